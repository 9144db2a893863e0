"""MXFP4 to NVFP4 without loss: keep the codes, move one exponent from the blocks to the tensor.

An MXFP4 block of 32 has the scale 2^k. Let k_max be the largest k of all blocks that hold a nonzero
value. The tensor scale is 2^(k_max - 8), and both halves of a block get 2^(k - k_max + 8). E4M3
holds 2^-9 to 2^8 exactly, so the result is exact where k_max - k <= 17. Blocks of zeros always fit.
Partners that share a tensor scale are judged together. The NaN scale (code 255) raises an error.

`proven` compares decoded values in float64, bit for bit, without relying on this rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.arrays import decode_array, encode_array
from degarble.harness.formats.element_formats import E4M3, UE8M0

if TYPE_CHECKING:
    from torch import Tensor

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


def joined(parts: list[Exponents | None]) -> Exponents | None:
    """Return the exponents of several matrices that share a tensor scale."""
    found = [each for each in parts if each is not None]
    if not found:
        return None
    return Exponents(min(each.low for each in found), max(each.high for each in found))


def fits(exponents: Exponents | None) -> bool:
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


def proven(codes: Tensor, source_scale: Tensor, block_scale: Tensor, tensor_scale: float) -> bool:
    """Return whether every decoded value is equal on both sides; the codes are shared."""
    expected = decode_array(source_scale.view(torch.uint8), UE8M0).double()
    packed = codes.view(torch.uint8).reshape(*expected.shape, _HALVES, -1).contiguous()
    holds = ((packed.view(torch.int64) & 0x7777777777777777) != 0).any(-1)
    found = decode_array(block_scale, E4M3).double() * tensor_scale
    same = found.reshape(*expected.shape, _HALVES) == expected[..., None]
    # Blocks of zeros may have any scale.
    return bool((same | ~holds).all())
