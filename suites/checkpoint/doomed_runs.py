"""Runs that die: forked from one light process, killed, and taken up again. A program of its own.

`python -m degarble.suites.checkpoint.doomed_runs MODE SEED TRIALS` prints JSON: how many runs
were killed, and every promise that was broken. Modes: `moments` (SIGKILL from outside, after a
random time), `operations` (before operations on the disk), `bytes` (in the middle of a write),
`file-size` (the system's limit on file sizes), `read-only` (a target that may not be written),
`together` (two runs at once).
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Refused
from degarble.harness.checkpoint.write.disk import Disk
from degarble.suites.checkpoint.writing_cases import (
    broken_promises,
    quick_folder,
    small_plan,
    tree,
    write_all,
    write_one_by_one,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Way = Callable[[Path], object]

PLAN = small_plan()
KILLS_A_TRIAL = 3
OPERATIONS = (
    *("make_folder", "create", "sync", "close", "rename", "sync_folder"),
    *("remove", "remove_folder"),
)


class MortalDisk(Disk):
    """Kills its process before one operation, or within a write when so many bytes are out."""

    def __init__(self, operation: int | None = None, byte: int | None = None) -> None:
        self.ticks = 0
        self._operation = operation
        self._byte = byte
        for name in OPERATIONS:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, operation: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object) -> object:
            self._tick()
            return operation(*given)

        return counted

    def _tick(self) -> None:
        if self.ticks == self._operation:
            os.kill(os.getpid(), signal.SIGKILL)
        self.ticks += 1

    def write(self, descriptor: int, data: memoryview) -> None:
        self._tick()
        if self._byte is not None:
            if data.nbytes > self._byte:
                super().write(descriptor, data[: self._byte])
                os.kill(os.getpid(), signal.SIGKILL)
            self._byte -= data.nbytes
        super().write(descriptor, data)


def forked(work: Callable[[], object]) -> int:
    """Start `work` in a child; return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except Refused as refusal:
        sys.stderr.write(f"{refusal}\n")
        os._exit(2)
    except BaseException as error:  # noqa: BLE001  a child must never return into the parent's code
        sys.stderr.write(f"{error!r}\n")
        os._exit(3)
    os._exit(0)


def ended(child: int) -> int:
    """Wait for a child; return its status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Court:
    """Judges what dead runs leave. `ways`: of writing the same target; the first is the measure."""

    def __init__(self, folder: Path, ways: Sequence[Way]) -> None:
        self.folder = folder
        self.ways = ways
        ways[0](folder / "whole")
        self.whole = tree(folder / "whole")
        self.killed = 0
        self.broken: list[str] = []
        self._numbers = count()
        self._next = cycle(ways)

    def target(self) -> Path:
        return self.folder / f"target-{next(self._numbers)}"

    def judge(self, target: Path, status: int, told: str) -> bool:
        """Note what is broken; tell whether the run ended by itself."""
        if status == -signal.SIGKILL:
            self.killed += 1
            if target.exists():
                self.broken += [
                    f"{told}: {promise}" for promise in broken_promises(target, self.whole)
                ]
            return False
        if status or tree(target) != self.whole:
            self.broken.append(f"{told}: status {status}, or other bytes than a whole run")
        return True

    def take_up(self, target: Path, told: str) -> None:
        """Run to the end, by either way of writing."""
        write = next(self._next)
        self.judge(target, ended(forked(lambda: write(target))), told)


def at_moments(court: Court, chance: random.Random, trials: int) -> None:
    """Kill after a random time, up to three times, then run to the end."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        court.take_up(court.target(), "timing")
        times.append(time.perf_counter() - begun)
    usual = sorted(times)[1]
    for trial in range(trials):
        target = court.target()
        for _ in range(KILLS_A_TRIAL):
            write = chance.choice(court.ways)
            child = forked(lambda: write(target))  # noqa: B023  ends within the turn
            time.sleep(chance.uniform(0, usual))
            os.kill(child, signal.SIGKILL)
            if court.judge(target, ended(child), f"trial {trial}"):
                break
        court.take_up(target, f"trial {trial}, resumed")


def before_operations(court: Court, chance: random.Random, trials: int) -> None:
    """Kill before one operation: before each in turn, or as many of them as there are trials."""
    counting = MortalDisk(operation=1 << 30)
    write_all(court.target(), PLAN, counting)
    total = counting.ticks
    for operation in sorted(chance.sample(range(total), min(trials, total))):
        target = court.target()
        child = forked(lambda: write_all(target, PLAN, MortalDisk(operation=operation)))  # noqa: B023  ends within the turn
        if court.judge(target, ended(child), f"operation {operation}"):
            court.broken.append(f"operation {operation} was never reached")
        court.take_up(target, f"operation {operation}, resumed")


def within_bytes(court: Court, chance: random.Random, trials: int) -> None:
    """Kill within a write, and once more within the run that takes up."""
    total = sum(map(len, court.whole.values()))
    for trial in range(trials):
        target = court.target()
        for _ in range(2):
            byte = chance.randrange(total)
            write = chance.choice([write_all, write_one_by_one])
            child = forked(lambda: write(target, PLAN, MortalDisk(byte=byte)))  # noqa: B023  as above
            if court.judge(target, ended(child), f"trial {trial}, byte {byte}"):
                break
        court.take_up(target, f"trial {trial}, resumed")


def refused(court: Court, target: Path, work: Callable[[], None], told: str) -> None:
    """Expect a refusal by name, then run to the end."""
    status = ended(forked(work))
    if status != 2:
        court.broken.append(f"{told}: status {status} instead of a refusal")
    if target.exists():
        court.broken += [f"{told}: {promise}" for promise in broken_promises(target, court.whole)]
        if any(name.endswith(".partial") for name in tree(target)):
            court.broken.append(f"{told}: left a temporary file")
    court.killed += 1


def beyond_file_size(court: Court, chance: random.Random, trials: int) -> None:
    """Let the system refuse files beyond a random size."""
    largest = max(map(len, court.whole.values()))
    for trial in range(trials):
        target, limit = court.target(), chance.randrange(1, largest)

        def work(target: Path = target, limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            court.ways[0](target)

        refused(court, target, work, f"limit {limit}, trial {trial}")
        court.take_up(target, f"limit {limit}, resumed")


def half_way(court: Court, target: Path) -> None:
    """Leave a target with some shards finished and others not."""
    for _ in range(400):
        child = forked(lambda: court.ways[0](target))
        while not list(target.glob("*.safetensors")) and not os.waitpid(child, os.WNOHANG)[0]:
            time.sleep(0.0005)
        try:
            os.kill(child, signal.SIGKILL)
            ended(child)
        except (ProcessLookupError, ChildProcessError):
            pass  # it was waited for already
        if not (target / "config.json").exists():
            return
        shutil.rmtree(target)
    raise AssertionError("every run ended before it could be killed")


def read_only(court: Court, _chance: random.Random, _trials: int) -> None:
    """Write below a folder that nobody may write into; as root, become nobody first."""
    court.folder.chmod(0o755)
    locked = court.folder / "locked"
    locked.mkdir(mode=0o555)
    begun = court.target()
    half_way(court, begun)
    before = tree(begun)
    for path in (begun, *begun.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work(target: Path) -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)  # nobody, on every Linux
        court.ways[0](target)

    refused(court, locked / "target", lambda: work(locked / "target"), "a locked parent")
    refused_status = ended(forked(lambda: work(begun)))
    if refused_status != 2 or tree(begun) != before:
        court.broken.append(f"a locked target: status {refused_status}, or it changed")
    for path in (begun, *begun.rglob("*")):
        path.chmod(0o755)
    court.take_up(begun, "unlocked")


def together(court: Court, _chance: random.Random, trials: int) -> None:
    """Start two whole runs at one target: each ends well or is refused, and nothing is spoilt."""
    for trial in range(trials):
        target = court.target()
        children = [forked(lambda: write_all(target, PLAN)) for _ in range(2)]  # noqa: B023  ends within the turn
        statuses = {ended(child) for child in children}
        if not statuses <= {0, 2}:
            court.broken.append(f"together, trial {trial}: statuses {statuses}")
        court.broken += [
            f"trial {trial}: {promise}" for promise in broken_promises(target, court.whole)
        ]
        court.killed += 2 in statuses
        court.take_up(target, f"together, trial {trial}")


MODES = {
    "together": together,
    "moments": at_moments,
    "operations": before_operations,
    "bytes": within_bytes,
    "file-size": beyond_file_size,
    "read-only": read_only,
}


def main(mode: str, seed: str, trials: str) -> None:
    """Run one mode and print what came of it."""
    with quick_folder() as folder:
        court = Court(folder, (partial(write_all, plan=PLAN), partial(write_one_by_one, plan=PLAN)))
        MODES[mode](court, random.Random(seed), int(trials))
    sys.stdout.write(json.dumps({"killed": court.killed, "broken": court.broken}))


if __name__ == "__main__":
    main(*sys.argv[1:])
