"""Log-probabilities of a text are those of one forward pass, whatever is cut into pieces."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference import generation
from degarble.harness.inference.generation import TokenLikelihoods, token_likelihoods
from degarble.references.state import Sequence
from degarble.suites.inference.speaking_cases import ids, speaker

TEXT = ids(3, 150)


def whole(family: str, text: list[int]) -> torch.Tensor:
    """By the definition: one pass, log-softmax of all logits."""
    made = speaker(family)
    logits = made.logits(made.hidden([Sequence()], [torch.tensor(text)]))
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
