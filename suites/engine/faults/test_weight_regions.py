from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.model_faults import Scene
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.weight_regions import (
    differing_columns,
    expert_of,
    full_name,
    matrices,
    plantable,
    suggested,
)
from degarble.harness.model.components import component_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.localise_cases import V4, V32, bound

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

EXPERTS = "layers.1.ffn.experts.w13"


def test_places_to_plant_are_told_apart() -> None:
    model = double("v4", "nvfp4-full")
    words = [str(spot) for spot in plantable(model.planting(EXPERTS))]
    assert words == [
        "layers.1.ffn.experts.w13 (all 8 weights)",
        "layers.1.ffn.experts.w13 of expert 2",
        "layers.1.ffn.experts.w13 of experts 0, 2",
        "layers.1.ffn.experts.w13 w1 of all experts",
        "layers.1.ffn.experts.w13 w3 of all experts",
        "layers.1.ffn.experts.2.w1, rows 48 to 95",
        "layers.1.ffn.experts.2.w1, rows 24 to 31",
    ]


def test_components_without_weights_have_no_place() -> None:
    model = double("v4", "nvfp4-full")
    scene = model.planting("layers.1.ffn.moe_sum")
    assert plantable(scene) == ()
    assert suggested(scene, model.sights(scene.name, None)[0]) == ()


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_what_any_component_reads_has_the_name_of_a_parameter(config: Config) -> None:
    """Also what a drafter shares with the model: V4's has its embedding and its head."""
    known = {parameter.name for parameter in parameters(config)}
    recipe, twin = recipe_named("nvfp4-full", config), bound(config, "nvfp4-full")
    for place in twin.calls:
        scene = Scene(twin, component_named(config, place, recipe), recipe)
        assert {full_name(scene, name) for name in matrices(scene)} <= known


@pytest.mark.parametrize("place", [EXPERTS, "layers.1.attn.wq_a", "layers.1.ffn.shared.w13"])
def test_the_place_is_seen_in_outputs(place: str) -> None:
    """For every spot, one suggestion has the same rows and the weights that were used."""
    model = double("v4", "nvfp4-full")
    fault, scene = MODEL_FAULTS["M06.exponent_off"], model.naming(place)
    used = set(model.calls[place][0].get("experts", torch.tensor([-1])).flatten().tolist())
    for spot, way in zip(
        plantable(model.planting(place)), fault.ways(model.planting(place)), strict=True
    ):
        found = suggested(scene, model.sights(place, way)[0])
        wanted = {name for name in spot.names if expert_of(name) in used}
        hits = [
            each for each in found if set(each.names) & wanted == wanted and each.rows == spot.rows
        ]
        assert hits, (str(spot), [str(each) for each in found])


def test_neighbouring_numbers_are_no_difference() -> None:
    plain = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    near = plain.double()
    stepped = near.clone()
    stepped[5, 7] *= 1 + 2.0**-8
    assert not bool(differing_columns(stepped, near).any())
    stepped[:, 9] *= 1.01
    stepped[3, 11] = torch.nan
    assert differing_columns(stepped, near).nonzero().flatten().tolist() == [9, 11]


def test_a_mild_gain_of_one_part_is_seen_beside_the_other() -> None:
    """Half of the results step to a neighbour in one part, hardly one in the other."""
    model = double("v4", "nvfp4-full")
    place = "layers.1.ffn.shared.w13"
    way = next(
        way
        for way in MODEL_FAULTS["M05.bf16_pair_as_float"].ways(model.planting(place))
        if "w3" in way.words and "w1" not in way.words
    )
    found = suggested(model.naming(place), model.sights(place, way)[0])
    assert ("ffn.shared_experts.w3",) in {each.names for each in found}
