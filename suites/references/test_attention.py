"""Attention, the indexer and the compressor against their formulas, token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.config.config import V3_2, small_v32
from degarble.harness.model.types import Rope, RopeEnd, RopePairing, Yarn
from degarble.references import attention, elementary, sparse_attention
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Sequence


# --------------------------------------------------------------------------------------------------
# Attention over one latent, token by token from the formula; windows, sinks, poison.

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


# --------------------------------------------------------------------------------------------------
# MLA in both forms against the formula, head by head, and against each other.

FORM = attention.Form(nope=3, value=5, scale=0.3, logits_stored=True)
HEADS, LATENT, ROTATED = 4, 6, 2


def latent_case(seed: int) -> tuple[torch.Tensor, ...]:
    q = noise(5, HEADS, FORM.nope + ROTATED, seed=seed)
    rows = noise(7, LATENT + ROTATED, seed=seed + 1)
    wkv_b = noise(HEADS * (FORM.nope + FORM.value), LATENT, seed=seed + 2)
    seen = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[0] = False
    seen[1] = True
    return q, rows, wkv_b, seen


def latent_by_hand(
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
    q, rows, wkv_b, seen = latent_case(seed)
    expected = latent_by_hand(q, rows, wkv_b, seen)
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
    q, rows, wkv_b, seen = (t.bfloat16() if t.is_floating_point() else t for t in latent_case(seed))
    numerics = Numerics.bf16()
    tensors = [
        attention.attend_absorbed(
            q, rows, wkv_b, seen, replace(FORM, logits_stored=stored), numerics
        )
        for stored in (True, False)
    ]
    exact = latent_by_hand(q.double(), rows.double(), wkv_b.double(), seen)
    for out in tensors:
        assert (out.double() - exact).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(tensors[0], tensors[1])


def test_a_row_that_is_not_visible_cannot_reach_a_token(seed: int) -> None:
    q, rows, wkv_b, seen = latent_case(seed)
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


# --------------------------------------------------------------------------------------------------
# Indexer scores and choice against their formulas, token by token.


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


# --------------------------------------------------------------------------------------------------
# Pooling against its formula, window by window, and split at every point of a sequence.

ROPE = Rope(theta=100.0, dims=4, pairing=RopePairing.INTERLEAVED, end=RopeEnd.LAST, yarn=None)
OVERLAPPING = sparse_attention.PoolFacts(ratio=4, overlap=True, width=6, epsilon=1e-6, rope=ROPE)
PLAIN = sparse_attention.PoolFacts(ratio=8, overlap=False, width=6, epsilon=1e-6, rope=ROPE)

Rows = tuple[torch.Tensor, torch.Tensor]


def rows(facts: sparse_attention.PoolFacts, count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    width = facts.width * (2 if facts.overlap else 1)
    made = torch.randn(2, count, width, generator=generator, dtype=torch.float64)
    return made[0], made[1]


def norm(facts: sparse_attention.PoolFacts) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, facts.width, dtype=torch.float64)


def fresh(facts: sparse_attention.PoolFacts) -> sparse_attention.PoolState:
    """What no call left: nothing of it may be read."""
    width = facts.width * (2 if facts.overlap else 1)
    nothing = torch.full((facts.state_rows, width), math.nan, dtype=torch.float64)
    return sparse_attention.PoolState(nothing, nothing)


def pooled_by_hand(new: Rows, facts: sparse_attention.PoolFacts) -> torch.Tensor:
    """Entries of all complete windows, one channel after the other."""
    entries = []
    for w in range(new[0].shape[0] // facts.ratio):
        own = range(w * facts.ratio, (w + 1) * facts.ratio)
        offset = facts.width if facts.overlap else 0
        slots = [(t, offset) for t in own]
        if facts.overlap and w:
            slots = [(t - facts.ratio, 0) for t in own] + slots
        pooled = []
        for channel in range(facts.width):
            gates = [math.exp(float(new[1][t, at + channel])) for t, at in slots]
            values = [float(new[0][t, at + channel]) for t, at in slots]
            parts = zip(gates, values, strict=True)
            pooled.append(sum(g * v for g, v in parts) / sum(gates))
        size = math.sqrt(sum(v * v for v in pooled) / facts.width + facts.epsilon)
        normed = torch.tensor(pooled, dtype=torch.float64) / size * norm(facts)
        table = elementary.rotation_table(ROPE, torch.tensor([w * facts.ratio]), EXACT)
        entries.append(elementary.rotate_tail(normed[None], table)[0])
    return torch.stack(entries)


def split(new: Rows, sizes: Sequence[int], facts: sparse_attention.PoolFacts) -> torch.Tensor:
    """Entries of the same rows, fed in pieces."""
    state, start, made = fresh(facts), 0, []
    for size in sizes:
        part = (new[0][start : start + size], new[1][start : start + size])
        entries, state = sparse_attention.pool_windows(
            part, state, start, norm(facts), facts, EXACT
        )
        made.append(entries)
        start += size
    return torch.cat(made)


@pytest.mark.parametrize("facts", [OVERLAPPING, PLAIN], ids=["overlap", "plain"])
def test_entries_follow_the_formula(facts: sparse_attention.PoolFacts, seed: int) -> None:
    new = rows(facts, 27, seed)
    made, _ = sparse_attention.pool_windows(new, fresh(facts), 0, norm(facts), facts, EXACT)
    expected = pooled_by_hand(new, facts)
    assert made.shape == expected.shape
    assert (made - expected).abs().max() < 1e-12
    # Planted: entries rotated at their own number instead of their first token.
    table = elementary.rotation_table(ROPE, torch.arange(len(made)), EXACT)
    first = elementary.rotation_table(ROPE, torch.arange(len(made)) * facts.ratio, EXACT)
    wrong = elementary.rotate_tail(elementary.rotate_tail(made, first, inverse=True), table)
    assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize("facts", [OVERLAPPING, PLAIN], ids=["overlap", "plain"])
def test_splitting_at_every_point_changes_nothing(
    facts: sparse_attention.PoolFacts, seed: int
) -> None:
    count = 3 * facts.ratio + 1
    new = rows(facts, count, seed)
    whole = split(new, [count], facts)
    for first in range(1, count):
        assert (split(new, [first, count - first], facts) - whole).abs().max() < 1e-14
    assert (split(new, [1] * count, facts) - whole).abs().max() < 1e-14
    assert (split(new, [5, 1, 1, 2, count - 9], facts) - whole).abs().max() < 1e-14


def test_the_window_before_counts_only_with_overlap(seed: int) -> None:
    new = rows(OVERLAPPING, 8, seed)
    state = fresh(OVERLAPPING)
    _, state = sparse_attention.pool_windows(
        (new[0][:4], new[1][:4]), state, 0, norm(OVERLAPPING), OVERLAPPING, EXACT
    )
    second = (new[0][4:], new[1][4:])
    made, _ = sparse_attention.pool_windows(second, state, 4, norm(OVERLAPPING), OVERLAPPING, EXACT)
    lost = sparse_attention.PoolState(torch.zeros_like(state.latent), torch.zeros_like(state.gate))
    pooled, _ = sparse_attention.pool_windows(
        second, lost, 4, norm(OVERLAPPING), OVERLAPPING, EXACT
    )
    assert (pooled - made).abs().max() > 1e-3  # pooling the current tokens only is seen


def test_state_is_replaced_and_never_written_to(seed: int) -> None:
    new = rows(PLAIN, 3, seed)
    state = sparse_attention.PoolState(torch.zeros(8, 6).double(), torch.zeros(8, 6).double())
    _, after = sparse_attention.pool_windows(new, state, 0, norm(PLAIN), PLAIN, EXACT)
    assert not state.latent.any()
    assert torch.equal(after.latent[:3], new[0])
    assert torch.equal(after.gate[:3], new[1])


def test_pooling_rounds_where_the_switch_says(seed: int) -> None:
    new = tuple(t.float() for t in rows(PLAIN, 8, seed))
    facts, weight = replace(PLAIN, epsilon=1e-6), norm(PLAIN).float()
    state = sparse_attention.PoolState(torch.zeros(8, 6), torch.zeros(8, 6))
    made = {
        stored: sparse_attention.pool_windows(
            (new[0], new[1]), state, 0, weight, facts,
            Numerics.bf16(pooling_in_storage_dtype=stored),
        )[0]
        for stored in (False, True)
    }  # fmt: skip
    share = torch.softmax(new[1], 0)
    for stored, out in made.items():
        pooled = (share * new[0]).sum(0).bfloat16()
        if stored:
            pooled = (share.bfloat16() * new[0].bfloat16()).sum(0)
        normed = elementary.rms_norm(pooled[None], weight, 1e-6, Numerics.bf16())
        assert torch.equal(out, normed)  # window 0 is not rotated
    assert not torch.equal(made[False], made[True])
