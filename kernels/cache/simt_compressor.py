"""Pool windows of tokens into compressed entries: a float32 softmax over the rows of each channel.

out[w, c] = sum_r softmax_r(gate[r, c] + ape[r, c]) * latent[r, c], over 8 or 128 rows r. One source
for sm_90a and sm_100a. Rows of this call come from the projections (their gates get the bias `ape`
here), earlier rows from the ring that the sequence carries.

* `pool_kernel`: a window per `groups` thread blocks. A thread has eight rows of two channels; 128
  rows are divided among sixteen threads, whose peaks and sums meet in shared memory. Of few windows
  of 128 a thread has one channel, and lanes of a warp add up first (`pool_spread`). Writes BF16
  entries [W, E], the position for RoPE (the window's first), and the cache slot, -1 where the
  window does not close.
  Of few windows with one token a sequence one more thread block writes position and slot, and for
  windows of 128 keeps the token's row (`write_slot_and_row`).
* `keep_kernel`: then writes the newest rows into every ring, after all windows have read them (PDL
  wait). With one token a sequence `pool_kernel` does both.

Then kv_write norms, rotates, quantises and stores by slot. The indexer's keys use the same with
E = 128 and "bf16" entries. What changes between replays of a graph lies in tensors. Shape letters
as in the problem; N pages of a table.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import ROWS_AT_ONCE, PoolForm, PoolProblem
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    brief_quotients,
    computed_here,
    emit,
    opaque,
    power,
    rounded_words,
    store,
    vectors,
)
from degarble.kernels.runtime.kernel import ANY, Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import (
    EARLY,
    fetch_line,
    fetch_row,
    guessed,
    let_follow,
    wait_for_front,
    wait_then_let_follow,
    wrong_guess,
)

# --------------------------------------------------------------------------------------------------
# Rows in registers: new rows of this call, carried rows of a ring.


class PoolTensors(NamedTuple):
    """Kernels' tensors; float32 in pairs."""

    projected: Any  # [T, 2 F]: latents, gates without bias
    ape: Any  # [ratio, F]
    rings: Any  # [S, R, 2 F]: latents, gates with bias
    closing: Any  # int32 [W]
    owners: Any  # int32 [W]
    starts: Any  # int64 [B]
    offsets: Any  # int32 [B + 1]
    ring_of: Any  # int32 [B]
    table: Any  # int32 [B, N]
    values: Any  # BF16 [W, E]
    positions: Any  # int64 [W]
    slots: Any  # int64 [W]


class SequenceRows(NamedTuple):
    """Rows of a sequence: first new position and its token, token count, ring; all Int32."""

    start: Any
    begin: Any
    count: Any
    ring: Any


def rows_of_sequence(tensors: PoolTensors, sequence: Any) -> SequenceRows:
    """Read the extents of a sequence's rows."""
    begin = Int32(tensors.offsets[sequence])
    count = Int32(tensors.offsets[sequence + 1]) - begin
    start, ring = Int32(tensors.starts[sequence]), Int32(tensors.ring_of[sequence])
    return SequenceRows(start, begin, count, ring)


def row_registers(form: PoolForm) -> tuple[Any, Any]:
    """Make registers for a part's latents and gates."""
    layout = cute.make_layout((form.channels_of_thread, ROWS_AT_ONCE))
    latent, gate = (cute.make_rmem_tensor(layout, Float32) for _ in range(2))
    return latent, gate


def zero_of_lane() -> Any:
    """Return 0. The compiler knows neither that it is 0 nor that all lanes have the same number.

    Trap: what it knows to be equal in a warp moves to uniform registers, and each such move waits
    for its load. Added to an index this keeps the loads of a position, a slot and the like apart.
    """
    other = cute.arch.shuffle_sync_bfly(cute.arch.lane_idx(), offset=1)
    return Int32(ops.shift_right(Uint32(other), 5))


def of_rows(form: PoolForm) -> tuple[int, int, int]:
    """Return the vectors of a row, of its latents, and of an entry."""
    row, latents, entry = map(form.vectors, (2 * form.columns, form.columns, form.width))
    return row, latents, entry


@cute.jit
def read_new_rows(
    tensors: PoolTensors,
    registers: tuple[Any, Any],
    numbers: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Read eight rows as if all came in this call; `numbers` is first token, part, chunk of E.

    So the loads are issued before the sequence's start is known; choose_rows corrects them.
    """
    first, part, chunk = numbers
    rLatent, rGate = registers
    of_row, of_gate, of_entry = of_rows(form)
    begin = first + part * ROWS_AT_ONCE
    if begin >= 0:  # rows lie a fixed distance apart: one address for all of them
        at = Int64(begin) * of_row + Int64(chunk)
        for row in cutlass.range_constexpr(ROWS_AT_ONCE):
            own = at + (row * of_row + row // form.ratio * of_entry)
            cute.autovec_copy(tensors.projected[None, own], rLatent[None, row])
            cute.autovec_copy(tensors.projected[None, own + of_gate], rGate[None, row])
    else:
        for row in cutlass.range_constexpr(ROWS_AT_ONCE):
            at = Int64(ops.maximum(begin + row, Int32(0))) * of_row + Int64(chunk)
            own = at + row // form.ratio * of_entry
            cute.autovec_copy(tensors.projected[None, own], rLatent[None, row])
            cute.autovec_copy(tensors.projected[None, own + of_gate], rGate[None, row])
    rBias, _ = row_registers(form)
    at = part * ROWS_AT_ONCE % form.ratio * of_gate + chunk
    for row in cutlass.range_constexpr(ROWS_AT_ONCE):
        # With overlap a window has its own half of the columns.
        own = at + (row % form.ratio * of_gate + row // form.ratio * of_entry)
        cute.autovec_copy(tensors.ape[None, own], rBias[None, row])
    for row in cutlass.range_constexpr(ROWS_AT_ONCE):
        for channel in cutlass.range_constexpr(form.channels_of_thread):
            biased = ops.add_rn(Float32(rGate[channel, row]), Float32(rBias[channel, row]))
            rGate[channel, row] = biased


def ring_at(place: SequenceRows, rings: Any, form: PoolForm) -> tuple[Any, Any]:
    """Return whether a sequence carries rows, and the first row of its ring."""
    carries = keeps(place, rings)
    return carries, Int64(ops.select(carries, place.ring, Int32(0))) * form.ring_rows


def vectors_of_old_rows(told: tuple[Any, Any, Any, Any], form: PoolForm) -> list[tuple[Any, Any]]:
    """Return where the latents and gates of a part's carried rows are, vectors of rings.

    `told` are the window's first position, the part, the chunk of E, and the ring's first row.
    """
    first, part, chunk, ring = told
    of_row, of_gate, of_entry = of_rows(form)
    together, found = facts.rows_in_turn(form.ratio, form.ring_rows), []
    for turn in range(ROWS_AT_ONCE // together):
        position = ops.maximum(first + (part * ROWS_AT_ONCE + turn * together), Int32(0))
        held = Int32(Uint32(position) % form.ring_rows)
        begin = ring * of_row + Int64(held * of_row + chunk)
        for step in range(together):
            row = turn * together + step
            at = begin + (step * of_row + row // form.ratio * of_entry)
            found.append((at, at + of_gate))
    return found


def read_old_rows(
    tensors: PoolTensors, carried: tuple[Any, Any], vectors_at: list[tuple[Any, Any]]
) -> None:
    """Read a part's carried rows, which are where vectors_of_old_rows says."""
    # Gates first: what follows needs them first.
    read_half(tensors, carried, vectors_at, 1)
    read_half(tensors, carried, vectors_at, 0)


def read_half(
    tensors: PoolTensors, carried: tuple[Any, Any], vectors_at: list[tuple[Any, Any]], half: int
) -> None:
    """Read the latents (0) or the gates (1) of a part's carried rows."""
    for row, places in enumerate(vectors_at):
        cute.autovec_copy(tensors.rings[None, places[half]], carried[half][None, row])


@cute.jit
def choose_rows(
    registers: tuple[Any, Any],
    carried: tuple[Any, Any],
    place: SequenceRows,
    numbers: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Replace rows from before this call by carried rows; `numbers`: first, part, carries.

    By selects, not branches: behind a branch each load would be waited for separately.
    """
    first, part, carries = numbers
    rLatent, rGate = registers
    rOld, rOldGate = carried
    together = facts.rows_in_turn(form.ratio, form.ring_rows)
    for turn in cutlass.range_constexpr(ROWS_AT_ONCE // together):
        begin = first + (part * ROWS_AT_ONCE + turn * together)
        is_there = begin >= 0
        is_old = is_there & carries
        lost = ops.select(is_there, Float32.nan, Float32(0.0))  # a ring that there is not
        # A gate of -inf: rows before the sequence's start have no weight.
        before = ops.select(is_there, Float32(0.0), -Float32.inf)
        for row in cutlass.range_constexpr(turn * together, (turn + 1) * together):
            is_new = begin + (row - turn * together) >= place.start
            for channel in cutlass.range_constexpr(form.channels_of_thread):
                latent = ops.select(is_old, Float32(rOld[channel, row]), lost)
                gate = ops.select(is_old, Float32(rOldGate[channel, row]), before)
                latent = ops.select(is_new, Float32(rLatent[channel, row]), latent)
                gate = ops.select(is_new, Float32(rGate[channel, row]), gate)
                rLatent[channel, row] = latent
                rGate[channel, row] = gate


@cute.jit
def correct_carried_rows(
    carried: tuple[Any, Any],
    kept: tuple[Any, Any, Any],
    place: SequenceRows,
    numbers: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Correct carried rows of a sequence's only token; `numbers`: first, part, carries.

    Its own row, a part's last, is new. Seldom does a row come before the sequence's start, or is
    there no ring.
    """
    first, part, carries = numbers
    rOld, rOldGate = carried
    together = facts.rows_in_turn(form.ratio, form.ring_rows)
    for turn in cutlass.range_constexpr(ROWS_AT_ONCE // together):
        begin = first + (part * ROWS_AT_ONCE + turn * together)
        is_there = begin >= 0
        if (begin < 0) | (carries == False):  # noqa: E712  traced
            lost = ops.select(is_there, Float32.nan, Float32(0.0))  # a ring that there is not
            # A gate of -inf: rows before the sequence's start have no weight.
            before = ops.select(is_there, Float32(0.0), -Float32.inf)
            for row in cutlass.range_constexpr(turn * together, (turn + 1) * together):
                for channel in cutlass.range_constexpr(form.channels_of_thread):
                    rOld[channel, row] = lost
                    rOldGate[channel, row] = before
    row = ROWS_AT_ONCE - 1
    is_new = first + (part * ROWS_AT_ONCE + row) >= place.start
    for channel in cutlass.range_constexpr(form.channels_of_thread):
        old, gate = Float32(rOld[channel, row]), Float32(rOldGate[channel, row])
        rOld[channel, row] = ops.select(is_new, Float32(kept[0][channel]), old)
        rOldGate[channel, row] = ops.select(is_new, Float32(kept[1][channel]), gate)


def kept_registers(form: PoolForm) -> tuple[Any, Any, Any]:
    """Make registers for a few columns of a token: latents, gates, bias."""
    latent, gate, bias = (cute.make_rmem_tensor(form.channels_of_thread, Float32) for _ in range(3))
    return latent, gate, bias


def keeps(place: SequenceRows, rings: Any) -> Any:
    """Return whether a sequence has a ring."""
    return (place.ring >= 0) & (place.ring < rings)


@cute.jit
def read_kept(
    tensors: PoolTensors,
    kept: tuple[Any, Any, Any],
    place: SequenceRows,
    numbers: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Read a few columns of a token and their bias; `numbers` is token, column. Nothing waits."""
    token, column = numbers
    rLatent, rGate, rBias = kept
    of_row, of_gate, _ = of_rows(form)
    position = place.start + (token - place.begin)
    at = Int64(token) * of_row + Int64(column)
    cute.autovec_copy(tensors.projected[None, at], rLatent)
    cute.autovec_copy(tensors.projected[None, at + of_gate], rGate)
    cute.autovec_copy(tensors.ape[None, position % form.ratio * of_gate + column], rBias)


@cute.jit
def write_kept(
    tensors: PoolTensors,
    kept: tuple[Any, Any, Any],
    place: SequenceRows,
    numbers: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Write what read_kept read into the token's ring, the gates with their bias."""
    token, column = numbers
    rLatent, rGate, rBias = kept
    for channel in cutlass.range_constexpr(form.channels_of_thread):
        rGate[channel] = ops.add_rn(Float32(rGate[channel]), Float32(rBias[channel]))
    of_row, of_gate, _ = of_rows(form)
    position = place.start + (token - place.begin)
    held = place.ring * form.ring_rows + position % form.ring_rows
    at = Int64(held) * of_row + Int64(column)
    cute.autovec_copy(rLatent, tensors.rings[None, at])
    cute.autovec_copy(rGate, tensors.rings[None, at + of_gate])


# --------------------------------------------------------------------------------------------------
# Kernels.

KEEPING_THREADS = 128


# ---- device --------------------------------------------------------------------------------------


@cute.jit
def pool_window(
    tensors: PoolTensors,
    registers: tuple[Any, Any],
    shared: tuple[Any, Any, Any],
    numbers: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Pool a thread's channels; `numbers` is window, part, chunk of E and of the block."""
    window, part, chunk, within = numbers
    latents, gates = (
        [[Float32(of[c, row]) for row in range(ROWS_AT_ONCE)] for c in range(of.shape[0])]
        for of in registers
    )
    peaks = [facts.peak_of(of_channel) for of_channel in gates]
    if cutlass.const_expr(form.parts > 1):
        put_own(shared[0], within, part, peaks)
        cute.arch.sync_threads()
        peaks = [
            facts.peak_of(each) for each in zip(*of_parts(shared[0], within, form), strict=True)
        ]
    sums = [
        facts.part_sums(g, a, peak, power) for g, a, peak in zip(gates, latents, peaks, strict=True)
    ]
    if cutlass.const_expr(form.parts > 1):
        put_own(shared[1], within, part, [total for total, _ in sums])
        put_own(shared[2], within, part, [made for _, made in sums])
        cute.arch.sync_threads()
    if part == 0:
        at = Int64(window) * form.vectors(form.width) + Int64(chunk)
        means = brief_quotients(pairs_of(sums, shared[1:], within, form))
        store(tensors.values, at, rounded_words([Float32(means[c]) for c in range(len(sums))]))


def pairs_of(
    sums: list[tuple[Any, Any]], shared: tuple[Any, ...], within: Any, form: PoolForm
) -> list[tuple[Any, Any]]:
    """Return what the means of a thread's channels divide, its own sums or those of all parts."""
    totals, weighted = [[total] for total, _ in sums], [[made] for _, made in sums]
    if form.parts > 1:
        totals, weighted = (of_parts(tensor, within, form) for tensor in shared)
        totals, weighted = (
            [list(each) for each in zip(*of, strict=True)] for of in (totals, weighted)
        )
    return [facts.sums_of_parts(t, w) for t, w in zip(totals, weighted, strict=True)]


def put_own(shared: Any, within: Any, part: Any, numbers: list[Any]) -> None:
    """Write a part's numbers of its channels to shared memory."""
    for channel, number in enumerate(numbers):
        shared[within * len(numbers) + channel, part] = number


def of_parts(shared: Any, within: Any, form: PoolForm) -> list[list[Any]]:
    """Return the numbers of all parts, channel by channel."""
    return [
        [
            Float32(shared[within * form.channels_of_thread + channel, part])
            for channel in range(form.channels_of_thread)
        ]
        for part in range(form.parts)
    ]


@cute.jit
def pool_spread(
    tensors: PoolTensors,
    registers: tuple[Any, Any],
    shared: tuple[Any, Any, Any],
    numbers: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Pool a thread's channel; `numbers` as above. The last parts meet in shared memory."""
    window, part, chunk, within = numbers
    latents, gates = ([Float32(of[0, row]) for row in range(ROWS_AT_ONCE)] for of in registers)
    warp, first = part % facts.SPREAD_WARPS, part < facts.SPREAD_WARPS
    peak = over_warp(facts.peak_of(gates), ops.maximum, form)
    if first:
        shared[0][warp, within] = peak
    cute.arch.sync_threads()
    peak = facts.peak_of(of_warps(shared[0], within))
    total, weighted = facts.part_sums(gates, latents, peak, power)
    total, weighted = (over_warp(each, ops.add_rn, form) for each in (total, weighted))
    if first:
        shared[1][warp, within] = total
        shared[2][warp, within] = weighted
    cute.arch.sync_threads()
    if (part == 0) & (within < form.channels // 2):
        pairs = [
            facts.sums_of_parts(of_warps(shared[1], channel), of_warps(shared[2], channel))
            for channel in (2 * within, 2 * within + 1)
        ]
        means = brief_quotients(pairs)
        at = Int64(window) * (form.width // 2) + Int64((chunk - within) // 2 + within)
        store(tensors.values, at, rounded_words([Float32(means[channel]) for channel in (0, 1)]))


def over_warp(number: Any, of_both: Any, form: PoolForm) -> Any:
    """Fold a warp's parts, which are lanes of the same channel: the first steps of their order."""
    distance = rows.LANES // 2
    while distance >= form.channels:
        other = cute.arch.shuffle_sync_bfly(number, offset=distance)
        number = of_both(number, other)
        distance //= 2
    return number


def of_warps(shared: Any, channel: Any) -> list[Any]:
    """Return the numbers of a channel that the warps have left."""
    read = cute.make_rmem_tensor(facts.SPREAD_WARPS, Float32)
    cute.autovec_copy(shared[None, channel], read)
    return [Float32(read[warp]) for warp in range(facts.SPREAD_WARPS)]


@cute.jit
def write_slot(tensors: PoolTensors, numbers: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Write position and slot.

    `numbers`: window, sequence, last position, closes, entries of a page, columns.
    """
    window, sequence, last, closes, entries, columns = numbers
    asked = ask_for_page(tensors, (sequence, last, closes, entries, columns), form)
    put_slot(tensors, (window, last, closes, entries), asked, form)


@cute.jit
def ask_for_page(
    tensors: PoolTensors, numbers: tuple[Any, ...], form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return the page of a window's entry, -1 for none, and its row there; nothing waits here."""
    sequence, last, closes, entries, columns = numbers
    entry = last // form.ratio
    column, page = entry // entries, Int32(facts.NO_PLACE)
    if closes & (column < columns):
        page = Int32(tensors.table[sequence * columns + column])
    return page, entry % entries


@cute.jit
def put_slot(
    tensors: PoolTensors, numbers: tuple[Any, ...], asked: tuple[Any, Any], form: cutlass.Constexpr
) -> None:
    """Write position and slot; `numbers`: window, last position, closes, entries of a page."""
    window, last, closes, entries = numbers
    page, within = asked
    first = Int64(last - (form.ratio - 1))
    slot = Int64(page) * Int64(entries) + Int64(within)
    tensors.positions[window] = ops.select(closes, first, Int64(0))
    tensors.slots[window] = ops.select(page >= 0, slot, Int64(facts.NO_PLACE))


def shared_of(form: PoolForm) -> tuple[Any, Any, Any]:
    """Allocate peaks and both sums of all parts, where there are several."""
    if form.parts == 1:
        return None, None, None
    memory = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((form.channels, form.parts))
    if form.spread:
        layout = cute.make_layout((facts.SPREAD_WARPS, form.channels))
    peaks, totals, weighted = (memory.allocate_tensor(Float32, layout, 16) for _ in range(3))
    return peaks, totals, weighted


@cute.jit
def pool_new_rows(
    tensors: PoolTensors,
    shared: Any,
    extents: Any,
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Pool a window, if it closes; `numbers` is window, group, thread."""
    window, group, thread = numbers
    tokens, sequences, rings, entries, columns = extents
    part, within = form.place_of(thread)
    chunk = group * form.vectors(form.channels) + within
    token, sequence = Int32(tensors.closing[window]), Int32(tensors.owners[window])
    known = (token >= 0) & (token < tokens) & (sequence >= 0) & (sequence < sequences)
    if known:
        registers, back = row_registers(form), form.ring_rows - 1
        read_new_rows(tensors, registers, (token - back, part, chunk), form)
        place = rows_of_sequence(tensors, sequence)
        last = place.start + (token - place.begin)
        closes = (last + 1) % form.ratio == 0
        if closes:
            if last - back < place.start:
                carries, ring = ring_at(place, rings, form)
                carried = row_registers(form)
                told = (last - back, part, chunk, ring)
                read_old_rows(tensors, carried, vectors_of_old_rows(told, form))
                choose_rows(registers, carried, place, (last - back, part, carries), form)
            pool_window(tensors, registers, shared, (window, part, chunk, within), form)
        if (group == 0) & (thread == 0):
            write_slot(tensors, (window, sequence, last, closes, entries, columns), form)
    elif (group == 0) & (thread == 0):
        tensors.slots[window] = Int64(facts.NO_PLACE)
        tensors.positions[window] = Int64(0)


@cute.jit
def pool_alone(  # noqa: PLR0915  in the order in which it waits
    tensors: PoolTensors,
    shared: Any,
    extents: Any,
    numbers: tuple[Any, ...],
    form: cutlass.Constexpr,
) -> None:
    """Pool the window of a sequence's only token, if it closes, and keep that token.

    Start and ring are guessed before the launch in front has ended, so that one wait is for all
    loads.
    """
    window, group, thread = numbers
    _, _, rings, entries, columns = extents
    part, within = form.place_of(thread)
    chunk = group * form.vectors(form.channels) + within
    writes, carried = (group == 0) & (thread == form.threads - 1), row_registers(form)
    kept = [kept_registers(form) for _ in range(form.columns // form.width)]
    biases = [rBias for _, _, rBias in kept]

    supposed, ring_of = guessed(tensors.starts, window), guessed(tensors.ring_of, window)
    guess = SequenceRows(ops.maximum(supposed, Int32(0)), window, Int32(1), ring_of)
    window += zero_of_lane()
    _, ring = ring_at(guess, rings, form)
    would_close = (guess.start + 1) % form.ratio == 0
    reading = (guess.start - (form.ring_rows - 1), part, chunk, ring)
    if cutlass.const_expr(form.few):
        # Where no window closes all parts read the same rows, and no load waits for a branch.
        reading = (*(ops.select(would_close, each, Int32(0)) for each in reading[:2]), chunk, ring)
        would_close = cutlass.Boolean(True)
    read_biases(tensors, biases, (guess.start, chunk), form)  # a weight
    vectors_at = vectors_of_old_rows(reading, form)
    if cutlass.const_expr(form.few):
        for at, of_gate_at in vectors_at:
            fetch_row(tensors.rings, at)
            fetch_row(tensors.rings, of_gate_at)
    else:
        listed = listed_page(guess.start, (window, entries, columns), form)
    wait_for_front()

    read_token(tensors, kept, (window, chunk), form)
    if would_close:
        read_half(tensors, carried, vectors_at, 1)
    # No load from one side of a barrier is moved to the other. The guesses are judged while the
    # last rows are on their way.
    cute.arch.sync_warp()
    start, true_ring = Int32(tensors.starts[window]), Int32(tensors.ring_of[window])
    cute.arch.sync_warp()
    if would_close:
        read_half(tensors, carried, vectors_at, 0)
    rPage = cute.make_rmem_tensor(1, Int32)
    rPage[0] = Int32(facts.NO_PLACE)
    if cutlass.const_expr(not form.few):  # noqa: SIM102  the first is settled when traced
        if columns > 0:
            rPage[0] = Int32(tensors.table[listed])
    cute.arch.sync_warp()
    # Trap: where the true numbers took over, what follows from them would be computed behind all
    # loads, and the guesses' registers would receive rows. So the guesses stand, if they were true.
    rKnown = cute.make_rmem_tensor(2, Int32)  # start, ring
    rKnown[0], rKnown[1] = opaque(supposed), opaque(ring_of)
    if wrong_guess(start, supposed) | wrong_guess(true_ring, ring_of):
        rKnown[0], rKnown[1] = start, true_ring
        read_biases(tensors, biases, (ops.maximum(start, Int32(0)), chunk), form)
        if cutlass.const_expr(not form.few):  # noqa: SIM102  as above
            if columns > 0:
                at = listed_page(start, (window, entries, columns), form)
                rPage[0] = Int32(tensors.table[at])
        if (start + 1) % form.ratio == 0:
            _, ring = ring_at(SequenceRows(start, window, Int32(1), true_ring), rings, form)
            told = (start - (form.ring_rows - 1), part, chunk, ring)
            read_old_rows(tensors, carried, vectors_of_old_rows(told, form))
    place = SequenceRows(Int32(rKnown[0]), window, Int32(1), Int32(rKnown[1]))
    first, closes = place.start - (form.ring_rows - 1), (place.start + 1) % form.ratio == 0
    carries = keeps(place, rings)
    add_biases(kept, form)
    if closes:
        correct_carried_rows(carried, kept[-1], place, (first, part, carries), form)
    row = KeptRow((part == 0) & carries, kept, place, chunk)
    slot = FoundSlot(writes, closes, Int32(rPage[0]), entries, columns)
    # Trap: beside the sums of several parts their registers would be spilled.
    if cutlass.const_expr(form.parts > 1):
        keep_row_and_put_slot(tensors, row, slot, form)
    if closes:
        if cutlass.const_expr(form.spread):
            pool_spread(tensors, carried, shared, (window, part, chunk, within), form)
        else:
            pool_window(tensors, carried, shared, (window, part, chunk, within), form)
    if cutlass.const_expr(form.parts == 1):
        keep_row_and_put_slot(tensors, row, slot, form)


def listed_page(start: Any, numbers: tuple[Any, Any, Any], form: PoolForm) -> Any:
    """Return where a window's page is listed, or any place; `numbers`: window, entries, columns."""
    window, entries, columns = numbers
    column = Int32(Uint32(ops.maximum(start, Int32(0))) // form.ratio) // entries
    return window * columns + ops.select(column < columns, column, Int32(0))


def read_biases(tensors: Any, biases: list[Any], numbers: tuple[Any, Any], form: PoolForm) -> None:
    """Read the bias of a token's gates; `numbers`: its position, not negative, and the chunk."""
    position, chunk = numbers
    _, of_gate, of_entry = of_rows(form)
    for half, rBias in enumerate(biases):
        at = position % form.ratio * of_gate + chunk + half * of_entry
        cute.autovec_copy(tensors.ape[None, at], rBias)


def read_token(tensors: Any, kept: list[Any], numbers: tuple[Any, Any], form: PoolForm) -> None:
    """Read a thread's columns of a token's row; `numbers`: token, chunk."""
    token, chunk = numbers
    of_row, of_gate, of_entry = of_rows(form)
    for half, (rLatent, rGate, _) in enumerate(kept):
        at = Int64(token) * of_row + Int64(chunk + half * of_entry)
        cute.autovec_copy(tensors.projected[None, at], rLatent)
        cute.autovec_copy(tensors.projected[None, at + of_gate], rGate)


def add_biases(kept: list[Any], form: PoolForm) -> None:
    """Add to gates what read_biases read."""
    for _, rGate, rBias in kept:
        for channel in range(form.channels_of_thread):
            rGate[channel] = ops.add_rn(Float32(rGate[channel]), Float32(rBias[channel]))


class KeptRow(NamedTuple):
    """A thread's columns of the row of a sequence's only token."""

    wanted: Any  # whether this thread writes them
    kept: Any  # registers
    place: Any
    chunk: Any


class FoundSlot(NamedTuple):
    """What the slot of a sequence's only window follows from."""

    wanted: Any  # whether this thread writes it
    closes: Any
    page: Any
    entries: Any  # of a page
    columns: Any  # of the table


@cute.jit
def keep_row_and_put_slot(
    tensors: PoolTensors, row: KeptRow, slot: FoundSlot, form: cutlass.Constexpr
) -> None:
    """Write columns of the token's row, and position and slot, what no other block writes."""
    keeps_row, kept, place, chunk = row
    writes, closes, page, entries, columns = slot
    if cutlass.const_expr(form.turns_of_row == 0):  # noqa: SIM102  the first is settled when traced
        if keeps_row:
            keep_row(tensors, kept, place, chunk, form)
    if cutlass.const_expr(not form.few):  # noqa: SIM102  as above
        if writes:
            within, listed = place_in_page(place.start, (entries, columns), form)
            found = ops.select(closes & listed, page, Int32(facts.NO_PLACE))
            put_slot(tensors, (place.begin, place.start, closes, entries), (found, within), form)


def keep_row(
    tensors: PoolTensors, kept: list[Any], place: SequenceRows, chunk: Any, form: PoolForm
) -> None:
    """Write a thread's columns of the token's row into the ring; `chunk` as above.

    Another thread block may read that row in the same launch: its value is replaced or not used.
    """
    of_row, of_gate, of_entry = of_rows(form)
    held = place.ring * form.ring_rows + place.start % form.ring_rows
    for half, (rLatent, rGate, _) in enumerate(kept):
        at = Int64(held) * of_row + Int64(chunk + half * of_entry)
        cute.autovec_copy(rLatent, tensors.rings[None, at])
        cute.autovec_copy(rGate, tensors.rings[None, at + of_gate])


@cute.jit
def write_slot_and_row(
    tensors: PoolTensors, extents: Any, numbers: tuple[Any, Any], form: cutlass.Constexpr
) -> None:
    """Write position and slot of the window of a sequence's only token, and of 128 keep its row.

    `numbers`: window, thread. The start is guessed as in pool_alone, whose blocks need not wait for
    the page, nor for the token's row to be written.
    """
    window, thread = numbers
    _, _, rings, entries, columns = extents
    supposed = guessed(tensors.starts, window)
    chunks = [turn * form.threads + thread for turn in range(form.turns_of_row)]
    kept = [kept_registers(form) for _ in chunks]
    biases = [rBias for _, _, rBias in kept]
    for rBias, chunk in zip(biases, chunks, strict=True):
        read_biases(tensors, [rBias], (ops.maximum(supposed, Int32(0)), chunk), form)
    rPlace = cute.make_rmem_tensor(2, Int32)  # row in the page, whether the page is listed
    put_place(rPlace, supposed, (entries, columns), form)
    place_of_page = listed_page(supposed, (window, entries, columns), form)
    of_page = computed_here(tensors.table.iterator.toint() + Int64(place_of_page) * 4)
    if columns > 0:
        fetch_line(of_page)  # and so the address is there behind the wait
    wait_for_front()
    window += zero_of_lane()
    for of_turn, chunk in zip(kept, chunks, strict=True):
        read_token(tensors, [of_turn], (window, chunk), form)
    rPage = cute.make_rmem_tensor(1, Int32)
    rPage[0] = Int32(facts.NO_PLACE)
    if columns > 0:
        rPage[0] = emit("ld.global.b32 {$w0}, [{$r0}];", Int32, of_page)
    start, ring = Int32(tensors.starts[window]), Int32(tensors.ring_of[window])
    if wrong_guess(start, supposed):
        put_place(rPlace, start, (entries, columns), form)
        for rBias, chunk in zip(biases, chunks, strict=True):
            read_biases(tensors, [rBias], (ops.maximum(start, Int32(0)), chunk), form)
        if columns > 0:
            at = listed_page(start, (window, entries, columns), form)
            rPage[0] = Int32(tensors.table[at])
    place = SequenceRows(start, window, Int32(1), ring)
    if keeps(place, rings):
        add_biases(kept, form)
        for of_turn, chunk in zip(kept, chunks, strict=True):
            keep_row(tensors, [of_turn], place, chunk, form)
    if thread == form.threads - 1:
        closes = (start + 1) % form.ratio == 0
        listed = closes & (Int32(rPlace[1]) == 1)
        found = ops.select(listed, Int32(rPage[0]), Int32(facts.NO_PLACE))
        put_slot(tensors, (window, start, closes, entries), (found, Int32(rPlace[0])), form)


def place_in_page(start: Any, numbers: tuple[Any, Any], form: PoolForm) -> tuple[Any, Any]:
    """Return a window's row in its page, and whether the table has that page."""
    entries, columns = numbers
    entry = start // form.ratio
    return entry % entries, entry // entries < columns


def put_place(registers: Any, start: Any, numbers: tuple[Any, Any], form: PoolForm) -> None:
    """Put what place_in_page returns into registers, computed where this stands."""
    within, listed = place_in_page(start, numbers, form)
    registers[0] = opaque(within)
    registers[1] = opaque(ops.select(listed, Int32(1), Int32(0)))


@cute.kernel
def pool_kernel(tensors: PoolTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Pool a window's channels, if it closes; one token a sequence: keep that token as well.

    The thread blocks of one window are adjacent: together they read whole rows.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, window, _ = cute.arch.block_idx()
    block = Int32(block)
    numbers = (block // form.groups, block % form.groups, Int32(thread))
    shared = shared_of(form)
    if cutlass.const_expr(form.few):
        let_follow()
        if block == form.groups:
            write_slot_and_row(tensors, extents, (Int32(window), Int32(thread)), form)
        else:
            numbers = (Int32(window), block, Int32(thread))
            pool_alone(tensors, shared, extents, numbers, form)
    elif cutlass.const_expr(form.alone):
        let_follow()
        pool_alone(tensors, shared, extents, numbers, form)
    else:
        # keep_kernel reads, before it waits, what launches before this one made.
        wait_then_let_follow()
        pool_new_rows(tensors, shared, extents, numbers, form)


@cute.kernel
def keep_kernel(tensors: PoolTensors, rings: Any, form: cutlass.Constexpr) -> None:
    """Write a sequence's last token of a ring's row into it, a few columns a thread."""
    thread, _, _ = cute.arch.thread_idx()
    row, sequence, group = cute.arch.block_idx()
    row, column = Int32(row), Int32(group) * KEEPING_THREADS + Int32(thread)
    place = rows_of_sequence(tensors, Int32(sequence))
    position = facts.newest_in_row(place.start + place.count - 1, row, form.ring_rows)
    wanted = (place.count > 0) & (position >= place.start) & (column < form.vectors(form.columns))
    wanted = wanted & keeps(place, rings)
    numbers, kept = (place.begin + (position - place.start), column), kept_registers(form)
    if wanted:
        read_kept(tensors, kept, place, numbers, form)
    # The loads above overlap the pool kernel's end; the stores may not.
    wait_then_let_follow()  # until no window reads a ring any more
    if wanted:
        write_kept(tensors, kept, place, numbers, form)


@cute.jit
def launch_pool(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are tokens, sequences, rings, entries of a page, columns, windows."""
    sizes = (*[form.channels_of_thread] * 3, *[0] * 6, 1, 0, 0)
    views = zip(pointers, sizes, strict=True)
    tensors = PoolTensors(*(vectors(address, words) for address, words in views))
    tokens, sequences, rings, entries, columns, windows = extents
    if windows > 0:
        pool_kernel(tensors, (tokens, sequences, rings, entries, columns), form).launch(
            grid=[form.blocks, windows, 1] if form.few else [windows * form.groups, 1, 1],
            block=[form.threads, 1, 1],
            min_blocks_per_mp=int(form.few),  # fewer registers would reuse those of loads
            use_pdl=EARLY,
            stream=stream,
        )
    if cutlass.const_expr(not form.alone):
        keep_kernel(tensors, rings, form).launch(
            grid=[
                form.ring_rows,
                sequences,
                -(-form.vectors(form.columns) // KEEPING_THREADS),
            ],
            block=[KEEPING_THREADS, 1, 1],
            use_pdl=windows > 0,  # else it would not be the windows that it follows
            stream=stream,
        )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[PoolProblem, PoolForm]) -> tuple[Any, ...]:
    problem, table = of.problem, of.tensors["table"]
    assert table is not None
    counts = (problem.tokens, problem.sequences, problem.rings, problem.page_entries)
    return ((*counts, table.shape[1], problem.windows),)


def _of_windows(problem: PoolProblem) -> tuple[int, ...]:
    return (problem.windows,)


def _of_sequences(problem: PoolProblem) -> tuple[int, ...]:
    return (problem.sequences,)


# `closing` names tokens that may close a window, numbered over all sequences, and `owners` their
# sequences; one that closes nothing, or -1, is skipped. With one token a sequence and W = B neither
# is read: window b is that of sequence b. A ring is -1 where nothing is carried, and so is a page
# of `table`: entry e of a sequence has slot `table[b, e // entries] * entries + e % entries`.
# Pooled rows have the position of their window's first token, and a slot, -1 where there is none.
_Operand = Operand[PoolProblem]
_FLOATS, _VALUES = Storage(Float32, torch.float32, 16), Storage(Uint32, torch.bfloat16, 16)
_WORDS, _PLACES = Storage(Int32, torch.int32, 4), Storage(Int64, torch.int64, 8)
KERNEL = Kernel[PoolProblem, PoolForm](
    entry=launch_pool,
    operands=(
        _Operand("projected", _FLOATS, lambda p: (p.tokens, 2 * p.columns)),
        _Operand("ape", _FLOATS, lambda p: (p.ratio, p.columns)),
        _Operand("rings", _FLOATS, lambda p: (p.rings, p.ring_rows, 2 * p.columns)),
        _Operand("closing", _WORDS, _of_windows),
        _Operand("owners", _WORDS, _of_windows),
        _Operand("starts", _PLACES, _of_sequences),
        _Operand("offsets", _WORDS, lambda p: (p.sequences + 1,)),
        _Operand("ring_of", _WORDS, _of_sequences),
        _Operand("table", _WORDS, lambda p: (p.sequences, ANY)),
        _Operand("pooled", _VALUES, lambda p: (p.windows, p.width), output=True, label="values"),
        _Operand("firsts", _PLACES, _of_windows, output=True, label="positions"),
        _Operand("places", _PLACES, _of_windows, output=True, label="slots"),
    ),
    choose_form=facts.choose_pool_form,
    kinds=((Int32,) * 6,),
    numbers=_numbers,
    work=lambda problem: problem.sequences,
)
compile_form = KERNEL.compile_form
