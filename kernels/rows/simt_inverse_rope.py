"""Inverse RoPE: rotate the last 64 values of attention's heads back, with one rounding to BF16.

Two forms for sm_90a and sm_100a: out of place, where the other values are copied, and in place,
where they are neither read nor written. A thread has AT_ONCE chunks of 16 bytes of a token; all are
loaded before the first is rotated. A position outside the RoPE table makes the rotated values NaN,
so that the error shows.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
Shape letters: T tokens, H heads, L width, P positions.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    SLOT_WORDS,
    load_turn,
    numbers_of,
    put,
    registers_of,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import InverseRopeForm, InverseRopeProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

# ---- device --------------------------------------------------------------------------------------


class InverseRopeTensors(NamedTuple):
    """Tensors of the kernel, as vectors of 16 bytes; positions one by one."""

    heads: Any  # BF16 [T, H, L]
    turns: Any  # float32 [P, 64]: 32 cosines, 32 sines
    positions: Any  # int64 [T]
    out: Any  # BF16 [T, H, L]


@cute.kernel
def back_kernel(
    tensors: InverseRopeTensors, extents: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Process chunks of a token: load all, rotate back where rotated, store."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    token, group, _ = cute.arch.block_idx()
    heads, positions = extents
    position = Int64(tensors.positions[token])
    inside = (position >= 0) & (position < Int64(positions))
    chunks = heads * facts.chunks_of_head(form.width, in_place=form.in_place)
    first = Int64(token) * Int64(heads) * rows.GEOMETRIES[form.width].chunks
    rWords = registers_of(SLOT_WORDS, facts.CHUNKS_AT_ONCE)
    begin = Int32(group) * (facts.CHUNKS_AT_ONCE * facts.BACK_THREADS) + Int32(thread)
    for turn in cutlass.range_constexpr(facts.CHUNKS_AT_ONCE):
        chunk = begin + turn * facts.BACK_THREADS
        if chunk < chunks:
            place, _ = facts.place_of_chunk(chunk, form.width, in_place=form.in_place)
            cute.autovec_copy(tensors.heads[None, first + Int64(place)], rWords[None, turn])
    for turn in cutlass.range_constexpr(facts.CHUNKS_AT_ONCE):
        chunk = begin + turn * facts.BACK_THREADS
        if chunk < chunks:
            place, within = facts.place_of_chunk(chunk, form.width, in_place=form.in_place)
            group = within - facts.first_turned(form.width)
            if group >= 0:
                rTurn = registers_of(rows.PAIRS_OF_LANE, 2)
                # Stays NaN where the position is not in the table.
                rTurn.fill(NAN)
                if inside:
                    load_turn(tensors.turns, rTurn, (position, group))
                numbers = numbers_of(words_at(rWords, turn))
                put(rWords, turn, turned_words(numbers, rTurn, back=True))
            store(tensors.out, first + Int64(place), words_at(rWords, turn))


@cute.jit
def launch_back(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are heads, positions, tokens, groups of chunks."""
    heads, positions, tokens, groups = extents
    views = zip(pointers, (SLOT_WORDS, rows.PAIRS_OF_LANE, 0, SLOT_WORDS), strict=True)
    tensors = InverseRopeTensors(*(vectors(address, words) for address, words in views))
    back_kernel(tensors, (heads, positions), form).launch(
        grid=[tokens, groups, 1], block=[facts.BACK_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[InverseRopeProblem, InverseRopeForm]) -> tuple[Any, ...]:
    return ((of.problem.heads, of.problem.positions, *facts.back_grid(of.problem)),)


def _shape(problem: InverseRopeProblem) -> tuple[int, ...]:
    return problem.tokens, problem.heads, problem.width


def _refuse(problem: InverseRopeProblem, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise where heads are turned in place and the result has other memory."""
    heads, out = tensors["heads"], tensors["out"]
    assert heads is not None
    assert out is not None
    if problem.in_place and out.data_ptr() != heads.data_ptr():
        raise InvalidArgument(
            "turned heads",
            "other memory than the heads",
            "the heads themselves, in_place=True moves nothing else",
            "Leave `out` out, or build the problem with in_place=False.",
        )


_Operand = Operand[InverseRopeProblem]
_HEADS = Storage(Uint32, torch.bfloat16, 16)
KERNEL = Kernel[InverseRopeProblem, InverseRopeForm](
    entry=launch_back,
    operands=(
        _Operand("heads", _HEADS, _shape),
        _Operand(
            "turns", Storage(Uint32, torch.float32, 16), lambda p: (p.positions, rows.TABLE_WIDTH)
        ),
        _Operand("positions", Storage(Int64, torch.int64, 8), lambda p: (p.tokens,)),
        _Operand(
            "out",
            _HEADS,
            _shape,
            output=True,
            label="turned heads",
            memory_of=lambda p: "heads" if p.in_place else "",
        ),
    ),
    choose_form=lambda problem, target: InverseRopeForm(problem.in_place, target, problem.width),
    kinds=((Int32,) * 4,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    refuse=_refuse,
)
compile_form = KERNEL.compile_form
