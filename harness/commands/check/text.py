"""The terminal output of `degarble check`: verdict, then origins with cause, evidence and remedy.

The first origins are shown in full, the others by name; of what was not judged, the number and an
example.
"""

from __future__ import annotations

import textwrap
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from degarble.harness.commands.check.page import Found, share_sentence
from degarble.harness.report.kernel_table import table_lines
from degarble.harness.report.number_text import number, visible
from degarble.reports.page_text import badge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.commands.check.check import Checked, Judgement

SHOWN = 4  # origins that are shown in full
_NAMED = 8  # of the others
_WORDS = 400  # characters of one text


def check_text(checked: Checked, sentence: str, *, width: int = 100, colour: bool = False) -> str:
    """Render a check for a terminal of `width` columns."""
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for line in _lines(checked, sentence, max(width, 40)):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _lines(checked: Checked, sentence: str, width: int) -> Iterator[Text]:
    head = textwrap.wrap(visible(sentence), width - 12) or [""]
    yield Text.assemble(badge(checked.verdict), "  ", Text(head[0], "bold"))
    for line in head[1:]:
        yield Text(f"  {line}", "bold")
    found, facts = checked.localised, checked.facts
    steps = len(checked.capture.steps)
    told = f"{checked.name} · capture {checked.capture.hash[:12]} · {steps} steps"
    yield Text(visible(f"{told} · reference {facts.get('reference', '')}")[: width - 1], "dim")
    yield Text("")
    calls = len(checked.capture.calls)
    names = {row.component.name for row in found.rows}
    yield from _columns("judged", f"{len(names):,} components, {calls:,} calls", width)
    worst = max((row for row in found.rows if row.ratio == row.ratio), default=None,
                key=lambda row: row.ratio)  # fmt: skip
    if worst is not None and not checked.origins:
        where = f"{worst.component.name}.{worst.output}"
        yield from _columns("nearest", f"{where} at {number(worst.ratio)} of its budget", width)
    for convention in found.conventions:
        yield from _columns("convention", convention.sentence, width)
    if found.unjudged:
        name, why = found.unjudged[0]
        more = f"{len(found.unjudged)} components, such as {name}: {why}"
        yield from _columns("not judged", more, width)
    if found.flips:
        count = sum(row.flips for row in found.flips)
        words = f"{count} choices fell the other way at near ties, which is legal"
        yield from _columns("flips", words, width)
    if found.first_non_finite is not None:
        yield from _columns("not finite", found.first_non_finite.sentence, width)
    table = checked.capture.facts.get("kernels")
    for line in table_lines(table) if isinstance(table, dict) else ():
        yield Text(visible(line), "dim")
    for note in (*checked.notes, *found.notes)[:3]:
        yield from _columns("note", note, width)
    for place, each in enumerate(checked.origins[:SHOWN], 1):
        yield from _origin(place, each, width)
    others = checked.origins[SHOWN:]
    if others:
        yield Text("")
        listed = ", ".join(each.trouble.component for each in others[:_NAMED])
        yield from _columns("and", f"{len(others)} more: {listed}", width)
    if checked.shares is not None and len(checked.origins) > 1:
        yield from _columns("together", checked.shares.sentence, width)


def _origin(place: int, each: Judgement, width: int) -> Iterator[Text]:
    trouble, cause = each.trouble, Found(each.trouble, each.diagnosed)
    yield Text("")
    yield Text.assemble(f"{place:<3}", (str(trouble.site), "bold red"))
    blamed = "" if trouble.component == trouble.site.component else f", by {trouble.component}"
    yield from _columns("   found", f"{trouble.sentence}{blamed}", width)
    named = each.diagnosed.named if each.diagnosed is not None else ()
    if named:
        yield from _columns("   cause", f"{named[0].id}: {cause.cause}. {named[0].evidence}", width)
    elif each.diagnosed is not None:
        yield from _columns("   cause", each.diagnosed.sentence, width)
    if each.share is not None:
        yield from _columns("   share", share_sentence(each.share), width)
    yield from _columns("   remedy", cause.remedy, width)
    if each.reproducer:
        yield from _columns("   run", each.reproducer, width)


def _columns(front: str, text: str, width: int) -> Iterator[Text]:
    """Wrap text after a prefix, with further lines indented below the first."""
    shown = visible(text).replace("\n", " ")
    shown = shown if len(shown) <= _WORDS else f"{shown[: _WORDS - 1]}…"
    for place, line in enumerate(textwrap.wrap(shown, max(20, width - 14)) or [""]):
        yield Text.assemble((f"{front if place == 0 else '':<12}", "dim"), " ", line)
