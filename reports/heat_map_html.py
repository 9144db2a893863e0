"""Render a heat map as a table whose cells carry a shade and their number.

Nine steps of shade make inline styles unnecessary. Cells link to the details that explain them. The
numbers are always in the table: a screen reader, a printer and a reader who cannot tell the shades
lose nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from degarble.harness.report.blocks import HeatMap, HeatScale
    from degarble.reports.markup import Element

SHADES = 9
_COMPACT_FROM = 17  # columns; numbers of three digits no longer fit side by side


def shade(value: float | None, scale: HeatScale) -> str:
    """Return the class of a cell: `h0` palest to `h8` darkest, `none`, or `nan`."""
    if value is None:
        return "none"
    position = scale.position(value)
    if math.isnan(position):
        return "nan"
    return f"h{min(SHADES - 1, int(position * SHADES))}"


def heat_map_element(block: HeatMap) -> Element:
    """Turn the matrix into a table with a legend."""
    compact = len(block.column_labels) >= _COMPACT_FROM
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [
        h("th", {"scope": "col"}, h("span", {"class": "turned" if compact else None}, label))
        for label in block.column_labels
    ]
    head = h("tr", None, h("td", {"class": "corner"}, corner), heads)
    rows = [_row(block, index, compact) for index in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat compact" if compact else "heat"},
        h("caption", None, block.caption),
        h("thead", None, head),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _legend(block.scale))


def _row(block: HeatMap, index: int, compact: bool) -> Element:
    anchors = block.anchors[index] if block.anchors else ("",) * len(block.column_labels)
    cells = []
    for label, value, anchor in zip(block.column_labels, block.values[index], anchors, strict=True):
        text = words.heat(value, block.scale)
        content: Element | str = h("span", {"class": "quiet" if compact else None}, text)
        if anchor:
            content = h("a", {"href": f"#{anchor}"}, content)
        unit = f" {block.scale.unit}" if block.scale.unit else ""
        title = f"{block.row_labels[index]}, {label}: {text}{unit}"
        cells.append(h("td", {"class": shade(value, block.scale), "title": title}, content))
    return h("tr", None, h("th", {"scope": "row"}, block.row_labels[index]), cells)


def _legend(scale: HeatScale) -> Element:
    swatches = [h("span", {"class": f"swatch h{step}"}) for step in range(SHADES)]
    unit = f" {scale.unit}" if scale.unit else ""
    return h(
        "p",
        {"class": "legend"},
        words.number(float(scale.low), scale.digits),
        h("span", {"class": "swatches", "aria-hidden": "true"}, swatches),
        words.number(float(scale.high), scale.digits) + unit,
        h("span", {"class": "swatch none", "aria-hidden": "true"}),
        "not run",
    )
