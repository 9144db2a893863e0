"""Typed blocks of a report panel: sentences, tables, maps, profiles, trends, figures, folds.

Blocks carry numbers as numbers and text as text; reports/ decides how they look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch

# --------------------------------------------------------------------------------------------------
# Severity of a block on a report page.


class Tone(StrEnum):
    """Severity of a sentence or bar. It is never shown by colour alone."""

    PLAIN = "plain"
    NOTE = "note"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"

    @property
    def weight(self) -> int:
        """Order of tones, the worst one highest."""
        return list(Tone).index(self)


# --------------------------------------------------------------------------------------------------
# Blocks of a replay panel: maps of results, profiles, texts side by side, links to files.


@dataclass(frozen=True)
class JudgedCell:
    """One cell of a judged map; None claims nothing. `note` says what the number alone does not."""

    value: float | None
    tone: Tone = Tone.PLAIN
    anchor: str = ""
    note: str = ""


@dataclass(frozen=True)
class JudgedMap:
    """Numbers by two names, each with its tone. A shade begins at each of `steps`, palest first.

    `near_one` writes numbers so that what is not 1 never looks like 1, as cosines need it.
    """

    caption: str
    row_title: str
    column_title: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    readings: tuple[tuple[JudgedCell | None, ...], ...]
    steps: tuple[float, ...]
    unit: str = ""
    near_one: bool = False
    legend: tuple[tuple[Tone, str], ...] = ()

    def __post_init__(self) -> None:
        where = f"readings of map {self.caption!r}"
        require_matrix(where, self.readings, self.row_labels, self.column_labels)
        rising, falling = sorted(self.steps), sorted(self.steps, reverse=True)
        known = all(math.isfinite(step) for step in self.steps)
        if not self.steps or not known or list(self.steps) not in (rising, falling):
            raise InvalidArgument(
                "steps of a map", self.steps, "finite numbers that rise or fall", "Sort them."
            )

    def passed(self, value: float) -> int:
        """Return how many steps `value` is beyond; all of them for NaN."""
        falling = self.steps[0] > self.steps[-1]
        return sum(not (value >= step if falling else value <= step) for step in self.steps)


@dataclass(frozen=True)
class Profile:
    """Numbers along one axis, drawn small: positions, rows, steps of a distance. None is a gap."""

    caption: str
    labels: tuple[str, ...]
    values: tuple[float | None, ...]
    unit: str = ""
    limit: float | None = None
    logarithmic: bool = False

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.values):
            raise ShapeMismatch(
                f"labels of profile {self.caption!r}", len(self.labels),
                f"{len(self.values)}, one a value", "Label every value.",
            )  # fmt: skip


@dataclass(frozen=True)
class Points:
    """Numbers in the order of a run, drawn on a logarithmic axis; None is a gap.

    `marked` are the places that stand out, `ticks` names places of the run, and `description` says
    in words what is drawn.
    """

    caption: str
    x_title: str
    y_title: str
    values: tuple[float | None, ...]
    description: str
    marked: tuple[int, ...] = ()
    ticks: tuple[tuple[int, str], ...] = ()
    limit: float | None = None

    def __post_init__(self) -> None:
        named = [*self.marked, *(at for at, _ in self.ticks)]
        wrong = [at for at in named if not 0 <= at < len(self.values)]
        if wrong:
            raise ShapeMismatch(
                f"places of {self.caption!r}", wrong, f"0 to {len(self.values) - 1}",
                "Mark and name places of the run only.",
            )  # fmt: skip


@dataclass(frozen=True)
class PictureLayer:
    """One view of a matrix: a digit a cell, a string a row; a blank is a value that is not finite.

    With `signed`, 0 is -`top`, 4 is zero and 8 is `top`. Otherwise a digit counts the steps of the
    picture that its value passes.
    """

    name: str
    cells: tuple[str, ...]
    signed: bool = False
    top: float = 0.0


@dataclass(frozen=True)
class GridLine:
    """Boundaries of parts with a name, such as tiles or heads; 0 where there are none."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class ErrorPicture:
    """A matrix by rows and columns, or a part of it, in several views of the same cells.

    `rows` and `columns` are first and end; a cell is `cell` rows by columns, at its worst element.
    """

    caption: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    cell: tuple[int, int]
    layers: tuple[PictureLayer, ...]
    steps: tuple[float, ...]
    unit: str
    lines: tuple[GridLine, ...] = ()

    def __post_init__(self) -> None:
        tall, wide = (
            -(-(ends[1] - ends[0]) // size)
            for ends, size in zip((self.rows, self.columns), self.cell, strict=True)
        )
        for layer in self.layers:
            extents = sorted({len(row) for row in layer.cells})
            if len(layer.cells) != tall or extents not in ([wide], []):
                raise ShapeMismatch(
                    f"cells of {layer.name!r}", (len(layer.cells), extents), f"{tall} by {wide}",
                    "Give one digit a cell.",
                )  # fmt: skip


@dataclass(frozen=True)
class ModelText:
    """Text of one model, token by token."""

    name: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class TextComparison:
    """Texts to one prompt, side by side; they differ from token `parting` on."""

    prompt: str
    voices: tuple[ModelText, ...]
    parting: int | None = None


@dataclass(frozen=True)
class Files:
    """Files next to the page, with name and content."""

    caption: str
    files: tuple[tuple[str, str], ...]


def require_matrix(
    name: str,
    matrix: tuple[tuple[object, ...], ...],
    rows: tuple[str, ...],
    columns: tuple[str, ...],
) -> None:
    """Refuse a matrix that is not rows by columns."""
    extents = [len(row) for row in matrix]
    if extents != [len(columns)] * len(rows):
        raise ShapeMismatch(
            name,
            extents,
            f"{len(rows)} rows of {len(columns)} cells",
            "Give one value a cell; None where nothing was run.",
        )


# --------------------------------------------------------------------------------------------------
# Block of a history: many series over nights as small charts, each with the night of its change.
#
# A series is given as bands (least and largest value of neighbouring nights, None where there is
# none), so that years fit into a page. `moved_at` lists the bands in which a change began.

Band = tuple[float, float] | None
DECADES = 100.0  # from here on a series is drawn on a logarithmic axis


@dataclass(frozen=True)
class Trend:
    """One series: its bands, its latest value, the latest green one, and its summary."""

    label: str
    bands: tuple[Band, ...]
    latest: float | None
    green: float | None
    moved_at: tuple[int, ...] = ()
    tone: Tone = Tone.PLAIN
    note: str = ""

    @property
    def logarithmic(self) -> bool:
        """Return whether its values span decades, so that it is drawn on a logarithmic axis."""
        known = [value for band in self.bands if band for value in band if 0 < value < math.inf]
        negative = any(value < 0 for band in self.bands if band for value in band)
        return bool(known) and not negative and max(known) > DECADES * min(known)

    def __post_init__(self) -> None:
        wrong = [at for at in self.moved_at if not 0 <= at < len(self.bands)]
        if wrong:
            raise ShapeMismatch(
                f"moved_at of {self.label!r}", wrong, f"bands 0 to {len(self.bands) - 1}",
                "Give the band in which a change began.",
            )  # fmt: skip


@dataclass(frozen=True)
class Trends:
    """Series below each other, over the same nights."""

    caption: str
    first: str
    last: str
    unit: str
    rows: tuple[Trend, ...]

    def __post_init__(self) -> None:
        lengths = sorted({len(row.bands) for row in self.rows})
        if len(lengths) > 1:
            raise ShapeMismatch(
                f"series of {self.caption!r}", lengths, "one length", "Give the same nights to all."
            )


# --------------------------------------------------------------------------------------------------
# Typed blocks of a report panel: sentences, facts, tables, catalogues, maps, bars, figures, code.
#
# Containers fold other blocks: details, tabs, close looks. Ragged tables and heat maps are rejected
# here, so that no renderer meets one.

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
class CatalogueEntry:
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
    entries: tuple[CatalogueEntry, ...]
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
    | JudgedMap | Profile | Points | ErrorPicture | TextComparison | Tabs | Looks | Files | Trends
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
    "points": Points,
    "error_picture": ErrorPicture,
    "voices": TextComparison,
    "tabs": Tabs,
    "looks": Looks,
    "files": Files,
    "trends": Trends,
}
