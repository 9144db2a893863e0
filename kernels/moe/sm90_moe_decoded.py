"""Routed experts in NVFP4 on Hopper (sm_90a) whose rows are decoded once, in front of the products.

`KERNEL` is a whole call with the results of sm90_moe_nvfp4, bit for bit. `GATHER` quantises every
slot's row as simt_moe_rows does, and stores what its codes and scales stand for: FP16 numbers,
which are exact, in the order of K in which a stage multiplies (nvfp4_stages). FC1 writes SwiGLU for
FC2 in the same way. So a product's tokens come by TMA as wgmma reads them, and only weights are
decoded, straight into wgmma's registers: weights are its 64 rows, and tokens its columns.
A tile is 128 rows of weights by up to 256 rows of one expert, of which it multiplies as many as
the narrowest of its instructions needs to have all rows in use (`WIDTHS`). Tiles of up to 64 rows
are in decoded_few.
Roles: warp 0 issues TMA; two warpgroups decode 64 rows of weights each, multiply and write. Of FC1
  a warp has eight rows of gate and the same ones of up, so that a thread holds both numbers of an
  output.
Pipeline: one ring of stages of 64 of K: full is one arrival plus bytes (codes, scales and only the
  boxes of rows in use); empty is one arrival per warp that multiplies, after the wgmma that read
  the stage have ended.
Two stages at a time: wait for both; read their codes and scales; for each, wait for the wgmma of
  the last but one and give that stage back, decode into its registers, issue this stage's wgmma.

Deterministic; nothing waits on the host. Shape letters: T tokens, K chosen, D hidden, F width of an
expert, E experts here, R rows at most.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm import sm90_gemm_nvfp4 as coded
from degarble.kernels.moe import decoded_few, decoded_rows, few_rows
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe.entry import decoded_experts, described_decoded
from degarble.kernels.moe.problem import GATE_AND_UP, GRANULE
from degarble.kernels.primitives import device_words as words
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

SPAN = stages.STAGE_K  # numbers of K in a stage
ROW_WORDS = SPAN // 2  # of a stage's row of numbers, or of a row of an outgoing piece
CHUNKS, CHUNK_WORDS = 8, 4  # of 16 bytes, in such a row; words of one
OF_ROW = CHUNKS * CHUNK_WORDS * 4  # bytes
BOX_ROWS = 2 * GRANULE  # of tokens; one box of half as many where an odd number of them is left
PIECE_ROWS_BYTES = GRANULE * OF_ROW  # of an outgoing piece
EVERY_THREAD = mainloop.FIRST_BARRIER  # barriers: of all that multiply, then of each warpgroup
LANES = 32


# ---- products: memory ----------------------------------------------------------------------------


class DecodedLeaving(NamedTuple):
    """Where a product writes, and what FC1's epilogue reads in addition to the sums."""

    store: mainloop.TmaStore
    slots: Any  # of each row
    weights: Any = None  # of each slot
    hidden_scale: Any = None  # of each expert: decode scale of what is written


class DecodedMemory(NamedTuple):
    """Shared memory of a thread block: what TMA writes, and how threads read it."""

    written: tuple[Any, ...]  # boxes of tokens, codes, scales
    tokens: Any  # (rows of a tile, K of a stage, stages)
    codes: Any  # (words of half a block, places, stages)
    scales: Any  # (word, places, stages)
    pieces: Any  # outgoing, as TMA reads them
    leaving: Any  # the same as (words of 16 bytes, places, 1)


def weight_layouts(form: gemm.GemmForm) -> tuple[Any, Any]:
    """Return the layouts of codes and scales of all stages, in words."""
    count, part = facts.decoded_stages(form), form.tactic.columns // form.parts
    many = (count,) if form.parts == 1 else (form.parts, count)
    codes = mainloop.staged_layout(Uint32, part, SPAN // 8, many, mainloop.Swizzle.K_SW32)
    tile = gemm.SCALE_TILE_BYTES // 4
    strides = (tile, tile * form.parts)[-len(many) :]
    return codes, cute.make_layout((1, tile, *many), stride=(tile, 1, *strides))


def granules_in(form: gemm.GemmForm) -> int:
    """Return how many times GRANULE rows a tile has."""
    return form.tactic.rows // GRANULE


def layouts_of(form: gemm.GemmForm) -> tuple[Any, ...]:
    """Return the layouts of what TMA writes: boxes of tokens, then codes and scales of weights."""
    boxes, swizzle = facts.decoded_stages(form) * granules_in(form), mainloop.Swizzle.K_SW128
    whole = mainloop.staged_layout(Float16, BOX_ROWS, SPAN, boxes // 2, swizzle)
    half = mainloop.staged_layout(Float16, GRANULE, SPAN, boxes, swizzle)
    return whole, half, *weight_layouts(form)


def boxes_of(form: gemm.GemmForm) -> tuple[tuple[int, ...], ...]:
    """Return the boxes: rows, then numbers or words of a row, then matrices if there are two."""
    part, many = form.tactic.columns // form.parts, (form.parts,) if form.parts > 1 else ()
    of_weights = (part, SPAN // 8, *many), (1, gemm.SCALE_TILE_BYTES // 4, *many)
    return (BOX_ROWS, SPAN), (GRANULE, SPAN), *of_weights


def shared_memory(memory: Any, form: gemm.GemmForm) -> DecodedMemory:
    """Allocate stages and outgoing pieces."""
    count = facts.decoded_stages(form)
    of_boxes, of_halves, of_codes, of_scales = layouts_of(form)
    tokens = memory.allocate_array(
        Uint32, count * form.tactic.rows * ROW_WORDS, byte_alignment=gemm.ALIGNMENT
    )
    codes, scales, pieces = (
        memory.allocate_array(Uint32, size, byte_alignment=gemm.ALIGNMENT)
        for size in (
            cute.cosize(of_codes), cute.cosize(of_scales), facts.decoded_output_bytes(form) // 4
        )
    )  # fmt: skip
    whole = mainloop.staged_layout(Float16, form.tactic.rows, SPAN, count, mainloop.Swizzle.K_SW128)
    outgoing = mainloop.piece_layout(facts.decoded_output_bytes(form) // PIECE_ROWS_BYTES, GRANULE)
    places = facts.decoded_output_bytes(form) // 16
    return DecodedMemory(
        (
            decoded_rows.swizzled(tokens, of_boxes, Float16),
            decoded_rows.swizzled(tokens, of_halves, Float16),
            decoded_rows.swizzled(codes, of_codes, Uint32),
            cute.make_tensor(scales, of_scales),
        ),
        decoded_rows.swizzled(tokens, whole, Float16),
        coded.side_by_side(codes, stages.WORDS, cute.cosize(of_codes) // count, count),
        coded.side_by_side(scales, 1, cute.cosize(of_scales) // count, count),
        decoded_rows.swizzled(pieces, outgoing, BFloat16),
        coded.side_by_side(pieces, CHUNK_WORDS, places * CHUNK_WORDS, 1),
    )


# ---- products: kernel ----------------------------------------------------------------------------


@cute.kernel
def decoded_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    leaving: DecodedLeaving,
    groups: decoded_rows.Groups,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp and warpgroup."""
    tactic = form.gemm.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // gemm.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    held = shared_memory(memory, form.gemm)
    ring = decoded_rows.ring_of(memory, form.gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((Int32(groups.rows[0]), extents[0]), tactic, groups.experts)
    steps = extents[1] // SPAN
    if group == 0:
        cute.arch.setmaxregister_decrease(facts.decoded_registers(form.gemm)[0])
        if cute.arch.warp_idx() == 0:
            feedings = tuple(map(mainloop.feeding, feeds, held.written, boxes_of(form.gemm)))
            load((ring, feedings, groups.slots), walk, steps, form.gemm)
    else:
        cute.arch.setmaxregister_increase(facts.decoded_registers(form.gemm)[1])
        consume(ring, (held, group - 1), leaving, (groups, walk, steps), form)


@cute.jit
def load(loading: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Load all tiles of this thread block: the boxes of rows in use, and the weights."""
    ring, feedings, slots = loading
    tokens, half, codes, scales = feedings
    state = mainloop.producer_state(ring.num_stages)
    part = form.tactic.columns // form.parts
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = mainloop.tile_at(walk, number)
        width = decoded_rows.width_of(slots, row, form.tactic.rows)
        size, granules = width * OF_ROW, width // GRANULE
        size += facts.decoded_weight_bytes(form)
        most = granules_in(form)
        of_scales = column * part // gemm.SCALE_TILE_ROWS
        for step in cutlass.range(steps, unroll=1):
            ring.sync_object_empty.wait(state.index, state.phase)
            barrier = ring.producer_get_barrier(state)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            mainloop.issue(codes, (column, step, expert), state.index, barrier)
            mainloop.issue(scales, (of_scales, step, expert), state.index, barrier)
            for box in cutlass.range(granules // 2, unroll=1):
                place = state.index * (most // 2) + box
                mainloop.issue(tokens, (row * (most // 2) + box, step), place, barrier)
            if granules % 2 > 0:
                last = granules - 1
                place = state.index * most + last
                mainloop.issue(half, (row * most + last, step), place, barrier)
            state.advance()
    ring.producer_tail(state)


@cute.jit
def consume(ring: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of this thread block, each by the form of its width."""
    held, mine = own
    groups, walk, steps = given
    state = mainloop.consumer_state(ring.num_stages)
    stored = Int32(0)
    widths = cutlass.const_expr(facts.WIDTHS[form.gemm.tactic.rows])
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, _ = mainloop.tile_at(walk, number)
        width = decoded_rows.width_of(groups.slots, row, form.gemm.tactic.rows)
        for i in cutlass.range_constexpr(len(widths)):
            if width == widths[i]:
                at = place_of_weights(within, (mine, column), form.gemm)
                state, sums = multiply(ring, state, (held, at, steps), widths[i], form.gemm)
                # Computed after the products: kept values would take registers from them.
                tile = mainloop.tile_at(walk, number)
                if cutlass.const_expr(form.gemm.parts == GATE_AND_UP):
                    write_gated(leaving, (held, mine), sums, (groups, tile), form)
                else:
                    written = (held, mine, stored)
                    stored = write_products(leaving, written, sums, (groups, tile), form)
    if stores_pieces():
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class WeightPlace(NamedTuple):
    """A thread's block of two rows of weights: which codes and which scales are its own."""

    codes: tuple[Any, Any]  # rows g and g + 8 of wgmma: the places of their words
    scales: tuple[Any, Any]
    block: Any


def place_of_weights(within: Any, own: Any, form: gemm.GemmForm) -> WeightPlace:
    """Return the place of a warpgroup's thread in the weights of a stage.

    `own` is the warpgroup and the tile's column. A warp's 16 rows of wgmma are rows of a matrix, or
    of FC1 eight rows of gate, then those of up.
    """
    mine, column = own
    warp, g, block = within // gemm.WARP, within % gemm.WARP // 4, within % 4
    part = form.tactic.columns // form.parts
    if form.parts == GATE_AND_UP:
        row = mine * (part // 2) + warp * 8 + g
        below, scale_below = row + part, gemm.SCALE_TILE_BYTES // 4
    else:
        row = mine * gemm.PIECE_ROWS + warp * 16 + g
        below, scale_below = row + 8, 32
    of_scales = stages.word_of_scales(row + column * part % gemm.SCALE_TILE_ROWS)
    places = [(stages.chunk_of_codes(each, block // 2)) * 2 + block % 2 for each in (row, below)]
    return WeightPlace((places[0], places[1]), (of_scales, of_scales + scale_below), block)


@cute.jit
def multiply(
    ring: Any, state: Any, work: Any, width: cutlass.Constexpr, form: cutlass.Constexpr
) -> Any:
    """Sum up one tile; two sets of registers alternate, so the loop goes by two stages."""
    held, at, steps = work
    mma = mainloop.mma_of(Float16, width, warpgroup.OperandSource.RMEM)
    sums = mainloop.sums_of(mma, width)
    a = mma.make_fragment_A(mma.partition_shape_A((gemm.PIECE_ROWS, 2 * SPAN)))
    tokens = cute.local_tile(held.tokens, (width, SPAN, facts.decoded_stages(form)), (0, 0, 0))
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(tokens))
    fragments = (mma, sums, a, b)

    states = state, state.clone()
    states = add_pair(ring, states, fragments, (held, at), begins=True)
    for _ in cutlass.range(steps // 2 - 1, unroll=1):
        states = add_pair(ring, states, fragments, (held, at), begins=False)
    state, before = states
    warpgroup.wait_group(0)
    for _ in cutlass.range_constexpr(2):
        ring.consumer_release(before)
        before.advance()
    return state, sums


def read_weights(ring: Any, state: Any, held: Any, at: WeightPlace) -> tuple[list[Any], list[Any]]:
    """Wait for a stage, and read a thread's codes and scales of two rows."""
    ring.consumer_wait(state)
    codes = [stages.words_at(held.codes, each, state.index, stages.WORDS) for each in at.codes]
    bits = [stages.words_at(held.scales, each, state.index, 1)[0] for each in at.scales]
    return codes, bits


def add_pair(ring: Any, states: Any, fragments: Any, own: Any, *, begins: bool) -> tuple[Any, Any]:
    """Add two stages: decode each into its registers while the wgmma of the stage before run.

    Both are waited for before the pair in front is given back: a ring has four stages at least.
    Trap: both are waited for first. ptxas runs all wgmma one by one where a thread waits for a
    barrier between two stages whose wgmma are under way.
    """
    state, before = states
    held, at = own
    later = state.clone()
    later.advance()
    reads = [read_weights(ring, each, held, at) for each in (state, later)]
    for half in range(2):
        if not begins:
            warpgroup.wait_group(1)
            ring.consumer_release(before)
            before.advance()
        registers = cute.recast_tensor(fragments[2], Uint32)
        few_rows.decode_rows(reads[half], registers, at.block, Uint32(stages.SCALE_BITS), half)
        add_stage(fragments, state.index, half, begins=begins and half == 0)
        state.advance()
    return state, before


def add_stage(fragments: Any, index: Any, half: int, *, begins: bool) -> None:
    """Issue a stage's wgmma."""
    mma, sums, a, b = fragments
    steps = (0, stages.BLOCKS, -half * stages.BLOCKS)
    mainloop.multiply_stage(mma, sums, a, b[None, None, None, index], begins=begins, steps=steps)


# ---- products: what leaves -----------------------------------------------------------------------


def stores_pieces() -> Any:
    """Return whether this warp issues the stores of its warpgroup."""
    thread, _, _ = cute.arch.thread_idx()
    return cute.arch.make_warp_uniform(Int32(thread) % gemm.WARPGROUP // gemm.WARP) == 0


def together(form: gemm.GemmForm) -> None:
    """Synchronise all that multiply."""
    count = facts.decoded_groups(form) * gemm.WARPGROUP
    cute.arch.barrier(barrier_id=EVERY_THREAD, number_of_threads=count)


def way_out(leaving: DecodedLeaving, pieces: Any) -> tuple[Any, Any]:
    """Partition outgoing pieces and the matrix: (piece, buffers), (piece, down, across)."""
    tiles = cute.local_tile(leaving.store.tensor, (GRANULE, gemm.PIECE_COLUMNS), (None, None))
    source, target = cpasync.tma_partition(
        leaving.store.atom, 0, cute.make_layout(1), cute.group_modes(pieces, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )  # fmt: skip
    return source, target


@cute.jit
def write_gated(
    leaving: DecodedLeaving, own: Any, sums: Any, given: Any, form: cutlass.Constexpr
) -> None:
    """Write SwiGLU of a tile as the numbers that its NVFP4 codes stand for.

    A row of the outgoing tile is 64 outputs of a token, from all warps; then one thread quantises
    it, and puts its numbers in the place.
    """
    held, mine = own
    groups, (row, column, expert) = given
    width = cutlass.const_expr(cute.size(sums) * 2)
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    lane, warp = within % LANES, within // LANES
    if (mine == 0) & stores_pieces():  # the last tile's rows have been read
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    together(form.gemm)
    scales = [few_rows.scales_of(groups, expert * GATE_AND_UP + part, expert) for part in range(2)]
    at = stages.chunk_of_numbers(lane, mine * (CHUNKS // 2) + warp)
    address = held.leaving.iterator.toint() + at * 16
    for i in cutlass.range_constexpr(ceil_div(width, BOX_ROWS)):
        first = row * form.gemm.tactic.rows + i * BOX_ROWS + lane % 4 * 2
        made = outputs_of(leaving, sums, (i, first, scales), form)
        decoded_rows.transposed(address + i * (BOX_ROWS * OF_ROW), made)
    together(form.gemm)
    token = mine * gemm.WARPGROUP + within
    if token < width:
        scaling = words.scaling_of(Float32(leaving.hidden_scale[expert]), None)
        requantise_row(held.leaving, token, scaling, form.gemm.target)
    cute.arch.fence_proxy("async.shared", space="cta")
    together(form.gemm)
    if (mine == 0) & stores_pieces():
        source, target = way_out(leaving, held.pieces)
        for i in cutlass.range_constexpr(width // GRANULE):
            to = target[None, row * granules_in(form.gemm) + i, column]
            cute.copy(leaving.store.atom, source[None, i], to)
        cute.arch.cp_async_bulk_commit_group()


def outputs_of(leaving: DecodedLeaving, sums: Any, at: Any, form: Any) -> list[Any]:
    """Return an output of 32 or 16 tokens as a word for each eight: of two adjacent ones.

    `at` is the number of those 32, the thread's first token, and the factors of gate and of up.
    """
    box, token, scales = at
    made, width = [], 2 * cute.size(sums)
    for eight in range(min(BOX_ROWS, width - box * BOX_ROWS) // 8):
        first = (box * BOX_ROWS + eight * 8) // 2
        weights = None
        if form.weighted:
            weights = [few_rows.weight_of(leaving, token + eight * 8 + k) for k in range(2)]
        made.append(gated([sums[first + k] for k in range(4)], scales, weights, form.limit))
    return made


def gated(sums: list[Any], scales: Any, weights: Any, limit: float | None) -> Any:
    """Return the word of an output of two tokens, from two sums of gate and two of up."""
    gate, up = (
        words.rounded_words([mainloop.scaled(sums[2 * part + i], scales[part]) for i in range(2)])
        for part in range(GATE_AND_UP)
    )
    made = words.swiglu_numbers(gate, up, limit)
    if weights is not None:
        made = [codecs.multiply_rn(n, each) for n, each in zip(made, weights, strict=True)]
    return words.rounded_words(made)[0]


def requantise_row(leaving: Any, row: Any, scaling: Any, target: str) -> None:
    """Replace four blocks of a row by what their codes and scales stand for, in K's order."""
    codes, of_scales = [], Uint32(0)
    for block in range(stages.BLOCKS):
        read: list[Any] = []
        for half in range(2):
            at = stages.chunk_of_numbers(row, 2 * block + half)
            read += stages.words_at(leaving, at, 0, CHUNK_WORDS)
        code = words.scale_code_of(words.block_amax(read), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        codes.append(words.code_words(read, factor, target))
        of_scales = of_scales | codecs.shift_left(Uint32(code), 8 * block)
    for chunk, made in enumerate(decoded_rows.decoded_chunks(codes, of_scales)):
        registers = cute.make_rmem_tensor(CHUNK_WORDS, Uint32)
        words.fill(registers, made)
        cute.autovec_copy(registers, leaving[None, stages.chunk_of_numbers(row, chunk), 0])


@cute.jit
def write_products(
    leaving: DecodedLeaving, own: Any, sums: Any, given: Any, form: cutlass.Constexpr
) -> Any:
    """Scale, round and store a warpgroup's 64 columns, 64 tokens at a time by two buffers."""
    held, mine, stored = own
    groups, (row, column, expert) = given
    width = cutlass.const_expr(cute.size(sums) * 2)
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % gemm.WARPGROUP
    lane, warp = within % LANES, within // LANES
    scales = few_rows.scales_of(groups, expert, expert)
    # Matrices of a store: rows g, then g + 8 of eight tokens; then the same of eight more.
    inside = stages.chunk_of_numbers(lane // 16 * 8 + lane % 8, warp * 2 + lane // 8 % 2) * 16
    source, target = way_out(leaving, held.pieces)
    barrier = EVERY_THREAD + 1 + mine
    pieces = cutlass.const_expr(ceil_div(width, gemm.PIECE_ROWS))
    for piece in cutlass.range_constexpr(pieces):
        buffer = mine * gemm.PIECES_AT_ONCE + (stored + piece) % gemm.PIECES_AT_ONCE
        tokens = cutlass.const_expr(min(gemm.PIECE_ROWS, width - piece * gemm.PIECE_ROWS))
        if stores_pieces():  # the store that read this buffer before has read it
            cute.arch.cp_async_bulk_wait_group(gemm.PIECES_AT_ONCE - 1, read=True)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=gemm.WARPGROUP)
        address = held.leaving.iterator.toint() + buffer * gemm.PIECE_BYTES + inside
        for i in cutlass.range_constexpr(tokens // 16):
            first = (piece * gemm.PIECE_ROWS + i * 16) // 2
            numbers = [mainloop.scaled(sums[first + k], scales) for k in range(8)]
            decoded_rows.transposed(address + i * 16 * OF_ROW, words.rounded_words(numbers))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=gemm.WARPGROUP)
        if stores_pieces():
            for i in cutlass.range_constexpr(tokens // GRANULE):
                of_tile = row * granules_in(form.gemm) + piece * (gemm.PIECE_ROWS // GRANULE) + i
                to = target[None, of_tile, column * facts.decoded_groups(form.gemm) + mine]
                of_buffer = source[None, buffer * (gemm.PIECE_ROWS // GRANULE) + i]
                cute.copy(leaving.store.atom, of_buffer, to)
            cute.arch.cp_async_bulk_commit_group()
    return stored + pieces


# ---- rows: launch --------------------------------------------------------------------------------


@cute.jit
def launch_gather(
    pointers: tuple[cute.Pointer, ...], extents: tuple[Int32, ...], form: cutlass.Constexpr,
    stream: CUstream,
) -> None:  # fmt: skip
    """Launch on blocks of a row, experts of a token, grid along x and y."""
    blocks, chosen, walkers, columns = extents
    values, *known, numbers = pointers
    read = rows.in_words(values, words.BLOCK_WORDS)
    written = rows.in_words(cute.recast_ptr(numbers, dtype=Uint32), CHUNK_WORDS)
    tensors = decoded_rows.DecodedGathering(*(read, *rows.flat(known), written))
    decoded_rows.gather_kernel(tensors, blocks, chosen, form.tile, form.target).launch(
        grid=[walkers, columns, 1], block=[rows.THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- products: launch ----------------------------------------------------------------------------


@cute.jit
def launch_decoded(
    pointers: tuple[cute.Pointer, ...], extents: tuple[Int32, ...], form: cutlass.Constexpr,
    stream: CUstream,
) -> None:  # fmt: skip
    """Launch on the extents rows at most, N, K, experts, thread blocks."""
    if cutlass.const_expr(gemm.has_few_rows(form.gemm)):
        decoded_few.launched(pointers, extents, form, stream, EARLY)
    else:
        launch_many(pointers, extents, form, stream)


def launch_many(pointers: Any, extents: Any, form: Any, stream: Any) -> None:
    """Launch tiles of many rows."""
    assert facts.decoded_stages(form.gemm) >= 4, "two pairs of stages are under way"
    m, n, k, experts, blocks = extents
    of_gemm = form.gemm
    numbers, codes, scales, *known = pointers
    out, *epilogue = known[5:]
    groups = decoded_rows.Groups(*rows.flat(known[:5]))
    parts, k = of_gemm.parts, cute.assume(k, divby=gemm.SCALE_TILE_ROWS)
    part = n // parts
    matrices = [cute.make_tensor(numbers, cute.make_layout((m, k), stride=(Int64(k), 1)))] * 2
    of_tiles = k // SPAN * (gemm.SCALE_TILE_BYTES // 4)
    for pointer, count, row_words in (
        (codes, part, k // 8), (scales, part // gemm.SCALE_TILE_ROWS, of_tiles),
    ):  # fmt: skip
        wide = Int64(row_words)
        strides = (wide, 1, wide * Int64(count))
        layout = cute.make_layout((count, row_words, experts * parts), stride=strides)
        matrices.append(cute.make_tensor(pointer, layout))
    feeds = tuple(map(mainloop.feed_of, matrices, layouts_of(of_gemm), boxes_of(of_gemm)))
    columns = cute.assume(part, divby=gemm.SCALE_TILE_ROWS)
    # FC1 writes FP16 numbers: the store moves 16 bits, whatever they are.
    mD = cute.make_tensor(
        cute.recast_ptr(out, dtype=BFloat16),
        cute.make_layout((m, columns), stride=(Int64(columns), 1)),
    )
    store = mainloop.store_of(mD, GRANULE)
    if parts == GATE_AND_UP:
        hidden_scale, weights = rows.flat(epilogue)
        leaving = DecodedLeaving(store, groups.slots, weights, hidden_scale)
    else:
        leaving = DecodedLeaving(store, groups.slots)
    decoded_kernel(feeds, leaving, groups, (n, k), form).launch(
        grid=[1, 1, blocks],
        block=[gemm.WARPGROUP * (1 + facts.decoded_groups(of_gemm)), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

GATHER, PRODUCTS = described_decoded(launch_gather, launch_decoded, SM90A)
FC1, FC2 = PRODUCTS
KERNEL = decoded_experts(GATHER, PRODUCTS, SM90A)
