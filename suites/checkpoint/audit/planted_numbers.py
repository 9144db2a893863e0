"""Audit a synthetic checkpoint once, and copies of it with one fault planted in their bytes.

A copy has bytes of named tensors changed in place; only the block that was touched is measured
again, then the whole table is judged. Faults are planted where they would arise: in the stored
bytes, whatever their type.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.checkpoint.audit.numbers.numbers import judge_numbers, measure_numbers
from degarble.harness.checkpoint.audit.table import NumberTable
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import small_v4
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint
from degarble.suites.support.synthetic.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.findings import Finding

CONFIG = small_v4(
    hidden_size=512,
    moe_intermediate_size=256,
    n_routed_experts=6,
    num_hidden_layers=3,
    compress_ratios=(0, 4, 128, 0),
    num_hash_layers=1,
    vocab_size=128,
)
# Channels strong enough to tell the packing order at a width of 512 already.
STATISTICS = Statistics(outlier_share=1 / 8, dead_share=0.0)
_NUMPY = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64}


class Bytes:
    """Tensors of a checkpoint as arrays over its files; writing changes the files."""

    def __init__(self, folder: Path) -> None:
        with Checkpoint.open(folder) as checkpoint:
            self._entries = dict(checkpoint.entries)

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        shape = entry.shape or (1,)
        kind = _NUMPY.get(entry.dtype, np.uint8)
        return np.memmap(entry.file, kind, "r+", offset=entry.begin, shape=shape)

    def set(self, name: str, value: object) -> None:
        """Set all elements, or the one of a scalar."""
        self[name][...] = value


@dataclass(frozen=True)
class Healthy:
    """A healthy checkpoint and its table."""

    folder: Path
    table: NumberTable


def make_healthy(folder: Path, layout: str, statistics: Statistics = STATISTICS) -> Healthy:
    """Write a synthetic checkpoint and measure it."""
    write_checkpoint(folder, Synthetic(CONFIG, layout, seed=5, statistics=statistics))
    with Checkpoint.open(folder) as checkpoint:
        return Healthy(folder, measure_numbers(checkpoint))


def audit_planted(healthy: Healthy, target: Path, plant: Callable[[Bytes], None]) -> list[Finding]:
    """Copy the healthy checkpoint, plant, measure what changed, judge everything."""
    shutil.copytree(healthy.folder, target)
    plant(Bytes(target))
    changed = _changed_places(healthy, target)
    with Checkpoint.open(target) as checkpoint:
        again = measure_numbers(checkpoint, places=changed)
        kept = [i for i, unit in enumerate(healthy.table.units) if unit.place not in changed]
        rest = healthy.table.chosen(kept)
        return judge_numbers(checkpoint, NumberTable.joined([again, rest]))


def _changed_places(healthy: Healthy, target: Path) -> set[str]:
    with Checkpoint.open(healthy.folder) as old, Checkpoint.open(target) as new:
        modules = {
            name.rpartition(".")[0]
            for name in old.entries
            if bytes(old.raw(name)) != bytes(new.raw(name))
        }
    units = healthy.table.units
    return {u.place for u in units if u.module in modules or u.module.rpartition(".")[0] in modules}
