"""Join the process group that torchrun started, and broadcast JSON from rank 0.

Messages are JSON and never pickled.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LONGEST = timedelta(days=1)  # that ranks wait for what another one does
MEETING = timedelta(minutes=5)  # that they wait for one who never came
_AGENT = "TORCHELASTIC_"  # prefix of what torchrun tells the processes that it started itself


class Place(NamedTuple):
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


def place_in(environment: Mapping[str, str]) -> Place:
    """Read the place of this process."""
    told = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    world = told["WORLD_SIZE"] or "1"
    rank = told["RANK"] or ("0" if world == "1" else "")
    if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
        raise InvalidArgument(
            "RANK of WORLD_SIZE", f"{told['RANK']!r} of {told['WORLD_SIZE']!r}",
            "a rank below the number of ranks", "Start with torchrun, or unset both.",
        )  # fmt: skip
    return Place(int(rank), int(world))


@contextmanager
def together() -> Iterator[None]:
    """Meet the other ranks, and part from them at the end."""
    from torch import distributed  # noqa: PLC0415  heavy: a process alone does without
    from torch.distributed.rendezvous import rendezvous  # noqa: PLC0415  as above

    try:
        store, rank, world = next(rendezvous("env://", timeout=MEETING))
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=LONGEST
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


def told_by_first(word: Any = None) -> Any:
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
