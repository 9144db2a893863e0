"""Formats listed by value, and integers by group: every code, every neighbour, outside decoders."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats.codec import (
    decode,
    decode_array,
    encode,
    encode_array,
    ordinal_array,
    ulp_distance,
    ulp_distance_array,
)
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    INT8,
    TABLE_FORMATS,
    UINT8,
    NanRule,
    Rounding,
    TableFormat,
)
from degarble.harness.formats.quantise import dequantise, quantise, spread_blocks

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat

by_table = pytest.mark.parametrize("fmt", TABLE_FORMATS.values(), ids=lambda fmt: fmt.name)
INTEGERS = [fmt for fmt in BLOCK_FORMATS.values() if isinstance(fmt.element, TableFormat)]
by_group = pytest.mark.parametrize("fmt", INTEGERS, ids=lambda fmt: fmt.name)


def rounded(value: Fraction, fmt: TableFormat, rule: Rounding) -> int:
    """Return the code of the definition: search all codes."""
    below = [code for code in range(fmt.code_count) if Fraction(fmt.table[code]) <= value]
    above = [code for code in range(fmt.code_count) if Fraction(fmt.table[code]) >= value]
    lower = max(below, key=fmt.table.__getitem__, default=fmt.ranked[0])
    upper = min(above, key=fmt.table.__getitem__, default=fmt.ranked[-1])
    down, up = value - Fraction(fmt.table[lower]), Fraction(fmt.table[upper]) - value
    if not above or not below:
        return lower if below else upper
    if rule in {Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY} and down != up:
        return lower if down < up else upper
    return {
        Rounding.NEAREST_EVEN: lower if lower % 2 == 0 else upper,
        Rounding.NEAREST_AWAY: upper if value > 0 else lower,
        Rounding.TOWARD_ZERO: lower if value > 0 else upper,
        Rounding.UP: upper,
        Rounding.DOWN: lower,
    }[rule]


@by_table
@pytest.mark.parametrize("rule", Rounding)
def test_every_code_and_neighbourhood(fmt: TableFormat, rule: Rounding) -> None:
    values = sorted(fmt.table)
    points = [*values, values[0] - 1, values[-1] + 1, values[-1] + 1e30]
    for low, high in pairwise(values):
        middle = (low + high) / 2
        points += [middle, middle - (high - low) / 64, middle + (high - low) / 64]
    points = [point for point in points if point >= 0 or fmt.signed]
    expected = [rounded(Fraction(point), fmt, rule) for point in points]
    assert [encode(point, fmt, rule) for point in points] == expected
    exact = torch.tensor(points, dtype=torch.float64)
    assert encode_array(exact, fmt, rule).tolist() == expected
    assert [decode(code, fmt) for code in range(fmt.code_count)] == list(fmt.table)
    assert decode_array(torch.arange(fmt.code_count), fmt).tolist() == list(fmt.table)


@by_table
@given(values=st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=20))
@settings(max_examples=40)
def test_the_twin_is_the_definition(fmt: TableFormat, values: list[float]) -> None:
    values = values if fmt.signed else [abs(value) for value in values]
    for rule in Rounding:
        expected = [encode(value, fmt, rule) for value in values]
        assert encode_array(torch.tensor(values), fmt, rule).tolist() == expected


def test_bytes_are_those_of_torch() -> None:
    octets = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(decode_array(octets, INT8), octets.view(torch.int8).float())
    assert torch.equal(decode_array(octets, UINT8), octets.float())


@by_table
def test_ordinals_rank_values(fmt: TableFormat) -> None:
    codes = torch.tensor(fmt.ranked)
    assert ordinal_array(codes, fmt).tolist() == list(range(fmt.code_count))
    first, last = fmt.ranked[0], fmt.ranked[-1]
    assert ulp_distance(first, last, fmt) == fmt.code_count - 1
    assert ulp_distance_array(codes[:1], codes[-1:], fmt).item() == fmt.code_count - 1


@by_table
def test_no_number_is_refused_by_name(fmt: TableFormat) -> None:
    with pytest.raises(InvalidArgument, match=f"{fmt.name} has no NaN"):
        encode(float("nan"), fmt)
    with pytest.raises(InvalidArgument, match=f"{fmt.name} has no NaN"):
        encode_array(torch.tensor([float("nan")]), fmt)
    nan = torch.tensor([float("nan"), 1.0])
    zero, one = fmt.table.index(0.0), encode(1.0, fmt)
    assert encode_array(nan, fmt, nan=NanRule.ZERO).tolist() == [zero, one]
    assert encode_array(nan, fmt, nan=NanRule.LARGEST).tolist() == [fmt.largest_code, one]
    with pytest.raises(InvalidArgument, match=f"{fmt.name} code"):
        decode(fmt.code_count, fmt)


# --------------------------------------------------------------------------------------------------
# Groups: scales, zero points and the index of columns.


def drawn(seed: int, shape: tuple[int, int] = (6, 200)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.3


@by_group
def test_an_error_is_half_a_step_at_most(fmt: BlockFormat, seed: int) -> None:
    assert isinstance(fmt.element, TableFormat)
    values = drawn(seed)
    tensor = quantise(values, fmt)
    step = spread_blocks(tensor, tensor.scale_values().double())
    error = (dequantise(tensor, torch.float64) - values.double()).abs()
    gap = max(above - below for below, above in pairwise(sorted(fmt.element.table)))
    # A zero point is rounded as well, which moves the range by up to half a step more.
    assert bool((error <= step * gap / 2 * (2 if fmt.zero_point else 1) * (1 + 2**-20)).all())
    assert bool(
        (dequantise(tensor).double() - dequantise(tensor, torch.float64)).abs().max() < 1e-6
    )


@by_group
def test_values_by_hand(fmt: BlockFormat, seed: int) -> None:
    tensor = quantise(drawn(seed), fmt)
    codes = tensor.element_codes()
    found = dequantise(tensor, torch.float64)
    high, wide = fmt.extents(6, 200)
    for row, column in ((0, 0), (1, 31), (2, 64), (3, 130), (5, 199)):
        place = row // high, column // wide
        zero = 0.0 if tensor.zero_point is None else float(tensor.zero_point[place])
        element = decode(int(codes[row, column]), fmt.element) - zero
        assert found[row, column] == element * float(tensor.block_scale[place])


def test_columns_find_their_group(seed: int) -> None:
    fmt = BLOCK_FORMATS["UINT4_G32"]
    order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
    plain = quantise(drawn(seed, (8, 128)), fmt)
    moved = replace(
        plain,
        codes=plain.with_nibble_order(plain.nibble_order).codes,  # type: ignore[arg-type]
        group_index=(torch.arange(128) // 32).int(),
    )
    assert torch.equal(dequantise(moved), dequantise(plain))
    ignored = replace(moved, group_index=(order // 32).int())
    assert not torch.equal(dequantise(ignored), dequantise(plain))
    wrong = (torch.arange(128) // 32).int()
    wrong[5] = 4
    with pytest.raises(InvalidArgument, match=r"group_index of column 5 = 4.*from 0 to 3"):
        replace(plain, group_index=wrong)


def test_zero_points_are_never_assumed(seed: int) -> None:
    tensor = quantise(drawn(seed), BLOCK_FORMATS["UINT8_G64"])
    with pytest.raises(InvalidArgument, match="zero_point of a UINT8_G64 tensor"):
        replace(tensor, zero_point=None)
    assert tensor.zero_point is not None
    with pytest.raises(ShapeMismatch, match="zero_point"):
        replace(tensor, zero_point=tensor.zero_point[:, :1])
    with pytest.raises(ShapeMismatch, match="an even number"):
        quantise(drawn(seed, (2, 33)), BLOCK_FORMATS["INT4_G32"])
