"""Norm query heads without a weight and rotate their last 64 values, with one rounding to BF16.

out = rope(x / sqrt(mean(x**2) + epsilon)). One source for sm_90a and sm_100a: a warp has a head of
512 or 128, whose values stay float32 from load to store; eight heads of a token a thread block. The
result may overwrite the input. A position outside the RoPE table makes the rotated values NaN, so
that the error shows.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: T tokens, H heads, L width, P positions.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    SLOT_WORDS,
    correct_turn,
    factor_of_row,
    guess_turn,
    load_row,
    load_turn,
    numbers_of,
    put,
    registers_of,
    rounded_words,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import QNormRopeForm, QNormRopeProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front

THREADS = facts.HEAD_WARPS * rows.LANES


# ---- device --------------------------------------------------------------------------------------


class QNormRopeTensors(NamedTuple):
    """Tensors of the kernel, as vectors of 16 bytes; positions one by one."""

    heads: Any  # BF16 [T, H, L]
    turns: Any  # float32 [P, 64]: 32 cosines, 32 sines
    positions: Any  # int64 [T]
    out: Any  # BF16 [T, H, L]


@cute.kernel
def heads_kernel(
    tensors: QNormRopeTensors, extents: tuple[Any, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Process a head per warp: read, norm, rotate, store."""
    let_follow()
    held = rows.GEOMETRIES[form.width]
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    heads, positions = extents
    lane = Int32(thread) % rows.LANES
    turned = lane - held.first_turned_lane
    turns = (turned >= 0) & (lane < held.lanes)
    rTurn, supposed = registers_of(rows.PAIRS_OF_LANE, 2), Int32(0)
    if cutlass.const_expr(form.few):
        asked = (Int32(token), turned), (turns, positions)
        supposed = guess_turn(tensors.turns, tensors.positions, rTurn, *asked)
    wait_for_front()
    head = Int32(group) * facts.HEAD_WARPS + Int32(thread) // rows.LANES
    if head < heads:
        first = (Int64(token) * Int64(heads) + Int64(head)) * held.chunks
        rWords = registers_of(SLOT_WORDS, held.slots)
        load_row(tensors.heads, rWords, first, lane, held)
        position = Int64(tensors.positions[token])
        if cutlass.const_expr(form.few):
            correct_turn(tensors.turns, rTurn, (position, turned), (turns, positions), supposed)
        else:
            # Stays NaN where the position is not in the table.
            rTurn.fill(NAN)
            if turns & (position >= 0) & (position < Int64(positions)):
                load_turn(tensors.turns, rTurn, (position, turned))

        factor = factor_of_row(rWords, epsilon, form.width)
        for half in cutlass.range_constexpr(held.slots):
            found = numbers_of(words_at(rWords, half))
            numbers = [ops.multiply_rn(number, factor) for number in found]
            put(rWords, half, rounded_words(numbers))
            if cutlass.const_expr(half == held.slots - 1):  # noqa: SIM102  one is known in tracing
                if turns:
                    # From the float32 numbers: one rounding to BF16, not two.
                    put(rWords, half, turned_words(numbers, rTurn, back=False))
            if lane < held.lanes:
                place = first + Int64(lane) + half * rows.LANES
                store(tensors.out, place, words_at(rWords, half))


@cute.jit
def launch_heads(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are heads, positions, tokens, groups of heads."""
    heads, positions, tokens, groups = extents
    views = zip(pointers, (SLOT_WORDS, rows.PAIRS_OF_LANE, 0, SLOT_WORDS), strict=True)
    tensors = QNormRopeTensors(*(vectors(address, words) for address, words in views))
    heads_kernel(tensors, (heads, positions), epsilon, form).launch(
        grid=[tokens, groups, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[QNormRopeProblem, QNormRopeForm]) -> tuple[Any, ...]:
    problem = of.problem
    return (problem.heads, problem.positions, *facts.heads_grid(problem)), problem.epsilon


def _shape(problem: QNormRopeProblem) -> tuple[int, ...]:
    return problem.tokens, problem.heads, problem.width


_Operand = Operand[QNormRopeProblem]
_HEADS = Storage(Uint32, torch.bfloat16, 16)
KERNEL = Kernel[QNormRopeProblem, QNormRopeForm](
    entry=launch_heads,
    operands=(
        _Operand("heads", _HEADS, _shape),
        _Operand(
            "turns", Storage(Uint32, torch.float32, 16), lambda p: (p.positions, rows.TABLE_WIDTH)
        ),
        _Operand("positions", Storage(Int64, torch.int64, 8), lambda p: (p.tokens,)),
        _Operand("out", _HEADS, _shape, output=True, label="normed heads"),
    ),
    choose_form=facts.choose_heads_form,
    kinds=((Int32,) * 4, Float32),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
