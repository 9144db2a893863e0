"""Block of a history: many series over nights as small charts, each with the night of its change.

A series is given as bands (least and largest value of neighbouring nights, None where there is
none), so that years fit into a page. `moved_at` lists the bands in which a change began.
"""

from __future__ import annotations

from dataclasses import dataclass

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.severity import Tone

Band = tuple[float, float] | None


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
