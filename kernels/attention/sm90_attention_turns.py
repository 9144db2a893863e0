"""Sparse attention on Hopper whose two warpgroups weigh in turns.

Prefill from BF16 entries, and V3.2's decoding from E4M3. A thread block has one token, 64 heads and
a split; in prefill it goes on to further tokens and groups of heads. Tiles of 64 keys come in
pairs. Warpgroup 0 has the logits of a pair's first tile, warpgroup 1 those of its second; each has
half of the output's columns, of all tiles. While one weighs, the other's products keep the matrix
unit busy.

* Warpgroup 0: logits; weighs; `FIRST`; adds the first tile, its own shares in registers; `SECOND`;
  adds the second tile, the other's shares in shared memory.
* Warpgroup 1: logits; `FIRST`; adds the first tile and weighs meanwhile; `SECOND`; adds the second.
* Warpgroup 2 (producers) brings tiles in two parts, by columns of the output: `full[stage][part]`,
  every thread when its copies land, and every warp where masks come with it; `empty[stage][part]`,
  4 arrivals: the warps of the warpgroup that has these columns.
* Warpgroups 2 and 3 where entries hold codes (gather.py): both parts of a stage at once; every
  thread and warp arrives at both. They are slower than products, so warpgroup 1 adds the first
  tile before it has logits, while the second one is decoded. Clusters of two splits go on to
  further tokens and groups of heads: queries are copied and tiles brought while sums are
  exchanged, and the last tile is given back after that (exchange.merge_and_stay).
* In prefill warpgroup 2 brings queries as well, and is ahead of the end of a token: `given` holds
  two barriers, queries that have come (every thread's copies) and queries that nobody reads any
  more (8 arrivals, a warp's behind its last logits). Rows leave by way of the shares of second
  tiles, since the next token's tiles may have come. `STAYED` ends a token for both warpgroups.

Both halves of the output have the same order of sums, that of the tiles: peaks, totals and sums are
brought to the first tile's peak and the first tile is added, 16 keys at a time; then the second.
Logits are sums over the whole key, 16 values at a time. Where the last pair of a split has one
tile, the other lies beyond every list and changes no bit. Everything else, the merge of splits
included, is that of sm90_attention_kernel.
"""

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import exchange, gather
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention import sm90_attention_kernel as base
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import opaque
from degarble.kernels.runtime.pdl import EARLY, follow

FIRST, SECOND = 5, 6  # named barriers: shares and peaks of a pair's first tile, of its second
STAYED = 7  # a named barrier between the items of a thread block that stays
PARTS = facts.PARTS
STEPS_OF_TILE = facts.TILE // base.STEP
STEPS_OF_PART = facts.COLUMNS // base.STEP
SHARES_BYTES = 2 * facts.HEADS * facts.TILE
KEY_BLOCK = rows.WIDTH // 64  # V3.2's turned key: read for logits alone, then room for shares


@cute.kernel
def turns_kernel(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Take a role by warpgroup: 0 and 1 multiply, the others bring keys."""
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = base.shared_memory(form)
    plan = facts.plan_of(form)
    begin_barriers(memory, plan, form)
    if cutlass.const_expr(form.pairs_stay):
        # The other block arrives at barriers of this one long before it ends.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if cutlass.const_expr(form.pairs_stay):
        many_pairs(addresses, extents, (memory, plan, group), scale, form)
    elif cutlass.const_expr(form.stays):
        many_items(addresses, extents, (memory, plan, group), scale, form)
    else:
        one_item(addresses, extents, (memory, plan, group), scale, form)


@cute.jit
def many_items(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    standing: tuple[Any, cutlass.Constexpr, Any],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Attend with tokens and groups of heads, one after the other: prefill."""
    thread, _, _ = cute.arch.thread_idx()
    memory, plan, group = standing
    multiplying, bringing = facts.registers_in_turns(plan)
    if group >= facts.CONSUMERS:
        cute.arch.setmaxregister_decrease(bringing)
        follow()
        bring_items(addresses, extents, memory, plan, form)
    else:
        cute.arch.setmaxregister_increase(multiplying)
        lane = base.lane_of(group, thread)
        follow()
        attend_items(addresses, extents, (memory, lane), scale, form)


@cute.jit
def one_item(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    standing: tuple[Any, cutlass.Constexpr, Any],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Attend with one token, group of heads and split: decoding."""
    thread, _, _ = cute.arch.thread_idx()
    memory, plan, group = standing
    multiplying, bringing = facts.registers_in_turns(plan)
    # Each role waits for the previous launch when it has its registers, and knows its place.
    place = base.place_of(extents)
    if group >= facts.CONSUMERS:
        cute.arch.setmaxregister_decrease(bringing)
        follow()
        lists, widths, walk = base.lists_of(addresses, extents, place, form)
        pairs = (walk[2] + 1) // 2
        even = walk[0], walk[1], 2 * pairs, walk[2]
        begin = gather.first_stage()
        gather.produce_codes(lists, widths, even, memory.places, plan, begin)
        base.stay_for_others(form)
    else:
        cute.arch.setmaxregister_increase(multiplying)
        lane = base.lane_of(group, thread)
        follow()
        base.load_queries(addresses.q, place, memory.queries_at, form.width // rows.HALF)
        _, _, walk = base.lists_of(addresses, extents, place, form)
        pairs = (walk[2] + 1) // 2
        state = base.state_of(form)
        add_pairs(memory, lane, (pairs, Uint32(0)), state, (scale, form))
        # Found again, as the compiler cannot know: no register holds it meanwhile.
        place = base.place_of(extents, opaque)
        base.finish(addresses, (place, lane), state, memory, form)


def pairs_of(extents: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """Return a cluster's first item, their number, the distance to its next one, and the rank."""
    tokens, heads, *_, of_block = extents
    items = tokens * ((heads + of_block - 1) // of_block)
    block = Int32(cute.arch.block_idx()[0])
    return block // 2, items, Int32(cute.arch.grid_dim()[0]) // 2, block % 2


@cute.jit
def many_pairs(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    standing: tuple[Any, cutlass.Constexpr, Any],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Attend with tokens and groups of heads, one after the other, a split of each: decoding."""
    thread, _, _ = cute.arch.thread_idx()
    memory, plan, group = standing
    multiplying, bringing = facts.registers_in_turns(plan)
    first, items, distance, rank = pairs_of(extents)
    if group >= facts.CONSUMERS:
        cute.arch.setmaxregister_decrease(bringing)
        follow()
        at = gather.first_stage()
        for item in cutlass.range(first, items, distance, unroll=1):
            place = base.place_of_item(item * 2 + rank, extents)
            lists, widths, walk = base.lists_of(addresses, extents, place, form)
            even = walk[0], walk[1], 2 * ops.maximum((walk[2] + 1) // 2, 1), walk[2]
            at = gather.produce_codes(lists, widths, even, memory.places, plan, at)
    else:
        cute.arch.setmaxregister_increase(multiplying)
        lane = base.lane_of(group, thread)
        follow()
        attend_pairs(addresses, extents, (memory, lane), scale, form)


@cute.jit
def attend_pairs(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    standing: tuple[Any, Any],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Attend with every token and group of this cluster, in the warpgroups that multiply.

    A split without tiles has a pair that lies beyond every list, as many last tiles do.
    """
    memory, lane = standing
    chunks = form.width // rows.HALF
    first, items, distance, rank = pairs_of(extents)
    base.begin_queries(
        addresses.q, base.place_of_item(first * 2, extents), memory.queries_at, chunks
    )
    state = base.state_of(form)
    phase, turn = Uint32(0), Uint32(0)
    at = memory.places.tiles + facts.TILE * form.width * 2  # the last tile's place
    for item in cutlass.range(first, items, distance, unroll=1):
        base.await_queries()  # and both warpgroups are done with the totals before
        place = base.place_of_item(item * 2 + rank, extents)
        _, _, walk = base.lists_of(addresses, extents, place, form)
        pairs = ops.maximum((walk[2] + 1) // 2, 1)
        add_pairs(memory, lane, (pairs, phase), state, (scale, form))
        phase = phase ^ (Uint32(pairs) & 1)
        if item + distance < items:
            # Nobody reads queries any more: share_totals has barriers.
            following = base.place_of_item((item + distance) * 2, extents)
            base.begin_queries(addresses.q, following, memory.queries_at, chunks)
        # Found again, as the compiler cannot know: no register holds it meanwhile.
        place = base.place_of_item(opaque(item) * 2 + rank, extents)
        exchange.merge_and_stay(addresses, (place, lane), state, memory, (at, turn), form.sinks)
        give_back(memory, lane, (1, lane.half))
        turn = turn ^ 1


@cute.jit
def add_pairs(
    memory: Any,
    lane: Any,
    walk: tuple[Any, ...],
    state: tuple[Any, Any, Any],
    given: tuple[Any, cutlass.Constexpr],
) -> None:
    """Add up a split: the number of its pairs, the phase of the first, and where queries end.

    The last is the barrier of empty queries, where a thread block stays.
    """
    base.begin_split(state)
    if cutlass.const_expr(len(walk) > 2):
        # Without pairs, queries are read by nobody.
        shared.arrive(walk[2], (lane.lane == 0) & (walk[0] == 0))
    if walk[0] > 0:
        if lane.half == 0:
            first_of_pairs(memory, lane, walk, state, given)
        else:
            second_of_pairs(memory, lane, walk, state, given)
    base.share_totals(memory, lane, state[2])


def items_of(extents: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Return a thread block's first item, their number, and the distance to its next one."""
    tokens, heads, *_, of_block = extents
    items = tokens * ((heads + of_block - 1) // of_block)
    return Int32(cute.arch.block_idx()[0]), items, Int32(cute.arch.grid_dim()[0])


@cute.jit
def attend_items(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    standing: tuple[Any, Any],
    scale: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Attend with every item of this thread block."""
    memory, lane = standing
    first, items, distance = items_of(extents)
    state = base.state_of(form)
    phase, of_queries = Uint32(0), Uint32(0)
    for item in cutlass.range(first, items, distance, unroll=1):
        shared.await_phase(memory.given, of_queries)
        cute.arch.fence_proxy("async.shared", space="cta")
        of_queries = of_queries ^ 1
        place = base.place_of_item(item, extents)
        sinks = base.sinks_of(addresses, place, lane, form.sinks)  # in time for the end
        _, _, walk = base.lists_of(addresses, extents, place, form)
        pairs = (walk[2] + 1) // 2
        add_pairs(memory, lane, (pairs, phase, memory.given + 8), state, (scale, form))
        phase = phase ^ (Uint32(pairs) & 1)
        # Found again, as the compiler cannot know: no register holds it meanwhile.
        place = base.place_of_item(opaque(item), extents)
        # Both warpgroups have added the shares of second tiles: share_totals has barriers.
        second = 0 if facts.shares_over_keys(form.format) else SHARES_BYTES
        base.store_rows(addresses, place, lane, state, (memory.shares_at + second, sinks))
        # Both have read the totals: the next item's peaks go to the same bytes.
        cute.arch.barrier(barrier_id=STAYED, number_of_threads=base.CONSUMER_THREADS)


@cute.jit
def begin_barriers(memory: Any, how: cutlass.Constexpr, form: cutlass.Constexpr) -> None:
    """Initialise the barriers of stages and parts in one thread."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for stage in cutlass.range_constexpr(facts.STAGES):
            for part in cutlass.range_constexpr(PARTS):
                full = memory.places.full + (stage * PARTS + part) * 8
                # Masks come with the first part; where codes are decoded, both parts come at once.
                several = part == 0 or how.turns > 0
                shared.begin_barrier(full, how.arrivals if several else how.threads)
                empty = full + facts.STAGES * PARTS * 8
                shared.begin_barrier(empty, facts.WARPGROUP // rows.LANES)
        if cutlass.const_expr(form.together == exchange.TOGETHER):
            exchange.begin_barriers_of_given(memory.given)
        if cutlass.const_expr(form.stays):
            # Queries have come: every thread's copies; and nobody reads them: a warp each.
            shared.begin_barrier(memory.given, how.threads)
            shared.begin_barrier(memory.given + 8, base.CONSUMER_THREADS // rows.LANES)
        cute.arch.mbarrier_init_fence()


def fragments(memory: Any, lane: Any, entry: Any) -> tuple[Any, ...]:
    """Return instructions and operands of a warpgroup: logits, then shares times values."""
    products = mainloop.mma_of(BFloat16, facts.TILE)
    logits = mainloop.sums_of(products, facts.TILE)
    a = products.make_fragment_A(products.get_slice(0).partition_A(memory.queries))
    b = products.make_fragment_B(products.get_slice(0).partition_B(memory.keys))
    at_once = facts.columns_at_once(entry)
    output = base.wgmma_of_output(at_once)
    of_half = facts.COLUMNS, facts.TILE, facts.STAGES
    columns = cute.local_tile(memory.values, of_half, (lane.half, 0, 0))
    values = output.make_fragment_B(output.get_slice(0).partition_B(columns))
    of_registers = base.wgmma_of_output(at_once, warpgroup.OperandSource.RMEM)
    own = of_registers.make_fragment_A(of_registers.partition_shape_A((facts.HEADS, facts.TILE)))
    return (products, logits, a, b), (of_registers, own, output, values)


def shares_of(memory: Any, number: int, output: Any, entry: Any) -> tuple[Any, Any]:
    """Return the operand and the address of the shares of a pair's first or second tile."""
    of_one = facts.HEADS, facts.TILE, 1
    if facts.shares_over_keys(entry):
        # The turned key of the first tile has done its part when its shares are known.
        if number == 0:
            tensor = cute.local_tile(memory.keys, of_one, (0, KEY_BLOCK, 0))
            at = memory.places.tiles + KEY_BLOCK * SHARES_BYTES
        else:
            tensor, at = memory.shares, memory.shares_at
    else:
        tensor = cute.local_tile(memory.shares, of_one, (0, 0, number))
        at = memory.shares_at + number * SHARES_BYTES
    return output.make_fragment_A(output.get_slice(0).partition_A(tensor)), at


@cute.jit
def first_of_pairs(
    memory: Any,
    lane: Any,
    walk: tuple[Any, ...],
    state: tuple[Any, Any, Any],
    given: tuple[Any, cutlass.Constexpr],
) -> None:
    """Weigh the first tile of every pair; add both tiles to the output's first columns."""
    scale, form = given
    entry = form.format
    pairs, phase, *queries = walk
    of_logits, of_sums = fragments(memory, lane, entry)
    # Logits are taken to base 2: exp(scale * x) = exp2(scale * log2(e) * x).
    to_powers = ops.multiply_rn(scale, merging.LOG2_E)
    begin_logits(memory, of_logits, (0, phase), 0)
    begin_logits(memory, of_logits, (0, phase), 1)
    warpgroup.wait_group(0)
    for _ in cutlass.range(Int32(1), pairs, unroll=1):
        first_turn(memory, lane, (of_logits[1], of_sums), state, (to_powers, entry))
        phase = phase ^ 1
        begin_logits(memory, of_logits, (0, phase), 0)
        warpgroup.wait_group(1)
        give_back(memory, lane, (1, 0))
        begin_logits(memory, of_logits, (0, phase), 1)
        # Trap: were they under way where the loop begins anew, ptxas would wait for each.
        warpgroup.wait_group(0)
    give_queries_back(queries, lane, True)
    first_turn(memory, lane, (of_logits[1], of_sums), state, (to_powers, entry))
    warpgroup.wait_group(0)
    if cutlass.const_expr(not form.pairs_stay):
        give_back(memory, lane, (1, 0))


@cute.jit
def first_turn(
    memory: Any,
    lane: Any,
    operands: tuple[Any, Any],
    state: tuple[Any, Any, Any],
    given: tuple[Any, cutlass.Constexpr],
) -> None:
    """Weigh the first tile, add it, and begin to add the second."""
    logits, (of_registers, own, output, values) = operands
    to_powers, entry = given
    sums = state[0]
    _, own_at = shares_of(memory, 0, output, entry)
    theirs, _ = shares_of(memory, 1, output, entry)
    factors = weigh(memory, lane, (logits, own), state, (to_powers, own_at, 0))
    rescale_where(sums, factors)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier_arrive(barrier_id=FIRST, number_of_threads=base.CONSUMER_THREADS)
    add_tile(of_registers, sums, own, (values, 0))
    warpgroup.wait_group(0)
    give_back(memory, lane, (0, 0))
    cute.arch.barrier(barrier_id=SECOND, number_of_threads=base.CONSUMER_THREADS)
    rescale_where(sums, taken_peaks(memory, lane, state, 1))
    add_tile(output, sums, theirs[None, None, None, 0], (values, 1))


@cute.jit
def second_of_pairs(
    memory: Any,
    lane: Any,
    walk: tuple[Any, ...],
    state: tuple[Any, Any, Any],
    given: tuple[Any, cutlass.Constexpr],
) -> None:
    """Weigh the second tile of every pair; add both tiles to the output's other columns."""
    scale, form = given
    entry = form.format
    pairs, phase, *queries = walk
    of_logits, (of_registers, own, output, values) = fragments(memory, lane, entry)
    sums = state[0]
    theirs, _ = shares_of(memory, 0, output, entry)
    _, own_at = shares_of(memory, 1, output, entry)
    to_powers = ops.multiply_rn(scale, merging.LOG2_E)
    of_first = (output, theirs), (sums, values)
    for pair in cutlass.range(Int32(0), pairs, unroll=1):
        if cutlass.const_expr(entry.code_bytes > 0):
            # While the second tile is decoded: its stage comes last, the first tile's is wanted.
            cute.arch.barrier(barrier_id=FIRST, number_of_threads=base.CONSUMER_THREADS)
            shared.await_phase(memory.places.full + 8, phase)  # it has come: warpgroup 0 had it
            cute.arch.fence_proxy("async.shared", space="cta")
            add_first(memory, lane, state, of_first)
            warpgroup.wait_group(0)
            give_back(memory, lane, (0, 1))
        begin_logits(memory, of_logits, (1, phase), 0)
        begin_logits(memory, of_logits, (1, phase), 1)
        warpgroup.wait_group(0)
        give_queries_back(queries, lane, pair + 1 == pairs)
        if cutlass.const_expr(entry.code_bytes == 0):
            cute.arch.barrier(barrier_id=FIRST, number_of_threads=base.CONSUMER_THREADS)
            add_first(memory, lane, state, of_first)
        factors = weigh(memory, lane, (of_logits[1], own), state, (to_powers, own_at, 1))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=SECOND, number_of_threads=base.CONSUMER_THREADS)
        if cutlass.const_expr(entry.code_bytes == 0):
            warpgroup.wait_group(0)
            give_back(memory, lane, (0, 1))
        rescale_where(sums, factors)
        add_tile(of_registers, sums, own, (values, 1))
        warpgroup.wait_group(0)
        # Where pairs stay, the last one's stage is given back after the merge.
        given_back = pair + 1 < pairs if form.pairs_stay else True
        give_back(memory, lane, (1, 1), given_back)
        phase = phase ^ 1


@cute.jit
def add_first(memory: Any, lane: Any, state: tuple[Any, ...], of: tuple[Any, Any]) -> None:
    """Take the peaks of a pair's first tile, and begin to add it by the other's shares."""
    (output, theirs), (sums, values) = of
    rescale_where(sums, taken_peaks(memory, lane, state, 0))
    add_tile(output, sums, theirs[None, None, None, 0], (values, 0))


@cute.jit
def begin_logits(
    memory: Any,
    of_logits: tuple[Any, ...],
    at: tuple[cutlass.Constexpr, Any],
    part: cutlass.Constexpr,
) -> None:
    """Wait for a part of a tile, and issue its products with queries."""
    products, logits, a, b = of_logits
    stage, phase = at
    shared.await_phase(memory.places.full + (stage * PARTS + part) * 8, phase)
    cute.arch.fence_proxy("async.shared", space="cta")  # what threads wrote, wgmma reads
    last = cute.size(a, mode=[2])
    steps = (0, STEPS_OF_PART, 0) if part == 0 else (STEPS_OF_PART, last, 0)
    mainloop.multiply_stage(
        products,
        logits,
        a[None, None, None, 0],
        b[None, None, None, stage],
        begins=part == 0,
        steps=steps,
    )


@cute.jit
def add_tile(mma: Any, sums: Any, shares: Any, of: tuple[Any, cutlass.Constexpr]) -> None:
    """Issue shares times values of a tile."""
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))  # as in mainloop.multiply_stage
    mma.set(warpgroup.Field.ACCUMULATE, True)
    values, stage = of
    warpgroup.fence()
    for k in cutlass.range_constexpr(STEPS_OF_TILE):
        cute.gemm(mma, sums, shares[None, None, k], values[None, None, k, stage], sums)
    warpgroup.commit_group()


def give_back(memory: Any, lane: Any, of: tuple[int, Any], given: Any = True) -> None:
    """Arrive at the empty barrier of a stage's part, if `given`: this warp reads it no more."""
    stage, part = of
    cute.arch.sync_warp()
    at = memory.places.full + (facts.STAGES + stage) * PARTS * 8 + Uint32(part) * 8
    one = lane.lane == 0
    shared.arrive(at, one if given is True else one & given)


def give_queries_back(queries: list[Any], lane: Any, last: Any) -> None:
    """Arrive, where a thread block stays, at the barrier of empty queries behind their last use."""
    if queries:
        cute.arch.sync_warp()
        shared.arrive(queries[0], (lane.lane == 0) & last)


@cute.jit
def weigh(
    memory: Any,
    lane: Any,
    registers: tuple[Any, Any],
    state: tuple[Any, Any, Any],
    step: tuple[Any, Any, cutlass.Constexpr],
) -> Any:
    """Turn a tile's logits into shares, in registers and shared memory; return both factors."""
    _, peaks, totals = state
    logits, own = registers
    words = cute.recast_tensor(own, Uint32)
    to_powers, shares_at, number = step
    at = memory.places.masks + number * (2 * facts.TILE // 8)
    masks = [shared.shared_words(at + i * (facts.TILE // 8), 2) for i in range(2)]
    base.hide(logits, masks, lane)
    factors = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        top = ops.multiply_rn(base.largest_logit(logits, row), to_powers)
        peak, against, factor = base.moved_peak(top, peaks[row])
        factors[row] = factor
        peaks[row] = peak
        if lane.quad == 0:
            ptx.store_number(base.counts_at(memory, lane, number, row), peak)
        to = shares_at, Uint32(0)
        total = base.put_shares((logits, words), row, lane, (to_powers, against), to)
        # Of this lane's keys only; share_totals adds lanes and warpgroups at the end.
        totals[row] = ops.fma_rn(totals[row], factors[row], total)
    return factors


@cute.jit
def taken_peaks(
    memory: Any, lane: Any, state: tuple[Any, Any, Any], number: cutlass.Constexpr
) -> Any:
    """Take the peaks that the other warpgroup has found; return the factors to them."""
    _, peaks, totals = state
    factors = cute.make_rmem_tensor(2, Float32)
    for row in cutlass.range_constexpr(2):
        peak = ptx.number_at(base.counts_at(memory, lane, number, row))
        factors[row] = ptx.power_of_two(ops.subtract_rn(peaks[row], merging.finite(peak)))
        peaks[row] = peak
        totals[row] = ops.multiply_rn(totals[row], factors[row])
    return factors


@cute.jit
def rescale_where(sums: Any, factors: Any) -> None:
    """Bring sums to new peaks if a row of the warp has one; decided by warp: none diverges."""
    if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
        base.rescale(sums, [factors[0], factors[1]])


# ---- bringing BF16 entries in parts --------------------------------------------------------------

ORDER = ((0, 0), (0, 1), (1, 0), (1, 1))  # stage and part, as they are given back


@cute.jit
def bring_items(
    addresses: base.AttentionAddresses,
    extents: tuple[Any, ...],
    memory: Any,
    how: cutlass.Constexpr,
    form: cutlass.Constexpr,
) -> None:
    """Bring queries and tiles of every item of this thread block, as soon as there is room."""
    first, items, distance = items_of(extents)
    # The first waits for empty queries and parts return at once.
    phase, of_queries = Uint32(1), Uint32(1)
    for item in cutlass.range(first, items, distance, unroll=1):
        place = base.place_of_item(item, extents)
        lists, widths, walk = base.lists_of(addresses, extents, place, form)
        even = walk[0], walk[1], 2 * ((walk[2] + 1) // 2), walk[2]
        slots = slots_of_pair(lists, Int32(0), even, widths, how)
        barriers = memory.given, memory.given + 8, of_queries
        gather.bring_queries(
            gather.NextQueries(addresses.q, place, memory.queries_at, *barriers), how
        )
        phase = produce_in_parts(lists, widths, even, (memory.places, slots, phase), how)
        of_queries = of_queries ^ 1
    ptx.end_of_copies()


@cute.jit
def produce_in_parts(
    lists: tuple[gather.List, gather.List],
    widths: tuple[Any, Any],
    walk: tuple[Any, ...],
    given: tuple[gather.TileAddresses, Any, Any],
    how: cutlass.Constexpr,
) -> Any:
    """Bring both tiles of every pair, each part as soon as it is given back; return the phase.

    `given` are places, the slots of the first pair, which are being read, and its phase.
    """
    places, slots, phase = given
    pairs = walk[2] // 2
    lane, warp = gather.standpoint(how)
    targets = gather.targets_of_rows(places.tiles, lane, warp, how)
    for pair in cutlass.range(Int32(0), pairs, unroll=1):
        found = [
            gather.rows_of(
                slots[stage], lists, gather.tile_of_step(2 * pair + stage, walk, widths), widths,
                how,
            )
            for stage in range(facts.STAGES)
        ]  # fmt: skip
        slots = slots_of_pair(lists, pair + 1, walk, widths, how)
        for turn in cutlass.range_constexpr(len(ORDER)):
            stage, part = ORDER[turn]
            full = places.full + (stage * PARTS + part) * 8
            shared.await_phase(full + facts.STAGES * PARTS * 8, phase)
            copy_part(found[stage], targets, (stage, part), how)
            ptx.arrive_behind_copies(full)
            if part == 0:
                if lane == 0:
                    gather.leave_masks(found[stage], places.masks, (Uint32(stage), warp), how)
                cute.arch.sync_warp()
                shared.arrive(full, lane == 0)
        phase = phase ^ 1
    return phase


def slots_of_pair(
    lists: tuple[gather.List, gather.List],
    pair: Any,
    walk: tuple[Any, ...],
    widths: tuple[Any, Any],
    how: Any,
) -> tuple[Any, Any]:
    """Issue the reads of a lane's slots of both tiles of a pair."""
    tiles = [gather.tile_of_step(2 * pair + stage, walk, widths) for stage in range(2)]
    first, second = (gather.slot_of(lists, tile, widths, how) for tile in tiles)
    return first, second


def copy_part(
    found: gather.GatheredRows, targets: tuple[Any, Any], at: tuple[int, int], how: Any
) -> None:
    """Issue cp.async of a part's columns of a warp's rows, 128 bytes of four rows at once."""
    lane, _ = gather.standpoint(how)
    stage, part = at
    blocks = how.entry.width // 64
    some = range(blocks // 2) if part == 0 else range(blocks // 2, blocks)
    for turn in range(how.rows_of_warp // gather.ROWS_OF_COPY):
        row = lane // gather.LANES_OF_ROW + turn * gather.ROWS_OF_COPY
        source = found.cache + Int64(gather.of_row(found.values, row)) * gather.CHUNK
        source = source + Int64(lane % gather.LANES_OF_ROW) * gather.CHUNK
        size = gather.bit(found.present, row) * gather.CHUNK
        # Rows eight apart have the same swizzle.
        first = stage * (facts.TILE * how.entry.width * 2) + turn // 2 * 1024
        for block in some:
            ptx.copy_16_at(
                (targets[turn % 2], first + block * gather.BLOCK_BYTES), (source, block * 128), size
            )


# ---- launch --------------------------------------------------------------------------------------


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
    addresses = base.AttentionAddresses(*(Int64(pointer.toint()) for pointer in pointers))
    kernel = turns_kernel if form.turns else base.attention_kernel
    kernel(addresses, tuple(inner), scale, form).launch(
        grid=[blocks, 1, 1],
        block=[facts.threads(form.format), 1, 1],
        cluster=[max(1, form.together), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )
