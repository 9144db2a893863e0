"""BF16 GEMM on Blackwell (sm_100a): D = A B^T with float32 sums, rounded once to BF16.

A [M, K] and B [N, K] with K along rows; tiles of 128 x 64, 128 or 256, stages of 64 along K.
Roles of six warps: 0 to 3 store, 4 multiplies by tcgen05.mma (A and B in shared memory, sums in
  tensor memory), 5 loads by TMA.
Pipelines: (1) ring of stages, PipelineTmaUmma: full is one arrival plus bytes, empty is the commit
  of the instructions that read the stage. (2) ring of two sums, PipelineUmmaAsync: full is a
  commit, empty is one arrival per storing thread (128). So a tile is stored while the next one is
  multiplied.
Order of a tile: load stages; wait for free sums; per stage wait, issue 4 tcgen05.mma (K = 16),
  release by commit; commit the sums; storing warps read 64 columns at a time by tcgen05.ld, release
  the sums after the last read, and store each piece by TMA. A tcgen05 fence stands on both sides of
  the barriers between threads. Warp 0 frees tensor memory when all storing warps are done.
Steps of K are taken in order, sixteen at a time: references.tensor_core.TCGEN05_F16 defines every
  bit of the float32 sum.

The entry point allocates only D and never synchronises. Compiled but never run: no sm_100a device
was available. Shape letters: M rows of A and D, N rows of B, K inner.
"""

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, cute

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.entry import described
from degarble.kernels.gemm.sm90_gemm_bf16 import OPERANDS, matrices_of
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM100A

# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: four store, one multiplies, one loads."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.memory.SmemAllocator()
    mma, count = tcgen05.dense_mma(form, BFloat16), tensor_memory.footprint(form).stages
    layouts_ = tcgen05.operand_layouts(mma, form, count, BFloat16)
    shared = tuple(mainloop.shared_of(memory, BFloat16, layout) for layout in layouts_)
    pieces = mainloop.piece_layout(facts.PIECES_AT_ONCE, tensor_memory.LANES)
    sD = mainloop.shared_of(memory, BFloat16, pieces)
    ring, sums_ring = tcgen05.ring_of_stages(memory, form), tcgen05.ring_of_sums(memory, form)
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    # Allocated before `begin`, whose barrier publishes the address.
    tcgen05.allocate(address, form)
    tcgen05.begin(form.tactic)

    base = tcgen05.base_of(address)
    sums = tcgen05.sums_of(mma, base, form)
    walk = mainloop.walk_of((extents[0], extents[1]), form.tactic)
    steps = ceil_div(extents[2], form.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        tcgen05.load(ring, tcgen05.plain_feedings(BFloat16, feeds, shared, form), walk, steps, form)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        fragments = (mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1]))
        multiply((ring, sums_ring), (mma, sums, *fragments), walk, steps, form)
    else:
        tcgen05.store_tiles((store, sD, sums, sums_ring), walk, (), form)
        tcgen05.give_back(base, form)


@cute.jit
def multiply(rings: Any, work: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Sum up tile after tile."""
    ring, sums_ring = rings
    mma, sums, a, b = work
    state = mainloop.consumer_state(tensor_memory.footprint(form).stages)
    target = mainloop.producer_state(tensor_memory.accumulators(form))
    for _ in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        sums_ring.producer_acquire(target)
        tcgen05.fence("after")
        # A place of sums in tensor memory: the next tile uses the other one.
        into = sums[None, None, None, target.index]
        for step in cutlass.range(steps, unroll=1):
            ring.consumer_wait(state)
            tcgen05.fence("after")
            at = (None, None, None, state.index)
            tcgen05.multiply_stage(mma, into, (a[at],), (b[at],), step == 0)
            # A commit: it arrives once the instructions issued so far have read the stage.
            ring.consumer_release(state)
            state.advance()
        sums_ring.producer_commit(target)
        target.advance()
    sums_ring.producer_tail(target)


@cute.jit
def launch_gemm(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K and the number of clusters."""
    *_, clusters = extents
    (mA, mB, mD), numbers = matrices_of(pointers, extents)
    feeds = tcgen05.plain_feeds(BFloat16, (mA, mB), form)
    store = mainloop.store_of(mD, tensor_memory.LANES)
    gemm_kernel(feeds, store, numbers, form).launch(
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
