"""One row of activations times NVFP4 matrices by thread blocks that walk (sm_90a).

It is what sm90_moe_by_row launches where matrices have whole lines and whole 128 rows
(w4a16_walk_problem). Units of all rows' matrices are divided evenly among as many thread blocks as
are there at once, and each walks its share. Roles of 18 warps:
* one asks the copy engine for boxes of codes and scales, `form.stages` stages ahead;
* 16 multiply, a part of K each. A warp brings its part of a row of activations to its own memory
  when the row changes; where those are not decoded yet, it quantises and decodes them on the way.
  For each unit it waits for stage after stage, decodes, multiplies by mma.sync and gives the stage
  back; then it leaves its sums in one of SUM_BUFFERS places and goes on;
* one adds the parts of a unit in the order of their number, scales, rounds, and writes.
Barriers, each with a full and an empty phase: a stage (1 arrival plus bytes; 16), a buffer of sums
(16; 1). A stage is given back behind a vote on what was read, as in sm90_gemm_w4a16.

Early (`form.early`): the loading warp does not wait for the previous launch. What it reads must be
older than that: weights that nothing writes, and the experts' numbers of a router that ended before
the previous launch let this one begin. Where numbers come from a router, the launch in front of
such a form calls `wait_then_let_follow` first.
Shape letters: N outputs, K columns.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm import w4a16_problem as product
from degarble.kernels.gemm import w4a16_walk_problem as facts
from degarble.kernels.gemm.sm90_gemm_w4a16 import (
    EMPTY,
    LANES,
    WHOLE_CARVEOUT,
    copy_box,
    next_place,
    view,
)
from degarble.kernels.gemm.w4a16_walk_problem import DECODED, W4A16WalkForm
from degarble.kernels.moe.problem import NONE
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives.e2m1 import PAIRS
from degarble.kernels.primitives.quantise_problem import SWIGLU, VALUES
from degarble.kernels.runtime.pdl import EARLY, wait_for_front, wait_then_let_follow

NOBODY = 0xFFFF_FFFF  # the number of no row and of no matrix
SECOND_HALF = 8 * facts.LINE  # bytes from a place's codes to those of the eighth after it


class WalkMemory(NamedTuple):
    """Shared addresses; an empty barrier is EMPTY bytes behind its full one."""

    ring: Any
    kept: Any
    sums: Any
    full: Any
    sums_full: Any


class WalkTask(NamedTuple):
    """The units of a thread block, and what all of them have in common."""

    begin: Any
    end: Any
    outputs: Any
    columns: Any
    rounds: Any
    of_matrix: Any  # tiles
    shared: Any  # rows of the shared expert, which come first
    routed: Any  # experts
    experts: Any
    chosen: Any  # experts of a token


def memory_of(rounds: Any, form: W4A16WalkForm) -> WalkMemory:
    """Divide the shared memory."""
    ring = Uint32(cute.arch.get_dyn_smem(Uint8, facts.ALIGNMENT).toint())
    kept = ring + form.stages * facts.STAGE_BYTES
    sums = kept + rounds * (facts.WARPS * facts.STEP_BYTES)
    full = sums + facts.SUM_BUFFERS * facts.SUM_BYTES
    return WalkMemory(ring, kept, sums, full, full + 2 * EMPTY)


def first_of(task: WalkTask, form: W4A16WalkForm) -> tuple[Any, Any, Any]:
    """Return the first unit, its matrix among those of all rows, and that one's end in tiles."""
    matrix = task.begin * form.tiles // task.of_matrix
    return task.begin, matrix, (matrix + 1) * task.of_matrix


def expert_of_row(row: Any, address: Any, read: Any, task: WalkTask) -> Any:
    """Return a row's expert from what its slot chose; `experts` where it is not here."""
    number = read(address + Int64(product.slot_of(row, task.shared)) * 4)
    return product.expert_of(row, number, (task.shared, task.routed, task.experts))


# ---- the warp that loads -------------------------------------------------------------------------


@cute.jit
def load_units(
    views: tuple[Any, ...],
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    lane: Uint32,
    form: cutlass.Constexpr,
) -> None:
    """Ask for all stages in turn, as soon as there is space."""
    read = ptx.early_word if form.early else ptx.global_word
    at, phase = Uint32(0), Uint32(1)  # of a fresh barrier phase 1 counts as ended
    unit, matrix, end = first_of(task, form)
    now, first_block = Uint32(NOBODY), Uint32(0)
    of_matrix = task.outputs // SWIZZLE_128X4.row_tile
    while unit < task.end:
        if unit * form.tiles >= end:
            matrix, end = matrix + 1, end + task.of_matrix
        if matrix != now:
            row = matrix // form.products
            expert = expert_of_row(row, pointers[6].toint(), read, task)
            first_block = (expert * form.products + matrix % form.products) * of_matrix
            now = matrix
        tile = unit * form.tiles + task.of_matrix - end
        place = tile % 8, first_block + tile // 8
        for round_ in cutlass.range(Int32(0), Int32(task.rounds), unroll=1):
            barrier = memory.full + at * 8
            ptx.await_phase(barrier + EMPTY, phase)
            ptx.expect(barrier, Uint32(facts.STAGE_BYTES), lane == 0)
            stage = memory.ring + at * facts.STAGE_BYTES
            copy_unit(views, (*place, Uint32(round_)), (stage, barrier), form)
            at, phase = next_place(at, phase, form.stages)
        unit = unit + 1


def copy_unit(
    views: tuple[Any, ...], place: tuple[Any, Any, Any], to: tuple[Any, Any], form: W4A16WalkForm
) -> None:
    """Start the copies of a round's codes and scales; a row beyond all matrices gives zeros."""
    (tile, block, round_), (stage, barrier) = place, to
    codes, scales = views
    code_bytes = facts.CODE_BYTES // form.tiles
    of_codes, of_scales = (Int32, facts.code_box(form)), (Uint8, facts.scale_box(form))
    for each in range(form.tiles):
        own = tile + each
        at = stage + each * code_bytes
        copy_box(codes, of_codes, (0, own, 0, round_, block), at, barrier)
        at = stage + facts.CODE_BYTES + each * (code_bytes // 8)
        copy_box(scales, of_scales, (own, round_, block), at, barrier)


# ---- the warps that multiply ---------------------------------------------------------------------


def four_words(address: Any) -> list[Any]:
    """Read 16 bytes of global memory."""
    text = "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(ptx.emit(text, [Uint32] * 4, address))


@cute.jit
def keep_row(
    pointers: tuple[Any, ...],
    own: Uint32,
    task: WalkTask,
    place: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Bring a warp's part of a row to its own memory, in the order in which mma pairs weights.

    Half a block of 16 a lane and two rounds at once; the halves of a block are neighbours.
    """
    row, lane, part = place
    source: Any = row
    scaling: Any = None
    if cutlass.const_expr(form.source != DECODED):
        expert = expert_of_row(row, pointers[6].toint(), ptx.global_word, task)
        expert = Int64(ops.select(expert < task.experts, expert, Uint32(0)))
        scaling = words.scaling_of(ptx.global_number(pointers[5].toint() + expert * 4), None)
        slot = product.slot_of(row, task.shared)
        of_token = ops.select(row < task.shared, row, slot // task.chosen)
        source = of_token if form.source == VALUES.name else row * 2
    cute.arch.sync_warp()  # all lanes have read the row before
    for pair in cutlass.range(Int32(0), Int32(task.rounds), 2, unroll=1):
        round_ = Uint32(pair) + lane // 16
        value = (round_ * product.PARTS + part) * product.STEP + lane % 16 * 8
        inside = (round_ < task.rounds) & (value < task.columns)
        value = ops.select(inside, value, Uint32(0))
        at = pointers[0].toint() + (Int64(source) * Int64(task.columns) + Int64(value)) * 2
        read = four_words(at)
        if cutlass.const_expr(form.source == SWIGLU.name):
            up = four_words(at + Int64(task.columns) * 2)
            read = words.swiglu_words(read, up, form.limit)
        if cutlass.const_expr(form.source != DECODED):
            largest = words.block_amax(read)
            other = cute.arch.shuffle_sync_bfly(largest, offset=1)
            code = words.scale_code_of(ops.maximum(largest, Float32(other)), scaling.share)
            factor = ops.nvfp4_block_encode_scale(code, scaling.encode)
            read = words.nvfp4_values(words.half_code_word(read, factor, form.target), code)
        if inside:
            to = own + round_ * facts.STEP_BYTES + lane % 16 * 16
            ptx.store_words(to, ptx.paired([ptx.as_halves(word) for word in read], False))
    cute.arch.sync_warp()


class WalkLane(NamedTuple):
    """A lane's addresses in the first stage and round, and the bytes of scales that it selects."""

    first: Any  # codes of its first block of a step
    second: Any
    scales: Any
    kept: Any
    selector: Any


def lane_of(place: tuple[Any, Any], memory: WalkMemory, form: W4A16WalkForm, own: Any) -> WalkLane:
    """Return what a lane reads, computed once; compilers would recompute it for each unit."""
    warp, lane = place
    part, side = warp % form.parts, warp // form.parts
    in_tile, code_bytes = facts.place_of(lane // 4), facts.CODE_BYTES // form.tiles
    offset = facts.code_offset(part, in_tile, lane)
    first = memory.ring + side * code_bytes
    scales = memory.ring + facts.CODE_BYTES + side * (code_bytes // 8)
    numbers = (
        first + offset,
        first + (offset ^ 2 * facts.CHUNK),
        scales + facts.scale_offset(part, in_tile),
        own + lane % 4 * 32,
        lane % 4 * 0x11 + 0x40,
    )
    return WalkLane(*(ptx.emit("mov.b32 {$w0}, {$r0};", [Uint32], each) for each in numbers))


def add_step(
    sums: Any, lane: WalkLane, by_stage: Any, kept: Any, given_back: tuple[Any, Any, Any]
) -> None:
    """Multiply a warp's step of a tile by its activations, and give its stage back."""
    barrier, zero, one = given_back
    both, read = [], Uint32(0)
    for half in range(2):
        behind = by_stage + half * SECOND_HALF
        codes = ptx.shared_words(lane.first + behind, 2)
        codes = codes + ptx.shared_words(lane.second + behind, 2)
        at = lane.scales + (by_stage + half * 8)
        low, high = (ptx.shared_words(at + later, 1)[0] for later in (0, 64))
        pair = ptx.chosen_bytes(low, high, lane.selector)
        read = read | codes[0] | codes[2] | pair
        both.append((codes, ptx.half_scales(pair)))
    for j in range(ptx.WORDS):
        if j == 1:  # not at once: the first products need half of the words only
            ptx.give_back(barrier, [read], zero, one)
        x = ptx.shared_words(kept + (0, 16, 128, 144)[j], ptx.WORDS)
        low, high = (
            ptx.decoded_halves(codes[j], ptx.twice(scales, j // 2)) for codes, scales in both
        )
        for pair in range(0, PAIRS, 2):
            four = [low[pair], high[pair], low[pair + 1], high[pair + 1]]
            ptx.products(sums, 0, four, x[pair : pair + 2], "f16")


@cute.jit
def multiply_units(
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    place: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Add up a warp's part of K of one unit after the other, and leave the sums."""
    warp, lane = place
    part = warp % form.parts
    own = memory.kept + warp * (task.rounds * facts.STEP_BYTES)
    reads = lane_of(place, memory, form, own)
    zero = task.rounds // 128  # which the compiler cannot know to be 0
    to = memory.sums + warp * (product.TILE * 4) + facts.place_of(lane // 4) * 4
    sums = cute.make_rmem_tensor(4, Float32)
    at, phase, buffer, sums_phase = Uint32(0), Uint32(0), Uint32(0), Uint32(1)
    unit, matrix, end = first_of(task, form)
    now = Uint32(NOBODY)
    while unit < task.end:
        if unit * form.tiles >= end:
            matrix, end = matrix + 1, end + task.of_matrix
        row = matrix // form.products
        if row != now:
            keep_row(pointers, own, task, (row, lane, part), form)
            now = row
        for i in cutlass.range_constexpr(4):
            sums[i] = Float32(0.0)
        for round_ in cutlass.range(Int32(0), Int32(task.rounds), unroll=1):
            barrier = memory.full + at * 8
            ptx.await_phase(barrier, phase)
            step = Uint32(round_) * product.PARTS + part
            if step * product.STEP < task.columns:
                of_round = reads.kept + Uint32(round_) * facts.STEP_BYTES
                given_back = barrier + EMPTY, zero, lane == 0
                add_step(sums, reads, at * facts.STAGE_BYTES, of_round, given_back)
            else:
                ptx.arrive(barrier + EMPTY, lane == 0)
            at, phase = next_place(at, phase, form.stages)
        barrier = memory.sums_full + buffer * 8
        ptx.await_phase(barrier + EMPTY, sums_phase)
        if lane % 4 == 0:  # column 0 of an mma, the only row of activations
            ptx.store_number(to + buffer * facts.SUM_BYTES, sums[0])
            ptx.store_number(to + (buffer * facts.SUM_BYTES + 8 * 4), sums[2])
        cute.arch.sync_warp()
        ptx.arrive(barrier, lane == 0)
        buffer, sums_phase = next_place(buffer, sums_phase, facts.SUM_BUFFERS)
        unit = unit + 1


# ---- the warp that adds up -----------------------------------------------------------------------


@cute.jit
def add_units(
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    lane: Uint32,
    form: cutlass.Constexpr,
) -> None:
    """Add the parts of one unit after the other in the order of their number, and write them."""
    buffer, phase = Uint32(0), Uint32(0)
    unit, matrix, end = first_of(task, form)
    now, scale = Uint32(NOBODY), Float32(0.0)
    side, place = lane // product.TILE, lane % product.TILE
    while unit < task.end:
        if unit * form.tiles >= end:
            matrix, end = matrix + 1, end + task.of_matrix
        if matrix != now:
            scale = scale_of(pointers, matrix, task, form)
            now = matrix
        barrier = memory.sums_full + buffer * 8
        ptx.await_phase(barrier, phase)
        if side < form.tiles:
            start = memory.sums + buffer * facts.SUM_BYTES + place * 4
            start = start + side * (form.parts * product.TILE * 4)
            total = added(start, form)
            tile = unit * form.tiles + task.of_matrix - end
            output = product.row_of(tile + side, place, SWIZZLE_128X4.name)
            at = Int64(matrix) * Int64(task.outputs) + Int64(output)
            ptx.store_rounded(pointers[4].toint() + at * 2, ops.multiply_rn(total, scale))
        cute.arch.sync_warp()
        ptx.arrive(barrier + EMPTY, lane == 0)
        buffer, phase = next_place(buffer, phase, facts.SUM_BUFFERS)
        unit = unit + 1


def added(start: Any, form: W4A16WalkForm) -> Any:
    """Add the parts' sums of an output from an address on; parts without steps are zeros."""
    numbers = [
        ptx.shared_number(start + part * (product.TILE * 4), 0, 1) for part in range(form.parts)
    ]
    total = numbers[0]
    for number in numbers[1:]:
        total = ops.add_rn(total, number)
    if form.parts < product.PARTS:
        total = ops.add_rn(total, Float32(0.0))
    return ops.multiply_rn(total, 2.0**-facts.DECODED_EXPONENT)


def scale_of(pointers: tuple[Any, ...], matrix: Any, task: WalkTask, form: W4A16WalkForm) -> Any:
    """Return the factor of a matrix's outputs, 0 where the expert is not here."""
    expert = expert_of_row(matrix // form.products, pointers[6].toint(), ptx.global_word, task)
    known = expert < task.experts
    at = Int64(ops.select(known, expert, Uint32(0)))
    of_weights = (at * form.products + Int64(matrix % form.products)) * 4
    of_rows = ptx.global_number(pointers[5].toint() + at * 4)
    scale = ops.multiply_rn(of_rows, ptx.global_number(pointers[3].toint() + of_weights))
    return ops.select(known, scale, Float32(0.0))


@cute.jit
def tell_places(pointers: tuple[Any, ...], task: WalkTask, slots: Uint32, lane: Uint32) -> None:
    """Write the row of each slot, or that it has none."""
    for slot in cutlass.range(Int32(lane), Int32(slots), LANES, unroll=1):
        row = Uint32(slot) + task.shared
        expert = expert_of_row(row, pointers[6].toint(), ptx.global_word, task)
        told = ops.select(expert < task.experts, Int32(row), Int32(NONE))
        ptx.emit("st.global.b32 [{$r0}], {$r1};", [], pointers[7].toint() + Int64(slot) * 4, told)


# ---- launch --------------------------------------------------------------------------------------


@cute.kernel
def walk_kernel(
    views: tuple[Any, ...],
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: 16 multiply, one loads, one adds up."""
    rows, outputs, columns, shared, routed, experts, chosen, *division = (
        Uint32(each) for each in extents
    )
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp, lane = Uint32(thread) // LANES, Uint32(thread) % LANES
    rounds = ceil_div(columns, product.ROUND)
    memory = memory_of(rounds, form)
    if warp == facts.WARPS:
        for atom, _ in views:
            cpasync.prefetch_descriptor(atom)
    if (warp == 0) & (lane < facts.MOST_STAGES):
        ptx.begin_barrier(memory.full + lane * 8, 1)
        ptx.begin_barrier(memory.full + EMPTY + lane * 8, facts.WARPS)
        if lane < facts.SUM_BUFFERS:
            ptx.begin_barrier(memory.sums_full + lane * 8, facts.WARPS)
            ptx.begin_barrier(memory.sums_full + EMPTY + lane * 8, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    of_matrix = outputs // product.TILE
    every = of_matrix * rows * form.products // form.tiles
    begin, end = product.share_of(Uint32(block), every, (*division, 1))
    task = WalkTask(
        begin, end, outputs, columns, rounds, of_matrix, shared, routed, experts, chosen
    )
    if warp == facts.WARPS:
        if cutlass.const_expr(not form.early):
            wait_for_front()
        load_units(views, pointers, memory, task, lane, form)
    else:
        wait_then_let_follow()  # the next launch may load early what this one has waited for
        if warp < facts.WARPS:
            multiply_units(pointers, memory, task, (warp, lane), form)
        else:
            if cutlass.const_expr(form.places):  # noqa: SIM102  the first is settled when traced
                if block == 0:
                    tell_places(pointers, task, rows - shared, lane)
            add_units(pointers, memory, task, lane, form)


def views_of(
    pointers: tuple[Any, ...], extents: tuple[Any, Any, Any], form: W4A16WalkForm
) -> tuple[tuple[Any, Any], ...]:
    """Make the TMA views of codes and scales: of all matrices, by blocks of 128 rows."""
    outputs, columns, matrices = extents
    blocks = matrices * (outputs // SWIZZLE_128X4.row_tile)
    by_row = cute.assume(Int64(columns // 8), divby=32)
    shape = (facts.LINE // 4, 32, 4, columns // product.COPIED, blocks)
    stride = (1, by_row, by_row * 32, facts.LINE // 4, by_row * SWIZZLE_128X4.row_tile)
    codes = cute.recast_ptr(pointers[1], dtype=Int32)
    tensor = cute.make_tensor(codes, cute.make_layout(shape, stride=stride))
    box = facts.code_box(form)
    swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(box))
    operation = cpasync.CopyBulkTensorTileG2SOp()
    made = cpasync.make_tiled_tma_atom(operation, tensor, swizzled, box)
    across = columns // 64
    down = cute.assume(Int64(across) * 512, divby=512)
    scales = view(pointers[2], (512, across, blocks), (1, 512, down), facts.scale_box(form))
    return (made.atom, made.tma_tensor), scales


@cute.jit
def launch_walk(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on rows, N, K, experts, shared rows, chosen, grid, shared bytes, and the division.

    The division: units that a thread block walks at least, and how many blocks walk one more.
    Pointers: those of w4a16_by_row.launch_by_row, and where each slot's row is written.
    """
    rows, outputs, columns, experts, shared, chosen, blocks, shared_bytes, *division = extents
    views = views_of(pointers, (outputs, columns, experts * form.products), form)
    routed = experts - cutlass.min(shared, 1)
    numbers = (rows, outputs, columns, shared, routed, experts, chosen, *division)
    walk_kernel(views, pointers, numbers, form).launch(
        grid=[blocks, 1, 1],
        block=[form.threads, 1, 1],
        smem=shared_bytes,
        min_blocks_per_mp=form.resident,
        preferred_smem_carveout=WHOLE_CARVEOUT,
        use_pdl=EARLY,
        stream=stream,
    )
