"""M05: the bytes of a number are read as another number format.

Producer and consumer follow different switches: E4M3 bytes read as exponents, exponent bytes as
numbers, float32 bits as four exponents, float32 as BF16 (mlx issue 3762, DeepGEMM issue 417,
flashinfer issue 3497, atlas issue 341). The shapes fit, so nothing fails.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_float_scales,
    has_scale_bytes,
    has_tensor_scale,
    of_scales,
    weight_fault,
    with_tensor_scale,
)
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import E4M3, UE8M0
from degarble.harness.formats.weight import Weight
from degarble.harness.model.types import Dtype

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Scene
    from degarble.harness.engine.faults.weight_faults import Kept
    from degarble.harness.formats.quantise import QuantisedTensor

_REMEDY = "Tag scales with their format, and assert it where they are read."


def _as_exponents(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    if tensor.format.scale != E4M3:
        return None
    return decode_array(tensor.linear_scale_codes(), UE8M0)


def _as_e4m3(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    if tensor.format.scale != UE8M0:
        return None
    return decode_array(tensor.linear_scale_codes(), E4M3)


def _as_numbers(tensor: QuantisedTensor, _scales: Tensor) -> Tensor | None:
    return tensor.linear_scale_codes().float() if tensor.format.scale.bits == 8 else None


def _bits_as_exponents(tensor: QuantisedTensor, scales: Tensor) -> Tensor | None:
    """Read the bytes of a row's first float32 words as exponents, one a byte."""
    if tensor.format.scale.bits != 32:
        return None
    octets = scales.contiguous().view(torch.uint8)[..., : scales.shape[-1]]
    exponents = decode_array(octets.contiguous(), UE8M0)
    return torch.where(octets == 0xFF, math.inf, exponents)  # a reader's 2^128


def _half_as_bf16(scale: Tensor) -> Tensor:
    """Read the low half of a float32 as BF16; in little-endian order it comes first."""
    return scale.reshape(-1, 1).view(torch.bfloat16)[:, 0].float()


def _pair_as_float(scale: Tensor) -> Tensor:
    """Read two copies of one BF16 value as one float32."""
    twice = scale.to(torch.bfloat16).reshape(-1, 1).expand(-1, 2).contiguous()
    return twice.view(torch.float32)[:, 0]


def _vector_as_bf16(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    if weight.value is None or weight.value.ndim != 1:
        return None
    value = weight.value.float().contiguous().view(torch.bfloat16)[: len(weight.value)]
    return Weight(value=value.to(weight.value.dtype))


def _is_float_vector(kept: Kept) -> bool:
    return kept.form is None and kept.stored is Dtype.F32 and len(kept.shape) == 1


_EACH = "every block is wrong by a factor of its own, of many orders"
MODEL_FAULTS = (
    weight_fault(
        Words(
            "M05.e4m3_as_exponent", "E4M3 block scales are read as exponents", _EACH, _REMEDY,
            "reading E4M3 scale bytes as exponents on",
        ),
        of_scales(_as_exponents),
        lambda kept: has_scale_bytes(kept) and has_tensor_scale(kept),
    ),
    weight_fault(
        Words(
            "M05.exponent_as_e4m3", "Exponent bytes are read as E4M3 numbers", _EACH, _REMEDY,
            "reading exponent bytes as E4M3 on",
        ),
        of_scales(_as_e4m3),
        lambda kept: has_scale_bytes(kept) and not has_tensor_scale(kept),
    ),
    weight_fault(
        Words(
            "M05.byte_as_number", "The byte of a scale is taken for its value", _EACH, _REMEDY,
            "scale bytes taken for numbers on",
        ),
        of_scales(_as_numbers),
        has_scale_bytes,
    ),
    weight_fault(
        Words(
            "M05.float_as_exponents", "The bits of float32 scales are read as packed exponents",
            _EACH, _REMEDY, "reading the bits of float32 scales as exponents on",
        ),
        of_scales(_bits_as_exponents),
        has_float_scales,
    ),
    weight_fault(
        Words(
            "M05.float_as_bf16", "A float32 tensor scale is read as BF16",
            "all values are wrong by one factor, of many orders", _REMEDY,
            "reading the float32 tensor scale as BF16 on",
        ),
        with_tensor_scale(_half_as_bf16),
        has_tensor_scale,
    ),
    weight_fault(
        Words(
            "M05.bf16_pair_as_float", "Two BF16 tensor scales are read as one float32",
            "all values are wrong by one factor, near 1 where the neighbour is the same", _REMEDY,
            "reading a pair of BF16 tensor scales as one float32 on",
        ),
        with_tensor_scale(_pair_as_float),
        has_tensor_scale,
    ),
    weight_fault(
        Words(
            "M05.vector_as_bf16", "A float32 vector is read as BF16",
            "every second number is noise, the others are those of half their index",
            "Compare the dtype of the parameter with the one that the kernel indexes by.",
            "reading the float32 vector as BF16 on",
        ),
        _vector_as_bf16,
        _is_float_vector,
    ),
)  # fmt: skip
