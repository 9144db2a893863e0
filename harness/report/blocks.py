"""Typed blocks of a report panel: sentences, facts, tables, catalogues, maps, bars, figures, code.

Containers fold other blocks: details, tabs, close looks. Blocks carry numbers as numbers and text
as text; reports/ decides how they look. Ragged tables and heat maps are rejected here, so that no
renderer meets one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.report.judged_blocks import (
    Files,
    JudgedMap,
    Profile,
    Voices,
    require_matrix,
)
from degarble.harness.report.severity import Tone as Tone  # noqa: PLC0414  every block has one
from degarble.harness.report.trend_blocks import Trends

Cell = str | int | float | bool | None


class ColumnKind(StrEnum):
    """Kind of a column: how its cells are read, aligned and sorted."""

    TEXT = "text"
    NUMBER = "number"
    SHARE = "share"  # a number in 0..1, shown in percent
    CODE = "code"
    VERDICT = "verdict"
    TONE = "tone"  # a word with its sign, sorted by how bad it is


@dataclass(frozen=True)
class Sentence:
    """One statement."""

    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Fact:
    """A named value; `code` where the value is to be copied literally."""

    name: str
    value: str
    code: bool = False


@dataclass(frozen=True)
class Facts:
    """Named values below each other."""

    rows: tuple[Fact, ...]
    caption: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table; `digits` are significant digits of a number."""

    name: str
    kind: ColumnKind = ColumnKind.TEXT
    digits: int = 4
    explanation: str = ""


@dataclass(frozen=True)
class Table:
    """Rows that a reader may sort. The first column names the row."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            _require_cells(f"row {number} of table {self.caption!r}", row, self.columns)


@dataclass(frozen=True)
class Entry:
    """One row of a catalogue. `blocks` explain it, folded under its last cell, at `anchor`."""

    cells: tuple[Cell, ...]
    blocks: tuple[Block, ...] = ()
    anchor: str = ""


@dataclass(frozen=True)
class Catalogue:
    """Rows that a reader may sort and filter, each with what explains it folded inside.

    `choices` counts the first columns that a reader may narrow down by choosing one of their words.
    """

    caption: str
    columns: tuple[Column, ...]
    entries: tuple[Entry, ...]
    choices: int = 0

    def __post_init__(self) -> None:
        for number, entry in enumerate(self.entries):
            name = f"entry {number} of catalogue {self.caption!r}"
            _require_cells(name, entry.cells, self.columns)


def _require_cells(name: str, cells: tuple[Cell, ...], columns: tuple[Column, ...]) -> None:
    if len(cells) != len(columns):
        raise ShapeMismatch(
            name,
            len(cells),
            f"{len(columns)} cells, one a column",
            "Give every row one cell a column; None shows as a dash.",
        )


@dataclass(frozen=True)
class HeatScale:
    """Colour scale of a heat map: `low` is palest, `high` darkest, clipped outside."""

    low: float
    high: float
    unit: str = ""
    digits: int = 3

    def __post_init__(self) -> None:
        if not math.isfinite(self.low) or not math.isfinite(self.high) or self.low == self.high:
            raise InvalidArgument(
                "scale of a heat map",
                (self.low, self.high),
                "two different finite ends",
                "Widen the scale by what counts as no difference.",
            )

    def position(self, value: float) -> float:
        """Where `value` lies between `low` (0) and `high` (1); NaN stays NaN."""
        return _clip((value - self.low) / (self.high - self.low))


def _clip(position: float) -> float:
    return position if math.isnan(position) else min(1.0, max(0.0, position))


@dataclass(frozen=True)
class HeatMap:
    """A matrix of numbers by two names, such as layer by component; None where nothing was run.

    `anchors` holds, for each cell, the anchor of a Details block that explains it, or "".
    """

    caption: str
    row_title: str
    column_title: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    scale: HeatScale
    anchors: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, matrix in (("values", self.values), ("anchors", self.anchors)):
            if matrix or name == "values":
                where = f"{name} of heat map {self.caption!r}"
                require_matrix(where, matrix, self.row_labels, self.column_labels)


@dataclass(frozen=True)
class Mark:
    """One cell of a tone map: how bad, in how many places; `anchor` leads to what explains it."""

    tone: Tone
    count: int = 0
    anchor: str = ""


@dataclass(frozen=True)
class ToneMap:
    """A matrix of marks by two names, such as kind of tensor by layer; None where nothing is.

    `legend` says in words what each tone means here.
    """

    caption: str
    row_title: str
    column_title: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    marks: tuple[tuple[Mark | None, ...], ...]
    legend: tuple[tuple[Tone, str], ...] = ()

    def __post_init__(self) -> None:
        where = f"marks of tone map {self.caption!r}"
        require_matrix(where, self.marks, self.row_labels, self.column_labels)


@dataclass(frozen=True)
class Bar:
    """One bar; `text` is its label."""

    label: str
    value: float
    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Bars:
    """Bars from zero (or, logarithmic, from `origin`), with an optional limit drawn across."""

    caption: str
    bars: tuple[Bar, ...]
    logarithmic: bool = False
    limit: float | None = None
    limit_text: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing as SVG text, shown as an image, so that it cannot run or load anything."""

    caption: str
    description: str  # for a reader who cannot see it
    svg: str


@dataclass(frozen=True)
class Code:
    """Literal text with a button that copies it."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Details:
    """Blocks that are folded until a click. `anchor` is the target of links from heat map cells."""

    summary: str
    blocks: tuple[Block, ...]
    anchor: str = ""


@dataclass(frozen=True)
class Tab:
    """One of several views of the same thing."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Tabs:
    """Views of one thing: one at a time on a screen, one after the other on paper."""

    caption: str
    tabs: tuple[Tab, ...]
    anchor: str = ""


@dataclass(frozen=True)
class Look:
    """A close look at one cell. Those with `first` are visible before any click."""

    anchor: str
    title: str
    blocks: tuple[Block, ...]
    first: bool = False


@dataclass(frozen=True)
class Looks:
    """Close looks, of which only the chosen one is shown; `back` links to where they start."""

    caption: str
    looks: tuple[Look, ...]
    back: str = ""


Block = (
    Sentence | Facts | Table | Catalogue | HeatMap | ToneMap | Bars | Figure | Code | Details
    | JudgedMap | Profile | Voices | Tabs | Looks | Files | Trends
)  # fmt: skip

BLOCKS: dict[str, type[Block]] = {
    "sentence": Sentence,
    "facts": Facts,
    "table": Table,
    "catalogue": Catalogue,
    "heat_map": HeatMap,
    "tone_map": ToneMap,
    "bars": Bars,
    "figure": Figure,
    "code": Code,
    "details": Details,
    "judged_map": JudgedMap,
    "profile": Profile,
    "voices": Voices,
    "tabs": Tabs,
    "looks": Looks,
    "files": Files,
    "trends": Trends,
}
