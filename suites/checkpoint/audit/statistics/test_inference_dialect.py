"""Producers are told by their traces, and what leaves the same traces is left together."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.checkpoint.audit.statistics.inference import (
    LOSSLESS,
    PRODUCERS,
    DialectTraces,
    candidates,
    infer_dialect,
)
from degarble.harness.formats.dialects import (
    CANONICAL,
    COMPRESSED_TENSORS,
    FLASHINFER_EXACT,
    MODELOPT,
    TORCHAO,
    Dialect,
)
from degarble.harness.formats.number_formats import NVFP4, ScaleDirection
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.number_cases import matrix

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
    found = traces(seed, GROUP_OF[name], zeros=zeros)
    assert name in candidates(found)
    assert infer_dialect(found).value in (None, name)


@pytest.mark.parametrize("name", PRODUCERS)
def test_blocks_of_zeros_tell_all_producers_apart(seed: int, name: str) -> None:
    inferred = infer_dialect(traces(seed, GROUP_OF[name], zeros=True))
    assert inferred.value == name
    assert inferred.confidence > 0.999
    assert "zero blocks have the scale" in inferred.because


def test_arithmetic_tells_without_blocks_of_zeros(seed: int) -> None:
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


def test_a_lossless_cast_is_told() -> None:
    inferred = infer_dialect(DialectTraces([2.0**-11], DECODE, [], 0.5, 0, powers_only=True))
    assert inferred.value == LOSSLESS


@pytest.mark.parametrize("scale", [0.0, math.nan, math.inf, -1.0])
def test_spoilt_scales_are_survived(scale: float) -> None:
    inferred = infer_dialect(DialectTraces([scale], DECODE, [0x38], 0.5, 0, powers_only=False))
    assert inferred.value == "modelopt"
    assert infer_dialect(DialectTraces([], DECODE, [], 0.5, 0, powers_only=False)).value is None
