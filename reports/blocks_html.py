"""Render each typed block of a report as one HTML element; maps and plots have their modules."""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING, Protocol

from degarble.harness.report.blocks import (
    Bars,
    Catalogue,
    Code,
    ColumnKind,
    Details,
    ErrorPicture,
    Facts,
    Figure,
    Files,
    HeatMap,
    JudgedMap,
    Looks,
    Points,
    Profile,
    Sentence,
    Table,
    Tabs,
    TextComparison,
    Tone,
    ToneMap,
    Trends,
)
from degarble.harness.report.verdict import Verdict
from degarble.reports import words
from degarble.reports.maps_html import (
    files_element,
    heat_map_element,
    judged_map_element,
    tone_map_element,
    voices_element,
)
from degarble.reports.markup import h
from degarble.reports.plots_html import (
    picture_element,
    points_element,
    profile_element,
    trends_element,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.report.blocks import Bar, Block, CatalogueEntry, Cell, Column, Look
    from degarble.reports.markup import HtmlElement


# --------------------------------------------------------------------------------------------------
# Render tabs and close looks as HTML: one at a time on a screen, complete without a script.
#
# The script turns marked views into tabs. A browser shows the close look that the address names
# (`:target`), so a click needs no script at all.

if TYPE_CHECKING:
    Inner = Callable[[Block], HtmlElement]


def tabs_element(block: Tabs, inner: Inner) -> HtmlElement:
    """Render views in order, each under its title."""
    views = [
        h(
            "section",
            {"class": "tab", "aria-label": tab.title},
            h("h3", None, tab.title),
            [inner(each) for each in tab.blocks],
        )
        for tab in block.tabs
    ]
    attributes = {"class": "block tabs", "id": block.anchor or None, "data-tabs": block.caption}
    return h("div", attributes, views)


def looks_element(block: Looks, inner: Inner) -> HtmlElement:
    """Render every close look; the style shows the one that the address names."""
    caption = h("p", {"class": "caption"}, block.caption)
    return h(
        "div", {"class": "block looks"}, caption, [_look(e, block, inner) for e in block.looks]
    )


def _look(look: Look, block: Looks, inner: Inner) -> HtmlElement:
    name = "look first" if look.first else "look"
    back = None
    if block.back:
        back = h("a", {"href": f"#{block.back}", "class": "back"}, "Back to the map")
    return h(
        "section",
        {"class": name, "id": look.anchor, "tabindex": "-1", "aria-label": look.title},
        h("div", {"class": "look-head"}, h("h3", None, look.title), back),
        [inner(each) for each in look.blocks],
    )


# --------------------------------------------------------------------------------------------------
# Render a catalogue as a table whose rows unfold to show their explanation.
#
# Marks let the script add a search field and choices. The fold is in the last cell, so it moves
# with its row when the table is sorted, and works without a script.


class Head(Protocol):
    """A function that returns the head of a column."""

    def __call__(self, column: Column, choose: bool = False) -> HtmlElement:
        """Return it; `choose`: the column can be filtered by its words."""


class CellMaker(Protocol):
    """A function that returns one cell."""

    def __call__(self, value: Cell, column: Column, *, labelled: bool = False) -> HtmlElement:
        """Return it; `labelled`: with the name of its column, for narrow screens."""


def catalogue_element(
    block: Catalogue,
    head: Head,
    cell: CellMaker,
    inner: Callable[[Block], HtmlElement],
) -> HtmlElement:
    """Turn a catalogue into a table; heads, cells and inner blocks look as everywhere."""
    heads = [head(column, index < block.choices) for index, column in enumerate(block.columns)]
    rows = [_catalogue_row(block, entry, cell, inner) for entry in block.entries]
    table = h(
        "table",
        {"class": "data catalogue"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, heads)),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block", "data-filter": block.caption}, h("div", region, table))


def _catalogue_row(
    block: Catalogue,
    entry: CatalogueEntry,
    cell: CellMaker,
    inner: Callable[[Block], HtmlElement],
) -> HtmlElement:
    *front, last = zip(entry.cells, block.columns, strict=True)
    cells = [cell(value, column, labelled=True) for value, column in front]
    return h("tr", None, cells, _last(entry, *last, inner))


def _last(
    entry: CatalogueEntry, value: Cell, column: Column, inner: Callable[[Block], HtmlElement]
) -> HtmlElement:
    text = words.cell(value, column)
    name = h("code", None, text) if column.kind is ColumnKind.CODE else text
    if not entry.blocks:
        return h("td", {"id": entry.anchor or None}, name)
    summary = h("summary", None, name)
    fold = h("details", {"id": entry.anchor or None}, summary, [inner(b) for b in entry.blocks])
    return h("td", {"class": "fold"}, fold)


# --------------------------------------------------------------------------------------------------
# Render each typed block of a report as one HTML element.
#
# The records were checked when they were made.

_LONG = 24  # characters of a sentence in a cell: it keeps a width that it can be read in
_TONE_WORDS = {
    Tone.NOTE: "Note",
    Tone.GOOD: "Good",
    Tone.WARNING: "Warning",
    Tone.BAD: "Bad",
}


def icon(name: str) -> HtmlElement:
    """Return a symbol of the page's sprite; the word always accompanies it."""
    return h("svg", {"class": "icon", "aria-hidden": "true"}, h("use", {"href": f"#icon-{name}"}))


def badge(verdict: Verdict | None, word: str = "") -> HtmlElement:
    """Return a verdict as icon and word, its own or another; None is a panel that did not run."""
    word = "not run" if verdict is None else word or str(verdict)
    kind = "absent" if verdict is None else verdict.lower()
    return h("span", {"class": f"badge {kind}"}, icon(kind), word)


def code_element(text: str, label: str) -> HtmlElement:
    """Return literal text; the script adds the button that copies it."""
    pre = h("pre", {"tabindex": "0", "aria-label": label}, h("code", None, text))
    return h("div", {"class": "code", "data-copy": label}, pre)


def block_element(block: Block) -> HtmlElement:
    """Turn one block into one element."""
    match block:
        case Sentence():
            return _sentence(block)
        case Facts():
            return _facts(block)
        case Table():
            return _table(block)
        case Catalogue():
            return catalogue_element(block, head, cell, block_element)
        case HeatMap():
            return heat_map_element(block)
        case ToneMap():
            return tone_map_element(block)
        case Bars():
            return _bars(block)
        case Figure():
            return _figure(block)
        case Code():
            return _code(block)
        case Details():
            return _details(block)
        case JudgedMap():
            return judged_map_element(block)
        case Profile():
            return profile_element(block)
        case Points():
            return points_element(block)
        case ErrorPicture():
            return picture_element(block)
        case TextComparison():
            return voices_element(block)
        case Files():
            return files_element(block)
        case Trends():
            return trends_element(block)
        case Tabs():
            return tabs_element(block, block_element)
        case Looks():
            return looks_element(block, block_element)


def _code(block: Code) -> HtmlElement:
    caption = h("p", {"class": "caption"}, block.caption) if block.caption else None
    return h("div", {"class": "block"}, caption, code_element(block.text, block.caption or "Code"))


def _sentence(block: Sentence) -> HtmlElement:
    word = _TONE_WORDS.get(block.tone)
    lead = (icon(block.tone), h("strong", {"class": "tone"}, f"{word}: ")) if word else ()
    return h("p", {"class": f"sentence {block.tone}"}, *lead, block.text)


def _facts(block: Facts) -> HtmlElement:
    rows = [
        h("div", None, h("dt", None, fact.name), h("dd", None, _literal(fact.value, fact.code)))
        for fact in block.rows
    ]
    caption = h("p", {"class": "caption"}, block.caption) if block.caption else None
    return h("div", {"class": "block"}, caption, h("dl", {"class": "facts"}, rows))


def _literal(text: str, code: bool) -> HtmlElement | str:
    return h("code", None, text) if code else text


def _table(block: Table) -> HtmlElement:
    heads = [head(column) for column in block.columns]
    rows = [
        h(
            "tr",
            None,
            [cell(value, block.columns[i], heading=i == 0) for i, value in enumerate(row)],
        )
        for row in block.rows
    ]
    table = h(
        "table",
        {"class": "data"},
        h("caption", None, block.caption),
        h("thead", None, h("tr", None, heads)),
        h("tbody", None, rows),
    )
    return h(
        "div",
        {"class": "block scroll", "tabindex": "0", "role": "region", "aria-label": block.caption},
        table,
    )


def head(column: Column, choose: bool = False) -> HtmlElement:
    """Return the head of a column; `choose`: the column can be filtered by its words."""
    number = words.is_number(column)
    attributes = {
        "scope": "col",
        "class": "number" if number else None,
        "data-sort": "number" if number or column.kind is ColumnKind.TONE else "text",
        "data-choose": choose,
        "title": column.explanation or None,
    }
    return h("th", attributes, column.name)


def cell(
    value: Cell, column: Column, *, heading: bool = False, labelled: bool = False
) -> HtmlElement:
    """Return one cell; a heading names its row, a label its column."""
    text = words.cell(value, column)
    tone = words.tone_of(value, column)
    attributes: dict[str, str | bool | None] = {}
    if words.is_number(column):
        attributes["class"] = "number"
        if labelled:
            attributes["data-label"] = column.name
        if isinstance(value, (int, float)):
            attributes["data-value"] = f"{value:.6g}" if isinstance(value, float) else str(value)
    content: HtmlElement | str = text
    if column.kind is ColumnKind.CODE and value is not None:
        content = h("code", None, text)
    elif column.kind is ColumnKind.VERDICT and text in set(Verdict):
        content = badge(Verdict(text))
    elif tone is not None:
        attributes["data-value"] = str(tone.weight)
        content = h("span", {"class": f"toned {tone}"}, icon(tone), text)
    if heading:
        return h("th", {**attributes, "scope": "row"}, content)
    if column.kind is ColumnKind.TEXT and len(text) > _LONG:
        attributes["class"] = "long"
    return h("td", attributes, content)


def _bars(block: Bars) -> HtmlElement:
    limits = [] if block.limit is None else [block.limit]
    # The limit counts too, so that its mark stays inside the drawing.
    reach = _Reach([bar.value for bar in block.bars] + limits, block.logarithmic)
    rows = [
        h(
            "tr",
            None,
            h("th", {"scope": "row"}, bar.label),
            h("td", {"class": "bar"}, _bar_drawing(bar, block.limit, reach)),
            h("td", {"class": "number"}, bar.text),
        )
        for bar in block.bars
    ]
    note = h("p", {"class": "legend"}, h("span", {"class": "limit-mark"}), block.limit_text)
    return h(
        "div",
        {"class": "block"},
        h("table", {"class": "bars"}, h("caption", None, block.caption), h("tbody", None, rows)),
        note if block.limit is not None else None,
    )


class _Reach:
    """The position of a value on a shared axis, in percent."""

    def __init__(self, values: list[float], logarithmic: bool) -> None:
        self.logarithmic = logarithmic
        self.finite = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
        scaled = [self._scaled(v) for v in self.finite]
        # Linear axes include 0; logarithmic ones begin half a decade below the least value.
        self.low = min([*scaled, 0.0]) if not logarithmic else min(scaled, default=0.0) - 0.5
        self.high = max([*scaled, self.low])

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def percent(self, value: float) -> float:
        if math.isnan(value) or (self.logarithmic and value <= 0):
            return 0.0
        if math.isinf(value):
            return 100.0 if value > 0 else 0.0
        width = self.high - self.low
        return 100.0 * (self._scaled(value) - self.low) / width if width else 0.0


def _bar_drawing(bar: Bar, limit: float | None, reach: _Reach) -> HtmlElement:
    start = reach.percent(0.0)
    end = reach.percent(bar.value)
    left = min(start, end)
    right = max(start, end, left + 0.4)  # a bar of no length is still seen
    box = {"x": f"{left:.2f}%", "width": f"{right - left:.2f}%", "y": "20%", "height": "60%"}
    mark = None
    if limit is not None:
        at = f"{min(99.7, reach.percent(limit)):.2f}%"
        mark = h("line", {"class": "limit", "x1": at, "x2": at, "y1": "0", "y2": "100%"})
    return h("svg", {"class": f"bar {bar.tone}", "aria-hidden": "true"}, h("rect", box), mark)


def _figure(block: Figure) -> HtmlElement:
    data = base64.b64encode(block.svg.encode("utf-8", "replace")).decode("ascii")
    source = f"data:image/svg+xml;base64,{data}"
    return h(
        "figure",
        {"class": "block"},
        h("img", {"src": source, "alt": block.description}),
        h("figcaption", None, block.caption),
    )


def _details(block: Details) -> HtmlElement:
    return h(
        "details",
        {"id": block.anchor or None},
        h("summary", None, block.summary),
        [block_element(inner) for inner in block.blocks],
    )
