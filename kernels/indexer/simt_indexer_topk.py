"""Exact top-k of each row of scores: a search over digits of scores that registers hold.

One source for sm_90a and sm_100a. The rule of the selection is in problem. A row that the registers
of a thread block or of a cluster of up to eight hold is read once:

1. Count the upper 12 bits of each score, rounded to FP16 and ordered, in shared memory; find the
   bin of the k-th largest, over the bins of the cluster.
2. List that bin's scores: as float32 keys in every thread block, where they are few, to compare all
   with all; else count 11, 11 and 10 bits of each block's own. That gives the last one chosen and
   how many of its equals are.
3. Mark scores above and equal to it; sums over lanes, warps and blocks give each its place, so
   entries leave in ascending order and ties go to the lower entry. Fill the rest with -1.

Longer rows, and those too many for clusters, are read chunk by chunk by one thread block. A sample
tells a limit that somewhat more than k scores probably exceed; those are candidates, collected in
shared memory in order, and chosen from as above. Where there are too many, the chosen among them
stay; where too few, the row is read again without a limit: the result never depends on the sample.

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
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import TopkForm, TopkProblem, visible_entries
from degarble.kernels.primitives.device_words import emit
from degarble.kernels.runtime.kernel import Kernel, Operand, Presence, Storage
from degarble.kernels.runtime.operands import DRIVERS_CHOICE
from degarble.kernels.runtime.pdl import EARLY, follow

FLAT = 1 << 40
INFINITY = float("inf")
NAN_KEY = 0xFFFF_FFFF
# Slots of `warps` and of `found`.
OF_BINS, OF_CHOSEN, OF_CHUNK = 0, 1, 2  # and 3: chunks take turns
BIN, RANK, COUNT, AHEAD, KEY, EQUALS, LISTS = 0, 1, 2, 3, 4, 5, 6
READ_AT_ONCE = 4  # thread blocks of a cluster: more would take registers
HASH = 0x9E37_79B1  # an odd number near 2**32 over the golden ratio


# ---- device --------------------------------------------------------------------------------------


class TopkTensors(NamedTuple):
    """Kernel's tensors: scores in vectors of four or singly, flat."""

    scores: Any
    positions: Any
    out: Any


class TopkSharedMemory(NamedTuple):
    """Shared memory of a thread block."""

    bins: Any
    warps: Any  # (warps, slots): counts of each warp
    found: Any  # what a search found, and how many keys are listed
    keys: Any  # of the listed scores of the whole cluster, where they are few
    ranges: Any  # what the bins of each warp of the cluster count
    totals: Any  # above and equal, of each thread block of the cluster
    scores: Any  # candidates in order of their entries; listed ones while registers hold those
    entries: Any


def key_of(score: Any) -> Any:
    """Return an integer that sorts as float32: NaN on top, -0 as +0; see router_problem.key_of."""
    text = """{
        .reg .f32 x; .reg .b32 b, m; .reg .pred p;
        add.rn.f32 x, {$r0}, 0f00000000;
        mov.b32 b, x; shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m;
        setp.nan.f32 p, x, x; selp.b32 {$w0}, 0xFFFFFFFF, b, p;
    }"""
    return emit(text, Uint32, score)


def limit_of(key: Any) -> Any:
    """Return the float32 of a key, which larger scores and NaN exceed; infinity for NaN's."""
    bits = ops.select(key >= Uint32(0x8000_0000), key ^ Uint32(0x8000_0000), ~key)
    return ops.select(key == Uint32(NAN_KEY), Float32(INFINITY), ops.number_of(bits))


def digits_of(low: Any, high: Any, zero: Any) -> Any:
    """Return two scores rounded to FP16, as ordered halves of a word; NaN is 0xFFFF."""
    text = """{
        .reg .f32 a, b; .reg .b32 h, m;
        add.rn.f32 a, {$r0}, {$r2}; add.rn.f32 b, {$r1}, {$r2};
        cvt.rn.f16x2.f32 h, b, a;
        prmt.b32 m, h, h, 0xBB99; or.b32 m, m, 0x80008000; xor.b32 {$w0}, h, m;
    }"""
    return emit(text, Uint32, low, high, zero)


def word_of(rScores: Any, pair: int, zero: Any) -> Any:
    """Return the digits of a pair of a thread's scores."""
    return digits_of(Float32(rScores[2 * pair]), Float32(rScores[2 * pair + 1]), zero)


def digit_of(word: Any, place: int) -> Any:
    """Return the bin of the first or second score of a pair."""
    return Int32(ops.shift_right(word, facts.VECTOR + 16 * place) & (facts.BINS - 1))


def bit_above(score: Any, limit: Any, place: int) -> Any:
    """Return the bit of a place if a score is NaN or above a limit, which is no NaN."""
    text = "{ .reg .pred p; setp.gtu.f32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r2}, 0, p; }"
    return emit(text, Uint32, score, limit, Uint32(1 << place))


def bit_equal(score: Any, limit: Any, place: int) -> Any:
    """Return the bit of a place if a score equals a limit."""
    text = "{ .reg .pred p; setp.eq.f32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r2}, 0, p; }"
    return emit(text, Uint32, score, limit, Uint32(1 << place))


def is_marked(marks: Any, place: int) -> Any:
    """Return whether the bit of a place is set."""
    return (marks & Uint32(1 << place)) != Uint32(0)


def shared_of(form: TopkForm) -> TopkSharedMemory:
    """Allocate what a thread block holds."""
    memory = cutlass.memory.SmemAllocator()

    def held(element: Any, *shape: int) -> Any:
        return memory.allocate_tensor(element, cute.make_layout(shape), 16)

    bins = held(Int32, facts.BINS)
    counts = held(Int32, form.warps, 4), held(Int32, 8)
    keys, totals = held(Uint32, facts.LISTED + facts.VECTOR), held(Uint32, facts.MOST_CLUSTER)
    ranges = held(Int32, form.warps * form.cluster)
    scores, entries = held(Float32, form.listed), held(Int32, max(form.capacity, facts.VECTOR))
    return TopkSharedMemory(bins, *counts, keys, ranges, totals, scores, entries)


def in_fours(tensor: Any) -> Any:
    """View shared memory as vectors of four."""
    layout = cute.make_layout((4, cute.size(tensor) // 4), stride=(1, 4))
    return cute.make_tensor(tensor.iterator, layout)


def scanned(number: Any) -> Any:
    """Return the sum of a number over the lanes up to this one."""
    steps = "".join(
        f"shfl.sync.up.b32 t|p, a, {distance}, 0, 0xFFFFFFFF; @p add.s32 a, a, t;\n"
        for distance in (1, 2, 4, 8, 16)
    )
    text = f"{{ .reg .b32 a, t; .reg .pred p; mov.b32 a, {{$r0}};\n{steps}mov.b32 {{$w0}}, a; }}"
    return emit(text, Int32, number)


def summed(number: Any) -> Any:
    """Return the sum of a number over a warp."""
    return emit("redux.sync.add.s32 {$w0}, {$r0}, {$r1};", Int32, number, Uint32(0xFFFF_FFFF))


def byte_of(words: list[Any], place: int) -> Any:
    """Return a byte of several words."""
    return Int32(ops.shift_right(Uint32(words[place // 4]), 8 * (place % 4)) & 0xFF)


@cute.jit
def before_warp(shared: TopkSharedMemory, slot: Any, form: cutlass.Constexpr) -> tuple[Any, Any]:
    """Return the sum over warps before this one, and over all; a barrier lies before."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // facts.WARP, thread % facts.WARP
    of_lane = Int32(0)
    if lane < form.warps:
        of_lane = Int32(shared.warps[lane, slot])
    return summed(ops.select(lane < warp, of_lane, Int32(0))), summed(of_lane)


# A warp's scores lie in vectors of all lanes, one vector after another.


def first_of_thread(held: int) -> Any:
    """Return the place of a thread's first score in its thread block's segment."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // facts.WARP, thread % facts.WARP
    return warp * (facts.WARP * held) + lane * facts.VECTOR


def counts_of(masks: list[Any], held: int) -> tuple[list[Any], list[Any]]:
    """Return counts of marks in bytes, a vector each: of the lanes before, and of all lanes."""
    numbers = [
        Int32(cute.arch.popc(ops.shift_right(mask, facts.VECTOR * i) & 15))
        for mask in masks
        for i in range(held // facts.VECTOR)
    ]
    lanes, of_warp = [], []
    for first in range(0, len(numbers), 4):
        word = Int32(0)
        for i, number in enumerate(numbers[first : first + 4]):
            word = word + (number << (8 * i))
        through = scanned(word)
        lanes.append(through - word)
        of_warp.append(Int32(cute.arch.shuffle_sync(through, facts.WARP - 1)))
    return lanes, of_warp


# ---- clusters ------------------------------------------------------------------------------------


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


def block_of(form: TopkForm) -> Any:
    """Return the place of this thread block in its cluster."""
    index, _, _ = cute.arch.block_idx()
    return index % form.cluster


def address_in(tensor: Any, at: Any, block: Any) -> Any:
    """Return the address of an element of a tensor in a thread block of the cluster."""
    text = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    return emit(text, Uint32, Uint32((tensor.iterator + at).toint()), Uint32(block))


def put_remote(address: Any, word: Any) -> None:
    """Store a word in the shared memory of a thread block of the cluster."""
    cute.arch.inline_ptx(
        "st.shared::cluster.b32 [{$r0}], {$r1};",
        write_only_types=[], read_only_args=[address, word],
    )  # fmt: skip


def remote_four(address: Any) -> list[Any]:
    """Read four integers of the shared memory of a thread block of the cluster."""
    words = ", ".join(f"{{$w{i}}}" for i in range(4))
    made: list[Any] = cute.arch.inline_ptx(
        f"ld.shared::cluster.v4.s32 {{{words}}}, [{{$r0}}];",
        write_only_types=[Int32] * 4, read_only_args=[address],
    )  # fmt: skip
    return made


# ---- the last one chosen -------------------------------------------------------------------------


@cute.jit
def count_in(shared: TopkSharedMemory, place: Any) -> None:
    """Count a score in a bin."""
    cute.arch.atomic_add(shared.bins.iterator + place, Int32(1))


def digits_counted(shared: TopkSharedMemory, rScores: Any, held: int) -> list[Any]:
    """Count the digits of a thread's scores; return them, a word of each pair."""
    words = []
    for i in range(held // 2):
        words.append(word_of(rScores, i, Float32(0.0)))
        for j in range(2):
            count_in(shared, digit_of(words[i], j))
    return words


@cute.jit
def clear_bins(shared: TopkSharedMemory, form: cutlass.Constexpr) -> None:
    """Set all bins to zero."""
    thread, _, _ = cute.arch.thread_idx()
    rNone = cute.make_rmem_tensor(facts.VECTOR, Int32)
    rNone.fill(0)
    for i in cutlass.range_constexpr(facts.BINS // facts.VECTOR // form.threads):
        cute.autovec_copy(rNone, in_fours(shared.bins)[None, thread + i * form.threads])
    cute.arch.sync_threads()


def if_before(other: Any, block: Any, number: Any) -> Any:
    """Return a number of the cluster's blocks before one, 0 of others."""
    return ops.select(other < block, number, Int32(0))


@cute.jit
def find_bin(shared: TopkSharedMemory, rank: Any, form: cutlass.Constexpr) -> tuple[Any, ...]:
    """Return the bin of the score of a rank, its rank there, and the bin's count: all, and before.

    Ranks are counted from the largest; at least as many are counted. The last number is of the
    cluster's blocks before this one. Blocks tell each other what a warp's bins count, and read each
    other's bins of one warp. A thread block alone clears its bins.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // facts.WARP, thread % facts.WARP
    # Thread t has the t-th run of bins from the top.
    vectors = facts.BINS // facts.VECTOR // form.threads
    first = facts.BINS // facts.VECTOR - (thread + 1) * vectors
    each, block = facts.VECTOR * vectors, block_of(form)
    cute.arch.sync_threads()
    if thread == 0:
        shared.found[LISTS] = 0
    rCounts = cute.make_rmem_tensor(cute.make_layout((facts.VECTOR, vectors)), Int32)
    for i in cutlass.range_constexpr(vectors):
        cute.autovec_copy(in_fours(shared.bins)[None, first + i], rCounts[None, i])
    counts = [Int32(rCounts[j, i]) for i in range(vectors) for j in range(facts.VECTOR)]
    own, ahead = Int32(0), [Int32(0)] * each
    for number in counts:
        own = own + number
    total = summed(own)
    if cutlass.const_expr(form.cluster == 1):
        rCounts.fill(0)
        for i in cutlass.range_constexpr(vectors):
            cute.autovec_copy(rCounts[None, i], in_fours(shared.bins)[None, first + i])
        if lane == 0:
            shared.warps[warp, OF_BINS] = total
    elif lane < form.cluster:
        put_remote(address_in(shared.ranges, block * form.warps + warp, lane), Uint32(total))
    together(form)
    of_lane = Int32(0)  # what the bins of the warp of a lane's number count
    if lane < form.warps:
        if cutlass.const_expr(form.cluster == 1):
            of_lane = Int32(shared.warps[lane, OF_BINS])
        else:
            for other in cutlass.range_constexpr(form.cluster):
                of_lane = of_lane + Int32(shared.ranges[other * form.warps + lane])
    before = summed(ops.select(lane < warp, of_lane, Int32(0)))
    of_warp = Int32(cute.arch.shuffle_sync(of_lane, warp))
    if (before < rank) & (rank <= before + of_warp):
        if cutlass.const_expr(form.cluster > 1):
            counts, at_once = [Int32(0)] * each, min(form.cluster, READ_AT_ONCE)
            for group in cutlass.range(form.cluster // at_once, unroll=1):
                for member in cutlass.range_constexpr(at_once):
                    other = group * at_once + member
                    address = address_in(shared.bins, facts.VECTOR * first, other)
                    found = [
                        n for i in range(vectors) for n in remote_four(address + Uint32(16 * i))
                    ]
                    counts = [old + new for old, new in zip(counts, found, strict=True)]
                    ahead = [
                        old + if_before(other, block, new)
                        for old, new in zip(ahead, found, strict=True)
                    ]
            own = Int32(0)
            for number in counts:
                own = own + number
        before = before + scanned(own) - own
        for i in cutlass.range_constexpr(each - 1, -1, -1):
            if (before < rank) & (rank <= before + counts[i]):
                shared.found[BIN] = facts.VECTOR * first + i
                shared.found[RANK] = rank - before
                shared.found[COUNT] = counts[i]
                shared.found[AHEAD] = ahead[i]
            before = before + counts[i]
    cute.arch.sync_threads()
    return tuple(Int32(shared.found[slot]) for slot in (BIN, RANK, COUNT, AHEAD))


@cute.jit
def list_bin(
    shared: TopkSharedMemory,
    rScores: Any,
    words: list[Any],
    found: Any,
    form: cutlass.Constexpr,
    held: cutlass.Constexpr,
) -> Any:
    """List a thread block's scores of a bin, in any order; return how many.

    Of many scores the digits are made again rather than held in registers meanwhile, by a zero that
    the compiler does not know.
    """
    kept = form.blocks * form.threads * held <= facts.KEPT
    zero = ops.number_of(Uint32(found) & 0x8000_0000)
    marks = Uint32(0)
    for i in cutlass.range_constexpr(held // 2):
        word = words[i] if kept else word_of(rScores, i, zero)
        for j in cutlass.range_constexpr(2):
            inside = digit_of(word, j) == found
            marks = marks | ops.select(inside, Uint32(1 << (2 * i + j)), Uint32(0))
    if marks != Uint32(0):
        own = Int32(cute.arch.popc(marks))
        at = Int32(cute.arch.atomic_add(shared.found.iterator + LISTS, own))
        for j in cutlass.range_constexpr(held):
            if is_marked(marks, j):
                shared.scores[at] = Float32(rScores[j])
            at = at + ops.select(is_marked(marks, j), Int32(1), Int32(0))
    cute.arch.sync_threads()
    return Int32(shared.found[LISTS])


@cute.jit
def share_listed(
    shared: TopkSharedMemory, numbers: tuple[Any, Any, Any], form: cutlass.Constexpr
) -> None:
    """Give each of the cluster's blocks the keys of all listed scores.

    The numbers are how many this block listed, how many those before it did, and all of them.
    """
    thread, _, _ = cute.arch.thread_idx()
    own, ahead, count = numbers
    if thread < own:
        key = key_of(Float32(shared.scores[thread]))
        if cutlass.const_expr(form.cluster == 1):
            shared.keys[thread] = key
        else:
            for other in cutlass.range_constexpr(form.cluster):
                put_remote(address_in(shared.keys, ahead + thread, Int32(other)), key)
    if thread < facts.VECTOR:
        shared.keys[count + thread] = Uint32(0)  # a vector of four is read as a whole
    together(form)


@cute.jit
def among_listed(shared: TopkSharedMemory, rank: Any, count: Any) -> tuple[Any, Any]:
    """Return the listed key of a rank and its rank among its equals: compare all with all."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        own = Uint32(shared.keys[thread])
        above, through = Int32(0), Int32(0)
        rKeys = cute.make_rmem_tensor(facts.VECTOR, Uint32)
        for vector in cutlass.range((count + 3) // facts.VECTOR, unroll=2):
            cute.autovec_copy(in_fours(shared.keys)[None, vector], rKeys)
            for j in cutlass.range_constexpr(facts.VECTOR):
                other = Uint32(rKeys[j])
                above = above + ops.select(other > own, Int32(1), Int32(0))
                through = through + ops.select(other >= own, Int32(1), Int32(0))
        if (above < rank) & (rank <= through):
            # Equal keys write the same.
            shared.found[KEY] = Int32(own)
            shared.found[EQUALS] = rank - above
    cute.arch.sync_threads()
    return Uint32(Int32(shared.found[KEY])), Int32(shared.found[EQUALS])


def bin_of(key: Any, level: int) -> Any:
    """Return the bin of a key at a level."""
    shift, bins = facts.LEVELS[level]
    return Int32(ops.shift_right(key, shift) & (bins - 1))


@cute.jit
def among_counted(
    shared: TopkSharedMemory, rank: Any, own: Any, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return the listed key of a rank and its rank among its equals: count digits of keys."""
    thread, _, _ = cute.arch.thread_idx()
    prefix = Uint32(0)
    for level in cutlass.range_constexpr(len(facts.LEVELS)):
        if cutlass.const_expr(form.cluster > 1):
            together(form)  # all have read the bins of the search before
            clear_bins(shared, form)
        above = facts.LEVELS[level - 1][0] if level else 0
        for at in cutlass.range(thread, own, form.threads, unroll=1):
            key = key_of(Float32(shared.scores[at]))
            if cutlass.const_expr(level == 0):  # noqa: SIM114  one is known in tracing
                count_in(shared, bin_of(key, level))
            elif ops.shift_right(key, above) == prefix:
                count_in(shared, bin_of(key, level))
        digit, rank, _, _ = find_bin(shared, rank, form)
        wider = (above or 32) - facts.LEVELS[level][0]
        prefix = ops.shift_left(prefix, wider) | Uint32(digit)
    return prefix, rank


@cute.jit
def last_chosen(
    shared: TopkSharedMemory,
    rScores: Any,
    rank: Any,
    form: cutlass.Constexpr,
    held: cutlass.Constexpr,
) -> tuple[Any, Any]:
    """Return the key of the score of a rank, and how many of its equals are chosen.

    -inf is counted as well; where it has the rank, none of its equals is chosen.
    """
    words = digits_counted(shared, rScores, held)
    found, inner, count, ahead = find_bin(shared, rank, form)
    own = list_bin(shared, rScores, words, found, form, held)
    key, equals = Uint32(facts.NEVER), Int32(0)
    if count <= facts.LISTED:
        share_listed(shared, (own, ahead, count), form)
        key, equals = among_listed(shared, inner, count)
    else:
        key, equals = among_counted(shared, inner, own, form)
    if key <= Uint32(facts.NEVER):
        key, equals = Uint32(facts.NEVER), Int32(0)
    return key, equals


def halves_of(pair: Any) -> tuple[Any, Any]:
    """Return the lower and the upper half of a word."""
    return Int32(Uint32(pair) & 0xFFFF), Int32(ops.shift_right(Uint32(pair), 16))


@cute.jit
def chosen_of(
    shared: TopkSharedMemory,
    rScores: Any,
    threshold: tuple[Any, Any],
    form: cutlass.Constexpr,
    held: cutlass.Constexpr,
) -> tuple[Any, Any, Any]:
    """Return marks of a thread's chosen scores, the place of each vector's first, and the total."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // facts.WARP, thread % facts.WARP
    key, wanted = threshold
    all_nan, limit = key == Uint32(NAN_KEY), limit_of(key)
    above, equal = Uint32(0), Uint32(0)
    for j in cutlass.range_constexpr(held):
        above = above | bit_above(Float32(rScores[j]), limit, j)
        equal = equal | bit_equal(Float32(rScores[j]), limit, j)
    equal = ops.select(all_nan, above, equal)
    above = ops.select(all_nan, Uint32(0), above)
    own = summed(Int32(cute.arch.popc(above)) + Int32(cute.arch.popc(equal)) * 65_536)
    if lane == 0:
        shared.warps[warp, OF_CHOSEN] = own
    lanes, of_warp = counts_of([above, equal], held)
    cute.arch.sync_threads()
    before, total = before_warp(shared, OF_CHOSEN, form)
    above_before, equal_before = halves_of(before)
    all_above, all_equal = halves_of(total)
    if cutlass.const_expr(form.cluster > 1):
        block = block_of(form)
        if thread < form.cluster:
            put_remote(address_in(shared.totals, block, thread), Uint32(total))
        together(form)
        all_above, all_equal = Int32(0), Int32(0)
        for other in cutlass.range_constexpr(form.cluster):
            of_above, of_equal = halves_of(shared.totals[other])
            above_before = above_before + if_before(Int32(other), block, of_above)
            equal_before = equal_before + if_before(Int32(other), block, of_equal)
            all_above, all_equal = all_above + of_above, all_equal + of_equal
    vectors, marks = held // facts.VECTOR, above
    places, rooms = [], []
    for i in cutlass.range_constexpr(vectors):
        of_above = above_before + byte_of(lanes, i)
        of_equal = equal_before + byte_of(lanes, vectors + i)
        places.append(of_above + cutlass.min(of_equal, wanted))
        rooms.append(wanted - of_equal)
        above_before = above_before + byte_of(of_warp, i)
        equal_before = equal_before + byte_of(of_warp, vectors + i)
    if equal != Uint32(0):
        for i in cutlass.range_constexpr(vectors):
            marks = marks | taken_of(equal, i, rooms[i])
    return marks, tuple(places), all_above + cutlass.min(all_equal, wanted)


def first_of(marks: Any) -> Any:
    """Return only the lowest set bit."""
    return marks & (Uint32(0) - marks)


def taken_of(equal: Any, vector: int, room: Any) -> Any:
    """Return the marks of a vector's first equals for which there is room."""
    left = ops.shift_right(equal, facts.VECTOR * vector) & 15
    taken = Uint32(0)
    for place in range(facts.VECTOR):
        lowest = first_of(left)
        taken = taken | ops.select(room > place, lowest, Uint32(0))
        left = left ^ lowest
    return taken << (facts.VECTOR * vector)


@cute.jit
def put_marked(out: Any, rValues: Any, marks: Any, places: tuple[Any, ...]) -> None:
    """Write the marked ones of a thread's values; places are those of each vector's first."""
    for i in cutlass.range_constexpr(len(places)):
        at = places[i]
        for j in cutlass.range_constexpr(facts.VECTOR * i, facts.VECTOR * i + facts.VECTOR):
            if is_marked(marks, j):
                out[at] = rValues[j]
            at = at + ops.select(is_marked(marks, j), Int32(1), Int32(0))


@cute.jit
def put_padding(out: Any, chosen: Any, count: Any, form: cutlass.Constexpr) -> None:
    """Write -1 behind the chosen entries; the cluster's blocks share that."""
    thread, _, _ = cute.arch.thread_idx()
    first = chosen + block_of(form) * form.threads + thread
    for at in cutlass.range(first, count, form.threads * form.cluster, unroll=1):
        out[at] = Int32(facts.NONE)


def row_of(tensors: TopkTensors, of_row: Any) -> Any:
    """Return the chosen entries of a row."""
    return cute.make_tensor(tensors.out.iterator + of_row, cute.make_layout(facts.MOST_COUNT))


# ---- rows that registers hold --------------------------------------------------------------------


@cute.jit
def load_scores(
    tensors: TopkTensors,
    rScores: Any,
    place: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
    vectors: cutlass.Constexpr,
) -> None:
    """Read vectors of all lanes from (start of the row, first entry, limit) on; -inf beyond it."""
    start, first, limit = place
    step = facts.VECTOR * facts.WARP
    rVectors = cute.make_tensor(rScores.iterator, cute.make_layout((facts.VECTOR, vectors)))
    rScores.fill(-INFINITY)
    vector = start // facts.VECTOR + Int64(first // facts.VECTOR)
    for i in cutlass.range_constexpr(vectors):
        entry = first + i * step
        if cutlass.const_expr(form.by_four):
            if entry < limit:
                at = vector + i * step // facts.VECTOR
                cute.autovec_copy(tensors.scores[None, at], rVectors[None, i])
        else:
            for j in cutlass.range_constexpr(facts.VECTOR):
                if entry + j < limit:
                    rVectors[j, i] = tensors.scores[0, start + Int64(entry + j)]
    if cutlass.const_expr(form.by_four):  # noqa: SIM102  one is known in tracing
        # One branch, which depends on no score: else the first mask waits before the last load.
        if first + (vectors - 1) * step + facts.VECTOR > limit:
            for i in cutlass.range_constexpr(vectors):
                for j in cutlass.range_constexpr(facts.VECTOR):
                    score = Float32(rVectors[j, i])
                    seen = first + i * step + j < limit
                    rVectors[j, i] = ops.select(seen, score, Float32(-INFINITY))


@cute.jit
def choose_held(
    shared: TopkSharedMemory,
    tensors: TopkTensors,
    row: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Choose in a row that the registers of a thread block hold, or those of a cluster."""
    start, of_row, visible, count = row
    each = form.each
    if cutlass.const_expr(form.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
    own = (visible + form.cluster - 1) // form.cluster
    own = (own + facts.WARP - 1) // facts.WARP * facts.WARP
    begin = block_of(form) * own
    first = begin + first_of_thread(each)
    rScores = cute.make_rmem_tensor(each, Float32)
    end = cutlass.min(begin + own, visible)
    load_scores(tensors, rScores, (start, first, end), form, each // facts.VECTOR)
    if cutlass.const_expr(form.cluster > 1):
        cute.arch.cluster_wait()  # all have begun: their shared memory may be written
    key, equals = Uint32(facts.NEVER), Int32(0)
    if visible > count:
        key, equals = last_chosen(shared, rScores, count, form, each)
    marks, places, chosen = chosen_of(shared, rScores, (key, equals), form, each)
    out = row_of(tensors, of_row)
    for i in cutlass.range_constexpr(each // facts.VECTOR):
        at = places[i]
        for j in cutlass.range_constexpr(facts.VECTOR):
            marked = is_marked(marks, facts.VECTOR * i + j)
            if marked:
                out[at] = first + (facts.VECTOR * facts.WARP * i + j)
            at = at + ops.select(marked, Int32(1), Int32(0))
    put_padding(out, chosen, count, form)


# ---- rows that one thread block reads chunk by chunk ---------------------------------------------


@cute.jit
def sampled_limit(
    shared: TopkSharedMemory,
    tensors: TopkTensors,
    row: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> Any:
    """Return a number that somewhat more scores than are chosen probably exceed.

    A pair of vectors in each of many equal parts of the row is looked at, where a hash of the part
    says; -inf where that has too few.
    """
    thread, _, _ = cute.arch.thread_idx()
    start, visible, count = row
    part = thread // 2
    pairs = visible // (2 * facts.VECTOR)
    begin = pairs * part // (form.threads // 2)
    length = pairs * (part + 1) // (form.threads // 2) - begin
    random = ops.shift_right(Uint32(part) * Uint32(HASH), 16)
    pair = begin + Int32(ops.shift_right(random * Uint32(length), 16))
    rScores = cute.make_rmem_tensor(facts.VECTOR, Float32)
    first = (2 * pair + thread % 2) * facts.VECTOR
    load_scores(tensors, rScores, (start, first, visible), form, 1)
    digits_counted(shared, rScores, facts.VECTOR)
    expected = count * (form.threads * facts.VECTOR) // visible
    found, _, _, _ = find_bin(shared, expected + expected // 2 + 16, form)
    return number_below(found)


def misled(limit: Any, filled: Any, count: Any) -> Any:
    """Return whether too few scores exceed a limit, and others may be chosen as well."""
    return (limit > Float32(-INFINITY)) & (filled < count)


def number_below(found: Any) -> Any:
    """Return an FP16 number below all scores of a bin, +0's as well; -inf for bin -1."""
    least, most = 0x03FF, 0xFC00  # of -inf and inf
    code = cutlass.max(cutlass.min(found * 16 - 2, Int32(most)), Int32(least))
    half = ops.select(code >= 0x8000, code & 0x7FFF, ~code & 0xFFFF)
    return emit("{ .reg .b16 h; cvt.u16.u32 h, {$r0}; cvt.f32.f16 {$w0}, h; }", Float32,
                Uint32(half))  # fmt: skip


@cute.jit
def passing(
    shared: TopkSharedMemory, rScores: Any, limit: Any, slot: Any, form: cutlass.Constexpr
) -> tuple[Any, Any, Any]:
    """Return marks of scores above a limit, the place of each vector's first, and how many."""
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // facts.WARP, thread % facts.WARP
    marks = Uint32(0)
    for j in cutlass.range_constexpr(form.each):
        marks = marks | bit_above(Float32(rScores[j]), limit, j)
    lanes, of_warp = counts_of([marks], form.each)
    vectors = form.each // facts.VECTOR
    if lane == 0:
        own = Int32(0)
        for i in cutlass.range_constexpr(vectors):
            own = own + byte_of(of_warp, i)
        shared.warps[warp, slot] = own
    cute.arch.sync_threads()
    at, total = before_warp(shared, slot, form)
    places = []
    for i in cutlass.range_constexpr(vectors):
        places.append(at + byte_of(lanes, i))
        at = at + byte_of(of_warp, i)
    return marks, tuple(places), total


@cute.jit
def load_held(shared: TopkSharedMemory, rScores: Any, filled: Any, form: cutlass.Constexpr) -> Any:
    """Load a thread's candidates; return the place of the first."""
    first, step = first_of_thread(form.kept), facts.VECTOR * facts.WARP
    vectors = cute.make_layout((facts.VECTOR, form.kept // facts.VECTOR))
    rVectors = cute.make_tensor(rScores.iterator, vectors)
    for i in cutlass.range_constexpr(form.kept // facts.VECTOR):
        at = (first + i * step) // facts.VECTOR
        cute.autovec_copy(in_fours(shared.scores)[None, at], rVectors[None, i])
        for j in cutlass.range_constexpr(facts.VECTOR):
            there, score = first + i * step + j < filled, Float32(rVectors[j, i])
            rVectors[j, i] = ops.select(there, score, Float32(-INFINITY))
    return first


@cute.jit
def compacted(
    shared: TopkSharedMemory, filled: Any, count: Any, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Keep the chosen candidates, in their order; return the limit for others, and how many."""
    rScores = cute.make_rmem_tensor(form.kept, Float32)
    rEntries = cute.make_rmem_tensor(form.kept, Int32)
    cute.arch.sync_threads()
    first = load_held(shared, rScores, filled, form)
    key, equals = last_chosen(shared, rScores, count, form, form.kept)
    marks, places, chosen = chosen_of(shared, rScores, (key, equals), form, form.kept)
    put_marked(shared.scores, rScores, marks, places)
    for j in cutlass.range_constexpr(form.kept):
        entry = first + (j // facts.VECTOR * facts.VECTOR * facts.WARP + j % facts.VECTOR)
        rEntries[j] = shared.entries[entry]
    cute.arch.sync_threads()
    put_marked(shared.entries, rEntries, marks, places)
    cute.arch.sync_threads()  # no load is moved before this, where registers are full
    return limit_after(key), chosen


def limit_after(key: Any) -> Any:
    """Return what later candidates have to exceed: those equal to the last one have higher entries.

    NaN exceeds any limit, and is compared again.
    """
    return limit_of(key)


@cute.jit
def streamed(
    shared: TopkSharedMemory,
    tensors: TopkTensors,
    row: tuple[Any, Any, Any],
    limit: Any,
    form: cutlass.Constexpr,
) -> Any:
    """Collect candidates of a whole row, chunk by chunk; return how many.

    A candidate exceeds the limit. Where they would be more than there is room for, the chosen ones
    among them stay, and the limit becomes the least of them. A chunk is read while the one before
    is looked at.
    """
    start, visible, count = row
    vectors, chunk = form.each // facts.VECTOR, form.segment
    own, filled = first_of_thread(form.each), Int32(0)
    rScores = cute.make_rmem_tensor(form.each, Float32)
    rNext = cute.make_rmem_tensor(form.each, Float32)
    load_scores(tensors, rScores, (start, own, visible), form, vectors)
    for number in cutlass.range((visible + chunk - 1) // chunk, unroll=1):
        first = number * chunk + own
        load_scores(tensors, rNext, (start, first + chunk, visible), form, vectors)
        slot = OF_CHUNK + number % 2
        marks, places, total = passing(shared, rScores, limit, slot, form)
        if filled + total > form.capacity:
            limit, filled = compacted(shared, filled, count, form)
            # Again, rather than in registers meanwhile.
            load_scores(tensors, rScores, (start, first, visible), form, vectors)
            load_scores(tensors, rNext, (start, first + chunk, visible), form, vectors)
            marks, places, total = passing(shared, rScores, limit, slot, form)
        for i in cutlass.range_constexpr(vectors):
            at = filled + places[i]
            for j in cutlass.range_constexpr(facts.VECTOR):
                marked = is_marked(marks, facts.VECTOR * i + j)
                if marked:
                    shared.scores[at] = Float32(rScores[facts.VECTOR * i + j])
                    shared.entries[at] = first + (facts.VECTOR * facts.WARP * i + j)
                at = at + ops.select(marked, Int32(1), Int32(0))
        filled = filled + total
        rScores.store(rNext.load())
    cute.arch.sync_threads()
    return filled


@cute.jit
def choose_streamed(
    shared: TopkSharedMemory,
    tensors: TopkTensors,
    row: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Choose in a row that one thread block reads once, or twice where the sample misled it."""
    start, of_row, visible, count = row
    read = (start, visible, count)
    limit, filled = Float32(-INFINITY), Int32(0)
    if visible > form.capacity:
        limit = sampled_limit(shared, tensors, read, form)
    sampled = limit
    for attempt in cutlass.range(2, unroll=1):
        if (attempt == 0) | misled(sampled, filled, count):
            filled = streamed(shared, tensors, read, limit, form)
        limit = Float32(-INFINITY)
    rScores = cute.make_rmem_tensor(form.kept, Float32)
    first = load_held(shared, rScores, filled, form)
    key, equals = Uint32(facts.NEVER), Int32(0)
    if filled > count:
        key, equals = last_chosen(shared, rScores, count, form, form.kept)
    marks, places, chosen = chosen_of(shared, rScores, (key, equals), form, form.kept)
    out = row_of(tensors, of_row)
    for i in cutlass.range_constexpr(form.kept // facts.VECTOR):
        at = places[i]
        for j in cutlass.range_constexpr(facts.VECTOR):
            marked = is_marked(marks, facts.VECTOR * i + j)
            if marked:
                out[at] = Int32(shared.entries[first + (facts.VECTOR * facts.WARP * i + j)])
            at = at + ops.select(marked, Int32(1), Int32(0))
    put_padding(out, chosen, count, form)


@cute.kernel
def topk_kernel(tensors: TopkTensors, extents: tuple[Int32, ...], form: cutlass.Constexpr) -> None:
    """Choose for one row, or for this thread block's segment of it."""
    index, _, _ = cute.arch.block_idx()
    shared = shared_of(form)
    clear_bins(shared, form)
    follow()
    entries, count, ratio = extents
    row = index // form.cluster
    visible = Int32(entries)
    if cutlass.const_expr(form.limited):
        seen = visible_of(Int64(tensors.positions[row]), ratio)
        seen = ops.select(seen > 0, seen, Int64(0))
        visible = Int32(ops.select(seen < Int64(entries), seen, Int64(entries)))
    given = (Int64(row) * Int64(entries), Int64(row) * Int64(count), visible, count)
    if cutlass.const_expr(form.held):
        choose_held(shared, tensors, given, form)
    else:
        choose_streamed(shared, tensors, given, form)


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
        min_blocks_per_mp=form.blocks,
        preferred_smem_carveout=DRIVERS_CHOICE,
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
