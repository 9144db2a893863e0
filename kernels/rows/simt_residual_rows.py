"""Add a residual to few rows and norm the sums, a cluster of thread blocks a row (V3.2).

One source for sm_90a and sm_100a. What is added is a row, or the weighted sum of the rows of a
token's experts, rounded to BF16 first as moe's combine does. A thread has half a block of 16
values (cluster_norm). Bits are those of combine and of simt_residual_norm.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import (
    numbers_of,
    rounded_words,
    square_root,
    store,
    vectors,
    words_of,
)
from degarble.kernels.rows import cluster_norm
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.problem import ROWS, ResidualRowsForm, ResidualRowsProblem
from degarble.kernels.rows.simt_mhc_onward import summed_words, words_from
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import EARLY, fetch_weights, follow

VALUES = 8  # of a thread
WORDS = VALUES // 2


class ResidualRowsTensors(NamedTuple):
    """Kernel's tensors: vectors of 16 bytes, or flat."""

    made: Any  # BF16 [M, K], or rows of experts [R, K]
    residual: Any  # BF16 [M, K]
    weight: Any  # BF16 or float32 [K]
    places: Any  # int32 [M chosen]
    weights: Any  # float32 [M, chosen]
    shared: Any  # BF16 [M, K]
    normed: Any  # BF16 [M, K]
    total: Any  # BF16 [M, K]


@cute.kernel
def residual_rows_kernel(
    tensors: ResidualRowsTensors,
    extents: tuple[Int32, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Add, sum squares over the cluster, norm, write the sum and the normed row."""
    thread, _, _ = cute.arch.thread_idx()
    rank, row, _ = cute.arch.block_idx()
    thread, rank, row = Int32(thread), Int32(rank), Int32(row)
    chunks, lanes = extents
    memory = cutlass.memory.SmemAllocator()
    of_lanes = memory.allocate_tensor(Float32, cute.make_layout(norms.LANES), 128)
    of_blocks = memory.allocate_tensor(Float32, cute.make_layout(norms.MOST_WARPS), 128)
    if thread < norms.MOST_WARPS:
        of_blocks[thread] = Float32(0.0)
    of_weight = VALUES if form.weight == "fp32" else WORDS
    if (thread == 0) & (rank == 0):
        fetch_weights(tensors.weight.iterator.toint(), Uint32(chunks * of_weight * 4))
    # Others may write here once all have begun.
    cute.arch.cluster_arrive()
    follow()
    chunk = 2 * cluster_norm.block_of(thread, rank, lanes) + thread % 2
    exists = chunk < chunks
    at = Int64(row) * Int64(chunks) + Int64(chunk)
    rWeight = cute.make_rmem_tensor(of_weight, Uint32)
    rWeight.fill(0)
    rSums = cute.make_rmem_tensor(VALUES, Float32)
    rSums.fill(0.0)
    if exists:
        cute.autovec_copy(tensors.weight[None, chunk], rWeight)
        before = words_from(tensors.residual, at, form)
        if cutlass.const_expr(form.source == ROWS):
            made = summed_words(tensors, row, (Int64(chunk), chunks), form)
        else:
            made = words_from(tensors.made, at, form)
        pairs = zip(numbers_of(made), numbers_of(before), strict=True)
        numbers = [ops.add_rn(number, other) for number, other in pairs]
        stored = rounded_words(numbers)
        store(tensors.total, at, stored)
        if cutlass.const_expr(form.rounded):
            numbers = numbers_of(stored)
        for i in cutlass.range_constexpr(VALUES):
            rSums[i] = numbers[i]
    held = [Float32(rSums[i]) for i in range(VALUES)]
    cute.arch.cluster_wait()
    squares = norms.half_sum(held)
    shared = (of_lanes, of_blocks)
    total = cluster_norm.total_of(squares, (thread, rank), shared, form.cluster)
    factor = norms.factor_of(total, Float32(Int32(chunks * VALUES)), epsilon, square_root)
    words = words_of(rWeight)
    weights = numbers_of(words)
    if cutlass.const_expr(form.weight == "fp32"):
        weights = [ops.number_of(word) for word in words]
    if exists:
        pairs = zip(held, weights, strict=True)
        normed = [norms.normed(number, weight, factor) for number, weight in pairs]
        store(tensors.normed, at, rounded_words(normed))


@cute.jit
def launch_residual_rows(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on rows, chunks of a row, lanes of the norm."""
    made, residual, weight, places, weights, shared, normed, total = pointers
    of_weight = VALUES if form.weight == "fp32" else WORDS
    tensors = ResidualRowsTensors(
        vectors(made, WORDS), vectors(residual, WORDS), vectors(weight, of_weight),
        vectors(places, 0), vectors(weights, 0), vectors(shared, WORDS), vectors(normed, WORDS),
        vectors(total, WORDS),
    )  # fmt: skip
    rows, chunks, lanes = extents
    residual_rows_kernel(tensors, (chunks, lanes), epsilon, form).launch(
        grid=[form.cluster, rows, 1],
        block=[cluster_norm.THREADS, 1, 1],
        cluster=[form.cluster, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[ResidualRowsProblem, ResidualRowsForm]) -> tuple[Any, ...]:
    columns = of.problem.columns
    extents = (of.problem.rows, columns // VALUES, norms.lanes_of_row(columns))
    return extents, of.problem.sums.epsilon


def _weight(of: Any) -> Storage:
    kind = DTYPES[of.sums.weight if isinstance(of, ResidualRowsProblem) else of.weight]
    return Storage(Uint32, kind, 32)


def _shape(problem: ResidualRowsProblem) -> tuple[int, int]:
    return problem.rows, problem.columns


_Operand = Operand[ResidualRowsProblem]
_VALUES = Storage(Uint32, torch.bfloat16, 16)
_OF_ROWS = Presence[Any](
    lambda of: of.source == ROWS, "Give it where what is added is a sum of experts' rows."
)
_APART = Presence[Any](
    lambda p: p.source == ROWS and not p.rides,
    "Give it where the shared expert's rows are not among the experts'.",
)
KERNEL = Kernel[ResidualRowsProblem, ResidualRowsForm](
    entry=launch_residual_rows,
    operands=(
        _Operand(
            "made",
            _VALUES,
            lambda p: (p.experts if p.source == ROWS else p.rows, p.columns),
            label="output of a sublayer",
        ),
        _Operand("residual", _VALUES, _shape),
        _Operand("weight", _weight, lambda p: (p.columns,)),
        _Operand(
            "places", Storage(Int32, torch.int32, 4), lambda p: (p.rows * p.chosen,), _OF_ROWS
        ),
        _Operand(
            "weights",
            Storage(Float32, torch.float32, 4),
            lambda p: (p.rows, p.chosen),
            _OF_ROWS,
            label="routing weights",
        ),
        _Operand(
            "shared", _VALUES, _shape, _APART, label="shared expert's output", address_of="made"
        ),
        _Operand("normed", _VALUES, _shape, output=True, label="normed values"),
        _Operand("total", _VALUES, _shape, output=True, label="stored sum"),
    ),
    choose_form=norms.choose_residual_rows_form,
    kinds=((Int32,) * 3, Float32),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
