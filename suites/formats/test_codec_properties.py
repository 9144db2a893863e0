"""What holds for any number in any scalar format: Hypothesis looks for the exception."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.formats.codec import decode, decode_array, encode, encode_array
from degarble.harness.formats.number_formats import ELEMENT_FORMATS, Overflow, Rounding
from degarble.suites.formats.codec_cases import ARRAYS, CODEC

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import ElementFormat

FORMATS = list(ELEMENT_FORMATS.values())
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
NEAREST = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY)

anything = st.floats(allow_nan=False)
# Half of the draws within reach of the narrow formats, where things happen.
numbers = st.one_of(anything, st.floats(-500, 500), st.floats(-1e-3, 1e-3))
number_lists = st.lists(numbers, min_size=1, max_size=40)
rules = st.sampled_from(list(Rounding))


def usable(values: list[float], fmt: ElementFormat) -> list[float]:
    return values if fmt.signed else [abs(value) for value in values]


@by_format
@given(values=number_lists, rule=rules, overflow=st.sampled_from(list(Overflow)))
def test_codec_and_arrays_agree(
    fmt: ElementFormat, values: list[float], rule: Rounding, overflow: Overflow
) -> None:
    if fmt.nan_code is None:
        overflow = Overflow.SATURATE
    values = usable(values, fmt)
    assert ARRAYS.encode(values, fmt, rule, overflow) == CODEC.encode(values, fmt, rule, overflow)


@by_format
@given(values=number_lists, rule=rules)
def test_encoding_is_monotone(fmt: ElementFormat, values: list[float], rule: Rounding) -> None:
    codes = ARRAYS.encode(sorted(usable(values, fmt)), fmt, rule)
    decoded = ARRAYS.decode(codes, fmt)
    assert decoded == sorted(decoded)


@by_format
@given(values=number_lists, rule=rules)
def test_rounding_twice_is_rounding_once(
    fmt: ElementFormat, values: list[float], rule: Rounding
) -> None:
    codes = ARRAYS.encode(usable(values, fmt), fmt, rule)
    assert ARRAYS.encode(ARRAYS.decode(codes, fmt), fmt, rule) == codes


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.signed], ids=lambda fmt: fmt.name)
@given(values=number_lists, rule=rules)
def test_a_sign_only_mirrors(fmt: ElementFormat, values: list[float], rule: Rounding) -> None:
    mirrored = {Rounding.UP: Rounding.DOWN, Rounding.DOWN: Rounding.UP}.get(rule, rule)
    codes = ARRAYS.encode(values, fmt, rule)
    assert ARRAYS.encode([-value for value in values], fmt, mirrored) == [
        code ^ fmt.sign_mask for code in codes
    ]


@by_format
@given(value=numbers, rule=rules)
def test_the_error_is_within_the_step(fmt: ElementFormat, value: float, rule: Rounding) -> None:
    value = min(abs(value), fmt.largest)
    if not fmt.subnormals:
        value = max(value, fmt.smallest)
    code = encode(value, fmt, rule)
    rounded = decode(code, fmt)
    # The step around the value: from the code below it to the next.
    lower = encode(value, fmt, Rounding.TOWARD_ZERO)
    upper = min(lower + 1, fmt.largest_code)
    step = Fraction(decode(upper, fmt)) - Fraction(decode(lower, fmt))
    error = abs(Fraction(rounded) - Fraction(value))
    assert 2 * error <= step if rule in NEAREST else error < step or error == 0


@by_format
@given(value=numbers)
def test_up_and_down_enclose(fmt: ElementFormat, value: float) -> None:
    value = math.copysign(min(abs(value), fmt.largest), value) if fmt.signed else abs(value)
    value = max(min(value, fmt.largest), -fmt.largest)
    below = decode(encode(value, fmt, Rounding.DOWN), fmt)
    above = decode(encode(value, fmt, Rounding.UP), fmt)
    if fmt.subnormals:
        assert below <= value
    assert value <= above


@by_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@settings(max_examples=25)
@given(values=st.lists(st.floats(0, 60_000), min_size=1, max_size=40), rule=rules)
def test_the_dtype_of_the_input_does_not_matter(
    fmt: ElementFormat, dtype: torch.dtype, values: list[float], rule: Rounding
) -> None:
    given_values = torch.tensor(values, dtype=torch.float64).to(dtype)
    codes = encode_array(given_values, fmt, rule)
    assert torch.equal(codes, encode_array(given_values.double(), fmt, rule))
    assert torch.equal(encode_array(decode_array(codes, fmt), fmt, rule), codes)
