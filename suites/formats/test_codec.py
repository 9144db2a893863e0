"""The codec, its array twin, packed nibbles and ulps: every code, every neighbour, every rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats import codec
from degarble.harness.formats.codec import (
    decode,
    decode_array,
    decode_pairs,
    encode,
    encode_array,
    high_nibble,
    is_nan,
    low_nibble,
    nan_distance,
    ordinal,
    ordinal_array,
    pack_nibbles,
    pack_pair,
    ulp_distance,
    ulp_distance_array,
    unpack_nibbles,
    value_ulp_distance,
)
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
    NibbleOrder,
    Overflow,
    Rounding,
)
from degarble.suites.formats.bits import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# Inputs around every representable number, with the code that each rounding rule must yield.
#
# The expectation comes from the construction: between two neighbouring codes lie six points, and
# each rule's choice at each of them is written in one table below, not computed by a rounder.

# Primes that leave some hundreds of codes of a wide format.
_STRIDES = {16: 61, 32: 4_194_301}


@dataclass(frozen=True)
class Implementation:
    """The codec or its twin, both on lists."""

    name: str
    decode: Callable[[list[int], ElementFormat], list[float]]
    encode: Callable[..., list[int]]


def _encode_each(
    values: list[float],
    fmt: ElementFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> list[int]:
    return [codec.encode(value, fmt, rounding, overflow, nan) for value in values]


def _encode_tensor(
    values: list[float],
    fmt: ElementFormat,
    rounding: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
    nan: NanRule = NanRule.REFUSE,
) -> list[int]:
    value = torch.tensor(values, dtype=torch.float64)
    codes: list[int] = codec.encode_array(value, fmt, rounding, overflow, nan).tolist()
    return codes


def _decode_tensor(codes: list[int], fmt: ElementFormat) -> list[float]:
    values: list[float] = codec.decode_array(torch.tensor(codes), fmt).tolist()
    return values


CODEC = Implementation(
    "codec", lambda codes, fmt: [codec.decode(code, fmt) for code in codes], _encode_each
)
ARRAYS = Implementation("arrays", _decode_tensor, _encode_tensor)


def magnitude_codes(fmt: ElementFormat) -> range:
    """Finite magnitude codes: all of them up to 8 bits, a stride beyond."""
    return range(0, fmt.largest_code, _STRIDES.get(fmt.bits, 1))


@dataclass(frozen=True)
class Case:
    """A positive value and what it lies next to: `code` is the code below or at it."""

    value: float
    code: int
    place: str  # exact, lower half, middle, upper half


def cases(fmt: ElementFormat) -> Iterator[Case]:
    """Yield points at, around and between neighbouring codes."""
    for code in magnitude_codes(fmt):
        below, above = codec.decode(code, fmt), codec.decode(code + 1, fmt)
        middle = (below + above) / 2
        yield Case(below, code, "exact")
        yield Case(middle, code, "middle")
        for point, towards, place in (
            (below, above, "lower half"),
            (middle, below, "lower half"),
            (middle, above, "upper half"),
            (above, below, "upper half"),
        ):
            yield Case(math.nextafter(point, towards), code, place)
            if fmt.bits <= 16:  # a float32 lies strictly between the points
                near = float(np.nextafter(np.float32(point), np.float32(towards)))
                yield Case(near, code, place)


# Whether a rule takes the code above. Even and odd codes are distinguished where it matters.
_ROUNDS_UP: dict[Rounding, Callable[[Case, bool], bool]] = {
    Rounding.NEAREST_EVEN: lambda case, _negative: (
        case.place == "upper half" or (case.place == "middle" and case.code % 2 == 1)
    ),
    Rounding.NEAREST_AWAY: lambda case, _negative: case.place in {"upper half", "middle"},
    Rounding.TOWARD_ZERO: lambda _case, _negative: False,
    Rounding.UP: lambda case, negative: case.place != "exact" and not negative,
    Rounding.DOWN: lambda case, negative: case.place != "exact" and negative,
}


def expected_code(case: Case, fmt: ElementFormat, rule: Rounding, negative: bool) -> int:
    """Return the code that the rule must yield for the case with that sign."""
    up = _ROUNDS_UP[rule](case, negative)
    return (case.code + int(up)) | (fmt.sign_mask if negative else 0)


def mismatches(
    encode: Callable[..., list[int]], fmt: ElementFormat, rule: Rounding
) -> list[tuple[float, int, int]]:
    """Return (value, expected, got) wherever an encoder leaves the table."""
    found = []
    every = list(cases(fmt))
    for negative in (False, True) if fmt.signed else (False,):
        values = [-case.value if negative else case.value for case in every]
        got = encode(values, fmt, rule)
        for case, value, code in zip(every, values, got, strict=True):
            expected = expected_code(case, fmt, rule, negative)
            if code != expected:
                found.append((value, expected, code))
    return found


# --------------------------------------------------------------------------------------------------
# The codec and its array twin, through one suite: every code, every neighbour, every rule.

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
    if overflow is Overflow.IEEE and fmt.infinity_code is None and fmt.nan_code is None:
        with pytest.raises(InvalidArgument, match=f"overflow rule for {fmt.name}"):
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


# --------------------------------------------------------------------------------------------------
# What holds for any number in any scalar format: Hypothesis looks for the exception.

codec_properties_by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
NEAREST = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY)

anything = st.floats(allow_nan=False)
# Half of the draws within reach of the narrow formats, where things happen.
numbers = st.one_of(anything, st.floats(-500, 500), st.floats(-1e-3, 1e-3))
number_lists = st.lists(numbers, min_size=1, max_size=40)
rules = st.sampled_from(list(Rounding))


def usable(values: list[float], fmt: ElementFormat) -> list[float]:
    return values if fmt.signed else [abs(value) for value in values]


@codec_properties_by_format
@given(values=number_lists, rule=rules, overflow=st.sampled_from(list(Overflow)))
def test_codec_and_arrays_agree(
    fmt: ElementFormat, values: list[float], rule: Rounding, overflow: Overflow
) -> None:
    if fmt.nan_code is None:
        overflow = Overflow.SATURATE
    values = usable(values, fmt)
    assert ARRAYS.encode(values, fmt, rule, overflow) == CODEC.encode(values, fmt, rule, overflow)


@codec_properties_by_format
@given(values=number_lists, rule=rules)
def test_encoding_is_monotone(fmt: ElementFormat, values: list[float], rule: Rounding) -> None:
    codes = ARRAYS.encode(sorted(usable(values, fmt)), fmt, rule)
    decoded = ARRAYS.decode(codes, fmt)
    assert decoded == sorted(decoded)


@codec_properties_by_format
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


@codec_properties_by_format
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


@codec_properties_by_format
@given(value=numbers)
def test_up_and_down_enclose(fmt: ElementFormat, value: float) -> None:
    value = math.copysign(min(abs(value), fmt.largest), value) if fmt.signed else abs(value)
    value = max(min(value, fmt.largest), -fmt.largest)
    below = decode(encode(value, fmt, Rounding.DOWN), fmt)
    above = decode(encode(value, fmt, Rounding.UP), fmt)
    if fmt.subnormals:
        assert below <= value
    assert value <= above


@codec_properties_by_format
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


# --------------------------------------------------------------------------------------------------
# Bytes looked up in a table, and the arithmetic that other integer dtypes take: every byte.

SMALL = [element_format for element_format in ELEMENT_FORMATS.values() if element_format.bits <= 8]
arrays_by_format = pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)


@arrays_by_format
@pytest.mark.parametrize("mode", [False, True], ids=["plain", "inference"])
def test_every_byte_is_what_arithmetic_makes_of_it(fmt: ElementFormat, mode: bool) -> None:
    codec._table.cache_clear()
    codes = torch.arange(fmt.code_count).repeat(3)
    with torch.inference_mode(mode):
        found = decode_array(codes.to(torch.uint8), fmt)
    assert differences(found.clone(), decode_array(codes, fmt)) == ""


@arrays_by_format
def test_pieces_join(fmt: ElementFormat) -> None:
    codes = torch.arange(2 * (1 << 17) + 5).remainder(fmt.code_count).reshape(1, -1)
    assert differences(decode_array(codes.to(torch.uint8), fmt), decode_array(codes, fmt)) == ""


def test_bytes_beyond_four_bits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="from 0 to 15"):
        decode_array(torch.tensor([3, 16], dtype=torch.uint8), E2M1)


@pytest.mark.parametrize("order", list(NibbleOrder), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(256,), (2, 128), (4, 8, 8), (0, 8)], ids=str)
def test_pairs_are_the_nibbles_one_by_one(
    order: NibbleOrder, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    packed = torch.arange(256)[: torch.Size(shape).numel()].to(torch.uint8).reshape(shape)
    expected = decode_array(unpack_nibbles(packed, order).long(), E2M1).to(dtype)
    found = decode_pairs(packed, E2M1, order, dtype)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_pairs_of_many_and_of_strided_bytes() -> None:
    packed = (torch.arange(1 << 18) * 7).to(torch.uint8).reshape(512, 512)[:, 3:500:2]
    expected = decode_array(unpack_nibbles(packed).long(), E2M1)
    assert torch.equal(decode_pairs(packed, E2M1, NibbleOrder.LOW_EVEN, torch.float32), expected)


# --------------------------------------------------------------------------------------------------
# Two codes to a byte: every byte, both orders, and every way to hold it wrong.

orders = pytest.mark.parametrize("order", list(NibbleOrder), ids=str)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


@orders
def test_every_pair_of_bytes_survives_both_ways(order: NibbleOrder) -> None:
    low, high = torch.meshgrid(EVERY_BYTE, EVERY_BYTE, indexing="ij")
    packed = torch.stack([low, high], dim=-1)  # all 65,536 pairs
    codes = unpack_nibbles(packed, order)
    assert codes.shape == (256, 256, 4)
    assert int(codes.max()) == 15
    assert torch.equal(pack_nibbles(codes, order), packed)


def test_the_even_index_is_the_low_half_unless_named_otherwise() -> None:
    codes = torch.tensor([0x1, 0x2, 0xA, 0xF], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [0x21, 0xFA]
    assert pack_nibbles(codes, NibbleOrder.HIGH_EVEN).tolist() == [0x12, 0xAF]


def test_the_wrong_order_swaps_neighbours_and_nothing_else() -> None:
    codes = unpack_nibbles(EVERY_BYTE)
    swapped = unpack_nibbles(EVERY_BYTE, NibbleOrder.HIGH_EVEN)
    assert not torch.equal(codes, swapped)
    assert torch.equal(codes.view(-1, 2).flip(-1).flatten(), swapped)


@pytest.mark.parametrize("byte", range(256))
def test_the_scalar_pair_is_what_the_tensor_packs(byte: int) -> None:
    low, high = low_nibble(byte), high_nibble(byte)
    assert pack_pair(low, high) == byte
    assert unpack_nibbles(torch.tensor([byte], dtype=torch.uint8)).tolist() == [low, high]


@orders
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)))
def test_any_shape_keeps_its_leading_extents(
    order: NibbleOrder, shape: tuple[int, int, int]
) -> None:
    experts, rows, columns = shape
    count = experts * rows * 2 * columns
    codes = (torch.arange(count) * 7 % 16).to(torch.uint8).reshape(experts, rows, 2 * columns)
    packed = pack_nibbles(codes, order)
    assert packed.shape == shape
    assert torch.equal(unpack_nibbles(packed, order), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="even number of codes"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ShapeMismatch, match="even number of codes"):
        pack_nibbles(torch.tensor(1, dtype=torch.uint8))
    with pytest.raises(InvalidArgument, match="not bytes that are packed already"):
        pack_nibbles(torch.tensor([1, 16], dtype=torch.uint8))
    with pytest.raises(DtypeMismatch, match="never cast"):
        pack_nibbles(torch.zeros(2))
    with pytest.raises(DtypeMismatch, match="never cast"):
        unpack_nibbles(torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ShapeMismatch, match="at least one dimension"):
        unpack_nibbles(torch.tensor(1, dtype=torch.uint8))


# --------------------------------------------------------------------------------------------------
# Distances in ulps: steps counted with nextafter, every pair of narrow codes, NaN and zero.

ulps_by_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
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


@ulps_by_format
def test_neighbours_are_one_apart_through_zero_and_across_binades(fmt: ElementFormat) -> None:
    if fmt.signed:
        assert ulp_distance(0, fmt.sign_mask, fmt) == 0
        assert ulp_distance(1, fmt.sign_mask | 1, fmt) == 2
    binade = 1 << fmt.mantissa_bits
    for code, after in pairwise([binade - 1, binade, binade + 1]):
        assert ulp_distance(code, after, fmt) == 1
    if fmt.infinity_code is not None:
        assert ulp_distance(fmt.largest_code, fmt.infinity_code, fmt) == 1


@ulps_by_format
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


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_tables_of_a_gpu_hold_what_the_definition_decodes(
    fmt: ElementFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU looks codes up in few launches; the same look-up runs on the CPU here."""
    codes = torch.arange(256, dtype=torch.uint8)[: fmt.code_count].repeat(3)
    expected = decode_array(codes, fmt)
    pairs = {
        (order, dtype): decode_pairs(torch.arange(256, dtype=torch.uint8), fmt, order, dtype)
        for order in NibbleOrder
        for dtype in (torch.float32, torch.float64)
        if fmt.bits == 4
    }
    monkeypatch.setattr(codec, "_is_looked_up_on_gpu", lambda codes: codes.dtype is torch.uint8)
    monkeypatch.setattr(codec, "_GPU_PIECE", 100)
    assert not differences(decode_array(codes, fmt), expected)
    for (order, dtype), values in pairs.items():
        found = decode_pairs(torch.arange(256, dtype=torch.uint8), fmt, order, dtype)
        assert found.dtype is dtype
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
    if fmt.bits < 8:
        with pytest.raises(InvalidArgument, match="code"):
            decode_array(torch.tensor([fmt.code_count], dtype=torch.uint8), fmt)
