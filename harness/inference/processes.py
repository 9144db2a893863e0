"""Processes of a run: the ranks that torchrun started, and workers here or on a cluster."""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnwritablePath
from degarble.harness.checkpoint.write.disk import DISK
from degarble.harness.checkpoint.write.manifest import WriteJournal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from degarble.harness.checkpoint.write.manifest import ShardRecord
    from degarble.harness.checkpoint.write.plan import ShardPlan, WritePlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.report.progress import Progress


# --------------------------------------------------------------------------------------------------
# The process group that torchrun started. Messages are JSON and never pickled.

COLLECTIVE_TIMEOUT = timedelta(days=1)  # that ranks wait for what another one does
MEETING_TIMEOUT = timedelta(minutes=5)  # that they wait for one who never came
_AGENT = "TORCHELASTIC_"  # prefix of what torchrun tells the processes that it started itself


class RankInfo(NamedTuple):
    """Which of how many."""

    rank: int
    world: int

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0, which reports for all."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world == 1


def read_rank_info(environment: Mapping[str, str]) -> RankInfo:
    """Read the place of this process."""
    fields = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    world = fields["WORLD_SIZE"] or "1"
    rank = fields["RANK"] or ("0" if world == "1" else "")
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise InvalidArgument(
            "RANK of WORLD_SIZE", f"{fields['RANK']!r} of {fields['WORLD_SIZE']!r}",
            "a rank below the number of ranks", "Start with torchrun, or unset both.",
        )  # fmt: skip
    return RankInfo(int(rank), int(world))


@contextmanager
def process_group() -> Iterator[None]:
    """Meet the other ranks, and part from them at the end."""
    from torch import distributed  # noqa: PLC0415  heavy: a process alone does without
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415  as above

    try:
        store, rank, world = next(rendezvous("env://", timeout=MEETING_TIMEOUT))
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
        )
    except (ValueError, distributed.DistError) as error:
        at = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise InvalidArgument(
            "MASTER_ADDR:MASTER_PORT", at, f"where the ranks meet ({error})",
            "Start with torchrun, or unset RANK and WORLD_SIZE for one process.",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        distributed.destroy_process_group()


def broadcast_json(word: Any = None) -> Any:
    """Broadcast rank 0's value to all; the other ranks bring none."""
    import torch  # noqa: PLC0415  heavy: a process alone does without
    from torch import distributed  # noqa: PLC0415  as above

    text = json.dumps(word).encode()
    size = torch.tensor([len(text)])
    distributed.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8)
    if distributed.get_rank() == 0:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    distributed.broadcast(data, 0)
    return json.loads(bytes(data.tolist()))


def environment_of_child(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """The environment of a process of this rank that meets those of other ranks at a port."""
    kept = {name: value for name, value in environment.items() if not name.startswith(_AGENT)}
    return kept | {"MASTER_PORT": str(port)}


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


# --------------------------------------------------------------------------------------------------
# Workers, and the bytes that they finished.

if TYPE_CHECKING:
    Listen = Callable[[int], AbstractContextManager[Progress]]  # given the bytes of all the work

# Measured for V4-Pro: 460 MB for the caller, 80 MB that workers share, 220 MB for each of them. Two
# stay below 1 GB whatever the checkpoint is; DEGARBLE_WORKERS asks for more.
MOST_WORKERS = 2


def usable_workers() -> int:
    """One process for each core of this machine, as far as 1 GB of memory goes."""
    return min(os.cpu_count() or 1, MOST_WORKERS)


def workers_for(needed: int) -> int:
    """One process for each core that this one may use, as far as free memory goes."""
    return max(1, min(usable_cores(), _free_bytes() // needed))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def _free_bytes() -> int:
    """Memory that may be taken without swapping; 2 GB where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        text = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(text.split()[1]) << 10
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
