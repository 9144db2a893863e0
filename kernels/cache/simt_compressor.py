"""Pool windows of tokens into compressed entries: a float32 softmax over the rows of each channel.

out[w, c] = sum_r softmax_r(gate[r, c] + ape[r, c]) * latent[r, c], over 8 or 128 rows r. One source
for sm_90a and sm_100a. Rows of this call come from the projections (their gates get the bias `ape`
here), earlier rows from the ring that the sequence carries.

* `pool_kernel`: a window per `groups` thread blocks. A thread has two channels and eight rows; 128
  rows are divided among sixteen threads, whose peaks and sums meet in shared memory. Writes BF16
  entries [W, E], the position for RoPE (the window's first), and the cache slot, -1 where the
  window does not close.
* `keep_kernel`: then writes the newest rows into every ring, after all windows have read them (PDL
  wait). With one token a sequence `pool_kernel` does both.

`compressor` adds kv_write: norm, RoPE, quantise, store by slot. The indexer's keys use the same
with E = 128 and "bf16" entries. Never waits for the GPU and allocates nothing where outputs are
given, so a launch may be captured in a graph; what changes between replays lies in tensors. Shape
letters as in compressor_problem; N pages of a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute
from torch import Tensor

from degarble.harness.base.errors import InvalidArgument
from degarble.kernels.cache import compressor_problem as facts
from degarble.kernels.cache import simt_kv_write
from degarble.kernels.cache.compressor_problem import AT_ONCE, CHANNELS, PoolForm, PoolProblem
from degarble.kernels.cache.compressor_rows import (
    Place,
    Tensors,
    choose_rows,
    keeps,
    kept_registers,
    place_of,
    read_kept,
    read_new_rows,
    read_old_rows,
    read_only_new_row,
    ring_at,
    row_registers,
    write_kept,
)
from degarble.kernels.primitives.approximations import power
from degarble.kernels.primitives.kv_problem import Pages, WriteProblem
from degarble.kernels.primitives.latent_words import vectors
from degarble.kernels.primitives.nvfp4_words import rounded_words, store
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.pdl import EARLY, follow, let_follow, wait_for_front
from degarble.kernels.runtime.settings import CompileSettings
from degarble.kernels.runtime.targets import TARGETS, target_of_device

KEEPING_THREADS = 128


class Windows(NamedTuple):
    """Windows that may close, their tokens and sequences, and where their entries go.

    `closing` names tokens, numbered over all sequences; one that closes nothing, or -1, is skipped.
    With one token a sequence and W = B, `closing` and `owners` are not read: window b is that of
    sequence b. Entry e of a sequence has slot `table[b, e // entries] * entries + e % entries`.
    """

    closing: Tensor  # int32 [W]
    owners: Tensor  # int32 [W], the sequence of each
    starts: Tensor  # int64 [B], position of each sequence's first new token
    offsets: Tensor  # int32 [B + 1], number of that token, and T
    ring_of: Tensor  # int32 [B], -1: nothing is carried
    table: Tensor  # int32 [B, N], -1: no page


class Carried(NamedTuple):
    """Pooled operands: projections of this call, the gates' bias, and the rings."""

    projected: Tensor  # float32 [T, 2 F]: latents, then gates without their bias
    ape: Tensor  # float32 [ratio, F]
    rings: Tensor  # float32 [S, R, 2 F]: latents, then gates with their bias


class Entries(NamedTuple):
    """Results of `pool`."""

    values: Tensor  # BF16 [W, E], pooled
    positions: Tensor  # int64 [W], of the window's first token
    slots: Tensor  # int64 [W], -1: none


# ---- device --------------------------------------------------------------------------------------


@cute.jit
def pool_window(
    tensors: Tensors,
    registers: tuple[Any, Any],
    shared: tuple[Any, Any, Any],
    told: tuple[Any, Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Pool a thread's channels; `told` is window, part, chunk of E and of the block."""
    window, part, chunk, within = told
    latents, gates = (
        [[Float32(of[c, row]) for row in range(AT_ONCE)] for c in range(CHANNELS)]
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
        at = Int64(window) * (form.width // CHANNELS) + Int64(chunk)
        store(tensors.values, at, rounded_words(means_of(sums, shared[1:], within, form)))


def means_of(
    sums: list[tuple[Any, Any]], shared: tuple[Any, ...], within: Any, form: PoolForm
) -> list[Any]:
    """Return the means of a thread's channels, from its own sums or those of all parts."""
    totals, weighted = [[total] for total, _ in sums], [[made] for _, made in sums]
    if form.parts > 1:
        totals, weighted = (of_parts(tensor, within, form) for tensor in shared)
        totals, weighted = (
            [list(each) for each in zip(*of, strict=True)] for of in (totals, weighted)
        )
    return [facts.pooled(t, w) for t, w in zip(totals, weighted, strict=True)]


def put_own(shared: Any, within: Any, part: Any, numbers: list[Any]) -> None:
    """Write a part's numbers of its channels to shared memory."""
    for channel, number in enumerate(numbers):
        shared[within * CHANNELS + channel, part] = number


def of_parts(shared: Any, within: Any, form: PoolForm) -> list[list[Any]]:
    """Return the numbers of all parts, channel by channel."""
    return [
        [Float32(shared[within * CHANNELS + channel, part]) for channel in range(CHANNELS)]
        for part in range(form.parts)
    ]


@cute.jit
def tell_slot(tensors: Tensors, told: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Write position and slot; `told`: window, sequence, last position, closes, page, columns."""
    window, sequence, last, closes, entries, columns = told
    slot, first = Int64(facts.NOTHING), Int64(0)
    if closes:
        first = Int64(last - (form.ratio - 1))
        entry = last // form.ratio
        column = entry // entries
        if column < columns:
            page = Int32(tensors.table[sequence * columns + column])
            if page >= 0:
                slot = Int64(page) * Int64(entries) + Int64(entry % entries)
    tensors.positions[window] = first
    tensors.slots[window] = slot


def shared_of(form: PoolForm) -> tuple[Any, Any, Any]:
    """Allocate peaks and both sums of all parts, where there are several."""
    if form.parts == 1:
        return None, None, None
    memory = cutlass.memory.SmemAllocator()
    layout = cute.make_layout((form.channels, form.parts))
    peaks, totals, weighted = (memory.allocate_tensor(Float32, layout, 16) for _ in range(3))
    return peaks, totals, weighted


@cute.jit
def pool_new_rows(
    tensors: Tensors, shared: Any, extents: Any, told: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Pool a window, if it closes; `told` is window, group, thread."""
    window, group, thread = told
    tokens, sequences, rings, entries, columns = extents
    of_block = form.channels // CHANNELS
    part, within = thread // of_block, thread % of_block
    chunk = group * of_block + within
    token, sequence = Int32(tensors.closing[window]), Int32(tensors.owners[window])
    known = (token >= 0) & (token < tokens) & (sequence >= 0) & (sequence < sequences)
    if known:
        registers, back = row_registers(), form.ring_rows - 1
        read_new_rows(tensors, registers, (token - back, part, chunk), form)
        place = place_of(tensors, sequence)
        last = place.start + (token - place.begin)
        closes = (last + 1) % form.ratio == 0
        if closes:
            if last - back < place.start:
                carries, ring = ring_at(place, rings, form)
                carried = row_registers()
                read_old_rows(tensors, carried, (last - back, part, chunk, ring), form)
                choose_rows(registers, carried, place, (last - back, part, carries))
            pool_window(tensors, registers, shared, (window, part, chunk, within), form)
        if (group == 0) & (thread == 0):
            tell_slot(tensors, (window, sequence, last, closes, entries, columns), form)
    elif (group == 0) & (thread == 0):
        tensors.slots[window] = Int64(facts.NOTHING)
        tensors.positions[window] = Int64(0)


@cute.jit
def pool_alone(
    tensors: Tensors, shared: Any, extents: Any, told: tuple[Any, ...], form: cutlass.Constexpr
) -> None:
    """Pool the window of a sequence's only token, if it closes, and keep that token.

    All loads are issued before any is used; ring, page and bias need only the start.
    """
    window, group, thread = told
    _, _, rings, entries, columns = extents
    of_block = form.channels // CHANNELS
    part, within = thread // of_block, thread % of_block
    chunk = group * of_block + within
    start, ring_of = Int32(tensors.starts[window]), Int32(tensors.ring_of[window])
    place = Place(start, window, Int32(1), ring_of)
    registers, carried = row_registers(), row_registers()
    read_only_new_row(tensors, registers, (window, chunk), form)
    carries, ring = ring_at(place, rings, form)
    first, closes = start - (form.ring_rows - 1), (start + 1) % form.ratio == 0
    if closes:
        read_old_rows(tensors, carried, (first, part, chunk, ring), form)
    if (group == 0) & (thread == 0):
        tell_slot(tensors, (window, window, start, closes, entries, columns), form)
    if part == 0:
        for half in cutlass.range_constexpr(form.columns // form.width):
            column = chunk + half * (form.width // CHANNELS)
            if keeps(place, rings):
                kept = kept_registers()
                read_kept(tensors, kept, place, (window, column), form)
                write_kept(tensors, kept, place, (window, column), form)
    if closes:
        choose_rows(registers, carried, place, (first, part, carries))
        pool_window(tensors, registers, shared, (window, part, chunk, within), form)


@cute.kernel
def pool_kernel(tensors: Tensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Pool a window's channels, if it closes; one token a sequence: keep that token as well.

    The thread blocks of one window are adjacent: together they read whole rows.
    """
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    block = Int32(block)
    told = (block // form.groups, block % form.groups, Int32(thread))
    shared = shared_of(form)
    follow()  # keep_kernel reads what is no output, and waits before it writes
    if cutlass.const_expr(form.alone):
        pool_alone(tensors, shared, extents, told, form)
    else:
        pool_new_rows(tensors, shared, extents, told, form)


@cute.kernel
def keep_kernel(tensors: Tensors, rings: Any, form: cutlass.Constexpr) -> None:
    """Write a sequence's last token of a ring's row into it, a few columns a thread."""
    thread, _, _ = cute.arch.thread_idx()
    row, sequence, group = cute.arch.block_idx()
    row, column = Int32(row), Int32(group) * KEEPING_THREADS + Int32(thread)
    place = place_of(tensors, Int32(sequence))
    last = place.start + place.count - 1
    # The latest position that belongs in this row of the ring.
    position = last - (last - row) % form.ring_rows
    wanted = (place.count > 0) & (position >= place.start) & (column < form.columns // CHANNELS)
    wanted = wanted & keeps(place, rings)
    told, kept = (place.begin + (position - place.start), column), kept_registers()
    if wanted:
        read_kept(tensors, kept, place, told, form)
    # The loads above overlap the pool kernel's end; the stores may not.
    wait_for_front()  # until no window reads a ring any more
    let_follow()
    if wanted:
        write_kept(tensors, kept, place, told, form)


@cute.jit
def launch_pool(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are tokens, sequences, rings, entries of a page, columns, windows."""
    sizes = (*[CHANNELS] * 3, *[0] * 6, CHANNELS // 2, 0, 0)
    views = zip(pointers, sizes, strict=True)
    tensors = Tensors(*(vectors(address, words) for address, words in views))
    tokens, sequences, rings, entries, columns, windows = extents
    if windows > 0:
        pool_kernel(tensors, (tokens, sequences, rings, entries, columns), form).launch(
            grid=[windows * form.groups, 1, 1],
            block=[form.threads, 1, 1],
            use_pdl=EARLY,
            stream=stream,
        )
    if cutlass.const_expr(not form.alone):
        keep_kernel(tensors, rings, form).launch(
            grid=[form.ring_rows, sequences, -(-form.columns // CHANNELS // KEEPING_THREADS)],
            block=[KEEPING_THREADS, 1, 1],
            use_pdl=windows > 0,  # else it would not be the windows that it follows
            stream=stream,
        )


# ---- host ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompressorProblem:
    """Pooling, and how its entries are written into pages of the cache."""

    pool: PoolProblem
    pages: Pages
    positions: int  # rows of the table of turns, which are those of compressed layers
    epsilon: float = 1e-6
    weight: str = "bf16"

    @property
    def write(self) -> WriteProblem:
        """Return the problem of kv_write."""
        return WriteProblem(
            self.pool.windows, self.pages, self.positions, self.epsilon, self.weight
        )

    def __post_init__(self) -> None:
        if self.pages.width != self.pool.width:
            raise InvalidArgument(
                "width of cache rows", self.pages.width, f"{self.pool.width}, as entries have",
                "Build the pages for the compressor's entries.",
            )  # fmt: skip
        assert self.write


@cache
def compile_form(form: PoolForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(6))
    arguments = (_pointers((None,) * 12), extents, form, any_stream())
    return compile_kernel(launch_pool, arguments, TARGETS[form.target], settings)


def pool(
    carried: Carried,
    windows: Windows,
    problem: PoolProblem,
    settings: CompileSettings,
    *,
    page_entries: int = 1,
    out: Entries | None = None,
) -> Entries:
    """Pool on the GPU and update the rings; slots count pages of `page_entries` entries."""
    out = empty_entries(problem, carried.projected.device) if out is None else out
    require_operands(problem, carried, windows, out)
    tensors = (*carried, *windows, *out)
    device = require_device(tensors)
    if problem.sequences:
        form = facts.choose_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), problem, tensors, page_entries)
    return out


def compressor(
    carried: Carried,
    windows: Windows,
    norm: tuple[Tensor, Tensor],
    cache_NB: Tensor,
    problem: CompressorProblem,
    settings: CompileSettings,
) -> Entries:
    """Pool, norm, rotate, quantise and store; `norm` is the weight [E] and RoPE table [P, 64].

    Returns `pool`'s entries. To capture without allocating, call `pool` with `out`, then kv_write.
    """
    made = pool(carried, windows, problem.pool, settings, page_entries=problem.pages.entries)
    weight, turns = norm
    operands = simt_kv_write.Operands(made.values, weight, turns, made.positions, made.slots)
    simt_kv_write.kv_write(operands, cache_NB, problem.write, settings)
    return made


def launch(
    kernel: CompiledKernel,
    problem: PoolProblem,
    tensors: tuple[Tensor, ...],
    page_entries: int,
) -> None:
    """Launch on checked tensors: carried ones, windows, entries."""
    table = tensors[8]
    counts = (problem.tokens, problem.sequences, problem.rings, page_entries, table.shape[1])
    extents = tuple(Int32(number) for number in (*counts, problem.windows))
    kernel(_pointers(tensors), extents, current_stream(tensors[0].device.index or 0))


def empty_entries(problem: PoolProblem, device: torch.device) -> Entries:
    """Allocate the results of `pool`."""
    values = torch.empty(problem.windows, problem.width, dtype=torch.bfloat16, device=device)
    positions, slots = (
        torch.empty(problem.windows, dtype=torch.int64, device=device) for _ in range(2)
    )
    return Entries(values, positions, slots)


def empty_rings(problem: PoolProblem, device: torch.device) -> Tensor:
    """Allocate rings; no row is read before it was written."""
    shape = (problem.rings, problem.ring_rows, 2 * problem.columns)
    return torch.zeros(shape, dtype=torch.float32, device=device)


def require_operands(
    problem: PoolProblem, carried: Carried, windows: Windows, out: Entries
) -> None:
    """Raise on tensors that the kernels would misread."""
    of_row, sequences, count = 2 * problem.columns, problem.sequences, problem.windows
    shapes: tuple[tuple[torch.dtype, tuple[int, ...], int], ...] = (
        (torch.float32, (problem.tokens, of_row), 16),
        (torch.float32, (problem.ratio, problem.columns), 16),
        (torch.float32, (problem.rings, problem.ring_rows, of_row), 16),
        (torch.int32, (count,), 4),
        (torch.int32, (count,), 4),
        (torch.int64, (sequences,), 8),
        (torch.int32, (sequences + 1,), 4),
        (torch.int32, (sequences,), 4),
        (torch.int32, (sequences, windows.table.shape[-1]), 4),
        (torch.bfloat16, (count, problem.width), 16),
        (torch.int64, (count,), 8),
        (torch.int64, (count,), 8),
    )
    names = (*Carried._fields, *Windows._fields, *Entries._fields)
    given = zip(names, (*carried, *windows, *out), shapes, strict=True)
    for name, tensor, (dtype, shape, alignment) in given:
        require_tensor(name, tensor, dtype, shape, alignment)


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    floats, words = (Float32, 16), (Int32, 4)
    kinds = (*[floats] * 3, words, words, (Int64, 8), *[words] * 3, (Uint32, 16), *[(Int64, 8)] * 2)
    return tuple(
        pointer(element, tensor, alignment)
        for (element, alignment), tensor in zip(kinds, tensors, strict=True)
    )
