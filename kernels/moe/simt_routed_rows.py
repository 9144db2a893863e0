"""Router and rows of experts for very few tokens, in one launch (sm_90a, sm_100a).

A thread block has a part of one row: it chooses the experts of the row's token, as simt_router
does, every thread block for itself, then quantises the token with the scale of the row's expert and
writes what the codes stand for, as sm90_moe_by_row.ROWS does. Rows of the shared expert need no
choice. The thread block of a token's first slot writes experts and weights. So no row waits for a
launch that one thread block a token makes. Bits are those of both kernels.

Nothing here synchronises with the host. Shape letters: T tokens, K chosen, E experts, D hidden.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.gemm import w4a16_problem as product
from degarble.kernels.moe import by_row_problem as facts
from degarble.kernels.moe.by_row_problem import RoutedRowsForm, RoutedRowsProblem
from degarble.kernels.moe.problem import NONE
from degarble.kernels.moe.simt_moe_rows import FLOATS, INTEGERS, flat, in_words
from degarble.kernels.primitives import device_words as words
from degarble.kernels.rows import simt_router
from degarble.kernels.rows.router_problem import LANES
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.operands import DTYPES
from degarble.kernels.runtime.pdl import EARLY, follow


class RoutedRowsTensors(NamedTuple):
    """Kernel's tensors beside the router's."""

    values: Any  # blocks of x
    scales: Any  # float32 [E], of rows before gate and up, the shared expert's last
    decoded: Any  # blocks of the decoded rows
    places: Any  # int32 [T K]


@cute.kernel
def routed_rows_kernel(
    router: Any,
    tensors: RoutedRowsTensors,
    extents: tuple[Any, ...],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
) -> None:
    """Route the token of a row, then quantise and decode a part of the row."""
    follow()
    experts, vocabulary, blocks, shared, count = extents
    thread, _, _ = cute.arch.thread_idx()
    part, row, _ = cute.arch.block_idx()
    thread, row = Uint32(thread), Uint32(row)
    lane = thread % LANES
    chosen = form.router.chosen
    slot = product.slot_of(row, Uint32(shared))
    token = codecs.select(row < Uint32(shared), row, slot // chosen)
    block = Uint32(part) * facts.ROUTING_THREADS + thread
    rBlock = cute.make_rmem_tensor(words.BLOCK_WORDS, Uint32)
    rBlock.fill(0)
    if block < Uint32(blocks):
        at = Int64(token) * Int64(blocks) + Int64(block)
        cute.autovec_copy(tensors.values[None, at], rBlock)
    named = Uint32(experts)  # the shared expert follows the routed ones
    if row >= Uint32(shared):
        told = (experts, vocabulary, *factors)
        place = (thread, Int32(token), Uint32(0))
        mine, weight = simt_router.routed(router, place, told, form.router)
        if (slot % chosen == 0) & (Uint32(part) == 0) & (thread < chosen):
            simt_router.write_choice(router, (token, lane), (mine, weight), form.router)
        found = Uint32(cute.arch.shuffle_sync(Uint32(mine), offset=slot % chosen))
        counts = (Uint32(shared), Uint32(experts), Uint32(count))
        named = product.expert_of(row, found, counts)
        if (thread == 0) & (Uint32(part) == 0):
            here = named < Uint32(count)
            tensors.places[slot] = codecs.select(here, Int32(row), Int32(NONE))
    named = codecs.select(named < Uint32(count), named, Uint32(0))
    if block < Uint32(blocks):
        read = words.words_of(rBlock)
        scaling = words.scaling_of(Float32(tensors.scales[named]), None)
        code = words.scale_code_of(words.block_amax(read), scaling.share)
        factor = codecs.nvfp4_block_encode_scale(code, scaling.encode)
        made = [
            words.nvfp4_values(word, code) for word in words.code_words(read, factor, form.target)
        ]
        at = Int64(row) * Int64(blocks) + Int64(block)
        words.store(tensors.decoded, at, made[0] + made[1])


@cute.jit
def launch_routed_rows(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    factors: tuple[Float32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on experts, table rows, blocks, shared rows, all experts; grid along x and y."""
    *known, along, rows = extents
    logits, bias, ids, table, values, scales, experts, weights, decoded, places = pointers
    router = simt_router.RouterTensors(*flat((logits, bias, ids, table, experts, weights)))
    tensors = RoutedRowsTensors(
        in_words(values, words.BLOCK_WORDS), *flat((scales,)),
        in_words(decoded, words.BLOCK_WORDS), *flat((places,)),
    )  # fmt: skip
    routed_rows_kernel(router, tensors, tuple(known), factors, form).launch(
        grid=[along, rows, 1],
        block=[facts.ROUTING_THREADS, 1, 1],
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[RoutedRowsProblem, RoutedRowsForm]) -> tuple[Any, ...]:
    problem, router = of.problem, of.problem.router
    extents = (router.experts, router.vocabulary, problem.blocks)
    counts = (problem.by_row.shared_rows, problem.by_row.experts)
    return (*extents, *counts, *problem.grid), (router.scale, router.epsilon)


def _ids(of: RoutedRowsProblem | RoutedRowsForm) -> Storage:
    name = of.router.ids
    return Storage(Int64 if name == "int64" else Int32, DTYPES[name], DTYPES[name].itemsize)


def _where(*, by_table: bool) -> Presence[RoutedRowsProblem]:
    return Presence(
        lambda p: (p.router.vocabulary > 0) == by_table,
        lambda p: f"The problem says vocabulary={p.router.vocabulary}.",
    )


_Operand = Operand[RoutedRowsProblem]
_VALUES = Storage(Uint32, torch.bfloat16, 32)
KERNEL = Kernel[RoutedRowsProblem, RoutedRowsForm](
    entry=launch_routed_rows,
    operands=(
        _Operand("logits", FLOATS, lambda p: (p.router.tokens, p.router.experts)),
        _Operand("bias", FLOATS, lambda p: (p.router.experts,), _where(by_table=False)),
        _Operand(
            "ids", _ids, lambda p: (p.router.tokens,), _where(by_table=True), label="token ids"
        ),
        _Operand(
            "table",
            _ids,
            lambda p: (p.router.vocabulary, p.router.chosen),
            _where(by_table=True),
        ),
        _Operand("x", _VALUES, lambda p: (p.router.tokens, p.by_row.moe.hidden)),
        _Operand(
            "w13_input_scale", FLOATS, lambda p: (p.by_row.experts,), label="input scales of w13"
        ),
        _Operand("experts", INTEGERS, lambda p: (p.router.tokens, p.router.chosen), output=True),
        _Operand("weights", FLOATS, lambda p: (p.router.tokens, p.router.chosen), output=True),
        _Operand("x_rows", _VALUES, lambda p: (p.by_row.rows, p.by_row.moe.hidden), output=True),
        _Operand("places", INTEGERS, lambda p: (p.by_row.moe.slots,), output=True),
    ),
    choose_form=facts.choose_routed_form,
    kinds=((Int32,) * 7, (Float32,) * 2),
    numbers=_numbers,
    work=lambda problem: problem.by_row.rows,
)
compile_form = KERNEL.compile_form
