"""NVFP4 x NVFP4 GEMM (W4A4) on Blackwell (sm_100a) by the block-scaled tcgen05.mma.

D = (A sA)(B sB)^T in BF16: packed E2M1 codes [rows, K / 2 bytes], E4M3 scales per block of 16 in
128x4 order, float32 tensor scales sA and sB. Stages are 256 of K.
Roles of six warps: 0 to 3 store, 4 copies scales and multiplies, 5 loads by TMA.
Pipelines: (1) ring of stages (codes and scales), PipelineTmaUmma: full is one arrival plus bytes,
  empty is a commit. (2) ring of sums in tensor memory, PipelineUmmaAsync: full is a commit, empty
  128 arrivals. There are two sums where they fit next to the scales, so that a tile is stored while
  the next is multiplied; 256 columns leave room for one.
A stage: wait; clear scales beyond K in shared memory; tcgen05.cp scales to tensor memory; 4
  tcgen05.mma (K = 64) with codes from shared memory; commit. After the last stage commit the sums;
  the storing warps read them by tcgen05.ld, multiply by sA sB in float32, round once, store by TMA.
Variants by tactic: two thread blocks together (pair), swapped operands for few rows (swapped).
references.tensor_core.block_scaled_gemm defines every bit of the sums, whatever the tactic.

The entry point allocates only D and never synchronises. Compiled but never run: no sm_100a device
was available. Shape letters: M rows of A, N rows of B, P = K / 2 bytes.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int16, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.entry import described, require_one_block
from degarble.kernels.gemm.problem import GemmForm, GemmProblem
from degarble.kernels.gemm.sm90_gemm_nvfp4 import operands_of as nvfp4_operands
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM100A

# --------------------------------------------------------------------------------------------------
# Two thread blocks that multiply together on sm_100a: cta_group::2 of tcgen05 (PTX ISA 9.1).
#
# Neighbours along M are a pair. Each block loads its 128 rows of A with their scales, half of the
# rows of B, and all scales of B: instruction and scale copy read both shared memories at the same
# offsets and write to both tensor memories. The first block issues for both. Barriers: bytes of
# both blocks count at the first block's full barrier; its commits arrive at both blocks; the
# storing threads of both arrive at it. Both end together, because tensor memory is freed by both
# and a block's shared memory has to exist while the other one still arrives there.
#
# GemmForm rejects tactics that are not pairs. Compiled but never run.


def sharing_of(form: GemmForm) -> tuple[Any, ...]:
    """Return by load which blocks of the cluster receive a box: place, number, mask."""
    by_side = tcgen05.sharing_of(form)
    halved = form.tactic.together > 1
    return tuple(
        sharing_of_half(form) if halved and load.name == "b" else by_side[load.side]
        for load in facts.loads(form)
    )


def sharing_of_half(form: GemmForm) -> tuple[Any, int, Any]:
    """Return which blocks receive the same half of B: every second one along M."""
    row, column, _ = cute.arch.block_idx()
    rows, together = form.tactic.cluster_rows, form.tactic.together
    count = rows // together
    if count == 1:
        return 0, 1, None
    every_second = Int16(sum(1 << together * i for i in range(count)))
    return row // together, count, every_second << (column * rows + row % together)


def group(form: GemmForm) -> tuple[Any, ...]:
    """Return the CTA group of a pair's loads, whose first block counts the bytes; else ()."""
    return () if form.tactic.together == 1 else (tcgen05.group_of(form),)


def leads(form: GemmForm) -> Any:
    """Return whether this thread block issues instructions: for its pair, or for itself."""
    if form.tactic.together == 1:
        return True
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) % 2 == 0


def of_other(tensor: Any) -> Any:
    """View the same place of the other thread block's shared memory."""
    other = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
    return cute.make_tensor(cute.arch.map_dsmem_ptr(tensor.iterator, other), tensor.layout)


# ---- sums that overlap ---------------------------------------------------------------------------


def place_to_fill(state: Any, form: GemmForm) -> Any:
    """Return the next place of sums; a ring of one that overlaps has two alternating places."""
    # A producer's phase starts at 1, a consumer's at 0: both begin with place 0.
    return state.phase ^ 1 if tensor_memory.overlaps(form) else state.index


@cute.jit
def store_tile(
    outlet: Any, reading: Any, ring: Any, state: Any, work: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Store a tile; release the sums after reading the piece that both places share.

    The pieces read later do not overlap the next tile's sums. They do overlap those of the tile
    after it, which wait for this thread's next release.
    """
    (row, column), stored, scales = work
    pieces, place = cute.size(reading.source, mode=[4]), state.phase
    ring.consumer_wait(state)
    tcgen05.fence("after")
    for i in cutlass.range_constexpr(pieces):
        piece = tensor_memory.piece_in_turn(i, place, pieces)
        part = reading.source[None, None, None, 0, piece, place]
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, part, registers)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(i == 0):
            tcgen05.fence("before")
            ring.consumer_release(state)
        numbers = [registers[j] for j in range(facts.PIECE_COLUMNS)]
        mainloop.store_piece(outlet, numbers, (row, column + piece), stored + i, scales)
    state.advance()
    return state, stored + Int32(pieces)


@cute.jit
def store_tiles_of_pair(
    outlets: Any, walk: Any, scales: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Store tile after tile of overlapping sums; `outlets` as in tcgen05.store_tiles."""
    store, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    outlet, reading = tcgen05.outlet_of(store, pieces, thread), tcgen05.reading_of(sums, thread)
    state, stored = mainloop.consumer_state(tensor_memory.accumulators(form)), Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = mainloop.tile_at(walk, number)
        place = (row, column * tensor_memory.stores(form))
        state, stored = store_tile(outlet, reading, ring, state, (place, stored, scales))
    mainloop.drain(outlet)


# ---- the end -------------------------------------------------------------------------------------


@cute.jit
def end_together(base: Any, form: cutlass.Constexpr) -> None:
    """Synchronise the cluster, then free tensor memory by the first warps."""
    tcgen05.fence("before")
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tcgen05.fence("after")
    if cute.arch.warp_idx() == 0:
        columns = tensor_memory.columns_allocated(form)
        cute.arch.dealloc_tmem(base, columns, is_two_cta=True)


# --------------------------------------------------------------------------------------------------
# Store tiles of D^T on sm_100a, where few rows of A are columns of the instruction.
#
# A storing thread has one lane of tensor memory: one column of D, with all rows of the tile. It
# scales and rounds them as epilogue does and writes them to shared memory, where adjacent threads
# write adjacent addresses. One TMA store takes the piece: 128 columns of the tile's rows of D,
# without what lies outside D. The four warps meet at a named barrier before the buffer is written
# and after.
#
# `tensor_memory.require_extents` rejects rows that the tile cannot address. Compiled but never run.


class SwappedEpilogueBuffers(NamedTuple):
    """TMA's view of D and of the buffers, and the threads' view of the buffers."""

    atom: Any
    target: Any  # (piece, pieces along M, pieces along N) of D
    source: Any  # (piece, buffers)
    shared: Any  # (rows of D, columns of D, buffers)
    thread: Any


def piece_layout(form: GemmForm, buffers: int) -> Any:
    """Return the layout of pieces in shared memory: rows of D, 128 columns each."""
    columns = tensor_memory.LANES
    shape = (form.tactic.columns, columns, buffers)
    return cute.make_layout(shape, stride=(columns, 1, form.tactic.columns * columns))


def pieces_of_swapped(memory: Any, form: GemmForm) -> Any:
    """Allocate the buffers of pieces."""
    layout = piece_layout(form, facts.PIECES_AT_ONCE)
    return memory.allocate_tensor(BFloat16, layout, facts.ALIGNMENT)


def store_of(tensor: Any, form: GemmForm) -> mainloop.TmaStore:
    """Make the TMA atom that stores pieces of D."""
    layout = cute.slice_(piece_layout(form, 1), (None, None, 0))
    box = (form.tactic.columns, tensor_memory.LANES)
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box
    )
    return mainloop.TmaStore(atom, coordinates)


def outlet_of(store: mainloop.TmaStore, shared: Any, thread: Any) -> SwappedEpilogueBuffers:
    """Partition D and the buffers."""
    pieces = cute.local_tile(store.tensor, cute.product_each(shared.shape)[:2], (None, None))
    source, target = cpasync.tma_partition(
        store.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(pieces, 0, 2),
    )
    return SwappedEpilogueBuffers(store.atom, target, source, shared, thread)


@cute.jit
def store_piece(
    outlet: SwappedEpilogueBuffers,
    numbers: Any,
    place: tuple[Any, Any],
    at: Any,
    scales: tuple[Any, ...],
) -> None:
    """Scale a column's float32 numbers, round them to BF16, store the piece from a buffer."""
    stores = cute.arch.make_warp_uniform(outlet.thread // facts.WARP) == 0
    if stores:  # the store that read this buffer before has read it
        cute.arch.cp_async_bulk_wait_group(facts.PIECES_AT_ONCE - 1, read=True)
    meet()
    for i in cutlass.range_constexpr(len(numbers)):
        outlet.shared[i, outlet.thread, at] = BFloat16(mainloop.scaled(numbers[i], scales))
    cute.arch.fence_proxy("async.shared", space="cta")
    meet()
    if stores:
        cute.copy(outlet.atom, outlet.source[None, at], outlet.target[None, *place])
        cute.arch.cp_async_bulk_commit_group()


def meet() -> None:
    """Synchronise the storing warps."""
    cute.arch.barrier(
        barrier_id=tcgen05.BARRIER_OF_STORES,
        number_of_threads=tensor_memory.threads_that_store(),
    )


@cute.jit
def store_swapped_tiles(
    outlets: Any, walk: Any, scales: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Store tile after tile of D^T; `outlets` are D, buffers of pieces, sums and their ring."""
    store, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    outlet = outlet_of(store, pieces, thread)
    columns = form.tactic.columns
    reading = tcgen05.reading_of(sums, thread, columns)
    state, stored = mainloop.consumer_state(tensor_memory.accumulators(form)), Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        # The walk is over D^T: its rows are columns of D.
        column, row = mainloop.tile_at(walk, number)
        ring.consumer_wait(state)
        tcgen05.fence("after")
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, reading.source[None, None, None, 0, 0, state.index], registers)
        cute.arch.fence_view_async_tmem_load()
        tcgen05.fence("before")
        ring.consumer_release(state)
        numbers = [registers[j] for j in range(columns)]
        store_piece(outlet, numbers, (row, column), stored % facts.PIECES_AT_ONCE, scales)
        state.advance()
        stored += 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)


# --------------------------------------------------------------------------------------------------
# NVFP4 x NVFP4 GEMM (W4A4) on Blackwell (sm_100a) by the block-scaled tcgen05.mma.

CODES_OF_WORD = 8
SCALE_UNIT = 8  # bytes that TMA counts scales in: a stage's row of a scale tile is 256 of them
UNITS_OF_TILE = facts.SCALE_TILE_BYTES // SCALE_UNIT
WORDS_OF_TILE = facts.SCALE_TILE_BYTES // 4
WORDS_OF_LANE = WORDS_OF_TILE // facts.WARP
SPACE_OF = {1: "cta", 2: "cluster"}  # whose shared memory a thread clears scales in
NAMES = ("a", "b", "scales of a", "scales of b")


class Nvfp4StageViews(NamedTuple):
    """Views of the stages: as TMA writes, as the instruction reads, as threads see scales."""

    written: tuple[Any, ...]
    codes: tuple[Any, Any]
    scales: tuple[Any, Any]
    words: tuple[Any, Any]
    whole: tuple[Any, ...]  # (words, stages) of each of NAMES


class Nvfp4BlockState(NamedTuple):
    """State that a thread block sets up before its warps take their roles."""

    mma: Any
    shared: Nvfp4StageViews
    pieces: Any
    ring: Any
    sums_ring: Any
    base: Any
    sums: Any


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    tensor_scales: tuple[Any, Any],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: four store, one multiplies, one loads."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = prepared(form)
    walk = mainloop.walk_of((extents[0], extents[1]), form.tactic)
    steps = ceil_div(extents[2], form.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        tcgen05.load(held.ring, feedings_of(feeds, held.shared, form), walk, steps, form)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        rings, inner = (held.ring, held.sums_ring), (steps, extents[2] // tcgen05.BLOCK)
        # Of a pair only the first block's warp issues, for both.
        if leads(form):
            multiply(rings, operands_of(held, form), walk, inner, form)
    else:
        scale = ops.multiply_rn(tensor_scales[0][0], tensor_scales[1][0])
        outlets = (store, held.pieces, held.sums, held.sums_ring)
        store_tiles_of(form)(outlets, walk, (scale,), form)
        # Blocks of a pair free tensor memory together, below.
        if cutlass.const_expr(form.tactic.together == 1):
            tcgen05.give_back(held.base, form)
    if cutlass.const_expr(form.tactic.together > 1):
        end_together(held.base, form)


def store_tiles_of(form: GemmForm) -> Any:
    """Return the store function: of D, of overlapping sums, or of D^T."""
    if tensor_memory.overlaps(form):
        return store_tiles_of_pair
    return store_swapped_tiles if form.tactic.swapped else tcgen05.store_tiles


def pieces_of(memory: Any, form: GemmForm) -> Any:
    """Allocate the buffers of pieces of D."""
    if form.tactic.swapped:
        return pieces_of_swapped(memory, form)
    pieces = mainloop.piece_layout(facts.PIECES_AT_ONCE, tensor_memory.LANES)
    return mainloop.shared_of(memory, BFloat16, pieces)


def prepared(form: GemmForm) -> Nvfp4BlockState:
    """Lay out shared memory, make both rings, allocate tensor memory, synchronise."""
    memory = cutlass.memory.SmemAllocator()
    mma = tcgen05.nvfp4_mma(form)
    shared = shared_memory(memory, mma, form)
    sD = pieces_of(memory, form)
    ring, sums_ring = tcgen05.ring_of_stages(memory, form), tcgen05.ring_of_sums(memory, form)
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    tcgen05.allocate(address, form)
    tcgen05.begin(form.tactic)
    base = tcgen05.base_of(address)
    return Nvfp4BlockState(mma, shared, sD, ring, sums_ring, base, tcgen05.sums_of(mma, base, form))


def operands_of(held: Nvfp4BlockState, form: GemmForm) -> tuple[Any, ...]:
    """Return the arguments of `multiply`: instruction, sums, A and B with scales, scale words."""
    mma, shared = held.mma, held.shared
    scales = tcgen05.scales_of(mma, held.base, shared.scales, form)
    a, b = mma.make_fragment_A(shared.codes[0]), mma.make_fragment_B(shared.codes[1])
    words = shared.words
    if form.tactic.together > 1:
        words += tuple(map(of_other, shared.words))
    return mma, held.sums, (a, scales[0]), (b, scales[1]), words


@cute.jit
def multiply(rings: Any, work: Any, walk: Any, extents: Any, form: cutlass.Constexpr) -> None:
    """Sum up tile after tile."""
    ring, ring_of_sums = rings
    mma, sums, (a, a_scales), (b, b_scales), words = work
    steps, blocks = extents
    state = mainloop.consumer_state(tensor_memory.footprint(form).stages)
    target = mainloop.producer_state(tensor_memory.accumulators(form))
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        column = mainloop.tile_at(walk, number)[1]
        skipped = tensor_memory.columns_skipped(column, form)
        # A tile of 64 or 192 columns may begin within a 128-row scale tile of B.
        of_b = tcgen05.shifted(b_scales.tensor, skipped)
        ring_of_sums.producer_acquire(target)
        tcgen05.fence("after")
        into = sums[None, None, None, place_to_fill(target, form)]
        for step in cutlass.range(steps, unroll=1):
            ring.consumer_wait(state)
            tcgen05.fence("after")
            end = tensor_memory.end_of_scales(blocks, step, form)
            clear_beyond(words, state.index, end, SPACE_OF[form.tactic.together])
            # Ordered before the products below and after those before: same thread.
            tcgen05.bring_scales(a_scales, state.index)
            tcgen05.bring_scales(b_scales, state.index)
            at = (None, None, None, state.index)
            tcgen05.multiply_stage(mma, into, (a[at], a_scales.tensor), (b[at], of_b), step == 0)
            ring.consumer_release(state)
            state.advance()
        ring_of_sums.producer_commit(target)
        target.advance()
    ring_of_sums.producer_tail(target)


@cute.jit
def clear_beyond(
    words: Any, stage: Any, end: tuple[Any, Any], space: cutlass.Constexpr = "cta"
) -> None:
    """Clear scales beyond K in the word that K ends within; `words` may include the other block's.

    Padding of scales may hold anything, NaN included. Whole words beyond K arrive as zeros. Blocks
    come in pairs, so half a word is kept, or all of it.
    """
    at, kept = end
    if (at < cute.size(words[0], mode=[2])) & (kept != 0):
        lane = cute.arch.lane_idx()
        for tiles in words:
            for i in cutlass.range_constexpr(cute.size(tiles, mode=[3])):
                part = tiles[None, lane, at, i, stage]
                registers = cute.make_rmem_tensor(WORDS_OF_LANE, Uint32)
                cute.autovec_copy(part, registers)
                for j in cutlass.range_constexpr(WORDS_OF_LANE):
                    registers[j] = registers[j] & Uint32(0xFFFF)
                cute.autovec_copy(registers, part)
        cute.arch.fence_proxy("async.shared", space=space)  # the copy reads through another proxy
        cute.arch.sync_warp()


def feedings_of(feeds: Any, shared: Nvfp4StageViews, form: GemmForm) -> tuple[Any, ...]:
    """Cut every feed for this thread block."""
    sharing = sharing_of(form)
    return tuple(map(mainloop.feeding, feeds, shared.written, boxes_of(form), sharing))


def boxes_of(form: GemmForm) -> tuple[tuple[int, ...], ...]:
    """Return the boxes of the feeds: codes in words, scales in units, matrices if several."""
    units = (4, 4) + (SCALE_UNIT,) * (len(facts.loads(form)) - 2)
    boxes = (
        (load.rows, load.row_bytes // unit, load.matrices)
        for load, unit in zip(facts.loads(form), units, strict=True)
    )
    return tuple(box if box[2] > 1 else box[:2] for box in boxes)


def layouts(form: GemmForm) -> tuple[Any, ...]:
    """Return the layouts of boxes in the stages: codes swizzled, scales tile by tile."""
    count, made = tensor_memory.footprint(form).stages, []
    for load, box in zip(facts.loads(form), boxes_of(form), strict=True):
        rows, inner, *matrices = box
        if load.name == load.side:
            stages_of = (*matrices, count)
            made.append(
                mainloop.staged_layout(Uint32, rows, inner, stages_of, mainloop.Swizzle.K_SW128)
            )
        else:
            of_stage = facts.bytes_of(form, load.name) // SCALE_UNIT
            strides = (inner, 1, *(rows * inner for _ in matrices), of_stage)
            made.append(cute.make_layout((*box, count), stride=strides))
    return tuple(made)


def shared_memory(memory: Any, mma: Any, form: GemmForm) -> Nvfp4StageViews:
    """Allocate the stages; return all views of them."""
    count = tensor_memory.footprint(form).stages
    held = [facts.bytes_of(form, name) for name in NAMES]
    pointers = [
        memory.allocate_array(Uint32, size * count // 4, byte_alignment=facts.ALIGNMENT)
        for size in held
    ]
    codes = tuple(
        cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=Float4E2M1FN), layout.outer)
        for pointer, layout in zip(
            pointers, tcgen05.operand_layouts(mma, form, count), strict=False
        )
    )
    scales = tuple(
        cute.make_tensor(cute.recast_ptr(pointer, dtype=Float8E4M3FN), layout)
        for pointer, layout in zip(
            pointers[2:], tcgen05.scale_layouts(mma, form, count), strict=True
        )
    )
    words = tuple(words_of(pointers[i], held[i], form) for i in (2, 3))
    whole = tuple(
        cute.make_tensor(pointer, cute.make_layout((size // 4, count), stride=(1, size // 4)))
        for pointer, size in zip(pointers, held, strict=True)
    )
    return Nvfp4StageViews(written_as(pointers, form), codes, scales, words, whole)


def written_as(pointers: Any, form: GemmForm) -> tuple[Any, ...]:
    """View the stages as TMA writes them, box by box."""
    made, used = [], dict.fromkeys(NAMES, 0)
    for load_, layout in zip(facts.loads(form), layouts(form), strict=True):
        pointer = pointers[NAMES.index(load_.name)]
        if isinstance(layout, cute.ComposedLayout):
            swizzled = cute.recast_ptr(pointer, layout.inner, dtype=Uint32)
            made.append(cute.make_tensor(swizzled, layout.outer))
        else:
            begins = pointer + used[load_.name] // 4
            made.append(cute.make_tensor(cute.recast_ptr(begins, dtype=Int64), layout))
        used[load_.name] += load_.bytes
    return tuple(made)


def words_of(pointer: Any, size: int, form: GemmForm) -> Any:
    """View scales as threads see them: (words of a lane, lanes, words of K, tiles, stages)."""
    count, inner = tensor_memory.footprint(form).stages, form.tactic.inner
    along = inner // (tcgen05.BLOCK * tensor_memory.SCALES_OF_WORD)
    tiles = size // (along * facts.SCALE_TILE_BYTES)
    layout = cute.make_layout(
        (WORDS_OF_LANE, facts.WARP, along, tiles, count),
        stride=(1, WORDS_OF_LANE, WORDS_OF_TILE, along * WORDS_OF_TILE, size // 4),
    )
    return cute.make_tensor(pointer, layout)


def atoms_of(pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm) -> Any:
    """Make the TMA atoms of A, its scales, B, its scales, box by box; and that of D."""
    m, n, k = extents
    # With swapped operands m counts rows of the weight, n rows of activations.
    tokens, outputs = (n, m) if form.tactic.swapped else (m, n)
    outputs = cute.assume(outputs, divby=facts.COLUMNS_MULTIPLE)
    words = cute.assume(k // CODES_OF_WORD, divby=facts.TMA_ALIGNMENT // 4)
    units = ceil_div(k, tcgen05.BLOCK * tensor_memory.SCALES_OF_WORD) * UNITS_OF_TILE
    tiles = [ceil_div(rows, facts.SCALE_TILE_ROWS) for rows in (m, n)]
    a, a_scales, b, b_scales, d = pointers
    shaped = {
        "a": (a, m, words),
        "b": (b, n, words),
        "scales of a": (a_scales, tiles[0], units),
        "scales of b": (b_scales, tiles[1], units),
        "d": (d, tokens, outputs),
    }
    matrices = {
        name: cute.make_tensor(
            pointer, cute.make_layout((rows, columns), stride=(Int64(columns), 1))
        )
        for name, (pointer, rows, columns) in shaped.items()
    }
    of_loads = (matrices[load_.name] for load_ in facts.loads(form))
    boxes = zip(of_loads, layouts(form), boxes_of(form), tensor_memory.sharers(form), strict=True)
    feeds = tuple(mainloop.feed_of(*box, group(form)) for box in boxes)
    if form.tactic.swapped:
        return feeds, store_of(matrices["d"], form)
    return feeds, mainloop.store_of(matrices["d"], tensor_memory.LANES)


@cute.jit
def launch_gemm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K (swapped: N, M, K) and the number of clusters."""
    m, n, k, clusters = extents
    a, a_scales, b, b_scales, scale_a, scale_b, d = pointers
    if cutlass.const_expr(form.tactic.swapped):
        a, a_scales, b, b_scales = b, b_scales, a, a_scales
    feeds, store = atoms_of((a, a_scales, b, b_scales, d), (m, n, k), form)
    tensor_scales = tuple(
        cute.make_tensor(pointer, cute.make_layout(1)) for pointer in (scale_a, scale_b)
    )
    gemm_kernel(feeds, store, tensor_scales, (m, n, k), form).launch(
        grid=[form.tactic.cluster_rows, form.tactic.cluster_columns, clusters],
        block=[tensor_memory.threads(), 1, 1],
        cluster=[form.tactic.cluster_rows, form.tactic.cluster_columns, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def refuse_form(problem: GemmProblem, form: GemmForm) -> None:
    """Raise on a form that cannot address the problem's rows."""
    require_one_block(problem, form)
    tensor_memory.require_extents(problem, form)


KERNEL = described(launch_gemm, nvfp4_operands(Int64), SM100A, refuse_form)
compile_form = KERNEL.compile_form
