"""The order of block scales is told from codes and scales alone, or it is left undecided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.audit.statistics.inference import (
    CERTAIN,
    FAR,
    LINEAR,
    best_of,
    confidence_of,
    infer_layout,
    orders_for,
)
from degarble.harness.formats.dialects import CANONICAL, MODELOPT
from degarble.harness.formats.layouts import ROW_ORDERS, SWIZZLE_128X4, reorder_rows, to_layout
from degarble.harness.formats.number_formats import FP8_128X128_F32, MXFP4, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.formats.weight import Weight
from degarble.suites.checkpoint.number_cases import channels, generator, matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

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
def test_scales_in_order_are_told_so(seed: int, kind: str, fmt: BlockFormat) -> None:
    if (kind, fmt) == ("uniform", MXFP4):  # all scales are equal
        assert infer_layout(weight_of(drawn(seed, kind), fmt)).value is None
        return
    found = infer_layout(weight_of(drawn(seed, kind), fmt))
    assert found.value == LINEAR
    assert found.confidence > 0.999
    assert found.evidence[LINEAR] > FAR


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
    found = infer_layout(weight)
    assert found.value is None
    assert not found.evidence[LINEAR] > FAR


def test_many_zeros_may_leave_it_undecided_but_never_mislead(seed: int) -> None:
    kept = torch.rand(SHAPE, generator=generator(seed)) < 0.3
    weight = weight_of(drawn(seed, KINDS[0]) * kept)
    assert infer_layout(weight).value in (None, LINEAR)


def test_what_cannot_tell_is_undecided(seed: int) -> None:
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
