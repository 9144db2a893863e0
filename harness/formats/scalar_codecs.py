"""Scalar codecs and scale rules, written once for Python scalars, torch tensors and CuTe kernels.

E2M1, E4M3, UE8M0 and BF16 in both directions, the canonical NVFP4 scale rule, and the RoPE rotation
with its roundings. A kernel and the code that judges it run the same text; scalar_ops says how.
Codes are unsigned integers in the low bits; numbers are float32.

The rules are the hardware's (PTX ISA 9.1, cvt; CUDA 12.8 headers for the cases that it leaves
open): nearest even, saturating, infinities too; -0 and negatives that round to zero keep the sign.
NaN becomes 0x7 in E2M1 (+6, there is no NaN), 0x7F in E4M3, 0xFF in UE8M0, 0x7FC0 in BF16.

Nothing is checked, because a kernel cannot raise. harness.formats.codec is the definition that
checks. Both agree on every code and on all 65,536 bfloat16 inputs, and an H200 returns the same
bytes.
"""

from __future__ import annotations

from typing import Any, Final

from degarble.harness.formats.scalar_ops import (
    add_rn,
    bits_of,
    count,
    divide_rn,
    maximum,
    minimum,
    multiply_rn,
    number_of,
    select,
    shift_left,
    shift_right,
    single,
    subtract_rn,
    unsigned,
)

_MAGNITUDE: Final = 0x7FFF_FFFF
_INFINITY: Final = 0x7F80_0000  # a magnitude above it is NaN
_NAN: Final = 0x7FC0_0000

FLOAT32_MAX: Final = 3.4028234663852886e38
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
ONE_SIXTH: Final = 0.1666666716337204  # 1/6 rounded to float32, as a CUDA constant is


def e2m1_encode(number: Any) -> Any:
    """Round a float32 to E2M1, nearest even: 0.25 and 0.75 go to 0 and 1.0, 5 goes to 4."""
    bits = bits_of(number)
    magnitude = bits & _MAGNITUDE
    # Seven boundaries between eight values; a boundary belongs to the even code of its neighbours.
    # Compared as integers, a NaN is above all of them.
    code = count(
        magnitude > 0x3E80_0000,  # 0.25, tie to 0
        magnitude >= 0x3F40_0000,  # 0.75, tie to 1.0
        magnitude > 0x3FA0_0000,  # 1.25, tie to 1.0
        magnitude >= 0x3FE0_0000,  # 1.75, tie to 2
        magnitude > 0x4020_0000,  # 2.5, tie to 2
        magnitude >= 0x4060_0000,  # 3.5, tie to 4
        magnitude > 0x40A0_0000,  # 5, tie to 4
    )
    sign = select(magnitude > _INFINITY, 0, shift_right(bits, 31))
    return code + sign * 8


def e2m1_decode(code: Any) -> Any:
    """Return the number of a code 0 to 15; higher bits are ignored."""
    code = unsigned(code)
    magnitude = code & 7
    # Normal values move exponent and mantissa into place; 0 and 0.5 are subnormal.
    normal = shift_left(magnitude, 22) + (126 << 23)
    bits = select(magnitude < 2, magnitude * 0x3F00_0000, normal)
    return number_of(bits + shift_left(code & 8, 28))


def e4m3_encode(number: Any) -> Any:
    """Round a float32 to E4M3, nearest even, saturating at 448; NaN becomes 0x7F."""
    bits = bits_of(number)
    magnitude = bits & _MAGNITUDE
    # Normal: drop 20 mantissa bits, the carry may run into the exponent; rebias 127 to 7.
    kept = shift_right(magnitude + 0x7_FFFF + (shift_right(magnitude, 20) & 1), 20)
    normal = minimum(maximum(kept, 960) - 960, 0x7E)
    # Subnormal: 2**14 has the step 2**-9, so adding it leaves the rounded code in the low bits.
    subnormal = bits_of(add_rn(number_of(magnitude), 16384.0)) & 0xF
    code = select(magnitude < 0x3C80_0000, subnormal, normal)  # 2**-6
    is_nan = magnitude > _INFINITY
    return select(is_nan, 0x7F, code + shift_right(bits, 31) * 128)


def e4m3_decode(code: Any) -> Any:
    """Return the number of a code 0 to 255; 0x7F and 0xFF are NaN."""
    code = unsigned(code)
    magnitude = code & 0x7F
    normal = shift_left(magnitude, 20) + (120 << 23)
    subnormal = bits_of(multiply_rn(single(magnitude), 2.0**-9))
    bits = select(magnitude < 8, subnormal, normal)
    bits = select(magnitude == 0x7F, _NAN, bits)
    return number_of(bits + shift_left(code & 0x80, 24))


def ue8m0_encode(number: Any) -> Any:
    """Round a magnitude up to a power of two; up to 2**-127 is code 0, infinity saturates to 254.

    By exponent bits, not by a logarithm: exact powers stay. The sign is ignored.
    """
    magnitude = bits_of(number) & _MAGNITUDE
    rounded_up = shift_right(magnitude + 0x7F_FFFF, 23)
    code = minimum(rounded_up, 254)
    code = select(magnitude <= 0x0040_0000, 0, code)  # 2**-127, a float32 subnormal
    return select(magnitude > _INFINITY, 255, code)


def ue8m0_decode(code: Any) -> Any:
    """Return 2 to the power of code - 127; 255 is NaN."""
    code = unsigned(code)
    bits = select(code == 0, 0x0040_0000, shift_left(code, 23))
    return number_of(select(code == 255, _NAN, bits))


def bf16_encode(number: Any) -> Any:
    """Round a float32 to BF16, nearest even; NaN becomes 0x7FC0."""
    bits = bits_of(number)
    kept = shift_right((bits & _MAGNITUDE) + 0x7FFF + (shift_right(bits, 16) & 1), 16)
    code = kept + shift_left(shift_right(bits, 31), 15)
    return select((bits & _MAGNITUDE) > _INFINITY, 0x7FC0, code)


def bf16_decode(code: Any) -> Any:
    """Return the number of a 16-bit code, exactly."""
    return number_of(shift_left(unsigned(code), 16))


def bf16_round(number: Any) -> Any:
    """Round a float32 to the nearest BF16 value, kept in float32."""
    return bf16_decode(bf16_encode(number))


def nvfp4_tensor_encode_scale(tensor_amax: Any) -> Any:
    """Return 2688 / amax, at most the largest float32; 1 where amax is 0 or infinite.

    Canonical dialect: Transformer Engine, common/cast/nvfp4/core_nvfp4.cuh.
    """
    scale = minimum(divide_rn(E2M1_MAX * E4M3_MAX, tensor_amax), FLOAT32_MAX)
    return select(scale == 0.0, 1.0, select(tensor_amax == 0.0, 1.0, scale))


def nvfp4_block_scale(block_amax: Any, encode_scale: Any) -> Any:
    """Return the E4M3 code of a block's decode scale: amax times (encode scale times 1/6)."""
    return e4m3_encode(multiply_rn(block_amax, multiply_rn(encode_scale, ONE_SIXTH)))


def nvfp4_block_encode_scale(scale_code: Any, encode_scale: Any) -> Any:
    """Return what the block's values are multiplied by; at most the largest float32.

    Three true divisions and products as the canonical dialect has them; no reciprocal estimate.
    """
    decode_scale = multiply_rn(e4m3_decode(scale_code), divide_rn(1.0, encode_scale))
    return minimum(divide_rn(1.0, decode_scale), FLOAT32_MAX)


def nvfp4_encode(number: Any, block_encode_scale: Any) -> Any:
    """Return the E2M1 code of one value of a block."""
    return e2m1_encode(multiply_rn(number, block_encode_scale))


def nvfp4_decode(code: Any, scale_code: Any) -> Any:
    """Return element times block scale, exact in float32; the tensor scale is the caller's."""
    return multiply_rn(e2m1_decode(code), e4m3_decode(scale_code))


def rope_rotate(x_even: Any, x_odd: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Rotate a pair in float32: round each product, then their sum; no FMA anywhere."""
    even = subtract_rn(multiply_rn(x_even, cos), multiply_rn(x_odd, sin))
    odd = add_rn(multiply_rn(x_even, sin), multiply_rn(x_odd, cos))
    return even, odd
