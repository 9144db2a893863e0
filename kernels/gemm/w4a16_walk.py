"""One row of activations times NVFP4 matrices by thread blocks that walk (sm_90a).

It is what sm90_moe_by_row launches where matrices have whole lines and whole 128 rows
(w4a16_walk_problem). Units of all rows' matrices are divided evenly among as many thread blocks as
are there at once, and each walks its share. Roles of 20 warps:
* 16 multiply, a part of K each. A warp brings its part of a row of activations to its own memory
  when the row changes; where those are not decoded yet, it quantises and decodes them on the way.
  For each unit it waits for stage after stage, decodes, multiplies by mma.sync and gives the stage
  back; then it leaves its sums in the next of SUM_BUFFERS places and goes on;
* four load and add up, every fourth unit each. Such a warp asks the copy engine for boxes of a
  unit's codes and scales as stages become free; then it adds up that unit's parts, in the order of
  their number; scales, rounds, and writes.
Rounds along K are written out. Where some parts of K have a step less, their warps have a text of
their own, so that no branch stands between two steps.
Barriers: a stage has a full and an empty one (1 arrival plus bytes; 16), given back behind a vote
on what was read, as in sm90_gemm_w4a16. A place of sums has a full one (16). It needs no empty
one: the warp that asks for a unit's stages has added up before what was in the unit's place. A turn
ends (1) when all stages of a unit are requested; the next unit's warp waits for that, because a
wait for an empty stage takes for granted that the stage's use before the last one has ended.

Early (`form.early`): loading warps do not wait for the previous launch until they add up; they
issue the copies of each of the first stages when those of the stage before have arrived, so that
few of them delay what the launch in front reads. The scale with which the first row is quantised is
read early, too. What is read must be older than that launch: weights that nothing writes, and the
experts' numbers of a router that ended before the previous launch let this one begin. Where numbers
come from a router, the launch in front of such a form calls `wait_then_let_follow` first.
Shape letters: N outputs, K columns.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import SWIZZLE_128X4
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
from degarble.kernels.primitives.e2m1 import PAIRS, e2m1_rounded
from degarble.kernels.primitives.quantise_problem import BLOCK, SWIGLU, VALUES
from degarble.kernels.runtime.pdl import EARLY, wait_for_front, wait_then_let_follow

VECTOR = 8  # values of half a block
NOBODY = 0xFFFF_FFFF  # the number of no row and of no matrix
SECOND_HALF = 8 * facts.LINE  # bytes from a place's codes to those of the eighth after it


class WalkMemory(NamedTuple):
    """Shared addresses; an empty barrier is EMPTY bytes behind its full one."""

    ring: Any
    kept: Any
    sums: Any
    full: Any
    sums_full: Any
    turns: Any


class WalkTask(NamedTuple):
    """The units of a thread block, and what all of them have in common."""

    begin: Any
    end: Any
    outputs: Any
    columns: Any
    of_matrix: Any  # tiles
    shared: Any  # rows of the shared expert, which come first
    routed: Any  # experts
    experts: Any
    chosen: Any  # experts of a token


def memory_of(form: W4A16WalkForm) -> WalkMemory:
    """Divide the shared memory."""
    ring = Uint32(cute.arch.get_dyn_smem(Uint8, facts.ALIGNMENT).toint())
    kept = ring + form.stages * facts.STAGE_BYTES
    sums = kept + form.rounds * (facts.WARPS * facts.STEP_BYTES)
    full = sums + facts.SUM_BUFFERS * facts.SUM_BYTES
    sums_full = full + 2 * EMPTY
    return WalkMemory(ring, kept, sums, full, sums_full, sums_full + 8 * facts.SUM_BUFFERS)


def matrix_of(unit: Any, task: WalkTask, form: W4A16WalkForm) -> tuple[Any, Any]:
    """Return a unit's matrix among those of all rows, and that one's end in tiles."""
    matrix = unit * form.tiles // task.of_matrix
    return matrix, (matrix + 1) * task.of_matrix


def expert_of_row(row: Any, address: Any, read: Any, task: WalkTask) -> Any:
    """Return a row's expert from what its slot chose; `experts` where it is not here."""
    number = read(address + Int64(product.slot_of(row, task.shared)) * 4)
    return product.expert_of(row, number, (task.shared, task.routed, task.experts))


# ---- the warps that load and add up --------------------------------------------------------------


@cute.jit
def feed_units(
    views: tuple[Any, ...],
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    own: tuple[Uint32, Uint32],
    form: cutlass.Constexpr,
) -> None:
    """Ask for all stages of every fourth unit, and add each of these up before the next one.

    Of a warp: its number among those that load, which is that of its place of sums; and the lane.
    """
    mine, lane = own
    read = ptx.early_word if form.early else ptx.global_word
    unit = task.begin + mine
    matrix, end = matrix_of(unit, task, form)
    now, first_block, scale = Uint32(NOBODY), Uint32(0), Float32(0.0)
    before = memory.turns + (mine + facts.LOADING - 1) % facts.LOADING * 8
    # Of a fresh barrier phase 1 counts as ended: the first unit waits for none.
    turn, sums_phase = ops.select(mine == 0, Uint32(1), Uint32(0)), Uint32(0)
    of_matrix = task.outputs // SWIZZLE_128X4.row_tile
    while unit < task.end:
        if unit * form.tiles >= end:
            matrix, end = matrix + 1, end + task.of_matrix
        changes = matrix != now
        if changes:
            row = matrix // form.products
            expert = expert_of_row(row, pointers[6].toint(), read, task)
            first_block = (expert * form.products + matrix % form.products) * of_matrix
        tile = unit * form.tiles + task.of_matrix - end
        place = tile % 8, first_block + tile // 8
        ptx.await_phase(before, turn)
        asked = (unit - task.begin) * form.rounds
        at, phase = asked % form.stages, 1 - asked // form.stages % 2
        for round_ in cutlass.range(Int32(0), Int32(form.rounds), unroll=1):
            barrier = memory.full + at * 8
            if cutlass.const_expr(form.early):  # noqa: SIM102  settled when traced
                if (asked > 0) & (asked < form.stages):
                    ptx.await_phase(barrier - 8, Uint32(0))
            asked = asked + 1
            ptx.await_phase(barrier + EMPTY, phase)
            ptx.expect(barrier, Uint32(facts.STAGE_BYTES), lane == 0)
            stage = memory.ring + at * facts.STAGE_BYTES
            copy_unit(views, (*place, Uint32(round_)), (stage, barrier), form)
            at, phase = next_place(at, phase, form.stages)
        # No barrier is needed here: each copy begins with elect.sync, in which the lanes meet, so
        # all of them have seen the last stage become free when lane 0 arrives.
        ptx.arrive(memory.turns + mine * 8, lane == 0)
        turn = turn ^ 1
        if cutlass.const_expr(form.early):
            wait_for_front()
        if changes:
            scale = scale_of(pointers, matrix, task, form)
            now = matrix
        add_unit(pointers, memory, task, (unit, matrix, end, lane, mine, sums_phase), scale, form)
        sums_phase = sums_phase ^ 1
        unit = unit + facts.LOADING


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


def input_scale(row: Any, pointers: tuple[Any, ...], reads: Any, task: WalkTask) -> Any:
    """Return the scale with which a row is quantised, its expert's."""
    of_number, of_scale = reads
    expert = expert_of_row(row, pointers[6].toint(), of_number, task)
    expert = Int64(ops.select(expert < task.experts, expert, Uint32(0)))
    return of_scale(pointers[5].toint() + expert * 4)


@cute.jit
def keep_row(
    pointers: tuple[Any, ...],
    own: Uint32,
    task: WalkTask,
    of: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Bring a warp's part of a row to its own memory, in the order in which mma pairs weights.

    A lane brings half a block of 16, of two rounds at once; or a quarter, where a round is all.
    """
    row, lane, part, scale = of
    each, lanes = form.kept_values, product.STEP // form.kept_values
    source: Any = row
    if cutlass.const_expr(form.source != DECODED):
        slot = product.slot_of(row, task.shared)
        of_token = ops.select(row < task.shared, row, slot // task.chosen)
        source = of_token if form.source == VALUES.name else row * 2
    cute.arch.sync_warp()  # all lanes have read the row before
    for first in cutlass.range(Int32(0), Int32(form.rounds), LANES // lanes, unroll=1):
        round_ = Uint32(first) + lane // lanes
        value = (round_ * product.PARTS + part) * product.STEP + lane % lanes * each
        inside = (round_ < form.rounds) & (value < task.columns)
        value = ops.select(inside, value, Uint32(0))
        at = pointers[0].toint() + (Int64(source) * Int64(task.columns) + Int64(value)) * 2
        read = ptx.global_words(at, each // 2)
        halves: Any = None
        if cutlass.const_expr(form.source == DECODED):
            halves = [ptx.as_halves(word) for word in read]
        else:
            up: Any = None
            if cutlass.const_expr(form.source == SWIGLU.name):
                up = ptx.global_words(at + Int64(task.columns) * 2, each // 2)
            decoding = words.decoding_of(scale)  # while the values are on their way
            if cutlass.const_expr(form.source == SWIGLU.name):
                read = words.swiglu_words(read, up, form.limit)
            halves = quantised_halves(read, decoding)
        if cutlass.const_expr(each == VECTOR):
            if inside:
                to = own + round_ * facts.STEP_BYTES + lane % lanes * 16
                ptx.store_words(to, ptx.paired(halves, False))
        else:
            # The block's half has a neighbour's words as well: this lane's are of both quarters.
            odd = lane % 2 == 1
            sent = ops.select(odd, halves[0], halves[1])
            got = Uint32(cute.arch.shuffle_sync_bfly(sent, offset=1))
            low, high = ops.select(odd, got, halves[0]), ops.select(odd, halves[1], got)
            if inside:
                ptx.store_words(own + lane * 8, ptx.paired_halves(low, high))
    cute.arch.sync_warp()


def quantised_halves(read: list[Any], decoding: Any) -> list[Any]:
    """Return words of two BF16 quantised and decoded, as FP16; a block's lanes are neighbours."""
    largest = words.block_amax(read)
    distance = 1
    while distance < BLOCK // (2 * len(read)):
        other = cute.arch.shuffle_sync_bfly(largest, offset=distance)
        largest = ops.maximum(largest, Float32(other))
        distance *= 2
    code, factor = words.coded_scale(largest, decoding)
    scale = words.e4m3_number(code)
    scaled = [ops.multiply_rn(number, factor) for number in words.numbers_of(read)]
    return ptx.halves_of([e2m1_rounded(number, scale) for number in scaled])


class WalkLane(NamedTuple):
    """A lane's addresses in the first stage and round."""

    first: Any  # codes of its first block of a step; those of its second one have bit 5 changed
    scales: Any
    kept: Any


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
        scales + facts.scale_offset(part, in_tile) + lane % 4,
        own + lane % 4 * 32,
    )
    return WalkLane(*(ptx.emit("mov.b32 {$w0}, {$r0};", [Uint32], each) for each in numbers))


def add_step(
    sums: Any, lane: WalkLane, by_stage: Any, kept: Any, given_back: tuple[Any, Any, Any]
) -> None:
    """Multiply a warp's step of a tile by its activations, and give its stage back."""
    barrier, zero, one = given_back
    both, read = [], Uint32(0)
    first = lane.first + by_stage
    second = first ^ 2 * facts.CHUNK  # places have whole KB
    for half in range(2):
        codes = ptx.shared_words(first + half * SECOND_HALF, 2)
        codes = codes + ptx.shared_words(second + half * SECOND_HALF, 2)
        at = lane.scales + (by_stage + half * 8)
        low, high = (ptx.shared_byte(at + later) for later in (0, 64))
        pair = ptx.multiplied(high, 1 << 8, low, zero)
        read = read | codes[0] | codes[2] | pair
        both.append((codes, ptx.half_scales(pair)))
    for j in range(ptx.WORDS):
        if j == 1:  # not at once: the first products need half of the words only
            ptx.give_back(barrier, [read], zero, one)
        x = ptx.shared_words(kept + (0, 16, 128, 144)[j], ptx.WORDS)
        low, high = (
            ptx.decoded_halves_by_products(codes[j], ptx.twice(scales, j // 2), zero)
            for codes, scales in both
        )
        for pair in range(0, PAIRS, 2):
            four = [low[pair], high[pair], low[pair + 1], high[pair + 1]]
            ptx.products(sums, 0, four, x[pair : pair + 2], "f16")


@cute.jit
def multiply_units(
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    place: tuple[Any, Any, Any, Any],
    told: cutlass.Constexpr,
) -> None:
    """Add up a warp's part of K of one unit after the other, and leave the sums.

    The place: warp, lane, whether this warp writes the places of slots, how many those are.
    `told`: the form, and the rounds in which the warp's part of K has a step.
    """
    form, steps = told
    warp, lane, tells, slots = place
    part = warp % form.parts
    own = memory.kept + warp * (form.rounds * facts.STEP_BYTES)
    reads = lane_of((warp, lane), memory, form, own)
    zero = task.columns // (1 << 20)  # which the compiler cannot know to be 0
    to = memory.sums + warp * (product.TILE * 4) + facts.place_of(lane // 4) * 4
    sums = cute.make_rmem_tensor(4, Float32)
    at, phase, buffer = Uint32(0), Uint32(0), Uint32(0)
    unit = task.begin
    matrix, end = matrix_of(unit, task, form)
    now, scale = Uint32(NOBODY), Float32(0.0)
    if cutlass.const_expr(form.early and form.source != DECODED):
        # What the first row needs besides its values: older than the launch in front.
        scale = input_scale(
            matrix // form.products, pointers, (ptx.early_word, ptx.early_number), task
        )
    wait_then_let_follow()  # the next launch may load early what this one has waited for
    if cutlass.const_expr(form.places):  # noqa: SIM102  the first is settled when traced
        if tells:
            tell_places(pointers, task, slots, lane)
    while unit < task.end:
        if unit * form.tiles >= end:
            matrix, end = matrix + 1, end + task.of_matrix
        row = matrix // form.products
        if row != now:
            if cutlass.const_expr(form.source != DECODED):  # noqa: SIM102  settled when traced
                if (unit != task.begin) | (not form.early):
                    scale = input_scale(row, pointers, (ptx.global_word, ptx.global_number), task)
            keep_row(pointers, own, task, (row, lane, part, scale), form)
            now = row
        for i in cutlass.range_constexpr(4):
            sums[i] = Float32(0.0)
        for round_ in cutlass.range_constexpr(form.rounds):
            barrier = memory.full + at * 8
            ptx.await_phase(barrier, phase)
            if cutlass.const_expr(round_ < steps):
                of_round = reads.kept + round_ * facts.STEP_BYTES
                given_back = barrier + EMPTY, zero, lane == 0
                add_step(sums, reads, at * facts.STAGE_BYTES, of_round, given_back)
            else:
                ptx.arrive(barrier + EMPTY, lane == 0)
            at, phase = next_place(at, phase, form.stages)
        # Free: this unit's copies were issued after the place's last sums had been added up.
        if lane % 4 == 0:  # column 0 of an mma, the only row of activations
            ptx.store_number(to + buffer * facts.SUM_BYTES, sums[0])
            ptx.store_number(to + (buffer * facts.SUM_BYTES + 8 * 4), sums[2])
        cute.arch.sync_warp()
        ptx.arrive(memory.sums_full + buffer * 8, lane == 0)
        buffer = (buffer + 1) % facts.SUM_BUFFERS
        unit = unit + 1


# ---- sums of a unit ------------------------------------------------------------------------------


@cute.jit
def add_unit(
    pointers: tuple[Any, ...],
    memory: WalkMemory,
    task: WalkTask,
    of: tuple[Any, Any, Any, Uint32, Uint32, Uint32],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Add the parts of a unit in the order of their number, and write them.

    Of a unit: its number, matrix, end of that in tiles; the lane; the buffer and its phase.
    """
    unit, matrix, end, lane, buffer, phase = of
    side, place = lane // product.TILE, lane % product.TILE
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
    # The store needed all sums, so none is still being read: the next copy may replace them.
    cute.arch.sync_warp()


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
    """Dispatch by warp: 16 multiply, four load and add up."""
    rows, outputs, columns, shared, routed, experts, chosen, *division = (
        Uint32(each) for each in extents
    )
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    warp, lane = Uint32(thread) // LANES, Uint32(thread) % LANES
    memory = memory_of(form)
    if warp == facts.WARPS:
        for atom, _ in views:
            cpasync.prefetch_descriptor(atom)
    if (warp == 0) & (lane < facts.MOST_STAGES):
        ptx.begin_barrier(memory.full + lane * 8, 1)
        ptx.begin_barrier(memory.full + EMPTY + lane * 8, facts.WARPS)
        if lane < facts.SUM_BUFFERS:
            ptx.begin_barrier(memory.sums_full + lane * 8, facts.WARPS)
            ptx.begin_barrier(memory.turns + lane * 8, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    of_matrix = outputs // product.TILE
    every = of_matrix * rows * form.products // form.tiles
    begin, end = product.share_of(Uint32(block), every, (*division, 1))
    task = WalkTask(begin, end, outputs, columns, of_matrix, shared, routed, experts, chosen)
    if warp >= facts.WARPS:
        if cutlass.const_expr(not form.early):
            wait_for_front()
        feed_units(views, pointers, memory, task, (warp - facts.WARPS, lane), form)
    else:
        # Of the last thread block, whose share is never the largest.
        tells = (block == blocks - 1) & (warp == 0)
        place = warp, lane, tells, rows - shared
        last = (form.rounds - 1) * product.PARTS + warp % form.parts
        if cutlass.const_expr(form.whole):  # noqa: SIM114  settled when traced
            multiply_units(pointers, memory, task, place, (form, form.rounds))
        elif last * product.STEP < columns:
            multiply_units(pointers, memory, task, place, (form, form.rounds))
        else:
            multiply_units(pointers, memory, task, place, (form, form.rounds - 1))


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
