"""Run one role of the sm_100a sparse attention at a time, to bring it up on a new GPU.

Three kernels call the roles of sm100_attention_kernel unchanged:

* `load`: writes tiles and masks out as they lie in shared memory;
* `multiply`: reads tiles and shares from memory, writes logits and sums there;
* `weigh`: reads logits and masks from memory, writes shares, peaks and totals there, and rescales
  an output of ones to each new peak.

Other warps replace a missing partner as far as the barriers need. One token, 64 heads, one split.
Compiled, never run. sm100_attention_minute.py holds the expected results.
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import gather
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import sm90_attention_kernel as hopper
from degarble.kernels.attention import sm100_attention_kernel as attention
from degarble.kernels.attention.problem import AttentionForm, AttentionProblem
from degarble.kernels.attention.sm90_attention_kernel import AttentionAddresses, AttentionLane
from degarble.kernels.attention.sm100_attention_kernel import Sm100AttentionMemory
from degarble.kernels.gemm import tcgen05
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer
from degarble.kernels.runtime.targets import TARGETS

PARTS = ("load", "multiply", "weigh")
STANDING_IN = 6  # number of the named barrier of the warpgroup that stands in for products
CHUNK = gather.CHUNK
MASK_BYTES = facts.MASK_BYTES // facts.STAGES
SHARE_BYTES = 2 * facts.HEADS * facts.TILE
THREADS = hopper.CONSUMER_THREADS


class Images(NamedTuple):
    """Addresses of what parts take and leave; S tiles."""

    tiles: Any  # [S, bytes] as they lie in shared memory
    masks: Any  # [S, 16 bytes]
    logits: Any  # float32 [S, 64, 64]
    shares: Any  # BF16 [S, 64, 64]: as they lie where weighing leaves them, plain where they come
    sums: Any  # float32 [64, 512]
    stats: Any  # float32 [64, 2]: peaks and totals


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def probe_kernel(
    addresses: AttentionAddresses,
    extents: tuple[Any, ...],
    images: Images,
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
) -> None:
    """Run one role, and let other warps stand in for its partners."""
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory, registers = attention.prepared(form), facts.REGISTERS[form.width]
    place = hopper.place_of(extents)
    lists, widths, walk = hopper.lists_of(addresses, extents, place, form)
    if group == facts.GATHERING_GROUP:
        cute.arch.setmaxregister_decrease(registers.gathering)
        if cutlass.const_expr(part == "load"):
            plan = facts.sm100_gather_plan(form.format)
            begin = gather.first_stage()
            gather.producer_of(form.format)(lists, widths, walk, memory.places, plan, begin)
    elif group == facts.MULTIPLYING_GROUP:
        cute.arch.setmaxregister_decrease(registers.multiplying)
        if cutlass.const_expr(part == "multiply"):
            multiply_alone(memory, walk[2])
        if cutlass.const_expr(part == "weigh"):
            stand_in(memory, attention.lane_of(thread, Int32(0)), images, walk[2])
    else:
        cute.arch.setmaxregister_increase(registers.weighing)
        lane = attention.lane_of(thread, group)
        if cutlass.const_expr(part == "load"):
            write_tiles(memory, images, walk[2], form)
        if cutlass.const_expr(part == "multiply"):
            chunks = form.width // rows.HALF
            hopper.load_queries(addresses.q, place, memory.queries_at, chunks)
            attention.meet_multiplier()
            bring_tiles(memory, lane, images, walk[2], form)
        if cutlass.const_expr(part == "weigh"):
            weigh_alone(memory, lane, images, walk[2])
        if cutlass.const_expr(part != "load"):
            write_sums(memory, lane, images, walk[2])
        attention.give_back(memory.address)


@cute.jit
def multiply_alone(memory: Sm100AttentionMemory, steps: Any) -> None:
    """Let the multiplying warp multiply."""
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == facts.MULTIPLYING_WARP:
        attention.multiply_tiles(memory, steps)


def together() -> None:
    """Let the weighing warpgroups meet."""
    cute.arch.barrier(barrier_id=hopper.EXCHANGE, number_of_threads=THREADS)


@cute.jit
def copy_out(source: Any, target: Any, size: cutlass.Constexpr) -> None:
    """Copy from shared memory to memory, 16 bytes a thread; whoever calls it has 256 threads."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(-(-size // (CHUNK * THREADS))):
        at = Uint32(i * THREADS + thread % THREADS) * CHUNK
        if at < size:
            ptx.store_16(target + Int64(at), shared.shared_words(source + at, 4))


@cute.jit
def copy_in(source: Any, target: Any, size: cutlass.Constexpr) -> None:
    """Copy from memory to shared memory, 16 bytes a thread of 256."""
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(-(-size // (CHUNK * THREADS))):
        at = Uint32(i * THREADS + thread % THREADS) * CHUNK
        there = ops.select(at < size, Uint32(1), Uint32(0))
        words = ptx.words_if(source + Int64(at), there, 4)
        ptx.store_16_shared_if(target + at, words, at < size)


@cute.jit
def write_tiles(
    memory: Sm100AttentionMemory, images: Images, steps: Any, form: cutlass.Constexpr
) -> None:
    """Write tile after tile, and its masks, to memory as they lie; give each back."""
    thread, _, _ = cute.arch.thread_idx()
    size = facts.TILE * form.width * 2
    stage, phase = Uint32(0), Uint32(0)
    places = memory.places
    for step in cutlass.range(Int32(0), steps, unroll=1):
        shared.await_phase(places.full + stage * 8, phase)
        copy_out(places.tiles + stage * size, images.tiles + Int64(step) * size, size)
        masks = images.masks + Int64(step) * MASK_BYTES
        copy_out(places.masks + stage * MASK_BYTES, masks, MASK_BYTES)
        together()
        shared.arrive(places.full + (facts.STAGES + stage) * 8, thread == 0)
        stage, phase = gather.shared_next(stage, phase)


@cute.jit
def bring_tiles(
    memory: Sm100AttentionMemory,
    lane: AttentionLane,
    images: Images,
    steps: Any,
    form: cutlass.Constexpr,
) -> None:
    """Bring tile after tile and its shares from memory; write its logits out."""
    size = facts.TILE * form.width * 2
    stage, phase = Uint32(0), Uint32(1)
    places, barriers = memory.places, memory.barriers
    start = Uint32(tcgen05.base_of(memory.address).toint())
    for step in cutlass.range(Int32(0), steps, unroll=1):
        number = Uint32(step)
        shared.await_phase(places.full + (facts.STAGES + stage) * 8, phase)
        copy_in(images.tiles + Int64(step) * size, places.tiles + stage * size, size)
        # As many arrivals as the warps that bring keys make: 128 threads, and four warps.
        shared.arrive(places.full + stage * 8, (lane.half == 0) | (lane.lane == 0))
        buffer = number % facts.LOGITS
        shared.await_phase(barriers.logits + buffer * 8, number // facts.LOGITS % 2)
        tcgen05.fence("after")
        column = facts.first_columns()[1] + Uint32(lane.half) * facts.KEYS
        at = start + column + buffer * facts.TILE + attention.lanes_of(lane, 0)
        found = attention.read_fragment(at, attention.REPEATS_OF_LOGITS)
        write_logits(found, lane, images, step)
        if step > 0:
            shared.await_phase(barriers.sums, (number - 1) % 2)
        bring_shares(memory, lane, images, step)
        attention.hand_over(memory, lane)
        stage, phase = gather.shared_next(stage, phase)


def key_of(lane: AttentionLane, block: int) -> Any:
    """Return the first of two neighbouring keys of a thread."""
    return Uint32(lane.half) * facts.KEYS + block * 8 + Uint32(lane.quad) * 2


def place_in(step: Any, row: Any, key: Any) -> Any:
    """Return the number of a place in [S, 64, 64]."""
    return (Int64(step) * facts.HEADS + Int64(row)) * facts.TILE + Int64(key)


def write_logits(found: list[Any], lane: AttentionLane, images: Images, step: Any) -> None:
    """Write a thread's logits to memory."""
    for row in range(2):
        for block in range(hopper.BLOCKS):
            at = place_in(step, lane.row + 8 * row, key_of(lane, block))
            pair = found[block * 4 + 2 * row : block * 4 + 2 * row + 2]
            ptx.store_pair(images.logits + at * 4, *pair)


def bring_shares(
    memory: Sm100AttentionMemory, lane: AttentionLane, images: Images, step: Any
) -> None:
    """Bring a thread's shares from memory to where tcgen05 reads them."""
    for row in range(2):
        for block in range(hopper.BLOCKS):
            at = place_in(step, lane.row + 8 * row, key_of(lane, block))
            word = ptx.word_at(images.shares + at * 2)
            chunk = Uint32(lane.half) * (facts.KEYS // rows.HALF) + block
            place = gather.address_in_tile(Uint32(lane.row) + 8 * row, chunk)
            ptx.store_word(memory.shares_at + place + Uint32(lane.quad) * 4, word)


@cute.jit
def weigh_alone(
    memory: Sm100AttentionMemory, lane: AttentionLane, images: Images, steps: Any
) -> None:
    """Weigh every tile, from an output of ones; leave peaks and totals."""
    start = Uint32(tcgen05.base_of(memory.address).toint())
    for i in cutlass.range_constexpr(facts.COLUMNS // attention.COLUMNS_AT_ONCE):
        at = start + attention.lanes_of(lane, lane.half) + i * attention.COLUMNS_AT_ONCE
        attention.write_fragment(at, [Float32(1.0)] * attention.NUMBERS_AT_ONCE)
    attention.end_of_writes()
    peaks, totals = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    peaks.fill(-float("inf"))
    totals.fill(0.0)
    attention.weigh_tiles(memory, lane, steps, (peaks, totals), Float32(1.0))
    hopper.share_totals(memory, lane, totals)
    for row in cutlass.range_constexpr(2):
        if (lane.quad == 0) & (lane.half == 0):
            to = images.stats + Int64(lane.row + 8 * row) * 8
            ptx.store_pair(to, peaks[row], totals[row])


@cute.jit
def stand_in(memory: Sm100AttentionMemory, lane: AttentionLane, images: Images, steps: Any) -> None:
    """Stand in for gather and products: logits and masks from memory, shares out to it."""
    thread, _, _ = cute.arch.thread_idx()
    start = Uint32(tcgen05.base_of(memory.address).toint())
    stage, phase = Uint32(0), Uint32(0)
    first = thread % facts.WARPGROUP == 0
    places, barriers = memory.places, memory.barriers
    for step in cutlass.range(Int32(0), steps, unroll=1):
        number = Uint32(step)
        buffer = number % facts.LOGITS
        if thread % facts.WARPGROUP < MASK_BYTES // 4:
            at = Uint32(thread % facts.WARPGROUP) * 4
            word = ptx.word_at(images.masks + Int64(step) * MASK_BYTES + Int64(at))
            ptx.store_word(places.masks + stage * MASK_BYTES + at, word)
        column = facts.first_columns()[1] + buffer * facts.TILE
        for block in cutlass.range_constexpr(facts.TILE // facts.REPEAT_COLUMNS):
            to = start + column + block * facts.REPEAT_COLUMNS
            numbers = logits_of(lane, images, step, block)
            attention.write_fragment(to + attention.lanes_of(lane, 0), numbers)
        attention.end_of_writes()
        tcgen05.fence("before")
        cute.arch.barrier(barrier_id=STANDING_IN, number_of_threads=facts.WARPGROUP)
        shared.arrive(places.full + stage * 8, lane.lane >= 0)
        shared.arrive(places.full + stage * 8, lane.lane == 0)
        shared.arrive(barriers.logits + buffer * 8, first)
        shared.await_phase(barriers.shares, number % 2)
        for i in cutlass.range_constexpr(SHARE_BYTES // (CHUNK * facts.WARPGROUP)):
            at = Uint32(i * facts.WARPGROUP + thread % facts.WARPGROUP) * CHUNK
            words = shared.shared_words(memory.shares_at + at, 4)
            ptx.store_16(images.shares + Int64(step) * SHARE_BYTES + Int64(at), words)
        cute.arch.barrier(barrier_id=STANDING_IN, number_of_threads=facts.WARPGROUP)
        shared.arrive(barriers.sums, first)
        stage, phase = gather.shared_next(stage, phase)


def logits_of(lane: AttentionLane, images: Images, step: Any, block: int) -> list[Any]:
    """Read a thread's logits of eight keys from memory, in the order of a fragment."""
    found = []
    for row in range(2):
        at = place_in(step, lane.row + 8 * row, key_of(lane._replace(half=0), block))
        found += [ptx.single_at(images.logits + (at + i) * 4) for i in range(2)]
    return found


@cute.jit
def write_sums(
    memory: Sm100AttentionMemory, lane: AttentionLane, images: Images, steps: Any
) -> None:
    """Write a thread's part of the output to memory."""
    sums = attention.sums_of(memory, lane, steps)
    for row in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(facts.COLUMNS // 8):
            column = Uint32(lane.half) * facts.COLUMNS + block * 8 + Uint32(lane.quad) * 2
            at = Int64(lane.row + 8 * row) * rows.WIDTH + Int64(column)
            index = block * 4 + 2 * row
            ptx.store_pair(images.sums + at * 4, sums[index], sums[index + 1])


@cute.jit
def launch_probe(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    part: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a part on one thread block."""
    count = len(AttentionAddresses._fields)
    at = [Int64(each.toint()) for each in pointers]
    probe_kernel(AttentionAddresses(*at[:count]), extents, Images(*at[count:]), form, part).launch(
        grid=[1, 1, 1],
        block=[facts.SM100_THREADS, 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_part(part: str, form: AttentionForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a part; needs no GPU."""
    if part not in PARTS:
        raise UnknownName.among("part of sparse attention", part, PARTS)
    names = (*AttentionAddresses._fields, *Images._fields)
    pointers = tuple(pointer(Uint8, None, 4) for _ in names)
    extents = tuple(Int32(1) for _ in range(12))
    arguments = (pointers, extents, form, part, any_stream())
    return compile_kernel(launch_probe, arguments, TARGETS[form.target], settings)


def launch(
    kernel: CompiledKernel,
    problem: AttentionProblem,
    operands: tuple[Tensor | None, Tensor | None, Tensor | None],
    images: Images,
) -> None:
    """Launch a part on one token with one list: queries, slots, cache; what it lacks is None."""
    if problem.tokens != 1 or problem.entries is not None or problem.lengths:
        raise InvalidArgument(
            "problem of a part",
            (problem.tokens, len(problem.lists), problem.lengths),
            "one token, one list, no lengths",
            "Cut it down.",
        )
    q, slots, cache = operands
    given = dict.fromkeys(AttentionAddresses._fields) | {"q": q, "near": slots, "near_cache": cache}
    pages = problem.window.pages
    of_list = (problem.window.width, pages.entries, pages.stride, pages.slots)
    numbers = (1, problem.heads, 1, problem.tiles, *of_list, 0, *of_list[1:])
    pointers = tuple(pointer(Uint8, tensor, 4) for tensor in (*given.values(), *images))
    device = images.tiles.device.index or 0
    kernel(pointers, tuple(map(Int32, numbers)), current_stream(device))
