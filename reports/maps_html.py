"""Render maps, texts side by side and lists of files as HTML.

Colour is never alone: a cell has its number, sign or words as well.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from degarble.harness.report.blocks import Tone
from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from degarble.harness.report.blocks import (
        Files,
        HeatMap,
        HeatScale,
        JudgedCell,
        JudgedMap,
        Mark,
        ModelText,
        TextComparison,
        ToneMap,
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
# Render the blocks of a replay as HTML: judged maps, texts side by side, files.
#
# Cells of a judged map have a shade, a sign and their number, so that colour is never alone. The
# place where texts differ is marked and described.

JUDGED_SHADES = 9
_COMPACT_FROM = 13  # columns; numbers no longer fit side by side
_ENDS = "ends"  # the column of what belongs to no layer
_TICKS = 5  # of many columns every fifth is named
_FOLDED = 3  # rows from which those without a difference are folded


def judged_map_element(block: JudgedMap) -> HtmlElement:
    """Turn the map into tables with a legend; fold rows without a difference and healthy layers."""
    every = range(len(block.column_labels))
    quiet = [at for at, row in enumerate(block.readings) if _is_exact(block, row)]
    quiet = quiet if len(quiet) >= _FOLDED else []
    rows = [at for at in range(len(block.row_labels)) if at not in quiet]
    sick = [at for at in every if any(_stands_out(row[at]) for row in block.readings)]
    healthy = [at for at in every if at not in sick and block.column_labels[at] != _ENDS]
    folded = len(every) >= _COMPACT_FROM and bool(sick) and bool(healthy)
    open_ones = [at for at in every if not folded or at not in healthy]
    parts = [_judged_table(block, rows, open_ones, block.caption)]
    if folded:
        names = f"{_counted(healthy, block.column_title)} without a finding"
        parts.append(_fold(names, _judged_table(block, rows, healthy, names)))
    if quiet:
        exact = "1" if block.near_one else "0"
        names = f"{_counted(quiet, block.row_title)} at {exact} in every {block.column_title}"
        listed = [h("li", None, h("code", None, block.row_labels[at])) for at in quiet]
        parts.append(_fold(names, h("ul", {"class": "names"}, listed)))
    return h("div", {"class": "block"}, parts, _judged_legend(block))


def _is_exact(block: JudgedMap, row: tuple[JudgedCell | None, ...]) -> bool:
    """Return whether a row has cells, and in none of them any difference."""
    cells = [reading for reading in row if reading is not None]
    exact = 1.0 if block.near_one else 0.0
    return bool(cells) and all(r.value == exact and r.tone is Tone.PLAIN for r in cells)


def _stands_out(reading: JudgedCell | None) -> bool:
    return reading is not None and reading.tone is not Tone.PLAIN


def _counted(indices: list[int], noun: str) -> str:
    return f"{len(indices)} {noun}{'' if len(indices) == 1 else 's'}"


def _fold(summary: str, content: HtmlElement) -> HtmlElement:
    return h("details", {"class": "quiet-part"}, h("summary", None, summary), content)


def _judged_table(
    block: JudgedMap, rows: list[int], columns: list[int], caption: str
) -> HtmlElement:
    compact = len(columns) >= _COMPACT_FROM
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [_judged_head(block.column_labels[at], compact) for at in columns]
    body = [_judged_row(block, at, columns, compact) for at in rows]
    table = h(
        "table",
        {"class": "heat judged dense" if compact else "heat judged"},
        h("caption", None, h("span", {"class": "held"}, caption)),
        h("thead", None, h("tr", None, h("td", {"class": "corner"}, corner), heads)),
        h("tbody", None, body),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption}
    return h("div", region, table)


def _judged_head(label: str, compact: bool) -> HtmlElement:
    """Return the head of a column; of many columns every fifth is seen, and all are read aloud."""
    hidden = compact and label.isdecimal() and int(label) % _TICKS
    return h("th", {"scope": "col"}, h("span", {"class": "quiet"}, label) if hidden else label)


def _judged_row(block: JudgedMap, at: int, columns: list[int], compact: bool) -> HtmlElement:
    cells = [_judged_cell(block, block.readings[at][column], compact) for column in columns]
    return h("tr", None, h("th", {"scope": "row"}, block.row_labels[at]), cells)


def _judged_cell(block: JudgedMap, reading: JudgedCell | None, compact: bool) -> HtmlElement:
    if reading is None:
        return h("td", {"class": "none"}, h("span", {"class": "quiet"}, _NOTHING))
    text = _judged_number(block, reading.value)
    said = words.reading(reading.tone, dict(block.legend))
    sign = h("span", {"class": "sign", "aria-hidden": "true"}, words.SIGNS.get(reading.tone, ""))
    parts: list[HtmlElement | str | None] = [
        sign if words.SIGNS.get(reading.tone) else None,
        h("span", {"class": "quiet"}, text) if compact else h("span", None, text),
        h("span", {"class": "quiet"}, f", {said}") if said else None,
    ]
    inner = [part for part in parts if part is not None]
    attributes = {"class": _look(block, reading), "title": reading.note or None}
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
    # A cosine is no verdict: it has a shade only where the output is beyond its budget.
    plain = block.near_one and reading.tone is not Tone.BAD
    return f"h{0 if plain else min(JUDGED_SHADES - 1, block.passed(reading.value))}{tone}"


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
