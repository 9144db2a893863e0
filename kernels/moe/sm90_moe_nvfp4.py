"""Routed experts in NVFP4 on Hopper (sm_90a): FC1 with SwiGLU and requantisation, FC2, sum.

`moe_nvfp4` is the torch entry point: BF16 x [T, D] in, float32 or BF16 [T, D] out. Steps: plan and
gather (simt_moe_rows), FC1, FC2, combine. FC1 writes NVFP4 for FC2 in its epilogue (moe.epilogue);
BF16 of the experts' width is never in memory.
grouped_kernel is sm90_gemm_nvfp4 over tiles that each have one expert: warpgroup 0 loads and
decodes B, further warpgroups decode A and multiply, with the same rings and arrival counts. The
experts' matrices are members of one TMA tensor, their tensor scales multiply the float32 sums, and
the number of tiles is read on the GPU. A warpgroup whose 64 rows are all padding only releases the
stages. Tiles by table: up to 64 rows in few_rows, 128 rows here, 256 rows with many_rows.multiply.

Deterministic. Nothing waits on the host, so it can be captured in a CUDA graph; a call allocates
its output and workspace. Shape letters: T tokens, K chosen, D hidden, F width of an expert, E
experts here, G experts in all, R rows at most.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, require, require_same
from degarble.kernels.gemm import contract, epilogue, producer, schedule, wgmma
from degarble.kernels.gemm import nvfp4_stages as stages
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_nvfp4 as gemm
from degarble.kernels.gemm.problem import GemmForm, Tactic
from degarble.kernels.moe import epilogue as moe_epilogue
from degarble.kernels.moe import few_rows, many_rows
from degarble.kernels.moe import problem as moe_problem
from degarble.kernels.moe import simt_moe_rows as rows
from degarble.kernels.moe.problem import GATE_AND_UP, MoeForm, MoeProblem
from degarble.kernels.runtime import operands
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import SM90A, TARGETS

# Inputs: A, its scales, B, its scales, decode scales of A and of B, rows, experts, slots.
# Outputs of FC1: codes, scales, decode scale to quantise by, slots, weights; of FC2: D.
INPUTS = (Uint32, Uint32, Uint32, Uint32, Float32, Float32, Int32, Int32, Int32)
ALIGNED = (16, 16, 16, 16, 4, 4, 4, 4, 4)
# Last element: gate and up, of an FC1 that stores them (`shown`).
OUTPUTS = {GATE_AND_UP: (Uint32, Uint8, Float32, Int32, Float32, Uint32), 1: (BFloat16,)}
WHOLE_CARVEOUT = 100  # per cent; CUDA Driver API 13.0, preferred shared memory carveout
OUTPUTS_ALIGNED = {GATE_AND_UP: (16, 16, 4, 4, 4, 16), 1: (16,)}


class Groups(NamedTuple):
    """Tensors that the walk and the epilogue read in addition to the operands."""

    scale_a: Any  # of each expert
    scale_b: Any  # of each expert, part by part
    rows: Any  # of all groups
    experts: Any  # of each tile of rows
    slots: Any  # of each row


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[producer.Feed, ...],
    leaving: Any,
    groups: Groups,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup as gemm.gemm_kernel does; `leaving` is how tiles are written."""
    of_gemm = form.gemm
    tactic = of_gemm.tactic
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    tensors, boxes, shared = gemm.shared_memory(memory, of_gemm)
    pieces = moe_epilogue.shared_pieces(memory, of_gemm)
    ring, decoded = wgmma.ring_of_stages(memory, of_gemm), gemm.ring_of_decoded(memory, of_gemm)
    wgmma.begin(tactic)

    walk = schedule.walk_of((Int32(groups.rows[0]), extents[0]), tactic, groups.experts)
    steps = ceil_div(extents[1], tactic.inner)
    decoding, consuming = facts.roles(of_gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(decoding.registers)
        feedings = tuple(map(producer.feeding, feeds, tensors, boxes))
        loading = (ring, feedings, walk, steps, of_gemm)
        decode(loading, decoded, shared, extents[1] // stages.BLOCK)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mma = wgmma.mma_of(BFloat16, tactic.columns, warpgroup.OperandSource.RMEM)
        of_warpgroup = (mma, shared, pieces, group - 1)
        given = (groups, walk, extents)
        if cutlass.const_expr(facts.has_many_rows(of_gemm)):
            consume_tall((ring, decoded), of_warpgroup, leaving, given, form)
        else:
            consume((ring, decoded), of_warpgroup, leaving, given, form)


@cute.jit
def decode(loading: Any, decoded: Any, shared: Any, blocks: Any) -> None:
    """Load all tiles of this thread block, and decode their rows of B."""
    ring, _, walk, _, form = loading
    thread, _, _ = cute.arch.thread_idx()
    tactic = form.tactic
    state = wgmma.consumer_state(ring.num_stages)
    target = wgmma.producer_state(facts.decoded_stages(form))
    cursor = gemm.begin_loading(loading)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        _, column, _ = schedule.tile_at(walk, number)
        first = column * (tactic.columns // form.parts) % facts.SCALE_TILE_ROWS
        first = moe_problem.first_scale_row(thread, first, form)
        rows_of_tile = (shared, first, blocks, tactic.columns)
        states = (state, target, cursor)
        state, target, cursor = gemm.decode_tile(loading, decoded, states, rows_of_tile)


@cute.jit
def consume(rings: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of this thread block."""
    mma, shared, pieces, mine = own
    groups, walk, (columns, inner) = given
    tactic, parts = form.gemm.tactic, form.gemm.parts
    steps, blocks = ceil_div(inner, tactic.inner), inner // stages.BLOCK
    sums = wgmma.sums_of(mma, tactic.columns)
    numbers = gemm.decoded_tensor(shared, form.gemm)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(numbers))
    state = wgmma.consumer_state(rings[0].num_stages)
    source = wgmma.consumer_state(facts.decoded_stages(form.gemm))
    stored = Int32(0)
    if cutlass.const_expr(parts == GATE_AND_UP):
        outlet = moe_epilogue.outlet_of_warpgroup(leaving, pieces, mma, mine)
    else:
        outlet = wgmma.outlet_of_warpgroup(leaving, pieces[0], mma, mine)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = schedule.tile_at(walk, number)
        first = row * tactic.rows % facts.SCALE_TILE_ROWS
        at = row * tactic.rows + mine * facts.PIECE_ROWS
        # What the epilogue needs is read before the products, which hide the latency.
        scales = scales_of(groups, expert, parts)
        # Padding follows all slots of a group: if the first of 64 rows has none, all have none.
        if cute.arch.make_warp_uniform(groups.slots[at]) >= 0:
            of_a: Any = (shared, first, mine * facts.PIECE_ROWS)
            if cutlass.const_expr(form.gemm.tactic.blocks > 1):
                # With several blocks on a multiprocessor, warps without rows do not decode A.
                of_a = (*of_a, warp_has_rows(groups, at))
            work = (*of_a, blocks, steps)
            state, source = gemm.multiply(rings, state, source, (mma, sums, b), work)
            if cutlass.const_expr(parts == GATE_AND_UP):
                written = (at, column, expert, columns // GATE_AND_UP // stages.BLOCK)
                if cutlass.const_expr(form.shown):
                    moe_epilogue.show_tile(outlet.leaving, sums, written, scales, form)
                stored = moe_epilogue.requantise_tile(outlet, sums, written, stored, scales, form)
            else:
                place = facts.piece_of(row, column, mine, tactic)
                stored = wgmma.store_tile(outlet, sums, place, stored, scales[0])
        else:  # rows of zeros at the end of a group: their results are never read
            state, source = pass_over(rings, state, source, steps)
    if cutlass.const_expr(parts == 1):
        epilogue.drain(outlet)


@cute.jit
def consume_tall(rings: Any, own: Any, leaving: Any, given: Any, form: cutlass.Constexpr) -> None:
    """Multiply and write all tiles of 256 rows of this thread block."""
    mma, shared, pieces, mine = own
    groups, walk, (columns, inner) = given
    tactic, parts = form.gemm.tactic, form.gemm.parts
    steps, blocks = ceil_div(inner, tactic.inner), inner // stages.BLOCK
    sums, a = wgmma.sums_of(mma, tactic.columns), many_rows.half_fragment(mma)
    numbers = gemm.decoded_tensor(shared, form.gemm)
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(numbers))
    state = wgmma.consumer_state(rings[0].num_stages)
    source = wgmma.consumer_state(facts.decoded_stages(form.gemm))
    stored = Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column, expert = schedule.tile_at(walk, number)
        at = row * tactic.rows + mine * facts.PIECE_ROWS
        # Padding follows all slots of a group: if the first of 64 rows has none, all have none.
        if cute.arch.make_warp_uniform(groups.slots[at]) >= 0:
            work = (shared, mine * facts.PIECE_ROWS, blocks, steps)
            states = state, source
            state, source = many_rows.multiply(rings, states, (mma, sums, a, b), work)
            # Recomputed after the products: kept values would take registers from them.
            row, column, expert = schedule.tile_at(walk, number)
            at = row * tactic.rows + mine * facts.PIECE_ROWS
            scales = scales_of(groups, expert, parts)
            if cutlass.const_expr(parts == GATE_AND_UP):
                outlet: Any = moe_epilogue.outlet_of_warpgroup(leaving, pieces, mma, mine)
                written = (at, column, expert, columns // GATE_AND_UP // stages.BLOCK)
                if cutlass.const_expr(form.shown):
                    moe_epilogue.show_tile(outlet.leaving, sums, written, scales, form)
                stored = moe_epilogue.requantise_tile(outlet, sums, written, stored, scales, form)
            else:
                outlet = wgmma.outlet_of_warpgroup(leaving, pieces[0], mma, mine)
                place = facts.piece_of(row, column, mine, tactic)
                stored = wgmma.store_tile(outlet, sums, place, stored, scales[0])
                epilogue.drain(outlet)
        else:  # rows of zeros at the end of a group: their results are never read
            state, source = pass_over(rings, state, source, steps)


@cute.jit
def warp_has_rows(groups: Groups, first: Any) -> Any:
    """Return whether any of this warp's 16 rows has a slot; padding ends a tile."""
    thread, _, _ = cute.arch.thread_idx()
    row = first + thread % facts.WARPGROUP // facts.WARP * 16
    return cute.arch.make_warp_uniform(groups.slots[row]) >= 0


@cute.jit
def pass_over(rings: Any, state: Any, source: Any, steps: Any) -> Any:
    """Release the stages of a tile in which this warpgroup has no rows."""
    ring, decoded = rings
    for _ in cutlass.range(steps, unroll=1):
        ring.consumer_wait(state)
        ring.consumer_release(state)
        decoded.consumer_wait(source)
        with cute.arch.elect_one():
            decoded.consumer_release(source)
        state.advance()
        source.advance()
    return state, source


def scales_of(groups: Groups, expert: Any, parts: int) -> tuple[tuple[Any, Any], ...]:
    """Return the factors of each part's sums, the exact power of two first."""
    of_a = Float32(groups.scale_a[expert])
    of_b = (Float32(groups.scale_b[expert * parts + part]) for part in range(parts))
    return tuple((stages.RESTORE, ops.multiply_rn(of_a, each)) for each in of_b)


def matrices_of(pointers: tuple[Any, ...], extents: tuple[Any, ...], form: GemmForm) -> list[Any]:
    """View A, B and their scales in words: B as matrices of N / parts rows, expert by expert."""
    a, a_scales, b, b_scales = pointers
    m, n, k, experts = extents
    parts, part = form.parts, n // form.parts
    words = cute.assume(k // gemm.CODES_OF_WORD, divby=contract.TMA_ALIGNMENT // 4)
    of_tiles = ceil_div(k, stages.STAGE_K) * gemm.WORDS_OF_TILE
    made = []
    for of_a, of_b, row_words, unit in (
        (a, b, words, 1),
        (a_scales, b_scales, of_tiles, facts.SCALE_TILE_ROWS),
    ):
        wide, count, own = Int64(row_words), ceil_div(part, unit), ceil_div(m, unit)
        made.append(cute.make_tensor(of_a, cute.make_layout((own, row_words), stride=(wide, 1))))
        layout = cute.make_layout(
            (count, row_words, experts * parts), stride=(wide, 1, wide * Int64(count))
        )
        made.append(cute.make_tensor(of_b, layout))
    return made


@cute.jit
def launch_grouped(
    inputs: tuple[cute.Pointer, ...],
    outputs: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents rows at most, N, K, experts, thread blocks."""
    m, n, k, experts, blocks = extents
    of_gemm = form.gemm
    matrices = matrices_of(inputs[:4], (m, n, k, experts), of_gemm)
    layouts, boxes = gemm.layouts(of_gemm), gemm.boxes_of(of_gemm)
    feeds = tuple(map(producer.feed_of, matrices, layouts, boxes))
    if cutlass.const_expr(of_gemm.parts == GATE_AND_UP):
        codes = rows.in_words(outputs[0], stages.BLOCK // gemm.CODES_OF_WORD)
        leaving: Any = moe_epilogue.Leaving(codes, *rows.flat(outputs[1:]))
    elif cutlass.const_expr(facts.has_few_rows(of_gemm)):
        leaving = rows.in_words(cute.recast_ptr(outputs[0], dtype=Uint32), few_rows.WORDS_OF_CHUNK)
    else:
        n = cute.assume(n, divby=facts.COLUMNS_MULTIPLE)
        mD = cute.make_tensor(outputs[0], cute.make_layout((m, n), stride=(Int64(n), 1)))
        leaving = epilogue.store_of(mD)
    groups = Groups(*rows.flat(inputs[4:]))
    kernel = few_rows.few_kernel if facts.has_few_rows(of_gemm) else grouped_kernel
    kernel(feeds, leaving, groups, (n, k), form).launch(
        grid=[1, 1, blocks],
        block=[facts.threads(of_gemm), 1, 1],
        min_blocks_per_mp=of_gemm.tactic.blocks,
        preferred_smem_carveout=WHOLE_CARVEOUT if of_gemm.tactic.blocks > 1 else None,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def outputs_of(form: MoeForm) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return element types and alignments of a form's outputs and of its epilogue's inputs."""
    parts = form.gemm.parts
    count = None if form.shown or parts == 1 else -1
    return OUTPUTS[parts][:count], OUTPUTS_ALIGNED[parts][:count]


@cache
def compile_form(form: MoeForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a product; needs no GPU."""
    pointers = (
        rows.pointers_of(elements, (None,) * len(elements), aligned)
        for elements, aligned in ((INPUTS, ALIGNED), outputs_of(form))
    )
    arguments = (*pointers, tuple(Int32(1) for _ in range(5)), form, any_stream())
    return compile_kernel(launch_grouped, arguments, TARGETS[form.gemm.target], settings)


class ExpertWeights(NamedTuple):
    """One of the experts' two products, for all experts held here."""

    codes: Tensor  # uint8: w1 and w3 [E, 2, F, D / 2], or w2 [E, D, F / 2]
    scales: Tensor  # uint8 in 128x4 order, a matrix at a time: [E, 2, bytes] or [E, bytes]
    decode_scale: Tensor  # float32 [E, 2] or [E]
    input_scale: Tensor  # float32 [E]: decode scale of what is multiplied


class MoeWeights(NamedTuple):
    """Both products' weights of all experts held here."""

    w13: ExpertWeights
    w2: ExpertWeights


def expert_weights(
    experts: Sequence[Sequence[QuantisedTensor]], input_scale_E: Tensor
) -> ExpertWeights:
    """Stack matrices as a checkpoint stores them: w1 and w3 of every expert, or w2 alone.

    Raise for formats, layouts, scale directions and nibble orders that kernels do not read, and for
    mixtures of them.
    """
    every = [matrix for matrices in experts for matrix in matrices]
    require_same(*every)
    for matrix in every:
        require(
            matrix,
            format=NVFP4,
            layout=SWIZZLE_128X4,
            direction=ScaleDirection.DECODE,
            nibble_order=NibbleOrder.LOW_EVEN,
        )
    kinds = {(len(matrices), *(matrix.shape for matrix in matrices)) for matrices in experts}
    if len(kinds) != 1 or len({matrix.shape for matrix in every}) != 1:
        raise ShapeMismatch(
            "experts' matrices", sorted(map(str, kinds)), "one shape", "Pass one layer's experts."
        )
    codes = _stacked([[matrix.codes for matrix in each] for each in experts])
    scales = _stacked([[matrix.block_scale for matrix in each] for each in experts])
    decode = _stacked([[matrix.decode_scale.reshape(()) for matrix in each] for each in experts])
    return ExpertWeights(codes, scales, decode, input_scale_E)


def _stacked(experts: list[list[Tensor]]) -> Tensor:
    """Stack expert by expert; of a single matrix each, without an extent of 1."""
    made = torch.stack([torch.stack(each) for each in experts])
    return made[:, 0].contiguous() if len(experts[0]) == 1 else made


class Routing(NamedTuple):
    """The experts and routing weights of each token, as simt_router writes them."""

    experts: Tensor  # int32 [T, K]; -1, or an expert that is elsewhere: the slot adds nothing
    weights: Tensor  # float32 [T, K]
    local: Tensor | None = None  # int32 [G]: an expert's number here, or -1; None: all are here


class Given(NamedTuple):
    """All inputs of a call."""

    x: Tensor  # BF16 [T, D]
    routing: Routing
    weights: MoeWeights
    shared: Tensor | None = None  # BF16 [T, D]


class Workspace(NamedTuple):
    """Intermediates of a call; none outlives it, so one workspace may serve all layers."""

    plan: rows.Plan
    x: rows.Rows  # [R, D]
    hidden: rows.Rows  # [R, F]
    out: Tensor  # BF16 [R, D]


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
    require_given(problem, given)
    job = job_of(problem, settings)
    workspace, out = empty_workspace(job, x_TD.device), empty_output(problem, given)
    contract.require_place(tuple(tensors_of(given)), SM90A)
    launch(job, given, workspace, out)
    return out


def job_of(
    problem: MoeProblem, settings: CompileSettings, tactic: Tactic | None = None
) -> rows.Job:
    """Return the arguments of all steps; `tactic` replaces the table's."""
    tactic = tactic or moe_problem.choose_tactic(problem, SM90A.name)
    return rows.Job(problem, tactic, SM90A.name, settings)


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
    device = a.codes.device.index or 0
    inputs = (
        *a,
        b.codes,
        b.scales,
        b.input_scale,
        b.decode_scale,
        plan.rows,
        plan.experts,
        plan.slots,
    )
    blocks = moe_problem.grid(job.problem, form, operands.processors_of(device))
    most = moe_problem.most_rows(job.problem, form.gemm.tactic)
    extents = (most, *moe_problem.columns_of(job.problem, form), job.problem.experts, blocks)
    compile_form(form, job.settings)(
        rows.pointers_of(INPUTS, inputs, ALIGNED),
        rows.pointers_of(outputs_of(form)[0], outputs, outputs_of(form)[1]),
        tuple(map(Int32, extents)),
        current_stream(device),
    )


def empty_workspace(job: rows.Job, device: torch.device) -> Workspace:
    """Allocate the intermediates uninitialised; what is read is written before."""
    problem = job.problem
    most = moe_problem.most_rows(problem, job.tactic)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    counts = moe_problem.plan_sizes(problem, job.tactic)
    x, hidden = (
        rows.Rows(empty(most, width // 2), empty(moe_problem.scale_bytes(most, width)))
        for width in (problem.hidden, problem.width)
    )
    plan = rows.Plan(*(empty(count, dtype=torch.int32) for count in counts))
    return Workspace(plan, x, hidden, empty(most, problem.hidden, dtype=torch.bfloat16))


def empty_output(problem: MoeProblem, given: Given) -> Tensor:
    """Allocate the sum uninitialised; every element is written."""
    dtype = torch.float32 if given.shared is None else torch.bfloat16
    shape = (problem.tokens, problem.hidden)
    return torch.empty(shape, dtype=dtype, device=given.x.device)


def require_given(problem: MoeProblem, given: Given) -> None:
    """Raise unless all inputs fit the problem."""
    check, shape = operands.require_tensor, (problem.tokens, problem.hidden)
    check("x", given.x, torch.bfloat16, shape, 32)
    if given.shared is not None:
        check("shared expert's output", given.shared, torch.bfloat16, shape, 16)
    of_slots = (problem.tokens, problem.chosen)
    check("experts of tokens", given.routing.experts, torch.int32, of_slots, 4)
    check("routing weights", given.routing.weights, torch.float32, of_slots, 4)
    require_local(problem, given.routing.local)
    require_weights("w13", given.weights.w13, problem, (problem.experts, GATE_AND_UP))
    require_weights("w2", given.weights.w2, problem, (problem.experts,))


def require_local(problem: MoeProblem, local_G: Tensor | None) -> None:
    """Raise if the map of local expert numbers is missing or of another kind."""
    if local_G is not None:
        operands.require_tensor("numbers here", local_G, torch.int32, (problem.routed,), 4)
    elif problem.experts != problem.routed:
        raise InvalidArgument(
            "experts held here",
            problem.experts,
            f"all {problem.routed}, or a map of numbers here",
            "Pass Routing(..., local=).",
        )


def require_weights(
    name: str, weights: ExpertWeights, problem: MoeProblem, leading: tuple[int, ...]
) -> None:
    """Raise unless the experts' matrices fit the problem; `leading` counts matrices."""
    sides = (problem.width, problem.hidden)
    n, k = sides if len(leading) > 1 else sides[::-1]
    check, tma = operands.require_tensor, contract.TMA_ALIGNMENT
    size = moe_problem.scale_bytes(n, k)
    check(f"codes of {name}", weights.codes, torch.uint8, (*leading, n, k // 2), tma)
    check(f"scales of {name}", weights.scales, torch.uint8, (*leading, size), tma)
    check(f"decode scales of {name}", weights.decode_scale, torch.float32, leading, 4)
    check(f"input scales of {name}", weights.input_scale, torch.float32, leading[:1], 4)


def tensors_of(given: Given) -> list[Tensor]:
    """Return all tensors of a call."""
    weights = given.weights
    all_of_it = (given.x, *given.routing, *weights.w13, *weights.w2, given.shared)
    return [tensor for tensor in all_of_it if tensor is not None]
