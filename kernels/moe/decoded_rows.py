"""Rows of experts as FP16 numbers in the order of K.

How wide a tile is, how a row is decoded, what products of few rows and of many share, and the
gather that writes rows. Numbers are what a row's NVFP4 codes and scales stand for, times a power of
two, as the products of sm90_moe_decoded read them.
In the gather a warp has 32 blocks of a row; each lane quantises and decodes one; pairs of four
blocks make 16 bytes in shared memory, and leave in lines.

Letters: T tokens, K chosen, R rows at most, D hidden
"""

import math
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives.e2m1 import PAIRS
from degarble.kernels.runtime.pdl import follow

LANES = rows.LANES
CHUNKS, CHUNK_WORDS = 8, 4  # of 16 bytes, in 64 numbers; words of one
STAGED_GROUP = CHUNKS * CHUNK_WORDS + CHUNK_WORDS  # words: padding, so that no bank is met twice
GROUPS = LANES // stages.BLOCKS  # of four blocks, of a warp
STAGED = GROUPS * STAGED_GROUP


def decoded_chunks(codes: list[list[Any]], scales: Any) -> list[list[Any]]:
    """Return eight chunks of 16 bytes from the codes of four blocks and a word of their scales.

    They are what nvfp4_stages.decode_row writes of a row of a stage, in its order.
    """
    of_block = stages.scales_of_blocks(scales)
    made = []
    for word in range(stages.WORDS):
        pairs = [stages.half_pairs(block[word]) for block in codes]
        made += [
            [stages.times_half(pairs[b][place], of_block[b]) for b in range(stages.BLOCKS)]
            for place in range(PAIRS)
        ]
    return made


# ---- what products of few rows and of many share -------------------------------------------------


class Groups(NamedTuple):
    """Tensors that the walk and the epilogue read in addition to the operands."""

    scale_a: Any  # of each expert
    scale_b: Any  # of each expert, part by part
    rows: Any  # of all groups
    experts: Any  # of each tile of rows
    slots: Any  # of each row


def swizzled(pointer: Any, layout: Any, element: Any) -> Any:
    """View words as elements under a swizzled layout."""
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=element), layout.outer)


def ring_of(memory: Any, form: gemm.GemmForm) -> Any:
    """Make the ring of stages; who loads says for every tile how many bytes a stage has."""
    group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
    count = facts.decoded_stages(form)
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * count),
        num_stages=count,
        producer_group=group(agent),
        consumer_group=group(agent, facts.decoded_groups(form) * gemm.WARPGROUP // gemm.WARP),
        tx_count=0,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


def transposed(address: Any, matrices: list[Any]) -> None:
    """Write 8 x 8 matrices of 16 bits, transposed; a lane has the address of one of their rows."""
    count = len(matrices)
    names = ", ".join(f"{{$r{1 + i}}}" for i in range(count))
    text = f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [{{$r0}}], {{{names}}};"
    ptx.emit(text, [], address, *matrices)


# ---- which rows a tile multiplies ----------------------------------------------------------------


def width_of(slots: Any, row: Any, tile: int) -> Any:
    """Return the columns of the narrowest instruction that has all rows of a tile in use.

    Padding follows all slots of a group, so the first row of each step says whether that is used.
    """
    widths = facts.WIDTHS[tile]
    step = math.gcd(*widths)
    thread, _, _ = cute.arch.thread_idx()
    used = cute.arch.vote_ballot_sync(
        Int32(slots[row * tile + Int32(thread) % (tile // step) * step]) >= 0
    )
    found = Int32(cute.arch.popc(used & Uint32((1 << tile // step) - 1))) * step
    width = Int32(widths[-1])
    for each in widths[-2::-1]:
        width = codecs.select(found <= each, Int32(each), width)
    return cute.arch.make_warp_uniform(width)


def is_read(slots: Any, row: Any, tile: int) -> Any:
    """Return whether a row is within its tile's width."""
    widths, within = facts.WIDTHS[tile], row % tile
    step = Int32(0)
    for each in widths[:-1]:
        step = codecs.select(within >= each, Int32(each), step)
    return (within < widths[0]) | (Int32(slots[row - within + step]) >= 0)


# ---- gather --------------------------------------------------------------------------------------


class DecodedGathering(NamedTuple):
    """Inputs and outputs of `gather`."""

    values: Any  # (words of a block, blocks) of tokens
    rows: Any
    experts: Any
    slots: Any
    decode_scale: Any  # of each expert here
    numbers: Any  # (words of 16 bytes, places)


def decoded_block(read: list[Any], scaling: Any, target: str) -> list[Any]:
    """Return a block's eight pairs, as canonical NVFP4 has them, each in its chunk's order."""
    code = words.scale_code_of(words.block_amax(read), scaling.share)
    factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
    codes = words.code_words(read, factor, target)
    of_block = stages.scales_of_blocks(Uint32(code))[0]
    return [stages.times_half(pair, of_block) for word in codes for pair in stages.half_pairs(word)]


def staged_memory(memory: Any) -> tuple[Any, Any]:
    """Allocate what a warp puts in order: as words, and as (words of 16 bytes, places)."""
    thread, _, _ = cute.arch.thread_idx()
    staged = memory.allocate_array(Uint32, rows.WARPS * STAGED, byte_alignment=16)
    staged = staged + Int32(thread) // LANES * STAGED
    shape = (CHUNK_WORDS, STAGED // CHUNK_WORDS)
    chunks = cute.make_layout(shape, stride=(1, CHUNK_WORDS))
    return cute.make_tensor(staged, cute.make_layout(STAGED)), cute.make_tensor(staged, chunks)


@cute.jit
def gather_part(
    tensors: Any, staged: Any, at: Any, extents: Any, target: cutlass.Constexpr
) -> None:
    """Write 32 blocks of a row by one warp.

    `at` is the row, which 32 blocks, the slot and its expert; a row without a slot becomes zeros.
    """
    (row, part, slot, expert), (blocks, chosen), (single, chunks) = at, extents, staged
    thread, _, _ = cute.arch.thread_idx()
    lane = Int32(thread) % LANES
    block = Int32(part) * LANES + lane
    made = [Uint32(0)] * CHUNKS
    if (slot >= 0) & (block < blocks):
        read = words.loaded(tensors.values, Int64(slot // chosen) * Int64(blocks) + Int64(block))
        scaling = words.scaling_of(Float32(tensors.decode_scale[expert]), None)
        made = decoded_block(read, scaling, target)
    for chunk in cutlass.range_constexpr(CHUNKS):
        at_word = lane // stages.BLOCKS * STAGED_GROUP + chunk * CHUNK_WORDS
        single[at_word + lane % stages.BLOCKS] = made[chunk]
    cute.arch.sync_warp()
    start = (Int64(row) * Int64(blocks) + Int64(part) * LANES) * 2
    for turn in cutlass.range_constexpr(2):
        chunk = turn * LANES + lane
        group = chunk // CHUNKS
        if (Int32(part) * LANES + group * stages.BLOCKS) < blocks:
            place = group * (STAGED_GROUP // CHUNK_WORDS) + chunk % CHUNKS
            found = rows.read_words(chunks, place, CHUNK_WORDS)
            words.store(tensors.numbers, start + Int64(chunk), found)
    cute.arch.sync_warp()


@cute.kernel
def gather_kernel(
    tensors: DecodedGathering, blocks: Int32, chosen: Int32, tile: cutlass.Constexpr,
    target: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Quantise and decode rows; a row of zeros only where it is read."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    first, part, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    staged = staged_memory(cutlass.memory.SmemAllocator())
    begin, total = Int32(first) * rows.WARPS + Int32(thread) // LANES, Int32(tensors.rows[0])
    for row in cutlass.range(begin, total, step * rows.WARPS, unroll=1):
        slot = Int32(tensors.slots[row])
        if is_read(tensors.slots, row, tile):
            at = (row, part, slot, Int32(tensors.experts[row // tile]))
            gather_part(tensors, staged, at, (blocks, chosen), target)
