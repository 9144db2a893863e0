"""Store tiles of D^T on sm_100a, where few rows of A are columns of the instruction.

A storing thread has one lane of tensor memory: one column of D, with all rows of the tile. It
scales and rounds them as epilogue does and writes them to shared memory, where adjacent threads
write adjacent addresses. One TMA store takes the piece: 128 columns of the tile's rows of D,
without what lies outside D. The four warps meet at a named barrier before the buffer is written and
after.

`tensor_memory.require_extents` rejects rows that the tile cannot address. Compiled but never run.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from degarble.kernels.gemm import epilogue, schedule, wgmma
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import GemmForm
from degarble.kernels.gemm.tcgen05 import instructions as tcgen05
from degarble.kernels.gemm.tcgen05 import tensor_memory as memory_facts


class Outlet(NamedTuple):
    """TMA's view of D and of the buffers, and the threads' view of the buffers."""

    atom: Any
    target: Any  # (piece, pieces along M, pieces along N) of D
    source: Any  # (piece, buffers)
    shared: Any  # (rows of D, columns of D, buffers)
    thread: Any


def piece_layout(form: GemmForm, buffers: int) -> Any:
    """Return the layout of pieces in shared memory: rows of D, 128 columns each."""
    columns = memory_facts.LANES
    shape = (form.tactic.columns, columns, buffers)
    return cute.make_layout(shape, stride=(columns, 1, form.tactic.columns * columns))


def pieces_of(memory: Any, form: GemmForm) -> Any:
    """Allocate the buffers of pieces."""
    layout = piece_layout(form, facts.PIECES_AT_ONCE)
    return memory.allocate_tensor(BFloat16, layout, facts.ALIGNMENT)


def store_of(tensor: Any, form: GemmForm) -> epilogue.Store:
    """Make the TMA atom that stores pieces of D."""
    layout = cute.slice_(piece_layout(form, 1), (None, None, 0))
    box = (form.tactic.columns, memory_facts.LANES)
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box
    )
    return epilogue.Store(atom, coordinates)


def outlet_of(store: epilogue.Store, shared: Any, thread: Any) -> Outlet:
    """Partition D and the buffers."""
    pieces = cute.local_tile(store.tensor, cute.product_each(shared.shape)[:2], (None, None))
    source, target = cpasync.tma_partition(
        store.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(pieces, 0, 2),
    )
    return Outlet(store.atom, target, source, shared, thread)


@cute.jit
def store_piece(
    outlet: Outlet, numbers: Any, place: tuple[Any, Any], at: Any, scales: tuple[Any, ...]
) -> None:
    """Scale a column's float32 numbers, round them to BF16, store the piece from a buffer."""
    stores = cute.arch.make_warp_uniform(outlet.thread // facts.WARP) == 0
    if stores:  # the store that read this buffer before has read it
        cute.arch.cp_async_bulk_wait_group(facts.PIECES_AT_ONCE - 1, read=True)
    meet()
    for i in cutlass.range_constexpr(len(numbers)):
        outlet.shared[i, outlet.thread, at] = BFloat16(epilogue.scaled(numbers[i], scales))
    cute.arch.fence_proxy("async.shared", space="cta")
    meet()
    if stores:
        cute.copy(outlet.atom, outlet.source[None, at], outlet.target[None, *place])
        cute.arch.cp_async_bulk_commit_group()


def meet() -> None:
    """Synchronise the storing warps."""
    cute.arch.barrier(
        barrier_id=tcgen05.BARRIER_OF_STORES,
        number_of_threads=memory_facts.threads_that_store(),
    )


@cute.jit
def store_tiles(outlets: Any, walk: Any, scales: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Store tile after tile of D^T; `outlets` are D, buffers of pieces, sums and their ring."""
    store, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    outlet = outlet_of(store, pieces, thread)
    columns = form.tactic.columns
    reading = tcgen05.reading_of(sums, thread, columns)
    state, stored = wgmma.consumer_state(memory_facts.accumulators(form)), Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        # The walk is over D^T: its rows are columns of D.
        column, row = schedule.tile_at(walk, number)
        ring.consumer_wait(state)
        tcgen05.fence("after")
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, reading.source[None, None, None, 0, 0, state.index], registers)
        cute.arch.fence_view_async_tmem_load()
        tcgen05.fence("before")
        ring.consumer_release(state)
        numbers = [registers[j] for j in range(columns)]
        store_piece(outlet, numbers, (row, column), stored % facts.PIECES_AT_ONCE, scales)
        state.advance()
        stored += 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)
