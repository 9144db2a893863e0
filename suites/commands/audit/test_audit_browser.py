"""The audit panel in a real Chromium: filter, choose, sort, walk the map; light, dark, narrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.commands.audit.page import audit_page
from degarble.harness.report.page import provenance
from degarble.reports.page_html import page_html
from degarble.suites.commands.audit.audit_cases import sick_checkpoint
from degarble.suites.reports.test_page_browser import CONTRAST, TOO_WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.suites.commands.browser import Window

pytestmark = pytest.mark.needs("chromium", "selenium")

UNFOLD = "document.querySelectorAll('details').forEach((fold) => { fold.open = true; })"
SHOWN = """
return Array.from(document.querySelector('.catalogue').tBodies[0].rows)
  .filter((row) => row.checkVisibility())
  .map((row) => Array.from(row.cells, (cell) =>
    (cell.querySelector('summary') || cell).textContent.trim()));
"""
TYPED = """
const fields = document.querySelector('.tools').querySelectorAll('input, select');
const field = fields[arguments[0]];
field.value = arguments[1];
field.dispatchEvent(new Event('input'));
"""
COUNT = "return document.querySelector('.tools .count').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = audit(AuditRequest(sick_checkpoint(tmp_path_factory), loader="vllm:tp=2"))
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(audit_page(found, provenance("degarble audit x"))), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    from degarble.suites.commands.browser import chromium  # noqa: PLC0415  only with selenium

    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def window(started: Window, page: Path) -> Window:
    started.media()
    started.open(page)
    return started


def test_it_is_quiet_and_loads_nothing(window: Window, page: Path) -> None:
    assert window.complaints() == []
    others = [url for url in window.requests() if not url.startswith("data:image/svg+xml")]
    assert others == [page.as_uri()]


def test_findings_are_filtered_by_words_and_choices(window: Window) -> None:
    everything = window.run(SHOWN)
    assert window.run(COUNT) == f"{len(everything)} shown"
    window.run(TYPED, 0, "NOT_FINITE  w1")
    (row,) = window.run(SHOWN)
    assert row[0] == "error"
    assert row[2] == "numbers.scale_not_finite"
    assert window.run(COUNT) == f"1 of {len(everything)} shown"
    window.run(TYPED, 0, "")
    window.run(TYPED, 1, "warning")
    assert {row[0] for row in window.run(SHOWN)} == {"warning"}
    window.run(TYPED, 2, "experts")
    assert {tuple(row[:2]) for row in window.run(SHOWN)} <= {("warning", "experts")}
    window.run(TYPED, 1, "")
    window.run(TYPED, 2, "")
    assert window.run(SHOWN) == everything


def test_levels_are_sorted_by_weight_and_folds_by_their_names(window: Window) -> None:
    focus = "document.querySelectorAll('.catalogue .sorter')[arguments[0]].focus()"
    window.run(focus, 0)
    window.press("Enter", "\r")
    levels = [row[0] for row in window.run(SHOWN)]
    assert levels == sorted(levels, key=["error", "warning", "note"].index)
    window.press("Enter", "\r")
    assert [row[0] for row in window.run(SHOWN)] == levels[::-1]
    window.run(focus, 5)
    window.press("Enter", "\r")
    names = [row[5] for row in window.run(SHOWN)]
    assert names == sorted(names, key=str.lower)


def test_a_cell_of_the_map_leads_to_its_finding_even_behind_a_filter(window: Window) -> None:
    window.run(TYPED, 0, "nothing has this name")
    assert window.run(SHOWN) == []
    window.run("document.querySelector('.tones a[tabindex=\"0\"]').focus()")
    anchor = window.run("return document.activeElement.hash.slice(1)")
    window.press("Enter", "\r")
    waited = """const done = arguments[arguments.length - 1];
                setTimeout(() => {
                  const fold = document.getElementById(arguments[0]);
                  done([fold.open, fold.checkVisibility(), fold.getBoundingClientRect().top]);
                }, 900)  // the page scrolls smoothly"""
    is_open, is_seen, top = window.driver.execute_async_script(waited, anchor)
    assert (is_open, is_seen) == (True, True)
    assert 0 <= top < 900


def test_arrow_keys_walk_the_map(window: Window) -> None:
    window.run("document.querySelector('.tones a[tabindex=\"0\"]').focus()")
    before = window.run("return document.activeElement.hash")
    window.press("ArrowRight")
    assert window.run("return document.activeElement.closest('.tones') !== null")
    assert window.run("return document.activeElement.hash") != before


def test_every_cell_of_the_map_says_more_than_its_colour(window: Window) -> None:
    script = """return Array.from(document.querySelectorAll('.tones tbody td'),
                (cell) => [cell.className, cell.querySelector('.quiet').textContent])"""
    cells = {tuple(each) for each in window.run(script)}
    assert ("good", "nothing found") in cells
    assert ("none", "nothing there") in cells
    assert any(name == "bad" and text.startswith("error, ") for name, text in cells)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_has_contrast(window: Window, scheme: str) -> None:
    window.media(scheme=scheme)
    window.run(UNFOLD)
    assert window.run(CONTRAST) == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_runs_out_of_the_window(window: Window, width: int) -> None:
    window.media(width=width)
    window.run(UNFOLD)
    assert window.run(TOO_WIDE, width) == []


def test_the_map_of_61_layers_needs_no_scrolling_on_a_desk(window: Window) -> None:
    script = """
    const table = document.querySelector('.tones');
    table.classList.remove('few');
    for (const row of table.rows) while (row.cells.length < 64) {
      const cell = row.cells[row.cells.length - 1].cloneNode(true);
      if (cell.tagName === 'TH') cell.textContent = '60';
      row.append(cell);
    }
    const region = table.closest('.scroll');
    return region.scrollWidth - region.clientWidth;
    """
    assert window.run(script) <= 0


def test_on_paper_there_are_no_tools_and_everything_is_unfolded(window: Window) -> None:
    window.media("print", "light", 718)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") == 0
    assert window.run("return getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert window.run("return document.documentElement.scrollWidth") <= 718
