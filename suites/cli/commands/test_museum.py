"""`degarble demo` and `degarble faults` as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.cli.commands import museum as command
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum import museum
from degarble.harness.museum.museum import Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.report.page import page_from_json
from degarble.suites.commands.calls import call
from degarble.suites.engine.adopted.test_files import verdict_of_product
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


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [
        ("nibble_ORDER", {"M10.nibble_order"}),
        ("m37.s[a-f]*", {"M37.scales"}),
        ("a quantiser's body", {"M41.quantiser_empty"}),
    ],
)
def test_faults_are_listed_by_a_pattern(
    capsys: pytest.CaptureFixture[str], pattern: str, ids: set[str]
) -> None:
    result = call(capsys, "faults", "list", pattern, "--json")
    assert {row["id"] for row in json.loads(result.out)["faults"]} == ids


def test_a_pattern_without_a_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "faults", "list", "nibbel")
    assert result.status == 2
    assert "PATTERN = 'nibbel'" in result.err


@pytest.mark.slow
def test_the_whole_story(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, told: list[str]
) -> None:
    result = call(capsys, "demo", "--out", tmp_path)
    assert (result.status, result.err, told) == (0, "", ["M10.nibble_order"])
    (html,) = tmp_path.glob("*.html")
    report, last = result.out.splitlines()[-2:]
    assert report == f"Open the report: {html}"
    assert last.startswith("✓ THE TOOL WORKS")
    assert "degarble demo --fault M10.nibble_order" in result.out
    assert "found and named" in result.out
    page = page_from_json(html.with_suffix(".json").read_text(encoding="utf-8"))
    assert page.findings[0].origin.confidence > 0.9
    names = {path.name.removeprefix(html.stem) for path in tmp_path.iterdir()}
    assert names == {".html", ".json", "-outputs.csv", "-budgets.csv", "-replay.json"}


@pytest.mark.slow
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
    demonstration = whole_story()
    origins = tuple(replace(origin, diagnosed=None) for origin in demonstration.sick.origins)
    blind = replace(demonstration, sick=replace(demonstration.sick, origins=origins))
    monkeypatch.setattr("degarble.harness.museum.demo.run_demo", lambda *_: blind)
    result = call(capsys, "demo", "--out", tmp_path)
    assert result.status == 1
    assert "the fault planted on purpose is not named" in result.out
    assert "No known fault explains this" in result.out
    assert "layers.3.ffn.experts.w2.out" in result.out


def test_the_module_does_not_import_torch_at_its_top() -> None:
    assert not hasattr(command, "tell_story")


W2 = "layers.1.ffn.experts.w2"


def test_the_list_has_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "faults", "list")
    assert result.status == 0
    assert [name for name in MODEL_FAULTS if name not in result.out] == []


def test_the_list_as_a_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["--json", "faults", "list"], ["faults", "list", "--json", "-"]):
        result = call(capsys, *arguments)
        faults = result.document["faults"]
        assert [fault["id"] for fault in faults] == list(MODEL_FAULTS)
        assert all(fault["components"] for fault in faults)
    file = tmp_path / "faults.json"
    assert call(capsys, "faults", "list", "--json", file).status == 0
    assert json.loads(file.read_text(encoding="utf-8"))["schema"] == 1


def test_an_unwritable_file_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = call(capsys, "faults", "list", "--json", tmp_path / "none" / "a.json")
    assert result.status == 2
    assert "a.json" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["M10.nible_order"], "M10.nibble_order"),
        (["M10", "M100"], "M10"),
        (["M10", "--whole"], "--whole"),
    ],
)
def test_what_cannot_be_planted_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    result = call(capsys, "faults", "run", *arguments)
    assert result.status == 2
    assert result.out == ""
    assert expected in result.err


@pytest.mark.parametrize(
    ("place", "status", "verdict"),
    [(PlaceAnswer.EXACT, 0, "AGREES"), (PlaceAnswer.NOWHERE, 1, "DIFFERS")],
)
def test_a_run_is_reported_and_a_miss_decides_the_status(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: PlaceAnswer,
    status: int,
    verdict: str,
) -> None:
    asked: list[object] = []

    def planted(faults: tuple[str, ...], extent: object, *_: object) -> Museum:
        asked.append((faults, extent))
        outcome = PlantOutcome(
            "M10.nibble_order", W2, "a way", "a case", 9.0, place, CauseAnswer.FIRST
        )
        return Museum((outcome,), (), ())

    monkeypatch.setattr(museum, "run_museum", planted)
    result = call(capsys, "faults", "run", "M10.nibble_order")
    assert result.status == status
    assert ("MISSED M10.nibble_order" in result.out) == bool(status)
    assert asked == [(("M10.nibble_order",), museum.CHOSEN)]
    document = call(capsys, "--json", "faults", "run").document
    assert document["verdict"] == verdict
    assert document["plants"][0]["component"] == W2
    call(capsys, "faults", "run", "--whole")
    assert asked[1:] == [
        (tuple(MODEL_FAULTS), museum.PUBLISHED),
        (tuple(MODEL_FAULTS), museum.WHOLE),
    ]


def test_a_description_is_adopted_shown_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, folder = tmp_path / "verdict.json", tmp_path / "faults"
    verdict.write_text(verdict_of_product())
    asked = ("faults", "adopt", verdict, "--to", folder, "--id", "adopted.row_5")
    assert "Would write" in call(capsys, *asked, "--dry-run").out
    assert not folder.exists()
    assert call(capsys, *asked).status == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "adopted.row_5.json", "adopted.row_5.md",
    ]  # fmt: skip
    shown = call(capsys, "--json", "faults", "show", "adopted.row_5", "--faults", folder).document
    assert shown["fault"]["origin"]["component"] == "gemm"
    monkeypatch.setenv("DEGARBLE_FAULTS", str(folder))
    listed = call(capsys, "--json", "faults", "list").document["faults"]
    assert listed[-1]["id"] == "adopted.row_5"
    assert listed[-1]["origin"]["component"] == "gemm"
    assert "row 5 of its weight" in call(capsys, "faults", "show", "adopted.row_5").out
    assert "M10" in call(capsys, "faults", "show", "M10.nibble_order").out


def test_bad_faults_are_refused_with_their_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text('{"degarble_fault": 1}')
    for arguments in (("list",), ("show", "M10.nibble_order"), ("run", "M10.nibble_order")):
        result = call(capsys, "faults", *arguments, "--faults", tmp_path)
        assert result.status == 2
        assert "bad.json" in result.err
    result = call(capsys, "faults", "list", "--faults", tmp_path / "none")
    assert result.status == 2
    assert "degarble faults adopt" in result.err
    assert call(capsys, "faults", "adopt", tmp_path / "bad.json").status == 2
