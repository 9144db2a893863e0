"""Render a page record as terminal text: the first screen, and the tables of the panels that ran.

Text of the record is shown literally: the terminal library's markup in it is not interpreted, and
control characters appear as their escape sequences.
"""

from __future__ import annotations

import math
from io import StringIO
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from degarble.harness.report.blocks import ColumnKind, Sentence, Table, TextComparison, Tone, Trends
from degarble.harness.report.number_text import visible
from degarble.harness.report.verdict import Verdict
from degarble.reports import words

if TYPE_CHECKING:
    from rich.console import RenderableType

    from degarble.harness.report.blocks import Block, Cell, Column, Trend
    from degarble.harness.report.page import Page, PageFinding, Panel

SIGNS = {
    Verdict.AGREES: "✓",
    Verdict.DIFFERS: "≠",
    Verdict.UNSTABLE: "~",
    Verdict.UNDECIDED: "?",
    Verdict.REFUSED: "⊘",
}
_STYLES = {
    Verdict.AGREES: "green",
    Verdict.DIFFERS: "red",
    Verdict.UNSTABLE: "magenta",
    Verdict.UNDECIDED: "yellow",
    Verdict.REFUSED: "yellow",
}
_ROOMY = 100  # columns from which names in tables are not broken
_WORD = 10  # characters of a word in a table that stay together
_TRENDS = 20  # series that a terminal shows
_SPARKS = "▁▂▃▄▅▆▇█"
_TONE_SIGNS = {Tone.WARNING: ("! ", "yellow"), Tone.BAD: ("x ", "red"), Tone.NOTE: ("i ", "cyan")}


def page_text(page: Page, *, width: int = 100, colour: bool = False) -> str:
    """Render `page` for a terminal of `width` columns."""
    parts: list[RenderableType] = [_verdict(page)]
    parts += [_panel(panel, width) for panel in page.ordered_panels if panel.verdict is not None]
    parts += [_finding(number, finding) for number, finding in enumerate(page.findings, 1)]
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    console.print(Group(*parts))
    lines = (line.rstrip() for line in stream.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style)


def badge(verdict: Verdict, word: str = "") -> Text:
    """Return a verdict as sign and word; `word` stands in the place of its own."""
    return Text(f"{SIGNS[verdict]} {word or verdict}", style=f"bold {_STYLES[verdict]}")


def verdict_line(verdict: Verdict, sentence: str, word: str = "") -> Text:
    """Return a verdict with its sentence."""
    return Text.assemble(badge(verdict, word), "  ", _text(sentence, "bold"))


def _verdict(page: Page) -> RenderableType:
    head = verdict_line(page.verdict, page.sentence, page.word)
    where = _text(
        f"{page.subject.name} · {page.subject.manifest_hash[:19]} · {page.provenance.machine}",
        "dim",
    )
    return Group(head, where)


def _panel(panel: Panel, width: int) -> RenderableType:
    head = Text.assemble("\n", _text(words.PANEL_TITLES[panel.kind], "bold"))
    drawn = (_block(block, width) for block in panel.blocks)
    return Group(head, *(block for block in drawn if block is not None))


def _block(block: Block, width: int) -> RenderableType | None:
    if isinstance(block, Table):
        return _table(block, width)
    if isinstance(block, Trends):
        return _trends(block)
    if isinstance(block, TextComparison):
        said = [(_text(voice.name, "dim"), _text("".join(voice.tokens))) for voice in block.voices]
        return _columns([(_text("prompt", "dim"), _text(block.prompt)), *said])
    if isinstance(block, Sentence) and block.tone in _TONE_SIGNS:
        sign, style = _TONE_SIGNS[block.tone]
        return _columns([(Text(sign, style), _text(block.text))])
    return None


def _trends(block: Trends) -> RenderableType:
    rows = []
    for row in block.rows[:_TRENDS]:
        sign, style = _TONE_SIGNS.get(row.tone, ("", ""))
        latest = words.DASH if row.latest is None else words.number(row.latest, 3)
        told = Text.assemble(sparks(row), " ", latest, " ", (sign, style), _text(row.note))
        rows.append((_text(row.label), told))
    more = len(block.rows) - len(rows)
    if more:
        rows.append((_text("", "dim"), _text(f"{more:,} more on the page", "dim")))
    return Group(_text(block.caption, "dim"), _columns(rows))


def sparks(row: Trend) -> str:
    """Draw a series with one character a band: its middle between the lowest and the highest."""
    known = [band for band in row.bands if band and all(map(math.isfinite, band))]
    low = min((band[0] for band in known), default=0.0)
    reach = max((band[1] for band in known), default=0.0) - low
    drawn = []
    for band in row.bands:
        if band not in known:
            drawn.append(" ")
            continue
        assert band is not None
        middle = (band[0] + band[1]) / 2 - low
        drawn.append(_SPARKS[round(middle / reach * (len(_SPARKS) - 1)) if reach else 0])
    return "".join(drawn)


def _table(block: Table, width: int) -> RenderableType:
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    codes = sum(
        max((len(words.cell(row[at], column)) for row in block.rows), default=0)
        for at, column in enumerate(block.columns)
        if column.kind is ColumnKind.CODE
    )
    # Long codes break, or the words next to them would, letter by letter.
    roomy = 2 * codes <= width
    kept = (ColumnKind.CODE, ColumnKind.VERDICT) if roomy else (ColumnKind.VERDICT,)
    for index, column in enumerate(block.columns):
        whole = index == 0 or column.kind in kept
        table.add_column(
            _text(column.name),
            justify="right" if words.is_number(column) else "left",
            overflow="fold",
            no_wrap=whole and width >= _ROOMY,
            min_width=None if whole else _longest_word(block, index),
        )
    for row in block.rows:
        table.add_row(*(_cell(c, k) for c, k in zip(row, block.columns, strict=True)))
    return table


def _longest_word(block: Table, index: int) -> int:
    """Return how narrow a column may be: names of others break before its words do."""
    column = block.columns[index]
    texts = [column.name, *(words.cell(row[index], column) for row in block.rows)]
    longest = max((len(word) for text in texts for word in visible(text).split()), default=1)
    return min(longest, _WORD)


def _cell(value: Cell, column: Column) -> Text:
    text = words.cell(value, column)
    if column.kind is ColumnKind.VERDICT and text in set(Verdict):
        return badge(Verdict(text))
    return _text(text)


def _finding(number: int, finding: PageFinding) -> RenderableType:
    origin = finding.origin
    title = Text.assemble(
        f"\n{number}  ", _text(finding.cause, "bold"), "  ", _text(origin.fault or "", "cyan")
    )
    figures = ", ".join(f"{name} {value}" for name, value in words.measures(origin))
    rows = [
        ("origin", " · ".join(words.place(origin))),
        ("evidence", origin.evidence),
        ("", figures),
        ("remedy", finding.remedy),
        ("reproduce", finding.reproduction),
        ("note", finding.note),
    ]
    drawn = _columns([(_text(name, "dim"), _text(text)) for name, text in rows if text])
    return Group(title, Padding(drawn, (0, 0, 0, 3)))


def _columns(rows: list[tuple[Text, Text]]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(name, text)
    return grid
