"""Run the same input twice and compare bit for bit: what differs is UNSTABLE.

A candidate runs a case twice, both runs are written as captures, and `degarble compare` judges
them. A race keeps its random state from one run to the next, so that the runs are damaged in
different places; a component of a healthy candidate may sum in any order, but in the same one each
time. If both runs are equal the race counts as without effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from degarble.harness.capture.files.writer import CaptureWriter, PendingCall, PendingTensor
from degarble.harness.capture.recorder import Snapshots
from degarble.harness.commands.check.compare_runs import compare_runs
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import Way
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.harness.museum.cases import Stage

REPEATED = (
    "M36.workspace",
    "M37",
)  # what is left over or spoilt by chance is another one each time


@dataclass(frozen=True)
class Repeated:
    """Two runs of one candidate. `fault` is empty for a healthy one."""

    fault: str
    component: str
    way: str
    case: str
    verdict: Verdict
    blamed: tuple[str, ...] = field(default=())  # in the order of the run
    seconds: float = 0.0

    @property
    def apart(self) -> bool:
        """Return whether the two runs differ."""
        return self.verdict is not Verdict.AGREES

    @property
    def right(self) -> bool:
        """Return whether the answer is right: UNSTABLE at the planted component first, or equal."""
        if not self.fault:
            return not self.apart
        return self.verdict is Verdict.UNSTABLE and self.blamed[:1] == (self.component,)


def repeat(
    stage: Stage,
    fault: str = "",
    component: str = "",
    way: Way | None = None,
    root: Path | None = None,
) -> Repeated:
    """Run a case twice and compare the captures, which are kept in `root` meanwhile."""
    candidate = stage.candidate()
    if way is not None:
        candidate.calls[component] = way.apply(candidate.calls[component])
    # Trap: a worker of an interrupted museum is ended by SIGTERM and removes nothing; its caller
    # removes the folder of all of it.
    with TemporaryDirectory(prefix="degarble-repeat-", dir=root) as made:
        folders = [Path(made) / name for name in ("first", "second")]
        for folder in folders:
            write(stage.run(candidate), folder, {"weights": str(stage.case)})
        found = compare_runs(*folders)
        blamed = tuple(dict.fromkeys(line.component for line in found.origins))
        told = (fault, component, way.words if way else "", str(stage.case))
        return Repeated(*told, found.verdict, blamed)


def write(run: InMemoryRun, folder: Path, facts: Mapping[str, str]) -> None:
    """Write a run that was kept in memory as a capture."""
    snapshots = Snapshots()

    def sent(side: Mapping[str, Tensor]) -> dict[str, PendingTensor]:
        taken = {name: snapshots.take(each).payload for name, each in side.items()}
        return {name: PendingTensor(taken[name], tuple(each.shape)) for name, each in side.items()}

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
