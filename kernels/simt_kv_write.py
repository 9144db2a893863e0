"""Norm, turn, quantise latent rows and put them into the paged cache by slot, in one pass.

Owns the writing forms of kv_problem: latents (RMSNorm rounded to BF16, then RoPE rounded to BF16,
as the reference has it) or rows that are both already; fp8, nvfp4, nvfp4-v41 and bf16 entries. A
warp has a token, and its row stays in registers from the load to the store.

A slot below 0 or beyond the cache is skipped; whatever no token names is left as it was. A position
outside of the table of turns makes the turned values NaN: seen, not hidden. Two tokens of a launch
with one slot: with `duplicates="last"` the last token's entry stays, by a first kernel that claims
slots and a second that keeps and clears the claims; with "absent" the caller promises that there
are none. The wrapper checks and launches, and never waits for the GPU, so it may be captured.

Refuses other dtypes, shapes, strides and alignments by name. Kept honest by
suites/kernels/test_simt_kv_write.py: compiled for every target, and on an H200 byte for byte.
Shape letters: T tokens, L latent width (512), P positions, N pages, B bytes of a page, S slots.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.errors import InvalidArgument
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.common import attention_rows as rows
from degarble.kernels.common import kv_problem as facts
from degarble.kernels.common.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.common.kv_problem import ENTRIES, NO_CLAIM, WriteForm, WriteProblem
from degarble.kernels.common.latent_words import (
    NAN,
    WORDS,
    amax_bits,
    factor_of_row,
    fp8_words,
    load_turn,
    nvfp4_scale_code,
    nvfp4_word,
    put,
    registers_of,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.common.nvfp4_words import numbers_of, rounded_words, store
from degarble.kernels.common.operands import pointer, require_device, require_tensor
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS, target_of_device

THREADS = facts.WARPS * rows.LANES
CLAIMING_THREADS = 256
ALIGNMENTS = (16, 16, 16, 8, 8, 4, 16)
ELEMENTS = (Uint32, Uint32, Uint32, Int64, Int64, Int32)
TORCH_WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Operands(NamedTuple):
    """What a launch reads: rows [T, L], weight [L], turns [P, 64], positions [T], slots [T]."""

    values: Tensor
    weight: Tensor | None
    turns: Tensor | None
    positions: Tensor | None
    slots: Tensor
    claims: Tensor | None = None  # [S] of int32, all -1; they are -1 again afterwards


# ---- device --------------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """What the kernels read and write; the cache in vectors of 16, 8 and 4 bytes and in bytes."""

    values: Any
    weight: Any
    turns: Any
    positions: Any
    slots: Any
    claims: Any
    cache_16: Any
    cache_8: Any
    cache_4: Any
    cache_1: Any


def tensors_of(pointers: tuple[Any, ...], form: WriteForm) -> Tensors:
    """View the pointers; extents are checked by token and slot, not by these layouts."""
    of_weight = rows.HALF if form.weight == "fp32" else WORDS
    shapes = (WORDS, of_weight, 4, 0, 0, 0, 4, 2, 0, 0)
    views = zip(pointers, shapes, strict=True)
    return Tensors(*(vectors(address, words) for address, words in views))


def normed_words(rWords: Any, rWeight: Any, slot: int, factor: Any, form: WriteForm) -> list[Any]:
    """Return the normed values of a slot, rounded to BF16."""
    weights = words_at(rWeight, slot)
    fp32 = form.weight == "fp32"
    numbers = [ops.number_of(word) for word in weights] if fp32 else numbers_of(weights)
    pairs = zip(numbers_of(words_at(rWords, slot)), numbers, strict=True)
    return rounded_words([rows.normed(number, weight, factor) for number, weight in pairs])


def coded(words: list[Any], form: WriteForm) -> tuple[Any, list[Any]]:
    """Return the code of the block's scale and the words of a lane's codes."""
    entry = ENTRIES[form.entry]
    bits = amax_bits(words, entry.block // rows.HALF)
    if entry.code_bits == 8:
        code = facts.fp8_scale_code(bits)
        return code, fp8_words(words, facts.fp8_factor(code))
    code = nvfp4_scale_code(bits)
    return code, [nvfp4_word(words, code, form.target)]


@cute.kernel
def claim_kernel(slots: Any, claims: Any, tokens: Int32, capacity: Int64) -> None:
    """Let the last token with a slot claim it."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = Int32(block) * CLAIMING_THREADS + Int32(thread)
    if token < tokens:
        slot = Int64(slots[token])
        if (slot >= 0) & (slot < capacity):
            cute.arch.atomic_max((claims.iterator + slot).llvm_ptr, token)


@cute.jit
def norm_and_turn(
    tensors: Tensors,
    rWords: Any,
    place: tuple[Any, Any, Any],
    epsilon: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Norm the latent of (token, lane, positions) and turn its tail, in registers."""
    token, lane, positions = place
    position = Int64(tensors.positions[token])
    rTurn = registers_of(rows.PAIRS_OF_LANE, 2)
    rTurn.fill(NAN)
    turns = lane >= rows.FIRST_TURNED_LANE
    if turns & (position >= 0) & (position < Int64(positions)):
        load_turn(tensors.turns, rTurn, (position, lane - rows.FIRST_TURNED_LANE))
    rWeight = registers_of(tensors.weight.shape[0], rows.SLOTS)
    for half in cutlass.range_constexpr(rows.SLOTS):
        chunk = half * rows.LANES + lane
        cute.autovec_copy(tensors.weight[None, chunk], rWeight[None, half])
    factor = factor_of_row(rWords, epsilon)
    for half in cutlass.range_constexpr(rows.SLOTS):
        put(rWords, half, normed_words(rWords, rWeight, half, factor, form))
    last = rows.SLOTS - 1
    if turns:
        numbers = numbers_of(words_at(rWords, last))
        put(rWords, last, turned_words(numbers, rTurn, back=False))


@cute.jit
def put_entry(
    tensors: Tensors,
    rWords: Any,
    place: tuple[Any, Any],
    pages: tuple[Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Quantise the row and store it into (slot, lane) of pages of (entries, bytes)."""
    slot, lane = place
    entries, stride = pages
    entry = ENTRIES[form.entry]
    codes_end = entry.quantised // rows.HALF
    page = Uint32(slot) // Uint32(entries)
    within = Int64(Uint32(slot) % Uint32(entries))
    start = facts.value_offset(Int64(page), within, Int64(stride), entry)
    scales = facts.scale_offset((Int64(page), within), Int64(stride), Int64(entries), entry)
    for half in cutlass.range_constexpr(rows.SLOTS):
        chunk = half * rows.LANES + lane
        words = words_at(rWords, half)
        plain = chunk >= codes_end
        if cutlass.const_expr(not facts.coded_only(entry, half)):  # noqa: SIM102  as below
            if plain:
                at = start + entry.code_bytes + Int64(chunk - codes_end) * 16
                store(tensors.cache_16, at // 16, words)
        if cutlass.const_expr(facts.coded_at_all(entry, half)):
            code, codes = coded(words, form)
            if cutlass.const_expr(facts.coded_only(entry, half)):
                plain = False
            if not plain:
                if cutlass.const_expr(entry.code_bits == 8):
                    store(tensors.cache_8, start // 8 + Int64(chunk), codes)
                else:
                    tensors.cache_4[start // 4 + Int64(chunk)] = codes[0]
            lanes = entry.block // rows.HALF
            if chunk % lanes == 0:
                code = ops.select(plain, Uint32(0), code)
                tensors.cache_1[scales + Int64(chunk // lanes)] = Uint8(code)


@cute.kernel
def write_kernel(
    tensors: Tensors, extents: tuple[Any, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Give each token a warp: read, norm, turn, quantise, store."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tokens, positions, entries, stride, capacity = extents
    lane = Int32(thread) % rows.LANES
    token = Int32(block) * facts.WARPS + Int32(thread) // rows.LANES
    if token < tokens:
        slot = Int64(tensors.slots[token])
        rWords = registers_of(WORDS, rows.SLOTS)
        for half in cutlass.range_constexpr(rows.SLOTS):
            first = Int64(token) * (rows.SLOTS * rows.LANES) + half * rows.LANES
            cute.autovec_copy(tensors.values[None, first + Int64(lane)], rWords[None, half])

        live = (slot >= 0) & (slot < capacity)
        if cutlass.const_expr(form.duplicates == "last"):
            claim = Int32(NO_CLAIM)
            if live:
                claim = Int32(tensors.claims[slot])
            live = live & (claim == token)
        if live:
            if cutlass.const_expr(form.source == "latent"):
                norm_and_turn(tensors, rWords, (token, lane, positions), epsilon, form)
            put_entry(tensors, rWords, (slot, lane), (entries, stride), form)
            if cutlass.const_expr(form.duplicates == "last"):  # noqa: SIM102  one is known in tracing
                if lane == 0:
                    tensors.claims[slot] = Int32(NO_CLAIM)


@cute.jit
def launch_write(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form: tokens, positions, entries and bytes of a page, slots, thread blocks."""
    tensors = tensors_of(pointers, form)
    tokens, positions, entries, stride, capacity, blocks, claiming = extents
    if cutlass.const_expr(form.duplicates == "last"):
        claim_kernel(tensors.slots, tensors.claims, tokens, Int64(capacity)).launch(
            grid=[claiming, 1, 1], block=[CLAIMING_THREADS, 1, 1], stream=stream
        )
    within = (tokens, positions, entries, stride, Int64(capacity))
    write_kernel(tensors, within, epsilon, form).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: WriteForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    arguments = (_pointers((None,) * 7), _extents(None), Float32(1e-6), form, any_stream())
    return compile_kernel(launch_write, arguments, TARGETS[form.target], settings)


def kv_write(
    operands: Operands, cache_NB: Tensor, problem: WriteProblem, settings: CompileSettings
) -> Tensor:
    """Write rows into the cache as the problem says, on their GPU; return the cache."""
    require_operands(problem, operands, cache_NB)
    tensors = (*operands, cache_NB)
    device = require_device(tensors)
    if problem.tokens and problem.pages.count:
        form = facts.choose_write_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), problem, tensors)
    return cache_NB


def launch(
    kernel: CompiledKernel, problem: WriteProblem, tensors: tuple[Tensor | None, ...]
) -> None:
    """Launch on checked tensors: the operands in their order, then the cache."""
    device = tensors[0].device.index or 0 if tensors[0] is not None else 0
    kernel(_pointers(tensors), _extents(problem), Float32(problem.epsilon), current_stream(device))


def empty_cache(problem: WriteProblem, device: torch.device) -> Tensor:
    """Allocate pages; nothing but entries is ever written into them."""
    pages = problem.pages
    return torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=device)


def empty_claims(problem: WriteProblem, device: torch.device) -> Tensor:
    """Allocate what decides between tokens of one slot; may be kept for any number of launches."""
    return torch.full((problem.pages.slots,), NO_CLAIM, dtype=torch.int32, device=device)


def require_operands(problem: WriteProblem, operands: Operands, cache_NB: Tensor) -> None:
    """Refuse tensors that the kernel would misread."""
    latent, last = problem.source == "latent", problem.duplicates == "last"
    tokens, pages = (problem.tokens,), problem.pages
    of_weight, of_turns = (rows.WIDTH,), (problem.positions, rows.TABLE_WIDTH)
    wanted: tuple[tuple[bool, torch.dtype, tuple[int, ...]], ...] = (
        (True, torch.bfloat16, (*tokens, rows.WIDTH)),
        (latent, TORCH_WEIGHTS[problem.weight], of_weight),
        (latent, torch.float32, of_turns),
        (latent, torch.int64, tokens),
        (True, torch.int64, tokens),
        (last, torch.int32, (pages.slots,)),
        (True, torch.uint8, (pages.count, pages.stride)),
    )
    given = zip(
        (*Operands._fields, "cache"), (*operands, cache_NB), wanted, ALIGNMENTS, strict=True
    )
    for name, tensor, (present, dtype, shape), alignment in given:
        if (tensor is not None) != present:
            raise InvalidArgument(
                name,
                None if tensor is None else tuple(tensor.shape),
                "a tensor" if present else "no tensor, as the problem says",
                f"It says source={problem.source!r}, duplicates={problem.duplicates!r}.",
            )
        if tensor is not None:
            require_tensor(name, tensor, dtype, shape, alignment)


def _extents(problem: WriteProblem | None) -> tuple[Int32, ...]:
    """Return what a launch is told; without a problem numbers to compile with."""
    if problem is None:
        return tuple(Int32(1) for _ in range(7))
    pages = problem.pages
    numbers = (problem.tokens, problem.positions, pages.entries, pages.stride, pages.slots)
    claiming = -(-problem.tokens // CLAIMING_THREADS)
    return tuple(Int32(number) for number in (*numbers, facts.grid(problem.tokens), claiming))


def _pointers(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what the entry takes; None becomes a pointer that is not read."""
    *operands, cache_NB = tensors
    places = zip(ELEMENTS, operands, ALIGNMENTS, strict=False)
    made = [pointer(element, tensor, alignment) for element, tensor, alignment in places]
    views = ((Uint32, 16), (Uint32, 8), (Uint32, 4), (Uint8, 1))
    return (*made, *(pointer(element, cache_NB, alignment) for element, alignment in views))
