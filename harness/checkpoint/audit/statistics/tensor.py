"""Compute the statistics of one weight in one pass: counts, extremes, energies, digests.

`statistics_of` walks a stored weight by row blocks; memory stays bounded and pages are released as
it goes. Shape letters: M rows, K columns, R and C blocks along M and K, b bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.number_formats import E2M1, E4M3, ELEMENT_FORMATS
from degarble.harness.formats.quantise import spread_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.audit.statistics.loops import E2M1Tables
    from degarble.harness.checkpoint.view.stored import StoredWeight
    from degarble.harness.formats.number_formats import BlockFormat, ElementFormat
    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.harness.formats.weight import Weight


# --------------------------------------------------------------------------------------------------
# Block scales, and how they correlate with the codes that they scale. ScaleStatistics come from
# counts of scale bytes or from float32 scales. A scale is ordinary if it is above the smallest
# normal number of its format: there it was rounded by a relative step, and the largest code of its
# block follows from the quantiser's rule. The lookup tables of the compiled E2M1 loop are made here
# too.


@dataclass(frozen=True)
class ScaleStatistics:
    """Counts of block scales. From `subnormal` on, only of blocks that are not all zero.

    subnormal    below the smallest normal number of the scale's format
    at_largest   the largest number of the format: where a scale was clipped, or just fits
    distinct     different positive values; `powers_of_two` counts scales, not values
    far          share that is 2^20 or more away from the median
    """

    count: int
    not_finite: int
    negative: int
    zero: int
    subnormal: int
    at_largest: int
    below_largest: int
    powers_of_two: int
    distinct: int
    far: float
    smallest: float  # of the positive ones; NaN without any
    largest: float


@dataclass(frozen=True)
class ScaleCorrelation:
    """Correlation of scale and energy over the blocks, with its degrees of freedom."""

    freedom: float
    correlation: float


def of_bytes(
    counts: NDArray[np.int64], used: NDArray[np.int64], fmt: ElementFormat
) -> ScaleStatistics:
    """Summarise byte scales from the counts of all scales, and of those over codes."""
    return _summary(values_of(fmt).astype(np.float64), counts, used, fmt)


def of_floats(scales: NDArray[np.float32], used: NDArray[np.bool_]) -> ScaleStatistics:
    """Summarise float32 scales; `used`: those of blocks that are not all zero."""
    values, at, counts = np.unique(
        scales.reshape(-1), return_inverse=True, return_counts=True, equal_nan=False
    )
    over_codes = np.bincount(at.reshape(-1)[used.reshape(-1)], minlength=len(values))
    return _summary(values.astype(np.float64), counts, over_codes, ELEMENT_FORMATS["FP32"])


def _summary(
    values: NDArray[np.float64],
    counts: NDArray[np.int64],
    used: NDArray[np.int64],
    fmt: ElementFormat,
) -> ScaleStatistics:
    finite = np.isfinite(values)
    seen = finite & (values > 0) & (used > 0)
    kept, often = values[seen], used[seen]
    ranked = np.sort(values[finite])
    below = ranked[-2] if len(ranked) > 1 else fmt.largest
    return ScaleStatistics(
        count=int(counts.sum()),
        not_finite=int(counts[~finite].sum()),
        negative=int(counts[finite & (values < 0)].sum()),
        zero=int(counts[values == 0].sum()),
        subnormal=int(often[kept < fmt.smallest_normal].sum()),
        at_largest=int(often[kept == fmt.largest].sum()),
        below_largest=int(often[kept == below].sum()),
        powers_of_two=int(often[np.frexp(kept)[0] == 0.5].sum()),
        distinct=len(kept),
        far=share_far(np.log2(kept), often, 20),
        smallest=float(kept.min()) if len(kept) else float("nan"),
        largest=float(kept.max()) if len(kept) else float("nan"),
    )


def share_far(places: NDArray[Any], counts: NDArray[Any], distance: float) -> float:
    """Return the share of a histogram at least `distance` away from its median."""
    total = counts.sum()
    if not total:
        return 0.0
    order = np.argsort(places)
    middle = places[order][np.searchsorted(np.cumsum(counts[order]), total / 2)]
    return float(counts[np.abs(places - middle) >= distance].sum() / total)


def ordinary(fmt: ElementFormat) -> NDArray[np.bool_]:
    """Return a mask of the bytes of a scale format that are ordinary scales."""
    values = values_of(fmt)
    return np.isfinite(values) & (values > fmt.smallest_normal)


@cache
def e2m1_tables(scale_format: str, block: int) -> E2M1Tables:
    """Return the lookup tables of the loop over E2M1 blocks."""
    from degarble.harness.checkpoint.audit.statistics.loops import E2M1Tables  # noqa: PLC0415  numba

    values = values_of(ELEMENT_FORMATS[scale_format]).astype(np.float64)
    kept = np.where(np.isfinite(values), values, 0.0)
    # E2M1 values are multiples of 1/2, so sums of their squares are multiples of 1/4.
    quarters = np.arange(4 * int(E2M1.largest) ** 2 * block + 1, dtype=np.float64)
    return E2M1Tables(kept * kept / 4, _log2(kept), _log2(quarters))


def _log2(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return binary logarithms; NaN for numbers that are not positive."""
    logs = np.full(numbers.shape, np.nan)
    np.log2(numbers, out=logs, where=numbers > 0)
    return logs.astype(np.float32)


def scale_correlation(
    scale_RC: NDArray[np.float64], energy_RC: NDArray[np.float64]
) -> ScaleCorrelation:
    """Correlate the logarithms of scales and of code energies, about the means of rows."""
    kept = (scale_RC > 0) & (energy_RC > 0)
    counts = kept.sum(1, keepdims=True)
    centred = []
    for values in (scale_RC, energy_RC):
        logs = np.where(kept, np.log2(np.where(kept, values, 1.0)), 0.0)
        centred.append((logs - logs.sum(1, keepdims=True) / np.maximum(counts, 1)) * kept)
    x, y = centred
    freedom = float(np.maximum(counts - 1, 0).sum())
    return ScaleCorrelation(
        freedom, correlation(float((x * x).sum()), float((y * y).sum()), float((x * y).sum()))
    )


def correlation(xx: float, yy: float, xy: float) -> float:
    """Return xy over the root of xx yy; NaN where one of them does not vary."""
    # Sums of squares about a mean are differences: below this they are rounding, not variation.
    return xy / (xx * yy) ** 0.5 if min(xx, yy) > 1e-6 else float("nan")


# --------------------------------------------------------------------------------------------------
# Digests of rows, runs of zero rows, entropy of bytes. Two digests of a matrix are made from those
# of its rows: one depends on the order of the rows, the other does not. Together they tell a matrix
# from its permuted copy, and both from everything else. Digests are 64 bits: two different ones of
# 300,000 agree by chance with a probability of 2e-9. They are no defence against intent.

_PRIME = np.uint64(0xBF58476D1CE4E5B9)  # an odd number of the splitmix64 finaliser (Steele, 2014)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(31)


def bytes_by_row(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor [..., K] as rows, without a copy if it is contiguous."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1).contiguous()
    found: NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return found


def as_words(data_Mb: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return rows of bytes as 64-bit words, padded with zero bytes."""
    rows, width = data_Mb.shape
    if width % 8 == 0 and data_Mb.flags.c_contiguous and _address(data_Mb) % 8 == 0:
        return data_Mb.view(np.uint64)
    filled = np.zeros((rows, -(-width // 8) * 8), np.uint8)
    filled[:, :width] = data_Mb
    return filled.view(np.uint64)


def _address(array: NDArray[Any]) -> int:
    """Return an array's address; `ctypes.data` takes ten times as long."""
    address: int = array.__array_interface__["data"][0]
    return address


def digests_of(data_Mb: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the digest of each row."""
    return digested(as_words(data_Mb), (1 << 64) - 1)[0]


def digested(words: NDArray[np.uint64], mask: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return each row's digest, and whether all of its bits under a repeated mask are zero."""
    from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

    digests, zero = np.empty(len(words), np.uint64), np.empty(len(words), np.bool_)
    loops.row_digests(words, np.uint64(mask), digests, zero)
    return digests, zero


def matrix_digest(digests: NDArray[np.uint64], *, ordered: bool) -> int:
    """Combine the digests of rows into one number."""
    mixed = digests.copy()
    # The sum below ignores the order of rows, unless each digest is mixed with its index.
    if ordered:
        mixed ^= np.arange(1, len(digests) + 1, dtype=np.uint64) * _STEP
    for _ in range(2):
        mixed ^= mixed >> _SHIFT
        mixed *= _PRIME
    mixed ^= mixed >> _SHIFT
    return int(mixed.sum(dtype=np.uint64))


def longest_run(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Return first index and length of the longest run of true flags; (0, 0) without any."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    if not len(edges):
        return 0, 0
    begins, ends = edges[::2], edges[1::2]
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest] - begins[longest])


def entropy(counts: NDArray[Any]) -> float:
    """Return the entropy of a histogram, in bits."""
    total = counts.sum()
    shares = counts[counts > 0] / max(total, 1)
    return float(-(shares * np.log2(shares)).sum()) if len(shares) else 0.0


def joined(pieces: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
    """Concatenate arrays, possibly none."""
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


# --------------------------------------------------------------------------------------------------
# Records. Values are codes times block scales; the tensor scale is a separate field.


@dataclass(frozen=True)
class BlockStatistics:
    """Statistics of a quantised weight's blocks.

    zero_blocks  all codes are zero; `zero_scales` counts their scale bytes [256]
    underflown   codes that are not zero under a scale that is
    tops         blocks of ordinary scale, by the largest magnitude code in them
    """

    scale: ScaleStatistics
    zero_blocks: int
    zero_scales: NDArray[np.int64]
    underflown: int
    tops: NDArray[np.int64]
    pairing: ScaleCorrelation


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one weight; `amax` and `sum_squares` exclude its tensor scale.

    counts      codes by bit pattern, or floats by exponent field; empty for integers
    row_digest  does not depend on the order of rows; `digest` and `scale_digest` do
    columns     squares by column over some rows, `rows` squares by row; None if not requested
    """

    elements: int
    height: int
    counts: NDArray[np.int64]
    not_finite: int
    zeros: int
    amax: float
    sum_squares: float
    zero_rows: int
    zero_run: tuple[int, int]  # first row and length of the longest run of zero rows
    column_run: tuple[int, int]  # of columns that are zero in the rows that `columns` is from
    digest: int
    row_digest: int
    scale_digest: int
    byte_entropy: float
    tensor_scale: float | None  # as stored
    input_scale: float | None  # a decode scale, whatever is stored
    blocks: BlockStatistics | None = None
    extremes: tuple[float, float] | None = None  # of integers
    columns: NDArray[np.float32] | None = None
    rows: NDArray[np.float32] | None = None

    @property
    def code_entropy(self) -> float:
        """Entropy in bits a code, or an exponent field."""
        return entropy(self.counts)

    @property
    def far(self) -> float:
        """Share of non-zero floats whose exponent is 40 or more from the median."""
        return share_far(np.arange(1, 255), self.counts[1:255], 40) if len(self.counts) else 0.0


# --------------------------------------------------------------------------------------------------
# Passes over the rows, by kind: packed E2M1, E4M3, codes of a table or plain values. A pass adds
# row blocks through the compiled loops and makes the record at the end. The loops are imported
# inside functions, because numba takes long to load.

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
    if fmt.element == E2M1:
        return E2M1Pass(stored, fmt, profile)
    return (E4M3Pass if fmt.element == E4M3 else TablePass)(stored, fmt, profile)


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

        words = as_words(data_Mb)
        digests, zero = digested(words, mask)
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
            "zero_run": longest_run(zero),
            "column_run": longest_run(self.columns == 0),
            "digest": matrix_digest(digests, ordered=True),
            "row_digest": matrix_digest(digests, ordered=False),
            "tensor_scale": self.scalars[0],
            "input_scale": self.scalars[1],
            "byte_entropy": entropy(self._bytes),
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
            pairing=ScaleCorrelation(freedom, correlation(xx, yy, xy)),
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

        height, width = self._format.extents(*codes_MK.shape)
        blocks_RC2 = np.empty((*shape, 2))
        for block_row, panel in enumerate(blocks_RC2):
            rows = codes_MK[block_row * height : (block_row + 1) * height]
            loops.e4m3_panel(rows, width, self._squares, self._counts, panel)
        return blocks_RC2

    def _take_columns(self, sampled: NDArray[np.uint8], square_RC: NDArray[np.float64]) -> None:
        height, width = self._format.extents(len(sampled) * self.every, self.width)
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
            pairing=scale_correlation(values, energy),
        )


class TablePass(Pass):
    """Codes of a table, less their zero points, under float32 scales: integers by group."""

    def __init__(self, stored: StoredWeight, fmt: BlockFormat, profile: bool) -> None:
        super().__init__(stored, profile)
        self._counts = np.zeros(fmt.element.code_count, np.int64)
        self._zeros = 0
        self._amax = 0.0
        self._blocks: list[NDArray[np.float64]] = []  # [M, G, 3]: scale, sum of squares, largest

    def add(self, weight: Weight) -> None:
        """Add the next rows."""
        tensor = weight.quantised()
        codes_MK = tensor.element_codes()
        if not codes_MK.numel():
            return
        self._counts += np.bincount(codes_MK.reshape(-1).numpy(), minlength=len(self._counts))
        step_MK = decode_array(codes_MK, tensor.format.element)
        if tensor.zero_point is not None:
            step_MK -= spread_blocks(tensor, tensor.zero_point)
        # Bytes of differences from the zero point: a row of zeros has no other bits than signs.
        self.take_rows(bytes_by_row(step_MK), _FINITE_MASK[0])
        self._zeros += int((step_MK == 0).sum())
        self._take_blocks(tensor, step_MK)

    def _take_blocks(self, tensor: QuantisedTensor, step_MK: Tensor) -> None:
        scale_RG = tensor.scale_values().double()
        scale_MG = scale_RG.expand(len(step_MK), -1)
        group_K = tensor.group_index
        if group_K is None:
            width = tensor.format.extents(*step_MK.shape)[1]
            group_K = torch.arange(step_MK.shape[1]) // width
        group_K = group_K.long()
        square_MK = step_MK.double().square()
        energy_MG = torch.zeros_like(scale_MG).index_add_(1, group_K, square_MK)
        top_MG = torch.zeros_like(scale_MG)
        index_MK = group_K.expand(len(step_MK), -1)
        top_MG.scatter_reduce_(1, index_MK, step_MK.abs().double(), "amax")
        self._blocks.append(torch.stack([scale_MG, energy_MG, top_MG], dim=-1).numpy())
        finite_MG = scale_MG.nan_to_num(0.0, 0.0, 0.0)
        self._amax = max(self._amax, float((finite_MG.abs() * top_MG).max()))
        self.take_energies((energy_MG * finite_MG.square()).sum(1).numpy())
        if self.wants_profile:
            factor_MK = finite_MG[:: self.every, group_K].square()
            self.columns += _narrowed((square_MK[:: self.every] * factor_MK).sum(0).numpy())

    def finish(self) -> TensorStatistics:
        """Return the accumulated statistics."""
        blocks = np.concatenate(self._blocks) if self._blocks else np.zeros((0, 1, 3))
        scale, energy, top = (np.ascontiguousarray(blocks[..., part]) for part in range(3))
        finite = np.isfinite(scale)
        value, zero = np.where(finite, scale, 0.0), top == 0
        kept = scale.astype(np.float32)
        return TensorStatistics(
            **self.common(),
            counts=self._counts,
            not_finite=0,
            zeros=self._zeros,
            amax=self._amax,
            scale_digest=matrix_digest(digests_of(kept.view(np.uint8)), ordered=True),
            blocks=BlockStatistics(
                scale=of_floats(kept, ~zero),
                zero_blocks=int(zero.sum()),
                zero_scales=np.zeros(256, np.int64),
                underflown=int(((value == 0) & ~zero & finite).sum()),
                tops=np.bincount(
                    np.minimum(top, 127).astype(int)[(value > 0) & ~zero], minlength=128
                ),
                pairing=scale_correlation(value, energy),
            ),
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


# --------------------------------------------------------------------------------------------------
# The tensor scale, one number that may itself be wrong, is left to the caller. NaN and infinities
# are counted and excluded from every sum.
#
# The pairing of a block format is the correlation, inside rows, between the logarithms of a block's
# scale and of its codes' energy. A quantiser that scales by the block's largest value makes it
# negative: an outlier raises the scale and shrinks the other codes. It vanishes when scales are
# paired with other blocks' codes. Derivation: docs/design-notes/audit_statistics.md.

__all__ = ["WINDOW_ELEMENTS", "BlockStatistics", "TensorStatistics", "statistics_of"]

WINDOW_ELEMENTS = 1 << 23  # of one row block: 4 MiB of E2M1 codes


def statistics_of(
    stored: StoredWeight, *, profile: bool = False, rows: int = PROFILE_ROWS
) -> TensorStatistics:
    """Return a weight's statistics; `profile`: with squares by row, and by column of some rows."""
    found = pass_over(stored, profile=profile)
    found.every = max(1, found.height // rows)
    if not found.elements:  # rows of nothing can be many
        return found.finish()
    for _, weight in stored.row_blocks(WINDOW_ELEMENTS):
        found.scalars = _scalar(weight.tensor_scale), _scalar(weight.input_scale)
        found.add(weight)
    return found.finish()


def _scalar(scale: Tensor | None) -> float | None:
    """Return the number in a scale; None for several, which only a stack has."""
    return float(scale) if scale is not None and scale.numel() == 1 else None
