"""Localise errors in a run: replay each component on its own inputs, and check every input.

A component whose outputs differ from its twin's on the same inputs is an origin. So is an input
that its producers' outputs do not imply, at the edge; if a component wrote into its own inputs, it
is the origin of what others read there. Each fault is reported once, at the place that
discrepancy.py names. An inherited error is never an origin, since every component is judged on the
inputs that it was given. What cannot be judged is listed by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.conventions.learned import (
    ConventionEvidence,
    ConventionFit,
    assumed_conventions,
    conventions_used,
)
from degarble.harness.engine.conventions.registry import LEARNED, REGISTRY, conventions_in
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.localise.discrepancy import (
    DifferenceLocation,
    Discrepancy,
    DiscrepancyKind,
    blamed_on_edge,
    is_memory,
    locate_difference,
    source_of,
)
from degarble.harness.engine.localise.input_reconstruction import (
    InputReconstruction,
    joined_prefill,
    lacks_producers,
    without_memory,
)
from degarble.harness.engine.localise.judged_run import (
    PAIRS,
    Judge,
    JudgedComponent,
    OutputRow,
    discrepancy_from_prefill,
    discrepancy_of_outputs,
    missing_calls,
    repeats_apart,
)
from degarble.harness.engine.localise.recorded_run import by_component, require_sound
from degarble.harness.engine.localise.replay import TwinComponents, batches, maker_of
from degarble.harness.engine.localise.tensor_forms import check_forms, earlier_of, same_values
from degarble.harness.model.sites import Port, Site
from degarble.harness.report.verdict import Verdict
from degarble.references.tensor_core import WGMMA_FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.conventions.registry import ConventionUsed
    from degarble.harness.engine.localise.input_reconstruction import Edge
    from degarble.harness.engine.localise.judged_run import Looked
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.localise.replay import Batch
    from degarble.harness.engine.localise.tensor_forms import FormCheck, NonFiniteOutput
    from degarble.harness.model.components import Component
    from degarble.harness.model.recipes import Recipe
    from degarble.references.binding import BoundModel


_MOST_RANKS = 4096
_TAKING_NUMBERS = frozenset({"traced.linear", "traced.experts"})  # and may quantise them
_LISTED = 6  # components that a note names
_EARLIER = 4  # earlier calls kept with a wrong input: stale values come from these


@dataclass(frozen=True, eq=False)
class Localised:
    """The verdict of a run, and the origins of its errors in the order of the run."""

    verdict: Verdict
    rows: tuple[OutputRow, ...]
    origins: tuple[Discrepancy, ...]
    first_non_finite: NonFiniteOutput | None = None
    unstable: tuple[str, ...] = ()  # components with two results for identical inputs
    unjudged: tuple[tuple[str, str], ...] = ()  # component and reason
    notes: tuple[str, ...] = ()
    conventions: tuple[ConventionUsed, ...] = ()  # that are not the official ones
    twin: BoundModel | None = None  # computes by these conventions
    run: RecordedRun | None = None  # its calls whose tensors fit their sites

    @property
    def flips(self) -> tuple[OutputRow, ...]:
        """Return the outputs with legal flips of a choice: near ties."""
        return tuple(row for row in self.rows if row.flips)


def localise(
    twin: BoundModel,
    recipe: Recipe,
    run: RecordedRun,
    reference: BoundModel | None = None,
    report: Callable[[str], None] = lambda _component: None,
    looked: Looked | None = None,
) -> Localised:
    """Judge a run against its twin; `reference` is the BF16 model, `looked` gets every replay."""
    require_sound(run)
    twin.ranks = ranks_of(run)
    twin.fraction_bits = fraction_bits_of(run)
    known = TwinComponents.from_twin(twin, recipe)
    checked = check_forms(run, known)
    work = _Work(known, checked, reference, looked)
    calls = work.calls
    for name, component in known.components.items():
        if name in calls:
            report(name)
            work.component(component, calls[name])
    work.by_conventions()
    strange = sorted(calls.keys() - known.components.keys())
    return work.result(strange)


def fraction_bits_of(run: RecordedRun) -> dict[str, int]:
    """Return the components that sum FP8 products in a tensor core, and the fraction bits kept."""
    stated = run.facts.get("fraction_bits", {})
    known = stated.items() if isinstance(stated, dict) else ()
    return {
        name: bits for name, bits in known if type(bits) is int and bits >= WGMMA_FP8.fraction_bits
    }


def ranks_of(run: RecordedRun) -> int:
    """Return how many ranks a run was joined from; their partial sums are stored on the way."""
    stated = run.facts.get("ranks", 1)
    return stated if type(stated) is int and 1 <= stated <= _MOST_RANKS else 1


@dataclass(frozen=True, eq=False)
class _Answer:
    """The result of one component; `build_discrepancy` builds its discrepancy, if there is one."""

    judged: JudgedComponent
    build_discrepancy: Callable[[], Discrepancy] | None = None

    @cached_property
    def discrepancy(self) -> Discrepancy | None:
        """Return the discrepancy; computed lazily, since a fit does not need it."""
        return None if self.build_discrepancy is None else self.build_discrepancy()

    @property
    def fit(self) -> ConventionFit:
        """Return how it compares with its twin."""
        rows = self.judged.rows.values()
        sums = [row.cosines.get(PAIRS[0]) for row in rows]
        return ConventionFit(
            self.build_discrepancy is None and all(row.verdict is Verdict.AGREES for row in rows),
            self.build_discrepancy is not None,
            math.fsum(total.dd for total in sums if total is not None),
            self._unlike if self.judged.component.kind in _TAKING_NUMBERS else math.inf,
        )

    @property
    def _unlike(self) -> float:
        rows = self.judged.rows.values()
        every = sum(row.elements for row in rows)
        return 1 - sum(row.identical for row in rows) / every if every else math.inf


@runtime_checkable
class Forgetful(Protocol):
    """An observer that keeps results by component, and can drop them again."""

    def forget(self, component: str) -> None:
        """Drop the results of a component that is judged again."""
        ...


class _Work:
    """A localisation in progress."""

    def __init__(
        self,
        known: TwinComponents,
        checked: FormCheck,
        reference: BoundModel | None,
        looked: Looked | None,
    ) -> None:
        run = checked.run
        self._known, self._run, self._reference, self._looked = known, run, reference, looked
        self._checked = checked
        self._judge, self._wires = Judge(known, reference, looked), InputReconstruction(known, run)
        self.calls = by_component(run)
        self._steps = {step.number: step for step in run.steps}
        self._answers: dict[str, _Answer] = {}
        self._conventions: tuple[ConventionUsed, ...] = ()
        self._edges: list[Edge] = []
        self._written: dict[tuple[int, Site], CapturedCall] = {}
        self._unstable: list[str] = []
        self._notes: list[str] = []

    def component(self, component: Component, calls: Sequence[CapturedCall]) -> None:
        """Judge all calls of one component, and the inputs that it was given."""
        if not all(map(_is_stored, calls)):
            self._notes.append(f"{component.name}: statistics only, so it was not judged")
        found = self._batches(component)
        self._answers[component.name] = self.answer(component, found)
        for batch in found:
            self._edges_of(batch)
        if repeats_apart(calls):
            self._unstable.append(component.name)

    def named(self, name: str) -> Component:
        """Return a component of the twin; a convention may leave its input as it is."""
        return self._known.components[name]

    def answer(
        self, component: Component, found: Sequence[Batch], *, briefly: bool = False
    ) -> _Answer:
        """Judge the outputs of a component; `briefly`, only enough to know whether they agree."""
        alone = lacks_producers(component, self.calls)
        asked = [without_memory(batch, self._steps) for batch in found] if alone else found
        judged_component = self._judge.component(component, asked, briefly=briefly)
        if judged_component.differs:
            return _Answer(
                judged_component,
                partial(discrepancy_of_outputs, self._known, judged_component, self._steps),
            )
        return self._as_one_prefill(judged_component, found) if alone else _Answer(judged_component)

    def _batches(self, component: Component) -> list[Batch]:
        stored = [call for call in self.calls[component.name] if _is_stored(call)]
        return batches(self._run, component, stored, self._steps)

    def _as_one_prefill(self, judged_component: JudgedComponent, found: Sequence[Batch]) -> _Answer:
        """Judge all calls of a sequence as one, where the content of its memory is unknown."""
        component = judged_component.component
        whole = Judge(self._known).component(
            component, list(joined_prefill(component, found, self._steps))
        )
        for name, row in whole.rows.items():
            own = judged_component.rows.get(name)
            if own is None or row.verdict is Verdict.DIFFERS or own.undecided:
                judged_component.rows[name] = row
        if not whole.differs:
            return _Answer(judged_component)
        known = self._known  # bind it now: learned conventions replace self._known
        return _Answer(
            judged_component,
            lambda: discrepancy_from_prefill(discrepancy_of_outputs(known, whole, self._steps)),
        )

    def by_conventions(self) -> None:
        """Learn the run's conventions, and judge the components that they concern again."""
        others: dict[tuple[Any, ...], _Work] = {}
        answers = self._answers

        def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
            if not values:
                return answers[name].fit
            work = others.get(key := tuple(sorted(values.items())))
            if work is None:
                work = others[key] = self._by(values)
            component = work.named(name)
            return work.answer(component, self._batches(component), briefly=True).fit

        twin = self._known.twin
        evidence = ConventionEvidence(
            {name: answer.judged.component.judged_as for name, answer in answers.items()},
            fit,
            assumed_conventions(twin.numerics, twin.config.family),
            frozenset(n for n in answers if not all(map(_is_stored, self.calls[n]))),
        )
        declared = {**conventions_in(self._run.facts), **twin.declared}
        self._conventions = conventions_used(declared, evidence)
        learned = {e.name: e.value for e in self._conventions if e.source == LEARNED}
        if learned:
            self._judge_again(self._by(learned, self._reference, self._looked), learned)

    def _by(
        self,
        values: Mapping[str, Any],
        reference: BoundModel | None = None,
        looked: Looked | None = None,
    ) -> _Work:
        """Return the same work for a twin with other conventions."""
        known = TwinComponents.from_twin(
            self._known.twin.with_switches(**values), self._known.recipe
        )
        return _Work(known, self._checked, reference, looked)

    def _judge_again(self, work: _Work, learned: Iterable[str]) -> None:
        """Judge again what learned conventions concern, and the quantisations before it."""
        roles = frozenset().union(*(REGISTRY[name].roles for name in learned))
        concerned = [
            e.judged.component
            for e in self._answers.values()
            if e.judged.component.judged_as in roles
        ]
        names = {name for each in concerned for name in (each.name, maker_of(each))}
        for name in tuple(self._answers):
            if name in names:
                if isinstance(self._looked, Forgetful):
                    self._looked.forget(name)
                component = work.named(name)
                self._answers[name] = work.answer(component, self._batches(component))
        self._known = work._known

    def _edges_of(self, batch: Batch) -> None:
        for at, call in enumerate(batch.calls):
            inputs = {name: batch.part(at, tensor) for name, tensor in batch.inputs.items()}
            self._edges += self._wires.broken(call, inputs)
            for name in call.changed:
                source = source_of(batch.component, name)
                if source is not None:
                    self._written.setdefault((call.step, source), call)

    def result(self, strange: Sequence[str]) -> Localised:
        """Assemble the result."""
        discrepancies = [
            answer.discrepancy
            for answer in self._answers.values()
            if answer.discrepancy is not None
        ]
        discrepancies += self._checked.discrepancies(self._known)
        discrepancies += [*self._broken_edges(), *missing_calls(self._known, self._checked.whole)]
        judged = [answer.judged for answer in self._answers.values()]
        rows = tuple(row for judged_component in judged for row in judged_component.rows.values())
        open_rows = [(row.component.name, row.undecided or row.partly) for row in rows]
        unjudged = [(name, why) for name, why in open_rows if why]
        unjudged += self._checked.unjudged.items()
        unjudged += [(name, "no component of this model") for name in strange]
        apart = self._run.facts.get("ranks_apart")
        if isinstance(apart, list) and apart:
            self._notes.append(f"{len(apart)} copies differ between ranks, such as {apart[0]}")
        self._notes += _measured(rows)
        first = None
        for component in judged:
            first = earlier_of(first, component.non_finite)
        return Localised(
            self._verdict(rows, discrepancies),
            rows,
            tuple(sorted(discrepancies, key=self._place)),
            first,
            tuple(self._unstable),
            tuple(dict(unjudged).items()),
            tuple(self._notes),
            self._conventions,
            self._known.twin,
            self._run,
        )

    def _place(self, discrepancy: Discrepancy) -> int:
        order = list(self._known.components)
        return order.index(discrepancy.component) if discrepancy.component in order else len(order)

    def _verdict(self, rows: Sequence[OutputRow], discrepancies: Sequence[Discrepancy]) -> Verdict:
        if self._unstable:
            return Verdict.UNSTABLE
        if discrepancies:
            return Verdict.DIFFERS
        judged = [row for row in rows if row.verdict is not Verdict.UNDECIDED]
        # A run with rows left out, or outputs without a budget, never AGREES.
        open_ones = [row for row in rows if row.left_out or (row.undecided and row.budgetless)]
        return Verdict.UNDECIDED if open_ones or not judged else Verdict.AGREES

    def _broken_edges(self) -> list[Discrepancy]:
        """Return one discrepancy for each input; an overwritten value belongs to the writer."""
        groups: dict[tuple[str, str], list[Edge]] = {}
        harmed: dict[tuple[str, str], list[Edge]] = {}
        for edge in self._edges:
            writer = None
            if edge.source is not None:
                writer = self._written.get((edge.call.step, edge.source))
            # Overwritten before this consumer read it.
            if writer is not None and writer.number < edge.call.number:
                harmed.setdefault((writer.component, str(edge.source)), []).append(edge)
            else:
                groups.setdefault((edge.component.name, edge.name), []).append(edge)
        fields = {call.component: call for call in self._written.values()}
        self._notes += [
            f"{name} wrote into its inputs ({', '.join(call.changed)}); nobody read them later"
            for name, call in fields.items()
            if name not in {writer for writer, _ in harmed}
        ]
        discrepancies = [self._changed(writer, edges) for (writer, _), edges in harmed.items()]
        return [*discrepancies, *(self._edge(each) for each in self._joined(list(groups.values())))]

    def _joined(self, groups: list[list[Edge]]) -> list[list[Edge]]:
        """Merge consumers of one output that were given the same wrong value."""
        kept: list[list[Edge]] = []
        for group in groups:
            first = group[0]
            for other in kept:
                if _one_value(first, other[0]):
                    other.extend(group)
                    break
            else:
                kept.append(group)
        return kept

    def _edge(self, edges: list[Edge]) -> Discrepancy:
        best = max(edges, key=lambda e: 0 if e.captured is None else e.captured.numel())
        consumers = sorted({edge.component.name for edge in edges})
        component = best.component
        blamed = blamed_on_edge(component, best.name)
        # Several consumers with one wrong value: attribute it to the producer.
        if len(consumers) > 1 and best.source is not None:
            blamed = best.source.component
        onset = _onset_of_edge(self._known, best)
        return Discrepancy(
            DiscrepancyKind.EDGE,
            blamed,
            ComponentContext(self._known.twin, component, self._known.recipe),
            Site(component.name, Port.IN, best.name),
            _words(best, consumers, onset),
            self._sight(best),
            where=onset.where,
            steps=tuple(sorted({edge.call.step for edge in edges})),
            more=tuple(self._sight(e) for e in edges if e.call.step != best.call.step)[:2],
        )

    def _changed(self, writer: str, edges: list[Edge]) -> Discrepancy:
        first = min(edges, key=lambda edge: edge.call.number)
        component = self._known.components[writer]
        call = self._written[(first.call.step, first.source)]  # type: ignore[index]
        readers = sorted({edge.component.name for edge in edges})
        name = next(n for n in call.changed if source_of(component, n) == first.source)
        sentence = (
            f"{writer} wrote into its input {name}, which {', '.join(readers)} read afterwards"
        )
        return Discrepancy(
            DiscrepancyKind.CHANGED,
            writer,
            ComponentContext(self._known.twin, component, self._known.recipe),
            Site(writer, Port.IN, name),
            sentence,
            where={"input": name},
            steps=tuple(sorted({edge.call.step for edge in edges})),
        )

    def _sight(self, edge: Edge) -> CallRecord:
        call = edge.call
        inputs, implied = dict(self._run.inputs(call)), self._wires.implied(call)
        if edge.implied is not None:
            implied[edge.name] = edge.implied
        for name, tensor in implied.items():
            if name in inputs:
                like = inputs[name]
                same = tensor.numel() == like.numel()
                implied[name] = (tensor.reshape(like.shape) if same else tensor).to(like.dtype)
        try:
            expected = self._known.expected(edge.component, inputs)
        except CANNOT_RUN:
            expected = {}
        sides = (inputs, self._run.outputs(call), expected, implied)
        elsewhere = self._elsewhere(call) if is_memory(edge.component, edge.name) else {}
        return CallRecord(*sides, call.step, self._earlier(call), elsewhere=elsewhere)

    def _elsewhere(self, call: CapturedCall) -> dict[int, Mapping[str, Tensor]]:
        """Return the implied inputs of the same component in other layers, in the same step."""
        own = self._known.components[call.component]
        found: dict[int, Mapping[str, Tensor]] = {}
        for captured_call in self._run.calls:
            other = self._known.components.get(captured_call.component)
            if captured_call.step != call.step or other is None or other.layer in (None, own.layer):
                continue
            if other.role == own.role and other.layer is not None:
                found[other.layer] = self._wires.implied(captured_call)
        return found

    def _earlier(self, call: CapturedCall) -> tuple[CallRecord, ...]:
        """Return the component's inputs in its first call and in the last ones before this."""
        before = [
            captured_call
            for captured_call in self.calls[call.component]
            if captured_call.step < call.step and _is_stored(captured_call)
        ]
        chosen = (*before[:1], *before[max(1, len(before) - _EARLIER) :])
        return tuple(
            CallRecord(self._run.inputs(captured_call), {}, {}, step=captured_call.step)
            for captured_call in chosen
        )


def _measured(rows: Sequence[OutputRow]) -> list[str]:
    """Return the note on components whose budget was measured; empty where all are derived."""
    of_rows = [row for row in rows if row.judged is not None and row.judged.is_measured]
    names = [*dict.fromkeys(row.component.name for row in of_rows)]
    if not names:
        return []
    several = f"{len(names)} components were" if len(names) > 1 else "1 component was"
    listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return [f"{several} judged by a measured budget, not by a derived one: {listed}"]


def _is_stored(call: CapturedCall) -> bool:
    return all(tensor.at for tensor in (*call.inputs.values(), *call.outputs.values()))


def _one_value(left: Edge, right: Edge) -> bool:
    if left.source is None or left.source != right.source or left.call.step != right.call.step:
        return False
    if left.captured is None or right.captured is None:
        return False
    a, b = left.captured.flatten(), right.captured.flatten()
    return a.shape == b.shape and a.dtype == b.dtype and same_values(a, b)


def _onset_of_edge(known: TwinComponents, edge: Edge) -> DifferenceLocation:
    implied, captured = edge.implied, edge.captured
    if implied is None or captured is None or implied.numel() != captured.numel():
        return DifferenceLocation()
    implied = implied.reshape(captured.shape)
    return locate_difference(known.twin.config, edge.component, (captured, implied))


def _words(edge: Edge, consumers: Sequence[str], onset: DifferenceLocation) -> str:
    name = f"{edge.component.name}.in.{edge.name}"
    if edge.captured is None:
        return f"{name} did not arrive, though earlier calls left rows for it"
    if edge.implied is None:
        return f"{name} arrived, though nothing was there to read"
    source = f"what {edge.source} put out" if edge.source else "the step's own record"
    if edge.captured.numel() != edge.implied.numel():
        found, want = (list(tensor.shape) for tensor in (edge.captured, edge.implied))
        return f"{name} has shape {found}; {source} implies {want}"
    others = len(consumers) - 1
    more = f", and {others} more components were given the same" if others else ""
    return f"{name} is not {source}{onset.sentence}{more}"
