"""`degarble faults run`: plant every known fault, run healthy cases, count what is said.

Owns what is planted (the published extent, the whole museum, or chosen faults), the work over
processes, and the summary. A fault that has no effect on any case that was tried is listed as such.
Exit status 1 follows from `missed`: a fault that is not localised from three budgets on, a wrong
cause, or a healthy run with an alarm.

Refuses unknown faults through the registry. Kept honest by suites/runs/test_museum.py and
suites/faults/test_museum.py, also with an engine that is blind on purpose.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.checkpoint.worker_pool import run_each
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.localise import localise
from degarble.harness.record.verdict import Verdict
from degarble.harness.runs.museum_cases import Case, Stage, healthy_cases, planting_cases
from degarble.harness.runs.museum_models import ModelKey, MuseumModel, prepare
from degarble.harness.runs.museum_plants import Outcome, Planted, judged, sites, touches, ways_of
from degarble.harness.runs.museum_scores import (
    Healthy,
    Score,
    by_family,
    by_strength,
    has_effect,
    is_missed,
    scores,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from degarble.harness.engine.faults.model_faults import ModelFault, Way

SEED = 5
_TRIES = 4  # plants that are tried for each that is wanted, where many have no effect
_WAYS = 2  # of one fault at one component


@dataclass(frozen=True)
class Extent:
    """How much is run. One in `leave_out` faults is also asked without its own family."""

    plants: int
    healthy: int
    leave_out: int = 0
    seed: int = SEED
    cases: tuple[Case, ...] = field(default_factory=planting_cases)


PUBLISHED = Extent(plants=1, healthy=40, leave_out=3)
WHOLE = Extent(plants=3, healthy=200, leave_out=2)
CHOSEN = Extent(plants=3, healthy=0, leave_out=1)


@dataclass(frozen=True)
class Museum:
    """All that was planted, all that was healthy, and what follows."""

    outcomes: tuple[Outcome, ...]
    healthy: tuple[Healthy, ...]
    without_effect: tuple[str, ...]  # faults that had none wherever they were tried
    seconds: float = 0.0

    @property
    def missed(self) -> tuple[str, ...]:
        """Faults of which something wrong, or nothing, was said."""
        return tuple(sorted({each.fault for each in self.outcomes if is_missed(each)}))

    @property
    def alarms(self) -> tuple[Healthy, ...]:
        """Healthy runs that were called ill."""
        return tuple(each for each in self.healthy if each.alarms)

    @property
    def verdict(self) -> Verdict:
        """Whether the engine said what is true."""
        return Verdict.DIFFERS if self.missed or self.alarms else Verdict.AGREES

    @property
    def scores(self) -> tuple[Score, ...]:
        """The claims with their figures."""
        return scores(self.outcomes, self.healthy)

    def document(self) -> dict[str, Any]:
        """The machine's view of it."""
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
            "healthy": self.healthy,
            "without_effect": self.without_effect,
            "missed": self.missed,
            "seconds": self.seconds,
        }


def _claims(three: Sequence[Score]) -> dict[str, Any]:
    return {each.claim: each.document() for each in three}


@dataclass(frozen=True)
class Task:
    """What one process does at a time: one fault in all its places, or one healthy case."""

    extent: Extent
    fault: str = ""
    healthy: Case | None = None

    @property
    def name(self) -> str:
        """In a progress line."""
        return self.fault or f"healthy: {self.healthy}"


def chosen(ids: Sequence[str]) -> tuple[str, ...]:
    """The faults of ids and families, in the order of the registry."""
    families = {fault.family for fault in MODEL_FAULTS.values()}
    wanted = set(ids)
    assert wanted <= {*MODEL_FAULTS, *families}, "the caller has refused unknown names"
    return tuple(
        name for name, each in MODEL_FAULTS.items() if not wanted or {name, each.family} & wanted
    )


def tasks(faults: Sequence[str], extent: Extent) -> list[Task]:
    """What is to be done, the longest first."""
    found = [
        Task(replace(extent, leave_out=_leaves_out(number, extent)), fault)
        for number, fault in enumerate(faults)
    ]
    return found + [Task(extent, healthy=case) for case in healthy_cases(extent.healthy)]


def _leaves_out(number: int, extent: Extent) -> int:
    return int(bool(extent.leave_out) and number % extent.leave_out == 0)


@contextmanager
def prepared(root: Path | None = None) -> Iterator[Path]:
    """Give a folder with the models, which goes when the run ends."""
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
) -> Museum:
    """Do all of it."""
    begun = time.perf_counter()
    outcomes: list[Outcome] = []
    healthy: list[Healthy] = []
    without: list[str] = []
    with prepared(root) as folder:
        work = partial(perform, folder)
        for task, found in run_each(work, tasks(faults, extent), workers, _name_of):
            told(task.name)
            outcomes += [each for each in found if isinstance(each, Outcome)]
            healthy += [each for each in found if isinstance(each, Healthy)]
            if task.fault and not any(has_effect(each) for each in found):  # type: ignore[arg-type]
                without.append(task.fault)
    order = {name: number for number, name in enumerate(MODEL_FAULTS)}
    outcomes.sort(key=lambda each: (order[each.fault], each.component, each.way))
    seconds = time.perf_counter() - begun
    return Museum(tuple(outcomes), tuple(healthy), tuple(sorted(without)), seconds)


def _name_of(task: Task) -> str:
    return task.name


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
    """A case on which faults are planted; opened once a process."""
    _keep(root)
    if case not in _KEPT.stages:
        _KEPT.stages[case] = Stage.of(case, root, _KEPT.models)
    return _KEPT.stages[case]


def perform(root: Path, task: Task) -> list[Outcome | Healthy]:
    """Do one task, on one thread."""
    torch.set_num_threads(1)
    if task.healthy is not None:
        return [judge_healthy(root, task.healthy)]
    return list(plant(root, MODEL_FAULTS[task.fault], task.extent))


def judge_healthy(root: Path, case: Case) -> Healthy:
    """Run a healthy case, and keep what the engine says against it."""
    begun = time.process_time()
    _keep(root)
    stage = Stage.of(case, root, _KEPT.models)
    found = localise(stage.twin, stage.model.recipe, stage.healthy)
    alarms = tuple(f"{each.component}: {each.sentence}" for each in found.origins)
    if found.verdict in (Verdict.DIFFERS, Verdict.UNSTABLE) and not alarms:
        alarms = (f"the verdict is {found.verdict}",)
    undecided = tuple(f"{name}: {reason}" for name, reason in found.unjudged)
    return Healthy(str(case), alarms, undecided, time.process_time() - begun)


def plant(root: Path, fault: ModelFault, extent: Extent) -> Iterator[Outcome]:
    """Plant one fault until enough plants have an effect, or too many have none."""
    chance = random.Random(f"{extent.seed} {fault.id}")  # noqa: S311  no secret
    done = 0
    for stage, component, way in _places(root, fault, extent, chance):
        planted = Planted(fault, component, way)
        begun = time.process_time()
        if not touches(stage, planted):
            continue
        leave_out = bool(extent.leave_out) and done == 0
        made = judged(stage, planted, leave_out=leave_out)
        yield replace(made, seconds=time.process_time() - begun)
        done += has_effect(made)
        if done == extent.plants:
            return


def _places(
    root: Path, fault: ModelFault, extent: Extent, chance: random.Random
) -> Iterator[tuple[Stage, str, Way]]:
    """Cases by turns, roles by turns within them, a few ways at each component."""
    cases = list(extent.cases)
    chance.shuffle(cases)
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
