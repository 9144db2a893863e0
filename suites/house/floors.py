"""The floors of the house as a table: who may import whom (docs/house.md draws it).

A unit is a folder or a single module under harness/; the longest matching name counts. `below`
names the units that it may import, besides itself. A module of no unit belongs to no floor, which
is a violation. Kept honest by test_floors.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from degarble.suites.house.imports import edges_of

if TYPE_CHECKING:
    import ast
    from collections.abc import Mapping


@dataclass(frozen=True)
class Unit:
    """One row: its floor, and the units that it may import."""

    floor: int
    below: frozenset[str]


def _row(floor: int, below: str) -> Unit:
    return Unit(floor, frozenset(below.split()))


_GROUND = (
    "masking durable errors private_folder compiled_loops input_files protocols version formats"
    " anatomy"
)
_KNOWING = "references record checkpoint"
_DOING_AND_TELLING = "kernels engine history reports"
_BINDING = "pairings talk runs"
_ALL_BELOW_EDGE = f"{_GROUND} {_KNOWING} {_DOING_AND_TELLING} {_BINDING}"

UNITS: Mapping[str, Unit] = {
    # F0 ground: beyond doubt, because every floor above rests on it
    "masking": _row(0, ""),
    "durable": _row(0, ""),
    "errors": _row(0, "masking"),
    "input_files": _row(0, "errors"),
    "private_folder": _row(0, "errors"),
    "compiled_loops": _row(0, "private_folder"),
    "protocols": _row(0, ""),
    "version": _row(0, ""),
    "formats": _row(0, "errors compiled_loops"),
    "anatomy": _row(0, "errors formats input_files"),
    # F1 knowing: never each other
    "references": _row(1, _GROUND),
    "record": _row(1, _GROUND),
    "checkpoint": _row(1, _GROUND),
    # F2 doing: a witness that imports the other witness repeats its mistakes
    "kernels": _row(2, "errors private_folder formats anatomy"),
    # F3 judging and telling: reports and history read an old run without torch or a checkpoint
    "engine": _row(3, f"{_GROUND} {_KNOWING}"),
    "history": _row(3, "masking errors input_files record"),
    "reports": _row(3, "errors record"),
    # F4 binding
    "pairings": _row(4, f"{_GROUND} {_KNOWING} {_DOING_AND_TELLING}"),
    "talk": _row(4, f"{_GROUND} {_KNOWING} {_DOING_AND_TELLING} pairings"),
    "runs": _row(4, f"{_GROUND} {_KNOWING} {_DOING_AND_TELLING} pairings talk"),
    # F5 edge
    "api": _row(5, _ALL_BELOW_EDGE),
    "plugins": _row(5, f"{_ALL_BELOW_EDGE} api serve"),
    "serve": _row(5, f"{_ALL_BELOW_EDGE} api"),
    "cli": _row(5, f"{_ALL_BELOW_EDGE} api serve plugins"),
    "suites": _row(5, f"{_ALL_BELOW_EDGE} api plugins serve cli"),
    "conftest": _row(5, "plugins"),
}


def unit_of(module: str) -> str | None:
    """Name the unit of a module: degarble.harness.formats.codec belongs to formats."""
    parts = module.removeprefix("degarble.").removeprefix("harness.").split(".")
    return parts[0] if parts[0] in UNITS else None


def violations(sources: Mapping[str, ast.Module]) -> list[str]:
    """List every import that goes up, sideways, or to nowhere."""
    found = []
    for module, source in sources.items():
        unit = unit_of(module)
        if unit is None:
            found.append(f"{module}: belongs to no floor; add its folder to the table")
            continue
        for target, line in sorted(edges_of(source, sources.keys())):
            if target not in sources:
                found.append(f"{module}:{line}: imports {target}, which is no module")
                continue
            other = unit_of(target)
            if other not in (unit, *UNITS[unit].below):
                found.append(f"{module}:{line}: {unit} may not import {other} ({target})")
    return found


def cycle(sources: Mapping[str, ast.Module]) -> list[str]:
    """Give one import cycle between modules, or an empty list."""
    graph = {
        module: {target for target, _ in edges_of(source, sources.keys())} - {module}
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
