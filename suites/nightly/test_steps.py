"""The judging steps on small models: what is green, and what each planted fault turns red."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.capture import capture as capturing
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.check.check import CheckRun
from degarble.harness.history.ledger import Failure
from degarble.harness.inference.model import open_model
from degarble.harness.museum.cases import ModelKey, prepare
from degarble.harness.nightly import metamorphic as night_metamorphic
from degarble.harness.nightly import steps as night_steps
from degarble.harness.nightly.metamorphic import judged as related
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.pages import write_night
from degarble.harness.nightly.table import STEPS
from degarble.harness.nightly.texts import NEW_TOKENS, limits_of, texts
from degarble.harness.report.verdict import Verdict
from degarble.suites.house.repository import ROOT
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "layers.1.attn.q_norm"
KEY = ModelKey("v4", "nvfp4-full")
SOURCE = ROOT / "references" / "tiny" / "v1" / "v4"
PLANTED = "model.layers.3.mlp.experts.2.down_proj.weight"
PROMPTS = ("w7 w8 w9 w31", "w9 w8", "w11 w12 w13", "w30 w14", "w15 w16 w17")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("v4") / "model", "v4")


def asked(model: Path, folder: Path, **more: Any) -> NightConfig:
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = {"prompts": prompts} | more
    return NightConfig(model, model, folder / "out", "2026-11-22", **given)


def gain(inner: Any, inputs: Any, weights: Any) -> Mapping[str, Any]:
    made = dict(inner(inputs, weights))
    made["out"] = (made["out"].float() * 1.25).to(made["out"].dtype)
    return made


def in_company(inner: Any, inputs: Any, weights: Any) -> Mapping[str, Any]:
    """A kernel that is wrong where more than six rows come together."""
    return gain(inner, inputs, weights) if len(inputs["x"]) > 6 else inner(inputs, weights)


def in_pieces(inner: Any, inputs: Any, weights: Any) -> Mapping[str, Any]:
    """A kernel that is wrong at the extents that only halves of the prompts have."""
    return gain(inner, inputs, weights) if len(inputs["x"]) in (2, 5) else inner(inputs, weights)


def captured(model: Path, folder: Path, faulty: str = "") -> Path:
    def opened(*args: Any, **named: Any) -> Any:
        found = open_model(*args, **named)
        calls = found.speaker.bound.calls
        if faulty:
            calls[faulty] = partial(gain, calls[faulty])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "open_model", opened)
        capturing.capture(model, list(PROMPTS), folder, lambda _streamed: nullcontext())
    return folder


def judging(asked: NightConfig) -> Night:
    wanted = {"captures", "repeats", "check"}
    return Night(asked, [step for step in STEPS if step.name in wanted])


def test_equal_captures_agree_and_one_of_them_is_judged(model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        captured(model, tmp_path / "runs" / name)
    night = judging(asked(model, tmp_path, captures=tmp_path / "runs"))
    assert night.run() is Verdict.AGREES
    assert [row[0] for row in night.results["check"].rows] == ["a"]
    assert night.results["check"].values["budgets"][NAME] < 1
    assert NAME in night.results["check"].judged


def test_a_capture_that_differs_is_unstable_and_judged_as_well(model: Path, tmp_path: Path) -> None:
    captured(model, tmp_path / "runs" / "a")
    captured(model, tmp_path / "runs" / "b", NAME)
    night = judging(asked(model, tmp_path, captures=tmp_path / "runs"))
    assert night.run() is Verdict.DIFFERS
    repeats, check = night.results["repeats"], night.results["check"]
    assert repeats.verdict is Verdict.UNSTABLE
    assert repeats.failures[0].component == NAME
    assert [row[:2] for row in check.rows] == [("a", "AGREES"), ("b", "DIFFERS")]
    assert [each.component for each in check.failures] == [NAME]
    assert check.values["budgets"][NAME] > 1


@pytest.mark.parametrize("order", [0, 1])
def test_the_worst_capture_speaks_and_one_without_origin_has_a_failure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: int
) -> None:
    origin = Failure(NAME, Verdict.DIFFERS)
    open_one = Failure("night.check", Verdict.UNDECIDED)
    said = [
        StepResult(Verdict.DIFFERS, "A norm differs.", failures=(origin,)),
        StepResult(Verdict.UNDECIDED, "Nothing could be judged.", failures=(open_one,)),
    ]
    each = iter(said[::-1] if order else said)
    monkeypatch.setattr(night_steps, "_checked", lambda *_: next(each))
    rows = tuple((name, "captured", name) for name in "ab")
    given = {
        "captures": StepResult(Verdict.AGREES, "", rows=rows),
        "repeats": StepResult(Verdict.UNSTABLE, ""),
    }
    found = night_steps.check(asked(tmp_path, tmp_path), given)
    assert (found.verdict, found.sentence) == (Verdict.DIFFERS, "A norm differs.")
    assert {told.component for told in found.failures} == {NAME, "night.check"}


def test_the_worst_pair_speaks_and_one_without_origin_has_a_failure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = SimpleNamespace(component=NAME)
    said = iter([
        SimpleNamespace(verdict=Verdict.UNSTABLE, origins=[line], sentence="Two answers."),
        SimpleNamespace(verdict=Verdict.DIFFERS, origins=[], sentence="None on equal inputs."),
    ])  # fmt: skip
    monkeypatch.setattr(night_steps, "compare_runs", lambda *_: next(said))
    rows = tuple((name, "captured", name) for name in "abc")
    given = {"captures": StepResult(Verdict.AGREES, "", rows=rows)}
    found = night_steps.repeats(asked(tmp_path, tmp_path), given)
    assert (found.verdict, found.sentence) == (Verdict.DIFFERS, "None on equal inputs.")
    assert [(told.component, told.verdict) for told in found.failures] == [
        (NAME, Verdict.UNSTABLE), ("night.repeats", Verdict.DIFFERS),
    ]  # fmt: skip
    assert found.lines == (f"{NAME} gave two answers on equal inputs",)


def test_a_capture_that_cannot_be_judged_says_so_as_a_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capture = captured(model, tmp_path / "a")
    judge = CheckRun.judge

    def undecided(self: CheckRun, *args: Any, **named: Any) -> Any:
        found = judge(self, *args, **named)
        return replace(found, localised=replace(found.localised, verdict=Verdict.UNDECIDED))

    monkeypatch.setattr(CheckRun, "judge", undecided)
    found = judging(asked(model, tmp_path, captures=capture))
    found.run()
    told = found.results["check"].failures
    assert [(each.component, each.verdict) for each in told] == [
        ("night.check", Verdict.UNDECIDED)
    ]  # fmt: skip


def test_a_single_capture_of_the_users_is_judged_and_not_compared(
    model: Path, tmp_path: Path
) -> None:
    alone = captured(model, tmp_path / "alone")
    night = judging(asked(model, tmp_path, captures=alone))
    assert night.run() is Verdict.AGREES
    assert night.results["repeats"].verdict is Verdict.UNDECIDED


def test_a_folder_without_captures_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    night = judging(asked(model, tmp_path, captures=tmp_path / "empty"))
    assert night.run() is Verdict.REFUSED
    assert night.results["check"].sentence == "There is no capture to judge."
    assert night.red("check")


def test_captures_are_made_by_processes_and_a_failing_one_is_reported(
    model: Path, tmp_path: Path
) -> None:
    made = night_steps.captures(asked(model, tmp_path, repeats=1), {})
    assert made.sentence == "The same prompts were captured in 1 process."
    wrong = asked(model, tmp_path, repeats=1, backend="nowhere:factory")
    night = Night(wrong, [NightStep("captures", night_steps.captures)])
    assert night.run() is Verdict.REFUSED
    assert "nowhere" in night.sentence


def test_prompts_generate_the_same_text_in_another_batch(model: Path, tmp_path: Path) -> None:
    ids = [[0, 7, 8, 9], [0, 9], [0, 1, 2, 3, 4, 5]]
    with open_model(model) as opened:
        found = related(opened, ids, asked(model, tmp_path))
        assert found.verdict is Verdict.AGREES, found
        assert [row[0] for row in found.rows] == [
            "in a batch", "with padding behind", "in two pieces",
        ]  # fmt: skip
        calls = opened.speaker.bound.calls
        calls[NAME] = partial(in_company, calls[NAME])
        found = related(opened, ids, asked(model, tmp_path))
    assert found.verdict is Verdict.DIFFERS
    assert {each.component for each in found.failures} == {NAME}
    assert [row[1] for row in found.rows] == ["DIFFERS", "DIFFERS", "AGREES"]


def test_what_is_wrong_in_pieces_alone_is_judged_in_these_pieces(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = [[0, 7, 8, 9]]
    with open_model(model) as opened:
        calls = opened.speaker.bound.calls
        calls[NAME] = partial(in_pieces, calls[NAME])
        found = related(opened, ids, asked(model, tmp_path))
        assert found.verdict is Verdict.DIFFERS, found
        assert {each.component for each in found.failures} == {NAME}
        assert [row[1] for row in found.rows] == ["AGREES", "AGREES", "DIFFERS"]
        monkeypatch.setattr(night_metamorphic, "_origins", lambda *_: ([], Verdict.UNDECIDED))
        found = related(opened, ids, asked(model, tmp_path))
    assert (found.verdict, found.red) == (Verdict.UNDECIDED, True)
    assert found.rows[-1][1] == "UNDECIDED"


def test_text_gates_on_a_model_and_on_its_captures(model: Path, tmp_path: Path) -> None:
    spoken = texts(asked(model, tmp_path), {})
    assert spoken.verdict is Verdict.AGREES, spoken
    assert [row[0] for row in spoken.rows] == ["perplexity", "divergence", "length", "echo"]
    assert abs(spoken.values["text"]["perplexity.drift"]) < 0.01
    for name, faulty, verdict in (("a", "", Verdict.AGREES), ("b", "norm", Verdict.DIFFERS)):
        folder = captured(model, tmp_path / "runs" / name, faulty)
        given = asked(model, tmp_path, captures=folder)
        found = texts(given, {"captures": night_steps.captures(given, {})})
        assert found.verdict is verdict, found
        assert "Not measured: echo." in found.sentence


def test_a_twin_may_answer_for_as_long_as_each_answer_was_let() -> None:
    new = {owner: [1] * (30 if owner == 9 else 4) for owner in range(10)}
    stated: list[Any] = [{"finish": "length"} for _ in new]
    run: Any = SimpleNamespace(facts={"sequences": stated})
    assert limits_of(run, list(new), new) == {owner: len(ids) for owner, ids in new.items()}
    # One ended by itself, one was broken off, one is no record.
    stated[0], stated[1], stated[2] = {"finish": "end"}, {"finish": None}, None
    told = limits_of(run, list(new), new)
    assert told == {0: 30, 3: 4, 4: 4, 5: 4, 6: 4, 7: 4, 8: 4, 9: 30}
    assert limits_of(run, [0], {0: [1]}) == {}, "fewer than a gate needs"
    short = {owner: [1] for owner in new}
    assert limits_of(run, [0, 3, 4, 5], short) == {0: NEW_TOKENS, 3: 1, 4: 1, 5: 1}
    run.facts["sequences"] = [{}] * 10
    assert limits_of(run, list(new), new) == {}, "nobody says how they ended"


def damaged(source: Path, folder: Path) -> Path:
    """Swap the nibbles of one expert's weight."""
    shutil.copytree(source, folder)
    with Checkpoint.open(folder) as checkpoint:
        entry = checkpoint.entries[PLANTED]
        file = entry.file
        with file.open("rb") as stream:
            head = 8 + int.from_bytes(stream.read(8), "little")
    with file.open("r+b") as stream:
        begin = entry.begin if entry.begin >= head else entry.begin + head
        stream.seek(begin)
        codes = torch.frombuffer(bytearray(stream.read(entry.nbytes)), dtype=torch.uint8)
        stream.seek(begin)
        stream.write(bytes((codes >> 4 | codes << 4).tolist()))
    return folder


@pytest.mark.slow
def test_a_whole_night_detects_a_damaged_weight_and_its_repair(tmp_path: Path) -> None:
    prepare(tmp_path, (KEY,))
    healthy = tmp_path / KEY.folder
    wrong = damaged(healthy, tmp_path / "damaged")
    steps = [step for step in STEPS if step.name not in ("museum", "figures")]
    for checkpoint, verdict in ((wrong, Verdict.DIFFERS), (healthy, Verdict.AGREES)):
        given = NightConfig(
            checkpoint, SOURCE, tmp_path / "out", "2026-11-22", repeats=2, subject="tiny",
            prompts=ROOT / ".ci" / "prompts.txt", store=str(tmp_path / "history.sqlite"),
        )  # fmt: skip
        night = Night(given, steps)
        assert night.run() is verdict, night.sentence
        told = write_night(night).summary.read_text()
        night.close()
        red = [name for name, each in night.results.items() if each.red]
        assert red == (["audit"] if checkpoint is wrong else []), told
        named = "layers.3.ffn.experts.2.w2 is packed in the order \\`high\\_even" in told
        assert named is (checkpoint is wrong), told


def test_a_spoilt_codec_turns_the_step_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(night_steps, "wrong_codecs", lambda: ["E2M1: 0.5 is 0x2, not 0x1"])
    found = night_steps.codecs(asked(tmp_path, tmp_path), {})
    assert found == StepResult(
        Verdict.DIFFERS,
        "1 of 44 known answers of the formats differ: E2M1: 0.5 is 0x2, not 0x1.",
        lines=("E2M1: 0.5 is 0x2, not 0x1",),
    )


@pytest.mark.parametrize("made", ["speaker", "tiny"])
def test_default_prompts_are_words_that_the_model_knows(
    made: str, model: Path, tmp_path: Path
) -> None:
    """A prompt of unknown words tells a model nothing; neither tokenizer has the English ones."""
    model = model if made == "speaker" else ROOT / "references/tiny/v1/v4"
    tokenizer = Tokenizer.of_checkpoint(model, {}, 1 << 20)
    lines = night_steps.prompts_file(asked(model, tmp_path, prompts=None)).read_text()
    prompts = [json.loads(line) for line in lines.splitlines()]
    assert [tokenizer.unknown(each) for each in prompts] == [[]] * night_steps.OWN_PROMPTS
    assert len({len(tokenizer.encode(each)) for each in prompts}) > 4


def test_a_tokenizer_that_knows_all_words_gets_the_english_prompts() -> None:
    whole: Any = SimpleNamespace(unknown=lambda _text: [], encode=lambda text: [1] * len(text))
    assert night_steps.known_prompts(whole) is night_steps.PROMPTS
