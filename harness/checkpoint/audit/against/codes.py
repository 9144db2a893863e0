"""Judge each code or plain value: it must be the nearest to the reference's value.

Whatever rule chose a scale (amax, mse, four-over-six), a code is then the nearest to value / scale.
So each code bounds the scale that it was made with: from value / upper end of its rounding interval
to value / lower end. The bounds of a block's codes intersect at the scale that made them; if a code
was changed, they do not intersect. No step needs to know the rule or the tool.

Where values went through another format first, or were rounded otherwise (GPTQ), misfits are
everywhere and prove nothing.

Shape letters: M rows, K columns, B rows of blocks, C columns of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.formats.codec import decode_array, unpack_nibbles
from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.layouts import SWIZZLE_8X4, SWIZZLE_128X4, offset_table
from degarble.harness.formats.number_formats import E2M1, E4M3, ScaleDirection, TableFormat

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat, NumberFormat
    from degarble.harness.formats.weight import Weight

SLACK = 2.0**-7  # of a value: quotients that a tool rounds to bfloat16, twice
FP8_SLACK = 2.0**-4 + SLACK  # of a value that was FP8 before
BITS_OF_A_BYTE = 8
_CLIPPED = 1.5  # an mse rule, or an exponent rounded down, cuts off at most a third
_UNDERFLOW = 2.0**-6  # of the scale format's full scale: smaller block scales may be flushed to 0
_COVERS = 0.98  # of all blocks that one factor explains
_MOSTLY, _FEWEST = 0.9, 4  # of the bad blocks, and how many they are at least
_GAIN = 0.004
_ENOUGH = 512  # elements: no chance brings their bounds together
_APART = 0.12  # by which a block scale is off that no coarser format on the way moves


class Misfits(NamedTuple):
    """Counts of elements that are not what the reference's value rounds to.

    `beyond`: those that FP8 on the way does not explain either. `first`: row of the first.
    """

    judged: int = 0
    near: int = 0
    beyond: int = 0
    rows: int = 0
    first: int = -1

    def and_then(self, other: Misfits) -> Misfits:
        """Join the counts of two pieces, the earlier one first."""
        sums = (a + b for a, b in zip(self[:4], other[:4], strict=True))
        judged, near, beyond, rows = sums
        first = self.first if self.first >= 0 else other.first
        return Misfits(judged, near, beyond, rows, first)


@cache
def bounds_of(element: NumberFormat) -> NDArray[np.float64]:
    """Return the rounding interval [2, codes] of every code; infinite for NaN codes."""
    with np.errstate(all="ignore"):
        values = values_of(element).astype(np.float64)
    known = np.unique(values[np.isfinite(values)])
    middle = (known[1:] + known[:-1]) / 2
    # The outermost codes also stand for clipped values, up to _CLIPPED times their own.
    ends = np.concatenate([[known[0] * _CLIPPED], middle, [known[-1] * _CLIPPED]])
    place = np.searchsorted(known, np.nan_to_num(values))
    found = np.stack([ends[place], ends[place + 1]])
    found[:, ~np.isfinite(values)] = np.array([[-np.inf], [np.inf]])
    return found


def codes_of(weight: Weight) -> Tensor | None:
    """Return the codes of a matrix as bytes [M, K]; None for other weights."""
    storage, codes = weight.storage, weight.codes
    if storage is None or codes is None or len(storage.shape) != 2:
        return None
    if storage.format.packed:
        assert storage.nibble_order is not None, "packed codes have an order"
        return unpack_nibbles(codes.view(torch.uint8), storage.nibble_order)
    return codes.view(torch.uint8)


def scales_of(weight: Weight) -> tuple[Tensor, float]:
    """Return the full scale of each block [B, C], and the tensor scale in it."""
    assert weight.storage is not None, "quantised weights have a storage"
    assert weight.block_scale is not None, "codes have scales"
    fmt, scale = weight.storage.format, weight.block_scale
    values = scale if scale.dtype is torch.float32 else decode_array(scale, fmt.scale)
    tensor = 1.0
    if weight.tensor_scale is not None:
        tensor = float(weight.tensor_scale.reshape(-1)[0])
        if weight.storage.direction is ScaleDirection.ENCODE:
            tensor = 1 / tensor if tensor else math.inf
    return values.double() * tensor, tensor


def misfits_of(ours: Weight, theirs: Weight, y_MK: Tensor, begin: int) -> Misfits:
    """Count the elements of some rows that are not the nearest to the reference's value."""
    from degarble.harness.checkpoint.audit.statistics import loops  # noqa: PLC0415  numba

    if ours.storage is None:
        return _plain_misfits(ours, theirs, y_MK, begin)
    codes = codes_of(ours)
    if codes is None or codes.shape != y_MK.shape:
        return Misfits()
    fmt = ours.storage.format
    if isinstance(fmt.element, TableFormat):
        return Misfits()  # GPTQ and AWQ choose other codes than the nearest, on purpose
    height, width = fmt.extents(*ours.storage.shape)
    scales, tensor = scales_of(ours)
    counts = np.zeros((len(codes), 2), np.int64)
    bounds = bounds_of(fmt.element)
    with np.errstate(all="ignore"):
        loops.count_misfits(
            codes.contiguous().numpy(),
            scales.contiguous().numpy(),
            (height, width, SLACK, FP8_SLACK, _flushed(fmt, tensor)),
            bounds,
            y_MK.numpy(),
            counts,
        )
    return _counted(counts, codes.numel(), begin)


def _flushed(fmt: BlockFormat, tensor: float) -> float:
    return fmt.element.largest * tensor * _UNDERFLOW if fmt.tensor_scale else 0.0


def _counted(counts: NDArray[np.int64], judged: int, begin: int) -> Misfits:
    wrong = np.flatnonzero(counts[:, 0])
    near, beyond = counts.sum(0)
    first = begin + int(wrong[0]) if len(wrong) else -1
    return Misfits(judged, int(near), int(beyond), len(wrong), first)


def _plain_misfits(ours: Weight, theirs: Weight, y_MK: Tensor, begin: int) -> Misfits:
    value = ours.value
    assert value is not None, "a weight without codes has values"
    x = value.reshape(y_MK.shape)
    # One dtype: every bit must agree. Another dtype: the reference rounded once. A quantised
    # reference: within SLACK.
    if theirs.value is not None and theirs.value.dtype is value.dtype:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        wrong = x.contiguous().view(bits) != theirs.value.contiguous().reshape(x.shape).view(bits)
    elif theirs.value is not None:
        wrong = (x != y_MK.to(value.dtype)) & ~y_MK.isnan()
    else:
        wrong = (x.float() - y_MK).abs() > SLACK * y_MK.abs()
    count = wrong.sum(1).numpy()
    return _counted(np.stack([count, count], 1), y_MK.numel(), begin)


# Which scale the codes of a block were made with


@dataclass
class Blocks:
    """Bounds [B, C] of the scale that made each block's codes, and the stored scale.

    `bad`: blocks with a misfit. `empty`: blocks whose codes are all zero though values are not.
    """

    low: Tensor
    high: Tensor
    stored: Tensor
    bad: Tensor
    empty: Tensor
    height: int
    width: int
    share: float  # of all elements, misfits
    slack: float
    grid: Tensor | None  # scales that can be stored; None for any

    @property
    def explained(self) -> Tensor:
        """Mask of the blocks that one storable scale explains."""
        found = (self.low <= self.high) & ~self.empty
        if self.grid is None:
            return found
        place = torch.searchsorted(self.grid, self.low.contiguous())
        known = place < len(self.grid)
        return found & known & (self.grid[place.clamp(max=len(self.grid) - 1)] <= self.high)

    def factor(self, chosen: Tensor) -> float | None:
        """Return a factor other than 1 on stored scales that explains nearly all chosen blocks."""
        kept = chosen & (self.stored > 0) & ~self.empty
        low = (self.low / self.stored)[kept].numpy()
        high = (self.high / self.stored)[kept].numpy()
        if not len(low) or not int(chosen.sum()) * _COVERS <= len(low):
            return None
        # Sweep over the ends of the intervals: the factor lies where most of them overlap.
        order = np.concatenate([low, high])
        steps = np.concatenate([np.ones(len(low)), -np.ones(len(high))])
        # At equal places intervals begin before others end.
        sweep = np.lexsort((-steps, order))
        inside = steps[sweep].cumsum()
        best = int(inside.argmax())
        if inside[best] < _COVERS * len(low) or best + 1 >= len(sweep):
            return None
        first, last = order[sweep[best]], order[sweep[best + 1]]
        factor = first if not np.isfinite(last) else math.sqrt(max(first * last, 0.0))
        # Bounds that are wide, or of few elements, meet somewhere by themselves.
        few = self.slack > SLACK or len(low) * self.height * self.width < _ENOUGH
        if first <= 1 <= last or abs(factor - 1) < (_APART if few else _GAIN):
            return None
        # `factor` turns stored scales into the right ones: the weight is too large by its inverse.
        return float(1 / factor) if factor else None

    def are_scaled(self, *, apart: bool) -> bool:
        """Return whether other scales explain bad blocks; `apart`: far from the stored ones."""
        bad, fits = self.bad, self.explained
        if int((bad & fits).sum()) < _MOSTLY * int(bad.sum()):
            return False
        if not apart:
            return True
        near = torch.where(self.stored < self.low, self.low, self.high)
        off = (self.stored / near.clamp(min=1e-300))[bad & fits].log2().abs()
        return float(off.median()) > math.log2(1 + _APART)

    def arranged(self) -> str | None:
        """Return the order of the stored scales; None for row-major or an unknown order."""
        rows, columns = self.stored.shape
        orders = {"reversed in their rows": self.stored.flip(1), "reversed": self.stored.flip(0)}
        if min(rows, columns) > 1:
            orders["transposed"] = self.stored.reshape(columns, rows).T
        for layout in (SWIZZLE_128X4, SWIZZLE_8X4):
            places = offset_table(layout, rows, columns).long()
            if int(places.max()) < rows * columns:  # nothing padded
                text = f"in the {layout.name} layout of a kernel"
                orders[text] = self.stored.flatten()[places].view(rows, columns)
        for text, scales in orders.items():
            held = ((scales >= self.low) & (scales <= self.high))[self.bad]
            if int(self.bad.sum()) >= _FEWEST and float(held.double().mean()) >= _MOSTLY:
                return text
        return None

    def shifted(self) -> str | None:
        """Return which neighbour's scales the bad blocks have; None if no neighbour's."""
        if int(self.bad.sum()) < _FEWEST:
            return None
        for text, step in _NEIGHBOURS.items():
            low, high = (torch.roll(tensor, step, (0, 1)) for tensor in (self.low, self.high))
            known = self.bad & torch.roll(~self.empty & (self.high < math.inf), step, (0, 1))
            held = (self.stored >= low) & (self.stored <= high) & known
            if int(known.sum()) and int(held.sum()) >= _MOSTLY * int(known.sum()):
                return text
        return None


# Block scales by what they are; `roll` brings the neighbour's bounds to a block.
_NEIGHBOURS = {
    "the next block of their row": (0, -1),
    "the block before in their row": (0, 1),
    "the next row of blocks": (-1, 0),
    "the row of blocks before": (1, 0),
}


def blocks_of(weight: Weight, y_MK: Tensor, slack: float) -> Blocks | None:
    """Bound the scale of each block by its codes and the reference's values."""
    codes = codes_of(weight)
    if codes is None or weight.storage is None or codes.shape != y_MK.shape:
        return None
    element = weight.storage.format.element
    height, width = weight.storage.format.extents(*weight.storage.shape)
    if element not in (E2M1, E4M3):
        return None
    bounds = torch.from_numpy(bounds_of(element))
    lower, upper = bounds[0][codes.long()], bounds[1][codes.long()]
    y = y_MK.double()
    zero, negative = lower * upper <= 0, upper < 0
    size = y.abs()
    agrees = (y < 0) == negative
    least = torch.where(negative, -upper, lower)
    most = torch.where(negative, -lower, upper)
    # [M, K]: bounds on the scale from each element; a zero code bounds it from below only.
    low = torch.where(zero, size / upper, size / most) * (1 - slack)
    high = torch.where(zero, torch.full_like(size, math.inf), size / least * (1 + slack))
    known = y.isfinite()
    low = torch.where(known & ~zero & ~agrees & (size > 0), math.inf, low)
    low, high = torch.where(known, low, 0.0), torch.where(known, high, math.inf)
    scales, tensor = scales_of(weight)
    spread = scales.repeat_interleave(height, 0)[: len(y)].repeat_interleave(width, 1)
    spread = spread[:, : y.shape[1]]
    # Distance of the value outside the code's interval under the stored scale.
    gap = torch.maximum(lower * spread - y, y - upper * spread)
    flushed = (spread == 0) & (size <= _flushed(weight.storage.format, tensor))
    wrong = (gap > slack * size) & ~flushed & known
    full = (-y.shape[0] % height, -y.shape[1] % width)

    def gathered(values: Tensor, fill: float) -> Tensor:
        padded = torch.nn.functional.pad(values, (0, full[1], 0, full[0]), value=fill)
        rows, columns = padded.shape
        return padded.view(rows // height, height, columns // width, width)

    fmt, grid = weight.storage.format, None
    # Byte scales take few values; float32 scales may take any.
    if fmt.scale.bits <= BITS_OF_A_BYTE:
        grid = torch.from_numpy(values_of(fmt.scale).astype(np.float64)) * tensor
        grid = grid[grid.isfinite() & (grid > 0)].unique()
    return Blocks(
        gathered(low, 0.0).amax((1, 3)),
        gathered(high, math.inf).amin((1, 3)),
        scales,
        gathered(wrong.double(), 0.0).amax((1, 3)) > 0,
        (gathered((~zero).double(), 0.0).amax((1, 3)) == 0)
        & (gathered(size, 0.0).amax((1, 3)) > 0),
        height,
        width,
        float(wrong.double().mean()),
        slack,
        grid,
    )
