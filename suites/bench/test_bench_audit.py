"""The bench of the audit at a small size: every arm runs, and a missed bound shows as missed."""

from __future__ import annotations

import pytest

from degarble.suites.bench import bench_audit as bench
from degarble.suites.bench.figures import measure
from degarble.suites.bench.timing import Settings


@pytest.mark.slow
def test_it_measures_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PEAK_BYTES", 1)  # the planted fault: nothing fits in one byte
    monkeypatch.setattr(bench, "_LAYOUTS", {"nvfp4-experts": 1.0})
    section = measure("audit", Settings(size=256, rounds=1, threads=1, peers=False))
    rates, cold, profile = section.tables
    assert [row[0] for row in rates.rows] == [
        "V4, nvfp4-experts",
        "V4, nvfp4-experts, --against itself",
    ]
    assert len(cold.rows) == 2
    assert profile.rows[-1][0].startswith("everything else")
    rate, share, peak = section.targets
    assert min(rate.measured, share.measured) > 0
    assert peak.measured > 50_000_000
    assert not peak.met
