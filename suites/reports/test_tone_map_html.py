from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.blocks import Mark, Tone, ToneMap
from degarble.reports.maps_html import tone_map_element
from degarble.suites.reports.test_markup import Reader

MAP = ToneMap(
    "caption",
    "kind",
    "layer",
    ("experts",),
    ("0", "1", "2"),
    ((Mark(Tone.BAD, 12, "fold"), Mark(Tone.GOOD), None),),
    ((Tone.BAD, "error"), (Tone.GOOD, "nothing found")),
)


def test_a_cell_is_colour_sign_words_and_a_way_to_the_reason() -> None:
    markup = str(tone_map_element(MAP))
    assert '<td class="bad" title="experts, layer 0: error, 12 places"><a href="#fold">' in markup
    assert '<span aria-hidden="true">×</span><span class="quiet">error, 12 places</span>' in markup
    assert '<td class="good" title="experts, layer 1: nothing found">' in markup
    assert '<td class="none" title="experts, layer 2: nothing there">' in markup
    assert markup.count('scope="col"') == 3
    assert markup.count('scope="row"') == 1


def test_the_legend_has_a_word_for_each_tone_and_for_gaps() -> None:
    assert Reader(str(tone_map_element(MAP))).text.endswith("×errornothing foundnothing there")
    whole = ToneMap("c", "r", "c", ("a",), ("b",), ((Mark(Tone.GOOD),),))
    assert "nothing there" not in str(tone_map_element(whole))


def test_a_few_columns_stay_next_to_their_labels() -> None:
    for count, told in ((3, '"heat tones few"'), (24, '"heat tones few"'), (25, '"heat tones"')):
        names = tuple(map(str, range(count)))
        block = ToneMap("c", "kind", "layer", ("a",), names, ((Mark(Tone.GOOD),) * count,))
        assert f"<table class={told}>" in str(tone_map_element(block))


def test_one_place_is_singular() -> None:
    block = ToneMap("c", "kind", "layer", ("a",), ("0",), ((Mark(Tone.WARNING, 1),),))
    assert 'title="a, layer 0: warning, 1 place"' in str(tone_map_element(block))


@pytest.mark.parametrize("marks", [(), ((None,),), ((None, None, None), (None, None, None))])
def test_a_ragged_map_is_refused(marks: tuple[tuple[None, ...], ...]) -> None:
    with pytest.raises(ShapeMismatch, match="marks of tone map 'c'"):
        ToneMap("c", "kind", "layer", ("a",), ("0", "1"), marks)
