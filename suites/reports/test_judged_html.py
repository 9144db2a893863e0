from __future__ import annotations

import math

from degarble.harness.report.blocks import (
    Files,
    JudgedCell,
    JudgedMap,
    Profile,
    Tone,
    Voices,
    VoiceText,
)
from degarble.reports.maps_html import (
    files_element,
    judged_map_element,
    profile_element,
    voices_element,
)

LEGEND = ((Tone.BAD, "differs"), (Tone.WARNING, "undecided"))


def judged(
    *readings: JudgedCell | None, steps: tuple[float, ...] = (0.7, 1.0), near_one: bool = False
) -> str:
    columns = tuple(str(at) for at in range(len(readings)))
    block = JudgedMap(
        "m", "part", "layer", ("wq",), columns, (readings,), steps, "budgets", near_one
    )
    return str(judged_map_element(JudgedMap(**{**vars(block), "legend": LEGEND})))


def test_a_cell_has_its_number_its_sign_and_its_words() -> None:
    markup = judged(JudgedCell(17210.0, Tone.BAD, "look-3"), JudgedCell(0.5), None)
    assert '<td class="h2 is-bad"><a href="#look-3">' in markup
    assert '<span class="sign" aria-hidden="true">×</span><span>17,210</span>' in markup
    assert '<span class="quiet">, differs</span>' in markup
    assert '<td class="h0"><span>0.500</span></td>' in markup
    assert '<td class="none"><span class="quiet">nothing there</span></td>' in markup


def test_nothing_is_claimed_without_a_number() -> None:
    markup = judged(JudgedCell(None, Tone.WARNING, "", "no <b>budget</b>"), JudgedCell(math.nan))
    assert 'class="unsaid is-warning" title="wq, layer 0: –; no &lt;b&gt;budget' in markup
    assert '<td class="unsaid"><span>–</span></td>' in markup


def test_a_cosine_that_is_not_1_never_looks_like_1() -> None:
    steps = (1 - 1e-6, 0.99)
    values = (1.0, 1 - 1e-7, 0.99996, 0.5, 1 - 1e-14, -1.0)
    markup = judged(*map(JudgedCell, values), steps=steps, near_one=True)
    for text in ("1</span>", "1 - 1e-07", "0.999960", "0.5000", "1 - 1e-14", ">-1</span>"):
        assert text in markup


def test_many_columns_keep_their_numbers_for_who_cannot_see_shades() -> None:
    markup = judged(*(JudgedCell(float(at)) for at in range(61)))
    assert "dense" in markup
    assert '<span class="quiet">60.0</span>' in markup
    assert 'title="wq, layer 60: 60.0 budgets"' in markup


def test_a_profile_is_stated_in_words() -> None:
    values: tuple[float | None, ...] = (0.0,) * 39 + (1.5,)
    markup = str(profile_element(Profile("P", tuple(map(str, range(40))), values, "u", 1.0)))
    assert "most 1.50 u at 39; 0 at 39 of 40; line at 1.00" in markup
    assert markup.count("M") == 1  # zeros are not drawn
    assert 'class="limit"' in markup
    few = str(profile_element(Profile("P", ("0", "1"), (900.0, None), logarithmic=True)))
    assert "0: 900" in few
    assert 'class="axis each"' in few
    empty = str(profile_element(Profile("P", ("0",), (0.0,))))
    assert "0 everywhere" in empty


def test_numbers_that_are_none_are_drawn_to_the_top() -> None:
    markup = str(profile_element(Profile("P", ("a", "b"), (math.inf, math.nan))))
    assert "a: inf, b: nan" in markup
    assert "V0h" in markup


def test_texts_part_where_they_do_and_meet_again() -> None:
    voices = (VoiceText("Twin", ("a", " b", " c", " d")), VoiceText("Candidate", ("a", " x", " c")))
    markup = str(voices_element(Voices("<p>", voices, 1)))
    assert "&lt;p&gt;" in markup
    assert '<p class="said">a<span class="quiet"> (from here they part:) </span>' in markup
    assert "(from here they part:) </span> b c d</p>" in markup  # what is meant is not marked
    assert '<span class="apart"> x</span> c</p>' in markup
    same = str(voices_element(Voices("p", voices[:1] * 2)))
    assert "apart" not in same
    assert "nothing" in str(voices_element(Voices("p", (VoiceText("Twin", ()),))))


def test_files_are_links_next_to_the_page_only() -> None:
    markup = str(files_element(Files("Tables", (("a-b-outputs.csv", "rows"),))))
    assert '<a href="a-b-outputs.csv">a-b-outputs.csv</a> rows' in markup
