"""Routed experts in NVFP4 on Blackwell (sm_100a): FC1 with SwiGLU and requantisation, FC2, sum.

`KERNEL` is a whole call (entry.py); its operands are those of sm90_moe_nvfp4.
grouped_kernel is sm100_gemm_nvfp4 (same warps, rings and arrival counts) over tiles that each have
one expert: the experts' matrices are members of one TMA tensor, and the number of tiles is read on
the GPU. An FC1 tile is gate next to up and leaves as NVFP4 codes of FC2's input, an FC2 tile as
BF16 by TMA. Every group begins at a multiple of 128 rows, so its
scales are whole tiles.

Deterministic. Nothing waits on the host, so it can be captured in a CUDA graph; a call allocates
its output and workspace. Compiled but never run: no sm_100a device was available.
Shape letters: T tokens, K chosen, D hidden, F width of an expert, E experts here, R rows at most.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm100_gemm_nvfp4 as gemm
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe.entry import READ, ScaleWords, described, routed_experts
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm
from degarble.kernels.primitives import device_words as words
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM100A

# --------------------------------------------------------------------------------------------------
# Epilogue of the expert products on sm_100a: FC1 tiles leave as NVFP4, FC2 tiles as BF16.
#
# Each of the four storing warps works on its 32 rows independently; unused rows are neither read
# nor stored. FC1, one row a thread: read gate and up by tcgen05.ld, scale, round to BF16 as
# separate kernels store them, release the sums (all 128 threads arrive), then in registers SwiGLU,
# the routing weight if it precedes w2, one rounding to BF16, blocks of 16 quantised as all
# quantising kernels do; codes and scales go straight to memory. FC2: pieces of 32 rows by TMA.
#
# Compiled but never run: there was no sm_100a device.


class Sm100Fc1Outputs(NamedTuple):
    """Outputs of FC1 in memory, and what its epilogue reads in addition to the sums."""

    codes: Any  # (words of two blocks, pairs of blocks)
    scales: Any  # words of four
    hidden_scale: Any  # of each expert: decode scale of what is written
    slots: Any  # of each row
    weights: Any  # of each slot


class Sm100ExpertTensors(NamedTuple):
    """Tensors that the walk and the epilogue read in addition to the operands."""

    scale_a: Any  # of each expert
    scale_b: Any  # of each expert, part by part
    rows: Any  # of all groups
    experts: Any  # of each tile of rows
    slots: Any  # of each row


def scales_of(groups: Sm100ExpertTensors, expert: Any, parts: int) -> tuple[Any, ...]:
    """Return the factor of each part of a tile."""
    of_a = Float32(groups.scale_a[expert])
    of_b = (Float32(groups.scale_b[expert * parts + part]) for part in range(parts))
    return tuple(codecs.multiply_rn(of_a, each) for each in of_b)


def weight_of_row(leaving: Sm100Fc1Outputs, row: Any) -> Any:
    """Return the routing weight of a row; 0 for a row of zeros."""
    slot = Int32(leaving.slots[row])
    weight = Float32(leaving.weights[cutlass.max(slot, 0)])
    return codecs.select(slot >= 0, weight, 0.0)


# ---- tiles ---------------------------------------------------------------------------------------


@cute.jit
def leave_tiles(
    outlets: Any, walk: Any, groups: Sm100ExpertTensors, blocks: Any, form: Any
) -> None:
    """Write tile after tile; `outlets` are destination, piece buffers, sums and their ring."""
    leaving, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // facts.WARP)
    reading = tcgen05.reading_of(sums, thread)
    state, stored = mainloop.consumer_state(tensor_memory.accumulators(form.gemm)), Int32(0)
    outlet = leaving
    if cutlass.const_expr(form.gemm.parts == 1):
        outlet = outlet_of_warp(leaving, pieces, thread % facts.WARP, warp)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = mainloop.tile_at(walk, number)
        scales = scales_of(groups, expert, form.gemm.parts)
        first = row * tensor_memory.LANES + warp * moe_problem.WARP_ROWS
        if cute.arch.make_warp_uniform(groups.slots[first]) >= 0:
            if cutlass.const_expr(form.gemm.parts == GATE_AND_UP):
                at = (row * tensor_memory.LANES + thread, column, expert, blocks)
                state = requantise_tile(outlet, reading, (ring, state), (at, scales), form)
            else:
                pieces_of_row = form.gemm.tactic.columns // facts.PIECE_COLUMNS
                place = (first // moe_problem.WARP_ROWS, column * pieces_of_row)
                work = (place, stored, scales)
                state, stored = tcgen05.store_tile(outlet, reading, ring, state, work)
        else:
            state = pass_over(ring, state)
    if cutlass.const_expr(form.gemm.parts == 1):
        mainloop.drain(outlet)


@cute.jit
def pass_over(ring: Any, state: Any) -> Any:
    """Release the sums of a tile in which this warp has no rows."""
    ring.consumer_wait(state)
    tcgen05.fence("before")
    ring.consumer_release(state)
    state.advance()
    return state


def outlet_of_warp(store: Any, shared: Any, lane: Any, warp: Any) -> mainloop.EpilogueBuffers:
    """Return a warp's outlet for pieces of 32 rows: its own buffers and named barrier."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=tcgen05.STORE_BITS
    )
    copy = cute.make_tiled_copy_tv(
        atom,
        cute.make_layout((moe_problem.WARP_ROWS, 1)),
        cute.make_layout((1, tcgen05.STORE_BITS // BFloat16.width)),
    )
    shape = (moe_problem.WARP_ROWS, facts.PIECE_COLUMNS, facts.PIECES_AT_ONCE)
    own = cute.local_tile(shared, shape, (0, 0, warp))
    return mainloop.outlet_of(store, own, copy, lane, moe_problem.FIRST_BARRIER + warp)


# ---- FC1 -----------------------------------------------------------------------------------------


@cute.jit
def requantise_tile(leaving: Sm100Fc1Outputs, reading: Any, sums: Any, work: Any, form: Any) -> Any:
    """Write a thread's row of SwiGLU as NVFP4.

    `work` is (row, tile along columns, expert, blocks of a row) and the factors of gate and of up.
    """
    ring, state = sums
    place, scales = work
    kept = cute.make_rmem_tensor(moe_problem.words_of_row(form), Uint32)
    ring.consumer_wait(state)
    tcgen05.fence("after")
    take_row(reading, state.index, scales, kept, form)
    tcgen05.fence("before")
    ring.consumer_release(state)
    state.advance()
    requantise_row(leaving, kept, place, form)
    return state


@cute.jit
def requantise_row(leaving: Sm100Fc1Outputs, kept: Any, at: Any, form: Any) -> None:
    """Requantise a row of gate next to up in BF16; `at` is as in `requantise_tile`."""
    row, column, expert, blocks = at
    scaling = words.scaling_of(Float32(leaving.hidden_scale[expert]), None)
    weight = None
    if cutlass.const_expr(form.weighted):
        weight = weight_of_row(leaving, row)
    of_tile = moe_problem.blocks_of_tile(form)
    for block in cutlass.range_constexpr(0, of_tile, moe_problem.BLOCKS_OF_PIECE):
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
    numbers = [mainloop.scaled(registers[j], scale) for j in range(facts.PIECE_COLUMNS)]
    for j, word in enumerate(words.rounded_words(numbers)):
        kept[piece * facts.PIECE_COLUMNS // 2 + j] = word


def halves_of(kept: Any, first: int, form: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return words of gate and of up, block by block of a piece."""
    up = moe_problem.columns_of_part(form) // 2
    count = moe_problem.WORDS_OF_BLOCK
    return [
        (
            [Uint32(kept[block * count + i]) for i in range(count)],
            [Uint32(kept[up + block * count + i]) for i in range(count)],
        )
        for block in range(first, first + moe_problem.BLOCKS_OF_PIECE)
    ]


def gated(pair: tuple[list[Any], list[Any]], weight: Any, limit: float | None) -> list[Any]:
    """Return the words of a block of outputs from those of gate and of up."""
    made = words.swiglu_numbers(*pair, limit)
    if weight is not None:
        made = [codecs.multiply_rn(number, weight) for number in made]
    return words.rounded_words(made)


@cute.jit
def quantise_blocks(
    leaving: Sm100Fc1Outputs, halves: Any, place: Any, given: Any, form: Any
) -> None:
    """Write four blocks of a row: their codes, and the word of their scales."""
    row, first, blocks = place
    weight, scaling = given
    made, word = [], Uint32(0)
    for i in cutlass.range_constexpr(moe_problem.BLOCKS_OF_PIECE):
        block = gated(halves[i], weight, form.limit)
        code = words.scale_code_of(words.block_amax(block), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        made.append(words.code_words(block, factor, form.gemm.target))
        # Columns beyond the width come from padding of w13's scales: anything.
        code = codecs.select(first + i < blocks, code, 0)
        word = word | codecs.shift_left(code, 8 * i)
    for i in cutlass.range_constexpr(0, moe_problem.BLOCKS_OF_PIECE, moe_problem.BLOCKS_OF_STORE):
        if first + i < blocks:
            at = moe_problem.codes_at(Int64(row), first + i, Int64(blocks))
            words.store(leaving.codes, at, made[i] + made[i + 1])
    if first < blocks:
        leaving.scales[moe_problem.scales_at(Uint32(row), Uint32(first), Uint32(blocks))] = word


# --------------------------------------------------------------------------------------------------
# Routed experts in NVFP4 on Blackwell (sm_100a): FC1 with SwiGLU and requantisation, FC2, sum.

# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    leaving: Any,
    groups: Sm100ExpertTensors,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp as gemm.gemm_kernel does; `leaving` is how tiles are written."""
    of_gemm = form.gemm
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = prepared(of_gemm)
    # The number of rows is read here: the host knows only a bound.
    walk = mainloop.walk_of((Int32(groups.rows[0]), extents[0]), of_gemm.tactic, groups.experts)
    steps = ceil_div(extents[1], of_gemm.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        feedings = gemm.feedings_of(feeds, held.shared, of_gemm)
        tcgen05.load(held.ring, feedings, walk, steps, of_gemm)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        rings, inner = (held.ring, held.sums_ring), (steps, extents[1] // tcgen05.BLOCK)
        gemm.multiply(rings, gemm.operands_of(held, of_gemm), walk, inner, of_gemm)
    else:
        outlets = (leaving, held.pieces, held.sums, held.sums_ring)
        blocks = extents[0] // of_gemm.parts // tcgen05.BLOCK
        leave_tiles(outlets, walk, groups, blocks, form)
        tcgen05.give_back(held.base, of_gemm)


def prepared(form: GemmForm) -> gemm.Nvfp4BlockState:
    """Lay out shared memory, make both rings, allocate tensor memory, synchronise.

    FC1 has no piece buffers; of FC2 every warp has its own.
    """
    memory = cutlass.memory.SmemAllocator()
    mma = tcgen05.nvfp4_mma(form)
    shared, pieces = gemm.shared_memory(memory, mma, form), None
    if form.parts == 1:
        layout = mainloop.piece_layout(moe_problem.piece_buffers(), moe_problem.WARP_ROWS)
        pieces = mainloop.shared_of(memory, BFloat16, layout)
    ring, sums_ring = tcgen05.ring_of_stages(memory, form), tcgen05.ring_of_sums(memory, form)
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    tcgen05.allocate(address, form)
    tcgen05.begin(form.tactic)
    base = tcgen05.base_of(address)
    sums = tcgen05.sums_of(mma, base, form)
    return gemm.Nvfp4BlockState(mma, shared, pieces, ring, sums_ring, base, sums)


def matrices_of(
    pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm
) -> dict[str, Any]:
    """View A, B and their scales: B as matrices of N / parts rows, expert by expert."""
    a, a_scales, b, b_scales = pointers
    m, n, k, experts = extents
    part, count = n // form.parts, experts * form.parts
    words = cute.assume(k // gemm.CODES_OF_WORD, divby=facts.TMA_ALIGNMENT // 4)
    units = ceil_div(k, tcgen05.BLOCK * tensor_memory.SCALES_OF_WORD) * gemm.UNITS_OF_TILE
    made = {}
    for side, of_codes, of_scales, height in (("a", a, a_scales, m), ("b", b, b_scales, part)):
        tiles = ceil_div(height, facts.SCALE_TILE_ROWS)
        for name, pointer, own, wide in (
            (side, of_codes, height, words),
            (f"scales of {side}", of_scales, tiles, units),
        ):
            shape: tuple[Any, ...] = (own, wide)
            strides: tuple[Any, ...] = (Int64(wide), 1)
            if side == "b":
                # Third mode: the matrix of an expert; FC1 has two per expert, gate and up.
                shape, strides = (*shape, count), (*strides, Int64(wide) * Int64(own))
            made[name] = cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))
    return made


def feeds_of(
    pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm
) -> tuple[mainloop.TmaFeed, ...]:
    """Make the TMA atoms of A, B and their scales, box by box."""
    matrices = matrices_of(pointers, extents, form)
    of_loads = (matrices[load.name] for load in facts.loads(form))
    sharers = tensor_memory.sharers(form)
    boxes = zip(of_loads, gemm.layouts(form), gemm.boxes_of(form), sharers, strict=True)
    return tuple(mainloop.feed_of(*box) for box in boxes)


def leaving_of(
    outputs: tuple[Any, ...], slots: Any, extents: tuple[Any, ...], form: MoeForm
) -> Any:
    """Return how tiles are written: FC1 as codes and scales, FC2 by TMA."""
    if form.gemm.parts == GATE_AND_UP:
        codes = rows.in_words(outputs[0], 2 * moe_problem.BLOCK // gemm.CODES_OF_WORD)
        scales, hidden_scale, weights = rows.flat(outputs[1:])
        return Sm100Fc1Outputs(codes, scales, hidden_scale, slots, weights)
    m, n, *_ = extents
    n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
    mD = cute.make_tensor(outputs[0], cute.make_layout((m, n), stride=(Int64(n), 1)))
    return mainloop.store_of(mD, moe_problem.WARP_ROWS)


@cute.jit
def launch_grouped(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents rows at most, N, K, experts, clusters."""
    *of_matrices, clusters = extents
    tactic = form.gemm.tactic
    feeds = feeds_of(pointers[:4], tuple(of_matrices), form.gemm)
    groups = Sm100ExpertTensors(*rows.flat(pointers[4:READ]))
    leaving = leaving_of(pointers[READ:], groups.slots, tuple(of_matrices), form)
    grouped_kernel(feeds, leaving, groups, extents[1:3], form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[tensor_memory.threads(), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

FC1, FC2 = PRODUCTS = described(launch_grouped, SM100A, ScaleWords(read=Int64, written=Uint32))
KERNEL = routed_experts(PRODUCTS, SM100A)
compile_form = PRODUCTS.compile_form
