"""Lightning indexer scores on Blackwell: s[t, w] = sum_h weight[t, h] * relu(q[t, h] . k[w]).

Compiled, never run. Operands, pages and the walk over keys are those of sm90_indexer_scores. 384
threads:

* Warp 0 (producer): TMA of queries once, of 128 keys a stage.
* Warp 1 (MMA): tcgen05 of 128 keys with all columns into one of two sums in tensor memory.
* Warpgroups 1, 2 (epilogue): weigh and write every other stage each, one thread a key.
* Key ring, up to 6 stages: TMA fills, the MMA that read a stage releases it.
* Sums ring, 2 stages: the MMA fills, the 128 threads of one warpgroup release.
* Named barrier 2: the 256 epilogue threads, before tensor memory is freed.

A thread has all heads of its key and adds them in the order in which four threads add them on
Hopper (CHAINS), so the order of a sum over heads is stated once. Allocates only the scores and
never waits for the GPU. Shape letters: T tokens, N heads, I width (128), W entries, S sequences, P
pages of a sequence.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.nvgpu import tcgen05 as instructions

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import round_up
from degarble.kernels.gemm import mainloop, tcgen05
from degarble.kernels.gemm.w4a16_instructions import shared_words
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer import sm90_indexer_scores as hopper
from degarble.kernels.indexer.problem import ScoresForm
from degarble.kernels.indexer.sm90_indexer_scores import (
    KeyWalk,
    ScoresExtents,
    ScoresTensors,
)
from degarble.kernels.runtime.targets import SM100A

CHAINS = 4  # sums of a key side by side: the threads of a quad on Hopper


class Rings(NamedTuple):
    """Rings that TMA fills, and the ring that the matrix unit fills."""

    queries: Any
    keys: Any
    sums: Any


class ScoresBlockState(NamedTuple):
    """What all warps share: instruction, shared memory, rings and tensor memory."""

    mma: Any
    queries: tuple[Any, Any]  # as TMA writes them, as the instruction reads them
    keys: tuple[Any, Any]
    tokens: Any
    weights: Any  # address in shared memory
    rings: Rings
    base: Any
    sums: Any


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def scores_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    tensors: ScoresTensors,
    e: ScoresExtents,
    form: cutlass.Constexpr,
) -> None:
    """Take a role by warp: 0 loads, 1 multiplies, two warpgroups weigh."""
    tile, chunk, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    tile = tiles - 1 - tile  # the last tokens see most: they begin first
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    held = prepared(tensors, tile, e, form)
    begin = chunk * e.chunk
    walk = KeyWalk(held.tokens, tile, begin, cutlass.min(begin + e.chunk, e.entries))
    if warp == facts.LOADING_WARP:
        hopper.load_queries(held.rings.queries, feeds[0], held.queries[0], tile, form)
        shared = (held.keys[0],)
        hopper.load_walk(held.rings.keys, feeds[1:], shared, (walk, tensors, e), form)
    elif warp == facts.MULTIPLYING_WARP:
        multiply_walk(held, walk, form)
    elif warp >= facts.ALLOCATING_WARP:
        weigh_walk(held, (walk, tensors, e), form)
        give_back(held.base, form)


def prepared(
    tensors: ScoresTensors, tile: Any, e: ScoresExtents, form: ScoresForm
) -> ScoresBlockState:
    """Lay out shared memory, make the rings, allocate tensor memory; then synchronise."""
    memory = cutlass.memory.SmemAllocator()
    mma = mma_of(form)
    queries, keys = shared_memory(memory, mma, form)
    address = memory.allocate_array(Int32, facts.ADDRESS_BYTES // 4)
    words = memory.allocate_array(Uint32, facts.words_of_weights(form))
    sTokens = memory.allocate_tensor(Int32, cute.make_layout((2, form.at_once)), 8)
    rings = rings_of(memory, form)
    hopper.look_up(sTokens, tensors, tile, e, form)
    threads = cute.arch.thread_idx()[0], facts.threads(form)
    hopper.leave_weights(words, tensors, tile, e, threads, form)
    allocate(address, form)
    pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
    cute.arch.sync_threads()
    base = tcgen05.base_of(address)
    shape = cute.append(mma.partition_shape_C((facts.KEYS, form.columns)), facts.SUMS)
    sums = cute.make_tensor(base, mma.make_fragment_C(shape).layout)
    return ScoresBlockState(mma, queries, keys, sTokens, Uint32(words.toint()), rings, base, sums)


def mma_of(form: ScoresForm) -> Any:
    """Return the instruction: 128 keys, all columns, both operands in shared memory."""
    element = hopper.ELEMENTS[form.operands]
    inner = facts.INSTRUCTION_BYTES * 8 // element.width
    rest = (
        (facts.KEYS, form.columns, inner),
        instructions.CtaGroup.ONE,
        instructions.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    operation: Any
    if form.operands == "fp8":
        operation = instructions.MmaF8F6F4Op(element, element, Float32, *rest)
    else:
        operation = instructions.MmaF16BF16Op(element, Float32, *rest)
    return cute.make_tiled_mma(operation)


def shared_memory(memory: Any, mma: Any, form: ScoresForm) -> tuple[tuple[Any, Any], ...]:
    """Allocate queries and keys; return both as TMA writes them and as the instruction reads."""
    element, stages = hopper.ELEMENTS[form.operands], facts.stages(form)
    atom = instructions.make_smem_layout_atom(instructions.SmemLayoutAtomKind.K_SW128, element)
    shapes = (
        cute.append(mma.partition_shape_B((form.columns, facts.WIDTH)), 1),
        cute.append(mma.partition_shape_A((facts.KEYS, facts.WIDTH)), stages),
    )
    made = []
    for written, shape in zip(hopper.layouts(form), shapes, strict=True):
        tensor = mainloop.shared_of(memory, element, written)
        layout = instructions.tile_to_mma_shape(atom, shape, order=(1, 2, 3))
        made.append((tensor, cute.make_tensor(tensor.iterator, layout.outer)))
    return tuple(made)


def rings_of(memory: Any, form: ScoresForm) -> Rings:
    """Make the rings; a stage of keys is released by the instruction that read it last."""
    group, agent, stages = pipeline.CooperativeGroup, pipeline.Agent.Thread, facts.stages(form)
    keys = pipeline.PipelineTmaUmma.create(
        barrier_storage=memory.allocate_array(Int64, 2 * stages),
        num_stages=stages,
        producer_group=group(agent),
        consumer_group=group(agent),
        tx_count=facts.stage_bytes(form),
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )
    sums = pipeline.PipelineUmmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * facts.SUMS),
        num_stages=facts.SUMS,
        producer_group=group(agent),
        consumer_group=group(agent, facts.WARPGROUP),
        defer_sync=True,
    )
    weighing = facts.threads_that_weigh(form)
    return Rings(hopper.ring_of(memory, 1, facts.query_bytes(form), weighing), keys, sums)


@cute.jit
def allocate(address: Any, form: cutlass.Constexpr) -> None:
    """Allocate tensor memory in one warp; all may read the address after a barrier."""
    if cute.arch.warp_idx() == facts.ALLOCATING_WARP:
        cute.arch.alloc_tmem(facts.columns_allocated(form), address)
        cute.arch.relinquish_tmem_alloc_permit()


@cute.jit
def give_back(base: Any, form: cutlass.Constexpr) -> None:
    """Free tensor memory in the allocating warp, once all epilogue threads have read theirs."""
    count = facts.threads_that_weigh(form)
    cute.arch.barrier(barrier_id=hopper.BARRIER_OF_WEIGHING, number_of_threads=count)
    if cute.arch.warp_idx() == facts.ALLOCATING_WARP:
        cute.arch.dealloc_tmem(base, facts.columns_allocated(form))


@cute.jit
def multiply_walk(held: ScoresBlockState, walk: KeyWalk, form: cutlass.Constexpr) -> None:
    """Multiply the keys of every sequence that the tile's tokens belong to."""
    mma, sums = held.mma, held.sums
    query_ring, key_ring, sums_ring = held.rings
    a, b = mma.make_fragment_A(held.keys[1]), mma.make_fragment_B(held.queries[1])
    query_ring.consumer_wait(mainloop.consumer_state(1))
    state = mainloop.consumer_state(facts.stages(form))
    target = mainloop.producer_state(facts.SUMS)
    for lead in cutlass.range(form.at_once, unroll=1):
        _, limit, _ = hopper.run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        for _ in cutlass.range(walk.begin, last, facts.KEYS, unroll=1):
            sums_ring.producer_acquire(target)
            key_ring.consumer_wait(state)
            tcgen05.fence("after")
            into = sums[None, None, None, target.index]
            keys, queries = a[None, None, None, state.index], b[None, None, None, 0]
            tcgen05.multiply_stage(mma, into, (keys,), (queries,), True)
            key_ring.consumer_release(state)
            sums_ring.producer_commit(target)
            state.advance()
            target.advance()
    sums_ring.producer_tail(target)


# ---- weigh ---------------------------------------------------------------------------------------


@cute.jit
def weigh_walk(
    held: ScoresBlockState,
    given: tuple[KeyWalk, ScoresTensors, ScoresExtents],
    form: cutlass.Constexpr,
) -> None:
    """Weigh every other stage of keys, and write the scores."""
    walk, tensors, e = given
    thread, _, _ = cute.arch.thread_idx()
    ring, weights_at = held.rings.sums, held.weights
    mine = thread // facts.WARPGROUP - 1
    reading = reading_of(held.sums, thread % facts.WARPGROUP, form)
    state = mainloop.consumer_state(facts.SUMS)
    for lead in cutlass.range(form.at_once, unroll=1):
        sequence, limit, limits = hopper.run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        for key in cutlass.range(walk.begin, last, facts.KEYS, unroll=1):
            # Stages alternate between both warpgroups, as the sums' buffers do.
            if state.index == mine:
                row = key + thread % facts.WARPGROUP
                scale = Float32(1.0)
                if cutlass.const_expr(form.operands == "fp8"):
                    scale = hopper.key_scale_of(tensors, (sequence, row, last), e)
                ring.consumer_wait(state)
                tcgen05.fence("after")
                scores = weighed(reading, mine, weights_at, scale, form)
                tcgen05.fence("before")
                ring.consumer_release(state)
                put_row(tensors.out, scores, (walk.tile, row, walk.end), limits, e.entries, form)
            state.advance()
        done = walk.begin + round_up(cutlass.max(last - walk.begin, 0), facts.KEYS)
        place = (walk.tile, done, walk.end)
        hopper.put_nothing(tensors.out, place, limits, e.entries, form)


def reading_of(sums: Any, thread: Any, form: ScoresForm) -> tcgen05.TensorMemoryRead:
    """Cut the sums into pieces of columns; a thread reads one lane, its key."""
    columns = facts.columns_read(form)
    atom = cute.make_copy_atom(instructions.Ld32x32bOp(instructions.Repetition(columns)), Float32)
    pieces = cute.flat_divide(sums[(None, None), 0, 0, None], (facts.KEYS, columns))
    copy = instructions.make_tmem_copy(atom, pieces[None, None, 0, 0, 0])
    own = copy.get_slice(thread)
    piece = cute.make_identity_tensor((facts.KEYS, columns))
    return tcgen05.TensorMemoryRead(copy, own.partition_S(pieces), own.partition_D(piece).shape)


def weighed(
    reading: tcgen05.TensorMemoryRead, number: Any, weights_at: Any, scale: Any, form: ScoresForm
) -> list[Any]:
    """Return a key's scores of every token; the next read overlaps the additions."""
    totals = [[Float32(0.0)] * CHAINS for _ in range(form.at_once)]
    reads = facts.reads(form)
    pending = read_piece(reading, 0, number)
    for piece in range(reads):
        # Waits for the pending read.
        cute.arch.fence_view_async_tmem_load()
        products = pending
        if piece + 1 < reads:
            pending = read_piece(reading, piece + 1, number)
        add_piece(products, piece, weights_at, totals, form)
    made = []
    for chains in totals:
        # The order of Hopper's quad: lanes 0 + 1, 2 + 3, then both.
        folded = [ops.add_rn(chains[i], chains[i + 1]) for i in (0, 2)]
        made.append(hopper.finished(ops.add_rn(*folded), scale, form))
    return made


def read_piece(reading: tcgen05.TensorMemoryRead, piece: int, number: Any) -> Any:
    """Issue the read of a piece of the sums."""
    registers = cute.make_rmem_tensor(reading.shape, Float32)
    cute.copy(reading.copy, reading.source[None, None, None, 0, piece, number], registers)
    return registers


def add_piece(
    products: Any, piece: int, weights_at: Any, totals: list[list[Any]], form: ScoresForm
) -> None:
    """Add a piece's products by their weights, eight neighbouring heads at a time."""
    columns, step = facts.columns_read(form), facts.HEADS_STEP
    words = step * facts.words_of_weights(form) // form.columns
    for eight in range(columns // step):
        first = piece * columns + eight * step
        at = weights_at + first // step * words * facts.WORD_BYTES
        weights = [word for i in range(0, words, 4) for word in shared_words(at + i * 4, 4)]
        chains = totals[first // form.padded]
        for chain in range(CHAINS):
            pair = [products[eight * step + 2 * chain + i] for i in (0, 1)]
            each = words // CHAINS
            own = [Uint32(word) for word in weights[chain * each : (chain + 1) * each]]
            chains[chain] = hopper.pair_added(pair, own, chains[chain], form)


@cute.jit
def put_row(
    out: Any,
    scores: list[Any],
    place: tuple[Any, Any, Any],
    limits: list[Any],
    entries: Any,
    form: cutlass.Constexpr,
) -> None:
    """Write the scores of (tile, thread's key) up to an end; neighbours write adjacent ones."""
    tile, entry, end = place
    for j in cutlass.range_constexpr(form.at_once):
        if (limits[j] >= 0) & (entry < end):
            at = Int64(tile * form.at_once + j) * Int64(entries) + Int64(entry)
            out[at] = ops.select(entry < limits[j], scores[j], Float32(float("-inf")))


@cute.jit
def launch_scores(
    pointers: tuple[cute.Pointer, ...],
    numbers: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form; the last two numbers are tiles and chunks."""
    *extents, tiles, chunks = numbers
    e = ScoresExtents(*extents)
    queries, pages, *others = pointers
    feeds = hopper.feeds_of(queries, pages, e, form)
    flat = cute.make_layout(hopper.FLAT)
    tensors = ScoresTensors(*(cute.make_tensor(address, flat) for address in others))
    scores_kernel(feeds, tensors, e, form).launch(
        grid=[tiles, chunks, 1],
        block=[facts.threads(form), 1, 1],
        min_blocks_per_mp=1,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------

KERNEL = replace(hopper.KERNEL, entry=launch_scores, target=SM100A)
compile_form = KERNEL.compile_form
