"""`degarble compare`: step by step and token by token, unstable candidates, what two runs lack."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness import api
from degarble.harness.base.errors import Undecided
from degarble.harness.capture import capture as run
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.capture.options import CaptureFilter
from degarble.harness.commands.check.compare_runs import (
    compare_by_tokens,
    compare_runs,
    compared_document,
    compared_lines,
    tokens_in_common,
)
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.inference.model import open_model
from degarble.harness.museum.cases import prompt_ids
from degarble.harness.museum.plants import write_capture
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import BoundModel
from degarble.references.numerics import Numerics
from degarble.suites.capture.files.capture_cases import marked_incomplete
from degarble.suites.commands.calls import call
from degarble.suites.museum.museum_stages import small_stage
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# `degarble compare`: to the bit, unstable candidates, and what two runs do not have in common.

NAME = "layers.1.ffn.norm"
ENDS = ("w7 w8", "w7 w31")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("compare") / "model", "v4")


def captured(
    model: Path, folder: Path, fault: float = 1.0, prompt: str = ENDS[0], **named: Any
) -> Path:
    def scaled(inner: Any, inputs: Any, weights: Any) -> Any:
        out = inner(inputs, weights)["out"].clone()
        out[-1] *= fault
        return {"out": out}

    def opened(*args: Any, **options: Any) -> Any:
        made = open_model(*args, **options)
        calls = made.logits_model.bound.calls
        calls[NAME] = partial(scaled, calls[NAME])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_model", opened)
        capture_settings = run.CaptureSettings(
            CaptureFilter.from_options(None, None, None), 2, **named
        )
        run.capture(model, [prompt], folder, lambda _streamed: nullcontext(), capture_settings)
    return folder


def test_equal_runs_agree_and_unequal_runs_of_one_candidate_are_unstable(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = captured(model, tmp_path / "one"), captured(model, tmp_path / "two")
    done = call(capsys, "--json", "compare", one, two)
    assert done.status == 0, done.err
    assert done.document["verdict"] == "AGREES"
    assert {each["cosine"] for each in done.document["cosines"]} == {1.0}
    marked_incomplete(two)
    assert call(capsys, "compare", one, two).status == 2
    done = call(capsys, "--json", "compare", one, two, "--partial")
    assert (done.status, done.document["verdict"]) == (0, "AGREES")
    assert "second capture is incomplete" in done.document["notes"][0]
    odd = captured(model, tmp_path / "odd", 1.5)
    file = tmp_path / "found.json"
    done = call(capsys, "compare", one, odd, "--json", file, "--report", tmp_path / "report")
    assert done.status == 1
    told = json.loads(file.read_text())
    assert told["verdict"] == "UNSTABLE"
    (origin,) = told["origins"]
    assert origin["site"] == f"{NAME}.out"
    assert origin["where"] == {"step": 0, "row": 2}
    lines = {(each["layer"], each["component"]): each for each in told["cosines"]}
    assert 0 < lines[1, "ffn.norm"]["relative_l2"] < 0.6
    assert lines[0, "ffn.norm"]["identical"] == 1
    assert NAME in done.out
    (page,) = (tmp_path / "report").glob("*.html")
    assert NAME in page.read_text()


def test_other_candidates_differ_and_hashes_alone_decide(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = captured(model, tmp_path / "one", statistics_only=True)
    two = captured(model, tmp_path / "two", 1.5, statistics_only=True)
    manifest = two / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"backend": "torch"', '"backend": "other"'))
    done = call(capsys, "--json", "compare", one, two)
    assert done.status == 1
    assert done.document["verdict"] == "DIFFERS"
    lines = {(each["layer"], each["component"]): each for each in done.document["cosines"]}
    assert lines[1, "ffn.norm"]["cosine"] is None
    assert lines[0, "ffn.norm"]["cosine"] == 1


def test_runs_of_other_models_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fingerprint may differ, a family or an extent may not."""
    one = captured(model, tmp_path / "one", statistics_only=True)
    two = captured(model, tmp_path / "two", statistics_only=True)
    manifest = two / "manifest.json"
    whole = json.loads(manifest.read_text())
    facts = whole["facts"]
    wider = facts["config"] | {"hidden_size": 2 * facts["config"]["hidden_size"]}
    for wrong, text in (
        ({"family": "deepseek_v32"}, "family = ['deepseek_v4', 'deepseek_v32']"),
        ({"config": wider}, "hidden_size"),
    ):
        manifest.write_text(json.dumps(whole | {"facts": facts | wrong}))
        done = call(capsys, "compare", one, two)
        assert (done.status, done.out) == (2, "")
        assert "REFUSED" in done.err
        assert text in done.err
    manifest.write_text(json.dumps(whole | {"facts": facts | {"config": None, "family": None}}))
    assert call(capsys, "compare", one, two).status == 0, (
        "what is not stated is not held against it"
    )


def test_runs_of_other_tokens_are_undecided(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = captured(model, tmp_path / "one")
    two = captured(model, tmp_path / "two", prompt=ENDS[1])
    done = call(capsys, "compare", one, two)
    assert done.status == 2
    assert "steps in common" in done.err


def llama(scale: float, drift: float = 0.0) -> torch.nn.Module:
    """A model of two linears; `drift` is an error that no weight shows, as a race makes it."""

    class Racing(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + drift

    torch.manual_seed(7)
    second = Racing(8, 8)
    made = torch.nn.Sequential(torch.nn.Linear(8, 8), second)
    with torch.no_grad():
        second.weight.mul_(scale)
    return made


@pytest.mark.parametrize(
    ("other", "verdict", "remedy"),
    [((1.5, 0.0), "DIFFERS", "degarble check"), ((1.0, 0.5), "UNSTABLE", "races, stale memory")],
)
def test_only_runs_of_equal_weights_can_be_unstable(
    other: tuple[float, float], verdict: str, remedy: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    api.capture(llama(1.0), x, folder=tmp_path / "one", label="before")
    api.capture(llama(*other), x, folder=tmp_path / "two", label="after", facts={"commit": "1f0c"})
    line = ("compare", tmp_path / "one", tmp_path / "two")
    done = call(capsys, "--json", *line, "--report", tmp_path / "report")
    assert done.document["verdict"] == verdict
    assert [each["component"] for each in done.document["origins"]] == ["m1"]
    (page,) = (tmp_path / "report").glob("*.html")
    assert remedy in page.read_text()
    assert "before (" in call(capsys, *line).out
    again = call(capsys, *line[:2], tmp_path / "one", "--report", tmp_path / "report")
    assert (again.status, len(list((tmp_path / "report").glob("*.html")))) == (0, 2)


def test_a_run_that_does_not_state_its_weights_is_nobodys_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    for name, drift in (("one", 0.0), ("two", 0.5)):
        api.capture(llama(1.0, drift), x, folder=tmp_path / name)
        manifest = tmp_path / name / "manifest.json"
        whole = json.loads(manifest.read_text())
        del whole["facts"]["weights"]
        manifest.write_text(json.dumps(whole))
    done = call(capsys, "--json", "compare", tmp_path / "one", tmp_path / "two")
    assert done.document["verdict"] == "DIFFERS"


# --------------------------------------------------------------------------------------------------
# Captures of one prompt in other cuts: compared token by token, and never called UNSTABLE.

IDS = prompt_ids(7, 44)
PROMPT = 40  # tokens; four are decoded
NORM, ATTEND = "layers.1.ffn.norm", "layers.1.attn.attend"
WHOLE, CHUNKS = (0, PROMPT), (0, 16, 32, PROMPT)


def steps(cuts: Sequence[int], ids: Sequence[int] = IDS) -> list[CapturedStep]:
    """A prompt in pieces, then token by token."""
    ends = [*cuts, *range(PROMPT + 1, len(ids) + 1)]
    return [
        CapturedStep(
            number,
            Phase.DECODE if begin >= PROMPT else Phase.PREFILL,
            tuple(ids[begin:end]),
            tuple(range(begin, end)),
            (0,) * (end - begin),
        )
        for number, (begin, end) in enumerate(pairwise(ends))
    ]


def compare_tokens_captured(
    folder: Path, cuts: Sequence[int], odd: str = "", ids: Sequence[int] = IDS
) -> Path:
    """A run in exact arithmetic; `odd` puts out another row for the fifth token of a chunk."""
    model = small_stage().model
    bound = BoundModel(model.config, Numerics.twin(model.switches), model.weights, model.recipe)
    if odd:
        plain = bound.calls[odd]

        def spoilt(inputs: Any, weights: Any) -> Any:
            outputs = dict(plain(inputs, weights))
            out = outputs["out"].clone()
            if len(out) == 16:
                out[4] *= 1.5
            return {**outputs, "out": out}

        bound.calls[odd] = spoilt
    write_capture(InMemoryRun.again(bound, steps(cuts, ids)), folder, {"weights": "one"})
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compare_tokens_captured(tmp_path_factory.mktemp("cuts") / "whole", WHOLE)


def test_a_prompt_in_chunks_is_the_same_prompt(whole: Path, tmp_path: Path) -> None:
    comparison = compare_runs(whole, compare_tokens_captured(tmp_path / "chunks", CHUNKS))
    assert comparison.verdict is Verdict.AGREES, comparison.sentence
    assert (comparison.tokens, comparison.steps) == (len(IDS), 0)
    assert "44 tokens" in comparison.sentence
    assert any("split differently" in note for note in comparison.notes)
    lines = {(line.component, line.output): line for line in comparison.lines}
    assert lines[NORM, "out"].calls == len(IDS)
    assert lines[NORM, "out"].elements == len(IDS) * 128
    assert compared_document(comparison)["tokens"] == len(IDS)


@pytest.mark.parametrize("odd", [NORM, ATTEND])
def test_differences_are_reported_by_sequence_and_position(
    whole: Path, tmp_path: Path, odd: str
) -> None:
    comparison = compare_runs(whole, compare_tokens_captured(tmp_path / "odd", CHUNKS, odd))
    assert comparison.verdict is Verdict.DIFFERS, "another cut is another question"
    assert comparison.same_candidate
    first = comparison.origins[0]
    assert (first.component, first.own) == (odd, (0, 4))
    (origin, *_) = compared_document(comparison)["origins"]
    assert origin.where == {"sequence": 0, "position": 4}
    text = "\n".join(compared_lines(comparison))
    assert "first in sequence 0, position 4, on equal inputs" in text
    behind = {line.component: line for line in comparison.lines}
    assert behind["layers.0.ffn.norm"].equal
    assert not behind["norm"].equal
    assert behind["norm"].own is None, "it inherits"


def test_runs_that_are_cut_alike_or_of_other_prompts_are_compared_by_steps(
    whole: Path, tmp_path: Path
) -> None:
    alike = compare_tokens_captured(tmp_path / "alike", WHOLE)
    assert compare_runs(whole, alike).tokens == 0
    other = compare_tokens_captured(tmp_path / "other", CHUNKS, ids=(*IDS[:20], 3, *IDS[21:]))
    with pytest.raises(Undecided, match="steps in common"):
        compare_runs(whole, other)
    parted = compare_tokens_captured(tmp_path / "parted", CHUNKS, ids=(*IDS[:42], IDS[42] + 1, 4))
    assert compare_runs(whole, parted).tokens == 42


def test_what_has_no_row_a_token_is_left_out(whole: Path, tmp_path: Path) -> None:
    sides = (
        Capture.open(whole),
        Capture.open(compare_tokens_captured(tmp_path / "chunks", CHUNKS)),
    )
    made, left = compare_by_tokens(sides, tokens_in_common(*sides))
    assert left > 0
    assert {compared_tokens.calls for compared_tokens in made} <= {len(IDS), 0}
    assert not any(compared_tokens.output == "entry_offsets" for compared_tokens in made)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [({}, "UNSTABLE"), ({"content": None}, "DIFFERS"), ({"backend": "vllm"}, "DIFFERS")],
    ids=["same content", "samples alone", "an engine"],
)
def test_only_a_hash_of_all_weights_makes_one_candidate(
    facts: dict[str, Any], verdict: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folders = captured(model, tmp_path / "one"), captured(model, tmp_path / "two", 1.5)
    for folder in folders:
        manifest = folder / "manifest.json"
        whole = json.loads(manifest.read_text())
        assert whole["facts"]["source"]["content"]
        whole["facts"] |= {name: value for name, value in facts.items() if name == "backend"}
        whole["facts"]["source"] |= {n: value for n, value in facts.items() if n == "content"}
        manifest.write_text(json.dumps(whole))
    assert call(capsys, "--json", "compare", *folders).document["verdict"] == verdict
