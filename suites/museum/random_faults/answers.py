"""Judge what the engine answers about random faults, by what its claims do to other tokens.

A cause is a change of the component. It is true if it does to a held-back run what the fault does
there, in the calls and rows where the fault acts; words are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.records import Phase
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.trial import make
from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.localise.recorded_run import by_component
from degarble.harness.engine.localise.replay import batches
from degarble.suites.museum.random_faults.conditions import ALWAYS, Condition

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.diagnose.diagnose import Diagnosed
    from degarble.harness.engine.faults.model_faults import FaultVariant
    from degarble.harness.engine.localise.discrepancy import Discrepancy
    from degarble.harness.engine.localise.localise import Localised
    from degarble.suites.museum.random_faults.stages import RandomFault, Stage

    Tensors = Mapping[str, Tensor]

FAINT = 0.1  # of what a fault changes in most rows: less may not show
LEFT = 0.1  # of what a fault changes, that a true cause may leave: fitted numbers
PART = "are healthy"  # ends what is said of a part of the run
STRONG = 3.0  # budgets from which on a fault has to be found


class CauseAnswer(StrEnum):
    """What was said of the cause of one fault."""

    NAMED = "named"
    DESCRIBED = "described"
    AMBIGUOUS = "ambiguous"  # the true cause is said to be one of several
    SILENT = "silent"
    FALSE = "false"


@dataclass(frozen=True)
class FaultAnswer:
    """What was said of one fault: whether its component was found, and of its cause."""

    truth: Mapping[str, Any]
    effect: float  # in budgets
    placed: bool
    cause: CauseAnswer = CauseAnswer.SILENT
    cause_id: str = ""
    sentence: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    proof: Mapping[str, float] = field(default_factory=dict)  # of the first cause
    condition: str = ""  # what was said of when it acts: right, also possible, silent, wrong

    @property
    def counts(self) -> bool:
        """Return whether rounding cannot explain it by far."""
        return self.effect >= STRONG


@dataclass(frozen=True)
class RunAnswer:
    """What was said of a run: of each of its faults, and which components were blamed wrongly."""

    answers: tuple[FaultAnswer, ...]
    elsewhere: tuple[str, ...] = ()


def judged(stage: Stage, faults: Sequence[RandomFault]) -> RunAnswer:
    """Plant faults, and judge what the engine says of the run."""
    found = stage.localised(stage.run(faults))
    origins: dict[str, Discrepancy] = {}
    for origin in found.origins:
        origins.setdefault(origin.component, origin)
    answers = [
        _answer(stage, fault, _effect(found, fault.component), origins.get(fault.component))
        for fault in faults
    ]
    planted = {fault.component for fault in faults}
    return RunAnswer(tuple(answers), tuple(sorted(origins.keys() - planted)))


def _effect(found: Localised, component: str) -> float:
    ratios = [row.ratio for row in found.rows if row.component.name == component]
    return max((ratio for ratio in ratios if ratio == ratio), default=0.0)  # noqa: PLR0124  NaN


def _answer(
    stage: Stage, fault: RandomFault, effect: float, origin: Discrepancy | None
) -> FaultAnswer:
    if origin is None:
        return FaultAnswer(fault.truth, effect, placed=False)
    if origin.record is None:
        return FaultAnswer(fault.truth, effect, placed=True, sentence=origin.sentence)
    told = diagnose(origin.context, [origin.record, *origin.more])
    cause, name = _cause(stage, fault, told)
    return FaultAnswer(
        fault.truth, effect, True, cause, name, f"{origin.sentence} | {told.sentence}",
        dict(told.where) | dict(origin.where), _proof(told),
        _condition(stage, fault, origin, told),
    )  # fmt: skip


# Features of rows by which a condition may be said, and the condition that they mean.
_FEATURES = {
    "phase": ("phase",), "sequence": ("sequence",), "expert": ("expert",), "tokens":
    ("calls of tokens",), "length": ("length",), "position": ("position",), "step": ("one step",),
    "steps": ("from step", "to step", "one step"),
}  # fmt: skip


def _condition(stage: Stage, fault: RandomFault, origin: Discrepancy, told: Diagnosed) -> str:
    """Compare the rules that are said with the rows in which the fault acts."""
    said = told.named[0].condition if told.named else told.condition
    meant = fault.condition.kind
    if said is None:
        return "" if meant == ALWAYS else "silent"
    if "rows of call" in fault.truth:
        return "also possible"  # the rows of every call are no condition that can be said
    assert origin.record is not None, "it was diagnosed"
    acted = list(_acted(stage, fault))
    if any(
        rule.holds(place[rule.feature]) != acts
        for rule in said.rules
        for place, acts in acted
        if rule.feature in place and place[rule.feature] not in rule.unknown
    ):
        return "wrong"
    right = any(meant in _FEATURES[rule.feature] for rule in said.rules)
    return "right" if right else "also possible"


def _acted(stage: Stage, fault: RandomFault) -> Iterator[tuple[dict[str, int], bool]]:
    """Yield rows on which a fault would show, and whether it acts there."""
    always = replace(fault, condition=Condition())
    steps = {step.number: step for step in stage.held.steps}
    rows = []
    for call, wrong in _faulty(stage, always):
        right = _right(stage, fault.component, stage.held.inputs(call))
        step = steps[call.step]
        lengths = dict(zip(step.sequences, step.positions, strict=True))
        name = next(iter(right))
        acts = fault.condition.rows(step, len(right[name])) if right[name].ndim else None
        if acts is None or len(acts) != len(step.tokens):
            continue
        acts = acts & fault.condition.holds_in(step)
        change = _numbers(wrong[name]) - _numbers(right[name])
        for row, size in enumerate(change.flatten(1).norm(dim=1).tolist()):
            owner = step.sequences[row]
            rows.append((size, bool(acts[row]), {
                "phase": int(step.phase is Phase.DECODE), "step": step.number,
                "steps": step.number, "tokens": len(step.tokens), "sequence": owner,
                "length": lengths[owner] + 1, "position": step.positions[row],
            }))  # fmt: skip
    sizes = sorted(size for size, _, _ in rows if size)
    least = FAINT * sizes[len(sizes) // 2] if sizes else 0.0
    for size, acts_here, place in rows:
        if size > least:
            yield place, acts_here


def _proof(told: Diagnosed) -> dict[str, float]:
    """Return what is known of the first cause when it is said."""
    if told.named:
        first = told.named[0]
        return {"confidence": told.confidence, "within": first.reproduced,
                "as stored": first.as_stored, "ratio": first.ratio,
                "causes": len(told.named)}  # fmt: skip
    if told.described is None:
        return {}
    fit = told.described.fit
    return {
        "confidence": told.confidence,
        "within": fit.within,
        "identical": fit.identical,
        "ratio": fit.ratio,
        "causes": 1,
    }


def _cause(stage: Stage, fault: RandomFault, told: Diagnosed) -> tuple[CauseAnswer, str]:
    if told.named:
        right = [_is_true(stage, fault, each.variant, each.evidence) for each in told.named]
        answer = CauseAnswer.NAMED if right[0] else CauseAnswer.AMBIGUOUS
        return answer if any(right) else CauseAnswer.FALSE, told.named[0].id
    if told.described is None:
        return CauseAnswer.SILENT, ""
    if _is_true(stage, fault, told.described.variant, told.described.sentence):
        return CauseAnswer.DESCRIBED, "described"
    several = "explain it as well" in " ".join((told.described.sentence, *told.described.table))
    return CauseAnswer.AMBIGUOUS if several else CauseAnswer.FALSE, "described"


def _is_true(stage: Stage, fault: RandomFault, claimed: FaultVariant, said: str) -> bool:
    """Return whether a claimed change does to the held-back run what the fault does.

    A claim about a part of the run is compared on the rows that the fault changes.
    """
    for sides in (_calls_together, _calls_alone):
        found = list(sides(stage, fault, claimed))
        if said.endswith(PART) or f"{PART}." in said:
            found = [(_in_part(*each), *each[1:]) for each in found]
        left = (
            torch.tensor([_left(*each) for each in found], dtype=torch.float64)
            .reshape(-1, 2, 2)
            .sum(0)
        )
        # What is beyond roundings counts; where nothing is, everything.
        rest, whole = (left[0] if float(left[0, 1]) else left[1]).tolist()
        if found and rest <= LEFT**2 * whole:
            return True
    return False


def _calls_together(
    stage: Stage, fault: RandomFault, claimed: FaultVariant
) -> Iterator[tuple[Tensors | None, Tensors, Tensors]]:
    """Yield what a claim, the fault and a healthy twin put out; calls joined as they are judged."""
    run, context = stage.held, stage.context(fault.component)
    steps = {step.number: step for step in run.steps}
    calls = by_component(run)[fault.component]
    made = {call.step: outputs for call, outputs in _faulty(stage, fault)}
    for batch in batches(run, context.component, calls, steps):
        right = _right(stage, fault.component, batch.inputs)
        truth = _joined([made[call.step] for call in batch.calls], right)
        record = CallRecord(batch.inputs, truth, right, step=batch.calls[0].step)
        with torch.inference_mode():
            outputs = make(context, record, claimed)
        yield None if outputs is None else outputs.outputs, truth, right


def _calls_alone(
    stage: Stage, fault: RandomFault, claimed: FaultVariant
) -> Iterator[tuple[Tensors | None, Tensors, Tensors]]:
    """Yield the same call by call, with the claim where the fault acts alone."""
    run, context = stage.held, stage.context(fault.component)
    steps = {step.number: step for step in run.steps}
    for call, truth in _faulty(stage, fault):
        inputs = run.inputs(call)
        right = _right(stage, fault.component, inputs)
        with torch.inference_mode():
            outputs = make(context, CallRecord(inputs, truth, right, step=call.step), claimed)
        if outputs is None or outputs.outputs.keys() < right.keys():
            yield None, truth, right
        else:
            step = steps[call.step]
            yield fault.condition.mixed(step, inputs, right, outputs.outputs), truth, right


def _faulty(stage: Stage, fault: RandomFault) -> Iterator[tuple[CapturedCall, Tensors]]:
    """Yield what the fault makes of each call of the held-back run."""
    name, run, twin = fault.component, stage.held, stage.twin
    steps, at = {step.number: step for step in run.steps}, [0]
    planted = fault.plant(twin.calls[name], lambda: steps[at[0]])
    for call in by_component(run)[name]:
        at[0] = call.step
        with torch.inference_mode():
            yield call, dict(planted(run.inputs(call), twin.weights_of(name)))


def _right(stage: Stage, name: str, inputs: Tensors) -> Tensors:
    with torch.inference_mode():
        return dict(stage.twin.calls[name](inputs, stage.twin.weights_of(name)))


def _joined(parts: Sequence[Tensors], like: Tensors) -> Tensors:
    """Join the outputs of calls as their inputs were joined; what all rows share stays as it is."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: torch.cat([part[name] for part in parts])
        if len(tensor) == sum(len(part[name]) for part in parts)
        else parts[0][name]
        for name, tensor in like.items()
        if tensor.ndim
    }


def _in_part(claim: Tensors | None, truth: Tensors, right: Tensors) -> Tensors | None:
    """Return a claim on the rows that the fault changes, and what is right on the others."""
    if claim is None or any(n not in claim or claim[n].shape != t.shape for n, t in right.items()):
        return None
    made = {}
    for name, good in right.items():
        same = (_numbers(truth[name]) == _numbers(good)).flatten(1).all(1) if good.ndim > 1 else (
            torch.zeros(good.shape[:1], dtype=torch.bool)
        )  # fmt: skip
        made[name] = claim[name].clone()
        made[name][same] = good[same]
    return made


def _left(
    claim: Tensors | None, truth: Tensors, right: Tensors
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the squared difference that a claim leaves of the fault's, and the fault's own.

    First of what is beyond roundings, then of everything: a change before a sum is stored and the
    same change after it are rounded at other places.
    """
    left, whole = [0.0, 0.0], [0.0, 0.0]
    for name, wrong in truth.items():
        other = None if claim is None else claim.get(name)
        size = float(_numbers(right[name]).square().sum()) or 1.0
        if other is None or other.shape != wrong.shape:
            return (1.0, 0.0), (1.0, 0.0)
        for at, (rest, change) in enumerate(
            zip(_apart(other, wrong), _apart(wrong, right[name]), strict=True)
        ):
            left[at] += rest / size
            whole[at] += change / size
    return (left[0], whole[0]), (left[1], whole[1])


def _apart(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the square of how far outputs differ: beyond a rounding of each number, and at all."""
    a, b = _numbers(one), _numbers(other)
    gap = (a - b).abs()
    beyond = gap
    if one.is_floating_point() and one.dtype.itemsize > 1:
        step = torch.maximum(a.abs(), b.abs()) * torch.finfo(one.dtype).eps
        beyond = (gap - step).clamp(min=0)
    return float(beyond.square().sum()), float(gap.square().sum())


def _numbers(x: Tensor) -> Tensor:
    """Return codes and choices as numbers as well."""
    if x.is_floating_point() and x.dtype.itemsize == 1:
        x = x.view(torch.uint8)
    return x.double().nan_to_num(0.0, 1e30, -1e30)
