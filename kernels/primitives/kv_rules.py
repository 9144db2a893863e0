"""Scale and code a block of a cache entry; written once for ints, tensors and kernels.

FP8 entries have UE8M0 or float32 scales. NVFP4 entries have no tensor scale and a smallest block
scale of 2**-9, as the references do. A block that holds a NaN reads back as NaN altogether (fp8:
an infinity as well).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.kernels.primitives.kv_problem import EntryFormat

NAN_BF16 = 0x7F80  # a magnitude above it
FP8_SMALLEST_AMAX = 1e-4  # DeepSeek-V4 inference/kernel.py, act_quant
LARGEST_E4M3_INVERSE = 1.0 / codecs.E4M3_MAX
NVFP4_SMALLEST_AMAX = codecs.E2M1_MAX * 2.0**-9  # FlashInfer, deepseek_v41/cache.py
ESTIMATE_LOWERED = 1 - 2.0**-20


def fp8_scale_code(amax_bits: Any) -> Any:
    """Return the UE8M0 code of a block whose largest magnitude has these BF16 bits."""
    amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
    bits = ops.bits_of(ops.multiply_rn(amax, LARGEST_E4M3_INVERSE))  # positive and normal
    # Adding the mantissa's ones rounds the exponent up: the next power of two. 255 is UE8M0's NaN.
    return ops.select(amax_bits >= NAN_BF16, 255, ops.shift_right(bits + 0x7F_FFFF, 23))


def fp8_factor(scale_code: Any) -> Any:
    """Return the factor of values before they are coded: a power of two, or NaN."""
    inverse = ops.shift_left(254 - ops.minimum(scale_code, 254), 23)
    return ops.number_of(ops.select(scale_code == 255, 0x7FC0_0000, inverse))


def fp32_scale_bits(amax_bits: Any, entry: EntryFormat) -> Any:
    """Return the bits of a block's float32 scale: amax / 448, or fp8's power of two; or NaN."""
    if entry.powers:
        bits = ops.shift_left(fp8_scale_code(amax_bits), 23)
    else:
        amax = ops.maximum(codecs.bf16_decode(amax_bits), FP8_SMALLEST_AMAX)
        bits = ops.bits_of(ops.divide_rn(amax, codecs.E4M3_MAX))
    return ops.select(amax_bits >= NAN_BF16, 0x7FC0_0000, bits)


def nvfp4_scale_number(amax: Any, larger: Callable[[Any, Any], Any] = ops.maximum) -> Any:
    """Return a sixth of a block's largest magnitude, floored; the caller codes it to E4M3.

    For BF16 magnitudes the product with ONE_SIXTH has the code of the true sixth, ties included.
    """
    return ops.multiply_rn(larger(amax, NVFP4_SMALLEST_AMAX), codecs.ONE_SIXTH)


def nvfp4_inverse(scale: Any, estimate: Any) -> tuple[Any, Any]:
    """Return 1 / scale as a sum of two numbers, from any estimate that is good to 21 bits.

    Both are positive, or a zero would lose its sign: hence the first is made too small.
    """
    estimate = ops.multiply_rn(estimate, ESTIMATE_LOWERED)
    error = ops.fma_rn(ops.multiply_rn(scale, -1.0), estimate, 1.0)
    return estimate, ops.multiply_rn(estimate, error)


def nvfp4_quotient(number: Any, inverse: tuple[Any, Any]) -> Any:
    """Return a BF16 number divided by a scale, exactly enough that E2M1 ties stay ties.

    A boundary times a scale has 7 bits, the number 8: what is no tie differs by at least 2**-16.
    """
    return ops.fma_rn(number, inverse[0], ops.multiply_rn(number, inverse[1]))


def e2m1_numbers(word: Any, scale: Any) -> list[Any]:
    """Return the eight numbers of a word of codes times a scale, exactly.

    The three bits of a magnitude, moved to exponent and mantissa, are the value times 2**-126.
    """
    made = []
    # 2**126 is split into 2**26 and 2**100.
    of_scale = ops.multiply_rn(scale, 2.0**26)
    for place in range(8):
        nibble = ops.shift_right(word, 4 * place) & 0xF
        bits = ops.shift_left(nibble & 7, 22) + ops.shift_left(nibble & 8, 28)
        made.append(ops.multiply_rn(ops.multiply_rn(ops.number_of(bits), 2.0**100), of_scale))
    return made
