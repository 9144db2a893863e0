"""The bench of full size on a small model: runs end healthy, a missed bound shows as missed."""

from __future__ import annotations

import pytest

from degarble.suites.bench import bench_full_size as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings


@pytest.mark.slow
def test_it_measures_a_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PEAK_BYTES", 1)  # the planted fault: nothing fits in one byte
    runs = (("official", "vllm:tp=8"), ("official", "vllm:tp=2,ep=8"))
    monkeypatch.setattr(bench, "RUNS", runs)
    section = measure("full-size", Settings(size=256, rounds=1, threads=1, peers=False))
    times, plans = section.tables
    assert [row[:2] for row in times.rows] == [("V4-Pro, official", each) for _, each in runs]
    assert [row[2:4] for row in plans.rows] == [("8", "1"), ("8", "8")]
    seconds, peak, healthy = section.targets
    assert 0 < seconds.measured < 60
    assert 20_000_000 < peak.measured < 1_000_000_000
    assert not peak.met
    assert healthy.met
