"""Ask damaged and hostile stores everything that `degarble history` answers.

Wanted: no crash, no wait, no gigabyte, and no number, run or verdict that the sound store lacks; an
answer that lacks rows says so and ends with status 2 (or 1, where it found a change).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from degarble.harness.cli.main import main as degarble
from degarble.suites.campaigns.runner import CaseResult, arguments, run_campaign
from degarble.suites.history.history_cases import W2
from degarble.suites.history.hostile_stores import FILES, KINDS, ROWS, SCHEMAS, sound_store

NAME = "hostile_history"
_GROUPS = (FILES, FILES, ROWS, ROWS, SCHEMAS, KINDS)
_SECONDS = 120  # after which a command counts as one that waits
_MEMORY = 1 << 20  # KiB by which a process may grow
_RUNS = ("0000001a", "0000001b")
_CHECK = {
    "schema": 1, "verdict": "AGREES", "checkpoint": "tiny",
    "cosines": [{"name": W2, "budgets": 0.25, "candidate_reference": 0.99}],
}  # fmt: skip


def questions(folder: Path, store: Path) -> dict[str, list[str]]:
    """Return the command line of every question."""
    check = folder / "check.json"
    check.write_text(json.dumps(_CHECK), encoding="utf-8")
    words = {
        "runs": ["runs"],
        "trends": ["trends", "--report", str(folder / "report")],
        "changes": ["changes"],
        "compare": ["compare", *_RUNS],
        "add": ["add", str(check), "--machine", "M", "--night", "2026-11-22"],
    }
    if find_spec("pyarrow") is not None:  # an extra
        words["export"] = ["export", str(folder / "all.parquet")]
    return {
        name: ["--json", "history", word[0], *word[1:], "--store", str(store)]
        for name, word in words.items()
    }


def ask(words: list[str]) -> tuple[int, dict[str, Any], str]:
    """Run one command line here; give status, document and stderr."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = degarble(words)
    text = out.getvalue()
    return status, json.loads(text) if text else {}, errors.getvalue()


@cache
def _sound() -> tuple[bytes, dict[str, Any]]:
    """Return a sound store, and its answers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sound_store(folder / "h.sqlite")
        data = (folder / "h.sqlite").read_bytes()
        answers = {}
        for question, words in questions(folder, folder / "h.sqlite").items():
            status, document, text = ask(words)
            assert status in (0, 1), text
            answers[question] = _content(question, document, folder)
    return data, answers


def _content(question: str, document: dict[str, Any], folder: Path) -> Any:
    """Return what an answer says of the store, as parts that can be compared."""
    if question == "runs":
        return {run["id"]: run for run in document["runs"]}
    if question == "trends":
        return {
            (s["subject"], s["machine"], s["measure"], s["place"], night): value
            for s in document["series"]
            for night, value in zip(s["nights"], s["values"], strict=True)
        }
    if question == "compare":
        return {(e["measure"], e["place"]): e for e in document["numbers"]}
    if question == "export":
        import pandas as pd  # noqa: PLC0415  an extra

        found = pd.read_parquet(folder / "all.parquet")
        return {tuple(map(str, row)): 0 for row in found.itertuples(index=False)}
    return {}


def case(seed: int) -> CaseResult:
    """Damage one store and ask it everything."""
    rng = random.Random(seed)
    group = _GROUPS[seed % len(_GROUPS)]
    kind = list(group)[(seed // len(_GROUPS)) % len(group)]
    data, answers = _sound()
    folder = Path(tempfile.mkdtemp(prefix="degarble-history-"))
    try:
        store = folder / "h.sqlite"
        store.write_bytes(data)
        group[kind](store, rng)
        signal.alarm(_SECONDS)  # ends this process: the runner then tells that it died
        outcome, detail = _judge(folder, store, answers, must_report=group is not FILES)
        signal.alarm(0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return CaseResult(seed, kind, outcome, detail)


def _judge(folder: Path, store: Path, answers: Any, *, must_report: bool) -> tuple[str, str]:
    """Return the outcome of all questions, and what went wrong."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reported_once = False
    for question, words in questions(folder, store).items():
        status, document, text = ask(words)
        if status not in (0, 1, 2):
            return f"status {status}", f"{question}: {text}"
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > _MEMORY:
            return "memory", question
        complete = status < 2 and not document.get("skipped")
        reported_once = reported_once or not complete
        if question in ("add", "changes") or "error" in document:
            continue
        found, wanted = _content(question, document, folder), answers[question]
        wrong = [key for key in found if found[key] != wanted.get(key, _NONE)]
        if wrong and not _averaged(question, document):
            return "accepted wrongly", f"{question}: {wrong[0]}: {found[wrong[0]]}"
        if complete and found.keys() != wanted.keys():
            return (
                "lost silently",
                f"{question}: {sorted(map(str, wanted.keys() - found.keys()))[:1]}",
            )
    if must_report and not reported_once:
        return "accepted wrongly", "every question was answered as if the store were sound"
    return "ok", ""


_NONE = object()


def _averaged(question: str, document: dict[str, Any]) -> bool:
    """Tell whether values may differ because a run of the same night was left out."""
    return question == "compare" and bool(document.get("skipped"))


def main() -> int:
    """Run the campaign; 1 where a case did not end as it should."""
    given = arguments(__doc__ or "", count=500).parse_args()
    os.environ.pop("DEGARBLE_TRACEBACK", None)
    return run_campaign(NAME, case, given)


if __name__ == "__main__":
    sys.exit(main())
