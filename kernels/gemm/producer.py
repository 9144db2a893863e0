"""The warp that loads: TMA boxes of every stage, as many bytes as the stage's barrier expects.

Owns how a matrix in memory becomes boxes in shared memory (`feed_of` on the host side of a launch,
`feeding` inside of the kernel) and the loop that issues them (`produce_tile`). Whatever lies beyond
a matrix arrives as zeros, so tails along M, N and K need nothing else. Descriptors are built at the
launch from pointers and extents, hence none of them is part of a compiled form.

How a form plugs in: one `Feed` a box of gemm_problem.loads, made in the jitted launch; the kernel
receives feeds and shared tensors, calls `feeding` once, and its producer warp calls `produce_tile`
for every tile with the pipeline of its architecture (PipelineTmaAsync or PipelineTmaUmma): any that
has producer_acquire and producer_get_barrier. All 32 threads of the warp call it; TMA elects one.

Refuses nothing: a kernel cannot. Kept honest by suites/kernels/gemm/test_sm90_gemm_bf16.py.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync


class Feed(NamedTuple):
    """A matrix that TMA reads, or many of one shape along a third mode: atom, coordinates."""

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

    A box of three extents takes as many matrices as the third one says. `sharing` thread blocks
    receive a box at once, each issuing a part; bytes count at the first one's barrier of a `group`.
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
    """Cut a feed into boxes; `sharing` is place among and number of sharers, and their mask."""
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
    """Load all steps of one tile; feeding i walks with tiles[i]. Return the pipeline's state."""
    for step in cutlass.range(steps, unroll=1):
        state = produce_step(pipeline, state, feedings, tiles, step)
    return state


@cute.jit
def produce_step(
    pipeline: Any, state: Any, feedings: tuple[Feeding, ...], tiles: tuple[Any, ...], step: Any
) -> Any:
    """Load one step of one tile into the next stage, once that is empty."""
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
    """Issue one box: (tile, step) of the matrix, or (tile, step, matrix), into a stage."""
    more = {} if feeding.mask is None else {"mcast_mask": feeding.mask}
    cute.copy(
        feeding.atom,
        feeding.source[None, *box],
        feeding.destination[None, stage],
        tma_bar_ptr=barrier,
        **more,
    )
