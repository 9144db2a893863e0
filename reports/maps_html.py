"""Render maps, profiles, texts side by side and trends as HTML.

Colour is never alone: a cell has its number, sign or words as well.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, TypeGuard

from degarble.harness.report.blocks import Tone
from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.report.blocks import (
        Band,
        Files,
        HeatMap,
        HeatScale,
        JudgedCell,
        JudgedMap,
        Mark,
        ModelText,
        Profile,
        TextComparison,
        ToneMap,
        Trend,
        Trends,
    )
    from degarble.reports.markup import HtmlElement


# --------------------------------------------------------------------------------------------------
# Render a heat map as a table whose cells carry a shade and their number.
#
# Nine steps of shade make inline styles unnecessary. Cells link to the details that explain them.
# The numbers are always in the table: a screen reader, a printer and a reader who cannot tell the
# shades lose nothing.

HEAT_SHADES = 9
_HEAT_COMPACT_FROM = 17  # columns; numbers of three digits no longer fit side by side


def shade(value: float | None, scale: HeatScale) -> str:
    """Return the class of a cell: `h0` palest to `h8` darkest, `none`, or `nan`."""
    if value is None:
        return "none"
    position = scale.position(value)
    if math.isnan(position):
        return "nan"
    return f"h{min(HEAT_SHADES - 1, int(position * HEAT_SHADES))}"


def heat_map_element(block: HeatMap) -> HtmlElement:
    """Turn the matrix into a table with a legend."""
    compact = len(block.column_labels) >= _HEAT_COMPACT_FROM
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [
        h("th", {"scope": "col"}, h("span", {"class": "turned" if compact else None}, label))
        for label in block.column_labels
    ]
    head = h("tr", None, h("td", {"class": "corner"}, corner), heads)
    rows = [_heat_row(block, index, compact) for index in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat compact" if compact else "heat"},
        h("caption", None, block.caption),
        h("thead", None, head),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _heat_legend(block.scale))


def _heat_row(block: HeatMap, index: int, compact: bool) -> HtmlElement:
    anchors = block.anchors[index] if block.anchors else ("",) * len(block.column_labels)
    cells = []
    for label, value, anchor in zip(block.column_labels, block.values[index], anchors, strict=True):
        text = words.heat(value, block.scale)
        content: HtmlElement | str = h("span", {"class": "quiet" if compact else None}, text)
        if anchor:
            content = h("a", {"href": f"#{anchor}"}, content)
        unit = f" {block.scale.unit}" if block.scale.unit else ""
        title = f"{block.row_labels[index]}, {label}: {text}{unit}"
        cells.append(h("td", {"class": shade(value, block.scale), "title": title}, content))
    return h("tr", None, h("th", {"scope": "row"}, block.row_labels[index]), cells)


def _heat_legend(scale: HeatScale) -> HtmlElement:
    swatches = [h("span", {"class": f"swatch h{step}"}) for step in range(HEAT_SHADES)]
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


# --------------------------------------------------------------------------------------------------
# Render a map of tones as a table: each cell has a colour, a sign, and words.
#
# Colour is never alone: a cell has its sign, its words for a screen reader, and a title with the
# number of places. Cells link to the details that explain them.

_NOTHING = "nothing there"
_FEW = 24  # up to here columns stay next to their labels; more are spread over the page


def tone_map_element(block: ToneMap) -> HtmlElement:
    """Turn the matrix into a table with a legend."""
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [h("th", {"scope": "col"}, label) for label in block.column_labels]
    head = h("tr", None, h("td", {"class": "corner"}, corner), heads)
    rows = [_tone_row(block, index) for index in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat tones few" if len(block.column_labels) <= _FEW else "heat tones"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, head),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _tone_legend(block))


def _tone_row(block: ToneMap, index: int) -> HtmlElement:
    label = block.row_labels[index]
    cells = [
        _tone_cell(mark, f"{label}, {block.column_title} {column}", dict(block.legend))
        for mark, column in zip(block.marks[index], block.column_labels, strict=True)
    ]
    return h("tr", None, h("th", {"scope": "row"}, label), cells)


def _tone_cell(mark: Mark | None, place: str, legend: dict[Tone, str]) -> HtmlElement:
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


def _tone_legend(block: ToneMap) -> HtmlElement:
    items = [
        h("span", {"class": "key"}, _swatch(str(tone), words.SIGNS.get(tone, "")), text)
        for tone, text in block.legend
    ]
    gaps = any(mark is None for row in block.marks for mark in row)
    nothing = h("span", {"class": "key"}, _swatch("none", ""), _NOTHING)
    return h("p", {"class": "legend"}, items, nothing if gaps else None)


def _swatch(name: str, sign: str) -> HtmlElement:
    return h("span", {"class": f"swatch {name}", "aria-hidden": "true"}, sign)


# --------------------------------------------------------------------------------------------------
# Render the blocks of a replay as HTML: judged maps, profiles, texts side by side, files.
#
# Cells of a judged map have a shade, a sign and their number, so that colour is never alone. A
# profile is drawn and also described in words. The place where texts differ is marked and
# described.

JUDGED_SHADES = 9
_COMPACT_FROM = 13  # columns; numbers no longer fit side by side
_LABELLED = 12  # values of a profile that are labelled one by one
_PROFILE_HIGH = 40.0  # of a profile's drawing


def judged_map_element(block: JudgedMap) -> HtmlElement:
    """Turn the map into a table with a legend."""
    compact = len(block.column_labels) >= _COMPACT_FROM
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [h("th", {"scope": "col"}, label) for label in block.column_labels]
    rows = [_judged_row(block, at, compact) for at in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat judged dense" if compact else "heat judged"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, h("td", {"class": "corner"}, corner), heads)),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _judged_legend(block))


def _judged_row(block: JudgedMap, at: int, compact: bool) -> HtmlElement:
    label = block.row_labels[at]
    cells = [
        _judged_cell(block, reading, f"{label}, {block.column_title} {column}", compact)
        for reading, column in zip(block.readings[at], block.column_labels, strict=True)
    ]
    return h("tr", None, h("th", {"scope": "row"}, label), cells)


def _judged_cell(
    block: JudgedMap, reading: JudgedCell | None, place: str, compact: bool
) -> HtmlElement:
    if reading is None:
        return h("td", {"class": "none"}, h("span", {"class": "quiet"}, "nothing there"))
    text = _judged_number(block, reading.value)
    said = words.reading(reading.tone, dict(block.legend))
    sign = h("span", {"class": "sign", "aria-hidden": "true"}, words.SIGNS.get(reading.tone, ""))
    parts = [
        sign if words.SIGNS.get(reading.tone) else None,
        h("span", {"class": "quiet" if compact else None}, text),
        h("span", {"class": "quiet"}, f", {said}") if said else None,
    ]
    inner = [part for part in parts if part is not None]
    unit = f" {block.unit}" if block.unit and reading.value is not None else ""
    title = f"{place}: {text}{unit}{f'; {reading.note}' if reading.note else ''}"
    told = compact or bool(reading.note)
    attributes = {"class": _look(block, reading), "title": title if told else None}
    if reading.anchor:
        return h("td", attributes, h("a", {"href": f"#{reading.anchor}"}, inner))
    return h("td", attributes, inner)


def _judged_number(block: JudgedMap, value: float | None) -> str:
    if value is None or math.isnan(value):
        return words.DASH
    return words.near_one(value) if block.near_one else words.number(value, 3)


def _look(block: JudgedMap, reading: JudgedCell) -> str:
    tone = "" if reading.tone is Tone.PLAIN else f" is-{reading.tone}"
    if reading.value is None or math.isnan(reading.value):
        return f"unsaid{tone}"
    return f"h{min(JUDGED_SHADES - 1, block.passed(reading.value))}{tone}"


def _judged_legend(block: JudgedMap) -> HtmlElement:
    steps = [words.near_one(s) if block.near_one else f"{s:,g}" for s in block.steps]
    swatches = [h("span", {"class": "swatch h0"})]
    for at, step in enumerate(steps[: JUDGED_SHADES - 1], 1):
        swatches += [
            h("span", {"class": "step"}, step),
            h("span", {"class": f"swatch h{at}", "aria-hidden": "true"}),
        ]
    tones = [
        h("span", {"class": "key"}, h("span", {"class": "sign"}, words.SIGNS.get(tone, "")), text)
        for tone, text in block.legend
        if words.SIGNS.get(tone)
    ]
    unit = h("span", {"class": "unit"}, block.unit) if block.unit else None
    scale = h("span", {"class": "steps"}, swatches)
    return h("p", {"class": "legend"}, scale, unit, tones)


def profile_element(block: Profile) -> HtmlElement:
    """Draw the numbers as bars side by side, and describe them."""
    text = _profile_words(block)
    count = max(1, len(block.values))
    box = {"viewBox": f"0 0 {count} {_PROFILE_HIGH:g}", "preserveAspectRatio": "none"}
    reach = _reach(block)
    path = "".join(_profile_bars(block, reach))
    drawing = h(
        "svg",
        {"class": "profile", "role": "img", "aria-label": f"{block.caption}: {text}", **box},
        h("path", {"d": path}) if path else None,
        _limit(block, reach, count),
    )
    few = len(block.labels) <= _LABELLED
    below = (
        [h("span", None, label) for label in block.labels]
        if few
        else [h("span", None, block.labels[0]), h("span", None, block.labels[-1])]
    )
    axis = h("p", {"class": "axis each" if few else "axis", "aria-hidden": "true"}, below)
    caption = h("p", {"class": "caption"}, block.caption)
    return h("div", {"class": "block profiled"}, caption, drawing, axis, h("p", None, text))


def _reach(block: Profile) -> float:
    values = [v for v in (*block.values, block.limit) if v is not None and math.isfinite(v)]
    return max((_scaled(block, value) for value in values), default=0.0) or 1.0


def _scaled(block: Profile, value: float) -> float:
    value = max(0.0, value)
    return math.log10(1.0 + value) if block.logarithmic else value


def _profile_bars(block: Profile, reach: float) -> Iterator[str]:
    for at, value in enumerate(block.values):
        if value is None or value <= 0:
            continue
        share = _scaled(block, value) / reach if math.isfinite(value) else 1.0
        top = _PROFILE_HIGH - max(0.5, _PROFILE_HIGH * share)  # what is not nothing is seen
        yield f"M{at + 0.06:.5g} {_PROFILE_HIGH:g}V{top:.3g}h.88V{_PROFILE_HIGH:g}z"


def _limit(block: Profile, reach: float, count: int) -> HtmlElement | None:
    if block.limit is None:
        return None
    at = f"{_PROFILE_HIGH * (1 - _scaled(block, block.limit) / reach):.3g}"
    return h("line", {"class": "limit", "x1": "0", "x2": str(count), "y1": at, "y2": at})


def _profile_words(block: Profile) -> str:
    unit = f" {block.unit}" if block.unit else ""
    known = [(v, label) for v, label in zip(block.values, block.labels, strict=True) if v]
    if not known:
        return f"0{unit} everywhere"
    if len(block.values) <= _LABELLED:
        pairs = (f"{label}: {_figure(block, v)}" for v, label in known)
        return f"{', '.join(pairs)}{unit}"
    most, where = max(known, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    zero = sum(value == 0 for value in block.values)
    rest = f"; 0 at {zero:,} of {len(block.values):,}" if zero else ""
    limit = "" if block.limit is None else f"; line at {words.number(block.limit, 3)}"
    return f"most {words.number(most, 3)}{unit} at {where}{rest}{limit}"


def _figure(block: Profile, value: float) -> str:
    return f"{value:,.0f}" if block.logarithmic else words.number(value, 3)


def voices_element(block: TextComparison) -> HtmlElement:
    """Render texts to one prompt side by side, and mark where they differ."""
    prompt = h("p", {"class": "prompt"}, h("span", {"class": "who"}, "Prompt"), block.prompt)
    spoken = [_voice(voice, block) for voice in block.voices]
    return h("div", {"class": "block voices"}, prompt, h("div", {"class": "spoken"}, spoken))


def _voice(voice: ModelText, block: TextComparison) -> HtmlElement:
    parting = len(voice.tokens) if block.parting is None else block.parting
    meant = block.voices[0].tokens  # of the twin: its own words are not marked
    said: list[HtmlElement | str] = ["".join(voice.tokens[:parting])]
    later = list(enumerate(voice.tokens))[parting:]
    if later:
        said.append(h("span", {"class": "quiet"}, " (from here they part:) "))

    def other_word(pair: tuple[int, str]) -> bool:
        at, token = pair
        return len(meant) <= at or meant[at] != token

    for apart, run in groupby(later, other_word):
        text = "".join(token for _, token in run)
        said.append(h("span", {"class": "apart"}, text) if apart else text)
    if not voice.tokens:
        said = [h("span", {"class": "who"}, "nothing")]
    head = h("span", {"class": "who"}, voice.name)
    return h("div", None, head, h("p", {"class": "said"}, said))


def files_element(block: Files) -> HtmlElement:
    """List files in the folder of the page, each as a link."""
    rows = [
        h("li", None, h("a", {"href": name}, name), f" {text}" if text else "")
        for name, text in block.files
    ]
    caption = h("p", {"class": "caption"}, block.caption)
    return h("div", {"class": "block files"}, caption, h("ul", None, rows))


# --------------------------------------------------------------------------------------------------
# Render histories as an HTML table of series, each drawn small, with its latest value and a note.
#
# Bands run from the least to the largest of neighbouring nights, in the series' own range; a line
# marks where a change began. What is drawn is also described in words.

_TREND_HIGH = 24.0  # of a drawing; its width is one a band
_LEAST = 1.2  # height of a band that is one value


def trends_element(block: Trends) -> HtmlElement:
    """Turn the histories into a table."""
    unit = f", {block.unit}" if block.unit else ""
    heads = ("place", f"{block.first} to {block.last}", f"latest{unit}", "last green", "note")
    table = h(
        "table",
        {"class": "data trends"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, [_head(at, head) for at, head in enumerate(heads)])),
        h("tbody", None, [_trend_row(row) for row in block.rows]),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table))


def _head(at: int, text: str) -> HtmlElement:
    return h("th", {"scope": "col", "class": "number" if at in (2, 3) else None}, text)


def _trend_row(row: Trend) -> HtmlElement:
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
        h("td", {"class": "number"}, _trend_number(row.latest)),
        h("td", {"class": "number"}, _trend_number(row.green)),
        h("td", None, [each for each in note if each]),
    )


def _trend_number(value: float | None) -> str:
    return words.DASH if value is None else words.number(value, 3)


def _drawing(row: Trend) -> HtmlElement:
    known = [band for band in row.bands if _is_drawn(band)]
    low = min((band[0] for band in known), default=0.0)
    high = max((band[1] for band in known), default=0.0)
    said = f"from {words.number(low, 3)} to {words.number(high, 3)}" if known else "no values"
    times = len(row.moved_at)
    moves = f", moved {'once' if times == 1 else f'{times} times'}" if times else ""
    box = {
        "viewBox": f"0 0 {max(1, len(row.bands))} {_TREND_HIGH:g}",
        "preserveAspectRatio": "none",
    }
    path = "".join(_trend_bars(row, low, high))
    lines = "".join(f"M{at} 0v{_TREND_HIGH:g}" for at in row.moved_at)
    return h(
        "svg",
        {"class": "trend", "role": "img", "aria-label": f"{said}{moves}", **box},
        h("path", {"d": path}) if path else None,
        h("path", {"d": lines, "class": "move"}) if lines else None,
    )


def _is_drawn(band: Band) -> TypeGuard[tuple[float, float]]:
    return band is not None and all(math.isfinite(value) for value in band)


def _trend_bars(row: Trend, low: float, high: float) -> list[str]:
    reach = high - low
    drawn = []
    for at, band in enumerate(row.bands):
        if not _is_drawn(band):
            continue
        bottom, top = (((value - low) / reach if reach else 0.5) for value in band)
        height = max(_LEAST, (top - bottom) * (_TREND_HIGH - _LEAST))
        y = (1 - top) * (_TREND_HIGH - _LEAST)
        drawn.append(f"M{at} {y:.3g}h1v{height:.3g}h-1z")
    return drawn
