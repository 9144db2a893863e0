"""Faults of tensor scales: M01 direction, M02 count, M03 fused, O02 order, O10 input scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults import operand_faults as operands
from degarble.harness.engine.faults.gain_fit import is_named, shared
from degarble.harness.engine.faults.model_faults import (
    ChangedWeights,
    FaultVariant,
    ModelFault,
    with_outputs,
)
from degarble.harness.engine.faults.regions import expert_of, matrices
from degarble.harness.engine.faults.tensor_faults import TensorFault, TensorPart, gain_match
from degarble.harness.engine.faults.weight_faults import (
    FaultTexts,
    has_tensor_scale,
    kept,
    numbers_of,
    of_fault,
    of_scales,
    scale_numbers,
    weight_fault,
    with_scales,
)
from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.number_formats import E4M3
from degarble.harness.formats.weight import Weight
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.harness.engine.faults.tensor_faults import DifferingPart, Match
    from degarble.harness.engine.faults.weight_faults import Change, WeightStorage
    from degarble.harness.formats.quantise import QuantisedTensor

    Keep = Callable[[Tensor], Tensor]
    Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


# --------------------------------------------------------------------------------------------------
# M01: the tensor scale is used in the wrong direction, 1/s instead of s.
#
# One producer stores the scale that decodes, another the scale that encodes; reading one as the
# other is off by its square (modular issue 6600, vllm issue 55643). The proportions stay, so a
# cosine stays perfect while the magnitude is wrong by up to ten orders.


def inject_direction(tensor: QuantisedTensor) -> QuantisedTensor | None:
    """Store the reciprocal; the label stays as it was."""
    if tensor.tensor_scale is None:
        return None
    return replace(tensor, tensor_scale=tensor.tensor_scale.reciprocal())


def signature_direction(case: DifferingPart) -> Match | None:
    """Compare the stored scale with the reciprocal of the twin's."""
    return gain_match(case, inject_direction(case.twin), "1 / s")


SCALE_DIRECTION_TENSOR_FAULTS = (
    TensorFault(
        id="M01.inverse",
        title="The tensor scale is used in the wrong direction, 1/s instead of s",
        effect="all values are wrong by one factor, s squared: saturation, or silence",
        remedy="Store the scale that multiplies codes, or declare the direction as encode.",
        part=TensorPart.TENSOR_SCALE,
        inject=inject_direction,
        signature=signature_direction,
    ),
)


def _made_with_reciprocal(
    context: ComponentContext, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return operands.requantised(context, inputs, outputs, outputs["tensor_scale"].reciprocal())


def _read_with_reciprocal(
    _context: ComponentContext, inputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": inputs["tensor_scale"].reciprocal()}


SCALE_DIRECTION_FAULTS = (
    of_fault(
        SCALE_DIRECTION_TENSOR_FAULTS[0], "the reciprocal of the tensor scale on", has_tensor_scale
    ),
    weight_fault(
        FaultTexts(
            "M01.block_inverse",
            "The block scales are used in the wrong direction, 1/s instead of s",
            "every block is wrong by a factor of its own, s squared",
            "Multiply codes by the stored block scale; a name that ends in inv is no divisor.",
            "the reciprocal of the block scales on",
        ),
        of_scales(lambda _tensor, scales: scales.reciprocal()),
    ),
    operands.making_fault(
        FaultTexts(
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
        FaultTexts(
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


# --------------------------------------------------------------------------------------------------
# M02: the tensor scale is left out, or applied twice.
#
# Two places each assume that the other one multiplies, or that it does not (vllm issue 52405). As
# in M01 the proportions stay, so a cosine does not detect it.

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


def signature_missing(case: DifferingPart) -> Match | None:
    """Compare the stored scale with 1."""
    return gain_match(case, inject_missing(case.twin), "1")


def signature_applied_twice(case: DifferingPart) -> Match | None:
    """Compare the stored scale with the square of the twin's."""
    return gain_match(case, inject_applied_twice(case.twin), "s * s")


SCALE_COUNT_TENSOR_FAULTS = (
    TensorFault(
        id="M02.missing",
        title="The tensor scale is left out",
        effect="all values are wrong by one factor, 1/s",
        remedy="Multiply by the tensor scale once: in the epilogue, or folded into alpha.",
        part=TensorPart.TENSOR_SCALE,
        inject=inject_missing,
        signature=signature_missing,
    ),
    TensorFault(
        id="M02.applied_twice",
        title="The tensor scale is applied twice",
        effect="all values are wrong by one factor, s: the component falls silent",
        remedy="Multiply by the tensor scale once; look for an alpha that already contains it.",
        part=TensorPart.TENSOR_SCALE,
        inject=inject_applied_twice,
        signature=signature_applied_twice,
    ),
)


def _codes_alone(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
    if not weight.is_quantised:
        return None
    tensor = weight.quantised()
    ones = torch.ones_like(scale_numbers(tensor))
    value = with_scales(tensor, ones, tensor_scale=False)
    return Weight(value=value, input_scale=weight.input_scale)


def _read_without(_context: ComponentContext, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": torch.ones_like(inputs["tensor_scale"])}


def _read_twice(_context: ComponentContext, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**inputs, "tensor_scale": inputs["tensor_scale"].square()}


def _of_product(
    words: str, change: Callable[[Tensor], Tensor]
) -> Callable[[ComponentContext], Iterator[FaultVariant]]:
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

    return lambda context: iter((FaultVariant(f"{words} {context.name}", apply),))


def _makes(context: ComponentContext) -> bool:
    form = operands.activation_format(context) if "codes" in context.component.outputs else None
    return form is not None and form.tensor_scale


def _made_by(context: ComponentContext, scale: float) -> FaultVariant:
    def change(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        used = torch.full_like(outputs["tensor_scale"], scale)
        return operands.requantised(context, inputs, outputs, used)

    words = f"codes by a tensor scale of {number(scale)} at {context.name}"
    return FaultVariant(words, with_outputs(change), {"scale": scale})


def _other_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    for scale in _PLANTED:
        yield _made_by(context, scale)


def _others(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Propose the tensor scale that the block scales imply, if all of them imply the same one."""
    stored, right = record.outputs["block_scale"], record.expected["block_scale"]
    if stored.dtype != right.dtype or stored.shape != right.shape:
        return
    # Codes of normal numbers, but the largest, at which conversion ends: a step is an eighth.
    # Trap: the right codes say little, for a calibrated scale has them at the largest.
    sure = (stored >= _NORMAL) & (stored < _LAST)
    if int(sure.sum()) < _FEWEST:
        return
    largest = (
        operands.blocks(context, record.inputs, record.expected["tensor_scale"]).abs().amax(-1)
    )
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
            yield _made_by(context, value)
    yield _made_by(context, scale)


def _product_fault(name: str, title: str, remedy: str, ways: Any) -> ModelFault:
    def applies_to(context: ComponentContext) -> bool:
        form = operands.activation_format(context)
        reads = any(each.name == "codes" for each in context.component.inputs)
        both = form is not None and form.tensor_scale and any(map(has_tensor_scale, kept(context)))
        return reads and both

    return ModelFault(
        f"M02.{name}",
        title,
        "outputs are wrong by one factor, the product of both scales",
        remedy,
        applies_to,
        ways,
        lambda context, record: ways(context) if _is_scaled(record) else iter(()),
    )


def _is_scaled(record: CallRecord) -> bool:
    """Return whether the output as a whole has another size, or that is unknown."""
    c, e = record.outputs.get("out"), record.expected.get("out")
    if c is None or e is None or c.shape != e.shape:
        return True  # several outputs: nothing is known of them
    sizes = [float(tensor.double().norm()) for tensor in (c, e)]
    if not all(map(math.isfinite, sizes)) or not all(sizes):
        return True
    return abs(math.log(sizes[0] / sizes[1])) > _SAME_SIZE


SCALE_COUNT_FAULTS = (
    of_fault(SCALE_COUNT_TENSOR_FAULTS[0], "leaving the tensor scale out on", has_tensor_scale),
    of_fault(SCALE_COUNT_TENSOR_FAULTS[1], "the tensor scale applied twice on", has_tensor_scale),
    weight_fault(
        FaultTexts(
            "M02.codes_alone",
            "Codes are used as numbers, without any of their scales",
            "every block is wrong by a factor of its own",
            "Load block and tensor scale with the codes, and multiply by both.",
            "codes without scales on",
        ),
        _codes_alone,
    ),
    weight_fault(
        FaultTexts(
            "M02.block_twice",
            "The block scales are applied twice",
            "every block is wrong by a factor of its own, its scale",
            "Multiply by the block scales once: in the decoder, or in the product.",
            "the block scales applied twice on",
        ),
        of_scales(lambda _tensor, scales: scales.square()),
    ),
    operands.reading_fault(
        FaultTexts(
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
        FaultTexts(
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
        applies_to=_makes,
        variants=_other_variants,
        signature=_others,
    ),
)


# --------------------------------------------------------------------------------------------------
# M03: matrices fused into one share one tensor scale, though each part has its own.
#
# A loader that keeps the first, the largest or the smallest of several scales leaves the block
# scales of the other parts as they are (vllm issues 47515 and 54974, TensorRT-LLM issues 14199 and
# 12240). The other parts are wrong by the ratio of two scales, own over kept, which identifies the
# cause. Without effect if all parts have one scale, as gate and up in ModelOpt's exports.


# Serving engines fuse these into one matrix: vLLM's fused_wqa_wkv.
_PARTNERS = {"attn.wq_a": ("attn.wkv", "attn.wkv_a"), "attn.wkv": ("attn.wq_a",)}
_PARTNERS["attn.wkv_a"] = ("attn.wq_a",)


def _fused_with(context: ComponentContext, name: str) -> Iterator[Weight]:
    """Return the weights that share one matrix with a weight, itself included, in order of rows."""
    if name in _PARTNERS:
        prefix = context.name.removesuffix(context.role)
        contexts = [context.sibling(prefix + other) for other in _PARTNERS[name]]
        partners = [
            component_context.weights[component_context.role]
            for component_context in contexts
            if component_context is not None
        ]
        first = name == "attn.wq_a"
        yield from (
            (context.weights[name], *partners) if first else (*partners, context.weights[name])
        )
        return
    number = expert_of(name)
    yield from (
        context.weights[matrix] for matrix in matrices(context) if expert_of(matrix) == number
    )


def _all_experts(context: ComponentContext, name: str) -> Iterator[Weight]:
    part = name.rpartition(".")[2]
    yield from (context.weights[n] for n in matrices(context) if n.rpartition(".")[2] == part)


def _kept_scale(group: Callable[[ComponentContext, str], Iterator[Weight]], keep: Keep) -> Change:
    def change(context: ComponentContext, name: str, weight: Weight) -> Weight | None:
        if weight.tensor_scale is None or weight.tensor_scale.ndim:
            return None
        scales = [each.tensor_scale for each in group(context, name)]
        known = torch.stack([scale.reshape(()) for scale in scales if scale is not None])
        return replace(weight, tensor_scale=keep(known), _decoded={})

    return change


_KEPT: tuple[tuple[str, str, Keep], ...] = (
    ("first", "the first", lambda scales: scales[0]),
    ("largest", "the largest", lambda scales: scales.amax()),
    ("smallest", "the smallest", lambda scales: scales.amin()),
)


def _of_parts(kept: WeightStorage) -> bool:
    fused = kept.name in _PARTNERS or kept.role.rpartition(".")[2] in {"w13", "proj"}
    return has_tensor_scale(kept) and fused


def _of_experts(kept: WeightStorage) -> bool:
    return has_tensor_scale(kept) and kept.routed


def _fused_fault(variant: str, which: str, keep: Keep, *, experts: bool) -> ModelFault:
    of = "experts" if experts else "fused parts"
    words = FaultTexts(
        f"M03.{'experts_' if experts else ''}{variant}",
        f"All {of} are decoded with {which} of their tensor scales",
        "each one is wrong by the ratio of two scales",
        "Keep one scale each, or quantise all of them with one; never choose among stored ones.",
        f"{which} tensor scale of all {of} on",
    )
    group = _all_experts if experts else _fused_with
    return weight_fault(words, _kept_scale(group, keep), _of_experts if experts else _of_parts)


FUSED_SCALES_FAULTS = (
    *(_fused_fault(variant, which, keep, experts=False) for variant, which, keep in _KEPT),
    *(_fused_fault(variant, which, keep, experts=True) for variant, which, keep in _KEPT),
)


# --------------------------------------------------------------------------------------------------
# O02: block and tensor scale are multiplied with each other first, and that product is rounded.
#
# Suspected in the first field report: the product of both scales, stored as FP16, BF16 or E4M3,
# replaces code * block scale * tensor scale. In FP16 small products are subnormal, in E4M3 most of
# them vanish; in BF16 the effect stays below one part in 256.


def _through_e4m3(product: Tensor) -> Tensor:
    return decode_array(encode_array(product.float(), E4M3), E4M3).double()


def _order_fault(variant: str, form: str, rounding: Callable[[Tensor], Tensor]) -> ModelFault:
    def product(tensor: QuantisedTensor, scales: Tensor) -> Tensor:
        factor = tensor.decode_scale.double().reshape(*tensor.decode_scale.shape, 1, 1)
        return rounding(scales.double() * factor).double() / factor

    words = FaultTexts(
        f"O02.{variant}",
        f"The product of block and tensor scale is rounded to {form}",
        "blocks are wrong by a factor of their own; small ones vanish",
        "Multiply code by block scale, sum, and apply the tensor scale in float32 at the end.",
        f"products of both scales in {form} on",
    )
    return weight_fault(words, of_scales(product), has_tensor_scale)


ORDER_OF_SCALES_FAULTS = (
    _order_fault("product_in_fp16", "FP16", lambda product: product.to(torch.float16)),
    _order_fault("product_in_bf16", "BF16", lambda product: product.to(torch.bfloat16)),
    _order_fault("product_in_e4m3", "E4M3", _through_e4m3),
)


# --------------------------------------------------------------------------------------------------
# O10: the activation's input scale is multiplied into the weights.
#
# Found in the first field report: `input_scale` was multiplied into the weight, which became about
# 5000 times too small. Variants replace the tensor scale by it, or divide by it. Applies where the
# checkpoint has an input scale.


def _input_scale_fault(variant: str, title: str, action: str, mix: Mix) -> ModelFault:
    def change(_context: ComponentContext, _name: str, weight: Weight) -> Weight | None:
        if weight.input_scale is None or weight.tensor_scale is None:
            return None
        own = weight.quantised().decode_scale.double()
        value = mix(numbers_of(weight), weight.input_scale.double(), own)
        return Weight(value=value, input_scale=weight.input_scale)

    words = FaultTexts(
        f"O10.{variant}",
        title,
        "all values are wrong by one factor, of three to four orders",
        "The input scale belongs to activations: into alpha, never into the weight.",
        action,
    )
    return weight_fault(words, change, has_tensor_scale)


INPUT_SCALE_IN_WEIGHTS_FAULTS = (
    _input_scale_fault(
        "multiplied",
        "The input scale is multiplied into the weight",
        "the input scale multiplied into",
        lambda values, scale, _own: values * scale,
    ),
    _input_scale_fault(
        "divided",
        "The weight is divided by the input scale",
        "the input scale divided out of",
        lambda values, scale, _own: values / scale,
    ),
    _input_scale_fault(
        "exchanged",
        "The input scale is in the place of the tensor scale",
        "the input scale in place of the tensor scale of",
        lambda values, scale, own: values / own * scale,
    ),
)
