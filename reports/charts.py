"""Static SVG charts of a whole run against its budgets, drawn by matplotlib.

Colours are written as variables that the picture sets by the light or dark scheme of the page.
Equal records give equal bytes.
"""

from __future__ import annotations

import math
from io import StringIO
from typing import TYPE_CHECKING, Any

from degarble.harness.report.blocks import Figure
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from degarble.harness.report.replay_panel import JudgedOutput, ReplayRecord

_FLOOR = 1e-3  # of a budget: what is nearer is drawn here
_INK, _SOFT, _GOOD, _BAD, _LINE = "#010203", "#040506", "#070809", "#0a0b0c", "#0d0e0f"
# Marker colours become variables; the picture chooses by the reader's scheme.
_STYLE = """<style>
:root { --ink: #18212b; --soft: #566270; --good: #0b5cad; --bad: #b23a07; --line: #dde2e8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa8b6; --good: #7cb7f5; --bad: #ff9c66; --line: #2a3440; }
}
@media print {
  :root { --ink: #18212b; --soft: #566270; --good: #0b5cad; --bad: #b23a07; --line: #dde2e8; }
}
</style>"""
_VARIABLES = {_INK: "ink", _SOFT: "soft", _GOOD: "good", _BAD: "bad", _LINE: "line"}


def run_chart(record: ReplayRecord) -> Figure:
    """Draw every judged output in the order of the run, by its difference in budgets."""
    judged = [each for each in record.outputs if each.ratio is not None]
    known = [each for each in judged if not math.isnan(each.ratio or 0.0)]
    beyond = [each for each in known if each.verdict is Verdict.DIFFERS]
    worst = max(known, key=lambda each: each.ratio or 0.0, default=None)
    said = f"{len(known):,} outputs in the order of the run, {len(beyond):,} beyond their budget"
    if worst is not None:
        said += f"; the furthest is {worst.site} at {number(worst.ratio or 0.0, 3)} budgets"
    caption = "Every output in the order of the run: the first one above the line is where it began"
    return Figure(caption, f"{said}.", _drawn(known))


def _drawn(outputs: list[JudgedOutput]) -> str:
    from matplotlib import rc_context  # noqa: PLC0415  half a second, and only where a run is drawn
    from matplotlib.backends.backend_svg import FigureCanvasSVG  # noqa: PLC0415
    from matplotlib.figure import Figure as Drawing  # noqa: PLC0415

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "degarble",
        "font.family": "sans-serif",
    }
    with rc_context(settings):
        drawing = Drawing(figsize=(9.6, 2.7))
        FigureCanvasSVG(drawing)
        axes = drawing.add_axes((0.075, 0.17, 0.915, 0.76))
        axes.set_yscale("log")
        finite = [each.ratio or 0.0 for each in outputs if math.isfinite(each.ratio or 0.0)]
        top = max([3.0, *finite]) * 3
        for good in (True, False):
            chosen = [
                (at, min(top, max(_FLOOR, each.ratio or 0.0)))
                for at, each in enumerate(outputs)
                if (each.verdict is not Verdict.DIFFERS) is good
            ]
            mark: Any = (
                {"marker": "o", "markersize": 2.6} if good else {"marker": "X", "markersize": 7}
            )
            colour = _GOOD if good else _BAD
            x, y = [pair[0] for pair in chosen], [pair[1] for pair in chosen]
            axes.plot(x, y, linestyle="none", color=colour, markeredgewidth=0, **mark)
        axes.axhline(1.0, color=_BAD, linewidth=1.2, linestyle=(0, (4, 3)))
        _layers(axes, outputs)
        axes.set_ylim(_FLOOR / 2, top * 2)
        _decades(axes, top)
        axes.set_xlim(-1, max(1, len(outputs)))
        axes.set_ylabel("budgets", color=_SOFT, fontsize=9)
        axes.tick_params(colors=_SOFT, labelsize=8, length=3, which="both")
        for name, spine in axes.spines.items():
            spine.set_color(_LINE)
            spine.set_visible(name in ("left", "bottom"))
        drawing.patch.set_alpha(0)
        axes.patch.set_alpha(0)
        stream = StringIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return _themed(stream.getvalue())


def _decades(axes: Any, top: float) -> None:
    """Name every other power of ten, in plain digits."""
    powers = range(round(math.log10(_FLOOR)), math.ceil(math.log10(top)) + 1)
    shown = list(powers)[:: 1 + len(powers) // 6]
    axes.set_yticks([10.0**power for power in shown], [f"{10.0**power:g}" for power in shown])
    axes.set_yticks([], minor=True)


def _layers(axes: Any, outputs: list[JudgedOutput]) -> None:
    """Name the layers on the axis of the run."""
    starts: dict[str, int] = {}
    for at, each in enumerate(outputs):
        starts.setdefault(each.column, at)
    named = [(at, name) for name, at in starts.items() if name != "ends"]
    step = max(1, len(named) // 16)
    shown = named[::step]
    axes.set_xticks([at for at, _ in shown], [f"layer {name}" for _, name in shown])


def _themed(svg: str) -> str:
    """Replace the marker colours by variables."""
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    head, mark, rest = svg.partition("<defs>")
    return f"{head}{_STYLE}{mark}{rest}"
