"""Splits of one token's keys side by side in a cluster: they merge through shared memory.

Owns the end of sparse attention where a cluster has all splits: each thread block leaves its sums
and its rows' peaks and totals in its own shared memory, where the tiles were; then each writes the
outputs of its rows, every so-manieth, from what all of them left. Splits are added in their order
by the arithmetic of simt_attention_merge: the bits are those of the merging kernel.

Every thread of the cluster takes part in its barriers, those that brought keys as well. Refuses
nothing: a kernel cannot. Kept honest by suites/kernels/test_sm90_sparse_attention.py.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels import simt_attention_merge as merging
from degarble.kernels import sm90_attention_instructions as ptx
from degarble.kernels.common import attention_rows as rows
from degarble.kernels.common import sparse_attention_problem as facts

SEGMENT = 32  # bytes that four lanes write
ROW_BYTES = 4 * rows.WIDTH
VALUES = 4  # of a lane, side by side
TURNS = rows.WIDTH // (VALUES * rows.LANES)
WARPS = facts.CONSUMERS * facts.WARPGROUP // rows.LANES


def address_of_sum(row: Any, segment: Any) -> Any:
    """Return the byte of a row's eight sums; neighbouring rows lie in different banks."""
    return row * ROW_BYTES + (segment ^ row % 8) * SEGMENT


@cute.jit
def leave(tiles_at: Any, stats_at: Any, lane: Any, state: tuple[Any, Any, Any]) -> None:
    """Leave a warpgroup's sums, and peaks and totals of rows, for the cluster."""
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
    for turn in cutlass.range_constexpr(-(-facts.HEADS // (WARPS * together))):
        row = (warp + turn * WARPS) * together + place.split
        head = place.head + row
        if (row < facts.HEADS) & (head < place.heads):
            merge_row(addresses, place, shared, (row, head, lane), form)


@cute.jit
def merge_row(
    addresses: Any,
    place: Any,
    shared: tuple[Any, Any],
    which: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Add up a row of all splits, divide, round once, write."""
    together = form.together
    tiles_at, stats_at = shared
    row, head, lane = which
    row, lane = Uint32(row), Uint32(lane)
    stats = [ptx.numbers_of_rank(stats_at + row * 8, rank, 2) for rank in range(together)]
    largest = stats[0][0]
    for rank in cutlass.range_constexpr(1, together):
        largest = ptx.larger(largest, stats[rank][0])
    total = Float32(0.0)
    sums = cute.make_rmem_tensor(TURNS * VALUES, Float32)
    sums.fill(0.0)
    for rank in cutlass.range_constexpr(together):
        peak, of_split = stats[rank]
        if of_split != 0.0:
            factor = merging.factor_of(peak, largest)
            total = ops.fma_rn(of_split, factor, total)
            for turn in cutlass.range_constexpr(TURNS):
                segment = lane // 2 + turn * (rows.LANES // 2)
                at = tiles_at + address_of_sum(row, segment) + lane % 2 * 16
                read = ptx.numbers_of_rank(at, rank, VALUES)
                for i in cutlass.range_constexpr(VALUES):
                    number = sums[turn * VALUES + i]
                    sums[turn * VALUES + i] = ops.fma_rn(read[i], factor, number)
    sink = merging.sink_of(addresses.sink, head, form.sinks)
    inverse = merging.inverse_total(total, largest, sink)
    number = Int64(place.token) * Int64(place.heads) + Int64(head)
    if lane == 0:
        ptx.store_single(addresses.lse + number * 4, merging.lse_of(total, largest))
    for turn in cutlass.range_constexpr(TURNS):
        four = [ops.multiply_rn(sums[turn * VALUES + i], inverse) for i in range(VALUES)]
        words = [ptx.pair_rounded(four[i], four[i + 1]) for i in (0, 2)]
        value = number * rows.WIDTH + Int64(lane * VALUES + turn * VALUES * rows.LANES)
        ptx.store_8(addresses.out + value * 2, words)
