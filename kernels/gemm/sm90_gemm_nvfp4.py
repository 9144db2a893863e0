"""NVFP4 x NVFP4 GEMM on Hopper (sm_90a), decoded to FP16 because wgmma has no E2M1 input.

D = (A sA)(B sB)^T in BF16: packed E2M1 codes [rows, K / 2 bytes], E4M3 scales per block of 16 in
128x4 order, float32 tensor scales sA and sB. Decoded numbers are exact, so sums are those of FP16
operands, with K in the order of nvfp4_stages within each 64.
Roles: warpgroup 0 loads and decodes B (64 or 88 registers): its warp 0 issues TMA up to AHEAD = 4
  stages in advance, all four warps decode. Each further warpgroup decodes its own 64 rows of A into
  registers, multiplies and stores.
Pipelines: (1) ring of loaded stages, PipelineTmaAsync: full is one arrival plus bytes; empty is one
  arrival per warp of decoders and consumers. (2) ring of 3 decoded stages of B, PipelineAsync: full
  is one arrival per decoding warp (after a fence to the async proxy), empty one per consumer warp.
A stage in a consumer: decode A into one of two register fragments while the wgmma of the stage
  before run; wait for those and release their B; wait for decoded B; issue the next 4 wgmma.
The epilogue multiplies float32 sums by RESTORE (exact), then by sA sB, and rounds once to BF16.

The sign bit of a scale is ignored. The entry point allocates only D and never synchronises.
Shape letters: M rows of A, N rows of B, P = K / 2 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.entry import GemmOperand, described
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.runtime.kernel import Storage
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

CODES_OF_WORD = 8
A_PLACE = 3  # entries of `work` about A; a fourth says whether this warp has rows
WORDS_OF_TILE = facts.SCALE_TILE_BYTES // 4
SWIZZLES = {
    64: mainloop.Swizzle.K_SW32,
    128: mainloop.Swizzle.K_SW64,
    256: mainloop.Swizzle.K_SW128,
}  # of a row of so many codes


class Nvfp4SharedViews(NamedTuple):
    """Stages as threads see them: (adjacent words, places, stages)."""

    a: Any
    a_scales: Any
    b: Any
    b_scales: Any
    numbers: Any  # B decoded


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    tensor_scales: tuple[Any, Any],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup: load and decode B, or decode A, multiply and store."""
    tactic, held = form.tactic, facts.footprint(form)
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    tensors, boxes, shared = shared_memory(memory, form)
    sD = mainloop.shared_of(
        memory, BFloat16, mainloop.piece_layout(facts.PIECES_AT_ONCE * facts.consumers(form))
    )
    ring, decoded = mainloop.ring_of_stages(memory, form), ring_of_decoded(memory, form)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((extents[0], extents[1]), tactic)
    steps = ceil_div(extents[2], tactic.inner)
    blocks = extents[2] // stages.BLOCK
    decoding, consuming = facts.roles(form)
    if group == 0:
        cute.arch.setmaxregister_decrease(decoding.registers)
        feedings = tuple(map(mainloop.feeding, feeds, tensors, boxes))
        state = mainloop.consumer_state(held.stages)
        target = mainloop.producer_state(facts.decoded_stages(form))
        loading = (ring, feedings, walk, steps, form)
        cursor = begin_loading(loading)
        for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
            _, column = mainloop.tile_at(walk, number)
            first = column * tactic.columns % facts.SCALE_TILE_ROWS
            rows = (shared, first, blocks, tactic.columns)
            state, target, cursor = decode_tile(loading, decoded, (state, target, cursor), rows)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mine = group - 1
        mma = mainloop.mma_of(Float16, tactic.columns, warpgroup.OperandSource.RMEM)
        sums = mainloop.sums_of(mma, tactic.columns)
        b = mma.make_fragment_B(mma.get_slice(0).partition_B(decoded_tensor(shared, form)))
        outlet = mainloop.outlet_of_warpgroup(store, sD, mma, mine)
        # The power of two first: it is exact.
        scales = (stages.RESTORE, ops.multiply_rn(tensor_scales[0][0], tensor_scales[1][0]))
        state = mainloop.consumer_state(held.stages)
        source = mainloop.consumer_state(facts.decoded_stages(form))
        stored = Int32(0)
        for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
            row, column = mainloop.tile_at(walk, number)
            # A tile of 64 rows may begin in the middle of a 128-row scale tile.
            first = row * tactic.rows % facts.SCALE_TILE_ROWS
            work = (shared, first, mine * facts.PIECE_ROWS, blocks, steps)
            state, source = multiply((ring, decoded), state, source, (mma, sums, b), work)
            place = facts.piece_of(row, column, mine, tactic)
            stored = mainloop.store_tile(outlet, sums, place, stored, scales)
        mainloop.drain(outlet)


class Cursor(NamedTuple):
    """Position of the loading warp: number of the tile, its place, step, ring state."""

    number: Any
    place: tuple[Any, ...]
    step: Any
    state: Any


@cute.jit
def begin_loading(loading: Any) -> Cursor:
    """Load the first stages; `loading` is ring, feedings, walk, steps of K, form."""
    ring, _, walk, _, _ = loading
    state = mainloop.producer_state(ring.num_stages)
    cursor = Cursor(Int32(walk.first), mainloop.tile_at(walk, walk.first), Int32(0), state)
    for _ in cutlass.range(facts.AHEAD, unroll=1):
        cursor = load_next(loading, cursor)
    return cursor


@cute.jit
def load_next(loading: Any, cursor: Any) -> Cursor:
    """Load the next stage, of this tile or the next one; nothing after the last."""
    ring, feedings, walk, steps, form = loading
    number, place, step, state = cursor
    if (cute.arch.warp_idx() == 0) & (number < walk.total):
        tiles = tiles_of_boxes(place, form)
        state = mainloop.produce_step(ring, state, feedings, tiles, step)
        step += 1
        if step == steps:
            step = Int32(0)
            number += walk.step
            place = mainloop.tile_at(walk, number)
    return Cursor(number, place, step, state)


@cute.jit
def decode_tile(loading: Any, decoded: Any, states: Any, work: Any) -> Any:
    """Decode the rows of B of one tile, stage by stage; a thread takes every 128th row."""
    ring, _, _, steps, _ = loading
    state, target, cursor = states
    shared, first, blocks, columns = work
    thread, _, _ = cute.arch.thread_idx()
    for step in cutlass.range(steps, unroll=1):
        cursor = load_next(loading, cursor)
        ring.consumer_wait(state)
        # Second ring: wait until the consumers have released this decoded buffer.
        decoded.producer_acquire(target)
        at = (state.index, target.index, stages.kept(blocks, step))
        for i in cutlass.range_constexpr(ceil_div(columns, facts.WARPGROUP)):
            row = thread + i * facts.WARPGROUP
            # With 64 columns half of the threads have no row.
            if cutlass.const_expr(columns < facts.WARPGROUP):
                if row < columns:
                    stages.decode_row(shared, (row, first), at)
            else:
                stages.decode_row(shared, (row, first), at)
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through another proxy
        cute.arch.sync_warp()
        ring.consumer_release(state)
        with cute.arch.elect_one():
            decoded.producer_commit(target)
        state.advance()
        target.advance()
    return state, target, cursor


@cute.jit
def multiply(rings: Any, state: Any, source: Any, fragments: Any, work: Any) -> Any:
    """Sum up one tile; the next stage of A is decoded while this one is multiplied.

    Trap: a wgmma reads its registers until it is waited for, and the compiler would fold a copy
    between two fragments. So two fragments alternate, and the loop over stages is unrolled by two.
    """
    ring, decoded = rings
    mma, sums, b = fragments
    even, odd = a_fragment(mma), a_fragment(mma)
    *place, blocks, steps = work
    if cutlass.const_expr(len(place) > A_PLACE):  # of warps without a row these stay zeros
        even.fill(0.0)
        odd.fill(0.0)
    state = load_a(ring, state, place, even, stages.kept(blocks, 0))
    decoded.consumer_wait(source)
    mainloop.multiply_stage(mma, sums, even, b[None, None, None, source.index], begins=True)
    for pair in cutlass.range((steps - 1) // 2, unroll=1):
        for i in cutlass.range_constexpr(2):
            mask = stages.kept(blocks, 2 * pair + i + 1)
            a = even if i else odd
            state = load_a(ring, state, place, a, mask)
            source = multiply_next(decoded, source, (mma, sums, a, b))
    if steps % 2 == 0:
        state = load_a(ring, state, place, odd, stages.kept(blocks, steps - 1))
        source = multiply_next(decoded, source, (mma, sums, odd, b))
    source = finish(decoded, source)
    return state, source


@cute.jit
def multiply_next(decoded: Any, source: Any, fragments: Any) -> Any:
    """Wait for the wgmma under way, release their B, and start the next stage."""
    mma, sums, a, b = fragments
    source = finish(decoded, source)
    decoded.consumer_wait(source)
    mainloop.multiply_stage(mma, sums, a, b[None, None, None, source.index], begins=False)
    return source


@cute.jit
def finish(decoded: Any, source: Any) -> Any:
    """Wait for the wgmma under way and release their B."""
    warpgroup.wait_group(0)
    with cute.arch.elect_one():
        decoded.consumer_release(source)
    source.advance()
    return source


@cute.jit
def load_a(ring: Any, state: Any, work: Any, fragment: Any, mask: Any) -> Any:
    """Decode this thread's part of a stage of A, and release the stage."""
    shared, first, own, *has_rows = work
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % facts.WARPGROUP
    # wgmma fragment: a warp has 16 rows, a thread rows g and g + 8, column pair q = thread % 4.
    row = own + thread // facts.WARP * 16 + thread % facts.WARP // 4
    ring.consumer_wait(state)
    words, place = cute.recast_tensor(fragment, Uint32), (row, first, thread % 4)
    if cutlass.const_expr(len(has_rows) > 0):
        if has_rows[0]:
            stages.decode_fragment(shared, words, place, (state.index, mask))
    else:
        stages.decode_fragment(shared, words, place, (state.index, mask))
    cute.arch.sync_warp()
    ring.consumer_release(state)
    state.advance()
    return state


def a_fragment(mma: Any) -> Any:
    """Return registers for a warpgroup's 64 rows of a stage of A."""
    return mma.make_fragment_A(mma.partition_shape_A((facts.PIECE_ROWS, stages.STAGE_K)))


def tiles_of_boxes(place: tuple[Any, ...], form: GemmForm) -> tuple[Any, ...]:
    """Return the box that each feed loads: codes of A and B, then tiles of their scales.

    Where a tile has an expert, boxes of B are those of the expert's matrices.
    """
    row, column, *expert = place
    tactic = form.tactic
    of_a, of_b = (
        at * extent // facts.SCALE_TILE_ROWS // ceil_div(extent, facts.SCALE_TILE_ROWS)
        for at, extent in ((row, tactic.rows), (column, tactic.columns // form.parts))
    )
    return (row, (column, *expert), of_a, (of_b, *expert))


def ring_of_decoded(memory: Any, form: GemmForm) -> Any:
    """Make the ring of decoded B: one arrival per warp on either side."""
    group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
    warps = facts.WARPGROUP // facts.WARP
    return pipeline.PipelineAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * facts.decoded_stages(form)),
        num_stages=facts.decoded_stages(form),
        producer_group=group(agent, facts.decoding_warps(form)),
        consumer_group=group(agent, facts.consumers(form) * warps),
        defer_sync=True,
    )


def layouts(form: GemmForm) -> tuple[Any, ...]:
    """Return the layouts of stages in words: codes of A and B, then tiles of their scales."""
    count, swizzle = facts.footprint(form).stages, SWIZZLES[form.tactic.inner]
    made = []
    for load in facts.loads(form):
        stages_of = (count,) if load.matrices == 1 else (load.matrices, count)
        words = load.row_bytes // 4
        if load.name in {"a", "b"}:
            made.append(mainloop.staged_layout(Uint32, load.rows, words, stages_of, swizzle))
        else:
            shape, size = (load.rows, words, *stages_of), load.rows * words
            outer = (size, size * load.matrices)[-len(stages_of) :]
            made.append(cute.make_layout(shape, stride=(words, 1, *outer)))
    return tuple(made)


def boxes_of(form: GemmForm) -> tuple[tuple[int, ...], ...]:
    """Return the boxes of the feeds in words; the third extent counts matrices."""
    boxes = ((load.rows, load.row_bytes // 4, load.matrices) for load in facts.loads(form))
    return tuple(box if box[2] > 1 else box[:2] for box in boxes)


def shared_memory(memory: Any, form: GemmForm) -> tuple[Any, Any, Nvfp4SharedViews]:
    """Allocate stages; return them as TMA writes them, their boxes, and as threads read them."""
    count, tactic = facts.footprint(form).stages, form.tactic
    tensors, pointers = loaded_stages(memory, form)
    words = tactic.columns * tactic.inner // 2
    decoded = memory.allocate_array(
        Uint32, words * facts.decoded_stages(form), byte_alignment=facts.ALIGNMENT
    )
    codes_a, codes_b, scales_a, scales_b = (
        facts.bytes_of(form, name) // 4 for name in ("a", "b", "scales of a", "scales of b")
    )
    shared = Nvfp4SharedViews(
        a=side_by_side(pointers[0], stages.WORDS, codes_a, count),
        a_scales=side_by_side(pointers[2], 1, scales_a, count),
        b=side_by_side(pointers[1], 4, codes_b, count),
        b_scales=side_by_side(pointers[3], 1, scales_b, count),
        numbers=side_by_side(decoded, 4, words, facts.decoded_stages(form)),
    )
    return tensors, boxes_of(form), shared


def loaded_stages(memory: Any, form: GemmForm) -> tuple[tuple[Any, ...], list[Any]]:
    """Allocate what TMA writes; return swizzled tensors and plain pointers."""
    tensors, pointers = [], []
    for layout in layouts(form):
        pointer = memory.allocate_array(Uint32, cute.cosize(layout), byte_alignment=facts.ALIGNMENT)
        pointers.append(pointer)
        if isinstance(layout, cute.ComposedLayout):
            swizzled = cute.recast_ptr(pointer, layout.inner, dtype=Uint32)
            tensors.append(cute.make_tensor(swizzled, layout.outer))
        else:
            tensors.append(cute.make_tensor(pointer, layout))
    return tuple(tensors), pointers


def side_by_side(pointer: Any, words: int, stage: int, count: int) -> Any:
    """View stages of `stage` words as (words moved at once, places, stages)."""
    layout = cute.make_layout((words, stage // words, count), stride=(1, words, stage))
    return cute.make_tensor(pointer, layout)


def decoded_tensor(shared: Nvfp4SharedViews, form: GemmForm) -> Any:
    """View decoded B as wgmma reads it."""
    tactic = form.tactic
    layout = mainloop.staged_layout(
        Float16, tactic.columns, tactic.inner, facts.decoded_stages(form), mainloop.Swizzle.K_SW128
    )
    pointer = cute.recast_ptr(shared.numbers.iterator, layout.inner, dtype=Float16)
    return cute.make_tensor(pointer, layout.outer)


@cute.jit
def launch_gemm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K and the number of clusters."""
    m, n, k, clusters = extents
    n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
    words = cute.assume(k // CODES_OF_WORD, divby=facts.TMA_ALIGNMENT // 4)
    # Words of a row of scale tiles: one tile has four blocks of K, that is 64 numbers.
    of_tiles = ceil_div(k, stages.STAGE_K) * WORDS_OF_TILE
    tiles = [ceil_div(rows, facts.SCALE_TILE_ROWS) for rows in (m, n)]
    a, a_scales, b, b_scales, scale_a, scale_b, d = pointers
    scales = ((a_scales, tiles[0], of_tiles), (b_scales, tiles[1], of_tiles))
    shaped = ((a, m, words), (b, n, words), *scales, (d, m, n))
    *matrices, mD = (
        cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(Int64(columns), 1)))
        for pointer, rows, columns in shaped
    )
    feeds = tuple(map(mainloop.feed_of, matrices, layouts(form), boxes_of(form)))
    tensor_scales = tuple(
        cute.make_tensor(pointer, cute.make_layout(1)) for pointer in (scale_a, scale_b)
    )
    gemm_kernel(feeds, mainloop.store_of(mD), tensor_scales, (m, n, k), form).launch(
        grid=[1, 1, clusters],
        block=[facts.threads(form), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def operands_of(scale_element: Any) -> tuple[GemmOperand, ...]:
    """Return packed codes, scales in 128x4 order, read as elements, and decode scales."""
    codes = Storage(Uint32, torch.uint8, facts.TMA_ALIGNMENT)
    scales = Storage(scale_element, torch.uint8, facts.TMA_ALIGNMENT)
    one = Storage(Float32, torch.float32, 4)
    return (
        GemmOperand("a", codes, lambda p: (p.rows, p.inner // 2), label="codes of A"),
        GemmOperand(
            "a_scales", scales, lambda p: (scale_bytes(p.rows, p.inner),), label="scales of A"
        ),
        GemmOperand("b", codes, lambda p: (p.columns, p.inner // 2), label="codes of B"),
        GemmOperand(
            "b_scales", scales, lambda p: (scale_bytes(p.columns, p.inner),), label="scales of B"
        ),
        GemmOperand("a_decode_scale", one, lambda _: (1,), label="decode scale of A"),
        GemmOperand("b_decode_scale", one, lambda _: (1,), label="decode scale of B"),
    )


def scale_bytes(rows: int, inner: int) -> int:
    """Return the bytes of a matrix' block scales."""
    return int(SWIZZLE_128X4.storage_size(rows, inner // stages.BLOCK))


KERNEL = described(launch_gemm, operands_of(Uint32), SM90A)
compile_form = KERNEL.compile_form
