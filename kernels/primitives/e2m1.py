"""Encode and decode words of eight E2M1 codes: from float32, from BF16 in pairs, to BF16.

Written once for ints, tensors and registers: the caller passes the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.scalar_ops import E2M1_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# --------------------------------------------------------------------------------------------------
# Encode eight float32 numbers as a word of E2M1 codes, without comparisons or conversions.
#
# For sm_90a: seven comparisons a number, as in the definition, would occupy the integer pipe for
# longer than memory takes. E2M1 has one mantissa bit, so adding 2**22 times the number's power of
# two (at least 1) leaves the rounded code in the low bits, nearest even: the adder does the
# rounding. The exponent then counts two codes a binade; both meet, with the sign, in four bits. The
# comment on _SUMMAND derives it.
#
# The primitives are parameters, because one GPU instruction does what takes three operators here.
# Not defined: the sign of a NaN's code, which is the NaN's own here; a GPU makes positive ones.

NUMBERS = 8  # in a word, the first in the lowest four bits
SIGN_AND_EXPONENT: Final = 0xFF80_0000
_SIGN: Final = 0x8000_0000
_EXPONENT: Final = 0x7F80_0000
_MAGNITUDE: Final = 0x7FFF_FFFF

# For a number of power E = 2**e, e = 0, 1, 2: the sum E * (2**22 + 1) + number has the step E / 2,
# so its low bits are 2 + (number in steps), and its exponent field is 149 + e. Then
#   low bits + bits >> 22 + bits >> 28 = (2 + k) + (298 + 2 e) + (4 + 8 sign) = 304 + code + 8 sign
# because code = k + 2 e: 2 e codes lie below 2**e. 304 is 19 * 16: the low four bits are the code.
_SUMMAND: Final = 2.0**22 + 1


@dataclass(frozen=True)
class WordOperations:
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


WORD_OPERATORS = WordOperations(
    limited=_limited,
    at_least_one=_at_least_one,
    constant=lambda number: number,
    low_halves=lambda low, high: (low & 0xFFFF) + (high & 0xFFFF) * 65_536,
    high_halves=lambda low, high: ops.shift_right(low, 16) + (high & 0xFFFF_0000),
)


def e2m1_word(numbers: Sequence[Any], primitives: WordOperations = WORD_OPERATORS) -> Any:
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


def _sum(number: Any, primitives: WordOperations) -> Any:
    """Return the bits of the number plus 2**22 of its steps: the addition rounds it to a code."""
    number = primitives.limited(number)
    power = ops.number_of(ops.bits_of(number) & primitives.constant(SIGN_AND_EXPONENT))
    return ops.bits_of(ops.fma_rn(primitives.at_least_one(power), _SUMMAND, number))


def e2m1_rounded(number: Any, scale: Any) -> Any:
    """Return what a number's code stands for, times a scale that is not negative.

    The sum that holds the code less what was added to it is the code's value: half the instructions
    of a code that is decoded again, with the same bits. A zero keeps its sign, and a NaN is 6.
    """
    magnitude = ops.minimum(ops.absolute(number), E2M1_MAX)
    power = ops.maximum(ops.number_of(ops.bits_of(magnitude) & _EXPONENT), 1.0)
    rounded = ops.fma_rn(power, -_SUMMAND, ops.fma_rn(power, _SUMMAND, magnitude))
    signed = ops.number_of(ops.bits_of(scale) ^ (ops.bits_of(number) & _SIGN))
    return ops.multiply_rn(rounded, signed)


# --------------------------------------------------------------------------------------------------
# Encode eight BF16 values as a word of E2M1 codes by packed BF16 arithmetic, two values at a time.
#
# For a processor with packed BF16 but without a conversion to E2M1 (sm_90a). The inverse of an E4M3
# scale is two BF16 numbers whose sum is good to 16 bits. Both are positive, or a zero would lose
# its sign. A quotient is an fma on a product, rounded to BF16 at the end. E2M1's boundaries times a
# scale have 7 bits, a value has 8: what is no tie is more than half a BF16 step from it, so the
# rounding keeps ties ties and everything else on its side.
#
# Then a quotient's power E = 2**e, e = 0, 1, 2, times 67, plus the quotient: the sum has the step E
# / 2, so its mantissa is 6 + k, with code = k + 2 e, and its exponent field is 133 + e. A product
# with 2**12 + 2**6 + 1 adds mantissa, twice the exponent and eight times the sign in bits 12 to 15:
# 6 + k + 2 (5 + e) + 8 sign = 16 + code. The addend takes the exponent's constant bit out of it, so
# that no carry of the lower half reaches the upper half's code.

WORDS = 4
_SIGNS_AND_EXPONENTS: Final = 0xFF80_FF80
_ONES: Final = 0x3F80_3F80
_SUMMANDS: Final = 0x4286_4286  # 67
_HALF_MOVES: Final = (1 << 12) + (1 << 6) + 1
# Bit 14 of both halves (the exponent's constant bit), moved by _MOVES and subtracted.
_WITHOUT_CONSTANT: Final = -0x4000_4000 * _HALF_MOVES % (1 << 32)
_IN_ORDER: Final = (1 << 12) + 1
_CODES: Final = 0xF0F0_F0F0
_UPPER_BF16: Final = 0xFFFF_0000


@dataclass(frozen=True)
class HalfOperations:
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
HALF_OPERATORS = HalfOperations(
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
    words: Sequence[Any], inverse: tuple[Any, Any], primitives: HalfOperations = HALF_OPERATORS
) -> list[Any]:
    """Return values divided by a scale; `inverse` has each term twice, in words."""
    first, second = inverse
    rest = [primitives.product(word, second) for word in words]
    return [primitives.fused(word, first, r) for word, r in zip(words, rest, strict=True)]


def code_word(numbers: Sequence[Any], primitives: HalfOperations = HALF_OPERATORS) -> Any:
    """Return the codes of four words of quotients up to 6, packed low nibble first."""
    moved = [_codes_on_top(word, primitives) for word in numbers]
    first = _four_codes(moved[0], moved[1], primitives)
    second = _four_codes(moved[2], moved[3], primitives)
    return primitives.bytes_of(first, second, 0x7632)


def _four_codes(low: Any, high: Any, primitives: HalfOperations) -> Any:
    """Return a word with four codes in its upper half, in order."""
    # Of values 0, 2, 1, 3, each in the upper half of a byte.
    apart = primitives.bytes_of(low, high, 0x7351) & primitives.constant(_CODES)
    return primitives.low_word(apart, _IN_ORDER, 0)


def _codes_on_top(word: Any, primitives: HalfOperations) -> Any:
    """Return a word with both codes in the top four bits of its halves."""
    power = word & primitives.constant(_SIGNS_AND_EXPONENTS)
    power = primitives.at_least(power, primitives.constant(_ONES))
    rounded = primitives.fused(power, primitives.constant(_SUMMANDS), word)
    return primitives.low_word(rounded, _HALF_MOVES, _WITHOUT_CONSTANT)


# --------------------------------------------------------------------------------------------------
# Encode eight float32 numbers as above, but bring each code to the top by one integer product.
#
# Between its low bits and its exponent a sum has zeros, so a product with 2**28 + 2**6 + 1 adds low
# bits, bits >> 22 and bits >> 28 in its top four bits, and nothing is carried into them. That takes
# fewer instructions of the integer pipe: a product is on the other one, and bytes are gathered by
# permutations.

_TOP_MOVES: Final = (1 << 28) + (1 << 6) + 1
_EVEN, _ODD = 0x0F0F_0F0F, 0xF0F0_F0F0


def e2m1_word_by_products(
    numbers: Sequence[Any],
    primitives: WordOperations = WORD_OPERATORS,
    moves: HalfOperations = HALF_OPERATORS,
) -> Any:
    """Return the codes of eight numbers, packed low nibble first."""
    tops = [moves.low_word(_sum(number, primitives), _TOP_MOVES, 0) for number in numbers]
    even, odd = _upper_bytes(tops[0::2], moves), _upper_bytes(tops[1::2], moves)
    even = ops.shift_right(even, 4) & moves.constant(_EVEN)
    return even | (odd & moves.constant(_ODD))


def largest_coded(factor: Any) -> Any:
    """Return the number of which a block's factor makes 6; the caller rounds it to BF16.

    Then 2**-8 of it are lost at most, and what a factor makes 5 to 7 has the code of 6. So larger
    BF16 values may be replaced by it, two at a time, in place of each product being limited; a NaN
    too.
    """
    return ops.divide_rn(E2M1_MAX, factor)


def _upper_bytes(words: Sequence[Any], moves: HalfOperations) -> Any:
    """Return the upper bytes of four words."""
    low, high = (moves.bytes_of(words[at], words[at + 1], 0x3373) for at in (0, 2))
    return moves.bytes_of(low, high, 0x5410)


# --------------------------------------------------------------------------------------------------
# Decode a word of eight E2M1 codes to four words of two BF16 numbers, one integer product a pair.
#
# For kernels without a conversion. A code's sign belongs in bit 15 of a BF16 number, its two
# exponent bits and its mantissa bit in bits 8 to 6: the number is then the value times 2**-126,
# subnormal 0.5 included. Both moves are one multiplication by two powers of two; codes j and j + 4
# share it, because they lie 16 bits apart. A product of BF16 numbers with the block scale times
# 2**118 gives value times scale times 2**-8, exactly: six bits at most.

VALUE_EXPONENT: Final = -126  # of what a decoded pair holds: BF16's smallest normal number
SCALE_EXPONENT: Final = 118  # so that the product of 448 and this stays below 2**127
PAIRS = 4  # of a word, the first of codes 0 and 4

_PAIR: Final = 0x000F_000F
_KEPT: Final = 0x81C0_81C0  # sign, two exponent bits, one mantissa bit
_PAIR_MOVES: Final = ((1 << 12) + (1 << 6), (1 << 8) + (1 << 2))  # from bits 0 and 4


def bf16_pairs(word: Any, constant: Callable[[int], Any] = int) -> list[Any]:
    """Return four words; word j has codes j (low) and j + 4, times 2**-126, as BF16.

    `constant` keeps an integer at 32 bits when it is combined with the word.
    """
    upper = ops.shift_right(word, 8)  # codes 2 and 3 in the places of 0 and 1
    return [
        ((source & constant(_PAIR << 4 * place)) * constant(move)) & constant(_KEPT)
        for source in (word, upper)
        for place, move in enumerate(_PAIR_MOVES)
    ]


# --------------------------------------------------------------------------------------------------
# Decode a word of eight E2M1 codes to four words of two FP16 numbers, four codes at once.
#
# A code's sign belongs in bit 15 of an FP16 number, its two exponent bits and its mantissa bit in
# bits 11 to 9: all in the upper byte, which is the value times 2**-14, subnormal 0.5 included. So
# the codes of a word's low nibbles become four such bytes, those of the high ones four more, and a
# byte permutation puts zeros below two of them. Products with the block scale times 2**7 are exact:
# six bits at most, of which the last is 2**-17 or more.

HALF_VALUE_EXPONENT: Final = -14  # of FP16's smallest normal number
HALF_SCALE_EXPONENT: Final = 7  # so that the product of 448 and this is an FP16 number

_SIGNS: Final = 0x8080_8080
_MAGNITUDES: Final = 0x0E0E_0E0E
_UPPER_BYTES: Final = (0x2404, 0x3414)  # of bytes 0 and 2, or 1 and 3; byte 4 is zero
_LOWER_BYTES: Final = 0x00FF_00FF
_BYTE_UP: Final = 1 << 8
_MINUS_ONE: Final = 0xFFFF_FFFF


def fp16_pairs(
    word: Any,
    bytes_of: Callable[[Any, Any, int], Any] = HALF_OPERATORS.bytes_of,
    constant: Callable[[int], Any] = int,
) -> list[Any]:
    """Return four words; word j has codes j (low) and j + 4, times 2**-14, as FP16."""
    nibbles = _half_bytes(word, constant)
    return [bytes_of(codes, 0, order) for order in _UPPER_BYTES for codes in nibbles]


def fp16_pairs_by_products(
    word: Any,
    bytes_of: Callable[[Any, Any, int], Any] = HALF_OPERATORS.bytes_of,
    product: Callable[[Any, int, Any], Any] = HALF_OPERATORS.low_word,
    constant: Callable[[int], Any] = int,
) -> list[Any]:
    """Return what `fp16_pairs` does; two products and a mask separate codes of low nibbles.

    Products are of another pipe than permutations and masks. They are on the one that multiplies by
    scales, too, so high nibbles stay with permutations.
    """
    low, high = _half_bytes(word, constant)
    lower = low & constant(_LOWER_BYTES)
    first, second = (bytes_of(high, 0, order) for order in _UPPER_BYTES)
    return [product(lower, _BYTE_UP, 0), first, product(lower, _MINUS_ONE, low), second]


def _half_bytes(word: Any, constant: Callable[[int], Any]) -> tuple[Any, Any]:
    """Return the upper bytes of FP16 numbers: those of low nibbles, and of high ones."""
    signs, magnitudes = constant(_SIGNS), constant(_MAGNITUDES)
    low = (word * constant(2) & magnitudes) | (word * constant(16) & signs)
    high = (ops.shift_right(word, 3) & magnitudes) | (word & signs)
    return low, high
