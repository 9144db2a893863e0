"""Weigh, add and write the indexer's products: the consumers' work after wgmma.

A thread adds its heads in their order, then the four threads of a quad are folded. FP8 keys are
scaled after the sum. Scores are -inf where a token sees nothing. Only for use inside a kernel that
is being traced; sm_100a adds in the same order.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import ScoresForm
from degarble.kernels.primitives.nvfp4_words import emit

HIGH_HALF = 0xFFFF_0000


class Tensors(NamedTuple):
    """Tensors that the kernel's threads access directly, flat."""

    weights: Any  # [T, N]
    scales: Any  # float32 [T, N], of FP8 queries
    positions: Any  # int64 [T]
    sequences: Any  # int32 [T]
    table: Any  # int32 [S, P]
    key_scales: Any  # the pages' bytes as float32
    out: Any  # float32 [T, W]


class Extents(NamedTuple):
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
def weights_of(tensors: Tensors, tile: Any, e: Extents, form: cutlass.Constexpr) -> Any:
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
def weight_of(tensors: Tensors, token: Any, head: Any, e: Extents, form: cutlass.Constexpr) -> Any:
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
    tensors: Tensors, place: tuple[Any, Any, Any], e: Extents, form: cutlass.Constexpr
) -> list[Any]:
    """Return the scales of a thread's two keys; 1 where none is read."""
    sequence, row, last = place
    found = [Float32(1.0)] * 2
    if cutlass.const_expr(form.operands == "fp8"):
        found = [key_scale_of(tensors, (sequence, row + i, last), e) for i in (0, 8)]
    return found


@cute.jit
def key_scale_of(tensors: Tensors, place: tuple[Any, Any, Any], e: Extents) -> Any:
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
