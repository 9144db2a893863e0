from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.operand_faults import (
    activation_format,
    numbers,
    requantised,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.diagnosing import double

MAKERS = ("layers.1.attn.wq_a.act_quant", "layers.1.ffn.experts.w13.act_quant")
SWIGLU = "layers.1.ffn.experts.act_quant"


@pytest.mark.parametrize("place", [*MAKERS, SWIGLU])
def test_quantising_again_by_the_same_rules_changes_next_to_nothing(place: str) -> None:
    model = double("v4", "nvfp4-full")
    scene, inputs = model.planting(place), model.calls[place][0]
    outputs = scene.call(inputs, scene.weights)
    again = requantised(scene, inputs, dict(outputs))
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
    scene, inputs = model.planting(SWIGLU), model.calls[SWIGLU][0]
    assert numbers(scene, inputs).shape[-1] * 2 == inputs["x"].shape[-1]


def test_half_of_the_columns_stays_right() -> None:
    model = double("v4", "nvfp4-full")
    scene, inputs = model.planting(MAKERS[0]), model.calls[MAKERS[0]][0]
    right = scene.call(inputs, scene.weights)
    _, half = MODEL_FAULTS["M09.truncated"].ways(scene)
    made = half.apply(scene.call)(inputs, scene.weights)
    middle = right["codes"].shape[-1] // 2
    assert torch.equal(made["codes"][:, :middle], right["codes"][:, :middle])
    assert not torch.equal(made["codes"][:, middle:], right["codes"][:, middle:])


@pytest.mark.parametrize("name", ["M11.activation_transposed", "M11.activation_reversed"])
def test_a_linear_that_is_handed_numbers_reads_no_codes_wrongly(name: str) -> None:
    """The official source multiplies wo_a by numbers, whatever the recipe keeps it in."""
    model, place = double("v4", "nvfp4-experts"), "layers.1.attn.wo_a"
    scene, inputs = model.planting(place), model.calls[place][0]
    assert MODEL_FAULTS[name].sits(scene)
    assert "codes" not in inputs
    way = next(MODEL_FAULTS[name].ways(scene))
    right = scene.call(inputs, scene.weights)
    assert torch.equal(way.apply(scene.call)(inputs, scene.weights)["out"], right["out"])
