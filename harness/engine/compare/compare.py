"""Compare a pair of tensors in one pass and bounded memory: error sums, counts, worst places.

Rows are processed in panels. A panel goes through the compiled loops where both sides hold one
format that has them, else through the definition; rows with NaN or infinity always use the
definition. Tensors may lie in memory, on a device, or mapped in safetensors files, whose pages are
released after they are read. A comparison is no verdict; engine/budget/budget.py judges it.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.checkpoint.view.stored import tensor_over
from degarble.harness.engine.compare.comparison import (
    Census,
    Comparison,
    Element,
    Places,
    RowCounts,
    Sums,
)
from degarble.harness.engine.compare.definition import compare_definition, values_of_any
from degarble.harness.formats.arrays import FORMAT_OF_DTYPE
from degarble.harness.formats.fast.threads import bits_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.formats.types import ElementFormat

_PANEL_BYTES = 8 << 20  # of one side: small enough for the page cache, large enough for few calls


def compare(
    candidate: Tensor,
    reference: Tensor,
    places: Places | None = None,
    fmt: ElementFormat | None = None,
) -> Comparison:
    """Compare two tensors; with `fmt` both hold codes of that format, one per byte."""
    _require_one_shape(candidate.shape, reference.shape)
    walk = Walk(tuple(candidate.shape), (candidate.dtype, reference.dtype), places, fmt)
    c_MK, r_MK = (side.detach().reshape(walk.rows, walk.width) for side in (candidate, reference))
    for rows in walk.panels():
        walk.add(c_MK[rows], r_MK[rows])
    return walk.finish()


def compare_stored(
    candidate: tuple[Checkpoint, str],
    reference: tuple[Checkpoint, str],
    places: Places | None = None,
    fmt: ElementFormat | None = None,
) -> Comparison:
    """Compare tensors of two safetensors files by name, panel by panel over mapped pages."""
    sides = [(holder, holder.entry(name)) for holder, name in (candidate, reference)]
    (_, c), (_, r) = sides
    _require_one_shape(c.shape, r.shape)
    dtypes = [tensor_over(_part(entry, slice(0, 0)), memoryview(b"")).dtype for _, entry in sides]
    walk = Walk(c.shape, (dtypes[0], dtypes[1]), places, fmt)
    for rows in walk.panels():
        parts = [_part(entry, rows, walk.width) for _, entry in sides]
        pair = [
            tensor_over(part, holder.files.raw(part))
            for (holder, _), part in zip(sides, parts, strict=True)
        ]
        walk.add(pair[0], pair[1])
        del pair
        for (holder, _), part in zip(sides, parts, strict=True):
            holder.files.release(part)
    return walk.finish()


def _part(entry: TensorEntry, rows: slice, width: int = 0) -> TensorEntry:
    """Return some rows of a stored tensor as a tensor entry of its own."""
    row_bytes = entry.nbytes // max(1, entry.elements) * width
    begin = entry.begin + rows.start * row_bytes
    end = entry.begin + rows.stop * row_bytes
    return entry._replace(begin=begin, end=end, shape=(rows.stop - rows.start, width))


class Walk:
    """A running comparison: add rows from first to last, then finish()."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        places: Places | None = None,
        fmt: ElementFormat | None = None,
    ) -> None:
        self.shape = shape
        self.width = shape[-1] if shape else 1
        self.rows = prod(shape[:-1])
        self._dtypes, self._format = dtypes, fmt
        self.places = places or Places()
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
        names = [self._format.name] * 2 if self._format else [_name(each) for each in self._dtypes]
        identical, outward, inward, _ = self._counts.T
        c_nan, c_infinite, r_nan, r_infinite, mismatched = map(int, self._census)
        return Comparison(
            shape=self.shape,
            formats=(names[0], names[1]),
            places=self.places,
            cell=self.cell,
            rows=Sums.of(self._row_sums),
            cells=Sums.of(self._cell_sums),
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
        tally = loops.Tally(self._row_sums, self._cell_sums, self._counts)
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


def worst_element(
    found: Comparison, candidate: Tensor, reference: Tensor, fmt: ElementFormat | None = None
) -> Element | None:
    """Return the element with the largest ulp distance, the first of equals; None if equal."""
    if not found.ulps:
        return None
    row = int(found.counts.ulps.argmax())
    width = found.shape[-1] if found.shape else 1
    pair = [side.reshape(-1, width)[row : row + 1].cpu() for side in (candidate, reference)]
    c, r = (values_of_any(side, fmt)[0] for side in pair)
    for column in np.flatnonzero(c != r):
        one = slice(int(column), int(column) + 1)
        ulps = int(compare_definition(pair[0][:, one], pair[1][:, one], 1, fmt).ulps[0])
        if ulps == found.ulps:
            return Element(row, int(column), float(c[column]), float(r[column]), ulps)
    message = "the tensors are those that were compared"
    raise AssertionError(message)


def _name(dtype: torch.dtype) -> str:
    fmt: Any = FORMAT_OF_DTYPE.get(dtype)
    return fmt.name if fmt else str(dtype).removeprefix("torch.")


def _require_one_shape(candidate: Any, reference: Any) -> None:
    if tuple(candidate) != tuple(reference):
        raise ShapeMismatch(
            "candidate", tuple(candidate), f"the reference's {tuple(reference)}",
            "Compare tensors of one site.",
        )  # fmt: skip
