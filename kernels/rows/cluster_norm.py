"""Device code of an RMSNorm whose row is shared by a cluster of thread blocks; sm_90a and sm_100a.

A thread block has the columns of one warp of the norm's lanes (rows/problem.py), a thread half a
block of 16 values: threads 4 l to 4 l + 3 have lane l's two blocks. Sums have the order of a norm
by one thread block, so the bits are those of simt_rmsnorm.

Sums go from thread block to thread block without a barrier: a place in shared memory holds EMPTY,
which is no sum, and who reads it waits until it holds something else. A barrier of the cluster that
releases would first wait until the whole GPU sees every write, and drop L1 behind it. A word comes
as a whole and says itself that it has come, so nothing else has to be ordered. The thread blocks
meet once before, when places are EMPTY; and whoever is written to waits for it, so none has ended.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import warp_folded
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.mhc_few_problem import MOST_CLUSTER, NORM_WARPS

WARPS = NORM_WARPS  # of a thread block that norm
THREADS = 32 * WARPS
BARRIER = 1  # of those warps
# No sum has these bits: the NaN that an addition makes is 0x7FFFFFFF (PTX ISA 9.1, add.f32).
EMPTY = 0xFFFF_FFFF
PLACES = norms.LANES * MOST_CLUSTER  # of sums of squares


def block_of(thread: Any, rank: Any, lanes: Any) -> Any:
    """Return the block of 16 values of which a thread has a half; `lanes` are those of a row."""
    return rank * norms.LANES + thread // 4 + thread // 2 % 2 * lanes


def give(address: Any, number: Any, rank: Any) -> None:
    """Write a sum to the shared memory of a thread block of the cluster."""
    text = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r2}; "
        "st.relaxed.cluster.shared::cluster.f32 [there], {$r1}; }"
    )
    cute.arch.inline_ptx(
        text, write_only_types=[], read_only_args=[Int32(address), number, Uint32(rank)]
    )


def clear(address: Any) -> None:
    """Let a place hold no sum; the thread blocks have to meet before anyone gives one."""
    cute.arch.inline_ptx(
        "st.relaxed.cluster.shared::cta.b32 [{$r0}], {$r1};",
        write_only_types=[], read_only_args=[Int32(address), Uint32(EMPTY)],
    )  # fmt: skip


def awaited(address: Any, count: int) -> list[Any]:
    """Return up to four adjacent sums as soon as all have come for all lanes of the warp."""
    size = 4 if count == 3 else count
    names = [f"n{i}" for i in range(size)]
    more = "".join(f"setp.eq.or.b32 none, {name}, {EMPTY}, none;\n" for name in names[1:count])
    read = f"{{{', '.join(names)}}}" if size > 1 else names[0]
    # Trap: labels in braces are local to them, so that this text may stand more than once.
    text = f"""{{
    .reg .pred none;
    .reg .b32 at, {", ".join(names)};
    mov.b32 at, {{$r0}};
    AGAIN: ld.relaxed.cluster.shared::cta.{f"v{size}." if size > 1 else ""}b32 {read}, [at];
    setp.eq.b32 none, n0, {EMPTY};
    {more}
    vote.sync.any.pred none, none, 0xffffffff;
    @none bra AGAIN;
    {" ".join(f"mov.b32 {{$w{i}}}, n{i};" for i in range(count))}
    }}"""
    found = cute.arch.inline_ptx(
        text, write_only_types=[Float32] * count, read_only_args=[Int32(address)]
    )
    return list(found) if count > 1 else [found]


def address_of(tensor: Any, place: Any) -> Any:
    """Return the shared address of a float32."""
    return Int32(tensor.iterator.toint()) + Int32(place) * 4


@cute.jit
def give_lane(
    number: Any, place: tuple[Any, Any], of_lanes: Any, cluster: cutlass.Constexpr
) -> None:
    """Sum up squares of half blocks over a lane of the norm, and give them to the cluster.

    Every thread of the cluster's norm calls it. `place` is thread and rank; `of_lanes` has float32
    [32, 8], the lanes of every thread block, which were cleared before the cluster met.
    """
    thread, rank = place
    for distance in cutlass.range_constexpr(2):  # halves of a block, blocks of a lane
        other = cute.arch.shuffle_sync_bfly(number, offset=1 << distance)
        number = ops.add_rn(number, other)
    address = address_of(of_lanes, thread // 4 * MOST_CLUSTER + rank)
    for turn in cutlass.range_constexpr(-(-cluster // 4)):  # a lane's threads share the others
        receiver = turn * 4 + thread % 4
        if receiver < cluster:
            give(address, number, receiver)


def total_of(lane: Any, of_lanes: Any, cluster: int) -> Any:
    """Return the sum of squares of the row; each warp folds the lanes of all thread blocks."""
    first = address_of(of_lanes, lane * MOST_CLUSTER)
    found = []
    for turn in range(0, cluster, 4):
        found += awaited(first + turn * 4, min(4, cluster - turn))
    return folded_over_warps([warp_folded(each) for each in found])


def folded_over_warps(totals: list[Any]) -> Any:
    """Return the sum of up to sixteen warps' totals, as simt_rmsnorm.warps_folded adds them."""
    slots = totals + [Float32(0.0)] * (norms.MOST_WARPS - len(totals))
    while len(slots) > 1:
        half = len(slots) // 2
        pairs = zip(slots[:half], slots[half:], strict=True)
        slots = [ops.add_rn(one, other) for one, other in pairs]
    return slots[0]
