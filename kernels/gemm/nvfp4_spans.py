"""Decode stages of 128 or 256 NVFP4 numbers along K, span by span, for tiles of few rows (sm_90a).

A span is 64 numbers of K, in the order of nvfp4_stages, so sums do not depend on the stage length.
Layout of a stage: a row is 64 or 128 bytes of codes whose 16-byte chunks TMA's swizzle permutes,
and one word of scales (four blocks) in each 128x4 tile.

Reading and decoding are two steps: registers that a wgmma reads may be overwritten only after it
was waited for, while reads of shared memory need not wait for that.
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
    """Return the index of a row's 16-byte chunk `chunk`, under the 32-, 64- or 128-byte swizzle."""
    of_row = CHUNKS * spans
    return row * of_row + (row // (SWIZZLED_ROWS // of_row) % of_row ^ chunk)


def chunk_of_numbers(row: Any, chunk: Any, span: int, rows: int) -> Any:
    """Return the index of a decoded 16-byte chunk: span by span, rows of 128 swizzled bytes."""
    return span * rows * SWIZZLED_ROWS + stages.chunk_of_numbers(row, chunk)


def word_of_scales(row: Any, span: int, spans: int) -> Any:
    """Return the word that holds a row's four scales of a span: tiles along K, then rows."""
    within = row % 32 * 4 + row % 128 // 32
    return (row // 128 * spans + span) * 128 + within


# ---- weights: registers of wgmma ---------------------------------------------------------------


def read_rows(
    shared: Any, place: tuple[Any, Any], stage: Any, spans: int, some: range
) -> list[Any]:
    """Read a thread's codes and scales of block q in rows g and g + 8, for some spans of a stage.

    `place` is the row g and the block q; `spans` is the number of spans in a stage.
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

    `place` is the index of the span among those that the registers hold.
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
    """Return the decoded scales of block q in rows g and g + 8 as one pair."""
    kept = (each & mask for each in bits)
    upper, lower = (ops.shift_right(each, Uint32(block) * 8) & 0x7F for each in kept)
    return stages.scale_pairs(ops.shift_left(upper, 4) + ops.shift_left(lower, 20))


# ---- tokens: shared memory ---------------------------------------------------------------------


def decode_span(
    shared: Any, place: tuple[Any, Any, Any], at: tuple[Any, Any, Any], extents: Any
) -> None:
    """Decode one span of a row from shared memory to shared memory.

    `place`: the row, the tile's first row among its rows of scales, the span. `at`: stage of codes,
    stage of numbers, mask of scales. `extents`: rows of a tile, spans of a stage.
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
