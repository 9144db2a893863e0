"""Faults of quantised inputs and of FP8 caches in traced models: another scale, or none.

A linear is given codes that the twin made of the run's own numbers, which stand beside them, or it
has a quantisation of its own in front. Experts and caches quantise inside the component, by scales
that belong to their weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.engine.budget.bounded_values import exactly
from degarble.harness.engine.budget.quantised_inputs import quantised_bound
from degarble.harness.engine.faults.model_faults import (
    ModelFault,
    with_facts,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.traced.operations import (
    others_of,
    traced_facts,
    variant_of,
)
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.weight import Weight
from degarble.references.facts import spans_of
from degarble.references.linears import (
    BLOCK_SCALE,
    CODES,
    TENSOR_SCALE,
    X_LOOSE,
    X,
)
from degarble.references.traced.family import by_sequence, cache_quantiser

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.faults.model_faults import (
        ComponentContext,
        FaultVariant,
    )

    Tensors = Mapping[str, Tensor]

_NEAR = 2  # layers before and after whose scales are tried
_CODED = frozenset({CODES, BLOCK_SCALE, TENSOR_SCALE, X_LOOSE})
_LINEARS = frozenset({"traced.linear", "traced.linear.act_quant"})


def _weight(context: ComponentContext) -> Weight:
    return next(iter(context.weights.values()))


def _form(context: ComponentContext) -> str | None:
    return traced_facts(context).activation(next(iter(context.weights)))


def _quantises(context: ComponentContext) -> bool:
    return context.component.kind in _LINEARS and _form(context) is not None


def _reads_codes(context: ComponentContext) -> bool:
    return context.component.kind == "traced.linear" and _form(context) is not None


def _layers_apart(context: ComponentContext, other: ComponentContext) -> int:
    own, layer = context.component.layer, other.component.layer
    return 0 if own is None or layer is None else abs(own - layer)


def taken_anew(context: ComponentContext, inputs: Tensors) -> Tensors | None:
    """Return inputs as another twin takes them; None where only codes are known."""
    if CODES not in inputs:
        return inputs
    if X not in inputs:
        return None
    given = {name: each for name, each in inputs.items() if name not in _CODED}
    if _form(context) is None:
        return given
    return {**given, **traced_facts(context).of_input(context.weights).codes(inputs[X])}


# --------------------------------------------------------------------------------------------------
# Linears


def _by_scale(context: ComponentContext, words: str, scale: Tensor | None) -> FaultVariant:
    """Quantise by another scale; by a token's own for None."""
    form = _form(context)
    assert form is not None, "applies where inputs are quantised"
    quantiser = traced_facts(context).quantiser(form, scale)

    def given(inputs: Tensors) -> Tensors:
        if X not in inputs:
            return inputs
        loose = quantised_bound(quantiser, exactly(inputs[X]))
        return {**inputs, **quantiser.codes(inputs[X]), X_LOOSE: loose}

    if CODES in context.component.outputs:
        apply = with_outputs(lambda inputs, _outputs: quantiser.codes(inputs[X]))
    else:
        apply = with_inputs(given)
    where = {} if scale is None else {"scale": float(scale)}
    return variant_of(context, words, apply, **where)


def _as_it_is(inputs: Tensors) -> Tensors:
    return {n: each for n, each in inputs.items() if n not in _CODED} if X in inputs else inputs


def _plain_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    yield variant_of(context, "an input that was never quantised", with_inputs(_as_it_is))


def _scale_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    weight, form = _weight(context), BLOCK_FORMATS[_form(context) or ""]
    own = None if weight.input_scale is None else weight.input_scale.float().reshape(())
    if own is None:
        yield _by_scale(context, "1 in place of a token's own scale", torch.ones(()))
        return
    full = form.element.largest * (form.scale.largest if form.tensor_scale else 1.0)
    yield _by_scale(context, "1 in place of the input scale", torch.ones(()))
    yield _by_scale(context, "the reciprocal of the input scale", own.reciprocal())
    yield _by_scale(context, "a largest magnitude in place of the input scale", own * full)
    yield _by_scale(context, "the input scale divided once more", own / full)
    yield _by_scale(context, "a token's own scale in place of the stored one", None)
    tensor = weight.tensor_scale if weight.tensor_scale is not None else weight.block_scale
    if tensor is not None and tensor.numel() == 1 and tensor.is_floating_point():
        scale = tensor.float().reshape(())
        yield _by_scale(context, "the weight's scale in place of the input scale", scale)
    yield from _scales_of_others(context, float(own))


def _scales_of_others(context: ComponentContext, own: float) -> Iterator[FaultVariant]:
    known = {own}
    near = sorted(others_of(context), key=partial(_layers_apart, context))
    for other in near:
        if other.component.kind != "traced.linear" or _layers_apart(context, other) > _NEAR:
            continue
        scale = _weight(other).input_scale
        if scale is not None and scale.numel() == 1 and float(scale) not in known:
            known.add(float(scale))
            words = f"the input scale of {other.name}"
            yield _by_scale(context, words, scale.float().reshape(()))


# --------------------------------------------------------------------------------------------------
# Factors of an input (pre_quant_scale), multiplied before it is quantised, or into the weight


def _has_factors(context: ComponentContext) -> bool:
    return context.component.kind in _LINEARS and _weight(context).channel_scale is not None


def _factor_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    own = _weight(context).channel_scale
    assert own is not None, "applies where there are factors"
    yield _by_factors(context, "factors that were never multiplied", torch.ones_like(own))
    yield _by_factors(context, "factors multiplied twice", own, own)
    yield _by_factors(context, "an input divided by its factors", own.reciprocal())
    near = sorted(others_of(context), key=partial(_layers_apart, context))
    for other in near:
        if other.component.kind != "traced.linear" or _layers_apart(context, other) > _NEAR:
            continue
        factors = _weight(other).channel_scale
        if factors is not None and factors.shape == own.shape and not torch.equal(factors, own):
            yield _by_factors(context, f"the factors of {other.name}", factors)


def _by_factors(context: ComponentContext, words: str, *factors: Tensor) -> FaultVariant:
    """Multiply by other factors, in front of the quantisation where there is one."""
    facts = traced_facts(context)

    def coded(inputs: Tensors) -> Tensors:
        if X not in inputs:
            return inputs
        x = inputs[X]
        for each in factors:
            x = facts.with_factors(x, Weight(channel_scale=each))
        quantiser = facts.of_input(context.weights)
        loose = quantised_bound(quantiser, exactly(x))
        return {**inputs, **quantiser.codes(x), X_LOOSE: loose}

    if CODES in context.component.outputs:
        apply = with_outputs(lambda inputs, _outputs: {
            name: each for name, each in coded(inputs).items() if name in _CODED - {X_LOOSE}
        })  # fmt: skip
    elif _form(context) is not None:
        apply = with_inputs(coded)
    elif facts.applies_factors:
        own = _weight(context)

        def multiplied(call: ComponentCall) -> ComponentCall:
            def run(inputs: Tensors, weights: Any) -> Tensors:
                x = inputs[X]
                for each in factors:
                    x = facts.with_factors(x, Weight(channel_scale=each))
                return call({**inputs, X: x}, {**weights, name: own.without_factors()})

            return run

        name = next(iter(context.weights))
        apply = multiplied
    else:
        whole = torch.stack(factors).prod(0)
        apply = with_weights(lambda _name, each: _refactored(each, whole))
    return variant_of(context, words, apply)


def _refactored(weight: Weight, factors: Tensor) -> Weight:
    matrix = len(weight.shape) > 1
    return replace(weight, channel_scale=factors, _decoded={}) if matrix else weight


# --------------------------------------------------------------------------------------------------
# Experts


def _has_scales(context: ComponentContext) -> bool:
    return context.component.kind == "traced.experts" and any(
        weight.input_scale is not None for weight in context.weights.values()
    )


def _expert_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    names = [name for name, each in context.weights.items() if each.input_scale is not None]
    changes = (
        ("1 in place of the input scales", torch.ones_like),
        ("the reciprocals of the input scales", torch.reciprocal),
        ("the input scales of the next experts", lambda scale: scale.roll(-1, 0)),
        ("a token's own scale in place of the stored ones", None),
    )
    for words, change in changes:
        for only in (None, *names):
            which = "" if only is None else f" of {only.rpartition('.')[2]}"
            yield variant_of(
                context, f"{words}{which}", with_weights(partial(_rescaled, only, change))
            )


def _rescaled(only: str | None, change: Any, name: str, weight: Weight) -> Weight:
    scale = weight.input_scale
    if scale is None or only not in {None, name}:
        return weight
    return replace(weight, input_scale=None if change is None else change(scale))


# --------------------------------------------------------------------------------------------------
# Caches


def _is_cached(context: ComponentContext) -> bool:
    return context.component.kind == "traced.cache" and bool(context.component.weights)


def _as_one_is(others: Mapping[str, Weight], name: str, weight: Weight) -> Weight:
    return others.get(name, weight)


def _cache_variants(context: ComponentContext) -> Iterator[FaultVariant]:
    held = dict(context.weights)
    for name, weight in held.items():
        scale = weight.values(torch.float32)
        for words, made in (
            (f"1 in place of {name}", torch.ones_like(scale)),
            (f"the reciprocal of {name}", scale.reciprocal()),
        ):
            yield _cached_by(context, words, {name: Weight(value=made)})
        if scale.numel() > 1:
            for words, made in (
                (f"{name} of the next head", scale.roll(-1)),
                (f"{name} of the first head for all", scale[:1].expand_as(scale)),
                (f"the largest {name} for all heads", scale.amax().expand_as(scale)),
            ):
                yield _cached_by(context, words, {name: Weight(value=made)})
        side = "key" if name.endswith("k_scale") else "value"
        yield _read_by(context, (side, name), torch.ones(()), f"{side}s read without their scale")
        for second, another in held.items():
            if second != name:
                yield _cached_by(context, f"{second} for {name}", {name: another})
                read = another.values(torch.float32)
                yield _read_by(context, (side, name), read, f"{side}s written by {name}, read by"
                               f" {second},")  # fmt: skip
    if len(held) > 1:
        exchanged = dict(zip(held, reversed(held.values()), strict=True))
        yield _cached_by(context, "k_scale and v_scale exchanged", exchanged)
    ones = {name: Weight(value=torch.ones(())) for name in held}
    yield _cached_by(context, "1 in place of both scales", ones)
    yield variant_of(context, "rows that were never quantised", with_facts(context, _unrounded))
    for other in others_of(context):
        if other.component.kind == "traced.cache" and _layers_apart(context, other) <= _NEAR:
            given = dict(zip(held, other.weights.values(), strict=True))
            yield _cached_by(context, f"the scales of {other.name}", given)


def _cached_by(context: ComponentContext, words: str, given: Mapping[str, Weight]) -> FaultVariant:
    return variant_of(context, words, with_weights(partial(_as_one_is, given)))


def _unrounded(facts: Any) -> Any:
    return replace(facts, numerics=facts.numerics.with_switches(cache_quantised=False))


def _read_by(
    context: ComponentContext, place: tuple[str, str], read: Tensor, words: str
) -> FaultVariant:
    """Write new rows by their own scale, and read them by another; earlier ones were read so."""
    side, name = place
    facts = traced_facts(context)
    quantiser = cache_quantiser(facts.config, context.weights[name].values(torch.float32))
    other = read if read.numel() == 1 else read.reshape(1, -1, 1)

    def change(inputs: Tensors, outputs: Tensors) -> Tensors:
        made = []
        sequences = by_sequence(facts.traced, inputs)
        for (given, _), span in zip(sequences, spans_of(inputs), strict=True):
            rows = given[side].double()
            codes = quantiser.codes(rows[-span.count :])
            scale = TENSOR_SCALE if TENSOR_SCALE in codes else BLOCK_SCALE
            codes[scale] = other.float().expand_as(codes[scale]).clone()
            made += [rows[: -span.count], quantiser.values(codes)]
        return {**outputs, side: torch.cat(made).to(outputs[side].dtype)}

    return variant_of(context, words, with_outputs(change), scale=float(read.max()))


TRACED_INPUT_FAULTS = (
    ModelFault(
        "M18.input_scale", "A linear quantises its input by another scale",
        "inputs are cut off, or fall onto few codes",
        "Take the input scale that the checkpoint stores for this linear.",
        _quantises, _scale_variants,
    ),
    ModelFault(
        "M18.input_factors", "A linear multiplies its input by other factors than it has",
        "columns of the input count too much or too little; the text degrades or is garbled",
        "Multiply the input by pre_quant_scale of the same module, once, before it is quantised.",
        _has_factors, _factor_variants,
    ),
    ModelFault(
        "M18.plain_input", "A linear leaves an input as it is that the others quantise",
        "nothing to be seen: one product is better than it should be",
        "Find out why this linear fell back to another kernel.",
        _reads_codes, _plain_variants,
    ),
    ModelFault(
        "M18.expert_scales", "Experts quantise their inputs by other scales",
        "tokens of some experts are cut off, or fall onto few codes",
        "Take each expert's own input scales, or the largest of the layer.",
        _has_scales, _expert_variants,
    ),
    ModelFault(
        "M32.cache_scale", "Keys or values are cached by another scale",
        "attention reads numbers that are too large, cut off or coarse",
        "Write and read keys by k_scale and values by v_scale of the same layer.",
        _is_cached, _cache_variants,
    ),
)  # fmt: skip
