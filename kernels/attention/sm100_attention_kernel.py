"""Sparse attention on Blackwell (sm_100a): softmax(scale * Q K^T) V over listed cache entries.

Compiled, never run: no sm_100a device was available. A thread block has one token, 64 heads and one
split of the keys; tiles of 64 keys; formula, operands and layouts are those of
sm90_attention_kernel. The shares are taken relative to the running peak of every tile, without
Hopper's leeway; a factor of one is skipped, which changes no bit. 512 threads:

* Warpgroups 0, 1 (softmax): each has 32 keys of a tile and 256 columns of the output, which stays
  in tensor memory and is rescaled there.
* Warpgroup 2 (producer): paged cache to shared memory, one warpgroup for every format.
* Warpgroup 3, first warp (MMA): tcgen05 products of 64 rows, one tile of logits ahead.
* `full[stage]`, 2 stages: every producer thread (when its copies land) plus every producer warp.
* `empty[stage]`: 1, tcgen05.commit of the products with the tile's values.
* `logits[2]`, `sums`: 1, tcgen05.commit. `shares`: 8, one for each softmax warp.
* Named barriers of 256: 1 row maxima written, 2 row maxima read, 3 queries, 5 output read; of 288
  (with the MMA warp): 4 queries.

One tile: full; logits (MMA); softmax warps read them, exchange maxima, compute shares; wait for the
last tile's sums; rescale the output; shares in BF16 to shared memory; MMA adds P V to both halves.
Memory accesses of threads and tcgen05 are ordered by a fence on either side.
"""

from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import tcgen05 as instructions

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import exchange, gather
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention import sm90_attention_kernel as hopper
from degarble.kernels.attention.problem import AttentionForm
from degarble.kernels.attention.sm90_attention_kernel import (
    AttentionAddresses,
    AttentionBlock,
    AttentionLane,
)
from degarble.kernels.gemm import tcgen05
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.gemm.w4a16_instructions import emit
from degarble.kernels.primitives import kv_problem as rows

# --------------------------------------------------------------------------------------------------
# PTX of sparse attention on Blackwell: tensor-memory fragments and MMA arrivals at barriers.
#
# A read or write of 16 lanes by 256 bits gives thread t what wgmma gives it: of row t // 4 and of
# the row eight further on, columns 2 (t % 4) and the next, eight columns a repeat. The wait is in
# the same asm text as the read, so that nothing can use a register before it is loaded.


def read_fragment(address: Any, repeats: int) -> list[Any]:
    """Read `repeats` repeats from an address in tensor memory; complete on return."""
    count = repeats * facts.REPEAT_REGISTERS
    names = ", ".join(f"{{$w{i}}}" for i in range(count))
    text = (
        f"tcgen05.ld.sync.aligned.16x256b.x{repeats}.b32 {{{names}}}, [{{$r0}}];\n"
        "tcgen05.wait::ld.sync.aligned;"
    )
    return list(emit(text, [Float32] * count, address))


def write_fragment(address: Any, numbers: list[Any]) -> None:
    """Issue the write of each thread's numbers to an address in tensor memory."""
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(len(numbers)))
    repeats = len(numbers) // facts.REPEAT_REGISTERS
    text = f"tcgen05.st.sync.aligned.16x256b.x{repeats}.b32 [{{$r0}}], {{{names}}};"
    emit(text, [], address, *numbers)


def end_of_writes() -> None:
    """Wait for this warp's writes to tensor memory."""
    emit("tcgen05.wait::st.sync.aligned;", [])


def arrive_behind_products(barrier: Any) -> None:
    """Arrive once at a barrier when this thread's matrix instructions so far are done."""
    with cute.arch.elect_one():
        text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];"
        emit(text, [], Uint32(barrier))


# --------------------------------------------------------------------------------------------------
# Sparse attention on Blackwell (sm_100a): softmax(scale * Q K^T) V over listed cache entries.

QUERIES_THERE, SUMS_READ = 4, 5  # named barriers, after those of sm90_attention_kernel
WARPS_THAT_WEIGH = hopper.CONSUMER_THREADS // rows.LANES
REPEATS_OF_LOGITS = facts.repeats(facts.KEYS)
AT_ONCE = facts.REPEATS_AT_ONCE
COLUMNS_AT_ONCE = AT_ONCE * facts.REPEAT_COLUMNS
NUMBERS_AT_ONCE = AT_ONCE * facts.REPEAT_REGISTERS


class Barriers(NamedTuple):
    """Shared addresses of the barriers other than those of tiles."""

    logits: Any  # two: they are there
    shares: Any
    sums: Any  # what the products with a tile's values have been added to


class Sm100AttentionMemory(NamedTuple):
    """Shared memory: tensors that tcgen05 reads, and addresses."""

    queries: Any  # BF16 [64, 512 or 576]
    keys: Any  # BF16 [64, 512 or 576, stages]
    values: Any  # the same memory: (half of the columns, keys), halves, tiles
    shares: Any  # BF16 [64 heads, 64 keys]
    queries_at: Any
    shares_at: Any
    counts_at: Any  # float32 [2 warpgroups, 64 rows]: maxima, later totals
    places: gather.TileAddresses
    barriers: Barriers
    address: Any  # of tensor memory's address


class Products(NamedTuple):
    """Instructions, operands and tensor memory of the MMA warp."""

    of_logits: Any
    of_sums: Any
    queries: Any
    keys: Any
    shares: Any
    values: Any
    logits: Any  # layouts of what they write
    sums: Any
    base: Any


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def attention_kernel(
    addresses: AttentionAddresses, extents: tuple[Any, ...], scale: Float32, form: cutlass.Constexpr
) -> None:
    """Take a role by warpgroup: 0 and 1 softmax, 2 brings keys, a warp of 3 multiplies."""
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory, registers = prepared(form), facts.REGISTERS[form.width]
    place = hopper.place_of(extents)
    lists, widths, walk = hopper.lists_of(addresses, extents, place, form)
    if group == facts.GATHERING_GROUP:
        cute.arch.setmaxregister_decrease(registers.gathering)
        plan = facts.sm100_gather_plan(form.format)
        begin = gather.first_stage()
        gather.producer_of(form.format)(lists, widths, walk, memory.places, plan, begin)
        leave_together(form)
    elif group == facts.MULTIPLYING_GROUP:
        cute.arch.setmaxregister_decrease(registers.multiplying)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == facts.MULTIPLYING_WARP:
            multiply_tiles(memory, walk[2])
        leave_together(form)
    else:
        cute.arch.setmaxregister_increase(registers.weighing)
        lane = lane_of(thread, group)
        hopper.load_queries(addresses.q, place, memory.queries_at, form.width // rows.HALF)
        meet_multiplier()
        peaks, totals = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        peaks.fill(-float("inf"))
        totals.fill(0.0)
        weigh_tiles(memory, lane, walk[2], (peaks, totals), scale)
        sums = sums_of(memory, lane, walk[2])
        give_back(memory.address)
        hopper.share_totals(memory, lane, totals)
        leave(addresses, place, lane, ((sums, peaks, totals), memory), form)


def lane_of(thread: Any, group: Any) -> AttentionLane:
    """Return a softmax thread's position, the same as in a wgmma fragment."""
    within, quads = thread % facts.WARPGROUP, hopper.QUADS
    warp, lane = within // rows.LANES, thread % rows.LANES
    return AttentionLane(group, warp * 16 + lane // quads, thread % quads, warp, lane)


@cute.jit
def leave(
    addresses: AttentionAddresses,
    place: AttentionBlock,
    lane: AttentionLane,
    held: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Write the results of one split or of all of them, as Hopper's warpgroups do."""
    state, memory = held
    places = memory.places.tiles, memory.shares_at  # no longer read: reused for sums
    if cutlass.const_expr(form.together == 0):
        hopper.store_partial(addresses, place, lane, state)
    elif cutlass.const_expr(form.together == 1):
        hopper.store_output(addresses, place, lane, state, (places[0], form.sinks))
    else:
        exchange.leave(*places, lane, state)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        warp = lane.half * (facts.WARPGROUP // rows.LANES) + lane.warp
        exchange.write_rows(addresses, place, places, (warp, lane.lane), form)
        cute.arch.cluster_arrive()  # stay until others have read this block's sums
        cute.arch.cluster_wait()


@cute.jit
def leave_together(form: cutlass.Constexpr) -> None:
    """Take part in the cluster's barriers, which count every thread."""
    if cutlass.const_expr(form.together > 1):
        for _ in range(2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


# ---- shared memory and tensor memory -------------------------------------------------------------


def prepared(form: AttentionForm) -> Sm100AttentionMemory:
    """Divide shared memory, initialise barriers and allocate tensor memory; synchronise."""
    allocator = cutlass.memory.SmemAllocator()
    layouts = (*layouts_of(form.width), layout_of_values(form.width))
    sizes = (facts.HEADS * form.width, facts.STAGES * facts.TILE * form.width)
    pointers = [
        allocator.allocate_array(BFloat16, size, byte_alignment=facts.ALIGNMENT)
        for size in (*sizes, facts.HEADS * facts.TILE)
    ]
    plan = facts.sm100_gather_plan(form.format)
    counts = allocator.allocate_array(Float32, facts.HEADS * facts.CONSUMERS)
    tiles = allocator.allocate_array(Int64, 2 * facts.STAGES)
    masks = allocator.allocate_array(Uint32, facts.MASK_BYTES // 4)
    others = allocator.allocate_array(Int64, facts.BARRIERS)
    address = allocator.allocate_array(Int32, facts.ADDRESS_BYTES // 4)
    codes = allocator.allocate_array(Uint32, plan.ahead_bytes // 4 or 4, byte_alignment=16)
    places = gather.TileAddresses(
        *(Uint32(each.toint()) for each in (pointers[1], tiles, masks, codes))
    )
    first = Uint32(others.toint())
    size = facts.SM100_BARRIER_BYTES
    barriers = Barriers(first, first + facts.LOGITS * size, first + 3 * size)
    begin(places, barriers, (address, plan))
    queries, keys, shares, values = (
        cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=BFloat16), layout.outer)
        for at, layout in zip((*pointers, pointers[1]), layouts, strict=True)
    )
    at = (Uint32(pointers[0].toint()), Uint32(pointers[2].toint()), Uint32(counts.toint()))
    return Sm100AttentionMemory(queries, keys, values, shares, *at, places, barriers, address)


@cute.jit
def begin(
    places: gather.TileAddresses, barriers: Barriers, held: tuple[Any, cutlass.Constexpr]
) -> None:
    """Initialise all barriers and allocate tensor memory, then synchronise the thread block."""
    thread, _, _ = cute.arch.thread_idx()
    address, how = held
    if thread == 0:
        # Full: producers' copies and warps. Empty, logits, sums: one tcgen05.commit each.
        for stage in range(facts.STAGES):
            shared.begin_barrier(places.full + stage * 8, how.arrivals)
            shared.begin_barrier(places.full + (facts.STAGES + stage) * 8, 1)
        for buffer in range(facts.LOGITS):
            shared.begin_barrier(barriers.logits + buffer * 8, 1)
        shared.begin_barrier(barriers.shares, WARPS_THAT_WEIGH)
        shared.begin_barrier(barriers.sums, 1)
        cute.arch.mbarrier_init_fence()
    if cute.arch.warp_idx() == 0:
        cute.arch.alloc_tmem(facts.columns_allocated(), address)
        # One allocation per thread block; other blocks of the processor may allocate next.
        cute.arch.relinquish_tmem_alloc_permit()
    tcgen05.fence("before")
    cute.arch.sync_threads()


@cute.jit
def give_back(address: Any) -> None:
    """Free tensor memory from the first warp, once all softmax warps have read their sums."""
    tcgen05.fence("before")
    cute.arch.barrier(barrier_id=SUMS_READ, number_of_threads=hopper.CONSUMER_THREADS)
    if cute.arch.warp_idx() == 0:
        cute.arch.dealloc_tmem(tcgen05.base_of(address), facts.columns_allocated())


def meet_multiplier() -> None:
    """Synchronise the softmax warps with the MMA warp: queries are in shared memory."""
    count = hopper.CONSUMER_THREADS + rows.LANES
    cute.arch.barrier(barrier_id=QUERIES_THERE, number_of_threads=count)


def mma_of(columns: int, major: Any) -> Any:
    """Return the instruction of 64 rows and `columns` columns; `major` is that of B."""
    shape = (facts.HEADS, columns, facts.INSTRUCTION_K)
    group, source = instructions.CtaGroup.ONE, instructions.OperandSource.SMEM
    return cute.make_tiled_mma(
        instructions.MmaF16BF16Op(
            BFloat16, Float32, shape, group, source, OperandMajorMode.K, major
        )
    )


def layouts_of(width: int) -> tuple[Any, ...]:
    """Return the layouts of queries, tiles of keys and shares: rows of 128 bytes, swizzled."""
    kind = instructions.SmemLayoutAtomKind.K_SW128
    atom = instructions.make_smem_layout_atom(kind, BFloat16)
    products, output = mma_of(facts.TILE, OperandMajorMode.K), mma_of_sums()
    shapes = (
        (products.partition_shape_A((facts.HEADS, width)), 1),
        (products.partition_shape_B((facts.TILE, width)), facts.STAGES),
        (output.partition_shape_A((facts.HEADS, facts.TILE)), 1),
    )
    return tuple(
        instructions.tile_to_mma_shape(atom, cute.append(shape, count), order=(1, 2, 3))
        for shape, count in shapes
    )


def mma_of_sums() -> Any:
    """Return the instruction of shares times half of the value columns."""
    return mma_of(facts.COLUMNS, OperandMajorMode.MN)


def layout_of_values(width: int) -> Any:
    """Return the layout of a tile's first 512 columns as values: columns, halves, tiles."""
    kind = instructions.SmemLayoutAtomKind.MN_SW128
    atom = instructions.make_smem_layout_atom(kind, BFloat16)
    shape = mma_of_sums().partition_shape_B((facts.COLUMNS, facts.TILE))
    one = instructions.tile_to_mma_shape(atom, shape, order=(2, 1))
    halves = cute.make_layout(facts.CONSUMERS, stride=facts.TILE * facts.COLUMNS)
    tiles = cute.make_layout(facts.STAGES, stride=facts.TILE * width)
    outer = cute.append(cute.append(one.outer, halves), tiles)
    return cute.make_composed_layout(one.inner, 0, outer)


# ---- multiply ------------------------------------------------------------------------------------


def products_of(memory: Sm100AttentionMemory) -> Products:
    """Partition the operands of both instructions."""
    logits, sums = mma_of(facts.TILE, OperandMajorMode.K), mma_of_sums()
    return Products(
        logits,
        sums,
        logits.make_fragment_A(memory.queries),
        logits.make_fragment_B(memory.keys),
        sums.make_fragment_A(memory.shares),
        sums.make_fragment_B(memory.values),
        logits.make_fragment_C(logits.partition_shape_C((facts.HEADS, facts.TILE))).layout,
        sums.make_fragment_C(sums.partition_shape_C((facts.HEADS, facts.COLUMNS))).layout,
        tcgen05.base_of(memory.address),
    )


@cute.jit
def multiply_tiles(memory: Sm100AttentionMemory, steps: Any) -> None:
    """Multiply tile after tile: the next tile's logits are issued before this one's sums."""
    products, places, barriers = products_of(memory), memory.places, memory.barriers
    meet_multiplier()
    stage, phase, before = Uint32(0), Uint32(0), Uint32(0)
    # Software pipeline: keys of tile `step`, then values of tile `step - 1`.
    for step in cutlass.range(Int32(0), steps + 1, unroll=1):
        if step < steps:
            multiply_keys(products, places, barriers, (stage, phase, Uint32(step)))
        if step > 0:
            multiply_values(products, places, barriers, (before, Uint32(step) - 1))
        before = stage
        stage, phase = gather.shared_next(stage, phase)


@cute.jit
def multiply_keys(
    products: Products, places: gather.TileAddresses, barriers: Barriers, at: tuple[Any, Any, Any]
) -> None:
    """Issue queries times a tile's keys; `at` is its stage, phase and number."""
    stage, phase, number = at
    buffer = number % facts.LOGITS
    shared.await_phase(places.full + stage * 8, phase)
    cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, tcgen05 reads
    tcgen05.fence("after")
    # Logits alternate between two buffers, so that the next tile's may start.
    column = facts.first_columns()[1] + Int32(buffer) * facts.TILE
    logits = cute.make_tensor(products.base + column, products.logits)
    queries = (products.queries[None, None, None, 0],)
    keys = (products.keys[None, None, None, stage],)
    tcgen05.multiply_stage(products.of_logits, logits, queries, keys, True)
    arrive_behind_products(barriers.logits + buffer * 8)


@cute.jit
def multiply_values(
    products: Products, places: gather.TileAddresses, barriers: Barriers, at: tuple[Any, Any]
) -> None:
    """Issue shares times a tile's values for both halves; `at` is its stage and number."""
    stage, number = at
    shared.await_phase(barriers.shares, number % 2)
    cute.arch.fence_proxy("async.shared", space="cta")
    tcgen05.fence("after")
    shares = (products.shares[None, None, None, 0],)
    for half in cutlass.range_constexpr(facts.CONSUMERS):
        # Both halves use the same columns; the second has the upper 16 lanes of each 32.
        lanes = half * facts.UPPER_LANES * facts.LANE
        sums = cute.make_tensor(products.base + lanes, products.sums)
        values = (products.values[None, None, None, half, stage],)
        # The first tile overwrites: tensor memory is not cleared.
        tcgen05.multiply_stage(products.of_sums, sums, shares, values, number == 0)
    arrive_behind_products(places.full + (facts.STAGES + stage) * 8)
    arrive_behind_products(barriers.sums)


# ---- weigh ---------------------------------------------------------------------------------------


def lanes_of(lane: AttentionLane, half: Any) -> Any:
    """Return the address offset of a warp's 16 lanes: lower or upper ones."""
    first = Uint32(lane.warp) * facts.LANES_OF_WARP + Uint32(half) * facts.UPPER_LANES
    return first * facts.LANE


@cute.jit
def weigh_tiles(
    memory: Sm100AttentionMemory,
    lane: AttentionLane,
    steps: Any,
    state: tuple[Any, Any],
    scale: Any,
) -> None:
    """Turn every tile's logits into shares."""
    start = Uint32(tcgen05.base_of(memory.address).toint())
    to_powers = ops.multiply_rn(scale, merging.LOG2_E)
    logits = cute.make_rmem_tensor(REPEATS_OF_LOGITS * facts.REPEAT_REGISTERS, Float32)
    column = facts.first_columns()[1] + Uint32(lane.half) * facts.KEYS
    logits_at = start + column + lanes_of(lane, 0)
    sums_at = start + lanes_of(lane, lane.half)
    stage, phase = Uint32(0), Uint32(0)
    for step in cutlass.range(Int32(0), steps, unroll=1):
        number = Uint32(step)
        buffer = number % facts.LOGITS
        shared.await_phase(memory.places.full + stage * 8, phase)  # masks are there
        ready = memory.barriers.logits + buffer * 8
        shared.await_phase(ready, number // facts.LOGITS % 2)
        tcgen05.fence("after")
        found = read_fragment(logits_at + buffer * facts.TILE, REPEATS_OF_LOGITS)
        for i in cutlass.range_constexpr(len(found)):
            logits[i] = found[i]
        masks = hopper.masks_of(memory.places.masks, stage, lane)
        hopper.hide(logits, masks, lane)
        factors = weigh(memory, lane, logits, state, to_powers)
        if step > 0:
            # The matrix unit still adds the last tile to the output that is rescaled here.
            shared.await_phase(memory.barriers.sums, (number - 1) % 2)
            tcgen05.fence("after")
            rescale(sums_at, factors)
        store_shares(memory, lane, logits)
        hand_over(memory, lane)
        stage, phase = gather.shared_next(stage, phase)


@cute.jit
def weigh(
    memory: Any, lane: AttentionLane, logits: Any, state: tuple[Any, Any], to_powers: Any
) -> Any:
    """Turn logits into shares relative to the running peak of all keys; return rows' factors."""
    peaks, totals = state
    tops = [hopper.largest_logit(logits, row) for row in range(2)]
    for row in cutlass.range_constexpr(2):
        if lane.quad == 0:
            ptx.store_number(hopper.counts_at(memory, lane, lane.half, row), tops[row])
    threads = hopper.CONSUMER_THREADS
    cute.arch.barrier(barrier_id=hopper.EXCHANGE, number_of_threads=threads)
    factors = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        other = ptx.number_at(hopper.counts_at(memory, lane, 1 - lane.half, row))
        top = ops.multiply_rn(ptx.larger(tops[row], other), to_powers)
        peak = ptx.larger(peaks[row], top)
        against = merging.finite(peak)
        factors[row] = ptx.power_of_two(ops.subtract_rn(peaks[row], against))
        peaks[row] = peak
        total = Float32(0.0)
        for block in cutlass.range_constexpr(hopper.BLOCKS):
            at = block * 4 + 2 * row
            for i in cutlass.range_constexpr(2):
                power = ops.fma_rn(logits[at + i], to_powers, -against)
                logits[at + i] = ptx.power_of_two(power)
            total = ops.add_rn(total, ops.add_rn(logits[at], logits[at + 1]))
        totals[row] = ops.fma_rn(totals[row], factors[row], total)
    # The next tile's maxima must not overwrite this one's before all have read them.
    cute.arch.barrier(barrier_id=hopper.SHARES_READY, number_of_threads=threads)
    return factors


@cute.jit
def rescale(sums_at: Any, factors: Any) -> None:
    """Rescale a warp's half of the output to new peaks, where any of its rows has one."""
    if cute.arch.vote_ballot_sync((factors[0] != 1.0) | (factors[1] != 1.0)) != 0:
        for i in cutlass.range_constexpr(facts.COLUMNS // COLUMNS_AT_ONCE):
            at = sums_at + i * COLUMNS_AT_ONCE
            numbers = read_fragment(at, AT_ONCE)
            made = [
                ops.multiply_rn(number, factors[j // 2 % 2]) for j, number in enumerate(numbers)
            ]
            write_fragment(at, made)
        end_of_writes()


@cute.jit
def store_shares(memory: Sm100AttentionMemory, lane: AttentionLane, shares: Any) -> None:
    """Round shares to BF16, and write them where tcgen05 reads them."""
    for row in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(hopper.BLOCKS):
            at = block * 4 + 2 * row
            chunk = Uint32(lane.half) * (facts.KEYS // rows.HALF) + block
            place = gather.address_in_tile(Uint32(lane.row) + 8 * row, chunk)
            word = ptx.pair_rounded(shares[at], shares[at + 1])
            ptx.store_word(memory.shares_at + place + Uint32(lane.quad) * 4, word)


def hand_over(memory: Sm100AttentionMemory, lane: AttentionLane) -> None:
    """Arrive at `shares`: a warp's shares are written and its sums rescaled."""
    cute.arch.fence_proxy("async.shared", space="cta")
    tcgen05.fence("before")
    cute.arch.sync_warp()
    shared.arrive(memory.barriers.shares, lane.lane == 0)


@cute.jit
def sums_of(memory: Sm100AttentionMemory, lane: AttentionLane, steps: Any) -> Any:
    """Return a thread's part of the output: zeros where there was no tile."""
    start = Uint32(tcgen05.base_of(memory.address).toint())
    sums = cute.make_rmem_tensor(facts.COLUMNS // 2, Float32)
    sums.fill(0.0)
    if steps > 0:
        shared.await_phase(memory.barriers.sums, Uint32(steps - 1) % 2)
        tcgen05.fence("after")
        for i in cutlass.range_constexpr(facts.COLUMNS // COLUMNS_AT_ONCE):
            at = start + lanes_of(lane, lane.half) + i * COLUMNS_AT_ONCE
            numbers = read_fragment(at, AT_ONCE)
            for j in cutlass.range_constexpr(NUMBERS_AT_ONCE):
                sums[i * NUMBERS_AT_ONCE + j] = numbers[j]
    return sums


@cute.jit
def launch_attention(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    scale: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form; the last of the extents is the number of thread blocks."""
    *inner, blocks = extents
    addresses = AttentionAddresses(*(Int64(pointer.toint()) for pointer in pointers))
    attention_kernel(addresses, tuple(inner), scale, form).launch(
        grid=[blocks, 1, 1],
        block=[facts.SM100_THREADS, 1, 1],
        cluster=[max(1, form.together), 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )
