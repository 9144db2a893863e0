"""Routed experts in NVFP4 on Blackwell (sm_100a): FC1 with SwiGLU and requantisation, FC2, sum.

`moe_nvfp4` is the torch entry point; its contract and workspace are those of sm90_moe_nvfp4. Steps:
plan and gather (simt_moe_rows), FC1, FC2 (`grouped_kernel`), combine.
grouped_kernel is sm100_gemm_nvfp4 (same warps, rings and arrival counts) over tiles that each have
one expert: the experts' matrices are members of one TMA tensor, and the number of tiles is read on
the GPU. An FC1 tile is gate next to up and leaves as NVFP4 codes of FC2's input, an FC2 tile as
BF16 by TMA (moe.tensor_memory_epilogue). Every group begins at a multiple of 128 rows, so its
scales are whole tiles.

Deterministic. Nothing waits on the host, so it can be captured in a CUDA graph; a call allocates
its output and workspace. Compiled but never run: no sm_100a device was available.
Shape letters: T tokens, K chosen, D hidden, F width of an expert, E experts here, R rows at most.
"""

from functools import cache
from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import contract, epilogue, producer, schedule, wgmma
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm100_gemm_nvfp4 as gemm
from degarble.kernels.gemm.problem import GemmForm, Tactic
from degarble.kernels.gemm.tcgen05 import instructions as tcgen05
from degarble.kernels.gemm.tcgen05 import tensor_memory
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe import sm90_moe_nvfp4 as hopper
from degarble.kernels.moe import tensor_memory as moe_facts
from degarble.kernels.moe import tensor_memory_epilogue as leaving_tiles
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm, MoeProblem
from degarble.kernels.moe.sm90_moe_nvfp4 import ExpertWeights, Given, MoeWeights, Routing, Workspace
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import SM100A, TARGETS

# Inputs: A, its scales, B, its scales, decode scales of A and of B, rows, experts, slots.
# Outputs of FC1: codes, scales, decode scale to quantise by, slots, weights; of FC2: D.
INPUTS = (Uint32, Int64, Uint32, Int64, Float32, Float32, Int32, Int32, Int32)
ALIGNED = (16, 16, 16, 16, 4, 4, 4, 4, 4)
OUTPUTS = {GATE_AND_UP: (Uint32, Uint32, Float32, Int32, Float32), 1: (BFloat16,)}
OUTPUTS_ALIGNED = {GATE_AND_UP: (16, 16, 4, 4, 4), 1: (16,)}


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[producer.Feed, ...],
    leaving: Any,
    groups: leaving_tiles.Groups,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp as gemm.gemm_kernel does; `leaving` is how tiles are written."""
    of_gemm = form.gemm
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = prepared(of_gemm)
    # The number of rows is read here: the host knows only a bound.
    walk = schedule.walk_of((Int32(groups.rows[0]), extents[0]), of_gemm.tactic, groups.experts)
    steps = ceil_div(extents[1], of_gemm.tactic.inner)
    if warp == tensor_memory.LOADING_WARP:
        feedings = gemm.feedings_of(feeds, held.shared, of_gemm)
        tcgen05.load(held.ring, feedings, walk, steps, of_gemm)
    elif warp == tensor_memory.MULTIPLYING_WARP:
        rings, inner = (held.ring, held.sums_ring), (steps, extents[1] // tcgen05.BLOCK)
        gemm.multiply(rings, gemm.operands_of(held, of_gemm), walk, inner, of_gemm)
    else:
        outlets = (leaving, held.pieces, held.sums, held.sums_ring)
        blocks = extents[0] // of_gemm.parts // tcgen05.BLOCK
        leaving_tiles.leave_tiles(outlets, walk, groups, blocks, form)
        tcgen05.give_back(held.base, of_gemm)


def prepared(form: GemmForm) -> gemm.Prepared:
    """Lay out shared memory, make both rings, allocate tensor memory, synchronise.

    FC1 has no piece buffers; of FC2 every warp has its own.
    """
    memory = cutlass.memory.SmemAllocator()
    mma = tcgen05.nvfp4_mma(form)
    shared, pieces = gemm.shared_memory(memory, mma, form), None
    if form.parts == 1:
        layout = epilogue.piece_layout(moe_facts.piece_buffers(), moe_facts.WARP_ROWS)
        pieces = wgmma.shared_of(memory, BFloat16, layout)
    ring, sums_ring = tcgen05.ring_of_stages(memory, form), tcgen05.ring_of_sums(memory, form)
    address = memory.allocate_array(Int32, tensor_memory.ADDRESS_BYTES // 4)
    tcgen05.allocate(address, form)
    tcgen05.begin(form.tactic)
    base = tcgen05.base_of(address)
    sums = tcgen05.sums_of(mma, base, form)
    return gemm.Prepared(mma, shared, pieces, ring, sums_ring, base, sums)


def matrices_of(
    pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm
) -> dict[str, Any]:
    """View A, B and their scales: B as matrices of N / parts rows, expert by expert."""
    a, a_scales, b, b_scales = pointers
    m, n, k, experts = extents
    part, count = n // form.parts, experts * form.parts
    words = cute.assume(k // gemm.CODES_OF_WORD, divby=contract.TMA_ALIGNMENT // 4)
    units = ceil_div(k, tcgen05.BLOCK * tensor_memory.SCALES_OF_WORD) * gemm.UNITS_OF_TILE
    made = {}
    for side, of_codes, of_scales, height in (("a", a, a_scales, m), ("b", b, b_scales, part)):
        tiles = ceil_div(height, facts.SCALE_TILE_ROWS)
        for name, pointer, own, wide in (
            (side, of_codes, height, words),
            (f"scales of {side}", of_scales, tiles, units),
        ):
            shape: tuple[Any, ...] = (own, wide)
            strides: tuple[Any, ...] = (Int64(wide), 1)
            if side == "b":
                # Third mode: the matrix of an expert; FC1 has two per expert, gate and up.
                shape, strides = (*shape, count), (*strides, Int64(wide) * Int64(own))
            made[name] = cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))
    return made


def feeds_of(
    pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm
) -> tuple[producer.Feed, ...]:
    """Make the TMA atoms of A, B and their scales, box by box."""
    matrices = matrices_of(pointers, extents, form)
    of_loads = (matrices[load.name] for load in facts.loads(form))
    sharers = tensor_memory.sharers(form)
    boxes = zip(of_loads, gemm.layouts(form), gemm.boxes_of(form), sharers, strict=True)
    return tuple(producer.feed_of(*box) for box in boxes)


def leaving_of(outputs: tuple[Any, ...], extents: tuple[Any, ...], form: MoeForm) -> Any:
    """Return how tiles are written: FC1 as codes and scales, FC2 by TMA."""
    if form.gemm.parts == GATE_AND_UP:
        codes = rows.in_words(outputs[0], 2 * moe_facts.BLOCK // gemm.CODES_OF_WORD)
        return leaving_tiles.Leaving(codes, *rows.flat(outputs[1:]))
    m, n, *_ = extents
    n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
    mD = cute.make_tensor(outputs[0], cute.make_layout((m, n), stride=(Int64(n), 1)))
    return epilogue.store_of(mD, moe_facts.WARP_ROWS)


@cute.jit
def launch_grouped(
    inputs: tuple[cute.Pointer, ...],
    outputs: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents rows at most, N, K, experts, clusters."""
    *of_matrices, clusters = extents
    tactic = form.gemm.tactic
    feeds = feeds_of(inputs[:4], tuple(of_matrices), form.gemm)
    leaving = leaving_of(outputs, tuple(of_matrices), form)
    groups = leaving_tiles.Groups(*rows.flat(inputs[4:]))
    grouped_kernel(feeds, leaving, groups, extents[1:3], form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[tensor_memory.threads(), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: MoeForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a product; needs no GPU."""
    parts = form.gemm.parts
    pointers = (
        rows.pointers_of(elements, (None,) * len(elements), aligned)
        for elements, aligned in ((INPUTS, ALIGNED), (OUTPUTS[parts], OUTPUTS_ALIGNED[parts]))
    )
    arguments = (*pointers, tuple(Int32(1) for _ in range(5)), form, any_stream())
    return compile_kernel(launch_grouped, arguments, TARGETS[form.gemm.target], settings)


def moe_nvfp4(
    x_TD: Tensor,
    routing: Routing,
    weights: MoeWeights,
    problem: MoeProblem,
    settings: CompileSettings,
    *,
    shared_TD: Tensor | None = None,
) -> Tensor:
    """Return the sum of every token's experts: float32 [T, D], or BF16 with `shared_TD` added.

    `x_TD` and `shared_TD` are BF16.
    """
    given = Given(x_TD, routing, weights, shared_TD)
    hopper.require_given(problem, given)
    job = job_of(problem, settings)
    contract.require_place(tuple(hopper.tensors_of(given)), SM100A)
    workspace = hopper.empty_workspace(job, x_TD.device)
    out = hopper.empty_output(problem, given)
    launch(job, given, workspace, out)
    return out


def job_of(
    problem: MoeProblem, settings: CompileSettings, tactic: Tactic | None = None
) -> rows.Job:
    """Return the arguments of all steps; `tactic` replaces FC2's of the table."""
    tactic = tactic or moe_problem.choose_tactic(problem, SM100A.name)
    return rows.Job(problem, tactic, SM100A.name, settings)


def launch(job: rows.Job, given: Given, workspace: Workspace, out: Tensor) -> None:
    """Launch all steps on checked tensors."""
    if job.problem.tokens:
        products(job, given, workspace)
        made = workspace.out, workspace.plan.places, given.routing.weights
        rows.combine(job, rows.Sum(*made, given.shared, out))


def products(job: rows.Job, given: Given, workspace: Workspace) -> None:
    """Plan, gather, FC1 and FC2: `workspace.out` is every row's output."""
    plan, w13, w2 = workspace.plan, given.weights.w13, given.weights.w2
    rows.plan(job, given.routing.experts, given.routing.local, plan)
    rows.gather(job, given.x, w13.input_scale, plan, workspace.x)
    first, second = moe_problem.forms_of(job.problem, job.target, job.tactic)
    leaving = (*workspace.hidden, w2.input_scale, plan.slots, given.routing.weights)
    multiply_rows(job, first, (workspace.x, w13, plan), leaving)
    multiply_rows(job, second, (workspace.hidden, w2, plan), (workspace.out,))


def multiply_rows(
    job: rows.Job,
    form: MoeForm,
    given: tuple[rows.Rows, ExpertWeights, rows.Plan],
    outputs: tuple[Tensor, ...],
) -> None:
    """Launch one product on checked tensors."""
    a, b, plan = given
    device, parts = a.codes.device.index or 0, form.gemm.parts
    of_b = (b.codes, b.scales, b.input_scale, b.decode_scale)
    inputs = (*a, *of_b, plan.rows, plan.experts, plan.slots)
    clusters = moe_problem.grid(job.problem, form, operands.processors_of(device))
    most = moe_problem.most_rows(job.problem, form.gemm.tactic)
    extents = (most, *moe_problem.columns_of(job.problem, form), job.problem.experts, clusters)
    compile_form(form, job.settings)(
        rows.pointers_of(INPUTS, inputs, ALIGNED),
        rows.pointers_of(OUTPUTS[parts], outputs, OUTPUTS_ALIGNED[parts]),
        tuple(map(Int32, extents)),
        current_stream(device),
    )
