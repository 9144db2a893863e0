from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.cli.commands import museum as command
from degarble.harness.report.page import page_from_json
from degarble.suites.commands.calls import call
from degarble.suites.museum.demo_cases import whole_story

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.museum.demo import Demonstration


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tell the story that suites share; give the faults that were asked for."""
    asked: list[str] = []

    def tell(fault: ModelFault, step: Callable[[str], None]) -> Demonstration:
        asked.append(fault.id)
        for number in range(command.STEPS):
            step(str(number))
        return whole_story()

    monkeypatch.setattr("degarble.harness.museum.demo.run_demo", tell)
    return asked


def test_the_whole_story(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, told: list[str]
) -> None:
    result = call(capsys, "demo", "--out", tmp_path)
    assert (result.status, result.err, told) == (0, "", ["M10.nibble_order"])
    (html,) = tmp_path.glob("*.html")
    assert result.out.endswith(f"Open the report: {html}\n")
    assert "degarble demo --fault M10.nibble_order" in result.out
    assert "found and named" in result.out
    page = page_from_json(html.with_suffix(".json").read_text(encoding="utf-8"))
    assert page.findings[0].origin.confidence == 1.0
    names = {path.name.removeprefix(html.stem) for path in tmp_path.iterdir()}
    assert names == {".html", ".json", "-outputs.csv", "-budgets.csv", "-replay.json"}


@pytest.mark.usefixtures("told")
def test_the_story_as_a_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = call(capsys, "--json", "demo", "--fault", "M10.nibble_order", "--out", tmp_path)
    assert result.status == 0
    document = result.document
    assert document["schema"] == 1
    assert document["holds"] is True
    assert (document["verdict"], document["healthy"]) == ("DIFFERS", "AGREES")
    (origin,) = document["origins"]
    assert (origin["fault"], origin["layer"]) == ("M10.nibble_order", 3)
    assert origin["component"] == "ffn.experts.w2"
    assert origin["reproducer"] == "degarble demo --fault M10.nibble_order"
    sick = next(e for e in document["cosines"] if e["site"] == "layers.3.ffn.experts.w2.out")
    assert sick["cosine"] < 0.999
    assert sick["budgets"] > 1
    assert document["texts"]["healthy"] != document["texts"]["planted"]


@pytest.mark.usefixtures("told")
def test_a_folder_cannot_repaint_the_terminal_and_quiet_means_quiet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = call(capsys, "demo", "--out", tmp_path / "a\x1b[2J\udcff")
    assert result.status == 0
    assert "\x1b[2J" not in result.out
    assert "a\\u001b[2J\\udcff/" in result.out
    again = call(capsys, "--quiet", "demo", "--out", tmp_path / "quiet")
    assert (again.status, again.out, again.err) == (0, "", "")


def test_an_empty_fault_is_not_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "demo", "--fault", "")
    assert result.status == 2
    assert result.err.startswith("degarble: REFUSED: fault = ''")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_unwritable_place_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    monkeypatch.setattr("degarble.harness.museum.demo.run_demo", pytest.fail)
    (tmp_path / "file").touch()
    result = call(capsys, "demo", "--out", tmp_path / place)
    assert result.status == 2
    assert result.err.startswith("degarble: REFUSED: --out = ")


def test_a_story_that_does_not_hold_is_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damage is still localised, but not named."""
    story = whole_story()
    found = tuple(replace(each, diagnosed=None) for each in story.sick.found)
    blind = replace(story, sick=replace(story.sick, found=found))
    monkeypatch.setattr("degarble.harness.museum.demo.run_demo", lambda *_: blind)
    result = call(capsys, "demo", "--out", tmp_path)
    assert result.status == 1
    assert "the fault planted on purpose is not named" in result.out
    assert "No known fault explains this" in result.out
    assert "layers.3.ffn.experts.w2.out" in result.out


def test_the_module_does_not_import_torch_at_its_top() -> None:
    assert not hasattr(command, "tell_story")
