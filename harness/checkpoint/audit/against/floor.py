"""Compute the error floor of a format: reference values quantised ideally and dequantised again.

Each round trip follows the definition of its format: scale by the largest magnitude of a block,
round to nearest. The scale rule is the stored tensor's where it can be recognised: powers of two or
not; exponents of MXFP4 rounded up (DeepSeek) or down (OCP MX), whichever more stored scales agree
with; NVFP4's own tensor scale if the reference could have led to it. A wrong scale must not explain
the error that it causes.

Rows that are not finite have no round trip; the caller leaves them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.fast.nvfp4 import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    dequantise_nvfp4,
    largest_magnitude_or_nan,
    quantise_modelopt,
)
from degarble.harness.formats.number_formats import (
    E2M1,
    E4M3,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    NVFP4,
    ScaleDirection,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat
    from degarble.harness.formats.weight import Weight

_NVFP4_FULL = E2M1.largest * E4M3.largest
# A tensor scale that cuts off by no more than rounding, and leaves 2^14.8 / 2^10 to block scales.
_LEAST, _MOST = 0.99, 2.0**10
_WIDEST = 126  # exponents whose powers of two float32 has
_UE8M0_BIAS = 127
_LARGEST_POWER = 2  # 2^2 is the largest power of two in E2M1
# Formats that weights may have had on their way, and one after the other.
CHAINS = ((FP8_128X128_F32,), (NVFP4,), (MXFP4,), (MXFP4, NVFP4))


def ideal_like(weight: Weight, there: Tensor, rows: Tensor) -> Tensor:
    """Convert rows of the reference to a stored weight's format and back, in float32.

    `rows`: indices of the matching rows of the stored weight.
    """
    if weight.storage is None:
        assert weight.value is not None, "a weight without codes has values"
        return there.to(weight.value.dtype).float()
    fmt, scale = weight.storage.format, weight.block_scale
    if fmt == NVFP4:
        return _nvfp4(there, _decode_scale(weight))
    assert scale is not None, "a quantised weight has scales"
    if fmt.element == E2M1:
        return _mxfp4(there, fmt.block[1], scale[rows])
    in_powers = scale.dtype is torch.uint8 or bool((torch.frexp(scale).mantissa == 0.5).all())
    return _fp8(there, fmt, in_powers=in_powers)


def ideal_in(fmt: BlockFormat, there: Tensor) -> Tensor:
    """Convert rows of the reference to a format of CHAINS and back."""
    if fmt == NVFP4:
        return _nvfp4(there, None)
    if fmt == MXFP4:
        return _mxfp4(there, fmt.block[1], None)
    return _fp8(there, fmt, in_powers=fmt == FP8_128X128_UE8M0)


def fits(fmt: BlockFormat, width: int) -> bool:
    """Return whether rows of a width can be stored in a format."""
    return fmt.ragged or width % fmt.block[1] == 0


def _decode_scale(weight: Weight) -> float | None:
    scale = weight.tensor_scale
    if scale is None or scale.numel() != 1:
        return None
    assert weight.storage is not None, "only quantised weights have a tensor scale"
    value = float(scale)
    if weight.storage.direction is ScaleDirection.DECODE:
        return value
    return 1 / value if value else None


def _nvfp4(there: Tensor, scale: float | None) -> Tensor:
    # The tensor scale of the amax rule, the smallest that clips nothing.
    least = largest_magnitude_or_nan(there.contiguous()) / _NVFP4_FULL
    chosen = scale if scale is not None and _LEAST * least <= scale <= _MOST * least else least
    if not SMALLEST_SCALE <= chosen <= LARGEST_SCALE:
        return there.clone()  # zeros, or beyond what any trained weight is
    codes, scales = quantise_modelopt(there.contiguous(), chosen, threads=1)
    decode = torch.tensor(chosen, dtype=torch.float32)
    return dequantise_nvfp4(codes, scales, decode, torch.float32)


def _mxfp4(there: Tensor, block: int, stored: Tensor | None) -> Tensor:
    blocks = there.reshape(-1, block)
    amax = blocks.abs().amax(1, keepdim=True)
    # DeepSeek: the least power of two at which the largest value fits. OCP MX: the exponent of the
    # largest value less that of E2M1's largest power of two, which may clip.
    up = _exponent_up(amax / E2M1.largest)
    down = torch.frexp(amax).exponent - 1 - _LARGEST_POWER
    rounded_up = True
    if stored is not None:
        kept = stored.reshape(-1, 1).int() - _UE8M0_BIAS
        rounded_up = int((kept == up).sum()) >= int((kept == down).sum())
    exponent = (up if rounded_up else down).clamp(-_WIDEST, _WIDEST)
    made = torch.ldexp(_e2m1(torch.ldexp(blocks, -exponent)), exponent)
    return torch.where(amax > 0, made, torch.zeros_like(blocks)).reshape(there.shape)


def _exponent_up(scale: Tensor) -> Tensor:
    """Return the exponent of the smallest power of two that is at least a scale."""
    parts = torch.frexp(scale)
    return parts.exponent - (parts.mantissa == 0.5).int()


def _e2m1(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to even codes."""
    magnitude = values.abs().clamp(max=E2M1.largest)
    # Even multiples of the step are even codes, so rounding half to even is right.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, values)


def _fp8(there: Tensor, fmt: BlockFormat, *, in_powers: bool) -> Tensor:
    height, width = fmt.block
    rows, columns = there.shape
    filled = torch.nn.functional.pad(there, (0, -columns % width, 0, -rows % height))
    blocks = filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)
    scale = blocks.abs().amax((1, 3), keepdim=True) / E4M3.largest
    if in_powers:
        scale = torch.ldexp(torch.ones_like(scale), _exponent_up(scale).clamp(-_WIDEST, _WIDEST))
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # The quotient may round to just above the largest value.
    scaled = (blocks / scale).clamp(-E4M3.largest, E4M3.largest)
    decoded: Tensor = scaled.to(torch.float8_e4m3fn).float() * scale
    return decoded.reshape(filled.shape)[:rows, :columns].contiguous()
