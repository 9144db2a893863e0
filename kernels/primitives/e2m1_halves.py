"""Encode eight BF16 values as a word of E2M1 codes by packed BF16 arithmetic, two values at a time.

For a processor with packed BF16 but without a conversion to E2M1 (sm_90a). The inverse of an E4M3
scale is two BF16 numbers whose sum is good to 16 bits. Both are positive, or a zero would lose its
sign. A quotient is an fma on a product, rounded to BF16 at the end. E2M1's boundaries times a scale
have 7 bits, a value has 8: what is no tie is more than half a BF16 step from it, so the rounding
keeps ties ties and everything else on its side.

Then a quotient's power E = 2**e, e = 0, 1, 2, times 67, plus the quotient: the sum has the step
E / 2, so its mantissa is 6 + k, with code = k + 2 e, and its exponent field is 133 + e. A product
with 2**12 + 2**6 + 1 adds mantissa, twice the exponent and eight times the sign in bits 12 to 15:
6 + k + 2 (5 + e) + 8 sign = 16 + code. The addend takes the exponent's constant bit out of it, so
that no carry of the lower half reaches the upper half's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WORDS = 4
_SIGNS_AND_EXPONENTS: Final = 0xFF80_FF80
_ONES: Final = 0x3F80_3F80
_SUMMANDS: Final = 0x4286_4286  # 67
_MOVES: Final = (1 << 12) + (1 << 6) + 1
# Bit 14 of both halves (the exponent's constant bit), moved by _MOVES and subtracted.
_WITHOUT_CONSTANT: Final = -0x4000_4000 * _MOVES % (1 << 32)
_IN_ORDER: Final = (1 << 12) + 1
_CODES: Final = 0xF0F0_F0F0
_UPPER_BF16: Final = 0xFFFF_0000


@dataclass(frozen=True)
class Primitives:
    """Operations that differ between operators and instructions, on words of two BF16."""

    product: Callable[[Any, Any], Any]  # each rounded to nearest even
    fused: Callable[[Any, Any, Any], Any]  # product and sum, rounded once
    at_least: Callable[[Any, Any], Any]  # the larger magnitude, the first one's sign
    low_word: Callable[[Any, int, int], Any]  # word times a number plus a number, modulo 2**32
    bytes_of: Callable[[Any, Any, int], Any]  # four of eight bytes, by their numbers as nibbles
    constant: Callable[[int], Any]  # an integer below 2**32 that keeps its 32 bits


def _on_pairs(function: Callable[..., Any], *words: Any) -> Any:
    """Apply a function of float32 numbers to both halves, rounded to BF16."""
    halves = []
    for shift in (0, 16):
        numbers = [codecs.bf16_decode(ops.shift_right(word, shift) & 0xFFFF) for word in words]
        halves.append(codecs.bf16_encode(function(*numbers)))
    return halves[0] + ops.shift_left(halves[1], 16)


def _larger(number: Any, other: Any) -> Any:
    magnitude = ops.maximum(ops.absolute(number), ops.absolute(other))
    return ops.number_of(ops.bits_of(magnitude) + (ops.bits_of(number) & 0x8000_0000))


def _bytes_of(low: Any, high: Any, order: int) -> Any:
    made = 0
    for place in range(4):
        chosen = order >> 4 * place & 7
        source = (low, high)[chosen // 4]
        byte = ops.shift_right(source, chosen % 4 * 8) & 0xFF
        made = made + ops.shift_left(byte, 8 * place)
    return made


# A sum of a product and a BF16 number may be rounded twice here; the suite's walk says it is exact.
OPERATORS = Primitives(
    product=lambda a, b: _on_pairs(ops.multiply_rn, a, b),
    fused=lambda a, b, c: _on_pairs(ops.fma_rn, a, b, c),
    at_least=lambda word, least: _on_pairs(_larger, word, least),
    low_word=lambda word, factor, addend: ops.unsigned(word * factor + addend),
    bytes_of=_bytes_of,
    constant=lambda number: number,
)


def inverse_terms(scale: Any, estimate: Any) -> tuple[Any, Any]:
    """Return 1 / scale as two positive numbers, from any estimate that is good to 21 bits.

    The first is a BF16 number; the second is the rest, which the caller rounds to BF16.
    """
    error = ops.fma_rn(ops.multiply_rn(scale, -1.0), estimate, 1.0)
    inverse = ops.fma_rn(estimate, error, estimate)
    first = ops.number_of(ops.bits_of(inverse) & _UPPER_BF16)
    return first, ops.subtract_rn(inverse, first)


def quotients(
    words: Sequence[Any], inverse: tuple[Any, Any], primitives: Primitives = OPERATORS
) -> list[Any]:
    """Return values divided by a scale; `inverse` has each term twice, in words."""
    first, second = inverse
    rest = [primitives.product(word, second) for word in words]
    return [primitives.fused(word, first, r) for word, r in zip(words, rest, strict=True)]


def code_word(numbers: Sequence[Any], primitives: Primitives = OPERATORS) -> Any:
    """Return the codes of four words of quotients up to 6, packed low nibble first."""
    moved = [_codes_on_top(word, primitives) for word in numbers]
    first = _four_codes(moved[0], moved[1], primitives)
    second = _four_codes(moved[2], moved[3], primitives)
    return primitives.bytes_of(first, second, 0x7632)


def _four_codes(low: Any, high: Any, primitives: Primitives) -> Any:
    """Return a word with four codes in its upper half, in order."""
    # Of values 0, 2, 1, 3, each in the upper half of a byte.
    apart = primitives.bytes_of(low, high, 0x7351) & primitives.constant(_CODES)
    return primitives.low_word(apart, _IN_ORDER, 0)


def _codes_on_top(word: Any, primitives: Primitives) -> Any:
    """Return a word with both codes in the top four bits of its halves."""
    power = word & primitives.constant(_SIGNS_AND_EXPONENTS)
    power = primitives.at_least(power, primitives.constant(_ONES))
    rounded = primitives.fused(power, primitives.constant(_SUMMANDS), word)
    return primitives.low_word(rounded, _MOVES, _WITHOUT_CONSTANT)
