"""The records of a comparison: additive error sums, row counts, a census of NaN, named places.

Four sums of products are kept, of the reference r, the candidate c and the difference d = c - r:
`rr`, `cc`, `rd` and `dd`. The gain is 1 + rd / rr, so that a gain of 1.000001 keeps its digits.
Sums of sums are records of the same kind, so heads, experts and halves are folds of rows or
columns.

Shape letters: M rows (all leading extents), K columns, R and S tiles along them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

TILE = (128, 128)  # rows and columns of a tensor-core tile: the extent of one wrong address


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of products, one entry per place, over elements that are finite on both sides."""

    rr: NDArray[np.float64]
    cc: NDArray[np.float64]
    rd: NDArray[np.float64]
    dd: NDArray[np.float64]
    whole: NDArray[np.float64] | None = field(default=None, repr=False)  # all four, stacked

    @classmethod
    def of(cls, stack: NDArray[np.float64]) -> Sums:
        """Unpack the four sums from the last axis."""
        return cls(stack[..., 0], stack[..., 1], stack[..., 2], stack[..., 3], stack)

    @property
    def stack(self) -> NDArray[np.float64]:
        """Return all four sums along a last axis."""
        if self.whole is not None:
            return self.whole
        return np.stack((self.rr, self.cc, self.rd, self.dd), axis=-1)

    @property
    def cosine(self) -> NDArray[np.float64]:
        """Return the cosine of the angle between both sides; NaN where one of them is zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float64] = (self.rr + self.rd) / np.sqrt(self.rr) / np.sqrt(self.cc)
        clipped: NDArray[np.float64] = np.clip(found, -1.0, 1.0)
        return clipped

    @property
    def relative_l2(self) -> NDArray[np.float64]:
        """Return the difference's length over the reference's; infinite for a zero reference."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float64] = np.sqrt(self.dd) / np.sqrt(self.rr)
        return found

    @property
    def gain(self) -> NDArray[np.float64]:
        """Return the least-squares factor that maps the reference to the candidate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1.0 + self.rd / self.rr

    def folded(self, labels: NDArray[np.int64], count: int) -> Sums:
        """Add up the places that share a label; leave out negative labels."""
        if labels.shape != self.rr.shape:
            raise ShapeMismatch(
                "labels", labels.shape, f"{self.rr.shape}, one a place", "Label every place once."
            )
        kept = labels >= 0
        out = np.zeros((count, 4))
        np.add.at(out, labels[kept], self.stack[kept])
        return Sums.of(out)

    @property
    def total(self) -> Sums:
        """Return the sum over all places, without extent."""
        return Sums.of(self.stack.reshape(-1, 4).sum(0))


@dataclass(frozen=True, eq=False)
class RowCounts:
    """Per row [M]: equal codes, magnitudes above and below the reference's, largest ulp distance.

    A magnitude is compared, and an ulp counted, only where both sides are finite.
    """

    identical: NDArray[np.int64]
    outward: NDArray[np.int64]
    inward: NDArray[np.int64]
    ulps: NDArray[np.uint64]


@dataclass(frozen=True)
class Census:
    """Counts of NaN and infinity; `mismatched` counts elements whose sides differ in kind."""

    candidate_nan: int = 0
    candidate_infinite: int = 0
    reference_nan: int = 0
    reference_infinite: int = 0
    mismatched: int = 0
    first: tuple[int, int] | None = None  # row and column of the first mismatch

    @property
    def clean(self) -> bool:
        """Tell whether every value of both sides is finite."""
        return not any(
            (
                self.candidate_nan,
                self.candidate_infinite,
                self.reference_nan,
                self.reference_infinite,
            )
        )


@dataclass(frozen=True, eq=False)
class Places:
    """Names for parts of a tensor: labels of its rows, and equal widths of its columns.

    `rows` maps a name (position, head, expert) to one label per row, -1 for none. `columns` maps a
    name (head, half) to the number of columns of one such part.
    """

    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    columns: Mapping[str, int] = field(default_factory=dict)
    tile: tuple[int, int] = TILE

    @classmethod
    def along(
        cls, shape: Sequence[int], axes: Sequence[str], columns: Mapping[str, int] | None = None
    ) -> Places:
        """Name the leading axes of a tensor: every row gets its index along each of them."""
        leading = tuple(shape[:-1])
        if len(axes) != len(leading):
            raise ShapeMismatch(
                "axes", tuple(axes), f"{len(leading)} names for the leading extents {leading}",
                "Leave the last axis out: its parts are named by `columns`.",
            )  # fmt: skip
        grid = np.indices(leading, dtype=np.int64).reshape(len(leading), -1)
        return cls(dict(zip(axes, grid, strict=True)), dict(columns or {}))

    def cell_width(self, width: int) -> int:
        """Return the widest run of columns that divides every part and every tile."""
        for name, part in self.columns.items():
            if part < 1 or width % part:
                raise InvalidArgument(
                    f"columns of one {name}", part, f"a divisor of the {width} columns",
                    "Name parts of equal width.",
                )  # fmt: skip
        if min(self.tile) < 1:
            raise InvalidArgument("tile", self.tile, "positive extents", "Leave it out.")
        return math.gcd(self.tile[1], *self.columns.values())

    def require_rows(self, count: int) -> None:
        """Raise if the labels are for another number of rows."""
        for name, labels in self.rows.items():
            if labels.shape != (count,):
                raise ShapeMismatch(
                    f"labels of {name}", labels.shape, f"({count},), one a row",
                    "Label the rows of all leading extents together.",
                )  # fmt: skip


@dataclass(frozen=True)
class Element:
    """One element: its place, both values, their distance in ulps."""

    row: int
    column: int
    candidate: float
    reference: float
    ulps: int


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of one pass over a pair of tensors."""

    shape: tuple[int, ...]
    formats: tuple[str, str]  # of candidate and reference
    places: Places
    cell: int  # columns of one cell of `cells`
    rows: Sums  # [M]
    cells: Sums  # [R, S']: tile rows by cells
    counts: RowCounts
    census: Census

    @property
    def elements(self) -> int:
        """Return the number of elements of each side."""
        return math.prod(self.shape)

    @cached_property
    def total(self) -> Sums:
        """Return the sums of the whole tensor."""
        return self.rows.total

    @property
    def identical(self) -> float:
        """Return the share of equal codes; NaN of an empty tensor."""
        return int(self.counts.identical.sum()) / self.elements if self.elements else math.nan

    @property
    def ulps(self) -> int:
        """Return the largest distance in ulps."""
        return int(self.counts.ulps.max(initial=0))

    @property
    def rounding_bias(self) -> float:
        """Return the share of steps away from zero less that toward zero; NaN for no steps."""
        out, back = int(self.counts.outward.sum()), int(self.counts.inward.sum())
        return (out - back) / (out + back) if out + back else math.nan

    @property
    def rounding_bias_sigmas(self) -> float:
        """Return the bias in standard deviations of fair coin tosses; 0 where nothing stepped."""
        out, back = int(self.counts.outward.sum()), int(self.counts.inward.sum())
        return (out - back) / math.sqrt(out + back) if out + back else 0.0

    @property
    def columns(self) -> Sums:
        """Return the sums of every run of `cell` columns."""
        return Sums.of(self.cells.stack.sum(0))

    @cached_property
    def tiles(self) -> Sums:
        """Return the error map [R, S]: the sums of each tile."""
        per = self.places.tile[1] // self.cell
        stack = self.cells.stack
        starts = np.arange(0, stack.shape[1], per)
        return Sums.of(np.add.reduceat(stack, starts, axis=1) if len(starts) else stack)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that `by` accepts."""
        return (*self.places.rows, *self.places.columns)

    def by(self, name: str) -> Sums:
        """Fold rows or columns into the parts of one name, in the order of their labels."""
        if name in self.places.rows:
            labels = self.places.rows[name]
            return self.rows.folded(labels, int(labels.max(initial=-1)) + 1)
        if name in self.places.columns:
            columns = self.columns
            labels = np.arange(len(columns.rr)) // (self.places.columns[name] // self.cell)
            return columns.folded(labels, int(labels.max(initial=-1)) + 1)
        raise UnknownName.among("place", name, self.names)
