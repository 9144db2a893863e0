"""The bench of comparing at a small size: both arms run and say the same."""

from __future__ import annotations

import torch

from degarble.suites.bench import bench_compare as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings


def test_it_measures_memory_and_files() -> None:
    section = measure("compare", Settings(size=256, rounds=1, threads=1))
    memory, stored = section.tables
    assert [row[0] for row in memory.rows] == [bench.OURS, bench.PLAIN]
    assert float(stored.rows[0][1]) == round(bench.TENSORS * 2 * 256 * 256 * 2 / 1e9, 2)
    met = {target.claim: target.met for target in section.targets}
    assert met["both arms say the same (1 = yes)"]
    assert met["peak resident bytes"]


def test_a_pair_steps_where_it_should() -> None:
    candidate, reference = bench.pair(128)
    _, _, _, steps, identical = bench.plain(candidate, reference)
    assert steps == 1
    assert 0.9 < identical < 0.97
    assert torch.isfinite(candidate).all()
