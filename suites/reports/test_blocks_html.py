from __future__ import annotations

import math
import re

import pytest

from degarble.harness.report.blocks import (
    Bar,
    Bars,
    Block,
    Column,
    ColumnKind,
    Figure,
    Sentence,
    Table,
    Tone,
)
from degarble.harness.report.verdict import Verdict
from degarble.reports.blocks_html import badge, block_element
from degarble.suites.reports.page_cases import HOSTILE, HOSTILE_SVG, every_block
from degarble.suites.reports.test_markup import Reader

PLAIN = [Reader(str(block_element(block))).elements for block in every_block("plain")]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_no_element_of_any_block(text: str) -> None:
    assert [Reader(str(block_element(block))).elements for block in every_block(text)] == PLAIN


def test_a_tone_is_stated_in_words_and_not_by_colour_alone() -> None:
    markup = str(block_element(Sentence("x", Tone.WARNING)))
    assert "Warning: " in Reader(markup).text
    assert "#icon-warning" in markup
    assert Reader(str(block_element(Sentence("x")))).text == "x"


@pytest.mark.parametrize("verdict", [*Verdict, None])
def test_a_verdict_is_icon_and_word(verdict: Verdict | None) -> None:
    markup = str(badge(verdict))
    assert Reader(markup).text == (verdict or "not run")
    assert '<use href="#icon-' in markup


def test_a_table_can_be_read_aloud() -> None:
    columns = (Column("name"), Column("x", ColumnKind.NUMBER))
    markup = str(block_element(Table("A caption", columns, (("a", 1.5), ("b", math.inf)))))
    assert "<caption>A caption</caption>" in markup
    assert markup.count('scope="col"') == 2
    assert markup.count('scope="row"') == 2
    assert 'data-value="1.5"' in markup
    assert 'data-value="inf"' in markup


def test_a_drawing_is_an_image_so_its_script_cannot_run() -> None:
    markup = str(block_element(Figure("c", "seen as words", HOSTILE_SVG)))
    assert Reader(markup).elements == ["figure", "img", "figcaption"]
    assert 'src="data:image/svg+xml;base64,' in markup
    assert 'alt="seen as words"' in markup


def _widths(block: Block) -> list[float]:
    markup = str(block_element(block))
    return [float(w) for w in re.findall(r'<rect x="[^"]*" width="([\d.]+)%"', markup)]


def test_bars_are_as_long_as_their_values() -> None:
    bars = (Bar("a", 1.0, ""), Bar("b", 2.0, ""), Bar("c", 4.0, ""))
    assert _widths(Bars("t", bars)) == [25, 50, 100]
    decades = (Bar("a", 1.0, ""), Bar("b", 10.0, ""), Bar("c", 100.0, ""))
    short, middle, long = _widths(Bars("t", decades, logarithmic=True))
    assert middle - short == pytest.approx(long - middle, abs=0.02)
    assert long == 100


@pytest.mark.parametrize("logarithmic", [False, True])
def test_bars_survive_any_number(logarithmic: bool) -> None:
    values = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1e300)
    block = Bars("t", tuple(Bar("b", v, "") for v in values), logarithmic, limit=1.0)
    assert all(0 <= width <= 100 for width in _widths(block))
    assert len(_widths(block)) == len(values)
    assert _widths(Bars("t", (), logarithmic)) == []


def test_a_negative_bar_grows_to_the_left() -> None:
    markup = str(block_element(Bars("t", (Bar("a", -1.0, ""), Bar("b", 1.0, "")))))
    assert 'x="0.00%" width="50.00%"' in markup
    assert 'x="50.00%" width="50.00%"' in markup
