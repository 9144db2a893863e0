"""Steps of a night: judging, known answers of the formats, text statistics, and closing."""

from __future__ import annotations

import json
import math
import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import date, timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import Undecided
from degarble.harness.capture import capture as capturing
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.commands.check.check import CheckRun
from degarble.harness.formats.codec import encode
from degarble.harness.history.ledger import Failure
from degarble.harness.history.records import BUDGETS, MUSEUM, SPEED
from degarble.harness.history.store import HistoryStore
from degarble.harness.inference.model import open_model
from degarble.harness.museum import museum as museum_run
from degarble.harness.museum.cases import ModelKey, prepare
from degarble.harness.museum.museum import Museum
from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome
from degarble.harness.museum.scores import HealthyRun
from degarble.harness.nightly import codecs as night_codecs
from degarble.harness.nightly import metamorphic as night_metamorphic
from degarble.harness.nightly import steps
from degarble.harness.nightly import steps as night_steps
from degarble.harness.nightly.codecs import count, wrong_codecs
from degarble.harness.nightly.metamorphic import judged as related
from degarble.harness.nightly.night import Night, NightConfig, NightStep, StepResult
from degarble.harness.nightly.pages import write_night
from degarble.harness.nightly.table import STEPS
from degarble.harness.nightly.texts import (
    MATTERS,
    NEW_TOKENS,
    TextGate,
    gate,
    limits_of,
    quantile,
    texts,
    with_unknown_words,
)
from degarble.harness.report.verdict import Verdict
from degarble.suites.house.repository import ROOT
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# The judging steps on small models: what is green, and what each planted fault turns red.

NAME = "layers.1.attn.q_norm"
KEY = ModelKey("v4", "nvfp4-full")
SOURCE = ROOT / "references" / "tiny" / "v1" / "v4"
PLANTED = "layers.3.ffn.experts.2.w2.weight"
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
        calls = found.logits_model.bound.calls
        if faulty:
            calls[faulty] = partial(gain, calls[faulty])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "open_model", opened)
        capturing.capture(model, list(PROMPTS), folder, lambda _streamed: nullcontext())
    return folder


def judging(config: NightConfig) -> Night:
    wanted = {"captures", "repeats", "check"}
    return Night(config, [step for step in STEPS if step.name in wanted])


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
    assert [failure.component for failure in check.failures] == [NAME]
    assert check.values["budgets"][NAME] > 1


@pytest.mark.parametrize("order", [0, 1])
def test_the_worst_capture_speaks_and_one_without_origin_has_a_failure_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: int
) -> None:
    origin = Failure(NAME, Verdict.DIFFERS)
    open_one = Failure("night.check", Verdict.UNDECIDED)
    results = [
        StepResult(Verdict.DIFFERS, "A norm differs.", failures=(origin,)),
        StepResult(Verdict.UNDECIDED, "Nothing could be judged.", failures=(open_one,)),
    ]
    each = iter(results[::-1] if order else results)
    monkeypatch.setattr(night_steps, "_checked", lambda *_: next(each))
    rows = tuple((name, "captured", name) for name in "ab")
    given = {
        "captures": StepResult(Verdict.AGREES, "", rows=rows),
        "repeats": StepResult(Verdict.UNSTABLE, ""),
    }
    result = night_steps.check(asked(tmp_path, tmp_path), given)
    assert (result.verdict, result.sentence) == (Verdict.DIFFERS, "A norm differs.")
    assert {failure.component for failure in result.failures} == {NAME, "night.check"}


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
    result = night_steps.repeats(asked(tmp_path, tmp_path), given)
    assert (result.verdict, result.sentence) == (Verdict.DIFFERS, "None on equal inputs.")
    assert [(failure.component, failure.verdict) for failure in result.failures] == [
        (NAME, Verdict.UNSTABLE), ("night.repeats", Verdict.DIFFERS),
    ]  # fmt: skip
    assert result.lines == (f"{NAME} gave two answers on equal inputs",)


def test_a_capture_that_cannot_be_judged_says_so_as_a_failure(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    capture = captured(model, tmp_path / "a")
    judge = CheckRun.judge

    def undecided(self: CheckRun, *args: Any, **named: Any) -> Any:
        result = judge(self, *args, **named)
        return replace(result, localised=replace(result.localised, verdict=Verdict.UNDECIDED))

    monkeypatch.setattr(CheckRun, "judge", undecided)
    night = judging(asked(model, tmp_path, captures=capture))
    night.run()
    failures = night.results["check"].failures
    assert [(failure.component, failure.verdict) for failure in failures] == [
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
    result = night_steps.captures(asked(model, tmp_path, repeats=1), {})
    assert result.sentence == "The same prompts were captured in 1 process."
    wrong = asked(model, tmp_path, repeats=1, backend="nowhere:factory")
    night = Night(wrong, [NightStep("captures", night_steps.captures)])
    assert night.run() is Verdict.REFUSED
    assert "nowhere" in night.sentence


def test_prompts_generate_the_same_text_in_another_batch(model: Path, tmp_path: Path) -> None:
    ids = [[0, 7, 8, 9], [0, 9], [0, 1, 2, 3, 4, 5]]
    with open_model(model) as opened:
        result = related(opened, ids, asked(model, tmp_path))
        assert result.verdict is Verdict.AGREES, result
        assert [row[0] for row in result.rows] == [
            "in a batch", "with padding behind", "in two pieces",
        ]  # fmt: skip
        calls = opened.logits_model.bound.calls
        calls[NAME] = partial(in_company, calls[NAME])
        result = related(opened, ids, asked(model, tmp_path))
    assert result.verdict is Verdict.DIFFERS
    assert {failure.component for failure in result.failures} == {NAME}
    assert [row[1] for row in result.rows] == ["DIFFERS", "DIFFERS", "AGREES"]


def test_what_is_wrong_in_pieces_alone_is_judged_in_these_pieces(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ids = [[0, 7, 8, 9]]
    with open_model(model) as opened:
        calls = opened.logits_model.bound.calls
        calls[NAME] = partial(in_pieces, calls[NAME])
        result = related(opened, ids, asked(model, tmp_path))
        assert result.verdict is Verdict.DIFFERS, result
        assert {failure.component for failure in result.failures} == {NAME}
        assert [row[1] for row in result.rows] == ["AGREES", "AGREES", "DIFFERS"]
        monkeypatch.setattr(night_metamorphic, "_origins", lambda *_: ([], Verdict.UNDECIDED))
        result = related(opened, ids, asked(model, tmp_path))
    assert (result.verdict, result.red) == (Verdict.UNDECIDED, True)
    assert result.rows[-1][1] == "UNDECIDED"


def test_text_gates_on_a_model_and_on_its_captures(model: Path, tmp_path: Path) -> None:
    spoken = texts(asked(model, tmp_path), {})
    assert spoken.verdict is Verdict.AGREES, spoken
    assert [row[0] for row in spoken.rows] == ["perplexity", "divergence", "length", "echo"]
    assert abs(spoken.values["text"]["perplexity.drift"]) < 0.01
    for name, faulty, verdict in (("a", "", Verdict.AGREES), ("b", "norm", Verdict.DIFFERS)):
        folder = captured(model, tmp_path / "runs" / name, faulty)
        given = asked(model, tmp_path, captures=folder)
        result = texts(given, {"captures": night_steps.captures(given, {})})
        assert result.verdict is verdict, result
        assert "Not measured: echo." in result.sentence


def test_unknown_words_are_named_where_a_gate_decides_nothing() -> None:
    notes = ["warning: 1 word is unknown to the tokenizer"]
    blind = StepResult(Verdict.UNDECIDED, "The prompts cannot show a drift that matters.")
    said = "Look at the prompts first: 1 word is unknown to the tokenizer."
    assert with_unknown_words(blind, notes).sentence == f"{blind.sentence} {said}"
    assert with_unknown_words(blind, []) == blind
    green = replace(blind, verdict=Verdict.AGREES)
    assert with_unknown_words(green, notes) == green


@pytest.mark.slow
def test_a_blind_gate_names_the_words_that_nobody_knows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "strange.txt"
    prompts.write_text("quantum w7\nneutrino w8 spectra\nvolatile w9\nserendipity w6\n")
    copied = tmp_path / "model"
    shutil.copytree(model, copied)
    raw = json.loads((copied / "tokenizer.json").read_text())
    raw["model"]["unk_token"] = "w6"
    (copied / "tokenizer.json").write_text(json.dumps(raw))
    given = asked(copied, tmp_path, prompts=prompts)
    for name in ("perplexity", "divergence"):
        monkeypatch.setitem(MATTERS, name, -1.0)
    result = texts(given, {})
    assert (result.verdict, result.red) == (Verdict.UNDECIDED, True)
    words = "Look at the prompts first: 5 words are unknown to the tokenizer"
    assert words in result.sentence
    assert "'neutrino'" in result.sentence


def test_a_twin_may_answer_for_as_long_as_each_answer_was_let() -> None:
    new = {owner: [1] * (30 if owner == 9 else 4) for owner in range(10)}
    stated: list[Any] = [{"finish": "length"} for _ in new]
    run: Any = SimpleNamespace(facts={"sequences": stated})
    assert limits_of(run, list(new), new) == {owner: len(ids) for owner, ids in new.items()}
    # One ended by itself, one was broken off, one is no record.
    stated[0], stated[1], stated[2] = {"finish": "end"}, {"finish": None}, None
    fields = limits_of(run, list(new), new)
    assert fields == {0: 30, 3: 4, 4: 4, 5: 4, 6: 4, 7: 4, 8: 4, 9: 30}
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
        text = write_night(night).summary.read_text()
        night.close()
        red = [name for name, result in night.results.items() if result.red]
        assert red == (["audit"] if checkpoint is wrong else []), text
        named = "layers.3.ffn.experts.2.w2 is packed in the order \\`high\\_even" in text
        assert named is (checkpoint is wrong), text


def test_a_spoilt_codec_turns_the_step_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(night_steps, "wrong_codecs", lambda: ["E2M1: 0.5 is 0x2, not 0x1"])
    result = night_steps.codecs(asked(tmp_path, tmp_path), {})
    assert result == StepResult(
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
    assert [tokenizer.unknown(prompt) for prompt in prompts] == [[]] * night_steps.OWN_PROMPTS
    assert len({len(tokenizer.encode(prompt)) for prompt in prompts}) > 4


def test_a_tokenizer_that_copied_words_gets_the_english_prompts() -> None:
    whole: Any = SimpleNamespace(unknown=lambda _text: [], encode=lambda text: [1] * len(text))
    assert night_steps.known_prompts(whole) is night_steps.PROMPTS


# --------------------------------------------------------------------------------------------------
# The known answers are met, and a damaged codec is detected.


def test_the_formats_meet_what_is_known() -> None:
    assert wrong_codecs() == []
    assert count() == 44


def test_a_spoilt_codec_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "encode", lambda v, f: encode(v * 1.1, f))
    assert any(line.startswith("E2M1: 0.25 is 0x0, 0x1") for line in wrong_codecs())


def test_swapped_nibbles_and_places_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    made = night_codecs.BLOCK_CODES
    monkeypatch.setattr(night_codecs, "BLOCK_CODES", bytes(b >> 4 | (b & 15) << 4 for b in made))
    assert wrong_codecs() == ["NVFP4 block: codes 1032547698badcfe, not 0123456789abcdef"]
    monkeypatch.setattr(night_codecs, "BLOCK_CODES", made)

    def linear(scales: Any, _: object) -> Any:
        return scales.flatten()

    monkeypatch.setattr(night_codecs, "to_layout", linear)
    found = wrong_codecs()
    assert found[0] == "scale 1, 0 of a swizzled tile lies at [4], not 16"


def test_a_block_that_reads_otherwise_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(night_codecs, "dequantise", lambda each: torch.zeros(each.shape))
    assert wrong_codecs() == ["NVFP4 block: what was quantised without loss reads otherwise"]


# --------------------------------------------------------------------------------------------------
# Intervals against tables, and gates over simulated prompts: false alarms, and detected shifts.

DOUBLED = math.log(2)


# Student's distribution, from any table of it.
@pytest.mark.parametrize(
    ("degrees", "probability", "known"),
    [
        (4, 0.975, 2.776),
        (5, 0.8, 0.920),
        (7, 0.9995, 5.408),
        (11, 0.9995, 4.437),
        (31, 0.975, 2.040),
        (100, 0.9995, 3.390),
    ],
)
def test_the_quantile_is_that_of_the_table(degrees: int, probability: float, known: float) -> None:
    assert quantile(degrees, probability) == pytest.approx(known, rel=0.012)


def drawn(seed: int, shift: float, count: int = 12) -> TextGate:
    chance = random.Random(seed)
    reference = [chance.gauss(3.0, 0.5) for _ in range(count)]
    twin = [each + chance.gauss(0.02, 0.01) for each in reference]
    candidate = [each + shift + chance.gauss(0.0, 0.005) for each in twin]
    return gate("perplexity", "nats", candidate, twin, reference, DOUBLED)


def test_healthy_prompts_never_alarm_and_prompts_of_another_difficulty_do_not_matter() -> None:
    assert all(drawn(seed, 0.0).verdict is Verdict.AGREES for seed in range(1000))


def test_a_drift_of_the_stated_size_is_detected_with_the_stated_power() -> None:
    verdicts = [drawn(seed, drawn(seed, 0.0).smallest).verdict for seed in range(400)]
    assert verdicts.count(Verdict.DIFFERS) / len(verdicts) >= 0.75
    assert all(drawn(seed, 0.3).verdict is Verdict.DIFFERS for seed in range(50))
    assert all(drawn(seed, -0.3).verdict is Verdict.DIFFERS for seed in range(50))


@pytest.mark.parametrize("voice", ["twin", "reference"])
@pytest.mark.parametrize("wild", [math.nan, math.inf])
def test_a_twin_that_is_not_finite_is_undecided(voice: str, wild: float) -> None:
    said = {"candidate": [3.0] * 6, "twin": [3.0] * 6, "reference": [3.0] * 6}
    said[voice][2] = wild
    with pytest.raises(Undecided, match=f"perplexity of the {voice}"):
        gate("perplexity", "nats", **said, matters=DOUBLED)


def test_one_wild_prompt_is_no_drift() -> None:
    reference = [3.0] * 8
    text_gate = gate("perplexity", "nats", [3.0] * 7 + [9.0], [3.0] * 8, reference, DOUBLED)
    assert text_gate.verdict is Verdict.UNDECIDED


def test_rounding_alone_is_no_drift_where_the_format_costs_nothing() -> None:
    same = [3.0, 2.9, 3.1, 3.05]
    moved = [each + 1e-4 for each in same]
    assert gate("perplexity", "nats", moved, same, same, DOUBLED).verdict is Verdict.AGREES
    moved = [each + 0.1 for each in same]
    assert gate("perplexity", "nats", moved, same, same, DOUBLED).verdict is Verdict.DIFFERS


def test_what_is_not_finite_differs() -> None:
    text_gate = gate("perplexity", "nats", [float("nan"), 1, 1, 1], [1.0] * 4, [1.0] * 4, DOUBLED)
    assert text_gate.verdict is Verdict.DIFFERS
    assert text_gate.sentence == "perplexity of the candidate is not finite."


def test_the_sentence_states_noise_and_power() -> None:
    assert drawn(1, 0.0).sentence == (
        "perplexity: drift 0.00153 nats [-0.00216, 0.00523], healthy up to 0.0352; "
        "12 prompts show a drift of 0.0396 80 times in 100."
    )


def test_too_few_prompts_are_undecided() -> None:
    with pytest.raises(Undecided, match="prompts of a text gate = 3"):
        gate("length", "tokens", [1.0] * 3, [1.0] * 3, [1.0] * 3, 12.0)


def test_a_gate_that_would_not_see_a_doubled_perplexity_decides_nothing() -> None:
    """Six prompts on which the format costs between -1 and 1 nats."""
    reference = [3.0, 3.2, 2.8, 3.1, 2.9, 3.0]
    twin = [a + b for a, b in zip(reference, (1.0, -0.9, 0.8, -1.0, 0.9, -0.7), strict=True)]
    text_gate = gate("perplexity", "nats", twin, twin, reference, DOUBLED)
    assert text_gate.verdict is Verdict.UNDECIDED
    assert text_gate.sentence.endswith("A drift of 0.693 has to be seen: give about 99 prompts.")
    more = gate("perplexity", "nats", twin * 16, twin * 16, reference * 16, DOUBLED)
    assert more.verdict is Verdict.AGREES


def test_a_format_that_costs_more_than_what_matters_is_not_helped_by_prompts() -> None:
    reference = [3.0, 3.2, 2.8, 3.1, 2.9, 3.0]
    twin = [each + 1.0 for each in reference]
    text_gate = gate("perplexity", "nats", twin, twin, reference, DOUBLED)
    assert text_gate.verdict is Verdict.UNDECIDED
    assert "the format alone costs more" in text_gate.sentence
    worse = gate("perplexity", "nats", [each + 2 for each in twin], twin, reference, DOUBLED)
    assert worse.verdict is Verdict.DIFFERS


# --------------------------------------------------------------------------------------------------
# A night in the history: changes are reported; a lower speed and misses of the museum are red.

KERNEL = "kernels.quantise_nvfp4"


SPEED_LEDGER = """
- component: speed.kernels.*
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-02-10
  why: being mended
"""


def closing_asked(folder: Path, night: int = 0, **more: object) -> NightConfig:
    day = str(date(2026, 1, 1) + timedelta(days=night))
    config = NightConfig(
        folder, folder, folder, day, store=str(folder / "history.sqlite"),
        commit=f"{night:040x}", started=day, subject="tiny",
    )  # fmt: skip
    return replace(config, **more)  # type: ignore[arg-type]


def measured(speed: float, budget: float) -> dict[str, StepResult]:
    values = {SPEED.name: {KERNEL: speed}, BUDGETS.name: {"head": budget}}
    return {"check": StepResult(Verdict.AGREES, "well", values=values)}


def nights(folder: Path, speed: float, budget: float) -> StepResult:
    """32 nights that are alike, then two that are not."""
    for night in range(32):
        quiet = steps.history(closing_asked(folder, night), measured(0.9 + night % 3 / 1000, 0.5))
        assert quiet.verdict is Verdict.AGREES
        assert quiet.lines == ()
    for night in (32, 33):
        result = steps.history(closing_asked(folder, night), measured(speed, budget))
    return result


def test_a_speed_that_fell_turns_the_night_red(tmp_path: Path) -> None:
    result = nights(tmp_path, 0.7, 0.5)
    assert result.verdict is Verdict.DIFFERS
    assert result.failures[0].component == f"speed.{KERNEL}"
    assert "in the night 2026-02-02" in result.sentence
    assert f"commits {31:040x}"[:20] in result.sentence
    with HistoryStore(str(tmp_path / "history.sqlite")) as store:
        assert len(store.runs()) == 34
        assert [run.verdict for run in store.runs()[-2:]] == [Verdict.AGREES, Verdict.DIFFERS]
    # It stays red until the speed is back for two nights, or the ledger knows it.
    stays = steps.history(closing_asked(tmp_path, 34), measured(0.7, 0.5))
    assert stays.verdict is Verdict.DIFFERS
    (tmp_path / "known.yaml").write_text(SPEED_LEDGER)
    known = closing_asked(tmp_path, 35, ledger=tmp_path / "known.yaml")
    assert steps.history(known, measured(0.7, 0.5)).failures == stays.failures
    with HistoryStore(str(tmp_path / "history.sqlite")) as store:
        assert [run.verdict for run in store.runs()[-2:]] == [Verdict.DIFFERS, Verdict.AGREES]
    once = steps.history(closing_asked(tmp_path, 36), measured(0.9, 0.5))
    assert once.verdict is Verdict.DIFFERS
    healed = steps.history(closing_asked(tmp_path, 37), measured(0.9, 0.5))
    assert healed.verdict is Verdict.AGREES
    assert healed.judged == (f"speed.{KERNEL}",)


def test_slower_steps_and_budgets_are_reported_and_not_red(tmp_path: Path) -> None:
    result = nights(tmp_path, 1.0, 0.8)
    assert result.verdict is Verdict.AGREES
    assert {line.partition(":")[0] for line in result.lines} == {"speed", "budgets"}


def test_a_night_is_kept_with_its_verdict_facts_and_worst(tmp_path: Path) -> None:
    results = measured(0.9, 0.5) | {
        "audit": StepResult(Verdict.DIFFERS, "wrong", facts={"manifest": "sha256:1"}),
        "text": StepResult(Verdict.UNDECIDED, "not asked", asked=False),
    }
    run = steps.run_of(closing_asked(tmp_path), results)
    assert run is not None
    assert run.verdict is Verdict.DIFFERS
    assert run.facts == {"manifest": "sha256:1"}
    assert steps.run_of(closing_asked(tmp_path), {"audit": results["audit"]}) is None
    assert steps.history(closing_asked(tmp_path), {"audit": results["audit"]}).red
    assert not steps.history(closing_asked(tmp_path, store=None), results).red


def test_a_night_on_the_cpu_is_none_of_the_gpu_that_is_there(tmp_path: Path) -> None:
    facts = {"machine": "CPU: 2 cores", "GPU 0 name": "NVIDIA B200"}
    results = measured(0.9, 0.5) | {"environment": StepResult(Verdict.AGREES, "", facts=facts)}
    for gpu, machine in ((True, "NVIDIA B200"), (False, "CPU: 2 cores")):
        run = steps.run_of(closing_asked(tmp_path, gpu=gpu), results)
        assert run is not None
        assert run.machine == machine


def museum(monkeypatch: pytest.MonkeyPatch, folder: Path, **more: Any) -> StepResult:
    made = Museum(outcomes=(), without_effect=(), **({"healthy": ()} | more))
    monkeypatch.setattr(museum_run, "run_museum", lambda *_, **__: made)
    return steps.museum(closing_asked(folder), {})


def test_a_museum_with_an_alarm_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert museum(monkeypatch, tmp_path).verdict is Verdict.AGREES
    result = museum(monkeypatch, tmp_path, healthy=(HealthyRun("v4 long", ("head: wrong",)),))
    assert result.verdict is Verdict.DIFFERS
    assert [failure.component for failure in result.failures] == ["museum.v4 long"]


def test_models_of_nights_long_over_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {"museum-2025-12-30", "museum-2025-12-31", "museum-of-somebody", "tiny"}
    for name in names:
        (tmp_path / "work" / name / "v4").mkdir(parents=True)
    museum(monkeypatch, tmp_path)
    left = {path.name for path in (tmp_path / "work").iterdir()}
    assert left == names - {"museum-2025-12-30"} | {"museum-2026-01-01"}


MUSEUM_LEDGER = """
- component: museum.M01.inverse
  verdict: DIFFERS
  issue: https://example.org/12
  until: 2026-01-02
  why: being mended
- component: museum.M26.weights
  verdict: DIFFERS
  issue: https://example.org/13
  until: 2026-01-02
  why: being mended
- component: kernels.another
  verdict: DIFFERS
  issue: https://example.org/14
  until: 2026-01-02
  why: being mended
"""


def test_only_what_was_planted_and_ran_can_heal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted = PlantOutcome(
        "M01.inverse", "head", "", "v4 long", 2.0, PlaceAnswer.EXACT, CauseAnswer.FIRST
    )
    made = Museum((planted,), (HealthyRun("v4 short"),), ())
    monkeypatch.setattr(museum_run, "run_museum", lambda *_, **__: made)
    result = steps.museum(closing_asked(tmp_path), {})
    assert result.judged == ("museum.M01.inverse", "museum.v4 short")
    assert result.values == {
        MUSEUM.name: {"no alarms on healthy runs": 1.0, "healthy runs judged": 1.0}
    }
    (tmp_path / "known.yaml").write_text(MUSEUM_LEDGER)
    kernels = StepResult(Verdict.AGREES, "well", judged=(KERNEL,))
    given = closing_asked(tmp_path, ledger=tmp_path / "known.yaml")
    settled = steps.ledger(given, {"museum": result, "kernels": kernels, "figures": kernels})
    assert [failure.component for failure in settled.failures] == ["ledger.museum.M01.inverse"]


def test_the_faults_of_a_short_night_exist() -> None:
    assert set(steps.PLANTED) <= set(museum_run.chosen(()))
