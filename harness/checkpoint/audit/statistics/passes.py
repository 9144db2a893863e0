"""Accumulate the statistics of a weight over its rows, by kind: packed E2M1, E4M3 or plain values.

A pass adds row blocks through the compiled loops and makes the record at the end. The loops are
imported inside functions, because numba takes long to load.

Shape letters: M rows, K columns, R and C blocks along M and K, b bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.checkpoint.audit.statistics import row_facts
from degarble.harness.checkpoint.audit.statistics.records import BlockStatistics, TensorStatistics
from degarble.harness.checkpoint.audit.statistics.row_facts import (
    bytes_by_row,
    digests_of,
    joined,
    matrix_digest,
)
from degarble.harness.checkpoint.audit.statistics.scales import (
    Pairing,
    correlation,
    e2m1_tables,
    of_bytes,
    of_floats,
    ordinary,
    pairing_of,
)
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.number_formats import E2M1, E4M3, ELEMENT_FORMATS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight

_WIDEST_PROFILE = 1 << 20  # columns; a long vector comes in pieces
PROFILE_ROWS = 32  # rows that stand for a matrix where a profile of its columns is wanted
PAIRED_ROWS = 512  # rows, evenly spread, whose blocks' scales are paired with their codes
_BYTE_ROWS = 8  # one row in so many is counted byte by byte, in matrices with enough rows
# Left shift that makes float32 bits of a value's bits.
_PLAIN_SHIFT = {torch.bfloat16: 16, torch.float32: 0}
_FINITE_MASK = {16: 0x7FFF7FFF7FFF7FFF, 0: 0x7FFFFFFF7FFFFFFF}  # signs do not count


def pass_over(stored: StoredWeight, *, profile: bool) -> Pass:
    """Return the pass for a weight of this kind."""
    fmt = stored.format
    if fmt is None:
        return PlainPass(stored, profile)
    return E2M1Pass(stored, fmt, profile) if fmt.element == E2M1 else E4M3Pass(stored, fmt, profile)


class Pass(ABC):
    """The statistics common to all kinds: digests by row, energies, bytes, a profile."""

    def __init__(self, stored: StoredWeight, profile: bool) -> None:
        shape = stored.shape
        self.elements = prod(shape)
        self.height = prod(shape[:-1]) if len(shape) > 1 else 1
        self.width = self.elements // max(self.height, 1)
        is_small = self.width <= _WIDEST_PROFILE
        self.wants_profile = profile and len(shape) in (1, 2) and self.elements > 0 and is_small
        self.every = max(1, self.height // PROFILE_ROWS)
        self.columns = np.zeros(self.width if self.wants_profile else 0, np.float32)
        self._energies: list[NDArray[np.float64]] = []
        self._digests: list[NDArray[np.uint64]] = []
        self._zero: list[NDArray[np.bool_]] = []
        self._bytes = np.zeros(256, np.int64)
        self.scalars: tuple[float | None, float | None] = (None, None)
        self._byte_step = _BYTE_ROWS if self.height >= 8 * _BYTE_ROWS else 1

    @abstractmethod
    def add(self, weight: Weight) -> None:
        """Add the next rows."""

    @abstractmethod
    def finish(self) -> TensorStatistics:
        """Return the accumulated statistics."""

    def take_rows(self, data_Mb: NDArray[np.uint8], mask: int) -> NDArray[np.uint64]:
        """Digest rows of bytes; return them as words, padded with zeros."""
        from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

        words = row_facts.as_words(data_Mb)
        digests, zero = row_facts.digested(words, mask)
        self._digests.append(digests)
        self._zero.append(zero)
        sampled = np.ascontiguousarray(data_Mb[:: self._byte_step]).reshape(-1)
        loops.byte_counts(sampled, self._bytes)
        return words

    def take_energies(self, energies: NDArray[np.float64]) -> None:
        """Keep the sums of squares of the latest rows, or rows of blocks."""
        self._energies.append(energies)

    def common(self) -> dict[str, Any]:
        """Return the fields common to all kinds."""
        zero, digests = joined(self._zero, np.bool_), joined(self._digests, np.uint64)
        if self.height == 1:  # a vector, of which each piece counted as a row
            zero = np.array([bool(zero.all())][: len(zero)], np.bool_)
        energies = joined(self._energies, np.float64)
        has_rows = self.wants_profile and len(energies) == self.height
        return {
            "elements": self.elements,
            "height": self.height,
            "sum_squares": float(energies.sum()),
            "zero_rows": int(zero.sum()),
            "zero_run": row_facts.longest_run(zero),
            "column_run": row_facts.longest_run(self.columns == 0),
            "digest": matrix_digest(digests, ordered=True),
            "row_digest": matrix_digest(digests, ordered=False),
            "tensor_scale": self.scalars[0],
            "input_scale": self.scalars[1],
            "byte_entropy": row_facts.entropy(self._bytes),
            "columns": self.columns if self.wants_profile else None,
            "rows": _narrowed(energies) if has_rows else None,
        }


def _narrowed(energies: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return energies as float32, clipped to its largest; only garbage is larger."""
    return np.minimum(energies, np.finfo(np.float32).max).astype(np.float32)


class E2M1Pass(Pass):
    """Packed pairs of E2M1 codes under byte scales."""

    def __init__(self, stored: StoredWeight, fmt: BlockFormat, profile: bool) -> None:
        from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

        super().__init__(stored, profile)
        self._format = fmt
        self._tables = e2m1_tables(fmt.scale.name, fmt.block[1])
        self._tally = loops.E2M1Tally(
            np.zeros(16, np.int64), np.zeros((256, 8), np.int64), np.zeros(4)
        )
        self._scale_digests: list[NDArray[np.uint64]] = []
        self._rows_done = 0
        self._pair_every = max(1, self.height // PAIRED_ROWS)

    def add(self, weight: Weight) -> None:
        """Add the next rows: codes and the scales of their blocks."""
        from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

        assert weight.codes is not None, "a quantised weight has codes"
        assert weight.block_scale is not None, "and scales"
        codes_Mb, scales_MC = bytes_by_row(weight.codes), bytes_by_row(weight.block_scale)
        if not codes_Mb.size:
            return
        # The mask leaves out the sign of each nibble: -0 is zero too.
        words = self.take_rows(codes_Mb, 0x7777777777777777)
        energies = np.empty(len(words))
        paired = self._rows_done, self._pair_every
        loops.e2m1_rows(words, scales_MC, self._tables, self._tally, energies, paired)
        self._rows_done += len(words)
        self.take_energies(energies)
        self._scale_digests.append(digests_of(scales_MC))
        if self.wants_profile:
            square = self._tables.square
            loops.e2m1_columns(codes_Mb, scales_MC, square, self.every, self.columns)

    def finish(self) -> TensorStatistics:
        """Return the accumulated statistics."""
        tally, scale_format = self._tally, self._format.scale
        values, reached = _reached(scale_format.name)
        freedom, xx, yy, xy = map(float, tally.pairing)
        blocks = BlockStatistics(
            scale=of_bytes(tally.tops.sum(1), tally.tops[:, 1:].sum(1), scale_format),
            zero_blocks=int(tally.tops[:, 0].sum()),
            zero_scales=tally.tops[:, 0].copy(),
            underflown=int(tally.tops[values == 0, 1:].sum()),
            tops=tally.tops[ordinary(scale_format)].sum(0),
            pairing=Pairing(freedom, correlation(xx, yy, xy)),
        )
        return TensorStatistics(
            **self.common(),
            counts=tally.counts,
            not_finite=0,
            zeros=int(tally.counts[[0, 8]].sum()),
            amax=float(reached[tally.tops > 0].max(initial=0.0)),
            scale_digest=matrix_digest(joined(self._scale_digests, np.uint64), ordered=True),
            blocks=blocks,
        )


@cache
def _reached(scale_format: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return each scale byte's value, and the magnitude [256, 8] of its product with each code."""
    values = values_of(ELEMENT_FORMATS[scale_format]).astype(np.float64)
    kept = np.where(np.isfinite(values), np.abs(values), 0.0)
    return values, kept[:, None] * values_of(E2M1)[:8].astype(np.float64)


class E4M3Pass(Pass):
    """E4M3 codes under byte or float32 scales."""

    def __init__(self, stored: StoredWeight, fmt: BlockFormat, profile: bool) -> None:
        super().__init__(stored, profile)
        self._format = fmt
        self._counts = np.zeros(256, np.int64)
        self._blocks: list[NDArray[np.float64]] = []  # [R, C, 2]: sum of squares, largest code
        self._scales: list[NDArray[Any]] = []
        with np.errstate(invalid="ignore"):
            values = values_of(E4M3).astype(np.float64)
        self._squares = np.where(np.isfinite(values), values * values, 0.0)

    def add(self, weight: Weight) -> None:
        """Add the next rows, in whole panels of blocks except for the last."""
        assert weight.codes is not None, "a quantised weight has codes"
        assert weight.block_scale is not None, "and scales"
        codes_MK = bytes_by_row(weight.codes)
        if not codes_MK.size:
            return
        # The mask leaves out the sign of each byte: -0 is zero too.
        self.take_rows(codes_MK, 0x7F7F7F7F7F7F7F7F)
        scales_RC = weight.block_scale.reshape(-1, weight.block_scale.shape[-1]).numpy()
        blocks_RC2 = self._tallied(codes_MK, scales_RC.shape)
        self._blocks.append(blocks_RC2)
        self._scales.append(scales_RC.copy())
        # The counts are of codes: squares of values need the square of each block's scale.
        square_RC = self._scale_values(scales_RC) ** 2
        self.take_energies((blocks_RC2[..., 0] * square_RC).sum(1))
        if self.wants_profile:
            self._take_columns(codes_MK[:: self.every], square_RC)

    def _tallied(self, codes_MK: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Return sum of squares and largest code of each block; count the codes."""
        from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

        height, width = self._format.block
        blocks_RC2 = np.empty((*shape, 2))
        for block_row, panel in enumerate(blocks_RC2):
            rows = codes_MK[block_row * height : (block_row + 1) * height]
            loops.e4m3_panel(rows, width, self._squares, self._counts, panel)
        return blocks_RC2

    def _take_columns(self, sampled: NDArray[np.uint8], square_RC: NDArray[np.float64]) -> None:
        height, width = self._format.block
        block_rows = np.arange(len(sampled)) * self.every // height
        factors = np.repeat(square_RC[block_rows], width, axis=1)[:, : self.width]
        self.columns += _narrowed((self._squares[sampled] * factors).sum(0))

    def _scale_values(self, scales: NDArray[Any]) -> NDArray[np.float64]:
        values = values_of(self._format.scale)[scales] if scales.dtype == np.uint8 else scales
        return np.where(np.isfinite(values), values, 0.0).astype(np.float64)

    def _are_finite(self, scales: NDArray[Any]) -> NDArray[np.bool_]:
        values = values_of(self._format.scale)[scales] if scales.dtype == np.uint8 else scales
        finite: NDArray[np.bool_] = np.isfinite(values)
        return finite

    def finish(self) -> TensorStatistics:
        """Return the accumulated statistics."""
        scales = np.concatenate(self._scales) if self._scales else np.zeros((0, 1), np.uint8)
        blocks = np.concatenate(self._blocks) if self._blocks else np.zeros((0, 1, 2))
        energy, top = blocks[..., 0], blocks[..., 1].astype(np.int64)
        magnitudes = values_of(E4M3)[:127].astype(np.float64)
        values = self._scale_values(scales)
        return TensorStatistics(
            **self.common(),
            counts=self._counts,
            not_finite=int(self._counts[[127, 255]].sum()),
            zeros=int(self._counts[[0, 128]].sum()),
            amax=float((np.abs(values) * magnitudes[top]).max(initial=0.0)),
            scale_digest=matrix_digest(digests_of(scales.view(np.uint8)), ordered=True),
            blocks=self._block_statistics(scales, values, energy, top),
        )

    def _block_statistics(
        self,
        scales: NDArray[Any],
        values: NDArray[np.float64],
        energy: NDArray[np.float64],
        top: NDArray[np.int64],
    ) -> BlockStatistics:
        zero = top == 0
        zero_scales = np.zeros(256, np.int64)
        if scales.dtype == np.uint8:
            zero_scales += np.bincount(scales[zero], minlength=256)
            counts = np.bincount(scales.reshape(-1), minlength=256)
            scale = of_bytes(counts, counts - zero_scales, self._format.scale)
        else:
            scale = of_floats(scales, ~zero)
        return BlockStatistics(
            scale=scale,
            zero_blocks=int(zero.sum()),
            zero_scales=zero_scales,
            underflown=int(((values == 0) & ~zero & self._are_finite(scales)).sum()),
            tops=np.bincount(top[(values > 0) & ~zero], minlength=128),
            pairing=pairing_of(values, energy),
        )


class PlainPass(Pass):
    """Plain values: floats, counted by their bits, or integers."""

    def __init__(self, stored: StoredWeight, profile: bool) -> None:
        super().__init__(stored, profile)
        self._exponents = np.zeros(256, np.int64)
        self._facts = np.zeros(3, np.int64)
        self._zeros = 0
        self._extremes: tuple[float, float] | None = None

    def add(self, weight: Weight) -> None:
        """Add the next rows."""
        assert weight.value is not None, "a plain weight has values"
        value = weight.value
        if not value.numel():
            return
        if not value.dtype.is_floating_point:
            self._add_integers(value)
            return
        if value.dtype not in _PLAIN_SHIFT:
            value = value.float()
        self._add_floats(self._as_rows(value), _PLAIN_SHIFT[value.dtype])

    def _as_rows(self, value: Tensor) -> Tensor:
        """Return a piece as rows; a piece of a long vector is one row."""
        return value.reshape(1, -1) if self.height == 1 else value.reshape(-1, self.width)

    def _add_floats(self, value_MK: Tensor, shift: int) -> None:
        from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

        data = bytes_by_row(value_MK)
        self.take_rows(data, _FINITE_MASK[shift])
        bits = data.view(np.uint16 if shift else np.uint32)
        energies = np.empty(len(bits))
        loops.float_rows(bits, np.uint32(shift), self._exponents, self._facts, energies)
        self.take_energies(energies)
        if self.wants_profile:
            sampled = value_MK[:: self.every].float().nan_to_num(0.0, 0.0, 0.0)
            self.columns += sampled.square().sum(0).numpy()

    def _add_integers(self, value: Tensor) -> None:
        self.take_rows(bytes_by_row(self._as_rows(value)), (1 << 64) - 1)
        numbers = value.numpy()  # torch compares no unsigned integers beyond a byte
        lowest, highest = float(numbers.min()), float(numbers.max())
        known = self._extremes or (lowest, highest)
        self._extremes = (min(known[0], lowest), max(known[1], highest))
        self._zeros += int((numbers == 0).sum())

    def finish(self) -> TensorStatistics:
        """Return the accumulated statistics."""
        largest = np.array([self._facts[2]], np.uint32).view(np.float32)
        is_integer = self._extremes is not None
        return TensorStatistics(
            **self.common(),
            counts=np.zeros(0, np.int64) if is_integer else self._exponents,
            not_finite=int(self._facts[0]),
            zeros=self._zeros if is_integer else int(self._facts[1]),
            amax=max(map(abs, self._extremes)) if self._extremes else float(largest[0]),
            scale_digest=0,
            extremes=self._extremes,
        )
