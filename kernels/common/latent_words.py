"""What a warp does with a row of 512 values: fold a sum, read and write words, turn pairs, code.

Owns the device side of attention_rows and kv_problem: loads into registers, butterflies, and the
instructions that the rules leave to a processor. Runs inside a kernel that is being traced, and
nowhere else. Refuses nothing: a kernel cannot. Kept honest by the suites of the kernels of latent
rows and heads, which on an H200 compare bytes with the stated rules and the references.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int64, Uint16, Uint32, cute

from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.common import attention_rows as rows
from degarble.kernels.common import kv_problem as facts
from degarble.kernels.common.e2m1_words import e2m1_word
from degarble.kernels.common.nvfp4_words import (
    INSTRUCTIONS,
    emit,
    native_word,
    numbers_of,
    rounded_words,
)
from degarble.kernels.common.targets import TARGETS

WORDS = rows.HALF // 2  # of two BF16 in a half
FLAT = 1 << 30
NAN = 0x7FC0_0000
MAGNITUDES = 0x7FFF_7FFF
LARGEST_PAIR = int(codecs.bf16_encode(facts.NVFP4_LARGEST)) * 0x1_0001


def vectors(address: Any, words: int) -> Any:
    """View a pointer as vectors of so many elements, one after the other; 0: single elements."""
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


def warp_folded(number: Any) -> Any:
    """Fold a number over the lanes of a warp; every lane has the result."""
    for distance in (16, 8, 4, 2, 1):
        number = ops.add_rn(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
    return number


def root_of(number: Any) -> Any:
    """Return the square root of a float32, rounded once to nearest even."""
    return emit("sqrt.rn.f32 {$w0}, {$r0};", Float32, number)


def factor_of_row(registers: Any, epsilon: Any) -> Any:
    """Return what the row that a warp holds is multiplied by."""
    halves = [numbers_of(words_at(registers, slot)) for slot in range(rows.SLOTS)]
    total = warp_folded(rows.lane_sum(halves))
    return rows.row_factor([total], epsilon, root_of)


def load_turn(table: Any, registers: Any, place: tuple[Any, Any]) -> None:
    """Read cosines and sines of a lane's pairs; place is (position, which of eight lanes)."""
    position, lane = place
    group = Int64(position) * (rows.TABLE_WIDTH // 4) + Int64(lane)
    cute.autovec_copy(table[None, group], registers[None, 0])
    cute.autovec_copy(table[None, group + rows.TABLE_WIDTH // 8], registers[None, 1])


def turned_words(numbers: list[Any], registers: Any, *, back: bool) -> list[Any]:
    """Return a lane's numbers turned by what load_turn read, rounded to BF16."""
    cos, sin = ([ops.number_of(word) for word in words_at(registers, part)] for part in (0, 1))
    return rounded_words(rows.turned(numbers, cos, sin, back=back))


# ---- blocks of a cache entry ---------------------------------------------------------------------


def amax_bits(words: list[Any], lanes: int) -> Any:
    """Return the BF16 bits of the largest magnitude in a block of so many lanes; NaN is largest."""
    largest = words[0] & Uint32(MAGNITUDES)
    for word in words[1:]:
        magnitudes = word & Uint32(MAGNITUDES)
        largest = emit("max.u16x2 {$w0}, {$r0}, {$r1};", Uint32, largest, magnitudes)
    bits = ops.maximum(largest & 0xFFFF, ops.shift_right(largest, 16))
    distance = 1
    while distance < lanes:
        bits = ops.maximum(bits, Uint32(cute.arch.shuffle_sync_bfly(bits, offset=distance)))
        distance *= 2
    return bits


def fp8_words(words: list[Any], factor: Any) -> list[Any]:
    """Return the codes of a half, four a word."""
    scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
    made = []
    for start in (0, 4):
        pairs = [_e4m3_pair(scaled[start + i], scaled[start + i + 1]) for i in (0, 2)]
        made.append(Uint32(pairs[0]) + ops.shift_left(Uint32(pairs[1]), 16))
    return made


def _e4m3_pair(low: Any, high: Any) -> Any:
    return emit("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, low, high)


def nvfp4_scale_code(bits: Any) -> Any:
    """Return the E4M3 code of a block's scale; a block that holds a NaN has the NaN's."""
    code = Uint32(_e4m3_pair(facts.nvfp4_scale_number(bits), Float32(0.0)))
    return ops.select(bits > facts.NAN_BF16, 0x7F, code)


def nvfp4_word(words: list[Any], scale_code: Any, target: str) -> Any:
    """Return the codes of a half; none where the scale is NaN."""
    scale = codecs.e4m3_decode(scale_code)
    estimate = emit("rcp.approx.ftz.f32 {$w0}, {$r0};", Float32, scale)
    inverse = facts.nvfp4_inverse(scale, estimate)
    text = f"{{ .reg .b32 at; mov.b32 at, {LARGEST_PAIR}; "
    text += "min.xorsign.abs.bf16x2 {$w0}, {$r0}, at; }"
    bounded = [emit(text, Uint32, word) for word in words]
    scaled = [facts.nvfp4_quotient(number, inverse) for number in numbers_of(bounded)]
    native = TARGETS[target].converts_e2m1
    word = native_word(scaled) if native else e2m1_word(scaled, INSTRUCTIONS)
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


def fp8_values(words: list[Any], scale_code: Any) -> list[Any]:
    """Return the BF16 words of a half of codes and its UE8M0 scale."""
    scale = codecs.ue8m0_decode(scale_code)
    return rounded_words([ops.multiply_rn(number, scale) for number in fp8_numbers(words)])


def nvfp4_values(word: Any, scale_code: Any) -> list[Any]:
    """Return the BF16 words of a half of codes and its E4M3 scale."""
    return rounded_words(facts.e2m1_numbers(word, codecs.e4m3_decode(scale_code)))
