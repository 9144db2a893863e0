"""Each row of activations times the matrices of its own expert, by runs (sm_90a, sm_100a).

Tiles of all rows and matrices are divided among thread blocks. Each walks its share in runs of up
to `form.tiles` tiles of one matrix, as sm90_gemm_w4a16 multiplies: the loading warp reads the row's
expert after the previous launch has ended, and before for L2 alone. It asks for the next run's
boxes while the others add up the parts of the last one, whose sums have memory of their own, twice.
A row's bits are those of `launch_w4a16` on its matrix.

sm90_moe_by_row launches it where w4a16_walk does not serve.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm import w4a16_problem as facts
from degarble.kernels.gemm.sm90_gemm_w4a16 import (
    WHOLE_CARVEOUT,
    Sources,
    Views,
    W4A16Memory,
    W4A16Thread,
    add_rounds,
    ask,
    ask_early,
    first_places,
    lane_of,
    memory_of,
    place_of,
    set_up,
    together,
    view,
)
from degarble.kernels.gemm.w4a16_problem import W4A16ByRowForm
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front
from degarble.kernels.runtime.targets import TARGETS

# ---- device --------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """The tiles of a thread block: of all matrices of all rows, from `begin` to `end`."""

    begin: Any
    end: Any
    of_matrix: Any


def walk_of(rows: Any, division: tuple[Any, ...], form: W4A16ByRowForm) -> Walk:
    """Return this thread block's walk."""
    block, _, _ = cute.arch.block_idx()
    of_matrix, *shares = division
    every = of_matrix * rows * form.products
    return Walk(*facts.share_of(Uint32(block), every, shares), of_matrix)


def own_matrix(
    place: W4A16Thread,
    tile: Any,
    walk: Walk,
    form: W4A16ByRowForm,
    chosen: tuple[Any, Callable[[Any], Any]],
    counts: tuple[Any, Any, Any],
) -> tuple[W4A16Thread, Any, Any]:
    """Return the loading warp's position in a run, its expert, and which of the expert's matrices.

    `chosen` has the address of what the first slot chose, and how to read it. Counts: rows of the
    shared expert, which come first and whose matrices are the last ones; routed experts; all. A row
    whose expert is not here gets a matrix beyond the last one, of which TMA reads zeros.
    """
    first, row, product = facts.tile_place(tile, walk.of_matrix, form.products)
    address, read = chosen
    number = read(address + Int64(facts.slot_of(row, counts[0])) * 4)
    expert = facts.expert_of(row, number, counts)
    matrix = (expert * form.products + product,)
    return place._replace(tile=first, row=row, matrix=matrix), expert, product


def scale_of(
    expert: Any, product: Any, pointers: tuple[Any, ...], experts: Any, form: W4A16ByRowForm
) -> tuple[tuple[Any, Any], Any]:
    """Return both factors of the output's scale, and whether the expert is here.

    Their product is the float32 number that the GEMM of tiles uses.
    """
    known = expert < experts
    at = Int64(ops.select(known, expert, Uint32(0)))
    of_weights = ptx.global_number(pointers[3].toint() + (at * form.products + Int64(product)) * 4)
    return (ptx.global_number(pointers[5].toint() + at * 4), of_weights), known


@cute.jit
def ask_runs(
    views: Views,
    place: W4A16Thread,
    memory: W4A16Memory,
    pointers: tuple[Any, ...],
    told: tuple[Walk, tuple[Any, Any, Any], tuple[Any, Any]],
    form: cutlass.Constexpr,
) -> None:
    """Issue the copies of one run after the other, and leave the scale of each."""
    walk, counts, rounds = told
    chosen = pointers[6].toint(), ptx.global_word
    at, phase, kept_at, kept_phase = first_places(1)
    tile, turn = walk.begin, Uint32(0)
    while tile < walk.end:
        own, expert, product = own_matrix(place, tile, walk, form, chosen, counts)
        scale = scale_of(expert, product, pointers, counts[2], form)
        count = facts.run_length(tile, walk.end, walk.of_matrix, form.tiles)
        slot = memory.scales + turn % facts.SCALE_SLOTS * facts.SLOT_BYTES
        asked = (at, phase, kept_at, kept_phase), (count, (slot, *scale))
        at, phase, kept_at, kept_phase = ask(views, own, memory, rounds, asked, form)
        tile, turn = tile + count, turn + 1


@cute.jit
def multiply_runs(
    sources: Sources,
    place: W4A16Thread,
    memory: W4A16Memory,
    out: Int64,
    told: tuple[Walk, tuple[Uint32, Uint32]],
    form: cutlass.Constexpr,
) -> None:
    """Add up a part of K for the tiles of a warp, run after run, and the parts of each run.

    Copies of the next run go on meanwhile: sums have memory of their own. A buffer is filled again
    after the next run's barrier, before which its readers have added it up.
    """
    walk, counts = told
    numbers = form.tiles * form.columns // 2
    sums = cute.make_rmem_tensor(numbers, Float32)
    lane = lane_of(place, memory, form)
    at, phase, kept_at, kept_phase = first_places(0)
    tile, turn = walk.begin, Uint32(0)
    while tile < walk.end:
        for i in cutlass.range_constexpr(numbers):
            sums[i] = Float32(0.0)
        count = facts.run_length(tile, walk.end, walk.of_matrix, form.tiles)
        state = (lane, counts, (at, phase, kept_at, kept_phase), count)
        at, phase, kept_at, kept_phase = add_rounds(sums, sources, place, memory, state, form)
        buffer = memory.sums + turn % facts.SUM_BUFFERS * form.run_bytes
        leave_sums(sums, buffer, place, form)
        together(form)
        scale = memory.scales + turn % facts.SCALE_SLOTS * facts.SLOT_BYTES
        run = (tile, count, walk.of_matrix, sources.extents[1])
        add_run(out, run, buffer, scale, form)
        tile, turn = tile + count, turn + 1


@cute.jit
def leave_sums(sums: Any, buffer: Any, place: W4A16Thread, form: cutlass.Constexpr) -> None:
    """Write a warp's sums of the only row: column 0 of an mma is in every fourth lane."""
    if place.lane % 4 == 0:
        for tile in cutlass.range_constexpr(form.tiles):
            for half in cutlass.range_constexpr(2):
                output = place.lane // 4 + (tile * facts.TILE + 8 * half)
                to = buffer + facts.run_sum_offset(place.part, output, form.outputs)
                ptx.store_number(to, sums[4 * tile + 2 * half])


@cute.jit
def add_run(
    out: Int64,
    told: tuple[Uint32, Uint32, Uint32, Uint32],
    buffer: Uint32,
    scale: Uint32,
    form: cutlass.Constexpr,
) -> None:
    """Add a run's parts in the order of their number, scale, round and write: a thread an output.

    Told are the run's first tile, its tiles, those of a matrix, and the matrix's outputs; `scale`
    is an address.
    """
    thread, _, _ = cute.arch.thread_idx()
    own = Uint32(thread)
    first, count, of_matrix, outputs = told
    if own < count * facts.TILE:
        numbers = [
            ptx.shared_number(buffer + facts.run_sum_offset(part, own, form.outputs), 0, 1)
            for part in range(facts.PARTS)
        ]
        factor = ptx.shared_scale(scale)
        total = numbers[0]
        for number in numbers[1:]:
            total = ops.add_rn(total, number)
        if cutlass.const_expr(not TARGETS[form.target].converts_e2m1):
            total = ops.multiply_rn(total, 2.0**-facts.DECODED_EXPONENT)
        total = ops.multiply_rn(total, factor)
        within, row, product = facts.tile_place(first, of_matrix, form.products)
        output = facts.row_of(within + own // facts.TILE, own % facts.TILE, form.layout)
        if output < outputs:
            before = Int64(row * form.products + product) * Int64(outputs)
            ptx.store_rounded(out + (before + Int64(output)) * 2, total)


@cute.kernel
def by_row_kernel(
    views: Views,
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: the last one loads, the others multiply and add up, run after run."""
    rows, outputs, columns, kept_count, *others = (Uint32(each) for each in extents)
    division = tuple(others[: facts.DIVISION])
    shared, routed, experts = others[facts.DIVISION :]
    counts = (shared, routed, experts)
    place, memory = place_of(form), memory_of(form)
    sums = memory.kept + kept_count * form.kept_bytes
    memory = memory._replace(sums=sums, scales=sums + facts.SUM_BUFFERS * form.run_bytes)
    set_up(views, place, memory, form)
    let_follow()  # as sm90_gemm_w4a16 does
    walk = walk_of(rows, division, form)
    rounds = ceil_div(columns, facts.ROUND)
    if cutlass.const_expr(form.early):  # noqa: SIM102  the first is settled when traced
        if place.warp == form.warps:
            # A guess: an expert that is still being written costs a copy to L2, and nothing else
            # follows from it.
            chosen = pointers[6].toint(), ptx.early_word
            own, _, _ = own_matrix(place, walk.begin, walk, form, chosen, counts)
            ask_early(views, own, rounds, form)
    wait_for_front()
    if place.warp == form.warps:
        ask_runs(views, place, memory, pointers, (walk, counts, (rounds, kept_count)), form)
    else:
        sources = Sources(pointers[2].toint(), (Uint32(1), outputs, columns), kept_count // 128)
        told = (walk, (rounds, kept_count))
        multiply_runs(sources, place, memory, pointers[4].toint(), told, form)


# ---- launch --------------------------------------------------------------------------------------


def views_by_row(
    pointers: tuple[Any, ...], extents: tuple[Any, ...], form: W4A16ByRowForm
) -> Views:
    """Make the TMA views of all rows and of all experts' matrices, whose scales are in 128x4."""
    rows, outputs, columns, matrices = extents
    words, steps = columns // 8, columns // facts.STEP
    wide = cute.assume(Int64(columns), divby=32)
    by_row = cute.assume(Int64(words), divby=4)
    by_matrix = cute.assume(Int64(outputs) * Int64(words), divby=4)
    x_ptr = cute.recast_ptr(pointers[0], dtype=BFloat16)
    codes_ptr = cute.recast_ptr(pointers[1], dtype=Int32)
    box = facts.code_box(form)
    if form.ragged:
        activations = view(x_ptr, (columns, rows), (1, wide), facts.activation_box(form))
        codes = view(codes_ptr, (words, outputs, matrices), (1, by_row, by_matrix), box)
    else:
        by_step = (facts.STEP, rows, steps), (1, wide, facts.STEP)
        activations = view(x_ptr, *by_step, facts.activation_box(form))
        shape_of_codes = (16, outputs, steps, matrices)
        codes = view(codes_ptr, shape_of_codes, (1, by_row, 16, by_matrix), box)
    across, tiles = ceil_div(columns // facts.BLOCK, 4), ceil_div(outputs, 128)
    down = cute.assume(Int64(across) * 512, divby=512)
    whole = cute.assume(Int64(across) * Int64(tiles) * 512, divby=512)
    by_tile = (512, across, tiles, matrices), (1, 512, down, whole)
    return Views(activations, codes, view(pointers[2], *by_tile, facts.scale_box(form)))


@cute.jit
def launch_by_row(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on rows, N, K, experts, shared rows, rounds kept, grid, shared bytes, division.

    The division: tiles of a matrix, units that a thread block walks at least, how many blocks walk
    one more, tiles of a unit.
    Pointers: rows, codes, scales, decode scales of matrices, output, decode scales of rows by
    expert, experts of rows.
    """
    rows, outputs, columns, experts, shared, kept_count, blocks, shared_bytes, *division = extents
    matrices = experts * form.products
    views = views_by_row(pointers, (rows, outputs, columns, matrices), form)
    routed = experts - cutlass.min(shared, 1)
    numbers = (rows, outputs, columns, kept_count, *division, shared, routed, experts)
    by_row_kernel(views, pointers, numbers, form).launch(
        grid=[blocks, 1, 1],
        block=[form.threads, 1, 1],
        smem=shared_bytes,
        min_blocks_per_mp=form.resident,
        preferred_smem_carveout=WHOLE_CARVEOUT if form.resident > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )
