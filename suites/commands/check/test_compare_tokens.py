"""Captures of one prompt in other cuts: compared token by token, and never called UNSTABLE."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import Undecided
from degarble.harness.capture.files.reader import Capture
from degarble.harness.capture.files.records import CapturedStep, Phase
from degarble.harness.commands.check.compare_runs import (
    compare_runs,
    compared_document,
    compared_lines,
)
from degarble.harness.commands.check.compare_tokens import beside_by_tokens, tokens_in_common
from degarble.harness.engine.localise.recorded_run import InMemoryRun
from degarble.harness.museum.cases import prompt_ids
from degarble.harness.museum.plants import write_capture
from degarble.harness.report.verdict import Verdict
from degarble.references.binding import Bound
from degarble.references.numerics import Numerics
from degarble.suites.museum.museum_stages import small_stage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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


def captured(folder: Path, cuts: Sequence[int], odd: str = "", ids: Sequence[int] = IDS) -> Path:
    """A run in exact arithmetic; `odd` puts out another row for the fifth token of a chunk."""
    model = small_stage().model
    bound = Bound(model.config, Numerics.twin(model.switches), model.weights, model.recipe)
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
    return captured(tmp_path_factory.mktemp("cuts") / "whole", WHOLE)


def test_a_prompt_in_chunks_is_the_same_prompt(whole: Path, tmp_path: Path) -> None:
    found = compare_runs(whole, captured(tmp_path / "chunks", CHUNKS))
    assert found.verdict is Verdict.AGREES, found.sentence
    assert (found.tokens, found.steps) == (len(IDS), 0)
    assert "44 tokens" in found.sentence
    assert any("cut otherwise" in note for note in found.notes)
    lines = {(line.component, line.output): line for line in found.lines}
    assert lines[NORM, "out"].calls == len(IDS)
    assert lines[NORM, "out"].elements == len(IDS) * 128
    assert compared_document(found)["tokens"] == len(IDS)


@pytest.mark.parametrize("odd", [NORM, ATTEND])
def test_what_differs_is_told_by_sequence_and_position(
    whole: Path, tmp_path: Path, odd: str
) -> None:
    found = compare_runs(whole, captured(tmp_path / "odd", CHUNKS, odd))
    assert found.verdict is Verdict.DIFFERS, "another cut is another question"
    assert found.same_candidate
    first = found.origins[0]
    assert (first.component, first.own) == (odd, (0, 4))
    (origin, *_) = compared_document(found)["origins"]
    assert origin.where == {"sequence": 0, "position": 4}
    told = "\n".join(compared_lines(found))
    assert "first in sequence 0, position 4, on equal inputs" in told
    behind = {line.component: line for line in found.lines}
    assert behind["layers.0.ffn.norm"].equal
    assert not behind["norm"].equal
    assert behind["norm"].own is None, "it inherits"


def test_runs_that_are_cut_alike_or_of_other_prompts_are_compared_by_steps(
    whole: Path, tmp_path: Path
) -> None:
    alike = captured(tmp_path / "alike", WHOLE)
    assert compare_runs(whole, alike).tokens == 0
    other = captured(tmp_path / "other", CHUNKS, ids=(*IDS[:20], 3, *IDS[21:]))
    with pytest.raises(Undecided, match="steps in common"):
        compare_runs(whole, other)
    parted = captured(tmp_path / "parted", CHUNKS, ids=(*IDS[:42], IDS[42] + 1, 4))
    assert compare_runs(whole, parted).tokens == 42


def test_what_has_no_row_a_token_is_left_out(whole: Path, tmp_path: Path) -> None:
    sides = (Capture.open(whole), Capture.open(captured(tmp_path / "chunks", CHUNKS)))
    made, left = beside_by_tokens(sides, tokens_in_common(*sides))
    assert left > 0
    assert {each.calls for each in made} <= {len(IDS), 0}
    assert not any(each.output == "entry_offsets" for each in made)
