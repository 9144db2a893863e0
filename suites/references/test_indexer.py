"""Indexer scores and choice against their formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.references import sparse_attention
from degarble.references.numerics import Numerics

EXACT = Numerics.definition()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_entry_is_visible_from_its_last_token_on() -> None:
    positions = torch.arange(0, 20)
    made = sparse_attention.visible_entries(positions, 4).tolist()
    assert made == [sum(4 * w + 3 <= t for w in range(20)) for t in range(20)]
    assert made[:9] == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    heavy = sparse_attention.visible_entries(torch.tensor([126, 127, 128, 255]), 128)
    assert heavy.tolist() == [0, 1, 1, 2]


def test_scores_sum_rectified_products(seed: int) -> None:
    q, k = noise(5, 3, 4, seed=seed), noise(6, 4, seed=seed + 1)
    w, visible = noise(5, 3, seed=seed + 2), torch.tensor([0, 1, 3, 6, 6])
    made = sparse_attention.indexer_scores(q, k, w, visible, EXACT)
    for t in range(5):
        for e in range(6):
            expected = -math.inf
            if e < int(visible[t]):
                dots = (q[t] @ k[e]).tolist()
                expected = sum(max(d, 0.0) * g for d, g in zip(dots, w[t].tolist(), strict=True))
            assert float(made[t, e]) == pytest.approx(expected, abs=1e-12)
    early = sparse_attention.indexer_scores(q, k, w, visible + 1, EXACT)
    assert not torch.equal(early, made)  # an entry visible one token early is seen


def test_steps_do_not_change_scores(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    q, k, w = noise(9, 3, 4, seed=seed), noise(6, 4, seed=seed), noise(9, 3, seed=seed)
    whole = sparse_attention.indexer_scores(q, k, w, torch.full((9,), 6), EXACT)
    monkeypatch.setattr(sparse_attention, "_SCORE_BYTES", 2 * 3 * 6 * 8)
    assert (
        sparse_attention.indexer_scores(q, k, w, torch.full((9,), 6), EXACT) - whole
    ).abs().max() < 1e-14


def test_official_scores_are_stored_at_every_step(seed: int) -> None:
    q, k, w = (noise(*s, seed=seed).bfloat16() for s in ((2, 3, 8), (5, 8), (2, 3)))
    visible = torch.full((2,), 5)
    official = sparse_attention.indexer_scores(q, k, w, visible, Numerics.bf16())
    dots = torch.relu(torch.einsum("tni,wi->tnw", q.float(), k.float())).bfloat16()
    assert torch.equal(official, (dots * w[..., None]).sum(1).float())
    plain = sparse_attention.indexer_scores(
        q, k, w, visible, Numerics.bf16(indexer_in_storage_dtype=False)
    )
    exact = torch.einsum("tnw,tn->tw", torch.einsum("tni,wi->tnw", q.double(), k.double()).relu(),
                         w.double())  # fmt: skip
    assert (plain - exact).abs().max() < 1e-5
    assert not torch.equal(plain, official)


def test_choice_prefers_the_lower_of_equals_and_marks_what_is_missing() -> None:
    inf = math.inf
    scores = torch.tensor([[0.0, 3.0, 0.0, 3.0], [1.0, -inf, -inf, -inf], [-inf, -inf, -inf, -inf]])
    assert sparse_attention.top_k(scores, 3).tolist() == [[1, 3, 0], [0, -1, -1], [-1, -1, -1]]
    assert sparse_attention.top_k(scores, 9).shape == (3, 4)
    assert sparse_attention.top_k(scores[:, :0], 3).shape == (3, 0)


def test_choice_is_a_stable_sort(seed: int) -> None:
    scores = torch.randint(0, 4, (40, 30), generator=torch.Generator().manual_seed(seed)).double()
    made = sparse_attention.top_k(scores, 7).tolist()
    for row, chosen in zip(scores.tolist(), made, strict=True):
        assert chosen == sorted(range(30), key=lambda i: (-row[i], i))[:7]
