"""Store a tile of D: scale float32 sums in registers, round once to BF16, store by TMA.

A tile leaves in pieces of 64 columns by the rows that one group of threads holds. One piece:
  1. scale in float32 (tensor scales are applied here, never in BF16), round to nearest even;
  2. the storing warp waits until at most one of its TMA stores still reads a buffer;
  3. named barrier of the group; registers to a swizzled buffer; fence to the async proxy;
  4. named barrier of the group; the storing warp (warp 0 of the group) issues the TMA store.
A group has PIECES_AT_ONCE = 2 buffers and its own named barrier, so groups do not wait for each
other, and stores overlap with the loads of the next tile. TMA omits what lies outside D: there is
no predicate for tails.

Use: `store_of` in the jitted launch makes the TMA atom of D; `Outlet` holds a group's barrier,
buffers and register layout (a tiled copy: `wgmma_copy` on sm_90a, a copy by rows on sm_100a);
`store_piece` stores each piece; `drain` runs before the thread block ends.
"""

from typing import Any, NamedTuple

from cutlass import BFloat16, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.gemm import problem as facts


class Store(NamedTuple):
    """TMA atom of D and its coordinate tensor."""

    atom: Any
    tensor: Any


class Outlet(NamedTuple):
    """The buffers, barrier and TMA atom through which one group of threads stores its pieces."""

    store: Any  # atom of D
    target: Any  # (piece, pieces along M, pieces along N) of D
    source: Any  # (piece, buffers) as TMA reads shared memory
    copy: Any  # tiled copy from registers to shared memory
    shared: Any  # (values of this thread, buffers)
    barrier: Any  # number of the group's named barrier
    threads: int  # of the group
    stores: Any  # whether this thread's warp issues the stores


def piece_layout(buffers: int, rows: int = facts.PIECE_ROWS) -> Any:
    """Return the layout of pieces in shared memory: rows of 128 bytes, swizzled."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, facts.PIECE_COLUMNS, buffers), (0, 1, 2))


def store_of(tensor: Any, rows: int = facts.PIECE_ROWS) -> Store:
    """Make the TMA atom that stores pieces of D."""
    layout = cute.slice_(piece_layout(1, rows), (None, None, 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, (rows, facts.PIECE_COLUMNS)
    )
    return Store(atom, coordinates)


def wgmma_copy(tiled_mma: Any) -> Any:
    """Return the copy of a wgmma accumulator's registers: four 8 x 8 matrices at once."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
    return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))


def outlet_of(store: Store, shared: Any, copy: Any, thread: Any, barrier: Any) -> Outlet:
    """Partition D and the group's own buffers; `thread` is its number in the group.

    Warp 0 of the group stores. Named barriers 0 and 1 belong to the thread block.
    """
    pieces = cute.local_tile(store.tensor, cute.product_each(shared.shape)[:2], (None, None))
    source, target = cpasync.tma_partition(
        store.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(pieces, 0, 2),
    )
    return Outlet(
        store=store.atom,
        target=target,
        source=source,
        copy=copy,
        shared=copy.get_slice(thread).partition_D(shared),
        barrier=barrier,
        threads=cute.size(copy),
        stores=cute.arch.make_warp_uniform(thread // facts.WARP) == 0,
    )


def scaled(number: Any, scales: tuple[Any, ...]) -> Any:
    """Multiply a float32 number by each scale in order, rounding every product."""
    for scale in scales:
        number = ops.multiply_rn(number, scale)
    return number


def round_into(registers: Any, numbers: Any, scales: tuple[Any, ...]) -> None:
    """Scale float32 numbers and round them to BF16 registers."""
    for i in range(cute.size(registers)):  # plain: the DSL warns of long loops of its own
        registers[i] = BFloat16(scaled(numbers[i], scales))


@cute.jit
def store_piece(
    outlet: Outlet, numbers: Any, place: tuple[Any, Any], count: Any, scales: tuple[Any, ...] = ()
) -> None:
    """Scale a group's float32 numbers, round them to BF16 and store the piece at (row, column).

    `numbers` are this thread's registers of the piece. `count` is the number of pieces that the
    group has stored so far; it selects the buffer.
    """
    rounded = cute.make_rmem_tensor(outlet.shared[None, None, None, 0].shape, BFloat16)
    round_into(rounded, numbers, scales)
    # Which of the buffers: they are used in turn.
    at = count % facts.PIECES_AT_ONCE
    if outlet.stores:  # the store that read this buffer before has read it
        cute.arch.cp_async_bulk_wait_group(facts.PIECES_AT_ONCE - 1, read=True)
    cute.arch.barrier(barrier_id=outlet.barrier, number_of_threads=outlet.threads)
    cute.copy(outlet.copy, rounded, outlet.shared[None, None, None, at])
    # TMA reads shared memory through the async proxy; the copy wrote it through the generic one.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=outlet.barrier, number_of_threads=outlet.threads)
    if outlet.stores:
        cute.copy(outlet.store, outlet.source[None, at], outlet.target[None, *place])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def drain(outlet: Outlet) -> None:
    """Wait until the TMA stores have read shared memory, which ends with the thread block."""
    if outlet.stores:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
