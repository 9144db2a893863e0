"""Add a residual to BF16 rows and apply RMSNorm to the sum, in one launch (V3.2).

total = x + residual; normed = total / sqrt(mean(total**2) + epsilon) * weight. Weight BF16 or
float32; the norm takes the float32 sum, or the stored BF16 one. A thread block walks down rows, a
step of the grid apart; where rows are at most 1,024 wide, each warp walks by itself. The next row's
x and residual are loaded while a row is worked on. Rows of whole warps (1,024 columns each) have a
kernel of their own, whose loads and stores are whole lines (whole_rows). The sum may overwrite the
residual, and the normed values x.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: M rows, K columns.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import (
    BLOCK_WORDS,
    emit,
    numbers_of,
    rounded_words,
    square_root,
    store,
    warp_folded,
    words_of,
)
from degarble.kernels.primitives.quantise_problem import BLOCK
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows import whole_rows as whole
from degarble.kernels.rows.problem import (
    LANES,
    MOST_WARPS,
    SLOTS_OF_LANE,
    ResidualForm,
    ResidualProblem,
)
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.operands import (
    DTYPES,
)
from degarble.kernels.runtime.pdl import (
    EARLY,
    fetch_weights,
    follow,
    let_follow,
    wait_for_front,
)

FLAT = 1 << 30


# ---- device --------------------------------------------------------------------------------------


class ResidualTensors(NamedTuple):
    """Kernel's tensors, as blocks: [words of a block, blocks]."""

    values: Any  # BF16 [M, K]
    residual: Any  # BF16 [M, K]
    weight: Any  # BF16 or float32 [K]
    normed: Any  # BF16 [M, K]
    total: Any  # BF16 [M, K]


def weights_of(registers: Any, slot: int, form: ResidualForm) -> list[Any]:
    """Return the float32 weights of a block."""
    words = words_of(registers[None, slot])
    if form.weight == "fp32":
        return [ops.number_of(word) for word in words]
    return numbers_of(again(words))


def sums_of(rValues: Any, rResidual: Any, slot: int) -> list[Any]:
    """Return the float32 sums of a block."""
    pair = (numbers_of(words_of(each[None, slot])) for each in (rValues, rResidual))
    return [ops.add_rn(number, other) for number, other in zip(*pair, strict=True)]


def folded_over_warps(number: Any) -> Any:
    """Sum over each half of a warp, where the sums of sixteen warps stand, twice."""
    for distance in (8, 4, 2, 1):
        number = ops.add_rn(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
    return number


def again(words: list[Any]) -> list[Any]:
    """Return words opaque to the compiler: it unpacks them twice instead of keeping them."""
    return [emit("mov.b32 {$w0}, {$r0};", Uint32, word) for word in words]


@cute.jit
def read(
    tensors: ResidualTensors, ahead: tuple[Any, Any], place: Any, slot: cutlass.Constexpr
) -> None:
    """Read a block of both operands."""
    cute.autovec_copy(tensors.values[None, place], ahead[0][None, slot])
    cute.autovec_copy(tensors.residual[None, place], ahead[1][None, slot])


@cute.jit
def fetch_weight(
    tensors: ResidualTensors, place: Any, blocks: Any, form: cutlass.Constexpr
) -> None:
    """Ask L2 for the weight by the launch's first thread."""
    if place == 0:
        size = BLOCK * (4 if form.weight == "fp32" else 2)
        fetch_weights(tensors.weight.iterator.toint(), Uint32(blocks * size))


@cute.kernel
def residual_kernel(  # noqa: PLR0915  one walk: what a lane holds would have to be handed on
    tensors: ResidualTensors, extents: tuple[Int32, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Walk down the rows: read both, add, sum squares, norm, write both."""
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    rows, blocks, lanes = extents
    fetch_weight(tensors, Int32(thread) + Int32(first), blocks, form)
    follow()
    blocks, lanes, thread = Uint32(blocks), Uint32(lanes), Uint32(thread)
    lane, warp = thread % LANES, thread // LANES
    lane_block = lane if cutlass.const_expr(form.narrow) else thread
    first, step = Int32(first), Int32(step)
    if cutlass.const_expr(form.narrow):
        first = first * norms.NARROW_WARPS + Int32(warp)
        step = step * norms.NARROW_WARPS

    allocator = cutlass.memory.SmemAllocator()
    # Of two turns, so that one barrier a turn is enough; absent warps stay 0.
    sSums = allocator.allocate_tensor(Float32, cute.make_layout((MOST_WARPS, 2)), 16)
    if cutlass.const_expr(not form.narrow):
        if thread < 2 * MOST_WARPS:
            sSums[thread] = Float32(0.0)
        cute.arch.sync_threads()

    of_weight = BLOCK if form.weight == "fp32" else BLOCK_WORDS
    rWeight = cute.make_rmem_tensor(cute.make_layout((of_weight, SLOTS_OF_LANE)), Uint32)
    rWeight.fill(0)
    layout = cute.make_layout((BLOCK_WORDS, SLOTS_OF_LANE))
    rAhead = (cute.make_rmem_tensor(layout, Uint32), cute.make_rmem_tensor(layout, Uint32))
    for part in rAhead:
        part.fill(0)
    for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
        block = lane_block + slot * lanes
        if block < blocks:
            if cutlass.const_expr(form.weight != "fp32"):
                cute.autovec_copy(tensors.weight[None, block], rWeight[None, slot])
            if first < rows:
                read(tensors, rAhead, Int64(first) * Int64(blocks) + Int64(block), slot)

    turn = Uint32(0)
    for row in cutlass.range(first, rows, step, unroll=1):
        start = Int64(row) * Int64(blocks) + Int64(lane_block)
        # Take this row, then load the next one: its latency overlaps the work below.
        sums = [sums_of(*rAhead, slot) for slot in range(SLOTS_OF_LANE)]
        for part in rAhead:
            part.fill(0)
        for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
            if (row + step < rows) & (lane_block + slot * lanes < blocks):
                place = start + Int64(step) * Int64(blocks) + Int64(slot * lanes)
                read(tensors, rAhead, place, slot)

        held = []  # of each block: its sums, or the words of the stored ones
        for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
            stored = rounded_words(sums[slot])
            if lane_block + slot * lanes < blocks:
                store(tensors.total, start + Int64(slot * lanes), stored)
            held.append(again(stored) if form.rounded else sums[slot])
        sums = [numbers_of(each) if form.rounded else each for each in held]
        total = warp_folded(ops.add_rn(*(norms.sum_of_squares(each) for each in sums)))
        if cutlass.const_expr(not form.narrow):
            if lane == 0:
                sSums[warp, turn] = total
            cute.arch.sync_threads()
            # Every warp folds all sums itself, in one order.
            total = folded_over_warps(Float32(sSums[lane % MOST_WARPS, turn]))
            turn = 1 - turn
        columns = Float32(Int32(blocks * BLOCK))
        factor = norms.factor_of(total, columns, epsilon, square_root)

        for slot in cutlass.range_constexpr(SLOTS_OF_LANE):
            place = start + Int64(slot * lanes)
            if lane_block + slot * lanes < blocks:
                if cutlass.const_expr(form.weight == "fp32"):
                    block = lane_block + slot * lanes
                    cute.autovec_copy(tensors.weight[None, block], rWeight[None, slot])
                numbers = numbers_of(again(held[slot])) if form.rounded else held[slot]
                pairs = zip(numbers, weights_of(rWeight, slot, form), strict=True)
                made = [norms.normed(number, weight, factor) for number, weight in pairs]
                store(tensors.normed, place, rounded_words(made))


@cute.kernel
def whole_kernel(
    tensors: ResidualTensors, rows: Int32, epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Walk down rows of whole lines: read both, add, sum squares, norm, write both."""
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    thread, first, step = Int32(thread), Int32(first), Int32(step)
    lane, warp = thread % LANES, thread // LANES
    of_row, places = whole.row_bytes(form.warps), whole.places_of(form.warps)
    if cutlass.const_expr(not form.reads_weight_early):
        fetch_weight(tensors, thread + first, form.warps * norms.BLOCKS_OF_WHOLE_WARP, form)
    else:
        let_follow()
    if thread == 0:
        # An earlier launch than the last one made it.
        fetch_weights(whole.address_of(tensors.residual, Int64(first) * of_row), Uint32(of_row))
    if cutlass.const_expr(not form.reads_weight_early):
        follow()
    allocator = cutlass.memory.SmemAllocator()
    # Of two turns, so that one barrier a turn is enough.
    sSums = allocator.allocate_tensor(Float32, cute.make_layout((MOST_WARPS, 2)), 16)
    behind = whole.first_chunk(thread) * whole.CHUNK_BYTES
    values, residual, normed, totals = (
        whole.address_of(tensor, behind)
        for tensor in (tensors.values, tensors.residual, tensors.normed, tensors.total)
    )
    rRow = whole.row_registers(), whole.row_registers()
    fp32 = form.weight == "fp32"
    rWeight = whole.row_registers(2 * whole.WORDS if fp32 else whole.WORDS)
    of_weight = whole.address_of(tensors.weight, behind * (2 if fp32 else 1))
    if cutlass.const_expr(form.reads_weight_early):
        whole.read_weights(rWeight, of_weight, form.warps)
        wait_for_front()

    turn = Uint32(0)
    for row in cutlass.range(first, rows, step, unroll=1):
        own_row = Int64(row) * of_row
        for registers, address in zip(rRow, (values, residual), strict=True):
            whole.read_row(registers, address + own_row, form.warps)
        if cutlass.const_expr(not form.reads_weight_early):
            whole.read_weights(rWeight, of_weight, form.warps)
        pairs = zip(*(whole.chunks_of(registers) for registers in rRow), strict=True)
        sums = [
            [ops.add_rn(x, y) for x, y in zip(numbers_of(left), numbers_of(right), strict=True)]
            for left, right in pairs
        ]
        held = []  # of each chunk: its sums, or the words of the stored ones
        for place, of_chunk in zip(places, sums, strict=True):
            stored = rounded_words(of_chunk)
            whole.write_words(totals + own_row, place, stored)
            held.append(again(stored) if form.rounded else of_chunk)
        numbers = [numbers_of(each) if form.rounded else each for each in held]
        total = whole.warp_sum([norms.half_sum(each) for each in numbers])
        total = whole.row_total(sSums, total, (lane, warp, turn), (0, 1), form.warps)
        turn = 1 - turn
        factor = norms.factor_of(total, form.warps * norms.OF_WHOLE_WARP, epsilon, square_root)
        for number, words in enumerate(whole.chunks_of(rWeight)):
            weights = whole.weight_numbers(words if fp32 else again(words))
            kept = numbers_of(again(held[number])) if form.rounded else held[number]
            made = [norms.normed(x, w, factor) for x, w in zip(kept, weights, strict=True)]
            whole.write_words(normed + own_row, places[number], rounded_words(made))


@cute.jit
def launch_residual(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form; extents are rows, blocks, lanes of a row, threads, thread blocks."""
    rows, blocks, lanes, threads, walkers = extents
    of_weight = BLOCK if form.weight == "fp32" else BLOCK_WORDS
    views = zip(
        pointers, (BLOCK_WORDS, BLOCK_WORDS, of_weight, BLOCK_WORDS, BLOCK_WORDS), strict=True
    )
    tensors = ResidualTensors(
        *(
            cute.make_tensor(each, cute.make_layout((words, FLAT), stride=(1, words)))
            for each, words in views
        )
    )
    declared = facts.residual_threads_declared(form)
    if cutlass.const_expr(form.warps):
        whole_kernel(tensors, rows, epsilon, form).launch(
            grid=[walkers, 1, 1],
            block=[form.warps * LANES, 1, 1],
            max_number_threads=[declared, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )
    else:
        residual_kernel(tensors, (rows, blocks, lanes), epsilon, form).launch(
            grid=[walkers, 1, 1],
            block=[threads, 1, 1],
            max_number_threads=[declared, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[ResidualProblem, ResidualForm]) -> tuple[Any, ...]:
    """Return rows, blocks, lanes of a row, threads, thread blocks; epsilon."""
    norm = of.problem.norm
    threads, lanes = norms.norm_threads(norm), norms.lanes_of_row(norm.columns)
    walkers = facts.residual_grid(of.problem, of.tactic, of.processors)
    return (norm.rows, norm.blocks, lanes, threads, walkers), of.problem.epsilon


def _shape(problem: ResidualProblem) -> tuple[int, ...]:
    return problem.rows, problem.columns


def _weight(of: ResidualProblem | ResidualForm) -> Storage:
    return Storage(Uint32, DTYPES[of.weight], 32)


_Operand = Operand[ResidualProblem]
_ROWS = Storage(Uint32, torch.bfloat16, 32)
KERNEL = Kernel[ResidualProblem, ResidualForm](
    entry=launch_residual,
    operands=(
        _Operand("values", _ROWS, _shape),
        _Operand("residual", _ROWS, _shape),
        _Operand("weight", _weight, lambda p: (p.columns,)),
        _Operand("normed", _ROWS, _shape, output=True, label="normed values"),
        _Operand("total", _ROWS, _shape, output=True, label="stored sum"),
    ),
    choose_form=facts.choose_residual_form,
    choose_tactic=facts.choose_residual_tactic,
    kinds=((Int32,) * 5, Float32),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
