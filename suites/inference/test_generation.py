"""Generation, sampling and perplexity against their definitions; every way to end; refusals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference import generation
from degarble.harness.inference.generation import (
    Continuation,
    Finish,
    Generation,
    Limits,
    Sampling,
    TokenLikelihoods,
    token_likelihoods,
)
from degarble.references.model import Sequence
from degarble.suites.inference.speaking_cases import V4, Letters, ids, scripted, speaker

if TYPE_CHECKING:
    from degarble.harness.inference.model import LogitsModel


# --------------------------------------------------------------------------------------------------
# Generation: company, caches and pieces change nothing; every way to end; refusals.

PROMPTS = [ids(n, length) for n, length in enumerate((1, 40, 131, 7))]
TALK = Sampling(1.0, 0.9, 5)


def run(model: LogitsModel, prompts: list[list[int]], **how: Any) -> list[Continuation]:
    continuations = [Continuation(prompt) for prompt in prompts]
    sampling = how.get("sampling", Sampling())
    Generation(model, None, sampling, Limits(how.get("tokens", 6))).run(continuations)
    return continuations


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_tokens_are_those_of_whole_forward_passes(family: str) -> None:
    """Greedy, without a cache: each token from a pass over everything before it."""
    model = speaker(family)
    (continuation,) = run(model, [PROMPTS[1]])
    known = list(PROMPTS[1])
    for token in continuation.ids:
        logits = model.next_logits([Sequence()], [torch.tensor(known)])
        assert token == int(logits[0].argmax())
        known.append(token)
    assert continuation.finish is Finish.LENGTH


@pytest.mark.parametrize(("family", "sampling"), [("v4", TALK), ("v32", Sampling())])
def test_batching_changes_no_token(
    family: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = speaker(family)
    alone = [run(model, [prompt], sampling=sampling)[0].ids for prompt in PROMPTS]
    assert [continuation.ids for continuation in run(model, PROMPTS, sampling=sampling)] == alone
    # Prompts that wait, join later, and come in other pieces.
    monkeypatch.setattr(generation, "MOST_CONCURRENT", 2)
    monkeypatch.setattr(generation, "STEP_TOKENS", 50)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 32)
    assert [continuation.ids for continuation in run(model, PROMPTS, sampling=sampling)] == alone


def test_a_seed_decides_what_is_drawn() -> None:
    model = speaker("v4")
    first, again = (run(model, PROMPTS[:2], sampling=TALK) for _ in range(2))
    assert [continuation.ids for continuation in first] == [
        continuation.ids for continuation in again
    ]
    other = run(model, PROMPTS[:2], sampling=Sampling(1.0, 0.9, 6))
    assert [continuation.ids for continuation in first] != [
        continuation.ids for continuation in other
    ]


def test_a_sequence_with_a_computed_beginning_is_continued() -> None:
    model = speaker("v4")
    (whole,) = run(model, [PROMPTS[2]])
    kept = Sequence()
    model.hidden([kept], [torch.tensor(PROMPTS[2][:50])])
    continuation = Continuation(PROMPTS[2], kept)
    generation_ = Generation(model, None, None, Limits(6))
    generation_.run([continuation])
    assert continuation.ids == whole.ids
    assert generation_.pace.prompt_tokens == len(PROMPTS[2]) - 50


def speak(
    script: list[int], stops: tuple[str, ...] = (), tokens: int = 99, length: int = 3
) -> Continuation:
    """One prompt; the model says `script`, then ends."""
    model = scripted(speaker("v4"), lambda n: dict(enumerate(script, length)).get(n, 63))
    tokenizer: Any = Letters()
    pieces: list[str] = []
    continuation = Continuation([1] * length)
    heard = Generation(model, tokenizer, None, Limits(tokens, stops))
    heard.run([continuation], lambda _speech, piece: pieces.append(piece))
    assert "".join(pieces) == continuation.text
    return continuation


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
    continuations = [Continuation([1]), Continuation(prompt)]
    with pytest.raises(InvalidArgument, match=match):
        Generation(speaker("v4")).run(continuations)
    assert not continuations[0].ids


# --------------------------------------------------------------------------------------------------
# Choices from logits against a count of their frequencies; seeds; logits that are not finite.

LOGITS = torch.tensor([0.0, 2.0, 2.0, -1.0, 1.0])
DRAWS = 4000


def frequencies(sampling: Sampling) -> torch.Tensor:
    sampler = sampling.sampler()
    drawn = torch.tensor([sampler(LOGITS) for _ in range(DRAWS)])
    return torch.bincount(drawn, minlength=5) / DRAWS


def test_the_likeliest_is_taken_and_ties_go_to_the_lower_id() -> None:
    sampler = Sampling().sampler()
    assert [sampler(LOGITS) for _ in range(5)] == [1] * 5
    for sampling in (Sampling(1.0, 0.0), Sampling(1e-320, 0.2), Sampling(1e-320, 0.4, 9)):
        assert sampling.sampler()(LOGITS) in (1, 2)
    assert Sampling(2.0, 0.0).sampler()(LOGITS) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    wanted = torch.softmax(LOGITS / temperature, -1)
    found = frequencies(Sampling(temperature, 1.0, 3))
    assert (found - wanted).abs().max() < 4 * (0.25 / DRAWS) ** 0.5


def test_top_p_keeps_the_smallest_set_that_reaches_the_share() -> None:
    share = torch.softmax(LOGITS, -1)
    assert share[1] + share[2] < 0.85 < share[1] + share[2] + share[4]
    found = frequencies(Sampling(1.0, 0.85, 3))
    assert (found > 0).tolist() == [False, True, True, False, True]
    kept = share * torch.tensor([0, 1, 1, 0, 1])
    assert (found - kept / kept.sum()).abs().max() < 4 * (0.25 / DRAWS) ** 0.5


def test_a_share_that_is_reached_exactly_takes_no_more() -> None:
    even = torch.tensor([0.0, -1e4, 0.0])  # shares 0.5, 0, 0.5
    found = [Sampling(1.0, 0.5, seed).sampler()(even) for seed in range(20)]
    assert found == [0] * 20


def test_a_seed_decides_everything() -> None:
    first, again, other = (Sampling(1.0, 1.0, seed).sampler() for seed in (5, 5, 6))
    ones = [first(LOGITS) for _ in range(50)]
    assert ones == [again(LOGITS) for _ in range(50)]
    assert ones != [other(LOGITS) for _ in range(50)]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_refused(wrong: float) -> None:
    sampler = Sampling().sampler()
    sampler(LOGITS)
    broken = LOGITS.clone()
    broken[2] = wrong
    with pytest.raises(InvalidArgument, match="logits of new token 1"):
        sampler(broken)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_capture_goes_on_with_the_likeliest_finite_one(wrong: float) -> None:
    sampler = Sampling(goes_on=True).sampler()
    broken = LOGITS.clone()
    broken[1] = wrong
    assert [sampler(LOGITS), sampler(broken)] == [1, 2]
    assert sampler(torch.full_like(LOGITS, wrong)) == 0


# --------------------------------------------------------------------------------------------------
# Log-probabilities of a text are those of one forward pass, whatever is cut into pieces.

TEXT = ids(3, 150)


def whole(family: str, text: list[int]) -> torch.Tensor:
    """By the definition: one pass, log-softmax of all logits."""
    model = speaker(family)
    logits = model.logits(model.hidden([Sequence()], [torch.tensor(text)]))
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_log_probabilities_are_those_of_a_whole_pass(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = whole(family, TEXT)
    for piece, logits in ((8192, 1 << 24), (128, 64 * 50), (33, 64)):
        monkeypatch.setattr(generation, "_LOGITS", logits)
        seen: list[int] = []
        found = token_likelihoods(speaker(family), TEXT, seen.append, piece=piece)
        assert (
            torch.tensor(found.log_probabilities, dtype=torch.float64) - wanted
        ).abs().max() < 1e-11, piece
        assert seen[-1] == len(TEXT) - 1
        assert found.loss == pytest.approx(-float(wanted.mean()), abs=1e-11)
        assert found.perplexity == pytest.approx(math.exp(-float(wanted.mean())), rel=1e-10)


def test_an_impossible_text_has_an_infinite_perplexity() -> None:
    assert TokenLikelihoods((-1e6, -1e6)).perplexity == math.inf


@pytest.mark.parametrize("length", [0, 1, 401])
def test_texts_that_do_not_fit_are_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{length} tokens"):
        token_likelihoods(speaker("v4"), [1] * length)
