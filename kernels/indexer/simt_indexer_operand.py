"""Prepare rows of the lightning indexer: LayerNorm, RoPE, Hadamard transform, block rounding.

One source for sm_90a and sm_100a; eight lanes have a row of 128, 16 adjacent values each; 8 warps,
32 rows a thread block. V4's queries rotate their last 64 values in interleaved pairs; V3.2's
queries and keys the first 64 by halves. V3.2's keys are normed first; V4's keys arrive rotated from
the compressor. Output: BF16, or FP8 codes with a float32 scale a row.

A position outside the RoPE table makes the rotated values NaN, and a NaN or an infinity makes its
whole block NaN where blocks are coded, so that errors show. Unless coded, the result may overwrite
the input. Allocates only what it returns and never waits for the GPU. Shape letters: T tokens, N
heads, I width, P rows of the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import OperandForm, OperandProblem
from degarble.kernels.primitives.device_words import (
    INSTRUCTIONS,
    NAN,
    amax_bits,
    fp8_numbers,
    fp8_words,
    numbers_of,
    rounded_words,
    square_root,
    store,
    vectors,
    words_of,
)
from degarble.kernels.primitives.kv_problem import fp8_factor, fp8_scale_code
from degarble.kernels.runtime.kernel import Kernel, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

WORDS = facts.OF_LANE // 2
THREADS = facts.WARPS * 32
VECTOR = 4  # words of 16 bytes


# ---- device --------------------------------------------------------------------------------------


class OperandTensors(NamedTuple):
    """Kernel's tensors: words in pairs, numbers in fours, or singly."""

    rows: Any  # BF16 [T, N, 128]
    turns: Any  # float32 [P, 64]
    positions: Any  # int64 [T]
    weight: Any  # float32 [128]
    bias: Any  # float32 [128]
    out: Any  # BF16 or FP8 codes [T, N, 128]
    scales: Any  # float32 [T, N]


def loaded(tensor: Any, at: Any, words: int) -> list[Any]:
    """Read adjacent words, from a vector on."""
    registers = cute.make_rmem_tensor(cute.make_layout((VECTOR, words // VECTOR)), Uint32)
    for vector in range(words // VECTOR):
        cute.autovec_copy(tensor[None, at + vector], registers[None, vector])
    return words_of(registers)


def put(tensor: Any, at: Any, words: list[Any]) -> None:
    """Write adjacent words, from a vector on."""
    for vector in range(len(words) // VECTOR):
        store(tensor, at + vector, words[vector * VECTOR : (vector + 1) * VECTOR])


def numbers_at(tensor: Any, lane: Any) -> list[Any]:
    """Read a lane's float32 numbers."""
    vectors_of_lane = facts.OF_LANE // VECTOR
    words = loaded(tensor, lane * vectors_of_lane, facts.OF_LANE)
    return [codecs.number_of(word) for word in words]


def row_folded(number: Any) -> Any:
    """Sum a number over the eight lanes of a row; each lane has the result."""
    distance = facts.LANES // 2
    while distance:
        number = codecs.add_rn(number, cute.arch.shuffle_sync_bfly(number, offset=distance))
        distance //= 2
    return number


def layer_normed(numbers: list[Any], tensors: OperandTensors, lane: Any, epsilon: Any) -> list[Any]:
    """Return a lane's numbers of a row after its LayerNorm, not rounded."""

    def mean(terms: list[Any]) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = codecs.add_rn(total, term)
        return codecs.multiply_rn(row_folded(total), 1.0 / facts.WIDTH)

    # Two passes: mean, then the variance of centred numbers.
    middle = mean(numbers)
    centred = [codecs.subtract_rn(number, middle) for number in numbers]
    variance = mean([codecs.multiply_rn(number, number) for number in centred])
    factor = codecs.divide_rn(1.0, square_root(codecs.add_rn(variance, epsilon)))
    weights, biases = numbers_at(tensors.weight, lane), numbers_at(tensors.bias, lane)
    return [
        codecs.add_rn(codecs.multiply_rn(codecs.multiply_rn(number, factor), weight), bias)
        for number, weight, bias in zip(centred, weights, biases, strict=True)
    ]


@cute.jit
def load_turn(
    tensors: OperandTensors, place: tuple[Any, Any], positions: Any, form: cutlass.Constexpr
) -> tuple[Any, Any]:
    """Return cosines and sines of (token, lane) as words, and whether the lane rotates at all."""
    token, lane = place
    turning = facts.LANES // 2  # lanes that turn
    of_lane = pairs_of_lane(form)
    rTurn = cute.make_rmem_tensor(cute.make_layout((VECTOR, 2 * of_lane // VECTOR)), Uint32)
    rTurn.fill(NAN)
    # V3.2 rotates the first 64 values, V4 the last 64.
    turns = lane < turning if form.pairing == "halves" else lane >= turning
    position = Int64(tensors.positions[token])
    if turns & (position >= 0) & (position < Int64(positions)):
        first = lane % (facts.PAIRS // of_lane) * (of_lane // VECTOR)
        row = position * (facts.TABLE_WIDTH // VECTOR) + Int64(first)
        for i in cutlass.range_constexpr(of_lane // VECTOR):
            cute.autovec_copy(tensors.turns[None, row + i], rTurn[None, i])
            of_sine = row + facts.PAIRS // VECTOR + i
            cute.autovec_copy(tensors.turns[None, of_sine], rTurn[None, of_lane // VECTOR + i])
    return rTurn, turns


def pairs_of_lane(form: OperandForm) -> int:
    """Return the pairs of which a lane has a value: one of each (halves) or both."""
    return facts.OF_LANE if form.pairing == "halves" else facts.OF_LANE // 2


def turned(numbers: list[Any], rTurn: Any, turns: Any, lane: Any, form: OperandForm) -> list[Any]:
    """Return a lane's numbers, rotated where it has rotated ones; not rounded."""
    angles = [codecs.number_of(word) for word in words_of(rTurn)]
    cos, sin = angles[: pairs_of_lane(form)], angles[pairs_of_lane(form) :]
    made: list[Any] = []
    if form.pairing == "interleaved":
        for pair, (c, s) in enumerate(zip(cos, sin, strict=True)):
            made += codecs.rope_rotate(numbers[2 * pair], numbers[2 * pair + 1], c, s)
    else:
        distance = facts.PAIRS // facts.OF_LANE
        # The first of a pair loses what the second gains: a sine of the other sign is exact.
        sign = codecs.select(lane % (2 * distance) < distance, Float32(-1.0), Float32(1.0))
        for number, c, s in zip(numbers, cos, sin, strict=True):
            other = cute.arch.shuffle_sync_bfly(number, offset=distance)
            part = codecs.multiply_rn(other, codecs.multiply_rn(s, sign))
            made.append(codecs.add_rn(codecs.multiply_rn(number, c), part))
    return [codecs.select(turns, new, old) for new, old in zip(made, numbers, strict=True)]


def transformed(numbers: list[Any], lane: Any) -> list[Any]:
    """Return a lane's numbers of the row's Hadamard transform, not rounded."""
    distance = 1
    while distance < facts.OF_LANE:
        made = list(numbers)
        for i in range(facts.OF_LANE):
            if not i & distance:
                made[i] = codecs.add_rn(numbers[i], numbers[i + distance])
                made[i + distance] = codecs.subtract_rn(numbers[i], numbers[i + distance])
        numbers, distance = made, 2 * distance
    distance = 1
    while distance < facts.LANES:
        # A product with 1 or -1 is exact: the fma is the sum or the difference, rounded once.
        sign = codecs.select(lane // distance % 2 == 1, Float32(-1.0), Float32(1.0))
        numbers = [
            codecs.fma_rn(number, sign, cute.arch.shuffle_sync_bfly(number, offset=distance))
            for number in numbers
        ]
        distance = 2 * distance
    return [codecs.multiply_rn(number, facts.HADAMARD_FACTOR) for number in numbers]


def scale_code_of(words: list[Any], form: OperandForm) -> Any:
    """Return the UE8M0 code of the block that a lane's words are in."""
    bits = amax_bits(words, facts.BLOCKS[form.format] // facts.OF_LANE)
    return fp8_scale_code(bits) if form.format == "fp8" else facts.mxfp4_scale_code(bits)


def codes_of(words: list[Any], factor: Any) -> list[Any]:
    """Return the FP8 codes of a lane's values, four a word."""
    half, made = facts.OF_LANE // 4, []
    for start in range(0, len(words), half):
        made += fp8_words(words[start : start + half], factor)
    return made


def coded_values(words: list[Any], code: Any, form: OperandForm) -> list[Any]:
    """Return the BF16 words that a lane's codes represent."""
    scale, factor = codecs.ue8m0_decode(code), fp8_factor(code)
    if form.format == "fp8":
        numbers = fp8_numbers(codes_of(words, factor))
    else:
        scaled = [codecs.multiply_rn(number, factor) for number in numbers_of(words)]
        numbers = [facts.mxfp4_number(number, INSTRUCTIONS) for number in scaled]
    return rounded_words([codecs.multiply_rn(number, scale) for number in numbers])


@cute.kernel
def operand_kernel(
    tensors: OperandTensors, extents: tuple[Any, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Process a row with eight lanes; surplus lanes repeat the last row and write nothing."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    rows, heads, positions = extents
    lane = Int32(thread) % facts.LANES
    own = Int32(group) * facts.ROWS + Int32(thread) // facts.LANES
    # All lanes take part in shuffles.
    row = cutlass.min(own, rows - 1)
    at = Int64(row) * (facts.WIDTH // 2 // VECTOR) + Int64(lane * (WORDS // VECTOR))
    words = loaded(tensors.rows, at, WORDS)
    if cutlass.const_expr(form.normed):
        # Every step is rounded to BF16, as the references store it.
        words = rounded_words(layer_normed(numbers_of(words), tensors, lane, epsilon))
    if cutlass.const_expr(form.pairing != "none"):
        rTurn, turns = load_turn(tensors, (row // heads, lane), positions, form)
        words = rounded_words(turned(numbers_of(words), rTurn, turns, lane, form))
    if cutlass.const_expr(form.hadamard):
        words = rounded_words(transformed(numbers_of(words), lane))
    code, out = Uint32(0), words
    if cutlass.const_expr(form.format != "exact"):
        code = scale_code_of(words, form)
        if cutlass.const_expr(form.coded):
            out = codes_of(words, fp8_factor(code))
        else:
            out = coded_values(words, code, form)
    if own < rows:
        if cutlass.const_expr(form.coded):
            put(tensors.out, Int64(row) * facts.LANES + Int64(lane), out)
            if lane == 0:
                tensors.scales[Int64(row)] = codecs.ue8m0_decode(code)
        else:
            put(tensors.out, at, out)


@cute.jit
def launch_operand(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are rows, heads, positions, thread blocks."""
    rows, heads, positions, blocks = extents
    widths = (VECTOR, VECTOR, 0, VECTOR, VECTOR, VECTOR, 0)
    views = zip(pointers, widths, strict=True)
    tensors = OperandTensors(*(vectors(address, width) for address, width in views))
    operand_kernel(tensors, (rows, heads, positions), epsilon, form).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _where(test: Callable[[Any], bool]) -> Presence[OperandProblem]:
    exactly = "given exactly where the problem asks for it"
    said = "The problem says pairing={}, normed={}."
    return Presence(test, lambda p: said.format(p.pairing, p.normed), exactly, exactly)


def _result(of: OperandProblem | OperandForm) -> Storage:
    return Storage(Uint32, torch.float8_e4m3fn if of.coded else torch.bfloat16, 16)


_Operand = Operand[OperandProblem]
_TURNED, _NORMED = _where(lambda of: of.pairing != "none"), _where(lambda of: of.normed)
_WITH_CODES = "scales exactly where codes leave"
_CODED = Presence[OperandProblem](
    lambda of: of.coded, lambda p: f"coded={p.coded}.", _WITH_CODES, _WITH_CODES
)
_ROWS, _WORDS = Storage(Uint32, torch.bfloat16, 16), Storage(Uint32, torch.float32, 16)
_PLACES, _SCALES = Storage(Int64, torch.int64, 8), Storage(Float32, torch.float32, 4)
KERNEL = Kernel[OperandProblem, OperandForm](
    entry=launch_operand,
    operands=(
        _Operand("rows", _ROWS, lambda p: (p.tokens, p.heads, facts.WIDTH)),
        _Operand("turns", _WORDS, lambda p: (p.positions, facts.TABLE_WIDTH), _TURNED),
        _Operand("positions", _PLACES, lambda p: (p.tokens,), _TURNED),
        _Operand("weight", _WORDS, lambda _: (facts.WIDTH,), _NORMED, label="weight of the norm"),
        _Operand("bias", _WORDS, lambda _: (facts.WIDTH,), _NORMED, label="bias of the norm"),
        # It may be the memory of the rows, unless codes leave.
        _Operand("values", _result, lambda p: (p.tokens, p.heads, facts.WIDTH), output=True),
        _Operand("scales", _SCALES, lambda p: (p.tokens, p.heads), _CODED, output=True),
    ),
    choose_form=facts.choose_operand_form,
    kinds=((Int32,) * 4, Float32),
    numbers=lambda of: (
        (
            of.problem.rows,
            of.problem.heads,
            of.problem.positions,
            facts.operand_grid(of.problem),
        ),
        of.problem.epsilon,
    ),
    work=lambda problem: problem.tokens,
)
compile_form = KERNEL.compile_form
