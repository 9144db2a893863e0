"""BF16 GEMM on Hopper (sm_90a): D = A B^T with float32 sums, rounded once to BF16.

A [M, K] and B [N, K] with K along rows; tiles of 64 x 64 to 128 x 256, stages of 64 of K.
Roles: warpgroup 0 loads (one warp issues TMA; 40 registers a thread). Each further warpgroup, one
  per 64 rows of the tile, multiplies and stores.
Pipeline: one ring of stages (PipelineTmaAsync, up to 8 that fit). Full: one arrival plus the bytes
  of A's and B's box. Empty: one arrival per consumer warp, of all thread blocks that share a load
  (`release_arrivals`); clusters of two rows receive B by multicast.
A tile in a consumer: for each stage wait, issue 4 wgmma (K = 16 each), then wait for the group
  before and release its stage; after the last stage store 64 columns at a time (epilogue).
Thread blocks are persistent: loads of the next tile start while this one is stored.
Few rows: with `swapped` operands wgmma's 64 rows are rows of B, and 8 to 64 rows of A its columns;
  `direct` tiles are written by the threads; `asked_early` stages of B are prefetched to L2 before
  the launch waits for the previous one. A step of K adds the same products to the same sum, so no
  bit depends on the tactic.
Steps of K are taken in order, sixteen at a time: references.tensor_core defines every bit of the
  float32 sum.

The entry point allocates only D and never synchronises, so it can be captured in a CUDA graph.
Shape letters: M rows of A and D, N rows of B, K inner.
"""

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.entry import BF16, GemmOperand, described
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

STEP_K = 16  # of one wgmma


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: Any,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup: the first loads, the others multiply and store."""
    tactic = form.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    elements = BFloat16, BFloat16
    # sA, sB: (rows, K of a stage, stages); sD: two pieces for each consumer warpgroup.
    sA, sB, sD, ring = mainloop.stages_of(memory, elements, layouts(form), form)
    boxes = ((tactic.rows, tactic.inner), (tactic.columns, tactic.inner))
    if cutlass.const_expr(not tactic.asked_early):
        mainloop.begin(tactic)

    walk = mainloop.walk_of((extents[0], extents[1]), tactic)
    steps = ceil_div(extents[2], tactic.inner)
    producing, consuming = facts.roles(form)
    if cutlass.const_expr(tactic.asked_early > 0):
        feedings = mainloop.feedings_of(feeds, (sA, sB), boxes, tactic)
        mainloop.begin_early(tactic, feedings, walk, steps)
    if group == 0:
        cute.arch.setmaxregister_decrease(producing.registers)
        if cute.arch.warp_idx() == 0:
            mainloop.load(ring, mainloop.feedings_of(feeds, (sA, sB), boxes, tactic), walk, steps)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mine = group - 1
        mma = mainloop.mma_of(BFloat16, tactic.columns)
        fragments = mainloop.fragments_of(mma, sA, sB, mine, tactic.columns)
        state, stored = mainloop.consumer_state(ring.num_stages), Int32(0)
        if cutlass.const_expr(tactic.direct):
            outlet = mainloop.direct_outlet_of(store, facts.sides(extents[:2], tactic), mine)
            for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
                state = multiply(ring, state, fragments, steps)
                place = mainloop.tile_at(walk, number)
                mainloop.store_directly(outlet, fragments[1], place, tactic)
        else:
            outlet = mainloop.outlet_of_warpgroup(store, sD, mma, mine)
            for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
                state = multiply(ring, state, fragments, steps)
                row, column = mainloop.tile_at(walk, number)
                place = facts.piece_of(row, column, mine, tactic)
                stored = mainloop.store_tile(outlet, fragments[1], place, stored)
            mainloop.drain(outlet)


@cute.jit
def multiply(ring: Any, state: Any, fragments: tuple[Any, Any, Any, Any], steps: Any) -> Any:
    """Sum up one tile; a stage is released once the wgmma of the next one are under way."""
    mma, sums, a, b = fragments
    before = state.clone()
    ring.consumer_wait(state)
    mainloop.multiply_stage(mma, sums, *mainloop.stage_of(a, b, state.index), begins=True)
    state.advance()
    for _ in cutlass.range(1, steps, unroll=1):
        ring.consumer_wait(state)
        mainloop.multiply_stage(mma, sums, *mainloop.stage_of(a, b, state.index), begins=False)
        state.advance()
        # One group may stay under way, so the stage before is no longer read.
        warpgroup.wait_group(1)
        ring.consumer_release(before)
        before.advance()
    warpgroup.wait_group(0)
    ring.consumer_release(before)
    return state


def layouts(form: GemmForm) -> tuple[Any, Any]:
    """Return the layouts of A's and B's stages."""
    tactic, stages = form.tactic, facts.footprint(form).stages
    return (
        mainloop.staged_layout(
            BFloat16, tactic.rows, tactic.inner, stages, mainloop.Swizzle.K_SW128
        ),
        mainloop.staged_layout(
            BFloat16, tactic.columns, tactic.inner, stages, mainloop.Swizzle.K_SW128
        ),
    )


def matrices_of(pointers: Any, extents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return tensors of A, B, D, and M, N, K with their known divisors."""
    m, n, k, *_ = extents
    k = cute.assume(k, divby=facts.BF16.inner_multiple)
    n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
    shaped = zip(pointers, (m, n, m), (k, k, n), strict=True)
    matrices = tuple(
        cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(Int64(columns), 1)))
        for pointer, rows, columns in shaped
    )
    return matrices, (m, n, k)


@cute.jit
def launch_gemm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K (swapped: N, M, K) and the number of clusters."""
    *walked, k, clusters = extents
    tactic = form.tactic
    (mA, mB, mD), (m, n, k) = matrices_of(pointers, (*facts.sides(walked, tactic), k))
    layout_a, layout_b = layouts(form)
    first, second = facts.sides((mA, mB), tactic)
    feeds = (
        mainloop.feed_of(first, layout_a, (tactic.rows, tactic.inner), tactic.cluster_columns),
        mainloop.feed_of(second, layout_b, (tactic.columns, tactic.inner), tactic.cluster_rows),
    )
    if cutlass.const_expr(tactic.direct):
        store = mainloop.pairs_of(mD, m, n)
    else:
        store = mainloop.store_of(mD, columns=facts.piece_columns(tactic))
    numbers = (*facts.sides((m, n), tactic), k)
    gemm_kernel(feeds, store, numbers, form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[facts.threads(form), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=tactic.blocks,
        preferred_smem_carveout=facts.WHOLE_CARVEOUT if tactic.blocks > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

OPERANDS = (
    GemmOperand("a", BF16, lambda p: (p.rows, p.inner), label="A"),
    GemmOperand("b", BF16, lambda p: (p.columns, p.inner), label="B"),
)
KERNEL = described(launch_gemm, OPERANDS, SM90A)
compile_form = KERNEL.compile_form
