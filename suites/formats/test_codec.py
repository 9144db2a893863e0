"""The codec and its array twin, through one suite: every code, every neighbour, every rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.codec import encode
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    ELEMENT_FORMATS,
    FP16,
    FP32,
    UE8M0,
    NanRule,
    Overflow,
    Rounding,
)
from degarble.suites.formats.codec_cases import (
    ARRAYS,
    CODEC,
    Implementation,
    magnitude_codes,
    mismatches,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.formats.number_formats import ElementFormat

FORMATS = list(ELEMENT_FORMATS.values())
by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
by_rule = pytest.mark.parametrize("rule", list(Rounding), ids=str)
both = pytest.mark.parametrize("impl", [CODEC, ARRAYS], ids=lambda impl: impl.name)

# (format, code, value): the landmarks of each format, from its specification.
LANDMARKS = [
    *((E2M1, code, value) for code, value in enumerate((0, 0.5, 1, 1.5, 2, 3, 4, 6))),
    *((E2M1, 8 + code, -value) for code, value in enumerate((0.0, 0.5, 1, 1.5, 2, 3, 4, 6))),
    (E4M3, 0x00, 0.0),
    (E4M3, 0x80, -0.0),
    (E4M3, 0x01, 2.0**-9),
    (E4M3, 0x07, 7 * 2.0**-9),
    (E4M3, 0x08, 2.0**-6),
    (E4M3, 0x38, 1.0),
    (E4M3, 0x7E, 448.0),
    (E4M3, 0xFE, -448.0),
    (E5M2, 0x01, 2.0**-16),
    (E5M2, 0x04, 2.0**-14),
    (E5M2, 0x3C, 1.0),
    (E5M2, 0x7B, 57344.0),
    (E5M2, 0x7C, math.inf),
    (E5M2, 0xFC, -math.inf),
    (UE8M0, 0x00, 2.0**-127),
    (UE8M0, 0x7F, 1.0),
    (UE8M0, 0xFE, 2.0**127),
    (BF16, 0x3F80, 1.0),
    (BF16, 0x0001, 2.0**-133),
    (BF16, 0x7F7F, 255 * 2.0**120),
    (BF16, 0xFF80, -math.inf),
    (FP16, 0x3C00, 1.0),
    (FP16, 0x0001, 2.0**-24),
    (FP16, 0x7BFF, 65504.0),
    (FP16, 0x7C00, math.inf),
    (FP32, 0x3F800000, 1.0),
    (FP32, 0x00000001, 2.0**-149),
    (FP32, 0x7F7FFFFF, (2**24 - 1) * 2.0**104),
    (FP32, 0xFF800000, -math.inf),
]

NAN_CODES = [
    (E4M3, (0x7F, 0xFF)),
    (E5M2, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    (UE8M0, (0xFF,)),
    (BF16, (0x7F81, 0x7FC0, 0xFFFF)),
    (FP16, (0x7C01, 0x7E00, 0xFFFF)),
    (FP32, (0x7F800001, 0x7FC00000, 0xFFFFFFFF)),
]


def same(left: float, right: float) -> bool:
    return left == right and math.copysign(1, left) == math.copysign(1, right)


@both
@pytest.mark.parametrize(("fmt", "code", "value"), LANDMARKS)
def test_landmarks_decode_and_encode(
    impl: Implementation, fmt: ElementFormat, code: int, value: float
) -> None:
    if fmt.sign_mask & code:
        value = math.copysign(value, -1.0)
    assert same(impl.decode([code], fmt)[0], value)
    assert impl.encode([value], fmt, Rounding.NEAREST_EVEN, _lossless(fmt)) == [code]


def _lossless(fmt: ElementFormat) -> Overflow:
    return Overflow.IEEE if fmt.infinities else Overflow.SATURATE


@both
@pytest.mark.parametrize(("fmt", "codes"), NAN_CODES, ids=lambda x: getattr(x, "name", None))
def test_nan_codes_decode_to_nan_and_nan_encodes_to_the_quiet_one(
    impl: Implementation, fmt: ElementFormat, codes: tuple[int, ...]
) -> None:
    assert all(math.isnan(value) for value in impl.decode(list(codes), fmt))
    for rule in NanRule:
        got = impl.encode([math.nan], fmt, Rounding.NEAREST_EVEN, Overflow.SATURATE, rule)
        assert got == [fmt.nan_code]
    assert fmt.nan_code in codes


@both
@by_format
def test_only_the_named_codes_are_nan(impl: Implementation, fmt: ElementFormat) -> None:
    finite = list(magnitude_codes(fmt))
    values = impl.decode(finite, fmt)
    assert all(math.isfinite(value) for value in values)
    assert values == sorted(set(values)), "magnitude codes are not ordered as their values"


@both
@by_format
@by_rule
def test_every_neighbourhood_rounds_as_the_table_says(
    impl: Implementation, fmt: ElementFormat, rule: Rounding
) -> None:
    assert mismatches(impl.encode, fmt, rule) == []


@both
@by_format
@by_rule
def test_every_code_survives_a_round_trip(
    impl: Implementation, fmt: ElementFormat, rule: Rounding
) -> None:
    codes = list(magnitude_codes(fmt))
    codes += [code | fmt.sign_mask for code in codes]
    assert impl.encode(impl.decode(codes, fmt), fmt, rule) == codes


@both
@by_format
@by_rule
@pytest.mark.parametrize("overflow", list(Overflow), ids=str)
def test_beyond_the_largest(
    impl: Implementation, fmt: ElementFormat, rule: Rounding, overflow: Overflow
) -> None:
    if overflow is Overflow.IEEE and fmt is E2M1:
        with pytest.raises(InvalidArgument, match="overflow rule for E2M1"):
            impl.encode([1.0], fmt, rule, overflow)
        return
    largest = fmt.largest
    step = largest - impl.decode([fmt.largest_code - 1], fmt)[0]
    if fmt is UE8M0:
        step = largest  # the next power of two
    half = largest + step / 2
    points = {
        "below half": math.nextafter(half, 0.0),
        "half": half,
        "above half": math.nextafter(half, math.inf),
        "far": 1e300,
        "infinite": math.inf,
    }
    for negative in (False, True) if fmt.signed else (False,):
        for place, value in points.items():
            got = impl.encode([-value if negative else value], fmt, rule, overflow)
            assert got == [_code_beyond(fmt, rule, overflow, place, negative)], (place, negative)


def _code_beyond(
    fmt: ElementFormat, rule: Rounding, overflow: Overflow, place: str, negative: bool
) -> int:
    """IEEE 754, 7.4: what overflows, and what it becomes under each rule."""
    sign = fmt.sign_mask if negative else 0
    away = {
        Rounding.NEAREST_EVEN: place in {"above half", "far"}
        or (place == "half" and fmt.largest_code % 2 == 1),
        Rounding.NEAREST_AWAY: place in {"half", "above half", "far"},
        Rounding.TOWARD_ZERO: False,
        Rounding.UP: not negative,
        Rounding.DOWN: negative,
    }[rule]
    if overflow is Overflow.SATURATE or not (away or place == "infinite"):
        return fmt.largest_code | sign
    if fmt.infinity_code is not None:
        return fmt.infinity_code | sign
    assert fmt.nan_code is not None
    return fmt.nan_code


@both
@by_format
@by_rule
def test_zero_and_what_vanishes_keep_their_sign(
    impl: Implementation, fmt: ElementFormat, rule: Rounding
) -> None:
    if not fmt.signed:
        assert impl.encode([0.0, -0.0, 5e-324, 2.0**-140], fmt, rule) == [0, 0, 0, 0]
        return
    assert impl.encode([0.0, -0.0], fmt, rule) == [0, fmt.sign_mask]
    tiny = impl.encode([5e-324, -5e-324], fmt, rule)
    assert tiny == [int(rule is Rounding.UP), fmt.sign_mask | int(rule is Rounding.DOWN)]


@both
def test_e2m1_has_no_nan_so_the_caller_names_what_becomes_of_it(impl: Implementation) -> None:
    rules = (Rounding.NEAREST_EVEN, Overflow.SATURATE)
    with pytest.raises(InvalidArgument, match=r"E2M1 has no NaN.*NanRule"):
        impl.encode([1.0, math.nan], E2M1, *rules)
    assert impl.encode([math.nan, -math.nan], E2M1, *rules, NanRule.LARGEST) == [7, 7]
    assert impl.encode([math.nan, 1.0], E2M1, *rules, NanRule.ZERO) == [0, 2]


@both
@pytest.mark.parametrize("value", [-5e-324, -1.0, -math.inf])
def test_ue8m0_refuses_negatives(impl: Implementation, value: float) -> None:
    with pytest.raises(InvalidArgument, match="not negative"):
        impl.encode([1.0, value], UE8M0)


@both
def test_ue8m0_rounds_up_by_its_exponent_bits(impl: Implementation) -> None:
    values = [1.0, math.nextafter(1.0, 2.0), 1.5, 2.0, 2.0**-127, 2.0**-128, 2.0**127]
    assert impl.encode(values, UE8M0, Rounding.UP) == [127, 128, 128, 128, 0, 0, 254]


@both
@by_format
def test_codes_out_of_range_are_refused(impl: Implementation, fmt: ElementFormat) -> None:
    for code in (-1, fmt.code_count):
        with pytest.raises(InvalidArgument, match=f"{fmt.name} code"):
            impl.decode([0, code], fmt)


def _ties_toward_zero(values: list[float], fmt: ElementFormat, rule: Rounding) -> list[int]:
    codes = [encode(value, fmt, rule) for value in values]
    for index, value in enumerate(values):
        down = encode(value, fmt, Rounding.TOWARD_ZERO)
        if encode(value, fmt, Rounding.NEAREST_AWAY) != encode(
            math.nextafter(value, 0.0), fmt, Rounding.NEAREST_AWAY
        ):
            codes[index] = down
    return codes


def _through_bf16(values: list[float], fmt: ElementFormat, rule: Rounding) -> list[int]:
    rounded: list[float] = torch.tensor(values).bfloat16().double().tolist()
    return [encode(value, fmt, rule) for value in rounded]


@pytest.mark.parametrize("planted", [_ties_toward_zero, _through_bf16])
@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_the_table_detects_a_planted_rounding_error(
    planted: Callable[..., list[int]], fmt: ElementFormat
) -> None:
    assert mismatches(planted, fmt, Rounding.NEAREST_EVEN)
