"""Table of the dependency order of folders: who may import whom (docs/house.md draws it).

A unit is a folder or a single module under harness/; the longest matching name counts. `below`
names the units that it may import, besides itself. A module that belongs to no unit is a violation.
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


_GROUND = "base formats model"
_KNOWING = "references report capture.files checkpoint"
_DOING_AND_TELLING = "kernels engine history reports"
_BINDING = "chat inference backends generate capture commands probe museum nightly"
_BELOW_BINDING = f"{_GROUND} {_KNOWING} {_DOING_AND_TELLING}"
_ALL_BELOW_EDGE = f"{_BELOW_BINDING} {_BINDING}"

UNITS: Mapping[str, Unit] = {
    # F0 ground: beyond doubt, because every floor above rests on it
    "base": _row(0, ""),
    "formats": _row(0, "base"),
    "model": _row(0, "base formats"),
    # F1 knowing: never each other, but for the files of captures, which hold records
    "references": _row(1, _GROUND),
    "report": _row(1, _GROUND),
    "capture.files": _row(1, f"{_GROUND} report"),
    "checkpoint": _row(1, _GROUND),
    # F2 doing: a witness that imports the other witness repeats its mistakes
    "kernels": _row(2, "base formats model"),
    # F3 judging and telling: reports and history read an old run without torch or a checkpoint
    "engine": _row(3, f"{_GROUND} {_KNOWING}"),
    "history": _row(3, "base report"),
    "reports": _row(3, "base report"),
    # F4 binding: each reads those above it here
    "chat": _row(4, _BELOW_BINDING),
    "inference": _row(4, f"{_BELOW_BINDING} chat"),
    "backends": _row(4, f"{_BELOW_BINDING} chat inference"),
    "generate": _row(4, f"{_BELOW_BINDING} chat inference backends"),
    "capture": _row(4, f"{_BELOW_BINDING} chat inference backends generate"),
    # Found by entry points, imported by nobody below the edge: a family may know every floor.
    "families": _row(4, f"{_BELOW_BINDING} chat inference backends generate capture"),
    "commands": _row(4, f"{_BELOW_BINDING} chat inference backends generate capture"),
    "probe": _row(4, f"{_BELOW_BINDING} chat inference backends generate capture commands"),
    "museum": _row(4, f"{_BELOW_BINDING} chat inference backends generate capture commands"),
    "nightly": _row(4, f"{_BELOW_BINDING} {_BINDING.removesuffix(' nightly')}"),
    # F5 edge
    "api": _row(5, _ALL_BELOW_EDGE),
    "plugins": _row(5, f"{_ALL_BELOW_EDGE} api"),
    "serve": _row(5, f"{_ALL_BELOW_EDGE} api"),
    "vllm": _row(5, f"{_ALL_BELOW_EDGE} api serve"),
    "cli": _row(5, f"{_ALL_BELOW_EDGE} api serve vllm plugins"),
    "suites": _row(5, f"{_ALL_BELOW_EDGE} families api plugins serve vllm cli"),
    "conftest": _row(5, "plugins"),
}


def unit_of(module: str) -> str | None:
    """Name the unit of a module: degarble.harness.formats.codec belongs to formats."""
    if module == "degarble":
        return "api"  # the root package gives the names of the surface
    parts = module.removeprefix("degarble.").removeprefix("harness.").split(".")
    names = (".".join(parts[:2]), parts[0])
    return next((name for name in names if name in UNITS), None)


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
