"""Pages for suites: one with every block and hostile text, and strategies that draw records."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from degarble.harness.report.blocks import (
    Bar,
    Bars,
    Block,
    Catalogue,
    CatalogueEntry,
    Code,
    Column,
    ColumnKind,
    Details,
    ErrorPicture,
    Fact,
    Facts,
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
from degarble.harness.report.page import Page, PageFinding, Panel, PanelKind, Provenance, Subject
from degarble.harness.report.verdict import Origin, Verdict

# Each would do harm where text is taken for markup, script, terminal codes or a template.
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    '"><svg onload=alert(1)>',
    "</style><script>alert(1)</script>",
    "javascript:alert(1)",
    "${body} $style {{7*7}} %s",
    "\x1b[2J\x1b[31mred\x07",
    "right\u202eto left\u2066",
    "lone \ud800 surrogate",
    "[bold red]markup[/] [link=http://x]y[/link]",
    "nul \x00 and \r return",
)
HOSTILE_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10">'
    "<script>document.title='owned'</script><rect width='20' height='10'/></svg>"
)


def every_block(text: str) -> tuple[Block, ...]:
    """One of each block, all of its words being `text`."""
    columns = tuple(Column(f"{kind} {text}", kind, explanation=text) for kind in ColumnKind)
    row = (text, 1.5, 0.5, text, "AGREES", "bad")
    return (
        *(Sentence(text, tone) for tone in Tone),
        Facts((Fact(text, text), Fact(text, text, code=True)), text),
        Table(
            text,
            columns,
            (row, (text, math.nan, 1.0, None, text, text), (text, -2, 0, text, None, None)),
        ),
        Catalogue(
            text,
            (Column(text, ColumnKind.TONE), Column(text), Column(text, ColumnKind.CODE)),
            (
                CatalogueEntry(
                    ("warning", text, text), (Sentence(text), Facts((Fact(text, text),))), "fold"
                ),
                CatalogueEntry(("good", None, text)),
            ),
            2,
        ),
        HeatMap(
            text,
            text,
            text,
            (text, "b"),
            (text, "c", "d"),
            ((0.0, None, math.nan), (math.inf, 1.0, -1.0)),
            HeatScale(0.0, 1.0, text),
            (("fold", "", ""), ("", "fold", "fold")),
        ),
        ToneMap(
            text,
            text,
            text,
            (text,),
            (text, "b"),
            ((Mark(Tone.BAD, 3, "fold"), None),),
            ((Tone.BAD, text), (Tone.GOOD, text)),
        ),
        Bars(text, (Bar(text, 1.0, text), Bar(text, math.inf, text, Tone.BAD)), limit=2.0),
        Bars(text, (Bar(text, 1e6, text), Bar(text, 0.0, text)), True, 1.0, text),
        Figure(text, text, HOSTILE_SVG),
        Code(text, text),
        Details(text, (Sentence(text), Details(text, (Code(text),))), "fold"),
        *judged_blocks(text),
    )


def trend(text: str) -> Trend:
    """A series with a gap, a band that is no number, and a move."""
    return Trend(text, ((0.0, 1.0), (math.nan, math.inf)), math.inf, None, (1,), Tone.BAD, text)


def judged_blocks(text: str) -> tuple[Block, ...]:
    """One of each block of a replay, all of its words being `text`."""
    judged = JudgedMap(
        text,
        text,
        text,
        (text, "b"),
        (text, "c", "d"),
        (
            (JudgedCell(0.5, anchor="look-1"), None, JudgedCell(None, Tone.WARNING, "", text)),
            (JudgedCell(math.inf, Tone.BAD, "look-1", text), JudgedCell(math.nan), JudgedCell(2.0)),
        ),
        (0.5, 1.0, 10.0),
        text,
        legend=((Tone.BAD, text), (Tone.WARNING, text)),
    )
    return (
        Tabs(text, (Tab(text, (judged,)), Tab(text, (Sentence(text),))), "views"),
        Trends(text, text, "b", text, (trend(text), Trend("b", ((0.0, 0.0), None), None, None))),
        Profile(text, (text, "b", "c"), (0.5, None, math.inf), text, 1.0),
        Profile(text, tuple(map(str, range(20))), (math.nan, *[0.0] * 18, 7.0), logarithmic=True),
        Points(text, text, text, (0.5, None, math.inf), text, (2,), ((0, text),), 1.0),
        ErrorPicture(
            text,
            (0, 2),
            (0, 2),
            (1, 1),
            (PictureLayer(text, ("0 ", "48")), PictureLayer(text, ("0 ", "48"), True, 1.0)),
            (1.0, 2.0),
            text,
            (GridLine(text, 0, 1),),
        ),
        TextComparison(
            text, (ModelText(text, (text, "a", text)), ModelText("b", (text, text, text))), 1
        ),
        TextComparison(text, (ModelText(text, ()),)),
        Files(text, (("a-page-cosines.csv", text),)),
        Looks(
            text, (Look("look-1", text, (Sentence(text),), True), Look("look-2", text, ())), "views"
        ),
    )


def page_of(text: str, verdict: Verdict = Verdict.DIFFERS) -> Page:
    """A page whose every word is `text`."""
    origin = Origin(3, text, text, {text: text, "rows": 7}, text, 0.5, 2.0, 0.1, 1.0, text, text)
    return Page(
        Subject(text, text, "sha256:0123456789abcdef"),
        Provenance(text, text, text, ((text, text),)),
        verdict,
        text,
        (
            PageFinding(text, text, origin, text, text),
            PageFinding(text, "", Origin(None, text, text)),
        ),
        (
            Panel(PanelKind.REPLAY, text, Verdict.UNDECIDED, (Sentence(text),)),
            Panel(PanelKind.AUDIT, text, verdict, every_block(text)),
            Panel(PanelKind.HISTORY, text),
        ),
    )


_texts = st.text(st.characters(), max_size=12)  # surrogates and controls included
_numbers = st.floats(allow_nan=False, width=32)
_cells = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | _numbers | _texts
_sentences = st.builds(Sentence, _texts, st.sampled_from(Tone))
_tables = st.integers(1, 3).flatmap(
    lambda width: st.builds(
        Table,
        _texts,
        st.tuples(*[st.builds(Column, _texts, st.sampled_from(ColumnKind))] * width),
        st.lists(st.tuples(*[_cells] * width), max_size=3).map(tuple),
    )
)
blocks: st.SearchStrategy[Block] = st.recursive(
    _sentences | _tables | st.builds(Code, _texts, _texts),
    lambda inner: st.builds(Details, _texts, st.lists(inner, max_size=3).map(tuple), _texts),
    max_leaves=4,
)
