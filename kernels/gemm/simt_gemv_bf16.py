"""Product of 1 to 8 BF16 rows with a BF16 weight without tensor cores, for sm_90a and sm_100a.

out [M, N] = x [M, K] W^T with W [N, K]; float32 sums by fma, rounded once (BF16) or stored as they
are. Used for the decoder's output head. gemv_problem states the order of every sum, so results have
defined bits.

One thread block of 16 warps per multiprocessor. All threads copy x to shared memory once (zeros
beyond M and K), then each warp takes groups of G rows of W, 16 warps x grid apart. Of a group:
  1. every lane has the next A steps of W in registers, 16 bytes a row;
  2. it starts the loads of step s + A, then adds step s for all rows of x from shared memory;
  3. sums are folded over the warp, and lane G m + g writes the sum of row m and weight row g.
W is read exactly once and goes straight to registers. G and A are the form's walk: G A = 8.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: M rows, N columns of the result, K inner.
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
    WARPS,
    GemvForm,
    GemvProblem,
)
from degarble.kernels.primitives.device_words import numbers_of, warp_folded, words_of
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, fetch_weights, follow

WORDS = VECTOR // 2


# ---- device --------------------------------------------------------------------------------------


def add_step(rSums: Any, weights: list[list[Any]], sVectors: Any, place: Any, rows: int) -> None:
    """Add a step's products to the sums [group, rows] of a lane."""
    numbers = [numbers_of(words) for words in weights]
    for row in range(rows):
        rActivations = cute.make_rmem_tensor(WORDS, Uint32)
        cute.autovec_copy(sVectors[None, place, row], rActivations)
        activations = numbers_of(words_of(rActivations))
        for of_group in range(len(numbers)):
            total = rSums[of_group, row]
            rSums[of_group, row] = facts.accumulated(total, numbers[of_group], activations)


def lanes_own(rSums: Any, lane: Any, form: GemvForm) -> Any:
    """Fold all sums over the warp; return to each lane the sum that it writes."""
    mine = Float32(0.0)
    group = form.walk.group
    for row in range(form.rows):
        for of_group in range(group):
            total = warp_folded(Float32(rSums[of_group, row]))
            mine = ops.select(lane == row * group + of_group, total, mine)
    return mine


@cute.kernel
def gemv_kernel(
    tensors: tuple[cute.Tensor, ...], extents: tuple[Int32, ...], form: cutlass.Constexpr
) -> None:
    """Copy the activations to shared memory, then sum up groups of rows of the weight."""
    activations, weight, out = tensors
    rows, columns, vectors, steps = extents
    size, most_ahead = form.walk.group, form.walk.ahead
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    walkers, _, _ = cute.arch.grid_dim()
    lane, warp = Int32(thread) % LANES, Int32(thread) // LANES
    own = Int32(block) + Int32(walkers) * warp
    fetch_group(weight, own, (columns, vectors), lane, size)
    follow()

    allocator = cutlass.memory.SmemAllocator()
    held = facts.inner_held(form.rows) // VECTOR
    layout = cute.make_layout((WORDS, held, form.rows), stride=(1, WORDS, WORDS * held))
    sVectors = allocator.allocate_tensor(Uint32, layout, 16)
    for row in cutlass.range_constexpr(form.rows):
        for place in cutlass.range(Int32(thread), steps * LANES, WARPS * LANES, unroll=1):
            rVector = cute.make_rmem_tensor(WORDS, Uint32)
            rVector.fill(0)
            if (place < vectors) & (row < rows):
                cute.autovec_copy(activations[None, Int64(row) * vectors + place], rVector)
            cute.autovec_copy(rVector, sVectors[None, place, row])
    cute.arch.sync_threads()

    groups = (columns + (size - 1)) // size
    for group in cutlass.range(own, groups, Int32(walkers) * WARPS, unroll=1):
        starts = [
            # Rows beyond N repeat the last one; their sums are not written.
            Int64(ops.minimum(group * size + each, columns - 1)) * Int64(vectors)
            for each in range(size)
        ]
        rAhead = cute.make_rmem_tensor(cute.make_layout((WORDS, size, most_ahead)), Uint32)
        rAhead.fill(0)
        for ahead in cutlass.range_constexpr(most_ahead):
            if ahead * LANES + lane < vectors:
                for each in cutlass.range_constexpr(size):
                    at = starts[each] + Int64(ahead * LANES + lane)
                    cute.autovec_copy(weight[None, at], rAhead[None, each, ahead])
        rSums = cute.make_rmem_tensor(cute.make_layout((size, form.rows)), Float32)
        rSums.fill(0.0)
        for step in cutlass.range(Int32(0), steps, most_ahead, unroll=1):
            for ahead in cutlass.range_constexpr(most_ahead):
                # Taken before the registers are refilled below.
                weights = group_words(rAhead, ahead, size)
                place = (step + ahead) * LANES + lane
                later = place + most_ahead * LANES
                for each in cutlass.range_constexpr(size):
                    # Zeros add nothing where the steps exceed K.
                    rAhead[None, each, ahead].fill(0)
                if later < vectors:
                    for each in cutlass.range_constexpr(size):
                        at = starts[each] + Int64(later)
                        cute.autovec_copy(weight[None, at], rAhead[None, each, ahead])
                add_step(rSums, weights, sVectors, place, form.rows)
        mine = lanes_own(rSums, lane, form)
        column, row = group * size + lane % size, lane // size
        if (row < rows) & (column < columns):
            out[Int64(row) * Int64(columns) + Int64(column)] = mine.to(out.element_type)


@cute.jit
def fetch_group(
    weight: cute.Tensor, group: Any, extents: tuple[Any, Any], lane: Any, rows: cutlass.Constexpr
) -> None:
    """Ask for the first bytes of a warp's first group of weights while the previous launch runs."""
    columns, vectors = extents
    first = group * rows
    if (lane == 0) & (first < columns):
        count = ops.minimum(columns - first, Int32(rows)) * vectors
        size = ops.minimum(count, Int32(facts.EARLY_VECTORS)) * Int32(2 * VECTOR)
        start = weight.iterator + Int64(first) * Int64(vectors) * WORDS
        fetch_weights(start.toint(), Uint32(size))


def group_words(rAhead: Any, ahead: int, rows: int) -> list[list[Any]]:
    """Return the words of one step that have arrived, for each row of the group."""
    return [words_of(rAhead[None, each, ahead]) for each in range(rows)]


@cute.jit
def launch_gemv(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form: rows, columns, vectors of K, steps along K, thread blocks."""
    rows, columns, vectors, steps, walkers = extents
    activations, weight, out = pointers
    flat = 1 << 30
    of_vectors = cute.make_layout((WORDS, flat), stride=(1, WORDS))
    tensors = (
        cute.make_tensor(activations, of_vectors),
        cute.make_tensor(weight, of_vectors),
        cute.make_tensor(out, cute.make_layout(flat)),
    )
    gemv_kernel(tensors, (rows, columns, vectors, steps), form).launch(
        grid=[walkers, 1, 1],
        block=[WARPS * LANES, 1, 1],
        min_blocks_per_mp=1,  # Trap: without it ptxas spills to fit two blocks where rows are few
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[GemvProblem, GemvForm]) -> tuple[Any, ...]:
    problem, walk = of.problem, of.form.walk
    vectors, walkers = problem.inner // VECTOR, facts.grid(problem, walk, of.processors)
    return ((problem.rows, problem.columns, vectors, facts.steps(problem, walk), walkers),)


_Operand = Operand[GemvProblem]
_VECTORS = Storage(Uint32, torch.bfloat16, 16)
_OUT = {
    "bf16": Storage(BFloat16, torch.bfloat16, 2), "fp32": Storage(Float32, torch.float32, 4),
}  # fmt: skip
KERNEL = Kernel[GemvProblem, GemvForm](
    entry=launch_gemv,
    operands=(
        _Operand("x", _VECTORS, lambda p: (p.rows, p.inner), label="activations"),
        _Operand("weight", _VECTORS, lambda p: (p.columns, p.inner)),
        _Operand(
            "out",
            lambda of: _OUT[of.out],
            lambda p: (p.rows, p.columns),
            output=True,
            label="sums to write",
        ),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 5,),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
