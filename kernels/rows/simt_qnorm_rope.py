"""Norm query heads without a weight and rotate their last 64 values, with one rounding to BF16.

out = rope(x / sqrt(mean(x**2) + epsilon)). One source for sm_90a and sm_100a: a warp has a head of
512 or 128, whose values stay float32 from load to store; eight heads of a token a thread block. The
result may overwrite the input. A position outside the RoPE table makes the rotated values NaN, so
that the error shows.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: T tokens, H heads, L width, P positions.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    SLOT_WORDS,
    factor_of_row,
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
from degarble.kernels.rows.problem import HeadsForm, HeadsProblem
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import TARGETS, target_of_device

THREADS = facts.HEAD_WARPS * rows.LANES
ALIGNMENTS = (16, 16, 8, 16)  # of heads, turns, positions, normed heads
ELEMENTS = (Uint32, Uint32, Int64, Uint32)


# ---- device --------------------------------------------------------------------------------------


class HeadsTensors(NamedTuple):
    """Tensors of the kernel, as vectors of 16 bytes; positions one by one."""

    heads: Any  # BF16 [T, H, L]
    turns: Any  # float32 [P, 64]: 32 cosines, 32 sines
    positions: Any  # int64 [T]
    out: Any  # BF16 [T, H, L]


@cute.kernel
def heads_kernel(
    tensors: HeadsTensors, extents: tuple[Any, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Process a head per warp: read, norm, rotate, store."""
    held = rows.GEOMETRIES[form.width]
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    heads, positions = extents
    lane = Int32(thread) % rows.LANES
    head = Int32(group) * facts.HEAD_WARPS + Int32(thread) // rows.LANES
    if head < heads:
        first = (Int64(token) * Int64(heads) + Int64(head)) * held.chunks
        rWords = registers_of(SLOT_WORDS, held.slots)
        load_row(tensors.heads, rWords, first, lane, held)
        position = Int64(tensors.positions[token])
        rTurn = registers_of(rows.PAIRS_OF_LANE, 2)
        # Stays NaN where the position is not in the table.
        rTurn.fill(NAN)
        group = lane - held.first_turned_lane
        turns = (group >= 0) & (lane < held.lanes)
        if turns & (position >= 0) & (position < Int64(positions)):
            load_turn(tensors.turns, rTurn, (position, group))

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
    tensors = HeadsTensors(*(vectors(address, words) for address, words in views))
    heads_kernel(tensors, (heads, positions), epsilon, form).launch(
        grid=[tokens, groups, 1], block=[THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: HeadsForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    arguments = (_pointers((None,) * 4), _extents(None), Float32(1e-6), form, any_stream())
    return compile_kernel(launch_heads, arguments, TARGETS[form.target], settings)


def qnorm_rope(
    heads_THL: Tensor,
    turns_P: Tensor,
    positions_T: Tensor,
    problem: HeadsProblem,
    settings: CompileSettings,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return heads normed and rotated, on their GPU; `out` may be the heads themselves.

    `turns_P` is float32 [P, 64]: 32 cosines and 32 sines of each position.
    """
    if out is None:
        out = torch.empty_like(heads_THL)
    require_operands(problem, heads_THL, turns_P, positions_T, out)
    tensors = (heads_THL, turns_P, positions_T, out)
    device = require_device(tensors)
    if problem.tokens:
        form = HeadsForm(target_of_device(device).name, problem.width)
        launch(compile_form(form, settings), problem, tensors)
    return out


def launch(kernel: CompiledKernel, problem: HeadsProblem, tensors: tuple[Tensor, ...]) -> None:
    """Launch on checked tensors: heads, RoPE table, positions, normed heads."""
    device = tensors[0].device.index or 0
    kernel(_pointers(tensors), _extents(problem), Float32(problem.epsilon), current_stream(device))


def require_operands(
    problem: HeadsProblem, heads_THL: Tensor, turns_P: Tensor, positions_T: Tensor, out: Tensor
) -> None:
    """Raise on tensors that the kernel would misread."""
    shape = (problem.tokens, problem.heads, problem.width)
    of_turns = (problem.positions, rows.TABLE_WIDTH)
    require_tensor("heads", heads_THL, torch.bfloat16, shape, ALIGNMENTS[0])
    require_tensor("turns", turns_P, torch.float32, of_turns, ALIGNMENTS[1])
    require_tensor("positions", positions_T, torch.int64, (problem.tokens,), ALIGNMENTS[2])
    require_tensor("normed heads", out, torch.bfloat16, shape, ALIGNMENTS[3])


def _extents(problem: HeadsProblem | None) -> tuple[Int32, ...]:
    """Return the extents of a launch; without a problem, ones to compile with."""
    if problem is None:
        return tuple(Int32(1) for _ in range(4))
    numbers = (problem.heads, problem.positions, *facts.heads_grid(problem))
    return tuple(Int32(number) for number in numbers)


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    places = zip(ELEMENTS, tensors, ALIGNMENTS, strict=True)
    return tuple(pointer(element, tensor, alignment) for element, tensor, alignment in places)
