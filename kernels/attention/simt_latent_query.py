"""Assemble V3.2's query rows: out[t, h] = concat(latent[t, h], rope(heads[t, h, -64:])).

One source for sm_90a and sm_100a. A thread has a 16-byte chunk of a row of 576: it copies eight of
the 512 latent values, or rotates eight of the head's last 64. A position outside the RoPE table
makes the rotated values NaN, so that the error shows.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph. Shape
letters: T tokens, H heads, P positions.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import QueryForm, QueryProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    NAN,
    SLOT_WORDS,
    correct_turn,
    guess_turn,
    load_turn,
    numbers_of,
    put,
    registers_of,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.runtime.kernel import Kernel, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, let_follow, wait_for_front


class QueryTensors(NamedTuple):
    """Kernel's tensors, as vectors of 16 bytes; positions one by one."""

    latent: Any
    heads: Any
    turns: Any
    positions: Any
    out: Any


@cute.kernel
def query_kernel(tensors: QueryTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Copy or rotate one chunk of a row."""
    let_follow()
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    heads, of_head, positions = extents
    chunk = Int32(part) * facts.QUERY_THREADS + Int32(thread)
    head, within = facts.place_of(chunk)
    group = within - facts.OF_LATENT
    rTurn, supposed = registers_of(rows.PAIRS_OF_LANE, 2), Int32(0)
    if cutlass.const_expr(form.few):
        asked = (Int32(token), group), (group >= 0, positions)
        supposed = guess_turn(tensors.turns, tensors.positions, rTurn, *asked)
    wait_for_front()
    if chunk < heads * facts.CHUNKS:
        row = Int64(token) * Int64(heads) + Int64(head)
        rWords = registers_of(SLOT_WORDS, 1)
        if group < 0:
            place = row * facts.OF_LATENT + Int64(within)
            cute.autovec_copy(tensors.latent[None, place], rWords[None, 0])
        if group >= 0:
            place = row * Int64(of_head) + Int64(of_head - facts.TURNED + group)
            cute.autovec_copy(tensors.heads[None, place], rWords[None, 0])
            position = Int64(tensors.positions[token])
            if cutlass.const_expr(form.few):
                told = (position, group), (group >= 0, positions)
                correct_turn(tensors.turns, rTurn, *told, supposed)
            else:
                # Stays NaN where the position is not in the table.
                rTurn.fill(NAN)
                if (position >= 0) & (position < Int64(positions)):
                    load_turn(tensors.turns, rTurn, (position, group))
            numbers = numbers_of(words_at(rWords, 0))
            put(rWords, 0, turned_words(numbers, rTurn, back=False))
        store(tensors.out, row * facts.CHUNKS + Int64(within), words_at(rWords, 0))


@cute.jit
def launch_query(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are heads, chunks of a head, positions, tokens, parts of a token."""
    heads, of_head, positions, tokens, parts = extents
    views = zip(pointers, (SLOT_WORDS, SLOT_WORDS, rows.PAIRS_OF_LANE, 0, SLOT_WORDS), strict=True)
    tensors = QueryTensors(*(vectors(address, words) for address, words in views))
    query_kernel(tensors, (heads, of_head, positions), form).launch(
        grid=[tokens, parts, 1], block=[facts.QUERY_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------

_Operand = Operand[QueryProblem]
_VALUES, _TURNS = Storage(Uint32, torch.bfloat16, 16), Storage(Uint32, torch.float32, 16)
_PLACES = Storage(Int64, torch.int64, 8)
KERNEL = Kernel[QueryProblem, QueryForm](
    entry=launch_query,
    operands=(
        _Operand("latent", _VALUES, lambda p: (p.tokens, p.heads, rows.WIDTH), label="latent part"),
        # The last 64 of a head are not turned yet.
        _Operand("heads", _VALUES, lambda p: (p.tokens, p.heads, p.width), label="query heads"),
        _Operand("turns", _TURNS, lambda p: (p.positions, rows.TABLE_WIDTH)),
        _Operand("positions", _PLACES, lambda p: (p.tokens,)),
        _Operand(
            "out",
            _VALUES,
            lambda p: (p.tokens, p.heads, rows.WITH_KEY),
            output=True,
            label="query rows",
        ),
    ),
    choose_form=facts.choose_query_form,
    kinds=((Int32,) * 5,),
    numbers=lambda of: (
        (
            of.problem.heads,
            of.problem.chunks_of_head,
            of.problem.positions,
            *facts.query_grid(of.problem),
        ),
    ),
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
