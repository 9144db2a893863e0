"""The models of tensor-core steps against rational arithmetic, answers by hand, and mmasim."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.codec import decode
from degarble.harness.formats.number_formats import BF16, E2M1, E4M3, FP16, FP32, UE8M0
from degarble.references import tensor_core as tc
from degarble.suites.references.tensor_core_cases import (
    DENSE,
    SCALED,
    DenseCase,
    ScaledCase,
    assert_same_bits,
    bits,
    draw_dense,
    draw_scaled,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


# --------------------------------------------------------------------------------------------------
# The models of tensor-core steps against rational arithmetic and answers made by hand.

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SCALED_RULES = (tc.NVFP4_BLOCK16, tc.MXFP4_BLOCK32)


# ---- the families show what they are for ---------------------------------------------------------


def any_of(mask: Tensor) -> bool:
    return bool(mask.any())


def is_subnormal(x: Tensor) -> Tensor:
    return (x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)


def loses_bits(case: DenseCase, out: Tensor) -> bool:
    exact = case.a.double() @ case.b.double().T + case.c.double()
    return any_of((exact - out.double()).abs() > 2.0**-23 * exact.abs())


DENSE_CLAIMS: dict[str, Callable[[DenseCase, Tensor], bool]] = {
    "normal": lambda _, out: bool(out.isfinite().all()),
    "all_codes": lambda case, out: any_of(case.a.isnan()) and any_of(out.isnan()),
    "infinities": lambda _, out: (
        any_of(out == torch.inf) and any_of(out == -torch.inf) and any_of(out.isnan())
    ),
    "spread": loses_bits,
    "cancelling": loses_bits,
    "c_dominates": lambda case, out: any_of(out != case.c),
    "c_tiny": lambda case, _: any_of(is_subnormal(case.c)),
    "zeros": lambda _, out: any_of(out == 0) and any_of(out != 0),
    "subnormal": lambda _, out: any_of(is_subnormal(out)),
    "zero_exponent": lambda case, out: (
        case.a.dtype == torch.float16
        or (any_of(is_subnormal(out)) and bool((out.abs() < 2.0**-140).all()))
    ),
    "overflow": lambda _, out: (
        any_of(out == torch.inf) and any_of(out == -torch.inf) and any_of(out.isfinite())
    ),
}


@pytest.mark.parametrize("operand", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_dense_family_shows_its_strain(family: str, operand: str, seed: int) -> None:
    case = draw_dense(family, seed, DTYPES[operand])
    assert DENSE_CLAIMS[family](case, tc.dense_gemm(*case))


SCALED_CLAIMS: dict[str, Callable[[ScaledCase, Tensor], bool]] = {
    "codes_normal": lambda _, out: bool(out.isfinite().all()),
    "any_scale": lambda _, out: any_of(out.isnan()) and any_of(~out.isnan()),
    "zero_groups": lambda case, out: any_of(out == case.c),
    "cancelling_groups": lambda _, out: any_of(out == 0) or any_of(out.abs() < 2.0**-8),
    "opposite_groups": lambda _, out: any_of(out != 0) and bool((out.abs() < 1).all()),
    "zero_scale": lambda case, _: any_of(case.a_scales == 0),
    "nan_scale": lambda _, out: any_of(out[::2].isnan()) and any_of(out[1::2].isfinite()),
    "scaled_spread": lambda _, out: bool(out.isfinite().all()),
    "c_above_groups": lambda case, out: any_of(out != case.c),
    "c_below_groups": lambda _, out: any_of(out == torch.inf) and any_of(out == -torch.inf),
    "scaled_subnormal": lambda _, out: any_of(is_subnormal(out)),
    "scaled_zero_exponent": lambda _, out: any_of(is_subnormal(out)),
    "scaled_overflow": lambda _, out: any_of(out.isinf()) and any_of(out.isfinite()),
}


@pytest.mark.parametrize("rule", SCALED_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("family", SCALED)
def test_scaled_family_shows_its_strain(family: str, rule: tc.StepRule, seed: int) -> None:
    case = draw_scaled(family, seed, rule.block)
    assert SCALED_CLAIMS[family](case, tc.block_scaled_gemm(*case, rule=rule))


# ---- against rational arithmetic -----------------------------------------------------------------


def nominal_exponent(value: float, fmt: ElementFormat) -> int:
    """Exponent of a number as its format writes it: subnormals keep the least."""
    return max(math.frexp(value)[1] - 1, 1 - fmt.bias if fmt.subnormals else -fmt.bias)


def rational_sum(terms: list[tuple[Fraction, int]], fraction_bits: int) -> float:
    """Cut each (value, exponent) toward zero at the largest exponent, add, cut to fp32."""
    unit = Fraction(2) ** (max(exponent for _, exponent in terms) - fraction_bits)
    total = sum((int(value / unit) for value, _ in terms), 0) * unit
    if total == 0:
        return 0.0
    exponent = -126
    while exponent <= 127 and abs(total) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    if exponent > 127:
        return math.copysign(math.inf, total)
    ulp = Fraction(2) ** (exponent - 23)
    return float(int(total / ulp) * ulp) + 0.0


def rational_c(c: float, zero: int) -> tuple[Fraction, int]:
    return Fraction(c), nominal_exponent(c, FP32) if c else zero


def rational_dense(a: list[float], b: list[float], c: float, fmt: ElementFormat) -> float:
    for start in range(0, len(a), 16):
        terms = [rational_c(c, -133)]
        for x, y in zip(a[start : start + 16], b[start : start + 16], strict=True):
            exponent = nominal_exponent(x, fmt) + nominal_exponent(y, fmt)
            terms.append((Fraction(x) * Fraction(y), exponent if x * y else -133))
        c = rational_sum(terms, 25)
    return c


def rational_scaled(case: ScaledCase, row: int, column: int, rule: tc.StepRule) -> float:
    scale_format = UE8M0 if rule.block == 32 else E4M3
    mask = 0xFF if rule.block == 32 else 0x7F
    c = float(case.c[row, column])
    for step in range(case.a_codes.shape[1] // 64):
        terms = [rational_c(c, -139)]
        for start in range(64 * step, 64 * step + 64, 16):
            a, b = (
                [Fraction(decode(code, E2M1)) for code in codes[start : start + 16].tolist()]
                for codes in (case.a_codes[row], case.b_codes[column])
            )
            scales = [
                decode(int(scale[start // rule.block]) & mask, scale_format)
                for scale in (case.a_scales[row], case.b_scales[column])
            ]
            products = [x * y for x, y in zip(a, b, strict=True)]
            zero = not any(products) or 0.0 in scales
            exponent = -139 if zero else sum(nominal_exponent(s, scale_format) for s in scales)
            terms.append((sum(products) * Fraction(scales[0]) * Fraction(scales[1]), exponent))
        c = rational_sum(terms, 35)
    return c


FINITE_DENSE = ("normal", "spread", "cancelling", "c_tiny", "zeros", "subnormal", "zero_exponent")
FINITE_SCALED = (
    "codes_normal",
    "zero_groups",
    "cancelling_groups",
    "opposite_groups",
    "zero_scale",
    "scaled_spread",
    "scaled_subnormal",
    "scaled_zero_exponent",
)


@pytest.mark.parametrize(("operand", "fmt"), [("bf16", BF16), ("f16", FP16)])
@pytest.mark.parametrize("family", FINITE_DENSE)
def test_dense_gemm_equals_rational_arithmetic(
    family: str, operand: str, fmt: ElementFormat, seed: int
) -> None:
    case = draw_dense(family, seed, DTYPES[operand], k=32)
    got = tc.dense_gemm(*case)
    for row in range(0, 64, 7):
        a, b, c = case.a[row].tolist(), case.b[row % 16].tolist(), case.c[row, row % 16]
        assert float(got[row, row % 16]) == rational_dense(a, b, float(c), fmt)


@pytest.mark.parametrize("rule", SCALED_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("family", FINITE_SCALED)
def test_block_scaled_gemm_equals_rational_arithmetic(
    family: str, rule: tc.StepRule, seed: int
) -> None:
    case = draw_scaled(family, seed, rule.block, k=128)
    got = tc.block_scaled_gemm(*case, rule=rule)
    for row in range(0, 64, 7):
        assert float(got[row, row % 16]) == rational_scaled(case, row, row % 16, rule)


# ---- by hand -------------------------------------------------------------------------------------

ULP = 2.0**-23  # of 1.0 in fp32
MAX = float.fromhex("0x1.fffffep127")

BY_HAND: dict[str, tuple[list[float], list[float], float, float]] = {
    # fifteen products of 2**-26 are each cut at 2**-25: their exact sum would be 1.875 ulp
    "what is cut is lost": ([1.0] + [2.0**-13] * 15, [1.0] + [2.0**-13] * 15, 0.0, 1.0),
    "toward zero, not down": ([1.0, 2.0**-13], [1.0, -(2.0**-13)], 0.0, 1.0),
    "25 bits are kept": ([2.0**-12, 2.0**-12, 1.0], [2.0**-12, 2.0**-13, 2.0**-25], 1.0, 1 + ULP),
    "the result is cut": ([2.0**-12, 2.0**-12], [2.0**-12, 2.0**-13], 1.0, 1.0),
    # 1.5 * 1.5 = 2.25 aligns as 2**0, so 2**-25 survives; as 2**1 it would not
    "products not normalised": ([1.5, -1.5, 2.0**-12], [1.5, 1.5, 2.0**-13], 0.0, 2.0**-25),
    # C = 0 aligns at 2**-133, so terms are cut at 2**-158
    "zero exponent, kept": ([2.0**-74, 2.0**-79], [2.0**-75, -(2.0**-79)], 0.0, 0.0),
    "zero exponent, cut": ([2.0**-74, 2.0**-79], [2.0**-75, -(2.0**-80)], 0.0, 2.0**-149),
    "minus zero becomes zero": ([-0.0], [1.0], -0.0, 0.0),
    "half an ulp from the top": ([2.0**51], [2.0**52], MAX, MAX),
    "over the top": ([2.0**52], [2.0**52], MAX, math.inf),
    "huge products may cancel": ([2.0**127, 2.0**127], [2.0**127, -(2.0**127)], 3.0, 0.0),
    "one of them overflows": ([-(2.0**127)], [2.0**127], 3.0, -math.inf),
}


def row_of(values: list[float]) -> Tensor:
    return torch.tensor([values + [0.0] * (16 - len(values))]).bfloat16()


@pytest.mark.parametrize("name", BY_HAND)
def test_one_wgmma_step_by_hand(name: str) -> None:
    a, b, c, want = BY_HAND[name]
    got = tc.dense_gemm(row_of(a), row_of(b), torch.tensor([[c]]))
    assert struct.pack("f", float(got)) == struct.pack("f", want)


ONE, HALF, SIX, MINUS = 2, 1, 7, 8  # E2M1 codes; MINUS is the sign bit
SCALE_ONE, SCALE_MAX, SCALE_LEAST, SCALE_NAN = 0x38, 0x7E, 0x01, 0x7F  # E4M3: 1, 448, 2**-9, NaN

# a and b: the first two codes of each group; the other fourteen are zero
SCALED_BY_HAND: dict[str, tuple[list[Any], list[int], float, float]] = {
    "scales multiply": ([(SIX, SIX)], [SCALE_MAX], 0.0, 36.0 * 448 * 448),
    # the cancelling group aligns at 8 + 8, so all is cut at 2**(16 - 35); a zero group does not
    "cancelling group": (
        [(SIX, SIX, SIX, SIX | MINUS), (HALF, HALF)],
        [SCALE_MAX, SCALE_LEAST],
        0.0,
        0.0,
    ),
    "zero group": ([(0, SIX), (HALF, HALF)], [SCALE_MAX, SCALE_LEAST], 0.0, 2.0**-20),
    "35 bits kept": ([(ONE, ONE), (ONE, ONE | MINUS)], [SCALE_ONE] * 2, 2.0**-35, 2.0**-35),
    "C cut": ([(ONE, ONE), (ONE, ONE | MINUS)], [SCALE_ONE] * 2, 2.0**-36, 0.0),
    "toward zero": ([(ONE, ONE), (ONE, ONE | MINUS)], [SCALE_ONE] * 2, -1.5 * 2**-35, -(2.0**-35)),
    "sums not normalised": ([(SIX, SIX), (SIX, SIX | MINUS)], [SCALE_ONE] * 2, 2.0**-35, 2.0**-35),
    "result cut": ([(ONE, ONE)], [SCALE_ONE], 0.75 * ULP, 1.0),
    "sign of a scale ignored": ([(ONE, ONE)], [SCALE_ONE | 0x80], 0.0, 1.0),
    "minus zero becomes zero": ([(MINUS, ONE)], [SCALE_ONE], -0.0, 0.0),
}


def scaled_by_hand(groups: list[Any], scales: list[int], c: float) -> Tensor:
    codes = torch.zeros(2, 1, 64, dtype=torch.uint8)
    for index, group in enumerate(groups):
        for position in range(0, len(group), 2):
            for operand in (0, 1):
                codes[operand, 0, 16 * index + position] = group[position + operand]
    a_scales = torch.tensor([scales + [SCALE_ONE] * (4 - len(scales))], dtype=torch.uint8)
    return tc.block_scaled_gemm(codes[0], a_scales, codes[1], a_scales & 0x7F, torch.tensor([[c]]))


@pytest.mark.parametrize("name", SCALED_BY_HAND)
def test_one_nvfp4_step_by_hand(name: str) -> None:
    groups, scales, c, want = SCALED_BY_HAND[name]
    got = scaled_by_hand(groups, scales, c)
    assert struct.pack("f", float(got)) == struct.pack("f", want)


def test_a_nan_scale_over_zeros_gives_the_one_nan() -> None:
    assert int(bits(scaled_by_hand([(0, 0)], [SCALE_NAN], 1.0))) == tc.NAN_CODE


def test_a_nan_with_a_payload_becomes_the_one_nan() -> None:
    c = torch.tensor([[-1]], dtype=torch.int32).view(torch.float32)
    assert int(bits(tc.dense_gemm(row_of([1.0]), row_of([1.0]), c))) == tc.NAN_CODE


# ---- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E2M1, E4M3, UE8M0, BF16, FP16], ids=lambda fmt: fmt.name)
def test_split_codes_agrees_with_the_codec(fmt: ElementFormat) -> None:
    parts = tc.split_codes(torch.arange(fmt.code_count, dtype=torch.int32), fmt)
    halves = zip(parts.significand.tolist(), parts.exponent.tolist(), strict=True)
    for code, (significand, exponent) in enumerate(halves):
        value = decode(code, fmt)
        if math.isfinite(value):
            assert math.ldexp(significand, exponent - fmt.mantissa_bits) == value, hex(code)
            assert value == 0 or exponent == nominal_exponent(value, fmt), hex(code)


def test_a_gemm_is_its_steps_in_order(seed: int) -> None:
    case = draw_dense("spread", seed, torch.bfloat16)
    acc_MN = case.c
    for start in range(0, 48, 16):
        k = slice(start, start + 16)
        acc_MN = tc.dense_gemm(case.a[:, k], case.b[:, k], acc_MN)
    assert_same_bits(tc.dense_gemm(*case), acc_MN)
    reverse = tc.dense_gemm(case.a.flip(1), case.b.flip(1), case.c)
    assert (bits(reverse) != bits(acc_MN)).any()


def test_cutting_rows_changes_no_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = draw_dense("all_codes", seed, torch.float16)
    scaled = draw_scaled("any_scale", seed, 16)
    want = tc.dense_gemm(*dense), tc.block_scaled_gemm(*scaled)
    monkeypatch.setattr(tc, "_TERMS_AT_ONCE", 1)
    assert_same_bits(tc.dense_gemm(*dense), want[0])
    assert_same_bits(tc.block_scaled_gemm(*scaled), want[1])


@pytest.mark.parametrize("family", [name for name in DENSE if name != "all_codes"])
def test_padding_k_with_zeros_changes_no_bit(family: str, seed: int) -> None:
    case = draw_dense(family, seed, torch.bfloat16)
    pad = torch.nn.functional.pad
    padded = tc.dense_gemm(pad(case.a, (0, 16)), pad(case.b, (0, 16)), case.c)
    assert_same_bits(padded, tc.dense_gemm(*case))


def test_one_scale_over_all_of_k_may_be_pulled_out_by_powers_of_two(seed: int) -> None:
    case = draw_scaled("codes_normal", seed, 16)
    plain = tc.block_scaled_gemm(*case._replace(c=torch.zeros(64, 16)))
    doubled = case._replace(a_scales=case.a_scales + 8, c=torch.zeros(64, 16))
    assert_same_bits(tc.block_scaled_gemm(*doubled), 2 * plain)


def test_an_absent_c_is_zero_and_operands_stay_as_they_are(seed: int) -> None:
    case = draw_dense("normal", seed, torch.bfloat16)
    before = case.a.clone(), case.b.clone()
    assert_same_bits(
        tc.dense_gemm(case.a, case.b),
        tc.dense_gemm(case.a, case.b, torch.zeros(64, 16)),
    )
    assert torch.equal(case.a, before[0])
    assert torch.equal(case.b, before[1])


# ---- refusals ------------------------------------------------------------------------------------


def test_dense_gemm_refuses_by_name() -> None:
    x = torch.zeros(4, 16, dtype=torch.bfloat16)
    with pytest.raises(DtypeMismatch, match="dtypes of A and B"):
        tc.dense_gemm(x, x.half())
    with pytest.raises(DtypeMismatch, match="float8"):
        tc.dense_gemm(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn))
    with pytest.raises(ShapeMismatch, match="multiple of 16"):
        tc.dense_gemm(x[:, :8], x[:, :8])
    with pytest.raises(ShapeMismatch, match="multiple of 16"):
        tc.dense_gemm(x[:, :0], x[:, :0])
    with pytest.raises(ShapeMismatch, match="shapes of A and B"):
        tc.dense_gemm(x, x[0])
    with pytest.raises(ShapeMismatch, match="shape of C"):
        tc.dense_gemm(x, x, torch.zeros(4, 5))
    with pytest.raises(DtypeMismatch, match="fp32 accumulators"):
        tc.dense_gemm(x, x, torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(InvalidArgument, match="without scales"):
        tc.dense_gemm(x, x, rule=tc.NVFP4_BLOCK16)


def test_block_scaled_gemm_refuses_by_name() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)
    good = ScaledCase(codes, scales, codes, scales, torch.zeros(4, 4))
    assert not tc.block_scaled_gemm(*good).any()
    with pytest.raises(InvalidArgument, match="E2M1 codes from 0 to 15"):
        tc.block_scaled_gemm(*good._replace(b_codes=codes + 16))
    with pytest.raises(DtypeMismatch, match="dtype of A scales"):
        tc.block_scaled_gemm(*good._replace(a_scales=scales.view(torch.float8_e4m3fn)))
    with pytest.raises(ShapeMismatch, match="B codes and scales"):
        tc.block_scaled_gemm(*good._replace(b_scales=scales[:, :2]))
    with pytest.raises(ShapeMismatch, match="multiple of 64"):
        tc.block_scaled_gemm(codes[:, :32], scales[:, :2], codes[:, :32], scales[:, :2])
    with pytest.raises(InvalidArgument, match="block-scaled instruction"):
        tc.block_scaled_gemm(*good, rule=tc.WGMMA_F16)


# --------------------------------------------------------------------------------------------------
# The models of tensor-core steps against the package mmasim, and faults planted in the models.

DENSE_RULES = (tc.WGMMA_F16, tc.TCGEN05_F16)
SHORT_RULES = (tc.WGMMA_FP8, tc.MMA_FP8)


def dense_oracle(case: DenseCase, rule: tc.StepRule, operand: str) -> Tensor:
    from mmasim import nv_ptx  # type: ignore[import-untyped]  # noqa: PLC0415  optional

    n = case.b.shape[0]
    if rule is tc.WGMMA_F16:
        step = nv_ptx.WGMMA("Hopper", f"m64n{n}k16.f32.{operand}.{operand}")
    else:
        step = nv_ptx.TCGen05MMA("Blackwell", f"m64n{n}k16.kind::f16.f32.{operand}.{operand}")
    out: Tensor = step(case.a, case.b.T, case.c)
    return out


def scaled_oracle(case: ScaledCase, rule: tc.StepRule) -> Tensor:
    from mmasim import nv_ptx  # noqa: PLC0415  optional

    nvfp4 = rule.block == 16
    kind = "mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3" if nvfp4 else "mxf4.block32.f32.e2m1.e2m1.ue8m0"
    n = case.b_codes.shape[0]
    step = nv_ptx.TCGen05MMABlockScale("Blackwell", f"m128n{n}k64.kind::{kind}")
    dtype = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
    out: Tensor = step(
        # mmasim unpacks the high nibble first; the order inside a group changes nothing
        (case.a_codes[:, 0::2] << 4) | case.a_codes[:, 1::2],
        ((case.b_codes[:, 0::2] << 4) | case.b_codes[:, 1::2]).T,
        case.c,
        case.a_scales.view(dtype),
        case.b_scales.view(dtype).T,
    )
    return out


# ---- against mmasim ------------------------------------------------------------------------------


@pytest.mark.needs("mmasim")
@pytest.mark.parametrize("rule", DENSE_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("operand", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_dense_gemm_equals_mmasim(family: str, operand: str, rule: tc.StepRule, seed: int) -> None:
    case = draw_dense(family, seed, DTYPES[operand])
    assert_same_bits(tc.dense_gemm(*case, rule=rule), dense_oracle(case, rule, operand))


def _fp8_codes(rows: int, kind: str, generator: torch.Generator) -> Tensor:
    """Draw codes of E4M3: of any number, of normal ones, or of ones that cancel."""
    if kind == "any":
        codes = torch.randint(0, 256, (rows, 64), generator=generator, dtype=torch.uint8)
        return codes.masked_fill(codes & 0x7F == 0x7F, 0)
    values = torch.randn(rows, 64, generator=generator)
    if kind == "cancelling":
        values[:, 1::2] = -values[:, ::2]
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.needs("mmasim")
@pytest.mark.parametrize("kind", ["any", "normal", "cancelling"])
@pytest.mark.parametrize("rule", SHORT_RULES, ids=lambda rule: rule.name)
def test_short_sums_of_fp8_equal_mmasim(rule: tc.StepRule, kind: str, seed: int) -> None:
    from mmasim import nv_ptx  # noqa: PLC0415  optional

    generator = torch.Generator().manual_seed(seed)
    a, b = _fp8_codes(64, kind, generator), _fp8_codes(8, "any", generator)
    if rule is tc.WGMMA_FP8:
        step = nv_ptx.WGMMA("Hopper", "m64n8k32.f32.e4m3.e4m3")
        parts, extent = [slice(0, 64)], 32
    else:
        step = nv_ptx.MMA("Ada Lovelace", "m16n8k32.f32.e4m3.e4m3.f32")
        parts, extent = [slice(begin, begin + 16) for begin in range(0, 64, 16)], 32
    wanted = torch.zeros(64, 8)
    values = [codes.view(torch.float8_e4m3fn) for codes in (a, b)]
    for rows in parts:
        for begin in range(0, 64, extent):
            k = slice(begin, begin + extent)
            wanted[rows] = step(values[0][rows, k], values[1][:, k].T, wanted[rows])
    assert_same_bits(tc.dense_gemm(*values, rule=rule), wanted)
    assert_same_bits(tc.short_sums(a, b, rule), wanted)
    # K that is no whole step, as both ways pad it, and a NaN.
    cut = a[:, :41].contiguous(), b[:, :41].contiguous()
    padded = [torch.nn.functional.pad(codes, (0, 23)).view(values[0].dtype) for codes in cut]
    assert_same_bits(tc.short_sums(*cut, rule), tc.dense_gemm(*padded, rule=rule))
    a[3, 5] = 0x7F
    assert tc.short_sums(a, b, rule)[3].isnan().all()
    assert not tc.short_sums(a, b, rule)[4].isnan().any()


@pytest.mark.needs("mmasim")
@pytest.mark.parametrize("rule", SCALED_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("family", SCALED)
def test_block_scaled_gemm_equals_mmasim(family: str, rule: tc.StepRule, seed: int) -> None:
    case = draw_scaled(family, seed, rule.block)
    assert_same_bits(tc.block_scaled_gemm(*case, rule=rule), scaled_oracle(case, rule))


# ---- planted faults ------------------------------------------------------------------------------

if TYPE_CHECKING:
    Plant = Callable[[pytest.MonkeyPatch, tc.StepRule], tc.StepRule]


def changed(**facts: int) -> Plant:
    """Return a plant that adds to the constants of the rule."""

    def plant(_: pytest.MonkeyPatch, rule: tc.StepRule) -> tc.StepRule:
        added = {name: getattr(rule, name) + change for name, change in facts.items()}
        return replace(rule, **added)

    return plant


def patched(name: str, function: Callable[..., Any]) -> Plant:
    """Return a plant that replaces one function of the model."""

    def plant(monkeypatch: pytest.MonkeyPatch, rule: tc.StepRule) -> tc.StepRule:
        monkeypatch.setattr(tc, name, function)
        return rule

    return plant


def nearest(total: Tensor, exponent: Tensor, _kept_bits: int) -> Tensor:
    return (total.double() * torch.exp2(exponent.double())).float() + 0.0


def shifted_down(significand: Tensor, shift: Tensor) -> Tensor:
    return significand >> shift.clamp(max=31).to(significand.dtype)


_truncated_sum = tc.truncated_sum
_split_codes = tc.split_codes


def normalised(terms: tc.CodeParts, c_MN: Tensor, rule: tc.StepRule) -> Tensor:
    over = (terms.significand.abs() >> (rule.fraction_bits + 1)) > 0
    parts = tc.CodeParts(terms.significand >> over.int(), terms.exponent + over.int())
    return _truncated_sum(parts, c_MN, rule)


def cancels(a_TMK: Tensor, b_TNK: Tensor) -> Tensor:
    return torch.bmm(a_TMK, b_TNK.mT) == 0


def flushed(codes: Tensor, fmt: ElementFormat) -> tc.CodeParts:
    parts = _split_codes(codes, fmt)
    hidden = parts.significand.abs() >> fmt.mantissa_bits
    return tc.CodeParts(parts.significand * hidden, parts.exponent)


DENSE_FAULTS: dict[str, tuple[Plant, str]] = {
    "a fraction bit less": (changed(fraction_bits=-1), "cancelling"),
    "a fraction bit more": (changed(fraction_bits=1), "cancelling"),
    "zero exponent one higher": (changed(zero_exponent=1), "zero_exponent"),
    "zero exponent one lower": (changed(zero_exponent=-1), "zero_exponent"),
    "zero aligned at one": (changed(zero_exponent=133), "subnormal"),
    "result to nearest": (patched("fp32_toward_zero", nearest), "normal"),
    "terms rounded down": (patched("_shifted_toward_zero", shifted_down), "cancelling"),
    "products normalised": (patched("truncated_sum", normalised), "cancelling"),
    "subnormals flushed": (patched("split_codes", flushed), "subnormal"),
}

SCALED_FAULTS: dict[str, tuple[Plant, tc.StepRule, str]] = {
    "a fraction bit less": (changed(fraction_bits=-1), tc.NVFP4_BLOCK16, "cancelling_groups"),
    "a fraction bit more": (changed(fraction_bits=1), tc.NVFP4_BLOCK16, "cancelling_groups"),
    "zero aligned at one": (changed(zero_exponent=139), tc.NVFP4_BLOCK16, "zero_groups"),
    "zero one higher": (changed(zero_exponent=1), tc.MXFP4_BLOCK32, "scaled_zero_exponent"),
    "zero one lower": (changed(zero_exponent=-1), tc.MXFP4_BLOCK32, "scaled_zero_exponent"),
    "result to nearest": (
        patched("fp32_toward_zero", nearest),
        tc.NVFP4_BLOCK16,
        "codes_normal",
    ),
    "terms rounded down": (
        patched("_shifted_toward_zero", shifted_down),
        tc.NVFP4_BLOCK16,
        "cancelling_groups",
    ),
    "cancelling aligned as zero": (
        patched("all_products_zero", cancels),
        tc.NVFP4_BLOCK16,
        "cancelling_groups",
    ),
    "sums normalised": (
        patched("truncated_sum", normalised),
        tc.NVFP4_BLOCK16,
        "opposite_groups",
    ),
}


@pytest.mark.needs("mmasim")
@pytest.mark.parametrize("fault", DENSE_FAULTS)
def test_a_fault_in_the_dense_model_is_detected(
    fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, family = DENSE_FAULTS[fault]
    case = draw_dense(family, seed, torch.bfloat16)
    want = dense_oracle(case, tc.WGMMA_F16, "bf16")
    assert_same_bits(tc.dense_gemm(*case), want)
    got = tc.dense_gemm(*case, rule=plant(monkeypatch, tc.WGMMA_F16))
    assert (bits(got) != bits(want)).any()


@pytest.mark.needs("mmasim")
@pytest.mark.parametrize("fault", SCALED_FAULTS)
def test_a_fault_in_the_block_scaled_model_is_detected(
    fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, rule, family = SCALED_FAULTS[fault]
    case = draw_scaled(family, seed, rule.block)
    want = scaled_oracle(case, rule)
    assert_same_bits(tc.block_scaled_gemm(*case, rule=rule), want)
    got = tc.block_scaled_gemm(*case, rule=plant(monkeypatch, rule))
    assert (bits(got) != bits(want)).any()
