"""Distances in ulps: steps counted with nextafter, every pair of narrow codes, NaN and zero."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.formats.codec import (
    decode,
    is_nan,
    nan_distance,
    ordinal,
    ordinal_array,
    ulp_distance,
    ulp_distance_array,
    value_ulp_distance,
)
from degarble.harness.formats.number_formats import E2M1, E4M3, E5M2, ELEMENT_FORMATS, FP32, UE8M0

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import ElementFormat

FORMATS = list(ELEMENT_FORMATS.values())
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
narrow = pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2, UE8M0], ids=lambda fmt: fmt.name)


@narrow
def test_ordinals_count_the_number_line(fmt: ElementFormat) -> None:
    codes = [code for code in range(fmt.code_count) if not is_nan(code, fmt)]
    line = sorted({decode(code, fmt) for code in codes})
    place = {value: index for index, value in enumerate(line)}
    zero = place.get(0.0, 0)
    for code in codes:
        assert ordinal(code, fmt) == place[decode(code, fmt)] - zero


@narrow
def test_the_twin_agrees_on_every_pair(fmt: ElementFormat) -> None:
    step = 1 if fmt.bits == 4 else 5
    codes = [*range(0, fmt.code_count, step), fmt.sign_mask, fmt.code_count - 1]
    pairs = list(product(codes, codes))
    left, right = (torch.tensor(side, dtype=torch.uint8) for side in zip(*pairs, strict=True))
    expected = [ulp_distance(code, other, fmt) for code, other in pairs]
    assert ulp_distance_array(left, right, fmt).tolist() == expected


@by_format
def test_neighbours_are_one_apart_through_zero_and_across_binades(fmt: ElementFormat) -> None:
    if fmt.signed:
        assert ulp_distance(0, fmt.sign_mask, fmt) == 0
        assert ulp_distance(1, fmt.sign_mask | 1, fmt) == 2
    binade = 1 << fmt.mantissa_bits
    for code, after in pairwise([binade - 1, binade, binade + 1]):
        assert ulp_distance(code, after, fmt) == 1
    if fmt.infinity_code is not None:
        assert ulp_distance(fmt.largest_code, fmt.infinity_code, fmt) == 1


@by_format
def test_nan_is_farther_than_any_number_except_from_nan(fmt: ElementFormat) -> None:
    widest = ulp_distance(fmt.largest_code, fmt.largest_code | fmt.sign_mask, fmt)
    assert widest < nan_distance(fmt)
    if fmt.nan_code is not None:
        assert ulp_distance(fmt.nan_code, fmt.code_count - 1, fmt) == 0
        assert ulp_distance(fmt.nan_code, 0, fmt) == nan_distance(fmt)


@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False), steps=st.integers(0, 9))
def test_steps_of_nextafter_are_ulps(value: float, steps: int) -> None:
    start = torch.tensor([value], dtype=torch.float32)
    moved = start
    for _ in range(steps):
        moved = torch.nextafter(moved, torch.tensor([math.inf]))
    if moved.isinf().any():
        return
    assert value_ulp_distance(start, moved).tolist() == [steps]
    assert value_ulp_distance(moved, start).tolist() == [steps]


def test_a_planted_step_is_counted_where_a_ratio_would_miss_it() -> None:
    values = torch.tensor([0.0, 1.0, -2.0, 2.0**-149], dtype=torch.float32)
    planted = values.clone()
    planted[3] = 2 * planted[3]  # one step in the subnormals
    planted[0] = -0.0
    assert value_ulp_distance(values, planted).tolist() == [0, 0, 0, 1]
    assert ordinal_array(torch.tensor([0x80000001]), FP32).tolist() == [-1]


def test_bfloat16_and_float8_tensors_have_their_own_ulps() -> None:
    values = torch.tensor([1.0, 1.5])
    moved = torch.tensor([1.0078125, 1.75])
    bf16 = value_ulp_distance(values.bfloat16(), moved.bfloat16())
    assert bf16.tolist() == [1, 32]
    fp8 = value_ulp_distance(values.to(torch.float8_e4m3fn), moved.to(torch.float8_e4m3fn))
    assert fp8.tolist() == [0, 2]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match="an ulp belongs to a format"):
        value_ulp_distance(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(DtypeMismatch, match="no torch dtype"):
        value_ulp_distance(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ShapeMismatch, match="one shape"):
        value_ulp_distance(torch.zeros(2), torch.zeros(3))
