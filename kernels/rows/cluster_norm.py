"""Device code of an RMSNorm whose row is shared by a cluster of thread blocks; sm_90a and sm_100a.

A thread block has the columns of one warp of the norm's lanes (rows/problem.py), a thread half a
block of 16 values: threads 4 l to 4 l + 3 have lane l's two blocks. Sums have the order of a norm
by one thread block, so the bits are those of simt_rmsnorm.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives.device_words import warp_folded
from degarble.kernels.rows import problem as norms
from degarble.kernels.rows.mhc_few_problem import NORM_WARPS
from degarble.kernels.rows.simt_rmsnorm import warps_folded

WARPS = NORM_WARPS  # of a thread block that norm
THREADS = 32 * WARPS
BARRIER = 1  # of those warps


def block_of(thread: Any, rank: Any, lanes: Any) -> Any:
    """Return the block of 16 values of which a thread has a half; `lanes` are those of a row."""
    return rank * norms.LANES + thread // 4 + thread // 2 % 2 * lanes


def give(address: Any, number: Any, rank: Any) -> None:
    """Write a float32 to the shared memory of a thread block of the cluster."""
    text = (
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r2}; "
        "st.shared::cluster.f32 [there], {$r1}; }"
    )
    cute.arch.inline_ptx(
        text, write_only_types=[], read_only_args=[Int32(address), number, Uint32(rank)]
    )


def address_of(tensor: Any, place: Any) -> Any:
    """Return the shared address of a float32."""
    return Int32(tensor.iterator.toint()) + Int32(place) * 4


@cute.jit
def total_of(
    number: Any,
    place: tuple[Any, Any],
    shared: tuple[Any, Any],
    cluster: cutlass.Constexpr,
) -> Any:
    """Sum up squares of half blocks over the row; every thread of the cluster's norm calls it.

    `place` is thread and rank; `shared` has float32 [32] of lanes and [16] of thread blocks, of
    which those that there are not hold 0 since before a barrier of the cluster.
    """
    (thread, rank), (of_lanes, of_blocks) = place, shared
    lane = thread % 32
    for distance in cutlass.range_constexpr(2):  # halves of a block, blocks of a lane
        other = cute.arch.shuffle_sync_bfly(number, offset=1 << distance)
        number = ops.add_rn(number, other)
    if thread % 4 == 0:
        of_lanes[thread // 4] = number
    cute.arch.barrier(barrier_id=BARRIER, number_of_threads=THREADS)
    number = warp_folded(Float32(of_lanes[lane]))
    if thread < cluster:
        give(address_of(of_blocks, rank), number, thread)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    return warps_folded(Float32(of_blocks[lane % norms.MOST_WARPS]))
