"""Gather entries of the paged latent cache by slot and decode them to BF16 rows [R, L].

A warp has an entry, four warps a thread block; lanes read codes and BF16 values in storage order
and write 16 bytes each. Decoding is exact before its one rounding to BF16. That rounding only
affects fp8 values below BF16's normal range, and values whose scales are no powers of two (V3.2).

An index below 0 gives a row of zeros; one beyond the cache gives NaN, so that the error shows. An
index may be repeated. Never waits for the GPU, so it may be captured in a graph. Shape letters: R
rows, L width (512, 128, 576), N pages, B bytes of a page.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import kv_problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives.device_words import (
    SLOT_WORDS,
    fp8_values,
    high_product,
    nvfp4_values,
    put,
    registers_of,
    scaled_values,
    store,
    vectors,
    words_at,
)
from degarble.kernels.primitives.kv_problem import ReadForm, ReadProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

THREADS = facts.WARPS * rows.LANES
NAN_PAIR = 0x7FC0_7FC0


# ---- device --------------------------------------------------------------------------------------


class ReadTensors(NamedTuple):
    """Kernel's tensors; the cache in vectors of 16, 8 and 4 bytes and in bytes."""

    indices: Any  # int32 [R]
    out: Any  # BF16 [R, L]
    cache_16: Any
    cache_8: Any
    cache_4: Any
    cache_1: Any


def decoded(tensors: ReadTensors, place: Any, start: Any, scales: Any, form: ReadForm) -> list[Any]:
    """Return the words of a half of an entry that begins with piece `start`."""
    entry = form.format
    block = Int64(place // (entry.block // rows.HALF))
    if entry.numbers:
        rCodes = registers_of(2, 1)
        cute.autovec_copy(tensors.cache_8[None, start * 2 + Int64(place)], rCodes[None, 0])
        scale = ops.number_of(Uint32(tensors.cache_4[scales // 4 + block]))
        return scaled_values(words_at(rCodes, 0), scale)
    code = Uint32(tensors.cache_1[scales + block]) & 0xFF
    if entry.code_bits == 8:
        rCodes = registers_of(2, 1)
        cute.autovec_copy(tensors.cache_8[None, start * 2 + Int64(place)], rCodes[None, 0])
        return fp8_values(words_at(rCodes, 0), code)
    return nvfp4_values(Uint32(tensors.cache_4[start * 4 + Int64(place)]), code)


@cute.kernel
def read_kernel(tensors: ReadTensors, extents: tuple[Any, ...], form: cutlass.Constexpr) -> None:
    """Process an index per warp: read an entry, decode, store a row."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    count, capacity, entries, pieces, multiplier, shift = extents
    lane = Int32(thread) % rows.LANES
    row = Int32(block) * facts.WARPS + Int32(thread) // rows.LANES
    entry = form.format
    codes_end, held = entry.quantised // rows.HALF, rows.cached_geometry(form.width)
    if row < count:
        index = Int32(tensors.indices[row])
        rWords = registers_of(SLOT_WORDS, held.slots)
        rWords.fill(0)
        # -1 keeps zeros, beyond the cache NaN; a valid index overwrites them below.
        if index >= capacity:
            rWords.fill(NAN_PAIR)
        if (index >= 0) & (index < capacity):
            magic = (multiplier, shift)
            of_slot = facts.place_of(Uint32(index), magic, Uint32(entries), high_product)
            start = Int64(facts.value_piece(of_slot, Uint32(pieces), entry))
            scales = Int64(of_slot[0] * Uint32(pieces)) * facts.VECTOR
            scales += Int64(facts.scale_within(of_slot[1], Uint32(entries), entry))
            for half in cutlass.range_constexpr(held.slots):
                place = half * rows.LANES + lane
                if cutlass.const_expr(facts.coded_only(entry, half)):
                    put(rWords, half, decoded(tensors, place, start, scales, form))
                else:
                    if (place >= codes_end) & (lane < held.lanes_of(half)):
                        rest = place + (entry.rest_at // facts.VECTOR - codes_end)
                        cute.autovec_copy(
                            tensors.cache_16[None, start + Int64(rest)], rWords[None, half]
                        )
                    if cutlass.const_expr(facts.coded_at_all(entry, half)):  # noqa: SIM102  traced
                        if place < codes_end:
                            put(rWords, half, decoded(tensors, place, start, scales, form))
        for half in cutlass.range_constexpr(held.slots):
            if lane < held.lanes_of(half):
                place = Int64(row) * held.chunks + half * rows.LANES
                store(tensors.out, place + Int64(lane), words_at(rWords, half))


@cute.jit
def launch_read(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are rows, slots, four of a page, thread blocks."""
    *told, blocks = extents
    shapes = (0, SLOT_WORDS, 4, 2, 0, 0)
    views = zip(pointers, shapes, strict=True)
    tensors = ReadTensors(*(vectors(address, words) for address, words in views))
    read_kernel(tensors, tuple(told), form).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[ReadProblem, ReadForm]) -> tuple[Any, ...]:
    count, pages = of.problem.count, of.problem.pages
    of_page = (pages.entries, pages.stride // facts.VECTOR, *facts.page_magic(pages.entries))
    return ((count, pages.slots, *of_page, facts.grid(count)),)


_Operand = Operand[ReadProblem]
_CACHE = Storage(Uint32, torch.uint8, 16, views=((Uint32, 8), (Uint32, 4), (Uint8, 1)))
KERNEL = Kernel[ReadProblem, ReadForm](
    entry=launch_read,
    operands=(
        _Operand("indices", Storage(Int32, torch.int32, 4), lambda p: (p.count,)),
        _Operand(
            "out",
            Storage(Uint32, torch.bfloat16, 16),
            lambda p: (p.count, p.pages.width),
            output=True,
            label="rows",
        ),
        _Operand("cache", _CACHE, lambda p: (p.pages.count, p.pages.stride)),
    ),
    choose_form=facts.choose_read_form,
    kinds=((Int32, Int32, Int32, Int32, Uint32, Uint32, Int32),),
    numbers=_numbers,
    work=lambda problem: problem.count,
)
compile_form = KERNEL.compile_form
