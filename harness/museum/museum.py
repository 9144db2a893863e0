"""Run `degarble faults run`: plant every known fault, run healthy cases, score the answers.

It plants the published extent, the whole museum, or chosen faults, over processes. A fault without
effect on every case that was tried is listed as such. The verdict is DIFFERS if a fault of three
budgets or more is not localised, a wrong cause is named, a healthy run raises an alarm, or two
equal runs are reported as UNSTABLE.
"""

from __future__ import annotations

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

from degarble.harness.checkpoint.write.workers import run_each
from degarble.harness.engine.faults.fault_strength import DIALS
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise.localise import localise
from degarble.harness.museum.cases import (
    Case,
    Stage,
    cases_of_fault,
    healthy_cases,
    planting_cases,
)
from degarble.harness.museum.models import ModelKey, MuseumModel, prepare
from degarble.harness.museum.plants import Outcome, Planted, judged, sites, touches, ways_of
from degarble.harness.museum.repeats import REPEATED, Repeated, repeat
from degarble.harness.museum.scores import (
    Healthy,
    Score,
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
    scores,
)
from degarble.harness.museum.sites import roles_of
from degarble.harness.museum.strengths import mild
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.harness.engine.faults.model_faults import ModelFault, Way

SEED = 5
WORKER_BYTES = 1 << 30  # that a process may take
_TRIES = 4  # plants that are tried for each that is wanted, where many have no effect
_WAYS = 2  # of one fault at one component
_BY_DIAL = 3  # times as many mild plants of a fault that can be as strong as is wanted


@dataclass(frozen=True)
class Extent:
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
    cases: tuple[Case, ...] = field(default_factory=planting_cases)


PUBLISHED = Extent(plants=1, healthy=40, leave_out=3, mild=1, repeats=1)
WHOLE = Extent(plants=4, healthy=240, leave_out=1, mild=4, repeats=6)
CHOSEN = Extent(plants=3, healthy=0, leave_out=1, mild=2, repeats=1)
VARIANTS = 3  # plants with an effect that a family needs, else it is reported


@dataclass(frozen=True)
class Museum:
    """All planted and healthy runs, and the conclusions."""

    outcomes: tuple[Outcome, ...]
    healthy: tuple[Healthy, ...]
    without_effect: tuple[str, ...]  # faults that had none wherever they were tried
    seconds: float = 0.0
    repeats: tuple[Repeated, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """Return the faults with a wrong or missing answer."""
        apart = {each.fault for each in self.repeats if each.fault and not each.right}
        return tuple(sorted({each.fault for each in self.outcomes if is_missed(each)} | apart))

    @property
    def alarms(self) -> tuple[Healthy, ...]:
        """Return the healthy runs with a false alarm."""
        return tuple(each for each in self.healthy if each.alarms)

    @property
    def shaken(self) -> tuple[Repeated, ...]:
        """Return the healthy candidates that were reported to give two results."""
        return tuple(each for each in self.repeats if not each.fault and not each.right)

    @property
    def thin(self) -> tuple[str, ...]:
        """Return the families with too few plants that have an effect."""
        counts = Counter(each.family for each in self.outcomes if has_effect(each))
        families = {each.family for each in self.outcomes}
        return tuple(sorted(each for each in families if counts[each] < VARIANTS))

    @property
    def verdict(self) -> Verdict:
        """Return whether the engine's answers are right."""
        return Verdict.DIFFERS if self.missed or self.alarms or self.shaken else Verdict.AGREES

    @property
    def scores(self) -> tuple[Score, ...]:
        """Return the claims with their figures."""
        return scores(self.outcomes, self.healthy, self.repeats)

    def document(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "verdict": self.verdict,
            "origins": [],
            "cosines": [],
            "scores": [each.document() for each in self.scores],
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
            "fewer_than_three": self.thin,
            "missed": self.missed,
            "seconds": self.seconds,
        }


def _claims(three: Sequence[Score]) -> dict[str, Any]:
    return {each.claim: each.document() for each in three}


@dataclass(frozen=True)
class Task:
    """The unit of work of one process: one fault in all its places, or one healthy case."""

    extent: Extent
    fault: str = ""
    healthy: Case | None = None
    twice: bool = False

    @property
    def name(self) -> str:
        """Return its name for a progress line."""
        return f"{self.fault or f'healthy: {self.healthy}'}{', twice' if self.twice else ''}"


def chosen(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the faults of ids and families, in the order of the registry."""
    families = {fault.family for fault in MODEL_FAULTS.values()}
    wanted = set(ids)
    assert wanted <= {*MODEL_FAULTS, *families}, "the caller has refused unknown names"
    return tuple(
        name for name, each in MODEL_FAULTS.items() if not wanted or {name, each.family} & wanted
    )


def tasks(faults: Sequence[str], extent: Extent) -> list[Task]:
    """Return all tasks, the longest first: with many processes a late one would run alone."""
    found = [
        Task(replace(extent, leave_out=_leaves_out(number, extent)), fault)
        for number, fault in enumerate(faults)
    ]
    found.sort(key=_is_short)
    if extent.repeats:
        racing = [name for name in faults if name.startswith(REPEATED)]
        found += [Task(extent, name, twice=True) for name in racing]
    healthy = list(healthy_cases(extent.healthy))
    found += [Task(extent, healthy=case) for case in healthy]
    return found + [
        Task(extent, healthy=case, twice=True) for case in healthy[: 2 * extent.repeats]
    ]


def _is_short(task: Task) -> tuple[bool, bool]:
    """Sort key: adjustable faults are planted many times, and attention is slowest to judge."""
    attends = "attn.attend" in roles_of(MODEL_FAULTS[task.fault])
    return task.fault not in DIALS, not attends


def _leaves_out(number: int, extent: Extent) -> int:
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
    extent: Extent,
    workers: int = 1,
    told: Callable[[str], None] = lambda _name: None,
    root: Path | None = None,
    ended: Callable[[Done], None] = lambda _done: None,
) -> Museum:
    """Run all tasks; `ended` gets the result of each as soon as it is known."""
    begun = time.perf_counter()
    done: dict[int, Done] = {}
    with prepared(root) as folder:
        numbered = list(enumerate(tasks(faults, extent)))
        for (number, task), made in run_each(partial(_done, folder), numbered, workers, _name_of):
            told(task.name)
            ended(made)
            done[number] = made
    found = [each for number in sorted(done) for each in done[number].found]
    outcomes = [each for each in found if isinstance(each, Outcome)]
    order = {name: number for number, name in enumerate(MODEL_FAULTS)}
    outcomes.sort(key=lambda each: (order[each.fault], each.component, each.way))
    seconds = time.perf_counter() - begun
    return Museum(
        tuple(outcomes),
        tuple(each for each in found if isinstance(each, Healthy)),
        tuple(sorted(each.task.fault for each in done.values() if each.without_effect)),
        seconds,
        tuple(each for each in found if isinstance(each, Repeated)),
    )


@dataclass(frozen=True)
class Done:
    """A finished task: its results, and the processor time that it took."""

    task: Task
    found: tuple[Outcome | Healthy | Repeated, ...]
    seconds: float

    @property
    def without_effect(self) -> bool:
        """Return whether a fault was planted and had no effect anywhere."""
        planted = [each for each in self.found if isinstance(each, Outcome)]
        return bool(self.task.fault) and not self.task.twice and not any(map(has_effect, planted))


def _done(root: Path, numbered: tuple[int, Task]) -> Done:
    begun = time.process_time()
    found = tuple(perform(root, numbered[1]))
    return Done(numbered[1], found, time.process_time() - begun)


def _name_of(numbered: tuple[int, Task]) -> str:
    return numbered[1].name


@dataclass
class _Kept:
    """Models and stages that this process has opened."""

    models: dict[ModelKey, MuseumModel] = field(default_factory=dict)
    stages: dict[Case, Stage] = field(default_factory=dict)
    root: Path | None = None


_KEPT = _Kept()


def _keep(root: Path) -> None:
    if root != _KEPT.root:
        _KEPT.models, _KEPT.stages, _KEPT.root = {}, {}, root


def stage_of(case: Case, root: Path) -> Stage:
    """Return the stage of a case, opened once a process."""
    _keep(root)
    if case not in _KEPT.stages:
        _KEPT.stages[case] = Stage.of(case, root, _KEPT.models)
    return _KEPT.stages[case]


def perform(root: Path, task: Task) -> list[Outcome | Healthy | Repeated]:
    """Run one task, on one thread."""
    torch.set_num_threads(1)
    if task.twice:
        return list(run_twice(root, task))
    if task.healthy is not None:
        return [judge_healthy(root, task.healthy)]
    return list(plant(root, MODEL_FAULTS[task.fault], task.extent))


def judge_healthy(root: Path, case: Case) -> Healthy:
    """Run a healthy case, and record every alarm."""
    begun = time.process_time()
    _keep(root)
    stage = Stage.of(case, root, _KEPT.models)
    found = localise(stage.twin, stage.model.recipe, stage.healthy)
    alarms = tuple(f"{each.component}: {each.sentence}" for each in found.origins)
    if found.verdict in (Verdict.DIFFERS, Verdict.UNSTABLE) and not alarms:
        alarms = (f"the verdict is {found.verdict}",)
    undecided = tuple(f"{name}: {reason}" for name, reason in found.unjudged)
    return Healthy(str(case), alarms, undecided, time.process_time() - begun)


def run_twice(root: Path, task: Task) -> Iterator[Repeated]:
    """Run a healthy case twice, or a race in several places until enough runs differ."""
    begun = time.process_time()
    if task.healthy is not None:
        _keep(root)
        made = repeat(Stage.of(task.healthy, root, _KEPT.models), root=root)
        yield replace(made, seconds=time.process_time() - begun)
        return
    chance = random.Random(f"{task.extent.seed} {task.fault} twice")  # noqa: S311  no secret
    done = 0
    for stage, component, way in _places(root, MODEL_FAULTS[task.fault], task.extent, chance):
        made = repeat(stage, task.fault, component, way, root)
        if made.apart:
            yield replace(made, seconds=time.process_time() - begun)
            done += 1
        begun = time.process_time()
        if done == task.extent.repeats:
            return


def plant(root: Path, fault: ModelFault, extent: Extent) -> Iterator[Outcome]:
    """Plant one fault until enough plants have an effect, or too many have none."""
    chance = random.Random(f"{extent.seed} {fault.id}")  # noqa: S311  no secret
    done = 0
    for stage, component, way in _places(root, fault, extent, chance):
        made = _planted(stage, fault, component, way, leave_out=bool(extent.leave_out) and not done)
        if made is not None:
            yield made
            done += has_effect(made)
        if done == extent.plants:
            break
    stages = [stage_of(case, root) for case in _cases(fault, extent)] if extent.mild else []
    count = extent.mild * (_BY_DIAL if fault.id in DIALS else 1)
    for stage, component, way in islice(mild(stages, fault, chance), count):
        made = _planted(stage, fault, component, way, leave_out=False)
        if made is not None:
            yield made


def _planted(
    stage: Stage, fault: ModelFault, component: str, way: Way, *, leave_out: bool
) -> Outcome | None:
    """Judge one plant; None if it changes nothing at all."""
    begun = time.process_time()
    planted = Planted(fault, component, way)
    if not touches(stage, planted):
        return None
    made = judged(stage, planted, leave_out=leave_out)
    return replace(made, seconds=time.process_time() - begun)


def _cases(fault: ModelFault, extent: Extent) -> list[Case]:
    """Return the cases for planting a fault, its own first."""
    own = cases_of_fault(fault.id) if len(extent.cases) > 1 else ()
    return [*own, *extent.cases]


def _places(
    root: Path, fault: ModelFault, extent: Extent, chance: random.Random
) -> Iterator[tuple[Stage, str, Way]]:
    """Yield places: alternate cases, alternate roles within them, a few ways at each component."""
    cases = list(extent.cases)
    chance.shuffle(cases)
    cases = [*_cases(fault, extent)[: -len(cases)], *cases]
    waiting = [(case, sites(stage_of(case, root), fault, chance)) for case in cases]
    tried = 0
    while waiting and tried < _TRIES * extent.plants:
        case, places = waiting.pop(0)
        component = next(places, None)
        if component is None:
            continue
        waiting.append((case, places))
        stage = stage_of(case, root)
        found = ways_of(stage, fault, component)
        chance.shuffle(found)
        for way in found[: _WAYS if extent.plants == 1 else 1]:
            tried += 1
            yield stage, component, way
