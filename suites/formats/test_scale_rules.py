"""Each scale rule against NumPy float32, one operation at a time, and the trap that it avoids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.formats.dialects import (
    CANONICAL,
    MODELOPT,
    BlockScaleRule,
    TensorScaleRule,
    ValueRule,
)
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.scale_rules import BLOCK_SCALE, TENSOR_SCALE, VALUE, TensorScales

if TYPE_CHECKING:
    from numpy.typing import NDArray

F = np.float32
ONE, SIX, FULL = F(1), F(6), F(2688)
LARGEST = F(np.finfo(np.float32).max)


def magnitudes(seed: int, count: int = 2000) -> NDArray[np.float32]:
    """Positive float32 numbers of all sizes that occur, and the ends of the range."""
    rng = np.random.default_rng(seed)
    ends = [1.0, 6.0, 10.5, 448.0, 2688.0, 1e-30, 1e30, float(LARGEST)]
    return np.concatenate([np.exp2(rng.uniform(-40, 40, count)), ends]).astype(F)


def test_every_rule_has_a_function() -> None:
    assert set(TENSOR_SCALE) == set(TensorScaleRule)
    assert set(BLOCK_SCALE) == set(BlockScaleRule)
    assert set(VALUE) == set(ValueRule)


@pytest.mark.parametrize(
    ("rule", "direction"),
    [
        (TensorScaleRule.ENCODE_CAPPED, "encode"),
        (TensorScaleRule.ENCODE_PLAIN, "encode"),
        (TensorScaleRule.DECODE, "decode"),
    ],
)
def test_tensor_scales_round_once(seed: int, rule: TensorScaleRule, direction: str) -> None:
    amax = magnitudes(seed)
    scales = TENSOR_SCALE[rule](torch.from_numpy(amax), NVFP4, torch.float32)
    expected = FULL / amax if direction == "encode" else amax / FULL
    assert np.array_equal(getattr(scales, direction).numpy(), expected)
    other = "decode" if direction == "encode" else "encode"
    assert np.array_equal(getattr(scales, other).numpy(), ONE / expected)


def test_a_number_over_a_tensor_would_round_twice(seed: int) -> None:
    # The planted trap: torch turns 2688 / tensor into reciprocal times 2688.
    amax = magnitudes(seed)
    trapped = (2688 / torch.from_numpy(amax)).numpy()
    assert np.count_nonzero(trapped != FULL / amax) > 0
    rule = TENSOR_SCALE[TensorScaleRule.ENCODE_IN_INPUT_DTYPE]
    scales = rule(torch.from_numpy(amax), NVFP4, torch.float32)
    assert np.array_equal(scales.encode.numpy(), trapped), "compressed-tensors falls into it"


@pytest.mark.parametrize(
    ("amax", "expected"),
    [(0.0, 1.0), (np.inf, 1.0), (1e-38, float(LARGEST)), (np.nan, float(LARGEST)), (2688.0, 1.0)],
)
def test_the_capped_encode_scale_is_always_usable(amax: float, expected: float) -> None:
    largest = torch.tensor(amax, dtype=torch.float32)
    scales = TENSOR_SCALE[TensorScaleRule.ENCODE_CAPPED](largest, NVFP4, torch.float32)
    assert scales.encode.item() == expected


@pytest.mark.parametrize("amax", [0.0, 1e-38, 1e-36])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_falls_back_to_one(amax: float, dtype: torch.dtype) -> None:
    largest = torch.tensor(amax, dtype=torch.float32)
    scales = TENSOR_SCALE[TensorScaleRule.ENCODE_IN_INPUT_DTYPE](largest, NVFP4, dtype)
    assert scales.encode.item() == 1.0


def test_block_scales_round_after_every_operation(seed: int) -> None:
    a = magnitudes(seed)
    g = magnitudes(seed + 1)
    with np.errstate(over="ignore", under="ignore"):
        s = ONE / g
        bf16 = torch.from_numpy(a).bfloat16()
        quotient = (bf16.float() / 6).bfloat16().float().numpy()
        expected: dict[BlockScaleRule, NDArray[np.float32]] = {
            BlockScaleRule.AMAX_TIMES_ENCODE_SHARE: a * (g * (ONE / SIX)),
            BlockScaleRule.ENCODE_TIMES_AMAX_SHARE: g * (a * (ONE / SIX)),
            BlockScaleRule.AMAX_OVER_DECODE_SHARE: a / (SIX * s),
            BlockScaleRule.QUOTIENT_TIMES_ENCODE: g * quotient,
            BlockScaleRule.QUOTIENT_OVER_DECODE: (a / SIX) / s,
            BlockScaleRule.AMAX_SHARE: a * (ONE / SIX),
        }
    scales = TensorScales(torch.from_numpy(g), torch.from_numpy(s))
    rule = CANONICAL.rule_for(NVFP4)
    assert set(expected) == set(BLOCK_SCALE)
    for name, function in BLOCK_SCALE.items():
        got = function(torch.from_numpy(a), scales, rule, torch.bfloat16).numpy()
        assert np.array_equal(got, expected[name]), name


def test_the_order_of_operations_matters(seed: int) -> None:
    a, g = (torch.from_numpy(magnitudes(seed + i)) for i in range(2))
    scales = TensorScales(g, g.reciprocal())
    rule = MODELOPT.rule_for(NVFP4)
    results = [function(a, scales, rule, torch.float32) for function in BLOCK_SCALE.values()]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert not torch.equal(one, other)


def test_values_round_after_every_operation(seed: int) -> None:
    x, b, g = (magnitudes(seed + i) for i in range(3))
    b = np.clip(b, F(2.0**-9), F(448)).astype(F)
    with np.errstate(over="ignore", under="ignore"):
        s = ONE / g
        factor = ONE / (b * (ONE / g))
        expected: dict[ValueRule, NDArray[Any]] = {
            ValueRule.TIMES_CAPPED_RECIPROCAL: x * np.fmin(factor, LARGEST),
            ValueRule.TIMES_RECIPROCAL: x * factor,
            ValueRule.TIMES_QUOTIENT: x * ((ONE / s) / b),
            ValueRule.OVER_PRODUCT: x / (b * s),
            ValueRule.OVER_QUOTIENT: x / (b / g),
            ValueRule.OVER_BLOCK: x / b,
        }
    scales = TensorScales(torch.from_numpy(g), torch.from_numpy(s))
    assert set(expected) == set(VALUE)
    for name, function in VALUE.items():
        got = function(torch.from_numpy(x), torch.from_numpy(b), scales).numpy()
        assert np.array_equal(got, expected[name]), name


def test_a_scale_of_zero_is_capped_or_infinite() -> None:
    one, zero = torch.ones(1), torch.zeros(1)
    scales = TensorScales(one, one)
    assert VALUE[ValueRule.TIMES_CAPPED_RECIPROCAL](one, zero, scales).item() == float(LARGEST)
    assert VALUE[ValueRule.TIMES_CAPPED_RECIPROCAL](zero, zero, scales).item() == 0.0
    assert VALUE[ValueRule.TIMES_RECIPROCAL](one, zero, scales).item() == np.inf
    assert VALUE[ValueRule.TIMES_RECIPROCAL](zero, zero, scales).isnan().item()
