"""Render the blocks of a replay as HTML: judged maps, profiles, texts side by side, files.

Cells of a judged map have a shade, a sign and their number, so that colour is never alone. A
profile is drawn and also described in words. The place where texts differ is marked and described.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from degarble.harness.report.severity import Tone
from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.report.judged_blocks import (
        Files,
        JudgedMap,
        Profile,
        Reading,
        Voice,
        Voices,
    )
    from degarble.reports.markup import Element

SHADES = 9
_COMPACT_FROM = 13  # columns; numbers no longer fit side by side
_LABELLED = 12  # values of a profile that are labelled one by one
_HIGH = 40.0  # of a profile's drawing


def judged_map_element(block: JudgedMap) -> Element:
    """Turn the map into a table with a legend."""
    compact = len(block.column_labels) >= _COMPACT_FROM
    corner = f"{block.row_title} \\ {block.column_title}"
    heads = [h("th", {"scope": "col"}, label) for label in block.column_labels]
    rows = [_row(block, at, compact) for at in range(len(block.row_labels))]
    table = h(
        "table",
        {"class": "heat judged dense" if compact else "heat judged"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, h("td", {"class": "corner"}, corner), heads)),
        h("tbody", None, rows),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table), _legend(block))


def _row(block: JudgedMap, at: int, compact: bool) -> Element:
    label = block.row_labels[at]
    cells = [
        _cell(block, reading, f"{label}, {block.column_title} {column}", compact)
        for reading, column in zip(block.readings[at], block.column_labels, strict=True)
    ]
    return h("tr", None, h("th", {"scope": "row"}, label), cells)


def _cell(block: JudgedMap, reading: Reading | None, place: str, compact: bool) -> Element:
    if reading is None:
        return h("td", {"class": "none"}, h("span", {"class": "quiet"}, "nothing there"))
    text = _number(block, reading.value)
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


def _number(block: JudgedMap, value: float | None) -> str:
    if value is None or math.isnan(value):
        return words.DASH
    return words.near_one(value) if block.near_one else words.number(value, 3)


def _look(block: JudgedMap, reading: Reading) -> str:
    tone = "" if reading.tone is Tone.PLAIN else f" is-{reading.tone}"
    if reading.value is None or math.isnan(reading.value):
        return f"unsaid{tone}"
    return f"h{min(SHADES - 1, block.passed(reading.value))}{tone}"


def _legend(block: JudgedMap) -> Element:
    steps = [words.near_one(s) if block.near_one else f"{s:,g}" for s in block.steps]
    swatches = [h("span", {"class": "swatch h0"})]
    for at, step in enumerate(steps[: SHADES - 1], 1):
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


def profile_element(block: Profile) -> Element:
    """Draw the numbers as bars side by side, and describe them."""
    told = _told(block)
    count = max(1, len(block.values))
    box = {"viewBox": f"0 0 {count} {_HIGH:g}", "preserveAspectRatio": "none"}
    reach = _reach(block)
    path = "".join(_bars(block, reach))
    drawing = h(
        "svg",
        {"class": "profile", "role": "img", "aria-label": f"{block.caption}: {told}", **box},
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
    return h("div", {"class": "block profiled"}, caption, drawing, axis, h("p", None, told))


def _reach(block: Profile) -> float:
    values = [v for v in (*block.values, block.limit) if v is not None and math.isfinite(v)]
    return max((_scaled(block, value) for value in values), default=0.0) or 1.0


def _scaled(block: Profile, value: float) -> float:
    value = max(0.0, value)
    return math.log10(1.0 + value) if block.logarithmic else value


def _bars(block: Profile, reach: float) -> Iterator[str]:
    for at, value in enumerate(block.values):
        if value is None or value <= 0:
            continue
        share = _scaled(block, value) / reach if math.isfinite(value) else 1.0
        top = _HIGH - max(0.5, _HIGH * share)  # what is not nothing is seen
        yield f"M{at + 0.06:.5g} {_HIGH:g}V{top:.3g}h.88V{_HIGH:g}z"


def _limit(block: Profile, reach: float, count: int) -> Element | None:
    if block.limit is None:
        return None
    at = f"{_HIGH * (1 - _scaled(block, block.limit) / reach):.3g}"
    return h("line", {"class": "limit", "x1": "0", "x2": str(count), "y1": at, "y2": at})


def _told(block: Profile) -> str:
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


def voices_element(block: Voices) -> Element:
    """Render texts to one prompt side by side, and mark where they differ."""
    prompt = h("p", {"class": "prompt"}, h("span", {"class": "who"}, "Prompt"), block.prompt)
    spoken = [_voice(voice, block) for voice in block.voices]
    return h("div", {"class": "block voices"}, prompt, h("div", {"class": "spoken"}, spoken))


def _voice(voice: Voice, block: Voices) -> Element:
    parting = len(voice.tokens) if block.parting is None else block.parting
    meant = block.voices[0].tokens  # of the twin: its own words are not marked
    said: list[Element | str] = ["".join(voice.tokens[:parting])]
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


def files_element(block: Files) -> Element:
    """List files in the folder of the page, each as a link."""
    rows = [
        h("li", None, h("a", {"href": name}, name), f" {text}" if text else "")
        for name, text in block.files
    ]
    caption = h("p", {"class": "caption"}, block.caption)
    return h("div", {"class": "block files"}, caption, h("ul", None, rows))
