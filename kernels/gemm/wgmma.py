"""Building blocks of the sm_90a GEMM kernels around wgmma: instruction, rings, clusters, roles.

A warpgroup multiplies 64 rows of the tile with all its columns by an instruction of its own
(`mma_of`); warpgroups synchronise only through the rings. `load` is the role of the loading warp,
`store_tile` writes a warpgroup's 64 rows piece by piece.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from degarble.kernels.gemm import epilogue, producer, schedule
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.problem import GemmForm, Tactic

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
    """Allocate the stages of A and B, the buffers of D's pieces, and the ring of stages."""
    sA, sB = (shared_of(memory, *each) for each in zip(elements, layouts, strict=True))
    pieces = epilogue.piece_layout(facts.PIECES_AT_ONCE * facts.consumers(form))
    return sA, sB, shared_of(memory, BFloat16, pieces), ring_of_stages(memory, form)


def feedings_of(feeds: Any, shared: Any, boxes: Any, tactic: Tactic) -> tuple[Any, ...]:
    """Cut the feeds of A and B into boxes, shared within the cluster."""
    whole = zip(feeds, shared, boxes, sharing_of(tactic), strict=True)
    return tuple(producer.feeding(*each) for each in whole)


def sharing_of(tactic: Tactic) -> Sharing:
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


def begin(tactic: Tactic) -> None:
    """Wait until all barriers of the cluster exist."""
    shape = (tactic.cluster_rows, tactic.cluster_columns)
    pipeline.pipeline_init_arrive(cluster_shape_mn=shape, is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=shape)


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
        tile = schedule.tile_at(walk, number)
        state = producer.produce_tile(ring, state, feedings, tile, steps)
    ring.producer_tail(state)


# ---- consumers -----------------------------------------------------------------------------------


def fragments_of(mma: Any, sA: Any, sB: Any, mine: Any, columns: int) -> tuple[Any, ...]:
    """Return the instruction, a warpgroup's sums, its rows of A and all of B, by stage."""
    part = mma.get_slice(0)
    a = mma.make_fragment_A(part.partition_A(rows_of(sA, mine)))
    return mma, sums_of(mma, columns), a, mma.make_fragment_B(part.partition_B(sB))


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


def outlet_of_warpgroup(store: Any, shared: Any, mma: Any, mine: Any) -> Any:
    """Return a warpgroup's outlet: its own buffers, its own named barrier."""
    thread, _, _ = cute.arch.thread_idx()
    own = cute.local_tile(
        shared, (facts.PIECE_ROWS, facts.PIECE_COLUMNS, facts.PIECES_AT_ONCE), (0, 0, mine)
    )
    copy = epilogue.wgmma_copy(mma)
    return epilogue.outlet_of(store, own, copy, thread % facts.WARPGROUP, FIRST_BARRIER + mine)


@cute.jit
def store_tile(
    outlet: Any, sums: Any, place: tuple[Any, Any], stored: Any, scales: tuple[Any, ...] = ()
) -> Any:
    """Store a warpgroup's 64 rows, piece by piece; `place` counts pieces along M and N of D."""
    row, column = place
    of_piece = facts.PIECE_ROWS * facts.PIECE_COLUMNS // facts.WARPGROUP
    pieces = cute.size(sums) // of_piece
    for i in cutlass.range_constexpr(pieces):
        # A wgmma accumulator counts 8 columns after 8 columns: a piece's registers lie together.
        numbers = [sums[i * of_piece + j] for j in range(of_piece)]
        epilogue.store_piece(outlet, numbers, (row, column + i), stored + i, scales)
    return stored + pieces
