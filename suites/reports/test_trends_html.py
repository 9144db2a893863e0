"""Histories as HTML and as text: every series is drawn and said, and moves are marked."""

import math

from degarble.harness.report.blocks import Tone, Trend, Trends
from degarble.reports.maps_html import trends_element
from degarble.reports.page_text import sparks

MOVED = Trend(
    "layers.3.ffn.experts.w2",
    ((0.1, 0.2), None, (0.8, 1.0)),
    0.9,
    0.15,
    (2,),
    Tone.WARNING,
    "moved on 2026-11-20",
)


def markup(*rows: Trend) -> str:
    return str(trends_element(Trends("Difference", "2026-01-01", "2026-11-21", "budgets", rows)))


def test_a_series_is_drawn_described_and_marked() -> None:
    text = markup(MOVED)
    assert 'aria-label="from 0.100 to 1.00, moved once"' in text
    assert 'd="M0 20.3h1v2.53h-1zM2 0h1v5.07h-1z"' in text
    assert 'd="M2 0v24"' in text
    assert "moved on 2026-11-20" in text
    assert "2026-01-01 to 2026-11-21" in text
    assert ">0.150<" in text


def test_a_series_that_stands_still_is_a_line_in_the_middle() -> None:
    text = markup(Trend("head", ((0.5, 0.5), (0.5, 0.5)), 0.5, None))
    assert 'd="M0 11.4h1v1.2h-1zM1 11.4h1v1.2h-1z"' in text


def test_what_is_no_number_is_a_gap() -> None:
    text = markup(Trend("head", ((math.nan, 1.0), None), None, None))
    assert 'aria-label="no values"' in text
    assert "<path" not in text


def test_sparks_fill_the_range_of_the_series() -> None:
    assert sparks(MOVED) == "▁ ▇"
    assert sparks(Trend("a", ((1.0, 1.0), (1.0, 1.0)), None, None)) == "▁▁"
