"""The page in a real Chromium: it runs, loads nothing, obeys the keyboard, and text stays text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.report.blocks import (
    Code,
    Column,
    ColumnKind,
    Details,
    HeatMap,
    HeatScale,
    Sentence,
    Table,
)
from degarble.harness.report.page import Page, Panel, PanelKind
from degarble.harness.report.verdict import Verdict
from degarble.reports.page_html import page_html
from degarble.suites.reports.page_cases import HOSTILE, page_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.suites.commands.browser import Window

pytestmark = pytest.mark.needs("chromium", "selenium")

TABLE = Table(
    "Sortable",
    (Column("name"), Column("gain", ColumnKind.NUMBER), Column("note")),
    (
        ("w10", 2.0, "b"),
        ("w9", math.inf, "a"),
        ("w1", None, "c"),
        ("w2", -1.5, "d"),
        ("w3", math.nan, "e"),
        ("w4", 1e6, "f"),
    ),
)
MAP = HeatMap(
    "Map",
    "layer",
    "part",
    ("0", "1"),
    ("a", "b", "c"),
    ((0.0, None, 0.5), (1.0, 0.2, 0.1)),
    HeatScale(0, 1),
    (("", "", "fold"), ("fold", "fold", "fold")),
)
FOLD = Details("Why", (Details("Deeper", (Sentence("the reason"),), "fold"),))
PAGE = replace(
    page_of("plain"),
    sentence="One layer differs.",
    panels=(Panel(PanelKind.AUDIT, "s", Verdict.DIFFERS, (TABLE, MAP, FOLD, Code("run me"))),),
)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    from degarble.suites.commands.browser import chromium  # noqa: PLC0415  only with selenium

    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _open(window: Window, tmp_path: Path, page: Page = PAGE) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_html(page), encoding="utf-8")
    window.media()
    window.open(path)


def _column(window: Window, index: int = 0) -> list[str]:
    script = """return Array.from(document.querySelectorAll('table.data tbody tr'),
                row => row.cells[arguments[0]].textContent)"""
    cells: list[str] = window.run(script, index)
    return cells


def test_it_loads_quietly_and_requests_nothing_else(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    assert window.complaints() == []
    others = [url for url in window.requests() if not url.startswith("data:image/svg+xml")]
    assert others == [(tmp_path / "page.html").as_uri()]


def test_a_page_that_breaks_the_rules_is_caught(window: Window, tmp_path: Path) -> None:
    """A page that breaks the rules is caught: else the suite above proves nothing."""
    path = tmp_path / "bad.html"
    text = page_html(PAGE).replace("<main>", '<img src="missing.png"><script>boom()</script><main>')
    path.write_text(text, encoding="utf-8")
    window.open(path)
    complaints = "\n".join(window.complaints())
    assert "Content Security Policy" in complaints
    without = tmp_path / "worse.html"
    start = text.index("<meta http-equiv")
    without.write_text(text[:start] + text[text.index(">", start) + 1 :], encoding="utf-8")
    window.open(without)
    assert any(url.endswith("missing.png") for url in window.requests())
    assert any("boom" in complaint for complaint in window.complaints())


def test_the_verdict_is_on_the_first_screen(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    box = window.run("return document.querySelector('h1').getBoundingClientRect().toJSON()")
    assert 0 < box["top"] < box["bottom"] < 500
    assert window.run("return document.querySelector('h1').textContent") == "One layer differs."
    assert "DIFFERS" in window.run("return document.querySelector('#verdict').innerText")
    finding = window.run(
        "return document.querySelector('.finding').getBoundingClientRect().toJSON()"
    )
    assert finding["bottom"] < 900  # origin, cause, evidence and command without scrolling


def test_tables_sort_by_keyboard(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    focus = "document.querySelectorAll('table.data .sorter')[arguments[0]].focus()"
    order = "return document.querySelectorAll('table.data thead th')[1].getAttribute('aria-sort')"
    window.run(focus, 1)
    window.press("Enter", "\r")
    assert _column(window) == ["w9", "w4", "w10", "w2", "w1", "w3"]
    assert window.run(order) == "descending"
    window.press("Enter", "\r")
    assert _column(window) == ["w2", "w10", "w4", "w9", "w1", "w3"]
    assert window.run(order) == "ascending"
    window.run(focus, 0)
    window.press("Enter", "\r")
    assert _column(window) == ["w1", "w2", "w3", "w4", "w9", "w10"]
    assert window.run(order) is None


def test_arrow_keys_walk_a_heat_map_and_enter_unfolds_the_reason(
    window: Window, tmp_path: Path
) -> None:
    _open(window, tmp_path)
    window.run("document.querySelector('table.heat a[tabindex=\"0\"]').focus()")
    where = """const cell = document.activeElement.closest('td');
               return [cell.parentElement.rowIndex, cell.cellIndex]"""
    assert window.run(where) == [1, 3]
    window.press("ArrowDown")
    window.press("ArrowLeft")
    assert window.run(where) == [2, 2]
    assert (
        window.run("return document.querySelectorAll('table.heat a[tabindex=\"0\"]').length") == 1
    )
    assert window.run("return document.querySelectorAll('details[open]').length") == 0
    window.press("Enter", "\r")
    waited = """const done = arguments[arguments.length - 1];
                setTimeout(() => done(document.querySelectorAll('details[open]').length), 50)"""
    assert window.driver.execute_async_script(waited) == 2


def test_tab_reaches_the_skip_link_first_and_focus_is_visible(
    window: Window, tmp_path: Path
) -> None:
    _open(window, tmp_path)
    window.press("Tab")
    assert window.run("return document.activeElement.className") == "skip"
    style = "return getComputedStyle(document.activeElement).outlineStyle"
    assert window.run(style) == "solid"
    window.press("Enter", "\r")
    window.press("Tab")
    script = "return document.querySelector('#verdict').compareDocumentPosition"
    assert window.run(f"{script}(document.activeElement) & 4") == 4  # behind the verdict


def test_dark_mode_follows_the_system_and_the_button(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = window.run(ground)
    window.media(scheme="dark")
    dark = window.run(ground)
    assert light != dark
    window.run("document.getElementById('theme').click()")
    assert window.run(ground) == light
    window.run("document.getElementById('theme').click()")
    assert window.run(ground) == dark


CONTRAST = """
const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ground = (element) => {
  for (; element; element = element.parentElement) {
    const colour = parse(getComputedStyle(element).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const low = new Set();
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
  if (element.closest('script, style, .sprite')) continue;
  const pair = [parse(getComputedStyle(element).color), ground(element)].map(luminance);
  const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
  if (ratio < 4.5) low.add(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
}
return Array.from(low);
"""


def test_the_contrast_check_detects_faint_text(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    window.run("document.querySelector('h1').style.color = '#999'")
    assert window.run(CONTRAST) == ["H1. 2.85"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("verdict", Verdict)
def test_every_word_has_contrast(
    window: Window, tmp_path: Path, scheme: str, verdict: Verdict
) -> None:
    """4.5 to 1, which WCAG 2.2 AA asks of text."""
    shades = HeatMap(
        "All shades",
        "r",
        "c",
        ("0",),
        tuple(str(index) for index in range(9)),
        (tuple(index / 8.9 for index in range(9)),),
        HeatScale(0, 1),
    )
    page = page_of("plain", verdict)
    page = page.with_panel(Panel(PanelKind.TEXT, "s", verdict, (shades,)))
    _open(window, tmp_path, page)
    window.media(scheme=scheme)
    window.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert window.run(CONTRAST) == []


TOO_WIDE = """
if (document.documentElement.scrollWidth <= arguments[0]) return [];
return Array.from(document.querySelectorAll('body *'))
  .filter((element) => element.getBoundingClientRect().right > arguments[0] + 0.5)
  .filter((element) => !element.closest('.scroll, pre, nav'))
  .map((element) => `${element.tagName}.${element.className}`);
"""


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_nothing_runs_out_of_the_window(window: Window, tmp_path: Path, width: int) -> None:
    long = replace(page_of("a_long_word_" * 20), panels=PAGE.panels)
    for page in (PAGE, long, page_of("plain")):
        _open(window, tmp_path, page)
        window.media(width=width)
        assert window.run(TOO_WIDE, width) == []


def test_a_sentence_in_a_table_stays_low_on_a_narrow_screen(window: Window, tmp_path: Path) -> None:
    names = ("check", "level", "question", "compared", "nats", "largest", "limit", "KL", "result")
    words = "Does a prompt give the same whole and in pieces?"
    row = tuple(words if name == "question" else name for name in names)
    panel = Panel(
        PanelKind.PROBE, "s", Verdict.AGREES, (Table("T", tuple(map(Column, names)), (row,)),)
    )
    path = tmp_path / "page.html"
    path.write_text(page_html(replace(page_of("plain"), panels=(panel,))), encoding="utf-8")
    window.media(width=500)
    window.open(path)
    lines = """const cell = document.querySelector('td.long'), style = getComputedStyle(cell);
        const [height, line] = [style.height, style.lineHeight].map(parseFloat);
        return height / line"""
    assert window.run(lines) < 3.5


def test_on_paper_everything_is_unfolded_and_light(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    window.media("print", "dark", 718)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert window.run("return document.querySelectorAll('details:not([open])').length") == 0
    assert window.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    hidden = "return getComputedStyle(document.getElementById('theme')).display"
    assert window.run(hidden) == "none"


def test_a_picture_grows_by_click_and_by_keyboard(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path, page_of("plain"))
    high = "return document.querySelector('svg.matrix').getBoundingClientRect().height"
    pressed = "return document.querySelector('.zoom').getAttribute('aria-pressed')"
    small = window.run(high)
    window.run("document.querySelector('.zoom').focus()")
    window.press("Enter", "\r")
    assert window.run(high) > 2 * small
    assert window.run(pressed) == "true"
    window.run("document.querySelector('svg.matrix').dispatchEvent(new Event('click'))")
    assert window.run(high) == small
    assert window.run(pressed) == "false"
    named = "return document.querySelector('.zoom').getAttribute('aria-label')"
    assert window.run(named) == "Larger: plain"


def test_a_cell_says_what_it_is_about_under_the_pointer(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path, page_of("plain"))
    over = """const cell = document.querySelector('table.judged tbody td');
              cell.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
              return cell.title"""
    assert window.run(over) == "plain, plain: 0.500"


def test_copying_leaves_the_command_selected_or_copied(window: Window, tmp_path: Path) -> None:
    _open(window, tmp_path)
    clicked = """const done = arguments[arguments.length - 1];
                 const button = document.querySelector('.copy');
                 button.click();
                 setTimeout(() => done(button.textContent), 200)"""
    assert window.driver.execute_async_script(clicked) in ("Copied", "Selected")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(window: Window, tmp_path: Path, text: str) -> None:
    _open(window, tmp_path, page_of("plain"))
    count = "return document.querySelectorAll('*').length"
    elements = window.run(count)
    _open(window, tmp_path, page_of(text))
    assert window.run(count) == elements
    assert window.run("return document.title").startswith("DIFFERS · ")
    assert window.complaints() == []
    assert all(url.startswith(("file:", "data:image/svg+xml")) for url in window.requests())
