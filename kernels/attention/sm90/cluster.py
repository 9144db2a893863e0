"""Merge the splits of one token through the shared memory of a cluster of up to 8 thread blocks.

Each thread block leaves its float32 sums [64, 512] where the tiles were, and the peaks and totals
of its 64 rows. After a cluster barrier a block of rank r writes rows r, r + together, ..., each
from what all blocks left. Splits are added in their order by the arithmetic of
simt_attention_merge, so the bits are those of the merge kernel. On Hopper, clusters of two use
exchange.merge_two instead.

Every thread of the cluster has to take part in its barriers, producers included.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention import simt_attention_merge as merging
from degarble.kernels.attention.sm90 import instructions as ptx
from degarble.kernels.primitives import attention_rows as rows

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
            wanted = (mine[i] < facts.HEADS) & (head < place.heads)
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
