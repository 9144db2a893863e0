"""Two thread blocks that multiply together on sm_100a: cta_group::2 of tcgen05 (PTX ISA 9.1).

Neighbours along M are a pair. Each block loads its 128 rows of A with their scales, half of the
rows of B, and all scales of B: instruction and scale copy read both shared memories at the same
offsets and write to both tensor memories. The first block issues for both. Barriers: bytes of both
blocks count at the first block's full barrier; its commits arrive at both blocks; the storing
threads of both arrive at it. Both end together, because tensor memory is freed by both and a
block's shared memory has to exist while the other one still arrives there.

GemmForm rejects tactics that are not pairs. Compiled but never run.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, cute

from degarble.kernels.gemm import epilogue, schedule, wgmma
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.gemm.tcgen05 import instructions as tcgen05
from degarble.kernels.gemm.tcgen05 import tensor_memory as memory_facts


def sharing_of(form: GemmForm) -> tuple[Any, ...]:
    """Return by load which blocks of the cluster receive a box: place, number, mask."""
    by_side = tcgen05.sharing_of(form)
    halved = form.tactic.together > 1
    return tuple(
        sharing_of_half(form) if halved and load.name == "b" else by_side[load.side]
        for load in facts.loads(form)
    )


def sharing_of_half(form: GemmForm) -> tuple[Any, int, Any]:
    """Return which blocks receive the same half of B: every second one along M."""
    row, column, _ = cute.arch.block_idx()
    rows, together = form.tactic.cluster_rows, form.tactic.together
    count = rows // together
    if count == 1:
        return 0, 1, None
    every_second = Int16(sum(1 << together * i for i in range(count)))
    return row // together, count, every_second << (column * rows + row % together)


def group(form: GemmForm) -> tuple[Any, ...]:
    """Return the CTA group of a pair's loads, whose first block counts the bytes; else ()."""
    return () if form.tactic.together == 1 else (tcgen05.group_of(form),)


def leads(form: GemmForm) -> Any:
    """Return whether this thread block issues instructions: for its pair, or for itself."""
    if form.tactic.together == 1:
        return True
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) % 2 == 0


def of_other(tensor: Any) -> Any:
    """View the same place of the other thread block's shared memory."""
    other = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) ^ 1
    return cute.make_tensor(cute.arch.map_dsmem_ptr(tensor.iterator, other), tensor.layout)


# ---- sums that overlap ---------------------------------------------------------------------------


def place_to_fill(state: Any, form: GemmForm) -> Any:
    """Return the next place of sums; a ring of one that overlaps has two alternating places."""
    # A producer's phase starts at 1, a consumer's at 0: both begin with place 0.
    return state.phase ^ 1 if memory_facts.overlaps(form) else state.index


@cute.jit
def store_tile(
    outlet: Any, reading: Any, ring: Any, state: Any, work: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Store a tile; release the sums after reading the piece that both places share.

    The pieces read later do not overlap the next tile's sums. They do overlap those of the tile
    after it, which wait for this thread's next release.
    """
    (row, column), stored, scales = work
    pieces, place = cute.size(reading.source, mode=[4]), state.phase
    ring.consumer_wait(state)
    tcgen05.fence("after")
    for i in cutlass.range_constexpr(pieces):
        piece = memory_facts.piece_in_turn(i, place, pieces)
        part = reading.source[None, None, None, 0, piece, place]
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, part, registers)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(i == 0):
            tcgen05.fence("before")
            ring.consumer_release(state)
        numbers = [registers[j] for j in range(facts.PIECE_COLUMNS)]
        epilogue.store_piece(outlet, numbers, (row, column + piece), stored + i, scales)
    state.advance()
    return state, stored + Int32(pieces)


@cute.jit
def store_tiles(outlets: Any, walk: Any, scales: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Store tile after tile of overlapping sums; `outlets` as in tcgen05.store_tiles."""
    store, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    outlet, reading = tcgen05.outlet_of(store, pieces, thread), tcgen05.reading_of(sums, thread)
    state, stored = wgmma.consumer_state(memory_facts.accumulators(form)), Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = schedule.tile_at(walk, number)
        place = (row, column * memory_facts.stores(form))
        state, stored = store_tile(outlet, reading, ring, state, (place, stored, scales))
    epilogue.drain(outlet)


# ---- the end -------------------------------------------------------------------------------------


@cute.jit
def end_together(base: Any, form: cutlass.Constexpr) -> None:
    """Synchronise the cluster, then free tensor memory by the first warps."""
    tcgen05.fence("before")
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tcgen05.fence("after")
    if cute.arch.warp_idx() == 0:
        columns = memory_facts.columns_allocated(form)
        cute.arch.dealloc_tmem(base, columns, is_two_cta=True)
