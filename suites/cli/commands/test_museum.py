from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.museum import museum
from degarble.harness.museum.museum import Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from pathlib import Path

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
        found = PlantOutcome(
            "M10.nibble_order", W2, "a way", "a case", 9.0, place, CauseAnswer.FIRST
        )
        return Museum((found,), (), ())

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
