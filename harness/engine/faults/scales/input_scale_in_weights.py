"""O10: the activation's input scale is multiplied into the weights.

Found in the first field report: `input_scale` was multiplied into the weight, which became about
5000 times too small. Variants replace the tensor scale by it, or divide by it. Applies where the
checkpoint has an input scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.faults.decoding import numbers_of
from degarble.harness.engine.faults.weight_faults import Words, has_tensor_scale, weight_fault
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ModelFault, Scene

    Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def _fault(variant: str, title: str, doing: str, mix: Mix) -> ModelFault:
    def change(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
        if weight.input_scale is None or weight.tensor_scale is None:
            return None
        own = weight.quantised().decode_scale.double()
        value = mix(numbers_of(weight), weight.input_scale.double(), own)
        return Weight(value=value, input_scale=weight.input_scale)

    words = Words(
        f"O10.{variant}",
        title,
        "all values are wrong by one factor, of three to four orders",
        "The input scale belongs to activations: into alpha, never into the weight.",
        doing,
    )
    return weight_fault(words, change, has_tensor_scale)


MODEL_FAULTS = (
    _fault(
        "multiplied",
        "The input scale is multiplied into the weight",
        "the input scale multiplied into",
        lambda values, scale, _own: values * scale,
    ),
    _fault(
        "divided",
        "The weight is divided by the input scale",
        "the input scale divided out of",
        lambda values, scale, _own: values / scale,
    ),
    _fault(
        "exchanged",
        "The input scale stands in the place of the tensor scale",
        "the input scale in place of the tensor scale of",
        lambda values, scale, own: values / own * scale,
    ),
)
