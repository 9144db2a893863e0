"""Building blocks that all GEMM kernels share: tile schedule, TMA loads, epilogue, wgmma roles.

Device code, only for use in a kernel that is being traced, but for `tile_of`, which also runs on
the host. The counterparts for sm_100a are in gemm/tcgen05.py.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import GemmForm, GemmTactic
from degarble.kernels.runtime.pdl import follow, let_follow, wait_for_front

# --------------------------------------------------------------------------------------------------
# The static persistent tile schedule: which tile a thread block computes next.
#
# `tile_of` maps a number to a tile. Tiles are numbered down groups of `tactic.group` rows of tiles,
# so that concurrent tiles share rows of B in the L2 cache. `TileWalk` holds a block's numbers:
# first, first + step, ... below total. Every role of a kernel iterates over the same numbers by
# itself: `for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1)`, then
# `tile_at`.
#
# A cluster is one unit of the walk: its thread blocks take neighbouring tiles. The last tiles may
# lie outside D, where loads return zeros and stores write nothing.
#
# `tile_of` runs on the host as well: it uses // % * + - on non-negative integers only.


class TileWalk(NamedTuple):
    """The tile numbers of a thread block, and what maps a number to a tile."""

    first: Any
    total: Any
    step: Any
    tiles: tuple[Any, Any]  # of clusters, along M and N
    place: tuple[Any, Any]  # of this thread block in its cluster
    tactic: GemmTactic
    experts: Any = None  # of each row of tiles of clusters, in memory; None: all of D has one B


def tile_of(number: Any, tiles: tuple[Any, Any], group: int, least: Any = min) -> tuple[Any, Any]:
    """Return (row, column) of a tile: groups of `group` rows, column-major within a group.

    `least` is the minimum of two integers; inside a kernel it is cutlass.min.
    """
    rows, columns = tiles
    first = number // (group * columns) * group
    height = least(rows - first, group)
    within = number - first * columns
    return first + within % height, within // height


def walk_of(extents: tuple[Any, Any], tactic: GemmTactic, experts: Any = None) -> TileWalk:
    """Return the walk of this thread block over D of M x N, with the grid of gemm.problem.

    Where M is read from memory, the grid may exceed the tiles; surplus thread blocks do nothing.
    """
    rows, columns = extents
    tiles = (
        ceil_div(rows, tactic.rows * tactic.cluster_rows),
        ceil_div(columns, tactic.columns * tactic.cluster_columns),
    )
    in_row, in_column, first = cute.arch.block_idx()
    _, _, step = cute.arch.grid_dim()
    return TileWalk(first, tiles[0] * tiles[1], step, tiles, (in_row, in_column), tactic, experts)


def tile_at(walk: TileWalk, number: Any) -> tuple[Any, ...]:
    """Return this thread block's tile, in tiles of D along M and N, and its expert if any.

    A number past the last tile gives a tile that must not be used; reading its expert is safe.
    """
    row, column = tile_of(Int32(number), walk.tiles, walk.tactic.group, cutlass.min)
    tactic, (in_row, in_column) = walk.tactic, walk.place
    row, column = row * tactic.cluster_rows + in_row, column * tactic.cluster_columns + in_column
    if walk.experts is None:
        return row, column
    # A cluster's rows of tiles have one expert.
    of_cluster = row if tactic.cluster_rows == 1 else row // tactic.cluster_rows
    # Clamped, because a number past the last tile would read outside the list of experts.
    known = cutlass.max(cutlass.min(of_cluster, walk.tiles[0] - 1), 0)
    return row, column, Int32(walk.experts[known])


# --------------------------------------------------------------------------------------------------
# The TMA producer of the GEMM kernels: issue the boxes of each stage on the stage's barrier.
#
# `feed_of` (host side of a launch) makes the TMA atom of a matrix, `feeding` (in the kernel) cuts
# it into boxes, `produce_tile` issues the boxes of all K steps of a tile. Descriptors are built at
# launch from pointers and extents, so they are not part of a compiled form. TMA fills whatever lies
# outside a matrix with zeros, so tails along M, N and K need no code; those zeros count as bytes.
#
# Use: one `TmaFeed` for each box of gemm.problem.loads. The producer warp calls `produce_tile` for
# every tile with any pipeline that has producer_acquire and producer_get_barrier (PipelineTmaAsync,
# PipelineTmaUmma). All 32 threads of the warp call it; TMA elects one.


class TmaFeed(NamedTuple):
    """TMA atom and coordinates of a matrix, or of many equal matrices along a third mode."""

    atom: Any
    tensor: Any


class BlockFeed(NamedTuple):
    """A feed cut for one thread block: (box, tiles along M or N, steps of K), (box, stages)."""

    atom: Any
    source: Any
    destination: Any
    mask: Any  # of the thread blocks that receive a box; None: this one alone


def feed_of(
    tensor: Any, layout: Any, box: tuple[int, ...], sharing: int = 1, group: tuple[Any, ...] = ()
) -> TmaFeed:
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
    return TmaFeed(atom, coordinates)


def feeding(
    feed: TmaFeed, shared: Any, box: tuple[int, ...], sharing: tuple[Any, int, Any] = (0, 1, None)
) -> BlockFeed:
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
    return BlockFeed(feed.atom, source, destination, mask)


@cute.jit
def produce_tile(
    pipeline: Any, state: Any, feedings: tuple[BlockFeed, ...], tiles: tuple[Any, ...], steps: Any
) -> Any:
    """Load all K steps of a tile; feeding i reads at tiles[i]. Return the pipeline state."""
    for step in cutlass.range(steps, unroll=1):
        state = produce_step(pipeline, state, feedings, tiles, step)
    return state


@cute.jit
def produce_step(
    pipeline: Any, state: Any, feedings: tuple[BlockFeed, ...], tiles: tuple[Any, ...], step: Any
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


def issue(feeding: BlockFeed, box: tuple[Any, ...], stage: Any, barrier: Any) -> None:
    """Issue one box into a stage; `box` is (tile, step) or (tile, step, matrix)."""
    more = {} if feeding.mask is None else {"mcast_mask": feeding.mask}
    cute.copy(
        feeding.atom,
        feeding.source[None, *box],
        feeding.destination[None, stage],
        tma_bar_ptr=barrier,
        **more,
    )


# --------------------------------------------------------------------------------------------------
# Store a tile of D: scale float32 sums in registers, round once to BF16, store by TMA.
#
# A tile leaves in pieces of 64 columns by the rows that one group of threads holds. One piece:
#   1. scale in float32 (tensor scales are applied here, never in BF16), round to nearest even;
#   2. the storing warp waits until at most one of its TMA stores still reads a buffer;
#   3. named barrier of the group; registers to a swizzled buffer; fence to the async proxy;
#   4. named barrier of the group; the storing warp (warp 0 of the group) issues the TMA store.
# A group has `pieces_at_once` buffers (two, or with `store_at_once` one for each piece of a tile)
# and its own named barrier, so groups do not wait for each other, and stores overlap with the loads
# of the next tile. TMA omits what lies outside D: there is no predicate for tails.
#
# Use: `store_of` in the jitted launch makes the TMA atom of D; `EpilogueBuffers` holds a group's
# barrier, buffers and register layout (a tiled copy: `wgmma_copy` on sm_90a, a copy by rows
# on sm_100a); `store_piece` stores each piece, or `store_at_once` a whole tile; `drain` runs before
# the thread block ends.


class TmaStore(NamedTuple):
    """TMA atom of D and its coordinate tensor."""

    atom: Any
    tensor: Any


class EpilogueBuffers(NamedTuple):
    """The buffers, barrier and TMA atom through which one group of threads stores its pieces."""

    store: Any  # atom of D
    target: Any  # (piece, pieces along M, pieces along N) of D
    source: Any  # (piece, buffers) as TMA reads shared memory
    copy: Any  # tiled copy from registers to shared memory
    shared: Any  # (values of this thread, buffers)
    barrier: Any  # number of the group's named barrier
    threads: int  # of the group
    stores: Any  # whether this thread's warp issues the stores


def piece_layout(
    buffers: int, rows: int = facts.PIECE_ROWS, columns: int = facts.PIECE_COLUMNS
) -> Any:
    """Return the layout of pieces in shared memory: rows of 128 or 64 bytes, swizzled."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.K_SW128 if columns == facts.PIECE_COLUMNS else kinds.K_SW64
    atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
    return cute.tile_to_shape(atom, (rows, columns, buffers), (0, 1, 2))


def store_of(
    tensor: Any, rows: int = facts.PIECE_ROWS, columns: int = facts.PIECE_COLUMNS
) -> TmaStore:
    """Make the TMA atom that stores pieces of D."""
    layout = cute.slice_(piece_layout(1, rows, columns), (None, None, 0))
    atom, coordinates = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, (rows, columns)
    )
    return TmaStore(atom, coordinates)


def wgmma_copy(tiled_mma: Any) -> Any:
    """Return the copy of a wgmma accumulator's registers: four 8 x 8 matrices at once."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
    return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, tiled_mma))


def outlet_of(
    store: TmaStore, shared: Any, copy: Any, thread: Any, barrier: Any
) -> EpilogueBuffers:
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
    return EpilogueBuffers(
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
    outlet: EpilogueBuffers,
    numbers: Any,
    place: tuple[Any, Any],
    count: Any,
    scales: tuple[Any, ...] = (),
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
def store_at_once(outlet: EpilogueBuffers, sums: list[Any], places: list[tuple[Any, Any]]) -> None:
    """Store a warpgroup's tile at once, each piece from a buffer of its own: two barriers a tile.

    `sums` are of 64 rows each, whose first piece lies at (row, column) of `places`.
    """
    if outlet.stores:  # those of the tile before have read the buffers
        cute.arch.cp_async_bulk_wait_group(0, read=True)
    cute.arch.barrier(barrier_id=outlet.barrier, number_of_threads=outlet.threads)
    of_piece = cutlass.const_expr(cute.size(outlet.shared[None, None, None, 0]))
    pieces = cute.size(sums[0]) // of_piece
    for i in cutlass.range_constexpr(len(sums) * pieces):
        first = i % pieces * of_piece
        rounded = cute.make_rmem_tensor(outlet.shared[None, None, None, 0].shape, BFloat16)
        round_into(rounded, [sums[i // pieces][first + j] for j in range(of_piece)], ())
        cute.copy(outlet.copy, rounded, outlet.shared[None, None, None, i])
    # TMA reads shared memory through the async proxy; the copy wrote it through the generic one.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=outlet.barrier, number_of_threads=outlet.threads)
    if outlet.stores:
        for i in cutlass.range_constexpr(len(sums) * pieces):
            target = outlet.target[None, *place_of_piece(i, pieces, places)]
            cute.copy(outlet.store, outlet.source[None, i], target)
        cute.arch.cp_async_bulk_commit_group()


def place_of_piece(piece: int, pieces: int, places: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return where a piece lies, of so many that share rows."""
    row, column = places[piece // pieces]
    return row, column + piece % pieces


@cute.jit
def drain(outlet: EpilogueBuffers) -> None:
    """Wait until the TMA stores have read shared memory, which ends with the thread block."""
    if outlet.stores:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


# --------------------------------------------------------------------------------------------------
# Building blocks of the sm_90a GEMM kernels around wgmma: instruction, rings, clusters, roles.
#
# A warpgroup multiplies 64 rows of the tile with all its columns by an instruction of its own
# (`mma_of`); warpgroups synchronise only through the rings. `load` is the role of the loading warp,
# `store_tile` writes a warpgroup's 64 rows piece by piece.

Swizzle = warpgroup.SmemLayoutAtomKind
WIDTH_OF_FP8 = 8  # bits
FIRST_BARRIER = 2  # of the warpgroups that multiply; 0 and 1 belong to the thread block


class Sharing(NamedTuple):
    """This thread block's place among those that receive its A and its B, with their masks."""

    a: tuple[Any, int, Any]
    b: tuple[Any, int, Any]


def mma_of(element: Any, columns: int, source: Any = warpgroup.OperandSource.SMEM) -> Any:
    """Return the wgmma of one warpgroup: 64 rows, float32 accumulators, K along rows."""
    majors = (OperandMajorMode.K, OperandMajorMode.K)
    # K of one wgmma is 32 bytes: 16 BF16 or 32 FP8 numbers.
    shape = (facts.PIECE_ROWS, columns, 32 * 8 // element.width)
    operation: Any
    if element.width == WIDTH_OF_FP8:
        operation = warpgroup.MmaF8Op(element, element, Float32, shape, source, *majors)
    else:
        operation = warpgroup.MmaF16BF16Op(element, Float32, shape, source, *majors)
    return cute.make_tiled_mma(cute.make_mma_atom(operation))


def staged_layout(element: Any, rows: int, inner: int, stages: Any, swizzle: Any) -> Any:
    """Return the layout of an operand's stages in shared memory: K along rows, swizzled.

    `stages` is their number, or (matrices of a stage, number of stages).
    """
    atom = warpgroup.make_smem_layout_atom(swizzle, element)
    shape = (rows, inner, *(stages if isinstance(stages, tuple) else (stages,)))
    return cute.tile_to_shape(atom, shape, tuple(range(len(shape))))


def shared_of(memory: Any, element: Any, layout: Any) -> Any:
    """Allocate shared memory for a swizzled layout."""
    return memory.allocate_tensor(element, layout.outer, facts.ALIGNMENT, swizzle=layout.inner)


def stages_of(memory: Any, elements: Any, layouts: Any, form: GemmForm) -> tuple[Any, ...]:
    """Allocate the stages of A and B, the buffers of D's pieces if any, and the ring of stages."""
    sA, sB = (shared_of(memory, *each) for each in zip(elements, layouts, strict=True))
    if form.tactic.direct:
        return sA, sB, None, ring_of_stages(memory, form)
    count = facts.pieces_at_once(form.tactic) * facts.consumers(form)
    pieces = piece_layout(count, columns=facts.piece_columns(form.tactic))
    return sA, sB, shared_of(memory, BFloat16, pieces), ring_of_stages(memory, form)


def feedings_of(feeds: Any, shared: Any, boxes: Any, tactic: GemmTactic) -> tuple[Any, ...]:
    """Cut the feeds of A and B into boxes, shared within the cluster."""
    whole = zip(feeds, shared, boxes, sharing_of(tactic), strict=True)
    return tuple(feeding(*each) for each in whole)


def sharing_of(tactic: GemmTactic) -> Sharing:
    """Return which blocks of the cluster share A (along its columns) and B (along its rows)."""
    row, column, _ = cute.arch.block_idx()
    rows, columns = tactic.cluster_rows, tactic.cluster_columns
    a = b = (0, 1, None)
    if columns > 1:
        a = (column, columns, cutlass.Int16(sum(1 << rows * i for i in range(columns))) << row)
    if rows > 1:
        # Ranks within a cluster count rows first: rank = row + column * rows.
        b = (row, rows, cutlass.Int16((1 << rows) - 1) << column * rows)
    return Sharing(a, b)


def ring_of_stages(memory: Any, form: GemmForm) -> Any:
    """Make the ring that TMA fills.

    Full: the producer's arrival plus the bytes of a stage. Empty: one arrival per reading warp, of
    all thread blocks that share a load.
    """
    footprint = facts.footprint(form)
    group = pipeline.CooperativeGroup
    tactic = form.tactic
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * footprint.stages),
        num_stages=footprint.stages,
        producer_group=group(pipeline.Agent.Thread),
        consumer_group=group(pipeline.Agent.Thread, facts.release_arrivals(form)),
        tx_count=facts.transaction_bytes(form),
        cta_layout_vmnk=cute.make_layout((1, tactic.cluster_rows, tactic.cluster_columns, 1)),
        defer_sync=True,
    )


def begin(tactic: GemmTactic) -> None:
    """Wait until all barriers of the cluster exist and the previous launch has ended."""
    shape = (tactic.cluster_rows, tactic.cluster_columns)
    pipeline.pipeline_init_arrive(cluster_shape_mn=shape, is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=shape)
    follow()


@cute.jit
def begin_early(tactic: cutlass.Constexpr, feedings: Any, walk: TileWalk, steps: Any) -> None:
    """Do what `begin` does, and ask L2 for a tile's first stages of B meanwhile.

    Nothing is read before the previous launch has ended, so B need not be constant.
    """
    shape = (tactic.cluster_rows, tactic.cluster_columns)
    pipeline.pipeline_init_arrive(cluster_shape_mn=shape, is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=shape)
    let_follow()
    if cute.arch.warp_idx() == 0:
        side = 0 if tactic.swapped else 1
        of_b, at = feedings[side], tile_at(walk, walk.first)[side]
        # Trap: the DSL elects a lane for a copy, but, as its PTX shows, not for a prefetch.
        with cute.arch.elect_one():
            for step in cutlass.range(cutlass.min(steps, tactic.asked_early), unroll=1):
                cute.prefetch(of_b.atom, of_b.source[None, at, step])
    wait_for_front()


def producer_state(stages: int) -> Any:
    """Return a producer's first state in a ring."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)


def consumer_state(stages: int) -> Any:
    """Return a consumer's first state in a ring."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)


@cute.jit
def load(ring: Any, feedings: Any, walk: Any, steps: Any) -> None:
    """Load all stages of all tiles."""
    state = producer_state(ring.num_stages)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        tile = tile_at(walk, number)
        state = produce_tile(ring, state, feedings, tile, steps)
    ring.producer_tail(state)


# ---- consumers -----------------------------------------------------------------------------------


def fragments_of(mma: Any, sA: Any, sB: Any, mine: Any, columns: int) -> tuple[Any, ...]:
    """Return the instruction, a warpgroup's sums, its rows of A and all of B, by stage."""
    a = mma.make_fragment_A(mma.get_slice(0).partition_A(rows_of(sA, mine)))
    return mma, sums_of(mma, columns), a, mma.make_fragment_B(mma.get_slice(0).partition_B(sB))


def stage_of(a: Any, b: Any, stage: Any) -> tuple[Any, Any]:
    """Return the fragments of one stage."""
    return a[None, None, None, stage], b[None, None, None, stage]


def rows_of(shared: Any, mine: Any) -> Any:
    """Return the 64 rows of A's stages that belong to a warpgroup."""
    return cute.local_tile(
        shared, (facts.PIECE_ROWS, shared.shape[1], shared.shape[2]), (mine, 0, 0)
    )


def sums_of(mma: Any, columns: int) -> Any:
    """Return the registers of a warpgroup's float32 sums."""
    return cute.make_rmem_tensor(mma.partition_shape_C((facts.PIECE_ROWS, columns)), Float32)


@cute.jit
def multiply_stage(
    mma: Any,
    sums: Any,
    a: Any,
    b: Any,
    *,
    begins: cutlass.Constexpr,
    steps: cutlass.Constexpr = None,
) -> None:
    """Issue a stage's wgmma, one for each step of K, and commit them as one group.

    `steps`: B's first step, the step after the last, and the offset of A's steps from B's. Trap:
    setting a field changes the mma object, which would escape from a traced loop; hence the new
    one.
    """
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    warpgroup.fence()
    first, behind, shift = (0, cute.size(a, mode=[2]), 0) if steps is None else steps
    for k in cutlass.range_constexpr(first, behind):
        mma.set(warpgroup.Field.ACCUMULATE, not (begins and k == first))
        cute.gemm(mma, sums, a[None, None, k - shift], b[None, None, k], sums)
    warpgroup.commit_group()


def outlet_of_warpgroup(
    store: Any, shared: Any, mma: Any, mine: Any, buffers: int = facts.PIECES_AT_ONCE
) -> Any:
    """Return a warpgroup's outlet: its own buffers, its own named barrier."""
    thread, _, _ = cute.arch.thread_idx()
    rows, columns, _ = cute.product_each(shared.shape)
    own = cute.local_tile(shared, (rows, columns, buffers), (0, 0, mine))
    copy = wgmma_copy(mma)
    return outlet_of(store, own, copy, thread % facts.WARPGROUP, FIRST_BARRIER + mine)


@cute.jit
def store_tile(
    outlet: Any, sums: Any, place: tuple[Any, Any], stored: Any, scales: tuple[Any, ...] = ()
) -> Any:
    """Store a warpgroup's 64 rows, piece by piece; `place` counts pieces along M and N of D."""
    row, column = place
    of_piece = cutlass.const_expr(cute.size(outlet.shared[None, None, None, 0]))
    pieces = cute.size(sums) // of_piece
    for i in cutlass.range_constexpr(pieces):
        # A wgmma accumulator counts 8 columns after 8 columns: a piece's registers lie together.
        numbers = [sums[i * of_piece + j] for j in range(of_piece)]
        store_piece(outlet, numbers, (row, column + i), stored + i, scales)
    return stored + pieces


# ---- a tile of few numbers of D ------------------------------------------------------------------


class DirectOutlet(NamedTuple):
    """Where a thread writes its numbers of a tile: pairs of D, and the rows of the tile it has."""

    pairs: Any  # D as words of two BF16 numbers (M, N / 2)
    extents: tuple[Any, Any]  # M, N
    row: Any  # g of rows g and g + 8 of the tile
    lane: Any  # of the quad, which has columns 2 q and 2 q + 1 of eight


def direct_outlet_of(d: Any, extents: tuple[Any, Any], mine: Any) -> DirectOutlet:
    """Return a thread's outlet; `mine` is its warpgroup among those that multiply."""
    thread, _, _ = cute.arch.thread_idx()
    within = thread % facts.WARPGROUP
    # wgmma accumulator: a warp has 16 rows, a thread rows g and g + 8 of them.
    row = mine * facts.PIECE_ROWS + within // facts.WARP * 16 + within % facts.WARP // 4
    return DirectOutlet(d, extents, row, within % 4)


def pairs_of(d: Any, rows: Any, columns: Any) -> Any:
    """View D as words of two BF16 numbers."""
    words = columns // 2
    return cute.make_tensor(
        cute.recast_ptr(d.iterator, dtype=Uint32),
        cute.make_layout((rows, words), stride=(Int64(words), 1)),
    )


def rounded_pair(low: Any, high: Any) -> Any:
    """Round two float32 numbers to BF16, to nearest even, in one word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


HALVES_OF_PAIR = (0x5410, 0x3276)  # of two words, where g is even or odd: low ones, high ones


def place_of_word(number: int, row: Any, lane: Any, swapped: bool) -> tuple[Any, Any]:
    """Return where a thread's word `number` begins in D, counted from the tile.

    Swapped, the row of the tile is the column in D, and neighbours in D belong to rows g and g + 1:
    their threads exchange a word, and each writes the pair of one row of D.
    """
    # Four registers for each eight columns: two columns of row g, then of row g + 8.
    row, column = row + number % 2 * 8, number // 2 * 8 + lane * 2
    return (column + row % 2, row - row % 2) if swapped else (row, column)


@cute.jit
def store_directly(
    outlet: DirectOutlet, sums: Any, place: tuple[Any, Any], tactic: cutlass.Constexpr
) -> None:
    """Round a thread's sums of a tile, and write those that lie within D; two at a time."""
    first = facts.sides((place[0] * tactic.rows, place[1] * tactic.columns), tactic)
    rows, columns = outlet.extents
    halves = ops.select(outlet.row % 2 == 0, *(Uint32(kind) for kind in HALVES_OF_PAIR))
    for i in cutlass.range_constexpr(cute.size(sums) // 2):
        word = rounded_pair(sums[2 * i], sums[2 * i + 1])
        if cutlass.const_expr(tactic.swapped):
            other = cute.arch.shuffle_sync_bfly(word, offset=4)  # the lane of row g + 1 or g - 1
            word = cute.arch.prmt(word, other, halves)
        row, column = place_of_word(i, outlet.row, outlet.lane, tactic.swapped)
        row, column = first[0] + row, first[1] + column
        if (row < rows) & (column < columns):
            outlet.pairs[row, column // 2] = word
