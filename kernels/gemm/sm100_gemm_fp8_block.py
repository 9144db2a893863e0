"""FP8 block-scaled GEMM on Blackwell (sm_100a): E4M3 codes, scales 1 x 128 (A), 128 x 128 (B).

D = A B^T in BF16 for NVIDIA's and DeepSeek's FP8 checkpoints. Scales are float32 or UE8M0 bytes,
row-major as on Hopper, and read from global memory by the threads that need them.
Roles of six warps as in sm100_gemm_bf16: 0 to 3 promote and store, 4 multiplies, 5 loads.
Pipelines: the ring of stages (full: one arrival plus bytes; empty: commit) and a ring of up to four
  sums in tensor memory. Unlike BF16, every stage (128 of K) has sums of its own.
A stage: wait for free sums and for the stage; 4 tcgen05.mma (K = 32) into fresh sums; commit both.
  The storing warps, one row a thread, read the sums by tcgen05.ld, release them (128 arrivals), and
  add sum times (scale of the row x scale of the tile's columns) to the total in float32 by fma.
  After the last stage they store the tile 64 columns at a time.

The entry point allocates only D and never synchronises. Compiled but never run: no sm_100a device
was available. Shape letters: M rows of A, N rows of B, K inner, G groups of 128 along K.
"""

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.entry import described
from degarble.kernels.gemm.sm90_gemm_fp8_block import (
    BLOCK,
    OPERANDS,
    BlockScales,
    matrices_of,
    scale_at,
)
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM100A

# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    scales: BlockScales,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: four promote and store, one multiplies, one loads."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.memory.SmemAllocator()
    mma, count = tcgen05.dense_mma(form, Float8E4M3FN), tensor_memory.footprint(form).stages
    layouts_ = tcgen05.operand_layouts(mma, form, count, Float8E4M3FN)
    shared = tuple(mainloop.shared_of(memory, Float8E4M3FN, layout) for layout in layouts_)
    pieces = mainloop.piece_layout(facts.PIECES_AT_ONCE, tensor_memory.LANES)
    sD = mainloop.shared_of(memory, BFloat16, pieces)
    ring, sums_ring = tcgen05.ring_of_stages(memory, form), tcgen05.ring_of_sums(memory, form)
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    tcgen05.allocate(address, form)
    tcgen05.begin(form.tactic)

    base = tcgen05.base_of(address)
    sums = tcgen05.sums_of(mma, base, form)
    walk = mainloop.walk_of((extents[0], extents[1]), form.tactic)
    steps = ceil_div(extents[2], form.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        tcgen05.load(
            ring, tcgen05.plain_feedings(Float8E4M3FN, feeds, shared, form), walk, steps, form
        )
    elif warp == tensor_memory.MULTIPLYING_WARP:
        fragments = (mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1]))
        multiply((ring, sums_ring), (mma, sums, *fragments), walk, steps, form)
    else:
        outlets = (store, sD, sums, sums_ring)
        promote_tiles(outlets, walk, (scales, extents[0], steps), form)
        tcgen05.give_back(base, form)


@cute.jit
def multiply(rings: Any, work: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Multiply stage after stage, each into sums of its own."""
    ring, sums_ring = rings
    mma, sums, a, b = work
    state = mainloop.consumer_state(tensor_memory.footprint(form).stages)
    target = mainloop.producer_state(tensor_memory.accumulators(form))
    for _ in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        for _step in cutlass.range(steps, unroll=1):
            sums_ring.producer_acquire(target)
            ring.consumer_wait(state)
            tcgen05.fence("after")
            into = sums[None, None, None, target.index]
            at = (None, None, None, state.index)
            # Always begins anew: sums of different stages have different scales.
            tcgen05.multiply_stage(mma, into, (a[at],), (b[at],), cutlass.Boolean(True))
            # Both are commits: they arrive once the instructions have ended.
            ring.consumer_release(state)
            sums_ring.producer_commit(target)
            state.advance()
            target.advance()
    sums_ring.producer_tail(target)


@cute.jit
def promote_tiles(outlets: Any, walk: Any, scaling: Any, form: cutlass.Constexpr) -> None:
    """Add up every tile's stages in float32, a row per thread, and store it."""
    store, pieces, sums, ring = outlets
    scales, rows, steps = scaling
    thread, _, _ = cute.arch.thread_idx()
    outlet, reading = tcgen05.outlet_of(store, pieces, thread), tcgen05.reading_of(sums, thread)
    state, stored = mainloop.consumer_state(tensor_memory.accumulators(form)), Int32(0)
    total = cute.make_rmem_tensor(form.tactic.columns, Float32)
    count = form.tactic.columns // facts.PIECE_COLUMNS
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = mainloop.tile_at(walk, number)
        own = cutlass.min(row * form.tactic.rows + thread, rows - 1)  # beyond A the last one
        # A tile has at most 128 columns, hence one scale of B per stage.
        block = column * form.tactic.columns // BLOCK
        total.fill(0.0)
        for step in cutlass.range(steps, unroll=1):
            scale = ops.multiply_rn(scale_at(scales.a, own, step), scale_at(scales.b, block, step))
            state = promote(ring, state, reading, total, scale)
        for i in cutlass.range_constexpr(count):
            numbers = part_of(total, i)
            mainloop.store_piece(outlet, numbers, (row, column * count + i), stored + i)
        stored += count
    mainloop.drain(outlet)


@cute.jit
def promote(ring: Any, state: Any, reading: Any, total: Any, scale: Any) -> Any:
    """Add a stage's sums times their scale."""
    ring.consumer_wait(state)
    tcgen05.fence("after")
    count = cute.size(total) // facts.PIECE_COLUMNS
    for i in cutlass.range_constexpr(count):
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, reading.source[None, None, None, 0, i, state.index], registers)
        cute.arch.fence_view_async_tmem_load()
        # All sums of this thread are in registers now.
        if cutlass.const_expr(i == count - 1):
            tcgen05.fence("before")
            ring.consumer_release(state)
        add_scaled(total, registers, i * facts.PIECE_COLUMNS, scale)
    state.advance()
    return state


def add_scaled(total: Any, registers: Any, first: int, scale: Any) -> None:
    """Add registers times a scale; a plain loop, as the DSL warns of long unrolled ones."""
    for i in range(cute.size(registers)):
        total[first + i] = ops.fma_rn(registers[i], scale, total[first + i])


def part_of(total: Any, piece: int) -> list[Any]:
    """Return a piece's numbers."""
    first = piece * facts.PIECE_COLUMNS
    return [total[first + i] for i in range(facts.PIECE_COLUMNS)]


@cute.jit
def launch_gemm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K and the number of clusters."""
    *_, clusters = extents
    (mA, mB, of_a, of_b, mD), numbers = matrices_of(pointers, extents)
    feeds = tcgen05.plain_feeds(Float8E4M3FN, (mA, mB), form)
    store = mainloop.store_of(mD, tensor_memory.LANES)
    gemm_kernel(feeds, store, BlockScales(of_a, of_b), numbers, form).launch(
        grid=[form.tactic.cluster_rows, form.tactic.cluster_columns, clusters],
        block=[tensor_memory.threads(), 1, 1],
        cluster=[form.tactic.cluster_rows, form.tactic.cluster_columns, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

KERNEL = described(launch_gemm, OPERANDS, SM100A)
compile_form = KERNEL.compile_form
