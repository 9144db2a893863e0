"""Pages as HTML and as text: every block is rendered, and hostile text stays text."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.blocks import (
    Bar,
    Bars,
    Block,
    Catalogue,
    CatalogueEntry,
    Cell,
    Column,
    ColumnKind,
    ErrorPicture,
    Figure,
    Files,
    GridLine,
    HeatMap,
    HeatScale,
    JudgedCell,
    JudgedMap,
    Look,
    Looks,
    Mark,
    ModelText,
    PictureLayer,
    Points,
    Profile,
    Sentence,
    Tab,
    Table,
    Tabs,
    TextComparison,
    Tone,
    ToneMap,
    Trend,
    Trends,
)
from degarble.harness.report.number_text import visible
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind, Provenance, Subject
from degarble.harness.report.verdict import NO_ERRORS, Origin, Verdict
from degarble.reports import words
from degarble.reports.blocks_html import badge, block_element
from degarble.reports.maps_html import (
    files_element,
    heat_map_element,
    judged_map_element,
    shade,
    tone_map_element,
    voices_element,
)
from degarble.reports.markup import escape, h
from degarble.reports.page_html import SIZE_LIMIT, page_html, sprite
from degarble.reports.page_text import SIGNS, page_text, sparks
from degarble.reports.plots_html import (
    Values,
    picture_element,
    points_element,
    profile_element,
    spread,
    trends_element,
)
from degarble.suites.reports.page_cases import HOSTILE, HOSTILE_SVG, every_block, page_of
from degarble.suites.snapshots import assert_as_kept


class Reader(HTMLParser):
    """What a reader of the markup finds: elements, attribute values, text."""

    def __init__(self, markup: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.values: list[str] = []
        self.pieces: list[str] = []
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.pieces.append(data)

    @property
    def text(self) -> str:
        """All text, without the elements."""
        return "".join(self.pieces)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text: str) -> None:
    reader = Reader(str(h("p", {"title": text}, text, h("code", None, text))))
    assert reader.elements == ["p", "code"]
    assert reader.values == [visible(text)]
    assert reader.text == visible(text) * 2


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_stays_text(attribute: str, text: str) -> None:
    reader = Reader(str(h("td", {"title": attribute}, text)))
    assert reader.elements == ["td"]
    assert reader.values == [visible(attribute)]
    assert reader.text == visible(text)


def test_without_escaping_markup_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("degarble.reports.markup.escape", lambda text: text)
    assert Reader(str(h("p", None, "<script>"))).elements == ["p", "script"]


@pytest.mark.parametrize("name", ["script", "style", "iframe", "p onclick=x", "object", "form"])
def test_only_harmless_elements_can_be_made(name: str) -> None:
    with pytest.raises(AssertionError):
        h(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("onclick", "x"),
        ("style", "x"),
        ("srcset", "x"),
        ("href", "https://example.org"),
        ("href", "javascript:x"),
        ("src", "data:text/html,x"),
        ("src", "https://example.org/x.png"),
    ],
)
def test_only_harmless_attributes_can_be_set(name: str, value: str) -> None:
    with pytest.raises(AssertionError):
        h("a", {name: value})


def test_children_are_flattened_and_absent_ones_left_out() -> None:
    element = h("ul", {"class": None, "hidden": True}, None, [h("li"), h("li", None, "a")], "b")
    assert str(element) == '<ul hidden=""><li></li><li>a</li>b</ul>'


def test_quotes_of_every_kind_are_escaped() -> None:
    assert escape("\"'`<>&") == "&quot;&#39;&#96;&lt;&gt;&amp;"


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


COLUMNS = (
    Column("level", ColumnKind.TONE),
    Column("layer", ColumnKind.NUMBER),
    Column("where", ColumnKind.CODE),
)
BLOCK = Catalogue(
    "Findings",
    COLUMNS,
    (
        CatalogueEntry(("bad", 3, "w1"), (Sentence("because"),), "finding-0"),
        CatalogueEntry(("note", None, "w2")),
    ),
    choices=1,
)


def test_a_row_unfolds_where_it_is() -> None:
    markup = str(block_element(BLOCK))
    summary = '<details id="finding-0"><summary><code>w1</code></summary>'
    assert f'{summary}<p class="sentence plain">because</p>' in markup
    assert "<td><code>w2</code></td>" in markup


def test_a_level_is_sorted_by_its_weight_and_marked_by_sign_and_word() -> None:
    markup = str(block_element(BLOCK))
    assert '<td data-value="4"><span class="toned bad">' in markup
    assert '<use href="#icon-bad">' in markup
    assert Reader(markup).text == "Findingslevellayerwhereerror3w1becausenote–w2"


def test_the_script_receives_what_it_offers() -> None:
    markup = str(block_element(BLOCK))
    assert 'data-filter="Findings"' in markup
    assert markup.count('data-choose=""') == 1
    assert 'data-label="layer"' in markup


def test_a_ragged_entry_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="entry 0 of catalogue 'Findings'"):
        Catalogue("Findings", COLUMNS, (CatalogueEntry(("bad", 3)),))


def test_views_are_whole_without_a_script() -> None:
    tabs = Tabs("Views", (Tab("One", (Sentence("1"),)), Tab("<Two>", (Sentence("2"),))), "views")
    markup = str(block_element(tabs))
    assert 'id="views"' in markup
    assert 'data-tabs="Views"' in markup
    assert markup.count("<section") == 2
    assert "<h3>&lt;Two&gt;</h3>" in markup
    assert "away" not in markup


def test_a_detail_view_has_a_name_an_address_and_a_way_back() -> None:
    looks = Looks("C", (Look("look-1", "a.b", (), True), Look("look-2", "c", ())), "views")
    markup = str(block_element(looks))
    assert '<section class="look first" id="look-1" tabindex="-1" aria-label="a.b">' in markup
    assert '<section class="look" id="look-2"' in markup
    assert markup.count('<a href="#views" class="back">') == 2
    assert "back" not in str(block_element(Looks("C", looks.looks)))


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
    for count, text in ((3, '"heat tones few"'), (24, '"heat tones few"'), (25, '"heat tones"')):
        names = tuple(map(str, range(count)))
        block = ToneMap("c", "kind", "layer", ("a",), names, ((Mark(Tone.GOOD),) * count,))
        assert f"<table class={text}>" in str(tone_map_element(block))


def test_one_place_is_singular() -> None:
    block = ToneMap("c", "kind", "layer", ("a",), ("0",), ((Mark(Tone.WARNING, 1),),))
    assert 'title="a, layer 0: warning, 1 place"' in str(tone_map_element(block))


@pytest.mark.parametrize("marks", [(), ((None,),), ((None, None, None), (None, None, None))])
def test_a_ragged_map_is_refused(marks: tuple[tuple[None, ...], ...]) -> None:
    with pytest.raises(ShapeMismatch, match="marks of tone map 'c'"):
        ToneMap("c", "kind", "layer", ("a",), ("0", "1"), marks)


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
    assert 'class="unsaid is-warning" title="no &lt;b&gt;budget' in markup
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
    assert '<th scope="col">60</th>' in markup  # every fifth is seen
    assert '<th scope="col"><span class="quiet">59</span></th>' in markup


def test_a_profile_is_stated_in_words() -> None:
    values: tuple[float | None, ...] = (0.0,) * 39 + (1.5,)
    markup = str(profile_element(Profile("P", tuple(map(str, range(40))), values, "u", 1.0)))
    assert "most 1.50 u at 39; 0 at 39 of 40; line at 1.00" in markup
    assert re.findall(r'<path d="([^"]*)">', markup) == ["M39.06 100V0h.88V100z"]  # not zeros
    assert "<text" in markup  # axes
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


def test_colour_begins_at_one_budget() -> None:
    steps = (1.0, 10.0)
    markup = judged(*map(JudgedCell, (0.99, 1.0, 1.01, 11.0)), steps=steps)
    assert re.findall(r'<td class="(h\d)">', markup) == ["h0", "h0", "h1", "h2"]
    cosines = judged(JudgedCell(0.5), JudgedCell(0.5, Tone.BAD), steps=(0.99, 0.9), near_one=True)
    assert re.findall(r'<td class="(h\d)[" ]', cosines) == ["h0", "h2"]


def _readings(rows: list[list[float]]) -> tuple[tuple[JudgedCell, ...], ...]:
    return tuple(
        tuple(JudgedCell(v, Tone.BAD if v > 1 else Tone.PLAIN) for v in row) for row in rows
    )


def test_rows_of_zeros_and_healthy_layers_are_folded() -> None:
    layers = (*map(str, range(61)), "ends")
    rows = [[0.0] * 62 for _ in range(4)] + [[0.25] * 62]
    rows[4][23] = 9.0
    names = ("a", "b", "c", "d", "w2")
    block = JudgedMap("m", "part", "layer", names, layers, _readings(rows), (1.0,), "budgets")
    markup = str(judged_map_element(block))
    main, *folds = re.split("<details", markup)
    assert Reader(main).text.count("9.00") == 1
    assert main.count("<td class=") == 3  # a corner, the layer that differs, the ends
    healthy, quiet = folds
    assert "60 layers without a finding" in healthy
    assert healthy.count("0.250") == 60
    assert "4 parts at 0 in every layer" in quiet
    assert all(f"<code>{name}</code>" in quiet for name in "abcd")
    calm = str(judged_map_element(replace(block, readings=_readings([[0.25] * 62] * 5))))
    assert "<details" not in calm  # a healthy run is not hidden


def test_points_stand_on_a_stem_where_they_are_marked() -> None:
    values = (0.0, 0.01, None, 1e5, math.nan, math.inf)
    block = Points("P", "layer", "budgets", values, "in words", (3,), ((1, "0"), (3, "<1>")), 1.0)
    markup = str(points_element(block))
    assert 'aria-label="P: in words"' in markup
    assert re.findall('class="(dots|stems|heads)" d="([^"]*)"', markup) == [
        ("dots", "M1.5 100h0M5.5 0h0"),  # from 0.01 to 100,000
        ("stems", "M3.5 0V71.43"),
        ("heads", "M3.5 0h0"),
    ]
    assert "&lt;1&gt;" in markup
    with pytest.raises(ShapeMismatch, match="places of 'P'"):
        replace(block, marked=(6,))


PICTURE = ErrorPicture(
    "E",
    (0, 4),
    (128, 134),
    (2, 2),
    (
        PictureLayer("difference", ("008", "000")),
        PictureLayer("twin", ("044", "8 4"), signed=True, top=2.5),
    ),
    (1.0, 10.0),
    "budgets",
    (GridLine("heads", 0, 4), GridLine("tiles", 128, 128)),
)


def test_a_picture_has_views_lines_ticks_and_words() -> None:
    markup = str(picture_element(PICTURE))
    assert "difference, rows 0 to 3, columns 128 to 133: 1 of 6 cells beyond 1 budgets" in markup
    assert "between rows 0 to 1 and columns 132 to 133" in markup
    assert markup.count('<path class="h8" d="M2 0.5h1">') == 1
    assert '<path class="nan" d="M1 1.5h1">' in markup
    assert "twin (colours: -2.5 to 2.5)" in Reader(markup).text
    assert markup.count('class="line l0" d="M2 0V2"') == 2  # column 132, in both views
    assert 'class="line l1"' not in markup  # no tile ends inside
    assert "tiles" not in Reader(markup).text
    assert "A cell is 2 x 2 elements, drawn by the worst of them." in markup
    with pytest.raises(ShapeMismatch, match="cells of 'difference'"):
        replace(PICTURE, columns=(128, 140))


def test_an_axis_has_few_round_labels() -> None:
    assert spread(61) == [0, 10, 20, 30, 40, 50, 60]
    assert [text for _, text in Values(0.0, 0.7, logarithmic=False).ticks] == [
        "0", "0.2", "0.4", "0.6",
    ]  # fmt: skip
    decades = Values.over((0.01, 3e4), logarithmic=True)
    assert [text for _, text in decades.ticks] == ["0.01", "1", "100", "10,000"]


def test_texts_part_where_they_do_and_meet_again() -> None:
    voices = (ModelText("Twin", ("a", " b", " c", " d")), ModelText("Candidate", ("a", " x", " c")))
    markup = str(voices_element(TextComparison("<p>", voices, 1)))
    assert "&lt;p&gt;" in markup
    assert '<p class="said">a<span class="quiet"> (from here they part:) </span>' in markup
    assert "(from here they part:) </span> b c d</p>" in markup  # what is meant is not marked
    assert '<span class="apart"> x</span> c</p>' in markup
    same = str(voices_element(TextComparison("p", voices[:1] * 2)))
    assert "apart" not in same
    assert "nothing" in str(voices_element(TextComparison("p", (ModelText("Twin", ()),))))


def test_files_are_links_next_to_the_page_only() -> None:
    markup = str(files_element(Files("Tables", (("a-b-outputs.csv", "rows"),))))
    assert '<a href="a-b-outputs.csv">a-b-outputs.csv</a> rows' in markup


# --------------------------------------------------------------------------------------------------
# Histories as HTML and as text: every series is drawn and said, and moves are marked.

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


# --------------------------------------------------------------------------------------------------
# A page as a check of one checkpoint would give, for the suites that keep its text.

ORIGIN = Origin(
    23,
    "ffn.experts.w2",
    "layers.23.ffn.experts.w2.out",
    {"expert": 17, "rows": "128 to 255"},
    "M10.nibble_order",
    0.1234,
    1.41,
    0.0951,
    1.0,
    "Swapping the two nibbles of every byte reproduces 100.0 % of 65,536 codes.",
)
PAGE = Page(
    Subject("a checkpoint", "Checkpoint", "sha256:0123456789abcdef0123456789abcdef"),
    Provenance("2026-01-02 03:04 UTC", "degarble check x", "CPU: a processor, 2 cores", ()),
    Verdict.DIFFERS,
    "Layer 23 differs in one expert.",
    (
        PageFinding(
            "The nibbles are swapped", "Swap them back.", ORIGIN, "degarble check y", "Rare."
        ),
    ),
    (
        Panel(PanelKind.TEXT, "not shown"),
        Panel(
            PanelKind.AUDIT,
            "one table",
            Verdict.DIFFERS,
            (
                Table(
                    "t",
                    (Column("tensor"), Column("verdict", ColumnKind.VERDICT),
                     Column("gain", ColumnKind.NUMBER), Column("share", ColumnKind.SHARE)),
                    (("w1", "AGREES", 1.0, 0.25), ("w2", "DIFFERS", 921000.0, None)),
                ),
                Sentence("Look here.", Tone.WARNING),
                Sentence("Left to the page."),
            ),
        ),
    ),
)  # fmt: skip


PAGE_HTML_PLAIN = Reader(page_html(page_of("plain"))).elements


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_changes_no_element_of_the_page(text: str) -> None:
    markup = page_html(page_of(text))
    assert Reader(markup).elements == PAGE_HTML_PLAIN
    markup.encode("utf-8")


def test_the_page_loads_nothing() -> None:
    markup = page_html(page_of("plain"))
    links = re.findall(r'<a [^>]*href="([^"]*)"', markup)
    beside = [address for address in links if not address.startswith("#")]
    assert beside == ["a-page-cosines.csv"]  # a table beside the page, loaded by nobody
    addresses = re.findall(r'(?:src|href|action)="([^"]*)"', markup)
    loaded = [address for address in addresses if address not in beside]
    assert all(a.startswith(("#", "data:image/svg+xml;base64,")) for a in loaded)
    assert "http://" not in markup.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in markup
    assert "url(" not in markup
    assert "@import" not in markup


def test_the_policy_admits_this_style_and_this_script_only() -> None:
    markup = page_html(page_of("plain"))
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', markup)
    assert found is not None
    policy = found.group(1)
    for element in ("style", "script"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", markup, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_can_be_walked_without_eyes_or_mouse() -> None:
    markup = page_html(page_of("plain"))
    assert '<a class="skip" href="#verdict">' in markup
    assert '<html lang="en-GB">' in markup
    for landmark in ("<header", "<nav aria-label=", "<main>", "<footer>"):
        assert markup.count(landmark) == 1
    labels = re.findall(r'<section[^>]* aria-labelledby="([^"]*)"', markup)
    assert len(labels) == 8  # verdict, findings, five panels, provenance
    assert all(f'id="{label}"' in markup for label in labels)
    assert markup.count("<h1") == 1
    targets = set(re.findall(r'href="#([^"]*)"', markup))
    assert all(f'id="{target}"' in markup for target in targets)


def test_ids_are_unique() -> None:
    page = page_of("plain")
    single = replace(page, panels=page.panels[:1])
    ids = re.findall(r' id="([^"]*)"', page_html(single))
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_icon(verdict: Verdict) -> None:
    assert f'id="icon-{verdict.lower()}"' in str(sprite())
    assert f'class="verdict {verdict.lower()}"' in page_html(page_of("plain", verdict))


def test_the_same_record_gives_the_same_bytes() -> None:
    assert page_html(page_of("plain")) == page_html(page_of("plain"))


def test_a_full_model_fits_the_limit() -> None:
    """61 layers by 40 components, three maps, each cell with a link: the largest table to come."""
    layers = tuple(str(index) for index in range(61))
    parts = tuple(f"attn.part_{index}" for index in range(40))
    values = tuple(tuple(index / 40 for index in range(40)) for _ in layers)
    anchors = tuple(tuple(f"cell-{i}-{j}" for j in range(40)) for i in range(61))
    maps = tuple(
        HeatMap(f"map {n}", "layer", "part", layers, parts, values, HeatScale(0, 1), anchors)
        for n in range(3)
    )
    panel = Panel(PanelKind.REPLAY, "all", Verdict.AGREES, maps)
    page: Page = replace(page_of("x"), panels=(panel,))
    assert len(page_html(page).encode()) < SIZE_LIMIT


def test_words_of_the_page_are_as_kept() -> None:
    body = page_html(PAGE).partition("<body>")[2].partition("<script>")[0]
    lines = [piece.strip() for piece in Reader(body).pieces]
    assert_as_kept("reports/page_words.txt", "".join(f"{line}\n" for line in lines if line))


@pytest.mark.parametrize("width", [60, 100])
def test_text_is_as_kept(width: int) -> None:
    assert_as_kept(f"reports/page_text_{width}.txt", page_text(PAGE, width=width))


def test_colour_changes_no_word() -> None:
    coloured = page_text(PAGE, colour=True)
    assert "\x1b[" in coloured
    plain = page_text(PAGE)
    assert "\x1b" not in plain
    assert "≠ DIFFERS" in plain


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_neither_moves_the_cursor_nor_is_read_as_markup(text: str) -> None:
    shown = page_text(page_of(text), width=400)
    assert not set(shown) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}
    if text.startswith("[bold"):
        assert "[bold red]markup[/]" in shown


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_own_sign(verdict: Verdict) -> None:
    assert len(set(SIGNS.values())) == len(Verdict)
    first = page_text(replace(PAGE, verdict=verdict)).splitlines()[0]
    assert first.startswith(f"{SIGNS[verdict]} {verdict}  Layer 23")


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


@pytest.mark.parametrize(
    ("kind", "name"), [("Checkpoint", "Header hash"), ("Server", "Page id"), ("Subject", "Page id")]
)
def test_only_a_checkpoint_has_a_header_hash(kind: str, name: str) -> None:
    markup = page_html(replace(PAGE, subject=replace(PAGE.subject, kind=kind)))
    other = {"Header hash": "Page id", "Page id": "Header hash"}[name]
    assert (markup.count(f"<dt>{name}</dt>"), markup.count(f"<dt>{other}</dt>")) == (2, 0)


def test_references_alone_are_no_tested_kernel() -> None:
    panel = Panel(PanelKind.REPLAY, "Built-in reference.", Verdict.AGREES)
    page = replace(PAGE, verdict=Verdict.AGREES, word=NO_ERRORS, panels=(panel,))
    assert words.meaning(page) == "nothing wrong was found, and no kernel was tested"
    for verdict, meaning in (
        (Verdict.AGREES, words.SUITES_ALONE), (Verdict.UNDECIDED, words.NO_KERNEL),
    ):  # fmt: skip
        kernels = Panel(PanelKind.KERNELS, "Suites of kernels.", verdict)
        assert words.meaning(replace(page, panels=(panel, kernels))) == meaning
    audit = replace(page, panels=(replace(panel, kind=PanelKind.AUDIT),))
    assert words.meaning(audit) == words.WORD_MEANINGS[NO_ERRORS]


def test_long_codes_do_not_break_the_words_next_to_them() -> None:
    code = ColumnKind.CODE
    columns = (
        Column("place", code), Column("measure"), Column("night", code), Column("commits", code),
        *(Column(f"number {at}", ColumnKind.NUMBER) for at in range(3)), Column("also changed"),
    )  # fmt: skip
    row = (
        "layers.23.ffn.experts.w2", "budgets", "2026-02-15", "0000002c0000..0000002d0000",
        0.25, 0.64, 21.0, "torch 2.13.0 -> 2.14.0",
    )  # fmt: skip
    panel = Panel(PanelKind.HISTORY, "", Verdict.AGREES, (Table("Moved", columns, (row,)),))
    text = page_text(replace(PAGE, panels=(panel,)))
    for word in ("budgets", "2026-02-15", "2.13.0", "2.14.0", "changed"):
        assert word in text
