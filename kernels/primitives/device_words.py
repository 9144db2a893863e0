"""Device code for words of two BF16: load, fold, rotate, quantise, decode, store.

Numbers are rounded only where a function says so; nothing is contracted to an fma unless it is one
by name. Only for use inside a kernel that is being traced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import numpy as np
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import e2m1 as halves
from degarble.kernels.primitives import kv_problem as rows
from degarble.kernels.primitives import kv_problem as rules
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.e2m1 import (
    NUMBERS,
    WordOperations,
    e2m1_rounded,
    e2m1_word,
)
from degarble.kernels.runtime.pdl import guessed, wrong_guess
from degarble.kernels.runtime.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# Blocks of sixteen BF16 values, eight words: load, clamp, SwiGLU, quantise to NVFP4, store.

BLOCK_WORDS = facts.BLOCK // 2  # words of two BF16 in a block
LOG2_E = 1.4426950408889634
HIGH_HALF = 0xFFFF_0000
HEADROOM = 2.0**-64


def emit(instruction: str, result: Any, *arguments: Any) -> Any:
    """Emit one instruction; {$w0} is the result, {$r0} and on are the arguments."""
    return cute.arch.inline_ptx(
        instruction, write_only_types=[result], read_only_args=list(arguments)
    )


INSTRUCTIONS = WordOperations(
    limited=lambda x: emit("min.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(6.0)),
    at_least_one=lambda x: emit(
        "max.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(1.0)
    ),
    constant=Uint32,
    low_halves=lambda a, b: emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", Uint32, a, b),
    high_halves=lambda a, b: emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", Uint32, a, b),
)

BOUNDED = replace(INSTRUCTIONS, limited=lambda x: x)  # of numbers below 7 in magnitude


def native_word(numbers: list[Any]) -> Any:
    """Return the codes of eight numbers by the conversion that sm_100a has; PTX ISA 9.1, cvt."""
    pairs = "\n".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    text = f"{{\n.reg .b8 b0, b1, b2, b3;\n{pairs}\nmov.b32 {{$w0}}, {{b0, b1, b2, b3}};\n}}"
    return emit(text, Uint32, *numbers)


def words_of(registers: Any) -> list[Any]:
    """Return the words that registers hold."""
    # Trap: an element of a Uint32 tensor arrives as a signed Int32.
    return [Uint32(registers[word]) for word in range(cute.size(registers))]


def warp_folded(number: Any) -> Any:
    """Sum a number over the lanes of a warp; every lane has the result."""
    for distance in (16, 8, 4, 2, 1):
        number = ops.add_rn(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
    return number


def square_root(number: Any) -> Any:
    """Return the square root of a float32, rounded once to nearest even."""
    return emit("sqrt.rn.f32 {$w0}, {$r0};", Float32, number)


def computed_here(number: Any) -> Any:
    """Return an Int64 that is computed where this stands, such as an address in front of a wait.

    The compiler would compute it where it is first used, behind the wait.
    """
    return emit("mov.b64 {$w0}, {$r0};", Int64, number)


def opaque(number: Any) -> Any:
    """Return an Int32 of which the compiler does not know that it is the same number.

    So it is kept and not computed once more, or is computed once more and not kept.
    """
    return emit("mov.b32 {$w0}, {$r0};", Int32, number)


def inverse_rn(number: Any) -> Any:
    """Return one over a float32, rounded once to nearest even: the bits of a division, sooner.

    It is computed where this stands.
    """
    return emit("rcp.rn.f32 {$w0}, {$r0};", Float32, number)


def block_amax(words: list[Any]) -> Any:
    """Return the largest magnitude of eight words of two BF16; a NaN is ignored."""
    largest = words[0]
    for word in words[1:]:
        # Compares magnitudes of both halves; the sign of the result means nothing.
        largest = emit("max.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};", Uint32, largest, word)
    low = ops.absolute(codecs.bf16_decode(largest & 0xFFFF))
    high = ops.absolute(ops.number_of(largest & Uint32(HIGH_HALF)))
    return ops.maximum(ops.maximum(low, high), 0.0)  # all NaN: 0


def numbers_of(words: list[Any]) -> list[Any]:
    """Return the float32 numbers of words of two BF16, the low half first."""
    found = []
    for word in words:
        found += [ops.number_of(ops.shift_left(word, 16)), ops.number_of(word & Uint32(HIGH_HALF))]
    return found


def scale_code_of(amax: Any, share: Any) -> Any:
    """Return the E4M3 code of a block's scale by the GPU's conversion."""
    raw = ops.multiply_rn(amax, share)
    pair = emit("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, raw, Float32(0.0))
    return Uint32(pair)


def swiglu_words(gate: list[Any], up: list[Any], limit: float | None) -> list[Any]:
    """Return silu(gate) * up rounded to BF16, both clamped first, the gate from above only."""
    return rounded_words(swiglu_numbers(gate, up, limit))


def swiglu_numbers(gate: list[Any], up: list[Any], limit: float | None) -> list[Any]:
    """Return silu(gate) * up in float32 of words of two BF16, clamped as above."""
    if limit is not None:
        gate = [_clamped("min", word, limit) for word in gate]
        up = [_clamped("max", _clamped("min", word, limit), -limit) for word in up]
    made = []
    for g, u in zip(numbers_of(gate), numbers_of(up), strict=True):
        # A power that is flushed is lost in the sum; the sum is scaled, so that no inverse is.
        power = emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, ops.multiply_rn(g, -LOG2_E))
        total = ops.fma_rn(power, HEADROOM, HEADROOM)
        inverse = emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, total)
        silu = ops.multiply_rn(g, ops.multiply_rn(inverse, HEADROOM))
        made.append(ops.multiply_rn(silu, u))
    return made


def rounded_words(numbers: list[Any]) -> list[Any]:
    """Round float32 numbers to BF16, nearest even, two a word, the first in the low half."""
    return [
        emit("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, *pair)
        for pair in zip(numbers[0::2], numbers[1::2], strict=True)
    ]


def _clamped(bound: str, word: Any, limit: float) -> Any:
    """Clamp both BF16 numbers of a word; as with torch, a NaN stays NaN."""
    pair = int(codecs.bf16_encode(limit)) * 0x1_0001
    text = f"{{ .reg .b32 at; mov.b32 at, {pair}; {bound}.NaN.bf16x2 {{$w0}}, {{$r0}}, at; }}"
    return emit(text, Uint32, word)


def code_words(words: list[Any], factor: Any, target: str) -> list[Any]:
    """Return the two words of codes of a block."""
    # Scaling all values first, not half by half, is what needs fewer registers on sm_100a.
    scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
    return [_encoded(half, target) for half in (scaled[:NUMBERS], scaled[NUMBERS:])]


def half_code_word(words: list[Any], factor: Any, target: str) -> Any:
    """Return the word of codes of half a block."""
    return _encoded([ops.multiply_rn(number, factor) for number in numbers_of(words)], target)


def _encoded(scaled: list[Any], target: str) -> Any:
    """Return the word of codes of eight scaled numbers."""
    if TARGETS[target].converts_e2m1:
        return native_word(scaled)
    return e2m1_word(scaled, INSTRUCTIONS)


def loaded(tensor: Any, index: Any) -> list[Any]:
    """Read the words of one block."""
    registers = cute.make_rmem_tensor(BLOCK_WORDS, Uint32)
    cute.autovec_copy(tensor[None, index], registers)
    return words_of(registers)


def store(tensor: Any, index: Any, words: list[Any]) -> None:
    """Write words of one block."""
    registers = cute.make_rmem_tensor(len(words), Uint32)
    fill(registers, words)
    cute.autovec_copy(registers, tensor[None, index])


def fill(registers: Any, words: list[Any]) -> None:
    """Put words into registers."""
    for place, word in enumerate(words):
        registers[place] = word


class Scaling(NamedTuple):
    """A tensor's scaling: the encode scale, a sixth of it, and a table of factors or None."""

    encode: Any
    share: Any
    factors: Any


def scaling_of(decode_scale: Any, factors: Any) -> Scaling:
    """Return the scaling that follows from a decode scale."""
    encode = ops.divide_rn(1.0, decode_scale)
    return Scaling(encode, ops.multiply_rn(encode, codecs.ONE_SIXTH), factors)


class DecodeScaling(NamedTuple):
    """What follows from a decode scale."""

    share: Any  # a sixth of the encode scale
    inverse: Any  # one over the encode scale


def quotient_of_one(number: Any) -> Any:
    """Return one over a float32 by a division, which the compiler may move.

    The bits are those of `inverse_rn`.
    """
    return ops.divide_rn(1.0, number)


def decoding_of(scale: Any, inverse: Callable[[Any], Any] = quotient_of_one) -> DecodeScaling:
    """Return what follows from a decode scale.

    With `inverse_rn` it is computed where it is called, which waits for the load of the scale.
    """
    encode = inverse(scale)
    return DecodeScaling(ops.multiply_rn(encode, codecs.ONE_SIXTH), inverse(encode))


def coded_scale(largest: Any, decoding: DecodeScaling) -> tuple[Any, Any]:
    """Return the code of a block's scale, and the factor of its values before they are coded.

    The factor is scalar_ops.nvfp4_block_encode_scale of the encode scale.
    """
    code = scale_code_of(largest, decoding.share)
    decode_scale = ops.multiply_rn(codecs.e4m3_decode(code), decoding.inverse)
    return code, ops.minimum(inverse_rn(decode_scale), codecs.FLOAT32_MAX)


# --------------------------------------------------------------------------------------------------
# A row's norm factor, 1 / sqrt(total / columns + epsilon), by one test of the total's range.
#
# The GPU has no instruction for a quotient or a root that is rounded once. ptxas makes each of an
# estimate and fused corrections, behind a test of its own that leads to a slow path. Between these
# bounds all numbers from the total on are normal, so the corrections are right without the tests.

LEAST_TOTAL, LARGEST_TOTAL = 2.0**-64, 2.0**64
LARGEST_DIVISOR = 2.0**16


@cute.jit
def brief_factor(
    total: Any, epsilon: Any, columns: cutlass.Constexpr, stated: cutlass.Constexpr
) -> Any:
    """Return a row's norm factor, with the bits of `stated(total)`, called outside the range."""
    factor = Float32(0.0)
    if (total >= LEAST_TOTAL) & (total <= LARGEST_TOTAL):
        mean = quotient_in_range(total, columns)
        factor = inverse_in_range(root_in_range(ops.add_rn(mean, epsilon)))
    else:
        factor = stated(total)
    return factor


def quotient_in_range(number: Any, divisor: int) -> Any:
    """Divide a number by a constant whose odd part is small; the suites walk all mantissas."""
    if divisor.bit_count() == 1:
        return ops.multiply_rn(number, 1.0 / divisor)
    inverse = float(np.float32(1.0 / divisor))
    first = ops.multiply_rn(number, inverse)
    return ops.fma_rn(ops.fma_rn(first, -float(divisor), number), inverse, first)


def root_in_range(number: Any) -> Any:
    """Return the square root of a normal number, rounded once to nearest even, as ptxas does."""
    estimate = inverse_root(number)
    root, half = ops.multiply_rn(number, estimate), ops.multiply_rn(estimate, 0.5)
    return ops.fma_rn(ops.fma_rn(-root, root, number), half, root)


def inverse_in_range(number: Any) -> Any:
    """Return the inverse of a normal number, rounded once to nearest even, as ptxas does.

    Trap: from the root's own estimate it is a step off for one number in seventy million.
    """
    estimate = reciprocal(number)
    estimate = ops.fma_rn(estimate, ops.fma_rn(-number, estimate, 1.0), estimate)
    return ops.fma_rn(ops.fma_rn(-number, estimate, 1.0), estimate, estimate)


@cute.jit
def brief_quotients(pairs: list[tuple[Any, Any]]) -> Any:
    """Divide the first of each pair by the second, rounded once; in registers, by one test of all.

    The bounds are those of a mean of a softmax: its divisor lies between 1 and the count.
    """
    made = cute.make_rmem_tensor(len(pairs), Float32)
    ordinary = cutlass.Boolean(True)
    for place in cutlass.range_constexpr(len(pairs)):
        number, divisor = pairs[place]
        size = ops.absolute(number)
        ordinary = ordinary & (size >= LEAST_TOTAL) & (size <= LARGEST_TOTAL)
        ordinary = ordinary & (divisor >= 1.0) & (divisor <= LARGEST_DIVISOR)
        estimate = reciprocal(divisor)
        estimate = ops.fma_rn(estimate, ops.fma_rn(-divisor, estimate, 1.0), estimate)
        first = ops.multiply_rn(number, estimate)
        made[place] = ops.fma_rn(estimate, ops.fma_rn(-divisor, first, number), first)
    if ordinary == False:  # noqa: E712  traced
        for place in cutlass.range_constexpr(len(pairs)):
            made[place] = ops.divide_rn(*pairs[place])
    return made


# --------------------------------------------------------------------------------------------------
# A warp's attention row: load, fold, rotate, code and decode; the device side of kv_problem.

SLOT_WORDS = rows.HALF // 2  # of two BF16 in a half
FLAT = 1 << 30
NAN = 0x7FC0_0000
UPPER_MAGNITUDE = 0x7FFF_0000


def _pairwise(instruction: str, words: int = 2) -> Callable[..., Any]:
    """Return an instruction on words of two BF16."""
    moves = "\n".join(f"mov.b32 w{i}, {{$r{i}}};" for i in range(words))
    operands = ", ".join(f"w{i}" for i in range(words))
    # Trap: these take no constants, and a constant is what some words become.
    text = f"{{\n.reg .b32 {operands};\n{moves}\n{instruction} {{$w0}}, {operands};\n}}"
    return lambda *given: emit(text, Uint32, *given)


PACKED = halves.HalfOperations(
    product=_pairwise("mul.rn.bf16x2"),
    fused=_pairwise("fma.rn.bf16x2", 3),
    at_least=_pairwise("max.xorsign.abs.bf16x2"),
    low_word=lambda word, factor, addend: emit(
        "mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, word, Uint32(factor), Uint32(addend)
    ),
    bytes_of=lambda low, high, order: emit(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {order};", Uint32, low, high
    ),
    constant=Uint32,
)
smaller_magnitude = _pairwise("min.xorsign.abs.bf16x2")
_larger_magnitude = _pairwise("max.NaN.xorsign.abs.bf16x2")


def vectors(address: Any, words: int) -> Any:
    """View a pointer as adjacent vectors of `words` elements; 0: single elements."""
    if not words:
        return cute.make_tensor(address, cute.make_layout(FLAT))
    return cute.make_tensor(address, cute.make_layout((words, FLAT), stride=(1, words)))


def registers_of(words: int, slots: int) -> Any:
    """Make registers for vectors of so many words."""
    return cute.make_rmem_tensor(cute.make_layout((words, slots)), Uint32)


def words_at(registers: Any, slot: int) -> list[Any]:
    """Return the words of one slot."""
    # Trap: an element of a Uint32 tensor arrives as a signed Int32.
    return [Uint32(registers[word, slot]) for word in range(registers.shape[0])]


def put(registers: Any, slot: int, words: list[Any]) -> None:
    """Replace the words of one slot."""
    for place, word in enumerate(words):
        registers[place, slot] = word


def root_of(number: Any) -> Any:
    """Return the square root of a float32, rounded once to nearest even."""
    return emit("sqrt.rn.f32 {$w0}, {$r0};", Float32, number)


def factor_of_row(registers: Any, epsilon: Any, width: int = rows.WIDTH) -> Any:
    """Return the norm factor of the row that a warp holds."""
    halves = [numbers_of(words_at(registers, slot)) for slot in range(rows.GEOMETRIES[width].slots)]
    total = warp_folded(rows.lane_sum(halves))
    return rows.row_factor([total], epsilon, root_of, width)


@cute.jit
def load_row(vectors: Any, registers: Any, first: Any, lane: Any, row: cutlass.Constexpr) -> None:
    """Read a row that begins with vector `first`, lane by lane; lanes without values have zeros."""
    if cutlass.const_expr(row.lanes_of(row.slots - 1) < rows.LANES):
        registers.fill(0)
    for slot in cutlass.range_constexpr(row.slots):
        place = first + Int64(slot * rows.LANES) + Int64(lane)
        if cutlass.const_expr(row.lanes_of(slot) < rows.LANES):
            if lane < row.lanes_of(slot):
                cute.autovec_copy(vectors[None, place], registers[None, slot])
        else:
            cute.autovec_copy(vectors[None, place], registers[None, slot])


def load_turn(table: Any, registers: Any, place: tuple[Any, Any]) -> None:
    """Read cosines and sines of a lane's pairs; place is (position, which of eight lanes)."""
    group = turn_group(place)
    cute.autovec_copy(table[None, group], registers[None, 0])
    cute.autovec_copy(table[None, group + rows.TABLE_WIDTH // 8], registers[None, 1])


@cute.jit
def guess_turn(
    table: Any, positions: Any, registers: Any, place: tuple[Any, Any], inside: tuple[Any, Any]
) -> Any:
    """Read what load_turn reads, of a position that is guessed (runtime/pdl); return that position.

    `place` is the token and the lane of eight; `inside`, whether the lane turns, and the positions
    of the table. Beyond it, and where nothing turns, all is NaN.
    """
    token, lane = place
    turns, count = inside
    supposed = guessed(positions, token)
    registers.fill(NAN)
    if turns & (supposed >= 0) & (supposed < count):
        load_turn(table, registers, (supposed, lane))
    return supposed


@cute.jit
def correct_turn(
    table: Any, registers: Any, place: tuple[Any, Any], inside: tuple[Any, Any], supposed: Any
) -> None:
    """Read the turn again where the guess was wrong; `place` is the true position and the lane."""
    position, lane = place
    turns, count = inside
    if turns & wrong_guess(position, Int64(supposed)):
        registers.fill(NAN)
        if (position >= 0) & (position < Int64(count)):
            load_turn(table, registers, (position, lane))


def ask_for_turn(table: Any, place: tuple[Any, Any]) -> None:
    """Prefetch what load_turn will read."""
    for part in (0, rows.TABLE_WIDTH // 8):
        address = table[None, turn_group(place) + part].iterator
        # L2 only; the values are loaded again later.
        text = "prefetch.global.L2 [{$r0}];"
        cute.arch.inline_ptx(text, read_only_args=[address.toint()])


def turn_group(place: tuple[Any, Any]) -> Any:
    """Return which four numbers of the table begin a lane's cosines."""
    position, lane = place
    return Int64(position) * (rows.TABLE_WIDTH // 4) + Int64(lane)


def turned_words(numbers: list[Any], registers: Any, *, back: bool) -> list[Any]:
    """Return a lane's numbers rotated by load_turn's cosines and sines, rounded to BF16."""
    cos, sin = ([ops.number_of(word) for word in words_at(registers, part)] for part in (0, 1))
    return rounded_words(rows.turned(numbers, cos, sin, back=back))


# ---- blocks of a cache entry ---------------------------------------------------------------------


def high_product(left: Any, right: Any) -> Any:
    """Return the upper 32 bits of a product of unsigned numbers."""
    return emit("mul.hi.u32 {$w0}, {$r0}, {$r1};", Uint32, left, right)


def amax_bits(words: list[Any], lanes: int) -> Any:
    """Return the BF16 bits of the largest magnitude in a block of so many lanes; NaN is largest."""
    largest = words[0]
    # xorsign makes the sign arbitrary; it is masked off below.
    text = "max.NaN.xorsign.abs.bf16x2 {$w0}, {$r0}, {$r1};"
    for word in words[1:]:
        largest = emit(text, Uint32, largest, word)
    bits = ops.maximum(largest & 0x7FFF, ops.shift_right(largest, 16) & 0x7FFF)
    distance = 1
    while distance < lanes:
        bits = ops.maximum(bits, Uint32(cute.arch.shuffle_sync_bfly(bits, offset=distance)))
        distance *= 2
    return bits


def amax_number(words: list[Any], lanes: int) -> Any:
    """Return the largest magnitude in a block of so many lanes; NaN is largest."""
    largest = words[0]
    for word in words[1:]:
        largest = _larger_magnitude(largest, word)
    distance = 1
    while distance < lanes:
        other = Uint32(cute.arch.shuffle_sync_bfly(largest, offset=distance))
        largest = _larger_magnitude(largest, other)
        distance *= 2
    largest = _larger_magnitude(largest, PACKED.bytes_of(largest, largest, 0x1032))
    return ops.number_of(largest & Uint32(UPPER_MAGNITUDE))


def pair_of(number: Any) -> Any:
    """Return a float32 that BF16 holds exactly as a word of two."""
    bits = ops.bits_of(number)
    return emit("prmt.b32 {$w0}, {$r0}, {$r0}, 0x3232;", Uint32, bits)


def fp8_words(words: list[Any], factor: Any) -> list[Any]:
    """Return the codes of a half, four a word; a product with a power of two is exact."""
    pair = pair_of(factor)
    product = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
    return e4m3_words(numbers_of([emit(product, Uint32, word, pair) for word in words]))


def e4m3_words(scaled: list[Any]) -> list[Any]:
    """Return the codes of eight float32 numbers, four a word."""
    text = """{
        .reg .b16 p0, p1;
        cvt.rn.satfinite.e4m3x2.f32 p0, {$r1}, {$r0};
        cvt.rn.satfinite.e4m3x2.f32 p1, {$r3}, {$r2};
        mov.b32 {$w0}, {p0, p1};
    }"""
    return [emit(text, Uint32, *scaled[start : start + 4]) for start in (0, 4)]


def nvfp4_scale_code(amax: Any) -> Any:
    """Return the E4M3 code of a block's scale; NaN's code if the block holds a NaN."""
    number = rules.nvfp4_scale_number(amax, _larger_or_nan)
    text = "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};"
    return Uint32(emit(text, Uint16, number, Float32(0.0)))


def _larger_or_nan(number: Any, least: float) -> Any:
    return emit("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, Float32(least))


def e4m3_number(code: Any) -> Any:
    """Return the value of an E4M3 code by the GPU's conversion."""
    text = """{
        .reg .b16 c, h0, h1; .reg .b32 d;
        cvt.u16.u32 c, {$r0};
        cvt.rn.f16x2.e4m3x2 d, c;
        mov.b32 {h0, h1}, d;
        cvt.f32.f16 {$w0}, h0;
    }"""
    return emit(text, Float32, code)


def nvfp4_word(words: list[Any], scale_code: Any, target: str) -> Any:
    """Return the codes of a half; 0 where the scale is NaN.

    Values are clamped to six scales first, two at once, so that quotients need no clamp.
    """
    scale = e4m3_number(scale_code)
    estimate = emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, scale)
    most = pair_of(ops.multiply_rn(scale, codecs.E2M1_MAX))
    bounded = [smaller_magnitude(word, most) for word in words]
    if TARGETS[target].converts_e2m1:
        inverse = rules.nvfp4_inverse(scale, estimate)
        scaled = [rules.nvfp4_quotient(number, inverse) for number in numbers_of(bounded)]
        word = native_word(scaled)
    else:
        first, second = halves.inverse_terms(scale, estimate)
        terms = pair_of(first), rounded_words([second, second])[0]
        word = halves.code_word(halves.quotients(bounded, terms, PACKED), PACKED)
    return ops.select(scale_code == 0x7F, Uint32(0), word)


def fp8_numbers(words: list[Any]) -> list[Any]:
    """Return the float32 numbers of E4M3 codes, four a word."""
    text = """{
        .reg .b16 p0, p1, h0, h1, h2, h3; .reg .b32 d0, d1;
        mov.b32 {p0, p1}, {$r0};
        cvt.rn.f16x2.e4m3x2 d0, p0; cvt.rn.f16x2.e4m3x2 d1, p1;
        mov.b32 {h0, h1}, d0; mov.b32 {h2, h3}, d1;
        cvt.f32.f16 {$w0}, h0; cvt.f32.f16 {$w1}, h1;
        cvt.f32.f16 {$w2}, h2; cvt.f32.f16 {$w3}, h3;
    }"""
    made: list[Any] = []
    for word in words:
        made += cute.arch.inline_ptx(text, write_only_types=[Float32] * 4, read_only_args=[word])
    return made


def scaled_values(words: list[Any], scale: Any) -> list[Any]:
    """Return the BF16 words of a half of E4M3 codes times a float32 scale."""
    return rounded_words([ops.multiply_rn(number, scale) for number in fp8_numbers(words)])


def fp8_values(words: list[Any], scale_code: Any) -> list[Any]:
    """Return the BF16 words of a half of codes and its UE8M0 scale."""
    return scaled_values(words, codecs.ue8m0_decode(scale_code))


def nvfp4_values(word: Any, scale_code: Any) -> list[Any]:
    """Return the BF16 words of a half of codes and its E4M3 scale."""
    return rounded_words(rules.e2m1_numbers(word, e4m3_number(scale_code)))


def nvfp4_rounded(words: list[Any], factor: Any, scale_code: Any) -> list[Any]:
    """Return BF16 words as NVFP4 has them: what `nvfp4_values` makes of their codes."""
    scale = e4m3_number(scale_code)
    scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
    return rounded_words([e2m1_rounded(number, scale) for number in scaled])


# --------------------------------------------------------------------------------------------------
# Approximate float32 instructions of the GPU. Arithmetic that uses them takes them as primitives,
# so that it also runs on tensors.

LOG2_E_HIGH, LOG2_E_REST = (
    1.4426950216293335,
    1.9259629911266175e-08,
)  # float32 and what it leaves out
LN_2 = 0.6931471805599453
LARGEST_POWER = 88.0  # of e; what lies outside of it and its negative gives 0 or 1 as a gate


def exponential(number: Any) -> Any:
    """Return e**number, at most two float32 steps off; a NaN stays one."""
    bound = Float32(LARGEST_POWER)
    number = emit("min.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, bound)
    number = emit("max.NaN.f32 {$w0}, {$r0}, {$r1};", Float32, number, Float32(-LARGEST_POWER))
    exponent = ops.multiply_rn(number, LOG2_E_HIGH)
    rest = ops.fma_rn(number, LOG2_E_HIGH, ops.multiply_rn(exponent, -1.0))
    rest = ops.fma_rn(number, LOG2_E_REST, rest)
    power = emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, exponent)
    return ops.fma_rn(power, ops.multiply_rn(rest, LN_2), power)


def power(number: Any) -> Any:
    """Return e**number of a number not above 0: within 2**-22, plus 2**-23 of the number's size.

    Meant for softmax weights: the error grows only where the weight is next to nothing.
    """
    return emit("ex2.approx.ftz.f32 {$w0}, {$r0};", Float32, ops.multiply_rn(number, LOG2_E_HIGH))


def reciprocal(number: Any) -> Any:
    """Return the GPU's reciprocal, at most one float32 step off."""
    return emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, number)


def inverse_root(number: Any) -> Any:
    """Return the GPU's inverse square root, at most two float32 steps off."""
    return emit("rsqrt.approx.ftz.f32 {$w0}, {$r0};", Float32, number)
