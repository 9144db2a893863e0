"""Attention over one latent, token by token from the formula; windows, sinks, poison."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.references import attention
from degarble.references.numerics import Numerics

EXACT = Numerics.definition()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(q: torch.Tensor, rows: list[torch.Tensor], sink: float) -> torch.Tensor:
    """One head of one token over its listed rows."""
    logits = [float(q @ row) * len(q) ** -0.5 for row in rows]
    total = sum(math.exp(v) for v in logits)
    parts = [math.exp(v) * row for v, row in zip(logits, rows, strict=True)]
    mixed = torch.stack(parts).sum(0) if parts else torch.zeros_like(q)
    return mixed / (total + math.exp(sink))


def case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, rows, sink = noise(6, 3, 8, seed=seed), noise(9, 8, seed=seed + 1), noise(3, seed=seed)
    seen = torch.rand(6, 9, generator=torch.Generator().manual_seed(seed)) < 0.5
    seen[2] = False  # a token that sees nothing
    seen[3] = True
    return q, rows, seen, sink


def test_output_follows_the_formula(seed: int) -> None:
    q, rows, seen, sink = case(seed)
    out = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    for t in range(6):
        for h in range(3):
            listed = [rows[r] for r in range(9) if seen[t, r]]
            expected = by_hand(q[t, h], listed, float(sink[h]))
            assert (out[t, h] - expected).abs().max() < 1e-13
    assert not out[2].any()
    whole = attention.attend(q, [rows], None, sink, EXACT)
    assert (whole[3] - out[3]).abs().max() < 1e-14
    deaf = attention.attend(
        q, [rows[:4], rows[4:]], seen, torch.full((3,), -torch.inf).double(), EXACT
    )
    assert (deaf[3] - out[3]).abs().max() > 1e-3  # a lost sink is seen


def test_no_rows_at_all_yield_zero(seed: int) -> None:
    q, rows, seen, sink = case(seed)
    assert not attention.attend(q, [rows[:0]], seen[:, :0], sink, EXACT).any()
    assert not attention.attend(q, [], None, sink, EXACT).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e308])
def test_rows_that_are_not_visible_cannot_reach_a_token(poison: float, seed: int) -> None:
    q, rows, seen, sink = case(seed)
    clean = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    seen[:3, 4], seen[3:, 4] = False, True
    clean = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    rows[4] = poison
    out = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    assert (out[:3] - clean[:3]).abs().max() < 1e-13
    assert not torch.isfinite(out[3:]).all() or poison == 1e308


def test_steps_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    q, rows, seen, sink = case(seed)
    whole = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    monkeypatch.setattr(attention, "_LOGIT_BYTES", 2 * 3 * 9 * 8)
    out = attention.attend(q, [rows[:4], rows[4:]], seen, sink, EXACT)
    assert (out - whole).abs().max() < 1e-14


def test_window_ends_with_the_token_itself() -> None:
    positions = torch.tensor([2, 3, 9])
    seen = attention.window_rows(positions, first=1, rows=9, window=3)
    rows = range(1, 10)
    expected = [[t - 3 < r <= t for r in rows] for t in positions.tolist()]
    assert seen.tolist() == expected
    assert seen[2].tolist() == [r in (7, 8, 9) for r in rows]
    off = attention.window_rows(positions, first=1, rows=9, window=4)
    assert not torch.equal(off, seen)


def test_listed_rows_pass_over_what_is_missing() -> None:
    chosen = torch.tensor([[3, -1, 0], [5, 9, -1]])  # of six rows; 9 does not exist
    index, seen = attention.listed_rows(chosen, 6)
    assert index == slice(0, 6)
    assert seen is not None
    assert seen.tolist() == [[r in (0, 3) for r in range(6)], [r == 5 for r in range(6)]]
    index, seen = attention.listed_rows(chosen[:1], 6)
    assert seen is None
    assert isinstance(index, torch.Tensor)
    assert index.tolist() == [3, 0]


def test_stored_weights_are_the_unnormalised_ones(seed: int) -> None:
    q, rows, seen, sink = (t.bfloat16() if t.is_floating_point() else t for t in case(seed))
    out = attention.attend(q, [rows[:4], rows[4:]], seen, sink, Numerics.bf16())
    logit = torch.einsum("thl,rl->thr", q.float(), rows.float()) * 8**-0.5
    logit = logit.masked_fill(~seen[:, None], -math.inf)
    peak = logit.amax(-1, keepdim=True).clamp(min=-1e30)
    weight = torch.exp(logit - peak)
    total = weight.sum(-1) + torch.exp(sink.float() - peak[..., 0])
    stored = torch.einsum("thr,rl->thl", weight.bfloat16().float(), rows.float())
    expected = (stored / total[..., None]).bfloat16()
    assert (out.float() - expected.float()).abs().max() <= 2**-8 * out.float().abs().max()
    shares = torch.einsum(
        "thr,rl->thl", (weight / total[..., None]).bfloat16().float(), rows.float()
    ).bfloat16()
    assert not torch.equal(out, shares)
    unstored = torch.einsum("thr,rl->thl", weight, rows.float()) / total[..., None]
    assert (out != expected).sum() < (out != unstored.bfloat16()).sum()


def test_the_other_softmax_stores_logits_and_shares(seed: int) -> None:
    q, rows, seen, sink = (t.bfloat16() if t.is_floating_point() else t for t in case(seed))
    out = attention.attend(
        q, [rows[:4], rows[4:]], seen, sink, Numerics.bf16(attention_in_storage_dtype=True)
    )
    logit = (torch.einsum("thl,rl->thr", q.float(), rows.float()).bfloat16() * 8**-0.5).masked_fill(
        ~seen[:, None], -math.inf
    )
    both = torch.cat((logit, sink.expand(6, 3)[..., None]), -1)
    share = torch.softmax(both - both.amax(-1, keepdim=True), -1)[..., :-1]
    expected = torch.einsum("thr,rl->thl", share.float(), rows.float()).bfloat16()
    assert torch.equal(out, expected)
    official = attention.attend(q, [rows[:4], rows[4:]], seen, sink, Numerics.bf16())
    assert not torch.equal(out, official)


def test_grouped_output_keeps_groups_apart(seed: int) -> None:
    o, w = noise(4, 12, seed=seed), noise(3, 2, 4, seed=seed + 1)
    made = attention.grouped(o, w, EXACT)
    for g in range(3):
        assert (made[:, 2 * g : 2 * g + 2] - o[:, 4 * g : 4 * g + 4] @ w[g].T).abs().max() < 1e-14
