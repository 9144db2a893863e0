"""Judging a small model: an oracle scores full, a guesser does not, and patches take away."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from degarble.references.binding import Bound
from degarble.references.model.v4 import ModelV4
from degarble.references.model.v32 import ModelV32
from degarble.references.numerics import Numerics
from degarble.references.state import Sequence
from degarble.references.tiny import figures, words
from degarble.references.tiny.configs import TINY_V4, TINY_V32
from degarble.references.tiny.language import document
from degarble.references.weights import random_weights


def _oracle(ids: list[int]) -> torch.Tensor:
    logits = torch.zeros(len(ids), words.SIZE)
    logits[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] = 30.0
    return logits


def test_an_oracle_scores_full(seed: int) -> None:
    told = figures.score([document(seed), document(seed + 1)], _oracle)
    for kind in (figures.NEAR, *figures.FAR, "sum", "copy"):
        assert told.asked[kind] > 0, kind
        assert told.share(kind) == 1.0
    assert told.perplexity < 1.001


def test_a_guesser_does_not(seed: int) -> None:
    told = figures.score([document(seed)], lambda ids: torch.zeros(len(ids), words.SIZE))
    assert told.share(*figures.FAR, "sum", "copy") < 0.05
    assert told.perplexity == pytest.approx(words.SIZE)


def test_chance_is_one_of_the_words_that_a_relation_takes(seed: int) -> None:
    probes = [each for each in document(seed).probes if each.kind == "recall"]
    counts = {figures.possible(each) for each in probes}
    assert counts <= {12, 16}
    told = figures.score([document(seed)], _oracle)
    kinds = (figures.NEAR, *figures.FAR)
    expected = sum(1 / figures.possible(each) for each in probes) / len(probes)
    assert told.chance(*kinds) == pytest.approx(expected)
    assert 1 / 16 <= told.chance(*figures.FAR) <= 1 / 12


def test_few_questions_leave_a_share_open() -> None:
    told = figures.Score(Counter(sum=164), Counter(sum=17))
    assert told.interval("sum") == pytest.approx((0.0658, 0.1599), abs=1e-3)
    many = figures.Score(Counter(sum=1640), Counter(sum=170))
    assert many.interval("sum") == pytest.approx((0.0899, 0.1193), abs=1e-3)
    assert figures.Score().interval("sum") == (0.0, 1.0)


def test_a_kind_that_was_not_asked_has_no_share() -> None:
    assert math.isnan(figures.Score().share("sum"))


def test_only_sentences_are_judged_as_sentences() -> None:
    text = "the fox sees a tree . anna paints blue . recall : anna paints blue . copy : red , red ."
    text += " 3 plus 4 is 7 . the foxes sees a tree . anna the sees . many fox"
    assert figures.sentences_in(text) == [
        "the fox sees a tree .",
        "the foxes sees a tree .",
        "anna the sees .",
    ]
    assert figures.grammatical([text, "a owl sees the fox ."]) == (1, 4)


@pytest.mark.parametrize("family", ["v4", "v32"])
def test_ablations_change_far_tokens_and_no_near_ones(family: str, seed: int) -> None:
    config = TINY_V4 if family == "v4" else TINY_V32
    weights = random_weights(config, seed % 1000, torch.float32)
    ids = torch.randint(0, words.SIZE, (256,), generator=torch.Generator().manual_seed(seed))

    def logits(patch: str) -> torch.Tensor:
        bound = Bound(config, Numerics.definition(torch.float32), weights)
        if patch == "window":
            figures.window_only(bound)
        elif patch == "chance":
            figures.random_choice(bound, 1)
        model = ModelV4(bound, config) if family == "v4" else ModelV32(bound, config)  # type: ignore[arg-type]
        with torch.inference_mode():
            return model.forward([Sequence()], [ids])

    plain = logits("")
    for patch in ("window", "chance"):
        changed = (logits(patch) - plain).abs().amax(-1)
        assert changed[-1] > 1e-3, patch
        # The first entry is complete behind token 3; V3.2 has all tokens of the window.
        early = 3 if family == "v4" else 60
        assert changed[:early].max() < 1e-5, patch
