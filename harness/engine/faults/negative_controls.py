"""Negative controls: legal differences that look like faults and must raise no alarm.

They have the same form as the variants of faults: another order of a sum, softmax before or after
top-k where there is no bias, a shift of all positions in layers with a window only, exponentials in
base 2, an approximate reciprocal before a scale, larger residuals, scales of a module that is never
run. A control is planted like a fault; a verdict DIFFERS on such a run is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.faults.model_faults import (
    ChangedWeights,
    FaultVariant,
    facts_of,
    unrounded,
    with_facts,
    with_inputs,
    with_numerics,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.weight_faults import numbers_of, scale_numbers, with_scales
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.types import LayerType, MlpType
from degarble.references.linears import weight_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import ComponentContext
    from degarble.references.numerics import Numerics

    Tensors = Mapping[str, Tensor]

_LINEARS = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wkv_a", "attn.wo", "attn.wo_b", "ffn.shared.w13",
    "ffn.shared.w2", "ffn.w13", "ffn.w2", "ffn.experts.w13", "ffn.experts.w2", "head",
)  # fmt: skip


@dataclass(frozen=True)
class Control:
    """One legal difference; `applies_to` and `variants` are as in ModelFault."""

    id: str
    title: str
    why: str
    applies_to: Callable[[ComponentContext], bool]
    variants: Callable[[ComponentContext], Iterator[FaultVariant]]


def _on_float32(facts: Any) -> Any:
    return with_numerics(facts, products=torch.float32)


def _reordered(context: ComponentContext, order: str, parts: int) -> Any:
    """Sum over K in another order, in float32, with one rounding at the end."""
    fine = with_facts(context, lambda facts: unrounded(_on_float32(facts)))
    numerics = context.bound.bound_to(context.name)[1].numerics

    def apply(call: Any) -> Any:
        exact = fine(call)

        def faulty(inputs: Tensors, weights: Mapping[str, Any]) -> Any:
            known = call(inputs, weights)
            width = max(weight.shape[1] for weight in weights.values())
            size = -(-width // parts)
            begins = list(range(0, width, size))
            if order == "backwards":
                begins.reverse()
            sums = []
            for begin in begins:
                some = ChangedWeights(weights, partial(_alone, numerics, begin, begin + size))
                sums.append(exact(inputs, some)["out"].float())
            total = sums[0]
            for part in sums[1:]:
                total = total + part
            return {**known, "out": total.to(known["out"].dtype)}

        return faulty

    return apply


def _alone(numerics: Numerics, begin: int, end: int, _name: str, weight: Weight) -> Weight:
    used = weight_values(weight, torch.float32, numerics)
    values = torch.zeros_like(used)
    values[:, begin:end] = used[:, begin:end]
    return Weight(value=values, input_scale=weight.input_scale)


def _order_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    yield FaultVariant("sums in float32", with_facts(context, _on_float32))
    yield FaultVariant("K in 4 parts", _reordered(context, "forwards", 4))
    yield FaultVariant("K in 16 parts, the last first", _reordered(context, "backwards", 16))


def _swapped_routing(context: ComponentContext) -> Iterator[FaultVariant]:
    """Take a softmax over the chosen experts; without a bias it equals the renormalised one."""
    del context
    yield FaultVariant(
        "shares computed by another order of the same operations", with_outputs(_reshared)
    )


def _reshared(_inputs: Tensors, outputs: Tensors) -> Tensors:
    weights = outputs["weights"]
    total = weights.float().sum(-1, keepdim=True)
    shares = torch.softmax(weights.float().log(), dim=-1) * total
    return {**outputs, "weights": shares.to(weights.dtype)}


def _exponential_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Multiply Q by log2(e) and take powers of two, as kernels do: one more rounding."""
    del context

    def change(inputs: Tensors) -> Tensors:
        q = inputs["q"].double()
        return {**inputs, "q": (q * math.log2(math.e)).float().double() / math.log2(math.e)}

    yield FaultVariant("exponentials in base 2", with_inputs(change))


def _shift_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Shift all positions; without entries the inverse rotation undoes the rotation of q and k."""
    del context
    for shift in (1, 5):
        yield FaultVariant(f"positions {shift:+d} for all rotations", with_inputs(_plus(shift)))


def _plus(shift: int) -> Any:
    def change(inputs: Tensors) -> Tensors:
        return {**inputs, "positions": inputs["positions"] + shift}

    return change


def _reciprocal_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    for steps in (1, -1):

        def change(inputs: Tensors, steps: int = steps) -> Tensors:
            x = inputs["x"].float().contiguous()
            codes = x.view(torch.int32) + (x != 0).to(torch.int32) * steps
            return {**inputs, "x": codes.view(torch.float32)}

        yield FaultVariant(f"inputs times a reciprocal {steps:+d} ulp off", with_inputs(change))


def _growth_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Double the streams, which their norm hides."""
    del context

    def change(inputs: Tensors) -> Tensors:
        return {**inputs, "streams": inputs["streams"] * 2}

    yield FaultVariant("streams twice as long", with_inputs(change))


def _unread_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    """Change the scales of a plain weight, which are never read."""
    del context

    def change(_name: str, weight: Weight) -> Weight:
        if weight.storage is not None:
            return weight
        return Weight(
            value=weight.value,
            block_scale=torch.full((1,), math.nan),
            tensor_scale=torch.zeros(1),
            input_scale=weight.input_scale,
        )

    yield FaultVariant("scales that nobody reads never loaded", with_weights(change))


def _tie_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    del context
    yield FaultVariant("the chosen in the order of their numbers", with_outputs(_sorted))


def _sorted(_inputs: Tensors, outputs: Tensors) -> Tensors:
    """Sort, with -1 at the end."""
    most = torch.iinfo(outputs["out"].dtype).max
    order = torch.where(outputs["out"] < 0, most, outputs["out"]).sort(dim=-1).values
    return {**outputs, "out": torch.where(order == most, -1, order)}


def _inner_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    if facts_of(context.call) is not None:
        yield FaultVariant("float64 inside", with_facts(context, _wide))


def _wide(facts: Any) -> Any:
    numerics = replace(facts.numerics, work=torch.float64, products=torch.float64)
    return replace(facts, numerics=numerics)


def _of_roles(*roles: str) -> Callable[[ComponentContext], bool]:
    return lambda context: context.role in roles


def _divides(context: ComponentContext) -> bool:
    """Return whether the scale need not be a power of two, whose reciprocal would be exact."""
    linear = context.name.removesuffix(".act_quant")
    if linear == context.name:
        return False
    _, facts = context.bound.bound_to(linear)
    formats = (facts.activation(name) for name in context.bound.weights_of(linear))
    return not any(form is not None and form.endswith("UE8M0") for form in formats)


def _scored(context: ComponentContext) -> bool:
    block = context.component.block
    return context.role == "ffn.topk" and block is not None and block.mlp_type is not MlpType.DENSE


def _window_only(context: ComponentContext) -> bool:
    block = context.component.block
    return block is not None and block.layer_type is LayerType.SLIDING


CONTROLS = (
    Control(
        "order_of_sums", "Another order of the same sum, or another legal tactic",
        "float32 additions may be done in any order",
        _of_roles(*_LINEARS), _order_variants,
    ),
    Control(
        "shares", "Softmax on the other side of top-k, where no bias is between them",
        "the shares of the chosen are the same",
        _scored, _swapped_routing,
    ),
    Control(
        "base_2", "Exponentials in base 2",
        "exp(x) is exp2(x log2(e)) but for a rounding",
        _of_roles("attn.attend"), _exponential_variants,
    ),
    Control(
        "reciprocal", "A scale's reciprocal within an ulp of float32",
        "codes differ only on the edge of a step",
        lambda context: "experts" not in context.role and _divides(context),
        _reciprocal_variants,
    ),
    Control(
        "order_of_choice", "The chosen rows in another order",
        "attention does not depend on the order of rows",
        _of_roles("attn.indexer.topk"), _tie_variants,
    ),
    Control(
        "inner_precision", "More precision inside than the definition requires",
        "a result that is nearer to the exact one is within its budget",
        _of_roles(
            "attn.norm", "ffn.norm", "attn.q_norm", "attn.kv_norm", "ffn.moe_sum", "attn.hc_post",
            "ffn.hc_post", "ffn.experts.combine", "ffn.shared.act", "ffn.act",
        ),
        _inner_variants,
    ),
    Control(
        "unread_scales", "Scales of a weight that has none were never loaded",
        "nobody reads them",
        lambda context: bool(context.component.weights), _unread_variants,
    ),
)  # fmt: skip

# These change what arrives at a component; whole runs with them are healthy, see their suites.
# The museum runs the first on the edges of a model, and growth by its weights.
WHOLE_RUN_CONTROLS = (
    Control(
        "window_shift", "All positions shifted, in a layer that sees its window alone",
        "rotations of q, k and output cancel: only differences of positions count",
        lambda context: _window_only(context)
        and context.role in {"attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope"},
        _shift_variants,
    ),
    Control(
        "growth", "Residual streams that grow with depth",
        "mHC normalises by their length; growth alone is no fault",
        _of_roles("attn.hc_pre", "ffn.hc_pre"), _growth_variants,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class WeightControl:
    """A legal change of weights, made in the checkpoint and so in candidate and twin alike."""

    id: str
    title: str
    why: str
    change: Callable[[str, Weight], Weight]


_OUT = (".attn.wo", ".attn.wo_b")


def _longer(name: str, weight: Weight) -> Weight:
    """Double what every block adds to its streams."""
    if not name.endswith((*_OUT, ".w2")):
        return weight
    if weight.tensor_scale is not None:
        return replace(weight, tensor_scale=weight.tensor_scale * 2, _decoded={})
    return Weight(value=numbers_of(weight) * 2, input_scale=weight.input_scale)


def _by_powers(name: str, weight: Weight) -> Weight:
    """Round block scales to the nearest power of two: a few percent of noise everywhere."""
    del name
    if not weight.is_quantised:
        return weight
    tensor = weight.quantised()
    scales = scale_numbers(tensor)
    rounded = torch.where(scales > 0, scales.log2().round().exp2(), scales)
    return Weight(value=with_scales(tensor, rounded), input_scale=weight.input_scale)


def _own_scale(_name: str, weight: Weight, larger: float = 1.0) -> Weight:
    """Quantise an NVFP4 weight by itself, with its own tensor scale or a larger one."""
    if not weight.is_quantised or weight.tensor_scale is None or weight.tensor_scale.ndim:
        return weight
    form, values = weight.quantised().format, weight.values(torch.float32).contiguous()
    made = quantise(values, form)
    if larger != 1:
        assert made.tensor_scale is not None, "NVFP4 has one"
        made = quantise(values, form, decode_scale=made.tensor_scale * larger)
    return Weight.of(made, weight.input_scale)


WEIGHT_CONTROLS = (
    WeightControl(
        "growth",
        "Residual streams that grow with depth",
        "mHC normalises by their length, and so does every norm",
        _longer,
    ),
    WeightControl(
        "powers_of_two",
        "Weights whose block scales are powers of two",
        "a checkpoint of another format is noisier and no less right",
        _by_powers,
    ),
    WeightControl(
        "own_scales",
        "Parts of one fused matrix with a tensor scale each",
        "exporters that do not know of the fusion write them so, and engines may keep all",
        _own_scale,
    ),
    WeightControl(
        "small_scales",
        "A tensor scale so large that many block scales are subnormal",
        "subnormal E4M3 numbers are numbers",
        partial(_own_scale, larger=2.0**13),
    ),
)
