from __future__ import annotations

import math

import pytest

from degarble.harness.report.blocks import HeatMap, HeatScale
from degarble.reports.maps_html import heat_map_element, shade
from degarble.suites.reports.test_markup import Reader


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "none"),
        (math.nan, "nan"),
        (-1.0, "h0"),
        (0.0, "h0"),
        (0.5, "h4"),
        (1.0, "h8"),
        (math.inf, "h8"),
    ],
)
def test_shades(value: float | None, name: str) -> None:
    assert shade(value, HeatScale(0, 1)) == name


def test_where_small_is_bad_the_scale_turns_round() -> None:
    cosine = HeatScale(1.0, 0.9)
    assert [shade(v, cosine) for v in (1.0, 0.95, 0.5)] == ["h0", "h4", "h8"]


def _map(columns: int, anchors: bool) -> str:
    labels = tuple(f"c{index}" for index in range(columns))
    row = tuple(float(index) for index in range(columns))
    places = (tuple(f"fold-{index}" for index in range(columns)),) if anchors else ()
    block = HeatMap("map", "layer", "part", ("7",), labels, (row,), HeatScale(0, 1, "x"), places)
    return str(heat_map_element(block))


def test_the_numbers_stay_in_the_table_when_only_shades_are_shown() -> None:
    wide = Reader(_map(40, anchors=False))
    assert wide.text.count("39.0") == 1
    assert 'class="heat compact"' in _map(40, anchors=False)
    assert 'class="heat"' in _map(4, anchors=False)


def test_cells_lead_to_what_explains_them() -> None:
    markup = _map(2, anchors=True)
    assert '<a href="#fold-1">' in markup
    assert 'title="7, c1: 1.00 x"' in markup
    assert "<a " not in _map(2, anchors=False)
