"""FP8 block-scaled GEMM on Hopper (sm_90a): E4M3 codes, scales 1 x 128 (A) and 128 x 128 (B).

D = A B^T in BF16 for NVIDIA's and DeepSeek's FP8 checkpoints. Scales are float32 or UE8M0 bytes,
row-major: A's [M, ceil(K / 128)], B's [ceil(N / 128), ceil(K / 128)].
Roles and ring are those of sm90_gemm_bf16: warpgroup 0 loads by TMA (40 registers), one consumer
  warpgroup per 64 rows. A stage is 128 of K, so all its products share one scale per row of A and
  one per tile of B.
A tile in a consumer: for each stage wait, issue 4 wgmma (K = 32) into fresh sums, wait for them,
  release the stage, and promote: add stage sum times scale to the float32 total by one fma. The
  tensor core sums a stage with 13 fraction bits only (MMA-Sim 2.1.1).
Tiles of 128 x 128 and few rows (as in sm90_gemm_bf16): a thread reads the next stage's scales from
  global memory, and stages take turns in two sets of sums: one is promoted while the next is
  multiplied. Tiles of 256 x 128: a warpgroup has twice 64 rows, which are multiplied and promoted
  in turn; two warps beside the loading one leave the products of both scales in shared memory.
  The order of promotions is the same in all.

The entry point allocates only D and never synchronises. Shape letters: M rows of A, N rows of B, K
inner, G groups of 128 along K, H blocks of 128 rows of B.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.harness.formats.scalar_ops import ue8m0_decode
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm.entry import GemmOperand, described
from degarble.kernels.gemm.problem import TMA_ALIGNMENT, GemmForm, GemmProblem, GemmTactic
from degarble.kernels.runtime.kernel import Storage
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

BATCHES = 2  # in which a lane reads its scales of a slot: all at once take too many registers
BLOCK = 128  # of K and of B's rows that share a scale
SCALES = {"float32": (Float32, torch.float32, 4), "ue8m0": (Uint8, torch.uint8, 1)}


class BlockScales(NamedTuple):
    """Both operands' block scales in global memory, row-major over the same groups of K."""

    a: Any
    b: Any


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def gemm_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: Any,
    scales: BlockScales,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup: the first loads, the others multiply, promote and store."""
    tactic = form.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    elements = Float8E4M3FN, Float8E4M3FN
    sA, sB, sD, ring = mainloop.stages_of(memory, elements, layouts(form), form)
    slots = slots_of(memory, form) if cutlass.const_expr(tactic.folds > 1) else None
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
        elif cutlass.const_expr(tactic.folds > 1):  # noqa: SIM102  the first is settled when traced
            if cute.arch.warp_idx() <= facts.FACTOR_WARPS:
                make_factors(slots, walk, scales, (extents[0], extents[1], steps))
    elif cutlass.const_expr(tactic.folds > 1):
        cute.arch.setmaxregister_increase(consuming.registers)
        mma = mainloop.mma_of(Float8E4M3FN, tactic.columns)
        consume_folds(ring, slots, walk, (mma, sA, sB, group - 1), (store, sD), (extents[0], steps))
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mine = group - 1
        mma = mainloop.mma_of(Float8E4M3FN, tactic.columns)
        fragments = mainloop.fragments_of(mma, sA, sB, mine, tactic.columns)
        if cutlass.const_expr(tactic.direct):
            outlet = mainloop.direct_outlet_of(store, facts.sides(extents[:2], tactic), mine)
            consume_few(ring, walk, fragments, outlet, (scales, steps), form)
        else:
            sums = mainloop.sums_of(mma, tactic.columns)
            outlet = mainloop.outlet_of_warpgroup(store, sD, mma, mine)
            state, stored = mainloop.consumer_state(ring.num_stages), Int32(0)
            for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
                row, column = mainloop.tile_at(walk, number)
                rows = rows_of_thread(row * tactic.rows + mine * facts.PIECE_ROWS, extents[0])
                # A tile has at most 128 columns, hence one scale of B per stage.
                block = column * tactic.columns // BLOCK
                if cutlass.const_expr(tactic.cluster_columns > 1):
                    block = block_of(column * tactic.columns, extents[1])
                scaling = (scales, (rows, block), steps)
                state = multiply_few(ring, state, fragments, sums, scaling, tactic)
                place = facts.piece_of(row, column, mine, tactic)
                stored = mainloop.store_tile(outlet, sums, place, stored)
            mainloop.drain(outlet)


def rows_of_thread(first: Any, rows: Any) -> tuple[Any, Any]:
    """Return the two rows of A whose sums a thread holds, clamped to the last row of A."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % facts.WARPGROUP
    # wgmma accumulator: a warp has 16 rows, a thread rows g and g + 8 of them.
    row = first + thread // facts.WARP * 16 + thread % facts.WARP // 4
    return cutlass.min(row, rows - 1), cutlass.min(row + 8, rows - 1)


@cute.jit
def multiply(ring: Any, state: Any, fragments: tuple[Any, ...], sums: Any, scaling: Any) -> Any:
    """Sum up one tile: stages on the tensor core, their scaled sums in float32."""
    mma, stage_sums, a, b = fragments
    scales, at, steps = scaling
    sums.fill(0.0)
    upper, lower = scales_of(scales, at, 0)
    for step in cutlass.range(steps, unroll=1):
        ring.consumer_wait(state)
        of_stage = a[None, None, None, state.index], b[None, None, None, state.index]
        mainloop.multiply_stage(mma, stage_sums, *of_stage, begins=True)
        # Loads that overlap with the wgmma; the last step reads its own scales again.
        next_upper, next_lower = scales_of(scales, at, cutlass.min(step + 1, steps - 1))
        # All of them: promotion reads the sums.
        warpgroup.wait_group(0)
        ring.consumer_release(state)
        state.advance()
        promote(sums, stage_sums, upper, lower)
        upper, lower = next_upper, next_lower
    return state


def promote(sums: Any, stage_sums: Any, upper: Any, lower: Any) -> None:
    """Add a stage's sums times their scales; registers alternate, two of row g, two of row g + 8.

    Not a jitted function: the DSL warns of long unrolled loops in those, and this loop has to be
    one.
    """
    for i in range(cute.size(sums)):
        sums[i] = ops.fma_rn(stage_sums[i], lower if i // 2 % 2 else upper, sums[i])


# ---- factors in shared memory --------------------------------------------------------------------
#
# A factor is the product of a row's scale and the tile's, of one stage. Two warps beside the
# loading one read scales, eight stages of a row side by side, and write their factors to a slot; a
# thread that multiplies reads one number for each of its rows. Full: an arrival of each of the two
# warps; empty: one of each multiplying warp.


class FactorSlots(NamedTuple):
    """Shared addresses: factors by slot, stage and row; barriers of full and of empty slots."""

    factors: Any
    full: Any
    empty: Any
    tactic: GemmTactic


def slots_of(memory: Any, form: GemmForm) -> FactorSlots:
    """Allocate the slots of factors, and set up their barriers."""
    size, count = facts.factor_bytes(form.tactic) // 4, facts.FACTOR_SLOTS
    factors = Uint32(memory.allocate_array(Float32, size, byte_alignment=16).toint())
    full = Uint32(memory.allocate_array(Int64, 2 * count, byte_alignment=8).toint())
    slots = FactorSlots(factors, full, full + count * facts.BARRIER_BYTES, form.tactic)
    begin_slots(slots, facts.consumers(form) * facts.WARPGROUP // facts.WARP)
    return slots


@cute.jit
def begin_slots(slots: Any, readers: cutlass.Constexpr) -> None:
    """Initialise the barriers of the slots."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for slot in cutlass.range_constexpr(facts.FACTOR_SLOTS):
            ptx.begin_barrier(slots.full + slot * facts.BARRIER_BYTES, facts.FACTOR_WARPS)
            ptx.begin_barrier(slots.empty + slot * facts.BARRIER_BYTES, readers)


def slot_at(slots: FactorSlots, chunk: Any) -> tuple[Any, Any, Any]:
    """Return the offset of a chunk's barrier, the address of its factors, and its parity."""
    at = Uint32(chunk) % facts.FACTOR_SLOTS
    size = 4 * facts.FACTOR_STAGES * facts.factor_stride(slots.tactic)
    parity = Uint32(chunk) // facts.FACTOR_SLOTS % 2
    return at * facts.BARRIER_BYTES, slots.factors + at * size, parity


@cute.jit
def make_factors(slots: Any, walk: Any, scales: BlockScales, extents: tuple[Any, Any, Any]) -> None:
    """Write the factors of all tiles; a lane has a stage of eight, and every fourth row."""
    rows, columns, steps = extents
    tactic = slots.tactic
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % facts.WARP, thread // facts.WARP - 1
    own = tactic.rows // facts.FACTOR_WARPS  # rows of a warp
    together = facts.WARP // facts.FACTOR_STAGES  # rows of an instruction
    count = own // together // BATCHES
    stage, first = lane % facts.FACTOR_STAGES, warp * own + lane // facts.FACTOR_STAGES
    chunk = Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = mainloop.tile_at(walk, number)
        begins, block = row * tactic.rows + first, block_of(column * tactic.columns, columns)
        for begin in cutlass.range(Int32(0), steps, facts.FACTOR_STAGES, unroll=1):
            step = cutlass.min(begin + stage, steps - 1)
            barrier, to, parity = slot_at(slots, chunk)
            of_b = scale_at(scales.b, block, step)
            target = to + 4 * Uint32(stage * facts.factor_stride(tactic) + first)
            ptx.await_phase(slots.empty + barrier, parity ^ 1)
            for batch in cutlass.range(BATCHES, unroll=1):
                within = [(batch * count + i) * together for i in range(count)]
                at_rows = [cutlass.min(begins + more, rows - 1) for more in within]
                read = [scale_at(scales.a, each, step) for each in at_rows]
                for more, scale in zip(within, read, strict=True):
                    ptx.store_number(target + 4 * Uint32(more), ops.multiply_rn(scale, of_b))
            cute.arch.sync_warp()
            ptx.arrive(slots.full + barrier, lane == 0)
            chunk += 1


@cute.jit
def consume_folds(
    ring: Any,
    slots: Any,
    walk: Any,
    operands: tuple[Any, ...],
    target: tuple[Any, Any],
    extents: tuple[Any, Any],
) -> None:
    """Sum up and store all tiles of a warpgroup, 64 rows of a stage after 64 rows.

    `operands` are the instruction, the stages of A and of B, and which warpgroup this is; `extents`
    are the rows of A and the stages of a tile.
    """
    mma, sA, sB, mine = operands
    rows, steps = extents
    tactic = slots.tactic
    folds = tactic.folds
    thread, _, _ = cute.arch.thread_idx()
    within = thread % facts.WARPGROUP
    # wgmma accumulator: a warp has 16 rows, a thread rows g and g + 8 of them.
    first = mine * folds * facts.PIECE_ROWS + within // facts.WARP * 16 + within % facts.WARP // 4
    outlet = mainloop.outlet_of_warpgroup(*target, mma, mine, facts.pieces_at_once(tactic))
    fragments = [
        mainloop.fragments_of(mma, sA, sB, mine * folds + fold, tactic.columns)
        for fold in range(folds)
    ]
    folded = FoldedSums(
        mma,
        fragments,
        fragments[0][1],
        [mainloop.sums_of(mma, tactic.columns) for _ in range(folds)],
        cute.make_rmem_tensor(2 * folds, Float32),
    )
    state, chunk = mainloop.consumer_state(ring.num_stages), Int32(0)
    whole = steps // facts.FACTOR_STAGES
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = mainloop.tile_at(walk, number)
        if row * tactic.rows + mine * folds * facts.PIECE_ROWS < rows:
            for total in folded.sums:
                total.fill(0.0)
            for _ in cutlass.range(whole, unroll=1):
                state = multiply_chunk(ring, state, folded, (slots, chunk, first), None)
                chunk += 1
            if steps > whole * facts.FACTOR_STAGES:
                rest = steps - whole * facts.FACTOR_STAGES
                state = multiply_chunk(ring, state, folded, (slots, chunk, first), rest)
                chunk += 1
            places = [
                facts.piece_of(row, column, mine * folds + fold, tactic) for fold in range(folds)
            ]
            mainloop.store_at_once(outlet, folded.sums, places)
        else:
            state = skip_tile(ring, state, slots, chunk, steps)
            chunk += ceil_div(steps, facts.FACTOR_STAGES)
    mainloop.drain(outlet)


@cute.jit
def skip_tile(ring: Any, state: Any, slots: FactorSlots, chunk: Any, steps: Any) -> Any:
    """Give back all stages and slots of a tile whose rows of this warpgroup lie outside of A."""
    thread, _, _ = cute.arch.thread_idx()
    for step in cutlass.range(steps, unroll=1):
        barrier, _, parity = slot_at(slots, chunk + step // facts.FACTOR_STAGES)
        ptx.await_phase(slots.full + barrier, parity)
        last = (step % facts.FACTOR_STAGES == facts.FACTOR_STAGES - 1) | (step == steps - 1)
        ring.consumer_wait(state)
        ring.consumer_release(state)
        state.advance()
        ptx.arrive(slots.empty + barrier, (thread % facts.WARP == 0) & last)
    return state


class FoldedSums(NamedTuple):
    """What a warpgroup holds of a tile: 64 rows, and 64 rows more, in turn."""

    mma: Any
    fragments: list[Any]
    stage_sums: Any
    sums: list[Any]
    factors: Any  # of a stage: two rows of each fold


@cute.jit
def multiply_chunk(
    ring: Any,
    state: Any,
    folded: FoldedSums,
    factors: tuple[FactorSlots, Any, Any],
    stages: Any,
) -> Any:
    """Add the stages of a slot of factors; `stages` is their number, None that of a whole slot.

    The slots, the number of this one, and the first row of the thread are `factors`.
    """
    slots, chunk, first = factors
    barrier, start, parity = slot_at(slots, chunk)
    stride, own = 4 * facts.factor_stride(slots.tactic), start + 4 * Uint32(first)
    ptx.await_phase(slots.full + barrier, parity)
    if cutlass.const_expr(stages is None):
        for stage in cutlass.range_constexpr(facts.FACTOR_STAGES):
            state = multiply_folds(ring, state, folded, own + stage * stride)
    else:
        for stage in cutlass.range(stages, unroll=1):
            state = multiply_folds(ring, state, folded, own + Uint32(stage * stride))
    thread, _, _ = cute.arch.thread_idx()
    ptx.arrive(slots.empty + barrier, thread % facts.WARP == 0)
    return state


def multiply_folds(ring: Any, state: Any, folded: FoldedSums, own: Any) -> Any:
    """Multiply and promote a stage, 64 rows after 64 rows; its factors are read meanwhile.

    Trap: ptxas runs wgmma one by one where a branch lies between them and their wait.
    """
    ring.consumer_wait(state)
    for fold, (_, _, a, b) in enumerate(folded.fragments):
        mainloop.multiply_stage(
            folded.mma, folded.stage_sums, *mainloop.stage_of(a, b, state.index), begins=True
        )
        if fold == 0:
            for i in range(cute.size(folded.factors)):
                at_row = i // 2 * facts.PIECE_ROWS + i % 2 * 8
                folded.factors[i] = ptx.shared_number(own + 4 * at_row, 0, 1)
        warpgroup.wait_group(0)
        if fold == len(folded.fragments) - 1:
            ring.consumer_release(state)
        pair = (folded.factors[2 * fold + row] for row in (0, 1))
        promote(folded.sums[fold], folded.stage_sums, *pair)
    state = state.clone()
    state.advance()
    return state


# ---- few numbers of D ----------------------------------------------------------------------------


@cute.jit
def consume_few(
    ring: Any,
    walk: Any,
    fragments: tuple[Any, ...],
    outlet: Any,
    scaling: Any,
    form: cutlass.Constexpr,
) -> None:
    """Sum up and write all tiles of a warpgroup."""
    tactic, (scales, steps) = form.tactic, scaling
    state = mainloop.consumer_state(ring.num_stages)
    total = mainloop.sums_of(fragments[0], tactic.columns)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        place = mainloop.tile_at(walk, number)
        rows, block = rows_of_factors(place, outlet, tactic)
        if cutlass.const_expr(facts.overlaps(form)):
            at = (scales, (rows, block), steps)
            state = multiply_few(ring, state, fragments, total, at, tactic)
        else:
            state = multiply(ring, state, fragments, total, (scales, (*rows, block), steps))
        mainloop.store_directly(outlet, total, place, tactic)


def rows_of_factors(place: Any, outlet: Any, tactic: GemmTactic) -> tuple[Any, Any]:
    """Return the rows of A, clamped, and the block of B whose scales meet a thread's sums."""
    row, column = place[0] * tactic.rows + outlet.row, place[1] * tactic.columns
    if tactic.swapped:  # columns 2 q and 2 q + 1 of each eight
        first = column + outlet.lane * 2
        rows = [first + 8 * i + j for i in range(tactic.columns // 8) for j in range(2)]
    else:
        rows = [row, row + 8]
    last = outlet.extents[0] - 1
    block = block_of(row if tactic.swapped else column, outlet.extents[1])
    return tuple(cutlass.min(each, last) for each in rows), block


def block_of(row: Any, rows: Any) -> Any:
    """Return the block of a row of B; the last one's for tiles of a cluster that lie outside D."""
    return cutlass.min(row, rows - 1) // BLOCK


def factor_of(number: int, tactic: GemmTactic) -> int:
    """Return which of a thread's rows of A a register of its sums belongs to."""
    return number // 4 * 2 + number % 2 if tactic.swapped else number // 2 % 2


@cute.jit
def multiply_few(
    ring: Any,
    state: Any,
    fragments: tuple[Any, ...],
    total: Any,
    scaling: Any,
    tactic: cutlass.Constexpr,
) -> Any:
    """Sum up one tile; a stage is promoted while the next one is multiplied.

    Trap: a wgmma writes its registers until it is waited for, so stages take turns in two sets of
    sums, and the loop over stages is unrolled by two.
    """
    mma, even, a, b = fragments
    scales, (rows, block), steps = scaling
    sums = (even, cute.make_rmem_tensor(even.shape, Float32))
    read = tuple(cute.make_rmem_tensor(len(rows) + 1, Float32) for _ in range(2))
    total.fill(0.0)
    before = state.clone()
    read_scales(read[0], scales, (rows, block), 0)
    ring.consumer_wait(state)
    mainloop.multiply_stage(mma, sums[0], *mainloop.stage_of(a, b, state.index), begins=True)
    state.advance()
    for pair in cutlass.range((steps - 1) // 2, unroll=1):
        for i in cutlass.range_constexpr(2):
            read_scales(read[1 - i], scales, (rows, block), 2 * pair + i + 1)
            ring.consumer_wait(state)
            mainloop.multiply_stage(
                mma, sums[1 - i], *mainloop.stage_of(a, b, state.index), begins=True
            )
            state.advance()
            warpgroup.wait_group(1)
            ring.consumer_release(before)
            before.advance()
            promote_few(total, sums[i], read[i], tactic)
    if steps % 2 == 0:
        read_scales(read[1], scales, (rows, block), steps - 1)
        ring.consumer_wait(state)
        mainloop.multiply_stage(mma, sums[1], *mainloop.stage_of(a, b, state.index), begins=True)
        state.advance()
        warpgroup.wait_group(1)
        ring.consumer_release(before)
        before.advance()
        promote_few(total, sums[0], read[0], tactic)
        warpgroup.wait_group(0)
        ring.consumer_release(before)
        promote_few(total, sums[1], read[1], tactic)
    else:
        warpgroup.wait_group(0)
        ring.consumer_release(before)
        promote_few(total, sums[0], read[0], tactic)
    return state


def read_scales(into: Any, scales: BlockScales, at: tuple[Any, Any], step: Any) -> None:
    """Read the scales of a stage: those of a thread's rows of A, then that of B.

    They are multiplied by one another where they are used: a product here would wait for them.
    """
    rows, block = at
    for i, row in enumerate(rows):
        into[i] = scale_at(scales.a, row, step)
    into[len(rows)] = scale_at(scales.b, block, step)


def promote_few(total: Any, stage_sums: Any, scales: Any, tactic: GemmTactic) -> None:
    """Add a stage's sums times their scales."""
    *of_a, of_b = (scales[i] for i in range(cute.size(scales)))
    factors = [ops.multiply_rn(scale, of_b) for scale in of_a]
    for i in range(cute.size(total)):
        total[i] = ops.fma_rn(stage_sums[i], factors[factor_of(i, tactic)], total[i])


# ---- scales --------------------------------------------------------------------------------------


def scales_of(scales: BlockScales, at: tuple[Any, Any, Any], step: Any) -> tuple[Any, Any]:
    """Return the factors of a stage's sums in both rows of a thread."""
    upper, lower, block = at
    of_b = scale_at(scales.b, block, step)
    return tuple(ops.multiply_rn(scale_at(scales.a, row, step), of_b) for row in (upper, lower))


def scale_at(scales: Any, row: Any, step: Any) -> Any:
    """Read one scale as float32."""
    scale = scales[row, step]
    if scales.element_type is Float32:
        return Float32(scale)
    return ue8m0_decode(Uint32(scale) & 0xFF)


def layouts(form: GemmForm) -> tuple[Any, Any]:
    """Return the layouts of A's and B's stages."""
    tactic, stages = form.tactic, facts.footprint(form).stages
    return tuple(
        mainloop.staged_layout(Float8E4M3FN, rows, tactic.inner, stages, mainloop.Swizzle.K_SW128)
        for rows in (tactic.rows, tactic.columns)
    )


def matrices_of(pointers: Any, extents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return tensors of A, B, their scales and D, and M, N, K with their known divisors."""
    m, n, k, *_ = extents
    k = cute.assume(k, divby=facts.FP8_BLOCK.inner_multiple)
    n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
    groups, blocks = ceil_div(k, BLOCK), ceil_div(n, BLOCK)
    shapes = ((m, k), (n, k), (m, groups), (blocks, groups), (m, n))
    matrices = tuple(
        cute.make_tensor(pointer, cute.make_layout(shape, stride=(Int64(shape[1]), 1)))
        for pointer, shape in zip(pointers, shapes, strict=True)
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
    given = (*facts.sides(walked, tactic), k)
    (mA, mB, of_a, of_b, mD), (m, n, k) = matrices_of(pointers, given)
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
    gemm_kernel(feeds, store, BlockScales(of_a, of_b), numbers, form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[facts.threads(form), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=tactic.blocks,
        preferred_smem_carveout=facts.WHOLE_CARVEOUT if tactic.blocks > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def stored_scales(of: GemmProblem | GemmForm) -> Storage:
    """Return how block scales are stored."""
    return Storage(*SCALES[of.scales])


_CODES = Storage(Float8E4M3FN, torch.float8_e4m3fn, TMA_ALIGNMENT)
OPERANDS = (
    GemmOperand("a", _CODES, lambda p: (p.rows, p.inner), label="A"),
    GemmOperand("b", _CODES, lambda p: (p.columns, p.inner), label="B"),
    GemmOperand(
        "a_scales", stored_scales, lambda p: (p.rows, ceil_div(p.inner, BLOCK)), label="scales of A"
    ),
    GemmOperand(
        "b_scales",
        stored_scales,
        lambda p: (ceil_div(p.columns, BLOCK), ceil_div(p.inner, BLOCK)),
        label="scales of B",
    ),
)
KERNEL = described(launch_gemm, OPERANDS, SM90A)
compile_form = KERNEL.compile_form
