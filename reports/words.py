"""Words for cells, columns, panels and origins, the same in HTML and on the terminal.

Imports no sibling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.harness.report.blocks import ColumnKind, Tone
from degarble.harness.report.number_text import number as number  # noqa: PLC0414  for renderers
from degarble.harness.report.number_text import share
from degarble.harness.report.page import PanelKind
from degarble.harness.report.verdict import NO_ERRORS, TOOL_WORKS, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.report.blocks import Cell, Column, HeatScale
    from degarble.harness.report.page import Page
    from degarble.harness.report.verdict import Origin

_ALIKE = 4e-15  # from 1: what the sums of a cosine lose themselves
DASH = "–"

PANEL_TITLES = {
    PanelKind.AUDIT: "Audit",
    PanelKind.REPLAY: "Replay",
    PanelKind.TEXT: "Text",
    PanelKind.KERNELS: "Kernels",
    PanelKind.HISTORY: "History",
    PanelKind.PROBE: "Probe",
    PanelKind.COMPARE: "Comparison",
}

PANEL_QUESTIONS = {
    PanelKind.AUDIT: "Are the files right?",
    PanelKind.REPLAY: "Does each component return what it should?",
    PanelKind.TEXT: "What does the model say?",
    PanelKind.KERNELS: "Which kernels ran, and how fast?",
    PanelKind.HISTORY: "Which night moved it?",
    PanelKind.PROBE: "Does the server give the same in every way?",
    PanelKind.COMPARE: "Where do the two runs differ?",
}


# An audit has rules and levels; it compares with no twin, so that nothing there has a budget.
AUDIT_MEANINGS = {
    Verdict.AGREES: "no rule of level error is broken",
    Verdict.DIFFERS: "a rule of level error is broken in at least one place",
}


# A probe holds a server against itself.
PROBE_MEANINGS = {
    Verdict.AGREES: "no way to the same numbers differs by more than rounding",
    Verdict.DIFFERS: "the server does what a healthy one does not",
    Verdict.UNSTABLE: "the same request gets other answers",
}


# Of words that stand in the place of a verdict's own.
WORD_MEANINGS = {
    NO_ERRORS: "no rule of level error is broken; nothing was compared with a reference",
    TOOL_WORKS: "the healthy run agrees, and the planted fault is found",
}


# Of a run that only degarble's own references computed; beside it a night may test all kernels.
NO_KERNEL = "nothing wrong was found, and no kernel was tested"
SUITES_ALONE = "nothing wrong was found; kernels were tested by suites, not on this checkpoint"


# A comparison of two captures has no budget: equal means to the bit.
COMPARE_MEANINGS = {
    Verdict.AGREES: "both runs are equal to the bit",
    Verdict.DIFFERS: "the runs differ in at least one output",
}


# A history has changes, and the verdict of its latest night.
HISTORY_MEANINGS = {
    Verdict.AGREES: "the latest night did not fail, and nothing is lost that it had",
    Verdict.DIFFERS: "the latest night failed, or something is worse than it was",
}


def meaning(page: Page) -> str:
    """Return what the verdict of a page means, given what was judged there."""
    judged = {panel.kind: panel.verdict for panel in page.panels if panel.verdict is not None}
    if page.word == NO_ERRORS and PanelKind.REPLAY in judged:
        of_kernels = judged.get(PanelKind.KERNELS)
        return SUITES_ALONE if of_kernels is Verdict.AGREES else NO_KERNEL
    if page.word in WORD_MEANINGS:
        return WORD_MEANINGS[page.word]
    alone = {
        PanelKind.AUDIT: AUDIT_MEANINGS,
        PanelKind.PROBE: PROBE_MEANINGS,
        PanelKind.COMPARE: COMPARE_MEANINGS,
        PanelKind.HISTORY: HISTORY_MEANINGS,
    }
    fields = alone.get(next(iter(judged)), {}) if len(judged) == 1 else {}
    return fields.get(page.verdict, page.verdict.meaning)


# The word of a tone in a table or a map, and its sign; a plain tone has neither.
TONES = {Tone.NOTE: "note", Tone.GOOD: "good", Tone.WARNING: "warning", Tone.BAD: "error"}
SIGNS = {Tone.NOTE: "i", Tone.GOOD: "", Tone.WARNING: "!", Tone.BAD: "×"}


def tone_of(value: Cell, column: Column) -> Tone | None:
    """Return the tone of a cell; None for cells of words and numbers."""
    if column.kind is not ColumnKind.TONE:
        return None
    return next((tone for tone in TONES if tone.value == value), None)


def cell(value: Cell, column: Column) -> str:
    """Return the text of one cell of a table."""
    if value is None:
        return DASH
    tone = tone_of(value, column)
    if tone is not None:
        return TONES[tone]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if column.kind is ColumnKind.SHARE:
        return share(value)
    return number(value, column.digits)


def heat(value: float | None, scale: HeatScale) -> str:
    """Return the text of one cell of a heat map, without its unit."""
    return DASH if value is None else number(value, scale.digits)


def reading(tone: Tone, legend: Mapping[Tone, str]) -> str:
    """Return what the tone of a cell means there; nothing for a plain one."""
    return legend.get(tone) or (TONES.get(tone, "") if SIGNS.get(tone) else "")


def near_one(value: float) -> str:
    """Return a cosine as text that shows 1 only for 1, as far as float64 sums can tell."""
    off = 1 - abs(value)
    if off <= _ALIKE or not math.isfinite(value):
        return f"{round(value)}" if math.isfinite(value) else str(value)
    for places in (4, 6):
        text = f"{value:.{places}f}"
        if abs(float(text)) != 1:
            return text
    return f"1 - {off:.0e}" if value > 0 else f"-1 + {off:.0e}"


def is_number(column: Column) -> bool:
    """Return whether the cells of `column` are read as numbers."""
    return column.kind in (ColumnKind.NUMBER, ColumnKind.SHARE)


def place(origin: Origin) -> tuple[str, ...]:
    """Return where a difference began, from coarse to fine: site, then what narrows it."""
    return (origin.site, *(f"{name} {value}" for name, value in origin.where.items()))


def measures(origin: Origin) -> tuple[tuple[str, str], ...]:
    """List the figures of an origin with their names."""
    pairs = (
        ("cosine", origin.cosine),
        ("relative difference", origin.difference),
        ("budget", origin.budget),
    )
    return tuple((name, number(value)) for name, value in pairs if value is not None)
