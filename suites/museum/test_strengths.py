"""Strengths: measured before planting; dials that are turned, mild ways that are found."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from degarble.harness.engine.faults.fault_strength import DIALS
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum.plants import (
    MILD,
    PlantedFault,
    adjusted_fault,
    candidate_sites,
    judge_plant,
    measure_strength,
    mild_plants,
    ways_of,
)
from degarble.suites.museum.museum_stages import small_stage

WO = "layers.1.attn.wo"


def test_the_quick_measure_is_that_of_the_run() -> None:
    stage, fault = small_stage(), MODEL_FAULTS["M10.nibble_order"]
    name = "layers.1.ffn.experts.w2"
    way = ways_of(stage, fault, name)[0]
    found = measure_strength(stage, name, way)
    whole = judge_plant(stage, PlantedFault(fault, name, way), leave_out=False).effect
    assert found == pytest.approx(whole, rel=0.5)
    assert found > MILD[1]


@pytest.mark.parametrize("wanted", [1.6, 7.0])
def test_a_dial_is_turned_until_the_effect_is_as_wanted(wanted: float) -> None:
    stage = small_stage()
    way = adjusted_fault(stage, "M43.whole", WO, wanted)
    assert way is not None
    assert wanted / 1.3 < measure_strength(stage, WO, way) < wanted * 1.3
    assert adjusted_fault(stage, "M43.whole", WO, 1e6) is None, "no such strength on its dial"


def test_mild_plants_are_mild() -> None:
    stage = small_stage()
    for name in ("M43.whole", "M24.norm_weight"):
        found = list(islice(mild_plants([stage], MODEL_FAULTS[name], random.Random(1)), 3))
        for at, component, way in found:
            assert measure_strength(at, component, way) >= 1
            assert measure_strength(at, component, way) < 16
    assert not list(mild_plants([stage], MODEL_FAULTS["M34.rows"], random.Random(1))), (
        "edges have none"
    )


@pytest.mark.parametrize("name", DIALS)
def test_every_dial_is_of_a_fault_that_sits_somewhere(name: str) -> None:
    stage, fault = small_stage(), MODEL_FAULTS[name]
    for component in islice(candidate_sites(stage, fault, random.Random(1)), 1):
        scene = stage.scene(component, stage.candidate())
        way = DIALS[name](scene, 0.05)
        assert way is None or measure_strength(stage, component, way) > 0
