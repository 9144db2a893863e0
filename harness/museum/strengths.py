"""Plant faults of a wanted strength: estimate the effect first, then adjust it.

The estimate runs the planted component alone, on the healthy run's inputs, in units of its budget.
Faults with an adjustable strength are adjusted until the effect is as wanted; of other faults mild
ways are searched, so that every bin of effect has plants. The score uses the effect measured in the
whole run, as for all plants.
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
    """Return a way's worst ratio to the budget on the healthy run's first and last call, or NaN."""
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
    """Return a way of an adjustable fault with about the wanted effect; None if there is none."""
    scene, turn = stage.scene(component, stage.candidate()), _FIRST
    with keeping_budgets():
        for _ in range(_TURNS):
            way = DIALS[fault](scene, turn)
            found = math.nan if way is None else strength(stage, component, way)
            if math.isnan(found):
                return None
            if wanted / _NEAR <= found <= wanted * _NEAR:
                return way
            # Assume that the effect is proportional to the strength, within a factor of 8 a trial.
            turn *= min(8.0, max(0.125, wanted / max(found, 1e-3)))
            if turn > _MOST:
                return None
    return None


def mild(
    stages: Sequence[Stage], fault: ModelFault, chance: random.Random
) -> Iterator[tuple[Stage, str, Way]]:
    """Yield plants of a fault with small effect: adjusted, or among its ways."""
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
