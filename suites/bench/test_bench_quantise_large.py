"""The large bench at a small size: every step runs, and a missed bound shows as missed."""

from __future__ import annotations

import pytest

from degarble.suites.bench import bench_quantise_large as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings


@pytest.mark.slow
def test_it_measures_every_step() -> None:
    section = measure("checkpoint-large", Settings(size=256, rounds=1, threads=1, peers=False))
    (table,) = section.tables
    assert [row[0] for row in table.rows] == list(bench.WORDS.values())
    size, peak, _ = section.targets
    assert not size.met  # a small source is no large one
    assert 100_000_000 < peak.measured < bench.PEAK_BYTES
    assert "881e9 /" in section.notes[0]
