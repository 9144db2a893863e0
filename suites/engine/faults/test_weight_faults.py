"""Every family of weights: where it sits, what it changes, and that it changes nothing else."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.diagnosing import FAULTS, OURS, double

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.engine.faults.model_faults import Way


def test_every_family_has_three_variants_and_words() -> None:
    variants = Counter(each.family for each in FAULTS)
    assert set(variants) == set(OURS)
    assert min(variants.values()) >= 3
    for name, fault in MODEL_FAULTS.items():
        assert name == fault.id
        assert re.fullmatch(r"[MO]\d\d\.[a-z0-9_]+", name)
        assert fault.title[0].isupper()
        assert fault.remedy.endswith(".")


# It takes what another layer's call was given: suites/museum/test_plants.py runs both.
WHOLE_RUNS = {"M12.layer_view"}


@pytest.mark.parametrize("fault", [each.id for each in FAULTS if each.id not in WHOLE_RUNS])
def test_it_sits_somewhere_and_has_an_effect(fault: str) -> None:
    """On small models, of which no weight has a small block scale."""
    silent = {"M08.subnormal", "M08.flushed", "M08.five_bits"}
    for family, recipe in (("v4", "nvfp4-full"), ("v32", "nvfp4-experts"), ("v4", "nvfp4-experts")):
        model = double(family, recipe)
        for place in model.calls:
            scene = model.planting(place)
            if not MODEL_FAULTS[fault].sits(scene):
                continue
            way = next(MODEL_FAULTS[fault].ways(scene))
            if model.ratio(place, model.sights(place, way, calls=1)[0]) > 1:
                return
    assert fault in silent


def test_weights_stay_as_they_were() -> None:
    model = double("v4", "nvfp4-full")
    place = "layers.1.ffn.experts.w13"
    scene = model.planting(place)
    before = {name: scene.weights[name].values(torch.float32).clone() for name in scene.weights}
    inputs = {name: each[:2] if each.ndim else each for name, each in model.calls[place][0].items()}
    for fault in FAULTS:
        if fault.sits(scene):
            next(fault.ways(scene)).apply(scene.call)(inputs, scene.weights)
    for name, values in before.items():
        assert torch.equal(scene.weights[name].values(torch.float32), values)


def test_only_the_weights_of_a_spot_change() -> None:
    model = double("v4", "nvfp4-full")
    scene = model.planting("layers.1.ffn.experts.w13")
    way = list(MODEL_FAULTS["M10.nibble_order"].ways(scene))[1]
    seen = {}

    def look(_inputs: object, weights: dict[str, object]) -> dict[str, torch.Tensor]:
        seen.update({name: weights[name] for name in weights})
        return {}

    way.apply(look)({}, scene.weights)  # type: ignore[arg-type]
    changed = {name for name in seen if seen[name] is not scene.weights[name]}
    assert changed == {"ffn.experts.2.w1", "ffn.experts.2.w3"}


@pytest.mark.parametrize("fault", ["M11.groups_of_four", "M12.row_off"])
def test_what_moves_scales_is_no_name_for_one_factor(fault: str) -> None:
    """One scale that is doubled often has a neighbour that is twice as large."""
    scene = double("v4", "nvfp4-experts").planting("layers.1.attn.wq_b")
    (name,) = scene.weights
    scales = torch.tensor([[121], [120], [121], [119]], dtype=torch.uint8)
    weight = replace(scene.weights[name], block_scale=scales, _decoded={})
    was, seen = weight.values(torch.float32), dict[object, bool]()
    for way in MODEL_FAULTS[fault].ways(scene):

        def look(inputs: Mapping[str, Any], weights: Mapping[str, Any], way: Way = way) -> Any:
            seen[way.where.get("rows")] = torch.equal(weights[name].values(torch.float32), was)
            return inputs

        way.apply(look)({}, {name: weight})
    assert seen == {None: False, "256 to 511": False, "128 to 191": True}
