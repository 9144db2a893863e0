"""MLA in both forms against the formula, head by head, and against each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from degarble.harness.model.config.config import V3_2, small_v32
from degarble.harness.model.types import Yarn
from degarble.references import attention
from degarble.references.numerics import Numerics

EXACT = Numerics.definition()
FORM = attention.Form(nope=3, value=5, scale=0.3, logits_stored=True)
HEADS, LATENT, ROTATED = 4, 6, 2


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(seed: int) -> tuple[torch.Tensor, ...]:
    q = noise(5, HEADS, FORM.nope + ROTATED, seed=seed)
    rows = noise(7, LATENT + ROTATED, seed=seed + 1)
    wkv_b = noise(HEADS * (FORM.nope + FORM.value), LATENT, seed=seed + 2)
    seen = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[0] = False
    seen[1] = True
    return q, rows, wkv_b, seen


def by_hand(
    q: torch.Tensor, rows: torch.Tensor, wkv_b: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(5, HEADS, FORM.value, dtype=torch.float64)
    per_head = wkv_b.reshape(HEADS, FORM.nope + FORM.value, LATENT)
    for t in range(5):
        for h in range(HEADS):
            logits, values = [], []
            for r in range(7):
                if seen[t, r]:
                    both = per_head[h] @ rows[r, :LATENT]
                    key = torch.cat((both[: FORM.nope], rows[r, LATENT:]))
                    logits.append(float(q[t, h] @ key) * FORM.scale)
                    values.append(both[FORM.nope :])
            total = sum(math.exp(v) for v in logits)
            for logit, value in zip(logits, values, strict=True):
                out[t, h] += math.exp(logit) / total * value
    return out.flatten(1)


def test_both_forms_follow_the_formula(seed: int) -> None:
    q, rows, wkv_b, seen = case(seed)
    expected = by_hand(q, rows, wkv_b, seen)
    absorbed = attention.attend_absorbed(q, rows, wkv_b, seen, FORM, EXACT)
    expanded = rows[:, :LATENT] @ wkv_b.T
    naive = attention.attend_naive(q, rows[:, LATENT:], expanded, seen, FORM, EXACT)
    assert (absorbed - expected).abs().max() < 1e-13
    assert (naive - expected).abs().max() < 1e-13
    assert not absorbed[0].any()
    values_first = wkv_b.reshape(HEADS, -1, LATENT).roll(FORM.value, 1).reshape(wkv_b.shape)
    wrong = attention.attend_absorbed(q, rows, values_first, seen, FORM, EXACT)
    assert (wrong - expected).abs().max() > 0.1  # value rows in front of key rows are seen


def test_logits_are_stored_where_the_sources_do(seed: int) -> None:
    q, rows, wkv_b, seen = (t.bfloat16() if t.is_floating_point() else t for t in case(seed))
    numerics = Numerics.bf16()
    made = [
        attention.attend_absorbed(
            q, rows, wkv_b, seen, replace(FORM, logits_stored=stored), numerics
        )
        for stored in (True, False)
    ]
    exact = by_hand(q.double(), rows.double(), wkv_b.double(), seen)
    for out in made:
        assert (out.double() - exact).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(made[0], made[1])


def test_a_row_that_is_not_visible_cannot_reach_a_token(seed: int) -> None:
    q, rows, wkv_b, seen = case(seed)
    seen[:3, 2], seen[3:, 2] = False, True
    clean = attention.attend_absorbed(q, rows, wkv_b, seen, FORM, EXACT)
    rows[2] = math.nan
    out = attention.attend_absorbed(q, rows, wkv_b, seen, FORM, EXACT)
    assert (out[:3] - clean[:3]).abs().max() < 1e-13
    assert torch.isnan(out[3:]).all()


def test_scale_has_mscale_squared_only_with_yarn() -> None:
    small = small_v32()
    assert attention.softmax_scale(replace(small, yarn=None)) == small.qk_head_dim**-0.5
    ratio = attention.softmax_scale(V3_2) / V3_2.qk_head_dim**-0.5
    assert ratio == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_logits_follow_mscale_all_dim_alone() -> None:
    yarn = Yarn(factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.7)
    config = small_v32(yarn=yarn)
    ratio = attention.softmax_scale(config) / config.qk_head_dim**-0.5
    assert ratio == pytest.approx((0.07 * math.log(40) + 1) ** 2)
