"""Row kernels of a mixture of experts: plan the rows, gather and quantise them, combine results.

For sm_90a and sm_100a; the layout is that of moe.problem. The GPU alone knows how many slots an
expert has.
* plan, two kernels of one thread block per expert. count: mark every slot as having no row, count
  the expert's slots. place: sum padded counts of the experts before, then give each slot its row by
  warp ballots; warps have contiguous slots. No atomics, so the order of slots is kept and the same
  in every run.
* gather: a thread per block of 16 of a row; read the slot's token, quantise it with its expert's
  decode scale (canonical NVFP4); rows that fill a tile become zeros.
* combine: a thread per eight columns of a token; sum its slots in order in float32, with routing
  weights or without; add the shared expert's row and round once to BF16, or store float32.

Nothing here synchronises with the host or allocates, so it can be captured in a CUDA graph.
Shape letters: T tokens, K chosen, S slots = T K, R rows at most, E experts here, G experts in all,
D hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, round_up
from degarble.kernels.moe import problem as facts
from degarble.kernels.moe.problem import PLANNED, CombineProblem, RowsForm, RowsProblem
from degarble.kernels.primitives import device_words as words
from degarble.kernels.primitives import quantise_problem
from degarble.kernels.runtime.kernel import (
    Kernel,
    LaunchContext,
    Operand,
    Operands,
    Presence,
    Storage,
)
from degarble.kernels.runtime.pdl import EARLY, follow

LANES, WARPS = 32, 8
THREADS = LANES * WARPS
EVERY_LANE = 0xFFFF_FFFF
FLAT = 1 << 30
CHUNK = 8  # numbers of a row that a thread of `combine` sums


def flat(pointers: Sequence[Any]) -> tuple[Any, ...]:
    """View pointers as unbounded tensors; kernels check their extents."""
    return tuple(cute.make_tensor(pointer, cute.make_layout(FLAT)) for pointer in pointers)


def in_words(pointer: Any, count: int) -> Any:
    """View a pointer as (adjacent words, places)."""
    return cute.make_tensor(pointer, cute.make_layout((count, FLAT), stride=(1, count)))


# ---- which row is whose --------------------------------------------------------------------------


@cute.jit
def expert_here(chosen: Any, local: Any, slot: Any, extents: Any) -> Any:
    """Return the local number of a slot's expert; -1 if it is elsewhere or no such slot exists.

    Without a map every expert is here, under its own number.
    """
    slots, routed, experts, mapped = extents
    found = Int32(facts.NONE)
    if slot < slots:
        expert = Int32(chosen[slot])
        if (expert >= 0) & (expert < routed):
            found = expert
            if mapped > 0:
                found = Int32(local[expert])
    if found >= experts:
        found = Int32(facts.NONE)
    return found


@cute.kernel
def count_kernel(tensors: tuple[Any, ...], extents: tuple[Int32, ...]) -> None:
    """Count the slots of one expert, and mark every slot as having no row."""
    follow()
    chosen, local, _, counts, _, _, places = tensors
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    slots = extents[0]
    for slot in cutlass.range(expert * THREADS + thread, slots, blocks * THREADS, unroll=1):
        places[slot] = Int32(facts.NONE)
    found = Int32(0)
    for slot in cutlass.range(thread, slots, THREADS, unroll=4):
        found += Int32(expert_here(chosen, local, slot, extents) == expert)
    sFound = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), 16)
    total = summed(found, sFound, thread)
    if thread == 0:
        counts[expert] = total


@cute.jit
def summed(number: Any, shared: Any, thread: Any) -> Any:
    """Return the sum of all threads' numbers, in every thread."""
    for distance in cutlass.range_constexpr(5):
        number += cute.arch.shuffle_sync_bfly(number, offset=1 << distance)
    if thread % LANES == 0:
        shared[thread // LANES] = number
    cute.arch.sync_threads()
    total = Int32(0)
    for warp in cutlass.range_constexpr(WARPS):
        total += Int32(shared[warp])
    cute.arch.sync_threads()
    return total


@cute.kernel
def place_kernel(
    tensors: tuple[Any, ...], extents: tuple[Int32, ...], tile: cutlass.Constexpr
) -> None:
    """Give one expert's slots their rows; each warp has contiguous slots."""
    follow()
    chosen, local, rows, counts, experts, slot_of, places = tensors
    thread, _, _ = cute.arch.thread_idx()
    expert, _, _ = cute.arch.block_idx()
    slots, _, number, _ = extents
    lane, warp = thread % LANES, thread // LANES
    shared = cutlass.memory.SmemAllocator().allocate_tensor(Int32, cute.make_layout(WARPS), 16)

    # Rows of the experts before this one, and of all; padded to whole tiles.
    before, whole = Int32(0), Int32(0)
    for each in cutlass.range(thread, number, THREADS, unroll=1):
        padded = round_up(Int32(counts[each]), tile)
        whole += padded
        if each < expert:
            before += padded
    before, whole = summed(before, shared, thread), summed(whole, shared, thread)
    own = Int32(counts[expert])
    if (expert == 0) & (thread == 0):
        rows[0] = whole

    of_warp = round_up(ceil_div(slots, WARPS), LANES)
    first, end = warp * of_warp, cutlass.min((warp + 1) * of_warp, slots)
    found = Int32(0)
    for at in cutlass.range(first, end, LANES, unroll=1):
        is_mine = expert_here(chosen, local, at + lane, extents) == expert
        found += cute.arch.popc(cute.arch.vote_ballot_sync(is_mine))
    if lane == 0:
        shared[warp] = found
    cute.arch.sync_threads()
    # First row of this warp's slots: those of lower warps come before.
    row = before
    for lower in cutlass.range_constexpr(WARPS):
        if lower < warp:
            row += Int32(shared[lower])
    below = cute.arch.lanemask_lt()
    for at in cutlass.range(first, end, LANES, unroll=1):
        is_mine = expert_here(chosen, local, at + lane, extents) == expert
        ballot = cute.arch.vote_ballot_sync(is_mine)
        # Lower lanes with the same expert come first, so slots stay in order.
        mine = row + cute.arch.popc(ballot & below)
        if is_mine:
            places[at + lane] = mine
            slot_of[mine] = at + lane
        row += cute.arch.popc(ballot)

    after = before + round_up(own, tile)
    # Rows of zeros at the end of the group.
    for each in cutlass.range(before + own + thread, after, THREADS, unroll=1):
        slot_of[each] = Int32(facts.NONE)
    for each in cutlass.range(before // tile + thread, after // tile, THREADS, unroll=1):
        experts[each] = expert


@cute.jit
def launch_plan(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch count and place on slots, experts in all, experts here, whether a map exists."""
    tensors, blocks = flat(pointers), extents[2]
    count_kernel(tensors, extents).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )
    place_kernel(tensors, extents, form.tile).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- rows of NVFP4 -------------------------------------------------------------------------------


class Gathering(NamedTuple):
    """Inputs and outputs of `gather`."""

    values: Any  # (words of a block, blocks) of tokens
    rows: Any
    experts: Any
    slots: Any
    decode_scale: Any  # of each expert here
    codes: Any  # (words of a block, blocks)
    scales: Any


@cute.kernel
def gather_kernel(
    tensors: Gathering,
    blocks: Int32,
    chosen: Int32,
    tile: cutlass.Constexpr,
    target: cutlass.Constexpr,
) -> None:
    """Quantise the rows of one column of tiles of 8 rows x 32 blocks."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    first, tile_column, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    thread, blocks = Uint32(thread), Uint32(blocks)
    layout = SWIZZLE_128X4
    rows = Int32(tensors.rows[0])
    padded_rows = round_up(rows, layout.row_tile)
    padded = round_up(blocks, layout.column_tile)
    walked_to = padded_rows // quantise_problem.TILE_ROWS
    for walked in cutlass.range(Int32(first), walked_to, Int32(step), unroll=1):
        row, block = quantise_problem.place_of(
            Uint32(walked), thread % 32, thread // 32, layout.name
        )
        block = Uint32(tile_column) * quantise_problem.TILE_BLOCKS + block
        code = Uint32(0)
        if (row < Uint32(rows)) & (block < blocks):
            slot = Int32(tensors.slots[row])
            token = cutlass.max(slot, 0) // chosen
            read = words.loaded(tensors.values, Int64(token) * Int64(blocks) + Int64(block))
            expert = Int32(tensors.experts[row // tile])
            scaling = words.scaling_of(Float32(tensors.decode_scale[expert]), None)
            of_block = words.scale_code_of(words.block_amax(read), scaling.share)
            factor = codecs.nvfp4_block_encode_scale(of_block, scaling.encode)
            made = words.code_words(read, factor, target)
            index = Int64(row) * Int64(blocks) + Int64(block)
            words.store(tensors.codes, index, [codecs.select(slot >= 0, word, 0) for word in made])
            code = codecs.select(slot >= 0, of_block, 0)
        if (row < Uint32(padded_rows)) & (block < padded):
            tensors.scales[layout.offset_of(row, block, None, blocks)] = Uint8(code)


@cute.jit
def launch_gather(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on blocks of a row, experts of a token, grid along x and y."""
    blocks, chosen, walkers, columns = extents
    values, rows, experts, slots, scale, codes, scales = pointers
    known, scales = flat((rows, experts, slots, scale)), flat((scales,))
    read, written = in_words(values, words.BLOCK_WORDS), in_words(codes, words.BLOCK_WORDS // 4)
    tensors = Gathering(*(read, *known, written, *scales))
    gather_kernel(tensors, blocks, chosen, form.tile, form.target).launch(
        grid=[walkers, columns, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- rows summed ---------------------------------------------------------------------------------


@cute.kernel
def combine_kernel(tensors: tuple[Any, ...], chunks: Int32, form: cutlass.Constexpr) -> None:
    """Sum eight columns of one token."""
    follow()
    rows, places, weights, shared, out = tensors
    thread, _, _ = cute.arch.thread_idx()
    token, part, _ = cute.arch.block_idx()
    chunk = part * THREADS + thread
    if chunk < chunks:
        sums = [Float32(0.0)] * CHUNK
        for k in cutlass.range_constexpr(form.chosen):
            slot = Int32(token) * form.chosen + k
            place = Int32(places[slot])
            at = Int64(cutlass.max(place, 0)) * Int64(chunks) + Int64(chunk)
            numbers = words.numbers_of(read_words(rows, at, CHUNK // 2))
            if cutlass.const_expr(form.weighted):
                numbers = weighed(numbers, Float32(weights[slot]))
            # What lies in the first row is read where a slot has none, and left out.
            sums = [
                codecs.select(place >= 0, codecs.add_rn(total, number), total)
                for total, number in zip(sums, numbers, strict=True)
            ]
        at = Int64(token) * Int64(chunks) + Int64(chunk)
        if cutlass.const_expr(form.shared):
            more = words.numbers_of(read_words(shared, at, CHUNK // 2))
            sums = [codecs.add_rn(total, number) for total, number in zip(sums, more, strict=True)]
            words.store(out, at, words.rounded_words(sums))
        else:
            words.store(out, at, [codecs.bits_of(total) for total in sums])


def weighed(numbers: list[Any], weight: Any) -> list[Any]:
    """Multiply a row's numbers by the slot's routing weight."""
    return [codecs.multiply_rn(number, weight) for number in numbers]


def read_words(tensor: Any, index: Any, count: int) -> list[Any]:
    """Read adjacent words."""
    registers = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(tensor[None, index], registers)
    return words.words_of(registers)


@cute.jit
def launch_combine(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on tokens, chunks of a row, thread blocks along a row."""
    tokens, chunks, parts = extents
    rows, places, weights, shared, out = pointers
    width = CHUNK // 2 if form.shared else CHUNK
    tensors = (
        in_words(rows, CHUNK // 2),
        *flat((places, weights)),
        in_words(shared, CHUNK // 2),
        in_words(out, width),
    )
    combine_kernel(tensors, chunks, form).launch(
        grid=[tokens, parts, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _plan_numbers(of: LaunchContext[RowsProblem, RowsForm]) -> tuple[Any, ...]:
    moe = of.problem.moe
    return ((moe.slots, moe.routed, moe.experts, int(of.problem.mapped)),)


def _require_all_here(problem: RowsProblem, _tensors: Operands) -> None:
    """Raise if experts are elsewhere, and no map says which."""
    moe = problem.moe
    if moe.experts != moe.routed and not problem.mapped:
        raise InvalidArgument(
            "experts held here",
            moe.experts,
            f"all {moe.routed}, or a map of numbers here",
            "Pass the map as `local`.",
        )


def _gather_numbers(of: LaunchContext[RowsProblem, RowsForm]) -> tuple[Any, ...]:
    moe = of.problem.moe
    blocks = moe.hidden // quantise_problem.BLOCK
    columns = ceil_div(blocks, quantise_problem.TILE_BLOCKS)
    down = ceil_div(of.problem.rows, quantise_problem.TILE_ROWS)
    at_once = of.processors * facts.WALKERS // columns
    return ((blocks, moe.chosen, min(down, max(1, at_once)), columns),)


def _combine_numbers(of: LaunchContext[CombineProblem, facts.CombineForm]) -> tuple[Any, ...]:
    chunks = of.problem.hidden // CHUNK
    return ((of.problem.tokens, chunks, ceil_div(chunks, THREADS)),)


INTEGERS = Storage(Int32, torch.int32, 4)
FLOATS = Storage(Float32, torch.float32, 4)
_BF16 = Storage(Uint32, torch.bfloat16, 16)
_MAPPED = Presence[RowsProblem](lambda p: p.mapped, lambda p: f"It says mapped={p.mapped}.")
_Rows = Operand[RowsProblem]
_Sum = Operand[CombineProblem]


def _planned(at: int) -> Operand[RowsProblem]:
    return _Rows(PLANNED[at], INTEGERS, lambda p: (p.sizes[at],), output=True)


PLAN = Kernel[RowsProblem, RowsForm](
    entry=launch_plan,
    operands=(
        _Rows(
            "experts",
            INTEGERS,
            lambda p: (p.moe.tokens, p.moe.chosen),
            label="experts of tokens",
        ),
        _Rows("local", INTEGERS, lambda p: (p.moe.routed,), _MAPPED, label="numbers here"),
        *map(_planned, range(len(PLANNED))),
    ),
    choose_form=facts.choose_rows_form,
    kinds=((Int32,) * 4,),
    numbers=_plan_numbers,
    work=lambda problem: problem.moe.tokens,
    refuse=_require_all_here,
)
GATHER = Kernel[RowsProblem, RowsForm](
    entry=launch_gather,
    operands=(
        _Rows("x", Storage(Uint32, torch.bfloat16, 32), lambda p: (p.moe.tokens, p.moe.hidden)),
        _Rows("rows", INTEGERS, lambda _: (1,)),
        _Rows("tiles", INTEGERS, lambda p: (p.sizes[2],)),
        _Rows("slots", INTEGERS, lambda p: (p.rows,)),
        _Rows("w13_input_scale", FLOATS, lambda p: (p.moe.experts,), label="input scales of w13"),
        _Rows(
            "x_codes",
            Storage(Uint32, torch.uint8, 8),
            lambda p: (p.rows, p.moe.hidden // 2),
            output=True,
        ),
        _Rows(
            "x_scales",
            Storage(Uint8, torch.uint8, 1),
            lambda p: (facts.scale_bytes(p.rows, p.moe.hidden),),
            output=True,
        ),
    ),
    choose_form=facts.choose_rows_form,
    kinds=((Int32,) * 4,),
    numbers=_gather_numbers,
    work=lambda problem: problem.moe.tokens,
)
COMBINE = Kernel[CombineProblem, facts.CombineForm](
    entry=launch_combine,
    operands=(
        _Sum("products", _BF16, lambda p: (p.rows, p.hidden)),
        _Sum("places", INTEGERS, lambda p: (p.tokens * p.chosen,)),
        _Sum("weights", FLOATS, lambda p: (p.tokens, p.chosen), label="routing weights"),
        _Sum(
            "shared",
            _BF16,
            lambda p: (p.tokens, p.hidden),
            Presence[CombineProblem](lambda p: p.shared, lambda p: f"It says shared={p.shared}."),
            label="shared expert's output",
        ),
        _Sum(
            "out",
            lambda of: _BF16 if of.shared else Storage(Uint32, torch.float32, 16),
            lambda p: (p.tokens, p.hidden),
            output=True,
        ),
    ),
    choose_form=facts.choose_combine_form,
    kinds=((Int32,) * 3,),
    numbers=_combine_numbers,
    work=lambda problem: problem.tokens,
)
compile_plan, compile_gather, compile_combine = (
    kernel.compile_form for kernel in (PLAN, GATHER, COMBINE)
)
