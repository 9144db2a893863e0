"""A night over ranks: who does what, without processes; and one real night of two ranks."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.files.reader import Capture
from degarble.harness.nightly import table as night_ranks
from degarble.harness.nightly.night import NightConfig, NightStep, StepResult
from degarble.harness.nightly.steps import captures
from degarble.harness.nightly.table import follow, lead, over_ranks
from degarble.harness.report.verdict import Verdict
from degarble.suites.checkpoint.reading_cases import TINY_V4
from degarble.suites.house.repository import ROOT
from degarble.suites.museum.torchrun import run_ranks
from degarble.suites.serve.talking_cases import write_tokenizer
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 2
GREEN = StepResult(Verdict.AGREES, "All is well.")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> deque[Any]:
    """What rank 0 says, in order; read again by whoever follows."""
    said: deque[Any] = deque()

    def told(word: Any = None) -> Any:
        if word is None:
            return said.popleft()
        said.append(json.loads(json.dumps(word)))
        return word

    monkeypatch.setattr(night_ranks, "broadcast_json", told)
    return said


@pytest.fixture
def asked(tmp_path: Path) -> NightConfig:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w7 w8")
    model = tmp_path / "model"
    return NightConfig(
        model, model, tmp_path / "out", "2026-11-22", repeats=2, ranks=RANKS, prompts=prompts
    )


def test_other_ranks_receive_what_a_step_reported(words: deque[Any]) -> None:
    assert lead("audit", lambda: GREEN) is GREEN
    assert follow("audit") == "AGREES: All is well."
    assert not words


@pytest.mark.usefixtures("words")
def test_a_crashed_step_leaves_no_rank_waiting() -> None:
    def crash() -> StepResult:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lead("audit", crash)
    assert follow("audit") == "no answer: see rank 0"


@pytest.mark.usefixtures("words")
def test_every_rank_captures_in_a_process_of_its_own(
    asked: NightConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[dict[str, str]] = []

    def child(line: list[str], **named: Any) -> Any:
        ran.append(named["env"])
        assert line[0] == sys.executable
        assert line[1:5] == ["-m", "degarble.harness.cli.main", "--quiet", "capture"]
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("degarble.harness.nightly.table.subprocess.run", child)
    monkeypatch.setattr(Capture, "open", lambda _: SimpleNamespace(facts={}))
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    result = lead("captures", lambda: step.run(asked, {}))
    assert result.facts["ranks"] == str(RANKS)
    assert [name for name, _, _ in result.rows] == ["run-1", "run-2"]
    first = list(ran)
    assert follow("captures").startswith("AGREES")
    assert ran == first * 2, "both ranks run the same, and meet at the same ports"
    assert len({each["MASTER_PORT"] for each in ran} - {"1"}) == asked.repeats
    assert not any("TORCHELASTIC_USE_AGENT_STORE" in each for each in ran)


@pytest.mark.usefixtures("words")
def test_a_capture_that_fails_says_why(asked: NightConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def child(*_: Any, **__: Any) -> Any:
        return type("Done", (), {"returncode": 2, "stderr": "no such\n  checkpoint"})

    monkeypatch.setattr("degarble.harness.nightly.table.subprocess.run", child)
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    with pytest.raises(InvalidArgument, match="no such checkpoint"):
        step.run(asked, {})


def test_kernels_and_captures_of_ones_own_are_refused(asked: NightConfig, tmp_path: Path) -> None:
    [step] = over_ranks([NightStep("captures", captures)], RANKS)
    with pytest.raises(InvalidArgument, match="--backend"):
        step.run(replace(asked, backend="cutedsl"), {})
    with pytest.raises(InvalidArgument, match="--captures"):
        step.run(replace(asked, captures=tmp_path), {})


@pytest.mark.slow
def test_a_night_of_two_ranks_makes_one_report(tmp_path: Path) -> None:
    config = replace(TINY_V4, moe_intermediate_size=128 * RANKS)
    write_checkpoint(tmp_path / "model", Synthetic(config, "bf16", seed=3))
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("w7 w8 w9\nw9 w8\n")
    out, xml = tmp_path / "out", tmp_path / "night.xml"
    line = ["-q", "-m", "night", str(ROOT / "suites" / "nights"), "--repeats", "2"]
    line += ["--checkpoint", str(tmp_path / "model"), "--reference", str(tmp_path / "model")]
    line += ["--prompts", str(tmp_path / "prompts.txt"), "--report-dir", str(out)]
    line += ["-k", "environment or captures or repeats or check", f"--junitxml={xml}"]
    run_ranks("pytest", RANKS, *line)
    captured = sorted((out / "work" / "model" / "captures").iterdir())
    assert [each.name for each in captured] == ["run-1", "run-2"]
    assert all(Capture.open(each).facts["ranks"] == RANKS for each in captured)
    told = xml.read_text(encoding="utf-8")
    assert 'failures="0"' in told
    assert "rank 0 judges" not in told
