"""Draw plots as HTML: profiles, runs as points, pictures of errors, histories; each with its axes.

Axes are drawings of their own around the plot. The plot is stretched to the width of the page, and
its labels are not. Colour stands for a difference beyond its budget, and for nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeGuard

from degarble.reports import words
from degarble.reports.markup import h

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from degarble.harness.report.blocks import (
        Band,
        ErrorPicture,
        PictureLayer,
        Points,
        Profile,
        Trend,
        Trends,
    )
    from degarble.reports.markup import HtmlElement


# --------------------------------------------------------------------------------------------------
# The frame of a plot: what is drawn, an axis of values at its left, one of places below it.

_HIGH = 100.0  # of a plot's own units; its width is one a place
_VALUES = 4  # labels of an axis of values, about
_PLACES = 6  # labels of an axis of places, at most
_EACH = 12  # places that are labelled one by one


@dataclass(frozen=True)
class Values:
    """An axis of values from `low` to `high`: logarithms of ten, or the numbers themselves."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def over(cls, values: Iterable[float], *, logarithmic: bool) -> Values:
        """Return the axis on which all finite values lie."""
        known = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
        if not logarithmic:
            return cls(min([*known, 0.0]), max([*known, 0.0]) or 1.0, logarithmic)
        low = math.floor(math.log10(min(known, default=1.0)))
        return cls(low, max(low + 1, math.ceil(math.log10(max(known, default=1.0)))), logarithmic)

    def height(self, value: float) -> float:
        """Return how far above the foot a value lies, from 0 to 1."""
        if math.isinf(value) and value > 0:
            return 1.0
        if self.logarithmic:
            if not value > 0:
                return 0.0
            value = math.log10(value)
        share = (value - self.low) / (self.high - self.low)
        return 0.0 if math.isnan(share) else min(1.0, max(0.0, share))

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return some values with their labels, by their height."""
        if self.logarithmic:
            powers = range(math.ceil(self.low), math.floor(self.high) + 1)
            shown = powers[:: 1 + (len(powers) - 1) // _VALUES]
            return [((p - self.low) / (self.high - self.low), _power(p)) for p in shown]
        step = _round_step((self.high - self.low) / _VALUES)
        first = math.ceil(self.low / step)
        last = math.floor(self.high / step + 1e-9)
        return [(self.height(k * step), f"{k * step:.6g}") for k in range(first, last + 1)]


def _power(exponent: int) -> str:
    return f"{10**exponent:,}" if 0 <= exponent < 6 else f"{10.0**exponent:g}"


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least as large."""
    unit: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= least * (1 - 1e-9))


@dataclass(frozen=True)
class Plot:
    """What is drawn over an axis of places: its kind, its words, its axes, its shapes."""

    kind: str
    name: str
    titles: tuple[str, str]  # of the places, of the values
    count: int
    values: Values
    shapes: Sequence[HtmlElement | None]
    places: HtmlElement

    @property
    def element(self) -> HtmlElement:
        """Return it with its axes."""
        below, left = self.titles
        marks = [
            h("text", {"x": "100%", "y": _percent(1 - at), "text-anchor": "end"}, text)
            for at, text in self.values.ticks
        ]
        grid = "".join(
            f"M0 {_HIGH * (1 - at):.5g}H{self.count}" for at, _ in self.values.ticks if at
        )
        box = {"viewBox": f"0 0 {self.count} {_HIGH:g}", "preserveAspectRatio": "none"}
        attributes = {"class": "plot", "role": "img", "aria-label": self.name, **box}
        return h(
            "div",
            {"class": f"chart {self.kind}"},
            h("span", {"class": "y-title", "aria-hidden": "true"}, left),
            h("svg", {"class": "y-axis", "aria-hidden": "true"}, marks),
            h(
                "svg",
                attributes,
                h("path", {"class": "grid", "d": grid}) if grid else None,
                [shape for shape in self.shapes if shape is not None],
            ),
            self.places,
            h("span", {"class": "x-title", "aria-hidden": "true"}, below),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _places(ticks: Sequence[tuple[float, str]]) -> HtmlElement:
    """Draw the labels of an axis of places, each at its share of the width."""
    marks = [
        h("text", {"x": _percent(at), "y": "1em", "text-anchor": _anchor(at)}, text)
        for at, text in ticks
    ]
    return h("svg", {"class": "x-axis", "aria-hidden": "true"}, marks)


def _anchor(at: float) -> str:
    return "start" if at < 0.04 else "end" if at > 0.96 else "middle"


def _each_place(labels: Sequence[str]) -> HtmlElement:
    """Return every label of an axis, under its place."""
    spans = [h("span", None, label) for label in labels]
    return h("p", {"class": "axis each", "aria-hidden": "true"}, spans)


def spread(count: int, most: int = _PLACES) -> list[int]:
    """Return places of a run of `count`, evenly spread by round steps, the first included."""
    step = max(1, -(-(count - 1) // most))
    return list(range(0, count, next(s for s in _ROUND if s >= step)))


_ROUND = tuple(factor * 10**power for power in range(9) for factor in (1, 2, 5))


def _limit_line(axis: Values, limit: float | None, count: int) -> HtmlElement | None:
    if limit is None:
        return None
    at = f"{_HIGH * (1 - axis.height(limit)):.4g}"
    return h("line", {"class": "limit", "x1": "0", "x2": str(count), "y1": at, "y2": at})


# --------------------------------------------------------------------------------------------------
# Profiles: numbers along one axis as bars, also described in words.


def profile_element(block: Profile) -> HtmlElement:
    """Draw the numbers as bars side by side, and describe them."""
    text = _profile_words(block)
    count = max(1, len(block.values))
    known = [v for v in (*block.values, block.limit) if v is not None]
    axis = Values.over(known, logarithmic=block.logarithmic)
    if block.logarithmic:  # counts: the foot is at a half, so that a single one is seen
        axis = Values(-0.3, axis.high, logarithmic=True)
    path = "".join(_profile_bars(block, axis))
    few = len(block.labels) <= _EACH
    places = (
        _each_place(block.labels)
        if few
        else _places([((at + 0.5) / count, block.labels[at]) for at in spread(count)])
    )
    shapes = [h("path", {"d": path}) if path else None, _limit_line(axis, block.limit, count)]
    titles = ("", block.unit or "relative difference")
    name = f"{block.caption}: {text}"
    plot = Plot("profile", name, titles, count, axis, shapes, places)
    caption = h("p", {"class": "caption"}, block.caption)
    return h("div", {"class": "block profiled"}, caption, plot.element, h("p", None, text))


def _profile_bars(block: Profile, axis: Values) -> Iterator[str]:
    for at, value in enumerate(block.values):
        if value is None or value <= 0:
            continue
        share = 1.0 if math.isnan(value) else axis.height(value)
        top = _HIGH - max(1.25, _HIGH * share)  # what is not nothing is seen
        yield f"M{at + 0.06:.5g} {_HIGH:g}V{top:.3g}h.88V{_HIGH:g}z"


def _profile_words(block: Profile) -> str:
    unit = f" {block.unit}" if block.unit else ""
    known = [(v, label) for v, label in zip(block.values, block.labels, strict=True) if v]
    if not known:
        return f"0{unit} everywhere"
    if len(block.values) <= _EACH:
        pairs = (f"{label}: {_figure(block, v)}" for v, label in known)
        return f"{', '.join(pairs)}{unit}"
    most, where = max(known, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    zero = sum(value == 0 for value in block.values)
    rest = f"; 0 at {zero:,} of {len(block.values):,}" if zero else ""
    limit = "" if block.limit is None else f"; line at {words.number(block.limit, 3)}"
    return f"most {words.number(most, 3)}{unit} at {where}{rest}{limit}"


def _figure(block: Profile, value: float) -> str:
    return f"{value:,.0f}" if block.logarithmic else words.number(value, 3)


# --------------------------------------------------------------------------------------------------
# Points: a whole run in its order. What stands out has a stem, so that colour is not alone. Zeros
# are not drawn.

_FLOOR = 1e-3  # what is smaller is drawn here


def points_element(block: Points) -> HtmlElement:
    """Draw the numbers as points; a stem leads to each that stands out."""
    count = max(1, len(block.values))
    known = [max(_FLOOR, v) for v in block.values if v and not math.isnan(v)]
    above = [2 * block.limit] if block.limit else []  # the line does not lie on the edge
    axis = Values.over([*known, *above], logarithmic=True)
    marked = frozenset(block.marked)
    foot = 0.0 if block.limit is None else axis.height(block.limit)
    dots: dict[bool, list[str]] = {False: [], True: []}
    for at, value in enumerate(block.values):
        if value and not math.isnan(value):
            high = _HIGH * (1 - axis.height(max(_FLOOR, value)))
            stem = f"V{_HIGH * (1 - foot):.4g}" if at in marked else "h0"
            dots[at in marked].append(f"M{at + 0.5:g} {high:.4g}{stem}")
    heads = "".join(f"{dot.partition('V')[0]}h0" for dot in dots[True])
    drawn = ((dots[False], "dots"), (dots[True], "stems"), ([heads], "heads"))
    paths = [h("path", {"class": name, "d": "".join(d)}) for d, name in drawn if "".join(d)]
    shapes = [_limit_line(axis, block.limit, count), *paths]
    places = _places([((at + 0.5) / count, text) for at, text in block.ticks])
    name = f"{block.caption}: {block.description}"
    plot = Plot("points", name, (block.x_title, block.y_title), count, axis, shapes, places)
    caption = h("p", {"class": "caption"}, block.caption)
    return h("div", {"class": "block"}, caption, plot.element)


# --------------------------------------------------------------------------------------------------
# Pictures of an error: rows by columns, a shade a cell, one picture a view, lines between parts.
#
# Neighbouring cells of one shade are one stroke, which keeps a picture at some ten kilobytes.

_NOT_FINITE = " "


def picture_element(block: ErrorPicture) -> HtmlElement:
    """Draw every view of the matrix; the script makes each larger on a click."""
    views = [_view(block, layer) for layer in block.layers]
    return h(
        "div",
        {"class": "block picture"},
        h("p", {"class": "caption"}, block.caption),
        h("div", {"class": "views"}, views),
        _picture_legend(block),
    )


def _view(block: ErrorPicture, layer: PictureLayer) -> HtmlElement:
    tall, wide = len(layer.cells), max((len(row) for row in layer.cells), default=1)
    prefix = "v" if layer.signed else "h"
    strokes: dict[str, list[str]] = {}
    for y, row in enumerate(layer.cells):
        x = 0
        for digit, run in groupby(row):
            length = len(list(run))
            strokes.setdefault(digit, []).append(f"M{x} {y}.5h{length}")
            x += length
    quiet = "4" if layer.signed else "0"  # the ground of the picture
    paths = [
        h("path", {"class": f"{prefix}{digit}" if digit != _NOT_FINITE else "nan", "d": "".join(d)})
        for digit, d in sorted(strokes.items())
        if digit != quiet
    ]
    box = {"viewBox": f"0 0 {wide} {tall}", "preserveAspectRatio": "none"}
    drawing = h(
        "svg",
        {"class": f"matrix {prefix}", "role": "img", "aria-label": _said(block, layer), **box},
        paths,
        [_lines(block, at, (tall, wide)) for at in drawn_lines(block)],
    )
    rows, columns = (_ends(ends, n) for ends, n in ((block.rows, tall), (block.columns, wide)))
    left = [h("text", {"x": "100%", "y": _percent(at), "text-anchor": "end"}, t) for at, t in rows]
    scale = f" (colours: {words.number(-layer.top, 2)} to {words.number(layer.top, 2)})"
    title = f"{layer.name}{scale if layer.signed else ''}"
    return h(
        "figure",
        {"data-zoom": layer.name},
        h("figcaption", None, title),
        h(
            "div",
            {"class": "chart map"},
            h("span", {"class": "y-title", "aria-hidden": "true"}, "row"),
            h("svg", {"class": "y-axis", "aria-hidden": "true"}, left),
            drawing,
            _places(columns),
            h("span", {"class": "x-title", "aria-hidden": "true"}, "column"),
        ),
    )


def _ends(ends: tuple[int, int], cells: int) -> list[tuple[float, str]]:
    """Return labels of an axis of a picture, at the middle of their cells."""
    first, end = ends
    size = (end - first) / max(1, cells)
    step = max(spread(end - first, 4)[1:2], default=1)
    shown = range(-(-first // step) * step, end, step)
    return [(((at - first) // size + 0.5) / max(1, cells), str(at)) for at in shown]


def _lines(block: ErrorPicture, at: int, extents: tuple[int, int]) -> HtmlElement:
    line, (tall, wide) = block.lines[at], extents
    across = _boundaries(line.rows, block.rows, block.cell[0])
    down = _boundaries(line.columns, block.columns, block.cell[1])
    path = "".join(f"M0 {y:.5g}H{wide}" for y in across)
    path += "".join(f"M{x:.5g} 0V{tall}" for x in down)
    return h("path", {"class": f"line l{at}", "d": path})


def _boundaries(size: int, ends: tuple[int, int], cell: int) -> list[float]:
    """Return where parts of a size meet, in cells; none where they lie too close to be seen."""
    if size < 2 * cell:
        return []
    first = -(-(ends[0] + 1) // size) * size
    return [(at - ends[0]) / cell for at in range(first, ends[1], size)]


def drawn_lines(block: ErrorPicture) -> list[int]:
    """Return the lines that the picture shows."""
    return [
        at
        for at, line in enumerate(block.lines)
        if _boundaries(line.rows, block.rows, block.cell[0])
        or _boundaries(line.columns, block.columns, block.cell[1])
    ]


def _said(block: ErrorPicture, layer: PictureLayer) -> str:
    """Describe a view for who cannot see it."""
    where = f"rows {block.rows[0]} to {block.rows[1] - 1}, columns {block.columns[0]} to"
    where = f"{layer.name}, {where} {block.columns[1] - 1}"
    if layer.signed:
        return f"{where}: values"
    beyond = [
        (y, x) for y, row in enumerate(layer.cells) for x, digit in enumerate(row) if digit != "0"
    ]
    if not beyond:
        return f"{where}: nothing beyond {block.steps[0]:g} {block.unit}"
    spans = []
    for axis, (first, end) in enumerate((block.rows, block.columns)):
        inside = sorted(pair[axis] for pair in beyond)
        last = min(end, first + (inside[-1] + 1) * block.cell[axis]) - 1
        spans.append(f"{first + inside[0] * block.cell[axis]} to {last}")
    total = len(layer.cells) * len(layer.cells[0])
    return (
        f"{where}: {len(beyond):,} of {total:,} cells beyond {block.steps[0]:g} {block.unit}, "
        f"between rows {spans[0]} and columns {spans[1]}"
    )


def _picture_legend(block: ErrorPicture) -> HtmlElement:
    swatches = [h("span", {"class": "swatch h0", "aria-hidden": "true"})]
    for at, step in enumerate(block.steps, 1):
        swatches += [
            h("span", {"class": "step"}, f"{step:,g}"),
            h("span", {"class": f"swatch h{at}", "aria-hidden": "true"}),
        ]
    lines = [
        h(
            "span",
            {"class": "key"},
            h("span", {"class": f"line-mark l{at}", "aria-hidden": "true"}),
            block.lines[at].name,
        )
        for at in drawn_lines(block)
    ]
    tall, wide = block.cell
    size = "A cell is one element" if tall == wide == 1 else f"A cell is {tall} x {wide} elements"
    worst = "" if tall == wide == 1 else ", drawn by the worst of them"
    return h(
        "p",
        {"class": "legend"},
        h("span", {"class": "steps"}, swatches),
        h("span", {"class": "unit"}, block.unit),
        lines,
        h("span", None, f"{size}{worst}."),
    )


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
    heads = (
        "place", f"{block.first} to {block.last}", "range", f"latest{unit}", "last green", "note",
    )  # fmt: skip
    table = h(
        "table",
        {"class": "data trends"},
        h("caption", None, h("span", {"class": "held"}, block.caption)),
        h("thead", None, h("tr", None, [_trend_head(at, head) for at, head in enumerate(heads)])),
        h("tbody", None, [_trend_row(row) for row in block.rows]),
    )
    region = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": block.caption}
    return h("div", {"class": "block"}, h("div", region, table))


def _trend_head(at: int, text: str) -> HtmlElement:
    return h("th", {"scope": "col", "class": "number" if at in (3, 4) else None}, text)


def _trend_row(row: Trend) -> HtmlElement:
    tone = words.SIGNS.get(row.tone, "")
    note = [
        h("span", {"class": "sign", "aria-hidden": "true"}, f"{tone} ") if tone else None,
        row.note,
    ]
    known = [value for band in row.bands if _is_drawn(band) for value in band]
    low, high = min(known, default=0.0), max(known, default=0.0)
    reach = [words.number(value, 2) for value in (high, low)] if known else [words.DASH]
    return h(
        "tr",
        {"class": f"is-{row.tone}" if tone else None},
        h("th", {"scope": "row"}, h("code", None, row.label)),
        h("td", {"class": "drawn"}, _trend_drawing(row, low, high)),
        h(
            "td",
            {"class": "reach"},
            [h("span", None, text) for text in dict.fromkeys(reach)],
            h("em", None, "log") if row.logarithmic else None,
        ),
        h("td", {"class": "number"}, _trend_number(row.latest)),
        h("td", {"class": "number"}, _trend_number(row.green)),
        h("td", None, [each for each in note if each]),
    )


def _trend_number(value: float | None) -> str:
    return words.DASH if value is None else words.number(value, 3)


def _trend_drawing(row: Trend, low: float, high: float) -> HtmlElement:
    known = any(map(_is_drawn, row.bands))
    said = f"from {words.number(low, 3)} to {words.number(high, 3)}" if known else "no values"
    times = len(row.moved_at)
    moves = f", moved {'once' if times == 1 else f'{times} times'}" if times else ""
    scale = ", logarithmic" if row.logarithmic else ""
    box = {
        "viewBox": f"0 0 {max(1, len(row.bands))} {_TREND_HIGH:g}",
        "preserveAspectRatio": "none",
    }
    path = "".join(_trend_bars(row, low, high))
    lines = "".join(f"M{at} 0v{_TREND_HIGH:g}" for at in row.moved_at)
    return h(
        "svg",
        {"class": "trend", "role": "img", "aria-label": f"{said}{scale}{moves}", **box},
        h("path", {"d": path}) if path else None,
        h("path", {"d": lines, "class": "move"}) if lines else None,
    )


def _is_drawn(band: Band) -> TypeGuard[tuple[float, float]]:
    return band is not None and all(math.isfinite(value) for value in band)


def _trend_bars(row: Trend, low: float, high: float) -> list[str]:
    axis = (
        Values.over([v for band in row.bands if _is_drawn(band) for v in band], logarithmic=True)
        if row.logarithmic
        else Values(low, high, logarithmic=False)
    )
    drawn = []
    for at, band in enumerate(row.bands):
        if not _is_drawn(band):
            continue
        bottom, top = (0.5, 0.5) if low == high else map(axis.height, band)
        height = max(_LEAST, (top - bottom) * (_TREND_HIGH - _LEAST))
        y = (1 - top) * (_TREND_HIGH - _LEAST)
        drawn.append(f"M{at} {y:.3g}h1v{height:.3g}h-1z")
    return drawn
