"""Stages of several 64 numbers of K, and few rows: what threads do with codes and scales of them.

Owns where codes and scales lie in a stage of 128 or 256 (a row is 64 or 128 bytes of codes, 16 of
them each in another order by TMA's swizzle, and a word of scales in each 128x4 tile), and how they
are decoded: a span is 64 numbers, in the order of nvfp4_stages, so a product's sums are those of
other stages.
Reading and decoding are two steps, because registers that a wgmma reads may be written only after
it was waited for, and shared memory need not wait for that.

Refuses nothing: a kernel cannot. Kept honest by suites/kernels/gemm/test_nvfp4_spans.py (places,
against the layouts that TMA and wgmma use) and suites/kernels/moe/test_sm90_moe_nvfp4.py.
"""

from __future__ import annotations

from typing import Any

from cutlass import Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm.nvfp4_stages import BLOCKS, WORDS
from degarble.kernels.primitives.e2m1_pairs import PAIRS, bf16_pairs

CHUNKS = 2  # of 16 bytes of codes in a span
FRAGMENT_WORDS = 16  # of a thread's part of a span of 64 rows
SWIZZLED_ROWS = 8


def chunk_of_codes(row: Any, chunk: Any, spans: int) -> Any:
    """Return the number of a row's 16 bytes `chunk`: the swizzle of 32, 64 or 128 bytes."""
    of_row = CHUNKS * spans
    return row * of_row + (row // (SWIZZLED_ROWS // of_row) % of_row ^ chunk)


def chunk_of_numbers(row: Any, chunk: Any, span: int, rows: int) -> Any:
    """Return where 16 bytes of decoded numbers lie: span by span, rows of 128 bytes, swizzled."""
    return span * rows * SWIZZLED_ROWS + stages.chunk_of_numbers(row, chunk)


def word_of_scales(row: Any, span: int, spans: int) -> Any:
    """Return where a row's four scales of a span lie, in words: tiles along K, then along rows."""
    within = row % 32 * 4 + row % 128 // 32
    return (row // 128 * spans + span) * 128 + within


# ---- weights: registers of wgmma ---------------------------------------------------------------


def read_rows(
    shared: Any, place: tuple[Any, Any], stage: Any, spans: int, some: range
) -> list[Any]:
    """Read what a thread brings of block q of rows g and g + 8: codes and scales of some spans.

    `place` is the row g and the block q; `spans` are those of a stage.
    """
    row, block = place
    # Row g + 8 and other spans lie as far away in every stage: one address serves many reads.
    of_scales, made = word_of_scales(row, 0, spans), []
    for span in some:
        chunk = chunk_of_codes(row, CHUNKS * span + block // CHUNKS, spans)
        at, below = chunk * 2 + block % 2, CHUNKS * spans * 2 * SWIZZLED_ROWS
        codes = [stages.words_at(shared.a, at + i * below, stage, WORDS) for i in range(2)]
        at = of_scales + span * 128
        bits = [stages.words_at(shared.a_scales, at + 32 * i, stage, 1)[0] for i in range(2)]
        made.append((codes, bits))
    return made


def decode_rows(
    read: tuple[list[Any], list[Any]], fragment: Any, block: Any, mask: Any, place: int
) -> None:
    """Decode a span that was read into wgmma's registers, as nvfp4_stages.decode_fragment does.

    `place` is that of the span among those that registers hold.
    """
    codes, bits = read
    both = scales_of_rows(bits, block, mask)
    for i in range(2):
        pairs = stages.decoded(codes[i], stages.doubled(both, upper=i == 1))
        for step in range(BLOCKS):
            at = FRAGMENT_WORDS * place + 4 * step + i
            fragment[at] = pairs[2 * step]
            fragment[at + 2] = pairs[2 * step + 1]


def scales_of_rows(bits: list[Any], block: Any, mask: Any) -> Any:
    """Return the scales of block q of rows g and g + 8, side by side."""
    kept = (each & mask for each in bits)
    upper, lower = (ops.shift_right(each, Uint32(block) * 8) & 0x7F for each in kept)
    return stages.scale_pairs(ops.shift_left(upper, 4) + ops.shift_left(lower, 20))


# ---- tokens: shared memory ---------------------------------------------------------------------


def decode_span(
    shared: Any, place: tuple[Any, Any, Any], at: tuple[Any, Any, Any], extents: Any
) -> None:
    """Decode a span of a row. `extents` are the rows of a tile and the spans of a stage.

    `place`: the row, where the tile begins among its rows of scales, the span. `at`: both stages,
    and the mask of scales.
    """
    row, first, span = place
    (source, target, mask), (rows, spans) = at, extents
    bits = stages.words_at(shared.b_scales, word_of_scales(row + first, span, spans), source, 1)[0]
    of_block = stages.scales_of_blocks(bits & mask)
    read = []
    for chunk in range(CHUNKS):
        index = chunk_of_codes(row, CHUNKS * span + chunk, spans)
        read += stages.words_at(shared.b, index, source, 4)
    for word in range(WORDS):
        pairs = [bf16_pairs(read[WORDS * block + word], Uint32) for block in range(BLOCKS)]
        for pair in range(PAIRS):
            made = cute.make_rmem_tensor(BLOCKS, Uint32)
            for block in range(BLOCKS):
                made[block] = stages.times(pairs[block][pair], of_block[block])
            chunk = chunk_of_numbers(row, word * PAIRS + pair, span, rows)
            cute.autovec_copy(made, shared.numbers[None, chunk, target])
