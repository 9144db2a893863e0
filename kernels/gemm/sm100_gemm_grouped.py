"""Grouped BF16 GEMM on Blackwell (sm_100a), with inverse RoPE on A inside the product for o_a.

D[t, g] = A[t, g] B[g]^T with the shapes of grouped_problem; BF16 results only. Kernel of
sm100_gemm_bf16 in which A's boxes begin at the K step of the tile's group.
Roles: warps 0 to 3 store, 4 multiplies, 5 loads. With `turned`, warps 6 and 7 are idle and two more
  warpgroups (warps 8 to 15) rotate, 64 rows each.
Rotation: the last stage of a head (64 of K) holds the values that inverse RoPE rotates. After it
  has arrived, the rotating warps work in place with the code of sm90_gemm_grouped and arrive at a
  barrier (8 arrivals, one a warp; one barrier per stage of the ring). The multiplying warp waits
  for it and fences to the async proxy before that stage only. The rotating warps never release a
  stage: the commit after the product does.

The entry point allocates only D and never synchronises. Compiled but never run: no sm_100a device
was available. Shape letters as in grouped_problem.
"""

from dataclasses import replace
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Int32, Int64, Uint32, cute

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.gemm import grouped_problem as grouped
from degarble.kernels.gemm import mainloop, tcgen05, tensor_memory
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_grouped as hopper
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.gemm.grouped_problem import GroupedForm, GroupedProblem
from degarble.kernels.gemm.sm90_gemm_grouped import RopeRows
from degarble.kernels.primitives.device_words import vectors
from degarble.kernels.runtime.kernel import Operands
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM100A

FIRST_TURNING_GROUP = 2  # after the first eight warps: six with a role, two idle
TURNING_GROUPS = 2
TURNING_WARPS = TURNING_GROUPS * facts.WARPGROUP // facts.WARP
NAMED_BARRIER = 1  # added to a rotating group's number, to differ from the storing warps' barrier


def threads(form: GroupedForm) -> int:
    """Return the threads of a thread block: six warps, or 16 where heads are rotated."""
    if not form.turned:
        return tensor_memory.threads()
    return (FIRST_TURNING_GROUP + TURNING_GROUPS) * facts.WARPGROUP


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    turning: RopeRows,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: four store, one multiplies, one loads, eight rotate."""
    rows_of_d, columns, steps, tiles = extents
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.memory.SmemAllocator()
    mma, count = tcgen05.dense_mma(form.gemm, BFloat16), tensor_memory.footprint(form.gemm).stages
    layouts = tcgen05.operand_layouts(mma, form.gemm, count, BFloat16)
    operands_ = tuple(mainloop.shared_of(memory, BFloat16, layout) for layout in layouts)
    pieces = mainloop.piece_layout(facts.PIECES_AT_ONCE, tensor_memory.LANES)
    sD = mainloop.shared_of(memory, BFloat16, pieces)
    ring, sums_ring = (
        tcgen05.ring_of_stages(memory, form.gemm),
        tcgen05.ring_of_sums(memory, form.gemm),
    )
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    turned_at = Uint32(memory.allocate_array(Int64, count).toint())
    if cutlass.const_expr(form.turned > 0):
        begin_turned(turned_at, count)
    tcgen05.allocate(address, form.gemm)
    tcgen05.begin(form.gemm.tactic)
    base = tcgen05.base_of(address)
    sums = tcgen05.sums_of(mma, base, form.gemm)
    walk = mainloop.walk_of((rows_of_d, columns), form.gemm.tactic)
    if warp == tensor_memory.LOADING_WARP:
        feedings = tcgen05.plain_feedings(BFloat16, feeds, operands_, form.gemm)
        hopper.load(ring, feedings, walk, (steps, tiles), 1)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        fragments = (mma.make_fragment_A(operands_[0]), mma.make_fragment_B(operands_[1]))
        multiply((ring, sums_ring), (mma, sums, *fragments), walk, (steps, turned_at), form)
    elif warp < tensor_memory.STORING_WARPS:
        tcgen05.store_tiles((store, sD, sums, sums_ring), walk, (), form.gemm)
        tcgen05.give_back(base, form.gemm)
    elif warp >= FIRST_TURNING_GROUP * facts.WARPGROUP // facts.WARP:
        turn(ring, (operands_[0], turned_at), turning, walk, (steps, form))


@cute.jit
def begin_turned(turned_at: Any, count: cutlass.Constexpr) -> None:
    """Set up a barrier for each stage whose rotation may be under way."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for i in cutlass.range_constexpr(count):
            shared.begin_barrier(turned_at + i * facts.BARRIER_BYTES, TURNING_WARPS)
        cute.arch.mbarrier_init_fence()


@cute.jit
def multiply(rings: Any, work: Any, walk: Any, numbers: Any, form: cutlass.Constexpr) -> None:
    """Sum up tile after tile; the last stage of each head is multiplied after its rotation."""
    ring, sums_ring = rings
    mma, sums, a, b = work
    steps, turned_at = numbers
    of_head = form.steps_of_head if form.turned else 1
    count = tensor_memory.footprint(form.gemm).stages
    state, target = (
        mainloop.consumer_state(count),
        mainloop.producer_state(tensor_memory.accumulators(form.gemm)),
    )
    turned = Uint32(0)
    for _ in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        sums_ring.producer_acquire(target)
        tcgen05.fence("after")
        into = sums[None, None, None, target.index]
        for head in cutlass.range(steps // of_head, unroll=1):
            for step in cutlass.range_constexpr(of_head):
                ring.consumer_wait(state)
                if cutlass.const_expr(form.turned > 0 and step == of_head - 1):
                    await_turned(turned_at, turned, count)
                tcgen05.fence("after")
                at = (None, None, None, state.index)
                # Only the tile's first stage starts new sums.
                begins = head == 0 if step == 0 else cutlass.Boolean(False)
                tcgen05.multiply_stage(mma, into, (a[at],), (b[at],), begins)
                ring.consumer_release(state)
                state.advance()
            turned = turned + 1
        sums_ring.producer_commit(target)
        target.advance()
    sums_ring.producer_tail(target)


def await_turned(turned_at: Any, number: Any, count: int) -> None:
    """Wait for rotation `number`; as many can be under way as there are stages."""
    shared.await_phase(turned_at + number % count * facts.BARRIER_BYTES, number // count % 2)
    cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, tcgen05 reads


@cute.jit
def turn(ring: Any, places: Any, turning: RopeRows, walk: Any, numbers: Any) -> None:
    """Apply inverse RoPE to the last stage of each head, 64 rows per warpgroup."""
    sA, turned_at = places
    steps, form = numbers
    thread, _, _ = cute.arch.thread_idx()
    mine = thread // facts.WARPGROUP - FIRST_TURNING_GROUP
    heads = hopper.heads_of(sA, mine)
    count = tensor_memory.footprint(form.gemm).stages
    state, turned = mainloop.consumer_state(count), Uint32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        tile = mainloop.tile_at(walk, number)
        # First row (token) of this rotating warpgroup.
        first = tile[0] * form.gemm.tactic.rows + mine * facts.PIECE_ROWS
        hopper.read_turns(turning, heads, first)
        for _ in cutlass.range(steps // form.steps_of_head, unroll=1):
            # Stages that need no rotation are skipped without waiting; only the state moves on.
            for _ in cutlass.range_constexpr(form.steps_of_head - 1):
                state.advance()
            ring.consumer_wait(state)
            hopper.turn_stage(heads, state.index, mine + NAMED_BARRIER, form)
            barrier = turned_at + turned % count * facts.BARRIER_BYTES
            shared.arrive(barrier, thread % facts.WARP == 0)
            state.advance()
            turned = turned + 1


@cute.jit
def launch_grouped(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents T, G N, K, G K, tiles of a group, clusters, positions."""
    tokens, columns, inner, wide, tiles, clusters, known = extents
    inner, wide = (cute.assume(extent, divby=grouped.GROUPED_STEP) for extent in (inner, wide))
    columns = cute.assume(columns, divby=facts.COLUMNS_MULTIPLE)
    a, b, d, table, positions = pointers
    mA, mB, mD = (
        cute.make_tensor(pointer, cute.make_layout((count, width), stride=(Int64(width), 1)))
        for pointer, count, width in ((a, tokens, wide), (b, columns, inner), (d, tokens, columns))
    )
    feeds = tcgen05.plain_feeds(BFloat16, (mA, mB), form.gemm)
    store = mainloop.store_of(mD, tensor_memory.LANES)
    turning = RopeRows(vectors(table, hopper.WORDS), vectors(positions, 0), known, tokens)
    numbers = (tokens, columns, inner // grouped.GROUPED_STEP, tiles)
    grouped_kernel(feeds, store, turning, numbers, form).launch(
        grid=[1, 1, clusters],
        block=[threads(form), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def refuse(problem: GroupedProblem, _tensors: Operands) -> None:
    """Raise on results that have no form here."""
    if problem.out != "bf16":
        raise InvalidArgument(
            "results of grouped products on sm_100a",
            problem.out,
            "bf16",
            "Float32 results have a form on sm_90a alone.",
        )


KERNEL = replace(hopper.KERNEL, entry=launch_grouped, target=SM100A, refuse=refuse)
compile_form = KERNEL.compile_form
