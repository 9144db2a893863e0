"""Plant one fault into one case, and score the engine's answer by place and by cause."""

from __future__ import annotations

import math
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.capture.files.writer import CaptureWriter, PendingCall, PendingTensor
from degarble.harness.capture.recorder import Snapshots
from degarble.harness.commands.check.compare_runs import compare_runs
from degarble.harness.engine.budget.attention import keeping_budgets
from degarble.harness.engine.budget.judging import judge_outputs
from degarble.harness.engine.budget.rules import JudgeableCall
from degarble.harness.engine.diagnose.diagnose import MOST_VARIANTS, diagnose, with_earlier
from degarble.harness.engine.diagnose.trial import make
from degarble.harness.engine.faults.model_faults import ComponentContext, Reach
from degarble.harness.engine.faults.registry import STRENGTHS, plantable_faults
from degarble.harness.engine.faults.weight_faults import remembering
from degarble.harness.engine.localise.discrepancy import blamed_on_edge
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import by_component, same_bits
from degarble.harness.model.components import components
from degarble.harness.model.recipes import recipe_named
from degarble.harness.museum.cases import RECIPES, equal
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics, switches_of
from degarble.references.tiny.configs import TINY_V4, TINY_V32

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.diagnose.diagnose import Diagnosed, NamedFault
    from degarble.harness.engine.faults.model_faults import CallRecord, FaultVariant, ModelFault
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.harness.museum.cases import Stage


# --------------------------------------------------------------------------------------------------
# Faults that the data cannot distinguish.
#
# Two faults form one class at a place if, in every call of the discrepancy, the outputs under the
# named fault have the names and shapes of those under the planted one, and 999 of 1,000 elements
# are equal. Both are computed by the twin on the inputs that the candidate received, call after
# call, so that variants with memory or random numbers repeat what they did. On an edge the received
# inputs are taken as the planted fault's result.

if TYPE_CHECKING:
    Tensors = Mapping[str, Tensor]

ALIKE = 0.999  # of the elements; the rest are roundings of sums in another order


@dataclass(eq=False)
class FaultyTwin:
    """The twin's outputs with a planted variant, for each call of the planted run."""

    twin: BoundModel
    component: str
    variant: FaultVariant
    run: InMemoryRun

    @cached_property
    def _calls(self) -> list[tuple[Tensors, Tensors]]:
        faulty = self.variant.apply(self.twin.calls[self.component])
        weights = self.twin.weights_of(self.component)
        made: list[tuple[Tensors, Tensors]] = []
        with torch.inference_mode():
            for call in by_component(self.run).get(self.component, ()):
                inputs = self.run.inputs(call)
                try:
                    made.append((inputs, dict(faulty(inputs, weights))))
                except CANNOT_RUN:
                    return made
        return made

    def outputs_for(self, record: CallRecord) -> Tensors | None:
        """Return the outputs of the call with these inputs; None if the run has no such call."""
        for inputs, outputs in self._calls:
            if equal(record.inputs, inputs):
                return {
                    name: output.to(record.outputs[name].dtype)
                    if name in record.outputs
                    else output
                    for name, output in outputs.items()
                }
        return None


def same_effect(planted: FaultyTwin, discrepancy: Discrepancy, first: NamedFault) -> bool:
    """Return whether a named cause has the planted one's effect in every call."""
    assert discrepancy.record is not None, "it was diagnosed"
    calls = with_earlier((discrepancy.record, *discrepancy.more))
    return all(_same(planted, discrepancy.context, call, first) for call in calls)


def _same(
    planted: FaultyTwin, context: ComponentContext, call: CallRecord, first: NamedFault
) -> bool:
    if call.implied:
        wanted: Tensors | None = {n: call.inputs[n] for n in call.implied if n in call.inputs}
    else:
        wanted = planted.outputs_for(call)
    if wanted is None:
        return False
    for variant in _ways(context, call, first):
        with torch.inference_mode():
            variant_outputs = make(context, call, variant)
        if variant_outputs is not None and equal_outputs(variant_outputs.outputs, wanted):
            return True
    return False


def _ways(context: ComponentContext, call: CallRecord, first: NamedFault) -> Iterator[FaultVariant]:
    """Yield the named variant; for a fault that varies from call to call, all its proposals."""
    yield first.variant
    if first.fault.per_call:
        yield from islice(first.fault.signature(context, call), MOST_VARIANTS)


def equal_outputs(made: Tensors, wanted: Tensors) -> bool:
    """Return whether all wanted tensors are there with nearly all elements bit-equal."""
    for name, tensor in wanted.items():
        other = made.get(name)
        if other is None or other.shape != tensor.shape:
            return False
        # NaN equals NaN here.
        same = (other == tensor) | ((other != other) & (tensor != tensor))  # noqa: PLR0124  NaN
        if same.numel() and float(same.double().mean()) < ALIKE:
            return False
    return True


# --------------------------------------------------------------------------------------------------
# Roles of components to which each fault applies, for `degarble faults list`.
#
# Config and recipe suffice: both small models are bound in every recipe of the museum, without
# weights, which `applies_to` does not need.


def roles_of(fault: ModelFault) -> list[str]:
    """Return the roles in the order in which they run; V4's first."""
    return list(dict.fromkeys(context.role for context in _scenes() if fault.applies_to(context)))


@cache
def _scenes() -> tuple[ComponentContext, ...]:
    """Yield one component of each role in each kind of layer, of both models in every recipe."""
    found: dict[tuple[object, ...], ComponentContext] = {}
    for config, source in ((TINY_V4, "official-v4"), (TINY_V32, "official-v32")):
        for name in RECIPES:
            recipe = recipe_named(name, config)
            bound = BoundModel(config, Numerics.twin(switches_of(source)), {}, recipe)
            for component in components(config, recipe):
                if component.name in bound.calls:
                    kind = (
                        (component.block.layer_type, component.block.mlp_type)
                        if component.block
                        else ()
                    )
                    key = (source, name, component.role, *kind)
                    found.setdefault(key, ComponentContext(bound, component, recipe))
    return tuple(found.values())


# --------------------------------------------------------------------------------------------------
# Planting, and the score of the answer.
#
# Roles are alternated, so that few plants reach many components. The answer is scored by place and
# by cause, both also without the fault's own family.
#
# The effect is measured in the run itself: the worst difference of the planted component from its
# twin, in units of budget. An edge is compared bit for bit, so that it has an effect or none. What
# the engine cannot judge counts against it.

if TYPE_CHECKING:
    _Said = tuple["CauseAnswer", str]


class PlaceAnswer(StrEnum):
    """How the engine's place compares with the true one."""

    EXACT = "exact"
    ELSEWHERE = "elsewhere"  # a component was blamed that has no fault
    ALSO_ELSEWHERE = "also elsewhere"  # the right one, and another one
    NOWHERE = "nowhere"


class CauseAnswer(StrEnum):
    """How the engine's cause compares with the true one."""

    FIRST = "named first"
    SAME = "same data effect"  # another fault of its class is first
    BESIDE = "named beside the first"  # reported as explaining equally well, but of another class
    WRONG = "wrong"
    UNKNOWN = "no known fault"


@dataclass(frozen=True)
class PlantOutcome:
    """One plant and its score. `effect` is in units of budget: 0 for none, inf for an edge's."""

    fault: str
    component: str
    way: str
    case: str
    effect: float
    place: PlaceAnswer = PlaceAnswer.NOWHERE
    cause: CauseAnswer = CauseAnswer.UNKNOWN
    named: str = ""
    left_out: CauseAnswer | None = None  # with the family's signatures taken away
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
class PlantedFault:
    """A variant at its component, and the inputs that it changed if it is on an edge."""

    fault: ModelFault
    component: str
    variant: FaultVariant
    changed_inputs: set[str] = field(default_factory=set)  # inputs that an edge fault changed


def candidate_sites(stage: Stage, fault: ModelFault, chance: random.Random) -> Iterator[str]:
    """Yield components to which a fault applies: one of each role, then others, in random order."""
    by_role: dict[str, list[str]] = defaultdict(list)
    for name in stage.calls:
        context = stage.context(name)
        if fault.applies_to(context):
            by_role[context.role].append(name)
    roles = sorted(by_role)
    chance.shuffle(roles)
    for names in by_role.values():
        chance.shuffle(names)
    while any(by_role.values()):
        for role in roles:
            if by_role[role]:
                yield by_role[role].pop()


def ways_of(stage: Stage, fault: ModelFault, component: str) -> list[FaultVariant]:
    """Return all variants of a fault at a component of a healthy candidate."""
    return list(fault.variants(stage.context(component, stage.candidate())))


def touches(stage: Stage, planted: PlantedFault) -> bool:
    """Return whether a variant changes anything at all in the healthy run's calls."""
    if planted.variant.companions:
        return True  # only a run tells
    candidate = stage.candidate()
    weights, call = candidate.weights_of(planted.component), candidate.calls[planted.component]
    edge = planted.fault.reach is Reach.EDGE
    # Trap: a variant may remember earlier calls, so it is applied once.
    faulty = planted.variant.apply((lambda given, _weights: given) if edge else call)
    for captured_call in stage.calls[planted.component]:
        inputs = stage.healthy.inputs(captured_call)
        with torch.inference_mode():
            try:
                made = faulty(inputs, weights)
            except CANNOT_RUN:
                return False
        if _differ(made, inputs if edge else stage.healthy.outputs(captured_call)):
            return True
    return False


def _differ(made: Mapping[str, Tensor], was: Mapping[str, Tensor]) -> bool:
    return made.keys() != was.keys() or any(not same_bits(made[n], was[n]) for n in was)


def judge_plant(stage: Stage, planted: PlantedFault, *, leave_out: bool) -> PlantOutcome:
    """Run a case with a fault planted, and score the engine's answer."""
    name = planted.component
    told = (planted.fault.id, name, planted.variant.words, str(stage.case))
    candidate, edges = stage.taped(), dict[str, "FaultVariant"]()
    if planted.fault.reach is Reach.EDGE:
        edges[name] = _watched(planted)
    else:
        candidate.calls[name] = planted.variant.apply(stage.candidate().calls[name])
    for other, wrap in planted.variant.companions.items():
        candidate.calls[other] = wrap(candidate.calls[other])
    try:
        run = stage.run(candidate, edges)
    except CANNOT_RUN as error:
        return PlantOutcome(*told, effect=0.0, sentence=f"the run stops: {error}"[:200])
    truth = _truth(stage, planted)
    try:
        found = localise(stage.twin, stage.model.recipe, stage.rest(run))
    except Exception as error:  # noqa: BLE001  an engine that stops has missed the fault
        return PlantOutcome(
            *told, effect=math.nan, truth=tuple(sorted(truth)), sentence=_stop(error)
        )
    blamed = tuple(sorted({origin.component for origin in found.origins}))
    effect = _effect(found, planted)
    place = _place(blamed, truth)
    here = [origin for origin in found.origins if origin.component in truth]
    outcome = {
        "effect": effect, "place": place, "blamed": blamed, "truth": tuple(sorted(truth)),
        "sentence": here[0].sentence if here else "",
    }  # fmt: skip
    if not here:
        return PlantOutcome(*told, **outcome)  # type: ignore[arg-type]
    try:
        remade = FaultyTwin(stage.twin, name, planted.variant, run)
        with remembering(), keeping_budgets():  # of both questions
            said = _diagnosed(here[0], tuple(plantable_faults().values()))
            cause, names = _cause(planted, remade, here[0], said)
            left = _without_family(planted, remade, here[0]) if leave_out else (None, "")
    except Exception as error:  # noqa: BLE001  as above: the place is right, the cause is not said
        outcome["sentence"] = f"{here[0].sentence} | {_stop(error)}"
        return PlantOutcome(*told, **outcome)  # type: ignore[arg-type]
    if said is not None and cause is not CauseAnswer.FIRST:
        outcome["sentence"] = f"{here[0].sentence} | {said.sentence}"
    outcome |= {"cause": cause, "named": names, "left_out": left[0], "left_named": left[1]}
    return PlantOutcome(*told, **outcome)  # type: ignore[arg-type]


def _without_family(planted: PlantedFault, remade: FaultyTwin, discrepancy: Discrepancy) -> _Said:
    """Return the cause named by an engine without the fault's family."""
    family = planted.fault.family
    others = tuple(fault for fault in plantable_faults().values() if fault.family != family)
    return _cause(planted, remade, discrepancy, _diagnosed(discrepancy, others))


def _stop(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = (str(error).splitlines() or [""])[0][:160]
    return f"the engine stops: {type(error).__name__} in {last.name}: {line}"


def _watched(planted: PlantedFault) -> FaultVariant:
    """Wrap the variant so that it records which inputs it changes."""
    from degarble.harness.engine.faults.model_faults import FaultVariant  # noqa: PLC0415

    def apply(call: ComponentCall) -> ComponentCall:
        arrived: dict[str, Tensor] = {}

        def seen(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> Any:
            for key in inputs.keys() | arrived.keys():
                both = key in inputs and key in arrived
                if not both or not same_bits(inputs[key], arrived[key]):
                    planted.changed_inputs.add(key)
            return call(inputs, weights)

        wrapped = planted.variant.apply(seen)  # once: a variant may remember earlier calls

        def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> Any:
            arrived.clear()
            arrived.update(inputs)
            return wrapped(inputs, weights)

        return faulty

    return FaultVariant(
        planted.variant.words, apply, planted.variant.where, planted.variant.companions
    )


def _truth(stage: Stage, planted: PlantedFault) -> set[str]:
    """Return the components to blame; an edge fault that changes several inputs has several."""
    if planted.fault.reach is not Reach.EDGE:
        return {planted.component}
    component = stage.context(planted.component).component
    names = {each.name for each in component.inputs} & planted.changed_inputs
    return {blamed_on_edge(component, name) for name in names} or {planted.component}


def _effect(found: Localised, planted: PlantedFault) -> float:
    if planted.fault.reach is Reach.EDGE:
        return math.inf if planted.changed_inputs else 0.0
    rows = [row for row in found.rows if row.component.name == planted.component]
    odd = [origin for origin in found.origins if origin.component == planted.component]
    ratios = [row.ratio for row in rows]
    # NaN: without a budget the effect is unknown, unless the component was blamed.
    if any(math.isnan(ratio) for ratio in ratios) and not odd:
        return math.nan
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return max(known, default=math.inf if odd else 0.0)


def _place(blamed: Sequence[str], truth: set[str]) -> PlaceAnswer:
    right = truth & set(blamed)
    if right and not set(blamed) - truth:
        return PlaceAnswer.EXACT
    if right:
        return PlaceAnswer.ALSO_ELSEWHERE
    return PlaceAnswer.ELSEWHERE if blamed else PlaceAnswer.NOWHERE


def _diagnosed(discrepancy: Discrepancy, faults: Sequence[ModelFault]) -> Diagnosed | None:
    if discrepancy.record is None:
        return None
    return diagnose(discrepancy.context, (discrepancy.record, *discrepancy.more), faults)


def _cause(
    planted: PlantedFault, remade: FaultyTwin, discrepancy: Discrepancy, said: Diagnosed | None
) -> _Said:
    if said is None or not said.named:
        return CauseAnswer.UNKNOWN, ""
    first = said.named[0]
    if first.id == planted.fault.id:
        return CauseAnswer.FIRST, first.id
    if same_effect(remade, discrepancy, first):
        return CauseAnswer.SAME, first.id
    beside = planted.fault.id in first.alternatives
    return (CauseAnswer.BESIDE if beside else CauseAnswer.WRONG), first.id


# --------------------------------------------------------------------------------------------------
# Plants of a wanted strength: estimate the effect first, then adjust it.
#
# The estimate runs the planted component alone, on the healthy run's inputs, in units of its
# budget. Faults with an adjustable strength are adjusted until the effect is as wanted; of other
# faults mild variants are searched, so that every bin of effect has plants. The score uses the
# effect measured in the whole run, as for all plants.

WANTED = (1.6, 4.0, 2.2, 7.0, 12.0)  # in units of budget; the bins are 1 to 3, 3 to 10, from 10
MILD = (1.0, 10.0)
TRIED = 24  # variants of a fault without a dial that are measured
_TURNS = 7
_NEAR = 1.25  # times the wanted effect, or a part of it
_FIRST = 0.01
_MOST = 0.5


def measure_strength(stage: Stage, component: str, variant: FaultVariant) -> float:
    """Return a variant's worst ratio to budget on the healthy run's first and last call, or NaN."""
    candidate = stage.candidate()
    faulty = variant.apply(candidate.calls[component])
    weights, worst = candidate.weights_of(component), 0.0
    calls = stage.calls[component]
    with torch.inference_mode():
        for call in dict.fromkeys((0, len(calls) - 1)):
            inputs = stage.healthy.inputs(calls[call])
            try:
                known = JudgeableCall.from_twin(stage.twin, component, inputs)
                found = judge_outputs(known, faulty(inputs, weights))
            except CANNOT_RUN:
                return math.nan
            ratios = [result.ratio for result in found.values()]
            if any(math.isnan(ratio) for ratio in ratios):
                return math.nan
            worst = max([worst, *ratios])
    return worst


def adjusted_fault(stage: Stage, fault: str, component: str, wanted: float) -> FaultVariant | None:
    """Return a variant of an adjustable fault with about the wanted effect, or None."""
    context, turn = stage.context(component, stage.candidate()), _FIRST
    with keeping_budgets():
        for _ in range(_TURNS):
            variant = STRENGTHS[fault](context, turn)
            found = math.nan if variant is None else measure_strength(stage, component, variant)
            if math.isnan(found):
                return None
            if wanted / _NEAR <= found <= wanted * _NEAR:
                return variant
            # Assume that the effect is proportional to the strength, within a factor of 8 a trial.
            turn *= min(8.0, max(0.125, wanted / max(found, 1e-3)))
            if turn > _MOST:
                return None
    return None


def mild_plants(
    stages: Sequence[Stage], fault: ModelFault, chance: random.Random
) -> Iterator[tuple[Stage, str, FaultVariant]]:
    """Yield plants of a fault with small effect: adjusted, or among its variants."""
    if fault.reach is Reach.EDGE:
        return
    places = [(stage, candidate_sites(stage, fault, chance)) for stage in stages]
    if fault.id in STRENGTHS:
        yield from _by_dial(places, fault)
        return
    tried = 0
    while places and tried < TRIED:
        stage, names = places.pop(0)
        component = next(names, None)
        if component is None:
            continue
        places.append((stage, names))
        variants = ways_of(stage, fault, component)
        chance.shuffle(variants)
        for variant in islice(variants, 4):
            tried += 1
            if MILD[0] <= measure_strength(stage, component, variant) < MILD[1]:
                yield stage, component, variant


def _by_dial(
    places: list[tuple[Stage, Iterator[str]]], fault: ModelFault
) -> Iterator[tuple[Stage, str, FaultVariant]]:
    wanted = 0
    while places:
        stage, names = places.pop(0)
        component = next(names, None)
        if component is None:
            continue
        places.append((stage, names))
        variant = adjusted_fault(stage, fault.id, component, WANTED[wanted % len(WANTED)])
        wanted += 1
        if variant is not None:
            yield stage, component, variant


# --------------------------------------------------------------------------------------------------
# Equal runs, compared bit for bit: what differs is UNSTABLE.
#
# A candidate runs a case twice, both runs are written as captures, and `degarble compare` judges
# them. A race keeps its random state from one run to the next, so that the runs are damaged in
# different places; a component of a healthy candidate may sum in any order, but in the same one
# each time. If both runs are equal the race counts as without effect.

REPEATED = (
    "M36.workspace",
    "M37",
)  # what is left over or spoilt by chance is another one each time


@dataclass(frozen=True)
class RepeatedRun:
    """Two runs of one candidate. `fault` is empty for a healthy one."""

    fault: str
    component: str
    way: str
    case: str
    verdict: Verdict
    blamed: tuple[str, ...] = field(default=())  # in the order of the run
    seconds: float = 0.0

    @property
    def differs(self) -> bool:
        """Return whether the two runs differ."""
        return self.verdict is not Verdict.AGREES

    @property
    def right(self) -> bool:
        """Return whether the answer is right: UNSTABLE at the planted component first, or equal."""
        if not self.fault:
            return not self.differs
        return self.verdict is Verdict.UNSTABLE and self.blamed[:1] == (self.component,)


def run_repeatedly(
    stage: Stage,
    fault: str = "",
    component: str = "",
    variant: FaultVariant | None = None,
    root: Path | None = None,
) -> RepeatedRun:
    """Run a case twice and compare the captures, which are kept in `root` meanwhile."""
    candidate = stage.candidate()
    if variant is not None:
        candidate.calls[component] = variant.apply(candidate.calls[component])
    # Trap: a worker of an interrupted museum is ended by SIGTERM and removes nothing; its caller
    # removes the folder of all of it.
    with TemporaryDirectory(prefix="degarble-repeat-", dir=root) as made:
        folders = [Path(made) / name for name in ("first", "second")]
        for folder in folders:
            write_capture(stage.run(candidate), folder, {"weights": str(stage.case)})
        comparison = compare_runs(*folders)
        blamed = tuple(dict.fromkeys(line.component for line in comparison.origins))
        told = (fault, component, variant.words if variant else "", str(stage.case))
        return RepeatedRun(*told, comparison.verdict, blamed)


def write_capture(run: InMemoryRun, folder: Path, facts: Mapping[str, str]) -> None:
    """Write a run that was kept in memory as a capture."""
    snapshots = Snapshots()

    def sent(side: Mapping[str, Tensor]) -> dict[str, PendingTensor]:
        taken = {name: snapshots.take(tensor).payload for name, tensor in side.items()}
        return {
            name: PendingTensor(taken[name], tuple(tensor.shape)) for name, tensor in side.items()
        }

    with CaptureWriter(folder, facts) as writer:
        steps = iter(run.steps)
        reached = -1
        for call in run.calls:
            while reached < call.step:
                step = next(steps)
                reached = step.number
                writer.step(step)
            sides = (sent(run.inputs(call)), sent(run.outputs(call)))
            writer.call(PendingCall(call.step, call.component, *sides, call.changed))
        writer.finish()
