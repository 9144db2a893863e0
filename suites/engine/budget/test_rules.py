"""Healthy arithmetic stays within HEADROOM of its slack, whatever order, format, K and data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import Tensor

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.engine.budget import rules as budget_rules
from degarble.harness.engine.budget.attention import bounded_logit as all_logits
from degarble.harness.engine.budget.attention import logit_in_part
from degarble.harness.engine.budget.bounded_values import (
    QUOTIENT,
    BoundedValue,
    bounded_norm,
    cache_grid,
    exactly,
    hadamard,
    indexer_grid,
    layer_normed,
    power_above,
    reach,
    rope_rotation,
    rotated,
    stored,
)
from degarble.harness.engine.budget.budget import HEADROOM, Budget, judge, spacing
from degarble.harness.engine.budget.rules import (
    U,
    ambiguous,
    cut_in_steps,
    exact,
    few,
    lost_in_steps,
    normed,
    product_operand,
    stored_between,
    summed,
)
from degarble.harness.engine.localise.localise import fraction_bits_of
from degarble.harness.formats.number_formats import (
    BF16,
    FP8_1X128_F32,
    FP8_128X128_F32,
    FP32,
    NVFP4,
)
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.harness.model.config.config import small_v32
from degarble.references import elementary
from degarble.references import numerics as rounding
from degarble.references.linears import STAGE
from degarble.references.numerics import IndexerFormat, KeyValueCache, Numerics, Switches
from degarble.references.tensor_core import WGMMA_FP8, dense_gemm
from degarble.suites.support.thinned import thinned

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# Healthy arithmetic sits within HEADROOM of its budget, whatever order, format, K and data.

ROWS, COLUMNS = 16, 96


def operand(kind: str, rows: int, width: int, seed: int) -> Tensor:
    """Data of one kind [rows, width]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "heavy":
        x = x * torch.randn(rows, width, generator=generator).exp().square()
    elif kind == "outlier":
        x[:, 3::97] *= 300
    elif kind == "tiny":
        x = x * 2.0**-60
    elif kind == "constant":
        x = torch.full_like(x, 1.0 + 2.0**-6)
    elif kind == "one sign":
        x = x.abs()
    elif kind == "cancelling":
        x = x.abs()
        x[:, width // 2 :] = -x[:, : width - width // 2]
    elif kind == "alternating":
        x = x.abs() * (1 - 2 * (torch.arange(width) % 2))
    elif kind == "sorted":
        x = x.sort(dim=1).values
    return x


KINDS = (
    "normal", "heavy", "outlier", "tiny", "constant", "one sign", "cancelling", "alternating",
    "sorted",
)  # fmt: skip


def sequential(x: Tensor, w: Tensor) -> Tensor:
    """One product after the other, as a scalar loop does."""
    out = torch.zeros(len(x), len(w))
    for k in range(x.shape[1]):
        out = out + x[:, k : k + 1] * w[:, k].unsqueeze(0)
    return out


def backwards(x: Tensor, w: Tensor) -> Tensor:
    return sequential(x.flip(1), w.flip(1))


def shuffled(x: Tensor, w: Tensor) -> Tensor:
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    return sequential(x[:, order], w[:, order])


def in_blocks(x: Tensor, w: Tensor) -> Tensor:
    """Blocks of 64 first, their sums after each other: a loop over K tiles."""
    parts = [a @ b.T for a, b in zip(x.split(64, 1), w.split(64, 1), strict=True)]
    return torch.stack(parts).cumsum(0)[-1]


def split_k(x: Tensor, w: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return sequential(x[:, half:], w[:, half:]) + sequential(x[:, :half], w[:, :half])


def library(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.T


ORDERS = (sequential, backwards, shuffled, in_blocks, split_k, library)


def twin_of(x: Tensor, w: Tensor, output: torch.dtype) -> Tensor:
    return (x.double() @ w.double().T).to(output)


@pytest.mark.parametrize("width", [64, 2048])
@pytest.mark.parametrize("kind", thinned(KINDS))
def test_a_product_in_any_order_is_healthy(kind: str, width: int) -> None:
    x = operand(kind, ROWS, width, 1).bfloat16().float()
    w = operand("one sign" if kind == "cancelling" else kind, COLUMNS, width, 2).bfloat16().float()
    for output, fmt in ((torch.bfloat16, BF16), (torch.float32, FP32)):
        budget, twin = summed(x, w, fmt), twin_of(x, w, output)
        for order in ORDERS:
            judged = judge(order(x, w).to(output), twin, budget)
            assert judged.ratio <= HEADROOM, (order.__name__, str(judged.worst))


def test_equal_rows_round_alike_and_are_healthy() -> None:
    """One weight row over and over, or with other sign and size: a step is one of all or none."""
    x = operand("normal", 2048, 2048, 21).bfloat16().float()
    one = operand("normal", 1, 2048, 22).bfloat16().float()
    sizes = torch.tensor([1.0, -1.0, 4.0, -0.5]).repeat(128)[:, None]
    w = one * sizes
    made = torch.cat([sequential(x, one)] * len(w), dim=1) * sizes.T
    budget, twin = summed(x, w), twin_of(x, w, torch.bfloat16)
    assert budget.repeats == (1, 512)
    judged = judge(made.bfloat16(), twin, budget)
    assert judged.comparison is not None
    assert judged.comparison.ulps == 1
    assert judged.ratio <= HEADROOM, str(judged.worst)
    alone = judge(made.bfloat16(), twin, replace(budget, repeats=(1, 1)))
    assert alone.ratio > HEADROOM, "the case needs no repeats"


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensor_core_is_healthy(kind: str) -> None:
    x, w = operand(kind, 8, 512, 3).bfloat16(), operand(kind, 64, 512, 4).bfloat16()
    for output, fmt in ((torch.bfloat16, BF16), (torch.float32, FP32)):
        judged = judge(dense_gemm(x, w).to(output), twin_of(x, w, output), summed(x, w, fmt))
        assert judged.ratio <= HEADROOM, str(judged.worst)


@pytest.mark.parametrize("kind", ["normal", "heavy", "outlier", "one sign", "constant"])
def test_tensor_scales_applied_after_the_sum_are_healthy(kind: str) -> None:
    x, w = (quantise(operand(kind, n, 512, n).bfloat16(), NVFP4) for n in (ROWS, COLUMNS))
    exactly = [dequantise(side, torch.float64) for side in (x, w)]
    scales = [side.decode_scale for side in (x, w)]
    plain = [(e / s.double()).float() for e, s in zip(exactly, scales, strict=True)]
    candidate = (sequential(plain[0], plain[1]) * (scales[0] * scales[1])).bfloat16()
    twin = twin_of(exactly[0], exactly[1], torch.bfloat16)
    judged = judge(candidate, twin, summed(exactly[0], exactly[1]))
    assert judged.ratio <= HEADROOM, str(judged.worst)


@pytest.mark.parametrize("kind", ["normal", "heavy", "outlier", "one sign", "constant"])
def test_block_scales_applied_after_each_block_are_healthy(kind: str) -> None:
    x = quantise(operand(kind, ROWS, 512, 5).bfloat16(), FP8_1X128_F32)
    w = quantise(operand(kind, 128, 512, 6).bfloat16(), FP8_128X128_F32)
    exactly = [dequantise(side, torch.float64) for side in (x, w)]
    codes = [side.codes.view(torch.float8_e4m3fn).float().split(128, 1) for side in (x, w)]
    candidate = torch.zeros(ROWS, 128)
    for block, (a, b) in enumerate(zip(*codes, strict=True)):
        scale = x.block_scale[:, block : block + 1] * w.block_scale[:, block]
        candidate = candidate + sequential(a, b) * scale
    twin = twin_of(exactly[0], exactly[1], torch.bfloat16)
    judged = judge(candidate.bfloat16(), twin, summed(exactly[0], exactly[1]))
    assert judged.ratio <= HEADROOM, str(judged.worst)


@pytest.mark.parametrize("kind", ["normal", "outlier", "cancelling"])
@pytest.mark.parametrize("output", [torch.bfloat16, torch.float32], ids=str)
def test_one_element_at_one_and_a_half_budgets_is_caught(kind: str, output: torch.dtype) -> None:
    fmt = BF16 if output is torch.bfloat16 else FP32
    x, w = operand(kind, ROWS, 512, 7).bfloat16().float(), operand("normal", COLUMNS, 512, 8)
    budget, twin = summed(x, w, fmt), twin_of(x, w, output)
    candidate = library(x, w).to(output)
    for row, column in ((0, 0), (11, 77), (15, 95)):
        allowed = (budget.slack[row, column] + _spacing(twin[row, column], fmt)) / HEADROOM
        for sign in (1, -1):
            spoilt = candidate.clone()
            spoilt[row, column] = (twin[row, column].double() + sign * 1.5 * allowed).to(output)
            judged = judge(spoilt, twin, budget)
            assert judged.ratio > 1, str(judged.worst)
            assert judged.findings[0].level == "element"
            assert judged.findings[0].place == (row, column)


def _spacing(value: Tensor, fmt: ElementFormat) -> float:
    return float(spacing(value.double().abs().numpy(), fmt))


@pytest.mark.parametrize("width", [512, 4096])
def test_a_gain_of_one_and_a_half_budgets_is_caught(width: int) -> None:
    """Spread over all elements it is far below one step of BF16 in each."""
    x, w = operand("normal", ROWS, width, 9).bfloat16().float(), operand("normal", 512, width, 10)
    budget, twin = summed(x, w), twin_of(x, w, torch.bfloat16)
    whole = judge(twin, twin, budget).findings
    allowed = next(finding.allowed for finding in whole if finding.level == "gain of whole")
    assert allowed < 2e-3
    candidate = ((x.double() @ w.double().T) * (1 + 1.5 * allowed)).bfloat16()
    judged = judge(candidate, twin, budget)
    assert judged.ratio > 1
    assert judged.findings[0].level.startswith("gain")


@pytest.mark.parametrize("width", [64, 7168])
@pytest.mark.parametrize("kind", thinned(KINDS))
def test_a_norm_is_healthy(kind: str, width: int) -> None:
    x, weight = operand(kind, ROWS, width, 11), operand("normal", 1, width, 12)[0]
    for output, fmt in ((torch.bfloat16, BF16), (torch.float32, FP32)):
        wide = x.double()
        twin = (weight * wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()).to(output)
        square = sequential(x.square(), torch.ones(1, width)) / width
        candidate = (weight * (x * (square + 1e-6).rsqrt())).to(output)
        judged = judge(candidate, twin, normed(twin, width, fmt))
        assert judged.ratio <= HEADROOM, str(judged.worst)


def test_a_function_of_few_operations_is_healthy_and_a_wrong_one_is_not() -> None:
    g, up = operand("normal", 64, 512, 13) * 4, operand("normal", 64, 512, 14)
    silu = torch.nn.functional.silu
    twin = (silu(g.double()) * up.double()).bfloat16()
    budget = few(twin.abs(), 16, BF16, "SwiGLU")
    assert judge((silu(g) * up).bfloat16(), twin, budget).ratio <= HEADROOM
    # tanh instead of the logistic function, at the strength at which it was seen in the field
    wrong = (g * 0.5 * (1 + torch.tanh(0.5 * g * 1.002)) * up).bfloat16()
    assert judge(wrong, twin, budget).ratio > 1


def test_what_is_stored_on_the_way_adds_a_step() -> None:
    x = operand("normal", 64, 512, 15)
    exactly = (x.double() * 1.1) * 1.3
    budget = few(exactly.abs(), 2, BF16, "two products")
    wider = stored_between(budget, exactly.abs(), 1, "the first product")
    candidate = ((x * 1.1).bfloat16().float() * 1.3).bfloat16()
    twin = exactly.bfloat16()
    assert judge(candidate, twin, budget).ratio > HEADROOM
    assert judge(candidate, twin, wider).ratio <= HEADROOM
    assert len(wider.derivation) == len(budget.derivation) + 1


def test_nothing_may_differ_where_nothing_is_computed() -> None:
    rows = operand("normal", 8, 16, 16).bfloat16()
    budget = exact(BF16, "rows of the table, copied")
    assert judge(rows, rows, budget).ratio == 0
    other = rows.clone()
    other[3, 5] = torch.nextafter(other[3, 5], torch.tensor(9.0).bfloat16())
    assert judge(other, rows, budget).ratio == float("inf")


def test_operands_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="operands"):
        summed(torch.ones(2, 3), torch.ones(2, 4))


def test_the_derivation_names_its_numbers() -> None:
    budget = summed(torch.ones(2, 64), torch.ones(3, 64))
    assert "K = 64" in budget.derivation[0]
    assert isinstance(budget, Budget)
    assert budget.derivation[-1] == "and one rounding to BF16"


def test_a_matrix_in_pieces_has_the_budget_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operand("normal", 5, 256, 1), operand("heavy", 70, 256, 2).bfloat16()
    w[11], w[64] = w[3], -2 * w[3]  # equal but for sign and size, in three pieces
    whole = summed(x, w.float())
    monkeypatch.setattr(budget_rules, "LARGE", 30 * 256)
    pieces = summed(x, w)
    assert torch.allclose(pieces.slack, whole.slack, rtol=1e-5)
    assert pieces.repeats == whole.repeats == (1, 3)


@pytest.mark.parametrize("rows", [2, 129, 300, 321])
def test_facts_of_an_operand_are_the_same_bits_by_parts(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = operand("heavy", rows, 257, 3)
    w[1], w[-1] = -2 * w[0], 0.0
    whole = product_operand(w)
    for at_once in (1 << 14, 1 << 10, 1):
        monkeypatch.setattr(budget_rules, "_IN_CACHE", at_once)
        parts = product_operand(w.clone())
        assert torch.equal(parts.four, whole.four)
        assert torch.equal(
            budget_rules._digests(w)[:-1],
            budget_rules._digests_of(w.double(), budget_rules._probe(257, w.device))[:-1],
        )
        assert parts.repeats == whole.repeats


# --------------------------------------------------------------------------------------------------
# What a tensor core cuts of FP8 sums: in its bound, beyond that of float32, believed so far.


def codes(seed: int, rows: int, inner: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator) * 20
    x[:, ::37] *= 8
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def by_steps(x: torch.Tensor, w: torch.Tensor, bits: int) -> torch.Tensor:
    """Steps of 32 products and C, each cut below the largest nominal exponent, then float32."""
    total = torch.zeros(len(x), len(w), dtype=torch.float32)
    for stage in range(0, x.shape[1], STAGE):
        c = torch.zeros(len(x), len(w), dtype=torch.float64)
        for begin in range(stage, min(stage + STAGE, x.shape[1]), WGMMA_FP8.step):
            a, b = (
                x[:, None, begin : begin + WGMMA_FP8.step],
                w[None, :, begin : begin + WGMMA_FP8.step],
            )
            exponents = torch.frexp(a).exponent + torch.frexp(b).exponent - 2
            exponents = torch.where(a * b == 0, -100, exponents)
            of_c = torch.where(c == 0, -100, torch.frexp(c).exponent - 1)
            unit = torch.exp2(torch.maximum(exponents.amax(-1), of_c).double() - bits)
            terms = torch.cat((a * b, c[..., None]), dim=-1) / unit[..., None]
            c = (terms.trunc().sum(-1) * unit).float().double()
        total += c.float()
    return total


@pytest.mark.parametrize("inner", [128, 512, 1184])
def test_steps_stay_within_the_bound_and_leave_that_of_float32(inner: int) -> None:
    x, w = codes(1, 24, inner), codes(2, 40, inner)
    exact = x @ w.T
    made = by_steps(x, w, WGMMA_FP8.fraction_bits).double()
    plain = summed(x.float(), w.float())
    allowed = cut_in_steps(plain, x.float(), w.float(), WGMMA_FP8.fraction_bits)
    off = (made - exact).abs()
    assert bool((off <= allowed.slack).all())
    assert bool((off > plain.slack).any()), "float32 alone does not explain it"
    assert any("cut 2^-13" in each for each in allowed.derivation)
    worse = (by_steps(x, w, WGMMA_FP8.fraction_bits - 6).double() - exact).abs()
    assert bool((worse > allowed.slack).any()), "fewer bits are found"


def test_a_stage_begins_anew() -> None:
    x, w = codes(3, 4, 256), codes(4, 4, 256)
    halves = [slice(0, 128), slice(128, 256)]
    parts = [lost_in_steps(x[:, k], w[:, k], WGMMA_FP8.fraction_bits) for k in halves]
    assert torch.allclose(lost_in_steps(x, w, WGMMA_FP8.fraction_bits), parts[0] + parts[1])


def test_a_manifest_is_believed_as_far_as_a_chip_goes() -> None:
    def report(stated: Any) -> dict[str, int]:
        return fraction_bits_of(cast("Any", SimpleNamespace(facts={"fraction_bits": stated})))

    assert report({"head": 13, "a": 14, "b": 3, "c": True, "d": "13"}) == {"head": 13, "a": 14}
    assert report(None) == report([13]) == {}


# --------------------------------------------------------------------------------------------------
# Errors that are carried through stored values: float32 by other means stays within them.

PLAIN = Numerics.twin()
CONFIG = small_v32()
ROPE = CONFIG.rope(CONFIG.blocks[0])


def rows(width: int, seed: int, kind: str = "normal") -> Tensor:
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier":
        x[:, 3::31] *= 300
    elif kind == "constant":
        x = torch.full_like(x, 1.0 + 2.0**-6)
    return x.bfloat16().float()


def within(made: Tensor, near: BoundedValue, share: float = 1.0) -> bool:
    off = (made.double() - near.value).abs()
    return bool((off <= share * near.error.expand(off.shape)).all())


def one_after_another(x: Tensor) -> Tensor:
    total = torch.zeros(x.shape[0], 1)
    for k in range(x.shape[1]):
        total = total + x[:, k : k + 1]
    return total


def test_storing_takes_an_error_away_or_makes_it_a_step() -> None:
    value = torch.tensor([1.0, 1.0 + 2.0**-8, 1.0 + 2.0**-8 - 1e-6], dtype=torch.float64)
    error = torch.tensor([1e-5, 0.0, 1e-5], dtype=torch.float64)
    kept = stored(BoundedValue(value, error), torch.bfloat16)
    assert kept.value.tolist() == [1.0, 1.0, 1.0]
    assert kept.error.tolist() == [0.0, 0.0, 2.0**-7]
    assert stored(kept, torch.float64) is kept


@pytest.mark.parametrize("kind", ["normal", "outlier", "constant"])
@pytest.mark.parametrize("width", [64, 1024])
def test_norms_in_float32_stay_within(kind: str, width: int) -> None:
    x, weight = rows(width, 1, kind), rows(width, 2)[0]
    mean = one_after_another(x.square()) / width
    for factor in (mean + 1e-6).rsqrt(), 1 / (mean + 1e-6).sqrt() * (1 + 2.0**-22):
        assert within(weight * (x * factor), bounded_norm(exactly(x), weight, 1e-6))
        normal = (x * factor).bfloat16().float()
        assert within(weight * normal, bounded_norm(exactly(x), weight, 1e-6, torch.bfloat16))
    bias = rows(width, 3)[0]
    centre = x - one_after_another(x) / width
    factor = (one_after_another(centre.square()) / width + 1e-6).rsqrt()
    near = layer_normed(x, weight, bias, 1e-6)
    assert within(centre * factor * weight + bias, near)
    wrong = (centre * factor * weight + bias) * (1 + 1e-3)
    assert kind == "constant" or not within(wrong, near)


@pytest.mark.parametrize("leading", [False, True])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("factor", [None, 1.277])
def test_rotations_in_float32_stay_within(
    leading: bool, halves: bool, factor: float | None
) -> None:
    scaled = ROPE.yarn and replace(ROPE.yarn, attention_factor=factor)
    rope = replace(ROPE, yarn=scaled)
    x, positions = rows(96, 4), torch.arange(40) * 997
    near = rotated(
        exactly(x), rope_rotation(rope, positions, PLAIN), leading=leading, halves=halves
    )
    table = elementary.rotation_table(rope, positions, PLAIN)
    cut = 64 if leading else 32
    parts = [x[:, :cut], x[:, cut:]]
    at = 0 if leading else 1
    turn_of = elementary.rotate_halves if halves else elementary.rotate_interleaved
    parts[at] = turn_of(parts[at], table)
    made = torch.cat(parts, dim=1)
    assert within(made, near)
    copied = near.error[:, 64:] if leading else near.error[:, :32]
    assert not copied.any(), "features that are not rotated are copied"
    other = elementary.rotation_table(rope, positions + 1, PLAIN)
    parts[at] = turn_of(parts[at], other)
    assert not within(torch.cat(parts, dim=1), near, 100)


def test_an_error_of_one_input_reaches_every_output_of_a_hadamard_transform() -> None:
    x, error = rows(128, 5), torch.zeros(40, 128, dtype=torch.float64)
    error[:, 7] = 2.0**-8
    near = hadamard(BoundedValue(x.double(), error))
    moved = x.clone()
    moved[:, 7] += 2.0**-8
    for step in (moved, x):
        made = step
        for k in range(7):  # butterflies in place of a product
            pairs = made.unflatten(1, (-1, 2, 2**k))
            made = torch.stack(
                (pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2
            )
            made = made.flatten(1)
        assert within(made * 128**-0.5, near)
    assert float(near.error.max()) < 2 * 2.0**-8 * 128**-0.5


@pytest.mark.parametrize("kind", [IndexerFormat.FP8, IndexerFormat.MXFP4])
def test_a_code_steps_only_at_its_boundary(kind: IndexerFormat) -> None:
    numerics = replace(PLAIN, switches=Switches(indexer_format=kind))
    x = rows(128, 6)
    twin = rounding.through_indexer(x, numerics).bfloat16()
    grid = indexer_grid(numerics, 128)
    assert grid is not None
    sharp = reach(exactly(x), torch.bfloat16, grid)
    assert float((sharp > 0).float().mean()) < 0.02, "only where amax is a power of two"
    error = torch.zeros(40, 128, dtype=torch.float64)
    error[:, 11] = 0.01 * x[:, 11].abs()
    wide = reach(BoundedValue(x.double(), error), torch.bfloat16, grid)
    for sign in (-1, 1):
        moved = x.clone()
        moved[:, 11] *= 1 + sign * 0.01
        off = (rounding.through_indexer(moved, numerics).double() - twin.double()).abs()
        assert bool((off <= wide).all())


@pytest.mark.parametrize("kind", [IndexerFormat.FP8, IndexerFormat.MXFP4])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("error", [0.0, 2.0**-12])
def test_a_scale_steps_only_where_amax_may(kind: IndexerFormat, side: int, error: float) -> None:
    """Another scale moves small numbers of the block, whose codes lose or gain a bit."""
    grid = indexer_grid(replace(PLAIN, switches=Switches(indexer_format=kind)), 128)
    assert grid is not None
    slack = error + QUOTIENT * U
    for share, steps in ((0.5, True), (1.5, False)):
        x = torch.full((1, grid.block), grid.largest / 20, dtype=torch.float64)
        x[:, ::2] = grid.largest * 2.0**-15
        x[:, 5] = grid.largest * (1 + side * share * slack)
        errors = torch.zeros_like(x)
        errors[:, 5] = x[:, 5] * error
        limit = reach(BoundedValue(x, errors), torch.bfloat16, grid)
        assert bool((limit[:, torch.arange(grid.block) != 5] > 0).any()) is steps, share


@pytest.mark.parametrize("boundary", [1 + 2.0**-8, -(3 - 2.0**-7)])
def test_a_decoded_number_is_ambiguous_within_two_units_of_a_boundary(boundary: float) -> None:
    units = torch.tensor([-6.0, -3.0, -1.0, 0.0, 1.0, 3.0, 6.0], dtype=torch.float64)
    moved = ambiguous(boundary * (1 + units * U))
    step = 2.0**-7 if abs(boundary) < 2 else 2.0**-6
    assert moved.tolist() == [0.0, 0.0, step, step, step, 0.0, 0.0]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: rotated(exactly(x), rope_rotation(ROPE, torch.arange(40) * 997, PLAIN)),
        lambda x: hadamard(exactly(x)),
        lambda x: bounded_norm(exactly(rows(128, 7)), x, 1e-6),
        lambda x: bounded_norm(exactly(rows(128, 7)), x, 1e-6, torch.bfloat16),
        lambda x: layer_normed(rows(128, 7), x, x, 1e-6),
        lambda x: logit_in_part(x[:, None].double(), rows(128, 8).double(), 0.1)[0],
        lambda x: all_logits(x[:, None].double(), rows(128, 8).double(), 0.1),
    ],
    ids=["rotation", "hadamard", "norm", "norm, stored", "layer norm", "common logit", "logit"],
)
@pytest.mark.parametrize("size", [2.0**-30, 2.0**30])
def test_an_error_has_the_unit_of_its_value(
    operation: Callable[[Tensor], BoundedValue], size: float
) -> None:
    near, scaled = operation(rows(128, 6)), operation(rows(128, 6) * size)
    assert torch.equal(scaled.value, near.value * size)
    assert torch.equal(scaled.error, near.error * size)


@pytest.mark.parametrize("kind", [KeyValueCache.FP8_F32, KeyValueCache.NVFP4, KeyValueCache.FP8])
def test_cache_rows_by_approximate_reciprocals_stay_within(kind: KeyValueCache) -> None:
    numerics = replace(PLAIN, switches=Switches(kv_cache=kind))
    x = torch.cat([rows(128, seed) for seed in range(20)])
    grid = cache_grid(numerics, 128)
    assert grid is not None
    twin = rounding.through_cache(x, 128, numerics).bfloat16()
    limit = reach(exactly(x), torch.bfloat16, grid)
    blocks = x.unflatten(1, (-1, grid.block))
    raw = blocks.abs().amax(-1, keepdim=True).clamp(min=grid.floor) * (1 / grid.largest)
    for off in (1 - 2.0**-22, 1 + 2.0**-22):
        scale = grid.scale(raw.double() * (1 if grid.exact_quotient else off)).float()
        factor = scale.reciprocal() * (1 if grid.exact_quotient else off)
        made = (grid.element(blocks * factor).float() * scale).flatten(1).bfloat16()
        assert bool(((made.double() - twin.double()).abs() <= limit).all())
    assert float((limit > 0).float().mean()) < (1.1 if kind is KeyValueCache.FP8_F32 else 0.1)


def test_a_power_of_two_is_its_own() -> None:
    x = torch.tensor([1.0, 1.0 + 2.0**-40, 0.75, 2.0**-126], dtype=torch.float64)
    assert power_above(x).tolist() == [1.0, 2.0, 1.0, 2.0**-126]
