"""Products of 1 to 8 BF16 rows with BF16 weights without tensor cores, for sm_90a and sm_100a.

out [M, N] = x [M, K] W^T with W [N, K]; or G such products, x [M, G K], W [G N, K], out [M, G N].
Float32 sums by fma, rounded once (BF16) or stored as they are. gemv_problem states the order of
every sum, so results have defined bits. Forms that save a launch beside it:
* turned: x are attention's heads, whose last 64 values are turned back (inverse RoPE, rounded to
  BF16) on their way to shared memory; a position outside of the table of turns makes them NaN.
* decoded: sums are quantised to NVFP4 and decoded as well, for a product that reads them so. Then a
  thread block's warps have neighbouring bundles, meet after each, and share the blocks of 16 sums.

One thread block of 16 warps per multiprocessor, or several smaller ones. All threads copy their
group's x to shared memory once (zeros beyond M and K), then each warp takes bundles of T rows of W,
as many apart as there are warps:
  1. every lane has the next A steps of W in registers, 16 bytes a row, the first ones before x and
     before the previous launch has ended: nothing writes weights while launches are under way;
  2. it starts the loads of step s + A, or of the next bundle's first steps, then adds step s for
     all rows of x from shared memory;
  3. sums are folded over the warp, and lane T m + t writes the sum of row m and weight row t.
W is read exactly once and goes straight to registers. T and A are the form's walk.

A product that spares multiprocessors for other branches of a graph lets the next launch be set up
when it is through its bundles: earlier, that one's thread blocks would stand there.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: G groups, M rows, N columns of a group's result, K inner.
"""

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import gemv_problem as facts
from degarble.kernels.gemm.gemv_problem import (
    LANES,
    VECTOR,
    GemvForm,
    GemvProblem,
)
from degarble.kernels.primitives.device_words import (
    NAN,
    block_amax,
    coded_scale,
    decoding_of,
    fill,
    load_turn,
    numbers_of,
    nvfp4_rounded,
    registers_of,
    rounded_words,
    store,
    turned_words,
    warp_folded,
    words_of,
)
from degarble.kernels.primitives.device_words import vectors as flat_vectors
from degarble.kernels.primitives.kv_problem import PAIRS_OF_LANE, TABLE_WIDTH
from degarble.kernels.rows.problem import first_turned
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Presence,
    Storage,
    as_vector,
)
from degarble.kernels.runtime.operands import DRIVERS_CHOICE
from degarble.kernels.runtime.pdl import EARLY, follow, let_follow, wait_for_front

WORDS = VECTOR // 2


# ---- device --------------------------------------------------------------------------------------


def add_step(rSums: Any, weights: list[list[Any]], sVectors: Any, place: Any, rows: int) -> None:
    """Add a step's products to the sums [together, rows] of a lane."""
    numbers = [numbers_of(words) for words in weights]
    for row in range(rows):
        rActivations = cute.make_rmem_tensor(WORDS, Uint32)
        cute.autovec_copy(sVectors[None, place, row], rActivations)
        activations = numbers_of(words_of(rActivations))
        for of_bundle in range(len(numbers)):
            total = rSums[of_bundle, row]
            rSums[of_bundle, row] = facts.accumulated(total, numbers[of_bundle], activations)


def lanes_own(rSums: Any, lane: Any, form: GemvForm) -> Any:
    """Fold all sums over the warp; return to each lane the sum that it writes."""
    mine = Float32(0.0)
    together = form.walk.together
    for row in range(form.rows):
        for of_bundle in range(together):
            total = warp_folded(Float32(rSums[of_bundle, row]))
            mine = ops.select(lane == row * together + of_bundle, total, mine)
    return mine


@cute.kernel
def gemv_kernel(  # noqa: PLR0915  one walk: what a lane holds would have to be handed on
    tensors: tuple[Any, ...], extents: tuple[Int32, ...], form: cutlass.Constexpr
) -> None:
    """Copy the activations to shared memory, then sum up bundles of rows of the weight."""
    activations, weight, out, turning, coding = tensors
    rows, columns, vectors, steps, positions = extents
    together, most_ahead, warps = form.walk.together, form.walk.ahead, form.walk.warps
    thread, _, _ = cute.arch.thread_idx()
    block, group, _ = cute.arch.block_idx()
    walkers, groups, _ = cute.arch.grid_dim()
    lane, warp = Int32(thread) % LANES, Int32(thread) // LANES
    own = Int32(block) + Int32(walkers) * warp
    if cutlass.const_expr(form.decoded):
        own = Int32(block) * warps + warp
    above = Int64(group) * Int64(columns)  # sums of the groups before
    rAhead = cute.make_rmem_tensor(cute.make_layout((WORDS, together, most_ahead)), Uint32)
    for ahead in cutlass.range_constexpr(most_ahead):
        load_step(rAhead, weight, (own, above), (columns, vectors), (ahead * LANES + lane, ahead))
    if cutlass.const_expr(form.late):
        wait_for_front()
    else:
        follow()

    allocator = cutlass.memory.SmemAllocator()
    held = facts.inner_held(form.rows) // VECTOR
    layout = cute.make_layout((WORDS, held, form.rows), stride=(1, WORDS, WORDS * held))
    sVectors = allocator.allocate_tensor(Uint32, layout, 16)
    if cutlass.const_expr(form.walk.copied > 1):
        copy_row(activations, sVectors, (Int32(thread), Int64(group)), (vectors, steps), form)
    for row in cutlass.range_constexpr(form.rows if form.walk.copied == 1 else 0):
        for place in cutlass.range(Int32(thread), steps * LANES, warps * LANES, unroll=1):
            rVector = cute.make_rmem_tensor(WORDS, Uint32)
            rVector.fill(0)
            if (place < vectors) & (row < rows):
                start = (Int64(row) * Int64(groups) + Int64(group)) * Int64(vectors)
                cute.autovec_copy(activations[None, start + place], rVector)
                if cutlass.const_expr(form.turned > 0):
                    turn_back(rVector, turning, (row, place), positions, form.turned)
            cute.autovec_copy(rVector, sVectors[None, place, row])
    cute.arch.sync_threads()

    sSums: Any = None
    decoding: Any = None
    if cutlass.const_expr(form.decoded):
        # Of two rounds, so that one barrier a round is enough.
        of_round = cute.make_layout((form.together, form.rows, 2))
        sSums = allocator.allocate_tensor(Float32, of_round, 16)
        decoding = decoding_of(Float32(coding[0][0]))
    turn = Int32(0)
    bundles, stride = (columns + (together - 1)) // together, Int32(walkers) * warps
    for bundle in cutlass.range(own, bundles, stride, unroll=1):
        rSums = cute.make_rmem_tensor(cute.make_layout((together, form.rows)), Float32)
        rSums.fill(0.0)
        for step in cutlass.range(Int32(0), steps, most_ahead, unroll=1):
            last = step + most_ahead >= steps
            taken = ops.select(last, bundle + stride, bundle)
            base = ops.select(last, Int32(0), step + most_ahead)
            for ahead in cutlass.range_constexpr(most_ahead):
                # Taken before the registers are refilled.
                weights = words_of_bundle(rAhead, ahead, together)
                later = (base + ahead) * LANES + lane
                if cutlass.const_expr(not form.walk.once):
                    load_step(rAhead, weight, (taken, above), (columns, vectors), (later, ahead))
                add_step(rSums, weights, sVectors, (step + ahead) * LANES + lane, form.rows)
        mine = lanes_own(rSums, lane, form)
        column, row = bundle * together + lane % together, lane // together
        if (row < rows) & (column < columns):
            at = (Int64(row) * Int64(groups) + Int64(group)) * Int64(columns) + Int64(column)
            out[at] = mine.to(out.element_type)
        if cutlass.const_expr(form.decoded):
            if row < form.rows:
                sSums[warp * together + lane % together, row, turn] = mine
            cute.arch.sync_threads()
            first = (bundle - warp) * together
            of_row = Int64(groups) * Int64(columns)
            place = (Int64(group) * Int64(columns) + Int64(first), of_row, rows)
            decode_round(sSums, coding[1], (Int32(thread), turn, place), decoding, form)
            turn = 1 - turn
    if cutlass.const_expr(form.late):
        let_follow()


@cute.jit
def copy_row(
    activations: Any,
    sVectors: Any,
    place: tuple[Any, Any],
    extents: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Copy the only row of activations to shared memory, several vectors of a thread at once."""
    (thread, group), (vectors, steps) = place, extents
    count, threads = form.walk.copied, form.walk.warps * LANES
    for first in cutlass.range(thread, steps * LANES, count * threads, unroll=1):
        rVectors = cute.make_rmem_tensor(cute.make_layout((WORDS, count)), Uint32)
        rVectors.fill(0)
        for each in cutlass.range_constexpr(count):
            at = first + each * threads
            if at < vectors:
                start = group * Int64(vectors) + Int64(at)
                cute.autovec_copy(activations[None, start], rVectors[None, each])
        for each in cutlass.range_constexpr(count):
            at = first + each * threads
            if at < steps * LANES:
                cute.autovec_copy(rVectors[None, each], sVectors[None, at, 0])


@cute.jit
def decode_round(
    sSums: Any,
    decoded: Any,
    told: tuple[Any, Any, tuple[Any, Any, Any]],
    decoding: Any,
    form: cutlass.Constexpr,
) -> None:
    """Quantise and decode a round's sums, half a block of 16 a thread.

    Told are the thread, the round's place in shared memory, and the round's first sum of row 0, the
    sums of a row, and the rows.
    """
    thread, turn, (first, of_row, rows) = told
    halves = form.together // VECTOR
    half, row = thread % halves, thread // halves
    if row < form.rows:
        numbers = [Float32(sSums[half * VECTOR + i, row, turn]) for i in range(VECTOR)]
        words = rounded_words(numbers)
        largest = block_amax(words)
        mask = (1 << min(LANES, halves * form.rows)) - 1
        other = cute.arch.shuffle_sync_bfly(largest, offset=1, mask=mask)
        largest = ops.maximum(largest, Float32(other))
        code, factor = coded_scale(largest, decoding)
        values = nvfp4_rounded(words, factor, code)
        if row < rows:
            vector = (Int64(row) * of_row + first) // VECTOR + Int64(half)
            store(decoded, vector, values)


@cute.jit
def turn_back(
    rVector: Any,
    turning: Any,
    place: tuple[Any, Any],
    positions: Any,
    width: cutlass.Constexpr,
) -> None:
    """Turn a vector of a row's heads back if it is among the last 64 values of its head."""
    (row, vector), (turns, of_rows) = place, turning
    group = vector % (width // VECTOR) - first_turned(width)
    if group >= 0:
        position = Int64(of_rows[row])
        rTurn = registers_of(PAIRS_OF_LANE, 2)
        # Stays NaN where the position is not in the table.
        rTurn.fill(NAN)
        if (position >= 0) & (position < Int64(positions)):
            load_turn(turns, rTurn, (position, group))
        fill(rVector, turned_words(numbers_of(words_of(rVector)), rTurn, back=True))


@cute.jit
def load_step(
    rAhead: Any, weight: cute.Tensor, bundle: tuple[Any, Any], extents: tuple[Any, Any], of: Any
) -> None:
    """Start a lane's loads of a step of a bundle; zeros, which add nothing, where there is none."""
    (number, above), (columns, vectors), (vector, ahead) = bundle, extents, of
    together = cute.size(rAhead, mode=[1])
    rAhead[None, None, ahead].fill(0)
    if (number * together < columns) & (vector < vectors):
        for each in cutlass.range_constexpr(together):
            # Rows beyond N repeat the last one; their sums are not written.
            row = above + Int64(ops.minimum(number * together + each, columns - 1))
            at = row * Int64(vectors) + Int64(vector)
            cute.autovec_copy(weight[None, at], rAhead[None, each, ahead])


def words_of_bundle(rAhead: Any, ahead: int, together: int) -> list[list[Any]]:
    """Return the words of one step that have arrived, for each row of the bundle."""
    return [words_of(rAhead[None, each, ahead]) for each in range(together)]


@cute.jit
def launch_gemv(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch: rows, columns, vectors of K, steps along K, blocks of a group, groups, positions."""
    rows, columns, vectors, steps, walkers, groups, positions = extents
    activations, weight, out, *more = pointers
    flat = 1 << 30
    of_vectors = cute.make_layout((WORDS, flat), stride=(1, WORDS))
    turning: tuple[Any, ...] = ()
    coding: tuple[Any, ...] = ()
    if cutlass.const_expr(form.turned > 0):
        turning = tuple(map(flat_vectors, more, (PAIRS_OF_LANE, 0)))
        more = more[2:]
    if cutlass.const_expr(form.decoded):
        coding = tuple(map(flat_vectors, more, (0, WORDS)))
    tensors = (
        cute.make_tensor(activations, of_vectors),
        cute.make_tensor(weight, of_vectors),
        cute.make_tensor(out, cute.make_layout(flat)),
        turning,
        coding,
    )
    gemv_kernel(tensors, (rows, columns, vectors, steps, positions), form).launch(
        grid=[walkers, groups, 1],
        block=[form.walk.warps * LANES, 1, 1],
        # Trap: without it ptxas spills to fit two blocks where rows are few.
        min_blocks_per_mp=form.walk.blocks,
        preferred_smem_carveout=DRIVERS_CHOICE if form.walk.blocks > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[GemvProblem, GemvForm]) -> tuple[Any, ...]:
    problem, walk = of.problem, of.form.walk
    vectors, steps = problem.inner // VECTOR, facts.steps(problem, walk)
    blocks = facts.grid(problem, walk, of.processors)
    return ((problem.rows, problem.columns, vectors, steps, *blocks, problem.positions),)


_Operand = Operand[GemvProblem]
_VECTORS = Storage(Uint32, torch.bfloat16, 16)
_OUT = {
    "bf16": Storage(BFloat16, torch.bfloat16, 2), "fp32": Storage(Float32, torch.float32, 4),
}  # fmt: skip


_TURNED = Presence[Any](lambda of: of.turned > 0, "Give it where heads are turned back.")
_DECODED = Presence[Any](lambda of: of.decoded, "Give it where sums are quantised.")
KERNEL = Kernel[GemvProblem, GemvForm](
    entry=launch_gemv,
    operands=(
        _Operand("x", _VECTORS, lambda p: (p.rows, p.groups * p.inner), label="activations"),
        _Operand("weight", _VECTORS, lambda p: (p.sums, p.inner)),
        _Operand(
            "out",
            lambda of: _OUT[of.out],
            lambda p: (p.rows, p.sums),
            output=True,
            label="sums to write",
        ),
        _Operand(
            "turns",
            Storage(Uint32, torch.float32, 16),
            lambda p: (p.positions, TABLE_WIDTH),
            _TURNED,
            passed=False,
        ),
        _Operand(
            "positions",
            Storage(Int64, torch.int64, 8),
            lambda p: (p.rows,),
            _TURNED,
            passed=False,
        ),
        _Operand(
            "decode_scale",
            Storage(Float32, torch.float32, 4),
            lambda _: (1,),
            _DECODED,
            passed=False,
            checked=as_vector,
        ),
        _Operand(
            "decoded",
            _VECTORS,
            lambda p: (p.rows, p.sums),
            _DECODED,
            output=True,
            passed=False,
            label="decoded sums",
        ),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 7,),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
