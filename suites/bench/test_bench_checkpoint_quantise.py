"""The bench of quantising at a small size: every arm runs, and a missed bound shows as missed."""

from __future__ import annotations

import pytest

from degarble.suites.bench import bench_checkpoint_quantise as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings


@pytest.mark.slow
def test_it_measures_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PEAK_BYTES", 1)  # the planted fault: nothing fits in one byte
    section = measure("checkpoint-quantise", Settings(size=256, rounds=1, threads=1, peers=False))
    matrix, whole = section.tables
    assert next(row[0] for row in matrix.rows) == "degarble, amax"
    assert len(matrix.rows) == 4
    assert [row[0] for row in whole.rows] == [
        "V4, official to nvfp4-full",
        "V4, bf16 to nvfp4-full",
    ]
    (peak,) = section.targets
    assert peak.measured > 50_000_000
    assert not peak.met
