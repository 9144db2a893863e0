"""Sums that pass float32: which kind of no number stands where is no evidence; numbers are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.overflow import beyond_float32
from degarble.harness.engine.diagnose.trial import make, proof
from degarble.harness.engine.faults.model_faults import FaultVariant, with_weights
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.weight_faults import numbers_of
from degarble.harness.formats.weight import Weight
from degarble.suites.engine.diagnosing import double

if TYPE_CHECKING:
    from degarble.harness.engine.diagnose.trial import Proof
    from degarble.harness.engine.faults.model_faults import CallRecord

PLACES = (
    "layers.1.attn.wq_a",
    "layers.1.attn.wo_a",
    "layers.1.ffn.experts.w13",
    "layers.1.ffn.shared.w13",
)
LARGE = 1e39


def times(factor: float, small: float = 1.0) -> FaultVariant:
    """Weights times a number, in float64; `small` are the rows of the second half."""

    def change(_name: str, weight: Weight) -> Weight:
        value = numbers_of(weight) * factor
        value[len(value) // 2 :] *= small
        return Weight(value=value, input_scale=weight.input_scale)

    return FaultVariant(f"times {factor}", with_weights(change))


def planted(place: str, way: FaultVariant) -> CallRecord:
    return double("v4", "nvfp4-full").sights(place, way, calls=1)[0]


def judged(place: str, sight: CallRecord, way: FaultVariant) -> Proof:
    scene = double("v4", "nvfp4-full").naming(place)
    made = make(scene, sight, way)
    assert made is not None
    return proof(scene, sight, made)


def altered(sight: CallRecord, row: int, column: int, factor: float) -> CallRecord:
    out = sight.outputs["out"].clone()
    out.reshape(-1, out.shape[-1])[row, column] *= factor
    return replace(sight, outputs={"out": out})


@pytest.mark.parametrize("place", PLACES)
def test_whose_sums_overflow_is_explained_by_the_numbers_that_remain(place: str) -> None:
    way = times(LARGE, small=1e-39)
    sight = planted(place, way)
    out = sight.outputs["out"]
    row, column = out.reshape(-1, out.shape[-1]).isfinite().nonzero()[0].tolist()
    made = make(double("v4", "nvfp4-full").naming(place), sight, way)
    assert made is not None
    kinds = out.isfinite() != made.outputs["out"].isfinite()
    assert kinds.any() or (out.isnan() != made.outputs["out"].isnan()).any(), (
        "else nothing is asked"
    )
    found = judged(place, sight, way)
    assert found.ratio <= 0.7, found.worst
    assert found.within == 1
    assert judged(place, altered(sight, row, column, 1.1), way).ratio > 1
    assert judged(place, sight, times(LARGE, small=1.1e-39)).ratio > 1


def test_what_is_no_number_from_the_start_has_to_be_the_same() -> None:
    place = PLACES[0]
    way = next(MODEL_FAULTS["M04.infinite"].ways(double("v4", "nvfp4-full").planting(place)))
    sight = planted(place, way)
    assert judged(place, sight, way).ratio == 0
    out = sight.outputs["out"].clone()
    out[0, 0] = 1.0 if out[0, 0].isnan() else torch.nan
    assert judged(place, replace(sight, outputs={"out": out}), way).ratio > 1


def test_where_nothing_may_overflow_no_budget_is_another_one() -> None:
    model = double("v4", "nvfp4-full")
    place = PLACES[0]
    sight = planted(place, times(1.0))
    scene = model.naming(place)
    call = JudgeableCall.of(scene.bound, place, sight.inputs)
    assert beyond_float32(scene, call, sight.outputs) == {}
