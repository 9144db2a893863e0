"""M01: the tensor scale is used in the wrong direction, 1/s instead of s.

One producer stores the scale that decodes, another the scale that encodes; reading one as the other
is off by its square (modular issue 6600, vllm issue 55643). The proportions stay, so a cosine stays
perfect while the magnitude is wrong by up to ten orders.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.family import Fault, Part
from degarble.harness.engine.faults.gain import gain_match
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    of_fault,
    of_scales,
    weight_fault,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.family import Case, Match
    from degarble.harness.engine.faults.model_faults import Scene
    from degarble.harness.formats.quantise import QuantisedTensor


def inject(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Store the reciprocal; the label stays as it was."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.reciprocal())


def signature(case: Case) -> Match | None:
    """Compare the stored scale with the reciprocal of the twin's."""
    return gain_match(case, inject(case.twin), "1 / s")


FAULTS = (
    Fault(
        id="M01.inverse",
        title="The tensor scale is used in the wrong direction, 1/s instead of s",
        effect="all values are wrong by one factor, s squared: saturation, or silence",
        remedy="Store the scale that multiplies codes, or declare the direction as encode.",
        part=Part.TENSOR_SCALE,
        inject=inject,
        signature=signature,
    ),
)


def _made_with_reciprocal(
    scene: Scene, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return operands.requantised(scene, inputs, outputs, outputs["tensor_scale"].reciprocal())


def _read_with_reciprocal(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": inputs["tensor_scale"].reciprocal()}


MODEL_FAULTS = (
    of_fault(FAULTS[0], "the reciprocal of the tensor scale on", has_tensor_scale),
    weight_fault(
        Words(
            "M01.block_inverse",
            "The block scales are used in the wrong direction, 1/s instead of s",
            "every block is wrong by a factor of its own, s squared",
            "Multiply codes by the stored block scale; a name that ends in inv is no divisor.",
            "the reciprocal of the block scales on",
        ),
        of_scales(lambda _tensor, scales: scales.reciprocal()),
    ),
    operands.making_fault(
        Words(
            "M01.activation_encoded",
            "Activations are quantised with s where 1/s is meant",
            "codes saturate, or all become zero, while the stored scale is right",
            "Hand the producer the encode scale, and the consumer its reciprocal.",
            "quantising with the reciprocal of the input scale at",
        ),
        _made_with_reciprocal,
        operands.has_tensor_scale,
    ),
    operands.reading_fault(
        Words(
            "M01.activation_alpha",
            "The input scale enters alpha in the wrong direction, 1/s instead of s",
            "outputs are wrong by one factor, s squared",
            "Multiply the product by the scale that decodes the activations.",
            "the reciprocal of the input scale in the product of",
        ),
        _read_with_reciprocal,
        operands.has_tensor_scale,
    ),
)
