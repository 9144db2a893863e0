"""Compute scales and scaled values by the rules of a quantisation dialect.

Every operation is one float32 operation on tensors that rounds to nearest even, in the order that
the rule spells out. harness.formats.quantise checks the arguments. Apart from dialects.py, which
audits import without torch.

Trap: torch computes number / tensor as reciprocal times number everywhere, and tensor / number as
tensor times reciprocal on CUDA; both round differently. So every constant here is a tensor.

Letters as in dialects.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.dialects import (
    BlockRule,
    BlockScaleRule,
    TensorScaleRule,
    ValueRule,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TensorScales:
    """The tensor scale in both directions: exactly as given or computed, and its reciprocal."""

    encode: Tensor
    decode: Tensor

    def for_blocks(self, blocks: int) -> TensorScales:
        """Return both with `blocks` trailing extents of 1, to broadcast over tensors of blocks."""
        shape = (*self.encode.shape, *(1,) * blocks)
        return TensorScales(self.encode.reshape(shape), self.decode.reshape(shape))


def _full_scale(fmt: BlockFormat, like: Tensor) -> Tensor:
    """Return Q q, the largest block scale times the largest element: 2688 for NVFP4."""
    return torch.full_like(like, fmt.scale.largest * fmt.element.largest)


def _encode_plain(largest: Tensor, fmt: BlockFormat, _dtype: torch.dtype) -> TensorScales:
    encode = _full_scale(fmt, largest) / largest
    return TensorScales(encode=encode, decode=encode.reciprocal())


def _encode_capped(largest: Tensor, fmt: BlockFormat, dtype: torch.dtype) -> TensorScales:
    encode = _encode_plain(largest, fmt, dtype).encode
    encode = torch.fmin(encode, torch.full_like(encode, _FLOAT32_MAX))
    unusable = (largest == 0) | (encode == 0)  # encode is 0 where the amax is infinite
    encode = torch.where(unusable, torch.ones_like(encode), encode)
    return TensorScales(encode=encode, decode=encode.reciprocal())


def _encode_in_input_dtype(largest: Tensor, fmt: BlockFormat, dtype: torch.dtype) -> TensorScales:
    narrow = largest.to(dtype).clamp(min=torch.finfo(dtype).tiny)
    # Two roundings on purpose: the producer writes number / tensor.
    encode = narrow.reciprocal() * (fmt.scale.largest * fmt.element.largest)
    encode = encode.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).float()
    return TensorScales(encode=encode, decode=encode.reciprocal())


def _decode(largest: Tensor, fmt: BlockFormat, _dtype: torch.dtype) -> TensorScales:
    decode = largest / _full_scale(fmt, largest)
    return TensorScales(encode=decode.reciprocal(), decode=decode)


def _unit(largest: Tensor, _fmt: BlockFormat, _dtype: torch.dtype) -> TensorScales:
    one = torch.ones_like(largest)
    return TensorScales(encode=one, decode=one)


TENSOR_SCALE: Mapping[
    TensorScaleRule, Callable[[Tensor, BlockFormat, torch.dtype], TensorScales]
] = {
    TensorScaleRule.ENCODE_CAPPED: _encode_capped,
    TensorScaleRule.ENCODE_PLAIN: _encode_plain,
    TensorScaleRule.ENCODE_IN_INPUT_DTYPE: _encode_in_input_dtype,
    TensorScaleRule.DECODE: _decode,
    TensorScaleRule.UNIT: _unit,
    TensorScaleRule.ABSENT: _unit,
}


# The block scale before rounding


def _largest_element(like: Tensor, fmt: BlockFormat) -> Tensor:
    return torch.full_like(like, fmt.element.largest)


def _amax_times_encode_share(
    amax: Tensor, scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return amax * (scales.encode * _largest_element(scales.encode, rule.format).reciprocal())


def _encode_times_amax_share(
    amax: Tensor, scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return scales.encode * (amax * _largest_element(amax, rule.format).reciprocal())


def _amax_over_decode_share(
    amax: Tensor, scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return amax / (scales.decode * _largest_element(scales.decode, rule.format))


def _quotient_times_encode(
    amax: Tensor, scales: TensorScales, rule: BlockRule, dtype: torch.dtype
) -> Tensor:
    narrow = amax.to(dtype)
    return scales.encode * (narrow / _largest_element(narrow, rule.format)).float()


def _quotient_over_decode(
    amax: Tensor, scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return (amax / _largest_element(amax, rule.format)) / scales.decode


def _amax_share(
    amax: Tensor, _scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return amax.clamp(min=rule.amax_floor) * _largest_element(amax, rule.format).reciprocal()


def _amax_over_largest(
    amax: Tensor, _scales: TensorScales, rule: BlockRule, _dtype: torch.dtype
) -> Tensor:
    return amax / _largest_element(amax, rule.format)


BLOCK_SCALE: Mapping[
    BlockScaleRule, Callable[[Tensor, TensorScales, BlockRule, torch.dtype], Tensor]
] = {
    BlockScaleRule.AMAX_TIMES_ENCODE_SHARE: _amax_times_encode_share,
    BlockScaleRule.ENCODE_TIMES_AMAX_SHARE: _encode_times_amax_share,
    BlockScaleRule.AMAX_OVER_DECODE_SHARE: _amax_over_decode_share,
    BlockScaleRule.QUOTIENT_TIMES_ENCODE: _quotient_times_encode,
    BlockScaleRule.QUOTIENT_OVER_DECODE: _quotient_over_decode,
    BlockScaleRule.AMAX_SHARE: _amax_share,
    BlockScaleRule.AMAX_OVER_LARGEST: _amax_over_largest,
}


# The scaled value


def _times_capped_reciprocal(x: Tensor, scale: Tensor, scales: TensorScales) -> Tensor:
    factor = (scale * scales.encode.reciprocal()).reciprocal()
    return x * torch.fmin(factor, torch.full_like(factor, _FLOAT32_MAX))


def _times_reciprocal(x: Tensor, scale: Tensor, scales: TensorScales) -> Tensor:
    return x * (scale * scales.encode.reciprocal()).reciprocal()


def _times_quotient(x: Tensor, scale: Tensor, scales: TensorScales) -> Tensor:
    return x * (scales.decode.reciprocal() / scale)


def _over_product(x: Tensor, scale: Tensor, scales: TensorScales) -> Tensor:
    return x / (scale * scales.decode)


def _over_quotient(x: Tensor, scale: Tensor, scales: TensorScales) -> Tensor:
    return x / (scale / scales.encode)


def _over_block(x: Tensor, scale: Tensor, _scales: TensorScales) -> Tensor:
    return x / scale


VALUE: Mapping[ValueRule, Callable[[Tensor, Tensor, TensorScales], Tensor]] = {
    ValueRule.TIMES_CAPPED_RECIPROCAL: _times_capped_reciprocal,
    ValueRule.TIMES_RECIPROCAL: _times_reciprocal,
    ValueRule.TIMES_QUOTIENT: _times_quotient,
    ValueRule.OVER_PRODUCT: _over_product,
    ValueRule.OVER_QUOTIENT: _over_quotient,
    ValueRule.OVER_BLOCK: _over_block,
}
