"""Epilogue of the expert products on sm_100a: FC1 tiles leave as NVFP4, FC2 tiles as BF16.

Each of the four storing warps works on its 32 rows independently; unused rows are neither read nor
stored. FC1, one row a thread: read gate and up by tcgen05.ld, scale, round to BF16 as separate
kernels store them, release the sums (all 128 threads arrive), then in registers SwiGLU, the routing
weight if it precedes w2, one rounding to BF16, blocks of 16 quantised as all quantising kernels
do; codes and scales go straight to memory. FC2: pieces of 32 rows by TMA.

Compiled but never run: there was no sm_100a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import epilogue, schedule, wgmma
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.tcgen05 import instructions as tcgen05
from degarble.kernels.gemm.tcgen05 import tensor_memory
from degarble.kernels.moe import tensor_memory as moe_facts
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.primitives import nvfp4_words as words


class Leaving(NamedTuple):
    """Outputs of FC1 in memory, and what its epilogue reads in addition to the sums."""

    codes: Any  # (words of two blocks, pairs of blocks)
    scales: Any  # words of four
    hidden_scale: Any  # of each expert: decode scale of what is written
    slots: Any  # of each row
    weights: Any  # of each slot


class Groups(NamedTuple):
    """Tensors that the walk and the epilogue read in addition to the operands."""

    scale_a: Any  # of each expert
    scale_b: Any  # of each expert, part by part
    rows: Any  # of all groups
    experts: Any  # of each tile of rows
    slots: Any  # of each row


def scales_of(groups: Groups, expert: Any, parts: int) -> tuple[Any, ...]:
    """Return the factor of each part of a tile."""
    of_a = Float32(groups.scale_a[expert])
    of_b = (Float32(groups.scale_b[expert * parts + part]) for part in range(parts))
    return tuple(ops.multiply_rn(of_a, each) for each in of_b)


def weight_of_row(leaving: Leaving, row: Any) -> Any:
    """Return the routing weight of a row; 0 for a row of zeros."""
    slot = Int32(leaving.slots[row])
    weight = Float32(leaving.weights[cutlass.max(slot, 0)])
    return ops.select(slot >= 0, weight, 0.0)


# ---- tiles ---------------------------------------------------------------------------------------


@cute.jit
def leave_tiles(outlets: Any, walk: Any, groups: Groups, blocks: Any, form: Any) -> None:
    """Write tile after tile; `outlets` are destination, piece buffers, sums and their ring."""
    leaving, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // facts.WARP)
    reading = tcgen05.reading_of(sums, thread)
    state, stored = wgmma.consumer_state(tensor_memory.accumulators(form.gemm)), Int32(0)
    outlet = leaving
    if cutlass.const_expr(form.gemm.parts == 1):
        outlet = outlet_of_warp(leaving, pieces, thread % facts.WARP, warp)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = schedule.tile_at(walk, number)
        scales = scales_of(groups, expert, form.gemm.parts)
        first = row * tensor_memory.LANES + warp * moe_facts.WARP_ROWS
        if cute.arch.make_warp_uniform(groups.slots[first]) >= 0:
            if cutlass.const_expr(form.gemm.parts == GATE_AND_UP):
                at = (row * tensor_memory.LANES + thread, column, expert, blocks)
                state = requantise_tile(outlet, reading, (ring, state), (at, scales), form)
            else:
                pieces_of_row = form.gemm.tactic.columns // facts.PIECE_COLUMNS
                place = (first // moe_facts.WARP_ROWS, column * pieces_of_row)
                work = (place, stored, scales)
                state, stored = tcgen05.store_tile(outlet, reading, ring, state, work)
        else:
            state = pass_over(ring, state)
    if cutlass.const_expr(form.gemm.parts == 1):
        epilogue.drain(outlet)


@cute.jit
def pass_over(ring: Any, state: Any) -> Any:
    """Release the sums of a tile in which this warp has no rows."""
    ring.consumer_wait(state)
    tcgen05.fence("before")
    ring.consumer_release(state)
    state.advance()
    return state


def outlet_of_warp(store: Any, shared: Any, lane: Any, warp: Any) -> epilogue.Outlet:
    """Return a warp's outlet for pieces of 32 rows: its own buffers and named barrier."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=tcgen05.STORE_BITS
    )
    copy = cute.make_tiled_copy_tv(
        atom,
        cute.make_layout((moe_facts.WARP_ROWS, 1)),
        cute.make_layout((1, tcgen05.STORE_BITS // BFloat16.width)),
    )
    shape = (moe_facts.WARP_ROWS, facts.PIECE_COLUMNS, facts.PIECES_AT_ONCE)
    own = cute.local_tile(shared, shape, (0, 0, warp))
    return epilogue.outlet_of(store, own, copy, lane, moe_facts.FIRST_BARRIER + warp)


# ---- FC1 -----------------------------------------------------------------------------------------


@cute.jit
def requantise_tile(leaving: Leaving, reading: Any, sums: Any, work: Any, form: Any) -> Any:
    """Write a thread's row of SwiGLU as NVFP4.

    `work` is (row, tile along columns, expert, blocks of a row) and the factors of gate and of up.
    """
    ring, state = sums
    place, scales = work
    kept = cute.make_rmem_tensor(moe_facts.words_of_row(form), Uint32)
    ring.consumer_wait(state)
    tcgen05.fence("after")
    take_row(reading, state.index, scales, kept, form)
    tcgen05.fence("before")
    ring.consumer_release(state)
    state.advance()
    requantise_row(leaving, kept, place, form)
    return state


@cute.jit
def requantise_row(leaving: Leaving, kept: Any, at: Any, form: Any) -> None:
    """Requantise a row of gate next to up in BF16; `at` is as in `requantise_tile`."""
    row, column, expert, blocks = at
    scaling = words.scaling_of(Float32(leaving.hidden_scale[expert]), None)
    weight = None
    if cutlass.const_expr(form.weighted):
        weight = weight_of_row(leaving, row)
    of_tile = moe_facts.blocks_of_tile(form)
    for block in cutlass.range_constexpr(0, of_tile, moe_facts.BLOCKS_OF_PIECE):
        halves = halves_of(kept, block, form)
        place = (row, column * of_tile + block, blocks)
        quantise_blocks(leaving, halves, place, (weight, scaling), form)


def take_row(reading: Any, stage: Any, scales: Any, kept: Any, form: Any) -> None:
    """Read a thread's row of a tile, and keep it scaled and rounded to BF16."""
    for i in range(form.gemm.tactic.columns // facts.PIECE_COLUMNS):
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, reading.source[None, None, None, 0, i, stage], registers)
        cute.arch.fence_view_async_tmem_load()
        keep_piece(registers, i, scales, kept, form)


def keep_piece(registers: Any, piece: int, scales: Any, kept: Any, form: Any) -> None:
    """Keep 64 sums of a row, scaled and rounded to BF16, two a word."""
    pieces = form.gemm.tactic.columns // facts.PIECE_COLUMNS
    scale = (scales[piece * form.gemm.parts // pieces],)
    numbers = [epilogue.scaled(registers[j], scale) for j in range(facts.PIECE_COLUMNS)]
    for j, word in enumerate(words.rounded_words(numbers)):
        kept[piece * facts.PIECE_COLUMNS // 2 + j] = word


def halves_of(kept: Any, first: int, form: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return words of gate and of up, block by block of a piece."""
    up = moe_facts.columns_of_part(form) // 2
    count = moe_facts.WORDS_OF_BLOCK
    return [
        (
            [Uint32(kept[block * count + i]) for i in range(count)],
            [Uint32(kept[up + block * count + i]) for i in range(count)],
        )
        for block in range(first, first + moe_facts.BLOCKS_OF_PIECE)
    ]


def gated(pair: tuple[list[Any], list[Any]], weight: Any, limit: float | None) -> list[Any]:
    """Return the words of a block of outputs from those of gate and of up."""
    made = words.swiglu_numbers(*pair, limit)
    if weight is not None:
        made = [ops.multiply_rn(number, weight) for number in made]
    return words.rounded_words(made)


@cute.jit
def quantise_blocks(leaving: Leaving, halves: Any, place: Any, given: Any, form: Any) -> None:
    """Write four blocks of a row: their codes, and the word of their scales."""
    row, first, blocks = place
    weight, scaling = given
    made, word = [], Uint32(0)
    for i in cutlass.range_constexpr(moe_facts.BLOCKS_OF_PIECE):
        block = gated(halves[i], weight, form.limit)
        code = words.scale_code_of(words.block_amax(block), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        made.append(words.code_words(block, factor, form.gemm.target))
        # Columns beyond the width come from padding of w13's scales: anything.
        code = ops.select(first + i < blocks, code, 0)
        word = word | ops.shift_left(code, 8 * i)
    for i in cutlass.range_constexpr(0, moe_facts.BLOCKS_OF_PIECE, moe_facts.BLOCKS_OF_STORE):
        if first + i < blocks:
            at = moe_facts.codes_at(Int64(row), first + i, Int64(blocks))
            words.store(leaving.codes, at, made[i] + made[i + 1])
    if first < blocks:
        leaving.scales[moe_facts.scales_at(Uint32(row), Uint32(first), Uint32(blocks))] = word
