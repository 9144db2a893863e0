"""Choices from logits against a count of their frequencies; seeds; logits that are not finite."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.inference.generation import Sampling

LOGITS = torch.tensor([0.0, 2.0, 2.0, -1.0, 1.0])
DRAWS = 4000


def frequencies(sampling: Sampling) -> torch.Tensor:
    sampler = sampling.sampler()
    drawn = torch.tensor([sampler(LOGITS) for _ in range(DRAWS)])
    return torch.bincount(drawn, minlength=5) / DRAWS


def test_the_likeliest_is_taken_and_ties_go_to_the_lower_id() -> None:
    sampler = Sampling().sampler()
    assert [sampler(LOGITS) for _ in range(5)] == [1] * 5
    for how in (Sampling(1.0, 0.0), Sampling(1e-320, 0.2), Sampling(1e-320, 0.4, 9)):
        assert how.sampler()(LOGITS) in (1, 2)
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
