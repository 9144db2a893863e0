"""Expert GEMM on sm_90a for tiles of 16, 32 or 64 rows: weights are wgmma's rows, tokens columns.

Where an expert has few rows, tiles of 128 are mostly zeros, and the time is that of one warpgroup
decoding B into shared memory. Here each consumer decodes its own 64 rows of B into wgmma registers.
Roles: warpgroup 0: warp 0 issues TMA, warps 1 to 3 decode the rows of A, each every third stage.
  Further warpgroups, one per 64 rows of B in the tile, decode B, multiply and write.
Pipelines: (1) ring of loaded stages: full is one arrival plus bytes; empty is one arrival per
  consumer warp and one of the decoding warp. (2) ring of 3 or 4 stages of decoded A: full is one
  arrival of the decoding warp, empty one per consumer warp.
A stage in a consumer: wait; per span of 64 of K read codes of B, wait until the wgmma that used
  these registers are done, decode, wait for decoded A (first span), issue wgmma. Two sets of
  registers alternate.
After the last stage sums are scaled, rounded to BF16, put into shared memory row by row of A; a
  named barrier of the warpgroups whose columns leave together (gate and its up); then they store D
  rows (FC2), or SwiGLU as NVFP4 (FC1); the barrier again.
Products, their order along K and roundings are those of the other tiles, so all bytes agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_nvfp4 as gemm
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm.nvfp4_stages import BLOCKS, WORDS, half_pairs
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives.e2m1 import PAIRS

# --------------------------------------------------------------------------------------------------
# Decode stages of 128 or 256 NVFP4 numbers along K, span by span, for tiles of few rows (sm_90a).
#
# A span is 64 numbers of K, in the order of nvfp4_stages, so sums do not depend on the stage
# length. Layout of a stage: a row is 64 or 128 bytes of codes whose 16-byte chunks TMA's swizzle
# permutes, and one word of scales (four blocks) in each 128x4 tile.
#
# Reading and decoding are two steps: registers that a wgmma reads may be overwritten only after it
# was waited for, while reads of shared memory need not wait for that.

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

    `mask` has the bits that count of both rows' scales; `place` is the index of the span among
    those that the registers hold.
    """
    codes, bits = read
    both = stages.scales_of_rows(bits, block, mask)
    for i in range(2):
        pairs = stages.decoded_halves(codes[i], ptx.twice(both, i))
        for step in range(BLOCKS):
            at = FRAGMENT_WORDS * place + 4 * step + i
            fragment[at] = pairs[2 * step]
            fragment[at + 2] = pairs[2 * step + 1]


def kept_of_span(left: Any, span: int) -> Any:
    """Return which bits of a thread's two scales count; `left`: from its block to the end of K."""
    return codecs.select(left > span * BLOCKS, Uint32(stages.SCALE_BITS), Uint32(0))


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
        pairs = [half_pairs(read[WORDS * block + word]) for block in range(BLOCKS)]
        for pair in range(PAIRS):
            made = cute.make_rmem_tensor(BLOCKS, Uint32)
            for block in range(BLOCKS):
                made[block] = stages.times_half(pairs[block][pair], of_block[block])
            chunk = chunk_of_numbers(row, word * PAIRS + pair, span, rows)
            cute.autovec_copy(made, shared.numbers[None, chunk, target])


# --------------------------------------------------------------------------------------------------
# Expert GEMM on sm_90a for tiles of 16, 32 or 64 rows: weights are wgmma's rows, tokens columns.

WORDS_OF_CHUNK, NUMBERS_OF_CHUNK = 4, 8  # of 16 bytes
BLOCK_WORDS = stages.BLOCK // 2
DECODERS = 3  # warps
AT_ONCE = 2  # spans of B that registers hold
# Spans that are read before they are decoded. Trap: with two, ptxas has too few registers for FC1's
# tiles of 32 rows, and serialises wgmma.
READ_AT_ONCE = 1
OPERANDS = ("a", "b", "scales of a", "scales of b")


class OutgoingTile(NamedTuple):
    """Shared memory of an outgoing tile: numbers, and 16-byte chunks, row by row of A."""

    numbers: Any  # (columns, rows)
    chunks: Any  # (words, chunks, rows)


class FewRowsMemory(NamedTuple):
    """Shared memory of a thread block."""

    tensors: tuple[Any, ...]  # as TMA writes them
    boxes: tuple[Any, ...]
    weights: gemm.Nvfp4SharedViews  # B in the place of A
    tokens: gemm.Nvfp4SharedViews  # A in the place of B
    tile: OutgoingTile


def shared_memory(memory: Any, form: Any) -> FewRowsMemory:
    """Allocate stages, decoded A and the outgoing tile."""
    count, tactic = facts.footprint(form).stages, form.tactic
    tensors, pointers = gemm.loaded_stages(memory, form)
    size = tactic.rows * tactic.inner // 2  # words
    decoded = memory.allocate_array(
        Uint32, size * facts.decoded_stages(form), byte_alignment=facts.ALIGNMENT
    )
    a, b, of_a, of_b = (
        (pointer, facts.bytes_of(form, name) // 4)
        for pointer, name in zip(pointers, OPERANDS, strict=True)
    )
    view = gemm.side_by_side
    numbers = view(decoded, 4, size, facts.decoded_stages(form))
    codes, scales = view(b[0], stages.WORDS, b[1], count), view(of_b[0], 1, of_b[1], count)
    # The decoding functions call wgmma's rows A; here those are the weights.
    weights = gemm.Nvfp4SharedViews(codes, scales, None, None, numbers)
    codes, scales = view(a[0], 4, a[1], count), view(of_a[0], 1, of_a[1], count)
    tokens = gemm.Nvfp4SharedViews(None, None, codes, scales, numbers)
    return FewRowsMemory(tensors, gemm.boxes_of(form), weights, tokens, tile_of(memory, tactic))


def tile_of(memory: Any, tactic: Any) -> OutgoingTile:
    """Allocate the outgoing tile, in words."""
    # In words; the padding puts consecutive rows in different banks.
    row = (tactic.columns + facts.FEW_PADDING) // 2
    leaving = memory.allocate_array(Uint32, row * tactic.rows, byte_alignment=16)
    shape = (WORDS_OF_CHUNK, row // WORDS_OF_CHUNK, tactic.rows)
    numbers = cute.make_layout((tactic.columns, tactic.rows), stride=(1, 2 * row))
    return OutgoingTile(
        cute.make_tensor(cute.recast_ptr(leaving, dtype=BFloat16), numbers),
        cute.make_tensor(leaving, cute.make_layout(shape, stride=(1, WORDS_OF_CHUNK, row))),
    )


@cute.kernel
def few_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    leaving: Any,
    groups: Any,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp and warpgroup; `leaving` is what a tile is written to."""
    of_gemm = form.gemm
    tactic = of_gemm.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    few = shared_memory(memory, of_gemm)
    ring, decoded = mainloop.ring_of_stages(memory, of_gemm), gemm.ring_of_decoded(memory, of_gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((Int32(groups.rows[0]), extents[0]), tactic, groups.experts)
    steps = ceil_div(extents[1], tactic.inner)
    decoding, consuming = facts.roles(of_gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(decoding.registers)
        if cute.arch.warp_idx() == 0:
            feedings = tuple(map(mainloop.feeding, feeds, few.tensors, few.boxes))
            load(ring, feedings, walk, steps, of_gemm)
        else:
            decode((ring, decoded), walk, few.tokens, (steps, extents[1] // stages.BLOCK), of_gemm)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mma = mainloop.mma_of(Float16, tactic.rows, warpgroup.OperandSource.RMEM)
        consume((ring, decoded), (mma, few, group - 1), leaving, (groups, walk, extents), form)


@cute.jit
def load(ring: Any, feedings: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Load all tiles of this thread block."""
    state = mainloop.producer_state(ring.num_stages)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        tiles = gemm.tiles_of_boxes(mainloop.tile_at(walk, number), form)
        state = mainloop.produce_tile(ring, state, feedings, tiles, steps)
    ring.producer_tail(state)


@cute.jit
def decode(rings: Any, walk: Any, shared: Any, extents: Any, form: cutlass.Constexpr) -> None:
    """Decode rows of A, each warp every third stage, so that decoders never wait for another."""
    (ring, decoded), (steps, blocks) = rings, extents
    tactic, turn = form.tactic, Int32(0)
    of_stage = tactic.inner // stages.STAGE_K
    state = mainloop.consumer_state(ring.num_stages)
    target = mainloop.producer_state(facts.decoded_stages(form))
    mine = cute.arch.warp_idx() - 1
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, _, _ = mainloop.tile_at(walk, number)
        first = row * tactic.rows % facts.SCALE_TILE_ROWS
        for step in cutlass.range(steps, unroll=1):
            if turn == mine:
                # In this order. This warp skips stages, so it has not waited for the earlier loads
                # into this stage; a free buffer proves that the consumers are past those.
                decoded.producer_acquire(target)
                ring.consumer_wait(state)
                at = (state.index, target.index)
                decode_stage(shared, first, at, (blocks, step * of_stage), tactic)
                cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads by another proxy
                cute.arch.sync_warp()
                ring.consumer_release(state)
                with cute.arch.elect_one():
                    decoded.producer_commit(target)
            turn += 1
            if turn == DECODERS:
                turn = Int32(0)
            state.advance()
            target.advance()


def decode_stage(shared: Any, first: Any, at: Any, inner: Any, tactic: Any) -> None:
    """Decode all rows of a stage by one warp, a span of a row per thread and turn."""
    thread, _, _ = cute.arch.thread_idx()
    lane, of_stage = Int32(thread) % facts.WARP, tactic.inner // stages.STAGE_K
    blocks, before = inner
    for turn in range(tactic.rows * of_stage // facts.WARP):
        item = lane + turn * facts.WARP
        row, span = item % tactic.rows, item // tactic.rows
        if tactic.rows >= facts.WARP:  # then all threads of a warp have the same span
            row, span = lane + turn * facts.WARP % tactic.rows, turn * facts.WARP // tactic.rows
        mask = stages.kept(blocks, before + span)
        decode_span(shared, (row, first, span), (*at, mask), (tactic.rows, of_stage))


@cute.jit
def consume(rings: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of this thread block."""
    mma, few, mine = own
    groups, walk, (columns, inner) = given
    tactic, parts = form.gemm.tactic, form.gemm.parts
    steps, blocks = ceil_div(inner, tactic.inner), inner // stages.BLOCK
    sums = mainloop.sums_of(mma, tactic.rows)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(decoded_tensor(few.weights, form.gemm)))
    # Registers of two spans, which alternate.
    held = AT_ONCE * stages.STAGE_K
    a = mma.make_fragment_A(mma.partition_shape_A((facts.PIECE_ROWS, held)))
    state = mainloop.consumer_state(rings[0].num_stages)
    source = mainloop.consumer_state(facts.decoded_stages(form.gemm))
    first = mine * facts.PIECE_ROWS
    matrix = first // (tactic.columns // parts)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        work = (few.weights, first, blocks, steps)
        state, source = multiply(rings, (state, source), (mma, sums, a, b), work, tactic)
        # Computed after the products: kept values would take registers from them.
        row, column, expert = mainloop.tile_at(walk, number)
        stage_tile(few.tile, sums, first, scales_of(groups, expert * parts + matrix, expert))
        wait_for_those(mine, form.gemm)
        at = row * tactic.rows
        if cutlass.const_expr(parts == GATE_AND_UP):
            written = (at, column, expert, columns // GATE_AND_UP // stages.BLOCK)
            requantise(leaving, few.tile, written, mine, form)
        else:
            stored = (at, column * tactic.columns, columns)
            store_rows(leaving, few.tile, stored, mine, form.gemm)
        wait_for_those(mine, form.gemm)


@cute.jit
def multiply(rings: Any, states: Any, fragments: Any, work: Any, tactic: cutlass.Constexpr) -> Any:
    """Sum up one tile, stage by stage; the first one has no products to wait for."""
    state, source = states
    shared, first, blocks, steps = work
    thread, _, _ = cute.arch.thread_idx()
    within, of_stage = Int32(thread) % facts.WARPGROUP, tactic.inner // stages.STAGE_K
    place = (first + within // facts.WARP * 16 + within % facts.WARP // 4, within % 4)
    given = (shared, place, blocks, of_stage)

    before = source.clone()
    state, before = add_stage(
        rings, (state, source, before), fragments, (*given, Int32(0)), begins=True
    )
    source.advance()
    for step in cutlass.range(1, steps, unroll=1):
        more = (*given, step)
        state, before = add_stage(rings, (state, source, before), fragments, more, begins=False)
        source.advance()
    warpgroup.wait_group(0)
    before = release(rings[1], before)
    return state, source


def add_stage(
    rings: Any, states: Any, fragments: Any, given: Any, *, begins: bool
) -> tuple[Any, Any]:
    """Add a stage span by span: read B, wait for the products before, decode, multiply.

    Trap: a wgmma reads its registers until it is waited for; decoding may start only then. Two sets
    of registers alternate: one is decoded while the other is multiplied.
    """
    ring, decoded = rings
    state, source, before = states
    shared, place, blocks, of_stage, step = given
    left = blocks - step * (of_stage * BLOCKS) - place[1]
    ring.consumer_wait(state)
    read = []
    for span in range(of_stage):
        if span % READ_AT_ONCE == 0:
            some = range(span, span + READ_AT_ONCE)
            read += read_rows(shared, place, state.index, of_stage, some)
        if span == of_stage - READ_AT_ONCE:
            state = give_back(ring, state)
        if not begins or span >= AT_ONCE:
            warpgroup.wait_group(AT_ONCE - 1)
        if not begins and span == AT_ONCE - 1:
            before = release(decoded, before)
        registers = cute.recast_tensor(fragments[2], Uint32)
        mask = kept_of_span(left, span)
        decode_rows(read[span], registers, place[1], mask, span % AT_ONCE)
        if span == 0:
            decoded.consumer_wait(source)
        add_span(fragments, span, source.index, begins=begins and span == 0)
    return state, before


def add_span(fragments: Any, span: int, index: Any, *, begins: bool) -> None:
    """Issue a span's wgmma."""
    mma, sums, a, b = fragments
    first = span * stages.BLOCKS
    steps = (first, first + stages.BLOCKS, first - span % AT_ONCE * stages.BLOCKS)
    mainloop.multiply_stage(mma, sums, a, b[None, None, None, index], begins=begins, steps=steps)


@cute.jit
def release(decoded: Any, state: Any) -> Any:
    """Release a stage of decoded numbers."""
    with cute.arch.elect_one():
        decoded.consumer_release(state)
    state.advance()
    return state


@cute.jit
def give_back(ring: Any, state: Any) -> Any:
    """Release a loaded stage that this warp has read."""
    cute.arch.sync_warp()
    ring.consumer_release(state)
    state.advance()
    return state


def decoded_tensor(shared: Any, form: Any) -> Any:
    """View decoded A as wgmma reads it."""
    tactic = form.tactic
    layout = mainloop.staged_layout(
        Float16, tactic.rows, tactic.inner, facts.decoded_stages(form), mainloop.Swizzle.K_SW128
    )
    pointer = cute.recast_ptr(shared.numbers.iterator, layout.inner, dtype=Float16)
    return cute.make_tensor(pointer, layout.outer)


def sharing(mine: Any, form: Any) -> tuple[Any, Any]:
    """Return this warpgroup's group of those that write together, and the number of groups.

    A warpgroup writes alone, or together with the one that has the up columns of its gate columns.
    """
    groups = facts.consumers(form) // form.parts
    return mine % groups, groups


def wait_for_those(mine: Any, form: Any) -> None:
    """Synchronise the warpgroups that write together."""
    those, _ = sharing(mine, form)
    barrier, count = mainloop.FIRST_BARRIER + those, form.parts * facts.WARPGROUP
    cute.arch.barrier(barrier_id=barrier, number_of_threads=count)


def thread_of_those(mine: Any, form: Any) -> Any:
    """Return a thread's number among the warpgroups that write together."""
    thread, _, _ = cute.arch.thread_idx()
    _, groups = sharing(mine, form)
    return mine // groups * facts.WARPGROUP + Int32(thread) % facts.WARPGROUP


@cute.jit
def stage_tile(tile: OutgoingTile, sums: Any, first: Any, scales: Any) -> None:
    """Scale and round a warpgroup's sums, and write them so that a row of A is contiguous.

    A thread has rows g and g + 8 of B in two adjacent columns of each eight.
    """
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    row = first + within // facts.WARP * 16 + within % facts.WARP // 4
    for i in cutlass.range_constexpr(cute.size(sums)):
        token = i // 4 * 8 + within % 4 * 2 + i % 2
        number = BFloat16(mainloop.scaled(sums[i], scales))
        tile.numbers[row + i // 2 % 2 * 8, token] = number


def words_of_block(tile: OutgoingTile, row: Any, first: Any) -> list[Any]:
    """Read the words of 16 numbers of a row."""
    at = first // NUMBERS_OF_CHUNK
    halves = (stages.words_at(tile.chunks, at + half, row, WORDS_OF_CHUNK) for half in range(2))
    return [word for half in halves for word in half]


def both_of(tile: OutgoingTile, row: Any, local: Any, part: int) -> list[list[Any]]:
    """Read a block of gate and that of up, at the same place in their parts."""
    firsts = (local * stages.BLOCK + matrix * part for matrix in range(GATE_AND_UP))
    return [words_of_block(tile, row, first) for first in firsts]


def weight_of(leaving: Any, row: Any) -> Any:
    """Return the routing weight of a row; 0 for a row of zeros."""
    slot = leaving.slots[row]
    weight = Float32(leaving.weights[cutlass.max(slot, 0)])
    return codecs.select(slot >= 0, weight, 0.0)


def scales_of(groups: Any, matrix: Any, expert: Any) -> tuple[Any, Any]:
    """Return the factors of a matrix's sums, the exact power of two first."""
    of_a, of_b = Float32(groups.scale_a[expert]), Float32(groups.scale_b[matrix])
    return stages.RESTORE, codecs.multiply_rn(of_a, of_b)


@cute.jit
def requantise(
    leaving: Any, tile: OutgoingTile, place: Any, mine: Any, form: cutlass.Constexpr
) -> None:
    """Write SwiGLU of a tile as NVFP4, a block per thread, with the bytes of other tiles."""
    first_row, column, expert, blocks = place
    part = form.gemm.tactic.columns // GATE_AND_UP
    (those, groups), item = sharing(mine, form.gemm), thread_of_those(mine, form.gemm)
    of_part = part // stages.BLOCK
    of_row = of_part // groups
    if item < form.gemm.tactic.rows * of_row:
        row, local = item // of_row, those * of_row + item % of_row
        block, at_row = column * of_part + local, first_row + row
        gate, up = both_of(tile, row, local, part)
        numbers = words.swiglu_numbers(gate, up, form.limit)
        if cutlass.const_expr(form.weighted):
            weight = weight_of(leaving, at_row)
            numbers = [codecs.multiply_rn(number, weight) for number in numbers]
        rounded = words.rounded_words(numbers)
        scaling = words.scaling_of(Float32(leaving.hidden_scale[expert]), None)
        code = words.scale_code_of(words.block_amax(rounded), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        if block < blocks:
            made = words.code_words(rounded, factor, form.gemm.target)
            words.store(leaving.codes, Int64(at_row) * Int64(blocks) + Int64(block), made)
            if cutlass.const_expr(form.shown):
                show(leaving, (gate, up), Int64(at_row) * 2 * Int64(blocks), (block, blocks))
        if block < round_up(blocks, SWIZZLE_128X4.column_tile):
            offset = SWIZZLE_128X4.offset_of(Uint32(at_row), Uint32(block), None, Uint32(blocks))
            leaving.scales[offset] = Uint8(code)


def show(leaving: Any, both: tuple[Any, Any], first: Any, place: tuple[Any, Any]) -> None:
    """Store a block of gate and of up unchanged; `first` counts blocks before the row."""
    block, blocks = place
    for matrix in range(GATE_AND_UP):
        at = (first + matrix * Int64(blocks) + Int64(block)) * BLOCK_WORDS
        for i in range(BLOCK_WORDS):
            leaving.shown[at + i] = both[matrix][i]


@cute.jit
def store_rows(
    leaving: Any, tile: OutgoingTile, place: Any, mine: Any, form: cutlass.Constexpr
) -> None:
    """Store columns of D, 16 bytes a thread; `leaving` is D in chunks of 16 bytes."""
    first_row, first_column, columns = place
    (those, groups), item = sharing(mine, form), thread_of_those(mine, form)
    chunks = form.tactic.columns // NUMBERS_OF_CHUNK // groups
    for turn in cutlass.range_constexpr(form.tactic.rows * chunks // facts.WARPGROUP):
        at = item + turn * facts.WARPGROUP
        row, chunk = at // chunks, those * chunks + at % chunks
        column = first_column + chunk * NUMBERS_OF_CHUNK
        if column < columns:
            read = stages.words_at(tile.chunks, chunk, row, WORDS_OF_CHUNK)
            index = (Int64(first_row + row) * Int64(columns) + Int64(column)) // NUMBERS_OF_CHUNK
            words.store(leaving, index, read)
