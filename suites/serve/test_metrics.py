"""Metrics: what Prometheus reads, and that nothing is counted twice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from degarble.harness.serve.metrics import FAMILIES, Metrics

if TYPE_CHECKING:
    from degarble.harness.serve.metrics import Gauges

LINE = re.compile(r"degarble_[a-z_]+(\{([a-z]+=\"([^\"\\\n]|\\.)*\",?)+\})? -?[0-9.e+-]+")
GAUGES: Gauges = {name: [({}, 1.0)] for name, (kind, *_) in FAMILIES.items() if kind == "gauge"}


def test_counts_and_histograms_are_written() -> None:
    metrics = Metrics()
    metrics.count("requests_total", path="/x", status="200")
    metrics.count("requests_total", 2, path="/x", status="200")
    for seconds in (0.004, 0.005, 0.3, 1000.0):
        metrics.observe("step_seconds", seconds)
    lines = metrics.text(GAUGES).splitlines()
    assert 'degarble_requests_total{path="/x",status="200"} 3' in lines
    assert 'degarble_step_seconds_bucket{le="0.005"} 2' in lines  # a bound belongs to its bucket
    assert 'degarble_step_seconds_bucket{le="300"} 3' in lines
    assert 'degarble_step_seconds_bucket{le="+Inf"} 4' in lines
    assert "degarble_step_seconds_count 4" in lines
    assert "degarble_step_seconds_sum 1000.309" in lines
    assert all(LINE.fullmatch(line) for line in lines if not line.startswith("# "))
    for name, (kind, _, _) in FAMILIES.items():
        assert f"# TYPE degarble_{name} {kind}" in lines


def test_labels_are_escaped() -> None:
    text = Metrics().text({**GAUGES, "info": [({"model": 'a"b\\c\nd'}, 1.0)]})
    assert 'degarble_info{model="a\\"b\\\\c\\nd"} 1' in text.splitlines()
