"""Infer nibble order, scale layout and producer, or say what evidence is missing."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.checkpoint.audit.statistics.inference import (
    CERTAIN,
    FAR,
    LINEAR,
    LOSSLESS,
    ORDERS,
    PRODUCERS,
    BlockProfiles,
    DialectTraces,
    Kinship,
    ReferenceProfile,
    best_of,
    candidates,
    confidence_of,
    infer_dialect,
    infer_layout,
    infer_order,
    logs_of,
    orders_for,
)
from degarble.harness.checkpoint.view.weight_units import WeightUnit
from degarble.harness.formats.dialects import (
    CANONICAL,
    COMPRESSED_TENSORS,
    FLASHINFER_EXACT,
    MODELOPT,
    TORCHAO,
    Dialect,
)
from degarble.harness.formats.layouts import ROW_ORDERS, SWIZZLE_128X4, reorder_rows, to_layout
from degarble.harness.formats.number_formats import FP8_128X128_F32, MXFP4, NVFP4, ScaleDirection
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.harness.model.types import Kind
from degarble.suites.checkpoint.number_cases import channels, generator, matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat


# --------------------------------------------------------------------------------------------------
# The packing order is inferred from matrices on the same input; how strong channels must be.

WIDTH = 3072
ROWS = 32


def energies(seed: int, gains: torch.Tensor, rows: int = ROWS) -> NDArray[np.float32]:
    values = matrix(seed, rows, len(gains), gains).float()
    found: NDArray[np.float32] = values.square().sum(0).numpy()
    return found


def packed_as(order: str, columns: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is measured low nibble first, where codes were packed in another order."""
    found = np.empty_like(columns.reshape(-1, 16))
    found[:, ORDERS[order]] = columns.reshape(-1, 16)
    return found.reshape(-1)


@pytest.mark.parametrize("order", ORDERS)
def test_an_unpacked_sibling_reveals_every_order(seed: int, order: str) -> None:
    gains = channels(seed, WIDTH)
    reference = ReferenceProfile(Kinship.SIBLING, logs_of(energies(seed + 1, gains, 64)))
    inference = infer_order(packed_as(order, energies(seed + 2, gains)), [reference])
    assert inference.value == order
    assert inference.because == Kinship.SIBLING
    assert inference.confidence > 0.999


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("slope", [1.0, -1.0])
def test_a_norm_reveals_the_order_whatever_the_sign_of_the_relation(
    seed: int, order: str, slope: float
) -> None:
    gains = channels(seed, WIDTH, 0.5)
    norm = ReferenceProfile(Kinship.NORM, slope * logs_of(gains.numpy()))
    inference = infer_order(packed_as(order, energies(seed + 1, gains)), [norm])
    assert inference.value == order


@pytest.mark.parametrize("kinship", [Kinship.NORM, Kinship.PRODUCER])
def test_an_unrelated_tensor_decides_nothing(seed: int, kinship: Kinship) -> None:
    stranger = ReferenceProfile(kinship, logs_of(channels(seed + 1, WIDTH, 0.5).numpy()))
    inference = infer_order(energies(seed, channels(seed, WIDTH, 0.5)), [stranger])
    assert inference.value is None
    assert "no relation" in inference.because


def test_power_by_the_spread_of_channels(seed: int) -> None:
    """At a width of 3072 a spread of 10 % decides; without spread nothing does."""
    decided = {}
    for spread in (0.0, 0.1, 0.2):
        values = []
        for i in range(8):
            gains = torch.exp(spread * torch.randn(WIDTH, generator=generator(seed + i)))
            reference = ReferenceProfile(
                Kinship.SIBLING, logs_of(energies(seed + 100 + i, gains, 64))
            )
            swapped = packed_as("high_even", energies(seed + 200 + i, gains))
            values.append(infer_order(swapped, [reference]).value)
        assert set(values) <= {None, "high_even"}
        decided[spread] = sum(value is not None for value in values)
    assert decided[0.0] == 0
    assert decided[0.2] == 8
    assert decided[0.1] >= 6


def test_smooth_channels_decide_nothing(seed: int) -> None:
    gains = torch.exp(torch.sin(torch.arange(WIDTH) / 300.0))
    reference = ReferenceProfile(Kinship.SIBLING, logs_of(energies(seed, gains, 64)))
    assert infer_order(energies(seed + 1, gains), [reference]).value is None


def test_a_missing_or_unfit_profile_is_named_as_the_reason(seed: int) -> None:
    columns = energies(seed, channels(seed, 256))
    assert "no profile" in infer_order(columns, []).because
    narrow = ReferenceProfile(Kinship.SIBLING, np.zeros(128))
    assert "no profile" in infer_order(columns, [narrow]).because
    assert "too few" in infer_order(columns[:64], [narrow]).because
    flat = ReferenceProfile(Kinship.SIBLING, np.zeros(256))
    assert infer_order(columns, [flat]).value is None


def test_the_best_of_several_references_counts(seed: int) -> None:
    gains = channels(seed, WIDTH)
    flat = ReferenceProfile(Kinship.SIBLING, np.zeros(WIDTH))
    norm = ReferenceProfile(Kinship.NORM, -logs_of(gains.numpy()))
    inference = infer_order(energies(seed + 1, gains), [flat, norm])
    assert (inference.value, inference.because) == ("low_even", Kinship.NORM)


def test_zeros_and_infinities_in_a_profile() -> None:
    logs = logs_of(np.array([0.0, 4.0, np.inf, np.nan, 1.0], np.float32))
    assert logs.tolist() == [0, 2, 2, 0, 0]
    assert logs_of(np.zeros(3, np.float32)).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------------
# Experts of one layer are judged together where the evidence of each alone is too weak.
#
# The relation is that of a trained network: a channel that an expert makes strong is read strongly.

EXPERTS, ORDER_EVIDENCE_WIDTH = 32, 1024
ACT, MADE = "layers.0.ffn.experts.act", "layers.0.ffn.experts.w13"
FEEDS = {ACT: f"{MADE}.out"}


def unit(expert: int, name: str, feed: str, component: str) -> WeightUnit:
    return WeightUnit(
        name=f"layers.0.ffn.experts.{expert}.{name}",
        module="",
        role=name,
        place="layers.0",
        layer=0,
        expert=expert,
        kind=Kind.LINEAR,
        feed=feed,
        component=component,
        member=None,
        is_bare=False,
        nbytes=0,
        position=(Path(), 0),
    )


def found(columns: NDArray[np.float64], rows: NDArray[np.float64], *, packed: bool) -> Any:
    return SimpleNamespace(
        columns=(2.0**columns).astype(np.float32),
        rows=(2.0**rows).astype(np.float32),
        blocks=object() if packed else None,
        counts=range(16),
    )


def judged(seed: int, related: float, order: str, experts: int = EXPERTS) -> list[Any]:
    """Judge the w2 of a layer whose columns follow the rows of w1 by so much."""
    random = np.random.default_rng(seed)
    block = BlockProfiles(FEEDS)
    for expert in range(experts):
        width = 6.0 if expert == 3 else 0.5  # a dead expert: wide on both sides, unrelated
        made = random.standard_t(6, ORDER_EVIDENCE_WIDTH)
        own = random.standard_t(6, ORDER_EVIDENCE_WIDTH)
        share = 0.0 if expert == 3 else related
        read = share * made + np.sqrt(1 - share * share) * own
        name = unit(expert, "w1", "layers.0.ffn.norm.out", MADE)
        block.add(2 * expert, name, found(random.normal(size=64), made * width, packed=False))
        facts = found(read * width, random.normal(size=64), packed=True)
        facts.columns = packed_as(order, facts.columns)
        block.add(2 * expert + 1, unit(expert, "w2", f"{ACT}.out", "w2"), facts)
    return [inferred_order for inferred_order in block.judge() if inferred_order.row % 2]


@pytest.mark.parametrize("order", ["low_even", "high_even", "halves"])
@pytest.mark.parametrize("related", [0.25, -0.25])
def test_weak_evidence_of_all_experts_is_enough(seed: int, order: str, related: float) -> None:
    made = judged(seed, related, order)
    assert {each.inferred.value for each in made} == {order}
    assert Kinship.EXPERTS in {each.kinship for each in made}


def test_one_expert_alone_would_not_be(seed: int) -> None:
    assert {each.inferred.value for each in judged(seed, 0.2, "high_even", experts=2)} == {None}


@pytest.mark.parametrize("order", ["low_even", "high_even"])
def test_experts_without_a_relation_stay_undecided(seed: int, order: str) -> None:
    assert {each.inferred.value for each in judged(seed, 0.0, order)} == {None}


# --------------------------------------------------------------------------------------------------
# The order of block scales is inferred from codes and scales alone, or left undecided.

SHAPE = (512, 1024)


def weight_of(values: Tensor, fmt: BlockFormat = NVFP4) -> Weight:
    return Weight.of(quantise(values, fmt, MODELOPT if fmt == NVFP4 else CANONICAL))


def drawn(seed: int, kind: str) -> Tensor:
    random = generator(seed)
    normal = torch.randn(SHAPE, generator=random)
    if kind == "uniform":
        return torch.rand(SHAPE, generator=random) * 2 - 1
    if kind == "low rank":
        return torch.randn(512, 16, generator=random) @ torch.randn(16, 1024, generator=random)
    if kind == "blocks of unlike gain":
        gains = torch.exp(torch.randn(512, 64, generator=random)).repeat_interleave(16, 1)
        return normal * gains
    return matrix(seed, *SHAPE, channels(seed, SHAPE[1], 0.5)).float()


KINDS = ("heavy tails and channels", "uniform", "low rank", "blocks of unlike gain")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_scales_in_order_are_reported_as_such(seed: int, kind: str, fmt: BlockFormat) -> None:
    if (kind, fmt) == ("uniform", MXFP4):  # all scales are equal
        assert infer_layout(weight_of(drawn(seed, kind), fmt)).value is None
        return
    inference = infer_layout(weight_of(drawn(seed, kind), fmt))
    assert inference.value == LINEAR
    assert inference.confidence > 0.999
    assert inference.evidence[LINEAR] > FAR


@pytest.mark.parametrize("kind", KINDS)
def test_swizzled_and_transposed_scales_are_named(seed: int, kind: str) -> None:
    weight = weight_of(drawn(seed, kind))
    scales = weight.block_scale
    assert scales is not None
    for name, stored in (
        ("128x4", to_layout(scales, SWIZZLE_128X4).reshape(scales.shape)),
        ("transposed", scales.t().contiguous().reshape(scales.shape)),
    ):
        weight.block_scale = stored
        assert infer_layout(weight).value == name


@pytest.mark.parametrize("name", [name for name in ROW_ORDERS if name != "as_stored"])
def test_reordered_rows_are_named(seed: int, name: str) -> None:
    weight = weight_of(drawn(seed, KINDS[0]))
    assert weight.block_scale is not None
    weight.block_scale = reorder_rows(weight.block_scale, ROW_ORDERS[name])
    assert (infer_layout(weight).value or "").startswith(f"rows {name}")


def test_every_order_is_undone_by_its_inverse(seed: int) -> None:
    stored = torch.randint(0, 256, (256, 8), dtype=torch.uint8, generator=generator(seed))
    orders = orders_for(256, 8)
    for name, order in orders.items():
        assert order(stored).sort().values.shape == stored.shape
        inverse = orders.get(f"{name}, undone") or orders.get(f"{name}, undone once too often")
        if inverse is not None:
            assert torch.equal(inverse(order(stored)), stored), name


UNKNOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "shuffled": lambda scales: scales.reshape(-1)[
        torch.randperm(scales.numel(), generator=generator(1))
    ].reshape(scales.shape),
    "one row further": lambda scales: scales.roll(1, 0),
    "one column further": lambda scales: scales.roll(1, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_order_is_no_known_one(seed: int, kind: str, name: str) -> None:
    weight = weight_of(drawn(seed, kind))
    assert weight.block_scale is not None
    weight.block_scale = UNKNOWN[name](weight.block_scale).contiguous()
    inference = infer_layout(weight)
    assert inference.value is None
    assert not inference.evidence[LINEAR] > FAR


def test_many_zeros_may_leave_it_undecided_but_never_mislead(seed: int) -> None:
    kept = torch.rand(SHAPE, generator=generator(seed)) < 0.3
    weight = weight_of(drawn(seed, KINDS[0]) * kept)
    assert infer_layout(weight).value in (None, LINEAR)


def test_too_little_evidence_is_undecided(seed: int) -> None:
    signs = torch.sign(torch.randn(SHAPE, generator=generator(seed)))
    assert infer_layout(weight_of(signs)).value is None
    assert infer_layout(weight_of(matrix(seed, 8, 64))).value is None
    assert infer_layout(weight_of(matrix(seed, 256, 256), FP8_128X128_F32)).value is None
    assert infer_layout(Weight(value=signs)).value is None


def test_the_rule_of_decision() -> None:
    assert best_of("x", {"a": 7.0, "b": 0.5}, "why").value == "a"
    assert best_of("x", {"a": 9.0, "b": 4.0}, "why").value is None
    assert best_of("x", {"a": 5.0, "b": -9.0}, "why").value is None
    assert best_of("x", {"a": float("nan")}, "why").value is None
    assert "leads by 5.0" in best_of("x", {"a": 5.0}, "why").because
    assert 0.94 < confidence_of(1.96) < 0.96
    assert confidence_of(1.96, tried=30) == 0
    assert confidence_of(40.0) == CERTAIN


# --------------------------------------------------------------------------------------------------
# Producers are recognised by their traces; those with the same traces are named together.

GROUP_OF = {
    "modelopt": MODELOPT,
    "canonical, flashinfer or vllm": CANONICAL,
    "torchao": TORCHAO,
    "compressed_tensors": COMPRESSED_TENSORS,
}
DECODE, ENCODE = ScaleDirection.DECODE, ScaleDirection.ENCODE


def traces(seed: int, dialect: Dialect, *, zeros: bool, tensors: int = 24) -> DialectTraces:
    """What the tensors of one producer show, gathered the slow way."""
    scales, zero_bytes, smallest, over_codes = [], [], 448.0, 0
    direction = ENCODE if dialect is COMPRESSED_TENSORS else DECODE
    for i in range(tensors):
        values = matrix(seed + i, 16, 64) * (1 + i)
        if zeros:
            values[3] = 0
        made = quantise(values, NVFP4, dialect)
        scales.append(float(made.encode_scale if direction is ENCODE else made.decode_scale))
        has_codes = (made.element_codes() & 7).reshape(16, 4, 16).bool().any(2)
        zero_bytes += made.block_scale[~has_codes][:1].tolist()
        used = made.scale_values()[has_codes]
        over_codes += int((used == 0).sum())
        smallest = min(smallest, float(used[used > 0].min()))
    return DialectTraces(scales, direction, zero_bytes, smallest, over_codes, powers_only=False)


@pytest.mark.parametrize("name", PRODUCERS)
@pytest.mark.parametrize("zeros", [False, True])
def test_a_producer_is_never_excluded_by_its_own_traces(seed: int, name: str, zeros: bool) -> None:
    dialect_traces = traces(seed, GROUP_OF[name], zeros=zeros)
    assert name in candidates(dialect_traces)
    assert infer_dialect(dialect_traces).value in (None, name)


@pytest.mark.parametrize("name", PRODUCERS)
def test_blocks_of_zeros_distinguish_all_producers(seed: int, name: str) -> None:
    inferred = infer_dialect(traces(seed, GROUP_OF[name], zeros=True))
    assert inferred.value == name
    assert inferred.confidence > 0.999
    assert "zero blocks have the scale" in inferred.because


def test_arithmetic_distinguishes_producers_without_blocks_of_zeros(seed: int) -> None:
    left = candidates(traces(seed, MODELOPT, zeros=False))
    assert left == ("modelopt", "torchao")
    assert candidates(traces(seed, COMPRESSED_TENSORS, zeros=False)) == ("compressed_tensors",)
    assert "modelopt" not in candidates(traces(seed, CANONICAL, zeros=False, tensors=64))


def test_dialects_of_one_group_leave_the_same_traces(seed: int) -> None:
    first = traces(seed, CANONICAL, zeros=True)
    second = traces(seed, FLASHINFER_EXACT, zeros=True)
    assert first.zero_bytes == second.zero_bytes
    assert candidates(first) == candidates(second)


def test_float32_weights_leave_the_arithmetic_open(seed: int) -> None:
    drawn = torch.rand(24, generator=torch.Generator().manual_seed(seed)) + 0.5
    scales = (drawn / 2688).tolist()
    inferred = infer_dialect(DialectTraces(scales, DECODE, [], 0.5, 0, powers_only=False))
    assert inferred.value is None
    assert max(inferred.evidence.values()) < 0.5


def test_small_scales_and_zeros_over_codes_exclude() -> None:
    tiny = DialectTraces([0.3], DECODE, [], 2.0**-9, 0, powers_only=False)
    assert "torchao" not in candidates(tiny)
    lost = DialectTraces([0.3], DECODE, [], 2.0**-9, 5, powers_only=False)
    assert candidates(lost) == ("canonical, flashinfer or vllm",)


def test_a_lossless_cast_is_reported() -> None:
    inferred = infer_dialect(DialectTraces([2.0**-11], DECODE, [], 0.5, 0, powers_only=True))
    assert inferred.value == LOSSLESS


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, -1.0])
def test_spoilt_scales_are_survived(scale: float) -> None:
    inferred = infer_dialect(DialectTraces([scale], DECODE, [0x38], 0.5, 0, powers_only=False))
    assert inferred.value == "modelopt"
    assert infer_dialect(DialectTraces([], DECODE, [], 0.5, 0, powers_only=False)).value is None
