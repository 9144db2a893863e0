"""Tables and documents of kernels against others: Markdown, JSON for the history, and joining."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnreadableFile
from degarble.suites.bench.kernel_peers.contest import OURS
from degarble.suites.bench.runner import Table, rendered_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

Record = dict[str, Any]
MICROSECONDS = 10_000  # from which a time is printed in milliseconds


def key_of(record: Mapping[str, Any]) -> str:
    return f"{record['group']}: {record['row']}"


def read(path: Path) -> Record:
    """Read a document of an earlier run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableFile(
            str(path), str(error), "a kernels.json of this command",
            "Name a file that make kernels-beside-peers wrote.",
        ) from error  # fmt: skip
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise UnreadableFile(
            str(path), type(found).__name__, "a document with rows",
            "Name a file that make kernels-beside-peers wrote.",
        )  # fmt: skip
    return found


def joined(documents: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return the rows of several runs; of a row measured twice, the later one that was timed."""
    rows: dict[str, Record] = {}
    for document in documents:
        for record in document["rows"]:
            known = rows.get(key_of(record))
            if known is None or _standing(record) >= _standing(known):
                rows[key_of(record)] = record
    return list(rows.values())


def _standing(record: Record) -> tuple[bool, str]:
    """Return whether ours was timed, and the day."""
    timed = "reason" not in record["arms"].get(OURS, {})
    return timed, str(record.get("origin", ""))[: len("2026-01-01")]


def records_text(rows: Iterable[Record]) -> str:
    """Return a document of the rows, a line each."""
    lines = ",\n".join(json.dumps(record) for record in rows)
    return f'{{"rows": [\n{lines}\n]}}\n'


def speeds(rows: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Return what the history keeps of each row: the ratio to the fastest peer."""
    return {
        key_of(record): {
            "microseconds": record["arms"][OURS]["microseconds"], "share": record["ratio"],
            "of": record["best"],
        }
        for record in rows if "ratio" in record
    }  # fmt: skip


def failures(rows: Iterable[Record]) -> dict[str, str]:
    """Return why our own kernel was not timed."""
    return {
        key_of(record): record["arms"][OURS]["reason"]
        for record in rows
        if "reason" in record["arms"].get(OURS, {})
    }


# ---- Markdown ------------------------------------------------------------------------------------


def time_text(microseconds: float) -> str:
    if microseconds >= MICROSECONDS:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def error_text(arm: Mapping[str, Any]) -> str:
    """Return relative L2 and the largest error, and say where two runs differ."""
    if "relative_l2" not in arm:
        return ""
    text = f"{arm['relative_l2']:.1e}, {arm['largest']:.1e}"
    return text if arm.get("same_bits_twice", True) else f"{text}; two runs differ"


def goal_text(goal: Mapping[str, Any]) -> str:
    sign = ">=" if goal["at_least"] else "<="
    met = "met" if goal["met"] else "MISSED"
    return f"{goal['value']:.2f} {goal['text']} ({sign} {goal['wanted']:g}: {met})"


def group_table(title: str, rows: Sequence[Record]) -> tuple[Table, list[str]]:
    """Return a group's table, and the reasons why kernels of it were not timed."""
    names = list(dict.fromkeys(name for record in rows for name in record["arms"]))
    shown = [name for name in names if any("microseconds" in r["arms"].get(name, {}) for r in rows)]
    header = ("shape", *shown, "best peer / ours", "wanted", "error of ours", "of the best peer")
    lines, reasons = [], dict[str, list[str]]()
    for record in rows:
        arms = record["arms"]
        for name, arm in arms.items():
            if "reason" in arm:
                reasons.setdefault(f"{name}: {arm['reason']}", []).append(record["row"])
        cells = [
            time_text(arms[name]["microseconds"]) if "microseconds" in arms.get(name, {}) else "-"
            for name in shown
        ]
        ratio = f"{record['ratio']:.2f} ({record['best']})" if "ratio" in record else ""
        goals = "; ".join(goal_text(goal) for goal in record["goals"])
        best = error_text(arms.get(record.get("best", ""), {}))
        ours = error_text(arms.get(OURS, {}))
        lines.append((record["row"], *cells, ratio, goals, ours, best))
    said = [f"not timed: {why} ({_which(of, rows)})" for why, of in reasons.items()]
    return Table(title, header, tuple(lines)), said


def _which(names: Sequence[str], rows: Sequence[Record]) -> str:
    return "every row" if len(names) == len(rows) > 1 else "; ".join(names)


def origins(rows: Sequence[Record]) -> list[str]:
    """Return date, machine and versions of the runs that measured the rows; of several, which."""
    found: dict[str, list[str]] = {}
    for record in rows:
        if "origin" in record:
            found.setdefault(record["origin"], []).append(record["row"])
    if len(found) < 2:
        return list(found)
    return [f"{origin} ({'; '.join(names)})" for origin, names in found.items()]


def markdown(rows: Sequence[Record], titles: Mapping[str, str]) -> str:
    """Return all groups; those that were not measured are named."""
    parts, missing = [], []
    for group, title in titles.items():
        of = [record for record in rows if record["group"] == group]
        if not of:
            missing.append(group)
            continue
        table, said = group_table(title, of)
        lines = "\n".join(f"- {line}" for line in (*origins(of), *said))
        parts += [lines, rendered_table(table)]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def wins(rows: Iterable[Record]) -> str:
    """Count rows whose goals are met, and those where a peer is faster."""
    judged = [record for record in rows if record["goals"]]
    met = sum(all(goal["met"] for goal in record["goals"]) for record in judged)
    behind = sum(record.get("ratio", 1.0) < 1 for record in judged)
    return f"{met} of {len(judged)} rows reach what is wanted; in {behind} a peer is faster"
