from __future__ import annotations

from dataclasses import replace

import pytest

from degarble.harness.report.verdict import Verdict
from degarble.reports.page_text import SIGNS, page_text
from degarble.suites.reports.page_cases import HOSTILE, page_of
from degarble.suites.reports.report_cases import PAGE
from degarble.suites.snapshots import assert_as_kept


@pytest.mark.parametrize("width", [60, 100])
def test_text_is_as_kept(width: int) -> None:
    assert_as_kept(f"reports/page_text_{width}.txt", page_text(PAGE, width=width))


def test_colour_changes_no_word() -> None:
    coloured = page_text(PAGE, colour=True)
    assert "\x1b[" in coloured
    plain = page_text(PAGE)
    assert "\x1b" not in plain
    assert "≠ DIFFERS" in plain


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_neither_moves_the_cursor_nor_is_read_as_markup(text: str) -> None:
    shown = page_text(page_of(text), width=400)
    assert not set(shown) & {"\x1b", "\x07", "\x00", "\r", "\u202e"}
    if text.startswith("[bold"):
        assert "[bold red]markup[/]" in shown


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_own_sign(verdict: Verdict) -> None:
    assert len(set(SIGNS.values())) == len(Verdict)
    first = page_text(replace(PAGE, verdict=verdict)).splitlines()[0]
    assert first.startswith(f"{SIGNS[verdict]} {verdict}  Layer 23")
