"""The replay and text panels in a real Chromium: click, keys, tabs, dark, narrow, paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.reports.page_html import page_html
from degarble.suites.reports.page_cases import HOSTILE
from degarble.suites.reports.replay_cases import replay_page
from degarble.suites.reports.test_page_browser import CONTRAST, TOO_WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from degarble.suites.commands.browser import Window

pytestmark = pytest.mark.needs("chromium", "selenium")

SHOWN = """
return Array.from(document.querySelectorAll('.look'))
  .filter((look) => look.checkVisibility())
  .map((look) => look.getAttribute('aria-label'));
"""
FOCUSED = "return document.activeElement.id || document.activeElement.textContent"
VISIBLE_TABS = """
return Array.from(document.querySelectorAll('.tab'))
  .filter((view) => view.checkVisibility()).map((view) => view.querySelector('h3').textContent);
"""
SICK = "layers.2.ffn.experts.w2.out"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    from degarble.suites.commands.browser import chromium  # noqa: PLC0415  only with selenium

    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page_html(replay_page()), encoding="utf-8")
    return path


@pytest.fixture
def window(started: Window, page: Path) -> Window:
    started.media()
    started.open(page)
    return started


def settled(window: Window, script: str) -> Any:
    """What a script returns when an address has been followed."""
    waiting = "const done = arguments[arguments.length - 1]; setTimeout(() => done("
    inner = f"(() => {{ {script} }})()"
    return window.driver.execute_async_script(f"{waiting}{inner}), 120)")


def test_it_is_quiet_and_loads_nothing(window: Window, page: Path) -> None:
    assert window.complaints() == []
    others = [url for url in window.requests() if not url.startswith("data:image/svg+xml")]
    assert others == [page.as_uri()]


def test_a_click_shows_one_close_look_and_marks_its_cell(window: Window) -> None:
    assert window.run(SHOWN) == [SICK]  # where it began is open from the start
    window.run("document.querySelector('.judged tbody tr:nth-child(2) td:nth-child(3) a').click()")
    assert settled(window, SHOWN) == ["layers.1.attn.norm.out"]
    asked = "return document.querySelectorAll('.judged td.asked').length"
    assert window.run(asked) >= 1
    text = window.run("return document.querySelector('.look:target').innerText")
    for word in ("Cosine, candidate and twin", "0x3f80", "by position", "How the budget comes"):
        assert word in text


def test_the_keyboard_walks_the_map_opens_a_look_and_comes_back(window: Window) -> None:
    window.run("document.querySelector('.judged a[tabindex=\"0\"]').focus()")
    window.press("ArrowDown")
    cell = "return document.activeElement.closest('td').cellIndex"
    window.press("ArrowDown")
    window.press("ArrowLeft")
    at = window.run(cell)
    window.press("Enter", "\r")
    look = settled(window, FOCUSED)
    assert look.startswith("look-")
    window.press("Escape")
    assert window.run(cell) == at
    assert window.run("return document.activeElement.hash") == f"#{look}"


def test_tabs_obey_arrow_keys_and_tell_a_screen_reader(window: Window) -> None:
    assert window.run(VISIBLE_TABS) == ["Difference in budgets"]
    window.run("document.querySelector('[role=tab]').focus()")
    window.press("ArrowRight")
    assert window.run(VISIBLE_TABS) == ["Cosine: candidate and twin"]
    chosen = "return document.querySelectorAll('[role=tab][aria-selected=true]').length"
    assert window.run(chosen) == 1
    window.press("ArrowLeft")
    window.press("ArrowLeft")
    assert window.run(VISIBLE_TABS) == ["Cosine: twin and BF16"]
    named = """return Array.from(document.querySelectorAll('[role=tabpanel]'),
      (view) => document.getElementById(view.getAttribute('aria-labelledby')).textContent)"""
    assert window.run(named)[0] == "Difference in budgets"


def test_every_cell_says_more_than_its_colour(window: Window) -> None:
    script = """return Array.from(document.querySelectorAll('.judged tbody td'),
      (cell) => [cell.className, cell.textContent])"""
    cells = window.run(script)
    assert ["h7 is-bad", "×17,210, differs"] in [
        [name.replace(" asked", ""), t] for name, t in cells
    ]
    assert any("is-warning" in name and "undecided" in text for name, text in cells)
    assert all(text.strip() for _, text in cells)
    drawn = "return Array.from(document.querySelectorAll('svg.profile'), (s) => s.ariaLabel)"
    assert all(window.run(drawn))


def test_where_texts_part_is_underlined_and_said(window: Window) -> None:
    parts = window.run(
        "return Array.from(document.querySelectorAll('.apart'), (part) => part.textContent)"
    )
    assert parts == [" was", "plain"]
    style = "return getComputedStyle(document.querySelector('.apart')).textDecorationLine"
    assert window.run(style) == "underline"
    assert "(from here they part:)" in window.run("return document.body.textContent")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_has_contrast(window: Window, scheme: str) -> None:
    window.media(scheme=scheme)
    for view in range(4):
        window.run("document.querySelectorAll('[role=tab]')[arguments[0]].click()", view)
        assert window.run(CONTRAST) == []


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_runs_out_of_the_window(window: Window, width: int) -> None:
    window.media(width=width)
    window.run("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert window.run(TOO_WIDE, width) == []


def test_paper_has_all_maps_and_the_look_at_the_origin_only(window: Window) -> None:
    window.run("location.hash = '#look-4'")
    window.media("print", "dark", 718)
    window.run("dispatchEvent(new Event('beforeprint'))")
    assert len(window.run(VISIBLE_TABS)) == 4
    assert window.run(SHOWN) == [SICK]
    tablist = "return getComputedStyle(document.querySelector('[role=tablist]')).display"
    assert window.run(tablist) == "none"
    assert window.run("return document.documentElement.scrollWidth") <= 718


def test_hostile_words_stay_words(started: Window, tmp_path: Path, page: Path) -> None:
    count = "return document.querySelectorAll('*').length"
    started.media()
    started.open(page)
    elements = started.run(count)
    for number, text in enumerate(HOSTILE):
        path = tmp_path / f"{number}.html"
        path.write_text(page_html(replay_page(text)), encoding="utf-8")
        started.open(path)
        assert started.run(count) == elements, text
        assert started.complaints() == []
        assert started.run("return document.title").startswith("DIFFERS · ")
