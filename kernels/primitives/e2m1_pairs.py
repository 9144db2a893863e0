"""Decode a word of eight E2M1 codes to four words of two BF16 numbers, one integer product a pair.

For kernels without a conversion. A code's sign belongs in bit 15 of a BF16 number, its two exponent
bits and its mantissa bit in bits 8 to 6: the number is then the value times 2**-126, subnormal 0.5
included. Both moves are one multiplication by two powers of two; codes j and j + 4 share it,
because they lie 16 bits apart. A product of BF16 numbers with the block scale times 2**118 gives
value times scale times 2**-8, exactly: six bits at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from degarble.harness.formats import scalar_ops as ops

if TYPE_CHECKING:
    from collections.abc import Callable

VALUE_EXPONENT: Final = -126  # of what a decoded pair holds: BF16's smallest normal number
SCALE_EXPONENT: Final = 118  # so that the product of 448 and this stays below 2**127
PAIRS = 4  # of a word, the first of codes 0 and 4

_PAIR: Final = 0x000F_000F
_KEPT: Final = 0x81C0_81C0  # sign, two exponent bits, one mantissa bit
_MOVES: Final = ((1 << 12) + (1 << 6), (1 << 8) + (1 << 2))  # from bits 0 and 4


def bf16_pairs(word: Any, constant: Callable[[int], Any] = int) -> list[Any]:
    """Return four words; word j has codes j (low) and j + 4, times 2**-126, as BF16.

    `constant` keeps an integer at 32 bits when it is combined with the word.
    """
    upper = ops.shift_right(word, 8)  # codes 2 and 3 in the places of 0 and 1
    return [
        ((source & constant(_PAIR << 4 * place)) * constant(move)) & constant(_KEPT)
        for source in (word, upper)
        for place, move in enumerate(_MOVES)
    ]
