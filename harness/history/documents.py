"""Read a check's JSON document as a run of the history, so that any CI can add its results.

A component has two numbers: its worst output in units of budget, and its worst distance from the
BF16 reference. A document that is no check, or has no judged output, raises an error.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.input_files import read_small_text
from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import BUDGETS, DISTANCE
from degarble.harness.report.verdict import SCHEMA, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_LARGEST = 64 << 20


def read_check(path: Path) -> dict[str, Any]:
    """Read a file that `degarble check --json` wrote."""
    remedy = "Give a file that `degarble check --json FILE` wrote."
    try:
        document = json.loads(read_small_text(path, _LARGEST), parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path.name, str(error), "a JSON document", remedy) from error
    lines = document.get("cosines") if isinstance(document, dict) else None
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise UnreadableFile(path.name, "no cosines", "the document of a check", remedy)
    if document.get("schema") != SCHEMA:
        raise UnreadableFile(f"schema of {path.name}", document.get("schema"), str(SCHEMA), remedy)
    facts, name = document.get("facts"), document.get("checkpoint", "")
    if not isinstance(facts, dict | None) or not isinstance(name, str):
        raise UnreadableFile(path.name, "facts, checkpoint", "an object and a name", remedy)
    if document.get("verdict") not in list(Verdict):
        raise UnreadableFile(
            f"verdict of {path.name}", document.get("verdict"), "a verdict", remedy
        )
    found: dict[str, Any] = document
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _number(value: object) -> float | None:
    """Return a finite number, or None where nothing was measured."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def values_of(document: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of a check: measure, then component, then number."""
    budgets: dict[str, float] = {}
    distances: dict[str, float] = {}
    for line in document["cosines"]:
        name = component_of(line)
        ratio = _number(line.get("budgets"))
        cosine = _number(line.get("candidate_reference"))
        if ratio is not None:
            budgets[name] = max(budgets.get(name, 0.0), ratio)
        if cosine is not None:
            distances[name] = max(distances.get(name, 0.0), 1.0 - cosine)
    if not budgets:
        raise InvalidArgument(
            "judged outputs of the check", 0, "one at least", "Check a capture that holds tensors."
        )
    return {BUDGETS.name: budgets, DISTANCE.name: distances}


def failures_of(document: Mapping[str, Any]) -> tuple[Failure, ...]:
    """Return the failures of a check, as the ledger lists them."""
    found = [
        Failure(
            component_of(origin),
            Verdict.DIFFERS,
            origin.get("fault"),
            str(origin.get("evidence") or document.get("sentence") or ""),
        )
        for origin in document.get("origins", ())
    ]
    found += [
        Failure(str(name), Verdict.UNSTABLE, None, "two runs disagree")
        for name in document.get("unstable", ())
    ]
    return tuple(found)


def component_of(line: Mapping[str, Any]) -> str:
    """Return the full name of a component: the document keeps layer and role apart."""
    layer, role = line.get("layer"), str(line.get("component", ""))
    if line.get("name"):
        return str(line["name"])
    return role if layer is None else f"layers.{layer}.{role}"
