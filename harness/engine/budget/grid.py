"""Error budgets of values that were rounded to blocks of codes and back (a quantised KV cache).

The reach of a value spans the least to the most that codes and scales allow. A code may be the
neighbour only where the exact quotient lies within its slack of a rounding boundary. A scale may be
one step away only where the block's largest magnitude lies within slack of the scale's own
boundary; then the block's values are those of either scale. Quotients by powers of two are exact;
others err by an approximate reciprocal (2 units: 4 u) and a product (u).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.budget.bounded_values import FUNCTION, Near
from degarble.harness.engine.budget.rules import U
from degarble.references import rounding
from degarble.references.numerics import IndexerFormat, KeyValueCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.references.numerics import Numerics

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


def reach(x: Near, dtype: torch.dtype, grid: Grid) -> Tensor:
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
