"""Decode NVFP4 operands in shared memory to FP16 for wgmma, which has no E2M1 input (sm_90a).

A stage is 64 numbers of K: a row is 32 bytes of codes and one word of four E4M3 block scales out of
a 128x4 tile. Products of code and scale are exact in FP16 (six significant bits). They come out
times 2**DECODED_EXPONENT, because a code is decoded as an FP16 number of the lowest exponents; the
epilogue multiplies the float32 sums by RESTORE, which is exact. Where the other operand is BF16 as
it came, weights are decoded to BF16, which takes more instructions.

Within a stage K is permuted, alike in both operands: in each step of 16 the thread of column pair
q holds four codes of block q, so that it needs one scale per row. `order_of_k` states the
permutation. Scales beyond K are padding of any value; `kept` masks them.
"""

from __future__ import annotations

from typing import Any

from cutlass import Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.primitives.e2m1 import (
    HALF_SCALE_EXPONENT,
    HALF_VALUE_EXPONENT,
    PAIRS,
    SCALE_EXPONENT,
    VALUE_EXPONENT,
    bf16_pairs,
    fp16_pairs,
)

BLOCK = 16
STAGE_K = 64  # numbers of K in a stage
BLOCKS = STAGE_K // BLOCK
WORDS = 2  # of eight codes in a block
DECODED_EXPONENT = HALF_VALUE_EXPONENT + HALF_SCALE_EXPONENT  # of a number in FP16
RESTORE = 2.0 ** (-2 * DECODED_EXPONENT)  # what the sum of products of two is multiplied by
SCALE_BITS = 0x7F7F_7F7F  # of four scales, without signs
PRODUCT_EXPONENT = VALUE_EXPONENT + SCALE_EXPONENT  # of a number in BF16

_E4M3_AS_BF16 = -120  # a code in bits 10 to 4 of a BF16 number is its value times 2**-120
_HALF_SHIFT = (SCALE_EXPONENT - _E4M3_AS_BF16) // 2
_FACTOR = ((127 + _HALF_SHIFT) << 7) * 0x1_0001  # two BF16 powers of two; used twice
_NAN_STEP = 0x0010_0010  # only code 0x7F carries beyond its bits
_NAN_CARRY = 0x0800_0800


def order_of_k() -> list[int]:
    """Return the number of K that lies at each place of a stage, in the order that wgmma takes."""
    order = []
    for step in range(BLOCKS):
        for half in range(2):
            word, place = divmod(2 * step + half, PAIRS)
            for block in range(BLOCKS):
                first = block * BLOCK + word * 2 * PAIRS + place
                order += [first, first + PAIRS]
    return order


def kept(blocks: Any, step: Any) -> Any:
    """Return the mask of a row's four scales that lie within K; `blocks` of K is an even number.

    A stage holds four blocks or, at the end of K, two.
    """
    return ops.select(step * BLOCKS + 2 < blocks, Uint32(0xFFFF_FFFF), Uint32(0xFFFF))


def half_pairs(word: Any) -> list[Any]:
    """Return a word's codes j and j + 4 as FP16 numbers times 2**-14."""
    return fp16_pairs(word, ptx.permuted_bytes, Uint32)


def times_half(pair: Any, scale: Any) -> Any:
    """Multiply two pairs of FP16 numbers, subnormals included (PTX ISA 9.1, mul.f16x2)."""
    return ptx.emit("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", [Uint32], pair, scale)


def scales_of_blocks(word: Any) -> list[Any]:
    """Return the scales of a word's four blocks, times 2**7, each as a pair of equal halves."""
    codes = word & Uint32(SCALE_BITS)
    both = [ptx.half_scales(ops.shift_right(codes, 16 * half)) for half in range(2)]
    return [ptx.twice(pair, which) for pair in both for which in range(2)]


def bytes_of_rows(block: Any) -> Any:
    """Return how byte q of one word is chosen, and then byte q of another one."""
    return Uint32(block) * 0x11 + Uint32(4 << 4)


def kept_of_rows(mask: Any, block: Any) -> Any:
    """Return which bits of block q's scales count, of two rows side by side."""
    return ptx.chosen_bytes(mask, mask, bytes_of_rows(block)) & Uint32(SCALE_BITS)


def scales_of_rows(bits: list[Any], block: Any, kept_bits: Any) -> Any:
    """Return the scales of block q in rows g and g + 8, times 2**7, as one pair."""
    row, below = bits
    return ptx.half_scales(ptx.chosen_bytes(row, below, bytes_of_rows(block)) & kept_bits)


def decoded_halves(words: list[Any], scale: Any) -> list[Any]:
    """Return the pairs of some words of a block, times a scale that fills both halves."""
    return [pair for word in words for pair in ptx.decoded_halves(word, scale)]


# ---- the same in BF16 ----------------------------------------------------------------------------


def times(left: Any, right: Any) -> Any:
    """Multiply two pairs of BF16 numbers, subnormals included (PTX ISA 9.1, mul.bf16x2)."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[left, right],
    )


def scale_pairs(placed: Any) -> Any:
    """Return two E4M3 scales as BF16 times 2**SCALE_EXPONENT; NaN stays NaN.

    The codes are in bits 10 to 4 of each half, without sign; all other bits have to be zero.
    """
    numbers = cute.arch.inline_ptx(
        f"{{ .reg .b32 at; mov.b32 at, {_FACTOR}; mul.rn.bf16x2 {{$w0}}, {{$r0}}, at; "
        "mul.rn.bf16x2 {$w0}, {$w0}, at; }",
        write_only_types=[Uint32],
        read_only_args=[placed],
    )
    carry = (placed + Uint32(_NAN_STEP)) & Uint32(_NAN_CARRY)
    return numbers | (ops.shift_right(carry, 4) * 255)  # all bits of the exponent


def doubled(pair: Any, upper: bool) -> Any:
    """Return a pair whose halves both hold one half of the given pair."""
    return cute.arch.prmt(pair, pair, Uint32(0x3232 if upper else 0x1010))


def decoded(words: list[Any], scale: Any) -> list[Any]:
    """Return the eight pairs of a block's two words, times a scale that fills both halves."""
    return [times(pair, scale) for word in words for pair in bf16_pairs(word, Uint32)]


# ---- where codes lie -----------------------------------------------------------------------------


def chunk_of_codes(row: Any, chunk: Any) -> Any:
    """Return the index of 16-byte chunk 0 or 1 of a row in a stage, under TMA's 32-byte swizzle."""
    return row * 2 + ((row // 4) % 2 ^ chunk)


def chunk_of_numbers(row: Any, chunk: Any) -> Any:
    """Return the index of 16-byte chunk 0 to 7 of a row in a stage, under the 128-byte swizzle."""
    return row * 8 + (row % 8 ^ chunk)


def word_of_scales(row: Any) -> Any:
    """Return the word that holds a row's four scales: tiles of 128 rows, 128x4 inside."""
    return row // 128 * 128 + row % 32 * 4 + row % 128 // 32


def words_at(tensor: Any, index: Any, stage: Any, count: int) -> list[Any]:
    """Read `count` adjacent words."""
    registers = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(tensor[None, index, stage], registers)
    return [Uint32(registers[i]) for i in range(count)]


# ---- a row of B, eight numbers of A ------------------------------------------------------------


def decode_row(shared: Any, row: tuple[Any, Any], at: tuple[Any, Any, Any]) -> None:
    """Decode a row of a stage of B from shared memory to shared memory, in wgmma's layout.

    `row` is the row of the tile and the tile's first row among its rows of scales; `at` is the
    stage of codes, the stage of numbers and the mask of scales.
    """
    row, first = row
    source, target, mask = at
    word = words_at(shared.b_scales, word_of_scales(row + first), source, 1)[0] & mask
    of_block = scales_of_blocks(word)
    chunks = (words_at(shared.b, chunk_of_codes(row, chunk), source, 4) for chunk in range(2))
    read = [word for chunk in chunks for word in chunk]
    for i in range(WORDS):
        pairs = [half_pairs(read[WORDS * block + i]) for block in range(BLOCKS)]
        for place in range(PAIRS):
            made = cute.make_rmem_tensor(BLOCKS, Uint32)
            for block in range(BLOCKS):
                made[block] = times_half(pairs[block][place], of_block[block])
            chunk = chunk_of_numbers(row, i * PAIRS + place)
            cute.autovec_copy(made, shared.numbers[None, chunk, target])


def decode_fragment(
    shared: Any, fragment: Any, place: tuple[Any, Any, Any], at: tuple[Any, Any]
) -> None:
    """Decode a thread's part of A, block q of rows g and g + 8, into wgmma's registers.

    `place` is the row g, the tile's first row among its rows of scales, and the block q; `at` is
    the stage and the mask of scales; `fragment` holds words, four for each step of K.
    """
    row, first, block = place
    source, mask = at
    rows = (row, row + 8)
    bits = [words_at(shared.a_scales, word_of_scales(r + first), source, 1)[0] for r in rows]
    both = scales_of_rows(bits, block, kept_of_rows(mask, block))
    for i in range(2):
        half = chunk_of_codes(rows[i], block // 2) * 2 + block % 2
        pairs = decoded_halves(words_at(shared.a, half, source, WORDS), ptx.twice(both, i))
        for step in range(BLOCKS):
            fragment[4 * step + i] = pairs[2 * step]
            fragment[4 * step + 2 + i] = pairs[2 * step + 1]
