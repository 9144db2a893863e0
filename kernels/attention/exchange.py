"""Exchange of partial results between warpgroups, and between the thread blocks of a cluster."""

from typing import Any

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import gather
from degarble.kernels.attention import instructions as ptx
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.gemm import w4a16_instructions as shared
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.kv_problem import EntryFormat

# --------------------------------------------------------------------------------------------------
# Merge the splits of one token through the shared memory of a cluster of up to 8 thread blocks.
#
# Each thread block leaves its float32 sums [64, 512] where the tiles were, and the peaks and totals
# of its 64 rows. After a cluster barrier a block of rank r writes rows r, r + together, ..., each
# from what all blocks left. Splits are added in their order by the arithmetic of
# simt_attention_merge, so the bits are those of the merge kernel. On Hopper, clusters of two use
# merge_two instead.
#
# Every thread of the cluster has to take part in its barriers, producers included.

SEGMENT = 32  # bytes that four lanes write
ROW_BYTES = 4 * rows.WIDTH
VALUES = 4  # of a lane, side by side
TURNS = rows.WIDTH // (VALUES * rows.LANES)
WARPS = facts.CONSUMERS * facts.WARPGROUP // rows.LANES
MOST_AT_ONCE = 8  # rows of splits in registers: 16 numbers each


def address_of_sum(row: Any, segment: Any) -> Any:
    """Return the byte of a row's eight sums; neighbouring rows lie in different banks."""
    return row * ROW_BYTES + (segment ^ row % 8) * SEGMENT


@cute.jit
def leave(tiles_at: Any, stats_at: Any, lane: Any, state: tuple[Any, Any, Any]) -> None:
    """Write a warpgroup's sums, peaks and totals to shared memory for the cluster."""
    sums, peaks, totals = state
    for row in cutlass.range_constexpr(2):
        number = Uint32(lane.row) + 8 * row
        if (lane.quad == 0) & (lane.half == 0):
            ptx.store_numbers(stats_at + number * 8, peaks[row], totals[row])
        for block in cutlass.range_constexpr(facts.COLUMNS // 8):
            segment = Uint32(lane.half) * (facts.COLUMNS // 8) + block
            at = tiles_at + address_of_sum(number, segment) + Uint32(lane.quad) * 8
            ptx.store_numbers(at, sums[block * 4 + 2 * row], sums[block * 4 + 2 * row + 1])


@cute.jit
def write_rows(
    addresses: Any,
    place: Any,
    shared: tuple[Any, Any],
    position: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Write this thread block's rows; `position` is the warp among eight, and the lane."""
    warp, lane = position
    together = form.together
    turns = -(-facts.HEADS // (WARPS * together))
    # A row of a split is 16 registers of a lane; MOST_AT_ONCE bounds them.
    at_once = max(1, MOST_AT_ONCE // together)
    for begin in cutlass.range_constexpr(0, turns, at_once):
        mine = [
            (warp + turn * WARPS) * together + place.split
            for turn in range(begin, min(begin + at_once, turns))
        ]
        # What other thread blocks have is far away: everything is asked for before any is used.
        kept = [Uint32(ops.minimum(row, facts.HEADS - 1)) for row in mine]
        stats = [
            [ptx.numbers_of_rank(shared[1] + row * 8, rank, 2) for rank in range(together)]
            for row in kept
        ]
        read = [
            [row_of_rank(shared[0], row, Uint32(lane), rank) for rank in range(together)]
            for row in kept
        ]
        for i in cutlass.range_constexpr(len(mine)):
            head = place.head + mine[i]
            wanted = (mine[i] < place.of_block) & (head < place.heads)
            which = head, lane, wanted
            merge_row(addresses, place, (stats[i], read[i]), which, form.sinks)


def row_of_rank(tiles_at: Any, row: Any, lane: Any, rank: int) -> list[Any]:
    """Issue the reads of a lane's sums of a row of one split."""
    made = []
    for turn in range(TURNS):
        segment = lane // 2 + turn * (rows.LANES // 2)
        at = tiles_at + address_of_sum(row, segment) + lane % 2 * 16
        made += ptx.numbers_of_rank(at, rank, VALUES)
    return made


def merge_row(
    addresses: Any,
    place: Any,
    found: tuple[Any, Any],
    which: tuple[Any, Any, Any],
    sinks: bool,
) -> None:
    """Add up a row of all splits, divide, round once, and write where the row is wanted.

    No branches: the compiler would sink the loads that only a branch uses into that branch.
    """
    stats, read = found
    head, lane, wanted = which
    lane = Uint32(lane)
    largest = stats[0][0]
    for peak, _ in stats[1:]:
        largest = ptx.larger(largest, peak)
    total = Float32(0.0)
    sums = [Float32(0.0)] * (TURNS * VALUES)
    for (peak, of_split), row in zip(stats, read, strict=True):
        # A split without keys (total 0, peak -inf) contributes nothing.
        counts = of_split != 0.0
        factor = merging.factor_of(peak, largest)
        total = ops.select(counts, ops.fma_rn(of_split, factor, total), total)
        sums = [
            ops.select(counts, ops.fma_rn(number, factor, so_far), so_far)
            for number, so_far in zip(row, sums, strict=True)
        ]
    kept = Int64(ops.minimum(head, place.heads - 1))
    sink = merging.sink_of(addresses.sink, kept, sinks)
    inverse = merging.inverse_total(total, largest, sink)
    number = Int64(place.token) * Int64(place.heads) + kept
    lse = merging.lse_of(total, largest)
    ptx.store_single_if(addresses.lse + number * 4, lse, wanted & (lane == 0))
    for turn in range(TURNS):
        four = [ops.multiply_rn(sums[turn * VALUES + i], inverse) for i in range(VALUES)]
        words = [ptx.pair_rounded(four[i], four[i + 1]) for i in (0, 2)]
        value = number * rows.WIDTH + Int64(lane * VALUES + turn * VALUES * rows.LANES)
        ptx.store_8_if(addresses.out + value * 2, words, wanted)


# --------------------------------------------------------------------------------------------------
# Exchange of partial results: logits between warpgroups, sums between two thread blocks.
#
# `joined`: a warpgroup has logit sums over half of the latent for all 64 keys of a tile; it gives
# the other warpgroup the sums of that one's 32 keys and adds what it receives. `merge_two`: the end
# of attention where a cluster has two splits. A thread has sums of two rows, keeps the row that its
# thread block writes, and sends the other to the same thread of the other block by st.async; the
# receiver's `given` barriers expect a part of the bytes each (1 arrival), so that one part is added
# while others come. Splits are added in their order, so the bits are those of
# simt_attention_merge.
#
# The received sums overwrite the first tile. So a block sends only after a cluster barrier, at
# which both blocks have finished reading tiles. `merge_and_stay`: the same where the tiles of other
# tokens are on their way; sums overwrite the tile that came last.

TOGETHER = facts.PAIR  # splits of a cluster that end here
LOGITS_READY = 4  # a barrier of the warpgroups that multiply
ROUNDS_OF_LOGITS = facts.KEYS // 2 // VALUES
ROUNDS = facts.COLUMNS // 8 * 2 // VALUES
ROW_OF_ROUND = facts.CONSUMER_THREADS * 4 * VALUES  # bytes
TILE_BYTES = 2 * facts.TILE * rows.WIDTH
ROUNDS_OF_PART = ROUNDS // facts.GIVEN_PARTS
STATS_BYTES = facts.HEADS // 2 * 8  # peaks and totals, which come with the first part


def places_of_given(memory: Any, lane: Any, half: Any, entry: EntryFormat) -> list[Any]:
    """Return the shared addresses where a thread leaves logits for the other warpgroup.

    Of E4M3 entries half of them overlay the other warpgroup's shares of the last tile:
    only this warp has read these 16 rows. Lanes four apart have rows four apart: other banks.
    """
    thread, lane_of_warp = Uint32(lane.warp * rows.LANES + lane.lane), Uint32(lane.lane)
    over = facts.laid_over(entry)
    own = ROUNDS_OF_LOGITS // 2 if over else ROUNDS_OF_LOGITS
    start = memory.partner_at + (Uint32(half) * (own * facts.WARPGROUP) + thread) * gather.CHUNK
    made = [start + i * (gather.CHUNK * facts.WARPGROUP) for i in range(own)]
    if over:
        chunk = (1 - Uint32(half)) * (facts.KEYS // rows.HALF) + lane_of_warp % 4
        row = Uint32(lane.warp) * 16 + lane_of_warp // 8 + lane_of_warp // 4 % 2 * 4
        at = [gather.address_in_tile(row + 8 * i, chunk) for i in range(ROUNDS_OF_LOGITS - own)]
        made += [memory.shares_at + each for each in at]
    return made


@cute.jit
def joined(memory: Any, lane: Any, halves: Any, entry: cutlass.Constexpr) -> Any:
    """Return a warpgroup's logits: its sums over half of the latent plus the other's."""
    count = facts.KEYS // 2
    mine = places_of_given(memory, lane, lane.half, entry)
    theirs = places_of_given(memory, lane, 1 - lane.half, entry)
    is_first = lane.half == 0
    for i in cutlass.range_constexpr(0, count, VALUES):
        first, second = ([halves[at + i + j] for j in range(VALUES)] for at in (0, count))
        ptx.store_one_of(mine[i // VALUES], second, first, is_first)
    logits = cute.make_rmem_tensor(count, Float32)
    for i in cutlass.range_constexpr(count):
        logits[i] = ops.select(is_first, halves[i], halves[count + i])
    cute.arch.barrier(barrier_id=LOGITS_READY, number_of_threads=facts.CONSUMER_THREADS)
    for i in cutlass.range_constexpr(0, count, VALUES):
        four = ptx.numbers_at(theirs[i // VALUES], VALUES)
        for j in cutlass.range_constexpr(VALUES):
            logits[i + j] = ops.add_rn(logits[i + j], four[j])
    return logits


def begin_barriers_of_given(barriers: Any) -> None:
    """Initialise, in one thread, the barriers of what the other thread block gives."""
    for number in range(facts.GIVEN_BARRIERS):
        shared.begin_barrier(barriers + 8 * number, 1)


def expect_given(barriers: Any, one: Any) -> None:
    """Expect the bytes of every part in one thread."""
    for part in range(facts.GIVEN_PARTS):
        size = ROUNDS_OF_PART * ROW_OF_ROUND + (0 if part else STATS_BYTES)
        shared.expect(barriers + 8 * part, Uint32(size), one)


@cute.jit
def merge_and_stay(
    addresses: Any,
    where: tuple[Any, Any],
    state: Any,
    memory: Any,
    at: tuple[Any, Any],
    sinks: cutlass.Constexpr,
) -> None:
    """Merge as `merge_two` does, where both thread blocks go on to other tokens.

    `at` are the place of the tile that came last, and the phase. That tile is given back after the
    merge: sums lie there, then rows. The other block's is free when it says so.
    """
    place, lane = where
    last_at, phase = at
    barriers, ready = memory.given, memory.given + 8 * facts.GIVEN_PARTS
    thread = Uint32(lane.half * facts.WARPGROUP + lane.warp * rows.LANES + lane.lane)
    head = ops.minimum(place.head + lane.row + 8 * place.split, place.heads - 1)
    sink = merging.sink_of(addresses.sink, head, sinks)  # it is far away: asked for in time
    expect_given(barriers, thread == 0)
    ptx.arrive_at_rank(ready, Uint32(1 - place.split), thread == 0)
    ptx.await_phase_of_cluster(ready, phase)
    stats_at = memory.shares_at + Uint32(lane.row) * 8
    to = last_at + thread * (4 * VALUES), stats_at, barriers, phase
    for row in cutlass.range_constexpr(2):
        if place.split != row:
            give(to, lane, state, (row, Uint32(row)))
    for row in cutlass.range_constexpr(2):
        if place.split == row:
            take((addresses, place, lane), to, (*state, sink), (row, last_at, True))


@cute.jit
def merge_two(
    addresses: Any, where: tuple[Any, Any], state: Any, memory: Any, sinks: cutlass.Constexpr
) -> None:
    """Send one row's sums to the other thread block, and merge and write the other row."""
    place, lane = where
    tiles_at, barriers = memory.places.tiles, memory.given
    thread = Uint32(lane.half * facts.WARPGROUP + lane.warp * rows.LANES + lane.lane)
    # Expected before the cluster barrier: the first bytes may arrive right after it.
    expect_given(barriers, thread == 0)
    head = ops.minimum(place.head + lane.row + 8 * place.split, place.heads - 1)
    sink = merging.sink_of(addresses.sink, head, sinks)  # it is far away: asked for in time
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    # Both blocks are past their last tile: their first tile may be overwritten.
    stats_at = memory.shares_at + Uint32(lane.row) * 8
    at = tiles_at + thread * (4 * VALUES), stats_at, barriers, Uint32(0)
    for row in cutlass.range_constexpr(2):
        # Thread block r of two keeps row r of each thread's pair and sends the other.
        if place.split != row:
            give(at, lane, state, (row, Uint32(row)))
    for row in cutlass.range_constexpr(2):
        if place.split == row:
            # The received sums fill the first tile; results are staged in the second.
            take((addresses, place, lane), at, (*state, sink), (row, tiles_at + TILE_BYTES, False))


def value_of(sums: Any, row: int, number: int) -> Any:
    """Return value `number` of a row's sums in a thread."""
    return sums[number // 2 * 4 + 2 * row + number % 2]


@cute.jit
def give(
    at: tuple[Any, Any, Any, Any], lane: Any, state: tuple[Any, Any, Any], which: tuple[Any, Any]
) -> None:
    """Send a row's sums, peak and total to the thread block of that rank."""
    sums, peaks, totals = state
    sums_at, stats_at, barriers, _ = at
    row, rank = which
    if (lane.quad == 0) & (lane.half == 0):
        ptx.give_numbers(stats_at, [peaks[row], totals[row]], barriers, rank)
    for turn in cutlass.range_constexpr(ROUNDS):
        four = [value_of(sums, row, turn * VALUES + i) for i in range(VALUES)]
        barrier = barriers + turn // ROUNDS_OF_PART * 8
        ptx.give_numbers(sums_at + turn * ROW_OF_ROUND, four, barrier, rank)


@cute.jit
def take(
    where: tuple[Any, Any, Any],
    at: tuple[Any, Any, Any, Any],
    state: tuple[Any, Any, Any, Any],
    which: tuple[Any, Any, Any],
) -> None:
    """Add up both splits of a row, divide, round once, and write through shared memory.

    `which` are the row, where rows are staged, and whether in place of this warp's received sums.
    """
    addresses, place, lane = where
    sums_at, stats_at, barriers, phase = at
    sums, peaks, totals, sink = state
    row, staged_at, in_place = which
    ptx.await_phase_of_cluster(barriers, phase)
    stats = [(peaks[row], totals[row]), tuple(ptx.numbers_at(stats_at, 2))]
    if cutlass.const_expr(row == 1):  # the rank is the row: splits count in their order
        stats = [stats[1], stats[0]]
    _, total, largest = added(stats, [[], []])
    head = place.head + lane.row + 8 * row
    inverse = merging.inverse_total(total, largest, sink)
    inside = (lane.row + 8 * row < place.of_block) & (head < place.heads)
    if inside & (lane.quad == 0) & (lane.half == 0):
        number = Int64(place.token) * Int64(place.heads) + Int64(head)
        ptx.store_single(addresses.lse + number * 4, merging.lse_of(total, largest))
    words = []
    for part in cutlass.range_constexpr(facts.GIVEN_PARTS):
        if cutlass.const_expr(part > 0):
            ptx.await_phase_of_cluster(barriers + 8 * part, phase)
        turns = range(part * ROUNDS_OF_PART, (part + 1) * ROUNDS_OF_PART)
        mine = [value_of(sums, row, turn * VALUES + i) for turn in turns for i in range(VALUES)]
        given = [ptx.numbers_at(sums_at + turn * ROW_OF_ROUND, VALUES) for turn in turns]
        both = [mine, [number for four in given for number in four]]
        if cutlass.const_expr(row == 1):
            both = [both[1], both[0]]
        made, _, _ = added(stats, both)
        made = [ops.multiply_rn(number, inverse) for number in made]
        words += [ptx.pair_rounded(made[i], made[i + 1]) for i in range(0, len(made), 2)]
    first = Uint32(lane.half) * (facts.COLUMNS // rows.HALF)
    if cutlass.const_expr(in_place):
        cute.arch.sync_warp()
        warp = Uint32(lane.half * (facts.WARPGROUP // rows.LANES) + lane.warp)
        staged_at = staged_at + warp * (rows.LANES * 4 * VALUES)
    for block in cutlass.range_constexpr(facts.COLUMNS // 8):
        if cutlass.const_expr(in_place):
            to = place_of_received(Uint32(lane.lane) // 4, block)
        else:
            to = gather.address_in_tile(Uint32(lane.row) + 8 * row, first + block)
        ptx.store_word(staged_at + to + Uint32(lane.quad) * 4, words[block])
    # A warp wrote its own rows: no wider barrier is needed.
    cute.arch.sync_warp()
    for turn in cutlass.range_constexpr(8):
        within = lane.warp * 16 + 8 * row + turn
        head = place.head + within
        if (within < place.of_block) & (head < place.heads):
            if cutlass.const_expr(in_place):
                from_ = place_of_received(Uint32(turn), Uint32(lane.lane))
            else:
                from_ = gather.address_in_tile(Uint32(within), first + Uint32(lane.lane))
            row_words = shared.shared_words(staged_at + from_, 4)
            number = Int64(place.token) * Int64(place.heads) + Int64(head)
            chunk = number * gather.CHUNKS + Int64(first + Uint32(lane.lane))
            ptx.store_16(addresses.out + chunk * gather.CHUNK, row_words)


def place_of_received(row: Any, chunk: Any) -> Any:
    """Return the byte of a chunk of a warp's row in what this warp has received of eight rounds."""
    return row * ROW_OF_ROUND + (chunk ^ row) * gather.CHUNK


def added(stats: list[Any], both: list[list[Any]]) -> tuple[list[Any], Any, Any]:
    """Return the rescaled sums of two splits, their total, and the larger peak."""
    largest = ptx.larger(stats[0][0], stats[1][0])
    total = Float32(0.0)
    made = [Float32(0.0)] * len(both[0])
    for (peak, of_split), values in zip(stats, both, strict=True):
        counts = of_split != 0.0
        factor = merging.factor_of(peak, largest)
        total = ops.select(counts, ops.fma_rn(of_split, factor, total), total)
        made = [
            ops.select(counts, ops.fma_rn(value, factor, so_far), so_far)
            for value, so_far in zip(values, made, strict=True)
        ]
    return made, total, largest
