"""Epilogue of experts' FC1 on sm_90a: SwiGLU of gate and up, requantised to NVFP4 for FC2.

A tile's columns are gate next to up. Gate and up are scaled and rounded to BF16, as separate
kernels store them; SwiGLU and, if it precedes w2, the routing weight are computed in float32 and
rounded once to BF16. Per warpgroup and piece of 64 rows x 64 columns: registers to one of two
swizzled buffers in shared memory; one named barrier; each thread reads whole blocks of 16,
quantises them as all quantising kernels do, and writes codes and scales to memory. Rows of zeros
stay zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import SWIZZLE_128X4, round_up
from degarble.kernels.gemm import epilogue, wgmma
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.primitives import nvfp4_words as words

WORDS_OF_CHUNK = 4
LANE_COLUMNS = 8  # of a wgmma accumulator that a row's four lanes share, two each
BLOCKS = facts.PIECE_COLUMNS // stages.BLOCK  # of a row of a piece
TURNS = facts.PIECE_ROWS * BLOCKS // facts.WARPGROUP  # blocks of a piece that a thread quantises
NUMBERS = facts.PIECE_ROWS * facts.PIECE_COLUMNS // facts.WARPGROUP  # of a piece in a thread


class Leaving(NamedTuple):
    """Outputs of FC1 in memory, and what its epilogue reads in addition to the sums."""

    codes: Any  # (words of a block, blocks)
    scales: Any
    hidden_scale: Any  # of each expert: decode scale of what is written
    slots: Any  # of each row
    weights: Any  # of each slot
    shown: Any = None  # words of two numbers, gate then up, row by row


class Outlet(NamedTuple):
    """The buffers and the barrier through which a warpgroup writes its pieces."""

    leaving: Leaving
    copy: Any  # tiled copy from registers to shared memory
    staged: Any  # (values of this thread, buffers)
    chunks: Any  # (words of 16 bytes, places, buffers)
    first: Any  # of the warpgroup's buffers
    barrier: Any


def shared_pieces(memory: Any, form: Any) -> tuple[Any, Any]:
    """Allocate all warpgroups' pieces; return them as wgmma's copy writes them, and as words."""
    buffers = facts.PIECES_AT_ONCE * facts.consumers(form)
    layout, held = epilogue.piece_layout(buffers), facts.PIECE_BYTES // 4
    pointer = memory.allocate_array(Uint32, buffers * held, byte_alignment=facts.ALIGNMENT)
    swizzled = cute.recast_ptr(pointer, layout.inner, dtype=BFloat16)
    shape = (WORDS_OF_CHUNK, held // WORDS_OF_CHUNK, buffers)
    plain = cute.make_layout(shape, stride=(1, WORDS_OF_CHUNK, held))
    return cute.make_tensor(swizzled, layout.outer), cute.make_tensor(pointer, plain)


def outlet_of_warpgroup(leaving: Leaving, shared: tuple[Any, Any], mma: Any, mine: Any) -> Outlet:
    """Return a warpgroup's outlet: its own buffers, its own named barrier."""
    thread, _, _ = cute.arch.thread_idx()
    pieces, chunks = shared
    shape = (facts.PIECE_ROWS, facts.PIECE_COLUMNS, facts.PIECES_AT_ONCE)
    copy = epilogue.wgmma_copy(mma)
    own = cute.local_tile(pieces, shape, (0, 0, mine))
    return Outlet(
        leaving=leaving,
        copy=copy,
        staged=copy.get_slice(thread % facts.WARPGROUP).partition_D(own),
        chunks=chunks,
        first=mine * facts.PIECES_AT_ONCE,
        barrier=wgmma.FIRST_BARRIER + mine,
    )


def weights_of_rows(leaving: Leaving, row: Any) -> list[Any]:
    """Return the routing weights of a thread's two rows; 0 for rows of zeros."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % facts.WARPGROUP
    first = row + thread // facts.WARP * 16 + thread % facts.WARP // 4
    found = []
    for each in (first, first + 8):
        slot = leaving.slots[each]
        weight = Float32(leaving.weights[cutlass.max(slot, 0)])
        found.append(ops.select(slot >= 0, weight, 0.0))
    return found


def gated(pair: tuple[list[Any], list[Any]], scales: Any, weight: Any, limit: float | None) -> Any:
    """Return the word of two outputs from two sums of gate and two of up."""
    gate, up = (
        words.rounded_words([epilogue.scaled(number, of_part) for number in part])
        for part, of_part in zip(pair, scales, strict=True)
    )
    made = words.swiglu_numbers(gate, up, limit)
    if weight is not None:
        made = [ops.multiply_rn(number, weight) for number in made]
    return words.rounded_words(made)[0]


@cute.jit
def requantise_tile(
    outlet: Outlet, sums: Any, place: Any, stored: Any, scales: Any, form: cutlass.Constexpr
) -> Any:
    """Write a warpgroup's 64 rows of SwiGLU as NVFP4.

    `place` is the first row, the tile along columns, the expert and the blocks of a row; `scales`
    are the factors of gate and of up.
    """
    row, column, expert, blocks = place
    pieces = form.gemm.tactic.columns // form.gemm.parts // facts.PIECE_COLUMNS
    scaling = words.scaling_of(Float32(outlet.leaving.hidden_scale[expert]), None)
    weights = [None, None]
    if cutlass.const_expr(form.weighted):
        weights = weights_of_rows(outlet.leaving, row)
    for piece in cutlass.range_constexpr(pieces):
        staged = cute.make_rmem_tensor(outlet.staged[None, None, None, 0].shape, BFloat16)
        pairs = cute.recast_tensor(staged, Uint32)
        for i in cutlass.range_constexpr(NUMBERS // 2):
            at = piece * NUMBERS + 2 * i
            up = pieces * NUMBERS + at
            both = ([sums[at], sums[at + 1]], [sums[up], sums[up + 1]])
            # Pairs of a wgmma accumulator take turns between row g and row g + 8.
            pairs[i] = gated(both, scales, weights[i % 2], form.limit)
        buffer = (stored + piece) % facts.PIECES_AT_ONCE
        cute.copy(outlet.copy, staged, outlet.staged[None, None, None, buffer])
        # Two buffers, so one barrier per piece: a thread at the next one has read this buffer.
        cute.arch.barrier(barrier_id=outlet.barrier, number_of_threads=facts.WARPGROUP)
        block = (column * pieces + piece) * BLOCKS
        quantise_piece(outlet, buffer, (row, block, blocks), scaling, form)
    return stored + pieces


@cute.jit
def show_tile(
    leaving: Leaving, sums: Any, place: Any, scales: Any, form: cutlass.Constexpr
) -> None:
    """Store gate and up of a warpgroup's 64 rows as SwiGLU reads them: BF16 [R, 2 F], gate first.

    `place` is that of `requantise_tile`.
    """
    row, column, _, blocks = place
    parts, width = form.gemm.parts, Int64(blocks) * stages.BLOCK
    part = form.gemm.tactic.columns // parts
    thread, _, _ = cute.arch.thread_idx()
    within = thread % facts.WARPGROUP
    first = row + within // facts.WARP * 16 + within % facts.WARP // 4
    for group in cutlass.range_constexpr(form.gemm.tactic.columns // LANE_COLUMNS):
        matrix = group * LANE_COLUMNS // part
        at = column * part + group * LANE_COLUMNS % part + within % 4 * 2
        if at < width:
            for half in cutlass.range_constexpr(2):
                pair = [sums[4 * group + 2 * half + i] for i in range(2)]
                made = words.rounded_words([epilogue.scaled(n, scales[matrix]) for n in pair])
                start = Int64(first + 8 * half) * parts + matrix
                leaving.shown[(start * width + at) // 2] = made[0]


def block_at(outlet: Outlet, row: Any, block: Any, buffer: Any) -> list[Any]:
    """Return the words of a block of a piece: two places of 16 bytes."""
    places = [stages.chunk_of_numbers(row, block * 2 + half) for half in range(2)]
    halves = [
        stages.words_at(outlet.chunks, at, outlet.first + buffer, WORDS_OF_CHUNK) for at in places
    ]
    return [word for half in halves for word in half]


@cute.jit
def quantise_piece(
    outlet: Outlet, buffer: Any, place: Any, scaling: Any, form: cutlass.Constexpr
) -> None:
    """Quantise a piece from shared memory, block by block."""
    first_row, first_block, blocks = place
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % facts.WARPGROUP
    for i in cutlass.range_constexpr(TURNS):
        row = thread // BLOCKS + i * (facts.WARPGROUP // BLOCKS)
        block = first_block + thread % BLOCKS
        read = block_at(outlet, row, thread % BLOCKS, buffer)
        code = words.scale_code_of(words.block_amax(read), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        at_row = first_row + row
        if block < blocks:
            made = words.code_words(read, factor, form.gemm.target)
            index = Int64(at_row) * Int64(blocks) + Int64(block)
            words.store(outlet.leaving.codes, index, made)
        if block < round_up(blocks, SWIZZLE_128X4.column_tile):
            offset = SWIZZLE_128X4.offset_of(Uint32(at_row), Uint32(block), None, Uint32(blocks))
            outlet.leaving.scales[offset] = Uint8(code)
