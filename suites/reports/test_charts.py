from __future__ import annotations

import xml.etree.ElementTree as ET

from degarble.harness.report.replay_record import ReplayRecord
from degarble.harness.report.verdict import Verdict
from degarble.reports.replay_panel import run_chart
from degarble.suites.reports.replay_cases import replay


def test_the_chart_says_what_it_shows_and_is_the_same_each_time() -> None:
    record = replay()
    figure = run_chart(record)
    assert figure.description == (
        "9 outputs in the order of the run, 1 beyond their budget; the furthest is "
        "layers.2.ffn.experts.w2.out at 17,210 budgets."
    )
    assert figure == run_chart(record)
    root = ET.fromstring(figure.svg)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in figure.svg
    assert "layer 2" in figure.svg


def test_no_marker_colour_is_left() -> None:
    svg = run_chart(replay()).svg
    for colour in ("#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f", "#000000"):
        assert colour not in svg.lower()
    assert "var(--bad)" in svg


def test_a_run_of_nothing_is_drawn() -> None:
    figure = run_chart(ReplayRecord(Verdict.UNDECIDED, "", ()))
    assert figure.description == "0 outputs in the order of the run, 0 beyond their budget."
    ET.fromstring(figure.svg)
