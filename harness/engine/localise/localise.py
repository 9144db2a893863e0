"""Localise errors in a run: replay each component on its own inputs, and check every input.

A component whose outputs differ from its twin's on the same inputs is an origin. So is an input
that its producers' outputs do not imply, at the edge; if a component wrote into its own inputs, it
is the origin of what others read there. Each fault is reported once, at the place that
discrepancy.py names. An inherited error is never an origin, since every component is judged on the
inputs that it was given. What cannot be judged is listed by name.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
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
from degarble.harness.engine.localise.answers import (
    ComponentAnswer,
    JudgingTask,
    RowNumbers,
    TaskAnswer,
    tasks_of,
)
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
from degarble.harness.engine.localise.replay import Replay, TwinComponents, batches, maker_of
from degarble.harness.engine.localise.screening import needs_more, screened
from degarble.harness.engine.localise.tensor_forms import (
    check_forms,
    earlier_of,
    non_finite_of,
    same_values,
)
from degarble.harness.model.sites import Port, Site
from degarble.harness.report.verdict import Verdict
from degarble.references.numerics import CodeSums
from degarble.references.tensor_core import WGMMA_FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall
    from degarble.harness.engine.conventions.registry import ConventionUsed
    from degarble.harness.engine.localise.answers import JudgedElsewhere
    from degarble.harness.engine.localise.input_reconstruction import Edge
    from degarble.harness.engine.localise.judged_run import Looked
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.localise.replay import Batch
    from degarble.harness.engine.localise.screening import SampledRows
    from degarble.harness.engine.localise.tensor_forms import FormCheck, NonFiniteOutput
    from degarble.harness.model.components import Component
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.report.replay_record import MeasuredOutput
    from degarble.references.binding import BoundModel


_MOST_RANKS = 4096
_TAKING_NUMBERS = frozenset({"traced.linear", "traced.experts"})  # and may quantise them
_LISTED = 6  # components that a note names
_FEWEST, _UNLIKE = 3, 0.5  # outputs, and the cosine at their median, that tell models apart
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
    # Components of which only sampled rows were looked at; None where nothing was sampled.
    sampled: Mapping[str, SampledRows] | None = None

    @property
    def flips(self) -> tuple[OutputRow, ...]:
        """Return the outputs with legal flips of a choice: near ties."""
        return tuple(row for row in self.rows if row.flips)


@dataclass(frozen=True)
class During:
    """What follows a localisation: `report` is called with each component, `looked` with replays.

    `elsewhere` judges components in other processes, or knows them from an earlier run. `screen`:
    look at sampled rows first, and at whole components where that is needed.
    """

    report: Callable[[str], None] = lambda _component: None
    looked: Looked | None = None
    elsewhere: JudgedElsewhere | None = None
    screen: bool = False


def localise(
    twin: BoundModel,
    recipe: Recipe,
    run: RecordedRun,
    reference: BoundModel | None = None,
    during: During = During(),
) -> Localised:
    """Judge a run against its twin; `reference` is the BF16 model."""
    work = Localisation.begun(twin, recipe, run, reference, during)
    with during.elsewhere or nullcontext():
        work.components()
        work.by_conventions()
        return work.result()


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
    build_discrepancy: Callable[[], Discrepancy | None] | None = None
    edges: list[Edge] | None = None  # inputs that differ; None: there are some, and not in memory
    sampled: SampledRows | None = None

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
class Collector(Protocol):
    """An observer that keeps results by component, drops them, and takes those of another."""

    def forget(self, component: str) -> None:
        """Drop the results of a component that is judged again."""
        ...

    def measured(self, component: str) -> tuple[MeasuredOutput, ...]:
        """Return the results of a component."""
        ...

    def take(self, component: str, measured: Sequence[MeasuredOutput]) -> None:
        """Take the results of a component that was judged elsewhere."""
        ...


class Localisation:
    """A localisation in progress."""

    def __init__(
        self,
        known: TwinComponents,
        checked: FormCheck,
        reference: BoundModel | None,
        during: During,
    ) -> None:
        run = checked.run
        self.known, self._run, self._reference, self._during = known, run, reference, during
        self._checked = checked
        self._judge = Judge(known, reference, during.looked)
        self._wires = InputReconstruction(known, run)
        self.calls = by_component(run)
        self._steps = {step.number: step for step in run.steps}
        self._others: dict[tuple[Any, ...], Localisation] = {}
        self._answers: dict[str, _Answer] = {}
        self._conventions: tuple[ConventionUsed, ...] = ()
        self._edges: list[Edge] = []
        self._written: dict[tuple[int, Site], CapturedCall] = {}
        self._unstable: list[str] = []
        self._notes: list[str] = []

    @classmethod
    def begun(
        cls,
        twin: BoundModel,
        recipe: Recipe,
        run: RecordedRun,
        reference: BoundModel | None,
        during: During,
    ) -> Localisation:
        """Begin the localisation of a run, once its record is sound."""
        require_sound(run)
        twin.ranks = ranks_of(run)
        twin.fraction_bits = fraction_bits_of(run)
        known = TwinComponents.from_twin(twin, recipe)
        return cls(known, check_forms(run, known), reference, during)

    def components(self) -> None:
        """Judge all components that were recorded, and the inputs that they were given."""
        names = [name for name in self.known.components if name in self.calls]
        if self._during.screen:
            answers = self._screened(names)
        else:
            answers = self._answered(tasks_of([self.named(name) for name in names], {}))
        for name in names:  # in the order of the run, whichever was judged first
            answer, calls = answers[name], self.calls[name]
            if not all(map(_is_stored, calls)):
                self._notes.append(f"{name}: statistics only, so it was not judged")
            self._answers[name] = answer
            # Those of a component that was judged elsewhere are read once more, for their tensors.
            found = self._broken_of(name) if answer.edges is None else answer.edges
            self._edges += found
            for call in filter(_is_stored, calls):
                for each in call.changed:
                    source = source_of(self.named(name), each)
                    if source is not None:
                        self._written.setdefault((call.step, source), call)
            if repeats_apart(calls):
                self._unstable.append(name)

    def _screened(self, names: Sequence[str]) -> dict[str, _Answer]:
        """Judge sampled rows of each component, then whole components where that is needed."""
        tasks = tasks_of([self.named(name) for name in names], {})
        answers = self._answered([replace(task, screened=True) for task in tasks])
        more = {name for name in names if needs_more(answers[name].judged)}
        while more:
            # A linear is judged with the quantisation before it, from which it is compared.
            more |= {maker_of(self.named(name)) for name in more} & set(names)
            listed = [self.named(name) for name in names if name in more]
            answers |= self._answered(tasks_of(listed, {}))
            more = self._beside_odd(answers)
        return answers

    def _beside_odd(self, answers: Mapping[str, _Answer]) -> set[str]:
        """Return sampled components that decide on a convention of one that differs.

        How clearly a convention fits is a matter of distances, which those of a sample are not.
        """
        roles = {n: self.named(n).judged_as for n in answers}
        odd = {roles[n] for n, answer in answers.items() if answer.fit.differs}
        while True:
            concerned = [
                each.roles for each in REGISTRY.values() if each.learned and each.roles & odd
            ]
            known, odd = odd, odd.union(*concerned)
            if known == odd:
                return {n for n, a in answers.items() if a.sampled is not None and roles[n] in odd}

    def told(self, task: JudgingTask) -> TaskAnswer:
        """Judge a task, and return what was found as plain numbers."""
        looked, work = self._during.looked, self.of_task(task)
        try:
            return work.as_numbers(work.judged_here(task))
        finally:
            if isinstance(looked, Collector):
                for name in task.names:
                    looked.forget(name)

    def _answered(self, tasks: Sequence[JudgingTask]) -> dict[str, _Answer]:
        """Return what was found in the components of tasks, judged here or elsewhere."""
        made: dict[str, _Answer] = {}
        elsewhere = self._during.elsewhere
        if elsewhere is None:
            for task in tasks:
                made |= self.of_task(task).judged_here(task)
            return made

        def here(task: JudgingTask) -> TaskAnswer:
            work = self.of_task(task)
            found = work.judged_here(task)
            made.update(found)
            return work.as_numbers(found)

        for task, told in elsewhere.each(tasks, here):
            for each in told.components:
                if each.name not in made:
                    made[each.name] = self.of_task(task).taken(each, task)
        return made

    def of_task(self, task: JudgingTask) -> Localisation:
        """Return the localisation by the conventions of a task."""
        if not task.values and not task.screened:
            return self
        key = (*task.values, task.briefly, task.screened)
        if key not in self._others:
            by_values = dict(task.values)
            if task.briefly or task.screened:
                self._others[key] = self._by(by_values, None, During(self._during.report))
            else:
                self._others[key] = self._by(by_values, self._reference, self._during)
        return self._others[key]

    def judged_here(self, task: JudgingTask) -> dict[str, _Answer]:
        """Judge the components of a task in this process."""
        made = {}
        for name in task.names:
            if not task.values:
                self._during.report(name)
            component = self.named(name)
            found = self._batches(component)
            if task.screened:
                answer = self._looked_into(component, found)
            else:
                answer = self.answer(component, found, briefly=task.briefly)
            edges: list[Edge] = (
                [] if task.values else [e for batch in found for e in self._broken_in(batch)]
            )
            made[name] = replace(answer, edges=edges)
        return made

    def _looked_into(self, component: Component, found: Sequence[Batch]) -> _Answer:
        """Judge sampled rows; a component whose memory is of unknown content is judged whole."""
        if lacks_producers(component, self.calls):
            return self.answer(component, found)
        replays, sampled = screened(self.known, component, found)
        judged = self._judge.replays(component, replays)
        for batch in found:  # of all rows
            odd = non_finite_of(Replay(batch))
            judged.non_finite = earlier_of(judged.non_finite, odd)
        build = (lambda: None) if judged.differs else None  # it will be judged whole
        return _Answer(judged, build, sampled=None if sampled.looked == sampled.rows else sampled)

    def as_numbers(self, found: Mapping[str, _Answer]) -> TaskAnswer:
        """Return what was found without the tensors."""
        looked = self._during.looked
        return TaskAnswer(
            tuple(
                ComponentAnswer(
                    name,
                    tuple(map(RowNumbers.of, answer.judged.rows.values())),
                    answer.build_discrepancy is not None,
                    len(answer.edges or ()),
                    answer.judged.non_finite,
                    looked.measured(name) if isinstance(looked, Collector) else (),
                    answer.sampled,
                )
                for name, answer in found.items()
            )
        )

    def taken(self, told: ComponentAnswer, task: JudgingTask) -> _Answer:
        """Take what was found elsewhere; a discrepancy is built from the tensors, once needed."""
        if not task.values:
            self._during.report(told.name)
        if isinstance(self._during.looked, Collector) and not task.briefly:
            self._during.looked.take(told.name, told.looks)
        edges: list[Edge] | None = None if told.edges else []
        judged = told.judged(self.named(told.name))
        if not told.differs:
            return _Answer(judged, edges=edges, sampled=told.sampled)
        # Bind it now: learned conventions replace self.known.
        again = Localisation(self.known, self._checked, self._reference, During())
        return _Answer(judged, lambda: again.judged_here(task)[told.name].discrepancy, edges)

    def named(self, name: str) -> Component:
        """Return a component of the twin; a convention may leave its input as it is."""
        return self.known.components[name]

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
                partial(discrepancy_of_outputs, self.known, judged_component, self._steps),
            )
        return self._as_one_prefill(judged_component, found) if alone else _Answer(judged_component)

    def compared(self, name: str) -> _Answer | None:
        """Compare outputs and judge none; None where calls may be judged as one prefill."""
        component = self.named(name)
        if lacks_producers(component, self.calls):
            return None
        return _Answer(self._judge.compared(component, self._batches(component)))

    def _batches(self, component: Component) -> list[Batch]:
        stored = [call for call in self.calls[component.name] if _is_stored(call)]
        return batches(self._run, component, stored, self._steps)

    def _as_one_prefill(self, judged_component: JudgedComponent, found: Sequence[Batch]) -> _Answer:
        """Judge all calls of a sequence as one, where the content of its memory is unknown."""
        component = judged_component.component
        whole = Judge(self.known).component(
            component, list(joined_prefill(component, found, self._steps))
        )
        for name, row in whole.rows.items():
            own = judged_component.rows.get(name)
            if own is None or row.verdict is Verdict.DIFFERS or own.undecided:
                judged_component.rows[name] = row
        if not whole.differs:
            return _Answer(judged_component)
        known = self.known  # bind it now: learned conventions replace self.known
        return _Answer(
            judged_component,
            lambda: discrepancy_from_prefill(discrepancy_of_outputs(known, whole, self._steps)),
        )

    def by_conventions(self) -> None:
        """Learn the run's conventions, and judge the components that they concern again."""
        answers = self._answers

        known: dict[tuple[Any, ...], dict[str, ConventionFit]] = {}

        def announce(names: Sequence[str], values: Mapping[str, Any]) -> None:
            fits = known.setdefault(tuple(sorted(values.items())), {})
            new = [self.named(name) for name in names if name not in fits]
            found = self._answered(tasks_of(new, values, briefly=True))
            fits.update((name, answer.fit) for name, answer in found.items())

        def fit(name: str, values: Mapping[str, Any]) -> ConventionFit:
            if not values:
                return answers[name].fit
            announce([name], values)
            return known[tuple(sorted(values.items()))][name]

        def gap(name: str, values: Mapping[str, Any]) -> ConventionFit | None:
            task = JudgingTask((name,), tuple(sorted(values.items())), briefly=True)
            made = None if self._during.elsewhere else self.of_task(task).compared(name)
            return None if made is None else made.fit

        twin = self.known.twin
        evidence = ConventionEvidence(
            {name: answer.judged.component.judged_as for name, answer in answers.items()},
            fit,
            assumed_conventions(twin.numerics, twin.config.family),
            frozenset(n for n in answers if not all(map(_is_stored, self.calls[n]))),
            announce,
            cache(self.known.is_coded),
            gap,
            self.known.recipe.all_formats,
            twin.ranks,
        )
        declared = {**conventions_in(self._run.facts), **twin.declared}
        self._conventions = conventions_used(declared, evidence)
        learned = {e.name: e.value for e in self._conventions if e.source == LEARNED}
        if learned:
            self._judge_again(learned)
        self._allow_exact_sums(learned)

    def _by(
        self,
        values: Mapping[str, Any],
        reference: BoundModel | None = None,
        during: During = During(),
    ) -> Localisation:
        """Return the same work for a twin with other conventions."""
        known = TwinComponents.from_twin(self.known.twin.with_switches(**values), self.known.recipe)
        return Localisation(known, self._checked, reference, during)

    def _judge_again(self, learned: Mapping[str, Any]) -> None:
        """Judge again what learned conventions concern, and the quantisations before it."""
        roles = frozenset().union(*(REGISTRY[name].roles for name in learned))
        concerned = [
            e.judged.component
            for e in self._answers.values()
            if e.judged.component.judged_as in roles
        ]
        names = {name for each in concerned for name in (each.name, maker_of(each))}
        again = [name for name in self._answers if name in names]
        if isinstance(self._during.looked, Collector):
            for name in again:
                self._during.looked.forget(name)
        stated = tuple(sorted(learned.items()))
        work = self.of_task(JudgingTask((), stated))
        answers = self._answered(tasks_of([work.named(name) for name in again], learned))
        for name in again:
            self._answers[name] = answers[name]
        self.known = work.known

    def _allow_exact_sums(self, learned: Mapping[str, Any]) -> None:
        """Judge by sums in float32 what differs from a run's short sums.

        An engine may have several kernels for FP8 products; the more exact one is no fault.
        """
        if self.known.twin.numerics.switches.code_sums is CodeSums.FLOAT32:
            return
        names = [
            name
            for name, answer in self._answers.items()
            if answer.build_discrepancy is not None
            and answer.judged.component.judged_as in REGISTRY["code_sums"].roles
        ]
        if not names:
            return
        values = {**learned, "code_sums": CodeSums.FLOAT32}
        work = self.of_task(JudgingTask((), tuple(sorted(values.items()))))
        briefly = self._answered(
            tasks_of([work.named(name) for name in names], values, briefly=True)
        )
        exact = [name for name, answer in briefly.items() if answer.fit.agrees]
        if not exact:
            return
        if isinstance(self._during.looked, Collector):
            for name in exact:
                self._during.looked.forget(name)
        self._answers.update(self._answered(tasks_of([work.named(name) for name in exact], values)))
        self._notes.append(
            f"{len(exact)} of its components, such as {exact[0]}, add up products of FP8 codes in "
            "float32, where the run's sums are short: that is more exact, and no finding"
        )

    def _broken_of(self, name: str) -> list[Edge]:
        batched = self._batches(self.named(name))
        return [edge for batch in batched for edge in self._broken_in(batch)]

    def _broken_in(self, batch: Batch) -> Iterator[Edge]:
        for at, call in enumerate(batch.calls):
            inputs = {name: batch.part(at, tensor) for name, tensor in batch.inputs.items()}
            yield from self._wires.broken(call, inputs)

    def result(self) -> Localised:
        """Assemble the result."""
        strange = sorted(self.calls.keys() - self.known.components.keys())
        discrepancies = [
            answer.discrepancy
            for answer in self._answers.values()
            if answer.discrepancy is not None
        ]
        discrepancies += self._checked.discrepancies(self.known)
        discrepancies += [*self._broken_edges(), *missing_calls(self.known, self._checked.whole)]
        judged = [answer.judged for answer in self._answers.values()]
        rows = tuple(row for judged_component in judged for row in judged_component.rows.values())
        open_rows = [(row.component.name, row.undecided or row.partly) for row in rows]
        unjudged = [(name, why) for name, why in open_rows if why]
        unjudged += self._checked.unjudged.items()
        unjudged += [(name, "no component of this model") for name in strange]
        apart = self._run.facts.get("ranks_apart")
        if isinstance(apart, list) and apart:
            self._notes.append(f"{len(apart)} copies differ between ranks, such as {apart[0]}")
        self._notes += [*_replayed(self._run), *_measured(rows), *_other_reference(rows)]
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
            self.known.twin,
            self._run,
            self._sampled() if self._during.screen else None,
        )

    def _sampled(self) -> dict[str, SampledRows]:
        return {n: a.sampled for n, a in self._answers.items() if a.sampled is not None}

    def _place(self, discrepancy: Discrepancy) -> int:
        order = list(self.known.components)
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
        onset = _onset_of_edge(self.known, best)
        return Discrepancy(
            DiscrepancyKind.EDGE,
            blamed,
            ComponentContext(self.known.twin, component, self.known.recipe),
            Site(component.name, Port.IN, best.name),
            _words(best, consumers, onset),
            self._sight(best),
            where=onset.where,
            steps=tuple(sorted({edge.call.step for edge in edges})),
            more=tuple(self._sight(e) for e in edges if e.call.step != best.call.step)[:2],
        )

    def _changed(self, writer: str, edges: list[Edge]) -> Discrepancy:
        first = min(edges, key=lambda edge: edge.call.number)
        component = self.known.components[writer]
        call = self._written[(first.call.step, first.source)]  # type: ignore[index]
        readers = sorted({edge.component.name for edge in edges})
        name = next(n for n in call.changed if source_of(component, n) == first.source)
        sentence = (
            f"{writer} wrote into its input {name}, which {', '.join(readers)} read afterwards"
        )
        return Discrepancy(
            DiscrepancyKind.CHANGED,
            writer,
            ComponentContext(self.known.twin, component, self.known.recipe),
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
            expected = self.known.expected(edge.component, inputs)
        except CANNOT_RUN:
            expected = {}
        sides = (inputs, self._run.outputs(call), expected, implied)
        elsewhere = self._elsewhere(call) if is_memory(edge.component, edge.name) else {}
        return CallRecord(*sides, call.step, self._earlier(call), elsewhere=elsewhere)

    def _elsewhere(self, call: CapturedCall) -> dict[int, Mapping[str, Tensor]]:
        """Return the implied inputs of the same component in other layers, in the same step."""
        own = self.known.components[call.component]
        found: dict[int, Mapping[str, Tensor]] = {}
        for captured_call in self._run.calls:
            other = self.known.components.get(captured_call.component)
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


def _other_reference(rows: Sequence[OutputRow]) -> list[str]:
    """Return the note on a reference whose weights compute something else than the twin's."""
    pairs = (row.cosines.get(PAIRS[2]) for row in rows if row.component.weights)
    cosines = [float(pair.cosine) for pair in pairs if pair is not None]
    known = sorted(cosine for cosine in cosines if math.isfinite(cosine))
    if len(known) < _FEWEST or known[len(known) // 2] > _UNLIKE:
        return []
    middle = known[len(known) // 2]
    note = (
        f"twin and reference have little in common: a cosine of {middle:.2f} at the median of"
        f" {len(known)} outputs that weights decide. It is another model's, or the checkpoint is"
        " not what was made of it: degarble audit CKPT --against REFERENCE tells"
    )
    return [note]


def _replayed(run: RecordedRun) -> list[str]:
    """Return the note on steps that were captured inside CUDA graphs; empty where none was."""
    steps = run.facts.get("replayed")
    if not isinstance(steps, list) or not steps:
        return []
    how = "which copied these tensors while they were replayed"
    return [
        f"decoding was captured inside CUDA graphs, {how}: {len(steps)} of {len(run.steps)} steps"
    ]


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
