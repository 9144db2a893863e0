"""The typed blocks that a panel of a report page is made of. Imports no sibling.

Owns what can be shown: sentences, facts, tables, heat maps, bars, figures, code, folded details.
Blocks carry numbers as numbers and text as text; how they look is decided in reports/.
Refuses ragged tables and heat maps, so a renderer never meets one.
What keeps it honest: suites/record/ walks every block through JSON and both renderers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from degarble.harness.errors import InvalidArgument, ShapeMismatch

Cell = str | int | float | bool | None


class Tone(StrEnum):
    """How a sentence or bar is meant. Never told by colour alone."""

    PLAIN = "plain"
    NOTE = "note"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class ColumnKind(StrEnum):
    """How the cells of a column are read, aligned and sorted."""

    TEXT = "text"
    NUMBER = "number"
    SHARE = "share"  # a number in 0..1, shown in percent
    CODE = "code"
    VERDICT = "verdict"


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
            if len(row) != len(self.columns):
                raise ShapeMismatch(
                    f"row {number} of table {self.caption!r}",
                    len(row),
                    f"{len(self.columns)} cells, one a column",
                    "Give every row one cell a column; None shows as a dash.",
                )


@dataclass(frozen=True)
class HeatScale:
    """How the values of a heat map become shades: `low` is palest, `high` darkest, clipped outside.

    Where small values are the bad ones (cosines), `low` may be above `high`.
    """

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
            extents = [len(row) for row in matrix]
            expected = [len(self.column_labels)] * len(self.row_labels)
            if extents != expected and (matrix or name == "values"):
                raise ShapeMismatch(
                    f"{name} of heat map {self.caption!r}",
                    extents,
                    f"{len(self.row_labels)} rows of {len(self.column_labels)} cells",
                    "Give one value a cell; None where nothing was run.",
                )


@dataclass(frozen=True)
class Bar:
    """One bar; `text` is what a reader reads beside it."""

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
    """Blocks that are folded until asked for. `anchor` is where heat map cells point to."""

    summary: str
    blocks: tuple[Block, ...]
    anchor: str = ""


Block = Sentence | Facts | Table | HeatMap | Bars | Figure | Code | Details

BLOCKS: dict[str, type[Block]] = {
    "sentence": Sentence,
    "facts": Facts,
    "table": Table,
    "heat_map": HeatMap,
    "bars": Bars,
    "figure": Figure,
    "code": Code,
    "details": Details,
}
