"""Sparse attention on Hopper (sm_90a): softmax(scale * Q K^T) V over listed cache entries.

A thread block has one token, 64 heads and one split of the keys. Tiles of 64 keys; Q [64, 512 or
576] and K in BF16, sums in float32. V is the first 512 columns of K: the same shared memory, read
along rows for the logits and along columns for the output. Shares (P) are rounded to BF16; their
sum is taken before rounding. 384 threads, or 512 where cache entries hold codes.

* Warpgroups 0, 1 (consumers): wgmma. Logits: each has half of the latent for all 64 keys, and the
  partial sums are exchanged (V3.2: all 576 values for 32 keys). Output: all 64 keys, 256 columns.
* Warpgroup 2, and 3 with codes (producers): paged cache to shared memory, decoded (gather.py).
* `full[stage]`, 2 stages: every producer thread (when its copies land) plus every producer warp.
* `empty[stage]`: 8 arrivals, one for each consumer warp. `given`: 1, in clusters of two.
* Named barriers of the 256 consumers: 1 row maxima, 2 shares, 3 queries, 4 partial logits.

One tile: wait full, proxy fence (threads wrote, wgmma reads), logits; exchange partial logits;
mask; exchange row maxima; P to registers and shared memory; rescale the output where the peak
moved; P V of the own 32 keys from registers; barrier 2; P V of the other 32 from shared memory;
begin the next tile's logits; wait for P V; arrive at empty. Splits end in the workspace
(together = 0), alone (1), by exchange.merge_two (2) or by exchange.write_rows (3 to 8).
"""

from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import exchange, gather
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention.problem import AttentionForm
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import opaque
from degarble.kernels.runtime.pdl import follow

NAN = float("nan")
QUADS = 4  # lanes that share a row
STEP = 16  # keys of a wgmma
STEPS_OF_KEYS = facts.KEYS // STEP
BLOCKS = facts.KEYS // 8  # of eight columns in a warpgroup's products
EXCHANGE, SHARES_READY, QUERIES_READY = 1, 2, 3  # barriers of the warpgroups that multiply
CONSUMER_THREADS = facts.CONSUMER_THREADS
# In powers of two. Rescaling at every new peak cost 5 % of prefill (attention_kernel.md).
LEEWAY = 8.0  # a peak moves where it is passed by a factor of more than 2**8: seldom
STAGED_CHUNKS = 4  # of a row, as it leaves by way of shared memory
STAGED_BYTES = 16 * STAGED_CHUNKS * gather.CHUNK  # of a warp's rows
CHUNKS_OF_HALF = facts.COLUMNS // rows.HALF


class AttentionAddresses(NamedTuple):
    """Operands and results in global memory, as 64-bit addresses."""

    q: Any  # BF16 [T, H, 512]; V3.2: 576
    sink: Any  # float32 [H]
    near: Any  # int32 [T, W], slots
    near_lengths: Any  # int32 [T]
    near_cache: Any  # bytes [pages, stride]
    far: Any  # int32 [T, K], slots
    far_lengths: Any  # int32 [T]
    far_cache: Any  # bytes [pages, stride]
    out: Any  # BF16 [T, H, 512]
    lse: Any  # float32 [T, H]
    sums: Any  # float32 [T, splits, H, 512]
    stats: Any  # float32 [T, splits, H, 2]: peak to base 2, sum of shares


class AttentionBlock(NamedTuple):
    """Token, split and heads of a thread block; extents T, H and the splits."""

    token: Any
    split: Any
    head: Any  # the first
    tokens: Any
    heads: Any
    splits: Any
    end: Any  # behind the last head of this thread block
    of_block: Any  # heads of a thread block; as a constant of the launch it costs no register


class AttentionLane(NamedTuple):
    """Position of a thread in its multiplying warpgroup and in the wgmma fragment."""

    half: Any  # the warpgroup
    row: Any  # of the fragment, the first of two that are eight apart
    quad: Any
    warp: Any  # of the warpgroup
    lane: Any


class Sm90AttentionMemory(NamedTuple):
    """Shared memory: tensors that wgmma reads, and addresses."""

    queries: Any  # BF16 [64, 512 or 576]
    keys: Any  # BF16 [64, 512 or 576, stages]
    values: Any  # the same memory, 512 columns of it
    shares: Any  # BF16 [64 heads, 64 keys]
    queries_at: Any
    shares_at: Any
    counts_at: Any  # float32 [2 warpgroups, 64 rows]: maxima, later totals
    partner_at: Any  # where logits are exchanged
    given: Any  # the barriers of what another thread block gives, or those of queries
    places: gather.TileAddresses


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def attention_kernel(
    addresses: AttentionAddresses, extents: tuple[Any, ...], scale: Float32, form: cutlass.Constexpr
) -> None:
    """Take a role by warpgroup: 0 and 1 multiply, the others bring keys."""
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = shared_memory(form)
    plan, (multiplying, bringing) = facts.plan_of(form), facts.registers(form.format)
    begin_barriers(memory, plan)
    cute.arch.sync_threads()

    # Each role waits for the previous launch when it has its registers, and knows its place.
    place = place_of(extents)
    if group >= facts.CONSUMERS:
        cute.arch.setmaxregister_decrease(bringing)
        follow()
        lists, widths, walk = lists_of(addresses, extents, place, form)
        begin = gather.first_stage()
        gather.producer_of(form.format)(lists, widths, walk, memory.places, plan, begin)
        stay_for_others(form)
    else:
        cute.arch.setmaxregister_increase(multiplying)
        lane = lane_of(group, thread)
        follow()
        load_queries(addresses.q, place, memory.queries_at, form.width // rows.HALF)
        _, _, walk = lists_of(addresses, extents, place, form)
        state = state_of(form)
        begin_split(state)
        consume(memory, lane, walk[2], state, (scale, form.format))
        share_totals(memory, lane, state[2])
        finish(addresses, (place, lane), state, memory, form)


def state_of(form: AttentionForm) -> tuple[Any, Any, Any]:
    """Return registers for a thread's sums, and for peaks and totals of its two rows."""
    output = wgmma_of_output(facts.columns_at_once(form.format))
    sums = mainloop.sums_of(output, facts.COLUMNS)
    peaks, totals = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    return sums, peaks, totals


def begin_split(state: tuple[Any, Any, Any]) -> None:
    """Forget everything; a split without tiles leaves zeros."""
    sums, peaks, totals = state
    sums.fill(0.0)
    # No key yet: exp2(-inf - anything finite) is 0.
    peaks.fill(-float("inf"))
    totals.fill(0.0)


@cute.jit
def stay_for_others(form: cutlass.Constexpr) -> None:
    """Arrive, in a producer thread, at as many cluster barriers as the consumers' ending has."""
    if cutlass.const_expr(form.together > 1):
        for _ in range(1 if form.together == exchange.TOGETHER else 2):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()


@cute.jit
def finish(
    addresses: AttentionAddresses,
    where: tuple[AttentionBlock, AttentionLane],
    state: tuple[Any, Any, Any],
    memory: Sm90AttentionMemory,
    form: cutlass.Constexpr,
) -> None:
    """Write what a split has come to: to the workspace, as the output, or with other splits."""
    place, lane = where
    if cutlass.const_expr(form.together == 0):
        store_partial(addresses, place, lane, state)
    elif cutlass.const_expr(form.together == 1):
        store_output(addresses, place, lane, state, (memory.places.tiles, form.sinks))
    elif cutlass.const_expr(form.together == exchange.TOGETHER):
        exchange.merge_two(addresses, (place, lane), state, memory, form.sinks)
    else:
        places = memory.places.tiles, memory.shares_at  # no longer read: reused for sums
        exchange.leave(*places, lane, state)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        warp = lane.half * (facts.WARPGROUP // rows.LANES) + lane.warp
        exchange.write_rows(addresses, place, places, (warp, lane.lane), form)
        # Stay until others have read this block's sums.
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def lane_of(group: Any, thread: Any) -> AttentionLane:
    """Return a thread's position in its warpgroup, and in the fragment."""
    return AttentionLane(
        group,
        thread % facts.WARPGROUP // rows.LANES * 16 + thread % rows.LANES // QUADS,
        thread % QUADS,
        thread % facts.WARPGROUP // rows.LANES,
        thread % rows.LANES,
    )


@cute.jit
def begin_barriers(memory: Sm90AttentionMemory, how: cutlass.Constexpr) -> None:
    """Initialise, in one thread, the barriers of the stages and of the cluster exchange."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for stage in range(facts.STAGES):
            shared.begin_barrier(memory.places.full + stage * 8, how.arrivals)
            empty = memory.places.full + (facts.STAGES + stage) * 8
            shared.begin_barrier(empty, CONSUMER_THREADS // rows.LANES)
        exchange.begin_barriers_of_given(memory.given)
        cute.arch.mbarrier_init_fence()


def shared_memory(form: AttentionForm) -> Sm90AttentionMemory:
    """Divide the shared memory of a thread block."""
    allocator = cutlass.memory.SmemAllocator()
    swizzle = mainloop.Swizzle.K_SW128
    turned = facts.memory_in_turns(form.format)
    buffers = turned.shares // (2 * facts.HEADS * facts.TILE) if form.turns else 1
    parts = facts.PARTS if form.turns else 1
    layouts = (
        mainloop.staged_layout(BFloat16, facts.HEADS, form.width, 1, swizzle),
        mainloop.staged_layout(BFloat16, facts.TILE, form.width, facts.STAGES, swizzle),
        mainloop.staged_layout(BFloat16, facts.HEADS, facts.TILE, buffers, swizzle),
    )
    pointers = [
        allocator.allocate_array(BFloat16, cute.cosize(layout), byte_alignment=facts.ALIGNMENT)
        for layout in layouts
    ]
    tensors = [
        cute.make_tensor(cute.recast_ptr(at, layout.inner, dtype=BFloat16), layout.outer)
        for at, layout in zip(pointers, layouts, strict=True)
    ]
    counts = allocator.allocate_array(Float32, facts.HEADS * facts.CONSUMERS)
    barriers = allocator.allocate_array(Int64, 2 * facts.STAGES * parts + facts.GIVEN_BARRIERS)
    masks = allocator.allocate_array(Uint32, facts.MASK_BYTES // 4)
    queries_at, keys_at, shares_at = (Uint32(at.toint()) for at in pointers)
    codes, partner = (
        # At least four words: a format without codes, or without an exchange, has size 0.
        allocator.allocate_array(Uint32, size // 4 or 4, byte_alignment=16)
        for size in (
            facts.plan_of(form).ahead_bytes,
            0 if form.turns else facts.exchanged_bytes(form.format),
        )
    )
    others = (Uint32(each.toint()) for each in (barriers, masks, codes))
    places = gather.TileAddresses(keys_at, *others)
    queries, keys, shares = tensors
    given = places.full + 2 * facts.STAGES * parts * 8
    at = (queries_at, shares_at, Uint32(counts.toint()), Uint32(partner.toint()), given)
    # Keys and values are the same bytes; only the layout differs.
    values = cute.make_tensor(keys.iterator, layout_of_values(form.width))
    return Sm90AttentionMemory(queries, keys, values, shares, *at, places)


def layout_of_values(width: int) -> Any:
    """Return the layout of the first 512 columns of every stage, columns first."""
    swizzle = mainloop.Swizzle.K_SW128
    tile = mainloop.staged_layout(BFloat16, facts.TILE, rows.WIDTH, 1, swizzle).outer
    stages = cute.make_layout(facts.STAGES, stride=facts.TILE * width)
    return cute.append(cute.select(tile, [1, 0]), stages)


def place_of(extents: tuple[Any, ...], seen: Any = Int32) -> AttentionBlock:
    """Return the work of this thread block."""
    return place_of_item(seen(cute.arch.block_idx()[0]), extents)


def place_of_item(block: Any, extents: tuple[Any, ...]) -> AttentionBlock:
    """Return the work of that number: splits count fastest, then groups of heads."""
    tokens, heads, splits, *_, of_block = extents
    groups = (heads + of_block - 1) // of_block
    token, rest = block // (groups * splits), block % (groups * splits)
    head = rest // splits * of_block
    end = ops.minimum(head + of_block, heads)
    return AttentionBlock(token, rest % splits, head, tokens, heads, splits, end, of_block)


def lists_of(
    addresses: AttentionAddresses,
    extents: tuple[Any, ...],
    place: AttentionBlock,
    form: AttentionForm,
) -> tuple[Any, Any, Any]:
    """Return the token's lists, their widths in tiles, and the walk of this split."""
    each, near_width, near_entries, near_stride, near_capacity = extents[3:8]
    far_width, far_entries, far_stride, far_capacity = extents[8:12]
    near_entries, far_entries = (
        form.page or Uint32(entries) for entries in (near_entries, far_entries)
    )
    kept = near_width, far_width
    if form.lengths:
        at = addresses.near_lengths, addresses.far_lengths
        lengths = (Int32(ptx.word_at(start + Int64(place.token) * 4)) for start in at)
        kept = tuple(
            ops.maximum(ops.minimum(length, width), 0)
            for length, width in zip(lengths, kept, strict=True)
        )
    token = Int64(place.token) * 4
    near = gather.List(
        addresses.near + token * Int64(near_width),
        kept[0],
        addresses.near_cache,
        near_entries,
        near_stride,
        near_capacity,
    )
    far = gather.List(
        addresses.far + token * Int64(far_width),
        kept[1],
        addresses.far_cache,
        far_entries,
        far_stride,
        far_capacity,
    )
    # Tiles of the full widths, then of the lengths.
    tiles = [(count + facts.TILE - 1) // facts.TILE for count in (near_width, far_width, *kept)]
    # Splits follow the widths of the lists, not the lengths: the bits do not depend on the batch.
    widths = tiles[0], tiles[1]
    walk = facts.tiles_of_split(place.split, each, widths, (tiles[2], tiles[3]))
    return (near, far), widths, walk


def wgmma_of_output(columns: int, source: Any = warpgroup.OperandSource.SMEM) -> Any:
    """Return the instruction for 64 rows of shares and columns of keys, taken as values."""
    operation = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (facts.HEADS, columns, STEP),
        source,
        OperandMajorMode.K,
        OperandMajorMode.MN,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(operation))


def load_queries(q: Any, place: AttentionBlock, queries_at: Any, chunks: int) -> None:
    """Copy 64 heads of the token to shared memory; rows without a head become zeros."""
    thread, _, _ = cute.arch.thread_idx()
    # cp.async of 16 bytes; size 0 fills with zeros.
    first = Int64(place.token) * Int64(place.heads) + Int64(place.head)
    for turn in range(facts.HEADS * chunks // CONSUMER_THREADS):
        item = Uint32(thread) + turn * CONSUMER_THREADS
        row, chunk = item // chunks, item % chunks
        exists = place.head + Int32(row) < place.end
        kept = ops.select(exists, row, Uint32(0))
        source = q + ((first + Int64(kept)) * chunks + Int64(chunk)) * gather.CHUNK
        size = ops.select(exists, Uint32(gather.CHUNK), Uint32(0))
        ptx.copy_16(queries_at + gather.address_in_tile(row, chunk), source, size)
    await_queries()


def begin_queries(q: Any, place: AttentionBlock, queries_at: Any, chunks: int) -> None:
    """Issue the copies of `load_queries`, a warp those of eight rows: few addresses to hold."""
    thread, _, _ = cute.arch.thread_idx()
    thread = Uint32(opaque(thread))
    first = Int64(place.token) * Int64(place.heads) + Int64(place.head)
    of_warp, lane = thread // rows.LANES, thread % rows.LANES
    for turn in range(8 // gather.ROWS_OF_COPY):
        row = of_warp * 8 + lane // gather.LANES_OF_ROW + gather.ROWS_OF_COPY * turn
        chunk = lane % gather.LANES_OF_ROW
        exists = place.head + Int32(row) < place.end
        kept = ops.select(exists, row, Uint32(0))
        source = q + ((first + Int64(kept)) * chunks + Int64(chunk)) * gather.CHUNK
        size = ops.select(exists, Uint32(gather.CHUNK), Uint32(0))
        at = queries_at + gather.address_in_tile(row, chunk)
        for block in range(chunks // gather.LANES_OF_ROW):
            ptx.copy_16_at((at, block * gather.BLOCK_BYTES), (source, block * 128), size)


def await_queries() -> None:
    """Wait for the queries of all threads that multiply."""
    ptx.end_of_copies()
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=QUERIES_READY, number_of_threads=CONSUMER_THREADS)


@cute.jit
def consume(
    memory: Sm90AttentionMemory,
    lane: AttentionLane,
    steps: Any,
    state: tuple[Any, Any, Any],
    given: tuple[Any, cutlass.Constexpr],
) -> None:
    """Multiply, weigh and add up every tile of a split."""
    sums, peaks, totals = state
    scale, entry = given
    halved = facts.halved(entry)
    columns_of = facts.TILE if halved else facts.KEYS
    products = mainloop.mma_of(BFloat16, columns_of)
    at_once = facts.columns_at_once(entry)
    output = wgmma_of_output(at_once)
    logits = mainloop.sums_of(products, columns_of)
    queries, own = memory.queries, memory.keys
    width = cute.size(memory.keys, mode=[1])
    if cutlass.const_expr(halved):
        queries = cute.local_tile(queries, (facts.HEADS, width // 2, 1), (0, lane.half, 0))
        own = cute.local_tile(own, (facts.TILE, width // 2, facts.STAGES), (0, lane.half, 0))
    else:
        own = cute.local_tile(own, (facts.KEYS, width, facts.STAGES), (lane.half, 0, 0))
    a = products.make_fragment_A(products.get_slice(0).partition_A(queries))
    b = products.make_fragment_B(products.get_slice(0).partition_B(own))
    of_half = facts.COLUMNS, facts.TILE, facts.STAGES
    columns = cute.local_tile(memory.values, of_half, (lane.half, 0, 0))
    values = output.make_fragment_B(output.get_slice(0).partition_B(columns))
    shares = output.make_fragment_A(output.get_slice(0).partition_A(memory.shares))
    # Logits are taken to base 2: exp(scale * x) = exp2(scale * log2(e) * x).
    to_powers = ops.multiply_rn(scale, merging.LOG2_E)
    state = (sums, peaks, totals)
    of_registers = wgmma_of_output(at_once, warpgroup.OperandSource.RMEM)
    own_shares = of_registers.make_fragment_A(
        of_registers.partition_shape_A((facts.HEADS, facts.KEYS))
    )
    pairs = (products, logits, a, b), ((of_registers, own_shares), (output, shares), sums, values)
    if steps > 0:
        stage, phase = Uint32(0), Uint32(0)
        begin_products(memory, pairs[0], (stage, phase))
        for _ in cutlass.range(Int32(1), steps, unroll=1):
            warpgroup.wait_group(0)
            weigh(memory, lane, (logits, own_shares), state, (to_powers, stage), entry)
            begin_sums(lane, pairs[1], stage)
            following = gather.shared_next(stage, phase)
            # Trap: were the sums under way where the loop begins anew, ptxas would wait for each.
            if cutlass.const_expr(entry.code_bits == facts.E4M3_BITS):
                begin_products(memory, pairs[0], following)
                warpgroup.wait_group(1)
                give_back(memory, lane, stage)
            else:
                # Not behind the next tile's coming: of BF16 entries 5 % of decoding.
                warpgroup.wait_group(0)
                give_back(memory, lane, stage)
                begin_products(memory, pairs[0], following)
            stage, phase = following
        warpgroup.wait_group(0)
        weigh(memory, lane, (logits, own_shares), state, (to_powers, stage), entry)
        begin_sums(lane, pairs[1], stage)
        warpgroup.wait_group(0)
        give_back(memory, lane, stage)


@cute.jit
def begin_products(memory: Sm90AttentionMemory, pair: tuple[Any, ...], at: tuple[Any, Any]) -> None:
    """Wait for a tile and issue its logits: queries times this warpgroup's part of the keys."""
    products, logits, a, b = pair
    stage, phase = at
    shared.await_phase(memory.places.full + stage * 8, phase)
    cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, wgmma reads
    mainloop.multiply_stage(
        products, logits, a[None, None, None, 0], b[None, None, None, stage], begins=True
    )


@cute.jit
def begin_sums(lane: AttentionLane, pair: tuple[Any, ...], stage: Any) -> None:
    """Issue shares times values of a tile, the warpgroup's own keys first.

    Own shares come from registers, so wgmma runs while the other warpgroup's shares are awaited.
    """
    (of_registers, own_shares), (output, shares), sums, values = pair
    add_products(of_registers, sums, own_shares, (values, stage), (0, lane.half * STEPS_OF_KEYS))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=SHARES_READY, number_of_threads=CONSUMER_THREADS)
    other = (1 - lane.half) * STEPS_OF_KEYS
    add_products(output, sums, shares[None, None, None, 0], (values, stage), (other, other))
    warpgroup.commit_group()


@cute.jit
def add_products(
    mma: Any, sums: Any, shares: Any, values: tuple[Any, Any], first: tuple[Any, Any]
) -> None:
    """Add shares times values of 32 keys.

    `first` is the first step of 16 keys, in the shares' fragment and in the values'.
    """
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))  # as in mainloop.multiply_stage
    mma.set(warpgroup.Field.ACCUMULATE, True)
    tensor, stage = values
    warpgroup.fence()
    for k in cutlass.range_constexpr(STEPS_OF_KEYS):
        a = shares[None, None, first[0] + k]
        cute.gemm(mma, sums, a, tensor[None, None, first[1] + k, stage], sums)


def give_back(memory: Sm90AttentionMemory, lane: AttentionLane, stage: Any) -> None:
    """Arrive at the stage's empty barrier: this warp reads it no more."""
    cute.arch.sync_warp()
    shared.arrive(memory.places.full + (facts.STAGES + stage) * 8, lane.lane == 0)


def masks_of(masks: Any, stage: Any, lane: AttentionLane) -> tuple[list[Any], list[Any]]:
    """Return two 32-bit masks of a warpgroup's keys: present, and beyond the cache."""
    at = masks + stage * (2 * facts.TILE // 8) + Uint32(lane.half) * (facts.KEYS // 8)
    present, beyond = (shared.shared_words(at + i * (facts.TILE // 8), 1) for i in range(2))
    return present, beyond


@cute.jit
def hide(logits: Any, masks: tuple[list[Any], list[Any]], lane: AttentionLane) -> None:
    """Set logits of absent keys to -inf, and those of keys beyond the cache to NaN.

    Masks: of keys that are present, and of those beyond, a word for 32 keys each.
    """
    present, beyond = masks
    if reduce(and_, present) != 0xFFFF_FFFF:
        for block in cutlass.range_constexpr(BLOCKS * len(present)):
            for i in cutlass.range_constexpr(4):
                key = Uint32(lane.quad) * 2 + (block % BLOCKS * 8 + i % 2)
                absent = ops.select(
                    gather.bit(beyond[block // BLOCKS], key) == 1,
                    Float32(NAN),
                    Float32(-float("inf")),
                )
                here = gather.bit(present[block // BLOCKS], key) == 1
                logits[block * 4 + i] = ops.select(here, logits[block * 4 + i], absent)


def largest_logit(logits: Any, row: int) -> Any:
    """Return the largest logit of a row, over all lanes that hold it."""
    top = logits[2 * row]
    # Fragment: per eight columns two of this row, two of the row eight further on.
    for i in range(1, cute.size(logits) // 2):
        top = ptx.larger(top, logits[i // 2 * 4 + 2 * row + i % 2])
    for distance in (1, 2):
        top = ptx.larger(top, cute.arch.shuffle_sync_bfly(top, offset=distance))
    return top


def moved_peak(top: Any, before: Any) -> tuple[Any, Any, Any]:
    """Return a row's new peak, what is subtracted from logits, and the factor of older sums."""
    peak = ops.select(top > ops.add_rn(before, Float32(LEEWAY)), top, before)
    # -inf while no key has come: -inf - -inf would be NaN.
    against = merging.finite(peak)
    return peak, against, ptx.power_of_two(ops.subtract_rn(before, against))


def put_shares(
    registers: tuple[Any, Any], row: int, lane: AttentionLane, powers: tuple[Any, Any], to: Any
) -> Any:
    """Write a row's shares to registers and shared memory; return their sum, of this lane alone.

    Powers: the factor to base 2 and what is subtracted; `to` is an address and the first chunk.
    """
    (logits, words), (to_powers, against), (shares_at, first) = registers, powers, to
    total = Float32(0.0)
    for block in range(cute.size(logits) // 4):
        at = block * 4 + 2 * row
        pair = [ptx.power_of_two(ops.fma_rn(logits[at + i], to_powers, -against)) for i in range(2)]
        total = ops.add_rn(total, ops.add_rn(pair[0], pair[1]))
        place = gather.address_in_tile(Uint32(lane.row) + 8 * row, first + block)
        word = ptx.pair_rounded(pair[0], pair[1])
        ptx.store_word(shares_at + place + Uint32(lane.quad) * 4, word)
        words[block * 2 + row] = word
    return total


@cute.jit
def weigh(
    memory: Sm90AttentionMemory,
    lane: AttentionLane,
    registers: tuple[Any, Any],
    state: tuple[Any, Any, Any],
    step: tuple[Any, Any],
    entry: cutlass.Constexpr,
) -> None:
    """Turn logits into shares: in registers, and in shared memory for the other warpgroup.

    Both warpgroups subtract the same running peak, over the keys of both.
    """
    sums, peaks, totals = state
    logits, own_shares = registers
    if cutlass.const_expr(facts.halved(entry)):
        logits = exchange.joined(memory, lane, logits, entry)
    words = cute.recast_tensor(own_shares, Uint32)
    to_powers, stage = step
    hide(logits, masks_of(memory.places.masks, stage, lane), lane)
    tops = []
    for row in cutlass.range_constexpr(2):
        top = largest_logit(logits, row)
        tops.append(top)
        if lane.quad == 0:
            ptx.store_number(counts_at(memory, lane, lane.half, row), top)
    cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=CONSUMER_THREADS)
    factors = []
    for row in cutlass.range_constexpr(2):
        other = ptx.number_at(counts_at(memory, lane, 1 - lane.half, row))
        top = ops.multiply_rn(ptx.larger(tops[row], other), to_powers)
        peak, against, factor = moved_peak(top, peaks[row])
        peaks[row] = peak
        to = memory.shares_at, Uint32(lane.half) * (facts.KEYS // rows.HALF)
        total = put_shares((logits, words), row, lane, (to_powers, against), to)
        # Of this lane's keys only; share_totals adds lanes and warpgroups at the end.
        totals[row] = ops.fma_rn(totals[row], factor, total)
        factors.append(factor)
    # Decided by warp, so that no warp diverges.
    if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
        rescale(sums, factors)


def rescale(sums: Any, factors: list[Any]) -> None:
    """Multiply the output's sums by exp2(old peak - new peak) of their rows."""
    for i in range(cute.size(sums)):
        sums[i] = ops.multiply_rn(sums[i], factors[i // 2 % 2])


def counts_at(memory: Sm90AttentionMemory, lane: AttentionLane, half: Any, row: int) -> Any:
    """Return the shared address of a warpgroup's per-row number (maximum or total)."""
    return memory.counts_at + (Uint32(half) * facts.HEADS + Uint32(lane.row) + 8 * row) * 4


@cute.jit
def share_totals(memory: Sm90AttentionMemory, lane: AttentionLane, totals: Any) -> None:
    """Add up the sums of shares: over lanes, then over both warpgroups in a fixed order."""
    cute.arch.barrier(barrier_id=EXCHANGE, number_of_threads=CONSUMER_THREADS)
    for row in cutlass.range_constexpr(2):
        total = totals[row]
        for distance in (1, 2):
            total = ops.add_rn(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
        if lane.quad == 0:
            ptx.store_number(counts_at(memory, lane, lane.half, row), total)
    cute.arch.barrier(barrier_id=SHARES_READY, number_of_threads=CONSUMER_THREADS)
    for row in cutlass.range_constexpr(2):
        both = [ptx.number_at(counts_at(memory, lane, half, row)) for half in range(2)]
        totals[row] = ops.add_rn(both[0], both[1])


@cute.jit
def store_partial(
    addresses: AttentionAddresses,
    place: AttentionBlock,
    lane: AttentionLane,
    state: tuple[Any, Any, Any],
) -> None:
    """Write sums, peak and sum of shares of a split to the workspace, for the merge kernel."""
    sums, peaks, totals = state
    for row in cutlass.range_constexpr(2):
        head = place.head + lane.row + 8 * row
        if head < place.end:
            of_token = Int64(place.token) * Int64(place.splits) + Int64(place.split)
            number = of_token * Int64(place.heads) + Int64(head)
            if (lane.quad == 0) & (lane.half == 0):
                ptx.store_pair(addresses.stats + number * 8, peaks[row], totals[row])
            start = addresses.sums + (number * rows.WIDTH + lane.half * facts.COLUMNS) * 4
            for block in cutlass.range_constexpr(facts.COLUMNS // 8):
                at = block * 4 + 2 * row
                to = start + Int64(lane.quad) * 8 + block * 32
                ptx.store_pair(to, sums[at], sums[at + 1])


def sinks_of(
    addresses: AttentionAddresses, place: AttentionBlock, lane: AttentionLane, sinks: bool
) -> list[Any]:
    """Issue the reads of the sinks of a thread's two rows; of a row without a head, of any."""
    heads = [ops.minimum(place.head + lane.row + 8 * row, place.heads - 1) for row in range(2)]
    return [merging.sink_of(addresses.sink, head, sinks) for head in heads]


@cute.jit
def inverses_of(
    addresses: AttentionAddresses,
    place: AttentionBlock,
    lane: AttentionLane,
    stats: tuple[Any, Any],
    sinks: cutlass.Constexpr,
) -> list[Any]:
    """Write LSE; return what a thread's two rows are multiplied by.

    `sinks` says whether there are sinks, or is those of both rows, if they are read already.
    """
    peaks, totals = stats
    inverses = []
    for row in cutlass.range_constexpr(2):
        head = place.head + lane.row + 8 * row
        sink = Float32(0.0)
        if head < place.end:
            if cutlass.const_expr(isinstance(sinks, bool)):
                sink = merging.sink_of(addresses.sink, head, sinks)
            else:
                sink = sinks[row]
            if (lane.quad == 0) & (lane.half == 0):
                number = Int64(place.token) * Int64(place.heads) + Int64(head)
                ptx.store_single(
                    addresses.lse + number * 4, merging.lse_of(totals[row], peaks[row])
                )
        # One division a row; elements are multiplied by the inverse.
        inverses.append(merging.inverse_total(totals[row], peaks[row], sink))
    return inverses


@cute.jit
def store_rows(
    addresses: AttentionAddresses,
    place: Any,
    lane: Any,
    state: tuple[Any, Any, Any],
    more: tuple[Any, list[Any]],
) -> None:
    """Divide, round once, and write rows by way of 1,024 bytes of a warp, 32 columns at once.

    These bytes are the shares of second tiles: the next item's tiles may already lie elsewhere.
    Warpgroup 1 writes shares there again only after `FIRST`, at which every warp of warpgroup 0
    arrives when it has written its rows.
    """
    sums, peaks, totals = state
    staged_at, sinks = more
    inverses = inverses_of(addresses, place, lane, (peaks, totals), sinks)
    warp = Uint32(lane.half) * (facts.WARPGROUP // rows.LANES) + Uint32(lane.warp)
    at = staged_at + warp * STAGED_BYTES
    of_lane = Uint32(lane.lane)
    own, chunk = of_lane // STAGED_CHUNKS, of_lane % STAGED_CHUNKS
    first = Int64(place.token) * Int64(place.heads) + Int64(place.head)
    for begin in cutlass.range_constexpr(0, facts.COLUMNS // 8, STAGED_CHUNKS):
        for row in cutlass.range_constexpr(2):
            for block in cutlass.range_constexpr(STAGED_CHUNKS):
                number = (begin + block) * 4 + 2 * row
                pair = [ops.multiply_rn(sums[number + i], inverses[row]) for i in range(2)]
                to = at + staged_place(own + 8 * row, Uint32(block)) + chunk * 4
                ptx.store_word(to, ptx.pair_rounded(pair[0], pair[1]))
        cute.arch.sync_warp()
        for row in cutlass.range_constexpr(2):
            within = lane.warp * 16 + Int32(own) + 8 * row
            words = shared.shared_words(at + staged_place(own + 8 * row, chunk), 4)
            to = (first + Int64(within)) * gather.CHUNKS + Int64(lane.half * CHUNKS_OF_HALF)
            to = addresses.out + (to + begin + Int64(chunk)) * gather.CHUNK
            ptx.store_16_global_if(to, words, place.head + within < place.end)
        cute.arch.sync_warp()


def staged_place(row: Any, chunk: Any) -> Any:
    """Return the byte of a chunk in a warp's rows of 64 bytes; eight lanes meet all banks."""
    return row * (STAGED_CHUNKS * gather.CHUNK) + (chunk ^ row // 2 % STAGED_CHUNKS) * gather.CHUNK


@cute.jit
def store_output(
    addresses: AttentionAddresses,
    place: AttentionBlock,
    lane: AttentionLane,
    state: tuple[Any, Any, Any],
    more: tuple[Any, cutlass.Constexpr],
) -> None:
    """Divide by the sum with the sink, round once, and write rows through shared memory."""
    sums, peaks, totals = state
    tiles_at, sinks = more
    inverses = inverses_of(addresses, place, lane, (peaks, totals), sinks)
    # Half of a tile's columns, 64 rows of them, is as much as this warpgroup writes; nobody else
    # reads or writes them any more.
    first = Uint32(lane.half) * CHUNKS_OF_HALF
    for row in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(facts.COLUMNS // 8):
            at = block * 4 + 2 * row
            pair = [ops.multiply_rn(sums[at + i], inverses[row]) for i in range(2)]
            to = gather.address_in_tile(Uint32(lane.row) + 8 * row, first + block)
            word = ptx.pair_rounded(pair[0], pair[1])
            ptx.store_word(tiles_at + to + Uint32(lane.quad) * 4, word)
    cute.arch.sync_warp()
    for turn in cutlass.range_constexpr(16):
        within = lane.warp * 16 + turn
        head = place.head + within
        if head < place.end:
            from_ = gather.address_in_tile(Uint32(within), first + Uint32(lane.lane))
            words = shared.shared_words(tiles_at + from_, 4)
            number = Int64(place.token) * Int64(place.heads) + Int64(head)
            chunk = number * gather.CHUNKS + Int64(first + Uint32(lane.lane))
            ptx.store_16(addresses.out + chunk * gather.CHUNK, words)
