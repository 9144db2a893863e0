"""Distribute the components of a check to processes, GPUs or machines, and keep finished ones.

Every worker opens capture and checkpoints for itself and judges one task after another, in the
order in which the weights lie on the disk: each is read once, and the pages of a node are shared.
Only numbers come back. What needs the whole run (conventions, origins, causes) stays with whoever
asked. Each worker computes on one thread, so that no sum depends on their number.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from degarble.harness.base.errors import UnreadableFile, WorkerLost
from degarble.harness.base.gpu import GpuLost, gpu_failures
from degarble.harness.checkpoint.view.view import fingerprint
from degarble.harness.checkpoint.write.finished_parts import FinishedParts
from degarble.harness.checkpoint.write.workers import CHECK_IMPORTS, Pool, end_server_without
from degarble.harness.commands.check.check import CheckRun
from degarble.harness.commands.check.output_statistics import StatisticsCollector
from degarble.harness.engine.localise.answers import TaskAnswer
from degarble.harness.engine.localise.localise import During, Localisation
from degarble.harness.inference.model import one_thread
from degarble.harness.report.page import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.commands.check.check import CheckSettings
    from degarble.harness.engine.localise.answers import JudgingTask

AGAIN = 2  # times that a component runs again whose worker died
_HEAVY = "transformers.models."  # modules that a model may need and CHECK_IMPORTS leaves out


@dataclass(frozen=True)
class SpreadSettings:
    """Who judges components, and where finished ones are kept.

    Without `workers` the calling process judges, with as many threads as torch has. `devices` are
    the workers' GPUs, in turn.
    """

    workers: Workers | None = None
    devices: tuple[str, ...] = ()
    unfinished: Path | None = None


class SpreadCheck:
    """Judges the components of a check elsewhere; a context ends the workers."""

    def __init__(self, opened: CheckRun, settings: SpreadSettings, *, looking: bool) -> None:
        self._opened, self._settings = opened, settings
        self._looking = looking
        self._stack = ExitStack()
        self._pool: Pool | None = None
        wanted = opened.settings
        if isinstance(settings.workers, int) and settings.devices:
            wanted = replace(wanted, sharing=-(-settings.workers // len(settings.devices)))
        self._work = partial(_judged, secrets.token_hex(8), wanted, looking)
        self._parts = self._finished_parts()
        self._unverified: list[tuple[list[object], Any]] = []

    def __enter__(self) -> Self:
        if self._settings.workers is not None:
            self._stack.enter_context(one_thread())
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()
        self._pool = None
        _forget()
        if self._unverified and (raised[1] is None or isinstance(raised[1], Exception)):
            self._opened.require_verified()
            self._keep()

    def close(self) -> None:
        """Forget finished components: the result is written."""
        if self._parts is not None:
            self._parts.close()

    def each(
        self, tasks: Sequence[JudgingTask], here: Callable[[JudgingTask], TaskAnswer]
    ) -> Iterator[tuple[JudgingTask, TaskAnswer]]:
        """Yield each task with its answer as it completes; finished ones first."""
        new = []
        for task in tasks:
            told = self._kept(task)
            if told is None:
                new.append(task)
            else:
                yield task, told
        for task, told in self._judged(new, here):
            if self._parts is not None:
                self._unverified.append((_name(task), to_plain(told)))
                self._keep()
            yield task, told

    def _keep(self) -> None:
        """Keep what has finished, once the reference is known to be what was written.

        One that is damaged and replaced may have the same size and time.
        """
        if self._parts is None or not self._opened.is_verified():
            return
        for name, part in self._unverified:
            self._parts.add(name, part)
        self._unverified.clear()

    def _judged(
        self, tasks: Sequence[JudgingTask], here: Callable[[JudgingTask], TaskAnswer]
    ) -> Iterator[tuple[JudgingTask, TaskAnswer]]:
        workers = self._settings.workers
        if workers is None or workers == 1 or len(tasks) < 2:
            for task in tasks:
                yield task, here(task)
            return
        ordered = sorted(tasks, key=self._opened.place_on_disk)
        if not isinstance(workers, int):
            yield from workers.run_each(self._work, ordered, _text, AGAIN)
            return
        if self._pool is None:
            imported = [CHECK_IMPORTS, *(name for name in sys.modules if name.startswith(_HEAVY))]
            end_server_without(imported)  # the command began one before it knew the model
            pool = Pool(self._work, workers, self._settings.devices, imported)
            self._pool = self._stack.enter_context(pool)
        yield from self._pool.run_each(ordered, _text, AGAIN)

    def _kept(self, task: JudgingTask) -> TaskAnswer | None:
        plain = None if self._parts is None else self._parts.read(_name(task))
        if plain is None:
            return None
        try:
            told: TaskAnswer = from_plain(TaskAnswer, plain, "finished component")
        except UnreadableFile:
            return None
        return told

    def _finished_parts(self) -> FinishedParts | None:
        """Open the folder of finished components; a capture whose run was killed has none."""
        folder, opened = self._settings.unfinished, self._opened
        if folder is None or not opened.capture.complete:
            return None
        settings = opened.settings
        facts = {
            "capture": opened.capture.hash,
            "checkpoint": fingerprint(opened.model.checkpoint),
            "reference": opened.reference_fingerprint,
            "files": opened.files(),
            "torch": torch.__version__,
            "device": settings.device,
            "one thread": self._settings.workers is not None,
            "conventions": sorted(map(list, settings.conventions.items())),
            "held values": settings.held_values,
            "statistics": self._looking,
            "screen": settings.screen,
        }
        return FinishedParts(folder / opened.capture.hash[:16], facts)


def _name(task: JudgingTask) -> list[object]:
    values = [list(pair) for pair in task.values]
    return [list(task.names), values, task.briefly, task.screened]


def _text(task: JudgingTask) -> str:
    return task.text


# --------------------------------------------------------------------------------------------------
# In a worker.

_KEPT: dict[tuple[str, str], tuple[ExitStack, Localisation]] = {}


def _judged(key: str, settings: CheckSettings, looking: bool, *given: Any) -> TaskAnswer:
    """Judge a task in any process, which keeps its models open for the next one."""
    *places, task = given
    device = places[0] if places else settings.device
    with one_thread():
        if (key, device) not in _KEPT:
            _forget()
            _KEPT[key, device] = _opened(replace(settings, device=device), looking=looking)
        work = _KEPT[key, device][1]
        try:
            with gpu_failures():
                return work.told(task)
        except GpuLost as lost:
            raise WorkerLost(
                f"GPU of the worker for {task.text}", f"{device}: {lost}",
                "a GPU that answers and has room",
                "Look at nvidia-smi; leave it out (--device cuda:N), or take fewer --workers.",
            ) from lost  # fmt: skip


def _forget() -> None:
    """Close what this process has kept open."""
    for stack, _ in _KEPT.values():
        stack.close()
    _KEPT.clear()


def _opened(settings: CheckSettings, *, looking: bool) -> tuple[ExitStack, Localisation]:
    stack = ExitStack()
    try:
        run = stack.enter_context(CheckRun(settings, verify=False))
        during = During(looked=StatisticsCollector(run.model.config) if looking else None)
        work = Localisation.begun(run.twin, run.recipe, run.capture, run.reference, during)
    except BaseException:
        stack.close()
        raise
    return stack, work
