"""Runs in memory: what a capture on disk would hold, edges from outside, the same steps again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs
from degarble.harness.engine.localise.recorded_run import (
    InMemoryRun,
    by_component,
    require_sound,
    same_bits,
)
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.harness.model.recipes import recipe_named
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics
from degarble.references.weights import quantised_weights, random_weights

V4 = small_v4(num_hidden_layers=2, compress_ratios=(0, 4, 0))
V32 = small_v32(num_hidden_layers=1)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5])


def bound(config: object) -> BoundModel:
    recipe = recipe_named("nvfp4-full", config)  # type: ignore[arg-type]
    weights = quantised_weights(random_weights(config, 1), config, recipe)  # type: ignore[arg-type]
    return BoundModel(config, Numerics.twin(), weights, recipe)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_every_component_of_every_step_is_recorded_and_steps_repeat_bit_for_bit(
    config: object,
) -> None:
    model = bound(config)
    plain = dict(model.calls)
    run = InMemoryRun.from_prompts(model, PROMPTS, 3)
    assert [step.phase for step in run.steps] == [Phase.PREFILL, Phase.DECODE, Phase.DECODE]
    assert run.steps[1].positions == (8, 3)
    assert run.steps[0].sequences == (0,) * 8 + (1,) * 3
    assert model.calls == plain  # nothing stays wrapped
    found = by_component(run)
    used = {name for name in plain if not name.startswith("mtp.") and not name.endswith("wkv_b")}
    missing = {name for name in used - found.keys() if "wkv_b" not in name}
    assert not missing
    assert {len(calls) for calls in found.values()} == {3}
    again = InMemoryRun.again(model, run.steps)
    assert [call.component for call in again.calls] == [call.component for call in run.calls]
    for call, other in zip(run.calls, again.calls, strict=True):
        for name, out in run.outputs(call).items():
            assert same_bits(out, again.outputs(other)[name])


def test_a_damaged_edge_and_a_write_into_an_input_are_reported() -> None:
    model = bound(V4)
    name = "layers.0.attn.q_norm"
    double = FaultVariant("twice", with_inputs(lambda given: {"x": given["x"] * 2}))
    run = InMemoryRun.from_prompts(model, PROMPTS, 1, {name: double})
    calls = {call.component: call for call in run.calls}
    made = run.outputs(calls["layers.0.attn.wq_a"])["out"]
    assert same_bits(run.inputs(calls[name])["x"], made * 2)
    call = model.calls[name]

    def writes(inputs: object, weights: object) -> object:
        out = call(inputs, weights)  # type: ignore[arg-type]
        inputs["x"].zero_()  # type: ignore[index]
        return out

    model.calls[name] = writes  # type: ignore[assignment]
    run = InMemoryRun.from_prompts(model, PROMPTS, 1)
    (seen,) = (captured_call for captured_call in run.calls if captured_call.component == name)
    assert seen.changed == ("x",)
    assert run.inputs(seen)["x"].any()
    assert [captured_call.component for captured_call in run.calls if captured_call.changed] == [
        name
    ]


def test_bits_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(nan, nan.double())
    assert not same_bits(nan, nan[:1])


@pytest.mark.parametrize("facts", [{"filters": 7}, {"filters": ["layers"]}])
def test_facts_of_another_type_are_refused_by_name(facts: dict[str, object]) -> None:
    run = InMemoryRun.from_prompts(bound(V32), PROMPTS, 1)
    run.facts = facts
    with pytest.raises(UnreadableFile, match="facts: filters"):
        require_sound(run)
    run.facts = {"filters": {"tokens": None}}
    require_sound(run)


def test_rows_that_no_token_has_are_refused_by_name() -> None:
    run = InMemoryRun.from_prompts(bound(V32), PROMPTS, 1)
    last = run.calls[-1]
    kept = last.outputs["out"]._replace(rows=(len(run.steps[0].tokens),))
    run.calls[-1] = replace(last, outputs={"out": kept})
    with pytest.raises(UnreadableFile, match="rows"):
        require_sound(run)
