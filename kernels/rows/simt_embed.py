"""Embedding lookup: out[t] = table[id[t]], BF16 rows copied in 16-byte vectors.

One source for sm_90a and sm_100a. A token has one thread block, or several for a long row; each
thread has four vectors in flight. Ids are int32 or int64; one outside the table gives a row of
zeros. Shape letters: T tokens, V rows of the table, K columns.
"""

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import EmbedForm, EmbedProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import EARLY, follow

WORDS = facts.EMBED_VECTOR // 2


@cute.kernel
def embed_kernel(
    tensors: tuple[cute.Tensor, ...], vocabulary: Int32, vectors: Int32, threads: Int32
) -> None:
    """Copy one token's row, or its share of one."""
    follow()
    ids, table, out = tensors
    thread, _, _ = cute.arch.thread_idx()
    token, across, _ = cute.arch.block_idx()
    number = Int64(ids[token])
    inside = (number >= 0) & (number < Int64(vocabulary))
    first = Int32(across) * threads * facts.EMBED_VECTORS_OF_THREAD + Int32(thread)
    row, start = number * Int64(vectors), Int64(token) * Int64(vectors)
    rVectors = cute.make_rmem_tensor(
        cute.make_layout((WORDS, facts.EMBED_VECTORS_OF_THREAD)), Uint32
    )
    # Stays zero where the id is outside the table.
    rVectors.fill(0)
    for place in cutlass.range_constexpr(facts.EMBED_VECTORS_OF_THREAD):
        vector = first + place * threads
        if inside & (vector < vectors):
            cute.autovec_copy(table[None, row + Int64(vector)], rVectors[None, place])
    for place in cutlass.range_constexpr(facts.EMBED_VECTORS_OF_THREAD):
        vector = first + place * threads
        if vector < vectors:
            cute.autovec_copy(rVectors[None, place], out[None, start + Int64(vector)])


@cute.jit
def launch_embed(
    pointers: tuple[cute.Pointer, ...], extents: tuple[Int32, ...], stream: CUstream
) -> None:
    """Launch; extents are table rows, vectors of a row, tokens, parts of a row, threads."""
    vocabulary, vectors, tokens, parts, threads = extents
    ids, table, out = pointers
    flat = 1 << 30
    of_vectors = cute.make_layout((WORDS, flat), stride=(1, WORDS))
    tensors = (
        cute.make_tensor(ids, cute.make_layout(flat)),
        cute.make_tensor(table, of_vectors),
        cute.make_tensor(out, of_vectors),
    )
    embed_kernel(tensors, vocabulary, vectors, threads).launch(
        grid=[tokens, parts, 1],
        block=[threads, 1, 1],
        max_number_threads=[facts.MOST_EMBED_THREADS, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[EmbedProblem, EmbedForm]) -> tuple[Any, ...]:
    problem = of.problem
    grid, threads = facts.embed_grid(problem), facts.embed_threads(problem)
    return ((problem.vocabulary, problem.vectors, *grid, threads),)


def _ids(of: EmbedProblem | EmbedForm) -> Storage:
    element = Int64 if of.ids == "int64" else Int32
    return Storage(element, DTYPES[of.ids], DTYPES[of.ids].itemsize)


_Operand = Operand[EmbedProblem]
_ROWS = Storage(Uint32, torch.bfloat16, 16)
KERNEL = Kernel[EmbedProblem, EmbedForm](
    entry=launch_embed,
    operands=(
        _Operand("ids", _ids, lambda p: (p.tokens,)),
        _Operand("table", _ROWS, lambda p: (p.vocabulary, p.columns)),
        _Operand("out", _ROWS, lambda p: (p.tokens, p.columns), output=True, label="rows to write"),
    ),
    choose_form=facts.choose_embed_form,
    kinds=((Int32,) * 5,),
    numbers=_numbers,
    work=lambda problem: problem.tokens,
    takes_form=False,
)
compile_form = KERNEL.compile_form
