"""Exact top-k of each row of scores: a radix search in shared memory, in one kernel.

One source for sm_90a and sm_100a. The rule of the selection is in problem. A row belongs to one
thread block, or to a cluster of up to eight, each with a segment.

1. Read the segment once; map each score to an ordered 32-bit key in shared memory; count the keys'
   top 11 bits in a histogram.
2. Find the bin of the k-th largest key, over the histograms of the cluster; count the next 11 bits
   of keys with that prefix; then the last 10. That gives the threshold and how many equals to take.
3. Mark keys above and equal to the threshold by ballots; prefix sums over lanes, warps and blocks
   give each mark its place, so entries leave in ascending order and ties go to the lower entry.
4. Fill the rest with -1.

With positions and a ratio, invisible entries are not read: NaN there changes nothing. Allocates
only the result and never waits for the GPU, so it may be captured in a graph. Shape letters: T
rows, W entries, K chosen.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div, round_up
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import TopkForm, TopkProblem, visible_entries
from degarble.kernels.primitives.device_words import emit
from degarble.kernels.runtime.kernel import Kernel, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

FLAT = 1 << 40
AT_ONCE = 4  # vectors that a thread asks for before it uses the first


# ---- device --------------------------------------------------------------------------------------


class TopkTensors(NamedTuple):
    """Kernel's tensors: scores in vectors of four or singly, flat."""

    scores: Any
    positions: Any
    out: Any


class TopkSharedMemory(NamedTuple):
    """Shared memory of a thread block."""

    keys: Any  # of its segment
    bins: Any  # (bins, levels)
    warps: Any  # (warps, levels): bins counted by each warp
    found: Any  # (bin and rank, levels)
    marks: Any  # (above and equal, warps)
    totals: Any  # above and equal, of the block


def key_of(score: Any) -> Any:
    """Return an integer that sorts as float32: NaN on top, -0 as +0; see router_problem.key_of."""
    text = """{
        .reg .f32 x; .reg .b32 b, m; .reg .pred p;
        add.rn.f32 x, {$r0}, 0f00000000;
        mov.b32 b, x; shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m;
        setp.nan.f32 p, x, x; selp.b32 {$w0}, 0xFFFFFFFF, b, p;
    }"""
    return emit(text, Uint32, score)


def shared_of(form: TopkForm) -> TopkSharedMemory:
    """Allocate what a thread block holds."""
    memory, levels = cutlass.memory.SmemAllocator(), len(facts.LEVELS)

    def held(element: Any, *shape: int) -> Any:
        return memory.allocate_tensor(element, cute.make_layout(shape), 16)

    return TopkSharedMemory(
        held(Uint32, form.capacity),
        held(Int32, facts.BINS, levels),
        held(Int32, form.warps, levels),
        held(Int32, 2, levels),
        held(Int32, 2, form.warps),
        held(Int32, 2),
    )


def bin_of(key: Any, level: int) -> Any:
    """Return the bin of a key at a level."""
    shift, bins = facts.LEVELS[level]
    return Int32(ops.shift_right(key, shift) & (bins - 1))


def counted(shared: TopkSharedMemory, key: Any, level: int) -> None:
    """Count a key in its bin."""
    cute.arch.atomic_add(shared.bins.iterator + bin_of(key, level) + level * facts.BINS, Int32(1))


def in_fours(tensor: Any) -> Any:
    """View shared memory as vectors of four."""
    layout = cute.make_layout((4, cute.size(tensor) // 4), stride=(1, 4))
    return cute.make_tensor(tensor.iterator, layout)


@cute.jit
def load_keys(
    shared: TopkSharedMemory,
    scores: Any,
    place: tuple[Any, Any],
    searched: Any,
    form: cutlass.Constexpr,
) -> None:
    """Read a segment of (start in memory, length), keep its keys, count them if searched."""
    thread, _, _ = cute.arch.thread_idx()
    start, length = place
    width = 4 if form.by_four else 1
    rScores = cute.make_rmem_tensor(cute.make_layout((width, AT_ONCE)), Float32)
    vectors = ceil_div(length, width)
    for first in cutlass.range(thread, vectors, form.threads * AT_ONCE, unroll=1):
        for i in cutlass.range_constexpr(AT_ONCE):
            vector = first + i * form.threads
            if vector < vectors:
                at = start // width + Int64(vector)
                cute.autovec_copy(scores[None, at], rScores[None, i])
        for i in cutlass.range_constexpr(AT_ONCE):
            vector = first + i * form.threads
            if vector < vectors:
                keys = [key_of(Float32(rScores[j, i])) for j in range(width)]
                if cutlass.const_expr(form.by_four):  # noqa: SIM102  one is known in tracing
                    if vector * width + width > length:
                        for j in cutlass.range_constexpr(width):
                            keys[j] = ops.select(vector * width + j < length, keys[j], Uint32(0))
                put_keys(shared, vector, keys)
                if searched:
                    for j in cutlass.range_constexpr(width):
                        counted(shared, keys[j], 0)
    if thread < round_up(length, 4) - length:
        shared.keys[length + thread] = Uint32(0)  # a vector of four is read as a whole


def put_keys(shared: TopkSharedMemory, vector: Any, keys: list[Any]) -> None:
    """Store adjacent keys."""
    width = len(keys)
    rKeys = cute.make_rmem_tensor(width, Uint32)
    for j, key in enumerate(keys):
        rKeys[j] = key
    layout = cute.make_layout((width, cute.size(shared.keys) // width), stride=(1, width))
    cute.autovec_copy(rKeys, cute.make_tensor(shared.keys.iterator, layout)[None, vector])


@cute.jit
def count_level(
    shared: TopkSharedMemory,
    prefix: Any,
    length: Any,
    level: cutlass.Constexpr,
    form: cutlass.Constexpr,
) -> None:
    """Count the keys whose bits above a level equal a prefix.

    The zero padding after a segment never matches: the prefix of -inf's key is not zero.
    """
    thread, _, _ = cute.arch.thread_idx()
    above = facts.LEVELS[level - 1][0]
    rKeys = cute.make_rmem_tensor(4, Uint32)
    for vector in cutlass.range(thread, ceil_div(length, 4), form.threads, unroll=2):
        cute.autovec_copy(in_fours(shared.keys)[None, vector], rKeys)
        keys = [Uint32(rKeys[j]) for j in range(4)]
        hits = [ops.shift_right(key, above) == prefix for key in keys]
        # Most vectors have no hit: one branch for four keys.
        if hits[0] | hits[1] | hits[2] | hits[3]:
            for j in cutlass.range_constexpr(4):
                if hits[j]:
                    counted(shared, keys[j], level)


def flat_of(tensor: Any) -> Any:
    """View a tensor of shared memory in the order in which it lies there."""
    return cute.make_tensor(tensor.iterator, cute.size(tensor))


def of_block(tensor: Any, at: Any, count: int, rank: Any, form: TopkForm) -> list[Any]:
    """Read neighbouring integers of the shared memory of a cluster's thread block."""
    if form.cluster == 1:
        return [Int32(flat_of(tensor)[at + i]) for i in range(count)]
    made: list[Any] = []
    for first in range(0, count, 4):
        several = min(4, count - first)
        words = ", ".join(f"{{$w{i}}}" for i in range(several))
        listed = f".v{several}.s32 {{{words}}}" if several > 1 else f".s32 {words}"
        text = "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1}; "
        text += f"ld.shared::cluster{listed}, [a]; }}"
        found = cute.arch.inline_ptx(
            text,
            write_only_types=[Int32] * several,
            read_only_args=[
                Uint32((tensor.iterator + at + first).toint()),
                Uint32(rank),
            ],
        )
        made += found if several > 1 else [found]
    return made


@cute.jit
def together(form: cutlass.Constexpr) -> None:
    """Synchronise the thread block or cluster, so that others' shared memory may be read."""
    cute.arch.sync_threads()
    if cutlass.const_expr(form.cluster > 1):
        thread, _, _ = cute.arch.thread_idx()
        # One fence for all: what the others wrote lies before the barrier above.
        if thread == 0:
            cute.arch.fence_acq_rel_cluster()
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


def scanned(number: Any) -> Any:
    """Return the sum of a number over the lanes up to this one."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        other = Int32(cute.arch.shuffle_sync_up(number, offset=distance, mask_and_clamp=0))
        number = number + ops.select(lane >= distance, other, Int32(0))
    return number


def summed(number: Any) -> Any:
    """Return the sum of a number over a warp."""
    return emit("redux.sync.add.s32 {$w0}, {$r0}, {$r1};", Int32, number, Uint32(0xFFFF_FFFF))


@cute.jit
def find_bin(
    shared: TopkSharedMemory, rank: Any, level: cutlass.Constexpr, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return the bin of the key of a rank, counted from the largest, and its rank in the bin."""
    thread, _, _ = cute.arch.thread_idx()
    together(form)
    bins = facts.LEVELS[level][1]
    # Thread t has the t-th run of bins from the top.
    each = bins // form.threads
    first = bins - (thread + 1) * each
    counts = [Int32(0)] * each
    index, _, _ = cute.arch.block_idx()
    for distance in cutlass.range_constexpr(form.cluster):
        # Each block begins with its own bins, so that not all ask the same one at once.
        block = (index + distance) % form.cluster
        found = of_block(shared.bins, level * facts.BINS + first, each, block, form)
        counts = [old + new for old, new in zip(counts, found, strict=True)]
    own = Int32(0)
    for number in counts:
        own = own + number
    through = scanned(own)
    warp, lane = thread // facts.WARP, thread % facts.WARP
    if lane == facts.WARP - 1:
        shared.warps[warp, level] = through
    cute.arch.sync_threads()
    before = Int32(0)
    if lane < warp:
        before = Int32(shared.warps[lane, level])
    before = summed(before) + through - own
    for i in cutlass.range_constexpr(each - 1, -1, -1):
        if (before < rank) & (rank <= before + counts[i]):
            shared.found[0, level] = first + i
            shared.found[1, level] = rank - before
        before = before + counts[i]
    cute.arch.sync_threads()
    return Int32(shared.found[0, level]), Int32(shared.found[1, level])


@cute.jit
def threshold_of(
    shared: TopkSharedMemory, length: Any, count: Any, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return the key of the last one chosen, and how many of its equals are chosen."""
    prefix, rank = find_bin(shared, count, 0, form)
    for level in cutlass.range_constexpr(1, len(facts.LEVELS)):
        count_level(shared, Uint32(prefix), length, level, form)
        found, rank = find_bin(shared, rank, level, form)
        wider = facts.LEVELS[level - 1][0] - facts.LEVELS[level][0]
        prefix = Int32(ops.shift_left(Uint32(prefix), wider)) + found
    return Uint32(prefix), rank


@cute.jit
def marks_of(shared: TopkSharedMemory, threshold: Any, place: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return a lane's words of marks: keys above the threshold and equal to it.

    A warp has (first key, keys) of the segment; lane i has the marks of its 32 keys from 32 i on.
    """
    first, length = place
    lane = cute.arch.lane_idx()
    above, equal = Uint32(0), Uint32(0)
    for group in cutlass.range(ceil_div(length, facts.WARP), unroll=4):
        own, key = group * facts.WARP + lane, Uint32(0)
        if own < length:
            key = Uint32(shared.keys[first + own])
        # Padding keys of 0 are never above or equal: the threshold is NEVER at least.
        of_above = Uint32(cute.arch.vote_ballot_sync(key > threshold))
        of_equal = Uint32(cute.arch.vote_ballot_sync(key == threshold))
        above = ops.select(lane == group, of_above, above)
        equal = ops.select(lane == group, of_equal, equal)
    return above, equal


@cute.jit
def before_block(shared: TopkSharedMemory, block: Any, form: cutlass.Constexpr) -> tuple[Any, ...]:
    """Return marks above and equal of the cluster's blocks before one, then of all."""
    together(form)
    found = [Int32(0), Int32(0), Int32(0), Int32(0)]
    for other in cutlass.range_constexpr(form.cluster):
        pair = of_block(shared.totals, 0, 2, other, form)
        for kind in cutlass.range_constexpr(2):
            found[kind] = found[kind] + ops.select(block > other, pair[kind], Int32(0))
            found[2 + kind] = found[2 + kind] + pair[kind]
    return tuple(found)


def first_of(marks: Any) -> Any:
    """Return only the lowest set bit."""
    return marks & (Uint32(0) - marks)


@cute.jit
def put_marked(
    out: Any, marks: tuple[Any, Any], counts: tuple[Any, Any], place: tuple[Any, Any, Any]
) -> None:
    """Write a lane's chosen entries; place is (start of the row, first entry, chosen equals)."""
    above, equal = marks
    above_before, equal_before = counts
    start, first, wanted = place
    left = above | equal
    while left != 0:
        lowest = first_of(left)
        entry = first + Int32(cute.arch.popc(lowest - 1))
        is_above = (above & lowest) != 0
        if is_above | (equal_before < wanted):
            # Place: chosen entries before this one.
            at = above_before + ops.select(equal_before < wanted, equal_before, wanted)
            out[start + Int64(at)] = entry
        above_before = above_before + ops.select(is_above, Int32(1), Int32(0))
        equal_before = equal_before + ops.select(is_above, Int32(0), Int32(1))
        left = left ^ lowest


@cute.jit
def row_of(
    shared: TopkSharedMemory,
    tensors: TopkTensors,
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> tuple[Any, ...]:
    """Read a segment; return row, first entry, length, threshold key, and equals to take."""
    entries, count, ratio = extents
    index, _, _ = cute.arch.block_idx()
    row, block = index // form.cluster, index % form.cluster
    visible = Int32(entries)
    if cutlass.const_expr(form.limited):
        seen = visible_of(Int64(tensors.positions[row]), ratio)
        seen = ops.select(seen > 0, seen, Int64(0))
        visible = Int32(ops.select(seen < Int64(entries), seen, Int64(entries)))
    own = round_up(ceil_div(visible, form.cluster), facts.SEGMENT_STEP)
    first = block * own
    length = cutlass.max(cutlass.min(own, visible - first), 0)
    start = Int64(row) * Int64(entries) + Int64(first)
    # At most `count` entries: all are chosen, no search.
    searched = visible > count
    load_keys(shared, tensors.scores, (start, length), searched, form)
    threshold, wanted = Uint32(facts.NEVER), Int32(0)
    if searched:
        threshold, wanted = threshold_of(shared, length, count, form)
    else:
        cute.arch.sync_threads()
    # The k-th largest is -inf, which is never chosen: take all above it, none equal.
    if threshold <= facts.NEVER:
        threshold, wanted = Uint32(facts.NEVER), Int32(0)
    return row, first, length, threshold, wanted


@cute.kernel
def topk_kernel(tensors: TopkTensors, extents: tuple[Int32, ...], form: cutlass.Constexpr) -> None:
    """Choose for one row, or for this thread block's segment of it."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    index, _, _ = cute.arch.block_idx()
    shared, block = shared_of(form), index % form.cluster
    rNone = cute.make_rmem_tensor(4, Int32)
    rNone.fill(0)
    for i in cutlass.range(thread, cute.size(shared.bins) // 4, form.threads, unroll=1):
        cute.autovec_copy(rNone, in_fours(shared.bins)[None, i])
    cute.arch.sync_threads()
    row, first, length, threshold, wanted = row_of(shared, tensors, extents, form)

    # Each warp has a span of the segment; 32 neighbours of it are one lane's.
    warp, lane = thread // facts.WARP, thread % facts.WARP
    span = round_up(ceil_div(length, form.warps), facts.WARP)
    of_warp = cutlass.max(cutlass.min(span, length - warp * span), 0)
    marks = marks_of(shared, threshold, (warp * span, of_warp))
    numbers = [Int32(cute.arch.popc(word)) for word in marks]
    through = [scanned(number) for number in numbers]
    if lane == facts.WARP - 1:
        for kind in cutlass.range_constexpr(2):
            shared.marks[kind, warp] = through[kind]
    cute.arch.sync_threads()
    before = []
    for kind in cutlass.range_constexpr(2):
        of_lane = Int32(0)
        if lane < form.warps:
            of_lane = Int32(shared.marks[kind, lane])
        if thread < facts.WARP:
            total = summed(of_lane)
            if lane == 0:
                shared.totals[kind] = total
        before.append(summed(ops.select(lane < warp, of_lane, Int32(0))))
    above, equal, all_above, all_equal = before_block(shared, block, form)
    if cutlass.const_expr(form.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
    counts = (
        above + before[0] + through[0] - numbers[0],
        equal + before[1] + through[1] - numbers[1],
    )
    of_row = Int64(row) * Int64(extents[1])
    entry = first + warp * span + lane * facts.WARP
    put_marked(tensors.out, marks, counts, (of_row, entry, wanted))
    chosen = all_above + cutlass.min(all_equal, wanted)
    # The cluster's blocks share the padding of the row.
    lacking = chosen + block * form.threads + thread
    for at in cutlass.range(lacking, extents[1], form.threads * form.cluster, unroll=1):
        tensors.out[of_row + Int64(at)] = Int32(facts.NONE)
    if cutlass.const_expr(form.cluster > 1):
        cute.arch.cluster_wait()  # stay until others have read this block's counts


def visible_of(position: Any, ratio: Any) -> Any:
    """Return how many entries a token sees."""
    return visible_entries(position, Int64(ratio))


@cute.jit
def launch_topk(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form; extents are entries, count, ratio, thread blocks."""
    entries, count, ratio, blocks = extents
    scores, positions, out = pointers
    width = 4 if form.by_four else 1
    flat = cute.make_layout(FLAT)
    vectors = cute.make_layout((width, FLAT), stride=(1, width))
    tensors = TopkTensors(
        cute.make_tensor(scores, vectors),
        cute.make_tensor(positions, flat),
        cute.make_tensor(out, flat),
    )
    topk_kernel(tensors, (entries, count, ratio), form).launch(
        grid=[blocks, 1, 1],
        block=[form.threads, 1, 1],
        cluster=[form.cluster, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _scores(of: TopkProblem | TopkForm) -> Storage:
    return Storage(Float32, torch.float32, 16 if of.by_four else 4)


_Operand = Operand[TopkProblem]
_LIMITED = Presence[TopkProblem](
    lambda of: of.limited, lambda p: f"The problem says ratio={p.ratio}."
)
_PLACES, _CHOSEN = Storage(Int64, torch.int64, 8), Storage(Int32, torch.int32, 4)
KERNEL = Kernel[TopkProblem, TopkForm](
    entry=launch_topk,
    operands=(
        _Operand("scores", _scores, lambda p: (p.rows, p.entries)),
        _Operand("positions", _PLACES, lambda p: (p.rows,), _LIMITED),
        _Operand("out", _CHOSEN, lambda p: (p.rows, p.count), output=True, label="chosen entries"),
    ),
    choose_form=facts.choose_topk_form,
    fit_form=lambda form, problem, count: facts.choose_topk_form(problem, form.target, count),
    kinds=((Int32,) * 4,),
    numbers=lambda of: (
        (
            of.problem.entries,
            of.problem.count,
            of.problem.ratio,
            facts.topk_grid(of.problem, of.form),
        ),
    ),
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
