"""Quantise and decode cache rows and the indexer's operands, as the official kernels do.

Legend: the last axis is cut into blocks; a value becomes scale * nearest representable code.
UE8M0 scales are rounded up by the bits of amax * (1 / largest), a float32 product, so exact powers
of two stay. Everything computes in float32 and returns float32. Rows must be whole blocks.
Written without harness.formats, which it equals for every code.
Sources: DeepSeek-V4 inference/kernel.py (act_quant, fp4_act_quant); FlashMLA tests/quant.py for the
floor of the scale; flashinfer experimental/deepseek_v41/cache.py for NVFP4 rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.references.numerics import IndexerFormat, KeyValueCache

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.references.numerics import Numerics

E2M1_LARGEST = 6.0
E4M3_LARGEST = 448.0
FP8_FLOOR = 1e-4  # of amax in the official kernels, of the scale in FlashMLA's test helper
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
NVFP4_SCALE_FLOOR = 2.0**-9  # smallest positive E4M3


def round_e2m1(x: Tensor) -> Tensor:
    """Return the nearest E2M1 value, ties to even, saturating at 6."""
    magnitude = x.abs().clamp(max=E2M1_LARGEST)
    # The spacing is 1/2 below 2, 1 below 4 and 2 above; torch.round takes ties to even.
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


def round_e4m3(x: Tensor) -> Tensor:
    """Return the nearest E4M3 value, ties to even, saturating at 448."""
    clamped = x.clamp(-E4M3_LARGEST, E4M3_LARGEST)
    return clamped.to(torch.float8_e4m3fn).to(torch.float32)


def power_of_two_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not below x (positive, normal float32)."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF).ne(0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def _blocks(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the blocks [..., n, block] in float32 and each one's largest magnitude [..., n, 1]."""
    count, rest = divmod(x.shape[-1], block)
    if rest:
        raise ShapeMismatch(
            "last extent", x.shape[-1], f"a multiple of the {block}-wide blocks",
            "Choose another cache or indexer format for this geometry.",
        )  # fmt: skip
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], count, block)
    return blocks, blocks.abs().amax(-1, keepdim=True)


def through_fp8(x: Tensor, block: int, *, scale_floored: bool = False) -> Tensor:
    """Round to E4M3 with one UE8M0 scale per block: latent rows (64 or 128), the indexer (128)."""
    blocks, amax = _blocks(x, block)
    if scale_floored:
        scale = power_of_two_above((amax * (1.0 / E4M3_LARGEST)).clamp(min=FP8_FLOOR))
    else:
        scale = power_of_two_above(amax.clamp(min=FP8_FLOOR) * (1.0 / E4M3_LARGEST))
    return (round_e4m3(blocks / scale) * scale).flatten(-2)


def through_fp8_f32(x: Tensor, block: int) -> Tensor:
    """Round to E4M3 with one float32 scale per block: the 656-byte rows of V3.2."""
    blocks, amax = _blocks(x, block)
    scale = amax.clamp(min=FP8_FLOOR) / E4M3_LARGEST
    return (round_e4m3(blocks / scale) * scale).flatten(-2)


def through_mxfp4(x: Tensor, block: int = 32) -> Tensor:
    """Round to E2M1 with one UE8M0 scale per block: the indexer's queries and keys."""
    blocks, amax = _blocks(x, block)
    scale = power_of_two_above(amax.clamp(min=FP4_AMAX_FLOOR) * (1.0 / E2M1_LARGEST))
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def through_nvfp4_row(x: Tensor, block: int = 16) -> Tensor:
    """Round to E2M1 with one E4M3 scale per block and no tensor scale: the NVFP4 cache rows."""
    blocks, amax = _blocks(x, block)
    scale = round_e4m3(amax.clamp(min=E2M1_LARGEST * NVFP4_SCALE_FLOOR) / E2M1_LARGEST)
    return (round_e2m1(blocks / scale) * scale).flatten(-2)


def through_cache(x: Tensor, block: int, numerics: Numerics) -> Tensor:
    """Return latents as they are read back; `block` is the family's FP8 block."""
    kind = numerics.switches.kv_cache
    if numerics.exact or kind is KeyValueCache.EXACT:
        return x
    floored = numerics.switches.cache_scale_floored
    if kind is KeyValueCache.FP8:
        return through_fp8(x, block, scale_floored=floored).to(x.dtype)
    if kind is KeyValueCache.FP8_F32:
        return through_fp8_f32(x, block).to(x.dtype)
    return through_nvfp4_row(x).to(x.dtype)


def through_indexer(x: Tensor, numerics: Numerics) -> Tensor:
    """Return the indexer's queries or keys as its kernel multiplies them."""
    kind = numerics.switches.indexer_format
    if numerics.exact or kind is IndexerFormat.EXACT:
        return x
    if kind is IndexerFormat.FP8:
        return through_fp8(x, min(128, x.shape[-1])).to(x.dtype)
    return through_mxfp4(x).to(x.dtype)
