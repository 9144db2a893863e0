"""Choose the workers of a run (local processes, or a cluster) and count finished bytes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.write.disk import DISK
from degarble.harness.checkpoint.write.manifest import WriteJournal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from degarble.harness.checkpoint.write.manifest import ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan, WritePlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.report.progress import Progress

    Listen = Callable[[int], AbstractContextManager[Progress]]  # given the bytes of all the work

# Measured for V4-Pro: 460 MB for the caller, 80 MB that workers share, 220 MB for each of them. Two
# stay below 1 GB whatever the checkpoint is; DEGARBLE_WORKERS asks for more.
MOST_WORKERS = 2


def usable_workers() -> int:
    """One process for each core of this machine, as far as 1 GB of memory goes."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


def workers_for(needed: int) -> int:
    """One process for each core that this one may use, as far as free memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _free_bytes() // needed))


def _free_bytes() -> int:
    """Memory that may be taken without swapping; 2 GB where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        told = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(told.split()[1]) << 10
    except (OSError, StopIteration, ValueError, IndexError):
        return 2 << 30


@contextmanager
def workers_of(
    cluster: str | None, address: str | None = None, processes: int | None = None
) -> Iterator[Workers]:
    """Yield the workers of a run: local processes without a cluster, otherwise Ray's."""
    if cluster is None:
        yield processes or usable_workers()
        return
    from degarble.harness.checkpoint.write.workers import ray_cluster  # noqa: PLC0415  seconds of start

    with ray_cluster(address, processes or os.cpu_count() or 1) as joined:
        yield joined


def counting(
    progress: Progress, target: Path, plan: WritePlan
) -> Callable[[ShardPlan, ShardRecord], None]:
    """Count each shard as it is done; those of an earlier run say nothing about the rate."""
    known = _finished(target, plan)

    def heard(shard: ShardPlan, _: ShardRecord) -> None:
        if shard.file in known:
            progress.skip(shard.data_bytes)
        else:
            progress.advance(shard.data_bytes, shard.file)

    return heard


def _finished(target: Path, plan: WritePlan) -> frozenset[str]:
    """Name the shards that an earlier run of this plan left."""
    try:
        journal = WriteJournal.join(target, plan.hash, DISK)
    except UnwritablePath:
        return frozenset()
    return frozenset(shard.file for shard in plan.shards if journal.recorded(shard))
