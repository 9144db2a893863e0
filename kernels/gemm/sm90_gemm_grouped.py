"""Grouped BF16 GEMM on Hopper (sm_90a), with inverse RoPE on A inside the product or float32 D.

D[t, g] = A[t, g] B[g]^T with the shapes of grouped_problem.
Roles and ring are those of sm90_gemm_bf16: warpgroup 0 loads by TMA, one consumer warpgroup per 64
  rows multiplies and stores. A's boxes begin at the K step of the tile's group.
With `turned`, A is attention's output. A stage is 64 of K, and the last stage of a head holds
  exactly the 64 values that inverse RoPE rotates. After that stage has arrived, each consumer
  warpgroup rotates its own 64 rows in place (two threads a row, cosines and sines read once per
  tile), fences to the async proxy, meets at its named barrier, and issues the wgmma. Rotated values
  are rounded to BF16 as simt_inverse_rope does, so D equals inverse RoPE followed by one GEMM per
  group bit for bit, and attention's output is read once. A position outside the table gives NaN
  rows.
Results leave as BF16 by TMA or as float32 straight from registers.

The entry point allocates only D and never synchronises, so it can be captured in a CUDA graph.
Shape letters as in grouped_problem.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.kernels.gemm import grouped_problem as grouped
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm.grouped_problem import GROUPED_STEP, GroupedForm, GroupedProblem
from degarble.kernels.gemm.problem import TMA_ALIGNMENT
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    load_turn,
    numbers_of,
    registers_of,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

WORDS = 4  # of 16 bytes
ROW_BYTES = 2 * GROUPED_STEP  # of a stage of A
CHUNKS_OF_THREAD = 4  # two threads have the eight chunks of a row


class RopeRows(NamedTuple):
    """RoPE table in vectors of four, positions, number of known positions, number of tokens."""

    table: Any
    positions: Any
    known: Any
    tokens: Any


class HeadRows(NamedTuple):
    """A warpgroup's rows of A's stages: shared address, a thread's row and first chunk, angles."""

    base: Any
    row: Any
    first: Any
    turns: Any


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    outlets: tuple[Any, Any],
    turning: RopeRows,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup: the first loads, the others rotate, multiply and store."""
    tactic = form.gemm.tactic
    rows_of_d, columns, steps, tiles = extents
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    elements = BFloat16, BFloat16
    sA, sB, sD, ring = mainloop.stages_of(memory, elements, layouts(form), form.gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((rows_of_d, columns), tactic)
    producing, consuming = facts.roles(form.gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(producing.registers)
        if cute.arch.warp_idx() == 0:
            boxes = ((tactic.rows, tactic.inner), (tactic.columns, tactic.inner))
            feedings = mainloop.feedings_of(feeds, (sA, sB), boxes, tactic)
            load(ring, feedings, walk, (steps, tiles), 1)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mine = group - 1
        mma = mainloop.mma_of(BFloat16, tactic.columns)
        fragments = mainloop.fragments_of(mma, sA, sB, mine, tactic.columns)
        outlet = None
        if cutlass.const_expr(form.out == "bf16"):
            outlet = mainloop.outlet_of_warpgroup(outlets[0], sD, mma, mine)
        heads = heads_of(sA, mine)
        state, stored = mainloop.consumer_state(ring.num_stages), Int32(0)
        for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
            tile = mainloop.tile_at(walk, number)
            if cutlass.const_expr(form.turned):
                read_turns(turning, heads, tile[0] * tactic.rows + mine * facts.PIECE_ROWS)
            state = multiply(ring, state, fragments, (heads, steps, mine), form)
            if cutlass.const_expr(form.out == "bf16"):
                place = facts.piece_of(tile[0], tile[1], mine, tactic)
                stored = mainloop.store_tile(outlet, fragments[1], place, stored)
            else:
                place = (tile[0] * tactic.rows + mine * facts.PIECE_ROWS, tile[1] * tactic.columns)
                store_floats(outlets[1], fragments[1], place, (rows_of_d, columns))
        if cutlass.const_expr(form.out == "bf16"):
            mainloop.drain(outlet)


@cute.jit
def load(
    ring: Any, feedings: Any, walk: Any, of_group: tuple[Any, Any], boxes: cutlass.Constexpr
) -> None:
    """Load all stages of all tiles, `boxes` of A each; `of_group`: steps and tiles of a group."""
    steps, tiles = of_group
    state = mainloop.producer_state(ring.num_stages)
    for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
        tile = mainloop.tile_at(walk, number)
        # First K step of the tile's group in A.
        first = tile[1] // tiles * steps
        state = produce_tile(ring, state, feedings, (*tile, first, steps), boxes)
    ring.producer_tail(state)


@cute.jit
def produce_tile(
    ring: Any,
    state: Any,
    feedings: tuple[Any, Any],
    place: tuple[Any, Any, Any, Any],
    boxes: cutlass.Constexpr,
) -> Any:
    """Load all K steps of one tile; A's begin at the tile's group."""
    row, column, first, count = place
    for step in cutlass.range(count, unroll=1):
        ring.producer_acquire(state)
        barrier = ring.producer_get_barrier(state)
        for box in cutlass.range_constexpr(boxes):
            at, slot = boxes * (first + step) + box, boxes * state.index + box
            mainloop.issue(feedings[0], (row, at), slot, barrier)
        mainloop.issue(feedings[1], (column, step), state.index, barrier)
        ring.producer_commit(state)
        state.advance()
    return state


@cute.jit
def multiply(
    ring: Any,
    state: Any,
    fragments: tuple[Any, Any, Any, Any],
    told: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> Any:
    """Sum up one tile, rotating the last stage of each head first. `told`: heads, steps, warpgroup.

    Trap: a branch between two wgmma would serialise them, so the stages of a head are unrolled.
    """
    mma, sums, a, b = fragments
    heads, steps, mine = told
    of_head = form.steps_of_head if form.turned else 1
    before = state.clone()
    ring.consumer_wait(state)
    if cutlass.const_expr(form.turned and of_head == 1):
        turn_stage(heads, state.index, mine, form)
    mainloop.multiply_stage(mma, sums, *mainloop.stage_of(a, b, state.index), begins=True)
    state.advance()
    for number in cutlass.range_constexpr(1, of_head):
        more = (heads, mine, number == of_head - 1)
        state, before = add_stage(ring, (state, before), fragments, more, form)
    for _ in cutlass.range(1, steps // of_head, unroll=1):
        for number in cutlass.range_constexpr(of_head):
            again = (heads, mine, form.turned > 0 and number == of_head - 1)
            state, before = add_stage(ring, (state, before), fragments, again, form)
    warpgroup.wait_group(0)
    ring.consumer_release(before)
    return state


def add_stage(
    ring: Any,
    states: tuple[Any, Any],
    fragments: tuple[Any, Any, Any, Any],
    numbers: tuple[Any, Any, bool],
    form: GroupedForm,
) -> tuple[Any, Any]:
    """Add one stage's products; release the stage before once this one's wgmma are under way."""
    mma, sums, a, b = fragments
    heads, mine, turned = numbers
    state, before = states
    ring.consumer_wait(state)
    if turned:
        turn_stage(heads, state.index, mine, form)
    mainloop.multiply_stage(mma, sums, *mainloop.stage_of(a, b, state.index), begins=False)
    state.advance()
    warpgroup.wait_group(1)
    ring.consumer_release(before)
    before.advance()
    return state, before


def heads_of(sA: Any, mine: Any) -> HeadRows:
    """Return a thread's half of a row among the warpgroup's 64 rows."""
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    # Two threads share a row of 128 bytes: four 16-byte chunks each.
    row = Int32(mine) * facts.PIECE_ROWS + within // 2
    turns = registers_of(WORDS, 2 * CHUNKS_OF_THREAD)
    return HeadRows(Int32(sA.iterator.toint()), row, within % 2 * CHUNKS_OF_THREAD, turns)


@cute.jit
def read_turns(turning: RopeRows, heads: HeadRows, first: Any) -> None:
    """Read cosines and sines of a thread's chunks for its row's token; `first` is the first row."""
    # Stays NaN for tokens and positions that do not exist.
    heads.turns.fill(NAN)
    token = first + heads.row % facts.PIECE_ROWS
    if token < turning.tokens:
        position = Int64(turning.positions[token])
        if (position >= 0) & (position < Int64(turning.known)):
            for chunk in cutlass.range_constexpr(CHUNKS_OF_THREAD):
                pair = cute.make_rmem_tensor(cute.make_layout((WORDS, 2)), Uint32)
                load_turn(turning.table, pair, (position, heads.first + chunk))
                for word in cutlass.range_constexpr(WORDS):
                    heads.turns[word, 2 * chunk] = pair[word, 0]
                    heads.turns[word, 2 * chunk + 1] = pair[word, 1]


@cute.jit
def turn_stage(heads: HeadRows, stage: Any, mine: Any, form: cutlass.Constexpr) -> None:
    """Apply inverse RoPE in place to a warpgroup's rows of a stage."""
    for chunk in cutlass.range_constexpr(CHUNKS_OF_THREAD):
        # Rows of 128 bytes, whose 16-byte chunks are exchanged by the row's number modulo 8.
        at = (heads.first + chunk) ^ (heads.row % 8)
        row = stage * form.gemm.tactic.rows + heads.row
        address = heads.base + row * ROW_BYTES + at * 16
        view = vectors(
            cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=16), WORDS
        )
        held = registers_of(WORDS, 1)
        cute.autovec_copy(view[None, 0], held[None, 0])
        turns = registers_of(WORDS, 2)
        for word in cutlass.range_constexpr(WORDS):
            turns[word, 0] = heads.turns[word, 2 * chunk]
            turns[word, 1] = heads.turns[word, 2 * chunk + 1]
        store(view, 0, turned_words(numbers_of(words_at(held, 0)), turns, back=True))
    cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through another proxy
    barrier = mainloop.FIRST_BARRIER + mine
    cute.arch.barrier(barrier_id=barrier, number_of_threads=facts.WARPGROUP)


@cute.jit
def store_floats(pairs: Any, sums: Any, place: tuple[Any, Any], extents: tuple[Any, Any]) -> None:
    """Store a warpgroup's 64 rows in float32; a lane has two columns of each eight in two rows."""
    row, column = place
    rows_of_d, columns = extents
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    # wgmma accumulator: a warp has 16 rows, a thread rows g and g + 8 of them.
    first = row + within // facts.WARP * 16 + within % facts.WARP // 4
    for part in cutlass.range_constexpr(cute.size(sums) // 4):
        at = column + part * 8 + within % 4 * 2
        for half in cutlass.range_constexpr(2):
            own = first + half * 8
            if (own < rows_of_d) & (at < columns):
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = sums[part * 4 + half * 2], sums[part * 4 + half * 2 + 1]
                place_of_pair = (Int64(own) * Int64(columns) + Int64(at)) // 2
                cute.autovec_copy(pair, pairs[None, place_of_pair])


def layouts(form: GroupedForm) -> tuple[Any, Any]:
    """Return the layouts of A's and B's stages."""
    tactic, stages = form.gemm.tactic, facts.footprint(form.gemm).stages
    return (
        mainloop.staged_layout(
            BFloat16, tactic.rows, tactic.inner, stages, mainloop.Swizzle.K_SW128
        ),
        mainloop.staged_layout(
            BFloat16, tactic.columns, tactic.inner, stages, mainloop.Swizzle.K_SW128
        ),
    )


@cute.jit
def launch_grouped(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on the extents T, G N, K, G K, tiles of a group, clusters, positions."""
    tokens, columns, inner, wide, tiles, clusters, known = extents
    tactic = form.gemm.tactic
    inner, wide = (cute.assume(extent, divby=GROUPED_STEP) for extent in (inner, wide))
    columns = cute.assume(columns, divby=facts.COLUMNS_MULTIPLE)
    a, b, d, table, positions = pointers
    mA, mB = (
        cute.make_tensor(pointer, cute.make_layout((count, width), stride=(Int64(width), 1)))
        for pointer, count, width in ((a, tokens, wide), (b, columns, inner))
    )
    layout_a, layout_b = layouts(form)
    feeds = (
        mainloop.feed_of(mA, layout_a, (tactic.rows, tactic.inner), tactic.cluster_columns),
        mainloop.feed_of(mB, layout_b, (tactic.columns, tactic.inner), tactic.cluster_rows),
    )
    outlets: tuple[Any, Any] = (None, None)
    if cutlass.const_expr(form.out == "bf16"):
        mD = cute.make_tensor(d, cute.make_layout((tokens, columns), stride=(Int64(columns), 1)))
        # TMA atom of BF16 results, or pairs of float32.
        outlets = (mainloop.store_of(mD), None)
    else:
        outlets = (None, vectors(d, 2))
    turning = RopeRows(vectors(table, WORDS), vectors(positions, 0), known, tokens)
    numbers = (tokens, columns, inner // GROUPED_STEP, tiles)
    grouped_kernel(feeds, outlets, turning, numbers, form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[facts.threads(form.gemm), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=1,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[GroupedProblem, GroupedForm]) -> tuple[Any, ...]:
    problem, form = of.problem, of.form
    *_, clusters = facts.grid(problem.gemm, form.gemm.tactic, of.processors)
    wide = (problem.groups * problem.columns, problem.inner, problem.groups * problem.inner)
    tiles = grouped.tiles_of_grouped(problem, form)
    return ((problem.tokens, *wide, tiles, clusters, problem.positions),)


def _when(test: Callable[[GroupedProblem], bool]) -> Presence[GroupedProblem]:
    return Presence(test, lambda p: f"It says turned={p.turned}.")


_Operand = Operand[GroupedProblem]
_ALWAYS, _TURNED = _when(lambda _: True), _when(lambda of: bool(of.turned))
_MATRIX = Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT)
_OUT = {"bf16": _MATRIX, "fp32": Storage(Float32, torch.float32, TMA_ALIGNMENT)}
_TURNS, _PLACES = Storage(Uint32, torch.float32, 16), Storage(Int64, torch.int64, 8)
KERNEL = Kernel[GroupedProblem, GroupedForm](
    entry=launch_grouped,
    operands=(
        _Operand("a", _MATRIX, lambda p: (p.tokens, p.groups * p.inner), _ALWAYS, label="A"),
        _Operand("b", _MATRIX, lambda p: (p.groups * p.columns, p.inner), _ALWAYS, label="B"),
        _Operand(
            "out",
            lambda of: _OUT[of.out],
            lambda p: (p.tokens, p.groups * p.columns),
            _ALWAYS,
            output=True,
            label="D",
        ),
        _Operand("turns", _TURNS, lambda p: (p.positions, rows.TABLE_WIDTH), _TURNED),
        _Operand("positions", _PLACES, lambda p: (p.tokens,), _TURNED),
    ),
    choose_form=grouped.choose_grouped_form,
    kinds=((Int32,) * 7,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    target=SM90A,
)
compile_form = KERNEL.compile_form
