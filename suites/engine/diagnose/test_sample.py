from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.diagnose.sample import (
    COLUMNS,
    WINDOW,
    calls_in,
    most_telling,
    sampled,
    together,
)
from degarble.harness.engine.diagnose.trial import distance
from degarble.harness.engine.faults.model_faults import CallRecord, FaultVariant, with_outputs
from degarble.suites.engine.diagnosing import double

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACE = "layers.1.attn.wq_a"


def test_the_window_holds_the_rows_that_differ() -> None:
    model = double("v4", "nvfp4-full")

    def late(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = outputs["out"].clone()
        made[100:110] *= 2
        return {"out": made}

    sight = model.sights(PLACE, FaultVariant("late", with_outputs(late)))[0]
    sample = sampled(model.naming(PLACE), sight)
    assert not sample.whole
    begin = WINDOW * (100 // WINDOW)
    assert torch.equal(sample.sight.outputs["out"], sight.outputs["out"][begin : begin + WINDOW])
    assert sample.sight.inputs["codes"].shape[0] == WINDOW
    assert sample.sight.inputs["tensor_scale"].ndim == 0
    assert sample.before(distance) > 0.01


def test_calls_with_sequences_are_not_cut() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.attn.compressor.pool"
    sight = model.sights(place, None)[0]
    assert sampled(model.naming(place), sight).sight is sight


def test_wide_outputs_are_looked_at_in_few_columns() -> None:
    model = double("v4", "nvfp4-full")

    def one_column(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        made = outputs["out"].clone()
        made[:, 77] += 1
        return {"out": made}

    place = "layers.1.attn.wq_b"
    sight = model.sights(place, FaultVariant("one column", with_outputs(one_column)))[0]
    assert sight.outputs["out"].shape[1] > COLUMNS
    sample = sampled(model.naming(place), sight)
    assert 77 in sample.columns["out"]
    assert sample.candidate["out"].shape[1] <= COLUMNS
    narrow = {"out": sight.outputs["out"][:, :8]}
    assert sample.looked_at(narrow)["out"].shape[1] == 8


def test_decoded_inputs_give_the_same_outputs() -> None:
    model = double("v4", "nvfp4-full")
    for place in (PLACE, "layers.1.ffn.experts.w13", "layers.2.ffn.experts.w2"):
        scene = model.naming(place)
        sample = sampled(scene, model.sights(place, None)[0])
        assert sample.plain is not None
        assert "codes" not in sample.plain
        direct = scene.call(sample.sight.inputs, scene.weights)["out"]
        assert torch.equal(scene.call(sample.plain, scene.weights)["out"], direct)


def test_the_most_telling_call_is_the_one_that_is_farthest_off() -> None:
    one = torch.ones(2, 4)
    near = CallRecord({}, {"out": one * 1.01}, {"out": one})
    far = CallRecord({}, {"out": one * 3}, {"out": one})
    assert most_telling([near, far, near]) is far


def test_calls_are_put_together_and_taken_apart_again() -> None:
    model = double("v4", "nvfp4-full")
    for place in (PLACE, "layers.1.ffn.experts.w13", f"{PLACE}.act_quant"):
        sights = model.sights(place, None)
        (joined,) = together(model.naming(place), sights)
        assert joined.rows == tuple(len(next(iter(each.inputs.values()))) for each in sights)
        for call, sight in zip(calls_in(joined), sights, strict=True):
            for name, each in sight.outputs.items():
                assert torch.equal(call.outputs[name], each)


def test_calls_with_sequences_stay_apart() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.attn.compressor.pool"
    sights = model.sights(place, None)
    assert together(model.naming(place), sights) == sights


def test_where_nothing_but_what_cancels_differs_it_is_looked_at() -> None:
    """A difference that is nothing beside its row is still the only one."""
    model = double("v4", "nvfp4-full")
    sight = model.sights(PLACE, None)[0]
    right = sight.expected["out"].float()
    made = right.clone()
    made[100, 0] += float(right[100].abs().max()) * 2.0**-20
    sight = replace(sight, expected={"out": right}, outputs={"out": made})
    sample = sampled(model.naming(PLACE), sight)
    begin = WINDOW * (100 // WINDOW)
    assert torch.equal(sample.sight.outputs["out"], made[begin : begin + WINDOW])
