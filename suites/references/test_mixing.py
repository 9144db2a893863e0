"""mHC against its formula, element by element; the compiled Sinkhorn against the readable one."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.references import compiled, mixing
from degarble.references.numerics import Numerics

EXACT = Numerics.definition()
FACTS = mixing.MixingFacts(streams=4, iterations=20, epsilon=1e-6, norm_epsilon=1e-6)


def made(seed: int, tokens: int = 3, width: int = 5) -> tuple[torch.Tensor, mixing.MixingWeights]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = mixing.MixingWeights(noise(24, 4 * width), noise(24), noise(3))
    return noise(tokens, 4, width), weights


def by_hand(x: list[list[float]], weights: mixing.MixingWeights) -> tuple[list[float], ...]:
    """Gates and mix of one token, from the formulas; comb flat, row-major."""
    flat = [value for stream in x for value in stream]
    rho = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + 1e-6)
    fn, base, scale = weights.fn.tolist(), weights.base.tolist(), weights.scale.tolist()
    m = [sum(w * v for w, v in zip(row, flat, strict=True)) * rho for row in fn]
    pre = [1 / (1 + math.exp(-(m[j] * scale[0] + base[j]))) + 1e-6 for j in range(4)]
    post = [2 / (1 + math.exp(-(m[4 + k] * scale[1] + base[4 + k]))) for k in range(4)]
    comb = [[m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k] for k in range(4)] for j in range(4)]
    for j, row in enumerate(comb):
        total = sum(math.exp(v) for v in row)
        comb[j] = [math.exp(v) / total + 1e-6 for v in row]
    for iteration in range(20):
        if iteration:
            comb = [[v / (sum(row) + 1e-6) for v in row] for row in comb]
        sums = [sum(column) + 1e-6 for column in zip(*comb, strict=True)]
        comb = [[v / s for v, s in zip(row, sums, strict=True)] for row in comb]
    return pre, post, [v for row in comb for v in row]


def test_pre_follows_its_formulas(seed: int) -> None:
    x, weights = made(seed)
    collapsed, post, comb = mixing.mixing_pre(x, weights, FACTS, EXACT)
    for t, token in enumerate(x.tolist()):
        gates, posts, mix = by_hand(token, weights)
        assert post[t].tolist() == pytest.approx(posts, rel=1e-12)
        assert comb[t].flatten().tolist() == pytest.approx(mix, rel=1e-12)
        columns = zip(*token, strict=True)
        expected = [sum(g * v for g, v in zip(gates, column, strict=True)) for column in columns]
        assert collapsed[t].tolist() == pytest.approx(expected, rel=1e-12)


def test_post_sums_over_the_first_index(seed: int) -> None:
    x, weights = made(seed)
    _, post, comb = mixing.mixing_pre(x, weights, FACTS, EXACT)
    v = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed + 1)).double()
    out = mixing.mixing_post(v, x, post, comb, EXACT)
    for t in range(3):
        for k in range(4):
            expected = post[t, k] * v[t] + sum(comb[t, j, k] * x[t, j] for j in range(4))
            assert (out[t, k] - expected).abs().max() < 1e-12
    turned = mixing.mixing_post(v, x, post, comb.transpose(1, 2), EXACT)
    assert (turned - out).abs().max() > 0.01  # a transposed mix is seen


def test_head_collapse_has_gates_only(seed: int) -> None:
    x, weights = made(seed)
    head = mixing.MixingWeights(weights.fn[:4], weights.base[:4], weights.scale[:1])
    out = mixing.collapse(x, head, FACTS, EXACT)
    for t, token in enumerate(x.tolist()):
        gates = by_hand(token, weights)[0]
        expected = sum(g * x[t, j] for j, g in enumerate(gates))
        assert (out[t] - expected).abs().max() < 1e-12


def test_mix_is_doubly_stochastic_after_twenty_iterations(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(50, 4, 4, generator=generator, dtype=torch.float64)
    for sinkhorn in (mixing.sinkhorn, compiled.sinkhorn):
        comb = sinkhorn(logits, 20, 1e-6)
        assert (comb.sum(-2) - 1).abs().max() < 2e-6  # columns come last
        assert (comb.sum(-1) - 1).abs().max() < 1e-3
        first = sinkhorn(logits, 1, 1e-6)
        assert (first.sum(-2) - 1).abs().max() < 5e-5  # epsilon beside a small sum
        assert (first.sum(-1) - 1).abs().max() > 0.1
        hard = 6 * logits
        lost = sinkhorn(hard, 19, 1e-6) - sinkhorn(hard, 20, 1e-6)
        assert lost.abs().max() > 1e-6  # a lost iteration is seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_loops_equal_the_readable_definition(dtype: torch.dtype, seed: int) -> None:
    x, weights = made(seed, tokens=40)
    x, weights = x.to(dtype), mixing.MixingWeights(weights.fn, weights.base * 3, weights.scale)
    numerics, kept = Numerics.definition(dtype), x.clone()
    fast = mixing.mixing_pre(x, weights, FACTS, numerics)
    slow = mixing.mixing_pre_definition(x, weights, FACTS, numerics)
    assert torch.equal(x, kept)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.dtype is dtype
        assert ours.shape == theirs.shape
        assert ((ours - theirs).abs() / theirs.abs().amax()).max() < 200 * torch.finfo(dtype).eps


def test_compiled_loops_round_once_to_what_is_stored(seed: int) -> None:
    x, weights = made(seed, tokens=5)
    fast = mixing.mixing_pre(x.bfloat16(), weights, FACTS, Numerics.bf16())
    slow = mixing.mixing_pre_definition(x.bfloat16(), weights, FACTS, Numerics.bf16())
    assert fast[0].dtype is torch.bfloat16
    assert (fast[0] - slow[0]).abs().max() <= 2**-8 * slow[0].abs().max()
    assert fast[1].dtype is fast[2].dtype is torch.float32


def test_numbers_that_are_none_stay_so(seed: int) -> None:
    x, weights = made(seed)
    x[1, 2, 0] = torch.nan
    for pre in (mixing.mixing_pre, mixing.mixing_pre_definition):
        for output in pre(x, weights, FACTS, EXACT):
            assert torch.isfinite(output[[0, 2]]).all()
            assert torch.isnan(output[1]).any()


def test_gradients_many_tokens_and_odd_shapes_take_the_readable_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(compiled, "mixing_pre", refused)
    x, weights = made(seed, tokens=65)
    mixing.mixing_pre(x, weights, FACTS, EXACT)
    few = x[:2].clone().requires_grad_()
    mixing.mixing_pre(few, weights, FACTS, EXACT)[0].sum().backward()
    assert few.grad is not None
    with pytest.raises(AssertionError):
        mixing.mixing_pre(x[:64], weights, FACTS, EXACT)
    spoilt = mixing.MixingWeights(weights.fn[:20], weights.base, weights.scale)
    with pytest.raises(RuntimeError):  # by torch, instead of reading beyond the end
        mixing.mixing_pre(x[:2], spoilt, FACTS, EXACT)


def test_coefficients_are_cast_only_where_the_switch_says(seed: int) -> None:
    x, weights = made(seed)
    numerics = Numerics.bf16()
    _, post, comb = mixing.mixing_pre(x.bfloat16(), weights, FACTS, numerics)
    v = torch.ones(3, 5, dtype=torch.bfloat16)
    official = mixing.mixing_post(v, x.bfloat16(), post, comb, numerics)
    wide = mixing.mixing_post(
        v.double(), x.bfloat16().double(), post.double(), comb.double(), EXACT
    )
    assert torch.equal(official, wide.float().bfloat16())
    cast = numerics.with_switches(mixing_in_storage_dtype=True)
    theirs = mixing.mixing_post(v, x.bfloat16(), post, comb, cast)
    stored = mixing.mixing_post(v, x.bfloat16(), post.bfloat16(), comb.bfloat16(), cast)
    assert torch.equal(theirs, stored)
    assert not torch.equal(theirs, official)
