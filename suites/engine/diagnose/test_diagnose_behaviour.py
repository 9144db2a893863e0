"""Faults of behaviour beside all others: named first, or as one that explains equally well.

What two faults do to the data may be the same: a cache's value scale and a gain of attention, a sum
taken twice and a gain of 2. Then both are told. A cause that is not the planted one and does not
have it beside it is a wrong one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.model_faults import FaultVariant
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.suites.engine import planting

if TYPE_CHECKING:
    from degarble.harness.engine.faults.model_faults import ModelFault

MINE = {
    "M21", "M23", "M24", "M25", "M26", "M27", "M28", "M29", "M30", "M31", "M32", "M34", "M35",
    "M36", "M37", "M40", "M41", "M43", "O20", "O21", "O22", "O23",
}  # fmt: skip
FAULTS = [each for each in MODEL_FAULTS.values() if each.family in MINE]
FIRST = [next(f for f in FAULTS if f.family == family) for family in sorted(MINE)]
ASKED = 0.95  # of what is planted at every place: told, first or beside


def told(fault_id: str, family: str, few: int) -> list[tuple[bool, bool, str]]:
    """For each planted way: whether it is named first, whether it is told at all, and words."""
    fault, made = MODEL_FAULTS[fault_id], planting.run(family)
    found = []
    with torch.inference_mode():
        for number, name in enumerate(planting._spread(made.sitting(fault), few)):
            ways = list(fault.ways(made.scene(name, twin=False)))
            way = ways[(number * 3 + 1) % len(ways)]
            twin = made.scene(name, twin=True)
            seen = [
                each
                for each in planting.sights(fault, made, name, way)
                if planting.has_effect(twin, each)
            ]
            if not seen:
                continue
            named = diagnose(twin, seen).named
            ids = [each.id for each in named]
            beside = {other for each in named for other in each.alternatives}
            words = f"{fault.id} at {name}, {way.words}: {ids}"
            found.append((ids[:1] == [fault.id], fault.id in {*ids, *beside}, words))
    return found


@pytest.mark.parametrize("fault", FIRST, ids=lambda each: each.id)
def test_one_fault_of_each_family_is_told(fault: ModelFault) -> None:
    family = next(f for f in planting.CONFIGS if planting.run(f).sitting(fault))
    found = told(fault.id, family, few=1)
    assert found, "it has an effect"
    assert all(known for _, known, _ in found), found


@pytest.mark.slow
def test_what_is_planted_is_told_at_nearly_every_place() -> None:
    found = [
        each
        for fault in FAULTS
        for family in planting.CONFIGS
        for each in told(fault.id, family, 2)
    ]
    missed = [words for _, known, words in found if not known]
    assert len(missed) <= (1 - ASKED) * len(found), "\n".join(missed)
    first = sum(each[0] for each in found)
    assert first >= 0.9 * len(found), f"{first} of {len(found)} named first"


def test_a_row_of_zeros_does_not_say_that_it_lies_a_slot_beside() -> None:
    made = planting.run("v4")
    fault, name = MODEL_FAULTS["M13.slot_beside"], "layers.2.attn.compressor.write"
    scene = made.scene(name, twin=True)

    def lost(call: Any) -> Any:
        return lambda inputs, weights: {"out": torch.zeros_like(call(inputs, weights)["out"])}

    with torch.inference_mode():
        assert fault.sits(scene)
        seen = planting.sights(fault, made, name, FaultVariant("zeros", lost))
        found = [each for each in seen if planting.has_effect(scene, each)]
        assert found, "rows were written"
        assert not any(list(fault.signature(scene, each)) for each in found)
