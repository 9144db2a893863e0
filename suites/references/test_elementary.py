"""Norms, rotations, SwiGLU and mHC against their formulas, in plain float64 Python."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch

from degarble.harness.model.config.config import V3_2, V4_PRO, small_v4
from degarble.harness.model.types import Rope, RopeEnd, RopePairing, Yarn
from degarble.references import attention, compiled, elementary, mixing
from degarble.references.numerics import HeadNorm, Numerics

# --------------------------------------------------------------------------------------------------
# Every elementary function against its formula, worked out here in plain float64 Python.

EXACT, STORED = Numerics.definition(), Numerics.bf16()


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_rms_norm_follows_its_formula(seed: int) -> None:
    x, w = random(3, 8, seed=seed), random(8, seed=seed + 1)
    made = elementary.rms_norm(x, w, 1e-2, EXACT)
    for row, out in zip(x.tolist(), made.tolist(), strict=True):
        size = math.sqrt(sum(v * v for v in row) / 8 + 1e-2)
        assert out == pytest.approx([v * g / size for v, g in zip(row, w.tolist(), strict=True)])
    once = elementary.rms_norm(x.bfloat16(), w.bfloat16(), 1e-2, STORED)
    wide = elementary.rms_norm(x.bfloat16().double(), w.bfloat16().double(), 1e-2, EXACT)
    assert once.dtype is torch.bfloat16
    assert torch.equal(once, wide.float().bfloat16())


def test_layer_norm_follows_its_formula(seed: int) -> None:
    x, w, b = random(2, 6, seed=seed), random(6, seed=seed + 1), random(6, seed=seed + 2)
    made = elementary.layer_norm(x, w, b, 1e-6, EXACT)
    for row, out in zip(x.tolist(), made.tolist(), strict=True):
        mean = sum(row) / 6
        size = math.sqrt(sum((v - mean) ** 2 for v in row) / 6 + 1e-6)
        parts = zip(row, w.tolist(), b.tolist(), strict=True)
        assert out == pytest.approx([(v - mean) / size * g + shift for v, g, shift in parts])


@pytest.mark.parametrize("kind", list(HeadNorm))
def test_head_norm_rounds_where_each_source_does(kind: HeadNorm, seed: int) -> None:
    q = random(5, 2, 512, seed=seed).bfloat16()
    numerics = Numerics.bf16(head_norm=kind)
    made = elementary.head_rms(q, 1e-6, numerics)
    wide = q.float()
    plain = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    if kind is HeadNorm.ONCE:
        assert torch.equal(made, plain)
        return
    assert torch.equal(made, made.bfloat16().float())
    if kind is HeadNorm.FACTOR:
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6).bfloat16()
        assert torch.equal(made, (q * factor).float())
    else:
        mean = (q * q).mean(-1, keepdim=True) + 1e-6
        factor = torch.rsqrt(mean.float()).bfloat16()  # rounded once, as on a GPU
        assert torch.equal(made, (q * factor).float())
        many = elementary.head_rms(q.repeat(7, 1, 1), 1e-6, numerics)
        assert torch.equal(many, made.repeat(7, 1, 1))  # company changes nothing
        assert not torch.equal(made, plain.bfloat16().float())
    assert (made - plain).abs().max() < 0.05 * plain.abs().max()


def turning_pair(rope: Rope, turns: float) -> float:
    assert rope.yarn is not None
    reach = rope.yarn.original_max_position_embeddings / (2 * math.pi * turns)
    return rope.dims * math.log(reach) / (2 * math.log(rope.theta))


@pytest.mark.parametrize(
    ("rope", "kappas", "low", "high"),
    [
        (V4_PRO.rope(V4_PRO.layers[2]), (15.453, 24.708), 15, 25),
        (V3_2.rope(V3_2.layers[0]), (10.47, 22.51), 10, 23),
    ],
    ids=["v4", "v32"],
)
def test_yarn_blends_between_the_known_dims(
    rope: Rope, kappas: tuple[float, float], low: int, high: int
) -> None:
    assert rope.yarn is not None
    found = (turning_pair(rope, 32), turning_pair(rope, 1))
    assert found == pytest.approx(kappas, abs=5e-3)
    made = elementary.frequencies(rope, torch.float64, torch.device("cpu")).tolist()
    assert len(made) == 32
    for i, frequency in enumerate(made):
        plain = rope.theta ** (-2 * i / 64)
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        expected = plain * (1 - ramp) + plain / rope.yarn.factor * ramp
        assert frequency == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("length", "betas", "truncate", "kept"),
    [
        (64, (4, 1), True, [1, 1, 0.75, 0.5]),  # from pair 1.62, cut to 1, to 4.03, cut to 5
        (64, (4, 1), False, [1, 1, 0.8438, 0.4285]),
        (64, (1, 4), True, [0, 0, 0, 0.5]),  # backwards, from 4 to 2
        (4, (32, 4), True, [1, 1, 1, 1]),  # backwards, from 0 to -3
    ],
)
def test_ramps_of_short_contexts_and_swapped_betas(
    length: int, betas: tuple[float, float], truncate: bool, kept: list[float]
) -> None:
    yarn = Yarn(
        factor=4, original_max_position_embeddings=length, beta_fast=betas[0], beta_slow=betas[1],
        truncate=truncate,
    )  # fmt: skip
    rope = replace(ROPE, theta=10.0, dims=8, yarn=yarn)
    made = elementary.frequencies(rope, torch.float64, torch.device("cpu"))
    plain = 10.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    share = ((made / plain - 0.25) / 0.75).tolist()
    assert share == pytest.approx(kept, abs=2e-4)


def test_a_scaled_rope_scales_what_it_turns() -> None:
    yarn = Yarn(factor=4, original_max_position_embeddings=64)
    scaled = replace(ROPE, yarn=yarn)
    even = replace(ROPE, yarn=replace(yarn, attention_factor=1.0))
    positions, x = torch.tensor([0, 5, 900]), torch.randn(3, 6, dtype=torch.float64)
    one, two = (
        elementary.rotate_interleaved(x, elementary.rotation_table(rope, positions, EXACT))
        for rope in (scaled, even)
    )
    assert (one / two).flatten().tolist() == pytest.approx([0.1 * math.log(4) + 1] * 18)


@pytest.mark.parametrize("rows", [1, 3])
def test_pairs_after_an_odd_number_of_features_rotate(rows: int) -> None:
    positions = torch.arange(rows) + 3
    table = elementary.rotation_table(ROPE, positions, EXACT)
    x = torch.randn(rows, 11, dtype=torch.float64)
    made = elementary.rotate_tail(x, table)
    assert torch.equal(made[:, :5], x[:, :5])
    assert torch.equal(made[:, 5:], elementary.rotate_interleaved(x[:, 5:].clone(), table))


def test_layers_without_compressor_rotate_plainly() -> None:
    config = small_v4()
    rope = config.rope(config.layers[0])
    made = elementary.frequencies(rope, torch.float64, torch.device("cpu"))
    assert made.tolist() == pytest.approx([10000.0 ** (-2 * i / 64) for i in range(32)])


def test_known_scales() -> None:
    assert attention.softmax_scale(V3_2) == pytest.approx(0.1352338, abs=5e-8)
    assert V4_PRO.head_dim**-0.5 == pytest.approx(0.0441942, abs=5e-8)
    indexer = (V4_PRO.index_head_dim * V4_PRO.index_n_heads) ** -0.5
    assert indexer == pytest.approx(0.01104854, abs=5e-9)


def turned(row: list[float], t: int, frequencies: list[float]) -> list[float]:
    """Interleaved pairs as complex numbers, turned by their angle."""
    out: list[float] = []
    for i, frequency in enumerate(frequencies):
        z = complex(row[2 * i], row[2 * i + 1]) * cmath.exp(1j * t * frequency)
        out += [z.real, z.imag]
    return out


ROPE = Rope(theta=100.0, dims=6, pairing=RopePairing.INTERLEAVED, end=RopeEnd.LAST, yarn=None)
FREQUENCIES = [100.0 ** (-2 * i / 6) for i in range(3)]


def test_rotation_turns_interleaved_pairs(seed: int) -> None:
    x, positions = random(4, 2, 10, seed=seed), torch.tensor([0, 1, 7, 1000])
    table = elementary.over_heads(elementary.rotation_table(ROPE, positions, EXACT))
    made = elementary.rotate_tail(x, table)
    for t, (token, out) in enumerate(zip(x.tolist(), made.tolist(), strict=True)):
        for head, result in zip(token, out, strict=True):
            expected = head[:4] + turned(head[4:], int(positions[t]), FREQUENCIES)
            assert result == pytest.approx(expected, abs=1e-12)
    back = elementary.rotate_tail(made, table, inverse=True)
    assert (back - x).abs().max() < 1e-14
    assert torch.equal(made[0], x[0])  # position 0 is blind
    halves = elementary.rotate_halves(x[..., 4:], table)
    assert (halves - made[..., 4:]).abs().max() > 0.1  # the wrong pairing is seen


def test_rotation_by_halves(seed: int) -> None:
    x, positions = random(3, 6, seed=seed), torch.tensor([1, 5, 90])
    made = elementary.rotate_halves(x, elementary.rotation_table(ROPE, positions, EXACT))
    for t, (row, out) in enumerate(zip(x.tolist(), made.tolist(), strict=True)):
        mixed = [row[j] for i in range(3) for j in (i, i + 3)]
        expected = turned(mixed, int(positions[t]), FREQUENCIES)
        assert out == pytest.approx(expected[0::2] + expected[1::2], abs=1e-12)


def test_kept_tables_follow_their_positions() -> None:
    positions = torch.tensor([1, 2])
    first = elementary.rotation_table(ROPE, positions, EXACT)
    assert elementary.rotation_table(ROPE, positions, EXACT) is first
    positions += 3
    later = elementary.rotation_table(ROPE, positions, EXACT)
    fresh = elementary.rotation_table(ROPE, torch.tensor([4, 5]), EXACT)
    assert torch.equal(later.cos, fresh.cos)
    assert not torch.equal(later.cos, first.cos)
    for _ in range(200):  # short-lived positions must not be taken for one another
        t = torch.randint(0, 1000, (1,))
        cos = elementary.rotation_table(ROPE, t, EXACT).cos
        assert cos[0, 0] == pytest.approx(math.cos(int(t)))


def test_stored_tables_are_rounded_to_bf16() -> None:
    positions = torch.arange(50)
    plain = elementary.rotation_table(ROPE, positions, STORED)
    switched = STORED.with_switches(rotation_in_storage_dtype=True)
    stored = elementary.rotation_table(ROPE, positions, switched)
    assert torch.equal(stored.cos, plain.cos.bfloat16().float())
    assert not torch.equal(stored.sin, plain.sin)


def test_float32_frequencies_stay_close_to_the_exact_ones() -> None:
    rope = V4_PRO.rope(V4_PRO.layers[2])
    narrow = elementary.frequencies(rope, torch.float32, torch.device("cpu"))
    wide = elementary.frequencies(rope, torch.float64, torch.device("cpu"))
    assert ((narrow - wide).abs() / wide).max() < 4e-7


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_the_orthonormal_walsh_matrix(width: int) -> None:
    matrix = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    ).double()
    made = elementary.hadamard(torch.eye(width, dtype=torch.float64))
    assert (made - matrix * width**-0.5).abs().max() < 1e-15
    assert (elementary.hadamard(made) - torch.eye(width)).abs().max() < 1e-14


def test_swiglu_clamps_the_gate_from_above_only() -> None:
    gate, up = torch.tensor([-30.0, 5.0, 12.0]), torch.tensor([-11.0, 3.0, 40.0])
    made = elementary.swiglu(gate, up, 10.0)

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x))

    assert made.tolist() == pytest.approx([silu(-30) * -10, silu(5) * 3, silu(10) * 10], rel=1e-6)
    free = elementary.swiglu(gate, up, None)
    assert free.tolist() == pytest.approx([silu(-30) * -11, silu(5) * 3, silu(12) * 40], rel=1e-6)


# --------------------------------------------------------------------------------------------------
# mHC against its formula, element by element; the compiled Sinkhorn against the readable one.

MIXING_EXACT = Numerics.definition()
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
    collapsed, post, comb = mixing.mixing_pre(x, weights, FACTS, MIXING_EXACT)
    for t, token in enumerate(x.tolist()):
        gates, posts, mix = by_hand(token, weights)
        assert post[t].tolist() == pytest.approx(posts, rel=1e-12)
        assert comb[t].flatten().tolist() == pytest.approx(mix, rel=1e-12)
        columns = zip(*token, strict=True)
        expected = [sum(g * v for g, v in zip(gates, column, strict=True)) for column in columns]
        assert collapsed[t].tolist() == pytest.approx(expected, rel=1e-12)


def test_post_sums_over_the_first_index(seed: int) -> None:
    x, weights = made(seed)
    _, post, comb = mixing.mixing_pre(x, weights, FACTS, MIXING_EXACT)
    v = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed + 1)).double()
    out = mixing.mixing_post(v, x, post, comb, MIXING_EXACT)
    for t in range(3):
        for k in range(4):
            expected = post[t, k] * v[t] + sum(comb[t, j, k] * x[t, j] for j in range(4))
            assert (out[t, k] - expected).abs().max() < 1e-12
    turned = mixing.mixing_post(v, x, post, comb.transpose(1, 2), MIXING_EXACT)
    assert (turned - out).abs().max() > 0.01  # a transposed mix is seen


def test_head_collapse_has_gates_only(seed: int) -> None:
    x, weights = made(seed)
    head = mixing.MixingWeights(weights.fn[:4], weights.base[:4], weights.scale[:1])
    out = mixing.collapse(x, head, FACTS, MIXING_EXACT)
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
        for output in pre(x, weights, FACTS, MIXING_EXACT):
            assert torch.isfinite(output[[0, 2]]).all()
            assert torch.isnan(output[1]).any()


def test_gradients_many_tokens_and_odd_shapes_take_the_readable_one(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(compiled, "mixing_pre", refused)
    x, weights = made(seed, tokens=65)
    mixing.mixing_pre(x, weights, FACTS, MIXING_EXACT)
    few = x[:2].clone().requires_grad_()
    mixing.mixing_pre(few, weights, FACTS, MIXING_EXACT)[0].sum().backward()
    assert few.grad is not None
    with pytest.raises(AssertionError):
        mixing.mixing_pre(x[:64], weights, FACTS, MIXING_EXACT)
    spoilt = mixing.MixingWeights(weights.fn[:20], weights.base, weights.scale)
    with pytest.raises(RuntimeError):  # by torch, instead of reading beyond the end
        mixing.mixing_pre(x[:2], spoilt, FACTS, MIXING_EXACT)


def test_coefficients_are_cast_only_where_the_switch_says(seed: int) -> None:
    x, weights = made(seed)
    numerics = Numerics.bf16()
    _, post, comb = mixing.mixing_pre(x.bfloat16(), weights, FACTS, numerics)
    v = torch.ones(3, 5, dtype=torch.bfloat16)
    official = mixing.mixing_post(v, x.bfloat16(), post, comb, numerics)
    wide = mixing.mixing_post(
        v.double(), x.bfloat16().double(), post.double(), comb.double(), MIXING_EXACT
    )
    assert torch.equal(official, wide.float().bfloat16())
    cast = numerics.with_switches(mixing_in_storage_dtype=True)
    theirs = mixing.mixing_post(v, x.bfloat16(), post, comb, cast)
    stored = mixing.mixing_post(v, x.bfloat16(), post.bfloat16(), comb.bfloat16(), cast)
    assert torch.equal(theirs, stored)
    assert not torch.equal(theirs, official)
