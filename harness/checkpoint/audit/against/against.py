"""Compare every weight of a checkpoint with a reference's, value by value.

`measure_against` reads both sides once, with threads of this process. `judge_against` is separate,
so that tables of several machines can be joined and judged as one; `places` splits the work as in
numbers/numbers.py. Layouts, formats, names, fusing and sharding may differ: against/pairs.py
matches the weights, and they are compared as float32 values. Memory is bounded by a window of rows
a worker.

A reference of another model, or without a weight in common, is rejected.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.against.checks import judge_table
from degarble.harness.checkpoint.audit.against.configs import judge_configs
from degarble.harness.checkpoint.audit.against.pairs import pairs_of, stored_there
from degarble.harness.checkpoint.audit.against.rows import compare
from degarble.harness.checkpoint.audit.against.table import AgainstTable
from degarble.harness.checkpoint.audit.findings import in_order
from degarble.harness.checkpoint.view.stored import PositionedReader
from degarble.harness.checkpoint.view.weight_units import stored_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.view.view import Checkpoint


@dataclass(frozen=True)
class AgainstAudit:
    """Result of a comparison: findings, the worst first, and their table."""

    findings: list[Finding]
    table: AgainstTable


def bytes_against(checkpoint: Checkpoint, reference: Checkpoint) -> int:
    """Return how many bytes a comparison reads on both sides, for a progress bar."""
    return pairs_of(named_alike(checkpoint, reference), reference).nbytes


def named_alike(checkpoint: Checkpoint, reference: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its names resolved by the reference's config.

    A config that is damaged, or counts other layers, must not decide what is compared.
    """
    named = checkpoint.named_by(reference.model)
    return named if named.names is not None else checkpoint


def measure_against(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    *,
    workers: int = 1,
    places: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AgainstTable:
    """Compare all weights, or those of some `places` (Unit.place), with `workers` threads.

    `progress` receives the number of bytes done on both sides, from the thread that did them.
    """
    if workers < 1:
        raise InvalidArgument("workers", workers, "at least 1", "Use one for each free core.")
    checkpoint = named_alike(checkpoint, reference)
    found = pairs_of(checkpoint, reference)
    table = AgainstTable.empty(p for p in found.pairs if places is None or p.unit.place in places)
    if places is None:
        table.unlike.update(found.unlike)
        table.only_here.update(found.only_here)
        table.only_there.update(found.only_there)
    walk = _Walk(checkpoint, reference, table, progress)
    if workers == 1:
        walk.work()
        return table
    with ThreadPoolExecutor(workers) as pool:
        threads = [pool.submit(walk.work) for _ in range(workers)]
        try:
            for each in as_completed(threads):
                each.result()
        except BaseException:
            walk.stop()  # Trap: the pool waits for its threads, and they would walk on to the end
            raise
    return table


def judge_against(
    checkpoint: Checkpoint, reference: Checkpoint, table: AgainstTable
) -> list[Finding]:
    """Judge the table of a whole checkpoint; return findings, the worst first."""
    configs = judge_configs(checkpoint, reference)
    values = judge_table(named_alike(checkpoint, reference), reference, table)
    return in_order([*configs, *values])


def audit_against(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    *,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> AgainstAudit:
    """Compare a checkpoint with the reference and judge the differences."""
    table = measure_against(checkpoint, reference, workers=workers, progress=progress)
    return AgainstAudit(judge_against(checkpoint, reference, table), table)


class _Walk:
    """The queue of pairs, shared by threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reference: Checkpoint,
        table: AgainstTable,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._sides = checkpoint, reference
        self._table = table
        self._progress = progress
        self._waiting = deque(range(len(table)))

    def stop(self) -> None:
        """Empty the queue: every thread ends after its current pair."""
        self._waiting.clear()

    def work(self) -> None:
        """Compare pairs until the queue is empty."""
        here, there = self._sides
        with PositionedReader(_sizes(here)) as ours, PositionedReader(_sizes(there)) as theirs:
            while True:
                try:
                    index = self._waiting.popleft()  # atomic
                except IndexError:
                    return
                pair = self._table.pairs[index]
                stored = ours.over(stored_of(here, pair.unit))
                beside = theirs.over(stored_there(there, pair))
                first = pair.rows[0] if pair.rows else 0
                self._table.put(index, compare(stored, beside, first))
                if self._progress:
                    self._progress(pair.nbytes)


def _sizes(checkpoint: Checkpoint) -> dict[Path, int]:
    return {shard.file: shard.file_size for shard in checkpoint.shards}
