"""A night's page in a real Chromium: the kernels that ran, sparklines; light, dark, narrow."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from typing import TYPE_CHECKING

import pytest

from degarble.harness.nightly import steps as closing
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.pages import write_night
from degarble.harness.nightly.steps import RAN
from degarble.harness.report.verdict import Verdict
from degarble.suites.reports.test_page_browser import CONTRAST, TOO_WIDE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from degarble.suites.commands.browser import Window

pytestmark = pytest.mark.needs("chromium", "selenium")

SPEED = "kernels.gemm_nvfp4"
FACTS = {"machine": "CPU: of a suite", "GPU 0 name": "NVIDIA H200",
         "GPU 0 driver_version": "580.1", "manifest": "sha256:" + "5a" * 32}  # fmt: skip
RESULTS = {
    "environment": StepResult(Verdict.AGREES, "NVIDIA H200; CPU: of a suite.", facts=FACTS),
    "kernels": StepResult(
        Verdict.DIFFERS,
        "1 of 2 kernels fail their suites.",
        rows=(("sm90_gemm_nvfp4", "DIFFERS", "2 of 5 cases fail, first test_tail[3]: 4 differ"),
              ("simt_rmsnorm", "AGREES", "47 cases agree with their definitions")),
    ),
    "captures": StepResult(
        Verdict.AGREES, "Captured.", facts={f"{RAN}attn.wq_a": "sm90_gemm_nvfp4 [128x128x128] x8"}
    ),
    "figures": StepResult(
        Verdict.AGREES,
        "1 kernel was timed.",
        values={"speed": {SPEED: 0.50}, "budgets": {"layers.3.ffn.experts.w2": 0.2}},
        rows=((SPEED, "measured", "50.0 % of cuBLAS, 310.0 us"),),
    ),
}  # fmt: skip
PANELS = "return Array.from(document.querySelectorAll('nav a'), (link) => link.textContent.trim())"
ROWS = """
return Array.from(document.querySelectorAll('tr'), (row) =>
  Array.from(row.cells, (cell) => cell.textContent.trim()).join(' '));
"""
SPARKS = """
return Array.from(document.querySelectorAll('svg.trend *'), (line) =>
  line.getBoundingClientRect().width).filter((width) => width > 20).length;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("night")
    config = NightConfig(folder, folder, folder, "2026-03-01", gpu=True, subject="tiny",
                  store=str(folder / "history.sqlite"))  # fmt: skip
    values = {"speed": {SPEED: 0.65}, "budgets": {"layers.3.ffn.experts.w2": 0.2}}
    healthy = {name: replace(result, verdict=Verdict.AGREES) for name, result in RESULTS.items()}
    for number in range(20):
        day = str(date(2026, 2, 1) + timedelta(days=number))
        before = healthy | {"figures": replace(healthy["figures"], values=values)}
        closing.history(replace(config, night=day, started=day), before)
    steps = [NightStep(name, lambda *_, each=result: each) for name, result in RESULTS.items()]
    night = Night(config, [*steps, NightStep("history", closing.history, all_before=True)])
    night.run()
    return write_night(night).page


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


def test_the_page_says_what_is_red_where_it_ran_and_what_each_kernel_did(window: Window) -> None:
    assert window.complaints() == []
    assert {"Kernels", "History"} <= set(window.run(PANELS))
    head = window.run("return document.querySelector('h1').textContent")
    assert head.startswith("kernels: 1 of 2 kernels fail their suites.")
    text = window.run("return document.body.innerText")
    assert "NVIDIA H200, driver 580.1; CPU: of a suite" in text
    rows = window.run(ROWS)
    for words in ("2 of 5 cases fail, first test_tail[3]: 4 differ", "50.0 % of cuBLAS, 310.0 us",
                  "attn.wq_a sm90_gemm_nvfp4 [128x128x128] x8"):  # fmt: skip
        assert any(words in row for row in rows), words


def test_the_history_draws_a_line_for_every_series_and_names_the_last_green_run(
    window: Window,
) -> None:
    assert window.run(SPARKS) >= 2
    text = window.run("return document.body.innerText")
    assert "2026-02-20" in text, "the last green night"
    assert SPEED in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_is_readable(window: Window, scheme: str, width: int) -> None:
    window.media(scheme=scheme, width=width)
    assert window.run(TOO_WIDE) == []
    assert window.run(CONTRAST) == []
