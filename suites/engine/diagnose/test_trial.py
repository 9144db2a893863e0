from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.diagnose.trial import (
    CODES_UNLIKE,
    distance,
    make,
    only_roundings,
    proof,
    proposed,
    shape_distance,
)
from degarble.harness.engine.faults.model_faults import CallRecord, FaultVariant, with_outputs
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine.diagnosing import double
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

PLACE = "layers.1.attn.wq_a"
TOPK = "layers.1.ffn.topk"
NOTHING = FaultVariant("nothing", lambda call: call)
MANY = torch.randn(64, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
ONE = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize(
    ("made", "least", "most"),
    [
        (ONE, 0, 0),
        (ONE * 1.001, 1e-4, 1e-3),
        (-ONE, 1, 1),
        (ONE * 1e6, 0.99, 1),
        (ONE.masked_fill(ONE > 0.9, torch.nan), 1 / 12, 1),
        (ONE[:2], 2, 2),
    ],
)
def test_distance_has_no_unit(made: torch.Tensor, least: float, most: float) -> None:
    assert least <= distance({"out": ONE}, {"out": made}) <= most


def test_equal_values_that_are_no_numbers_are_equal() -> None:
    odd = ONE.clone()
    odd[0, 0], odd[1, 1] = torch.nan, torch.inf
    assert distance({"out": odd}, {"out": odd.clone()}) == 0
    assert distance({"out": odd}, {"out": ONE}) > 0.1
    assert distance({"codes": torch.tensor([1, 2])}, {"codes": torch.tensor([1, 3])}) == 0.5


def test_choices_are_sets_in_whatever_order_they_are_told() -> None:
    by_score = {"out": torch.tensor([[5, 2, 9, -1], [3, 1, 0, 7]])}
    by_number = {"out": torch.tensor([[2, 5, 9, -1], [0, 1, 3, 7]])}
    other = {"out": torch.tensor([[2, 5, 8, -1], [0, 1, 3, 7]])}
    assert distance(by_score, by_number) == 0
    assert distance(by_score, other) == pytest.approx(1 / 8)
    one, two = ({"out": each["out"][0]} for each in (by_score, by_number))
    assert distance(one, two) > 0, "a row by itself is codes"


def rounded_otherwise(count: int, spacings: int = 1) -> dict[str, torch.Tensor]:
    """Numbers of BF16 of which some lie beside where they were."""
    codes = MANY.view(torch.int16).clone()
    codes[0, :count] += spacings
    return {"out": codes.view(torch.bfloat16)}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (rounded_otherwise(0), True),
        (rounded_otherwise(8), True),
        (rounded_otherwise(1, spacings=4), False),
        (rounded_otherwise(9), False),
        ({"out": MANY[:4]}, False),
        ({}, False),
    ],
)
def test_sums_in_another_order_round_otherwise_here_and_there(
    made: Mapping[str, torch.Tensor], expected: bool
) -> None:
    assert only_roundings({"out": MANY}, made) is expected


def test_of_codes_and_of_what_is_no_number_nothing_is_a_rounding() -> None:
    codes = torch.arange(4096).reshape(64, 64)
    other = codes.clone()
    other[0, 0] += 1
    assert only_roundings({"codes": codes}, {"codes": codes.clone()})
    assert not only_roundings({"codes": codes}, {"codes": other})
    nan = MANY.clone()
    nan[0, 0] = torch.nan
    assert only_roundings({"out": nan}, {"out": nan.clone()})
    assert not only_roundings({"out": nan}, {"out": MANY})


def test_gains_of_rows_or_columns_are_taken_out() -> None:
    noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gains = torch.linspace(0.1, 9, 8, dtype=torch.float64)
    assert shape_distance({"out": noise * gains}, {"out": noise}) < 1e-12
    assert distance({"out": noise * gains}, {"out": noise}) > 0.5
    assert shape_distance({"out": noise.flip(0)}, {"out": noise}) > 0.5


def test_a_healthy_candidate_is_within_and_a_changed_one_is_not() -> None:
    model = double("v4", "nvfp4-full")
    scene, sight = model.naming(PLACE), model.sights(PLACE, None)[0]
    nothing = make(scene, sight, FaultVariant("nothing", lambda call: call))
    assert nothing is not None
    found = proof(scene, sight, nothing)
    assert found.ratio <= 0.7
    assert found.within == 1
    double_way = FaultVariant(
        "doubled", with_outputs(lambda _i, outputs: {"out": outputs["out"] * 1.05})
    )
    wrong = make(scene, sight, double_way)
    assert wrong is not None
    found = proof(scene, sight, wrong)
    assert found.ratio > 1
    assert found.within < 0.5
    assert wrong.stretch["out"] == pytest.approx(1.05, rel=1e-3)


@pytest.mark.parametrize(
    ("every", "spacings", "within"), [(4096, 1, True), (64, 1, False), (4096, 4, False)]
)
def test_of_what_is_stored_on_the_way_few_roundings_may_be_others(
    every: int, spacings: int, within: bool
) -> None:
    both = double("v4", "nvfp4-full")
    name = "layers.1.attn.kv_norm_rope"
    scene = both.naming(name)
    way = next(each for each in MODEL_FAULTS["M24.epsilon"].ways(scene) if "0.1" in each.words)
    sight = both.sights(name, way, 1)[0]
    plain = sight.outputs["out"].flatten().view(torch.int16).clone()
    plain[::every] += spacings  # codes of BF16: neighbours of each other
    moved = plain.view(torch.bfloat16).reshape(sight.outputs["out"].shape)
    changed = replace(sight, outputs={"out": moved})
    made = make(scene, changed, way)
    assert made is not None
    assert (proof(scene, changed, made).ratio <= HEADROOM) is within


def test_a_way_that_cannot_be_made_makes_nothing() -> None:
    model = double("v4", "nvfp4-full")

    def broken(_inputs: object, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": outputs["out"] @ outputs["out"][:3]}

    way = FaultVariant("broken", with_outputs(broken))
    assert make(model.naming(PLACE), model.sights(PLACE, None)[0], way) is None


@pytest.mark.parametrize(("share", "within"), [(CODES_UNLIKE / 2, True), (0.05, False)])
def test_codes_may_differ_as_producers_of_one_dialect_do(share: float, within: bool) -> None:
    model = double("v4", "nvfp4-full")
    place = f"{PLACE}.act_quant"
    scene, sight = model.naming(place), model.sights(place, None)[0]
    codes = sight.outputs["codes"].flatten().clone()
    codes[: math.ceil(share * codes.numel())] ^= 1
    made = make(scene, sight, FaultVariant("nothing", lambda call: call))
    assert made is not None
    sight.outputs["codes"] = codes.reshape(sight.outputs["codes"].shape)  # type: ignore[index]
    assert (proof(scene, sight, made).ratio <= 0.7) is within


def test_weights_of_a_router_are_held_against_what_the_way_made() -> None:
    """A factor that is left out and weights that are made to add up to 1 are the same numbers."""
    stage = small_stage()
    scene, inputs = stage.scene(TOPK), stage.healthy.inputs(stage.first(TOPK))
    known = stage.healthy.outputs(stage.first(TOPK))
    shares = known["weights"] / known["weights"].sum(-1, keepdim=True)
    sight = CallRecord(inputs, {**known, "weights": shares}, known)
    (way,) = MODEL_FAULTS["M27.left_out"].ways(scene)
    made = make(scene, sight, way)
    assert made is not None
    assert not torch.equal(made.outputs["weights"], shares), "else nothing is asked"
    assert proof(scene, sight, made).ratio <= 0.7
    spoilt = CallRecord(inputs, {**known, "weights": shares * (1 + 1e-4)}, known)
    assert proof(scene, spoilt, made).ratio > 1


@pytest.mark.parametrize("place", [PLACE, "layers.1.attn.attend", "layers.1.ffn.experts.w2"])
@pytest.mark.parametrize("side", ["outputs", "expected"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_fault_fits_a_number_to_what_is_none(place: str, side: str, value: float) -> None:
    model = double("v4", "nvfp4-full")
    (sight,) = model.sights(place, None, calls=1)
    out = (sight.outputs if side == "outputs" else sight.expected)["out"].clone()
    out[0] = value
    scene, made = model.naming(place), {"out": out}
    odd = replace(sight, outputs=made) if side == "outputs" else replace(sight, expected=made)
    for fault in MODEL_FAULTS.values():
        if fault.sits(scene) and not fault.per_call:
            for way in islice(proposed(fault, scene, odd), 24):
                numbers = [each for each in way.where.values() if isinstance(each, float)]
                assert all(map(math.isfinite, numbers))


def test_a_choice_may_be_held_in_int32() -> None:
    model = double("v4", "nvfp4-full")
    (sight,) = model.sights(TOPK, None, calls=1)
    narrow = {name: each.int() if name == "experts" else each for name, each in
              sight.outputs.items()}  # fmt: skip
    made = make(model.naming(TOPK), replace(sight, outputs=narrow), NOTHING)
    assert made is not None
    assert proof(model.naming(TOPK), replace(sight, outputs=narrow), made).ratio <= HEADROOM
