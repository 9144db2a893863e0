"""The table of a mutation run, and the comparison of two runs of one sample."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DETECTED = ("killed", "timed out")
OUTCOMES = (*DETECTED, "survived", "not reached", "broken")
_Z = 1.959964  # 95 %


def wilson(detected: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, which stays within 0 and 1 for small samples too."""
    if not total:
        return 0.0, 1.0
    share, square = detected / total, _Z * _Z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    half /= 1 + square / total
    return max(0.0, middle - half), min(1.0, middle + half)


def table(results: list[dict[str, Any]], population: dict[str, int]) -> str:
    """Return counts and score of each room as Markdown."""
    heads = ("room", "mutants", "drawn", *OUTCOMES[:-1], "score", "95 % interval")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    rooms = [*population, *(["all"] if len(population) > 1 else [])]
    for room in rooms:
        chosen = [result for result in results if room in ("all", result["room"])]
        counts = Counter(result["outcome"] for result in chosen)
        judged = len(chosen) - counts["broken"]
        detected = sum(counts[outcome] for outcome in DETECTED)
        low, high = wilson(detected, judged)
        size = sum(population.values()) if room == "all" else population[room]
        cells = [room, size, len(chosen), *(counts[outcome] for outcome in OUTCOMES[:-1])]
        share = f"{detected / judged:.1%}" if judged else "-"
        lines.append(
            f"| {' | '.join(map(str, cells))} | {share} | {low:.1%} to {high:.1%} |".replace(
                "%", " %"
            )
        )
    return "\n".join(lines)


def compare(before: Path, after: Path) -> tuple[str, bool]:
    """Say which mutants of one sample only one of two runs detected; true where none was lost."""
    first, second = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    old, new = ({m["key"]: m for m in run["mutants"]} for run in (first, second))
    shared = sorted(old.keys() & new.keys())
    lost = [key for key in shared if _detected(old[key]) and not _detected(new[key])]
    gained = [key for key in shared if not _detected(old[key]) and _detected(new[key])]
    lines = [f"{len(shared)} mutants are in both runs: {len(lost)} lost, {len(gained)} gained"]
    for run, others, name in ((old, new, before), (new, old, after)):
        alone = len(run.keys() - others.keys())
        if alone:
            lines.append(f"{alone} are in {name} alone, and say nothing")
    for word, keys in (("lost", lost), ("gained", gained)):
        lines += [f"{word}: {shown(new[key])}; before: {_ended(old[key])}" for key in keys]
    return "\n".join(lines), bool(shared) and not lost


def _detected(mutant: dict[str, Any]) -> bool:
    return mutant["outcome"] in DETECTED


def _ended(mutant: dict[str, Any]) -> str:
    return f"{mutant['outcome']} {mutant['test']}".strip()


def shown(mutant: dict[str, Any]) -> str:
    """Return one line about a mutant: place, operator, text, outcome."""
    place = f"{mutant['file']}:{mutant['line']}"
    changed = f"`{mutant['text']}` -> `{mutant.get('became', '')}`"
    return f"{place} {mutant['operator']} {changed}: {_ended(mutant)}"
