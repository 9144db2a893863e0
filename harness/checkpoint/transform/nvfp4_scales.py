"""Choose the scales of NVFP4: by a rule with a measured error, or exactly from MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.fast.nvfp4 import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleSearch,
    measure_error,
    quantise_modelopt,
    search_modelopt,
)
from degarble.harness.formats.number_formats import E4M3, UE8M0

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Scale rules, and the error above their floor.
#
# With A the largest magnitude of the tensor, the rules are:
#   amax           tensor scale A / (6 * 448); a block's largest magnitude becomes 6. ModelOpt's
#                  default, bit for bit.
#   mse            the same tensor scale; of the 17 block scales from 8 codes below to 8 above (an
#                  octave each way) the one with the least squared error.
#   four-over-six  tensor scale A / (6 * 256); a block's largest magnitude becomes 6 or 4, whichever
#                  has the smaller squared error, 6 if equal. ModelOpt's rule for the scales.
#
# The floor is the error of the `mse` search with the same tensor scale, measured on every 32nd row.
# Error over floor is 1 at best; a healthy amax quantisation of weights has about 1.17. Values that
# are not finite raise an error.

# Every 32nd row is sampled for the floor.
FLOOR_ROWS = 32
# Moves of the E4M3 code: with 3 mantissa bits, 8 codes are an octave.
_OCTAVE = tuple(move for step in range(1, 9) for move in (-step, step))
_SEARCHES = {
    "mse": ScaleSearch((6.0,), (0, *_OCTAVE)),
    "four-over-six": ScaleSearch((6.0, 4.0)),
}


class ScaleRule(StrEnum):
    """The rule that chooses block scales; values are those of the command line."""

    AMAX = "amax"
    MSE = "mse"
    FOUR_OVER_SIX = "four-over-six"

    @property
    def full_scale(self) -> float:
        """The divisor of a tensor's largest magnitude."""
        # If a block's largest becomes 4, its scale grows by 6 / 4: 256 * 1.5 = 384 is within 448.
        return 6.0 * (256.0 if self is ScaleRule.FOUR_OVER_SIX else 448.0)


def tensor_scale(amax: float, rule: ScaleRule) -> float:
    """Return the decode scale of a tensor; 1 for zeros, whose blocks all have scale 1."""
    if amax == 0.0:
        return 1.0
    scale = float(np.float32(amax) / np.float32(rule.full_scale))
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise InvalidArgument(
            "largest magnitude of a weight",
            amax,
            "one whose tensor scale is within 2^-100 to 2^100",
            "No trained weight is as small or as large: audit the source.",
        )
    return scale


class NVFP4Rows(NamedTuple):
    """Quantised rows: packed codes and E4M3 bytes."""

    codes: Tensor
    block_scale: Tensor


def quantise_rows(values: Tensor, scale: float, rule: ScaleRule) -> NVFP4Rows:
    """Quantise rows [M, K] of float32 or bfloat16 by a rule; one thread."""
    if rule is ScaleRule.AMAX:
        return NVFP4Rows(*quantise_modelopt(values, scale, threads=1))
    return NVFP4Rows(*search_modelopt(values, scale, _SEARCHES[rule], threads=1))


@dataclass
class Errors:
    """Squared errors, added up row block by row block in a fixed order."""

    energy: float = 0.0
    error: float = 0.0
    sampled: float = 0.0
    floor: float = 0.0

    def add(self, first_row: int, values: Tensor, nvfp4_rows: NVFP4Rows, scale: float) -> None:
        """Compare decoded rows, as they will be stored, with the values they were made from."""
        error = measure_error(values, *nvfp4_rows, scale)
        self.energy += error.energy
        self.error += error.error
        start = -first_row % FLOOR_ROWS
        sample = values[start::FLOOR_ROWS].contiguous()
        if sample.numel():
            codes, block_scale = (tensor[start::FLOOR_ROWS].contiguous() for tensor in nvfp4_rows)
            self.sampled += measure_error(sample, codes, block_scale, scale).error
            best = quantise_rows(sample, scale, ScaleRule.MSE)
            self.floor += measure_error(sample, *best, scale).error

    @property
    def relative(self) -> float:
        """Relative error in the 2-norm; 0 for zeros."""
        return (self.error / self.energy) ** 0.5 if self.energy else 0.0

    @property
    def over_floor(self) -> float | None:
        """Error over the floor, both of the sampled rows; None where the floor is 0."""
        return (self.sampled / self.floor) ** 0.5 if self.floor else None


# --------------------------------------------------------------------------------------------------
# MXFP4 to NVFP4 without loss: keep the codes, move one exponent from the blocks to the tensor.
#
# An MXFP4 block of 32 has the scale 2^k. Let k_max be the largest k of all blocks that hold a
# nonzero value. The tensor scale is 2^(k_max - 8), and both halves of a block get 2^(k - k_max +
# 8). E4M3 holds 2^-9 to 2^8 exactly, so the result is exact where k_max - k <= 17. Blocks of zeros
# always fit. Partners that share a tensor scale are judged together. The NaN scale (code 255)
# raises an error.
#
# `is_lossless` compares decoded values in float64, bit for bit, without relying on this rule.

WIDEST = 17  # from 2^8 down to 2^-9, E4M3's smallest subnormal
# 2^8 is the largest power of two that E4M3 holds.
_TOP = 8
_BIAS = UE8M0.bias
_NAN = 0xFF
_HALVES = 2  # NVFP4 blocks in one MXFP4 block


class Exponents(NamedTuple):
    """The smallest and largest exponent among blocks that hold a nonzero value."""

    low: int
    high: int


def exponents_of(codes: Tensor, block_scale: Tensor) -> Exponents | None:
    """Return the exponents of packed codes [..., K/2] with UE8M0 bytes [..., K/32]."""
    scales = block_scale.view(torch.uint8)
    if bool(scales.eq(_NAN).any()):
        where = scales.eq(_NAN).nonzero()[0].tolist()
        raise InvalidArgument(
            f"block scale {where}", "NaN (code 255)", "a power of two", "The source is damaged."
        )
    packed = codes.view(torch.uint8).reshape(*scales.shape, -1)
    # Eight codes at once; a sign alone is still a zero.
    words = packed.contiguous().view(torch.int64)
    holds = ((words & 0x7777777777777777) != 0).any(-1)
    if not bool(holds.any()):
        return None
    held = scales[holds]
    return Exponents(int(held.min()) - _BIAS, int(held.max()) - _BIAS)


def join_exponents(parts: list[Exponents | None]) -> Exponents | None:
    """Return the exponents of several matrices that share a tensor scale."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return Exponents(
        min(exponents.low for exponents in found), max(exponents.high for exponents in found)
    )


def is_exact(exponents: Exponents | None) -> bool:
    """Return whether NVFP4 holds them exactly; its tensor scale must be at least 2^-149."""
    if exponents is None:
        return True
    return exponents.high - exponents.low <= WIDEST and exponents.high - _TOP >= -149


def tensor_scale_of(exponents: Exponents | None) -> float:
    """Return the decode scale of the tensor; 1 where no block holds a value."""
    return 1.0 if exponents is None else 2.0 ** (exponents.high - _TOP)


def block_scales_of(block_scale: Tensor, exponents: Exponents | None) -> Tensor:
    """Convert UE8M0 bytes [..., K/32] to E4M3 bytes [..., K/16]."""
    high = 0 if exponents is None else exponents.high
    moved = block_scale.view(torch.uint8).int() - _BIAS - high + _TOP
    # Only blocks of zeros are clamped (see `fits`); they stay zero under any scale.
    powers = decode_array((moved.clamp(_TOP - WIDEST, _TOP) + _BIAS).byte(), UE8M0)
    return encode_array(powers, E4M3).repeat_interleave(_HALVES, dim=-1)


def is_lossless(
    codes: Tensor, source_scale: Tensor, block_scale: Tensor, tensor_scale: float
) -> bool:
    """Return whether every decoded value is equal on both sides; the codes are shared."""
    expected = decode_array(source_scale.view(torch.uint8), UE8M0).double()
    packed = codes.view(torch.uint8).reshape(*expected.shape, _HALVES, -1).contiguous()
    holds = ((packed.view(torch.int64) & 0x7777777777777777) != 0).any(-1)
    found = decode_array(block_scale, E4M3).double() * tensor_scale
    same = found.reshape(*expected.shape, _HALVES) == expected[..., None]
    # Blocks of zeros may have any scale.
    return bool((same | ~holds).all())
