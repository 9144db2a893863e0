"""The terminal output of `degarble audit`: verdict, judged parts, findings with the worst first.

For a few rules the first finding is shown in full (found, expected, remedy) with the number of
places, for the others the number alone. Page and JSON contain the rest.
"""

from __future__ import annotations

import textwrap
from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from degarble.harness.checkpoint.audit.findings import RULES
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.commands.audit.audit import by_rule, places
from degarble.harness.report.number_text import visible
from degarble.harness.report.progress import size
from degarble.reports.page_text import badge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from degarble.harness.commands.audit.audit import Audit, BrokenRule

SHOWN = 4  # rules whose first finding is shown in full
_RULES = 8  # lines for the rules of the others
_WORDS = 250  # characters of one text
_STYLES = {Level.ERROR: "red", Level.WARNING: "yellow", Level.NOTE: "cyan"}


def audit_text(audit: Audit, *, width: int = 100, colour: bool = False) -> str:
    """Render an audit for a terminal of `width` columns."""
    stream = StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for line in _lines(audit, max(width, 40)):
        console.print(line, soft_wrap=True)
    lines = (line.rstrip() for line in stream.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def _lines(audit: Audit, width: int) -> Iterator[Text]:
    about = audit.subject
    head = textwrap.wrap(visible(audit.sentence), width - len(audit.headline) - 5) or [""]
    yield Text.assemble(badge(audit.verdict, audit.headline), "  ", Text(head[0], "bold"))
    for line in head[1:]:
        yield Text(f"  {line}", "bold")
    files = places(about.shards, "file")
    what = f"{about.family}, {about.layout}, {size(about.nbytes)} in {files}"
    yield Text(
        visible(f"{about.name} · headers {about.identity[:19]} · {what}")[: width - 1], "dim"
    )
    if audit.content is not None:
        yield Text(f"content sha256:{audit.content}", "dim")
    yield Text("")
    for title, parts in (("judged", audit.judged), ("not judged", audit.not_judged)):
        for number, part in enumerate(parts):
            front = title if number == 0 else ""
            yield from _columns(f"{front:<11} {part.name:<10}", part.text, width, "dim")
    broken = by_rule(audit.findings)
    serious = [broken_rule for broken_rule in broken if broken_rule.first.level is not Level.NOTE][
        :SHOWN
    ]
    for number, rule in enumerate(serious, 1):
        yield from _whole(number, rule, width)
    yield from _others(
        [broken_rule for broken_rule in broken if broken_rule not in serious], bool(serious)
    )


def _whole(number: int, broken: BrokenRule, width: int) -> Iterator[Text]:
    finding = broken.first
    yield Text("")
    yield Text.assemble(
        f"{number:<3}",
        (f"{finding.level:<8}", f"bold {_STYLES[finding.level]}"),
        " ",
        (finding.rule, "bold"),
        (f"  {broken.extent}" if broken.extent else "", "dim"),
    )
    rows = (
        ("found", finding.message),
        ("expected", RULES[finding.rule].statement),
        ("remedy", finding.remedy),
    )
    for name, text in rows:
        yield from _columns(f"   {name:<8}", text, width, "dim")


def _others(others: Sequence[BrokenRule], has_more: bool) -> Iterator[Text]:
    if not others:
        return
    yield Text("")
    yield Text("And more:" if has_more else "Notes:")
    for rule in others[:_RULES]:
        level = rule.first.level
        count = places(rule.count, "place")
        yield Text.assemble(
            "   ", (f"{level:<8}", _STYLES[level]), f" {rule.first.rule:<34} {count:>14}"
        )
    if len(others) > _RULES:
        yield Text(f"   and {places(len(others) - _RULES, 'rule')} more")


def _columns(front: str, text: str, width: int, style: str) -> Iterator[Text]:
    """Wrap text after a prefix, with further lines indented below the first."""
    shown = visible(text).replace("\n", " ")
    shown = shown if len(shown) <= _WORDS else f"{shown[: _WORDS - 1]}…"
    lines = textwrap.wrap(shown, max(20, width - len(front) - 2)) or [""]
    for number, line in enumerate(lines):
        yield Text.assemble((front if number == 0 else " " * len(front), style), " ", line)
