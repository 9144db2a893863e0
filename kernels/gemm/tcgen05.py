"""Building blocks of the sm_100a GEMM kernels around tcgen05: instructions, rings, tensor memory.

Six warps: 0 to 3 store, each from its 32 lanes of tensor memory; 4 copies scales to tensor memory
and multiplies; 5 loads. Copies and matrix instructions of one thread run in their order (PTX ISA
9.1, tcgen05 memory consistency, pipelined instructions). That the next stage's copy of scales waits
for this stage's products is not stated there; all published kernels rely on it. Between threads a
fence stands on either side of each barrier.

Compiled but never run: no sm_100a device was available.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import BFloat16, Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blockscaled_layout

from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory as memory_facts
from degarble.kernels.gemm.problem import GemmForm, GemmTactic

BLOCK = facts.NVFP4.block
BARRIER_OF_STORES = 2  # 0 and 1 belong to the thread block
STORE_BITS = 128  # of one write of a thread to shared memory


class TensorMemoryScales(NamedTuple):
    """One operand's scales: their place in tensor memory, and the copy that fills it per stage."""

    tensor: Any
    copy: Any
    source: Any
    target: Any


def fence(side: str) -> None:
    """Order tcgen05 operations `before` or `after` a barrier (PTX ISA 9.1)."""
    cute.arch.inline_ptx(f"tcgen05.fence::{side}_thread_sync;")


# ---- instructions and layouts --------------------------------------------------------------------


def dense_mma(form: GemmForm, element: Any) -> Any:
    """Return the tcgen05.mma of operands without scales: one thread block, shared memory."""
    inner = memory_facts.INSTRUCTION_K[form.operands]
    rest = (
        (form.tactic.rows, form.tactic.columns, inner),
        tcgen05.CtaGroup.ONE,
        tcgen05.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    operation: Any
    if element is BFloat16:
        operation = tcgen05.MmaF16BF16Op(element, Float32, *rest)
    else:
        operation = tcgen05.MmaF8F6F4Op(element, element, Float32, *rest)
    return cute.make_tiled_mma(operation)


def group_of(form: GemmForm) -> Any:
    """Return the CTA group: one thread block, or a pair that multiplies together."""
    return tcgen05.CtaGroup.ONE if form.tactic.together == 1 else tcgen05.CtaGroup.TWO


def nvfp4_mma(form: GemmForm) -> Any:
    """Return the block-scaled tcgen05.mma: both operands in shared memory."""
    rows, columns, _ = tile_of(form)
    shape = (rows, columns, memory_facts.INSTRUCTION_K["nvfp4"])
    operation = tcgen05.MmaMXF4NVF4Op(
        Float8E4M3FN, shape, group_of(form), tcgen05.OperandSource.SMEM
    )
    return cute.make_tiled_mma(operation)


def tile_of(form: GemmForm) -> tuple[int, int, int]:
    """Return M, N, K of what one stage multiplies, by one thread block or by a pair."""
    return form.tactic.together * form.tactic.rows, form.tactic.columns, form.tactic.inner


def operand_layouts(mma: Any, form: GemmForm, stages: int, element: Any = Float4E2M1FN) -> Any:
    """Return the layouts of A's and B's stages for the instruction: 128-byte swizzle."""
    rows, columns, inner = tile_of(form)
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, element)
    shapes = (mma.partition_shape_A((rows, inner)), mma.partition_shape_B((columns, inner)))
    return tuple(
        tcgen05.tile_to_mma_shape(atom, cute.append(shape, stages), order=(1, 2, 3))
        for shape in shapes
    )


def scale_layouts(mma: Any, form: GemmForm, stages: int) -> tuple[Any, ...]:
    """Return the layouts of A's and B's scales in a stage: tiles of 512 bytes, K first."""
    make = (blockscaled_layout.make_smem_layout_sfa, blockscaled_layout.make_smem_layout_sfb)
    return tuple(each(mma, tile_of(form), BLOCK, stages) for each in make)


# ---- rings ---------------------------------------------------------------------------------------


def sharing_of(form: GemmForm) -> dict[str, tuple[Any, int, Any]]:
    """Return by side which blocks of the cluster receive a box: place, number, mask."""
    share = mainloop.sharing_of(form.tactic)
    return {"a": share.a, "b": share.b}


def sharers(form: GemmForm) -> dict[str, int]:
    """Return by side how many thread blocks receive a box at once."""
    return {"a": form.tactic.cluster_columns, "b": form.tactic.cluster_rows}


def cluster_layout(form: GemmForm) -> Any:
    """Return the layout of a cluster: blocks of a pair, rows, columns."""
    tactic = form.tactic
    rows = tactic.cluster_rows // tactic.together
    return cute.make_layout((tactic.together, rows, tactic.cluster_columns, 1))


def ring_of_stages(memory: Any, form: GemmForm) -> Any:
    """Make the ring that TMA fills.

    Full: one arrival plus the bytes of a stage (of a pair, of both blocks). Empty: the commits of
    the instruction streams that read it (`arrivals_of_stage`).
    """
    held = memory_facts.footprint(form)
    group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
    return pipeline.PipelineTmaUmma.create(
        barrier_storage=memory.allocate_array(Int64, 2 * held.stages),
        num_stages=held.stages,
        producer_group=group(agent),
        consumer_group=group(agent, memory_facts.arrivals_of_stage(form)),
        tx_count=facts.expected_bytes(form),
        cta_layout_vmnk=cluster_layout(form),
        defer_sync=True,
    )


def ring_of_sums(memory: Any, form: GemmForm) -> Any:
    """Make the ring of sums in tensor memory.

    Full: a commit of the multiplying thread. Empty: an arrival of every thread that stores.
    """
    count = memory_facts.accumulators(form)
    group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
    return pipeline.PipelineUmmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * count),
        num_stages=count,
        producer_group=group(agent),
        consumer_group=group(agent, memory_facts.arrivals_of_sums(form)),
        cta_layout_vmnk=None if form.tactic.together == 1 else cluster_layout(form),
        defer_sync=True,
    )


# ---- tensor memory -------------------------------------------------------------------------------


def begin(tactic: GemmTactic) -> None:
    """Wait until all barriers and the address of tensor memory exist."""
    mainloop.begin(tactic)
    if tactic.cluster_rows * tactic.cluster_columns > 1:
        cute.arch.sync_threads()  # a cluster's barrier is relaxed: it orders no memory


@cute.jit
def allocate(address: Any, form: cutlass.Constexpr) -> None:
    """Allocate tensor memory by warp 0; the address is readable after a barrier."""
    if cute.arch.warp_idx() == 0:
        pair = form.tactic.together > 1
        cute.arch.alloc_tmem(memory_facts.columns_allocated(form), address, is_two_cta=pair)
        # No further allocation by this block; PTX ISA 9.1, tcgen05.relinquish_alloc_permit.
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)


def base_of(address: Any) -> Any:
    """Return the base of tensor memory; a pointer step is a column."""
    fence("after")
    return cute.arch.retrieve_tmem_ptr(Float32, 16, address)


@cute.jit
def give_back(base: Any, form: cutlass.Constexpr) -> None:
    """Free tensor memory by warp 0 after all storing warps have read theirs."""
    cute.arch.barrier(
        barrier_id=BARRIER_OF_STORES, number_of_threads=memory_facts.threads_that_store()
    )
    if cute.arch.warp_idx() == 0:
        cute.arch.dealloc_tmem(base, memory_facts.columns_allocated(form))


def sums_of(mma: Any, base: Any, form: GemmForm) -> Any:
    """Return the sums in tensor memory: (lanes and columns, 1, 1, places)."""
    shape = mma.partition_shape_C(tile_of(form)[:2])
    layout = mma.make_fragment_C(cute.append(shape, memory_facts.places_of_sums(form))).layout
    if memory_facts.overlaps(form):
        stride = (*layout.stride[:-1], memory_facts.columns_apart(form))
        layout = cute.make_layout(layout.shape, stride=stride)
    return cute.make_tensor(base, layout)


def scales_of(
    mma: Any, base: Any, shared: tuple[Any, Any], form: GemmForm
) -> tuple[TensorMemoryScales, ...]:
    """Return both operands' scales in tensor memory, after the sums, and their copies."""
    make = (blockscaled_layout.make_tmem_layout_sfa, blockscaled_layout.make_tmem_layout_sfb)
    made = []
    for of_layout, source, first in zip(
        make, shared, memory_facts.first_columns(form), strict=True
    ):
        one = cute.slice_(source.layout, (None, None, None, 0))
        layout = of_layout(mma, tile_of(form), BLOCK, one)
        pointer = cute.recast_ptr(base + first, dtype=Float8E4M3FN)
        made.append(scales_at(cute.make_tensor(pointer, layout), source, group_of(form)))
    return tuple(made)


def scales_at(tensor: Any, shared: Any, group: Any = tcgen05.CtaGroup.ONE) -> TensorMemoryScales:
    """Make the copy of an operand's scales: 32 lanes of 16 bytes, to all four lane groups."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(group), Float8E4M3FN)
    target, source = cute.filter_zeros(tensor), cute.filter_zeros(shared)
    copy = tcgen05.make_s2t_copy(atom, target)
    part = copy.get_slice(0)
    source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source))
    return TensorMemoryScales(tensor, copy, source, part.partition_D(target))


def shifted(tensor: Any, columns: Any) -> Any:
    """Return a tensor of scales that begins some columns further."""
    base = cute.recast_ptr(tensor.iterator, dtype=Float32)
    return cute.make_tensor(cute.recast_ptr(base + columns, dtype=Float8E4M3FN), tensor.layout)


# ---- load ----------------------------------------------------------------------------------------


@cute.jit
def load(ring: Any, feedings: Any, walk: Any, steps: Any, form: cutlass.Constexpr) -> None:
    """Load all stages of all tiles."""
    state = mainloop.producer_state(memory_facts.footprint(form).stages)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        tiles = memory_facts.tiles_of_boxes(mainloop.tile_at(walk, number), form)
        state = mainloop.produce_tile(ring, state, feedings, tiles, steps)
    ring.producer_tail(state)


# ---- multiply ------------------------------------------------------------------------------------


def bring_scales(scales: TensorMemoryScales, stage: Any) -> None:
    """Copy a stage's scales to tensor memory; later instructions of the thread see them."""
    cute.copy(scales.copy, scales.source[None, None, None, None, stage], scales.target)


@cute.jit
def multiply_stage(mma: Any, sums: Any, a: Any, b: Any, begins: Any) -> None:
    """Issue a stage's tcgen05.mma; with `begins` the sums start anew. A and B may carry scales.

    Trap: setting a field changes the mma object, which would escape from a traced loop; hence the
    new one.
    """
    mma = cute.make_tiled_mma(mma.op)
    for k in cutlass.range_constexpr(cute.size(a[0], mode=[2])):
        mma.set(tcgen05.Field.ACCUMULATE, cutlass.Boolean(True) if k else begins == 0)
        at = (None, None, k)
        if cutlass.const_expr(len(a) > 1):
            cute.gemm(mma, sums, [a[0][at], a[1][at]], [b[0][at], b[1][at]], sums)
        else:
            cute.gemm(mma, sums, a[0][at], b[0][at], sums)


# ---- stores --------------------------------------------------------------------------------------


def outlet_of(store: mainloop.TmaStore, shared: Any, thread: Any) -> mainloop.EpilogueBuffers:
    """Return the outlet of the four storing warps: a thread has a row of 64 columns."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=STORE_BITS)
    copy = cute.make_tiled_copy_tv(
        atom,
        cute.make_layout((memory_facts.LANES, 1)),
        cute.make_layout((1, STORE_BITS // BFloat16.width)),
    )
    return mainloop.outlet_of(store, shared, copy, thread, BARRIER_OF_STORES)


class TensorMemoryRead(NamedTuple):
    """Copy by which a thread reads sums: its part of all pieces, shape of its registers."""

    copy: Any
    source: Any
    shape: Any


def reading_of(sums: Any, thread: Any, columns: int = facts.PIECE_COLUMNS) -> TensorMemoryRead:
    """Cut the sums into pieces of so many columns; a thread reads one lane."""
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), Float32)
    pieces = cute.flat_divide(sums[(None, None), 0, 0, None], (memory_facts.LANES, columns))
    copy = tcgen05.make_tmem_copy(atom, pieces[None, None, 0, 0, 0])
    own = copy.get_slice(thread)
    piece = cute.make_identity_tensor((memory_facts.LANES, columns))
    return TensorMemoryRead(copy, own.partition_S(pieces), own.partition_D(piece).shape)


@cute.jit
def store_tile(
    outlet: Any, reading: Any, ring: Any, state: Any, work: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Store a tile by pieces; release the sums once the last piece is in registers."""
    (row, column), stored, scales = work
    pieces = cute.size(reading.source, mode=[4])
    ring.consumer_wait(state)
    fence("after")
    for i in cutlass.range_constexpr(pieces):
        part = reading.source[None, None, None, 0, i, state.index]
        registers = cute.make_rmem_tensor(reading.shape, Float32)
        cute.copy(reading.copy, part, registers)
        cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(i == pieces - 1):
            # All reads of the sums are complete: the multiplying warp may overwrite them.
            fence("before")
            ring.consumer_release(state)
        numbers = [registers[j] for j in range(facts.PIECE_COLUMNS)]
        mainloop.store_piece(outlet, numbers, (row, column + i), stored + i, scales)
    state.advance()
    return state, stored + Int32(pieces)


@cute.jit
def store_tiles(outlets: Any, walk: Any, scales: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Store tile after tile; `outlets` are D, buffers of pieces, sums and their ring."""
    store, pieces, sums, ring = outlets
    thread, _, _ = cute.arch.thread_idx()
    outlet, reading = outlet_of(store, pieces, thread), reading_of(sums, thread)
    state, stored = mainloop.consumer_state(memory_facts.accumulators(form)), Int32(0)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        row, column = mainloop.tile_at(walk, number)
        place = (row, column * (form.tactic.columns // facts.PIECE_COLUMNS))
        state, stored = store_tile(outlet, reading, ring, state, (place, stored, scales))
    mainloop.drain(outlet)


# ---- operands without scales in tensor memory ----------------------------------------------------


def plain_boxes(form: GemmForm) -> tuple[tuple[int, int], ...]:
    """Return the boxes of A's and B's feeds, counted in elements."""
    return tuple((load.rows, form.tactic.inner) for load in facts.loads(form))


def plain_layouts(element: Any, form: GemmForm) -> tuple[Any, ...]:
    """Return the layouts in which TMA writes A's and B's stages."""
    count, swizzle = memory_facts.footprint(form).stages, mainloop.Swizzle.K_SW128
    return tuple(mainloop.staged_layout(element, *box, count, swizzle) for box in plain_boxes(form))


def plain_feeds(element: Any, matrices: tuple[Any, Any], form: GemmForm) -> tuple[Any, ...]:
    """Return the feeds of A and B."""
    shared_by = sharers(form)
    layouts, boxes = plain_layouts(element, form), plain_boxes(form)
    return tuple(map(mainloop.feed_of, matrices, layouts, boxes, (shared_by["a"], shared_by["b"])))


def plain_feedings(
    element: Any, feeds: Any, shared: tuple[Any, Any], form: GemmForm
) -> tuple[Any, ...]:
    """Cut both feeds for this thread block."""
    views = (
        cute.make_tensor(tensor.iterator, layout.outer)
        for tensor, layout in zip(shared, plain_layouts(element, form), strict=True)
    )
    sharing = sharing_of(form)
    boxes = plain_boxes(form)
    return tuple(map(mainloop.feeding, feeds, views, boxes, (sharing["a"], sharing["b"])))
