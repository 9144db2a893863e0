"""`degarble capture --fault`: the fault is planted where it was named, found there, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import DegarbleError
from degarble.harness.commands.plant import planting
from degarble.harness.inference.model import open_model
from degarble.suites.commands.calls import call
from degarble.suites.house.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SMALL = ROOT / "references/tiny/v1/v4"
PLACE = "layers.1.ffn.experts.w2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("M43.whole", "ID@COMPONENT"),
        ("M43.hole@layers.0.attn.wq_a", "M43.whole"),
        ("M43.whole@layers.9.attn.wq_a", "component of --fault"),
        ("M43.one_expert@layers.0.attn.wq_a", "degarble faults show M43.one_expert"),
        ("M10.activation_order@", "ID@COMPONENT"),
    ],
)
def test_a_fault_that_cannot_be_there_is_refused(text: str, words: str) -> None:
    with pytest.raises(DegarbleError, match=words), open_model(SMALL) as model:
        planting(text)(model)


@pytest.mark.slow
def test_a_planted_fault_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ("capture", SMALL, "--out", tmp_path / "run", "--prompt", "anna paints blue")
    done = call(capsys, *line, "--fault", f"M43.whole@{PLACE}", "--max-new-tokens", "1")
    assert done.status == 0, done.err
    assert "Patched by the fault M43.whole, a gain of" in done.out
    assert PLACE in done.out
    found = call(capsys, "check", tmp_path / "run")
    assert found.status == 1
    assert "M43.whole" in found.out
    assert "Built-in reference" not in found.out
