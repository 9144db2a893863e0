"""The scalar formats against outside libraries: ml_dtypes, gfloat, torch, struct.

8 bits and below exhaustively: what every code decodes to, and the code of every bfloat16, of every
midpoint and of its float32 neighbours. Where an oracle disagrees, a table here says where and why;
an entry that no longer holds fails as well.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gfloat  # type: ignore[import-untyped]  # ships no types
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from degarble.harness.formats.codec import code_dtype, codes_of, decode_array, encode_array
from degarble.harness.formats.number_formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    FP16,
    FP32,
    UE8M0,
    NanRule,
    Overflow,
    Rounding,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from degarble.harness.formats.number_formats import ElementFormat

ML_DTYPES: dict[str, Any] = {
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "UE8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
}
GFLOAT: dict[str, Any] = {
    "E2M1": gfloat_formats.format_info_ocp_e2m1,
    "E4M3": gfloat_formats.format_info_ocp_e4m3,
    "E5M2": gfloat_formats.format_info_ocp_e5m2,
    "UE8M0": gfloat_formats.format_info_ocp_e8m0,
    "BF16": gfloat_formats.format_info_bfloat16,
    "FP16": gfloat_formats.format_info_binary16,
}
GFLOAT_ROUNDING = {
    Rounding.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.NEAREST_AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    Rounding.UP: gfloat.RoundMode.TowardPositive,
    Rounding.DOWN: gfloat.RoundMode.TowardNegative,
}

NARROW = [E2M1, E4M3, E5M2, UE8M0]
narrow = pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
by_rule = pytest.mark.parametrize("rule", list(Rounding), ids=str)


def every_code(fmt: ElementFormat) -> NDArray[Any]:
    dtype = np.uint8 if fmt.bits <= 8 else np.uint16
    return np.arange(fmt.code_count, dtype=dtype)


def ours(codes: NDArray[Any], fmt: ElementFormat) -> NDArray[np.float32]:
    result: NDArray[np.float32] = decode_array(
        torch.from_numpy(codes.astype(np.int32)), fmt
    ).numpy()
    return result


def every_bfloat16(fmt: ElementFormat) -> NDArray[np.float32]:
    """Every number that bfloat16 holds, infinities included, NaN left out."""
    values = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    values = values[~np.isnan(values)]
    return values if fmt.signed else values[~np.signbit(values)]


def every_midpoint(fmt: ElementFormat) -> NDArray[np.float32]:
    """Midpoints of neighbouring codes, and the float32 numbers right beside them."""
    line = np.sort(ours(np.arange(fmt.largest_code + 1, dtype=np.uint16), fmt)).astype(np.float64)
    middle = ((line[:-1] + line[1:]) / 2).astype(np.float32)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    points = np.concatenate([middle, below, above])
    return np.concatenate([points, -points]) if fmt.signed else points


def ml_encode(values: NDArray[np.float32], fmt: ElementFormat) -> NDArray[np.int64]:
    with np.errstate(all="ignore"):  # an overflowing cast warns, and overflow is what we look at
        return values.astype(ML_DTYPES[fmt.name]).view(every_code(fmt).dtype).astype(np.int64)


def gfloat_encode(
    values: NDArray[np.float32], fmt: ElementFormat, rule: Rounding, overflow: Overflow
) -> NDArray[np.int64]:
    info = GFLOAT[fmt.name]
    with np.errstate(all="ignore"):
        rounded = gfloat.round_ndarray(
            info, values.astype(np.float64), GFLOAT_ROUNDING[rule], overflow is Overflow.SATURATE
        )
        return np.asarray(gfloat.encode_ndarray(info, rounded), dtype=np.int64)


def encoded(
    values: NDArray[np.float32],
    fmt: ElementFormat,
    rule: Rounding = Rounding.NEAREST_EVEN,
    overflow: Overflow = Overflow.SATURATE,
) -> NDArray[np.int64]:
    codes = encode_array(torch.from_numpy(values.copy()), fmt, rule, overflow)
    result: NDArray[np.int64] = codes.to(torch.int64).numpy()
    return result


def differing(
    values: NDArray[np.float32], left: NDArray[np.int64], right: NDArray[np.int64]
) -> list[tuple[str, int, int]]:
    """Return (value in hex, our code, theirs) at each difference, ready to be read."""
    where = np.flatnonzero(left != right)
    return [(float(values[i]).hex(), int(left[i]), int(right[i])) for i in where]


@pytest.mark.parametrize("fmt", [*NARROW, BF16, FP16], ids=lambda fmt: fmt.name)
def test_every_code_decodes_as_in_ml_dtypes_and_gfloat(fmt: ElementFormat) -> None:
    codes = every_code(fmt)
    decoded = ours(codes, fmt)
    from_ml = codes.view(ML_DTYPES[fmt.name]).astype(np.float32)
    from_gfloat = gfloat.decode_ndarray(GFLOAT[fmt.name], codes.astype(np.int64))
    for other in (from_ml, from_gfloat.astype(np.float32)):
        np.testing.assert_array_equal(decoded, other)
        numbers = ~np.isnan(decoded)
        np.testing.assert_array_equal(np.signbit(decoded)[numbers], np.signbit(other)[numbers])


def test_fp32_decodes_as_struct_reads_it(seed: int) -> None:
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 1 << 32, 4096, dtype=np.uint64)
    expected = np.frombuffer(b"".join(struct.pack("<I", int(c)) for c in codes), dtype="<f4")
    decoded = decode_array(torch.from_numpy(codes.astype(np.int64)), FP32).numpy()
    np.testing.assert_array_equal(decoded, expected)


POINTS: dict[str, Callable[[ElementFormat], NDArray[np.float32]]] = {
    "bfloat16": every_bfloat16,
    "midpoints": every_midpoint,
}
by_points = pytest.mark.parametrize("points", list(POINTS))


@narrow
@by_points
@by_rule
def test_saturating_codes_equal_gfloat(fmt: ElementFormat, points: str, rule: Rounding) -> None:
    values = POINTS[points](fmt)
    if fmt is UE8M0:
        # gfloat leaves the code range below 2**-127 (see the table of differences).
        values = values[values >= fmt.smallest]
    theirs = gfloat_encode(values, fmt, rule, Overflow.SATURATE)
    assert differing(values, encoded(values, fmt, rule), theirs) == []


@pytest.mark.parametrize("fmt", [E4M3, E5M2, UE8M0], ids=lambda fmt: fmt.name)
@by_rule
def test_overflowing_codes_equal_gfloat(fmt: ElementFormat, rule: Rounding) -> None:
    values = every_bfloat16(fmt)
    values = values[np.abs(values) >= fmt.smallest]
    mine = encoded(values, fmt, rule, Overflow.IEEE)
    theirs = gfloat_encode(values, fmt, rule, Overflow.IEEE)
    if fmt.infinity_code is None:
        assert fmt.nan_code is not None
        theirs[theirs == 0xFF] = fmt.nan_code  # gfloat's NaN of E4M3 is 0xFF, ours 0x7F
    assert differing(values, mine, theirs) == []


@by_points
def test_e2m1_equals_ml_dtypes(points: str) -> None:
    values = POINTS[points](E2M1)
    assert differing(values, encoded(values, E2M1), ml_encode(values, E2M1)) == []


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@by_points
def test_fp8_equals_ml_dtypes_which_overflows_as_ieee(fmt: ElementFormat, points: str) -> None:
    values = POINTS[points](fmt)
    theirs = ml_encode(values, fmt)
    if fmt is E4M3:
        theirs[theirs == 0xFF] = 0x7F  # ml_dtypes keeps the sign of a number that becomes NaN
    mine = encoded(values, fmt, Rounding.NEAREST_EVEN, Overflow.IEEE)
    assert differing(values, mine, theirs) == []


@by_points
def test_ue8m0_equals_ml_dtypes_which_rounds_ties_up(points: str) -> None:
    values = POINTS[points](UE8M0)
    mine = encoded(values, UE8M0, Rounding.NEAREST_AWAY, Overflow.IEEE)
    theirs = ml_encode(values, UE8M0)
    known = (values == 0) | ((values > 2.0**-127) & (values < 1.5 * 2.0**-127))
    np.testing.assert_array_equal(theirs[values == 0], 0xFF)
    np.testing.assert_array_equal(theirs[known & (values > 0)], 0x01)
    assert differing(values[~known], mine[~known], theirs[~known]) == []


# (what, value, our code, ml_dtypes, gfloat saturating): None where the library raises or leaves
# the range of codes. Rounding is to nearest even, overflow saturates in ours.
DIFFERENCES: dict[str, list[tuple[str, float, int, int, int | None]]] = {
    "E2M1": [
        ("NaN, NanRule.LARGEST as the hardware", np.nan, 0x7, 0x8, None),
        ("negative NaN", -np.nan, 0x7, 0x0, None),
        ("infinity", np.inf, 0x7, 0x7, 0x7),
        ("negative zero", -0.0, 0x8, 0x8, 0x8),
    ],
    "E4M3": [
        ("NaN", np.nan, 0x7F, 0x7F, 0xFF),
        ("negative NaN", -np.nan, 0x7F, 0xFF, 0xFF),
        ("infinity", np.inf, 0x7E, 0x7F, 0x7E),
        ("480, beyond the midpoint 464", 480.0, 0x7E, 0x7F, 0x7E),
        ("464, the midpoint to the code after 448", 464.0, 0x7E, 0x7E, 0x7E),
    ],
    "E5M2": [
        ("NaN", np.nan, 0x7E, 0x7E, 0xFF),
        ("negative NaN", -np.nan, 0x7E, 0xFE, 0xFF),
        ("infinity", np.inf, 0x7B, 0x7C, 0x7B),
        ("61440, the midpoint to the code of infinity", 61440.0, 0x7B, 0x7C, 0x7B),
    ],
    "UE8M0": [
        ("NaN", np.nan, 0xFF, 0xFF, 0xFF),
        ("infinity", np.inf, 0xFE, 0xFF, 0xFE),
        ("zero", 0.0, 0x00, 0xFF, 0x00),
        ("2**-128", 2.0**-128, 0x00, 0x00, None),
        ("just above 2**-127", 1.25 * 2.0**-127, 0x00, 0x01, 0x00),
        ("3, a tie", 3.0, 0x80, 0x81, 0x80),
        ("6, a tie", 6.0, 0x82, 0x82, 0x82),
        ("beyond 2**127", 1.75 * 2.0**127, 0xFE, 0xFF, 0xFE),
    ],
}


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name, rows in DIFFERENCES.items() for row in rows],
    ids=str,
)
def test_the_table_of_differences_holds(
    name: str, row: tuple[str, float, int, int, int | None]
) -> None:
    fmt = next(fmt for fmt in NARROW if fmt.name == name)
    _, number, our_code, ml_code, gfloat_code = row
    value = np.array([number], dtype=np.float32)
    mine = encode_array(torch.from_numpy(value.copy()), fmt, nan=NanRule.LARGEST)
    assert mine.tolist() == [our_code]
    assert ml_encode(value, fmt).tolist() == [ml_code]
    try:
        theirs: int | None = int(
            gfloat_encode(value, fmt, Rounding.NEAREST_EVEN, Overflow.SATURATE)[0]
        )
    except AssertionError:
        theirs = None
    if theirs is not None and not 0 <= theirs < fmt.code_count:
        theirs = None
    assert theirs == gfloat_code


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_16_bit_formats_round_as_torch_casts(fmt: ElementFormat, seed: int) -> None:
    dtype = {"BF16": torch.bfloat16, "FP16": torch.float16}[fmt.name]
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator)
    near = decode_array(torch.arange(fmt.largest_code), fmt).double()
    middle = (near[:-1] + near[1:]) / 2
    values = torch.cat([bits.to(torch.int32).view(torch.float32), middle.float(), -middle.float()])
    values = values[~values.isnan()]
    cast = codes_of(values.to(dtype))
    assert cast.dtype == code_dtype(fmt)
    assert torch.equal(encode_array(values, fmt, overflow=Overflow.IEEE), cast)


def test_the_comparison_detects_a_planted_difference() -> None:
    values = every_bfloat16(E4M3)
    theirs = gfloat_encode(values, E4M3, Rounding.TOWARD_ZERO, Overflow.SATURATE)
    found = differing(values, encoded(values, E4M3), theirs)
    assert ((1.9375).hex(), 0x40, 0x3F) in found
