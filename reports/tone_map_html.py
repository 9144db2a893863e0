"""Render a map of tones as a table: each cell has a colour, a sign, and words.

Colour is never alone: a cell has its sign, its words for a screen reader, and a title with the
number of places. Cells link to the details that explain them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from degarble.harness.report.blocks import Mark, Tone, ToneMap
    from degarble.reports.markup import Element

_NOTHING = "nothing there"
_FEW = 24  # up to here columns stay next to their labels; more are spread over the page


def tone_map_element(block: ToneMap) -> Element:
    """Turn the matrix into a table with a legend."""
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [h("th", {"scope": "col"}, label) for label in block.column_labels]
    head = h("tr", None, h("td", {"class": "corner"}, corner), heads)
    rows = [_row(block, index) for index in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat tones few" if len(block.column_labels) <= _FEW else "heat tones"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, head),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _legend(block))


def _row(block: ToneMap, index: int) -> Element:
    label = block.row_labels[index]
    cells = [
        _cell(mark, f"{label}, {block.column_title} {column}", dict(block.legend))
        for mark, column in zip(block.marks[index], block.column_labels, strict=True)
    ]
    return h("tr", None, h("th", {"scope": "row"}, label), cells)


def _cell(mark: Mark | None, place: str, legend: dict[Tone, str]) -> Element:
    if mark is None:
        quiet = h("span", {"class": "quiet"}, _NOTHING)
        return h("td", {"class": "none", "title": f"{place}: {_NOTHING}"}, quiet)
    text = legend.get(mark.tone) or words.TONES.get(mark.tone, words.DASH)
    if mark.count:
        text += f", {mark.count:,} {'place' if mark.count == 1 else 'places'}"
    parts = [
        h("span", {"aria-hidden": "true"}, words.SIGNS.get(mark.tone, "")),
        h("span", {"class": "quiet"}, text),
    ]
    inner = [h("a", {"href": f"#{mark.anchor}"}, parts)] if mark.anchor else parts
    return h("td", {"class": str(mark.tone), "title": f"{place}: {text}"}, inner)


def _legend(block: ToneMap) -> Element:
    items = [
        h("span", {"class": "key"}, _swatch(str(tone), words.SIGNS.get(tone, "")), text)
        for tone, text in block.legend
    ]
    gaps = any(mark is None for row in block.marks for mark in row)
    nothing = h("span", {"class": "key"}, _swatch("none", ""), _NOTHING)
    return h("p", {"class": "legend"}, items, nothing if gaps else None)


def _swatch(name: str, sign: str) -> Element:
    return h("span", {"class": f"swatch {name}", "aria-hidden": "true"}, sign)
