"""Make operands that put each rule of tensor-core arithmetic under strain, one family a function.

DENSE and SCALED map a family's name to a maker of operands. The CPU suite of
references.tensor_core, which also checks that each family shows its strain, and the suite that runs
wgmma on an H200 share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Pair = tuple[Tensor, Tensor]

LARGEST_FP32 = torch.finfo(torch.float32).max


def bits(x: Tensor) -> Tensor:
    """Return the codes of a float32 tensor."""
    return x.contiguous().view(torch.int32)


def bit_mismatch(got: Tensor, want: Tensor) -> str:
    """Describe how fp32 results differ in their bits; empty where they do not."""
    codes = [bits(x) for x in (got, want)]
    differs = codes[0] != codes[1]
    if not bool(differs.any()):
        return ""
    at = tuple(differs.nonzero()[0].tolist())
    shown = " and ".join(f"0x{int(code[at]) & 0xFFFFFFFF:08X}" for code in codes)
    return (
        f"{int(differs.sum())} of {differs.numel()} differ (budget 0: the arithmetic is exact);"
        f" first at {at}: got and want {shown}, {float(got[at])!r} and {float(want[at])!r}"
    )


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Fail with the description of bit_mismatch."""
    mismatch = bit_mismatch(got, want)
    assert not mismatch, mismatch


class DenseCase(NamedTuple):
    """Operands of a dense GEMM."""

    a: Tensor  # M K
    b: Tensor  # N K
    c: Tensor  # M N


class ScaledCase(NamedTuple):
    """Operands of a block-scaled GEMM."""

    a_codes: Tensor  # M K
    a_scales: Tensor  # M B
    b_codes: Tensor  # N K
    b_scales: Tensor  # N B
    c: Tensor  # M N


@dataclass(frozen=True)
class Draw:
    """A source of random operands with the extents and the format of one case."""

    generator: torch.Generator
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    block: int = 16

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw integers from `low` to `high - 1`."""
        return torch.randint(low, high, shape, generator=self.generator)

    def floats(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw float32 of either sign whose binary exponents run from `low` to `high - 1`."""
        significand = 1 + torch.rand(shape, generator=self.generator, dtype=torch.float64)
        sign = 1 - 2 * self.integers(0, 2, *shape)
        # torch.ldexp computes 2**exponent in float32 for float32: too narrow here.
        return (sign * significand * torch.exp2(self.integers(low, high, *shape).double())).float()

    def chance(self, probability: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) < probability

    def dense(self, low: int, high: int) -> Pair:
        """Draw A and B in the format of the case."""
        a_MK = self.floats(low, high, self.m, self.k).to(self.dtype)
        return a_MK, self.floats(low, high, self.n, self.k).to(self.dtype)

    def accumulators(self, low: int, high: int) -> Tensor:
        return self.floats(low, high, self.m, self.n)

    def codes(self) -> Pair:
        a_MK = self.integers(0, 16, self.m, self.k).to(torch.uint8)
        return a_MK, self.integers(0, 16, self.n, self.k).to(torch.uint8)

    def scales(self, low: int, high: int) -> Pair:
        a_MB = self.integers(low, high, self.m, self.k // self.block).to(torch.uint8)
        return a_MB, self.integers(low, high, self.n, self.k // self.block).to(torch.uint8)


# ---- dense families ------------------------------------------------------------------------------


def normal(draw: Draw) -> DenseCase:
    """Draw what a model multiplies."""
    a_MK = torch.randn(draw.m, draw.k, generator=draw.generator).to(draw.dtype)
    b_NK = torch.randn(draw.n, draw.k, generator=draw.generator).to(draw.dtype)
    return DenseCase(a_MK, b_NK, torch.randn(draw.m, draw.n, generator=draw.generator))


def all_codes(draw: Draw) -> DenseCase:
    """Draw any bit pattern: NaN with payloads, infinities, subnormals."""
    a_MK, b_NK = (
        draw.integers(-(1 << 15), 1 << 15, rows, draw.k).to(torch.int16).view(draw.dtype)
        for rows in (draw.m, draw.n)
    )
    c = draw.integers(-(1 << 31), 1 << 31, draw.m, draw.n).to(torch.int32).view(torch.float32)
    return DenseCase(a_MK, b_NK, c)


def infinities(draw: Draw) -> DenseCase:
    """Plant a few infinities and zeros among finite numbers: inf, inf - inf, and inf * 0."""
    a_MK, b_NK, c_MN = normal(draw)
    for operand, likely in ((a_MK, 0.004), (b_NK, 0.004), (c_MN, 0.05)):
        sign = torch.where(draw.chance(0.5, *operand.shape), 1.0, -1.0).to(operand.dtype)
        operand[draw.chance(likely, *operand.shape)] = torch.inf
        operand.mul_(sign)
        operand[draw.chance(0.02, *operand.shape)] = 0
    return DenseCase(a_MK, b_NK, c_MN)


def spread(draw: Draw) -> DenseCase:
    """Draw exponents so far apart that most terms lose bits and many vanish."""
    reach = 40 if draw.dtype == torch.bfloat16 else 14
    a_MK, b_NK = draw.dense(-reach, reach)
    return DenseCase(a_MK, b_NK, draw.accumulators(-2 * reach, 2 * reach))


def cancelling(draw: Draw) -> DenseCase:
    """Let large products cancel, so that the truncated small ones are the whole result."""
    a_MK, b_NK = draw.dense(6, 9)
    a_MK[:, 1::2], b_NK[:, 1::2] = a_MK[:, 0::2], -b_NK[:, 0::2]
    small = torch.arange(draw.k) % 16 >= 12
    a_MK[:, small] = draw.floats(-7, -3, draw.m, int(small.sum())).to(draw.dtype)
    b_NK[:, small] = draw.floats(-7, -3, draw.n, int(small.sum())).to(draw.dtype)
    return DenseCase(a_MK, b_NK, draw.accumulators(-12, -6))


def c_dominates(draw: Draw) -> DenseCase:
    """Let C stand so high that products reach its last bits only."""
    a_MK, b_NK = draw.dense(-2, 3)
    return DenseCase(a_MK, b_NK, draw.accumulators(20, 26))


def c_tiny(draw: Draw) -> DenseCase:
    """Let C lie at the end of the kept fraction, or be subnormal, or be either zero."""
    a_MK, b_NK = draw.dense(-2, 3)
    c_MN = draw.accumulators(-26, -18)
    c_MN[draw.chance(0.2, draw.m, draw.n)] = 1e-40
    c_MN[draw.chance(0.2, draw.m, draw.n)] = 0.0
    c_MN[draw.chance(0.2, draw.m, draw.n)] = -0.0
    return DenseCase(a_MK, b_NK, c_MN)


def zeros(draw: Draw) -> DenseCase:
    """Draw mostly zeros of both signs, so that whole steps are zero."""
    a_MK, b_NK, c_MN = normal(draw)
    a_MK[draw.chance(0.97, draw.m, draw.k)] = -0.0
    b_NK[draw.chance(0.5, draw.n, draw.k)] = 0.0
    c_MN[draw.chance(0.8, draw.m, draw.n)] = -0.0
    return DenseCase(a_MK, b_NK, c_MN)


def subnormal(draw: Draw) -> DenseCase:
    """Draw results below the least normal fp32, from products and from C."""
    if draw.dtype == torch.bfloat16:
        a_MK, b_NK = draw.dense(-80, -66)
    else:  # fp16 products are far above: subnormal results come from C, past products of zero
        a_MK, b_NK = draw.dense(-24, -14)
        b_NK.zero_()
    c_MN = draw.accumulators(-148, -126) * draw.chance(0.7, draw.m, draw.n)
    return DenseCase(a_MK, b_NK, c_MN)


def zero_exponent(draw: Draw) -> DenseCase:
    """Let products below the exponent of zero decide the last bit of a subnormal result."""
    a_MK, b_NK = draw.dense(-82, -72) if draw.dtype == torch.bfloat16 else draw.dense(-15, -14)
    a_MK, b_NK = a_MK.abs(), b_NK.abs()
    if draw.dtype == torch.bfloat16:  # 2**-149 less a little below what alignment at -133 keeps
        a_MK[:, 0::16], b_NK[:, 0::16] = 2.0**-74, 2.0**-75
        a_MK[:, 1::16] = -a_MK[:, 1::16]
        a_MK[:, 2::16], b_NK[:, 3::16] = 0, 0
    return DenseCase(a_MK, b_NK, torch.zeros(draw.m, draw.n))


def overflow(draw: Draw) -> DenseCase:
    """Draw sums at the end of the fp32 range: some fit, some become infinite, some then NaN."""
    if draw.dtype == torch.bfloat16:
        a_MK, b_NK = draw.dense(60, 64)
        return DenseCase(a_MK, b_NK, draw.accumulators(124, 128))
    a_MK, b_NK = draw.dense(12, 14)  # fp16 products do not reach the last bit of C
    a_MK[::5, 0] = torch.inf
    return DenseCase(a_MK, b_NK, draw.accumulators(127, 128).sign() * LARGEST_FP32)


DENSE: dict[str, Callable[[Draw], DenseCase]] = {
    make.__name__: make
    for make in (
        normal,
        all_codes,
        infinities,
        spread,
        cancelling,
        c_dominates,
        c_tiny,
        zeros,
        subnormal,
        zero_exponent,
        overflow,
    )
}


# ---- block-scaled families -----------------------------------------------------------------------


def _middle(draw: Draw) -> Pair:
    """Draw scales near one: E4M3 codes 0x28 to 0x50, or powers of two near 2**0."""
    return draw.scales(0x28, 0x50) if draw.block == 16 else draw.scales(117, 137)


def _scaled(codes: Pair, scales: Pair, c_MN: Tensor) -> ScaledCase:
    return ScaledCase(codes[0], scales[0], codes[1], scales[1], c_MN)


def codes_normal(draw: Draw) -> ScaledCase:
    """Draw all codes with scales near one."""
    return _scaled(draw.codes(), _middle(draw), draw.accumulators(-3, 6))


def any_scale(draw: Draw) -> ScaledCase:
    """Draw any scale byte: zero, subnormal, sign bit, NaN, for UE8M0 also overflow."""
    scales = draw.scales(0, 256)
    scales[0][0, 0] = 0xFF  # NaN in either format
    return _scaled(draw.codes(), scales, draw.accumulators(-30, 30))


def zero_groups(draw: Draw) -> ScaledCase:
    """Draw groups of zeros of both signs beside small C, whose bits they must not push out."""
    codes = draw.codes()
    for codes_RK in codes:
        rows, k = codes_RK.shape
        group = draw.chance(0.7, rows, k // 16).repeat_interleave(16, dim=1)
        codes_RK[group] &= 8  # the sign stays: -0
    return _scaled(codes, _middle(draw), draw.accumulators(-149, -100))


def cancelling_groups(draw: Draw) -> ScaledCase:
    """Let a group of the largest exponent cancel: it still decides where the others are cut."""
    a_MK, b_NK = draw.codes()
    first = torch.arange(draw.k) % 64 < draw.block
    even = torch.arange(draw.k) % 2 == 0
    a_MK[:, first & ~even] = a_MK[:, first & even] = (a_MK[:, first & even] & 7).clamp(min=1)
    b_NK[:, first & ~even] = b_NK[:, first & even] ^ 8
    high, low, least = (0x7E, 9, 1) if draw.block == 16 else (127, 112, 109)
    a_MB, b_NB = draw.scales(least, low)
    a_MB[:, :: 64 // draw.block] = b_NB[:, :: 64 // draw.block] = high
    return _scaled((a_MK, b_NK), (a_MB, b_NB), draw.accumulators(-20, -8))


def opposite_groups(draw: Draw) -> ScaledCase:
    """Let two groups with large sums cancel each other, so that what is cut decides."""
    a_MK, b_NK = draw.codes()
    for codes, sign in ((a_MK, 0), (b_NK, 8)):
        of_steps = codes.view(codes.shape[0], -1, 64)
        of_steps[:, :, :16] &= 7  # all products positive: the sum is far above two
        of_steps[:, :, 16:32] = of_steps[:, :, :16] | sign
    high, low, least = (0x7E, 9, 1) if draw.block == 16 else (127, 112, 109)
    a_MB, b_NB = draw.scales(least, low)
    for scales in (a_MB, b_NB):
        scales.view(scales.shape[0], -1, 64 // draw.block)[:, :, : 32 // draw.block] = high
    return _scaled((a_MK, b_NK), (a_MB, b_NB), draw.accumulators(-20, -8))


def zero_scale(draw: Draw) -> ScaledCase:
    """Draw many scales of code 0 and, for E4M3, of -0."""
    a_MB, b_NB = _middle(draw)
    a_MB[draw.chance(0.4, *a_MB.shape)] = 0
    b_NB[draw.chance(0.2, *b_NB.shape)] = 0x80 if draw.block == 16 else 0
    return _scaled(draw.codes(), (a_MB, b_NB), draw.accumulators(-40, 0))


def nan_scale(draw: Draw) -> ScaledCase:
    """Plant NaN scales, also above groups of zeros."""
    codes = draw.codes()
    codes[0][::2] &= 8
    a_MB, b_NB = _middle(draw)
    a_MB[draw.chance(0.1, *a_MB.shape)] = 0x7F if draw.block == 16 else 0xFF
    b_NB[draw.chance(0.02, *b_NB.shape)] = 0xFF
    return _scaled(codes, (a_MB, b_NB), draw.accumulators(-3, 3))


def scaled_spread(draw: Draw) -> ScaledCase:
    """Draw scales over their whole finite range."""
    scales = draw.scales(0, 0x7F) if draw.block == 16 else draw.scales(80, 175)
    return _scaled(draw.codes(), scales, draw.accumulators(-40, 40))


def c_above_groups(draw: Draw) -> ScaledCase:
    """Let C stand 30 to 40 binades above the groups."""
    return _scaled(draw.codes(), _middle(draw), draw.accumulators(30, 42))


def c_below_groups(draw: Draw) -> ScaledCase:
    """Let C lie at the end of the 35 fraction bits, be subnormal, infinite, or either zero."""
    c_MN = draw.accumulators(-36, -20)
    for value in (0.0, -0.0, 1e-42, torch.inf, -torch.inf):
        c_MN[draw.chance(0.1, draw.m, draw.n)] = value
    return _scaled(draw.codes(), _middle(draw), c_MN)


def scaled_subnormal(draw: Draw) -> ScaledCase:
    """Draw subnormal results: of tiny scales, or where scales cannot, of C past zero groups."""
    codes = draw.codes()
    if draw.block == 16:
        codes[1].bitwise_and_(8)
        return _scaled(codes, _middle(draw), draw.accumulators(-149, -126))
    c_MN = draw.accumulators(-149, -130) * draw.chance(0.5, draw.m, draw.n)
    return _scaled(codes, draw.scales(28, 62), c_MN)


def scaled_zero_exponent(draw: Draw) -> ScaledCase:
    """Let groups below the exponent of zero decide the last bit of a subnormal result.

    E4M3 scales reach down to 2**-18 only; there the family is C past groups of zeros.
    """
    if draw.block == 16:
        return zero_groups(draw)
    a_MK, b_NK = draw.codes()
    one_in_group = torch.arange(draw.k) % 16 == 0
    a_MK[:, ~one_in_group], b_NK[:, ~one_in_group] = 0, 0
    first = torch.arange(draw.k) % 64 < 16
    a_MK[:, first & one_in_group], b_NK[:, first & one_in_group] = 2, 2  # one, of 2**-149
    a_MK[:, ~first & one_in_group] &= 7
    b_NK[:, ~first & one_in_group] |= 8
    a_MK[:, 16::64] = 0
    a_MB, b_NB = draw.scales(38, 41)
    a_MB[:, 0::2], b_NB[:, 0::2] = 127 - 74, 127 - 75
    return _scaled((a_MK, b_NK), (a_MB, b_NB), torch.zeros(draw.m, draw.n))


def scaled_overflow(draw: Draw) -> ScaledCase:
    """Draw sums at the end of the fp32 range."""
    c_MN = draw.accumulators(127, 128).sign() * LARGEST_FP32
    if draw.block == 16:  # the groups cannot reach the last bit of C: it only stays
        c_MN[draw.chance(0.1, draw.m, draw.n)] = torch.inf
        return _scaled(draw.codes(), draw.scales(0x70, 0x7F), c_MN)
    return _scaled(draw.codes(), draw.scales(180, 192), c_MN)


SCALED: dict[str, Callable[[Draw], ScaledCase]] = {
    make.__name__: make
    for make in (
        codes_normal,
        any_scale,
        zero_groups,
        cancelling_groups,
        opposite_groups,
        zero_scale,
        nan_scale,
        scaled_spread,
        c_above_groups,
        c_below_groups,
        scaled_subnormal,
        scaled_zero_exponent,
        scaled_overflow,
    )
}


def draw_dense(family: str, seed: int, dtype: torch.dtype, k: int = 48) -> DenseCase:
    """Make the operands of a family: 64 x 16 outputs."""
    generator = torch.Generator().manual_seed(seed)
    return DENSE[family](Draw(generator, m=64, n=16, k=k, dtype=dtype))


def draw_scaled(family: str, seed: int, block: int, k: int = 192) -> ScaledCase:
    """Make the operands of a block-scaled family: 64 x 16 outputs."""
    generator = torch.Generator().manual_seed(seed)
    return SCALED[family](Draw(generator, m=64, n=16, k=k, block=block))
