"""Decode E4M3 and E2M1 cache codes to pairs of BF16 by packed conversions and products (sm_90a).

A code is exact in BF16. Its product with the scale is exact too, except below BF16's normal range
or where the scale is no power of two (V3.2); there it is rounded as kv_read rounds it. A NaN code
or scale stays NaN.
"""

from typing import Any

from cutlass import Uint32

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives.kv_problem import EntryFormat

# A BF16 NaN.
NAN = 0x7FFF
# 2**8 as a pair of BF16: undoes the 2**-8 of w4a16_instructions.decoded.
POWER_8 = ((127 + 8) << 7) * 0x1_0001


def factors_of(scale: Any, entry: EntryFormat) -> list[Any]:
    """Return the scales of 16 bytes of codes, each as a pair of BF16."""
    if entry.code_bits == 4:
        return list(shared.block_scales(scale, False))
    # A UE8M0 code is BF16's exponent; code 0 means half of the smallest normal number.
    bits = ops.select(scale == 0, Uint32(0x40), ops.shift_left(scale, 7))
    return [ops.select(scale == 255, Uint32(NAN), bits) * 0x1_0001]


def decoded(words: list[Any], factor: Any, entry: EntryFormat) -> list[Any]:
    """Return the four words of eight BF16 values (8 bytes of E4M3, or 4 of E2M1)."""
    if entry.code_bits == 8:
        return [pair for word in words for pair in e4m3_pairs(word, factor)]
    return e2m1_pairs(words[0], factor)


def e4m3_pairs(word: Any, factor: Any) -> list[Any]:
    """Return four E4M3 codes as BF16, times a BF16 factor."""
    # Moving bits would be fewer instructions, but of a pipe that is half as wide.
    text = """{
    .reg .b16 p0, p1, h0, h1, h2, h3; .reg .b32 d0, d1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {p0, p1}, {$r0};
    cvt.rn.f16x2.e4m3x2 d0, p0; cvt.rn.f16x2.e4m3x2 d1, p1;
    mov.b32 {h0, h1}, d0; mov.b32 {h2, h3}, d1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 d0, f1, f0; cvt.rn.bf16x2.f32 d1, f3, f2;
    mul.rn.bf16x2 {$w0}, d0, {$r1}; mul.rn.bf16x2 {$w1}, d1, {$r1};
    }"""
    return list(shared.emit(text, [Uint32, Uint32], word, factor))


def e4m3_scaled(words: list[Any], scale: Any) -> list[Any]:
    """Return the four words of eight E4M3 codes times a float32 scale, rounded once."""
    text = """{
    .reg .b16 p0, p1, h0, h1, h2, h3; .reg .b32 d0, d1; .reg .f32 f0, f1, f2, f3, s;
    mov.b32 {p0, p1}, {$r0}; mov.b32 s, {$r1};
    cvt.rn.f16x2.e4m3x2 d0, p0; cvt.rn.f16x2.e4m3x2 d1, p1;
    mov.b32 {h0, h1}, d0; mov.b32 {h2, h3}, d1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    mul.rn.f32 f0, f0, s; mul.rn.f32 f1, f1, s; mul.rn.f32 f2, f2, s; mul.rn.f32 f3, f3, s;
    cvt.rn.bf16x2.f32 {$w0}, f1, f0; cvt.rn.bf16x2.f32 {$w1}, f3, f2;
    }"""
    return [pair for word in words for pair in shared.emit(text, [Uint32, Uint32], word, scale)]


def e2m1_pairs(word: Any, factor: Any) -> list[Any]:
    """Return eight E2M1 codes as BF16, in their order, times a factor that is 2**118 too large."""
    spread = shared.decoded(word, factor, False)  # codes j and j + 4, times 2**-8
    text = f"""{{
    .reg .b32 a, b, at; mov.b32 at, {POWER_8};
    prmt.b32 a, {{$r0}}, {{$r1}}, 0x5410; prmt.b32 b, {{$r0}}, {{$r1}}, 0x7632;
    mul.rn.bf16x2 {{$w0}}, a, at; mul.rn.bf16x2 {{$w1}}, b, at;
    }}"""
    low, high = (shared.emit(text, [Uint32, Uint32], spread[i], spread[i + 1]) for i in (0, 2))
    return [low[0], high[0], low[1], high[1]]
