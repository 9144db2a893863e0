"""Pooling against its formula, window by window, and split at every point of a sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.model.types import Rope, RopeEnd, RopePairing
from degarble.references import elementary, sparse_attention
from degarble.references.numerics import Numerics

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT = Numerics.definition()
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


def by_hand(new: Rows, facts: sparse_attention.PoolFacts) -> torch.Tensor:
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
    expected = by_hand(new, facts)
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
