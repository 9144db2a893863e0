from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.cli.commands import demo as command
from degarble.harness.record.page_json import page_from_json
from degarble.suites.cli.calls import call

if TYPE_CHECKING:
    from pathlib import Path


def test_the_whole_story(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = call(capsys, "demo", "--out", tmp_path)
    assert result.status == 0
    assert result.err == ""
    (html,) = tmp_path.glob("*.html")
    assert result.out.endswith(f"Open the report: {html}\n")
    healthy = next(line for line in result.out.splitlines() if line.startswith("nothing"))
    assert "✓ AGREES" in healthy
    for fault in ("M10.nibble_order", "M11.read_unswizzled", "M01.inverse"):
        assert f"degarble demo --fault {fault}" in result.out
    page = page_from_json(html.with_suffix(".json").read_text(encoding="utf-8"))
    assert [finding.origin.confidence for finding in page.findings] == [1.0, 1.0, 1.0]


def test_one_fault_as_a_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = call(capsys, "--json", "demo", "--fault", "M02.missing", "--out", tmp_path)
    assert result.status == 0
    document = result.document
    assert document["schema"] == 1
    assert document["holds"] is True
    assert document["healthy"] == "AGREES"
    (origin,) = document["origins"]
    assert (origin["fault"], origin["layer"]) == ("M02.missing", 3)
    assert origin["reproducer"] == "degarble demo --fault M02.missing"
    assert len(document["cosines"]) == 2


def test_a_folder_cannot_repaint_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hostile = tmp_path / "a\x1b[2J\udcff"
    result = call(capsys, "demo", "--fault", "M01.inverse", "--out", hostile)
    assert result.status == 0
    assert "\x1b[2J" not in result.out
    assert "a\\u001b[2J\\udcff/" in result.out


def test_an_empty_fault_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "demo", "--fault", "")
    assert result.status == 2
    assert result.err.startswith("degarble: REFUSED: fault = ''")


def test_quiet_means_quiet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = call(capsys, "--quiet", "demo", "--fault", "M01.inverse", "--out", tmp_path)
    assert (result.status, result.out, result.err) == (0, "", "")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_unwritable_place_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    monkeypatch.setattr("degarble.harness.runs.demo.demo_weight", pytest.fail)
    (tmp_path / "file").touch()
    result = call(capsys, "demo", "--out", tmp_path / place)
    assert result.status == 2
    assert result.err.startswith("degarble: REFUSED: --out = ")


def test_a_story_that_does_not_hold_is_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no fault known, the damage is still found, but not named."""
    monkeypatch.setattr("degarble.harness.engine.packing_diagnosis.FAULTS", {})
    result = call(capsys, "demo", "--fault", "M10.nibble_order", "--out", tmp_path)
    assert result.status == 1
    assert "0 of 1 faults" in result.out
    assert "No known fault explains the codes" in result.out


def test_the_module_does_not_import_torch_at_its_top() -> None:
    assert not hasattr(command, "tell_story")


@pytest.mark.needs("chromium", "selenium")
def test_the_page_opens_in_a_browser(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from degarble.suites.reports.browser import chromium  # noqa: PLC0415  only with selenium

    assert call(capsys, "demo", "--out", tmp_path / "report").status == 0
    (html,) = (tmp_path / "report").glob("*.html")
    with chromium(tmp_path / "profile") as window:
        window.media()
        window.open(html)
        assert window.complaints() == []
        assert all(url.startswith(("file:", "data:image/svg+xml")) for url in window.requests())
        shown = window.run("return document.body.innerText")
        assert "3 of 3 faults planted on purpose were found and named." in shown
        second = "return document.querySelectorAll('.finding')[1].getBoundingClientRect().bottom"
        assert window.run(second) < 900  # two findings on the first screen
        window.media(width=390)
        assert window.run("return document.documentElement.scrollWidth") <= 390
