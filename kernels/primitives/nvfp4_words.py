"""Device code for blocks of sixteen BF16 values: load, clamp, SwiGLU, quantise to NVFP4, store.

A block is eight words of two BF16. Numbers are rounded only where a function says so; nothing is
contracted to an fma unless it is one by name. Only for use inside a kernel that is being
traced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, Uint16, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.e2m1_words import NUMBERS, Primitives, e2m1_word
from degarble.kernels.runtime.targets import TARGETS

WORDS = facts.BLOCK // 2  # words of two BF16 in a block
LOG2_E = 1.4426950408889634
HIGH_HALF = 0xFFFF_0000
HEADROOM = 2.0**-64


def emit(instruction: str, result: Any, *arguments: Any) -> Any:
    """Emit one instruction; {$w0} is the result, {$r0} and on are the arguments."""
    return cute.arch.inline_ptx(
        instruction, write_only_types=[result], read_only_args=list(arguments)
    )


INSTRUCTIONS = Primitives(
    limited=lambda x: emit("min.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(6.0)),
    at_least_one=lambda x: emit(
        "max.xorsign.abs.f32 {$w0}, {$r0}, {$r1};", Float32, x, Float32(1.0)
    ),
    constant=Uint32,
    low_halves=lambda a, b: emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", Uint32, a, b),
    high_halves=lambda a, b: emit("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", Uint32, a, b),
)


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


def _encoded(scaled: list[Any], target: str) -> Any:
    """Return the word of codes of eight scaled numbers."""
    if TARGETS[target].converts_e2m1:
        return native_word(scaled)
    return e2m1_word(scaled, INSTRUCTIONS)


def loaded(tensor: Any, index: Any) -> list[Any]:
    """Read the words of one block."""
    registers = cute.make_rmem_tensor(WORDS, Uint32)
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
