"""Store tokens' pooling states in the pages of a sequence, and pool the windows that they close.

One source for sm_90a and sm_100a. `keep_kernel`, a thread block a token: writes a
token's latents, and its gates plus their bias `ape`, into its slot of the states. `pool_kernel`:
each token that closes a window reads that window's rows back from the pages of its sequence and
writes a pooled BF16 entry [T, E], the position for its RoPE, and its slot in the cache of entries;
for other tokens only a slot of -1. The only token of a launch has `single_kernel`, which does both.
The sums are simt_compressor's, in its order: equal rows give equal bits.

Tokens without a slot (below 0, or beyond the pages) are skipped. A missing page makes its window
NaN, so that the error shows. Never waits for the GPU and allocates nothing where outputs are given,
so a launch may be captured; grids follow from extents alone. Shape letters as in
cache/problem.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import (
    CHANNELS_OF_THREAD,
    NO_PLACE,
    ROWS_AT_ONCE,
    PagedForm,
    PagedPoolProblem,
)
from degarble.kernels.cache.simt_compressor import pool_window, row_registers, shared_of
from degarble.kernels.primitives.device_words import vectors
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.kernel import ANY, Kernel, LaunchContext, Operand, Operands, Storage
from degarble.kernels.runtime.operands import require_tensor
from degarble.kernels.runtime.pdl import EARLY, follow

FOUR = facts.VECTOR_BYTES // 4  # columns of a load where rows are kept


# ---- device --------------------------------------------------------------------------------------


class PagedTensors(NamedTuple):
    """Kernels' tensors; floats of states in pairs, or in fours."""

    projected: Any
    ape: Any
    requests: Any
    positions: Any
    slots: Any
    table: Any
    entries: Any
    states: Any  # float32, rows of pages: latents, gates with bias
    values: Any  # BF16 [T, E]
    firsts: Any  # int64 [T], position of the window's first token
    entry_slots: Any  # int64 [T], slots of entries


def tensors_of(pointers: tuple[Any, ...], floats: int) -> PagedTensors:
    """View the pointers; bounds are checked by token, slot and page, not by these layouts."""
    shapes = (floats, floats, 0, 0, 0, 0, 0, floats, CHANNELS_OF_THREAD // 2, 0, 0)
    return PagedTensors(*(vectors(at, words) for at, words in zip(pointers, shapes, strict=True)))


@cute.kernel
def keep_kernel(tensors: PagedTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Store a token's row in its slot, the gates with their bias."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    token, _, _ = cute.arch.block_idx()
    capacity, of_page = extents
    slot = Int64(tensors.slots[token])
    if (slot >= 0) & (slot < capacity):
        of_gate = form.pool.columns // FOUR
        at = Int64(token) * (2 * of_gate) + Int64(thread)
        place = Int64(Int32(slot) // form.rows) * of_page
        place += Int64(Int32(slot) % form.rows * (2 * of_gate) + Int32(thread))
        bias = Int32(tensors.positions[token]) % form.pool.ratio * of_gate + Int32(thread)
        for step in cutlass.range_constexpr(of_gate // form.keeping_threads):
            more = step * form.keeping_threads
            rLatent, rGate, rBias = (cute.make_rmem_tensor(FOUR, Float32) for _ in range(3))
            cute.autovec_copy(tensors.projected[None, at + more], rLatent)
            cute.autovec_copy(tensors.projected[None, at + (of_gate + more)], rGate)
            cute.autovec_copy(tensors.ape[None, bias + more], rBias)
            for column in cutlass.range_constexpr(FOUR):
                rGate[column] = ops.add_rn(Float32(rGate[column]), Float32(rBias[column]))
            cute.autovec_copy(rLatent, tensors.states[None, place + more])
            cute.autovec_copy(rGate, tensors.states[None, place + (of_gate + more)])


class ListedRows(NamedTuple):
    """Where a part's rows of a window lie: rows in turn are in one page."""

    begin: Any  # position of the first
    found: list[Any]  # whether the page of rows in turn is there
    pages: list[Any]  # 0 where it is not
    rows: list[Any]  # which row of its page the first one is


def in_turn(form: PagedForm) -> int:
    """Return how many rows of a closing window lie one after the other in a page."""
    return facts.rows_in_turn(form.pool.ratio, form.rows)


def listed_rows(
    tensors: PagedTensors, numbers: tuple[Any, ...], extents: tuple[Any, ...], form: PagedForm
) -> ListedRows:
    """Look up the pages of a part's rows; `numbers`: first position, part, sequence.

    Where the window does not close, the first position is any, and what is listed is not used.
    """
    first, part, sequence = numbers
    pages, columns, _ = extents
    begin, found, listed, rows = first + part * ROWS_AT_ONCE, [], [], []
    for row in range(0, ROWS_AT_ONCE, in_turn(form)):
        position = Uint32(ops.maximum(begin + row, Int32(0)))  # unsigned: divided by a shift
        column = Int32(position // form.rows)
        inside = column < columns
        at = Int64(sequence) * columns + Int64(ops.select(inside, column, Int32(0)))
        page = Int32(tensors.table[at])
        there = inside & (page >= 0) & (page < pages)
        found.append(there)
        listed.append(ops.select(there, page, Int32(0)))
        rows.append(Int32(position % form.rows))
    return ListedRows(begin, found, listed, rows)


def read_rows(
    tensors: PagedTensors,
    registers: tuple[Any, Any],
    listed: ListedRows,
    numbers: tuple[Any, Any],
    form: PagedForm,
) -> None:
    """Read a part's rows of a window; `numbers`: chunk of E, vectors of a page."""
    chunk, of_page = numbers
    rLatent, rGate = registers
    of_row, of_gate, of_entry = (
        n // CHANNELS_OF_THREAD for n in (2 * form.pool.columns, form.pool.columns, form.pool.width)
    )
    together = in_turn(form)
    for turn, (page, begin) in enumerate(zip(listed.pages, listed.rows, strict=True)):
        first = Int64(page) * of_page + Int64(begin * of_row + chunk)
        for step in range(together):
            row = turn * together + step
            at = first + (step * of_row + row // form.pool.ratio * of_entry)
            cute.autovec_copy(tensors.states[None, at], rLatent[None, row])
            cute.autovec_copy(tensors.states[None, at + of_gate], rGate[None, row])


def choose_rows(registers: tuple[Any, Any], listed: ListedRows, form: PagedForm) -> None:
    """Give rows before the sequence's start no weight, and make those of a missing page NaN."""
    rLatent, rGate = registers
    together = in_turn(form)
    for turn, found in enumerate(listed.found):
        is_there = listed.begin + turn * together >= 0
        known = is_there & found
        # A row that should exist but has no page is NaN; one before the start is no row.
        lost = ops.select(is_there, Float32.nan, Float32(0.0))
        before = ops.select(is_there, Float32(0.0), -Float32.inf)
        for row in range(turn * together, (turn + 1) * together):
            for channel in range(CHANNELS_OF_THREAD):
                rLatent[channel, row] = ops.select(known, Float32(rLatent[channel, row]), lost)
                rGate[channel, row] = ops.select(known, Float32(rGate[channel, row]), before)


def choose_kept(
    registers: tuple[Any, Any], listed: ListedRows, slot: Any, kept: list[Any], form: PagedForm
) -> None:
    """Take the rows of the slot that this launch fills from what it stores there."""
    rLatent, rGate = registers
    together = in_turn(form)
    places = zip(listed.found, listed.pages, listed.rows, strict=True)
    for turn, (found, page, begin) in enumerate(places):
        behind = slot - (Int64(page) * form.rows + Int64(begin))
        for step in range(together):
            row, own = turn * together + step, found & (behind == step)
            latents, gates = kept[row // form.pool.ratio]
            for channel in range(CHANNELS_OF_THREAD):
                latent, gate = Float32(rLatent[channel, row]), Float32(rGate[channel, row])
                rLatent[channel, row] = ops.select(own, Float32(latents[channel]), latent)
                rGate[channel, row] = ops.select(own, Float32(gates[channel]), gate)


@cute.jit
def pool_token(
    tensors: PagedTensors,
    shared: Any,
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Pool a token's window, if it closes one; `numbers` is token, group, thread."""
    token, group, thread = numbers
    tokens, sequences, capacity, pages, columns, of_page = extents
    of_block = form.pool.channels // CHANNELS_OF_THREAD
    part, within = thread // of_block, thread % of_block
    chunk = group * of_block + within
    if token < tokens:
        slot, position = Int64(tensors.slots[token]), Int32(tensors.positions[token])
        sequence = Int32(tensors.requests[token])
        known = (slot >= 0) & (slot < capacity) & (sequence >= 0) & (sequence < sequences)
        closes = known & ((position + 1) % form.pool.ratio == 0)
        if (group == 0) & (thread == 0):
            first, entry = position - (form.pool.ratio - 1), Int64(tensors.entries[token])
            tensors.firsts[token] = Int64(ops.select(closes, first, Int32(0)))
            tensors.entry_slots[token] = ops.select(closes, entry, Int64(NO_PLACE))
        if closes:
            registers = row_registers()
            first = position - (form.pool.ring_rows - 1)
            of_pages = (pages, columns, of_page)
            listed = listed_rows(tensors, (first, part, sequence), of_pages, form)
            read_rows(tensors, registers, listed, (chunk, of_page), form)
            choose_rows(registers, listed, form)
            pool_window(tensors, registers, shared, (token, part, chunk, within), form.pool)


@cute.jit
def pool_single(
    tensors: PagedTensors,
    shared: Any,
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Keep the only token's row, and pool the window that it closes; `numbers`: group, thread.

    All other rows were kept by earlier launches, so none has to be waited for.
    """
    group, thread = numbers
    _, sequences, capacity, pages, columns, of_page = extents
    of_block = form.pool.channels // CHANNELS_OF_THREAD
    part, within = thread // of_block, thread % of_block
    chunk = group * of_block + within
    of_row, of_gate, of_entry = (
        n // CHANNELS_OF_THREAD for n in (2 * form.pool.columns, form.pool.columns, form.pool.width)
    )
    slot, position = Int64(tensors.slots[0]), Int32(tensors.positions[0])
    sequence, entry = Int32(tensors.requests[0]), Int64(tensors.entries[0])
    valid = (slot >= 0) & (slot < capacity)
    of_bias = ops.select(valid, position, Int32(0)) % form.pool.ratio * of_gate  # else anything
    kept, biases = [], []
    for half in cutlass.range_constexpr(form.pool.columns // form.pool.width):
        column = chunk + half * of_entry
        rLatent, rGate, rBias = (
            cute.make_rmem_tensor(CHANNELS_OF_THREAD, Float32) for _ in range(3)
        )
        cute.autovec_copy(tensors.projected[None, column], rLatent)
        cute.autovec_copy(tensors.projected[None, column + of_gate], rGate)
        cute.autovec_copy(tensors.ape[None, of_bias + column], rBias)
        kept.append((rLatent, rGate))
        biases.append(rBias)
    known = valid & (sequence >= 0) & (sequence < sequences)
    closes = known & ((position + 1) % form.pool.ratio == 0)
    registers = row_registers()
    first = position - (form.pool.ring_rows - 1)
    owner = ops.select(closes, sequence, Int32(0))
    listed = listed_rows(tensors, (first, part, owner), (pages, columns, of_page), form)
    if closes:
        read_rows(tensors, registers, listed, (chunk, of_page), form)
    for (_, rGate), rBias in zip(kept, biases, strict=True):
        for channel in cutlass.range_constexpr(CHANNELS_OF_THREAD):
            rGate[channel] = ops.add_rn(Float32(rGate[channel]), Float32(rBias[channel]))
    if closes:
        choose_kept(registers, listed, slot, kept, form)
        choose_rows(registers, listed, form)
        pool_window(tensors, registers, shared, (Int32(0), part, chunk, within), form.pool)
    if valid & (part == 0):
        place = Int64(Int32(slot) // form.rows) * of_page
        place += Int64(Int32(slot) % form.rows * of_row + chunk)
        for half in cutlass.range_constexpr(form.pool.columns // form.pool.width):
            more = half * of_entry
            cute.autovec_copy(kept[half][0], tensors.states[None, place + more])
            cute.autovec_copy(kept[half][1], tensors.states[None, place + (of_gate + more)])
    if (group == 0) & (thread == form.pool.threads - 1):
        told = position - (form.pool.ratio - 1)
        tensors.firsts[0] = Int64(ops.select(closes, told, Int32(0)))
        tensors.entry_slots[0] = ops.select(closes, entry, Int64(NO_PLACE))


@cute.kernel
def single_kernel(tensors: PagedTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Process the only token of a launch, by thread blocks that share its channels."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    follow()
    numbers = (Int32(group), Int32(thread))
    pool_single(tensors, shared_of(form.pool), extents, numbers, form)


@cute.kernel
def pool_kernel(tensors: PagedTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Process a token, or `span` of them, by adjacent thread blocks that share its channels."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    group = Int32(block) % form.pool.groups
    first = Int32(block) // form.pool.groups * form.span
    shared = shared_of(form.pool)
    if cutlass.const_expr(form.span == 1):
        pool_token(tensors, shared, extents, (first, group, Int32(thread)), form)
    else:
        for step in cutlass.range(form.span, unroll=1):
            pool_token(tensors, shared, extents, (first + step, group, Int32(thread)), form)


@cute.jit
def launch_pool(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are tokens, sequences, slots, pages, columns, vectors of a page."""
    tokens, sequences, capacity, pages, columns, of_page = extents
    pairs = Int64(of_page) * (FOUR // CHANNELS_OF_THREAD)
    numbers = (tokens, sequences, Int64(capacity), pages, columns, pairs)
    if tokens == 1:
        single_kernel(tensors_of(pointers, CHANNELS_OF_THREAD), numbers, form).launch(
            grid=[form.pool.groups, 1, 1],
            block=[form.pool.threads, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )
    else:
        keep_kernel(tensors_of(pointers, FOUR), (Int64(capacity), of_page), form).launch(
            grid=[tokens, 1, 1], block=[form.keeping_threads, 1, 1], use_pdl=EARLY, stream=stream
        )
        pool_kernel(tensors_of(pointers, CHANNELS_OF_THREAD), numbers, form).launch(
            grid=[-(-tokens // form.span) * form.pool.groups, 1, 1],
            block=[form.pool.threads, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[PagedPoolProblem, PagedForm]) -> tuple[Any, ...]:
    problem, pages, table = of.problem, of.problem.pages, of.tensors["table"]
    assert table is not None
    counts = (problem.tokens, problem.sequences, pages.slots, pages.count, table.shape[1])
    return ((*counts, pages.stride // facts.VECTOR_BYTES),)


def _refuse(problem: PagedPoolProblem, tensors: Mapping[str, Tensor | None]) -> None:
    """Raise on a table without columns: for a column beyond it the first is read."""
    table = tensors["table"]
    assert table is not None
    listed = max(1, table.shape[1])
    require_tensor("table", table, torch.int32, (problem.sequences, listed), 4)


def _of_tokens(problem: PagedPoolProblem) -> tuple[int, ...]:
    return (problem.tokens,)


def _mark_unlaunched(problem: PagedPoolProblem, tensors: Operands, _: CompileSettings) -> None:
    places = tensors["places"]
    if places is not None and not problem.tokens * problem.sequences:
        places.fill_(NO_PLACE)


_Operand = Operand[PagedPoolProblem]
_FLOATS = Storage(Float32, torch.float32, facts.VECTOR_BYTES)
_STATES = Storage(Float32, torch.uint8, facts.VECTOR_BYTES)
_VALUES = Storage(Uint32, torch.bfloat16, facts.VECTOR_BYTES)
_WORDS, _PLACES = Storage(Int32, torch.int32, 4), Storage(Int64, torch.int64, 8)
KERNEL = Kernel[PagedPoolProblem, PagedForm](
    entry=launch_pool,
    operands=(
        _Operand("projected", _FLOATS, lambda p: (p.tokens, 2 * p.columns)),
        _Operand("ape", _FLOATS, lambda p: (p.ratio, p.columns)),
        _Operand("requests", _WORDS, _of_tokens),
        _Operand("positions", _PLACES, _of_tokens),
        _Operand("slots", _PLACES, _of_tokens),
        _Operand("table", _WORDS, lambda p: (p.sequences, ANY)),
        _Operand("entries", _PLACES, _of_tokens),
        _Operand("states", _STATES, lambda p: (p.pages.count, p.pages.stride)),
        _Operand("pooled", _VALUES, lambda p: (p.tokens, p.width), output=True, label="values"),
        _Operand("firsts", _PLACES, _of_tokens, output=True, label="positions"),
        _Operand("places", _PLACES, _of_tokens, output=True, label="slots"),
    ),
    choose_form=facts.choose_paged_form,
    kinds=((Int32,) * 6,),
    numbers=_numbers,
    work=lambda problem: problem.tokens * problem.sequences,
    refuse=_refuse,
    after=_mark_unlaunched,
)
compile_form = KERNEL.compile_form
