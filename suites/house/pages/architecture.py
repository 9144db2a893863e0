"""Write docs/architecture.svg and the tables of docs/architecture.md from the sources.

    python -m degarble.suites.house.pages.architecture

Rooms are the units of floors.py. Lines are imports that the sources really have, without those
that follow from others (the transitive reduction), so that the drawing stays readable. The walks
are those of walks.py. test_architecture.py holds both files against the sources.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.suites.house import walks
from degarble.suites.house.floors import UNITS, unit_of
from degarble.suites.house.imports import edges_of
from degarble.suites.house.repository import ROOT, modules, name_of, tree

if TYPE_CHECKING:
    from collections.abc import Mapping

PICTURE = ROOT / "docs" / "architecture.svg"
PAGE = ROOT / "docs" / "architecture.md"
WALKS = {
    "capture to page": walks.CAPTURE_TO_PAGE,
    "checkpoint to shard": walks.CHECKPOINT_TO_SHARD,
    "call to launch": walks.CALL_TO_LAUNCH,
}
FLOORS = (
    "ground: numbers, model facts, errors",
    "knowing: how things should be",
    "doing: kernels",
    "judging and telling",
    "binding: runs, commands, nights",
    "edge: what people and engines call",
)
# Column and purpose of each room. Columns are chosen so that few lines cross a box.
ROOMS = {
    "base": (3.4, "errors, files, version"),
    "formats": (5.7, "codecs, packing, scales"),
    "model": (6.9, "components, names, configs"),
    "report": (1.0, "blocks of a page, as data"),
    "capture.files": (2.6, "captures on disk"),
    "references": (3.7, "slow exact models"),
    "checkpoint": (4.7, "read, audit, write, convert"),
    "kernels": (5.9, "CuTe DSL kernels"),
    "history": (0.3, "verdicts over time"),
    "reports": (1.4, "HTML, charts, text"),
    "engine": (3.7, "budget, localise, diagnose"),
    "nightly": (0, "a night's plan and steps"),
    "museum": (1, "planted faults, demo"),
    "probe": (9, "check a server from outside"),
    "families": (8, "what each model family has"),
    "commands": (2, "check, audit, quantise"),
    "capture": (3, "record a run"),
    "generate": (4, "text from a checkpoint"),
    "backends": (5, "who computes a component"),
    "inference": (6, "run a model layer by layer"),
    "chat": (7, "prompts, tokenizers"),
    "suites": (0.5, "tests, benches, campaigns"),
    "cli": (1.6, "the command line"),
    "vllm": (2.7, "plug-in for vLLM"),
    "serve": (3.8, "OpenAI-compatible server"),
    "plugins": (4.9, "pytest plug-in"),
    "api": (6.0, "the Python interface"),
}
_WIDTH, _HEIGHT, _GAP, _LANE, _LEFT, _TOP = 178, 52, 20, 128, 20, 46
_STYLE = """
.back{fill:#fff}.lane{fill:#f3f5f8}.room{fill:#fff;stroke:#44546a;stroke-width:1.2}
.edge{fill:none;stroke:#8497b0;stroke-width:1.1}.name{font:600 15px sans-serif;fill:#1f2d3d}
.note{font:12px sans-serif;fill:#44546a}.floor{font:600 12px sans-serif;fill:#6b7c93}
@media (prefers-color-scheme: dark){.back{fill:#14181d}.lane{fill:#1c232b}.room{fill:#232c36;
stroke:#8ea3bd}.edge{stroke:#5d7189}.name{fill:#e6edf5}.note{fill:#b3c1d1}.floor{fill:#8ea3bd}}
"""


_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#8497b0"/></marker></defs>'
)


@dataclass(frozen=True)
class Box:
    """A room in the drawing: its left upper corner."""

    x: float
    y: float


def edges() -> dict[str, set[str]]:
    """Return which unit imports which, as the sources have it."""
    known = {name_of(path) for path in modules()}
    found: dict[str, set[str]] = defaultdict(set)
    for path in modules():
        unit = unit_of(name_of(path))
        for target, _ in edges_of(tree(path), known):
            other = unit_of(target)
            if unit in ROOMS and other in ROOMS and unit != other:
                found[str(unit)].add(str(other))
    return dict(found)


def reduced(graph: Mapping[str, set[str]]) -> set[tuple[str, str]]:
    """Return the edges that no longer path implies."""

    def reached(unit: str) -> set[str]:
        found: set[str] = set()
        waiting = list(graph.get(unit, ()))
        while waiting:
            other = waiting.pop()
            if other not in found:
                found.add(other)
                waiting.extend(graph.get(other, ()))
        return found

    return {
        (unit, other)
        for unit, others in graph.items()
        for other in others
        if not any(other in reached(between) for between in others - {other})
    }


def boxes() -> dict[str, Box]:
    """Place each unit: a lane a floor, the ground at the bottom."""
    return {
        unit: Box(
            _LEFT + column * (_WIDTH + _GAP),
            _TOP + (len(FLOORS) - 1 - UNITS[unit].floor) * _LANE + 34,
        )
        for unit, (column, _) in ROOMS.items()
    }


def draw() -> str:
    """Return the picture."""
    placed = boxes()
    width = f"{_LEFT + max(box.x for box in placed.values()) + _WIDTH:g}"
    height = _TOP + len(FLOORS) * _LANE + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"',
        ' aria-label="Floors and rooms of degarble; lines are imports and go down">',
        f"<style>{_STYLE}</style>{_ARROW}",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="note" x="{_LEFT}" y="26">A line is an import. Imports go down, or sideways',
        "within a floor; imports that follow from others are not drawn.</text>",
    ]
    for floor, words in enumerate(FLOORS):
        y = _TOP + (len(FLOORS) - 1 - floor) * _LANE
        lane = f'x="8" y="{y}" width="{float(width) - 16:g}" height="{_LANE - 14}" rx="6"'
        out += [
            f'<rect class="lane" {lane}/>',
            f'<text class="floor" x="{_LEFT}" y="{y + 20}">F{floor} {words}</text>',
        ]
    out += [_line(placed[unit], placed[other]) for unit, other in sorted(reduced(edges()))]
    for unit, box in placed.items():
        corner = f'x="{box.x:g}" y="{box.y:g}"'
        middle = f'x="{box.x + _WIDTH / 2:g}" text-anchor="middle"'
        out += [
            f'<rect class="room" {corner} width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>',
            f'<text class="name" y="{box.y + 22:g}" {middle}>{unit}</text>',
            f'<text class="note" y="{box.y + 40:g}" {middle}>{ROOMS[unit][1]}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])


def _line(upper: Box, lower: Box) -> str:
    """Draw a curve from the importing room to the imported one."""
    if upper.y == lower.y:  # the same floor: an arc below
        right = lower.x > upper.x
        start, end = (
            upper.x + _WIDTH * (0.7 if right else 0.3),
            lower.x + _WIDTH * (0.3 if right else 0.7),
        )
        bottom = upper.y + _HEIGHT
        depth = bottom + min(22.0, 10 + abs(end - start) / 40)
        path = f"M{start:g} {bottom:g}C{start:g} {depth:g} {end:g} {depth:g} {end:g} {bottom:g}"
    else:
        start, end = upper.x + _WIDTH / 2, lower.x + _WIDTH / 2
        top, bottom = upper.y + _HEIGHT, lower.y
        half = (top + bottom) / 2
        path = f"M{start:g} {top:g}C{start:g} {half:g} {end:g} {half:g} {end:g} {bottom:g}"
    return f'<path class="edge" d="{path}" marker-end="url(#arrow)"/>'


def table(walk: tuple[walks.Step, ...]) -> str:
    """Return a walk as a table in Markdown."""
    rows = [f"| `{step.file}` | `{step.function}` | {step.does} |" for step in walk]
    return "\n".join(["| file | function | what it does |", "|---|---|---|", *rows])


def with_tables(page: str) -> str:
    """Return the page with the tables of the walks as they are."""
    for name, walk in WALKS.items():
        begin, end = f"<!-- walk: {name} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{table(walk)}\n{end}{after}"
    return page


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
