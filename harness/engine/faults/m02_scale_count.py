"""M02: the tensor scale is left out, or applied twice.

Two places each think that the other one multiplies, or does not (vllm issue 52405). As in M01 the
proportions stay, and a cosine sees nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.decoding import scale_numbers, with_scales
from degarble.harness.engine.faults.family import Fault, Part
from degarble.harness.engine.faults.gain import gain_match
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    of_fault,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.family import Case, Match
    from degarble.harness.engine.faults.model_faults import Scene
    from degarble.harness.formats.quantised import QuantisedTensor


def inject_missing(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Put 1 in the place of the scale."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.new_ones(tensor.tensor_scale.shape))


def inject_applied_twice(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Put the square in the place of the scale."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale * tensor.tensor_scale)


def signature_missing(case: Case) -> Match | None:
    """Compare the stored scale with 1."""
    return gain_match(case, inject_missing(case.twin), "1")


def signature_applied_twice(case: Case) -> Match | None:
    """Compare the stored scale with the square of the twin's."""
    return gain_match(case, inject_applied_twice(case.twin), "s * s")


FAULTS = (
    Fault(
        id="M02.missing",
        title="The tensor scale is left out",
        effect="all values are wrong by one factor, 1/s",
        remedy="Multiply by the tensor scale once: in the epilogue, or folded into alpha.",
        part=Part.TENSOR_SCALE,
        inject=inject_missing,
        signature=signature_missing,
    ),
    Fault(
        id="M02.applied_twice",
        title="The tensor scale is applied twice",
        effect="all values are wrong by one factor, s: the component falls silent",
        remedy="Multiply by the tensor scale once; look for an alpha that already contains it.",
        part=Part.TENSOR_SCALE,
        inject=inject_applied_twice,
        signature=signature_applied_twice,
    ),
)


def _codes_alone(_scene: Scene, _name: str, weight: Weight) -> Weight | None:
    if not weight.is_quantised:
        return None
    tensor = weight.quantised()
    ones = torch.ones_like(scale_numbers(tensor))
    value = with_scales(tensor, ones, tensor_scale=False)
    return Weight(value=value, input_scale=weight.input_scale)


def _read_without(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": torch.ones_like(inputs["tensor_scale"])}


def _read_twice(_scene: Scene, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": inputs["tensor_scale"].square()}


MODEL_FAULTS = (
    of_fault(FAULTS[0], "leaving the tensor scale out on", has_tensor_scale),
    of_fault(FAULTS[1], "the tensor scale applied twice on", has_tensor_scale),
    weight_fault(
        Words(
            "M02.codes_alone",
            "Codes are used as numbers, without any of their scales",
            "every block is wrong by a factor of its own",
            "Load block and tensor scale beside the codes, and multiply by both.",
            "codes without scales on",
        ),
        _codes_alone,
    ),
    weight_fault(
        Words(
            "M02.block_twice",
            "The block scales are applied twice",
            "every block is wrong by a factor of its own, its scale",
            "Multiply by the block scales once: in the decoder, or in the product.",
            "the block scales applied twice on",
        ),
        of_scales(lambda _tensor, scales: scales.square()),
    ),
    operands.reading_fault(
        Words(
            "M02.activation_missing",
            "The input scale is left out of the product",
            "outputs are wrong by one factor, 1/s",
            "Alpha is the product of both tensor scales.",
            "leaving the input scale out of the product of",
        ),
        _read_without,
        operands.has_tensor_scale,
    ),
    operands.reading_fault(
        Words(
            "M02.activation_twice",
            "The input scale is applied twice",
            "outputs are wrong by one factor, s",
            "Look for an alpha that already contains the input scale.",
            "the input scale applied twice in the product of",
        ),
        _read_twice,
        operands.has_tensor_scale,
    ),
)
