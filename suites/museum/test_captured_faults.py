"""Random faults in captured runs: a replay gives what was captured, and a fault is found in it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.suites.commands.calls import call
from degarble.suites.house.repository import ROOT
from degarble.suites.museum.random_faults.answers import judged
from degarble.suites.museum.random_faults.captured import CapturedCalls, CapturedStage, replaying

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

SMALL = ROOT / "references/tiny/v1/v32"


def test_a_replay_gives_what_was_captured_and_computes_the_rest() -> None:
    x, out, weight = torch.ones(2, 3), torch.full((2, 3), 2.5), object()

    def doubled(inputs: Mapping[str, Tensor], weights: Mapping[str, object]) -> dict[str, Tensor]:
        del weights
        return {"out": inputs["x"] * 2, "state": inputs["x"]}

    captured = CapturedCalls((({"x": x}, {"out": out}),))
    replayed = replaying(captured, {"w": weight}, doubled)
    made = replayed({"x": x.double()}, {"w": weight})
    assert made["out"] is out
    assert torch.equal(made["state"], x.double())
    assert torch.equal(replayed({"x": x + 1}, {"w": weight})["out"], (x + 1) * 2)
    assert torch.equal(replayed({"x": x}, {"w": object()})["out"], x * 2)


@pytest.mark.slow
def test_a_fault_planted_into_a_capture_is_placed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = ("capture", SMALL, "--out", tmp_path / "v32", "--prompt", "the old fox sees a tree")
    assert call(capsys, *line, "--max-new-tokens", "3").status == 0
    stage = CapturedStage.open(tmp_path / "v32", SMALL)
    assert stage.replayed() == 1
    assert not stage.localised(stage.healthy).origins
    answer = judged(stage, [stage.drawn(random.Random("a captured fault"))])
    assert not answer.elsewhere
    assert all(each.placed for each in answer.answers if each.counts)
