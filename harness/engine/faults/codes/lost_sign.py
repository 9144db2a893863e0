"""O01: the sign of 4-bit codes is lost or misread.

Suspected in the first field report: magnitudes without sign, negative numbers clipped to zero, the
sign of one nibble in two lost, nibbles read as 4-bit integers in two's complement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults.decoding import elements, scale_numbers, with_scales
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_codes,
    is_packed,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene
    from degarble.harness.engine.faults.weight_faults import Change, Needs
    from degarble.harness.formats.quantise import QuantisedTensor


def of_elements(change: Callable[[QuantisedTensor, Tensor], Tensor]) -> Change:
    """Lift a change of decoded elements; scales stay."""

    def changed(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if not weight.is_quantised:
            return None
        tensor = weight.quantised()
        element = change(tensor, elements(tensor))
        value = with_scales(tensor, scale_numbers(tensor), element)
        return Weight(value=value, input_scale=weight.input_scale)

    return changed


def _one_nibble(_tensor: QuantisedTensor, element: Tensor) -> Tensor:
    made = element.clone()
    made[..., 0::2] = made[..., 0::2].abs()
    return made


def _twos_complement(tensor: QuantisedTensor, element: Tensor) -> Tensor:
    """Read code 8 + m as m - 8 instead of minus the m-th magnitude."""
    codes = tensor.element_codes()
    below = 8 - (codes % 8).to(torch.uint8)
    magnitude = decode_array(below.clamp(max=7), tensor.format.element)
    return torch.where(codes >= 8, -magnitude, element)


def _fault(variant: str, title: str, doing: str, change: Change, needs: Needs) -> ModelFault:
    words = Words(
        f"O01.{variant}",
        title,
        "half of the values are wrong: text is garbled, nothing is NaN",
        "Take the sign from the top bit of each code; prove the decoder over all of them.",
        doing,
    )
    return weight_fault(words, change, needs)


MODEL_FAULTS = (
    _fault(
        "magnitudes", "Codes are decoded without their sign", "magnitudes alone on",
        of_elements(lambda _tensor, element: element.abs()), has_codes,
    ),
    _fault(
        "negative_lost", "Negative values become zero", "negative values cut to zero on",
        of_elements(lambda _tensor, element: element.clamp(min=0)), has_codes,
    ),
    _fault(
        "one_nibble", "The low nibble of every byte loses its sign",
        "low nibbles without sign on", of_elements(_one_nibble), is_packed,
    ),
    _fault(
        "twos_complement", "Nibbles are taken for integers in two's complement",
        "negative codes in two's complement on", of_elements(_twos_complement), is_packed,
    ),
)  # fmt: skip
