"""Norm, rotate and quantise latent rows, and store them in the paged cache by slot, in one pass.

Rows are latents (RMSNorm rounded to BF16, then RoPE rounded to BF16, as the reference does), or
finished rows. Entries: fp8, nvfp4, nvfp4-v41 and bf16, and an indexer's fp8-key; of V3.2's rows,
whose latent is normed and whose key is rotated, fp8-v32, fp8-v32-ue8m0 and bf16. A warp has a
token, four warps a thread block; the row stays in registers from load to store. One token's life:
slot and row, RoPE and weight, sum of squares, then half by half norm, rotate, quantise, store.

A slot below 0 or beyond the cache is skipped; unnamed slots keep their bytes. A position outside
the RoPE table makes the rotated values NaN, so that the error shows. Two tokens with one slot: with
`duplicates="last"` the last token's entry stays: claim_kernel takes an atomic maximum of token
numbers by slot, write_kernel stores the winner and clears the claim. With "absent" the caller
promises that there are none. Never waits for the GPU, so it may be captured in a graph. Shape
letters: T tokens, L row width (512, 128 or 576), P positions, N pages, B bytes of a page, S
slots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import kv_problem as facts
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives import kv_problem as rules
from degarble.kernels.primitives.device_words import (
    NAN,
    SLOT_WORDS,
    amax_bits,
    amax_number,
    ask_for_turn,
    e4m3_words,
    emit,
    factor_of_row,
    fp8_words,
    high_product,
    load_row,
    load_turn,
    numbers_of,
    nvfp4_scale_code,
    nvfp4_word,
    put,
    registers_of,
    rounded_words,
    store,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.primitives.kv_problem import NO_CLAIM, WriteForm, WriteProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.operands import (
    DRIVERS_CHOICE,
    DTYPES,
)
from degarble.kernels.runtime.pdl import EARLY, fetch_weights, follow

THREADS = facts.WARPS * rows.LANES
CLAIMING_THREADS = 256


# ---- device --------------------------------------------------------------------------------------


class WriteTensors(NamedTuple):
    """Kernels' tensors; the cache in vectors of 16, 8 and 4 bytes and in bytes."""

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


class RowRegisters(NamedTuple):
    """A warp's row: words, weights, turns (registers), norm factor, position and its validity."""

    words: Any
    weight: Any
    turn: Any
    factor: Any
    position: Any
    inside: Any


def weight_registers(tensors: WriteTensors, row: rows.Geometry) -> Any:
    """Make registers for a lane's weights."""
    return registers_of(tensors.weight.shape[0], row.slots)


def tensors_of(pointers: tuple[Any, ...], form: WriteForm) -> WriteTensors:
    """View the pointers; bounds are checked by token and slot, not by these layouts."""
    of_weight = rows.HALF if form.weight == "fp32" else SLOT_WORDS
    shapes = (SLOT_WORDS, of_weight, 4, 0, 0, 0, 4, 2, 0, 0)
    views = zip(pointers, shapes, strict=True)
    return WriteTensors(*(vectors(address, words) for address, words in views))


def normed_words(words: list[Any], weights: list[Any], factor: Any, form: WriteForm) -> list[Any]:
    """Return the normed values of a half, rounded to BF16."""
    fp32 = form.weight == "fp32"
    numbers = [ops.number_of(word) for word in weights] if fp32 else numbers_of(weights)
    pairs = zip(numbers_of(words), numbers, strict=True)
    return rounded_words([rows.normed(number, weight, factor) for number, weight in pairs])


def quotient(number: Any, divisor: Any, inverse: Any) -> Any:
    """Return number / divisor, rounded once, for an inverse that is off by a unit at most.

    Of numbers whose quotients and remainders are normal. The rest is of the other sign than usual:
    so a zero keeps its sign.
    """
    made = ops.multiply_rn(number, inverse)
    for _ in range(2):
        rest = ops.fma_rn(divisor, made, -number)
        made = ops.fma_rn(-inverse, rest, made)
    return made


def quotients(numbers: list[Any], scale: Any) -> list[Any]:
    """Return numbers over their block's scale, by one inverse, as true divisions have them.

    A division each takes a branch, and where a lane's numbers are zeros a slow one. Quotients that
    are not normal have the code of zero, however they are rounded.
    """
    estimate = emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, scale)
    inverse = ops.fma_rn(estimate, ops.fma_rn(-scale, estimate, Float32(1.0)), estimate)
    return [quotient(number, scale, inverse) for number in numbers]


def scale_bits(bits: Any, entry: Any) -> Any:
    """Return what fp32_scale_bits does, without a division."""
    if entry.powers:
        return rules.fp32_scale_bits(bits, entry)
    amax = ops.maximum(codecs.bf16_decode(bits), rules.FP8_SMALLEST_AMAX)
    most, inverse = Float32(codecs.E4M3_MAX), Float32(rules.LARGEST_E4M3_INVERSE)
    made = ops.bits_of(quotient(amax, most, inverse))
    return ops.select(bits >= rules.NAN_BF16, Uint32(0x7FC0_0000), made)


def coded(words: list[Any], form: WriteForm) -> tuple[Any, list[Any]]:
    """Return the code of the block's scale, or its bits, and the words of a lane's codes."""
    entry = form.format
    if entry.code_bits == 4:
        code = nvfp4_scale_code(amax_number(words, entry.block // rows.HALF))
        return code, [nvfp4_word(words, code, form.target)]
    bits = amax_bits(words, entry.block // rows.HALF)
    if entry.numbers:
        scale = scale_bits(bits, entry)
        return scale, e4m3_words(quotients(numbers_of(words), ops.number_of(scale)))
    code = rules.fp8_scale_code(bits)
    return code, fp8_words(words, rules.fp8_factor(code))


@cute.kernel
def claim_kernel(slots: Any, claims: Any, tokens: Int32, capacity: Int64) -> None:
    """Claim each slot for its last token."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    token = Int32(block) * CLAIMING_THREADS + Int32(thread)
    if token < tokens:
        slot = Int64(slots[token])
        if (slot >= 0) & (slot < capacity):
            # The highest token number wins; claims start at -1.
            cute.arch.atomic_max((claims.iterator + slot).llvm_ptr, token)


@cute.jit
def load_weight(
    tensors: WriteTensors, rWeight: Any, half: cutlass.Constexpr, lane: Any, held: cutlass.Constexpr
) -> None:
    """Read a lane's weights of a half."""
    if lane < held.lanes:
        cute.autovec_copy(tensors.weight[None, half * rows.LANES + lane], rWeight[None, half])


@cute.jit
def norm_half(
    tensors: WriteTensors,
    row: RowRegisters,
    half: cutlass.Constexpr,
    lane: Any,
    form: cutlass.Constexpr,
) -> None:
    """Norm a half of the latent, and rotate its tail or the key, in registers."""
    held = rows.cached_geometry(form.width)
    last = half == held.slots - 1
    if cutlass.const_expr(half < facts.normed_slots(form)):
        if cutlass.const_expr(not form.few):
            load_weight(tensors, row.weight, half, lane, held)
        weights, found = words_at(row.weight, half), words_at(row.words, half)
        put(row.words, half, normed_words(found, weights, row.factor, form))
    if cutlass.const_expr(last):  # noqa: SIM102  one is known in tracing
        if (lane >= held.first_turned_lane) & (lane < held.lanes_of(half)):
            if cutlass.const_expr(not form.few):  # noqa: SIM102  as above
                if row.inside:
                    group = lane - held.first_turned_lane
                    load_turn(tensors.turns, row.turn, (row.position, group))
            numbers = numbers_of(words_at(row.words, half))
            put(row.words, half, turned_words(numbers, row.turn, back=False))


@cute.jit
def put_half(
    tensors: WriteTensors,
    words: list[Any],
    half: cutlass.Constexpr,
    place: tuple[Any, Any, Any],
    form: cutlass.Constexpr,
) -> None:
    """Quantise a half and store it; place is the entry's first piece, its scales, and the lane."""
    start, scales, lane = place
    entry = form.format
    codes_end = entry.quantised // rows.HALF
    chunk = half * rows.LANES + lane
    plain = chunk >= codes_end
    if cutlass.const_expr(not facts.coded_only(entry, half)):  # noqa: SIM102  known in tracing
        if plain & (lane < rows.cached_geometry(form.width).lanes_of(half)):
            rest = chunk + (entry.rest_at // facts.VECTOR - codes_end)
            store(tensors.cache_16, start + Int64(rest), words)
    if cutlass.const_expr(facts.coded_at_all(entry, half)):
        code, codes = coded(words, form)
        if cutlass.const_expr(facts.coded_only(entry, half)):
            plain = False
        if not plain:
            if cutlass.const_expr(entry.code_bits == 8):
                store(tensors.cache_8, start * 2 + Int64(chunk), codes)
            else:
                tensors.cache_4[start * 4 + Int64(chunk)] = codes[0]
        lanes = entry.block // rows.HALF
        if cutlass.const_expr(entry.inside):
            if chunk % lanes == 0:
                tensors.cache_4[scales // 4 + Int64(chunk // lanes)] = code
        elif cutlass.const_expr(entry.numbers):
            if chunk == 0:
                tensors.cache_4[scales // 4] = code
        elif (chunk % lanes == 0) & (chunk // lanes < entry.scale_bytes):
            # Lanes past the codes write the padding of the scales as zeros.
            code = ops.select(plain, Uint32(0), code)
            tensors.cache_1[scales + Int64(chunk // lanes)] = Uint8(code)


@cute.jit
def fetch_weight(tensors: WriteTensors, place: Any, form: cutlass.Constexpr) -> None:
    """Ask L2 for the norm's weight by the launch's first thread."""
    if cutlass.const_expr(form.source == "latent"):  # noqa: SIM102  known in tracing
        if place == 0:
            size = facts.normed_width(form.width) * (4 if form.weight == "fp32" else 2)
            fetch_weights(tensors.weight.iterator.toint(), Uint32(size))


@cute.kernel
def write_kernel(
    tensors: WriteTensors,
    extents: tuple[Any, ...],
    pages: tuple[Any, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
) -> None:
    """Process a token per warp: read, norm, rotate, quantise, store."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    fetch_weight(tensors, Int32(thread) + Int32(block), form)
    follow()
    tokens, positions, capacity = extents
    entries, pieces, multiplier, shift = pages
    lane = Int32(thread) % rows.LANES
    token = Int32(block) * facts.WARPS + Int32(thread) // rows.LANES
    held = rows.cached_geometry(form.width)
    entry, latent = form.format, form.source == "latent"
    if token < tokens:
        slot = Int64(tensors.slots[token])
        rWords = registers_of(SLOT_WORDS, held.slots)
        load_row(tensors.values, rWords, Int64(token) * held.chunks, lane, held)
        row = RowRegisters(rWords, None, None, None, None, None)
        if cutlass.const_expr(latent):
            position = Int64(tensors.positions[token])
            # Trap: as one unsigned comparison each, here and below, forms of float32 weights spill.
            inside = (position >= 0) & (position < Int64(positions))
            rTurn, rWeight = registers_of(rows.PAIRS_OF_LANE, 2), weight_registers(tensors, held)
            # Stays NaN where the position is not in the table.
            rTurn.fill(NAN)
            group = lane - held.first_turned_lane
            if inside & (group >= 0) & (lane < held.lanes_of(held.slots - 1)):
                if cutlass.const_expr(form.few):
                    load_turn(tensors.turns, rTurn, (position, group))
                else:
                    ask_for_turn(tensors.turns, (position, group))
            if cutlass.const_expr(form.few):
                rWeight.fill(0)
                for half in cutlass.range_constexpr(facts.normed_slots(form)):
                    load_weight(tensors, rWeight, half, lane, held)
            factor = factor_of_row(rWords, epsilon, facts.normed_width(form.width))
            row = RowRegisters(rWords, rWeight, rTurn, factor, position, inside)

        live = (slot >= 0) & (slot < capacity)
        if cutlass.const_expr(form.duplicates == "last"):
            claim = Int32(NO_CLAIM)
            if live:
                claim = Int32(tensors.claims[slot])
            live = live & (claim == token)
        if live:
            magic = (multiplier, shift)
            of_slot = facts.place_of(Uint32(slot), magic, Uint32(entries), high_product)
            start = Int64(facts.value_piece(of_slot, Uint32(pieces), entry))
            scales = Int64(of_slot[0] * Uint32(pieces)) * facts.VECTOR
            scales += Int64(facts.scale_within(of_slot[1], Uint32(entries), entry))
            for half in cutlass.range_constexpr(held.slots):
                if cutlass.const_expr(latent):
                    norm_half(tensors, row, half, lane, form)
                put_half(tensors, words_at(rWords, half), half, (start, scales, lane), form)
            if cutlass.const_expr(form.duplicates == "last"):  # noqa: SIM102  known in tracing
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
    """Launch; extents are tokens, positions, slots, four of a page, two of thread blocks."""
    tensors = tensors_of(pointers, form)
    tokens, positions, capacity, entries, pieces, multiplier, shift, blocks, claiming = extents
    if cutlass.const_expr(form.duplicates == "last"):
        claim_kernel(tensors.slots, tensors.claims, tokens, Int64(capacity)).launch(
            grid=[claiming, 1, 1], block=[CLAIMING_THREADS, 1, 1], use_pdl=EARLY, stream=stream
        )
    pages = (entries, pieces, multiplier, shift)
    bound = facts.bound_blocks(form)
    write_kernel(tensors, (tokens, positions, Int64(capacity)), pages, epsilon, form).launch(
        grid=[blocks, 1, 1],
        block=[THREADS, 1, 1],
        min_blocks_per_mp=bound,
        preferred_smem_carveout=DRIVERS_CHOICE if bound else None,
        use_pdl=EARLY,
        stream=stream,
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[WriteProblem, WriteForm]) -> tuple[Any, ...]:
    problem, pages = of.problem, of.problem.pages
    extents = (
        *(problem.tokens, problem.positions, pages.slots),
        *(pages.entries, pages.stride // facts.VECTOR, *facts.page_magic(pages.entries)),
        facts.grid(problem.tokens),
        -(-problem.tokens // CLAIMING_THREADS),
    )
    return extents, problem.epsilon


def _weight(of: WriteProblem | WriteForm) -> Storage:
    return Storage(Uint32, DTYPES[of.weight], 16)


def _when(test: Callable[[WriteProblem], bool]) -> Presence[WriteProblem]:
    return Presence(test, lambda p: f"It says source={p.source!r}, duplicates={p.duplicates!r}.")


_ALWAYS, _LATENT = _when(lambda _: True), _when(lambda p: p.source == "latent")
_LAST = _when(lambda p: p.duplicates == "last")
_Operand = Operand[WriteProblem]
_ROWS, _TURNS = Storage(Uint32, torch.bfloat16, 16), Storage(Uint32, torch.float32, 16)
_PLACES, _CLAIMS = Storage(Int64, torch.int64, 8), Storage(Int32, torch.int32, 4)
_CACHE = Storage(Uint32, torch.uint8, 16, views=((Uint32, 8), (Uint32, 4), (Uint8, 1)))
KERNEL = Kernel[WriteProblem, WriteForm](
    entry=launch_write,
    operands=(
        _Operand("values", _ROWS, lambda p: (p.tokens, p.pages.width), _ALWAYS),
        _Operand("weight", _weight, lambda p: (facts.normed_width(p.pages.width),), _LATENT),
        _Operand("turns", _TURNS, lambda p: (p.positions, rows.TABLE_WIDTH), _LATENT),
        _Operand("positions", _PLACES, lambda p: (p.tokens,), _LATENT),
        _Operand("slots", _PLACES, lambda p: (p.tokens,), _ALWAYS),
        _Operand("claims", _CLAIMS, lambda p: (p.pages.slots,), _LAST),
        _Operand("cache", _CACHE, lambda p: (p.pages.count, p.pages.stride), _ALWAYS, updated=True),
    ),
    choose_form=facts.choose_write_form,
    kinds=((Int32, Int32, Int32, Int32, Int32, Uint32, Uint32, Int32, Int32), Float32),
    numbers=_numbers,
    work=lambda problem: problem.tokens * problem.pages.count,
)
compile_form = KERNEL.compile_form


def empty_cache(problem: WriteProblem, device: torch.device) -> Tensor:
    """Allocate zeroed pages; only entries are ever written into them."""
    pages = problem.pages
    return torch.zeros(pages.count, pages.stride, dtype=torch.uint8, device=device)


def empty_claims(problem: WriteProblem, device: torch.device) -> Tensor:
    """Allocate claims of slots; reusable for any number of launches."""
    return torch.full((problem.pages.slots,), NO_CLAIM, dtype=torch.int32, device=device)
