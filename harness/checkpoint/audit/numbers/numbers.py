"""Audit a checkpoint's numbers: measure every weight in one pass, then judge the table.

`measure_numbers` reads the bytes once, in the order of the files, with threads of this process.
`judge_numbers` is separate, so that tables of several machines can be joined and judged as one.
Memory is bounded: buffers of a few MiB a worker, profiles of the blocks in progress, and 500 bytes
a weight. A tensor that cannot be read is a finding.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.audit.numbers.checks import (
    check_codes,
    check_copies,
    check_norms,
    check_scales,
    check_values,
)
from degarble.harness.checkpoint.audit.numbers.orders import (
    KINSHIPS,
    check_dialects,
    check_layouts,
    check_orders,
)
from degarble.harness.checkpoint.audit.numbers.siblings import check_inputs, check_magnitudes
from degarble.harness.checkpoint.audit.numbers.table import Judging, NumberTable
from degarble.harness.checkpoint.audit.statistics.inference import ORDER_NAMES, BlockProfiles
from degarble.harness.checkpoint.audit.statistics.tensor import statistics_of
from degarble.harness.checkpoint.view.stored import PositionedReader
from degarble.harness.checkpoint.view.weight_units import feeds_of, stored_of, units_of
from degarble.harness.model.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.checkpoint.view.weight_units import WeightUnit

_AHEAD = 64 << 20  # bytes to prefetch beyond the current unit


@dataclass(frozen=True)
class NumbersAudit:
    """Result of a numbers audit: findings, the worst first, and their table."""

    findings: list[Finding]
    table: NumberTable


def measure_numbers(
    checkpoint: Checkpoint,
    *,
    workers: int = 1,
    places: Collection[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> NumberTable:
    """Measure all weights, or those of some `places` (Unit.place), with `workers` threads.

    `progress` receives the number of bytes that are done, from the thread that did them.
    """
    if workers < 1:
        raise InvalidArgument("workers", workers, "at least 1", "Use one for each free core.")
    found = units_of(checkpoint)
    chosen = [unit for unit in found.units if places is None or unit.place in places]
    table = NumberTable.empty(chosen)
    table.unread.update(found.unread if places is None else {})
    walk = _Walk(checkpoint, table, progress)
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


def audit_numbers(
    checkpoint: Checkpoint,
    *,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> NumbersAudit:
    """Measure a checkpoint and judge its numbers."""
    table = measure_numbers(checkpoint, workers=workers, progress=progress)
    return NumbersAudit(judge_numbers(checkpoint, table), table)


CHECKS = (
    check_scales,
    check_codes,
    check_values,
    check_norms,
    check_magnitudes,
    check_inputs,
    check_copies,
    check_layouts,
    check_orders,
    check_dialects,
)


def judge_numbers(checkpoint: Checkpoint, table: NumberTable) -> list[Finding]:
    """Judge the table of a whole checkpoint; return findings, the worst first."""
    judging = Judging(checkpoint, table)
    for check in CHECKS:
        check(judging)
    return judging.findings.sorted()


class _Walk:
    """The shared queue of units. The thread that completes a block judges its packing orders."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        table: NumberTable,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._table = table
        self._progress = progress
        self._waiting = deque(range(len(table)))
        # Units of each block that are not measured yet.
        self._open = Counter(unit.place for unit in table.units)
        self._blocks: dict[str, BlockProfiles] = {}
        self._feeds = feeds_of(checkpoint.names.config) if checkpoint.names else {}
        # Offset in each file up to which a prefetch was requested.
        self._asked: dict[Path, int] = {}
        self._lock = threading.Lock()

    def work(self) -> None:
        """Process units until the queue is empty."""
        sizes = {shard.file: shard.file_size for shard in self._checkpoint.shards}
        with PositionedReader(sizes) as reader:
            while True:
                try:
                    index = self._waiting.popleft()  # atomic
                except IndexError:
                    return
                self._fetch_ahead(reader, self._table.units[index])
                self._measure(reader, index)

    def stop(self) -> None:
        """Empty the queue: every thread ends after its current unit."""
        self._waiting.clear()

    def _measure(self, reader: PositionedReader, index: int) -> None:
        unit = self._table.units[index]
        stored = reader.over(stored_of(self._checkpoint, unit))
        found = statistics_of(stored, profile=unit.is_linear or unit.kind is Kind.NORM)
        self._table.put(index, stored.form, found)
        with self._lock:
            block = self._blocks.setdefault(unit.place, BlockProfiles(self._feeds))
            block.add(index, unit, found)
            self._open[unit.place] -= 1
            is_complete = not self._open[unit.place]
            if is_complete:
                del self._blocks[unit.place]
        if is_complete:
            self._judge(block)
        if self._progress:
            self._progress(unit.nbytes)

    def _judge(self, block: BlockProfiles) -> None:
        for judged in block.judge():
            row = self._table.data[judged.row]
            value = judged.inferred.value
            row["order"] = -1 if value is None else ORDER_NAMES.index(value)
            row["order_kin"] = -1 if judged.kinship is None else KINSHIPS.index(judged.kinship)
            row["order_lead"] = judged.inferred.lead

    def _fetch_ahead(self, reader: PositionedReader, unit: WeightUnit) -> None:
        """Prefetch the bytes after a unit in its file, in large steps, each once."""
        file, begin = unit.position
        with self._lock:
            asked = max(self._asked.get(file, 0), begin)
            wanted = begin + unit.nbytes + _AHEAD
            if wanted - asked < _AHEAD // 2:
                return
            self._asked[file] = wanted
        reader.ahead(file, asked, wanted)
