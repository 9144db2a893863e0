"""Captures over ranks: joined they have the sites of one rank, agree, and name a planted fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.ranks import plan_over
from degarble.suites.capture.capture_rank_faulty import DAMAGED
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.commands.calls import call
from degarble.suites.museum.torchrun import run_ranks
from degarble.suites.serve.talking_cases import CONFIGS, write_tokenizer
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2


@pytest.fixture(scope="module", params=["v4", pytest.param("v32", marks=pytest.mark.slow)])
def line(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line that captures a model which two ranks can share; `--out` is missing."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    if request.param == "v4":
        config = replace(config, moe_intermediate_size=128 * RANKS)
    write_checkpoint(folder / "model", Synthetic(config, "bf16", seed=3))
    write_tokenizer(folder / "model")
    (folder / "prompts.txt").write_text("w7 w8 w9\nw9\n")
    return ["capture", str(folder / "model"), "--prompts", str(folder / "prompts.txt")]


def _shapes(capture: Capture) -> list[object]:
    return [
        (call.step, call.component, {n: k.shape for n, k in kept.items()})
        for call in capture.calls
        for kept in (call.inputs, call.outputs)
    ]


def test_ranks_make_one_capture_that_agrees(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    over, alone = tmp_path / "over", tmp_path / "alone"
    run_ranks("degarble.harness.cli.main", RANKS, *line, "--out", str(over))
    assert call(capsys, *line, "--out", alone).status == 0
    joined, single = Capture.open(over), Capture.open(alone)
    assert joined.facts["ranks"] == RANKS
    assert "ranks_apart" not in joined.facts
    assert _shapes(joined) == _shapes(single)
    assert joined.steps[0] == single.steps[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["alone", "over"]
    done = call(capsys, "check", over, "--reference", line[1])
    assert done.status == 0, done.out


@pytest.mark.slow
def test_a_part_that_every_rank_loads_is_named(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "capture"
    faulty = "degarble.suites.capture.capture_rank_faulty"
    run_ranks(faulty, RANKS, *line, "--out", str(out))
    done = call(capsys, "--json", "check", out, "--reference", line[1])
    assert done.status == 1
    found = [f"layers.{each['layer']}.{each['component']}" for each in done.document["origins"]]
    assert found == [DAMAGED]


def test_a_cut_that_engines_pad_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="moe_intermediate_size"):
        plan_over(TINY_V4, RANKS)


@pytest.mark.parametrize("more", [("--amax-only",), ("--patch", "prompts.txt")])
def test_what_ranks_cannot_do_is_refused(
    line: list[str],
    more: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("")
    done = call(capsys, *line, "--out", tmp_path / "capture", *more)
    assert done.status == 2
    assert more[0] in done.err
    assert not (tmp_path / "capture").exists()
