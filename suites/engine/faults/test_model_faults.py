"""Faults in a running model: a variant changes a call and nothing else; controls are no faults."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults import model_faults
from degarble.harness.engine.faults.model_faults import (
    CallRecord,
    ComponentContext,
    FaultVariant,
    with_inputs,
    with_outputs,
    with_weights,
)
from degarble.harness.engine.faults.negative_controls import CONTROLS, WHOLE_RUN_CONTROLS, Control
from degarble.harness.engine.faults.operand_faults import activation_format, numbers, requantised
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.formats.weight import Weight
from degarble.references.binding import BoundModel
from degarble.references.model import ModelV4, Sequence
from degarble.references.numerics import Numerics
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.planting import V4, has_effect, run, same
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Variants wrap calls: weights, inputs and outputs change for the callee, and only there.

X = torch.arange(4.0)
WEIGHTS = {"a": Weight(value=torch.full((4,), 2.0)), "b": Weight(value=torch.ones(4))}


def call(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    total = sum(weight.values(torch.float32) for weight in weights.values())
    return {"out": inputs["x"] * total}


def doubled(name: str, weight: Weight) -> Weight:
    return Weight(value=2 * weight.values(torch.float32)) if name == "a" else weight


def test_a_weight_is_another_one_while_names_and_order_stay() -> None:
    seen: list[list[str]] = []

    def look(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
        seen.append(list(weights))
        return call(inputs, weights)

    faulty = with_weights(doubled)(look)
    assert torch.equal(faulty({"x": X}, WEIGHTS)["out"], 5 * X)
    assert seen == [["a", "b"]]
    assert torch.equal(call({"x": X}, WEIGHTS)["out"], 3 * X)


def test_inputs_and_outputs_are_changed_on_their_way() -> None:
    halved = with_inputs(lambda inputs: {"x": inputs["x"] / 2})
    assert torch.equal(halved(call)({"x": X}, WEIGHTS)["out"], 1.5 * X)
    added = with_outputs(lambda inputs, outputs: {"out": outputs["out"] + inputs["x"]})
    assert torch.equal(added(call)({"x": X}, WEIGHTS)["out"], 4 * X)


def test_an_edge_states_what_its_consumer_receives() -> None:
    variant = FaultVariant(
        "zeros in place of x", with_inputs(lambda inputs: {"x": 0 * inputs["x"]})
    )
    assert torch.equal(variant.passed_on({"x": X}, WEIGHTS)["x"], 0 * X)


# --------------------------------------------------------------------------------------------------
# The same code with other facts: what changes, what stays, and whose call is taken.

NAME = "layers.1.ffn.shared.act"


def test_other_facts_run_the_same_function() -> None:
    made = run("v4")
    context, seen = made.scene(NAME, twin=True), made.calls[NAME][0]
    assert model_faults.facts_at(context).shared_limit == 0.5
    opened = model_faults.with_facts(context, partial(model_faults.with_config, swiglu_limit=0.0))
    call = opened(context.call)
    facts = model_faults.facts_of(call)
    assert facts is not None
    assert facts.shared_limit is None
    assert not torch.equal(call(seen.inputs, {})["out"], context.call(seen.inputs, {})["out"])
    assert model_faults.facts_at(context).shared_limit == 0.5


def test_the_facts_are_those_of_the_call_that_is_wrapped() -> None:
    """The candidate's arithmetic stays the candidate's, the twin's the twin's."""
    made = run("v4")
    context, candidate = made.scene(NAME, twin=True), made.scene(NAME, twin=False)
    call = model_faults.with_facts(context, lambda facts: facts)(candidate.call)
    found = model_faults.facts_of(call)
    assert found is not None
    assert found.numerics == model_faults.facts_at(candidate).numerics
    assert found.numerics != model_faults.facts_at(context).numerics


def test_a_call_without_facts_falls_to_the_scenes_own() -> None:
    context = run("v4").scene(NAME, twin=True)

    def kernel(inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> Mapping[str, Any]:
        del weights
        return inputs

    assert model_faults.facts_of(kernel) is None
    call = model_faults.with_facts(context, lambda facts: facts)(kernel)
    assert model_faults.facts_of(call) == model_faults.facts_at(context)


def test_unrounded_outputs_round_to_the_stored_ones() -> None:
    made = run("v4")
    name = "layers.1.attn.wo_b"
    context, seen = made.scene(name, twin=True), made.calls[name][-1]
    fine = model_faults.with_facts(context, model_faults.unrounded)(context.call)
    exact = fine(seen.inputs, context.weights)["out"]
    assert exact.dtype is torch.float64
    stored = context.call(seen.inputs, context.weights)["out"]
    assert torch.equal(exact.to(stored.dtype), stored)
    assert not torch.equal(exact, stored.double())


def test_another_epsilon_reaches_norms_that_have_their_own() -> None:
    context = run("v32").scene("layers.1.attn.q_norm", twin=True)
    for own in (None, 1e-6):
        facts = model_faults.with_switches(model_faults.facts_at(context), latent_norm_epsilon=own)
        changed = model_faults.with_epsilon(0.25, facts)
        roles = ("attn.q_norm", "attn.kv_norm", "attn.norm")
        assert {changed.norm_epsilon(role) for role in roles} == {0.25}
        assert changed.norm_epsilon("attn.indexer.k_norm") == 1e-6


MAKERS = ("layers.1.attn.wq_a.act_quant", "layers.1.ffn.experts.w13.act_quant")
SWIGLU = "layers.1.ffn.experts.act_quant"


@pytest.mark.parametrize("place", [*MAKERS, SWIGLU])
def test_quantising_again_by_the_same_rules_changes_next_to_nothing(place: str) -> None:
    model = double("v4", "nvfp4-full")
    context, inputs = model.planting(place), model.calls[place][0]
    outputs = context.call(inputs, context.weights)
    again = requantised(context, inputs, dict(outputs))
    assert again["codes"].shape == outputs["codes"].shape
    assert float((again["codes"] != outputs["codes"]).double().mean()) < 0.005


def test_formats_follow_the_recipe() -> None:
    full, experts = double("v4", "nvfp4-full"), double("v4", "nvfp4-experts")
    assert activation_format(full.planting(MAKERS[0])).name == "NVFP4"  # type: ignore[union-attr]
    form = activation_format(experts.planting(MAKERS[0]))
    assert form is not None
    assert form.name == "FP8_1X128_UE8M0"
    assert activation_format(full.planting("layers.1.attn.wq_a")) is not None
    assert activation_format(full.planting("layers.1.attn.wo_a")) is None


def test_what_swiglu_makes_is_what_is_quantised() -> None:
    model = double("v4", "nvfp4-full")
    context, inputs = model.planting(SWIGLU), model.calls[SWIGLU][0]
    assert numbers(context, inputs).shape[-1] * 2 == inputs["x"].shape[-1]


def test_half_of_the_columns_stays_right() -> None:
    model = double("v4", "nvfp4-full")
    context, inputs = model.planting(MAKERS[0]), model.calls[MAKERS[0]][0]
    right = context.call(inputs, context.weights)
    _, half = MODEL_FAULTS["M09.truncated"].variants(context)
    made = half.apply(context.call)(inputs, context.weights)
    middle = right["codes"].shape[-1] // 2
    assert torch.equal(made["codes"][:, :middle], right["codes"][:, :middle])
    assert not torch.equal(made["codes"][:, middle:], right["codes"][:, middle:])


@pytest.mark.parametrize("name", ["M11.activation_transposed", "M11.activation_reversed"])
def test_a_linear_that_is_handed_numbers_reads_no_codes_wrongly(name: str) -> None:
    """The official source multiplies wo_a by numbers, whatever the recipe keeps it in."""
    model, place = double("v4", "nvfp4-experts"), "layers.1.attn.wo_a"
    context, inputs = model.planting(place), model.calls[place][0]
    assert MODEL_FAULTS[name].applies_to(context)
    assert "codes" not in inputs
    variant = next(MODEL_FAULTS[name].variants(context))
    right = context.call(inputs, context.weights)
    assert torch.equal(variant.apply(context.call)(inputs, context.weights)["out"], right["out"])


# --------------------------------------------------------------------------------------------------
# Legal differences: each changes something, and none is a finding.

SAME = {"unread_scales"}  # nothing changes at all; others move some number


def seen_with(
    context: ComponentContext,
    twin: ComponentContext,
    variant: FaultVariant,
    inputs: Mapping[str, Tensor],
) -> CallRecord:
    outputs = variant.apply(context.call)(inputs, context.weights)
    return CallRecord(inputs, outputs, twin.call(inputs, twin.weights))


@pytest.mark.parametrize("family", ["v4", "v32"])
@pytest.mark.parametrize("control", thinned(CONTROLS), ids=lambda control: control.id)
def test_a_control_is_within_every_budget(control: Control, family: str) -> None:
    made, moved, places = run(family), False, set()
    with torch.inference_mode():
        for name, calls in made.calls.items():
            context, twin = made.scene(name, twin=False), made.scene(name, twin=True)
            if not control.applies_to(context) or context.role in places:
                continue
            places.add(context.role)
            for variant in control.variants(context):
                for seen in (calls[0], calls[-1]):
                    record = seen_with(context, twin, variant, seen.inputs)
                    assert not has_effect(twin, record), f"{name}: {variant.words}"
                    moved |= any(not same(seen.outputs[n], x) for n, x in record.outputs.items())
    assert places or family == "v32"
    assert moved == (control.id not in SAME) or not places, "a control that changes nothing"


def logits_with(variants: Mapping[str, FaultVariant]) -> Tensor:
    """A prompt and a token in float64, with ways in front of some components."""
    made = run("v4")
    weights = made.twin.weights
    bound = BoundModel(V4, Numerics.definition(), weights)
    for name, variant in variants.items():
        bound.calls[name] = variant.apply(bound.calls[name])
    sequence, model = Sequence(), ModelV4(bound, V4)
    with torch.inference_mode():
        model.forward([sequence], [torch.arange(30) % 50])
        return model.forward([sequence], [torch.tensor([3])])


def test_a_shift_in_a_layer_of_windows_changes_nothing() -> None:
    """But in a layer with entries it does: their positions are absolute."""
    control = next(each for each in WHOLE_RUN_CONTROLS if each.id == "window_shift")
    made = run("v4")
    scenes = [made.scene(name, twin=True) for name in made.calls]
    sliding = [context for context in scenes if control.applies_to(context)]
    assert {context.role for context in sliding} == {
        "attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope",
    }  # fmt: skip
    variants = {context.name: next(control.variants(context)) for context in sliding}
    plain = logits_with({})
    assert float((logits_with(variants) - plain).abs().max()) < 1e-9
    moved = {name.replace("layers.0", "layers.1"): variant for name, variant in variants.items()}
    assert float((logits_with(moved) - plain).abs().max()) > 1e-6


def test_streams_that_grow_are_collapsed_like_others() -> None:
    control = next(each for each in WHOLE_RUN_CONTROLS if each.id == "growth")
    made = run("v4")
    name = "layers.1.attn.hc_pre"
    context, seen = made.scene(name, twin=True), made.calls[name][0]
    (variant,) = control.variants(context)
    own, grown = context.call(seen.inputs, context.weights), variant.apply(context.call)
    made_by = grown(seen.inputs, context.weights)
    assert torch.allclose(made_by["out"].double(), own["out"].double() * 2, rtol=1e-2, atol=1e-3)
    assert torch.allclose(made_by["mix"].double(), own["mix"].double(), rtol=1e-3, atol=1e-4)


def test_controls_have_names_of_their_own() -> None:
    names = {control.id for control in (*CONTROLS, *WHOLE_RUN_CONTROLS)}
    assert len(names) == len(CONTROLS) + len(WHOLE_RUN_CONTROLS)
    assert not names & set(MODEL_FAULTS)
