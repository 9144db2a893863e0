"""Render histories as an HTML table of series, each drawn small, with its latest value and a note.

Bands run from the least to the largest of neighbouring nights, in the series' own range; a line
marks where a change began. What is drawn is also described in words.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from degarble.harness.report.trend_blocks import Band, Trend, Trends
    from degarble.reports.markup import Element

_HIGH = 24.0  # of a drawing; its width is one a band
_LEAST = 1.2  # height of a band that is one value


def trends_element(block: Trends) -> Element:
    """Turn the histories into a table."""
    unit = f", {block.unit}" if block.unit else ""
    heads = ("place", f"{block.first} to {block.last}", f"latest{unit}", "last green", "note")
    table = h(
        "table",
        {"class": "data trends"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, [_head(at, each) for at, each in enumerate(heads)])),
        h("tbody", None, [_row(row) for row in block.rows]),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table))


def _head(at: int, text: str) -> Element:
    return h("th", {"scope": "col", "class": "number" if at in (2, 3) else None}, text)


def _row(row: Trend) -> Element:
    tone = words.SIGNS.get(row.tone, "")
    note = [
        h("span", {"class": "sign", "aria-hidden": "true"}, f"{tone} ") if tone else None,
        row.note,
    ]
    return h(
        "tr",
        {"class": f"is-{row.tone}" if tone else None},
        h("th", {"scope": "row"}, h("code", None, row.label)),
        h("td", {"class": "drawn"}, _drawing(row)),
        h("td", {"class": "number"}, _number(row.latest)),
        h("td", {"class": "number"}, _number(row.green)),
        h("td", None, [each for each in note if each]),
    )


def _number(value: float | None) -> str:
    return words.DASH if value is None else words.number(value, 3)


def _drawing(row: Trend) -> Element:
    known = [band for band in row.bands if _is_drawn(band)]
    low = min((band[0] for band in known), default=0.0)
    high = max((band[1] for band in known), default=0.0)
    said = f"from {words.number(low, 3)} to {words.number(high, 3)}" if known else "no values"
    times = len(row.moved_at)
    moves = f", moved {'once' if times == 1 else f'{times} times'}" if times else ""
    box = {"viewBox": f"0 0 {max(1, len(row.bands))} {_HIGH:g}", "preserveAspectRatio": "none"}
    path = "".join(_bars(row, low, high))
    lines = "".join(f"M{at} 0v{_HIGH:g}" for at in row.moved_at)
    return h(
        "svg",
        {"class": "trend", "role": "img", "aria-label": f"{said}{moves}", **box},
        h("path", {"d": path}) if path else None,
        h("path", {"d": lines, "class": "move"}) if lines else None,
    )


def _is_drawn(band: Band) -> TypeGuard[tuple[float, float]]:
    return band is not None and all(math.isfinite(value) for value in band)


def _bars(row: Trend, low: float, high: float) -> list[str]:
    reach = high - low
    drawn = []
    for at, band in enumerate(row.bands):
        if not _is_drawn(band):
            continue
        bottom, top = (((value - low) / reach if reach else 0.5) for value in band)
        height = max(_LEAST, (top - bottom) * (_HIGH - _LEAST))
        y = (1 - top) * (_HIGH - _LEAST)
        drawn.append(f"M{at} {y:.3g}h1v{height:.3g}h-1z")
    return drawn
