"""Encode eight float32 numbers as a word of E2M1 codes, without comparisons or conversions.

For sm_90a: seven comparisons a number, as in the definition, would occupy the integer pipe for
longer than memory takes. E2M1 has one mantissa bit, so adding 2**22 times the number's power of two
(at least 1) leaves the rounded code in the low bits, nearest even: the adder does the rounding. The
exponent then counts two codes a binade; both meet, with the sign, in four bits. The comment on
_SUMMAND derives it.

The primitives are parameters, because one GPU instruction does what takes three operators here. Not
defined: the sign of a NaN's code, which is the NaN's own here; a GPU makes positive ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.scalar_ops import E2M1_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUMBERS = 8  # in a word, the first in the lowest four bits
SIGN_AND_EXPONENT: Final = 0xFF80_0000
_SIGN: Final = 0x8000_0000
_MAGNITUDE: Final = 0x7FFF_FFFF

# For a number of power E = 2**e, e = 0, 1, 2: the sum E * (2**22 + 1) + number has the step E / 2,
# so its low bits are 2 + (number in steps), and its exponent field is 149 + e. Then
#   low bits + bits >> 22 + bits >> 28 = (2 + k) + (298 + 2 e) + (4 + 8 sign) = 304 + code + 8 sign
# because code = k + 2 e: 2 e codes lie below 2**e. 304 is 19 * 16: the low four bits are the code.
_SUMMAND: Final = 2.0**22 + 1


@dataclass(frozen=True)
class Primitives:
    """Operations that differ between operators and instructions; halves: first word low."""

    limited: Callable[[Any], Any]  # magnitude at most 6, sign kept, NaN to 6
    at_least_one: Callable[[Any], Any]  # magnitude at least 1, sign kept
    constant: Callable[[int], Any]  # an integer below 2**32 that keeps its 32 bits
    low_halves: Callable[[Any, Any], Any]
    high_halves: Callable[[Any, Any], Any]


def _limited(number: Any) -> Any:
    return _with_sign_of(number, ops.minimum(ops.absolute(number), E2M1_MAX))


def _at_least_one(number: Any) -> Any:
    return _with_sign_of(number, ops.maximum(ops.absolute(number), 1.0))


def _with_sign_of(number: Any, magnitude: Any) -> Any:
    bits = (ops.bits_of(number) & _SIGN) + (ops.bits_of(magnitude) & _MAGNITUDE)
    return ops.number_of(bits)


OPERATORS = Primitives(
    limited=_limited,
    at_least_one=_at_least_one,
    constant=lambda number: number,
    low_halves=lambda low, high: (low & 0xFFFF) + (high & 0xFFFF) * 65_536,
    high_halves=lambda low, high: ops.shift_right(low, 16) + (high & 0xFFFF_0000),
)


def e2m1_word(numbers: Sequence[Any], primitives: Primitives = OPERATORS) -> Any:
    """Return the codes of eight numbers, packed low nibble first."""
    sums = [_sum(number, primitives) for number in numbers]
    word = None
    # Numbers j and j + 4 share a word of two halves: then four such words only shift and merge.
    for place in range(NUMBERS // 2):
        pair = sums[place], sums[place + NUMBERS // 2]
        high = primitives.high_halves(*pair)
        codes = primitives.low_halves(*pair) + ops.shift_right(high, 6) + ops.shift_right(high, 12)
        if word is None:
            word = codes
            continue
        kept = ((1 << 4 * place) - 1) * 0x1_0001
        codes = ops.shift_left(codes, 4 * place) & primitives.constant(0xFFFF_FFFF - kept)
        word = (word & primitives.constant(kept)) | codes
    return word


def _sum(number: Any, primitives: Primitives) -> Any:
    """Return the bits of the number plus 2**22 of its steps: the addition rounds it to a code."""
    number = primitives.limited(number)
    power = ops.number_of(ops.bits_of(number) & primitives.constant(SIGN_AND_EXPONENT))
    return ops.bits_of(ops.fma_rn(primitives.at_least_one(power), _SUMMAND, number))
