"""Lightning indexer scores on Hopper: s[t, w] = sum_h weight[t, h] * relu(q[t, h] . k[w]).

Scores are float32 [T, W], -inf from the token's first invisible entry on. No key is read from there
on. A thread block has a tile of one or four tokens (all their heads are the columns) and a chunk of
keys. 128 threads load, 128 or 256 multiply and weigh (problem.ScoresTeam):

* Warpgroup 0, its first warp (producer): TMA of the tile's queries once, of pages of keys and their
  scales by stage.
* Warpgroup 1, or 1 and 2 (consumers): wgmma of 64 keys each, the columns in two sets if there are
  several tokens: one is multiplied while the other is weighed, added and written.
* Query ring, 1 stage; key ring, up to 9 stages: `full` expects the bytes of all boxes (1 arrival),
  `empty` has 4 arrivals of each consumer warpgroup, one a warp.
* Named barrier 2: all consumers, once the weights lie in shared memory.

One stage: look up pages, TMA (box by box, zeros past the end); wgmma; relu, weights; release the
stage; key scales; store. Tokens of a tile may belong to several sequences: the keys are walked once
for each. A thread adds its heads in order, then the four threads of a quad are folded, so a score's
bits depend on its query, key and weights alone. Barriers are made before the previous launch ends.
Of one FP8 token a sequence the first warp also prefetches queries, weights and first keys to L2
then (`ask_early`), from guessed pages.

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
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm.problem import WHOLE_CARVEOUT
from degarble.kernels.gemm.w4a16_instructions import early_word, shared_words
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import ScoresForm, ScoresProblem
from degarble.kernels.primitives.device_words import emit
from degarble.kernels.runtime import pdl
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.targets import SM90A

# --------------------------------------------------------------------------------------------------
# Weigh, add and write the indexer's products: the consumers' work after wgmma.
#
# A thread adds its heads in their order, then the four threads of a quad are folded. FP8 keys are
# scaled after the sum. Scores are -inf where a token sees nothing. Only for use inside a kernel
# that is being traced; sm_100a adds in the same order.

HIGH_HALF = 0xFFFF_0000
BARRIER_OF_WEIGHING = 2  # 0 and 1 belong to the thread block


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


class ScoresOfLane(NamedTuple):
    """Which token of each set a lane scores, which key, and where it writes."""

    row: Any  # of a stage
    starts: list[Any]  # of each set: where the token's row of scores begins
    limits: list[Any]  # of each set: entries that the token sees
    ends: list[Any]  # of each set: the first entry that is not written


def row_of_thread(mine: Any, form: ScoresForm) -> Any:
    """Return the key of a stage that a thread scores, one of two that are eight apart."""
    thread, _, _ = cute.arch.thread_idx()
    second = lane_of() // tokens_of_set(form) % 2
    return mine * facts.PIECE + thread % facts.WARPGROUP // 32 * 16 + lane_of() // 4 + 8 * second


def tokens_of_set(form: ScoresForm) -> int:
    """Return how many tokens a set of sums has."""
    return form.at_once // facts.sets(form)


def scores_of_lane(
    mine: Any, walk: Any, limits: list[Any], entries: Any, form: ScoresForm
) -> ScoresOfLane:
    """Return what a lane of a warpgroup scores in a run: one token of a set, one of two keys."""
    tokens = tokens_of_set(form)
    own = lane_of() % tokens
    starts, seen, ends = [], [], []
    for first in range(0, form.at_once, tokens):
        limit = limits[first]
        if tokens > 1:
            limit = ops.select(own == 1, limits[first + 1], limit)
        # Of one token two lanes have the same score.
        writes = (limit >= 0) & (lane_of() % 4 < 2 * tokens)
        ends.append(ops.select(writes, Int32(walk.end), Int32(0)))
        seen.append(limit)
        start = Int64(walk.tile * form.at_once + first + own) * Int64(entries)
        # Trap: computed anew at each use otherwise, with a slow read of the block's number.
        starts.append(emit("mov.b64 {$w0}, {$r0};", Int64, start))
    return ScoresOfLane(row_of_thread(mine, form), starts, seen, ends)


@cute.jit
def leave_weights(
    words: Any,
    tensors: ScoresTensors,
    tile: Any,
    e: ScoresExtents,
    threads: tuple[Any, int],
    form: cutlass.Constexpr,
) -> None:
    """Write the weights of all columns to shared memory; `threads`: this one, and their number.

    In float32 each has a word; in `stored` arithmetic two share one, as BF16.
    """
    thread, count = threads
    each = form.columns // facts.words_of_weights(form)
    for first in cutlass.range_constexpr(0, facts.words_of_weights(form), count):
        word = thread + first
        if word < facts.words_of_weights(form):
            column = word * each
            token = tile * form.at_once + column // form.padded
            pair = [
                weight_of(tensors, token, head_of_column(column + i, form), e, form)
                for i in range(each)
            ]
            words[word] = pair_rounded(*pair) if each > 1 else ops.bits_of(pair[0])


def head_of_column(column: Any, form: ScoresForm) -> Any:
    """Return the head of a column."""
    return column % form.padded


def weights_of(words: Any, form: ScoresForm) -> list[Any]:
    """Return the words of a thread's columns: a wgmma gives it two neighbours of every eight."""
    start, each = Uint32(words.iterator.toint()), 2 * facts.words_of_weights(form) // form.columns
    found = []
    for group in range(form.columns // facts.HEADS_STEP):
        at = (group * facts.HEADS_STEP // 2 + lane_of() % 4) * each
        found += shared_words(start + Uint32(at * facts.WORD_BYTES), each)
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


def rectified(number: Any) -> Any:
    """Return relu of a product; NaN stays."""
    return emit("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, Float32(0.0))


def rectified_pair(low: Any, high: Any) -> Any:
    """Return relu of two products, rounded to BF16, in one word; NaN stays."""
    return emit("cvt.rn.relu.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def totals_of(sums: Any, rWeights: Any, which: int, form: ScoresForm) -> list[Any]:
    """Return this thread's part of a set's scores: of each token two keys, keys fastest."""
    tokens, eights = tokens_of_set(form), form.padded // facts.HEADS_STEP
    totals = []
    for j in range(tokens):
        for row in (0, 1):
            total = Float32(0.0)
            for eight in range(eights):
                at = (j * eights + eight, row)
                total = added(sums, rWeights, at, which * tokens * eights, total, form)
            totals.append(total)
    return totals


def score_of(totals: list[Any], scale: Any, form: ScoresForm) -> Any:
    """Return the score of this lane's token and key from the parts of a quad's threads.

    They exchange what they do not keep: first by token, then by key. A set of one token is
    exchanged by key, then two threads have the same score.
    """
    for distance in (1, 2):
        totals = exchanged(totals, distance)
    return finished(totals[0], scale, form)


def exchanged(totals: list[Any], distance: int) -> list[Any]:
    """Add those of another lane; of several, the lane whose bit is set keeps the second half."""
    half = len(totals) // 2
    if not half:
        other = cute.arch.shuffle_sync_bfly(totals[0], offset=distance)
        return [ops.add_rn(totals[0], other)]
    second = lane_of() & distance != 0
    made = []
    for pair in zip(totals[:half], totals[half:], strict=True):
        kept, given = (ops.select(second, pair[1 - i], pair[i]) for i in (0, 1))
        other = cute.arch.shuffle_sync_bfly(given, offset=distance)
        made.append(ops.add_rn(kept, other))
    return made


def finished(total: Any, scale: Any, form: ScoresForm) -> Any:
    """Return a score from the sum over heads: key scale, and BF16 rounding if `stored`."""
    if form.operands == "fp8":
        total = ops.multiply_rn(total, scale)
    if form.arithmetic == "stored":
        word = emit("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", Uint32, total, Float32(0.0))
        total = ops.number_of(word & Uint32(HIGH_HALF))
    return total


def added(
    sums: Any, rWeights: Any, at: tuple[int, int], before: int, total: Any, form: ScoresForm
) -> Any:
    """Add two neighbouring heads' weighted products to a key's sum; `before`: eights of columns."""
    group, row = at
    pair = [sums[4 * group + 2 * row + c] for c in (0, 1)]
    group += before
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
def put_score(out: Any, score: Any, entry: Any, place: tuple[Any, Any, Any]) -> None:
    """Write the score of an entry; place is (start of the row, entries seen, end)."""
    start, limit, end = place
    if entry < end:
        out[start + Int64(entry)] = ops.select(entry < limit, score, Float32(float("-inf")))


def put_if_within(out: Any, score: Any, entry: Any, place: tuple[Any, Any, Any]) -> None:
    """Write a score as `put_score` does, by a store with a predicate in place of a branch."""
    start, limit, end = place
    number = ops.select(entry < limit, score, Float32(float("-inf")))
    text = """{ .reg .pred within; setp.lt.s32 within, {$r1}, {$r2};
    @within st.global.f32 [{$r0}], {$r3}; }"""  # around a branch a warp's threads meet again
    numbers = [(out.iterator + start + Int64(entry)).toint(), Int32(entry), Int32(end), number]
    cute.arch.inline_ptx(text, write_only_types=[], read_only_args=numbers)


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
            step = facts.threads_that_weigh(form)
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

    tokens: Any  # (sequence and visible entries, token) in shared memory; of one, in registers
    tile: Any
    begin: Any
    end: Any


def walk_of(tokens: Any, place: tuple[Any, Any], e: ScoresExtents) -> KeyWalk:
    """Return the walk of the thread block at (tile, chunk)."""
    tile, chunk = place
    begin = chunk * e.chunk
    return KeyWalk(tokens, tile, begin, cutlass.min(begin + e.chunk, e.entries))


def ring_of(memory: Any, stages: int, expected: int, threads: int) -> Any:
    """Make a ring that TMA fills; every consumer warp releases its stages."""
    group = pipeline.CooperativeGroup
    return pipeline.PipelineTmaAsync.create(
        barrier_storage=memory.allocate_array(Int64, 2 * stages),
        num_stages=stages,
        producer_group=group(pipeline.Agent.Thread),
        consumer_group=group(pipeline.Agent.Thread, threads // 32),
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
            sequence, visible = judged(tensors.sequences[token], tensors.positions[token], e)
        sTokens[0, thread] = sequence
        sTokens[1, thread] = visible


@cute.jit
def judged(sequence: Any, position: Any, e: ScoresExtents) -> tuple[Any, Any]:
    """Return the sequence of a token, and how many entries it sees: none of an unknown one."""
    sequence, position = Int32(sequence), Int64(position)
    known, visible = (sequence >= 0) & (sequence < e.sequences), Int32(0)
    if known & (position >= 0):
        visible = Int32(e.entries)
        if position < facts.LARGEST - 1:  # a division of 32 bits takes a fifth of the time
            seen = visible_of(Int32(position), e.ratio)
            visible = cutlass.min(seen, visible)
        else:
            seen = visible_of(position, Int64(e.ratio))
            visible = Int32(ops.select(seen < Int64(e.entries), seen, Int64(e.entries)))
    # Visible is 0 then: the token's row is filled with -inf.
    return ops.select(known, sequence, Int32(0)), visible


def visible_of(position: Any, ratio: Any) -> Any:
    """Return how many entries a token sees."""
    return facts.visible_entries(position, ratio)


def run_of(sTokens: Any, lead: Any, form: ScoresForm) -> tuple[Any, Any, list[Any]]:
    """Return the sequence that a token leads, its entries to score, and those of each token.

    The first token of a sequence in the tile leads it. A token of another sequence has -1; so have
    all if an earlier token led this sequence.
    """
    if isinstance(sTokens, tuple):
        sequence, visible = sTokens
        return sequence, visible, [visible]
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
    """Take a role by warpgroup: 0 loads, 1, or 1 and 2, multiply and weigh."""
    thread, _, _ = cute.arch.thread_idx()
    tile, chunk, _ = cute.arch.block_idx()
    tiles, _, _ = cute.arch.grid_dim()
    tile = tiles - 1 - tile  # the last tokens see most: they begin first
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    element, stages = ELEMENTS[form.operands], facts.stages(form)
    registers = facts.team_of(form).registers
    memory = cutlass.memory.SmemAllocator()
    layout_q, layout_k = layouts(form)
    sQ = mainloop.shared_of(memory, element, layout_q)
    sK = mainloop.shared_of(memory, element, layout_k)
    sScales = shared_scales(memory, form)
    words = cute.make_layout(facts.words_of_weights(form))
    sWeights = memory.allocate_tensor(Uint32, words, 16)
    sTokens = memory.allocate_tensor(Int32, cute.make_layout((2, form.at_once)), 8)
    weighing = facts.threads_that_weigh(form)
    # Queries are loaded once; the ring serves as their barrier.
    query_ring = ring_of(memory, 1, facts.query_bytes(form), weighing)
    key_ring = ring_of(memory, stages, facts.expected_bytes(form), weighing)
    if cute.arch.warp_idx() == 0:
        for feed in feeds:
            cpasync.prefetch_descriptor(feed.atom)
    # After these, barriers are visible to all warps.
    pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
    pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))
    if cutlass.const_expr(facts.team_of(form).asked_early > 0):
        pdl.let_follow()
        if cute.arch.warp_idx() == 0:
            ask_early(feeds[0], sQ, tensors, walk_of((), (tile, chunk), e), e, form)
        pdl.wait_for_front()
    else:
        pdl.follow()
    if cutlass.const_expr(form.at_once > 1):
        look_up(sTokens, tensors, tile, e, form)
        cute.arch.sync_threads()

    walk = walk_of(sTokens if form.at_once > 1 else (), (tile, chunk), e)
    if group == 0:
        if cutlass.const_expr(registers):
            cute.arch.setmaxregister_decrease(registers[0])
        if cute.arch.warp_idx() == 0:
            load_queries(query_ring, feeds[0], sQ, tile, form)
            load_walk(key_ring, feeds[1:], (sK, sScales), (walk, tensors, e), form)
    else:
        if cutlass.const_expr(registers):
            cute.arch.setmaxregister_increase(registers[1])
        rings, shared = (query_ring, key_ring), (sQ, sK, sScales, sWeights)
        score_walk(rings, shared, group - 1, (walk, tensors, e), form)


@cute.jit
def ask_early(
    feed: mainloop.TmaFeed,
    sQ: Any,
    tensors: ScoresTensors,
    walk: KeyWalk,
    e: ScoresExtents,
    form: cutlass.Constexpr,
) -> None:
    """Ask L2 for what a block of one token loads first, while the previous launch still runs.

    A guess: a page, a position or a sequence that is still being written costs a copy to L2, and
    nothing else follows from it. They are read again behind the wait.
    """
    tile, lane, kind = walk.tile, lane_of(), facts.OPERANDS[form.operands]
    sequence = Int32(early_word(address_in(tensors.sequences, tile, 4)))
    position = Int32(early_word(address_in(tensors.positions, tile, 8)))  # its low word
    entry = walk.begin + lane * form.box
    if (lane < facts.boxes_asked(form)) & (entry < walk.end) & (tile < e.sequences):
        column, along = place_of(entry, e, form)
        at = Int64(tile) * Int64(e.of_table) + Int64(column)
        page = Int32(early_word(address_in(tensors.table, at, 4)))
        seen = (Int64(entry) + 1) * Int64(e.ratio) <= Int64(position) + 1
        if (sequence == tile) & seen & (page >= 0) & (page < e.pages):
            start = address_in(tensors.key_scales, Int64(page) * Int64(e.stride_words), 4)
            row = facts.WIDTH * kind.bytes
            pdl.fetch_weights(start + Int64(along * (form.box * row)), Int32(form.box * row))
            if cutlass.const_expr(kind.scaled):
                size = form.box * facts.SCALE_BYTES
                scales = start + Int64(e.of_page * row + along * size)
                pdl.fetch_weights(scales, Int32(size))
    line = Int64(tile) * Int64(e.heads) * facts.WORD_BYTES + Int64(lane * facts.ROW_BYTES)
    if lane * facts.ROW_BYTES < e.heads * facts.WORD_BYTES:
        if cutlass.const_expr(kind.scaled):
            pdl.fetch_line(address_in(tensors.scales, line, 1))
        if cutlass.const_expr(form.arithmetic == "float32"):
            pdl.fetch_line(address_in(tensors.weights, line, 1))
    _, source = boxes_of(feed, sQ, (form.padded, inner_of(form)))
    # Trap: the DSL elects a lane for a copy, but not for a prefetch.
    with cute.arch.elect_one():
        for half in cutlass.range_constexpr(kind.halves):
            cute.prefetch(feed.atom, source[None, 0, half, tile])


def address_in(tensor: Any, index: Any, size: int) -> Any:
    """Return the address of an element of `size` bytes."""
    return tensor.iterator.toint() + Int64(index) * size


def shared_scales(memory: Any, form: ScoresForm) -> Any:
    """Allocate the scales of the stages' keys: (within a box, boxes, stages); None for BF16."""
    if not facts.scale_bytes(form):
        return None
    apart, boxes = facts.scales_apart(form), facts.keys_of_stage(form) // form.box
    layout = cute.make_layout(
        (form.box, boxes, facts.stages(form)), stride=(1, apart, apart * boxes)
    )
    return memory.allocate_tensor(Float32, layout, facts.SCALES_APART * facts.SCALE_BYTES)


@cute.jit
def load_walk(
    ring: Any,
    feeds: tuple[mainloop.TmaFeed, ...],
    shared: tuple[Any, ...],
    given: tuple[KeyWalk, ScoresTensors, ScoresExtents],
    form: cutlass.Constexpr,
) -> None:
    """Load the keys, and their scales if fed, of every sequence that tokens of the tile have."""
    walk, tensors, e = given
    boxes = [boxes_of(feeds[0], shared[0], (form.box, inner_of(form)))]
    if cutlass.const_expr(len(feeds) > 1):
        boxes.append(scales_of_boxes(feeds[1], shared[1], form))
    atoms = [feed.atom for feed in feeds]
    state = mainloop.producer_state(facts.stages(form))
    # Each lane looks up a page, then shares it; the next place is computed behind the loads.
    keys = facts.keys_of_stage(form)
    of_group = 32 // (keys // form.box) * keys
    first = walk.begin + lane_of() * form.box
    column, along = place_of(first, e, form)
    guess = Int32(-1)
    if cutlass.const_expr(isinstance(walk.tokens, tuple)):
        # Often a token's number is its sequence's: that page is looked up before this is known.
        if (walk.tile < e.sequences) & (first < e.entries):
            guess = page_at(tensors.table, (walk.tile, column), e)
        walk = known_walk(walk, tensors, e)
    for lead in cutlass.range(form.at_once, unroll=1):
        sequence, limit, _ = run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        for group in cutlass.range(walk.begin, last, of_group, unroll=1):
            first = group + lane_of() * form.box
            page = Int32(e.pages)  # none: TMA brings zeros
            if first < last:
                if cutlass.const_expr(isinstance(walk.tokens, tuple)):
                    if (sequence == walk.tile) & (group == walk.begin):
                        page = guess
                    else:
                        page = page_at(tensors.table, (sequence, column), e)
                else:
                    page = page_at(tensors.table, (sequence, column), e)
            page = ops.select((page >= 0) & (page < e.pages), page, Int32(e.pages))
            group_end = cutlass.min(last, group + of_group)
            for key in cutlass.range(group, group_end, keys, unroll=1):
                number = (key - group) // form.box
                state = load_keys(ring, state, boxes, (atoms, page, along, number), form)
            column, along = place_of(first + of_group, e, form)
        if cutlass.const_expr(form.at_once > 1):
            column, along = place_of(walk.begin + lane_of() * form.box, e, form)
    ring.producer_tail(state)


def place_of(entry: Any, e: ScoresExtents, form: ScoresForm) -> tuple[Any, Any]:
    """Return the column of the table, and the box of the page, that an entry lies in."""
    column = entry // e.of_page
    return column, (entry - column * e.of_page) // form.box


def page_at(table: Any, place: tuple[Any, Any], e: ScoresExtents) -> Any:
    """Return the page of (sequence, column), as the table has it."""
    sequence, column = place
    return Int32(table[Int64(sequence) * Int64(e.of_table) + Int64(column)])


def known_walk(walk: KeyWalk, tensors: ScoresTensors, e: ScoresExtents) -> KeyWalk:
    """Return the walk of a block of one token, whose sequence and entries each thread reads."""
    found = judged(tensors.sequences[walk.tile], tensors.positions[walk.tile], e)
    return walk._replace(tokens=found)


class SetsOfSums(NamedTuple):
    """What a warpgroup multiplies: its keys of every stage with one set of columns each."""

    mma: Any
    sums: tuple[Any, ...]
    a: Any
    b: tuple[Any, ...]
    scales: Any  # of keys, in shared memory; None for BF16
    weights: list[Any]


def sets_of_sums(mine: Any, shared: tuple[Any, ...], form: ScoresForm) -> SetsOfSums:
    """Return the sets of a warpgroup; the weights lie in shared memory by then."""
    sQ, sK, sScales, sWeights = shared
    columns, sets = facts.columns_of_set(form), range(facts.sets(form))
    mma = mainloop.mma_of(ELEMENTS[form.operands], columns)
    slice_ = mma.get_slice(0)
    sums = tuple(mainloop.sums_of(mma, columns) for _ in sets)
    a = mma.make_fragment_A(slice_.partition_A(mainloop.rows_of(sK, mine)))
    b = tuple(
        mma.make_fragment_B(slice_.partition_B(columns_of(sQ, which, form))) for which in sets
    )
    return SetsOfSums(mma, sums, a, b, sScales, weights_of(sWeights, form))


@cute.jit
def score_walk(
    rings: tuple[Any, Any],
    shared: tuple[Any, ...],
    mine: Any,
    given: tuple[KeyWalk, ScoresTensors, ScoresExtents],
    form: cutlass.Constexpr,
) -> None:
    """Multiply a warpgroup's keys with the queries, stages after stages, and write the scores."""
    walk, tensors, e = given
    own = cute.arch.thread_idx()[0] - facts.WARPGROUP  # consumers come after the producer
    count = facts.threads_that_weigh(form)
    leave_weights(shared[-1], tensors, walk.tile, e, (own, count), form)
    cute.arch.barrier(barrier_id=BARRIER_OF_WEIGHING, number_of_threads=count)
    held = sets_of_sums(mine, shared, form)
    if cutlass.const_expr(form.at_once == 1):
        walk = known_walk(walk, tensors, e)
    rings[0].consumer_wait(mainloop.consumer_state(1))
    state = mainloop.consumer_state(facts.stages(form))
    keys, several = facts.keys_of_stage(form), facts.team_of(form).stages_at_once
    for lead in cutlass.range(form.at_once, unroll=1):
        _, limit, limits = run_of(walk.tokens, lead, form)
        last = cutlass.min(limit, walk.end)
        of = scores_of_lane(mine, walk, limits, e.entries, form)
        stages = (cutlass.max(last - walk.begin, 0) + keys - 1) // keys
        alone = walk.begin + stages // several * several * keys
        done = walk.begin + stages * keys
        for key in cutlass.range(walk.begin, alone, several * keys, unroll=1):
            to = (tensors.out, of, key)
            state = score_stages(held, (rings[1], state), to, several, form)
        if cutlass.const_expr(several > 1):
            for key in cutlass.range(alone, done, keys, unroll=1):
                state = score_stages(held, (rings[1], state), (tensors.out, of, key), 1, form)
        # Entries of the chunk past the last multiplied stage.
        put_nothing(tensors.out, (walk.tile, done, walk.end), limits, e.entries, form)


def score_stages(
    held: SetsOfSums,
    keys: tuple[Any, Any],
    to: tuple[Any, ScoresOfLane, Any],
    count: int,
    form: ScoresForm,
) -> Any:
    """Score a number of stages from a key on; return the ring's state behind them.

    Of two sets one is multiplied while the other is weighed, from stage to stage as well. Where
    registers suffice, a quad exchanges a set's sums while it weighs the next.

    Trap: ptxas lets wgmma run on in straight code alone. Sums that are in flight over the end of a
    loop are waited for after each wgmma.
    """
    ring, state = keys
    sets, states = facts.sets(form), states_from(state, count)
    for which in range(sets):
        multiply_set(held, ring, states[0], which, form)
    former: tuple[Any, ...] = ()
    for unit in range(count * sets):
        stage, which = divmod(unit, sets)
        if which == 0:
            scale = key_scale(held.scales, to[1].row, states[stage].index, form)
        warpgroup.wait_group(min(sets, count * sets - unit) - 1)
        if former:
            score = score_of(former[0], former[1], form)
        totals = totals_of(held.sums[which], held.weights, which, form)
        if which == sets - 1:
            ring.consumer_release(states[stage])
        if stage + 1 < count:
            multiply_set(held, ring, states[stage + 1], which, form)
        if former:
            put_set(to, score, divmod(unit - 1, sets), form)
        former = (totals, scale)
        if unit == count * sets - 1 or not facts.exchanges_later(form):
            put_set(to, score_of(totals, scale, form), (stage, which), form)
            former = ()
    return states[-1]


def states_from(state: Any, count: int) -> list[Any]:
    """Return the ring's states of a number of stages, and the one behind them."""
    states = [state]
    for _ in range(count):
        following = states[-1].clone()
        following.advance()
        states.append(following)
    return states


def multiply_set(held: SetsOfSums, ring: Any, state: Any, which: int, form: ScoresForm) -> None:
    """Multiply a stage with a set of columns; the first set waits for the keys."""
    if which == 0:
        ring.consumer_wait(state)
    multiply(held.mma, held.sums[which], (held.a, held.b[which]), state.index, form)


def put_set(
    to: tuple[Any, ScoresOfLane, Any], score: Any, at: tuple[int, int], form: ScoresForm
) -> None:
    """Write a lane's score of (stage, set)."""
    (out, of, key), (stage, which) = to, at
    place = (of.starts[which], of.limits[which], of.ends[which])
    put = put_if_within if form.operands == "fp8" else put_score
    put(out, score, key + stage * facts.keys_of_stage(form) + of.row, place)


def columns_of(sQ: Any, which: int, form: ScoresForm) -> Any:
    """Return the queries of a set."""
    box = (facts.columns_of_set(form), sQ.shape[1], sQ.shape[2])
    return cute.local_tile(sQ, box, (which, 0, 0))


def key_scale(sScales: Any, row: Any, stage: Any, form: ScoresForm) -> Any:
    """Return the scale of a key of a stage; 1 for BF16."""
    if sScales is None:
        return Float32(1.0)
    return sScales[row % form.box, row // form.box, stage]


def inner_of(form: ScoresForm) -> int:
    """Return the numbers of a 128-byte row."""
    return facts.WIDTH // facts.OPERANDS[form.operands].halves


def layouts(form: ScoresForm) -> tuple[Any, Any]:
    """Return the layouts of queries (rows, inner, halves) and keys, stage by stage."""
    element, halves = ELEMENTS[form.operands], facts.OPERANDS[form.operands].halves
    keys = facts.keys_of_stage(form)
    sizes = ((form.columns, halves), (keys, halves * facts.stages(form)))
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


def scales_of_boxes(feed: mainloop.TmaFeed, shared: Any, form: ScoresForm) -> tuple[Any, Any]:
    """Return destinations (box, boxes, stages) and sources (box, along keys, page) of scales."""
    boxes = cute.local_tile(feed.tensor, (form.box, 1), (None, None))
    destination, source = cpasync.tma_partition(
        feed.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(cute.local_tile(shared, (form.box, 1), (0, None, None)), 0, 2),
        cute.group_modes(boxes, 0, 2),
    )
    return destination, source


@cute.jit
def load_keys(
    ring: Any,
    state: Any,
    boxes: list[tuple[Any, Any]],
    given: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> Any:
    """Load a stage of keys whose first page has a lane's number; no page brings zeros."""
    atoms, pages, places, lane = given
    halves = facts.OPERANDS[form.operands].halves
    ring.producer_acquire(state)
    barrier = ring.producer_get_barrier(state)
    for number in cutlass.range_constexpr(facts.keys_of_stage(form) // form.box):
        page = cute.arch.shuffle_sync(pages, lane + number)
        along = cute.arch.shuffle_sync(places, lane + number)
        destination, source = boxes[0]
        for half in cutlass.range_constexpr(halves):
            into = destination[None, number, state.index * halves + half]
            cute.copy(atoms[0], source[None, along, half, page], into, tma_bar_ptr=barrier)
        if cutlass.const_expr(len(boxes) > 1):
            destination, source = boxes[1]
            into = destination[None, number, state.index]
            cute.copy(atoms[1], source[None, along, page], into, tma_bar_ptr=barrier)
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


def scales_feed(scales: Any, e: ScoresExtents, form: ScoresForm) -> tuple[Any, ...]:
    """Make the TMA atom of the keys' scales, which follow the keys of a page; none for BF16."""
    if not facts.scale_bytes(form):
        return ()
    words = facts.WIDTH // facts.SCALE_BYTES
    first = scales + cute.assume(e.of_page * words, divby=facts.HEADS_STEP * words)
    stride = cute.assume(e.stride_words, divby=facts.PAGE_ALIGNMENT // facts.SCALE_BYTES)
    tensor = cute.make_tensor(
        first, cute.make_layout((e.of_page, e.pages), stride=(1, Int64(stride)))
    )
    return (mainloop.feed_of(tensor, cute.make_layout((form.box, 1, 1)), (form.box, 1)),)


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
    feeds = (*feeds_of(queries, pages, e, form), *scales_feed(others[5], e, form))
    flat = cute.make_layout(FLAT)
    tensors = ScoresTensors(*(cute.make_tensor(address, flat) for address in others))
    blocks = facts.team_of(form).blocks
    scores_kernel(feeds, tensors, e, form).launch(
        grid=[tiles, chunks, 1],
        block=[facts.threads(form), 1, 1],
        min_blocks_per_mp=blocks,
        preferred_smem_carveout=WHOLE_CARVEOUT if blocks > 1 else None,
        use_pdl=pdl.EARLY,
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
_SCALES = Storage(Float32, torch.float32, 16)
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
        _Operand("key_scales", _SCALES, lambda _: (), _IN_PAGES, address_of="pages"),
        _Operand("out", _FP32, lambda p: (p.tokens, p.entries), output=True, label="scores"),
    ),
    choose_form=facts.choose_form,
    kinds=((Int32,) * (len(ScoresExtents._fields) + 2),),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    target=SM90A,
)
compile_form = KERNEL.compile_form
