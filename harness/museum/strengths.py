"""How strong a plant is, before it is planted: and plants of the strengths that are wanted.

Owns the quick measure (the planted component alone, on what the healthy run gave it, in units of
its budget), the turning of a dial until the effect is as wanted, and the search for mild ways of
faults that have none. So every bin of effect has plants; what the engine says of them is asked of a
whole run, as of all others, and the effect that counts is measured there.

Refuses nothing. Kept honest by suites/museum/test_strengths.py.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.budget.attention import keeping_budgets
from degarble.harness.engine.budget.call import Call
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.faults.fault_strength import DIALS
from degarble.harness.engine.faults.model_faults import Reach
from degarble.harness.museum.plants import sites, ways_of

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from degarble.harness.engine.faults.model_faults import ModelFault, Way
    from degarble.harness.museum.cases import Stage

WANTED = (1.6, 4.0, 2.2, 7.0, 12.0)  # in units of budget; the bins are 1 to 3, 3 to 10, from 10
MILD = (1.0, 10.0)
TRIED = 24  # ways of a fault without a dial that are measured
_TURNS = 7
_NEAR = 1.25  # times the wanted effect, or a part of it
_FIRST = 0.01
_MOST = 0.5


def strength(stage: Stage, component: str, way: Way) -> float:
    """The worst of a component with a way, on the healthy run's first and last call; NaN: none."""
    candidate = stage.candidate()
    faulty = way.apply(candidate.calls[component])
    weights, worst = candidate.weights_of(component), 0.0
    calls = stage.calls[component]
    with torch.inference_mode():
        for call in dict.fromkeys((0, len(calls) - 1)):
            inputs = stage.healthy.inputs(calls[call])
            try:
                known = Call.of(stage.twin, component, inputs)
                found = judge_outputs(known, faulty(inputs, weights))
            except CANNOT_RUN:
                return math.nan
            ratios = [each.ratio for each in found.values()]
            if any(math.isnan(ratio) for ratio in ratios):
                return math.nan
            worst = max([worst, *ratios])
    return worst


def turned(stage: Stage, fault: str, component: str, wanted: float) -> Way | None:
    """A way of a fault with a dial, of about the wanted effect; None where there is none."""
    scene, turn = stage.scene(component, stage.candidate()), _FIRST
    with keeping_budgets():
        for _ in range(_TURNS):
            way = DIALS[fault](scene, turn)
            found = math.nan if way is None else strength(stage, component, way)
            if math.isnan(found):
                return None
            if wanted / _NEAR <= found <= wanted * _NEAR:
                return way
            turn *= min(8.0, max(0.125, wanted / max(found, 1e-3)))
            if turn > _MOST:
                return None
    return None


def mild(
    stages: Sequence[Stage], fault: ModelFault, chance: random.Random
) -> Iterator[tuple[Stage, str, Way]]:
    """Plants of a fault whose effect is small: as its dial says, or as few of its ways have it."""
    if fault.reach is Reach.EDGE:
        return
    places = [(stage, sites(stage, fault, chance)) for stage in stages]
    if fault.id in DIALS:
        yield from _by_dial(places, fault)
        return
    tried = 0
    while places and tried < TRIED:
        stage, names = places.pop(0)
        component = next(names, None)
        if component is None:
            continue
        places.append((stage, names))
        found = ways_of(stage, fault, component)
        chance.shuffle(found)
        for way in islice(found, 4):
            tried += 1
            if MILD[0] <= strength(stage, component, way) < MILD[1]:
                yield stage, component, way


def _by_dial(
    places: list[tuple[Stage, Iterator[str]]], fault: ModelFault
) -> Iterator[tuple[Stage, str, Way]]:
    wanted = 0
    while places:
        stage, names = places.pop(0)
        component = next(names, None)
        if component is None:
            continue
        places.append((stage, names))
        way = turned(stage, fault.id, component, WANTED[wanted % len(WANTED)])
        wanted += 1
        if way is not None:
            yield stage, component, way
