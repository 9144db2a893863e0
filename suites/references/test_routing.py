"""Expert choice against its formulas, row by row, with ties and group limits."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.references import experts
from degarble.references.numerics import Numerics

EXACT = Numerics.definition()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scores_are_roots_of_softplus() -> None:
    x = [-40.0, -1.0, 0.0, 2.0, 19.9, 20.1, 300.0]
    expected = [math.sqrt(math.log1p(math.exp(v)) if v <= 20 else v) for v in x]
    made = experts.sqrt_softplus(torch.tensor(x, dtype=torch.float64))
    assert made.tolist() == pytest.approx(expected, rel=1e-12)


def test_choice_is_by_size_and_ties_go_to_the_lower_id() -> None:
    scores = torch.tensor([[0.5, 2.0, 0.5, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert experts.largest_experts(scores, 3).tolist() == [[1, 3, 0], [0, 1, 2]]


def test_choice_before_or_after_the_scoring_function_is_the_same(seed: int) -> None:
    """A negative control: without a bias both orders are right, so they must not be told apart."""
    logits = noise(50, 8, seed=seed)
    expected = experts.largest_experts(logits, 3)
    assert torch.equal(experts.largest_experts(experts.sqrt_softplus(logits), 3), expected)
    assert torch.equal(experts.largest_experts(torch.sigmoid(logits), 3), expected)
    biased = experts.largest_experts(experts.sqrt_softplus(logits) + noise(8, seed=seed + 1), 3)
    assert not torch.equal(biased, expected)


def test_weights_are_shares_of_the_chosen_scores(seed: int) -> None:
    scores = noise(4, 6, seed=seed).abs()
    chosen = experts.largest_experts(scores, 2)
    made = experts.router_weights(scores, chosen, 2.5, 0.0)
    for row, ids, out in zip(scores.tolist(), chosen.tolist(), made.tolist(), strict=True):
        total = sum(row[i] for i in ids)
        assert out == pytest.approx([2.5 * row[i] / total for i in ids])
    assert made.sum(-1).tolist() == pytest.approx([2.5] * 4)
    assert (experts.router_weights(scores, chosen, 2.5, 0.1) < made).all()  # an epsilon is seen


def test_groups_are_worth_their_two_best(seed: int) -> None:
    scores = noise(7, 12, seed=seed)
    made = experts.grouped_scores(scores, experts.GroupFacts(groups=4, kept=2))
    for row, out in zip(scores.tolist(), made.tolist(), strict=True):
        groups = [row[3 * g : 3 * g + 3] for g in range(4)]
        worth = [sum(sorted(group)[-2:]) for group in groups]
        best = sorted(range(4), key=lambda g: -worth[g])[:2]
        expected = [v if i // 3 in best else -math.inf for i, v in enumerate(row)]
        assert out == expected
        by_one = sorted(range(4), key=lambda g: -max(groups[g]))[:2]
        if set(by_one) != set(best):
            break
    else:
        pytest.fail("no row tells two best from one")


def test_router_rounds_only_where_the_switch_says(seed: int) -> None:
    x, w = noise(3, 16, seed=seed).bfloat16(), noise(5, 16, seed=seed + 1).bfloat16()
    official = experts.router_logits(x, w, Numerics.bf16())
    assert torch.equal(official, x.float() @ w.float().T)
    theirs = experts.router_logits(x, w, Numerics.bf16(router_in_storage_dtype=True))
    assert theirs.dtype is torch.bfloat16
    assert torch.equal(theirs, official.bfloat16())
    assert not torch.equal(theirs.float(), official)
