"""Routed experts in NVFP4 on Hopper (sm_90a): FC1 with SwiGLU and requantisation, FC2, sum.

`KERNEL` is a whole call: BF16 x [T, D] in, float32 or BF16 [T, D] out (entry.py). FC1 writes NVFP4
for FC2 in its epilogue; BF16 of the experts' width is never in memory.
grouped_kernel is sm90_gemm_nvfp4 over tiles that each have one expert: warpgroup 0 loads and
decodes B, further warpgroups decode A and multiply, with the same rings and arrival counts. The
experts' matrices are members of one TMA tensor, their tensor scales multiply the float32 sums, and
the number of tiles is read on the GPU. A warpgroup whose 64 rows are all padding only releases the
stages. Tiles by table: up to 64 rows in few_rows, 128 rows here, 256 by multiply_many_rows.

Deterministic. Nothing waits on the host, so it can be captured in a CUDA graph; a call allocates
its output and workspace. Shape letters: T tokens, K chosen, D hidden, F width of an expert, E
experts here, G experts in all, R rows at most.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_nvfp4 as gemm
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.moe import few_rows
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe.entry import READ, ScaleWords, described, routed_experts
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.moe.sm90_moe_decoded import KERNEL as DECODED
from degarble.kernels.primitives import device_words as words
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

# --------------------------------------------------------------------------------------------------
# Epilogue of experts' FC1 on sm_90a: SwiGLU of gate and up, requantised to NVFP4 for FC2.
#
# A tile's columns are gate next to up. Gate and up are scaled and rounded to BF16, as separate
# kernels store them; SwiGLU and, if it precedes w2, the routing weight are computed in float32 and
# rounded once to BF16. Per warpgroup and piece of 64 rows x 64 columns: registers to one of two
# swizzled buffers in shared memory; one named barrier; each thread reads whole blocks of 16,
# quantises them as all quantising kernels do, and writes codes and scales to memory. Rows of zeros
# stay zeros.

WORDS_OF_CHUNK = 4
LANE_COLUMNS = 8  # of a wgmma accumulator that a row's four lanes share, two each
BLOCKS = facts.PIECE_COLUMNS // stages.BLOCK  # of a row of a piece
TURNS = facts.PIECE_ROWS * BLOCKS // facts.WARPGROUP  # blocks of a piece that a thread quantises
NUMBERS = facts.PIECE_ROWS * facts.PIECE_COLUMNS // facts.WARPGROUP  # of a piece in a thread


class Fc1Outputs(NamedTuple):
    """Outputs of FC1 in memory, and what its epilogue reads in addition to the sums."""

    codes: Any  # (words of a block, blocks)
    scales: Any
    hidden_scale: Any  # of each expert: decode scale of what is written
    slots: Any  # of each row
    weights: Any  # of each slot
    shown: Any = None  # words of two numbers, gate then up, row by row


class Fc1Buffers(NamedTuple):
    """The buffers and the barrier through which a warpgroup writes its pieces."""

    leaving: Fc1Outputs
    copy: Any  # tiled copy from registers to shared memory
    staged: Any  # (values of this thread, buffers)
    chunks: Any  # (words of 16 bytes, places, buffers)
    first: Any  # of the warpgroup's buffers
    barrier: Any


def shared_pieces(memory: Any, form: Any) -> tuple[Any, Any]:
    """Allocate all warpgroups' pieces; return them as wgmma's copy writes them, and as words."""
    buffers = facts.PIECES_AT_ONCE * facts.consumers(form)
    layout, held = mainloop.piece_layout(buffers), facts.PIECE_BYTES // 4
    pointer = memory.allocate_array(Uint32, buffers * held, byte_alignment=facts.ALIGNMENT)
    swizzled = cute.recast_ptr(pointer, layout.inner, dtype=BFloat16)
    shape = (WORDS_OF_CHUNK, held // WORDS_OF_CHUNK, buffers)
    plain = cute.make_layout(shape, stride=(1, WORDS_OF_CHUNK, held))
    return cute.make_tensor(swizzled, layout.outer), cute.make_tensor(pointer, plain)


def outlet_of_warpgroup(
    leaving: Fc1Outputs, shared: tuple[Any, Any], mma: Any, mine: Any
) -> Fc1Buffers:
    """Return a warpgroup's outlet: its own buffers, its own named barrier."""
    thread, _, _ = cute.arch.thread_idx()
    pieces, chunks = shared
    shape = (facts.PIECE_ROWS, facts.PIECE_COLUMNS, facts.PIECES_AT_ONCE)
    copy = mainloop.wgmma_copy(mma)
    own = cute.local_tile(pieces, shape, (0, 0, mine))
    return Fc1Buffers(
        leaving=leaving,
        copy=copy,
        staged=copy.get_slice(thread % facts.WARPGROUP).partition_D(own),
        chunks=chunks,
        first=mine * facts.PIECES_AT_ONCE,
        barrier=mainloop.FIRST_BARRIER + mine,
    )


def weights_of_rows(leaving: Fc1Outputs, row: Any) -> list[Any]:
    """Return the routing weights of a thread's two rows; 0 for rows of zeros."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % facts.WARPGROUP
    first = row + thread // facts.WARP * 16 + thread % facts.WARP // 4
    found = []
    for each in (first, first + 8):
        slot = leaving.slots[each]
        weight = Float32(leaving.weights[cutlass.max(slot, 0)])
        found.append(codecs.select(slot >= 0, weight, 0.0))
    return found


def gated(pair: tuple[list[Any], list[Any]], scales: Any, weight: Any, limit: float | None) -> Any:
    """Return the word of two outputs from two sums of gate and two of up."""
    gate, up = (
        words.rounded_words([mainloop.scaled(number, of_part) for number in part])
        for part, of_part in zip(pair, scales, strict=True)
    )
    made = words.swiglu_numbers(gate, up, limit)
    if weight is not None:
        made = [codecs.multiply_rn(number, weight) for number in made]
    return words.rounded_words(made)[0]


@cute.jit
def requantise_tile(
    outlet: Fc1Buffers, sums: Any, place: Any, stored: Any, scales: Any, form: cutlass.Constexpr
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
    leaving: Fc1Outputs, sums: Any, place: Any, scales: Any, form: cutlass.Constexpr
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
                made = words.rounded_words([mainloop.scaled(n, scales[matrix]) for n in pair])
                start = Int64(first + 8 * half) * parts + matrix
                leaving.shown[(start * width + at) // 2] = made[0]


def block_at(outlet: Fc1Buffers, row: Any, block: Any, buffer: Any) -> list[Any]:
    """Return the words of a block of a piece: two places of 16 bytes."""
    places = [stages.chunk_of_numbers(row, block * 2 + half) for half in range(2)]
    halves = [
        stages.words_at(outlet.chunks, at, outlet.first + buffer, WORDS_OF_CHUNK) for at in places
    ]
    return [word for half in halves for word in half]


@cute.jit
def quantise_piece(
    outlet: Fc1Buffers, buffer: Any, place: Any, scaling: Any, form: cutlass.Constexpr
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


# --------------------------------------------------------------------------------------------------
# Expert GEMM on sm_90a for tiles of 256 x 128: four warpgroups multiply 64 rows each.
#
# A fifth warpgroup decodes 128 rows of B for all four, where tiles of 128 x 256 decode 256 rows for
# two. A warpgroup without rows skips the tile, so an expert's rows cost in steps of 64. Registers
# are scarce: in addition to 64 x 128 sums a thread holds half a stage of A, and decodes the other
# half after that one is multiplied; the other three warpgroups keep the tensor core busy meanwhile.

STEPS_OF_HALF = stages.BLOCKS // 2  # of K, 16 numbers each


@cute.jit
def multiply_many_rows(rings: Any, states: Any, fragments: Any, work: Any) -> Any:
    """Sum up one tile; half a stage of A is decoded and multiplied at a time."""
    ring, decoded = rings
    state, source = states
    mma, sums, a, b = fragments
    shared, first, blocks, steps = work
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    place = (first + within // facts.WARP * 16 + within % facts.WARP // 4, within % 4)

    ring.consumer_wait(state)
    codes, bits = few_rows.read_rows(shared, place, state.index, 1, range(1))[0]
    # The codes are in registers, so the stage can be refilled during the products.
    state = few_rows.give_back(ring, state)
    scales = scales_of_half(bits, place[1], stages.kept(blocks, Int32(0)))
    decode_half(codes, scales, a, 0)
    decoded.consumer_wait(source)
    multiply_half((mma, sums, a, b[None, None, None, source.index]), 0, begins=True)
    # The wgmma still reads the half fragment that is decoded over next.
    warpgroup.wait_group(0)
    decode_half(codes, scales, a, 1)
    multiply_half((mma, sums, a, b[None, None, None, source.index]), 1)
    for step in cutlass.range(1, steps, unroll=1):
        ring.consumer_wait(state)
        codes, bits = few_rows.read_rows(shared, place, state.index, 1, range(1))[0]
        state = few_rows.give_back(ring, state)
        scales = scales_of_half(bits, place[1], stages.kept(blocks, step))
        source = gemm.finish(decoded, source)
        decode_half(codes, scales, a, 0)
        decoded.consumer_wait(source)
        multiply_half((mma, sums, a, b[None, None, None, source.index]), 0)
        warpgroup.wait_group(0)
        decode_half(codes, scales, a, 1)
        multiply_half((mma, sums, a, b[None, None, None, source.index]), 1)
    source = gemm.finish(decoded, source)
    return state, source


def half_fragment(mma: Any) -> Any:
    """Return registers for half a stage of a warpgroup's rows of A."""
    return mma.make_fragment_A(mma.partition_shape_A((facts.PIECE_ROWS, stages.STAGE_K // 2)))


def scales_of_half(bits: Any, block: Any, mask: Any) -> list[Any]:
    """Return the scales of a thread's two rows, each as a pair of equal halves."""
    both = stages.scales_of_rows(bits, block, stages.kept_of_rows(mask, block))
    return [ptx.twice(both, row) for row in range(2)]


def decode_half(codes: Any, scales: Any, a: Any, half: int) -> None:
    """Decode one word of both rows' blocks: two steps of K."""
    fragment = cute.recast_tensor(a, Uint32)
    for i in range(2):
        pairs = stages.decoded_halves([codes[i][half]], scales[i])
        for step in range(STEPS_OF_HALF):
            # wgmma's A registers of a step of 16: row g, row g + 8, then both again for k + 8.
            fragment[4 * step + i] = pairs[2 * step]
            fragment[4 * step + 2 + i] = pairs[2 * step + 1]


@cute.jit
def multiply_half(
    fragments: Any, half: cutlass.Constexpr, begins: cutlass.Constexpr = False
) -> None:
    """Issue the wgmma of half a stage."""
    mma, sums, a, b = fragments
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    warpgroup.fence()
    for k in cutlass.range_constexpr(STEPS_OF_HALF):
        mma.set(warpgroup.Field.ACCUMULATE, not (begins and k == 0))
        cute.gemm(mma, sums, a[None, None, k], b[None, None, half * STEPS_OF_HALF + k], sums)
    warpgroup.commit_group()


# --------------------------------------------------------------------------------------------------
# Routed experts in NVFP4 on Hopper (sm_90a): FC1 with SwiGLU and requantisation, FC2, sum.

WHOLE_CARVEOUT = 100  # per cent; CUDA Driver API 13.0, preferred shared memory carveout


class ExpertTensors(NamedTuple):
    """Tensors that the walk and the epilogue read in addition to the operands."""

    scale_a: Any  # of each expert
    scale_b: Any  # of each expert, part by part
    rows: Any  # of all groups
    experts: Any  # of each tile of rows
    slots: Any  # of each row


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    leaving: Any,
    groups: ExpertTensors,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup as gemm.gemm_kernel does; `leaving` is how tiles are written."""
    of_gemm = form.gemm
    tactic = of_gemm.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    tensors, boxes, shared = gemm.shared_memory(memory, of_gemm)
    pieces = shared_pieces(memory, of_gemm)
    ring, decoded = mainloop.ring_of_stages(memory, of_gemm), gemm.ring_of_decoded(memory, of_gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((Int32(groups.rows[0]), extents[0]), tactic, groups.experts)
    steps = ceil_div(extents[1], tactic.inner)
    decoding, consuming = facts.roles(of_gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(decoding.registers)
        feedings = tuple(map(mainloop.feeding, feeds, tensors, boxes))
        loading = (ring, feedings, walk, steps, of_gemm)
        decode(loading, decoded, shared, extents[1] // stages.BLOCK)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mma = mainloop.mma_of(Float16, tactic.columns, warpgroup.OperandSource.RMEM)
        of_warpgroup = (mma, shared, pieces, group - 1)
        given = (groups, walk, extents)
        if cutlass.const_expr(facts.has_many_rows(of_gemm)):
            consume_tall((ring, decoded), of_warpgroup, leaving, given, form)
        else:
            consume((ring, decoded), of_warpgroup, leaving, given, form)


@cute.jit
def decode(loading: Any, decoded: Any, shared: Any, blocks: Any) -> None:
    """Load all tiles of this thread block, and decode their rows of B."""
    ring, _, walk, _, form = loading
    thread, _, _ = cute.arch.thread_idx()
    tactic = form.tactic
    state = mainloop.consumer_state(ring.num_stages)
    target = mainloop.producer_state(facts.decoded_stages(form))
    cursor = gemm.begin_loading(loading)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        _, column, _ = mainloop.tile_at(walk, number)
        first = column * (tactic.columns // form.parts) % facts.SCALE_TILE_ROWS
        first = moe_problem.first_scale_row(thread, first, form)
        rows_of_tile = (shared, first, blocks, tactic.columns)
        states = (state, target, cursor)
        state, target, cursor = gemm.decode_tile(loading, decoded, states, rows_of_tile)


@cute.jit
def consume(rings: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of this thread block."""
    mma, shared, pieces, mine = own
    groups, walk, (columns, inner) = given
    tactic, parts = form.gemm.tactic, form.gemm.parts
    steps, blocks = ceil_div(inner, tactic.inner), inner // stages.BLOCK
    sums = mainloop.sums_of(mma, tactic.columns)
    numbers = gemm.decoded_tensor(shared, form.gemm)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(numbers))
    state = mainloop.consumer_state(rings[0].num_stages)
    source = mainloop.consumer_state(facts.decoded_stages(form.gemm))
    stored = Int32(0)
    if cutlass.const_expr(parts == GATE_AND_UP):
        outlet = outlet_of_warpgroup(leaving, pieces, mma, mine)
    else:
        outlet = mainloop.outlet_of_warpgroup(leaving, pieces[0], mma, mine)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = mainloop.tile_at(walk, number)
        first = row * tactic.rows % facts.SCALE_TILE_ROWS
        at = row * tactic.rows + mine * facts.PIECE_ROWS
        # What the epilogue needs is read before the products, which hide the latency.
        scales = scales_of(groups, expert, parts)
        # Padding follows all slots of a group: if the first of 64 rows has none, all have none.
        if cute.arch.make_warp_uniform(groups.slots[at]) >= 0:
            of_a: Any = (shared, first, mine * facts.PIECE_ROWS)
            if cutlass.const_expr(form.gemm.tactic.blocks > 1):
                # With several blocks on a multiprocessor, warps without rows do not decode A.
                of_a = (*of_a, warp_has_rows(groups, at))
            work = (*of_a, blocks, steps)
            state, source = gemm.multiply(rings, state, source, (mma, sums, b), work)
            if cutlass.const_expr(parts == GATE_AND_UP):
                written = (at, column, expert, columns // GATE_AND_UP // stages.BLOCK)
                if cutlass.const_expr(form.shown):
                    show_tile(outlet.leaving, sums, written, scales, form)
                stored = requantise_tile(outlet, sums, written, stored, scales, form)
            else:
                place = facts.piece_of(row, column, mine, tactic)
                stored = mainloop.store_tile(outlet, sums, place, stored, scales[0])
        else:  # rows of zeros at the end of a group: their results are never read
            state, source = pass_over(rings, state, source, steps)
    if cutlass.const_expr(parts == 1):
        mainloop.drain(outlet)


@cute.jit
def consume_tall(rings: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of 256 rows of this thread block."""
    mma, shared, pieces, mine = own
    groups, walk, (columns, inner) = given
    tactic, parts = form.gemm.tactic, form.gemm.parts
    steps, blocks = ceil_div(inner, tactic.inner), inner // stages.BLOCK
    sums, a = mainloop.sums_of(mma, tactic.columns), half_fragment(mma)
    numbers = gemm.decoded_tensor(shared, form.gemm)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(numbers))
    state = mainloop.consumer_state(rings[0].num_stages)
    source = mainloop.consumer_state(facts.decoded_stages(form.gemm))
    stored = Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = mainloop.tile_at(walk, number)
        at = row * tactic.rows + mine * facts.PIECE_ROWS
        # Padding follows all slots of a group: if the first of 64 rows has none, all have none.
        if cute.arch.make_warp_uniform(groups.slots[at]) >= 0:
            work = (shared, mine * facts.PIECE_ROWS, blocks, steps)
            states = state, source
            state, source = multiply_many_rows(rings, states, (mma, sums, a, b), work)
            # Recomputed after the products: kept values would take registers from them.
            row, column, expert = mainloop.tile_at(walk, number)
            at = row * tactic.rows + mine * facts.PIECE_ROWS
            scales = scales_of(groups, expert, parts)
            if cutlass.const_expr(parts == GATE_AND_UP):
                outlet: Any = outlet_of_warpgroup(leaving, pieces, mma, mine)
                written = (at, column, expert, columns // GATE_AND_UP // stages.BLOCK)
                if cutlass.const_expr(form.shown):
                    show_tile(outlet.leaving, sums, written, scales, form)
                stored = requantise_tile(outlet, sums, written, stored, scales, form)
            else:
                outlet = mainloop.outlet_of_warpgroup(leaving, pieces[0], mma, mine)
                place = facts.piece_of(row, column, mine, tactic)
                stored = mainloop.store_tile(outlet, sums, place, stored, scales[0])
                mainloop.drain(outlet)
        else:  # rows of zeros at the end of a group: their results are never read
            state, source = pass_over(rings, state, source, steps)


@cute.jit
def warp_has_rows(groups: ExpertTensors, first: Any) -> Any:
    """Return whether any of this warp's 16 rows has a slot; padding ends a tile."""
    thread, _, _ = cute.arch.thread_idx()
    row = first + thread % facts.WARPGROUP // facts.WARP * 16
    return cute.arch.make_warp_uniform(groups.slots[row]) >= 0


@cute.jit
def pass_over(rings: Any, state: Any, source: Any, steps: Any) -> Any:
    """Release the stages of a tile in which this warpgroup has no rows."""
    ring, decoded = rings
    for _ in cutlass.range(steps, unroll=1):
        ring.consumer_wait(state)
        ring.consumer_release(state)
        decoded.consumer_wait(source)
        with cute.arch.elect_one():
            decoded.consumer_release(source)
        state.advance()
        source.advance()
    return state, source


def scales_of(groups: ExpertTensors, expert: Any, parts: int) -> tuple[tuple[Any, Any], ...]:
    """Return the factors of each part's sums, the exact power of two first."""
    of_a = Float32(groups.scale_a[expert])
    of_b = (Float32(groups.scale_b[expert * parts + part]) for part in range(parts))
    return tuple((stages.RESTORE, codecs.multiply_rn(of_a, each)) for each in of_b)


def matrices_of(pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm) -> list[Any]:
    """View A, B and their scales in words: B as matrices of N / parts rows, expert by expert."""
    a, a_scales, b, b_scales = pointers
    m, n, k, experts = extents
    parts, part = form.parts, n // form.parts
    words = cute.assume(k // gemm.CODES_OF_WORD, divby=facts.TMA_ALIGNMENT // 4)
    of_tiles = ceil_div(k, stages.STAGE_K) * gemm.WORDS_OF_TILE
    made = []
    for of_a, of_b, row_words, unit in (
        (a, b, words, 1),
        (a_scales, b_scales, of_tiles, facts.SCALE_TILE_ROWS),
    ):
        wide, count, own = Int64(row_words), ceil_div(part, unit), ceil_div(m, unit)
        made.append(cute.make_tensor(of_a, cute.make_layout((own, row_words), stride=(wide, 1))))
        layout = cute.make_layout(
            (count, row_words, experts * parts), stride=(wide, 1, wide * Int64(count))
        )
        made.append(cute.make_tensor(of_b, layout))
    return made


@cute.jit
def launch_grouped(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents rows at most, N, K, experts, thread blocks."""
    m, n, k, experts, blocks = extents
    of_gemm = form.gemm
    matrices = matrices_of(pointers[:4], (m, n, k, experts), of_gemm)
    layouts, boxes = gemm.layouts(of_gemm), gemm.boxes_of(of_gemm)
    feeds = tuple(map(mainloop.feed_of, matrices, layouts, boxes))
    groups, (out, *epilogue) = ExpertTensors(*rows.flat(pointers[4:READ])), pointers[READ:]
    if cutlass.const_expr(of_gemm.parts == GATE_AND_UP):
        codes = rows.in_words(out, stages.BLOCK // gemm.CODES_OF_WORD)
        scales, hidden_scale, *others = rows.flat(epilogue)
        leaving: Any = Fc1Outputs(codes, scales, hidden_scale, groups.slots, *others)
    elif cutlass.const_expr(facts.has_few_rows(of_gemm)):
        leaving = rows.in_words(cute.recast_ptr(out, dtype=Uint32), few_rows.WORDS_OF_CHUNK)
    else:
        n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
        mD = cute.make_tensor(out, cute.make_layout((m, n), stride=(Int64(n), 1)))
        leaving = mainloop.store_of(mD)
    kernel = few_rows.few_kernel if facts.has_few_rows(of_gemm) else grouped_kernel
    kernel(feeds, leaving, groups, (n, k), form).launch(
        grid=[1, 1, blocks],
        block=[facts.threads(of_gemm), 1, 1],
        min_blocks_per_mp=of_gemm.tactic.blocks,
        preferred_smem_carveout=WHOLE_CARVEOUT if of_gemm.tactic.blocks > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

FC1, FC2 = PRODUCTS = described(launch_grouped, SM90A, ScaleWords(read=Uint32, written=Uint8))
KERNEL = routed_experts(PRODUCTS, SM90A, DECODED)
compile_form = PRODUCTS.compile_form
