"""BF16 activations times NVFP4 weights (W4A16) by wgmma, up to 64 rows; sm_90a.

out [M, N] = x [M, K] W^T, W as a checkpoint stores it: codes [N, P], block scales linear or 128x4.
Weights are A of wgmma: each thread decodes its part from shared memory into registers. Activations
are B; their K is put in the order of nvfp4_stages within each 64, in which a thread's weights share
a block scale. Code times block scale is exact in BF16, so only the sums over K, in the order of
w4a16_wgmma_problem, and the output round. The sign bit of a scale is ignored.
Roles: `form.groups` warpgroups multiply 64 outputs each; `form.permuting` warps put activations in
  order, in place; one more warp issues TMA. A cluster of `ranks` thread blocks shares K.
Pipeline: `form.stages` stages of 128 numbers of K, activations and codes; full: 1 arrival plus
  bytes; ready: one arrival for each half stage of 32 rows (after a fence to the async proxy);
  empty: one arrival per multiplying warp. Scales of 256 numbers of K are copied with the first of
  their stages, to one of four slots; stages are released in order, so a slot is free when its next
  chunk is copied.
Order: set up barriers; PDL: release the next launch, prefetch the first stages to L2, wait for the
  launch before; the loading warp waits for space and issues boxes; a warpgroup decodes half a stage
  into its fragment while the other half's wgmma run, reads the next stage's codes and scales before
  it starts the second half's, and releases a stage once its wgmma have ended; sums replace the
  stages in shared memory; thread block or cluster barrier; all threads add the runs in order,
  scale, round, write.

The entry point allocates only its result and never synchronises, so it can be captured in a CUDA
graph. Shape letters: M rows, N outputs, K columns, P = K / 2 bytes.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import LINEAR, ceil_div
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import nvfp4_stages as codec
from degarble.kernels.gemm import w4a16_instructions as ptx
from degarble.kernels.gemm import w4a16_wgmma_problem as facts
from degarble.kernels.gemm.sm90_gemm_w4a16 import (
    EMPTY,
    copy_box,
    make_shared_ptr,
    next_place,
    view,
)
from degarble.kernels.gemm.sm90_gemm_w4a16 import KERNEL as BY_MMA
from degarble.kernels.gemm.w4a16_problem import W4A16Problem
from degarble.kernels.gemm.w4a16_wgmma_problem import W4A16WgmmaForm
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Storage
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front
from degarble.kernels.runtime.targets import SM90A

LANES = 32
READY = 2 * EMPTY  # bytes from a full barrier to that of its permuted activations
CHUNKS = range(8)  # of 16 bytes, of half a step of activations
QUAD = 4  # lanes of a warp that have the same rows of a fragment
ROWS_OF_LANE = 2  # of W, eight apart
CODES_OF_STEP = facts.HALVES * ROWS_OF_LANE * codec.WORDS  # words that a thread reads
WORDS_OF_STEP = CODES_OF_STEP + facts.HALVES * ROWS_OF_LANE


# ---- device --------------------------------------------------------------------------------------


class WgmmaPlace(NamedTuple):
    """A thread's position; indices count within the thread block, except `tile` and `rank`."""

    lane: Any
    warp: Any
    tile: Any
    rank: Any  # of its thread block in the cluster


class WgmmaMemory(NamedTuple):
    """Shared addresses; the empty barriers lie EMPTY bytes behind the full ones."""

    activations: Any
    codes: Any
    scales: Any
    full: Any


class WgmmaViews(NamedTuple):
    """Feeds of activations and codes, TMA atom and tensor of scales."""

    activations: mainloop.TmaFeed
    codes: mainloop.TmaFeed
    scales: tuple[Any, Any]


class WgmmaFeedings(NamedTuple):
    """The feeds of activations and codes, cut into boxes."""

    activations: mainloop.BlockFeed
    codes: mainloop.BlockFeed


class WgmmaSources(NamedTuple):
    """Address of the scales in global memory; M, N, K; first step of the run, and its steps."""

    scales: Any
    extents: tuple[Any, Any, Any]
    run: tuple[Any, Any]


def place_of(form: W4A16WgmmaForm) -> WgmmaPlace:
    """Return this thread's position."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    warp = Uint32(cute.arch.make_warp_uniform(thread // LANES))
    return WgmmaPlace(Uint32(thread) % LANES, warp, Uint32(block) // form.ranks, block % form.ranks)


def memory_of(form: W4A16WgmmaForm) -> WgmmaMemory:
    """Divide the shared memory into activations, codes, scales and barriers."""
    shared = Uint32(cute.arch.get_dyn_smem(Uint8, 1024).toint())
    places = (0, form.codes_at, form.scales_at, form.barriers_at)
    return WgmmaMemory(*(shared + place for place in places))


def activation_layout(form: W4A16WgmmaForm) -> Any:
    """Return the layout of activations, half a step each: rows of 128 bytes, swizzled."""
    count, swizzle = facts.HALVES * form.stages, mainloop.Swizzle.K_SW128
    return mainloop.staged_layout(BFloat16, form.columns, facts.HALF, count, swizzle)


def code_layout(form: W4A16WgmmaForm) -> Any:
    """Return the layout of the stages of codes in words: rows of 64 bytes, swizzled."""
    words, swizzle = facts.CODE_BYTES // 4, mainloop.Swizzle.K_SW64
    return mainloop.staged_layout(Uint32, form.outputs, words, form.stages, swizzle)


def shared_at(address: Any, element: Any, layout: Any) -> Any:
    """View shared memory in a swizzled layout."""
    pointer = cute.recast_ptr(make_shared_ptr(element, address, 1024), layout.inner, dtype=element)
    return cute.make_tensor(pointer, layout.outer)


def feedings_of(views: WgmmaViews, memory: WgmmaMemory, form: W4A16WgmmaForm) -> WgmmaFeedings:
    """Cut activations and codes into boxes."""
    activations = shared_at(memory.activations, BFloat16, activation_layout(form))
    codes = shared_at(memory.codes, Uint32, code_layout(form))
    return WgmmaFeedings(
        mainloop.feeding(views.activations, activations, facts.activation_box(form)),
        mainloop.feeding(views.codes, codes, facts.code_box(form)),
    )


def begin_barriers(memory: WgmmaMemory, form: W4A16WgmmaForm) -> None:
    """Initialise the barriers of all stages with one thread.

    With a lane for each, ptxas makes a loop over lanes, and a fence in each of its turns.
    """
    for stage in range(form.stages):
        full = memory.full + 8 * stage
        ptx.begin_barrier(full, 1)
        ptx.begin_barrier(full + EMPTY, form.warps)
        ptx.begin_barrier(full + READY, facts.HALVES * form.row_groups)


def copy_scales(
    views: WgmmaViews, place: WgmmaPlace, chunk: Any, to: Any, barrier: Any, form: W4A16WgmmaForm
) -> None:
    """Start the copies of a chunk's scales; without a barrier to L2 alone."""
    box = (Int32, facts.scale_box(form))
    if form.layout == LINEAR.name:
        copy_box(views.scales, box, (chunk, place.tile), to, barrier)
        return
    first = place.tile * form.outputs // facts.SCALE_ROWS
    for tile in range(form.scale_boxes):
        at = to + tile * facts.SCALE_TILE_BYTES
        copy_box(views.scales, box, (0, chunk, first + tile), at, barrier)


@cute.jit
def ask_early(
    views: WgmmaViews, feedings: WgmmaFeedings, place: WgmmaPlace, run: Any, form: cutlass.Constexpr
) -> None:
    """Prefetch the first stages to L2, before the previous launch has ended: nothing is read."""
    first, steps = run
    for number in cutlass.range(Int32(0), cutlass.min(steps, form.stages), unroll=1):
        step = first + number
        cute.prefetch(feedings.codes.atom, feedings.codes.source[None, Int32(place.tile), step])
        for half in range(facts.HALVES):
            box = facts.HALVES * step + half
            cute.prefetch(feedings.activations.atom, feedings.activations.source[None, 0, box])
        if cutlass.const_expr(not form.ragged):  # noqa: SIM102  the first is settled when traced
            if (step % facts.STEPS_OF_CHUNK == 0) | (number == 0):
                copy_scales(views, place, step // facts.STEPS_OF_CHUNK, Uint32(0), None, form)


@cute.jit
def ask(
    views: WgmmaViews,
    feedings: WgmmaFeedings,
    place: WgmmaPlace,
    memory: WgmmaMemory,
    run: Any,
    form: cutlass.Constexpr,
) -> None:
    """Issue all copies in the order in which they are used, as soon as there is space."""
    first, steps = run
    # Parity 1 of a fresh barrier counts as ended: the first pass over the ring does not wait.
    at, phase = Uint32(0), Uint32(1)
    for number in cutlass.range(Int32(0), steps, unroll=1):
        full, step = memory.full + at * 8, first + number
        ptx.await_phase(full + EMPTY, phase)
        size = form.activation_bytes + form.code_bytes
        begins = (step % facts.STEPS_OF_CHUNK == 0) | (number == 0)
        if cutlass.const_expr(not form.ragged):
            more = ops.select(begins, Uint32(form.slot_bytes), Uint32(0))
            ptx.expect(full, Uint32(size) + more, place.lane == 0)
            if begins:
                chunk = step // facts.STEPS_OF_CHUNK - first // facts.STEPS_OF_CHUNK
                slot = Uint32(chunk) % facts.SLOTS
                to = memory.scales + slot * form.slot_bytes
                copy_scales(views, place, step // facts.STEPS_OF_CHUNK, to, full, form)
        else:
            ptx.expect(full, Uint32(size), place.lane == 0)
        barrier = make_shared_ptr(Int64, full, 8)
        mainloop.issue(feedings.codes, (Int32(place.tile), step), Int32(at), barrier)
        for half in range(facts.HALVES):
            box, stage = (0, facts.HALVES * step + half), facts.HALVES * Int32(at) + half
            mainloop.issue(feedings.activations, box, stage, barrier)
        at, phase = next_place(at, phase, form.stages)


def permute_row(chunks: list[Any]) -> None:
    """Put half a step of a row, eight numbers at each address, in the order of nvfp4_stages."""
    read = [ptx.paired(ptx.shared_words(chunk, ptx.WORDS), False) for chunk in chunks]
    for at, chunk in enumerate(chunks):
        word, pair = divmod(at, QUAD)
        made = [read[codec.WORDS * block + word][pair] for block in range(codec.BLOCKS)]
        ptx.store_words(chunk, made)


@cute.jit
def permute(place: WgmmaPlace, memory: WgmmaMemory, run: Any, form: cutlass.Constexpr) -> None:
    """Put each row of a stage's activations in the order in which weights are decoded.

    The warps take turns at units of up to 32 rows of half a stage; a thread reads all of its row
    before it writes.
    """
    _, steps = run
    units = facts.HALVES * form.row_groups
    size = form.activation_bytes // facts.HALVES
    first = Int32(place.warp) - form.warps
    for unit in cutlass.range(first, steps * units, form.permuting, unroll=1):
        number, within = Uint32(unit) // units, Uint32(unit) % units
        at, phase = number % form.stages, number // form.stages % 2
        full = memory.full + at * 8
        ptx.await_phase(full, phase)
        row = within // facts.HALVES * LANES + place.lane
        if row < form.columns:
            own = memory.activations + (facts.HALVES * at + within % facts.HALVES) * size
            permute_row([own + codec.chunk_of_numbers(row, chunk) * 16 for chunk in CHUNKS])
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through another proxy
        cute.arch.sync_warp()
        ptx.arrive(full + READY, place.lane == 0)


class WgmmaThread(NamedTuple):
    """What a thread reads, computed once: addresses in the first stage and slot; rows of W."""

    full: Any  # of the first stage
    codes: Any  # of block q in row g, in the first half of a step
    scales: tuple[Any, Any]  # of rows g and g + 8
    outputs: tuple[Any, Any]  # the same rows of W
    block: Any  # q
    chosen: Any  # selects byte q of the words of both rows


def thread_of(place: WgmmaPlace, memory: WgmmaMemory, form: W4A16WgmmaForm) -> WgmmaThread:
    """Return what a thread reads."""
    row, block = facts.row_of(place.warp, place.lane // QUAD), place.lane % QUAD
    first = facts.first_scale_row(place.tile, form)
    rows = (row, row + 8)
    # TMA's 64-byte swizzle, which is the same eight rows further on.
    chunk = (block // 2) ^ (row // 2 % 4)
    codes = memory.codes + row * facts.CODE_BYTES + chunk * 16 + block % 2 * (codec.BLOCK // 2)
    scales = tuple(memory.scales + facts.scale_word(first + each, form) for each in rows)
    # Trap: ptxas would compute these anew in every step, from the thread's number, which comes
    # late. It does not know what a shuffle gives.
    made = (memory.full, codes, *scales, block)
    kept = [Uint32(cute.arch.shuffle_sync(each, place.lane)) for each in made]
    full, codes, upper, lower, block = kept
    return WgmmaThread(
        full,
        codes,
        (upper, lower),
        tuple(place.tile * form.outputs + each for each in rows),
        block,
        block + (block + 4) * 256,
    )


def scale_words(
    sources: WgmmaSources, thread: WgmmaThread, row: int, number: Any, form: W4A16WgmmaForm
) -> list[Any]:
    """Return the four scales of one of a thread's rows in each half of a step."""
    if not form.ragged:
        # A run may begin with the second step of a chunk.
        step = Uint32(number) + Uint32(sources.run[0]) % facts.STEPS_OF_CHUNK
        slot = step // facts.STEPS_OF_CHUNK % facts.SLOTS * form.slot_bytes
        within = step % facts.STEPS_OF_CHUNK * facts.HALVES * facts.scale_half(form)
        address = thread.scales[row] + slot + within
        if form.layout == LINEAR.name:
            return ptx.shared_words(address, facts.HALVES)
        halves = range(facts.HALVES)
        return [ptx.shared_words(address + h * facts.scale_half(form), 1)[0] for h in halves]
    # Two blocks at a time, because K / 16 is even; the last two may lie beyond the row.
    _, outputs, columns = sources.extents
    blocks, output = columns // codec.BLOCK, ops.minimum(thread.outputs[row], outputs - 1)
    start = Uint32(sources.run[0] + number) * facts.HALVES * codec.BLOCKS
    words = []
    for first in (start, start + codec.BLOCKS):
        low, high = (
            ptx.global_half(
                sources.scales + Int64(output * blocks + ops.minimum(first + more, blocks - 2))
            )
            for more in (0, 2)
        )
        words.append(low + high * 65_536)
    return words


def scales_of(
    sources: WgmmaSources, thread: WgmmaThread, number: Any, both: Any, form: W4A16WgmmaForm
) -> list[Any]:
    """Return the scales of block q of both rows, for each half of a step; 0 beyond K."""
    upper, lower = both
    blocks = sources.extents[2] // codec.BLOCK
    pairs = []
    for half in range(facts.HALVES):
        codes = ptx.chosen_bytes(upper[half], lower[half], thread.chosen)
        mask = Uint32(facts.SCALE_CODES)
        if form.ragged or form.layout != LINEAR.name:  # linear scales of whole chunks have no rest
            first = (Uint32(sources.run[0] + number) * facts.HALVES + half) * codec.BLOCKS
            mask = ops.select(first + thread.block < blocks, mask, Uint32(0))
        pairs.append(codec.scale_pairs(ops.shift_left(codes & mask, 4)))
    return pairs


def codes_of(thread: WgmmaThread, stage: Any, form: W4A16WgmmaForm) -> list[Any]:
    """Read block q of both rows, for each half of a step."""
    first = thread.codes + stage * form.code_bytes
    # The swizzle leaves the halves 32 bytes apart, in either order.
    places = [at + row * 8 * facts.CODE_BYTES for at in (first, first ^ 32) for row in range(2)]
    return [word for at in places for word in ptx.shared_words(at, codec.WORDS)]


def read_step(
    sources: WgmmaSources, thread: WgmmaThread, at: tuple[Any, Any], held: Any, form: Any
) -> None:
    """Read codes and scales of a step: of both rows, for each half."""
    number, stage = at
    words = codes_of(thread, stage, form)
    for row in range(ROWS_OF_LANE):
        words += scale_words(sources, thread, row, number, form)
    for i, word in enumerate(words):
        held[i] = word


def step_of(
    sources: WgmmaSources, thread: WgmmaThread, number: Any, held: Any, form: Any
) -> tuple[list[list[list[Any]]], list[Any]]:
    """Return what `read_step` read: codes by half and row, and the halves' scales."""
    words = [held[i] for i in range(WORDS_OF_STEP)]
    rows = [words[i : i + codec.WORDS] for i in range(0, CODES_OF_STEP, codec.WORDS)]
    codes = [rows[i : i + ROWS_OF_LANE] for i in range(0, len(rows), ROWS_OF_LANE)]
    upper = words[CODES_OF_STEP : CODES_OF_STEP + facts.HALVES]
    lower = words[CODES_OF_STEP + facts.HALVES :]
    return codes, scales_of(sources, thread, number, (upper, lower), form)


def decode_half(codes: list[list[Any]], scales: Any, fragment: Any) -> None:
    """Decode a thread's part of half a step's weights into wgmma's registers.

    A thread has block q of rows g and g + 8; a fragment has four words for each step of 16.
    """
    words = cute.recast_tensor(fragment, Uint32)
    for row, read in enumerate(codes):
        pairs = codec.decoded(read, codec.doubled(scales, row == 1))
        for step in range(codec.BLOCKS):
            words[4 * step + row] = pairs[2 * step]
            words[4 * step + 2 + row] = pairs[2 * step + 1]


@cute.jit
def multiply(
    sources: WgmmaSources, place: WgmmaPlace, memory: WgmmaMemory, form: cutlass.Constexpr
) -> None:
    """Add up a run of K for a warpgroup's outputs, and leave the sums where the stages were.

    Each half of a step has a fragment of its own, so that one is decoded while the other one's
    wgmma run: a wgmma reads its registers until it is waited for.
    """
    mma = mainloop.mma_of(BFloat16, form.columns, warpgroup.OperandSource.RMEM)
    sums = mainloop.sums_of(mma, form.columns)
    activations = shared_at(memory.activations, BFloat16, activation_layout(form))
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(activations))
    fragments = [
        mma.make_fragment_A(mma.partition_shape_A((facts.ROWS, facts.HALF)))
        for _ in range(facts.HALVES)
    ]
    sums.fill(0.0)
    thread = thread_of(place, memory, form)
    at, phase, before = Uint32(0), Uint32(0), Uint32(0)
    held = cute.make_rmem_tensor(WORDS_OF_STEP, Uint32)
    here = Uint32(0)
    for number in cutlass.range(Int32(0), sources.run[1], unroll=1):
        if here == 0:
            ptx.await_phase(thread.full + at * 8, phase)
            read_step(sources, thread, (number, at), held, form)
        codes, scales = step_of(sources, thread, number, held, form)
        following, turned = next_place(at, phase, form.stages)
        for half in cutlass.range_constexpr(facts.HALVES):
            warpgroup.wait_group(1)  # the wgmma of this half of the step before
            if cutlass.const_expr(half == facts.HALVES - 1):
                # Those of the step before have read its activations, and their registers hold what
                # was decoded from its codes and scales.
                ptx.arrive(thread.full + EMPTY + before * 8, (place.lane == 0) & (number > 0))
            decode_half(codes[half], scales[half], fragments[half])
            if cutlass.const_expr(half == 0):
                ptx.await_phase(thread.full + READY + at * 8, phase)
            else:
                # Issued after the wgmma, the test and the reads would be served only once those
                # have begun.
                # Trap: a loop that waits here would let ptxas run all wgmma one by one.
                here = ptx.has_ended(thread.full + following * 8, turned)
                # Addresses depend on the answer, so nothing is read before it has come.
                next_step = number + Int32(here), ops.select(here == 1, following, at)
                read_step(sources, thread, next_step, held, form)
            stage = b[None, None, None, facts.HALVES * Int32(at) + half]
            mainloop.multiply_stage(mma, sums, fragments[half], stage, begins=False)
        before = at
        at, phase = following, turned
    leave_sums(sums, place, memory, form)


@cute.jit
def leave_sums(sums: Any, place: WgmmaPlace, memory: WgmmaMemory, form: cutlass.Constexpr) -> None:
    """Leave a warpgroup's sums where the stages were."""
    warpgroup.wait_group(0)
    # Sums overwrite the stages: every multiplying warp has to be past its last one.
    cute.arch.barrier(barrier_id=1, number_of_threads=form.warps * LANES)
    own = memory.activations + facts.row_of(place.warp, place.lane // QUAD) * 4
    for i in range(cute.size(sums)):
        # Four registers for each eight columns: two columns of row g, then of row g + 8.
        column = i // 4 * 8 + i % 2
        at_sum = own + (place.lane % QUAD * 2 + column) * form.sum_stride + i // 2 % 2 * 32
        ptx.store_number(at_sum, sums[i])


def scaled_total(numbers: list[Any], scale: Any) -> Any:
    """Add the runs' sums in order, and scale; what is decoded is times a power of two."""
    total = numbers[0]
    for number in numbers[1:]:
        total = ops.add_rn(total, number)
    total = ops.multiply_rn(total, 2.0**-codec.PRODUCT_EXPONENT)
    return ops.multiply_rn(total, scale)


def addition_of(
    number: Any, extents: tuple[Any, Any], place: WgmmaPlace, memory: WgmmaMemory, form: Any
) -> tuple[Any, list[list[Any]]]:
    """Return the place in the result of four outputs of a row, and their sums of each run.

    Whatever lies behind the last row or output is the last one again.
    """
    rows, outputs = extents
    across, first = form.outputs // 4, place.tile * form.outputs
    each = ops.minimum(number, rows * across - 1)
    row = each // across
    output = ops.minimum(each % across * 4, outputs - first - 4)
    at = memory.activations + row * form.sum_stride + output * 4
    runs = [ptx.shared_numbers(at, rank, form.ranks) for rank in range(form.ranks)]
    return row * outputs + first + output, runs


@cute.jit
def add_runs(
    out: Int64,
    extents: tuple[Uint32, Uint32],
    scale: Float32,
    memory: WgmmaMemory,
    form: cutlass.Constexpr,
) -> None:
    """Add the runs' sums in order, four outputs a thread; scale, round and write.

    All reads first: reads from another thread block are slow, so they have to overlap. A read
    without a store behind it could be under way when this thread block says it left: so threads
    that have no outputs of their own write others' as well, the same numbers.
    """
    thread, _, _ = cute.arch.thread_idx()
    place = place_of(form)
    begin, stride = Uint32(place.rank) * form.threads + Uint32(thread), form.ranks * form.threads
    made = [
        addition_of(begin + turn * stride, extents, place, memory, form)
        for turn in range(form.turns)
    ]
    for turn in cutlass.range_constexpr(form.turns):
        at, runs = made[turn]
        numbers = [scaled_total([run[i] for run in runs], scale) for i in range(4)]
        ptx.store_four_rounded(out + Int64(at * 2), numbers)


@cute.kernel
def w4a16_wgmma_kernel(
    views: WgmmaViews,
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warp: the last one loads, the others multiply; then add the runs of K."""
    rows, outputs, columns = (Uint32(extent) for extent in extents)
    place, memory = place_of(form), memory_of(form)
    run = facts.run_of(Int32(place.rank), Int32(columns), form.ranks, cutlass.min)
    if place.warp == form.warps + form.permuting:
        for atom in (views.activations.atom, views.codes.atom, views.scales[0]):
            cpasync.prefetch_descriptor(atom)
    if (place.warp == 0) & (place.lane == 0):
        begin_barriers(memory, form)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    # PDL: the next kernel may set up from here on. This one reads and writes no global memory
    # before the previous kernel, and with it everything that kernel waited for, has ended.
    let_follow()
    if place.warp == form.warps + form.permuting:
        ask_early(views, feedings_of(views, memory, form), place, run, form)
    wait_for_front()
    scale = ptx.global_number(pointers[3].toint())
    if place.warp == form.warps + form.permuting:
        ask(views, feedings_of(views, memory, form), place, memory, run, form)
    elif place.warp >= form.warps:
        permute(place, memory, run, form)
    else:
        sources = WgmmaSources(pointers[2].toint(), (rows, outputs, columns), run)
        multiply(sources, place, memory, form)
    if cutlass.const_expr(form.ranks == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    add_runs(pointers[4].toint(), (rows, outputs), scale, memory, form)
    if cutlass.const_expr(form.ranks > 1):
        # Shared memory has to exist while others read it. Relaxed: what was read is in what this
        # thread has written, and an arrival that releases would wait for those writes.
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def views_of(
    pointers: tuple[Any, ...], extents: tuple[Any, Any, Any], form: W4A16WgmmaForm
) -> WgmmaViews:
    """Make the TMA views of all operands; TMA writes zeros beyond the end of an extent."""
    rows, outputs, columns = extents
    words, blocks = columns // 8, columns // codec.BLOCK
    x_ptr, codes_ptr, scales_ptr = (
        cute.recast_ptr(pointer, dtype=element)
        for pointer, element in zip(pointers[:3], (BFloat16, Uint32, Int32), strict=True)
    )
    wide, by_row = cute.assume(Int64(columns), divby=32), cute.assume(Int64(words), divby=4)
    matrices = (
        cute.make_tensor(x_ptr, cute.make_layout((rows, columns), stride=(wide, 1))),
        cute.make_tensor(codes_ptr, cute.make_layout((outputs, words), stride=(by_row, 1))),
    )
    layouts = (activation_layout(form), code_layout(form))
    boxes = (facts.activation_box(form), facts.code_box(form))
    x, codes = map(mainloop.feed_of, matrices, layouts, boxes)
    box = facts.scale_box(form)
    if form.ragged:  # a view that no copy uses
        return WgmmaViews(x, codes, view(pointers[2], (16, 1), (1, 16), (16, 1)))
    if form.layout == LINEAR.name:
        stride = (1, cute.assume(Int64(blocks // 4), divby=4))
        return WgmmaViews(x, codes, view(scales_ptr, (blocks // 4, outputs), stride, box))
    across = ceil_div(blocks, codec.BLOCKS)
    down = cute.assume(Int64(across) * facts.SCALE_ROWS, divby=facts.SCALE_ROWS)
    shape = (facts.SCALE_ROWS, across, ceil_div(outputs, facts.SCALE_ROWS))
    return WgmmaViews(x, codes, view(scales_ptr, shape, (1, facts.SCALE_ROWS, down), box))


@cute.jit
def launch_w4a16_wgmma(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on the extents M, N, K and the number of thread blocks."""
    rows, outputs, columns, blocks = extents
    views = views_of(pointers, (rows, outputs, columns), form)
    w4a16_wgmma_kernel(views, pointers, (rows, outputs, columns), form).launch(
        grid=[blocks, 1, 1],
        block=[form.threads, 1, 1],
        cluster=[form.ranks, 1, 1] if cutlass.const_expr(form.ranks > 1) else None,
        smem=form.shared_bytes,
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[W4A16Problem, W4A16WgmmaForm]) -> tuple[Any, ...]:
    problem = of.problem
    blocks = facts.grid(problem, of.form)
    return ((problem.rows, problem.outputs, problem.columns, blocks),)


_OUT = Storage(BFloat16, torch.bfloat16, 8)  # four outputs are written at once
KERNEL = Kernel[W4A16Problem, W4A16WgmmaForm](
    entry=launch_w4a16_wgmma,
    operands=(*BY_MMA.operands[:-1], replace(BY_MMA.operands[-1], storage=_OUT)),
    choose_form=facts.choose_form,
    kinds=((Int32,) * 4,),
    numbers=_numbers,
    work=lambda problem: problem.rows,
    target=SM90A,
)
compile_form = KERNEL.compile_form
