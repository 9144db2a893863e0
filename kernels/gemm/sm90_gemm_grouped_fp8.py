"""Grouped FP8 block GEMM on Hopper (sm_90a), for o_a of FP8 checkpoints.

D[t, g] = A[t, g] B[g]^T with the shapes of grouped_problem. Without `turned` this is
sm90_gemm_fp8_block with A's codes and scales beginning at the K step of the tile's group.
With `turned`, A is attention's BF16 output; a stage of 128 of K is two boxes of 64. Warpgroup 0
loads by TMA (40 registers), one consumer warpgroup per 64 rows does the rest. For each stage:
  1. wait for it; each thread reads 32 numbers of each of its two rows (four lanes share a row);
  2. in a head's last stage apply inverse RoPE to the last 64 values, rounded to BF16;
  3. fold the row's largest magnitude over four lanes, quantise, put codes into wgmma's A registers;
  4. issue wgmma with B from shared memory, wait, release the stage, promote in float32 by fma.
So D equals simt_inverse_rope, simt_quantise_fp8 and one product per group bit for bit; neither
rotated heads nor their codes are in memory. A position outside the table gives NaN rows.

The entry point allocates only D and never synchronises, so it can be captured in a CUDA graph.
Shape letters as in grouped_problem.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import warpgroup

from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm import grouped_problem as problems
from degarble.kernels.gemm import mainloop
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import sm90_gemm_fp8_block as plain
from degarble.kernels.gemm import sm90_gemm_grouped as grouped
from degarble.kernels.gemm.grouped_problem import FP8_STEP, GroupedFp8Form, GroupedFp8Problem
from degarble.kernels.gemm.nvfp4_stages import words_at
from degarble.kernels.gemm.problem import TMA_ALIGNMENT
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    block_amax,
    numbers_of,
    turned_words,
    vectors,
)
from degarble.kernels.quantise import simt_quantise_fp8 as quantise
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY
from degarble.kernels.runtime.targets import SM90A

HALF = 64  # numbers of BF16 that a swizzled row of 128 bytes holds: half of a stage's row
HALVES = FP8_STEP // HALF
QUARTERS = 4  # of a half: 16 numbers, four of each thread
STEPS_OF_MMA = FP8_STEP // 32
WHOLE_CARVEOUT = 100  # per cent; CUDA Driver API 13.0, preferred shared memory carveout


class ThreadRows(NamedTuple):
    """A thread's two rows of a tile: first row, lane of four, words of stages, angles."""

    row: Any
    lane: Any
    words: Any  # (two words, places, halves of stages)
    turns: Any  # (two cosines or sines, quarter and row, cosines or sines)


# ---- device --------------------------------------------------------------------------------------


@cute.kernel
def grouped_kernel(
    feeds: tuple[mainloop.TmaFeed, ...],
    store: mainloop.TmaStore,
    scales: plain.BlockScales,
    turning: grouped.RopeRows,
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Dispatch by warpgroup: the first loads; others rotate, quantise, multiply, promote."""
    tactic = form.gemm.tactic
    rows_of_d, columns, steps, tiles = extents
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // facts.WARPGROUP)
    memory = cutlass.memory.SmemAllocator()
    elements = element_of_a(form), Float8E4M3FN
    sA, sB, sD, ring = mainloop.stages_of(memory, elements, layouts(form), form.gemm)
    mainloop.begin(tactic)

    walk = mainloop.walk_of((rows_of_d, columns), tactic)
    producing, consuming = facts.roles(form.gemm)
    if group == 0:
        cute.arch.setmaxregister_decrease(producing.registers)
        if cute.arch.warp_idx() == 0:
            boxes = (box_of_a(form), (tactic.columns, FP8_STEP))
            feedings = mainloop.feedings_of(feeds, (sA, sB), boxes, tactic)
            grouped.load(ring, feedings, walk, (steps, tiles), HALVES if form.turned else 1)
    else:
        cute.arch.setmaxregister_increase(consuming.registers)
        mine = group - 1
        mma = mma_of(form)
        fragments = fragments_of(mma, sA, sB, mine, form)
        sums = mainloop.sums_of(mma, tactic.columns)
        outlet = mainloop.outlet_of_warpgroup(store, sD, mma, mine)
        own = rows_of(sA, mine, form)
        state, stored = mainloop.consumer_state(ring.num_stages), Int32(0)
        for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1):
            row, column = mainloop.tile_at(walk, number)
            first = row * tactic.rows + mine * facts.PIECE_ROWS
            block = column * tactic.columns // plain.BLOCK
            if cutlass.const_expr(form.turned):
                read_turns(turning, own, first)
                scaling = (scales.b, block, steps)
                state = multiply_heads(ring, state, fragments, (sums, own), scaling, form)
            else:
                at = (*plain.rows_of_thread(first, rows_of_d), block)
                of_group = scales_of_group(scales, column // tiles * steps)
                state = plain.multiply(ring, state, fragments, sums, (of_group, at, steps))
            place = facts.piece_of(row, column, mine, tactic)
            stored = mainloop.store_tile(outlet, sums, place, stored)
        mainloop.drain(outlet)


def element_of_a(form: GroupedFp8Form) -> Any:
    """Return the element type of A in memory and in stages."""
    return BFloat16 if form.turned else Float8E4M3FN


def box_of_a(form: GroupedFp8Form) -> tuple[int, int]:
    """Return the box of A: a stage of codes, or half a stage of heads."""
    return form.gemm.tactic.rows, HALF if form.turned else FP8_STEP


def mma_of(form: GroupedFp8Form) -> Any:
    """Return the instruction; A comes from registers if the kernel quantises it."""
    source = warpgroup.OperandSource
    kind = source.RMEM if form.turned else source.SMEM
    return mainloop.mma_of(Float8E4M3FN, form.gemm.tactic.columns, kind)


def fragments_of(mma: Any, sA: Any, sB: Any, mine: Any, form: GroupedFp8Form) -> tuple[Any, ...]:
    """Return the instruction, the sums of a stage, and the fragments of A and B."""
    columns = form.gemm.tactic.columns
    if not form.turned:
        return mainloop.fragments_of(mma, sA, sB, mine, columns)
    a = mma.make_fragment_A(mma.partition_shape_A((facts.PIECE_ROWS, FP8_STEP)))
    b = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
    return mma, mainloop.sums_of(mma, columns), a, b


def scales_of_group(scales: plain.BlockScales, first: Any) -> plain.BlockScales:
    """Return scales in which A's begin at a group's first step."""
    return plain.BlockScales(cute.domain_offset((0, first), scales.a), scales.b)


# ---- heads to codes ------------------------------------------------------------------------------


def rows_of(sA: Any, mine: Any, form: GroupedFp8Form) -> ThreadRows:
    """Return a thread's part of a warpgroup's rows: numbers 4 q to 4 q + 3 of each 16."""
    thread, _, _ = cute.arch.thread_idx()
    within = Int32(thread) % facts.WARPGROUP
    row = mine * facts.PIECE_ROWS + within // facts.WARP * 16 + within % facts.WARP // 4
    held = form.gemm.tactic.rows * HALF // 2  # words of a half of a stage
    shape = (2, held // 2, HALVES * facts.footprint(form.gemm).stages)
    pointer = cute.recast_ptr(sA.iterator, dtype=Uint32)
    plain_words = cute.make_ptr(
        Uint32, Int32(pointer.toint()), cute.AddressSpace.smem, assumed_align=facts.ALIGNMENT
    )
    words = cute.make_tensor(plain_words, cute.make_layout(shape, stride=(1, 2, held)))
    turns = cute.make_rmem_tensor(cute.make_layout((2, 2 * QUARTERS, 2)), Uint32)
    return ThreadRows(row, within % 4, words, turns)


@cute.jit
def read_turns(turning: grouped.RopeRows, own: ThreadRows, first: Any) -> None:
    """Read cosines and sines for both rows of a thread; `first` is the warpgroup's first row."""
    # Stays NaN for tokens and positions that do not exist.
    own.turns.fill(NAN)
    for i in cutlass.range_constexpr(2):
        token = first + own.row % facts.PIECE_ROWS + 8 * i
        if token < turning.tokens:
            position = Int64(turning.positions[token])
            if (position >= 0) & (position < Int64(turning.known)):
                for quarter in cutlass.range_constexpr(QUARTERS):
                    place = position * (rows.TABLE_WIDTH // 2) + Int64(4 * quarter + own.lane)
                    for part in cutlass.range_constexpr(2):
                        at = place + part * (rows.TABLE_WIDTH // 4)
                        slot = own.turns[None, QUARTERS * i + quarter, part]
                        cute.autovec_copy(turning.table[None, at], slot)


def read_half(own: ThreadRows, slot: Any) -> list[list[list[Any]]]:
    """Read half a stage: of both rows, of each quarter, the words of four numbers."""
    # Rows of 128 bytes, whose 16-byte chunks are exchanged by the row's number modulo 8.
    found = []
    for i in range(2):
        row = (own.row + 8 * i) * 16
        at = [(2 * quarter + own.lane // 2) ^ (own.row % 8) for quarter in range(QUARTERS)]
        found.append([words_at(own.words, row + 2 * c + own.lane % 2, slot, 2) for c in at])
    return found


def turned_back(words: list[list[list[Any]]], own: ThreadRows) -> list[list[list[Any]]]:
    """Apply inverse RoPE to a half, rounded to BF16 as simt_inverse_rope does."""
    made = []
    for i in range(2):
        turns = [own.turns[None, QUARTERS * i + quarter, None] for quarter in range(QUARTERS)]
        pairs = zip(words[i], turns, strict=True)
        made.append([turned_words(numbers_of(each), turn, back=True) for each, turn in pairs])
    return made


def quantised(words: list[Any], form: GroupedFp8Form) -> tuple[list[Any], Any]:
    """Return the codes of a thread's numbers of a row, four a word, and the row's scale.

    The four lanes of a row share its largest magnitude by shuffles.
    """
    amax = block_amax(words)
    for distance in (1, 2):
        amax = ops.maximum(amax, cute.arch.shuffle_sync_bfly(amax, offset=distance))
    _, scale = quantise.scale_of(amax, form.scales)
    inverse, against = ops.divide_rn(Float32(1.0), scale), ops.multiply_rn(scale, -1.0)
    exact = form.scales == "ue8m0"
    scaled = [
        problems.quotient(number, against, inverse, exact=exact) for number in numbers_of(words)
    ]
    return quantise.e4m3_words(scaled), scale


def encode_stage(
    own: ThreadRows, stage: Any, fragment: Any, form: GroupedFp8Form, turned: bool
) -> Any:
    """Quantise a stage into wgmma's registers; return the scales of both rows."""
    halves = [read_half(own, HALVES * stage + half) for half in range(HALVES)]
    if turned:
        halves[-1] = turned_back(halves[-1], own)
    scales = []
    for i in range(2):
        words = [word for half in halves for quarter in half[i] for word in quarter]
        codes, scale = quantised(words, form)
        scales.append(scale)
        for number, code in enumerate(codes):  # of a step of 32: rows g, g + 8, then 16 on
            step, upper = number // 2, number % 2
            fragment[4 * step + 2 * upper + i] = code
    return scales


@cute.jit
def multiply_heads(
    ring: Any,
    state: Any,
    fragments: tuple[Any, ...],
    own: tuple[Any, Any],
    scaling: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> Any:
    """Sum up one tile of heads: quantise a stage, multiply it, promote its sums.

    Trap: a branch between two wgmma would serialise them, so the stages of a head are unrolled.
    """
    mma, stage_sums, a, b = fragments
    sums, mine = own
    of_b, block, steps = scaling
    registers = cute.recast_tensor(a, Uint32)
    sums.fill(0.0)
    for head in cutlass.range(steps // form.steps_of_head, unroll=1):
        for number in cutlass.range_constexpr(form.steps_of_head):
            scale = plain.scale_at(of_b, block, head * form.steps_of_head + number)
            ring.consumer_wait(state)
            turned = number == form.steps_of_head - 1
            of_rows = encode_stage(mine, state.index, registers, form, turned)
            mainloop.multiply_stage(
                mma, stage_sums, a, b[None, None, None, state.index], begins=True
            )
            upper, lower = (ops.multiply_rn(row, scale) for row in of_rows)
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
            plain.promote(sums, stage_sums, upper, lower)
    return state


# ---- launch --------------------------------------------------------------------------------------


def layouts(form: GroupedFp8Form) -> tuple[Any, Any]:
    """Return the layouts of A's and B's stages; a stage of heads is two halves."""
    tactic, stages = form.gemm.tactic, facts.footprint(form.gemm).stages
    swizzle, halves = mainloop.Swizzle.K_SW128, HALVES if form.turned else 1
    return (
        mainloop.staged_layout(element_of_a(form), *box_of_a(form), halves * stages, swizzle),
        mainloop.staged_layout(Float8E4M3FN, tactic.columns, FP8_STEP, stages, swizzle),
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
    inner, wide = (cute.assume(extent, divby=FP8_STEP) for extent in (inner, wide))
    columns = cute.assume(columns, divby=facts.COLUMNS_MULTIPLE)
    a, of_a, b, of_b, d, table, positions = pointers
    blocks = (ceil_div(columns, plain.BLOCK), inner // FP8_STEP)
    shapes = (
        (tokens, wide),
        (tokens, wide // FP8_STEP),
        (columns, inner),
        blocks,
        (tokens, columns),
    )
    mA, scales_a, mB, scales_b, mD = (
        cute.make_tensor(pointer, cute.make_layout(shape, stride=(Int64(shape[1]), 1)))
        for pointer, shape in zip((a, of_a, b, of_b, d), shapes, strict=True)
    )
    layout_a, layout_b = layouts(form)
    feeds = (
        mainloop.feed_of(mA, layout_a, box_of_a(form), tactic.cluster_columns),
        mainloop.feed_of(mB, layout_b, (tactic.columns, FP8_STEP), tactic.cluster_rows),
    )
    turning = grouped.RopeRows(vectors(table, 2), vectors(positions, 0), known, tokens)
    numbers = (tokens, columns, inner // FP8_STEP, tiles)
    scales = plain.BlockScales(scales_a, scales_b)
    grouped_kernel(feeds, mainloop.store_of(mD), scales, turning, numbers, form).launch(
        grid=[tactic.cluster_rows, tactic.cluster_columns, clusters],
        block=[facts.threads(form.gemm), 1, 1],
        cluster=[tactic.cluster_rows, tactic.cluster_columns, 1],
        min_blocks_per_mp=tactic.blocks,
        preferred_smem_carveout=WHOLE_CARVEOUT if tactic.blocks > 1 else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[GroupedFp8Problem, GroupedFp8Form]) -> tuple[Any, ...]:
    problem, tactic = of.problem, of.form.gemm.tactic
    # A tactic may keep several thread blocks on a multiprocessor.
    *_, clusters = facts.grid(problem.gemm, tactic, of.processors * tactic.blocks)
    wide = (problem.groups * problem.columns, problem.inner, problem.groups * problem.inner)
    tiles = problems.tiles_of_fp8_group(problem, of.form)
    return ((problem.tokens, *wide, tiles, clusters, problem.positions),)


def _when(test: Callable[[GroupedFp8Problem], bool]) -> Presence[GroupedFp8Problem]:
    return Presence(test, "Give turns and positions where heads are turned, else scales of A.")


_Operand = Operand[GroupedFp8Problem]
_ALWAYS, _TURNED = _when(lambda _: True), _when(lambda of: bool(of.turned))
_CODED = _when(lambda of: not of.turned)
_CODES = Storage(Float8E4M3FN, torch.float8_e4m3fn, TMA_ALIGNMENT)
_HEADS = Storage(BFloat16, torch.bfloat16, TMA_ALIGNMENT)
_TURNS, _PLACES = Storage(Float32, torch.float32, 8), Storage(Int64, torch.int64, 8)
KERNEL = Kernel[GroupedFp8Problem, GroupedFp8Form](
    entry=launch_grouped,
    operands=(
        _Operand(
            "a",  # codes and scales, or heads with a RoPE table and positions
            lambda of: _HEADS if of.turned else _CODES,
            lambda p: (p.tokens, p.groups * p.inner),
            _ALWAYS,
            label="A",
        ),
        _Operand(
            "a_scales",
            plain.stored_scales,
            lambda p: (p.tokens, p.groups * p.blocks),
            _CODED,
            label="scales of A",
        ),
        _Operand("b", _CODES, lambda p: (p.groups * p.columns, p.inner), _ALWAYS, label="B"),
        _Operand(
            "b_scales",
            plain.stored_scales,
            lambda p: (p.rows_of_scales, p.blocks),
            _ALWAYS,
            label="scales of B",
        ),
        _Operand("out", _HEADS, lambda p: (p.tokens, p.groups * p.columns), output=True, label="D"),
        _Operand("turns", _TURNS, lambda p: (p.positions, rows.TABLE_WIDTH), _TURNED),
        _Operand("positions", _PLACES, lambda p: (p.tokens,), _TURNED),
    ),
    choose_form=problems.choose_fp8_form,
    kinds=((Int32,) * 7,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    target=SM90A,
)
compile_form = KERNEL.compile_form
