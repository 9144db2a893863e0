"""Name the fault that explains a component's difference, by reproduction; or none.

Every fault that applies proposes variants. Each is tried on a sample: a few rows and columns that
differ. What explains the sample is proved on every row of every call; if no fault explains all
calls, each call, and each part in which calls differ, is diagnosed by itself.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.budget.attention import keeping_budgets
from degarble.harness.engine.conventions.registry import REGISTRY
from degarble.harness.engine.diagnose.conditions import condition_of, struck_rows
from degarble.harness.engine.diagnose.trial import (
    VariantFit,
    calls_in,
    distance,
    explained,
    in_every_call,
    make,
    most_telling,
    only_roundings,
    proof,
    proposed,
    sampled,
    seen_tensors,
    sequences_in,
    shape_distance,
    together,
    untouched,
)
from degarble.harness.engine.faults.model_faults import CallRecord, FaultVariant, Reach
from degarble.harness.engine.faults.regions import apart, flat
from degarble.harness.engine.faults.registry import faults_for
from degarble.harness.engine.faults.traced.inputs import taken_anew
from degarble.harness.engine.faults.weight_faults import decode_small, remembering
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.engine.localise.replay import RAGGED
from degarble.harness.engine.recover.described import describe, in_some_rows
from degarble.harness.engine.recover.lacking import lacking
from degarble.harness.engine.recover.shares import shares_of
from degarble.harness.report.number_text import number, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.engine.diagnose.conditions import ActiveCondition
    from degarble.harness.engine.diagnose.trial import Measure, Sample
    from degarble.harness.engine.faults.model_faults import ComponentContext, ModelFault
    from degarble.harness.engine.recover.described import Described


# --------------------------------------------------------------------------------------------------
# Diagnose faults whose damage differs from call to call: races, stale graphs, workspaces.
#
# Each call is diagnosed by itself, together with the tensors of the same component in earlier
# calls. A fault holds if one of its variants explains every call that the plain twin does not. This
# runs only where no variant explains all calls alike.

MOST_CALLS = 8  # calls examined at most
MOST_VARIANTS = 64  # variants of a fault tried on one call
_NOTHING = FaultVariant("nothing", lambda call: call)


@dataclass(frozen=True, eq=False)
class CallByCall:
    """A fault that explains every call, each by its own variant; the worst of the proofs."""

    fault: ModelFault
    variant: FaultVariant
    proof: VariantFit
    calls: int


def call_by_call(
    context: ComponentContext, records: Sequence[CallRecord], faults: Iterable[ModelFault]
) -> Iterator[CallByCall]:
    """Yield each fault that explains every call by a variant of its own."""
    calls = with_earlier(records)[-MOST_CALLS:]
    spoilt = [record for record in calls if explained(context, record, _NOTHING) is None]
    for fault in faults:
        if not fault.per_call or not spoilt or not fault.applies_to(context):
            continue
        found = []
        for call in spoilt:
            best = _first(context, call, fault)
            if best is None:
                break
            found.append(best)
        else:
            variant, worst = max(found, key=lambda each: each[1].ratio)
            yield CallByCall(fault, variant, worst, len(found))


def with_earlier(records: Sequence[CallRecord]) -> list[CallRecord]:
    """Return single calls in the order of their steps, each with those before it."""
    single = [call for call_record in records for call in calls_in(call_record)]
    ordered = sorted(single, key=lambda call_record: call_record.step)
    found = []
    for at, record in enumerate(ordered):
        # Do not list an earlier call twice.
        known = {id(other.outputs) for other in record.earlier}
        more = (other for other in ordered[:at] if id(other.outputs) not in known)
        found.append(replace(record, earlier=(*record.earlier, *more)))
    return found


def _first(
    context: ComponentContext, call: CallRecord, fault: ModelFault
) -> tuple[FaultVariant, VariantFit] | None:
    for variant in islice(proposed(fault, context, call), MOST_VARIANTS):
        fit = explained(context, call, variant)
        if fit is not None:
            return variant, fit
    return None


# --------------------------------------------------------------------------------------------------
# Separate the calls or sequences in which a fault acts from the healthy ones.
#
# A fault may act in one phase, in one call or on one sequence. A variant that explains it there
# changes the others as well, so no proof over every call holds. Calls or sequences that match the
# healthy twin need no explanation; the cause is searched in the rest.

_MOST = 64  # calls or sequences examined at most


def differing_parts(
    context: ComponentContext, records: Sequence[CallRecord]
) -> Iterator[tuple[str, list[CallRecord]]]:
    """Yield what remains without the healthy calls, then without the healthy sequences.

    Each comes with a description; nothing is yielded where all of them differ.
    """
    calls = [call for record in records for call in calls_in(record)]
    wrong = _unhealthy(context, calls)
    if 0 < len(wrong) < len(calls):
        yield f"in {len(wrong)} of {len(calls)} calls, the others are healthy", wrong
    # Only the differing calls are split into sequences.
    apart = [record for call in wrong for record in sequences_in(context, call)]
    left = _unhealthy(context, apart) if len(apart) > len(wrong) else apart
    if 0 < len(left) < len(apart):
        text = f"of {len(left)} of {len(apart)} sequences of these calls, the others are healthy"
        yield text, left


def _struck_part(
    context: ComponentContext, records: Sequence[CallRecord]
) -> Iterator[tuple[str, list[CallRecord]]]:
    """Yield the rows that are beyond their budgets, where rows are independent and some are not."""
    cut = [part for record in records if (part := struck_rows(context, record)) is not None]
    if cut:
        yield "", cut


def _unhealthy(context: ComponentContext, records: Sequence[CallRecord]) -> list[CallRecord]:
    if len(records) > _MOST:
        return []
    return [record for record in records if not _is_healthy(context, record)]


def _is_healthy(context: ComponentContext, record: CallRecord) -> bool:
    return explained(context, record, _NOTHING) is not None


# --------------------------------------------------------------------------------------------------
# Every fault that applies proposes variants. Each is tried on a sample: a few
# rows, those that differ most. Those that leave little of the difference are proved on every row of
# every call: the twin with the variant must return what the candidate returned, within the budget
# fraction of a healthy component. So a variant has to explain every row that differs and break none
# that agreed. If none does, and some calls or sequences are healthy, the others alone are
# diagnosed; after that, pairs of variants are tried. Equal explanations are ranked by simplicity,
# where fitted numbers count against a variant; the rest are listed as alternatives. A wrong cause
# is worse than none.

EXPLAINS = 0.5  # of the difference may be left: three quarters of its energy are explained
IN_SUMS = 0.866  # of it, where no number is beyond its budget: a quarter of its energy is explained
ALIKE_IN_SUMS = 0.9  # of the energy that the best variant explains there
PIECE = 64  # elements of a row summed into one piece
EQUALLY = 4.0  # times what the best variant leaves: variants below explain equally well
PART = 0.9  # of the difference: a fault that leaves more explains no part of it
PAIRS_LEAVE = 0.5  # of what either fault leaves alone; more, and the second adds nothing
PROVED = 12  # variants at most that are proved on every row
_PAIRED = 3  # first variants of a pair at most, from each of the two rankings
_PARTNERS = 20  # second variants of a pair at most
_NOISE = 1e-6  # of the difference: below, all is explained
_ROUNDINGS = 0.01  # of the difference: more is never left by roundings alone
_BLIND = EQUALLY**2 * _NOISE  # least remainder if small outputs are wrong, which a norm hides
_WHOLE = 1 << 22  # elements of an output up to which whole calls are tried
_TINY = 1e-30
_NEAREST = 3  # excluded faults in a sentence
_PARTS = ("head", "expert", "column")  # of an output


@dataclass(frozen=True, eq=False)
class NamedFault:
    """A cause: one fault, or two at once, and the proof that it explains every call.

    `reproduced` and `as_stored` are the shares of outputs within budget, with the variant and
    without.
    """

    faults: tuple[ModelFault, ...]
    variant: FaultVariant
    reproduced: float
    as_stored: float
    ratio: float
    evidence: str
    alternatives: tuple[str, ...] = ()
    condition: ActiveCondition | None = None

    @property
    def fault(self) -> ModelFault:
        """Return the fault; the first of two."""
        return self.faults[0]

    @property
    def id(self) -> str:
        """Return its id, or both ids."""
        return " + ".join(fault.id for fault in self.faults)


@dataclass(frozen=True)
class Excluded:
    """A rejected fault, its nearest variant, and the share of the difference that remains."""

    fault: str
    words: str
    left: float


@dataclass(frozen=True, eq=False)
class Diagnosed:
    """The diagnosis of one discrepancy; causes are ranked, and none means no known fault.

    Where none is named, what the component computed with may be described all the same.
    """

    named: tuple[NamedFault, ...]
    excluded: tuple[Excluded, ...]
    tried: int
    sentence: str
    like: str = ""  # the component whose cause was tried first, and holds here as well
    described: Described | None = None
    condition: ActiveCondition | None = None  # of what is described
    confidence: float = 0.0  # that the first cause gives the next row as well, and no other does
    wanted: str = ""  # which data would tell more, where nothing is named or described

    @property
    def where(self) -> Mapping[str, str]:
        """Return when the first cause acts, as data; empty where it always does."""
        condition = self.named[0].condition if self.named else self.condition
        return {} if condition is None else condition.where


@dataclass(frozen=True, eq=False)
class _Trial:
    order: int
    fault: tuple[ModelFault, ...]
    variant: FaultVariant
    left: float
    uncut: bool = False  # tried on a whole call only
    alone: tuple[float, ...] = ()  # what each of several faults leaves by itself

    @property
    def fitted(self) -> int:
        """Return how many facts were fitted: numbers, rows of a weight, columns of an input.

        A number with its own part of an output counts twice: a weight's rows with a known fault are
        simpler.
        """
        where = self.variant.where
        found = sum(isinstance(each, float) for each in where.values())
        part = found and any(each in where for each in _PARTS)
        return found + bool(part) + ("rows" in where) + ("columns" in where)


def diagnose(
    context: ComponentContext,
    records: CallRecord | Sequence[CallRecord],
    faults: Iterable[ModelFault] | None = None,
) -> Diagnosed:
    """Diagnose calls of one component that belong together; on an edge, those of its consumer."""
    apart = [records] if isinstance(records, CallRecord) else list(records)
    calls = together(context, apart)
    reach = Reach.EDGE if calls[0].implied else Reach.COMPONENT
    known = faults_for(context) if faults is None else faults
    sitting = [fault for fault in known if fault.reach is reach and fault.applies_to(context)]
    main = most_telling(calls)
    if not _has_the_twins_form(main):
        sentence = "No known fault explains this: its outputs have another form, so none was tried."
        return Diagnosed((), (), 0, sentence)
    # Inference mode passes composite operators, of which errors are not known, whole to modes.
    decode_small(context.weights, context.bound.numerics.products)
    recorded = torch.no_grad() if context.component.kind else torch.inference_mode()
    with recorded, remembering(), keeping_budgets():
        sample = sampled(context, main)
        # Faults that differ from call to call are tried only where nothing explains all calls
        # alike.
        steady = [fault for fault in sitting if not fault.per_call]
        named, trials = _alike_in_all(context, calls, (main, sample), steady)
        if not named:
            named = _races(context, apart, sitting)
        alone = [trial for trial in trials if not trial.uncut]
        # Where no fault explains a part, parts, pairs and conventions rarely help: describe first.
        partly = any(trial.left <= PART for trial in alone)
        whole = [main, *_but(calls, main)]
        described = None if named or partly else describe(context, whole)
        known_so = bool(named) or described is not None
        parts = [] if known_so or reach is Reach.EDGE else _parts(context, apart)
        named = named or _in_a_part(context, apart, parts, steady)
        if not named and not known_so and reach is Reach.COMPONENT:
            named = _in_a_share(context, calls, steady)
        pairs: list[_Trial] = []
        if not named and described is None:
            pairs = list(_pairs(context, sample, alone))
            named = _proved(context, calls, main, pairs)
        if not named and described is None and _shows_in_sums_only(context, calls):
            named = _proved(context, calls, main, _in_sums(context, main, trials), IN_SUMS)
        if not named and partly:
            described = describe(context, whole)
        condition = None
        if not named and described is None:
            described, condition = _described_in_a_part(context, apart, parts)
        if not named and described is None and context.component.kind:
            named = _by_other_conventions(context, apart, steady)
    excluded = _excluded(trials, named)
    tried = sum(not trial.uncut for trial in trials) + len(pairs)
    sentence = _sentence(named, excluded, len(sitting), tried)
    if described is not None:
        sentence = f"{described.evidence} {sentence}"
    wanted = lacking(context, main) if described is None and not named else ""
    confidence = confidence_of(calls, named, described)
    return Diagnosed(
        named, excluded, tried, sentence, described=described, condition=condition,
        confidence=confidence, wanted=wanted,
    )  # fmt: skip


def confidence_of(
    calls: Sequence[CallRecord], named: Sequence[NamedFault], described: Described | None
) -> float:
    """Return how sure the first cause is: 0 without one.

    It gives every one of n rows that differ; by Laplace's rule of succession the next one follows
    it with (n + 1) / (n + 2). Causes that explain them equally well share that, and a cause that
    leaves outputs beyond their budget has only its part of it.
    """
    if named:
        within, equal = named[0].reproduced, 1 + len(named[0].alternatives)
    elif described is not None:
        within, equal = described.fit.within, 1
    else:
        return 0.0
    rows = sum(map(_differing_rows, calls))
    return round(within * (rows + 1) / (rows + 2) / equal, 4)


def _differing_rows(record: CallRecord) -> int:
    """Count the rows of a call that differ by more than roundings; by anything, where none does."""
    expected, beyond, unlike = untouched(record), 0, 0
    for name, seen in seen_tensors(record).items():
        right = expected.get(name)
        if right is None or seen.shape != right.shape or seen.ndim < 1 or not seen.numel():
            continue
        count = len(seen)
        beyond = max(beyond, int(apart(seen, right).reshape(count, -1).any(1).sum()))
        unlike = max(unlike, int((flat(seen) != flat(right)).reshape(count, -1).any(1).sum()))
    return beyond or unlike


def _but(calls: Sequence[CallRecord], main: CallRecord) -> list[CallRecord]:
    return [call for call in calls if call is not main]


def _has_the_twins_form(record: CallRecord) -> bool:
    """Tell whether the tensors have the twin's rows, and no integers in place of numbers.

    A byte may stand for a narrow float, and rows may be split into heads or not.
    """
    expected = untouched(record)
    pairs = [(tensor, expected[n]) for n, tensor in seen_tensors(record).items() if n in expected]
    return bool(pairs) and all(
        tensor.ndim >= min(twin.ndim, 2)
        and (tensor.is_floating_point() or tensor.itemsize == 1 or not twin.is_floating_point())
        for tensor, twin in pairs
    )


def _alike_in_all(
    context: ComponentContext,
    calls: Sequence[CallRecord],
    shown: tuple[CallRecord, Sample],
    sitting: Sequence[ModelFault],
) -> tuple[tuple[NamedFault, ...], list[_Trial]]:
    """Return causes that explain all calls alike, and every trial; `shown` is tried first."""
    main, sample = shown
    trials = list(_trials(context, main, sample, sitting))
    named = _proved(context, calls, main, trials)
    if not named and not (sample.whole and len(main.rows) < 2):
        # A fault that counts rows or tiles shows its pattern only in a whole call.
        whole = _uncut(context, main)
        if whole is not None:
            more = [
                replace(trial, uncut=True)
                for trial in _trials(context, main, whole, sitting, weights=False)
            ]
            named = _proved(context, calls, main, more)
            trials += more
    return named, trials


def _parts(
    context: ComponentContext, apart: Sequence[CallRecord]
) -> list[tuple[str, list[CallRecord]]]:
    """Return the calls, the sequences and the rows that differ, where the others are healthy."""
    found = list(differing_parts(context, apart))
    for words, part in _struck_part(context, together(context, apart)):
        if not found or not _are_same(together(context, found[-1][1]), part):
            found.append((words, part))
    return found


def _are_same(calls: Sequence[CallRecord], others: Sequence[CallRecord]) -> bool:
    """Tell whether records hold the same numbers, their rows divided into calls or not."""
    return len(calls) == len(others) and all(
        one.keys() == other.keys()
        and all(same_bits(tensor, other[name]) for name, tensor in one.items())
        for a, b in zip(calls, others, strict=True)
        for one, other in ((a.inputs, b.inputs), (a.outputs, b.outputs), (a.held, b.held))
    )


def _in_a_part(
    context: ComponentContext,
    apart: Sequence[CallRecord],
    parts: Sequence[tuple[str, list[CallRecord]]],
    sitting: Sequence[ModelFault],
) -> tuple[NamedFault, ...]:
    """Return causes that act in some calls, on some sequences or rows; the others are healthy."""
    for words, part in parts:
        calls = together(context, part)
        main = most_telling(calls)
        named, _ = _alike_in_all(context, calls, (main, sampled(context, main)), sitting)
        found = []
        for each in named:
            condition = condition_of(context, together(context, apart), each.variant)
            when = words if condition is None else condition.sentence
            if when:
                evidence = f"{each.evidence}, {when}"
                found.append(replace(each, evidence=evidence, condition=condition))
        if found:
            return tuple(found)
    return ()


def _in_a_share(
    context: ComponentContext, calls: Sequence[CallRecord], sitting: Sequence[ModelFault]
) -> tuple[NamedFault, ...]:
    """Return causes that act in some heads, or in one rank's columns; the others are healthy."""
    cut = shares_of(context, calls)
    if cut is None:
        return ()
    main = most_telling(cut.calls)
    named, _ = _alike_in_all(context, cut.calls, (main, sampled(context, main)), sitting)
    stored = _as_stored(context, most_telling(calls)) if named else 0.0
    found = []
    for each in named:
        variant = cut.alone(each.variant)
        fit = _on_every_call(context, calls, most_telling(calls), variant)
        if fit is not None:
            evidence = _evidence(variant, fit, stored)
            found.append(replace(
                each, variant=variant, reproduced=fit.within, as_stored=stored, ratio=fit.ratio,
                evidence=evidence,
            ))  # fmt: skip
    return _as_alternatives(found)


def _as_alternatives(found: Sequence[NamedFault]) -> tuple[NamedFault, ...]:
    """Return causes each of which names the others."""
    ids = [each.id for each in found]
    return tuple(
        replace(each, alternatives=(*ids[:at], *ids[at + 1 :])) for at, each in enumerate(found)
    )


def _described_in_a_part(
    context: ComponentContext,
    apart: Sequence[CallRecord],
    parts: Sequence[tuple[str, list[CallRecord]]],
) -> tuple[Described | None, ActiveCondition | None]:
    """Describe what was computed in some calls, on some sequences or rows, and when."""
    for words, part in parts:
        calls = together(context, part)
        main = most_telling(calls)
        found = describe(context, [main, *_but(calls, main)])
        if found is None or (found.here and any(len(call.rows) > 1 for call in calls)):
            continue  # nothing, or by rows that are counted over several calls
        condition = condition_of(context, together(context, apart), found.variant)
        when = words if condition is None else condition.sentence
        if when:
            sentence = f"{found.sentence.removesuffix('.')}, {when}."
            return replace(found, sentence=sentence), condition
    whole = together(context, apart)
    if parts and not whole[0].implied:
        beside = in_some_rows(context, [call for record in whole for call in calls_in(record)])
        if beside is not None:
            found, condition = beside
            sentence = f"{found.sentence.removesuffix('.')}, {condition.sentence}."
            return replace(found, sentence=sentence), condition
    return None, None


def _by_other_conventions(
    context: ComponentContext, apart: Sequence[CallRecord], sitting: Sequence[ModelFault]
) -> tuple[NamedFault, ...]:
    """Return causes for a twin on the other side of a convention.

    A component that is wrong shows no convention, and contradicts that of the others.
    """
    kind, twin = context.component.kind, context.bound
    switches = twin.numerics.switches
    for convention in REGISTRY.values():
        if kind not in convention.roles:
            continue
        for value in convention.values:
            if value == getattr(switches, convention.name, None):
                continue
            other = replace(context, bound=twin.with_switches(**{convention.name: value}))
            records = list(_as_taken_by(other, apart))
            if len(records) < len(apart):
                continue  # codes were recorded: nobody knows of which numbers
            calls = together(other, records)
            main = most_telling(calls)
            known = [fault for fault in sitting if fault.applies_to(other)]
            named, _ = _alike_in_all(other, calls, (main, sampled(other, main)), known)
            if named:
                return named
    return ()


def _as_taken_by(context: ComponentContext, records: Sequence[CallRecord]) -> Iterator[CallRecord]:
    """Yield calls as another twin takes and computes them, where it can."""
    for record in records:
        inputs = taken_anew(context, record.inputs)
        if inputs is not None:
            yield replace(record, inputs=inputs, expected=context.call(inputs, context.weights))


def _each_by_itself(
    context: ComponentContext, calls: Sequence[CallRecord], sitting: Sequence[ModelFault]
) -> tuple[NamedFault, ...]:
    """Return causes whose damage differs in every call."""
    found = list(call_by_call(context, calls, sitting))
    ids = [call.fault.id for call in found]
    stored = _as_stored(context, most_telling(calls)) if found else 0.0
    return tuple(
        NamedFault(
            (call.fault,),
            call.variant,
            call.proof.within,
            stored,
            call.proof.ratio,
            f"{_several(call.calls)}{_evidence(call.variant, call.proof, stored)}",
            tuple(ids[:at] + ids[at + 1 :]),
        )
        for at, call in enumerate(found)
    )


def _several(calls: int) -> str:
    return f"in {calls} calls, each by itself, " if calls > 1 else ""


def _races(
    context: ComponentContext, apart: Sequence[CallRecord], sitting: Sequence[ModelFault]
) -> tuple[NamedFault, ...]:
    """Return causes whose damage differs in every call, and those that act in some rows alike.

    A race strikes places by chance. Where one rule gives the rows of several calls, a cause that
    acts by it comes first; in one call either may be meant.
    """
    races = _each_by_itself(context, apart, sitting)
    if not races or apart[0].implied:
        return races
    steady = [fault for fault in sitting if not fault.per_call]
    named = _in_a_part(context, apart, _parts(context, apart), steady)
    ruled = [cause for cause in named if cause.condition is not None]
    if not ruled:
        return races
    calls = [call for record in apart for call in calls_in(record)]
    several = len(_unhealthy(context, calls)) > 1
    return _as_alternatives((*ruled, *races) if several else (*races, *ruled))


def _trials(
    context: ComponentContext,
    main: CallRecord,
    sample: Sample,
    sitting: Sequence[ModelFault],
    *,
    weights: bool = True,
) -> Iterator[_Trial]:
    """Try every variant that the faults propose, on the sample; or all but those of weights."""
    order, uncut = 0, cache(lambda: _uncut(context, main) or sample)
    for fault in sitting:
        for variant in proposed(fault, context, main):
            if not weights and "weights" in variant.where:
                continue
            looked_at = uncut() if variant.needs_whole_call else sample
            yield _Trial(order, (fault,), variant, _left(context, looked_at, variant))
            order += 1


def _uncut(context: ComponentContext, main: CallRecord) -> Sample | None:
    """Return the call that shows most, with all its rows; None where that is too expensive."""
    call = most_telling(calls_in(main))
    largest = max((output.numel() for output in call.outputs.values()), default=math.inf)
    if largest > _WHOLE and RAGGED not in call.inputs:  # their samples are beginnings
        return None
    return sampled(context, call, sys.maxsize)


def _left(
    context: ComponentContext, sample: Sample, variant: FaultVariant, measure: Measure = distance
) -> float:
    """Return the share of the difference that a variant leaves; 1 if it changes nothing."""
    before = sample.before(measure)
    outputs = sample.kept(variant) or _outputs(context, sample, variant)
    if outputs is None or not before:
        return 1.0
    left = measure(sample.candidate, outputs) / before
    if measure is not distance:
        return left
    if left != 1:
        sample.keep(variant, outputs)  # its shape is asked for where nothing explains all
    if left >= 1:
        return left
    # `left` is measured by a norm, which large outputs dominate; this check is by element.
    alike = only_roundings(sample.candidate, outputs)
    if left > _ROUNDINGS:
        # Healthy roundings may be most of a faint difference; leaving only these counts as
        # explaining it.
        return _NOISE if alike and not sample.only_roundings else left
    # Which of two variants rounds more like the candidate is luck, and no evidence for either. A
    # variant that gets only the large outputs right is not as near as one that gets all.
    return min(left, _NOISE) if alike else max(left, _BLIND)


def _outputs(
    context: ComponentContext, sample: Sample, variant: FaultVariant
) -> dict[str, Tensor] | None:
    # Only a fault of weights acts the same on any subset of their rows.
    rows = sample.rows if "weights" in variant.where else None
    made = make(context, sample.record, variant, sample.plain, rows)
    return None if made is None else sample.looked_at(made.outputs)


def _pairs(context: ComponentContext, sample: Sample, trials: Sequence[_Trial]) -> Iterator[_Trial]:
    """Add a second variant to those that alone come nearest, with gains removed or not."""
    effective = [trial for trial in trials if trial.left != 1.0]
    in_shape = {
        trial.order: _left(context, sample, trial.variant, shape_distance) for trial in effective
    }
    by_left = sorted(effective, key=lambda trial: trial.left)[:_PAIRED]
    by_shape = sorted(effective, key=lambda trial: in_shape[trial.order])[:_PAIRED]
    first = {trial.order: trial for trial in (*by_left, *by_shape)}
    partners = sorted(effective, key=lambda trial: min(trial.left, in_shape[trial.order]))
    order = len(trials)
    for a in first.values():
        for b in partners[:_PARTNERS]:
            # Two faults of one family overlap; a pair of two first variants is tried once.
            if a.fault[0].family == b.fault[0].family or (b.order in first and b.order < a.order):
                continue
            # Variants do not commute in general.
            for inner, outer in ((a, b), (b, a)):
                variant = _composed(inner.variant, outer.variant)
                left = _left(context, sample, variant)
                if left <= PAIRS_LEAVE * min(a.left, b.left):
                    faults, lefts = (inner.fault[0], outer.fault[0]), (inner.left, outer.left)
                    yield _Trial(order, faults, variant, left, alone=lefts)
                order += 1


def _composed(inner: FaultVariant, outer: FaultVariant) -> FaultVariant:
    def apply(call: ComponentCall) -> ComponentCall:
        return outer.apply(inner.apply(call))

    where = {**outer.where, **inner.where}
    return FaultVariant(f"{inner.words}, with {outer.words},", apply, where)


def _shows_in_sums_only(context: ComponentContext, calls: Sequence[CallRecord]) -> bool:
    """Tell whether every element is within budget, so that legal roundings dominate."""
    return all(_as_stored(context, call) == 1 for call in calls)


def _in_sums(context: ComponentContext, main: CallRecord, trials: Sequence[_Trial]) -> list[_Trial]:
    """Return the variants that explain most of the difference beyond roundings.

    All of them leave the candidate's own roundings, so the explained energies are compared. In sums
    over pieces of a row roundings are small; no variant may leave more there than elsewhere.
    """
    known = [trial for trial in trials if trial.left <= IN_SUMS]
    most = max((1 - trial.left**2 for trial in known), default=0.0)
    # left is a ratio of lengths, so 1 - left^2 is the explained share of the energy.
    near = [trial for trial in known if 1 - trial.left**2 >= ALIKE_IN_SUMS * most]
    near = sorted(near, key=_likeliest)[:PROVED]
    return [trial for trial in near if _left_of_pieces(context, main, trial.variant) <= EXPLAINS]


def _left_of_pieces(context: ComponentContext, main: CallRecord, variant: FaultVariant) -> float:
    """Return the share that a variant leaves of the gains of all pieces of rows."""
    variant_outputs = make(context, main, variant)
    if variant_outputs is None:
        return math.inf
    sides = seen_tensors(main), variant_outputs.outputs, untouched(main)
    left = before = 0.0
    for name, expected in sides[2].items():
        if not expected.numel():
            continue
        own, tried = (side.get(name) for side in sides[:2])
        if own is None or tried is None or not own.shape == tried.shape == expected.shape:
            return math.inf
        c, m, e = (_pieces(tensor) for tensor in (own, tried, expected))
        size = e.norm(dim=-1).clamp(min=_TINY)
        left += float((((c - m) * e).sum(-1) / size).square().sum())
        before += float((((c - e) * e).sum(-1) / size).square().sum())
    return math.sqrt(left / before) if before else math.inf


def _pieces(x: Tensor) -> Tensor:
    """Cut rows into pieces [N, P, W] where their width allows."""
    rows = flat(x).double()
    width = rows.shape[1]
    return rows.reshape(len(rows), -1, PIECE if width % PIECE == 0 else max(1, width))


def _proved(
    context: ComponentContext,
    calls: Sequence[CallRecord],
    main: CallRecord,
    trials: Sequence[_Trial],
    leaves: float = EXPLAINS,
) -> tuple[NamedFault, ...]:
    """Prove the variants that leave least on every row of every call, and rank those that hold."""
    near = sorted((each for each in trials if each.left <= leaves), key=_likeliest)
    held: list[tuple[_Trial, VariantFit]] = []
    stored = _as_stored(context, main) if near else 0.0
    for trial in near[:PROVED]:
        if held and _likeliest(trial)[0] > _likeliest(held[0][0])[0] + 1:
            break  # it leaves many times more than one that was proved
        if any(trial.fault == other.fault for other, _ in held):
            continue  # a simpler variant of the same fault was proved already
        worst = _on_every_call(context, calls, main, trial.variant)
        # Legal choices may differ from the twin's: a cause leaves fewer of them than none does.
        if worst is not None and (stored == 1 or worst.within > stored):
            held.append((trial, worst))
    if not held:
        return ()
    best = min(trial.left for trial, _ in held)
    ranked = sorted(
        held,
        key=lambda pair: (
            pair[0].left > EQUALLY * best + _NOISE,
            len(pair[0].fault),
            pair[0].fitted,
            pair[0].order,
        ),
    )
    ids = [" + ".join(fault.id for fault in trial.fault) for trial, _ in ranked]
    return tuple(
        NamedFault(
            trial.fault,
            trial.variant,
            fit.within,
            stored,
            fit.ratio,
            _evidence(trial.variant, fit, stored) + _apart(trial),
            tuple(ids[:at] + ids[at + 1 :]),
        )
        for at, (trial, fit) in enumerate(ranked)
    )


def _likeliest(trial: _Trial) -> tuple[int, int, int]:
    """Return a key: what is left, in steps of equal explanation; then simplicity."""
    step = math.log(trial.left + _NOISE, EQUALLY)
    return math.floor(step), trial.fitted, trial.order


def _on_every_call(
    context: ComponentContext, calls: Sequence[CallRecord], main: CallRecord, variant: FaultVariant
) -> VariantFit | None:
    """Return the worst proof over all calls; None where one of them is not explained."""
    worst: VariantFit | None = None
    for record in (main, *_but(calls, main)):
        fit = explained(context, record, variant)
        # Joined calls: a budget over all rows may fail where each call alone is explained.
        if fit is None and len(record.rows) > 1:
            fit = in_every_call(context, record, variant)
        if fit is None:
            return None
        worst = fit if worst is None else max(worst, fit, key=_ratio)
    return worst


def _ratio(fit: VariantFit) -> float:
    return fit.ratio


def _as_stored(context: ComponentContext, main: CallRecord) -> float:
    variant_outputs = make(context, main, FaultVariant("nothing", lambda call: call))
    return proof(context, main, variant_outputs).within if variant_outputs else 0.0


def _evidence(variant: FaultVariant, fit: VariantFit, stored: float) -> str:
    return (
        f"{variant.words} reproduces {share(fit.within)} of outputs within budget "
        f"({share(fit.identical)} to the bit, the worst at {number(fit.ratio, 3)} of it); "
        f"as stored {share(stored)}"
    )


def _apart(trial: _Trial) -> str:
    """Say how much each of several faults leaves by itself; empty for one."""
    if not trial.alone:
        return ""
    lefts = " and ".join(share(min(left, 1.0)) for left in trial.alone)
    return f"; alone they leave {lefts} of the difference"


def _excluded(trials: Sequence[_Trial], named: Sequence[NamedFault]) -> tuple[Excluded, ...]:
    explained = {fault.id for cause in named for fault in cause.faults}
    # By fault, its variant that leaves least.
    nearest: dict[str, _Trial] = {}
    for trial in trials:
        name = trial.fault[0].id
        if name not in explained and (name not in nearest or trial.left < nearest[name].left):
            nearest[name] = trial
    ranked = sorted(nearest.values(), key=lambda each: (each.left, each.order))
    return tuple(Excluded(each.fault[0].id, each.variant.words, each.left) for each in ranked)


def _sentence(
    named: Sequence[NamedFault], excluded: Sequence[Excluded], sitting: int, tried: int
) -> str:
    if named:
        first = named[0]
        titles = " and ".join(fault.title for fault in first.faults)
        also = f" Equally well: {', '.join(first.alternatives)}." if first.alternatives else ""
        return f"{titles}: {first.evidence}.{also}"
    near = "; ".join(
        f"{each.fault} leaves {share(min(each.left, 1.0))} of the difference"
        for each in excluded[:_NEAREST]
    )
    return (
        f"No known fault explains this: {sitting} faults in {tried} variants were tried"
        f"{f'; nearest: {near}' if near else ''}."
    )
