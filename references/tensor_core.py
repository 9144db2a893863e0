"""Bit-exact model of tensor cores: the steps of wgmma, mma and tcgen05, and GEMMs made of them.

INSTRUCTIONS lists the instructions. One step adds the products of `step` elements of K to C: every
term is exact; all are aligned to the largest *nominal* exponent (the sum of the operands'
exponents; a product is not normalised first); each is truncated to `fraction_bits` below it; the
rest is added exactly and truncated once, to fp32 or to `kept_bits` of its mantissa. A GEMM is these
steps in the order of K, so tiles and clusters change no bit unless they split K.

Fixed point: a term is an integer times 2**(exponent - fraction_bits). 16-bit products are below
4 * 2**25 (int32); a group of mxf4nvf4 is below 576 * 3.52 * 2**35 < 2**46, a sum of all below
2**49 (int64). Hence nothing rounds but the two truncations.

Not covered: K that is not whole steps, mixed formats, E5M2, accumulators other than fp32, K = 96,
sparse forms, negated operands. The fp32 tensor scales of NVFP4 belong to a kernel's epilogue.
Constants: MMA-Sim (arXiv 2511.10909), package mmasim 2.1.1; checked against that package and
rational arithmetic, and wgmma on an H200 (sm90_probe_wgmma.py; FP8 by outputs of vLLM's CUTLASS).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.number_formats import BF16, E2M1, E4M3, FP16, FP32, UE8M0

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat

# Shape letters: M rows of A and of the result, N rows of B (columns of the result), K inner extent,
# B scale blocks along K, T terms of one step (products or groups). A trailing 1 is a broadcast.

NAN_CODE = 0x7FFFFFFF  # the one NaN that the hardware writes (MMA-Sim)
GROUP = 16  # E2M1 products that mxf4nvf4 sums exactly before it scales (MMA-Sim)
_TERMS_AT_ONCE = 1 << 17  # keeps the temporaries of a step inside a core's cache
_LARGEST_SHIFT = 63  # a shift by the width of the integer or more is undefined


@dataclass(frozen=True)
class StepRule:
    """One instruction: its operands, how much of K is one step, and how it aligns.

    `block` is the extent of K under one scale; 0 says that the instruction takes no scales.
    """

    name: str
    step: int
    # Bits kept below the largest exponent of a step; lower ones are truncated.
    fraction_bits: int
    # The exponent with which a zero (product or C) takes part in the alignment.
    zero_exponent: int
    block: int = 0
    scale: ElementFormat | None = None
    # Mantissa bits that the sum keeps.
    kept_bits: int = FP32.mantissa_bits


WGMMA_F16 = StepRule(
    name="wgmma.f16",  # sm_90a, fp32 accumulators, fp16 or bf16 operands
    step=16,
    fraction_bits=25,
    zero_exponent=-133,
)
TCGEN05_F16 = StepRule(
    name="tcgen05.f16",  # sm_100a; the same arithmetic, not compared with a chip
    step=16,
    fraction_bits=25,
    zero_exponent=-133,
)
WGMMA_FP8 = StepRule(
    name="wgmma.fp8",  # sm_90a, fp32 accumulators of which 13 mantissa bits are kept
    step=32,
    fraction_bits=13,
    zero_exponent=-133,
    kept_bits=13,
)
MMA_FP8 = StepRule(
    name="mma.fp8",  # sm_89: two steps an instruction
    step=16,
    fraction_bits=13,
    zero_exponent=-133,
    kept_bits=13,
)
NVFP4_BLOCK16 = StepRule(
    name="tcgen05.mxf4nvf4.block16.ue4m3",  # sm_100a; not compared with a chip
    step=64,
    fraction_bits=35,
    zero_exponent=-139,
    block=16,
    scale=E4M3,
)
MXFP4_BLOCK32 = StepRule(
    name="tcgen05.mxf4.block32.ue8m0",  # sm_100a; not compared with a chip
    step=64,
    fraction_bits=35,
    zero_exponent=-139,
    block=32,
    scale=UE8M0,
)

INSTRUCTIONS: Mapping[str, StepRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (WGMMA_F16, TCGEN05_F16, WGMMA_FP8, MMA_FP8, NVFP4_BLOCK16, MXFP4_BLOCK32)
    }
)


def dense_gemm(
    a_MK: Tensor, b_NK: Tensor, c_MN: Tensor | None = None, *, rule: StepRule = WGMMA_F16
) -> Tensor:
    """Return C + A B^T in fp32 as `rule` computes it; K equal to one step is one instruction.

    A and B are of the rule's operands, bfloat16 or float16, or float8_e4m3fn; C is float32 and
    counts as +0 where it is absent.
    """
    if rule.block:
        raise InvalidArgument("rule", rule.name, "an instruction without scales", _USE_SCALED)
    fmt = _required_format(a_MK, b_NK, rule)
    c_MN = _required_accumulator(a_MK, b_NK, c_MN, rule)
    out_MN = torch.empty_like(c_MN)
    for rows in _row_chunks(a_MK.shape[0], b_NK.shape[0], rule.step):
        acc_MN = c_MN[rows]
        for start in range(0, a_MK.shape[1], rule.step):
            k = slice(start, start + rule.step)
            acc_MN = _dense_step(a_MK[rows, k], b_NK[:, k], acc_MN, fmt, rule)
        out_MN[rows] = acc_MN
    return out_MN


def short_sums(a_MK: Tensor, b_NK: Tensor, rule: StepRule) -> Tensor:
    """Return A B^T of FP8 codes (uint8) as `rule` sums it; K of any extent, on any device."""
    pad = (0, -a_MK.shape[1] % rule.step)
    a_MK, b_NK = (torch.nn.functional.pad(codes, pad) for codes in (a_MK, b_NK))
    if a_MK.device.type != "cpu":
        return dense_gemm(a_MK.view(torch.float8_e4m3fn), b_NK.view(torch.float8_e4m3fn), rule=rule)
    from degarble.references import compiled  # noqa: PLC0415  numba is heavy

    out = compiled.short_sums(_with_powers(a_MK), _with_powers(b_NK), rule.step, rule.fraction_bits)
    nan_M, nan_N = (((codes & 0x7F) == 0x7F).any(1) for codes in (a_MK, b_NK))
    return out.masked_fill_(nan_M[:, None] | nan_N, torch.nan)


def _with_powers(codes: Tensor) -> Tensor:
    """Return the numbers of codes of E4M3 beside 2 to their exponents, 0 of a zero [2, R, K]."""
    significand, exponent = split_codes(codes.int(), E4M3)
    powers = torch.ldexp((significand != 0).float(), exponent)
    return torch.stack([codes.view(torch.float8_e4m3fn).float(), powers])


def block_scaled_gemm(
    a_codes_MK: Tensor,
    a_scales_MB: Tensor,
    b_codes_NK: Tensor,
    b_scales_NB: Tensor,
    c_MN: Tensor | None = None,
    *,
    rule: StepRule = NVFP4_BLOCK16,
) -> Tensor:
    """Return C + (A sA)(B sB)^T in fp32 as `rule` computes it; K = 64 is one instruction.

    Codes are uint8, one E2M1 code each (unpacked); scales are uint8 codes in row order, one a
    block. The sign bit of a UE4M3 scale is ignored, as the hardware does.
    """
    if not rule.block:
        raise InvalidArgument("rule", rule.name, "a block-scaled instruction", _USE_DENSE)
    _require_codes_and_scales(a_codes_MK, a_scales_MB, rule, "A")
    _require_codes_and_scales(b_codes_NK, b_scales_NB, rule, "B")
    c_MN = _required_accumulator(a_codes_MK, b_codes_NK, c_MN, rule)
    a, b = _scaled(a_codes_MK, a_scales_MB, rule), _scaled(b_codes_NK, b_scales_NB, rule)
    out_MN = torch.empty_like(c_MN)
    groups = rule.step // GROUP
    for rows in _row_chunks(a_codes_MK.shape[0], b_codes_NK.shape[0], groups):
        acc_MN = c_MN[rows]
        for start in range(0, a_codes_MK.shape[1] // GROUP, groups):
            terms = slice(start, start + groups)
            acc_MN = _scaled_step(a.part(terms, rows), b.part(terms, slice(None)), acc_MN, rule)
        out_MN[rows] = acc_MN
    return out_MN


class CodeParts(NamedTuple):
    """Numbers as integers: value = significand * 2**(exponent - mantissa_bits of the format)."""

    significand: Tensor
    exponent: Tensor


def split_codes(codes: Tensor, fmt: ElementFormat) -> CodeParts:
    """Split int32 codes into signed significands and unbiased exponents; subnormals keep the least.

    The result of NaN and infinities is meaningless: callers overwrite it.
    """
    field = (codes >> fmt.mantissa_bits) & fmt.exponent_mask
    fraction = codes & fmt.mantissa_mask
    if fmt.subnormals:
        significand = fraction + ((field > 0).int() << fmt.mantissa_bits)
        exponent = field.clamp(min=1) - fmt.bias
    else:
        significand = fraction + (1 << fmt.mantissa_bits)
        exponent = field - fmt.bias
    if fmt.signed:
        significand = significand * (1 - 2 * ((codes >> (fmt.bits - 1)) & 1))
    return CodeParts(significand, exponent)


# ---- one step ------------------------------------------------------------------------------------


def _dense_step(
    a_MK: Tensor, b_NK: Tensor, c_MN: Tensor, fmt: ElementFormat, rule: StepRule
) -> Tensor:
    """Add one step of products to C."""
    a, b = _operand(a_MK, fmt), _operand(b_NK, fmt)
    # A product has 2 * mantissa_bits fractional bits; lift it to units of 2**-fraction_bits.
    lift = rule.fraction_bits - 2 * fmt.mantissa_bits
    significand_TMN = (a.significand << lift).unsqueeze(2) * b.significand.unsqueeze(1)
    exponent_TMN = a.exponent.unsqueeze(2) + b.exponent.unsqueeze(1)
    exponent_TMN.masked_fill_(significand_TMN == 0, rule.zero_exponent)
    finite_MN = truncated_sum(CodeParts(significand_TMN, exponent_TMN), c_MN, rule)
    if bool(a_MK.float().isfinite().all()) and bool(b_NK.float().isfinite().all()):
        return _with_specials(finite_MN, _special(c_MN))
    # Signs are enough to find NaN and infinities; finite values come from the integers.
    products_MN = _special(a_MK, 1.0) @ _special(b_NK, 1.0).T
    return _with_specials(finite_MN, _special(c_MN) + products_MN)


class _Scaled(NamedTuple):
    """One operand of a block-scaled instruction, cut into groups T of 16 along K."""

    halves: Tensor  # T M K: E2M1 values in halves, as float32 integers
    scale: CodeParts  # significand and exponent, each T M
    nan: Tensor  # T M: where the scale is NaN

    def part(self, terms: slice, rows: slice) -> _Scaled:
        """Return some groups and rows."""
        scale = CodeParts(self.scale.significand[terms, rows], self.scale.exponent[terms, rows])
        return _Scaled(self.halves[terms, rows], scale, self.nan[terms, rows])


def _scaled_step(a: _Scaled, b: _Scaled, c_MN: Tensor, rule: StepRule) -> Tensor:
    """Add one step of groups, each an exact sum times its two scales, to C."""
    assert rule.scale is not None
    # Exact in float32 whatever the order: integers of at most 16 * 12 * 12 quarters.
    quarters_TMN = torch.bmm(a.halves, b.halves.mT)
    scale_TMN = a.scale.significand.unsqueeze(2) * b.scale.significand.unsqueeze(1)
    exponent_TMN = a.scale.exponent.unsqueeze(2) + b.scale.exponent.unsqueeze(1)
    zero_TMN = all_products_zero(a.halves, b.halves) | (scale_TMN == 0)
    exponent_TMN.masked_fill_(zero_TMN, rule.zero_exponent)
    # The same for sums of E2M1 products times two scales.
    lift = rule.fraction_bits - 2 * rule.scale.mantissa_bits - 2 * E2M1.mantissa_bits
    significand_TMN = quarters_TMN.long() * scale_TMN << lift
    finite_MN = truncated_sum(CodeParts(significand_TMN, exponent_TMN), c_MN, rule)
    nan_MN = a.nan.any(0).unsqueeze(1) | b.nan.any(0)
    return _with_specials(finite_MN, _special(c_MN).masked_fill(nan_MN, torch.nan))


def all_products_zero(a_TMK: Tensor, b_TNK: Tensor) -> Tensor:
    """Return which sums have only zero products: these align as zeros, sums that cancel do not."""
    return torch.bmm(a_TMK.abs(), b_TNK.abs().mT) == 0


def truncated_sum(terms: CodeParts, c_MN: Tensor, rule: StepRule) -> Tensor:
    """Align C and the terms (T M N, in units of 2**-fraction_bits), add, and truncate to fp32."""
    lift = rule.fraction_bits - rule.kept_bits
    assert lift >= 0, "C would be truncated before it is aligned"
    c = split_codes(c_MN.view(torch.int32), FP32)
    exponent_MN = c.exponent.masked_fill(c.significand == 0, rule.zero_exponent)
    largest_MN = torch.maximum(terms.exponent.amax(0), exponent_MN)
    aligned_TMN = _shifted_toward_zero(terms.significand, largest_MN - terms.exponent)
    # Bits of C below those that a sum keeps are zero, or are cut.
    c_MN = _shifted_toward_zero(c.significand, torch.tensor(FP32.mantissa_bits - rule.kept_bits))
    c_aligned_MN = _shifted_toward_zero(c_MN.long() << lift, largest_MN - exponent_MN)
    # Trap: torch widens the sum of int32 to int64; the widening is what keeps it exact.
    total_MN = aligned_TMN.sum(0, dtype=torch.int64) + c_aligned_MN
    return fp32_toward_zero(total_MN, largest_MN - rule.fraction_bits, rule.kept_bits)


def _shifted_toward_zero(significand: Tensor, shift: Tensor) -> Tensor:
    """Shift right, dropping bits of the magnitude (an arithmetic shift would round down)."""
    width = _LARGEST_SHIFT if significand.dtype == torch.int64 else _LARGEST_SHIFT // 2
    return significand.sign() * (significand.abs() >> shift.clamp(max=width).to(significand.dtype))


def fp32_toward_zero(
    total: Tensor, exponent: Tensor, kept_bits: int = FP32.mantissa_bits
) -> Tensor:
    """Return total * 2**exponent as fp32, truncated; beyond the range infinity; never -0."""
    magnitude = total.abs()
    bits = torch.frexp(magnitude.double()).exponent  # exact: totals are below 2**53
    lead = (exponent + bits - 1).clamp(min=FP32.min_exponent)
    lead = lead.masked_fill(total == 0, FP32.min_exponent)  # frexp calls the exponent of zero 0
    drop = lead - FP32.mantissa_bits - exponent
    kept = (magnitude >> drop.clamp(0, _LARGEST_SHIFT)) << (-drop).clamp(min=0)
    kept &= -1 << (FP32.mantissa_bits - kept_bits)
    # Adding, not or-ing: the hidden bit of `kept` completes the exponent field.
    code = ((lead - FP32.min_exponent).long() << FP32.mantissa_bits) + kept
    code = torch.where(lead > FP32.bias, FP32.exponent_mask << FP32.mantissa_bits, code)
    negative = (total < 0) & (kept != 0)
    return (code - (negative.long() << 31)).int().view(torch.float32)


# ---- operands ------------------------------------------------------------------------------------


def _operand(x_MK: Tensor, fmt: ElementFormat) -> CodeParts:
    """Split an operand; K comes first, as the terms do."""
    codes = torch.uint8 if fmt.bits == 8 else torch.int16
    return split_codes(x_MK.T.contiguous().view(codes).int(), fmt)


def _scaled(codes_MK: Tensor, scales_MB: Tensor, rule: StepRule) -> _Scaled:
    """Cut codes and scales into groups; a scale of 32 elements serves two groups."""
    assert rule.scale is not None
    element = split_codes(codes_MK.int(), E2M1)
    halves_MK = (element.significand << element.exponent).float()
    halves_TMK = halves_MK.view(codes_MK.shape[0], -1, GROUP).movedim(1, 0).contiguous()
    scales_TM = scales_MB.repeat_interleave(rule.block // GROUP, dim=1).T.contiguous().int()
    if rule.scale.signed:
        scales_TM = scales_TM & rule.scale.magnitude_mask
    nan_codes = torch.tensor(rule.scale.nan_codes, dtype=torch.int32, device=codes_MK.device)
    return _Scaled(halves_TMK, split_codes(scales_TM, rule.scale), torch.isin(scales_TM, nan_codes))


def _special(x: Tensor, finite: float = 0.0) -> Tensor:
    """Keep NaN and infinities; of a finite number keep the sign, times `finite`.

    Sums and products of these are NaN or infinite exactly where those of `x` are.
    """
    x = x.float()
    return torch.where(x.isfinite(), x.sign() * finite, x)


def _with_specials(finite_MN: Tensor, special_MN: Tensor) -> Tensor:
    """Put infinities and the one NaN where the terms contain them."""
    if bool(special_MN.isfinite().all()):
        return finite_MN
    nan = torch.tensor(NAN_CODE, dtype=torch.int32, device=finite_MN.device).view(torch.float32)
    out_MN = torch.where(special_MN.isinf(), special_MN, finite_MN)
    return torch.where(special_MN.isnan(), nan, out_MN)


def _row_chunks(rows: int, columns: int, terms: int) -> Iterator[slice]:
    """Cut the rows so that one step's terms stay few."""
    count = max(1, _TERMS_AT_ONCE // max(1, columns * terms))
    for start in range(0, rows, count):
        yield slice(start, start + count)


# ---- refusals ------------------------------------------------------------------------------------

_USE_SCALED = "Call block_scaled_gemm with codes and scales."
_USE_DENSE = "Call dense_gemm with bfloat16, float16 or float8_e4m3fn tensors."
_FORMAT_OF_DTYPE = MappingProxyType(
    {torch.bfloat16: BF16, torch.float16: FP16, torch.float8_e4m3fn: E4M3}
)


def _required_format(a_MK: Tensor, b_NK: Tensor, rule: StepRule) -> ElementFormat:
    """Return the format of both operands."""
    fmt = _FORMAT_OF_DTYPE.get(a_MK.dtype)
    bits = 8 if rule in (WGMMA_FP8, MMA_FP8) else 16
    if fmt is None or fmt.bits != bits or b_NK.dtype != a_MK.dtype:
        raise DtypeMismatch(
            "dtypes of A and B",
            (str(a_MK.dtype), str(b_NK.dtype)),
            "float8_e4m3fn twice" if bits == 8 else "bfloat16 twice or float16 twice",
            f"Round both operands to one format of {bits} bits; {rule.name} does not mix them.",
        )
    return fmt


def _required_accumulator(
    a_MK: Tensor, b_NK: Tensor, c_MN: Tensor | None, rule: StepRule
) -> Tensor:
    """Check the extents; return C, or zeros of its shape."""
    if a_MK.dim() != 2 or b_NK.dim() != 2 or a_MK.shape[1] != b_NK.shape[1]:
        raise ShapeMismatch(
            "shapes of A and B",
            (tuple(a_MK.shape), tuple(b_NK.shape)),
            "(M, K) and (N, K)",
            "Pass B as rows of K; drop batch extents.",
        )
    k = a_MK.shape[1]
    if k == 0 or k % rule.step:
        raise ShapeMismatch(
            "K",
            k,
            f"a positive multiple of {rule.step}, one step of {rule.name}",
            "Pad both with zeros: C aligns no lower than a zero does, so no bit changes.",
        )
    shape = (a_MK.shape[0], b_NK.shape[0])
    if c_MN is None:
        return torch.zeros(shape, dtype=torch.float32, device=a_MK.device)
    if tuple(c_MN.shape) != shape:
        raise ShapeMismatch(
            "shape of C", tuple(c_MN.shape), f"{shape}", "It has the result's shape."
        )
    if c_MN.dtype != torch.float32:
        raise DtypeMismatch(
            "dtype of C", str(c_MN.dtype), "float32", "Only fp32 accumulators are modelled."
        )
    return c_MN.contiguous()


def _require_codes_and_scales(codes: Tensor, scales: Tensor, rule: StepRule, operand: str) -> None:
    """Refuse what is not unpacked E2M1 codes with one scale code a block."""
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dtype != torch.uint8:
            raise DtypeMismatch(
                f"dtype of {operand} {name}",
                str(tensor.dtype),
                "uint8 holding codes",
                "View the tensor as torch.uint8 and unpack nibbles with harness.formats.codec.",
            )
    if codes.numel() and int(codes.max()) >= E2M1.code_count:
        raise InvalidArgument(
            f"{operand} codes",
            int(codes.max()),
            "E2M1 codes from 0 to 15",
            "Unpack two codes a byte with harness.formats.codec.",
        )
    if codes.dim() != 2 or tuple(scales.shape) != (codes.shape[0], codes.shape[1] // rule.block):
        raise ShapeMismatch(
            f"shapes of {operand} codes and scales",
            (tuple(codes.shape), tuple(scales.shape)),
            f"(rows, K) and (rows, K / {rule.block})",
            "Bring the scales into linear order with harness.formats.layouts.",
        )
