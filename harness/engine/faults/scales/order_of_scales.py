"""O02: block and tensor scale are multiplied with each other first, and that product is rounded.

Suspected in the first field report: the product of both scales, stored as FP16, BF16 or E4M3,
replaces code * block scale * tensor scale. In FP16 small products are subnormal, in E4M3 most of
them vanish; in BF16 the effect stays below one part in 256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.formats.quantise import QuantisedTensor


def _through_e4m3(product: Tensor) -> Tensor:
    return decode_array(encode_array(product.float(), E4M3), E4M3).double()


def _fault(variant: str, form: str, rounding: Callable[[Tensor], Tensor]) -> ModelFault:
    def product(tensor: QuantisedTensor, scales: Tensor) -> Tensor:
        factor = tensor.decode_scale.double().reshape(*tensor.decode_scale.shape, 1, 1)
        return rounding(scales.double() * factor).double() / factor

    words = Words(
        f"O02.{variant}",
        f"The product of block and tensor scale is rounded to {form}",
        "blocks are wrong by a factor of their own; small ones vanish",
        "Multiply code by block scale, sum, and apply the tensor scale in float32 at the end.",
        f"products of both scales in {form} on",
    )
    return weight_fault(words, of_scales(product), has_tensor_scale)


MODEL_FAULTS = (
    _fault("product_in_fp16", "FP16", lambda product: product.to(torch.float16)),
    _fault("product_in_bf16", "BF16", lambda product: product.to(torch.bfloat16)),
    _fault("product_in_e4m3", "E4M3", _through_e4m3),
)
