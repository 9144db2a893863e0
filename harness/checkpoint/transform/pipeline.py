"""Turn one checkpoint into another: plan, refuse, write, resume, finish, prove.

A `Transform` states what differs: the tensors that it plans, how it produces each one, what their
bytes depend on, and the files next to the shards. Everything else is done here, once for all.

A transform pickles to its parameters, so it can run in any process or on any machine; it opens the
source where it runs. The same call resumes an interrupted run.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

from degarble.harness.checkpoint.read.file_access import SourceState
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.disk import require_separate_folders
from degarble.harness.checkpoint.write.manifest import MANIFEST
from degarble.harness.checkpoint.write.plan import SHARD_BYTES, WritePlan
from degarble.harness.checkpoint.write.writer import beginning, finish, make_shards, write_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.transform.units import Chunk, ConversionProof
    from degarble.harness.checkpoint.write.manifest import Manifest, ShardRecord
    from degarble.harness.checkpoint.write.plan import PlannedTensor, ShardPlan
    from degarble.harness.checkpoint.write.workers import Workers
    from degarble.harness.checkpoint.write.writer import CompanionFiles


@dataclass(frozen=True)
class Transform(ABC):
    """A transformation of one source. Its fields are all parameters that the bytes depend on."""

    source: Path

    @abstractmethod
    def planned(self) -> Iterable[PlannedTensor]:
        """List the tensors of the target; raise for what the source lacks."""

    @abstractmethod
    def plan_sources(self) -> Mapping[str, str]:
        """Return everything that the bytes depend on; a run resumes only where it is the same."""

    @abstractmethod
    def produce(self, tensor: PlannedTensor) -> Iterator[Chunk]:
        """Yield the bytes of one planned tensor."""

    @property
    @abstractmethod
    def companions(self) -> CompanionFiles:
        """The files to write next to the shards; those of the source are read once."""

    def require(self, workers: Workers = 1) -> None:  # noqa: B027  mostly, planning tells all
        """Raise for what cannot be made, if finding out takes more than planning."""

    def prove(  # noqa: B027  where nothing is promised there is nothing to compare
        self,
        target: Path,
        *,
        workers: Workers = 1,
        progress: Callable[[int, str], None] | None = None,
    ) -> ConversionProof | None:
        """Compare a finished target with the source; None: no bound is promised for its values.

        `progress` is called with the number of compared bytes.
        """

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the parameters only, without the files opened here."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def state(self) -> SourceState:
        """The state of the source's files before they were opened."""
        return SourceState.from_source(self.source)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The source, opened where the transform runs."""
        _ = self.state  # older than anything that is read
        return Checkpoint.open(self.source)

    def close(self) -> None:
        """Close the source and forget what was read from it; the next run opens it anew."""
        cached = self.__dict__
        if "checkpoint" in cached:
            cached["checkpoint"].close()
        for name in cached.keys() - self.__getstate__().keys():
            del cached[name]

    def plan(self, shard_bytes: int = SHARD_BYTES) -> WritePlan:
        """Return the plan of all shards."""
        return WritePlan.from_tensors(
            self.planned(), shard_bytes=shard_bytes, sources=dict(self.plan_sources())
        )

    def make_shard(self, target: Path, shard: ShardPlan) -> ShardRecord:
        """Write one shard of a target that was begun; a finished one is only read again."""
        return write_shard(target, shard, self.produce)

    def finish(self, target: Path, plan: WritePlan) -> Manifest:
        """Write the files next to the shards, and declare the checkpoint complete."""
        return finish(target, plan, self.companions)

    def run(
        self,
        target: Path,
        *,
        workers: Workers = 1,
        shard_bytes: int = SHARD_BYTES,
        progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
        plan: WritePlan | None = None,
    ) -> Manifest:
        """Write the whole target, or resume an interrupted run. `plan`: this object's own."""
        require_separate_folders(self.source, target)
        key = secrets.token_hex(8)  # separates this run from an earlier one in the same process
        try:
            plan = plan or self.plan(shard_bytes)
            # A finished target passed this check when it was written.
            if not (target / MANIFEST).exists():
                self.require(workers)
            _ = self.companions  # what configs cannot state is refused before the first shard
            work = partial(_make_shard, key, self, target)
            with beginning(target, plan):
                make_shards(target, plan, work, workers, source=self.state, progress=progress)
            return self.finish(target, plan)
        except BaseException:
            self.close()  # the source may be mended before the next run
            raise
        finally:
            _KEPT.pop(key, None)


# Trap: a cluster unpickles the transform for every shard; without this each would open the source.
_KEPT: dict[str, Transform] = {}


def _make_shard(key: str, transform: Transform, target: Path, shard: ShardPlan) -> ShardRecord:
    """Write one shard in any process, which keeps the source open for its next shard."""
    if key not in _KEPT:
        _KEPT.clear()
        _KEPT[key] = transform
    return _KEPT[key].make_shard(target, shard)
