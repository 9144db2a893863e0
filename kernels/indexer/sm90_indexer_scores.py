"""Lightning indexer scores on Hopper: s[t, w] = sum_h weight[t, h] * relu(q[t, h] . k[w]).

Scores are float32 [T, W], -inf from the token's first invisible entry on. No key is read from there
on. A thread block has a tile of one or four tokens (all their heads are the columns) and a chunk of
keys; a stage has 128 keys. 384 threads:

* Warpgroup 0, its first warp (producer): TMA of the tile's queries once, of pages of keys by stage.
* Warpgroups 1, 2 (consumers): wgmma of 64 keys each with all columns; then weigh, add and write.
* Query ring, 1 stage; key ring, up to 6 stages: `full` expects the bytes of all boxes (1 arrival),
  `empty` has 8 arrivals, one for each consumer warp.

One stage: look up pages, TMA (box by box, zeros past the end); wgmma; release the stage; relu,
weights, key scales; store. Tokens of a tile may belong to several sequences: the keys are walked
once for each. A thread adds its heads in order, then the four threads of a quad are folded, so a
score's bits depend on its query, key and weights alone.

A page outside the cache counts as keys of zero; a token of an unknown sequence sees nothing.
Allocates only the scores and never waits for the GPU. Shape letters: T tokens, N heads, I width
(128), W entries, S sequences, P pages of a sequence.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import round_up
from degarble.kernels.gemm import mainloop
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import ScoresForm, ScoresProblem
from degarble.kernels.primitives.device_words import emit
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow
from degarble.kernels.runtime.targets import SM90A

# --------------------------------------------------------------------------------------------------
# Weigh, add and write the indexer's products: the consumers' work after wgmma.
#
# A thread adds its heads in their order, then the four threads of a quad are folded. FP8 keys are
# scaled after the sum. Scores are -inf where a token sees nothing. Only for use inside a kernel
# that is being traced; sm_100a adds in the same order.

HIGH_HALF = 0xFFFF_0000


class ScoresTensors(NamedTuple):
    """Tensors that the kernel's threads access directly, flat."""

    weights: Any  # [T, N]
    scales: Any  # float32 [T, N], of FP8 queries
    positions: Any  # int64 [T]
    sequences: Any  # int32 [T]
    table: Any  # int32 [S, P]
    key_scales: Any  # the pages' bytes as float32
    out: Any  # float32 [T, W]


class ScoresExtents(NamedTuple):
    """Run-time extents of a launch."""

    tokens: Any
    heads: Any
    entries: Any
    sequences: Any
    ratio: Any  # tokens of an entry
    of_page: Any  # entries of a page
    pages: Any
    of_table: Any  # columns of the table
    stride_words: Any  # words of four bytes from page to page
    chunk: Any  # keys of a thread block


def lane_of() -> Any:
    """Return this thread's number in its warp."""
    thread, _, _ = cute.arch.thread_idx()
    return thread % 32


def row_of_thread(mine: Any) -> Any:
    """Return the first of a stage's two keys of a thread; the other is eight further on."""
    thread, _, _ = cute.arch.thread_idx()
    return mine * facts.PIECE + thread % facts.WARPGROUP // 32 * 16 + thread % 32 // 4


@cute.jit
def weights_of(tensors: ScoresTensors, tile: Any, e: ScoresExtents, form: cutlass.Constexpr) -> Any:
    """Return the weights of a thread's columns, two per eight; 0 beyond heads and tokens.

    In float32 each has a register; in `stored` arithmetic both share one, as BF16.
    """
    # A wgmma fragment has two columns of every eight in a thread.
    groups = form.columns // facts.HEADS_STEP
    stored = form.arithmetic == "stored"
    found = cute.make_rmem_tensor(groups if stored else 2 * groups, Uint32)
    for group in cutlass.range_constexpr(groups):
        j, eight = divmod(group, form.padded // facts.HEADS_STEP)
        token = tile * form.at_once + j
        pair = [weight_of(tensors, token, head_of_thread(eight, c), e, form) for c in (0, 1)]
        if cutlass.const_expr(stored):
            found[group] = pair_rounded(*pair)
        else:
            found[2 * group], found[2 * group + 1] = (ops.bits_of(weight) for weight in pair)
    return found


@cute.jit
def weight_of(
    tensors: ScoresTensors, token: Any, head: Any, e: ScoresExtents, form: cutlass.Constexpr
) -> Any:
    """Return the weight of a token's head, times the query's scale; 0 beyond heads and tokens."""
    weight = Float32(0.0)
    if (head < e.heads) & (token < e.tokens):
        at = Int64(token) * Int64(e.heads) + Int64(head)
        weight = Float32(tensors.weights[at])
        if cutlass.const_expr(form.operands == "fp8"):
            # The query's scale is folded into the weight.
            weight = ops.multiply_rn(weight, Float32(tensors.scales[at]))
    return weight


def pair_rounded(low: Any, high: Any) -> Any:
    """Return two numbers rounded to BF16, in one word."""
    return emit("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def head_of_thread(eight: int, place: int) -> Any:
    """Return the head of a thread's column: a wgmma gives a thread two neighbours of eight."""
    return eight * facts.HEADS_STEP + 2 * (lane_of() % 4) + place


def rectified(number: Any) -> Any:
    """Return relu of a product; NaN stays."""
    return emit("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, Float32(0.0))


def rectified_pair(low: Any, high: Any) -> Any:
    """Return relu of two products, rounded to BF16, in one word; NaN stays."""
    return emit("cvt.rn.relu.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def weighed(sums: Any, rWeights: Any, scales: list[Any], form: ScoresForm) -> list[list[Any]]:
    """Return both keys' scores of every token, the same in all threads of a quad."""
    eights = form.padded // facts.HEADS_STEP
    made = []
    for j in range(form.at_once):
        pair = []
        for row in (0, 1):
            total = Float32(0.0)
            for eight in range(eights):
                total = added(sums, rWeights, (j * eights + eight, row), total, form)
            for distance in (1, 2):
                other = cute.arch.shuffle_sync_bfly(total, offset=distance)
                total = ops.add_rn(total, other)
            pair.append(finished(total, scales[row], form))
        made.append(pair)
    return made


def finished(total: Any, scale: Any, form: ScoresForm) -> Any:
    """Return a score from the sum over heads: key scale, and BF16 rounding if `stored`."""
    if form.operands == "fp8":
        total = ops.multiply_rn(total, scale)
    if form.arithmetic == "stored":
        word = emit("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", Uint32, total, Float32(0.0))
        total = ops.number_of(word & Uint32(HIGH_HALF))
    return total


def added(sums: Any, rWeights: Any, at: tuple[int, int], total: Any, form: ScoresForm) -> Any:
    """Add two neighbouring heads' weighted products to a key's sum."""
    group, row = at
    pair = [sums[4 * group + 2 * row + c] for c in (0, 1)]
    words = [group] if form.arithmetic == "stored" else [2 * group, 2 * group + 1]
    return pair_added(pair, [Uint32(rWeights[word]) for word in words], total, form)


def pair_added(pair: list[Any], weights: list[Any], total: Any, form: ScoresForm) -> Any:
    """Add two products by their weights, a word each or, stored, both in one."""
    if form.arithmetic == "stored":
        word = rectified_pair(*pair)
        word = emit("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", Uint32, word, weights[0])
        total = ops.add_rn(total, ops.number_of(ops.shift_left(word, 16)))
        return ops.add_rn(total, ops.number_of(word & Uint32(HIGH_HALF)))
    for number, weight in zip(pair, weights, strict=True):
        total = ops.fma_rn(rectified(number), ops.number_of(weight), total)
    return total


@cute.jit
def key_scales_of(
    tensors: ScoresTensors, place: tuple[Any, Any, Any], e: ScoresExtents, form: cutlass.Constexpr
) -> list[Any]:
    """Return the scales of a thread's two keys; 1 where none is read."""
    sequence, row, last = place
    found = [Float32(1.0)] * 2
    if cutlass.const_expr(form.operands == "fp8"):
        found = [key_scale_of(tensors, (sequence, row + i, last), e) for i in (0, 8)]
    return found


@cute.jit
def key_scale_of(tensors: ScoresTensors, place: tuple[Any, Any, Any], e: ScoresExtents) -> Any:
    """Return the scale of (sequence, entry, end); 1 where none is read."""
    sequence, entry, last = place
    scale = Float32(1.0)
    if entry < last:
        at = Int64(sequence) * Int64(e.of_table) + Int64(entry // e.of_page)
        page = Int32(tensors.table[at])
        if (page >= 0) & (page < e.pages):
            start = Int64(page) * Int64(e.stride_words)
            within = e.of_page * (facts.WIDTH // facts.SCALE_BYTES) + entry % e.of_page
            scale = Float32(tensors.key_scales[start + Int64(within)])
    return scale


@cute.jit
def put_scores(
    out: Any,
    scores: list[list[Any]],
    place: tuple[Any, Any, Any],
    limits: list[Any],
    entries: Any,
    form: cutlass.Constexpr,
) -> None:
    """Write the scores of (tile, thread's row) up to an end; a quad's threads share the tokens."""
    tile, row, end = place
    lane = lane_of()
    for j in cutlass.range_constexpr(form.at_once):
        # All lanes of a quad have every token's score: lane j % 4 writes token j.
        if (lane % 4 == j % 4) & (limits[j] >= 0):
            start = Int64(tile * form.at_once + j) * Int64(entries)
            for second in cutlass.range_constexpr(2):
                entry = row + 8 * second
                if entry < end:
                    score = ops.select(entry < limits[j], scores[j][second], Float32(float("-inf")))
                    out[start + Int64(entry)] = score


@cute.jit
def put_nothing(
    out: Any,
    place: tuple[Any, Any, Any],
    limits: list[Any],
    entries: Any,
    form: cutlass.Constexpr,
) -> None:
    """Write -inf to entries whose keys were not multiplied."""
    tile, first, end = place
    thread, _, _ = cute.arch.thread_idx()
    # Consumers come after the producer warpgroup.
    own = thread - facts.WARPGROUP
    for j in cutlass.range_constexpr(form.at_once):
        if limits[j] >= 0:
            start = Int64(tile * form.at_once + j) * Int64(entries)
            step = facts.CONSUMERS * facts.WARPGROUP
            for entry in cutlass.range(first + own, end, step, unroll=1):
                out[start + Int64(entry)] = Float32(float("-inf"))


# --------------------------------------------------------------------------------------------------
# Lightning indexer scores on Hopper: s[t, w] = sum_h weight[t, h] * relu(q[t, h] . k[w]).

ELEMENTS = {"bf16": BFloat16, "fp8": Float8E4M3FN}
TORCH = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
WEIGHTS = {"float32": (Float32, torch.float32, 4), "stored": (BFloat16, torch.bfloat16, 2)}
# Extent of flat views; the kernel checks its own indices.
FLAT = 1 << 40


# ---- device --------------------------------------------------------------------------------------


class KeyWalk(NamedTuple):
    """Work of a thread block: its tile's tokens and a range of keys."""

    tokens: Any  # (sequence and visible entries, token) in shared memory
    tile: Any
    begin: Any
    end: Any


def ring_of(memory: Any, stages: int, expected: int) -> Any:
    """Make a ring that TMA fills; every consumer warp releases its stages."""
    group = pipeline.CooperativeGroup
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * stages),
        num_stages=stages,
        producer_group=group(pipeline.Agent.Thread),
        consumer_group=group(pipeline.Agent.Thread, facts.CONSUMERS * facts.WARPGROUP // 32),
        tx_count=expected,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        defer_sync=True,
    )


@cute.jit
def look_up(
    sTokens: Any, tensors: ScoresTensors, tile: Any, e: ScoresExtents, form: cutlass.Constexpr
) -> None:
    """Write sequence (-1: no token) and visible entries of the tile's tokens to shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < form.at_once:
        token = tile * form.at_once + thread
        sequence, visible = Int32(-1), Int32(0)
        if token < e.tokens:
            sequence = Int32(tensors.sequences[token])
            known = (sequence >= 0) & (sequence < e.sequences)
            position = Int64(tensors.positions[token])
            if known & (position >= 0):
                seen = visible_of(position, e.ratio)
                visible = Int32(ops.select(seen < Int64(e.entries), seen, Int64(e.entries)))
            # Visible is 0 then: the token's row is filled with -inf.
            sequence = ops.select(known, sequence, Int32(0))
        sTokens[0, thread] = sequence
        sTokens[1, thread] = visible


def visible_of(position: Any, ratio: Any) -> Any:
    """Return how many entries a token sees."""
    return facts.visible_entries(position, Int64(ratio))


def run_of(sTokens: Any, lead: Any, form: ScoresForm) -> tuple[Any, Any, list[Any]]:
    """Return the sequence that a token leads, its entries to score, and those of each token.

    The first token of a sequence in the tile leads it. A token of another sequence has -1; so have
    all if an earlier token led this sequence.
    """
    sequence = Int32(sTokens[0, lead])
    others = [Int32(sTokens[0, j]) for j in range(form.at_once)]
    leads = sequence >= 0
    for j, other in enumerate(others):
        leads = leads & ((other != sequence) | (lead <= j))
    limit, limits = Int32(0), []
    for j, other in enumerate(others):
        mine = ops.select(leads & (other == sequence), Int32(sTokens[1, j]), Int32(-1))
        limit = cutlass.max(limit, mine)
        limits.append(mine)
    return sequence, limit, limits


@cute.kernel
def scores_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    tensors: ScoresTensors,
    e: ScoresExtents,
    form: cutlass.Constexpr,
) -> None:
    """Take a role by warpgroup: 0 loads, 1 and 2 multiply and weigh."""
    thread, _, _ = cute.arch.thread_idx()
    tile, chunk, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    tile = tiles - 1 - tile  # the last tokens see most: they begin first
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    element, stages = ELEMENTS[form.operands], facts.stages(form)
    memory = cutlass.memory.SmemAllocator()
    layout_q, layout_k = layouts(form)
    sQ = mainloop.shared_of(memory, element, layout_q)
    sK = mainloop.shared_of(memory, element, layout_k)
    sTokens = memory.allocate_tensor(Int32, cute.make_layout((2, form.at_once)), 8)
    # Queries are loaded once; the ring serves as their barrier.
    query_ring = ring_of(memory, 1, facts.query_bytes(form))
    key_ring = ring_of(memory, stages, facts.stage_bytes(form))
    follow()
    look_up(sTokens, tensors, tile, e, form)
    # After these, barriers and the tokens' sequences are visible to all warps.
    pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
    cute.arch.sync_threads()

    begin = chunk * e.chunk
    walk = KeyWalk(sTokens, tile, begin, cutlass.min(begin + e.chunk, e.entries))
    if group == 0:
        cute.arch.setmaxregister_decrease(facts.PRODUCER_REGISTERS)
        if cute.arch.warp_idx() == 0:
            load_queries(query_ring, feeds[0], sQ, tile, form)
            load_walk(key_ring, feeds[1], sK, (walk, tensors, e), form)
    else:
        cute.arch.setmaxregister_increase(facts.CONSUMER_REGISTERS)
        score_walk((query_ring, key_ring), (sQ, sK), group - 1, (walk, tensors, e), form)


@cute.jit
def load_walk(
    ring: Any,
    feed: mainloop.TmaFeed,
    sK: Any,
    given: tuple[KeyWalk, ScoresTensors, ScoresExtents],
    form: cutlass.Constexpr,
) -> None:
    """Load the keys of every sequence that the tile's tokens belong to."""
    walk, tensors, e = given
    boxes = boxes_of(feed, sK, (form.box, inner_of(form)))
    state = mainloop.producer_state(facts.stages(form))
    for lead in cutlass.range(form.at_once, unroll=1):
        sequence, limit, _ = run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        for key in cutlass.range(walk.begin, last, facts.KEYS, unroll=1):
            place = (sequence, key, last)
            state = load_keys(ring, state, boxes, (feed.atom, tensors.table, e), place, form)
    ring.producer_tail(state)


@cute.jit
def score_walk(
    rings: tuple[Any, Any],
    shared: tuple[Any, Any],
    mine: Any,
    given: tuple[KeyWalk, ScoresTensors, ScoresExtents],
    form: cutlass.Constexpr,
) -> None:
    """Multiply a warpgroup's keys with the queries, stage after stage, and write the scores."""
    walk, tensors, e = given
    sQ, sK = shared
    mma = mainloop.mma_of(ELEMENTS[form.operands], form.columns)
    slice_ = mma.get_slice(0)
    sums = mainloop.sums_of(mma, form.columns)
    a = mma.make_fragment_A(slice_.partition_A(mainloop.rows_of(sK, mine)))
    b = mma.make_fragment_B(slice_.partition_B(sQ))
    rWeights = weights_of(tensors, walk.tile, e, form)
    rings[0].consumer_wait(mainloop.consumer_state(1))
    state = mainloop.consumer_state(facts.stages(form))
    for lead in cutlass.range(form.at_once, unroll=1):
        sequence, limit, limits = run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        for key in cutlass.range(walk.begin, last, facts.KEYS, unroll=1):
            row = key + row_of_thread(mine)
            rings[1].consumer_wait(state)
            multiply(mma, sums, (a, b), state.index, form)
            # Loaded while wgmma runs.
            scales = key_scales_of(tensors, (sequence, row, last), e, form)
            warpgroup.wait_group(0)
            rings[1].consumer_release(state)
            state.advance()
            scores = weighed(sums, rWeights, scales, form)
            place = (walk.tile, row, walk.end)
            put_scores(tensors.out, scores, place, limits, e.entries, form)
        # Entries of the chunk past the last multiplied stage.
        done = walk.begin + round_up(cutlass.max(last - walk.begin, 0), facts.KEYS)
        place = (walk.tile, done, walk.end)
        put_nothing(tensors.out, place, limits, e.entries, form)


def inner_of(form: ScoresForm) -> int:
    """Return the numbers of a 128-byte row."""
    return facts.WIDTH // facts.OPERANDS[form.operands].halves


def layouts(form: ScoresForm) -> tuple[Any, Any]:
    """Return the layouts of queries (rows, inner, halves) and keys, stage by stage."""
    element, halves = ELEMENTS[form.operands], facts.OPERANDS[form.operands].halves
    sizes = ((form.columns, halves), (facts.KEYS, halves * facts.stages(form)))
    return tuple(
        mainloop.staged_layout(element, rows, inner_of(form), count, mainloop.Swizzle.K_SW128)
        for rows, count in sizes
    )


def boxes_of(feed: mainloop.TmaFeed, shared: Any, box: tuple[int, int]) -> tuple[Any, Any]:
    """Return destinations (box, along rows, halves) and sources (box, rows, halves, third)."""
    boxes = cute.local_tile(feed.tensor, box, (None, None, None))
    inside = cute.local_tile(shared, box, (None, 0, None))
    destination, source = cpasync.tma_partition(
        feed.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(inside, 0, 2),
        cute.group_modes(boxes, 0, 2),
    )
    return destination, source


@cute.jit
def load_queries(
    ring: Any, feed: mainloop.TmaFeed, sQ: Any, tile: Any, form: cutlass.Constexpr
) -> None:
    """Load the heads of the tile's tokens; zeros beyond heads and tokens."""
    destination, source = boxes_of(feed, sQ, (form.padded, inner_of(form)))
    state = mainloop.producer_state(1)
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    for half in cutlass.range_constexpr(facts.OPERANDS[form.operands].halves):
        for j in cutlass.range_constexpr(form.at_once):
            box = source[None, 0, half, tile * form.at_once + j]
            cute.copy(feed.atom, box, destination[None, j, half], tma_bar_ptr=barrier)
    ring.producer_commit(state)


@cute.jit
def load_keys(
    ring: Any,
    state: Any,
    boxes: tuple[Any, Any],
    given: tuple[Any, Any, ScoresExtents],
    place: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> Any:
    """Load 128 keys of (sequence, first key, end); boxes from the end on are zeros."""
    destination, source = boxes
    atom, table, e = given
    sequence, key, last = place
    halves = facts.OPERANDS[form.operands].halves
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    for number in cutlass.range_constexpr(facts.KEYS // form.box):
        first = key + number * form.box
        page = Int32(e.pages)  # none: TMA brings zeros
        if first < last:
            page = Int32(table[Int64(sequence) * Int64(e.of_table) + Int64(first // e.of_page)])
        page = ops.select((page >= 0) & (page < e.pages), page, Int32(e.pages))
        along = first % e.of_page // form.box
        for half in cutlass.range_constexpr(halves):
            box = source[None, along, half, page]
            into = destination[None, number, state.index * halves + half]
            cute.copy(atom, box, into, tma_bar_ptr=barrier)
    ring.producer_commit(state)
    state.advance()
    return state


@cute.jit
def multiply(
    mma: Any, sums: Any, fragments: tuple[Any, Any], stage: Any, form: cutlass.Constexpr
) -> None:
    """Multiply the keys of a stage with all columns, as one group of wgmma."""
    # Trap: setting a field changes the object, which would escape from a loop that is traced.
    mma = cute.make_tiled_mma(cute.make_mma_atom(mma.op))
    a, b = fragments
    halves = facts.OPERANDS[form.operands].halves
    warpgroup.fence()
    for half in cutlass.range_constexpr(halves):
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, half + k > 0)
            keys = a[None, None, k, stage * halves + half]
            cute.gemm(mma, sums, keys, b[None, None, k, half], sums)
    warpgroup.commit_group()


def feeds_of(queries: Any, pages: Any, e: ScoresExtents, form: ScoresForm) -> tuple[Any, ...]:
    """Make the TMA atoms of queries, a box a token, and of keys, a box a part of a page."""
    size = facts.OPERANDS[form.operands].bytes
    heads = (e.heads, facts.WIDTH, e.tokens)
    mQ = cute.make_tensor(
        queries, cute.make_layout(heads, stride=(facts.WIDTH, 1, Int64(e.heads) * facts.WIDTH))
    )
    stride = Int64(cute.assume(e.stride_words * (4 // size), divby=facts.PAGE_ALIGNMENT // size))
    mK = cute.make_tensor(
        pages,
        cute.make_layout((e.of_page, facts.WIDTH, e.pages), stride=(facts.WIDTH, 1, stride)),
    )
    element, inner = ELEMENTS[form.operands], inner_of(form)
    return tuple(
        mainloop.feed_of(
            tensor,
            mainloop.staged_layout(element, rows, inner, 1, mainloop.Swizzle.K_SW128),
            (rows, inner),
        )
        for tensor, rows in ((mQ, form.padded), (mK, form.box))
    )


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
    feeds = feeds_of(queries, pages, e, form)
    flat = cute.make_layout(FLAT)
    tensors = ScoresTensors(*(cute.make_tensor(address, flat) for address in others))
    scores_kernel(feeds, tensors, e, form).launch(
        grid=[tiles, chunks, 1],
        block=[facts.threads(form), 1, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _codes(of: ScoresProblem | ScoresForm) -> Storage:
    return Storage(ELEMENTS[of.operands], TORCH[of.operands], 16)


def _pages(of: ScoresProblem | ScoresForm) -> Storage:
    return Storage(ELEMENTS[of.operands], torch.uint8, 16)


def _weights(of: ScoresProblem | ScoresForm) -> Storage:
    return Storage(*WEIGHTS[of.arithmetic])


def _numbers(of: LaunchContext[ScoresProblem, ScoresForm]) -> tuple[Any, ...]:
    problem, pages = of.problem, of.problem.pages
    tiles, chunks, keys = facts.grid(problem, of.form, of.processors)
    extents = ScoresExtents(
        tokens=problem.tokens,
        heads=problem.heads,
        entries=problem.entries,
        sequences=problem.sequences,
        ratio=problem.ratio,
        of_page=pages.entries,
        pages=pages.count,
        of_table=problem.pages_of_sequence,
        stride_words=pages.stride // 4,
        chunk=keys,
    )
    return ((*extents, tiles, chunks),)


_Operand = Operand[ScoresProblem]
_SCALED = Presence[ScoresProblem](
    lambda of: facts.OPERANDS[of.operands].scaled, lambda p: f"The problem says {p.operands}."
)
_IN_PAGES = Presence[ScoresProblem](lambda _of: False, "They lie in the pages of keys.")
_PLACES, _NUMBERS = Storage(Int64, torch.int64, 8), Storage(Int32, torch.int32, 4)
_FP32 = Storage(Float32, torch.float32, 4)
KERNEL = Kernel[ScoresProblem, ScoresForm](
    entry=launch_scores,
    operands=(
        _Operand("queries", _codes, lambda p: (p.tokens, p.heads, facts.WIDTH)),
        _Operand(
            "pages", _pages, lambda p: (p.pages.count, p.pages.stride), label="pages of keys"
        ),  # rows of keys, then for fp8 float32 scales
        _Operand("weights", _weights, lambda p: (p.tokens, p.heads), label="weights of heads"),
        _Operand(
            "scales", _FP32, lambda p: (p.tokens, p.heads), _SCALED, label="scales of queries"
        ),
        # Within the token's sequence.
        _Operand("positions", _PLACES, lambda p: (p.tokens,)),
        # The token's row of the table.
        _Operand("sequences", _NUMBERS, lambda p: (p.tokens,), label="sequences of tokens"),
        # Pages of each sequence in order; beyond the entries anything.
        _Operand(
            "table", _NUMBERS, lambda p: (p.sequences, p.pages_of_sequence), label="table of pages"
        ),
        _Operand("key_scales", _FP32, lambda _: (), _IN_PAGES, address_of="pages"),
        _Operand("out", _FP32, lambda p: (p.tokens, p.entries), output=True, label="scores"),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * (len(ScoresExtents._fields) + 2),),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    target=SM90A,
)
compile_form = KERNEL.compile_form
