"""Assemble V3.2's query rows: out[t, h] = concat(latent[t, h], rope(heads[t, h, -64:])).

Entry point: `latent_query(operands, problem, settings)`. One source for sm_90a and sm_100a. A
thread has a 16-byte chunk of a row of 576: it copies eight of the 512 latent values, or rotates
eight of the head's last 64. A position outside the RoPE table makes the rotated values NaN, so that
the error shows.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph. Shape
letters: T tokens, H heads, P positions.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import QueryForm, QueryProblem
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
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import TARGETS, target_of_device

ALIGNMENTS = (16, 16, 16, 8, 16)
ELEMENTS = (Uint32, Uint32, Uint32, Int64, Uint32)


class QueryOperands(NamedTuple):
    """Tensors that a launch reads."""

    latent: Tensor  # BF16 [T, H, 512]
    heads: Tensor  # BF16 [T, H, width], the last 64 not turned yet
    turns: Tensor  # float32 [P, 64]: 32 cosines and 32 sines of each position
    positions: Tensor  # int64 [T]


class QueryTensors(NamedTuple):
    """Kernel's tensors, as vectors of 16 bytes; positions one by one."""

    latent: Any
    heads: Any
    turns: Any
    positions: Any
    out: Any


@cute.kernel
def query_kernel(tensors: QueryTensors, extents: tuple[Any, ...]) -> None:
    """Copy or rotate one chunk of a row."""
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    heads, of_head, positions = extents
    chunk = Int32(part) * facts.QUERY_THREADS + Int32(thread)
    if chunk < heads * facts.CHUNKS:
        head, within = facts.place_of(chunk)
        row = Int64(token) * Int64(heads) + Int64(head)
        rWords = registers_of(SLOT_WORDS, 1)
        group = within - facts.OF_LATENT
        if group < 0:
            place = row * facts.OF_LATENT + Int64(within)
            cute.autovec_copy(tensors.latent[None, place], rWords[None, 0])
        if group >= 0:
            place = row * Int64(of_head) + Int64(of_head - facts.TURNED + group)
            cute.autovec_copy(tensors.heads[None, place], rWords[None, 0])
            position = Int64(tensors.positions[token])
            rTurn = registers_of(rows.PAIRS_OF_LANE, 2)
            # Stays NaN where the position is not in the table.
            rTurn.fill(NAN)
            if (position >= 0) & (position < Int64(positions)):
                load_turn(tensors.turns, rTurn, (position, group))
            numbers = numbers_of(words_at(rWords, 0))
            put(rWords, 0, turned_words(numbers, rTurn, back=False))
        store(tensors.out, row * facts.CHUNKS + Int64(within), words_at(rWords, 0))


@cute.jit
def launch_query(
    pointers: tuple[cute.Pointer, ...], extents: tuple[Any, ...], stream: CUstream
) -> None:
    """Launch; extents are heads, chunks of a head, positions, tokens, parts of a token."""
    heads, of_head, positions, tokens, parts = extents
    views = zip(pointers, (SLOT_WORDS, SLOT_WORDS, rows.PAIRS_OF_LANE, 0, SLOT_WORDS), strict=True)
    tensors = QueryTensors(*(vectors(address, words) for address, words in views))
    query_kernel(tensors, (heads, of_head, positions)).launch(
        grid=[tokens, parts, 1], block=[facts.QUERY_THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: QueryForm, settings: CompileSettings) -> CompiledKernel:
    """Compile the form; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(5))
    arguments = (_pointers((None,) * 5), extents, any_stream())
    return compile_kernel(launch_query, arguments, TARGETS[form.target], settings)


def latent_query(
    operands: QueryOperands,
    problem: QueryProblem,
    settings: CompileSettings,
    out: Tensor | None = None,
) -> Tensor:
    """Return query rows BF16 [T, H, 576] on their GPU."""
    if out is None:
        out = empty_rows(problem, operands.latent.device)
    tensors = (*operands, out)
    require_operands(problem, tensors)
    device = require_device(tensors)
    if problem.tokens:
        form = QueryForm(target_of_device(device).name)
        numbers = (
            problem.heads,
            problem.chunks_of_head,
            problem.positions,
            *facts.query_grid(problem),
        )
        extents = tuple(Int32(number) for number in numbers)
        compile_form(form, settings)(_pointers(tensors), extents, current_stream(device))
    return out


def empty_rows(problem: QueryProblem, device: torch.device) -> Tensor:
    """Allocate the result; a launch writes every byte of it."""
    shape = (problem.tokens, problem.heads, rows.WITH_KEY)
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def require_operands(problem: QueryProblem, tensors: tuple[Tensor, ...]) -> None:
    """Raise on tensors that the kernel would misread."""
    of_heads = (problem.tokens, problem.heads)
    wanted = (
        ("latent part", torch.bfloat16, (*of_heads, rows.WIDTH)),
        ("query heads", torch.bfloat16, (*of_heads, problem.width)),
        ("turns", torch.float32, (problem.positions, rows.TABLE_WIDTH)),
        ("positions", torch.int64, (problem.tokens,)),
        ("query rows", torch.bfloat16, (*of_heads, rows.WITH_KEY)),
    )
    for (name, dtype, shape), tensor, size in zip(wanted, tensors, ALIGNMENTS, strict=True):
        require_tensor(name, tensor, dtype, shape, size)


def _pointers(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    places = zip(ELEMENTS, tensors, ALIGNMENTS, strict=True)
    return tuple(pointer(element, tensor, size) for element, tensor, size in places)
