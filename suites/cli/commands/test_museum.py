from __future__ import annotations

import json
from typing import TYPE_CHECKING

from degarble.harness.engine.faults.registry import FAULTS
from degarble.suites.cli.calls import call

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_list_has_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    result = call(capsys, "faults", "list")
    assert result.status == 0
    assert [name for name in FAULTS if name not in result.out] == []


def test_the_list_as_a_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments in (["--json", "faults", "list"], ["faults", "list", "--json", "-"]):
        result = call(capsys, *arguments)
        assert [fault["id"] for fault in result.document["faults"]] == list(FAULTS)
    file = tmp_path / "faults.json"
    assert call(capsys, "faults", "list", "--json", file).status == 0
    assert json.loads(file.read_text(encoding="utf-8"))["schema"] == 1


def test_an_unwritable_file_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = call(capsys, "faults", "list", "--json", tmp_path / "none" / "a.json")
    assert result.status == 2
    assert "a.json" in result.err
