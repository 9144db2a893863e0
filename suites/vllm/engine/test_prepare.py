"""The questions for a server follow from the margins of the references."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.vllm.capture import stated_conventions
from degarble.harness.vllm.engine import prepare
from degarble.harness.vllm.engine.steps import Answers
from degarble.harness.vllm.installed import NAME
from degarble.references.tiny.language import Document, Probe
from degarble.suites.vllm.engine import stand_in

if TYPE_CHECKING:
    from pathlib import Path

WORDS = 32


def rows(likeliest: list[int], gaps: list[float]) -> torch.Tensor:
    made = torch.zeros(len(likeliest), WORDS)
    for row, (token, gap) in enumerate(zip(likeliest, gaps, strict=True)):
        made[row, token] = gap
    return made


def test_a_question_goes_on_as_long_as_the_references_are_sure() -> None:
    document = Document([1, 2, 3, 4, 5, 6, 7], [Probe("recall", 2, 3), Probe("sum", 5, 6)])
    likeliest, gaps = [2, 3, 4, 9, 6, 7], [9.0, 9.0, 9.0, 9.0, 0.5, 9.0]
    (text,) = prepare.questions(document, rows(likeliest, gaps), 1.0)
    assert (text.prompt, text.ids) == ([1, 2], [3, 4])  # 5 is not the likeliest
    first, second = prepare.questions(document, rows(likeliest, gaps), 0.1)
    assert (first.ids, second.prompt, second.ids) == ([3, 4], [1, 2, 3, 4, 5], [6, 7])
    assert [second.gap(0, 6), second.gap(0, 11), second.gap(1, 7)] == [0.0, 0.5, 0.0]


def test_the_change_of_logits_is_reported_relative_to_the_best() -> None:
    before = rows([3, 4], [9.0, 9.0])
    after = before.clone() + 2.0  # all of them alike: nothing moved
    assert prepare.moved(before, after) == pytest.approx(0.0)
    after[1, 4] -= 1.5
    assert prepare.moved(before, after) == pytest.approx(1.5)


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = stand_in.answers()
    (tmp_path / "a.json").write_text(json.dumps(asdict(made)), encoding="utf-8")
    assert Answers.read(tmp_path / "a.json") == made


def test_a_folder_that_exists_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare.main([str(tmp_path)]) == 2
    assert "DIR" in capsys.readouterr().err


def test_the_unquantised_checkpoint_is_the_trained_one(tmp_path: Path) -> None:
    made = prepare.write_checkpoint("bf16", tmp_path / "bf16", tmp_path)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    assert "layer_types" not in config
    assert config["compress_ratios"]
    assert not (made / "manifest.json").exists()  # it spoke of another config.json
    names = {path.name for path in made.iterdir()}
    assert "model-00001-of-00001.safetensors" in names


def test_what_breaks_off_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "SOURCE", tmp_path / "nowhere")
    assert prepare.main([str(tmp_path / "new" / "asked")]) == 2
    assert "degarble capture = 'status 2'" in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    assert prepare.main([str(tmp_path / "file" / "asked")]) == 2
    assert "DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_the_references_are_sure_of_more_than_a_moved_rounding(tmp_path: Path) -> None:
    to = tmp_path / "prepared"
    prepare.prepare(to, ("experts",))
    found = Answers.read(to / "experts.json")
    assert len(found.texts) == len(prepare.LENGTHS)
    assert len(found.questions) == prepare.QUESTIONS
    assert any(len(text.prompt) > 512 for text in found.questions)
    for question in found.questions:
        assert min(row[0] - row[1] for row in question.logits) > found.moves
    assert found.steady < prepare.NEW * len(found.texts)  # a moved rounding is told


def test_every_moved_convention_is_one_of_the_references() -> None:
    switches = stated_conventions(NAME)
    numerics: Any = SimpleNamespace(**switches)
    for each in prepare.MOVED:
        for name, moved in each.items():
            assert getattr(numerics, name, None) != moved
