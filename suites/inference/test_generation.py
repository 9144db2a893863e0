"""Generation: company, caches and pieces change nothing; every way to end; refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference import generation
from degarble.harness.inference.generation import Continuation, Finish, Generation, Limits, Sampling
from degarble.references.state import Sequence
from degarble.suites.inference.speaking_cases import V4, Letters, ids, scripted, speaker

if TYPE_CHECKING:
    from degarble.harness.inference.model import LogitsModel

PROMPTS = [ids(n, length) for n, length in enumerate((1, 40, 131, 7))]
TALK = Sampling(1.0, 0.9, 5)


def run(made: LogitsModel, prompts: list[list[int]], **how: Any) -> list[Continuation]:
    speeches = [Continuation(prompt) for prompt in prompts]
    sampling = how.get("sampling", Sampling())
    Generation(made, None, sampling, Limits(how.get("tokens", 6))).run(speeches)
    return speeches


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_tokens_are_those_of_whole_forward_passes(family: str) -> None:
    """Greedy, without a cache: each token from a pass over everything before it."""
    made = speaker(family)
    (speech,) = run(made, [PROMPTS[1]])
    known = list(PROMPTS[1])
    for token in speech.ids:
        logits = made.next_logits([Sequence()], [torch.tensor(known)])
        assert token == int(logits[0].argmax())
        known.append(token)
    assert speech.finish is Finish.LENGTH


@pytest.mark.parametrize(("family", "sampling"), [("v4", TALK), ("v32", Sampling())])
def test_company_changes_no_token(
    family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = speaker(family)
    alone = [run(made, [prompt], sampling=sampling)[0].ids for prompt in PROMPTS]
    assert [each.ids for each in run(made, PROMPTS, sampling=sampling)] == alone
    # Prompts that wait, join later, and come in other pieces.
    monkeypatch.setattr(generation, "MOST_CONCURRENT", 2)
    monkeypatch.setattr(generation, "STEP_TOKENS", 50)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 32)
    assert [each.ids for each in run(made, PROMPTS, sampling=sampling)] == alone


def test_a_seed_decides_what_is_drawn() -> None:
    made = speaker("v4")
    first, again = (run(made, PROMPTS[:2], sampling=TALK) for _ in range(2))
    assert [each.ids for each in first] == [each.ids for each in again]
    other = run(made, PROMPTS[:2], sampling=Sampling(1.0, 0.9, 6))
    assert [each.ids for each in first] != [each.ids for each in other]


def test_a_sequence_that_has_seen_the_beginning_is_continued() -> None:
    made = speaker("v4")
    (whole,) = run(made, [PROMPTS[2]])
    kept = Sequence()
    made.hidden([kept], [torch.tensor(PROMPTS[2][:50])])
    speech = Continuation(PROMPTS[2], kept)
    generation_ = Generation(made, None, None, Limits(6))
    generation_.run([speech])
    assert speech.ids == whole.ids
    assert generation_.pace.prompt_tokens == len(PROMPTS[2]) - 50


def speak(
    script: list[int], stops: tuple[str, ...] = (), tokens: int = 99, length: int = 3
) -> Continuation:
    """One prompt; the model says `script`, then ends."""
    made = scripted(speaker("v4"), lambda n: dict(enumerate(script, length)).get(n, 63))
    tokenizer: Any = Letters()
    pieces: list[str] = []
    speech = Continuation([1] * length)
    heard = Generation(made, tokenizer, None, Limits(tokens, stops))
    heard.run([speech], lambda _speech, piece: pieces.append(piece))
    assert "".join(pieces) == speech.text
    return speech


def test_every_way_to_end() -> None:
    ended = speak([40, 41, 42])
    assert (ended.text, ended.ids, ended.finish) == ("IJK", [40, 41, 42, 63], Finish.END)
    stopped = speak([40, 41, 42, 43], ("JK",))
    assert (stopped.text, stopped.ids, stopped.finish) == ("I", [40, 41, 42], Finish.STOP)
    cut = speak([40, 41, 42, 43], ("KZ",), tokens=3)
    assert (cut.text, cut.ids, cut.finish) == ("IJK", [40, 41, 42], Finish.LENGTH)
    full = speak([40] * 500, tokens=999, length=397)
    assert (len(full.all_ids), full.finish) == (V4.max_position_embeddings, Finish.CONTEXT)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [([], "prompt 2"), ([64], "ids below 64"), ([-1], "ids below 64"), ([1] * 400, "context")],
)
def test_prompts_that_do_not_fit_are_refused_before_anything_runs(
    prompt: list[int], match: str
) -> None:
    speeches = [Continuation([1]), Continuation(prompt)]
    with pytest.raises(InvalidArgument, match=match):
        Generation(speaker("v4")).run(speeches)
    assert not speeches[0].ids
