from __future__ import annotations

import math

import pytest

from degarble.harness.report.blocks import Cell, Column, ColumnKind, HeatScale
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import Origin
from degarble.reports import words


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, ColumnKind.NUMBER, "–"),
        (None, ColumnKind.TEXT, "–"),
        (True, ColumnKind.TEXT, "yes"),
        (False, ColumnKind.NUMBER, "no"),
        ("x", ColumnKind.NUMBER, "x"),
        (0.99999, ColumnKind.SHARE, "99.999 %"),
        (1, ColumnKind.SHARE, "100.0 %"),
        (3, ColumnKind.NUMBER, "3"),
        (math.nan, ColumnKind.NUMBER, "nan"),
    ],
)
def test_cells(value: Cell, kind: ColumnKind, text: str) -> None:
    assert words.cell(value, Column("c", kind)) == text


def test_heat_cells() -> None:
    scale = HeatScale(0, 1, "x", digits=2)
    assert [words.heat(v, scale) for v in (None, 0.256, 1e9)] == ["–", "0.26", "1.0e+09"]


def test_every_panel_has_a_title_and_a_question() -> None:
    assert set(words.PANEL_TITLES) == set(words.PANEL_QUESTIONS) == set(PanelKind)


def test_an_origin_is_described_from_coarse_to_fine() -> None:
    origin = Origin(1, "c", "layers.1.c", {"expert": 17, "rows": "0 to 3"}, cosine=0.5)
    assert words.place(origin) == ("layers.1.c", "expert 17", "rows 0 to 3")
    assert words.measures(origin) == (("cosine", "0.5000"),)
