"""Blocks of a replay panel: maps of results, profiles, texts side by side, links to files.

harness.report.blocks joins them with the plain blocks and with those that fold blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.report.severity import Tone


@dataclass(frozen=True)
class Reading:
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
    readings: tuple[tuple[Reading | None, ...], ...]
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
        """Return how many steps are at or below `value`; all of them for NaN."""
        falling = self.steps[0] > self.steps[-1]
        return sum(not (value > step if falling else value < step) for step in self.steps)


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
class Voice:
    """Text of one model, token by token."""

    name: str
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Voices:
    """Texts to one prompt, side by side; they differ from token `parting` on."""

    prompt: str
    voices: tuple[Voice, ...]
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
