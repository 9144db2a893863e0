"""Render each typed block of a report as one HTML element.

Sentences, facts, tables, bars, figures, code and folded details are here; maps, catalogues, folds
and replay blocks have files of their own. The records were checked when they were made.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING

from degarble.harness.report.blocks import (
    Bars,
    Catalogue,
    Code,
    ColumnKind,
    Details,
    Facts,
    Figure,
    HeatMap,
    Looks,
    Sentence,
    Table,
    Tabs,
    Tone,
    ToneMap,
)
from degarble.harness.report.judged_blocks import Files, JudgedMap, Profile, Voices
from degarble.harness.report.trend_blocks import Trends
from degarble.harness.report.verdict import Verdict
from degarble.reports import words
from degarble.reports.catalogue_html import catalogue_element
from degarble.reports.folds_html import looks_element, tabs_element
from degarble.reports.heat_map_html import heat_map_element
from degarble.reports.judged_html import (
    files_element,
    judged_map_element,
    profile_element,
    voices_element,
)
from degarble.reports.markup import h
from degarble.reports.tone_map_html import tone_map_element
from degarble.reports.trends_html import trends_element

if TYPE_CHECKING:
    from degarble.harness.report.blocks import Bar, Block, Cell, Column
    from degarble.reports.markup import Element

_TONE_WORDS = {
    Tone.NOTE: "Note",
    Tone.GOOD: "Good",
    Tone.WARNING: "Warning",
    Tone.BAD: "Bad",
}


def icon(name: str) -> Element:
    """Return a symbol of the page's sprite; the word always accompanies it."""
    return h("svg", {"class": "icon", "aria-hidden": "true"}, h("use", {"href": f"#icon-{name}"}))


def badge(verdict: Verdict | None) -> Element:
    """Return a verdict as icon and word; None is a panel that did not run."""
    word = "not run" if verdict is None else str(verdict)
    kind = "absent" if verdict is None else verdict.lower()
    return h("span", {"class": f"badge {kind}"}, icon(kind), word)


def code_element(text: str, label: str) -> Element:
    """Return literal text; the script adds the button that copies it."""
    pre = h("pre", {"tabindex": "0", "aria-label": label}, h("code", None, text))
    return h("div", {"class": "code", "data-copy": label}, pre)


def block_element(block: Block) -> Element:
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
        case Voices():
            return voices_element(block)
        case Files():
            return files_element(block)
        case Trends():
            return trends_element(block)
        case Tabs():
            return tabs_element(block, block_element)
        case Looks():
            return looks_element(block, block_element)


def _code(block: Code) -> Element:
    caption = h("p", {"class": "caption"}, block.caption) if block.caption else None
    return h("div", {"class": "block"}, caption, code_element(block.text, block.caption or "Code"))


def _sentence(block: Sentence) -> Element:
    word = _TONE_WORDS.get(block.tone)
    lead = (icon(block.tone), h("strong", {"class": "tone"}, f"{word}: ")) if word else ()
    return h("p", {"class": f"sentence {block.tone}"}, *lead, block.text)


def _facts(block: Facts) -> Element:
    rows = [
        h("div", None, h("dt", None, fact.name), h("dd", None, _literal(fact.value, fact.code)))
        for fact in block.rows
    ]
    caption = h("p", {"class": "caption"}, block.caption) if block.caption else None
    return h("div", {"class": "block"}, caption, h("dl", {"class": "facts"}, rows))


def _literal(text: str, code: bool) -> Element | str:
    return h("code", None, text) if code else text


def _table(block: Table) -> Element:
    heads = [head(column) for column in block.columns]
    rows = [
        h("tr", None, [cell(value, block.columns[i], i == 0) for i, value in enumerate(row)])
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


def head(column: Column, choose: bool = False) -> Element:
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


def cell(value: Cell, column: Column, heading: bool) -> Element:
    """Return one cell; a heading names its row."""
    text = words.cell(value, column)
    tone = words.tone_of(value, column)
    attributes: dict[str, str | bool | None] = {}
    if words.is_number(column):
        attributes["class"] = "number"
        attributes["data-label"] = column.name
        if isinstance(value, (int, float)):
            attributes["data-value"] = repr(value)
    content: Element | str = text
    if column.kind is ColumnKind.CODE and value is not None:
        content = h("code", None, text)
    elif column.kind is ColumnKind.VERDICT and text in set(Verdict):
        content = badge(Verdict(text))
    elif tone is not None:
        attributes["data-value"] = str(tone.weight)
        content = h("span", {"class": f"toned {tone}"}, icon(tone), text)
    if heading:
        return h("th", {**attributes, "scope": "row"}, content)
    return h("td", attributes, content)


def _bars(block: Bars) -> Element:
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


def _bar_drawing(bar: Bar, limit: float | None, reach: _Reach) -> Element:
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


def _figure(block: Figure) -> Element:
    data = base64.b64encode(block.svg.encode("utf-8", "replace")).decode("ascii")
    source = f"data:image/svg+xml;base64,{data}"
    return h(
        "figure",
        {"class": "block"},
        h("img", {"src": source, "alt": block.description}),
        h("figcaption", None, block.caption),
    )


def _details(block: Details) -> Element:
    return h(
        "details",
        {"id": block.anchor or None},
        h("summary", None, block.summary),
        [block_element(inner) for inner in block.blocks],
    )
