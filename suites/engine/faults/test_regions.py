"""Regions of outputs and of weights in which a candidate differs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.faults.regions import (
    Region,
    apart,
    box,
    cancelled,
    differing,
    differing_columns,
    expert_of,
    full_name,
    grown,
    length_of_difference,
    matrices,
    plantable,
    replaced,
    suggested,
)
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.model.components import component_named
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.localise_cases import V4, V32, bound

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Where a candidate differs, beyond roundings, and the tiles around it.


def values(seed: int) -> torch.Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_roundings_do_not_count_and_more_does(seed: int) -> None:
    x = values(seed)
    up = (x.view(torch.int16) + 1).view(torch.bfloat16)
    assert not bool(apart(up, x).any())
    spoilt = x.clone()
    spoilt[7, 9] += 0.5 + abs(float(x[7, 9]))
    spoilt[8, 11] = math.nan
    assert apart(spoilt, x).nonzero().tolist() == [[7, 9], [8, 11]]
    assert not bool(apart(spoilt, spoilt).any())


def test_what_remains_where_terms_cancel_is_small_against_its_row(seed: int) -> None:
    x = values(seed)
    x[3, :2], x[4] = torch.tensor([4e-8, -2.0]), x[4] * 1e-9
    other = x.clone()
    other[3, 0], other[4, 0], other[5, 0] = -3e-16, 0.0, 1 + x[5, 0]
    found = cancelled(other, x)
    assert bool(found[3, 0]), "a rounding, however far it is in units of itself"
    assert not bool(found[4, 0]), "all of this row is as small"
    assert not bool(found[5, 0])
    other[3, 1] = math.inf
    assert bool(cancelled(other, x)[3, 0])
    assert not bool(cancelled(other, x)[3, 1])


def test_codes_differ_one_by_one() -> None:
    codes = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    other = codes.clone()
    other[2, 1] += 1
    assert apart(other, codes).nonzero().tolist() == [[2, 1]]


def test_a_box_grows_to_tiles(seed: int) -> None:
    x = values(seed)
    spoilt = x.clone()
    spoilt[5:7, 33:40] += 9
    mask = differing(CallRecord({}, {"out": spoilt}, {"out": x}))
    assert mask is not None
    region = box(mask)
    assert region == Region((5, 7), (33, 40))
    assert grown(region, (32, 16), (40, 64)) == Region((0, 32), (32, 48))
    assert grown(region, (128, 128), (40, 64)) == Region((0, 40), (0, 64))
    assert differing(CallRecord({}, {"out": x}, {"out": x})) is None
    assert differing(CallRecord({}, {"out": x[:3]}, {"out": x})) is None


def test_a_region_is_replaced_in_a_copy(seed: int) -> None:
    x = values(seed).reshape(10, 4, 64)
    made = replaced({"out": x}, "out", Region((0, 2), (0, 3)), 0.0)["out"]
    assert int((made != x).sum()) == 6
    assert made.shape == x.shape


def test_the_length_of_a_difference_is_relative(seed: int) -> None:
    x = values(seed)
    assert length_of_difference(CallRecord({}, {"out": x * 2}, {"out": x})) == 1.0
    assert length_of_difference(CallRecord({}, {"out": x}, {"out": x})) == 0.0
    for other in (x[:3], x * math.nan):
        assert math.isinf(length_of_difference(CallRecord({}, {"out": other}, {"out": x})))
    assert math.isinf(length_of_difference(CallRecord({}, {}, {"out": x})))


EXPERTS = "layers.1.ffn.experts.w13"


def test_places_to_plant_are_distinguished() -> None:
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
    context = model.planting("layers.1.ffn.moe_sum")
    assert plantable(context) == ()
    assert suggested(context, model.sights(context.name, None)[0]) == ()


@pytest.mark.parametrize("config", [V4, V32], ids=["v4", "v32"])
def test_what_any_component_reads_has_the_name_of_a_parameter(config: Config) -> None:
    """Also what a drafter shares with the model: V4's has its embedding and its head."""
    known = {parameter.name for parameter in parameters(config)}
    recipe, twin = recipe_named("nvfp4-full", config), bound(config, "nvfp4-full")
    for place in twin.calls:
        context = ComponentContext(twin, component_named(config, place, recipe), recipe)
        assert {full_name(context, name) for name in matrices(context)} <= known


@pytest.mark.parametrize("place", [EXPERTS, "layers.1.attn.wq_a", "layers.1.ffn.shared.w13"])
def test_the_place_shows_in_outputs(place: str) -> None:
    """For every spot, one suggestion has the same rows and the weights that were used."""
    model = double("v4", "nvfp4-full")
    fault, context = MODEL_FAULTS["M06.exponent_off"], model.naming(place)
    used = set(model.calls[place][0].get("experts", torch.tensor([-1])).flatten().tolist())
    for spot, variant in zip(
        plantable(model.planting(place)), fault.variants(model.planting(place)), strict=True
    ):
        regions = suggested(context, model.sights(place, variant)[0])
        wanted = {name for name in spot.names if expert_of(name) in used}
        hits = [
            region
            for region in regions
            if set(region.names) & wanted == wanted and region.rows == spot.rows
        ]
        assert hits, (str(spot), [str(region) for region in regions])


def test_neighbouring_numbers_are_no_difference() -> None:
    plain = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    near = plain.double()
    stepped = near.clone()
    stepped[5, 7] *= 1 + 2.0**-8
    assert not bool(differing_columns(stepped, near).any())
    stepped[:, 9] *= 1.01
    stepped[3, 11] = torch.nan
    assert differing_columns(stepped, near).nonzero().flatten().tolist() == [9, 11]


def test_a_mild_gain_of_one_part_is_detected_against_the_other() -> None:
    """Half of the results step to a neighbour in one part, hardly one in the other."""
    model = double("v4", "nvfp4-full")
    place = "layers.1.ffn.shared.w13"
    variant = next(
        fault_variant
        for fault_variant in MODEL_FAULTS["M05.bf16_pair_as_float"].variants(model.planting(place))
        if "w3" in fault_variant.words and "w1" not in fault_variant.words
    )
    regions = suggested(model.naming(place), model.sights(place, variant)[0])
    assert ("ffn.shared_experts.w3",) in {region.names for region in regions}
