"""Compare two tensors in one pass and bounded memory: error sums, counts, worst places.

A comparison is no verdict; harness/engine/budget/budget.py judges it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch, UnknownName
from degarble.harness.base.sums import ErrorSums
from degarble.harness.formats.codec import FORMAT_OF_DTYPE, codes_of, decode_array, encode_array
from degarble.harness.formats.fast.buffers import bits_view
from degarble.harness.formats.number_formats import NanRule, Overflow, Rounding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# Records: row counts, a census of NaN, named places.
#
# Shape letters: M rows (all leading extents), K columns, R and S tiles along them.

TILE = (128, 128)  # rows and columns of a tensor-core tile: the extent of one wrong address


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
class NamedPlaces:
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
    ) -> NamedPlaces:
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


@dataclass(frozen=True, eq=False)
class Comparison:
    """The results of one pass over a pair of tensors."""

    shape: tuple[int, ...]
    formats: tuple[str, str]  # of candidate and reference
    places: NamedPlaces
    cell: int  # columns of one cell of `cells`
    rows: ErrorSums  # [M]
    cells: ErrorSums  # [R, S']: tile rows by cells
    counts: RowCounts
    census: Census

    @property
    def elements(self) -> int:
        """Return the number of elements of each side."""
        return math.prod(self.shape)

    @cached_property
    def total(self) -> ErrorSums:
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
    def columns(self) -> ErrorSums:
        """Return the sums of every run of `cell` columns."""
        return ErrorSums(self.cells.stack.sum(0))

    @cached_property
    def tiles(self) -> ErrorSums:
        """Return the error map [R, S]: the sums of each tile."""
        per = self.places.tile[1] // self.cell
        stack = self.cells.stack
        starts = np.arange(0, stack.shape[1], per)
        return ErrorSums(np.add.reduceat(stack, starts, axis=1) if len(starts) else stack)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that `by` accepts."""
        return (*self.places.rows, *self.places.columns)

    def by(self, name: str) -> ErrorSums:
        """Fold rows or columns into the parts of one name, in the order of their labels."""
        if name in self.places.rows:
            labels = self.places.rows[name]
            return self.rows.folded(labels, int(labels.max(initial=-1)) + 1)
        if name in self.places.columns:
            columns = self.columns
            labels = np.arange(len(columns.rr)) // (self.places.columns[name] // self.cell)
            return columns.folded(labels, int(labels.max(initial=-1)) + 1)
        raise UnknownName.among("place", name, self.names)


# --------------------------------------------------------------------------------------------------
# The definition of a row comparison: slow, and for every dtype.
#
# Values are compared in float64. What is not finite on either side is left out of sums, magnitudes
# and ulps, and counted in the census. An ulp belongs to the format of the candidate: a reference of
# another dtype is rounded to it once, to nearest even, before steps are counted and codes compared;
# the sums use the unrounded reference. Integers and booleans step by 1. Complex numbers raise.
#
# Shape letters: M rows, K columns, S cells along K.


@dataclass(frozen=True, eq=False)
class RowFacts:
    """The results for some rows; `first` is row and column of the first mismatch of kinds."""

    cells: NDArray[np.float64]  # [M, S, 4]: rr, cc, rd, dd
    counts: NDArray[np.int64]  # [M, 3]: identical, outward, inward
    ulps: NDArray[np.uint64]  # [M]
    census: NDArray[np.int64]  # NaN and infinities of the candidate, of the reference, mismatched
    first: tuple[int, int] | None


def compare_definition(
    candidate_MK: Tensor, reference_MK: Tensor, cell: int, fmt: ElementFormat | None = None
) -> RowFacts:
    """Compare rows; with `fmt` both hold codes of that format, one per byte."""
    c, r = values_of_any(candidate_MK, fmt), values_of_any(reference_MK, fmt)
    kinds = [_kinds(side) for side in (c, r)]
    known = (kinds[0] == 0) & (kinds[1] == 0)
    steps, identical = _steps(candidate_MK, reference_MK, fmt)
    x, y = np.where(known, c, 0.0), np.where(known, r, 0.0)
    d = x - y
    outward, inward = abs(x) > abs(y), abs(x) < abs(y)
    mismatched = np.argwhere(kinds[0] != kinds[1])
    return RowFacts(
        cells=np.stack([_by_cell(p, cell) for p in (y * y, x * x, y * d, d * d)], axis=-1),
        counts=np.stack([identical.sum(1), outward.sum(1), inward.sum(1)], axis=-1),
        ulps=np.where(known, steps, np.uint64(0)).max(axis=1, initial=np.uint64(0)),
        census=np.array(
            [*(f(side) for side in kinds for f in (_nans, _infinities)), len(mismatched)]
        ),
        first=(int(mismatched[0][0]), int(mismatched[0][1])) if len(mismatched) else None,
    )


def values_of_any(tensor: Tensor, fmt: ElementFormat | None = None) -> NDArray[np.float64]:
    """Return the numbers of a tensor of any dtype in float64."""
    if fmt is None and tensor.dtype is torch.float8_e8m0fnu:
        fmt, tensor = FORMAT_OF_DTYPE[tensor.dtype], tensor.view(torch.uint8)
    if fmt is not None:
        values: NDArray[np.float64] = decode_array(tensor, fmt).double().numpy()
        return values
    if tensor.dtype.is_complex:
        raise DtypeMismatch(
            "tensor", tensor.dtype, "real numbers", "Compare real and imaginary parts apart."
        )
    plain: NDArray[np.float64] = tensor.to(torch.float64).numpy()
    return plain


def _kinds(values: NDArray[np.float64]) -> NDArray[np.int8]:
    """Classify values: finite (0), NaN (1), infinity (2), minus infinity (3)."""
    kinds = np.isnan(values) + 2 * np.isposinf(values) + 3 * np.isneginf(values)
    small: NDArray[np.int8] = kinds.astype(np.int8)
    return small


def _nans(kinds: NDArray[np.int8]) -> int:
    return int((kinds == 1).sum())


def _infinities(kinds: NDArray[np.int8]) -> int:
    return int((kinds > 1).sum())


def _by_cell(products_MK: NDArray[np.float64], cell: int) -> NDArray[np.float64]:
    """Sum runs of `cell` columns; the last run may be short."""
    rows, width = products_MK.shape
    count = -(-width // cell)
    padded = np.zeros((rows, count * cell))
    padded[:, :width] = products_MK
    sums: NDArray[np.float64] = padded.reshape(rows, count, cell).sum(-1)
    return sums


def _steps(
    candidate: Tensor, reference: Tensor, fmt: ElementFormat | None
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return distances in ulps of the candidate's format, and which codes are equal."""
    own = fmt or FORMAT_OF_DTYPE.get(candidate.dtype)
    if own is None:
        return _plain_steps(candidate, reference)
    codes = [candidate, reference] if fmt else [codes_of(candidate), _rounded(reference, own)]
    a, b = (side.to(torch.int64).numpy() for side in codes)
    return _apart(a, b, own.sign_mask, own.magnitude_mask), a == b


def _rounded(reference: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of the reference in the candidate's format."""
    if FORMAT_OF_DTYPE.get(reference.dtype) is fmt:
        return codes_of(reference)
    values = torch.from_numpy(values_of_any(reference))
    if not fmt.signed:
        values = values.abs()
    return encode_array(values, fmt, Rounding.NEAREST_EVEN, Overflow.IEEE, NanRule.LARGEST)


def _plain_steps(
    candidate: Tensor, reference: Tensor
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Count steps of float64, and of whole numbers."""
    if candidate.dtype is torch.float64:
        a = candidate.contiguous().view(torch.int64).numpy()
        b = torch.from_numpy(values_of_any(reference)).view(torch.int64).numpy()
        # Sign mask and magnitude mask of float64, as signed 64-bit integers.
        return _apart(a, b, -(1 << 63), (1 << 63) - 1), a == b
    a, b = values_of_any(candidate), values_of_any(reference)
    # Infinite distances are cut so that they fit into uint64.
    far = np.nan_to_num(np.abs(a - b), nan=0.0, posinf=2.0**62)
    return np.rint(far).astype(np.uint64), a == b


def _apart(
    a: NDArray[np.int64], b: NDArray[np.int64], sign: int, magnitude: int
) -> NDArray[np.uint64]:
    """Return how many representable numbers lie between two codes."""
    am, bm = (a & magnitude).astype(np.uint64), (b & magnitude).astype(np.uint64)
    same = (a & sign) == (b & sign)
    return np.where(same, np.maximum(am, bm) - np.minimum(am, bm), am + bm)


# --------------------------------------------------------------------------------------------------
# The comparison, panel by panel.
#
# A panel goes through the compiled loops where both sides hold one format that has them, else
# through the definition; rows with NaN or infinity always use the definition. Tensors may lie in
# memory, on a device, or mapped in safetensors files, whose pages are released after they are read.

_PANEL_BYTES = 8 << 20  # of one side: small enough for the page cache, large enough for few calls


def compare(
    candidate: Tensor,
    reference: Tensor,
    places: NamedPlaces | None = None,
    fmt: ElementFormat | None = None,
) -> Comparison:
    """Compare two tensors; with `fmt` both hold codes of that format, one per byte."""
    _require_one_shape(candidate.shape, reference.shape)
    walk = RunningComparison(
        tuple(candidate.shape), (candidate.dtype, reference.dtype), places, fmt
    )
    c_MK, r_MK = (side.detach().reshape(walk.rows, walk.width) for side in (candidate, reference))
    for rows in walk.panels():
        walk.add(c_MK[rows], r_MK[rows])
    return walk.finish()


class RunningComparison:
    """A running comparison: add rows from first to last, then finish()."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        places: NamedPlaces | None = None,
        fmt: ElementFormat | None = None,
    ) -> None:
        self.shape = shape
        self.width = shape[-1] if shape else 1
        self.rows = prod(shape[:-1])
        self._dtypes, self._format = dtypes, fmt
        self.places = places or NamedPlaces()
        self.places.require_rows(self.rows)
        self.cell = self.places.cell_width(self.width)
        self._require_codes()
        bands = -(-self.rows // self.places.tile[0])
        self._row_sums = np.zeros((self.rows, 4))
        self._cell_sums = np.zeros((bands, -(-self.width // self.cell), 4))
        self._counts = np.zeros((self.rows, 4), np.int64)
        self._ulps = np.zeros(self.rows, np.uint64)
        self._census = np.zeros(5, np.int64)
        self._first: tuple[int, int] | None = None
        self._done = 0

    def panels(self) -> Iterator[slice]:
        """Yield the slices of rows to add together."""
        size = max(dtype.itemsize for dtype in self._dtypes)
        step = max(1, _PANEL_BYTES // max(1, self.width * size))
        for start in range(0, self.rows if self.width else 0, step):
            yield slice(start, min(start + step, self.rows))

    def add(self, candidate_MK: Tensor, reference_MK: Tensor) -> None:
        """Add the next rows."""
        rows = slice(self._done, self._done + len(candidate_MK))
        self._done = rows.stop
        candidate_MK, reference_MK = candidate_MK.cpu(), reference_MK.cpu()
        self._require_range(candidate_MK, reference_MK)
        fmt = self._fast_format()
        if fmt is None:
            self._define(candidate_MK, reference_MK, np.arange(rows.start, rows.stop))
            return
        # Skipped rows hold NaN or infinity; the definition counts these.
        for at in self._through_loops(candidate_MK, reference_MK, rows, fmt):
            one = slice(at - rows.start, at - rows.start + 1)
            self._define(candidate_MK[one], reference_MK[one], np.array([at]))

    def finish(self) -> Comparison:
        """Return the comparison."""
        assert self._done == self.rows or not self.width, "every row went in"
        names = (
            [self._format.name] * 2 if self._format else [_name(dtype) for dtype in self._dtypes]
        )
        identical, outward, inward, _ = self._counts.T
        c_nan, c_infinite, r_nan, r_infinite, mismatched = map(int, self._census)
        return Comparison(
            shape=self.shape,
            formats=(names[0], names[1]),
            places=self.places,
            cell=self.cell,
            rows=ErrorSums(self._row_sums),
            cells=ErrorSums(self._cell_sums),
            counts=RowCounts(identical, outward, inward, self._ulps),
            census=Census(c_nan, c_infinite, r_nan, r_infinite, mismatched, self._first),
        )

    def _fast_format(self) -> ElementFormat | None:
        """Return the format whose compiled loops apply to both sides, or None."""
        from degarble.harness.engine.compare import loops  # noqa: PLC0415  numba

        fmt = self._format or FORMAT_OF_DTYPE.get(self._dtypes[0])
        one = self._format is not None or self._dtypes[0] is self._dtypes[1]
        return fmt if fmt is not None and one and loops.has_loops(fmt) else None

    def _through_loops(
        self, candidate_MK: Tensor, reference_MK: Tensor, rows: slice, fmt: ElementFormat
    ) -> list[int]:
        """Add rows through the compiled loop; return the rows that it skipped."""
        from degarble.harness.engine.compare import loops  # noqa: PLC0415  numba

        c, r = (
            bits_view("tensor", side.contiguous(), [side.dtype]).reshape(side.shape)
            for side in (candidate_MK, reference_MK)
        )
        tally = loops.LoopTotals(self._row_sums, self._cell_sums, self._counts)
        grid = (rows.start, self.places.tile[0], self.cell)
        loops.loops_of(fmt)(c, r, grid, tally)
        self._ulps[rows] = self._counts[rows, 3]
        skipped = np.flatnonzero(self._counts[rows, 0] == loops.SKIPPED)
        return [int(at) + rows.start for at in skipped]

    def _define(self, candidate: Tensor, reference: Tensor, at: NDArray[np.int64]) -> None:
        """Add rows through the definition."""
        facts = compare_definition(candidate, reference, self.cell, self._format)
        self._row_sums[at] = facts.cells.sum(1)
        np.add.at(self._cell_sums, at // self.places.tile[0], facts.cells)
        self._counts[at, :3] = facts.counts
        self._ulps[at] = facts.ulps
        self._census += facts.census
        if facts.first is not None and self._first is None:
            self._first = (int(at[facts.first[0]]), facts.first[1])

    def _require_range(self, *sides: Tensor) -> None:
        """Raise for bytes that are no codes of `fmt`; most often two codes share one byte."""
        if self._format is None or self._format.bits == 8:
            return
        largest = max((int(side.max()) for side in sides if side.numel()), default=0)
        if largest >= self._format.code_count:
            raise InvalidArgument(
                f"{self._format.name} code", largest, f"codes below {self._format.code_count}",
                "Unpack nibbles first: one code a byte.",
            )  # fmt: skip

    def _require_codes(self) -> None:
        """Raise if `fmt` is given for tensors that do not hold one code per byte."""
        if self._format is None:
            return
        if self._format.bits > 8 or any(dtype is not torch.uint8 for dtype in self._dtypes):
            raise DtypeMismatch(
                f"codes of {self._format.name}", tuple(map(str, self._dtypes)),
                "uint8 twice, one code of at most 8 bits a byte",
                "Leave `fmt` out for tensors whose dtype is their format; unpack nibbles first.",
            )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    fmt: Any = FORMAT_OF_DTYPE.get(dtype)
    return fmt.name if fmt else str(dtype).removeprefix("torch.")


def _require_one_shape(candidate: Any, reference: Any) -> None:
    if tuple(candidate) != tuple(reference):
        raise ShapeMismatch(
            "candidate", tuple(candidate), f"the reference's {tuple(reference)}",
            "Compare tensors of one site.",
        )  # fmt: skip
