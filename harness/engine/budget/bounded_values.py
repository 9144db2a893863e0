"""Values with error bounds, carried through operations, storing and rounding to blocks of codes.

This is interval arithmetic: the exact value in float64, and the most that float32 may differ.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.rules import U
from degarble.references import elementary
from degarble.references import numerics as rounding
from degarble.references.numerics import IndexerFormat, KeyValueCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from degarble.harness.model.types import Rope
    from degarble.references.facts import Span
    from degarble.references.numerics import Numerics


# --------------------------------------------------------------------------------------------------
# Operations and storing.
#
# Storing keeps the bound tight: a rounded value differs only where a rounding boundary lies within
# its error, and then by the distance of both neighbours. Everywhere else the error disappears.
#
# Elementary functions count as accurate to 2 units in the last place (4 u, u = 2^-24), including
# approximate reciprocals and roots of a device. Sums may be taken in any order.
#
# Shape letters: T tokens, P pairs, D features.

FUNCTION = 4  # of u: an elementary function, a reciprocal or a root within 2 units


class BoundedValue(NamedTuple):
    """An exact value, and the most that float32 may differ from it."""

    value: Tensor
    error: Tensor


class BoundedRotation(NamedTuple):
    """Cosine and sine of RoPE angles [T, P], or [T, 1, P] to broadcast over heads."""

    cos: BoundedValue
    sin: BoundedValue


def exactly(x: Tensor) -> BoundedValue:
    """Return an operand without error."""
    return BoundedValue(x.double(), torch.zeros((), dtype=torch.float64))


def stored(x: BoundedValue, dtype: torch.dtype) -> BoundedValue:
    """Round to a storage dtype: an error vanishes, or becomes the distance to a neighbour."""
    if dtype is torch.float64:
        return x
    low, middle, high = (
        side.to(dtype).double() for side in (x.value - x.error, x.value, x.value + x.error)
    )
    # Rounding is monotone: equal ends mean that every value between them rounds alike.
    return BoundedValue(middle, torch.maximum(high - middle, middle - low))


def bounded_norm(
    x: BoundedValue, weight: Tensor, epsilon: float, stored_before: torch.dtype | None = None
) -> BoundedValue:
    """Return the RMS norm: a quarter of the width in same-sign additions, root and products 8 more.

    `stored_before` is the format in which rows are stored before the weight is applied, if any.
    """
    if stored_before is not None:
        plain = stored(bounded_norm(x, torch.ones(()), epsilon), stored_before)
        value = weight.double() * plain.value
        return BoundedValue(value, weight.double().abs() * plain.error + U * value.abs())
    width, square = x.value.shape[-1], x.value.square().mean(-1, keepdim=True)
    factor = (square + epsilon).rsqrt()
    # Relative change of the root by the errors of x.
    moved = (x.value.abs() * x.error).mean(-1, keepdim=True) * factor.square()
    out = weight.double() * x.value * factor
    own = weight.double().abs() * x.error * factor
    return BoundedValue(out, own + out.abs() * (moved + (width / 4 + 8) * U))


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> BoundedValue:
    """Return the LayerNorm of exact rows; its mean errs by u times the sum of magnitudes."""
    wide, width = x.double(), x.shape[-1]
    centred = wide - wide.mean(-1, keepdim=True)
    off = U * (wide.abs().sum(-1, keepdim=True) + centred.abs())
    square = centred.square().mean(-1, keepdim=True)
    factor = (square + epsilon).rsqrt()
    relative = (centred.abs() * off).mean(-1, keepdim=True) * factor.square()
    scaled = centred * factor * weight.double()
    out = scaled + bias.double()
    error = weight.double().abs() * factor * off + scaled.abs() * (relative + (width / 4 + 8) * U)
    return BoundedValue(out, error + U * (out.abs() + scaled.abs()))


def rope_rotation(
    rope: Rope, positions_T: Tensor, numerics: Numerics, heads: bool = False
) -> BoundedRotation:
    """Return the angles of positions; a frequency's exponent is rounded, at a cost of ln(theta).

    The angle errs by its own rounding and by the frequency's error, sine and cosine by 2 units.
    """
    frequency_P = elementary.frequencies(rope, torch.float64, torch.device("cpu"))
    angle_TP = positions_T.cpu().double()[:, None] * frequency_P
    share = torch.arange(len(frequency_P)) / len(frequency_P)
    # frequency = theta^(-i / P): its exponent, up to ln(theta), is rounded as well.
    off_TP = U * (angle_TP * (8 + 2 * math.log(rope.theta) * share) + FUNCTION)
    if heads:
        angle_TP, off_TP = angle_TP.unsqueeze(1), off_TP.unsqueeze(1)
    parts = BoundedValue(angle_TP.cos(), off_TP), BoundedValue(angle_TP.sin(), off_TP)
    # YaRN scales cosine and sine.
    if rope.scale != 1.0:
        scale = BoundedValue(
            torch.tensor(rope.scale, dtype=torch.float64), torch.tensor(U * rope.scale)
        )
        parts = _product(parts[0], scale), _product(parts[1], scale)
    if numerics.switches.rotation_in_storage_dtype:
        parts = stored(parts[0], numerics.store), stored(parts[1], numerics.store)
    return BoundedRotation(*parts)


def rotated(
    x: BoundedValue, by: BoundedRotation, *, leading: bool = False, halves: bool = False
) -> BoundedValue:
    """Rotate the last 2P features, or the leading ones, in pairs (2i, 2i+1) or (i, i+P)."""
    width = 2 * by.cos.value.shape[-1]
    value, error = (part.expand(x.value.shape) for part in x)
    rest = value.shape[-1] - width
    cuts = (width, rest) if leading else (rest, width)
    values, errors = (list(part.split(cuts, -1)) for part in (value, error))
    at = 0 if leading else 1
    values[at], errors[at] = _rotated(BoundedValue(values[at], errors[at]), by, halves)
    return BoundedValue(torch.cat(values, -1), torch.cat(errors, -1))


def _rotated(x: BoundedValue, by: BoundedRotation, halves: bool) -> BoundedValue:
    if halves:
        pairs = [
            BoundedValue(*part) for part in zip(*(side.chunk(2, -1) for side in x), strict=True)
        ]
    else:
        pairs = [BoundedValue(x.value[..., i::2], x.error[..., i::2]) for i in (0, 1)]
    a, b = pairs
    first = _sum(_product(a, by.cos), _product(b, by.sin), -1)
    second = _sum(_product(a, by.sin), _product(b, by.cos), 1)
    if halves:
        return BoundedValue(*(torch.cat(sides, -1) for sides in zip(first, second, strict=True)))
    return BoundedValue(
        *(torch.stack(sides, -1).flatten(-2) for sides in zip(first, second, strict=True))
    )


def _product(a: BoundedValue, b: BoundedValue) -> BoundedValue:
    value = a.value * b.value
    return BoundedValue(value, a.error * b.value.abs() + a.value.abs() * b.error + U * value.abs())


def _sum(a: BoundedValue, b: BoundedValue, sign: int) -> BoundedValue:
    """Add two terms; fused or not, the sum is rounded once more."""
    value = a.value + sign * b.value
    return BoundedValue(value, a.error + b.error + U * value.abs())


def hadamard(x: BoundedValue) -> BoundedValue:
    """Apply the orthonormal transform: D additions, whose partial sums average half the total."""
    width = x.value.shape[-1]
    out, factor = elementary.hadamard(x.value), width**-0.5
    error = x.error.expand(x.value.shape).sum(-1, keepdim=True) * factor
    added = U * width / 2 * x.value.abs().sum(-1, keepdim=True) * factor
    return BoundedValue(out, error + added + 2 * U * out.abs())


def memories(
    spans: Sequence[Span], before: Tensor | None, made: Tensor, ratio: int
) -> list[Tensor]:
    """Return each sequence's rows, one for `ratio` tokens: of earlier calls, then of this one."""
    found, old, new = [], 0, 0
    for span in spans:
        kept, added = span.entries_before(ratio), span.entries_made(ratio)
        parts = [made[new : new + added]]
        if kept and before is not None:
            parts.insert(0, before[old : old + kept])
        found.append(torch.cat(parts))
        old, new = old + kept, new + added
    return found


# --------------------------------------------------------------------------------------------------
# Rounding to blocks of codes and back (a quantised KV cache).
#
# The reach of a value spans the least to the most that codes and scales allow. A code may be the
# neighbour only where the exact quotient lies within its slack of a rounding boundary. A scale may
# be one step away only where the block's largest magnitude lies within slack of the scale's own
# boundary; then the block's values are those of either scale. Quotients by powers of two are exact;
# others err by an approximate reciprocal (2 units: 4 u) and a product (u).

QUOTIENT = FUNCTION + 1  # of u: a reciprocal within 2 units, and a product


class Grid(NamedTuple):
    """One way to round blocks; `floor` applies to amax, or to the scale if `scale_floored`."""

    block: int
    largest: float
    floor: float
    element: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor], Tensor]
    exact_quotient: bool
    scale_floored: bool = False


def power_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below x (positive, float64)."""
    mantissa, exponent = torch.frexp(x)
    # frexp returns mantissas in [0.5, 1): 0.5 is an exact power of two.
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _kept(x: Tensor) -> Tensor:
    return x


def _e4m3(x: Tensor) -> Tensor:
    return rounding.round_e4m3(x).double()


def cache_grid(numerics: Numerics, block: int) -> Grid | None:
    """Return how a cache rounds its rows; None where it does not."""
    kind, floored = numerics.switches.kv_cache, numerics.switches.cache_scale_floored
    floor = rounding.FP8_FLOOR
    match kind:
        case KeyValueCache.FP8:
            return Grid(block, rounding.E4M3_LARGEST, floor, _e4m3, power_above, True, floored)
        case KeyValueCache.FP8_F32:
            return Grid(block, rounding.E4M3_LARGEST, floor, _e4m3, _kept, False)
        case KeyValueCache.NVFP4:
            # The floor of amax that gives the smallest scale.
            floor = rounding.E2M1_LARGEST * rounding.NVFP4_SCALE_FLOOR
            return Grid(16, rounding.E2M1_LARGEST, floor, rounding.round_e2m1, _e4m3, False)
    return None


def indexer_grid(numerics: Numerics, width: int) -> Grid | None:
    """Return how the indexer rounds its operands; None where it does not."""
    kind, floor = numerics.switches.indexer_format, rounding.FP4_AMAX_FLOOR
    if kind is IndexerFormat.EXACT:
        return None
    if kind is IndexerFormat.FP8:
        block = min(128, width)
        return Grid(
            block, rounding.E4M3_LARGEST, rounding.FP8_FLOOR, _e4m3, power_above, True
        )  # fmt: skip
    return Grid(32, rounding.E2M1_LARGEST, floor, rounding.round_e2m1, power_above, True)


def reach(x: BoundedValue, dtype: torch.dtype, grid: Grid) -> Tensor:
    """Return how far two correct kernels may be apart [..., D], rounded to `dtype`.

    It does not depend on the twin's outputs: for a damaged twin it is no wider.
    """
    shape = (*x.value.shape[:-1], x.value.shape[-1] // grid.block, grid.block)
    value, error = (part.expand(x.value.shape).reshape(shape) for part in x)
    low, high = value - error, value + error
    # Least and largest possible amax of each block.
    largest = torch.stack([(value.abs() + sign * error).amax(-1) for sign in (-1, 1)])
    off = QUOTIENT * U * torch.tensor([-1.0, 1.0], dtype=torch.float64)
    off = off.reshape(2, *[1] * (largest.ndim - 1))
    lowest, highest = torch.full_like(value, torch.inf), torch.full_like(value, -torch.inf)
    # Both ends of the scale's error; usually they round to the same scale.
    for scale in grid.scale(_raw_scales(largest, grid) * (1 + off)):
        wide = scale.unsqueeze(-1)
        slack = 0.0 if grid.exact_quotient else QUOTIENT * U
        below, above = low / wide, high / wide
        below, above = below - slack * below.abs(), above + slack * above.abs()
        met = [(grid.element(side) * wide).to(dtype).double() for side in (below, above)]
        lowest, highest = torch.minimum(lowest, met[0]), torch.maximum(highest, met[1])
    return (highest - lowest).reshape(x.value.shape)


def _raw_scales(largest: Tensor, grid: Grid) -> Tensor:
    if grid.scale_floored:
        return (largest / grid.largest).clamp(min=grid.floor)
    return largest.clamp(min=grid.floor) / grid.largest
