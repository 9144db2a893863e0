"""BF16 activations times NVFP4 weights (W4A16) for decoding, M up to 64; sm_90a and sm_100a.

out [M, N] = x [M, K] W^T, W as a checkpoint stores it: codes [N, P], block scales linear or 128x4.
Outputs are the 16 rows and activations the 8 columns of mma.sync.m16n8k16. Code times block scale
is exact in BF16, so only the sums over K, in the order of w4a16_problem, and the output round.
Roles: `form.warps` warps multiply (groups x 16 / ranks, one part of K each); one more warp issues
  TMA. A cluster of `ranks` thread blocks shares the 16 parts of K of the same outputs.
Pipelines, both with full barriers (1 arrival plus bytes) and empty barriers (`form.warps`
  arrivals): (1) `form.stages` stages of weights, a round's codes and scales of one tile per group;
  (2) rounds of activations, which stay for all tiles of the round.
Order: set up barriers; PDL: release the next launch, ask L2 for the first stages' weights, wait for
  the launch before; per round and tile the loading warp waits for space and issues boxes, the
  others wait, decode, multiply by mma.sync and release the stage; the parts' sums replace the
  stages in shared memory; thread block or cluster barrier; all threads add the parts in order,
  scale, round, write.
K that is no multiple of 256 (`ragged`) puts linear scales on addresses that TMA rejects; lanes read
  those from global memory.
By row (W4A16ByRowForm): w4a16_by_row.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: M rows, N outputs, K columns, P = K / 2 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync
from torch import Tensor

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import LINEAR, ceil_div
from degarble.harness.formats.number_formats import NVFP4, NibbleOrder, ScaleDirection
from degarble.harness.formats.quantise import QuantisedTensor, require
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm import w4a16_problem as facts
from degarble.kernels.gemm.w4a16_problem import W4A16Form, W4A16Problem
from degarble.kernels.primitives.e2m1 import PAIRS
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage, as_vector
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front
from degarble.kernels.runtime.targets import TARGETS

LANES = 32
HELD = 2  # of four words' activations, in registers, where two thread blocks share a processor
WHOLE_CARVEOUT = 100  # per cent; CUDA Driver API 13.0, preferred shared memory carveout


# ---- device --------------------------------------------------------------------------------------


class W4A16Thread(NamedTuple):
    """A thread's position; indices count within the thread block, except `tile` and `rank`."""

    lane: Any
    warp: Any
    part: Any  # of the warps that share outputs
    group: Any
    tile: Any  # the thread block's first
    rank: Any  # of its thread block in the cluster
    row: Any = 0  # of activations, the first
    matrix: tuple[Any, ...] = ()  # the number of the run's matrix, by row alone


class W4A16Memory(NamedTuple):
    """Shared addresses: full barriers, EMPTY bytes before their empty ones, and both rings."""

    full: Any
    kept_full: Any
    ring: Any
    kept: Any
    sums: Any = None  # of parts of a run, twice, by row alone; the scales of runs follow
    scales: Any = None


class Views(NamedTuple):
    """TMA atom and tensor of activations, codes and scales."""

    activations: tuple[Any, Any]
    codes: tuple[Any, Any]
    scales: tuple[Any, Any]


EMPTY = 128  # bytes from a full barrier to its empty barrier


def place_of(form: W4A16Form) -> W4A16Thread:
    """Return this thread's position."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    thread, block = Uint32(thread), Uint32(block)
    warp = thread // LANES
    # Thread blocks of a cluster have the same outputs.
    tile = block // form.ranks * (form.groups * form.tiles)
    return W4A16Thread(
        thread % LANES, warp, warp % form.parts, warp // form.parts, tile, block % form.ranks
    )


def memory_of(form: W4A16Form) -> W4A16Memory:
    """Divide the shared memory into barriers, ring of stages and activations."""
    shared = Uint32(cute.arch.get_dyn_smem(Uint8, 128).toint())
    ring = shared + facts.BARRIER_BYTES
    return W4A16Memory(shared, shared + 2 * EMPTY, ring, ring + form.ring_bytes)


def next_place(place: Any, phase: Any, count: Any) -> tuple[Any, Any]:
    """Return the next place of a ring and the parity of the phase in which it becomes full."""
    wraps = place + 1 == count
    return ops.select(wraps, Uint32(0), place + 1), ops.select(wraps, phase ^ 1, phase)


Box = tuple[Any, tuple[int, ...]]  # type of an element, extents


def copy_box(
    view: tuple[Any, Any], box: Box, place: tuple[Any, ...], to: Any, barrier: Any
) -> None:
    """Start the TMA copy of the box at `place`, counted in boxes, to a shared address.

    Without a barrier it is prefetched to L2 alone.
    """
    atom, tensor = view
    element, shape = box
    rank = len(shape)
    pointer = make_shared_ptr(element, to, 128)
    shared = cute.make_tensor(pointer, cute.make_layout(shape))
    boxes = cute.local_tile(tensor, shape, (None,) * rank)
    grouped = cute.group_modes(shared, 0, rank), cute.group_modes(boxes, 0, rank)
    target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
    coordinate = (None, *(Int32(each) for each in place))
    if cutlass.const_expr(barrier is None):
        cute.prefetch(atom, source[coordinate])
    else:
        bar = make_shared_ptr(Int64, barrier, 8)
        cute.copy(atom, source[coordinate], target, tma_bar_ptr=bar)


def make_shared_ptr(element: Any, address: Any, alignment: int) -> Any:
    """Return a pointer to a shared address."""
    return cute.make_ptr(element, Int32(address), cute.AddressSpace.smem, assumed_align=alignment)


def ask_activations(
    views: Views, place: W4A16Thread, memory: W4A16Memory, asked: tuple[Any, Any], form: W4A16Form
) -> None:
    """Start to copy a round's activations to a place of their ring."""
    round_, at = asked
    barrier = memory.kept_full + at * 8
    ptx.expect(barrier, Uint32(form.kept_bytes), place.lane == 0)
    start, box = memory.kept + at * form.kept_bytes, (BFloat16, facts.activation_box(form))
    if not form.ragged:
        step = round_ * form.ranks + place.rank
        copy_box(views.activations, box, (0, place.row, step), start, barrier)
        return
    for part in range(form.parts):
        step = round_ * facts.PARTS + place.rank * form.parts + part
        to = start + part * (form.copied_rows * 2 * facts.STEP)
        copy_box(views.activations, box, (step, place.row), to, barrier)


def ask_weights(
    views: Views,
    place: W4A16Thread,
    memory: W4A16Memory,
    asked: tuple[Any, Any, Any],
    form: W4A16Form,
) -> None:
    """Start to copy a round's codes and scales of one tile of every group to a stage."""
    stage = memory.ring + asked[2] * form.stage_bytes
    barrier = memory.full + asked[2] * 8
    ptx.expect(barrier, Uint32(form.copied_bytes), place.lane == 0)
    copy_weights(views, place, asked[:2], (stage, barrier), form)


@cute.jit
def ask_early(views: Views, place: W4A16Thread, rounds: Any, form: cutlass.Constexpr) -> None:
    """Ask L2 for the weights of as many stages as there are, before the previous launch has ended.

    Nothing is read: L2 is also where its writes arrive.
    """
    ahead = cutlass.min(Uint32(form.stages), rounds * form.tiles)
    for at in cutlass.range(Uint32(0), ahead, unroll=1):
        copy_weights(views, place, (at // form.tiles, at % form.tiles), (Uint32(0), None), form)


def copy_weights(
    views: Views,
    place: W4A16Thread,
    asked: tuple[Any, Any],
    target: tuple[Any, Any],
    form: W4A16Form,
) -> None:
    """Start the copies of a round's codes and scales of one tile of every group.

    `target` is the address of a stage and its barrier, or None to prefetch to L2 alone.
    """
    (round_, tile), (stage, barrier) = asked, target
    span = round_ * form.ranks + place.rank
    box, of_scales = (Int32, facts.code_box(form)), (Uint8, facts.scale_box(form))
    for group in range(form.groups):
        own = place.tile + group * form.tiles + tile
        for piece in range(form.pieces):
            rows = facts.row_of(own, piece * (facts.TILE // form.pieces), form.layout)
            rows = rows // (facts.TILE // form.pieces)
            to = stage + (group * form.pieces + piece) * (form.group_bytes // form.pieces)
            if not form.ragged:
                copy_box(views.codes, box, (0, rows, span, *place.matrix), to, barrier)
                continue
            for part in range(form.parts):
                step = span * form.parts + part
                by_part = part * (facts.STEP // 2 * facts.TILE // form.pieces)
                copy_box(views.codes, box, (step, rows, *place.matrix), to + by_part, barrier)
        to = stage + form.scales_at + group * (form.group_bytes // 8)
        if form.layout != LINEAR.name:
            where = (own % 8, span, own // 8, *place.matrix)
            copy_box(views.scales, of_scales, where, to, barrier)
        elif not form.ragged:
            copy_box(views.scales, of_scales, (span, own), to, barrier)


Rings = tuple[Any, Any, Any, Any]  # place and parity in the ring of stages, then of activations


def first_places(parity: int) -> Rings:
    """Return where both rings begin.

    Parity 1 of a fresh barrier counts as ended: the first pass over each ring asks without waiting.
    """
    return Uint32(0), Uint32(parity), Uint32(0), Uint32(parity)


@cute.jit
def ask(
    views: Views,
    place: W4A16Thread,
    memory: W4A16Memory,
    counts: tuple[Uint32, Uint32],
    asked: tuple[Rings, Any],
    form: cutlass.Constexpr,
) -> Rings:
    """Issue all copies in the order in which they are used, as soon as there is space.

    `asked` has the rings, and by row the tiles that the run has, and its scale: slot and factors.
    Stages of tiles that it does not have bring nothing. The scale is left before the last stage is
    asked for, so that who waits for that stage sees it. The scale that was in the slot, SCALE_SLOTS
    runs before, has been read by then: every warp gave back a later run's stage.
    """
    rounds, kept_count = counts
    rings, run = asked
    at, phase, kept_at, kept_phase = rings
    for round_ in cutlass.range(Int32(0), Int32(rounds), unroll=1):
        ptx.await_phase(memory.kept_full + EMPTY + kept_at * 8, kept_phase)
        ask_activations(views, place, memory, (Uint32(round_), kept_at), form)
        kept_at, kept_phase = next_place(kept_at, kept_phase, kept_count)
        for tile in cutlass.range(Int32(0), form.tiles, unroll=1):
            ptx.await_phase(memory.full + EMPTY + at * 8, phase)
            if cutlass.const_expr(form.by_row):
                if (Uint32(round_) + 1 == rounds) & (Uint32(tile) + 1 == form.tiles):
                    # Trap: without a branch here (this wait has ended) ptxas makes the store one
                    # instruction under a predicate, and the first stage waits for the factors.
                    ptx.await_phase(memory.full + EMPTY + at * 8, phase)
                    ptx.store_factors(*run[1])
                if Uint32(tile) < run[0]:
                    ask_weights(views, place, memory, (Uint32(round_), Uint32(tile), at), form)
                else:
                    ptx.arrive(memory.full + at * 8, place.lane == 0)
            else:
                ask_weights(views, place, memory, (Uint32(round_), Uint32(tile), at), form)
            at, phase = next_place(at, phase, form.stages)
    return at, phase, kept_at, kept_phase


class Sources(NamedTuple):
    """Inputs that lanes read from global memory: address of the scales; M, N, K."""

    scales: Any
    extents: tuple[Any, Any, Any]
    zero: Any  # 0, which the compiler cannot know


def activations_at(
    start: Any, place: W4A16Thread, extents: tuple[Any, Any, Any], form: W4A16Form
) -> Any:
    """Return a function of word j that gives a step's activations, four words per eight rows."""
    native = TARGETS[form.target].converts_e2m1
    own = start + place.part * (form.copied_rows * 2 * facts.STEP) + place.lane % 4 * 32
    of_columns = [
        own + ops.minimum(place.lane // 4 + column, extents[0] - 1) * (2 * facts.STEP)
        for column in range(0, form.columns, facts.COLUMNS)
    ]

    def read(j: int) -> list[Any]:
        chunk = (0, 16, 128, 144)[j]
        return [ptx.paired(ptx.shared_words(at + chunk, ptx.WORDS), native) for at in of_columns]

    if len(of_columns) > (1 if native or form.ragged else 2):  # more than registers hold
        return read
    held = [read(j) for j in range(ptx.WORDS if form.resident == 1 else HELD)]
    return lambda j: held[j] if j < len(held) else read(j)


class W4A16Lane(NamedTuple):
    """Addresses of a lane's codes and scales in the first stage, and the bytes it selects."""

    codes: Any
    scales: Any
    selector: Any


def lane_of(place: W4A16Thread, memory: W4A16Memory, form: W4A16Form) -> W4A16Lane:
    """Return what a lane reads, computed once; compilers would recompute it for each tile."""
    row, rows = place.lane // 4, facts.TILE // form.pieces
    codes = memory.ring + place.group * form.group_bytes + place.part * (rows * 64)
    codes = codes + row // rows * (form.group_bytes // form.pieces) + row % rows * 64
    scales = memory.ring + form.scales_at + place.group * (form.group_bytes // 8)
    if form.layout == LINEAR.name:
        scales = scales + row * (form.parts * 8) + place.part * 8
    else:
        scales = scales + place.part * 128 + row % 4 * 16 + row // 4 * 4
    numbers = (codes + place.lane % 4 * 8, scales, place.lane % 4 * 0x11 + 0x40)
    return W4A16Lane(*(ptx.emit("mov.b32 {$w0}, {$r0};", [Uint32], number) for number in numbers))


def scale_pair(
    sources: Sources, lane: W4A16Lane, by_stage: Any, row: tuple[int, Any, Any], form: W4A16Form
) -> Any:
    """Return the codes of the two scales of a lane's blocks in one of its rows, the first low."""
    half, output, value = row
    scales = lane.scales + by_stage
    if form.layout != LINEAR.name:
        both = ptx.shared_words(scales + half * 8, 1) + ptx.shared_words(scales + half * 8 + 64, 1)
    elif not form.ragged:
        both = ptx.shared_words(scales + half * (8 * 8 * form.parts), 2)
    else:
        _, outputs, columns = sources.extents
        codes = []
        for block in (0, 64):
            first = ops.minimum(value + block, columns - facts.BLOCK)
            offset = ops.minimum(output, outputs - 1) * (columns // 16) + first // 16
            codes.append(ptx.global_byte(sources.scales + Int64(offset)))
        return codes[0] + codes[1] * 256
    low, high = both
    return ptx.chosen_bytes(low, high, lane.selector)


def add_tile(
    sums: Any,
    sources: Sources,
    place: W4A16Thread,
    step: tuple[Any, Any, Any, Any, Any],
    tile: int,
    form: W4A16Form,
) -> None:
    """Multiply a step of a tile with its activations, and release its stage."""
    lane, by_stage, empty, value, activations = step
    native = TARGETS[form.target].converts_e2m1
    both, read = [], Uint32(0)
    for half in range(2):
        codes = lane.codes + by_stage + half * form.half_bytes
        words = ptx.shared_words(codes, 2) + ptx.shared_words(codes + 32, 2)
        within = place.lane // 4 + 8 * half
        output = facts.row_of(place.tile + place.group * form.tiles + tile, within, form.layout)
        pair = scale_pair(sources, lane, by_stage, (half, output, value), form)
        if form.ragged:  # codes beyond K are zeros, scales may be anything
            inside = [value + block < sources.extents[2] for block in (0, 64)]
            low, high = (ops.select(each, Uint32(0xFF), Uint32(0)) for each in inside)
            pair = pair & (low + high * 256)
        read = read | words[0] | words[2] | pair
        both.append((words, ptx.block_scales(pair, native)))
    for j in range(ptx.WORDS):
        if j == 1:  # not at once: the first products need half of the words only
            ptx.give_back(empty, [read], sources.zero, place.lane == 0)
        low, high = (ptx.decoded(words[j], scales[j // 2], native) for words, scales in both)
        for column, x in enumerate(activations(j)):
            at = (tile * form.columns // facts.COLUMNS + column) * 4
            for pair in range(0, PAIRS, 2):
                four = [low[pair], high[pair], low[pair + 1], high[pair + 1]]
                ptx.products(sums, at, four, x[pair : pair + 2])


@cute.jit
def add_rounds(
    sums: Any,
    sources: Sources,
    place: W4A16Thread,
    memory: W4A16Memory,
    walk: tuple[W4A16Lane, tuple[Uint32, Uint32], Rings, Any],
    form: cutlass.Constexpr,
) -> Rings:
    """Add up a part of K for the tiles of a warp; give back every stage and all activations.

    By row a run may have fewer tiles: that number is the last of `walk`.
    """
    lane, (rounds, kept_count), rings, count = walk
    at, phase, kept_at, kept_phase = rings
    _, _, columns = sources.extents
    numbers = form.tiles * form.columns // 2
    for round_ in cutlass.range(Int32(0), Int32(rounds), unroll=1):
        step = Uint32(round_) * facts.PARTS + place.rank * form.parts + place.part
        first = step * facts.STEP
        value = first + place.lane % 4 * facts.BLOCK
        ptx.await_phase(memory.kept_full + kept_at * 8, kept_phase)
        activations = activations_at(
            memory.kept + kept_at * form.kept_bytes, place, sources.extents, form
        )
        for tile in cutlass.range_constexpr(form.tiles):
            ptx.await_phase(memory.full + at * 8, phase)
            empty = memory.full + EMPTY + at * 8
            inside = first < columns
            if cutlass.const_expr(form.by_row):
                inside = inside & (tile < count)
            if inside:
                taken = (lane, at * form.stage_bytes, empty, value, activations)
                add_tile(sums, sources, place, taken, tile, form)
            else:
                ptx.arrive(empty, place.lane == 0)
            at, phase = next_place(at, phase, form.stages)
        last = [ops.bits_of(sums[i]) for i in range(numbers - form.columns // 2, numbers, 4)]
        empty = memory.kept_full + EMPTY + kept_at * 8
        ptx.give_back(empty, last, sources.zero, place.lane == 0)
        kept_at, kept_phase = next_place(kept_at, kept_phase, kept_count)
    return at, phase, kept_at, kept_phase


def together(form: W4A16Form) -> None:
    """Wait for all warps that multiply."""
    cute.arch.barrier(barrier_id=1, number_of_threads=form.warps * LANES)


@cute.jit
def multiply(
    sources: Sources,
    place: W4A16Thread,
    memory: W4A16Memory,
    counts: tuple[Uint32, Uint32],
    form: cutlass.Constexpr,
) -> None:
    """Add up a part of K for the tiles of a warp, and leave the sums where the stages were."""
    numbers = form.tiles * form.columns // 2
    sums = cute.make_rmem_tensor(numbers, Float32)
    for i in cutlass.range_constexpr(numbers):
        sums[i] = Float32(0.0)
    walk = (lane_of(place, memory, form), counts, first_places(0), None)
    add_rounds(sums, sources, place, memory, walk, form)

    # Sums overwrite the ring: every multiplying warp has to be past its last stage.
    together(form)
    own = memory.ring + place.warp * form.sum_bytes
    for i in cutlass.range_constexpr(numbers // 4):
        four = [ops.bits_of(sums[4 * i + j]) for j in range(4)]
        ptx.store_words(own + facts.lane_offset(i, place.lane), four)


@cute.jit
def add_parts(
    out: Int64,
    extents: tuple[Uint32, Uint32],
    scale: Float32,
    ring: Uint32,
    form: cutlass.Constexpr,
) -> None:
    """Add the parts' sums in the order of their number, scale, round and write."""
    thread, _, _ = cute.arch.thread_idx()
    rows, outputs = extents
    place = place_of(form)
    of_columns, tiles = form.columns // facts.COLUMNS, form.tiles * form.groups
    native = TARGETS[form.target].converts_e2m1
    begin = place.rank * form.threads + Uint32(thread)
    count, stride = ceil_div(rows, 2) * 2 * form.outputs, form.ranks * form.threads
    for each in cutlass.range(Int32(begin), Int32(count), stride, unroll=1):
        within, tile, row = facts.sum_place(Uint32(each), tiles)
        fragment = tile % form.tiles * of_columns + row // facts.COLUMNS
        at = ring + tile // form.tiles * (form.parts * form.sum_bytes)
        at = at + facts.sum_offset(fragment, within, row)
        # All reads first: reads from another thread block are slow, so they have to overlap.
        numbers = [
            ptx.shared_number(
                at + part % form.parts * form.sum_bytes, part // form.parts, form.ranks
            )
            for part in range(facts.PARTS)
        ]
        total = numbers[0]
        for number in numbers[1:]:
            total = ops.add_rn(total, number)
        if cutlass.const_expr(not native):
            total = ops.multiply_rn(total, 2.0**-facts.DECODED_EXPONENT)
        total = ops.multiply_rn(total, scale)
        output = facts.row_of(place.tile + tile, within, form.layout)
        if (output < outputs) & (row < rows):
            ptx.store_rounded(out + Int64((row * outputs + output) * 2), total)


def begin_barriers(memory: W4A16Memory, form: W4A16Form) -> None:
    """Initialise the barriers of all stages and of all rounds kept, with one thread.

    With a lane for each, ptxas makes a loop over lanes, and a fence in each of its turns.
    """
    for first, count in ((memory.full, form.stages), (memory.kept_full, facts.LARGEST_KEPT)):
        for at in range(count):
            # Full: the loading warp arrives, with bytes. Empty: each multiplying warp arrives.
            ptx.begin_barrier(first + at * 8, 1)
            ptx.begin_barrier(first + EMPTY + at * 8, form.warps)


@cute.jit
def set_up(views: Views, place: W4A16Thread, memory: W4A16Memory, form: cutlass.Constexpr) -> None:
    """Fetch the descriptors and begin the barriers."""
    if place.warp == form.warps:
        for atom, _ in views:
            cpasync.prefetch_descriptor(atom)
    if (place.warp == 0) & (place.lane == 0):
        begin_barriers(memory, form)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.kernel
def w4a16_kernel(
    views: Views,
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: the last one loads, the others multiply; then add the parts of K."""
    rows, outputs, columns, kept_count = (Uint32(extent) for extent in extents)
    place, memory = place_of(form), memory_of(form)
    set_up(views, place, memory, form)
    # PDL: the next kernel may set up from here on. This one reads and writes no global memory
    # before the previous kernel, and with it everything that kernel waited for, has ended.
    let_follow()
    if place.warp == form.warps:
        ask_early(views, place, ceil_div(columns, facts.ROUND), form)
    wait_for_front()
    sources = Sources(pointers[2].toint(), (rows, outputs, columns), rows // 128)
    counts = ceil_div(columns, facts.ROUND), kept_count
    scale = ptx.global_number(pointers[3].toint())
    if place.warp == form.warps:
        ask(views, place, memory, counts, (first_places(1), None), form)
    else:
        multiply(sources, place, memory, counts, form)
    if cutlass.const_expr(form.ranks == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    add_parts(pointers[4].toint(), (rows, outputs), scale, memory.ring, form)
    if cutlass.const_expr(form.ranks > 1):
        cute.arch.cluster_arrive()  # shared memory has to exist while others read it
        cute.arch.cluster_wait()


# ---- launches ------------------------------------------------------------------------------------


def view(
    pointer: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], box: tuple[int, ...]
) -> tuple[Any, Any]:
    """Make the TMA atom and tensor for boxes of a global tensor."""
    tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
    operation = cpasync.CopyBulkTensorTileG2SOp()
    made = cpasync.make_tiled_tma_atom(operation, tensor, cute.make_layout(box), box)
    return made.atom, made.tma_tensor


def views_of(pointers: tuple[Any, ...], extents: tuple[Any, Any, Any], form: W4A16Form) -> Views:
    """Make the TMA views of all operands; TMA writes zeros beyond the end of an extent."""
    rows, outputs, columns = extents
    words, blocks = columns // 8, columns // facts.BLOCK
    steps = columns // facts.STEP
    wide = cute.assume(Int64(columns), divby=32)
    by_row = cute.assume(Int64(words), divby=4)
    x_ptr = cute.recast_ptr(pointers[0], dtype=BFloat16)
    codes_ptr = cute.recast_ptr(pointers[1], dtype=Int32)
    if form.ragged:
        activations = view(x_ptr, (columns, rows), (1, wide), facts.activation_box(form))
        codes = view(codes_ptr, (words, outputs), (1, by_row), facts.code_box(form))
    else:
        by_step = (facts.STEP, rows, steps), (1, wide, facts.STEP)
        activations = view(x_ptr, *by_step, facts.activation_box(form))
        codes = view(codes_ptr, (16, outputs, steps), (1, by_row, 16), facts.code_box(form))
    if form.layout != LINEAR.name:
        across = ceil_div(blocks, 4)
        down = cute.assume(Int64(across) * 512, divby=512)
        by_tile = (512, across, ceil_div(outputs, 128)), (1, 512, down)
        return Views(activations, codes, view(pointers[2], *by_tile, facts.scale_box(form)))
    if form.ragged:
        return Views(activations, codes, codes)
    stride = (1, cute.assume(Int64(blocks), divby=16))
    scales = view(pointers[2], (blocks, outputs), stride, facts.scale_box(form))
    return Views(activations, codes, scales)


@cute.jit
def launch_w4a16(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K, rounds kept, grid, shared bytes."""
    rows, outputs, columns, kept_count, blocks, shared_bytes = extents
    views = views_of(pointers, (rows, outputs, columns), form)
    w4a16_kernel(views, pointers, (rows, outputs, columns, kept_count), form).launch(
        grid=[blocks, 1, 1],
        block=[form.threads, 1, 1],
        cluster=[form.ranks, 1, 1] if cutlass.const_expr(form.ranks > 1) else None,
        smem=shared_bytes,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def operands_of(
    activations_MK: Tensor, weights: QuantisedTensor
) -> tuple[W4A16Problem, dict[str, Tensor]]:
    """Return the problem and the operands of weights NVFP4 [N, K] as a checkpoint stores them.

    Raise on other formats, and on tensor scales that do not decode.
    """
    order, decodes = NibbleOrder.LOW_EVEN, ScaleDirection.DECODE
    require(weights, format=NVFP4, direction=decodes, nibble_order=order)
    if activations_MK.ndim != 2 or len(weights.shape) != 2:
        raise ShapeMismatch(
            "activations and weights",
            (tuple(activations_MK.shape), weights.shape),
            "[M, K] and [N, K]",
            "Flatten leading extents of activations; experts need a grouped GEMM.",
        )
    rows, (outputs, columns) = activations_MK.shape[0], weights.shape
    problem = W4A16Problem(rows, outputs, columns, weights.layout.name)
    return problem, {
        "x": activations_MK,
        "codes": weights.codes,
        "scales": weights.block_scale,
        "decode_scale": weights.decode_scale,
    }


def _numbers(of: LaunchContext[W4A16Problem, W4A16Form]) -> tuple[Any, ...]:
    problem, form = of.problem, of.form
    return (
        (
            problem.rows,
            problem.outputs,
            problem.columns,
            facts.rounds_kept(problem, form),
            facts.grid(problem, form),
            facts.shared_bytes(problem, form),
        ),
    )


def _choose_form(problem: W4A16Problem, target: str) -> W4A16Form:
    return facts.choose_form(problem, facts.choose_tactic(problem), target)


def _flat(scales: Tensor) -> Tensor:
    return scales.view(-1) if scales.is_contiguous() else scales


_Operand = Operand[W4A16Problem]
_BYTES = Storage(Uint8, torch.uint8, 16)
KERNEL = Kernel[W4A16Problem, W4A16Form](
    entry=launch_w4a16,
    operands=(
        _Operand(
            "x",
            Storage(Uint8, torch.bfloat16, 16),
            lambda p: (p.rows, p.columns),
            label="activations",
        ),
        _Operand("codes", _BYTES, lambda p: (p.outputs, p.columns // 2)),
        _Operand("scales", _BYTES, lambda p: (p.scale_bytes,), checked=_flat),
        _Operand(
            "decode_scale",
            Storage(Float32, torch.float32, 4),
            lambda _: (1,),
            label="tensor scale",
            checked=as_vector,
        ),
        _Operand(
            "out",
            Storage(BFloat16, torch.bfloat16, 2),
            lambda p: (p.rows, p.outputs),
            output=True,
            label="output",
        ),
    ),
    choose_form=_choose_form,
    kinds=((Int32,) * 6,),
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
