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
    NO_PLACE,
    ROWS_AT_ONCE,
    PagedForm,
    PagedPoolProblem,
)
from degarble.kernels.cache.simt_compressor import (
    add_biases,
    kept_registers,
    of_rows,
    pool_spread,
    pool_window,
    read_biases,
    read_token,
    row_registers,
    shared_of,
    zero_of_lane,
)
from degarble.kernels.primitives.device_words import vectors
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.kernel import ANY, Kernel, LaunchContext, Operand, Operands, Storage
from degarble.kernels.runtime.operands import require_tensor
from degarble.kernels.runtime.pdl import (
    EARLY,
    fetch_row,
    follow,
    guessed,
    let_follow,
    wait_for_front,
    wrong_guess,
)

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
    shapes = (floats, floats, 0, 0, 0, 0, 0, floats, 1, 0, 0)
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


class RowPlaces(NamedTuple):
    """Where a part's rows of a window are listed: rows in turn are in one page."""

    begin: Any  # position of the first
    inside: list[Any]  # whether the table has the page of rows in turn
    listed: list[Any]  # which number of the table is their page
    rows: list[Any]  # which row of its page the first one is


def in_turn(form: PagedForm) -> int:
    """Return how many rows of a closing window lie one after the other in a page."""
    return facts.rows_in_turn(form.pool.ratio, form.rows)


def row_places(numbers: tuple[Any, ...], columns: Any, form: PagedForm) -> RowPlaces:
    """Say where the pages of a part's rows are listed; `numbers`: first position, part, sequence.

    Where the window does not close, the first position is any, and what is listed is not used.
    """
    first, part, sequence = numbers
    begin, inside, listed, rows = first + part * ROWS_AT_ONCE, [], [], []
    for row in range(0, ROWS_AT_ONCE, in_turn(form)):
        position = Uint32(ops.maximum(begin + row, Int32(0)))  # unsigned: divided by a shift
        column = Int32(position // form.rows)
        inside.append(column < columns)
        listed.append(Int64(sequence) * columns + Int64(ops.select(inside[-1], column, Int32(0))))
        rows.append(Int32(position % form.rows))
    return RowPlaces(begin, inside, listed, rows)


def is_page(page: Any, pages: Any) -> Any:
    """Return whether there is such a page."""
    return (page >= 0) & (page < pages)


class ListedRows(NamedTuple):
    """Where a part's rows of a window lie: rows in turn are in one page."""

    begin: Any  # position of the first
    found: list[Any]  # whether the page of rows in turn is there
    pages: list[Any]  # 0 where it is not
    rows: list[Any]  # which row of its page the first one is


def rows_listed(places: RowPlaces, listed: list[Any], pages: Any) -> ListedRows:
    """Say where rows lie; `listed` are the pages that a table has at their places."""
    pairs = zip(places.inside, listed, strict=True)
    found = [inside & is_page(page, pages) for inside, page in pairs]
    known = [ops.select(there, page, Int32(0)) for there, page in zip(found, listed, strict=True)]
    return ListedRows(places.begin, found, known, places.rows)


def listed_rows(
    tensors: PagedTensors, numbers: tuple[Any, ...], extents: tuple[Any, ...], form: PagedForm
) -> ListedRows:
    """Look up the pages of a part's rows, as row_places says."""
    pages, columns, _ = extents
    places = row_places(numbers, columns, form)
    return rows_listed(places, [Int32(tensors.table[at]) for at in places.listed], pages)


def rows_or_first(listed: ListedRows, closes: Any) -> ListedRows:
    """Return where rows lie, or the first rows of one page where no window closes.

    Trap: only rows of a closing window lie within their page from the first in turn on.
    """
    pages, rows = (
        [ops.select(closes, number, Int32(0)) for number in numbers]
        for numbers in (listed.pages, listed.rows)
    )
    return listed._replace(pages=pages, rows=rows)


def vectors_of_rows(
    listed: ListedRows, numbers: tuple[Any, Any], form: PagedForm
) -> list[tuple[Any, Any]]:
    """Return where the latents and gates of a part's rows are, vectors of states.

    `numbers` are the chunk of E, and the vectors of a page.
    """
    chunk, of_page = numbers
    of_row, of_gate, of_entry = of_rows(form.pool)
    together, found = in_turn(form), []
    for turn, (page, begin) in enumerate(zip(listed.pages, listed.rows, strict=True)):
        first = Int64(page) * of_page + Int64(begin * of_row + chunk)
        for step in range(together):
            row = turn * together + step
            at = first + (step * of_row + row // form.pool.ratio * of_entry)
            found.append((at, at + of_gate))
    return found


def read_rows(
    tensors: PagedTensors, registers: tuple[Any, Any], vectors_at: list[tuple[Any, Any]]
) -> None:
    """Read a part's rows of a window, which are where vectors_of_rows says."""
    rLatent, rGate = registers
    for row, (_, at) in enumerate(vectors_at):  # gates first: what follows needs them first
        cute.autovec_copy(tensors.states[None, at], rGate[None, row])
    for row, (at, _) in enumerate(vectors_at):
        cute.autovec_copy(tensors.states[None, at], rLatent[None, row])


class PlacedRows(NamedTuple):
    """What corrects a part's rows, one number for rows in turn each; all in registers."""

    there: Any  # 1 where the sequence has begun, else 0
    found: Any  # 1 where their page is there as well
    slots: Any  # int64, the slot of their first row


def placed(listed: ListedRows, form: PagedForm) -> PlacedRows:
    """Make registers of what corrects a part's rows, and fill them."""
    turns = ROWS_AT_ONCE // in_turn(form)
    there, found = (cute.make_rmem_tensor(turns, Int32) for _ in range(2))
    places = PlacedRows(there, found, cute.make_rmem_tensor(turns, Int64))
    place_again(places, listed, form)
    return places


def place_again(places: PlacedRows, listed: ListedRows, form: PagedForm) -> None:
    """Fill registers with what corrects a part's rows."""
    together = in_turn(form)
    for turn, found in enumerate(listed.found):
        is_there = listed.begin + turn * together >= 0
        first = Int64(listed.pages[turn]) * form.rows + Int64(listed.rows[turn])
        places.there[turn] = Int32(is_there)
        places.found[turn] = Int32(found)
        places.slots[turn] = first


@cute.jit
def correct_paged_rows(
    registers: tuple[Any, Any], places: PlacedRows, form: cutlass.Constexpr
) -> None:
    """Give rows before the sequence's start no weight, and make those of a missing page NaN."""
    rLatent, rGate = registers
    together = in_turn(form)
    for turn in cutlass.range_constexpr(ROWS_AT_ONCE // together):
        is_there = Int32(places.there[turn])
        if is_there * Int32(places.found[turn]) == 0:  # seldom
            # A row that should exist but has no page is NaN; one before the start is no row.
            lost = ops.select(is_there == 1, Float32.nan, Float32(0.0))
            before = ops.select(is_there == 1, Float32(0.0), -Float32.inf)
            for row in cutlass.range_constexpr(turn * together, (turn + 1) * together):
                for channel in cutlass.range_constexpr(form.pool.channels_of_thread):
                    rLatent[channel, row] = lost
                    rGate[channel, row] = before


@cute.jit
def take_kept(
    registers: tuple[Any, Any],
    places: PlacedRows,
    slot: Any,
    kept: list[Any],
    form: cutlass.Constexpr,
) -> None:
    """Take the rows of the slot that this launch fills from what it stores there.

    It is a thread's last row, or none, but where slots and pages contradict each other.
    """
    together = in_turn(form)
    for turn in cutlass.range_constexpr(ROWS_AT_ONCE // together):
        behind = slot - Int64(places.slots[turn])
        if (Int32(places.found[turn]) == 1) & (behind >= 0) & (behind < together):
            for step in cutlass.range_constexpr(together):
                take_row(registers, turn * together + step, behind == step, kept, form)


def take_row(
    registers: tuple[Any, Any], row: int, own: Any, kept: list[Any], form: PagedForm
) -> None:
    """Replace a row where it is the token's own."""
    rLatent, rGate = registers
    latents, gates = kept[row // form.pool.ratio]
    for channel in range(form.pool.channels_of_thread):
        latent, gate = Float32(rLatent[channel, row]), Float32(rGate[channel, row])
        rLatent[channel, row] = ops.select(own, Float32(latents[channel]), latent)
        rGate[channel, row] = ops.select(own, Float32(gates[channel]), gate)


def pool_rows(
    tensors: PagedTensors,
    registers: tuple[Any, Any],
    shared: Any,
    numbers: tuple[Any, Any, Any, Any],
    form: PagedForm,
) -> None:
    """Pool a thread's channels; `numbers` is token, part, chunk of E and of the block."""
    pool = pool_spread if form.pool.spread else pool_window
    pool(tensors, registers, shared, numbers, form.pool)


def closes_window(valid: Any, of: tuple[Any, Any], position: Any, form: PagedForm) -> Any:
    """Return whether a token closes a window; `of`: its sequence, and how many there are."""
    sequence, sequences = of
    known = valid & (sequence >= 0) & (sequence < sequences)
    return known & ((position + 1) % form.pool.ratio == 0)


def put_slot(tensors: PagedTensors, token: Any, numbers: tuple[Any, ...], form: PagedForm) -> None:
    """Write position and slot of a token's window; `numbers`: closes, position, entry."""
    closes, position, entry = numbers
    first = position - (form.pool.ratio - 1)
    tensors.firsts[token] = Int64(ops.select(closes, first, Int32(0)))
    tensors.entry_slots[token] = ops.select(closes, entry, Int64(NO_PLACE))


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
    part, within = form.pool.place_of(thread)
    chunk = group * form.pool.vectors(form.pool.channels) + within
    if token < tokens:
        slot, position = Int64(tensors.slots[token]), Int32(tensors.positions[token])
        sequence = Int32(tensors.requests[token])
        valid = (slot >= 0) & (slot < capacity)
        closes = closes_window(valid, (sequence, sequences), position, form)
        if (group == 0) & (thread == 0):
            put_slot(tensors, token, (closes, position, Int64(tensors.entries[token])), form)
        if closes:
            registers = row_registers(form.pool)
            first = position - (form.pool.ring_rows - 1)
            of_pages = (pages, columns, of_page)
            listed = listed_rows(tensors, (first, part, sequence), of_pages, form)
            read_rows(tensors, registers, vectors_of_rows(listed, (chunk, of_page), form))
            correct_paged_rows(registers, placed(listed, form), form)
            pool_rows(tensors, registers, shared, (token, part, chunk, within), form)


@cute.jit
def pool_single(  # noqa: PLR0915  in the order in which it waits
    tensors: PagedTensors,
    shared: Any,
    extents: tuple[Any, ...],
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Pool the window that the only token closes; `numbers`: group, thread.

    Where channels are not spread its row is kept as well; otherwise keep_single keeps it. All other
    rows were kept by earlier launches, so none has to be waited for. Position, sequence and pages
    are guessed before the launch in front has ended, so that one wait is for all loads.
    """
    group, thread = numbers
    _, sequences, capacity, pages, columns, of_page = extents
    part, within = form.pool.place_of(thread)
    chunk = group * form.pool.vectors(form.pool.channels) + within
    _, of_gate, of_entry = of_rows(form.pool)
    halves, of_thread = form.pool.columns // form.pool.width, form.pool.channels_of_thread
    kept, biases = [], []
    for _ in cutlass.range_constexpr(halves):
        rLatent, rGate, rBias = (cute.make_rmem_tensor(of_thread, Float32) for _ in range(3))
        kept.append((rLatent, rGate))
        biases.append(rBias)
    registers, back = row_registers(form.pool), form.pool.ring_rows - 1

    supposed, owner = guessed(tensors.positions, 0), guessed(tensors.requests, 0)
    supposed = ops.maximum(supposed, Int32(0))
    own = zero_of_lane() if form.pool.parts > 1 else 0  # the only token
    owner = ops.select((owner >= 0) & (owner < sequences), owner, Int32(0))
    would_close = (supposed + 1) % form.pool.ratio == 0
    places = row_places((supposed - back, part, owner), columns, form)
    asked = [guessed(tensors.table, at) for at in places.listed]
    guess = rows_listed(places, asked, pages)
    rPlaces = placed(guess, form)
    read_biases(tensors, biases, (supposed, chunk), form.pool)  # a weight
    if cutlass.const_expr(form.pool.parts == 1):
        guess = rows_or_first(guess, would_close)  # no load waits for a branch
        would_close = cutlass.Boolean(True)
    vectors_at = vectors_of_rows(guess, (chunk, of_page), form)
    if would_close:
        for at, of_gate_at in vectors_at:
            fetch_row(tensors.states, at)
            fetch_row(tensors.states, of_gate_at)
    wait_for_front()

    if would_close:
        read_rows(tensors, registers, vectors_at)
    for half in cutlass.range_constexpr(halves):
        column = chunk + half * of_entry
        cute.autovec_copy(tensors.projected[None, column], kept[half][0])
        cute.autovec_copy(tensors.projected[None, column + of_gate], kept[half][1])
    slot, entry = Int64(tensors.slots[own]), Int64(tensors.entries[own])
    cute.arch.sync_warp()  # no load from above is moved behind what waits for one from below
    rPages = cute.make_rmem_tensor(len(asked), Int32)
    for turn in cutlass.range_constexpr(len(asked)):
        rPages[turn] = Int32(tensors.table[places.listed[turn]])
    position, sequence = Int32(tensors.positions[own]), Int32(tensors.requests[own])
    cute.arch.sync_warp()
    valid = (slot >= 0) & (slot < capacity)
    closes = closes_window(valid, (sequence, sequences), position, form)
    wrong = wrong_guess(position, supposed) | wrong_guess(sequence, owner)
    for turn in cutlass.range_constexpr(len(asked)):
        wrong = wrong | wrong_guess(Int32(rPages[turn]), asked[turn])
    if wrong:
        own_position = ops.select(valid, position, Int32(0))
        read_biases(tensors, biases, (own_position, chunk), form.pool)
        if closes:
            told = (position - back, part, sequence)
            listed = listed_rows(tensors, told, (pages, columns, of_page), form)
            place_again(rPlaces, listed, form)
            read_rows(tensors, registers, vectors_of_rows(listed, (chunk, of_page), form))
    for half in cutlass.range_constexpr(halves):
        rGate, rBias = kept[half][1], biases[half]
        for channel in cutlass.range_constexpr(of_thread):
            rGate[channel] = ops.add_rn(Float32(rGate[channel]), Float32(rBias[channel]))
    if closes:
        take_kept(registers, rPlaces, slot, kept, form)
        correct_paged_rows(registers, rPlaces, form)
        pool_rows(tensors, registers, shared, (Int32(0), part, chunk, within), form)
    if cutlass.const_expr(not form.pool.spread):
        if valid & (part == 0):
            place = place_of_row(slot, chunk, of_page, form)
            for half in cutlass.range_constexpr(halves):
                more = half * of_entry
                cute.autovec_copy(kept[half][0], tensors.states[None, place + more])
                cute.autovec_copy(kept[half][1], tensors.states[None, place + (of_gate + more)])
        if (group == 0) & (thread == form.pool.threads - 1):
            put_slot(tensors, 0, (closes, position, entry), form)


def place_of_row(slot: Any, chunk: Any, of_page: Any, form: PagedForm) -> Any:
    """Return where a chunk of the row of a slot is, vectors of states."""
    of_row, _, _ = of_rows(form.pool)
    place = Int64(Int32(slot) // form.rows) * of_page
    return place + Int64(Int32(slot) % form.rows * of_row + chunk)


@cute.jit
def keep_single(
    tensors: PagedTensors, extents: tuple[Any, ...], thread: Any, form: cutlass.Constexpr
) -> None:
    """Keep the only token's row, and write position and slot; the pooling blocks wait for neither.

    They may read that row meanwhile, but take the token's own numbers in its place (take_kept).
    """
    _, sequences, capacity, _, _, of_page = extents
    _, of_gate, _ = of_rows(form.pool)
    supposed = ops.maximum(guessed(tensors.positions, 0), Int32(0))
    chunks = [turn * form.pool.threads + thread for turn in range(form.pool.turns_of_row)]
    kept = [kept_registers(form.pool) for _ in chunks]
    biases = [rBias for _, _, rBias in kept]
    for rBias, chunk in zip(biases, chunks, strict=True):
        read_biases(tensors, [rBias], (supposed, chunk), form.pool)
    wait_for_front()
    own = zero_of_lane()
    for of_turn, chunk in zip(kept, chunks, strict=True):
        read_token(tensors, [of_turn], (own, chunk), form.pool)
    slot, entry = Int64(tensors.slots[own]), Int64(tensors.entries[own])
    position, sequence = Int32(tensors.positions[own]), Int32(tensors.requests[own])
    valid = (slot >= 0) & (slot < capacity)
    if wrong_guess(position, supposed):
        for rBias, chunk in zip(biases, chunks, strict=True):
            at = ops.select(valid, position, Int32(0)), chunk
            read_biases(tensors, [rBias], at, form.pool)
    if valid:
        add_biases(kept, form.pool)
        for (rLatent, rGate, _), chunk in zip(kept, chunks, strict=True):
            place = place_of_row(slot, chunk, of_page, form)
            cute.autovec_copy(rLatent, tensors.states[None, place])
            cute.autovec_copy(rGate, tensors.states[None, place + of_gate])
    if thread == form.pool.threads - 1:
        closes = closes_window(valid, (sequence, sequences), position, form)
        put_slot(tensors, 0, (closes, position, entry), form)


@cute.kernel
def single_kernel(tensors: PagedTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Process the only token of a launch, by thread blocks that share its channels.

    Where those are spread, one more thread block keeps the token's row.
    """
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    group, thread = Int32(group), Int32(thread)
    let_follow()
    shared = shared_of(form.pool)
    if cutlass.const_expr(form.pool.spread):
        if group == form.pool.groups:
            keep_single(tensors, extents, thread, form)
        else:
            pool_single(tensors, shared, extents, (group, thread), form)
    else:
        pool_single(tensors, shared, extents, (group, thread), form)


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
    of_thread = form.pool.channels_of_thread
    vectors_of_page = Int64(of_page) * (FOUR // of_thread)
    numbers = (tokens, sequences, Int64(capacity), pages, columns, vectors_of_page)
    if tokens == 1:
        single_kernel(tensors_of(pointers, of_thread), numbers, form).launch(
            grid=[form.single_blocks, 1, 1],
            block=[form.pool.threads, 1, 1],
            min_blocks_per_mp=1,  # fewer registers would reuse those of loads under way
            use_pdl=EARLY,
            stream=stream,
        )
    else:
        keep_kernel(tensors_of(pointers, FOUR), (Int64(capacity), of_page), form).launch(
            grid=[tokens, 1, 1], block=[form.keeping_threads, 1, 1], use_pdl=EARLY, stream=stream
        )
        pool_kernel(tensors_of(pointers, of_thread), numbers, form).launch(
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
