"""M02: the tensor scale is left out, or applied twice.

Two places each assume that the other one multiplies, or that it does not (vllm issue 52405). As in
M01 the proportions stay, so a cosine does not detect it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.decoding import scale_numbers, with_scales
from degarble.harness.engine.faults.family import Fault, Part
from degarble.harness.engine.faults.gain import gain_match
from degarble.harness.engine.faults.gain_fit import is_named, shared
from degarble.harness.engine.faults.model_faults import (
    ChangedWeights,
    ModelFault,
    Way,
    with_outputs,
)
from degarble.harness.engine.faults.weight_faults import (
    Words,
    has_tensor_scale,
    kept,
    of_fault,
    of_scales,
    weight_fault,
)
from degarble.harness.formats.codec import decode_array
from degarble.harness.formats.number_formats import E4M3
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.family import Case, Match
    from degarble.harness.engine.faults.model_faults import Scene, Sight
    from degarble.harness.formats.quantise import QuantisedTensor

_PLANTED = (0.01, 1.0)  # tensor scales
_NORMAL, _LAST = 0x08, 0x7E  # codes of E4M3: the smallest normal number, the largest
_FEWEST, _MOST = 32, 1 << 20  # block scales that show a tensor scale; torch has quantiles to 2^24
_LARGEST = 6.0  # of E2M1: what the largest number of a block becomes
_SAME_SIZE = 0.1  # logarithm of a ratio of lengths
_SPREAD = 1.3  # between what they show: each is rounded by up to a sixteenth


def inject_missing(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Replace the scale by 1."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.new_ones(tensor.tensor_scale.shape))


def inject_applied_twice(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Replace the scale by its square."""
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


def _of_product(words: str, change: Callable[[Tensor], Tensor]) -> Callable[[Scene], Iterator[Way]]:
    """Change both tensor scales, so that their product is what a factor of the sum becomes."""

    def of_weight(_name: str, weight: Weight) -> Weight:
        if weight.tensor_scale is None:
            return weight
        return replace(weight, tensor_scale=change(weight.tensor_scale), _decoded={})

    def apply(call: ComponentCall) -> ComponentCall:
        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
            scaled = {**inputs, "tensor_scale": change(inputs["tensor_scale"])}
            return call(scaled, ChangedWeights(weights, of_weight))

        return faulty

    return lambda scene: iter((Way(f"{words} {scene.name}", apply),))


def _makes(scene: Scene) -> bool:
    form = operands.activation_format(scene) if "codes" in scene.component.outputs else None
    return form is not None and form.tensor_scale


def _made_by(scene: Scene, scale: float) -> Way:
    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        used = torch.full_like(outputs["tensor_scale"], scale)
        return operands.requantised(scene, inputs, outputs, used)

    words = f"codes by a tensor scale of {number(scale)} at {scene.name}"
    return Way(words, with_outputs(change), {"scale": scale})


def _other_ways(scene: Scene) -> Iterator[Way]:
    for scale in _PLANTED:
        yield _made_by(scene, scale)


def _others(scene: Scene, sight: Sight) -> Iterator[Way]:
    """Propose the tensor scale that the block scales imply, if all of them imply the same one."""
    stored, right = sight.outputs["block_scale"], sight.expected["block_scale"]
    if stored.dtype != right.dtype or stored.shape != right.shape:
        return
    # Codes of normal numbers, but the largest, at which conversion ends: a step is an eighth.
    # Trap: the right codes say little, for a calibrated scale has them at the largest.
    sure = (stored >= _NORMAL) & (stored < _LAST)
    if int(sure.sum()) < _FEWEST:
        return
    largest = operands.blocks(scene, sight.inputs, sight.expected["tensor_scale"]).abs().amax(-1)
    units, codes = (largest.double() / _LARGEST)[sure], stored[sure]
    every = -(-len(codes) // _MOST)
    units, codes = units[::every], codes[::every]
    made, below, above = (decode_array(codes + by, E4M3).double() for by in (0, -1, 1))
    shown = units / made
    low, scale, high = shown.quantile(shown.new_tensor([0.05, 0.5, 0.95])).tolist()
    if not low or high > low * _SPREAD or stored.eq(right).all():
        return
    least, most = shared(2 * units / (made + above), 2 * units / (made + below))
    scale = (least + most) / 2
    for value in {float(f"{scale:.{digits}g}"): None for digits in (1, 2, 3)}:
        if least <= value <= most or is_named(scale, value):
            yield _made_by(scene, value)
    yield _made_by(scene, scale)


def _product_fault(name: str, title: str, remedy: str, ways: Any) -> ModelFault:
    def sits(scene: Scene) -> bool:
        form = operands.activation_format(scene)
        reads = any(each.name == "codes" for each in scene.component.inputs)
        both = form is not None and form.tensor_scale and any(map(has_tensor_scale, kept(scene)))
        return reads and both

    return ModelFault(
        f"M02.{name}", title, "outputs are wrong by one factor, the product of both scales",
        remedy, sits, ways, lambda scene, sight: ways(scene) if _is_scaled(sight) else iter(()),
    )  # fmt: skip


def _is_scaled(sight: Sight) -> bool:
    """Return whether the output as a whole has another size, or that is unknown."""
    c, e = sight.outputs.get("out"), sight.expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return True  # several outputs: nothing is known of them
    sizes = [float(each.double().norm()) for each in (c, e)]
    if not all(map(math.isfinite, sizes)) or not all(sizes):
        return True
    return abs(math.log(sizes[0] / sizes[1])) > _SAME_SIZE


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
    _product_fault(
        "product_missing",
        "Both tensor scales are left out of the product",
        "Multiply the sum by alpha, the product of both tensor scales.",
        _of_product("both tensor scales left out of the product of", torch.ones_like),
    ),
    _product_fault(
        "product_twice",
        "The product of both tensor scales is applied twice",
        "Multiply by alpha once: where the sum is finished, or where it is stored.",
        _of_product("both tensor scales applied twice in the product of", torch.square),
    ),
    ModelFault(
        id="M02.another",
        title="Activations are quantised by another tensor scale than the one that goes with them",
        effect="all inputs are too large or too small by the ratio of two scales",
        remedy="Quantise by the scale that is handed on; an expert's rows by their expert's.",
        sits=_makes,
        ways=_other_ways,
        signature=_others,
    ),
)
