"""Gather entries of the paged latent cache by slot and decode them to BF16 rows [R, L].

A warp has an entry, four warps a thread block; lanes read codes and BF16 values in storage order
and write 16 bytes each. Decoding is exact before its one rounding to BF16. That rounding only
affects fp8 values below BF16's normal range, and values whose scales are no powers of two (V3.2).

An index below 0 gives a row of zeros; one beyond the cache gives NaN, so that the error shows. An
index may be repeated. Never waits for the GPU, so it may be captured in a graph. Shape letters: R
rows, L width (512, 128, 576), N pages, B bytes of a page.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

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
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import TARGETS, target_of_device

THREADS = facts.WARPS * rows.LANES
ALIGNMENTS = (4, 16, 16)  # of indices, rows, cache
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
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: ReadForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    arguments = (_pointers((None,) * 3), _extents(None), form, any_stream())
    return compile_kernel(launch_read, arguments, TARGETS[form.target], settings)


def kv_read(
    indices_R: Tensor,
    cache_NB: Tensor,
    problem: ReadProblem,
    settings: CompileSettings,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return BF16 rows [R, L] of the entries that int32 indices name, on their GPU."""
    if out is None:
        shape = (problem.count, problem.pages.width)
        out = torch.empty(shape, dtype=torch.bfloat16, device=indices_R.device)
    require_operands(problem, indices_R, out, cache_NB)
    tensors = (indices_R, out, cache_NB)
    device = require_device(tensors)
    if problem.count:
        form = facts.choose_read_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), problem, tensors)
    return out


def launch(kernel: CompiledKernel, problem: ReadProblem, tensors: tuple[Tensor, ...]) -> None:
    """Launch on checked tensors: indices, rows, cache."""
    device = tensors[0].device.index or 0
    kernel(_pointers(tensors), _extents(problem), current_stream(device))


def require_operands(
    problem: ReadProblem, indices_R: Tensor, out: Tensor, cache_NB: Tensor
) -> None:
    """Raise on tensors that the kernel would misread."""
    pages = problem.pages
    require_tensor("indices", indices_R, torch.int32, (problem.count,), ALIGNMENTS[0])
    require_tensor("rows", out, torch.bfloat16, (problem.count, problem.pages.width), ALIGNMENTS[1])
    require_tensor("cache", cache_NB, torch.uint8, (pages.count, pages.stride), ALIGNMENTS[2])


def _extents(problem: ReadProblem | None) -> tuple[Any, ...]:
    """Return the extents of a launch; without a problem, ones to compile with."""
    kinds = (Int32, Int32, Int32, Int32, Uint32, Uint32, Int32)
    if problem is None:
        return tuple(kind(1) for kind in kinds)
    pages = problem.pages
    of_page = (pages.entries, pages.stride // facts.VECTOR, *facts.page_magic(pages.entries))
    numbers = (problem.count, pages.slots, *of_page, facts.grid(problem.count))
    return tuple(kind(number) for kind, number in zip(kinds, numbers, strict=True))


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    indices_R, out, cache_NB = tensors
    views = ((Uint32, 16), (Uint32, 8), (Uint32, 4), (Uint8, 1))
    return (
        pointer(Int32, indices_R, ALIGNMENTS[0]),
        pointer(Uint32, out, ALIGNMENTS[1]),
        *(pointer(element, cache_NB, alignment) for element, alignment in views),
    )
