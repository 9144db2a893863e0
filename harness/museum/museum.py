"""Run `degarble faults run`: plant every known fault, run healthy cases, report the answers."""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.write.workers import run_each
from degarble.harness.engine.adopted.files import searching
from degarble.harness.engine.faults.registry import STRENGTHS, plantable_faults
from degarble.harness.engine.localise.localise import localise
from degarble.harness.museum.cases import (
    ModelKey,
    MuseumCase,
    MuseumModel,
    Stage,
    cases_of_fault,
    healthy_cases,
    planting_cases,
    prepare,
)
from degarble.harness.museum.plants import (
    REPEATED,
    CauseAnswer,
    PlaceAnswer,
    PlantedFault,
    PlantOutcome,
    RepeatedRun,
    candidate_sites,
    judge_plant,
    mild_plants,
    roles_of,
    run_repeatedly,
    touches,
    ways_of,
)
from degarble.harness.museum.products import plant_in_product
from degarble.harness.museum.scores import (
    HealthyRun,
    MuseumScore,
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
    scores,
    wilson,
)
from degarble.harness.report.number_text import number, visible
from degarble.harness.report.page import to_plain
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault


# --------------------------------------------------------------------------------------------------
# The run.

SEED = 5
WORKER_BYTES = 1 << 30  # that a process may take
_TRIES = 4  # plants that are tried for each that is wanted, where many have no effect
_WAYS = 2  # of one fault at one component
_BY_DIAL = 3  # times as many mild plants of a fault that can be as strong as is wanted


@dataclass(frozen=True)
class MuseumExtent:
    """How much is run. One in `leave_out` faults is also diagnosed without its own family.

    Of each fault `plants` plants with an effect are judged, and `mild` mild ones are added.
    `repeats` is how often each race, and how many healthy cases, are run twice.
    """

    plants: int
    healthy: int
    leave_out: int = 0
    mild: int = 0
    repeats: int = 0
    seed: int = SEED
    cases: tuple[MuseumCase, ...] = field(default_factory=planting_cases)
    adopted: Path | None = None  # a folder of adopted faults


PUBLISHED = MuseumExtent(plants=1, healthy=40, leave_out=3, mild=1, repeats=1)
WHOLE = MuseumExtent(plants=4, healthy=240, leave_out=1, mild=4, repeats=6)
CHOSEN = MuseumExtent(plants=3, healthy=0, leave_out=1, mild=2, repeats=1)
VARIANTS = 3  # plants with an effect that a family needs, else it is reported


@dataclass(frozen=True)
class Museum:
    """All planted and healthy runs, and the conclusions."""

    outcomes: tuple[PlantOutcome, ...]
    healthy: tuple[HealthyRun, ...]
    without_effect: tuple[str, ...]  # faults that had none wherever they were tried
    seconds: float = 0.0
    repeats: tuple[RepeatedRun, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """Return the faults with a wrong or missing answer."""
        apart = {repeat.fault for repeat in self.repeats if repeat.fault and not repeat.right}
        return tuple(
            sorted({outcome.fault for outcome in self.outcomes if is_missed(outcome)} | apart)
        )

    @property
    def alarms(self) -> tuple[HealthyRun, ...]:
        """Return the healthy runs with a false alarm."""
        return tuple(run for run in self.healthy if run.alarms)

    @property
    def unstable(self) -> tuple[RepeatedRun, ...]:
        """Return the healthy candidates that were reported to give two results."""
        return tuple(repeat for repeat in self.repeats if not repeat.fault and not repeat.right)

    @property
    def scarce(self) -> tuple[str, ...]:
        """Return the families with too few plants that have an effect."""
        counts = Counter(outcome.family for outcome in self.outcomes if has_effect(outcome))
        families = {outcome.family for outcome in self.outcomes}
        return tuple(sorted(family for family in families if counts[family] < VARIANTS))

    @property
    def verdict(self) -> Verdict:
        """Return whether the engine's answers are right."""
        return Verdict.DIFFERS if self.missed or self.alarms or self.unstable else Verdict.AGREES

    @property
    def scores(self) -> tuple[MuseumScore, ...]:
        """Return the claims with their figures."""
        return scores(self.outcomes, self.healthy, self.repeats)

    def document(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "verdict": self.verdict,
            "origins": [],
            "cosines": [],
            "scores": [score.document() for score in self.scores],
            "strengths": [
                {"effect": name, "plants": count, **{s.claim: s.document() for s in three}}
                for name, count, *three in by_strength(self.outcomes)
            ],
            "families": {
                name: {"plants": count, "effective": counted, **_claims(three)}
                for name, (count, counted, *three) in by_family(self.outcomes).items()
            },
            "plants": self.outcomes,
            "classes": [
                {"faults": list(pair), "seen": count}
                for pair, count in classes(self.outcomes).items()
            ],
            "healthy": self.healthy,
            "repeats": self.repeats,
            "without_effect": self.without_effect,
            "fewer_than_three": self.scarce,
            "missed": self.missed,
            "seconds": self.seconds,
        }


def _claims(three: Sequence[MuseumScore]) -> dict[str, Any]:
    return {score.claim: score.document() for score in three}


@dataclass(frozen=True)
class MuseumTask:
    """The unit of work of one process: one fault in all its places, or one healthy case."""

    extent: MuseumExtent
    fault: str = ""
    healthy: MuseumCase | None = None
    twice: bool = False

    @property
    def name(self) -> str:
        """Return its name for a progress line."""
        return f"{self.fault or f'healthy: {self.healthy}'}{', twice' if self.twice else ''}"


def chosen(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the faults of ids and families, in the order of the registry."""
    known = plantable_faults()
    families = {fault.family for fault in known.values()}
    wanted = set(ids)
    assert wanted <= {*known, *families}, "the caller has refused unknown names"
    return tuple(
        name for name, fault in known.items() if not wanted or {name, fault.family} & wanted
    )


def tasks(faults: Sequence[str], extent: MuseumExtent) -> list[MuseumTask]:
    """Return all tasks, the longest first: with many processes a late one would run alone."""
    found = [
        MuseumTask(replace(extent, leave_out=_leaves_out(number, extent)), fault)
        for number, fault in enumerate(faults)
    ]
    found.sort(key=_is_short)
    if extent.repeats:
        racing = [name for name in faults if name.startswith(REPEATED)]
        found += [MuseumTask(extent, name, twice=True) for name in racing]
    healthy = list(healthy_cases(extent.healthy))
    found += [MuseumTask(extent, healthy=case) for case in healthy]
    return found + [
        MuseumTask(extent, healthy=case, twice=True) for case in healthy[: 2 * extent.repeats]
    ]


def _is_short(task: MuseumTask) -> tuple[bool, bool]:
    """Sort key: adjustable faults are planted many times, and attention is slowest to judge."""
    attends = "attn.attend" in roles_of(plantable_faults()[task.fault])
    return task.fault not in STRENGTHS, not attends


def _leaves_out(number: int, extent: MuseumExtent) -> int:
    return int(bool(extent.leave_out) and number % extent.leave_out == 0)


@contextmanager
def prepared(root: Path | None = None) -> Iterator[Path]:
    """Yield a folder with the models, removed when the run ends."""
    with tempfile.TemporaryDirectory(prefix="degarble-museum-") as temporary:
        folder = root or Path(temporary)
        prepare(folder)
        yield folder


def run_museum(
    faults: Sequence[str],
    extent: MuseumExtent,
    workers: int = 1,
    report: Callable[[str], None] = lambda _name: None,
    root: Path | None = None,
    ended: Callable[[FinishedTask], None] = lambda _done: None,
) -> Museum:
    """Run all tasks; `ended` gets the result of each as soon as it is known."""
    begun = time.perf_counter()
    done: dict[int, FinishedTask] = {}
    with prepared(root) as folder, searching(extent.adopted):
        order = {name: number for number, name in enumerate(plantable_faults())}
        numbered = list(enumerate(tasks(faults, extent)))
        for (number, task), finished_task in run_each(
            partial(_done, folder), numbered, workers, _name_of
        ):
            report(task.name)
            ended(finished_task)
            done[number] = finished_task
    found = [each for number in sorted(done) for each in done[number].found]
    outcomes = [each for each in found if isinstance(each, PlantOutcome)]
    outcomes.sort(key=lambda outcome: (order[outcome.fault], outcome.component, outcome.way))
    seconds = time.perf_counter() - begun
    return Museum(
        tuple(outcomes),
        tuple(each for each in found if isinstance(each, HealthyRun)),
        tuple(sorted(each.task.fault for each in done.values() if each.without_effect)),
        seconds,
        tuple(each for each in found if isinstance(each, RepeatedRun)),
    )


@dataclass(frozen=True)
class FinishedTask:
    """A finished task: its results, and the processor time that it took."""

    task: MuseumTask
    found: tuple[PlantOutcome | HealthyRun | RepeatedRun, ...]
    seconds: float

    @property
    def without_effect(self) -> bool:
        """Return whether a fault was planted and had no effect anywhere."""
        planted = [each for each in self.found if isinstance(each, PlantOutcome)]
        return bool(self.task.fault) and not self.task.twice and not any(map(has_effect, planted))


def _done(root: Path, numbered: tuple[int, MuseumTask]) -> FinishedTask:
    begun = time.process_time()
    found = tuple(perform(root, numbered[1]))
    return FinishedTask(numbered[1], found, time.process_time() - begun)


def _name_of(numbered: tuple[int, MuseumTask]) -> str:
    return numbered[1].name


@dataclass
class _Kept:
    """Models and stages that this process has opened."""

    models: dict[ModelKey, MuseumModel] = field(default_factory=dict)
    stages: dict[MuseumCase, Stage] = field(default_factory=dict)
    root: Path | None = None


_KEPT = _Kept()


def _keep(root: Path) -> None:
    if root != _KEPT.root:
        _KEPT.models, _KEPT.stages, _KEPT.root = {}, {}, root


def stage_of(case: MuseumCase, root: Path) -> Stage:
    """Return the stage of a case, opened once a process."""
    _keep(root)
    if case not in _KEPT.stages:
        _KEPT.stages[case] = Stage.open(case, root, _KEPT.models)
    return _KEPT.stages[case]


def perform(root: Path, task: MuseumTask) -> list[PlantOutcome | HealthyRun | RepeatedRun]:
    """Run one task, on one thread."""
    torch.set_num_threads(1)
    with searching(task.extent.adopted) as adopted:
        if task.twice:
            return list(run_twice(root, task))
        if task.healthy is not None:
            return [judge_healthy(root, task.healthy)]
        fault = plantable_faults()[task.fault]
        own = next((each for each in adopted if each.id == fault.id), None)
        if own is not None and own.kind:
            outcome = plant_in_product(fault, own)
            return [] if outcome is None else [outcome]
        return list(plant(root, fault, task.extent))


def judge_healthy(root: Path, case: MuseumCase) -> HealthyRun:
    """Run a healthy case, and record every alarm."""
    begun = time.process_time()
    _keep(root)
    stage = Stage.open(case, root, _KEPT.models)
    found = localise(stage.twin, stage.model.recipe, stage.healthy)
    alarms = tuple(f"{origin.component}: {origin.sentence}" for origin in found.origins)
    if found.verdict in (Verdict.DIFFERS, Verdict.UNSTABLE) and not alarms:
        alarms = (f"the verdict is {found.verdict}",)
    undecided = tuple(f"{name}: {reason}" for name, reason in found.unjudged)
    return HealthyRun(str(case), alarms, undecided, time.process_time() - begun)


def run_twice(root: Path, task: MuseumTask) -> Iterator[RepeatedRun]:
    """Run a healthy case twice, or a race in several places until enough runs differ."""
    begun = time.process_time()
    if task.healthy is not None:
        _keep(root)
        run = run_repeatedly(Stage.open(task.healthy, root, _KEPT.models), root=root)
        yield replace(run, seconds=time.process_time() - begun)
        return
    chance = random.Random(f"{task.extent.seed} {task.fault} twice")  # noqa: S311  no secret
    done = 0
    for stage, component, variant in _places(
        root, plantable_faults()[task.fault], task.extent, chance
    ):
        run = run_repeatedly(stage, task.fault, component, variant, root)
        if run.differs:
            yield replace(run, seconds=time.process_time() - begun)
            done += 1
        begun = time.process_time()
        if done == task.extent.repeats:
            return


def plant(root: Path, fault: ModelFault, extent: MuseumExtent) -> Iterator[PlantOutcome]:
    """Plant one fault until enough plants have an effect, or too many have none."""
    chance = random.Random(f"{extent.seed} {fault.id}")  # noqa: S311  no secret
    done = 0
    for stage, component, variant in _places(root, fault, extent, chance):
        outcome = _planted(
            stage, fault, component, variant, leave_out=bool(extent.leave_out) and not done
        )
        if outcome is not None:
            yield outcome
            done += has_effect(outcome)
        if done == extent.plants:
            break
    stages = [stage_of(case, root) for case in _cases(fault, extent)] if extent.mild else []
    count = extent.mild * (_BY_DIAL if fault.id in STRENGTHS else 1)
    for stage, component, variant in islice(mild_plants(stages, fault, chance), count):
        outcome = _planted(stage, fault, component, variant, leave_out=False)
        if outcome is not None:
            yield outcome


def _planted(
    stage: Stage, fault: ModelFault, component: str, variant: FaultVariant, *, leave_out: bool
) -> PlantOutcome | None:
    """Judge one plant; None if it changes nothing at all."""
    begun = time.process_time()
    planted = PlantedFault(fault, component, variant)
    if not touches(stage, planted):
        return None
    outcome = judge_plant(stage, planted, leave_out=leave_out)
    return replace(outcome, seconds=time.process_time() - begun)


def _cases(fault: ModelFault, extent: MuseumExtent) -> list[MuseumCase]:
    """Return the cases for planting a fault, its own first."""
    own = cases_of_fault(fault.id) if len(extent.cases) > 1 else ()
    return [*own, *extent.cases]


def _places(
    root: Path, fault: ModelFault, extent: MuseumExtent, chance: random.Random
) -> Iterator[tuple[Stage, str, FaultVariant]]:
    """Yield places: alternate cases, alternate roles within them, a few variants of each."""
    cases = list(extent.cases)
    chance.shuffle(cases)
    cases = [*_cases(fault, extent)[: -len(cases)], *cases]
    waiting = [(case, candidate_sites(stage_of(case, root), fault, chance)) for case in cases]
    tried = 0
    while waiting and tried < _TRIES * extent.plants:
        case, places = waiting.pop(0)
        component = next(places, None)
        if component is None:
            continue
        waiting.append((case, places))
        stage = stage_of(case, root)
        variants = ways_of(stage, fault, component)
        chance.shuffle(variants)
        for variant in variants[: _WAYS if extent.plants == 1 else 1]:
            tried += 1
            yield stage, component, variant


# --------------------------------------------------------------------------------------------------
# JSON lines, one a task, so that an interrupted run keeps them.

if TYPE_CHECKING:
    Ended = Callable[[FinishedTask], None]


@contextmanager
def lines_to(path: Path | None) -> Iterator[Ended]:
    """Return a function that appends a finished task to `path`; without a path it does nothing."""
    if path is None:
        yield lambda _done: None
        return
    try:
        file = path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UnwritablePath(
            str(path), error.strerror or str(error), "a file that can be written",
            "Name another file.",
        ) from error  # fmt: skip
    with file:

        def ended(done: FinishedTask) -> None:
            line = {"task": done.task.name, "seconds": done.seconds, "found": done.found}
            file.write(json.dumps(to_plain(line), allow_nan=False) + "\n")
            file.flush()

        yield ended


# --------------------------------------------------------------------------------------------------
# The report: claims, strengths, families, and every miss.

_SHOWN = 40  # misses in the terminal; the JSON has all of them


def report_lines(museum: Museum) -> list[str]:
    """Return the report: what was run, the claims, the tables, the misses."""
    return [
        *_first(museum),
        *_claim_lines(museum),
        *_tables(museum),
        *_classes(museum),
        *_misses(museum),
    ]


def percent(score: MuseumScore) -> str:
    """Return a share with its interval; a dash if nothing was counted."""
    if not score.total:
        return "-"
    low, high = wilson(score.hits, score.total)
    return f"{100 * score.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def target_text(score: MuseumScore) -> str:
    """Return a score's target; a dash if it has none."""
    if score.wanted is None:
        return "-"
    return f"{'>=' if score.at_least else '<='} {100 * score.wanted:g} %"


def effect_text(value: float) -> str:
    """Return an effect in units of budget."""
    if math.isnan(value):
        return "no budget"
    return "an edge" if math.isinf(value) else f"{number(value, 3)}x"


def _first(museum: Museum) -> Iterator[str]:
    effective = sum(map(has_effect, museum.outcomes))
    faults = len({outcome.fault for outcome in museum.outcomes})
    yield (
        f"{faults} {'fault' if faults == 1 else 'faults'} planted {len(museum.outcomes)} times, "
        f"{effective} with an effect; {len(museum.healthy)} healthy runs; "
        f"{len(museum.repeats)} run twice; {museum.seconds:.0f} s"
    )


def _claim_lines(museum: Museum) -> Iterator[str]:
    yield ""
    for score in museum.scores:
        if score.total:
            met = "MISSED" if not score.met else "met" if score.wanted is not None else ""
            yield (
                f"  {score.claim:40} {score.hits:>5,} of {score.total:>5,}  {percent(score):26}"
                f" {target_text(score):8} {met}".rstrip()
            )


def _tables(museum: Museum) -> Iterator[str]:
    header = f"{'plants':>7} {'localised':26} {'named first':26} {'wrong cause':26}"
    yield from ("", f"  {'effect':10} {header}".rstrip())
    for name, count, *three in by_strength(museum.outcomes):
        yield _row(name, count, three)
    yield from ("", f"  {'from 3x':10} {header}".rstrip())
    for name, (count, _, *three) in by_family(museum.outcomes).items():
        yield _row(name, count, three)


def _row(name: str, count: int, three: Sequence[MuseumScore]) -> str:
    cells = "".join(f" {percent(score):26}" for score in three)
    return f"  {name:10} {count:>7}{cells}".rstrip()


def _classes(museum: Museum) -> Iterator[str]:
    found = classes(museum.outcomes)
    if found:
        yield from ("", "With the same effect on the data, so the two cannot be distinguished:")
        yield from (f"  {one} and {other}: {count}" for (one, other), count in found.items())


def _misses(museum: Museum) -> Iterator[str]:
    if museum.without_effect:
        names = ", ".join(museum.without_effect)
        yield from ("", f"No effect wherever it was planted, so not counted: {names}")
    if museum.scarce:
        yield from ("", f"Fewer than three plants with an effect: {', '.join(museum.scarce)}")
    missed = [plant_outcome for plant_outcome in museum.outcomes if is_missed(plant_outcome)]
    for outcome in missed[:_SHOWN]:
        yield from ("", *_miss(outcome))
    if len(missed) > _SHOWN:
        yield f"... and {len(missed) - _SHOWN} more; --json has all of them"
    for run in museum.alarms:
        yield from ("", f"ALARM on a healthy run: {run.case}")
        yield from (f"  {visible(alarm)}" for alarm in run.alarms)
    for twice in museum.repeats:
        if not twice.right:
            yield from ("", *_twice(twice))


def _twice(run: RepeatedRun) -> Iterator[str]:
    blamed = ", ".join(run.blamed[:3]) or "nobody"
    if not run.fault:
        yield f"ALARM on a healthy case that was run twice: {run.case}: {blamed}"
        return
    yield f"MISSED {run.fault} in {run.component}, run twice: {run.verdict}, blamed {blamed}"
    yield f"  planted   {visible(run.way)}; {run.case}"


def _miss(outcome: PlantOutcome) -> Iterator[str]:
    yield f"MISSED {outcome.fault} in {outcome.component} ({effect_text(outcome.effect)})"
    yield f"  planted   {visible(outcome.way)}; {outcome.case}"
    if outcome.place is not PlaceAnswer.EXACT:
        blamed = ", ".join(outcome.blamed) or "nobody"
        yield f"  blamed    {blamed}; it is {', '.join(outcome.truth)}"
    if outcome.cause is CauseAnswer.WRONG:
        yield f"  named     {outcome.named}"
    if outcome.sentence:
        yield f"  said      {visible(outcome.sentence)}"
