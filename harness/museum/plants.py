"""Plant one known fault into one case, and score the engine's answer.

Roles are alternated, so that few plants reach many components. The true place comes from
harness/engine/localise/attribution.py, as for every discrepancy. The answer is scored by place and
by cause, both also without the fault's own family.

The effect is measured in the run itself: the worst difference of the planted component from its
twin, in units of budget. An edge is compared bit for bit, so that it has an effect or none. What
the engine cannot judge counts against it.
"""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.budget.attention import keeping_budgets
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.faults.decoding import remembering
from degarble.harness.engine.faults.model_faults import Reach
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.attribution import blamed_on_edge
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.museum.alike import Remade, same_effect

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.diagnose.diagnose import Diagnosed
    from degarble.harness.engine.faults.model_faults import ModelFault, Way
    from degarble.harness.engine.localise.attribution import Trouble
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.museum.cases import Stage

    _Said = tuple["Cause", str]


class Place(StrEnum):
    """How the engine's place compares with the true one."""

    EXACT = "exact"
    ELSEWHERE = "elsewhere"  # a component was blamed that has no fault
    ALSO_ELSEWHERE = "also elsewhere"  # the right one, and another one
    NOWHERE = "nowhere"


class Cause(StrEnum):
    """How the engine's cause compares with the true one."""

    FIRST = "named first"
    SAME = "same data effect"  # another fault of its class is first, see alike.py
    BESIDE = "named beside the first"  # reported as explaining equally well, but of another class
    WRONG = "wrong"
    UNKNOWN = "no known fault"


@dataclass(frozen=True)
class Outcome:
    """One plant and its score. `effect` is in units of budget: 0 for none, inf for an edge's."""

    fault: str
    component: str
    way: str
    case: str
    effect: float
    place: Place = Place.NOWHERE
    cause: Cause = Cause.UNKNOWN
    named: str = ""
    left_out: Cause | None = None  # with the family's signatures taken away
    blamed: tuple[str, ...] = ()
    truth: tuple[str, ...] = ()
    sentence: str = ""
    seconds: float = 0.0
    left_named: str = ""  # who is named with the family taken away

    @property
    def family(self) -> str:
        """Return the part of the id before the dot."""
        return self.fault.partition(".")[0]


@dataclass(eq=False)
class Planted:
    """A way at its component, and the inputs that it changed if it is on an edge."""

    fault: ModelFault
    component: str
    way: Way
    harmed: set[str] = field(default_factory=set)  # inputs that an edge fault changed


def sites(stage: Stage, fault: ModelFault, chance: random.Random) -> Iterator[str]:
    """Yield components to which a fault applies: one of each role, then others, in random order."""
    by_role: dict[str, list[str]] = defaultdict(list)
    for name in stage.calls:
        scene = stage.scene(name)
        if fault.sits(scene):
            by_role[scene.role].append(name)
    roles = sorted(by_role)
    chance.shuffle(roles)
    for names in by_role.values():
        chance.shuffle(names)
    while any(by_role.values()):
        for role in roles:
            if by_role[role]:
                yield by_role[role].pop()


def ways_of(stage: Stage, fault: ModelFault, component: str) -> list[Way]:
    """Return all ways of a fault at a component of a healthy candidate."""
    return list(fault.ways(stage.scene(component, stage.candidate())))


def touches(stage: Stage, planted: Planted) -> bool:
    """Return whether a way changes anything at all in the healthy run's calls."""
    if planted.way.beside:
        return True  # only a run tells
    candidate = stage.candidate()
    weights, call = candidate.weights_of(planted.component), candidate.calls[planted.component]
    edge = planted.fault.reach is Reach.EDGE
    # Trap: a way may remember earlier calls, so it is applied once.
    faulty = planted.way.apply((lambda given, _weights: given) if edge else call)
    for each in stage.calls[planted.component]:
        inputs = stage.healthy.inputs(each)
        with torch.inference_mode():
            try:
                made = faulty(inputs, weights)
            except CANNOT_RUN:
                return False
        if _differ(made, inputs if edge else stage.healthy.outputs(each)):
            return True
    return False


def _differ(made: Mapping[str, Tensor], was: Mapping[str, Tensor]) -> bool:
    return made.keys() != was.keys() or any(not same_bits(made[n], was[n]) for n in was)


def judged(stage: Stage, planted: Planted, *, leave_out: bool) -> Outcome:
    """Run a case with a fault planted, and score the engine's answer."""
    name = planted.component
    told = (planted.fault.id, name, planted.way.words, str(stage.case))
    candidate, edges = stage.taped(), dict[str, "Way"]()
    if planted.fault.reach is Reach.EDGE:
        edges[name] = _watched(planted)
    else:
        candidate.calls[name] = planted.way.apply(stage.candidate().calls[name])
    for other, wrap in planted.way.beside.items():
        candidate.calls[other] = wrap(candidate.calls[other])
    try:
        run = stage.run(candidate, edges)
    except CANNOT_RUN as error:
        return Outcome(*told, effect=0.0, sentence=f"the run stops: {error}"[:200])
    truth = _truth(stage, planted)
    try:
        found = localise(stage.twin, stage.model.recipe, stage.rest(run))
    except Exception as error:  # noqa: BLE001  an engine that stops has missed the fault
        return Outcome(*told, effect=math.nan, truth=tuple(sorted(truth)), sentence=_stop(error))
    blamed = tuple(sorted({each.component for each in found.origins}))
    effect = _effect(found, planted)
    place = _place(blamed, truth)
    here = [each for each in found.origins if each.component in truth]
    outcome = {
        "effect": effect, "place": place, "blamed": blamed, "truth": tuple(sorted(truth)),
        "sentence": here[0].sentence if here else "",
    }  # fmt: skip
    if not here:
        return Outcome(*told, **outcome)  # type: ignore[arg-type]
    try:
        remade = Remade(stage.twin, name, planted.way, run)
        with remembering(), keeping_budgets():  # of both questions
            said = _diagnosed(here[0], tuple(MODEL_FAULTS.values()))
            cause, names = _cause(planted, remade, here[0], said)
            left = _without_family(planted, remade, here[0]) if leave_out else (None, "")
    except Exception as error:  # noqa: BLE001  as above: the place is right, the cause is not said
        outcome["sentence"] = f"{here[0].sentence} | {_stop(error)}"
        return Outcome(*told, **outcome)  # type: ignore[arg-type]
    if said is not None and cause is not Cause.FIRST:
        outcome["sentence"] = f"{here[0].sentence} | {said.sentence}"
    outcome |= {"cause": cause, "named": names, "left_out": left[0], "left_named": left[1]}
    return Outcome(*told, **outcome)  # type: ignore[arg-type]


def _without_family(planted: Planted, remade: Remade, trouble: Trouble) -> _Said:
    """Return the cause named by an engine without the fault's family."""
    family = planted.fault.family
    others = tuple(each for each in MODEL_FAULTS.values() if each.family != family)
    return _cause(planted, remade, trouble, _diagnosed(trouble, others))


def _stop(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = (str(error).splitlines() or [""])[0][:160]
    return f"the engine stops: {type(error).__name__} in {last.name}: {line}"


def _watched(planted: Planted) -> Way:
    """Wrap the way so that it records which inputs it changes."""
    from degarble.harness.engine.faults.model_faults import Way  # noqa: PLC0415

    def apply(call: ComponentCall) -> ComponentCall:
        arrived: dict[str, Tensor] = {}

        def seen(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> Any:
            for key in inputs.keys() | arrived.keys():
                both = key in inputs and key in arrived
                if not both or not same_bits(inputs[key], arrived[key]):
                    planted.harmed.add(key)
            return call(inputs, weights)

        wrapped = planted.way.apply(seen)  # once: a way may remember earlier calls

        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> Any:
            arrived.clear()
            arrived.update(inputs)
            return wrapped(inputs, weights)

        return faulty

    return Way(planted.way.words, apply, planted.way.where, planted.way.beside)


def _truth(stage: Stage, planted: Planted) -> set[str]:
    """Return the components to blame; an edge fault that changes several inputs has several."""
    if planted.fault.reach is not Reach.EDGE:
        return {planted.component}
    component = stage.scene(planted.component).component
    names = {each.name for each in component.inputs} & planted.harmed
    return {blamed_on_edge(component, name) for name in names} or {planted.component}


def _effect(found: Localised, planted: Planted) -> float:
    if planted.fault.reach is Reach.EDGE:
        return math.inf if planted.harmed else 0.0
    rows = [row for row in found.rows if row.component.name == planted.component]
    odd = [each for each in found.origins if each.component == planted.component]
    ratios = [row.ratio for row in rows]
    # NaN: without a budget the effect is unknown, unless the component was blamed.
    if any(math.isnan(ratio) for ratio in ratios) and not odd:
        return math.nan
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return max(known, default=math.inf if odd else 0.0)


def _place(blamed: Sequence[str], truth: set[str]) -> Place:
    right = truth & set(blamed)
    if right and not set(blamed) - truth:
        return Place.EXACT
    if right:
        return Place.ALSO_ELSEWHERE
    return Place.ELSEWHERE if blamed else Place.NOWHERE


def _diagnosed(trouble: Trouble, faults: Sequence[ModelFault]) -> Diagnosed | None:
    if trouble.sight is None:
        return None
    return diagnose(trouble.scene, (trouble.sight, *trouble.more), faults)


def _cause(planted: Planted, remade: Remade, trouble: Trouble, said: Diagnosed | None) -> _Said:
    if said is None or not said.named:
        return Cause.UNKNOWN, ""
    first = said.named[0]
    if first.id == planted.fault.id:
        return Cause.FIRST, first.id
    if same_effect(remade, trouble, first):
        return Cause.SAME, first.id
    beside = planted.fault.id in first.alternatives
    return (Cause.BESIDE if beside else Cause.WRONG), first.id
