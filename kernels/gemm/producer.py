"""The TMA producer of the GEMM kernels: issue the boxes of each stage on the stage's barrier.

`feed_of` (host side of a launch) makes the TMA atom of a matrix, `feeding` (in the kernel) cuts it
into boxes, `produce_tile` issues the boxes of all K steps of a tile. Descriptors are built at
launch from pointers and extents, so they are not part of a compiled form. TMA fills whatever lies
outside a matrix with zeros, so tails along M, N and K need no code; those zeros count as bytes.

Use: one `Feed` for each box of gemm.problem.loads. The producer warp calls `produce_tile` for every
tile with any pipeline that has producer_acquire and producer_get_barrier (PipelineTmaAsync,
PipelineTmaUmma). All 32 threads of the warp call it; TMA elects one.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync


class Feed(NamedTuple):
    """TMA atom and coordinates of a matrix, or of many equal matrices along a third mode."""

    atom: Any
    tensor: Any


class Feeding(NamedTuple):
    """A feed cut for one thread block: (box, tiles along M or N, steps of K), (box, stages)."""

    atom: Any
    source: Any
    destination: Any
    mask: Any  # of the thread blocks that receive a box; None: this one alone


def feed_of(
    tensor: Any, layout: Any, box: tuple[int, ...], sharing: int = 1, group: tuple[Any, ...] = ()
) -> Feed:
    """Make the TMA atom of a matrix for boxes whose shared memory has `layout` (with stages).

    The third extent of a box is a number of matrices. `sharing` thread blocks receive a box by
    multicast, each issuing a part. With a `group` (cta_group::2) bytes count at the first block's
    barrier.
    """
    operation = (
        cpasync.CopyBulkTensorTileG2SOp(*group)
        if sharing == 1
        else cpasync.CopyBulkTensorTileG2SMulticastOp(*group)
    )
    of_stage = cute.slice_(layout, (*[None] * len(box), 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation, tensor, of_stage, box, num_multicast=sharing
    )
    return Feed(atom, coordinates)


def feeding(
    feed: Feed, shared: Any, box: tuple[int, ...], sharing: tuple[Any, int, Any] = (0, 1, None)
) -> Feeding:
    """Cut a feed into boxes; `sharing` is place among sharers, their number, multicast mask."""
    place, count, mask = sharing
    boxes = cute.local_tile(feed.tensor, box, (None,) * cute.rank(feed.tensor))
    destination, source = cpasync.tma_partition(
        feed.atom,
        place,
        cute.make_layout(count),
        cute.group_modes(shared, 0, len(box)),
        cute.group_modes(boxes, 0, len(box)),
    )
    return Feeding(feed.atom, source, destination, mask)


@cute.jit
def produce_tile(
    pipeline: Any, state: Any, feedings: tuple[Feeding, ...], tiles: tuple[Any, ...], steps: Any
) -> Any:
    """Load all K steps of a tile; feeding i reads at tiles[i]. Return the pipeline state."""
    for step in cutlass.range(steps, unroll=1):
        state = produce_step(pipeline, state, feedings, tiles, step)
    return state


@cute.jit
def produce_step(
    pipeline: Any, state: Any, feedings: tuple[Feeding, ...], tiles: tuple[Any, ...], step: Any
) -> Any:
    """Load one K step of a tile into the next stage as soon as that is empty."""
    # Waits for the empty barrier, then arms the full one with the bytes of a stage.
    pipeline.producer_acquire(state)
    barrier = pipeline.producer_get_barrier(state)
    for i in cutlass.range_constexpr(len(feedings)):
        # A tile of one of many matrices is a pair: the tile, and which matrix.
        at = tiles[i] if isinstance(tiles[i], tuple) else (tiles[i],)
        issue(feedings[i], (at[0], step, *at[1:]), state.index, barrier)
    pipeline.producer_commit(state)
    state.advance()
    return state


def issue(feeding: Feeding, box: tuple[Any, ...], stage: Any, barrier: Any) -> None:
    """Issue one box into a stage; `box` is (tile, step) or (tile, step, matrix)."""
    more = {} if feeding.mask is None else {"mcast_mask": feeding.mask}
    cute.copy(
        feeding.atom,
        feeding.source[None, *box],
        feeding.destination[None, stage],
        tma_bar_ptr=barrier,
        **more,
    )
