"""Rows of the indexer as its scores multiply them: LayerNorm, turn, Hadamard, rounding to blocks.

Entry point: `indexer_operand(rows, problem, settings, turning=None, norm=None, out=None)
-> Operand(values, scales)`. Queries of V4 turn their last 64 values in pairs side by side, queries
and keys of V3.2 the first 64 by halves; V3.2's keys are normed first; V4's keys come turned from
the compressor. Values leave as BF16, or as FP8 codes with a float32 scale a row.

Owns one source for sm_90a and sm_100a: a warp has a row of 128. A position outside of the table of
turns makes the turned values NaN, and a NaN or an infinity makes its whole block NaN where blocks
are coded: seen, not hidden. The result may be written where the rows were read, unless it is coded.
The wrapper checks and launches, allocates no more than what it returns, and never waits for the
GPU. Refuses other dtypes, shapes, strides and alignments by name. Kept honest by
suites/kernels/test_simt_indexer_operand.py. Shape letters: T tokens, N heads, I width,
P rows of the table
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint16, Uint32, cute
from torch import Tensor

from degarble.harness.errors import InvalidArgument
from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.common import indexer_operand_problem as facts
from degarble.kernels.common.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.common.indexer_operand_problem import OperandForm, OperandProblem
from degarble.kernels.common.kv_problem import fp8_factor, fp8_scale_code
from degarble.kernels.common.latent_words import (
    NAN,
    amax_bits,
    fp8_numbers,
    vectors,
    warp_folded,
)
from degarble.kernels.common.nvfp4_words import (
    emit,
    numbers_of,
    rounded_words,
    square_root,
    store,
    words_of,
)
from degarble.kernels.common.operands import pointer, require_device, require_tensor
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS, target_of_device

WORDS = facts.OF_LANE // 2
THREADS = facts.WARPS * facts.LANES


class Turning(NamedTuple):
    """What rows turn by: float32 [P, 64], cosines then sines, and int64 positions [T]."""

    turns: Tensor
    positions: Tensor


class Norm(NamedTuple):
    """LayerNorm's float32 weight and bias [128]."""

    weight: Tensor
    bias: Tensor


class Operand(NamedTuple):
    """What a launch writes: BF16 values [T, N, 128]; or FP8 codes, and scales [T, N]."""

    values: Tensor
    scales: Tensor | None


# ---- device --------------------------------------------------------------------------------------


class Tensors(NamedTuple):
    """What the kernel reads and writes: words in pairs, numbers in fours, or alone."""

    rows: Any
    turns: Any
    positions: Any
    weight: Any
    bias: Any
    out: Any
    scales: Any


def loaded(tensor: Any, at: Any, words: int) -> list[Any]:
    """Read words that lie side by side."""
    registers = cute.make_rmem_tensor(words, Uint32)
    cute.autovec_copy(tensor[None, at], registers)
    return words_of(registers)


def four_of(tensor: Any, at: Any) -> list[Any]:
    """Read four float32 numbers."""
    return [ops.number_of(word) for word in loaded(tensor, at, facts.OF_LANE)]


def layer_normed(numbers: list[Any], tensors: Tensors, lane: Any, epsilon: Any) -> list[Any]:
    """Return a lane's numbers of a row behind its LayerNorm, not rounded."""

    def mean(terms: list[Any]) -> Any:
        total = terms[0]
        for term in terms[1:]:
            total = ops.add_rn(total, term)
        return ops.multiply_rn(warp_folded(total), 1.0 / facts.WIDTH)

    middle = mean(numbers)
    centred = [ops.subtract_rn(number, middle) for number in numbers]
    variance = mean([ops.multiply_rn(number, number) for number in centred])
    factor = ops.divide_rn(1.0, square_root(ops.add_rn(variance, epsilon)))
    weights, biases = four_of(tensors.weight, lane), four_of(tensors.bias, lane)
    return [
        ops.add_rn(ops.multiply_rn(ops.multiply_rn(number, factor), weight), bias)
        for number, weight, bias in zip(centred, weights, biases, strict=True)
    ]


@cute.jit
def load_turn(
    tensors: Tensors, place: tuple[Any, Any], positions: Any, form: cutlass.Constexpr
) -> tuple[Any, bool]:
    """Return a lane's cosines and sines of (token, lane), and whether it turns at all."""
    token, lane = place
    of_half = facts.LANES // 2
    halves = form.pairing == "halves"
    width = 4 if halves else 2
    rTurn = cute.make_rmem_tensor(cute.make_layout((width, 2)), Uint32)
    rTurn.fill(NAN)
    turns = lane < of_half if halves else lane >= of_half
    position = Int64(tensors.positions[token])
    if turns & (position >= 0) & (position < Int64(positions)):
        group = lane % (of_half // 2) if halves else lane % of_half
        row = position * (facts.TABLE_WIDTH // width) + Int64(group)
        cute.autovec_copy(tensors.turns[None, row], rTurn[None, 0])
        cute.autovec_copy(tensors.turns[None, row + facts.PAIRS // width], rTurn[None, 1])
    return rTurn, turns


def turned(numbers: list[Any], rTurn: Any, turns: Any, lane: Any, form: OperandForm) -> list[Any]:
    """Return a lane's numbers, turned where it has some that turn; not rounded."""
    width = 4 if form.pairing == "halves" else 2
    cos, sin = ([ops.number_of(Uint32(rTurn[i, part])) for i in range(width)] for part in (0, 1))
    made: list[Any] = []
    if form.pairing == "interleaved":
        for pair in range(2):
            even, odd = numbers[2 * pair], numbers[2 * pair + 1]
            made += codecs.rope_rotate(even, odd, cos[pair], sin[pair])
    else:
        distance = facts.PAIRS // facts.OF_LANE
        is_first = lane % (2 * distance) < distance
        for number, c, s in zip(numbers, cos, sin, strict=True):
            other = cute.arch.shuffle_sync_bfly(number, offset=distance)
            first, second = ops.select(is_first, number, other), ops.select(is_first, other, number)
            made.append(ops.select(is_first, *codecs.rope_rotate(first, second, c, s)))
    return [ops.select(turns, new, old) for new, old in zip(made, numbers, strict=True)]


def transformed(numbers: list[Any], lane: Any) -> list[Any]:
    """Return a lane's numbers of the row's Hadamard transform, not rounded."""
    for distance in (1, 2):
        made = list(numbers)
        for i in range(facts.OF_LANE):
            if not i & distance:
                made[i] = ops.add_rn(numbers[i], numbers[i + distance])
                made[i + distance] = ops.subtract_rn(numbers[i], numbers[i + distance])
        numbers = made
    distance = 1
    while distance < facts.LANES:
        # A product with 1 or -1 is exact: the fma is the sum or the difference, rounded once.
        sign = ops.select(lane // distance % 2 == 1, Float32(-1.0), Float32(1.0))
        numbers = [
            ops.fma_rn(number, sign, cute.arch.shuffle_sync_bfly(number, offset=distance))
            for number in numbers
        ]
        distance = 2 * distance
    return [ops.multiply_rn(number, facts.HADAMARD_FACTOR) for number in numbers]


def scale_code_of(words: list[Any], form: OperandForm) -> Any:
    """Return the UE8M0 code of the block that a lane's words are in."""
    bits = amax_bits(words, facts.BLOCKS[form.format] // facts.OF_LANE)
    return fp8_scale_code(bits) if form.format == "fp8" else facts.mxfp4_scale_code(bits)


def fp8_word(words: list[Any], factor: Any) -> Any:
    """Return the codes of a lane's four values."""
    scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
    low, high = (
        emit("cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};", Uint16, *scaled[i : i + 2])
        for i in (0, 2)
    )
    return Uint32(low) + ops.shift_left(Uint32(high), 16)


def coded_values(words: list[Any], code: Any, form: OperandForm) -> list[Any]:
    """Return the BF16 words of what a lane's values are coded as."""
    scale, factor = codecs.ue8m0_decode(code), fp8_factor(code)
    if form.format == "fp8":
        numbers = fp8_numbers([fp8_word(words, factor)])
    else:
        scaled = [ops.multiply_rn(number, factor) for number in numbers_of(words)]
        numbers = [facts.mxfp4_number(number) for number in scaled]
    return rounded_words([ops.multiply_rn(number, scale) for number in numbers])


@cute.kernel
def operand_kernel(
    tensors: Tensors, extents: tuple[Any, ...], epsilon: Float32, form: cutlass.Constexpr
) -> None:
    """Give each row a warp."""
    thread, _, _ = cute.arch.thread_idx()
    group, _, _ = cute.arch.block_idx()
    rows, heads, positions = extents
    lane = Int32(thread) % facts.LANES
    row = Int32(group) * facts.WARPS + Int32(thread) // facts.LANES
    if row < rows:
        at = Int64(row) * facts.LANES + Int64(lane)
        words = loaded(tensors.rows, at, WORDS)
        numbers = numbers_of(words)
        if cutlass.const_expr(form.normed):
            words = rounded_words(layer_normed(numbers, tensors, lane, epsilon))
            numbers = numbers_of(words)
        if cutlass.const_expr(form.pairing != "none"):
            rTurn, turns = load_turn(tensors, (row // heads, lane), positions, form)
            words = rounded_words(turned(numbers, rTurn, turns, lane, form))
            numbers = numbers_of(words)
        if cutlass.const_expr(form.hadamard):
            words = rounded_words(transformed(numbers, lane))
        if cutlass.const_expr(form.format != "exact"):
            code = scale_code_of(words, form)
            if cutlass.const_expr(form.coded):
                store(tensors.out, at, [fp8_word(words, fp8_factor(code))])
                if lane == 0:
                    tensors.scales[Int64(row)] = codecs.ue8m0_decode(code)
            else:
                store(tensors.out, at, coded_values(words, code, form))
        else:
            store(tensors.out, at, words)


@cute.jit
def launch_operand(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Any, ...],
    epsilon: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on extents that are known now: rows, heads, positions, thread blocks."""
    rows, heads, positions, blocks = extents
    of_turn = 4 if form.pairing == "halves" else 2
    widths = (WORDS, of_turn, 0, 4, 4, 1 if form.coded else WORDS, 0)
    views = zip(pointers, widths, strict=True)
    tensors = Tensors(*(vectors(address, width) for address, width in views))
    operand_kernel(tensors, (rows, heads, positions), epsilon, form).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: OperandForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(4))
    arguments = (_pointers(form, (None,) * 7), extents, Float32(1e-6), form, any_stream())
    return compile_kernel(launch_operand, arguments, TARGETS[form.target], settings)


def indexer_operand(
    x_TNI: Tensor,
    problem: OperandProblem,
    settings: CompileSettings,
    *,
    turning: Turning | None = None,
    norm: Norm | None = None,
    out: Operand | None = None,
) -> Operand:
    """Return rows as the scores multiply them, on their GPU: [T, N, 128] in BF16 or codes."""
    out = out or empty_operand(problem, x_TNI.device)
    require_operands(problem, x_TNI, turning, norm)
    require_output(problem, out)
    turns, positions = turning or (None, None)
    weight, bias = norm or (None, None)
    tensors = (x_TNI, turns, positions, weight, bias, out.values, out.scales)
    device = require_device(tensors)
    if problem.tokens:
        form = facts.choose_form(problem, target_of_device(device).name)
        launch(compile_form(form, settings), form, problem, tensors)
    return out


def launch(
    kernel: CompiledKernel,
    form: OperandForm,
    problem: OperandProblem,
    tensors: tuple[Tensor | None, ...],
) -> None:
    """Launch on checked tensors: rows, turns, positions, weight, bias, values, scales."""
    device = tensors[0].device.index or 0 if tensors[0] is not None else 0
    numbers = (problem.rows, problem.heads, problem.positions, facts.grid(problem))
    extents = tuple(Int32(number) for number in numbers)
    kernel(_pointers(form, tensors), extents, Float32(problem.epsilon), current_stream(device))


def empty_operand(problem: OperandProblem, device: torch.device) -> Operand:
    """Allocate what a launch writes; every number of it is written."""
    shape = (problem.tokens, problem.heads, facts.WIDTH)
    if not problem.coded:
        return Operand(torch.empty(shape, dtype=torch.bfloat16, device=device), None)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return Operand(codes, torch.empty(shape[:2], dtype=torch.float32, device=device))


def require_operands(
    problem: OperandProblem, x_TNI: Tensor, turning: Turning | None, norm: Norm | None
) -> None:
    """Refuse inputs that the kernel would misread."""
    shape = (problem.tokens, problem.heads, facts.WIDTH)
    require_tensor("rows", x_TNI, torch.bfloat16, shape, 8)
    for name, given, wanted in (
        ("turning", turning, problem.pairing != "none"),
        ("norm", norm, problem.normed),
    ):
        if (given is not None) is not wanted:
            raise InvalidArgument(
                name,
                "given" if given else None,
                "given exactly where the problem asks for it",
                f"The problem says pairing={problem.pairing}, normed={problem.normed}.",
            )
    if turning is not None:
        of_turns = (problem.positions, facts.TABLE_WIDTH)
        require_tensor("turns", turning.turns, torch.float32, of_turns, 16)
        require_tensor("positions", turning.positions, torch.int64, (problem.tokens,), 8)
    if norm is not None:
        require_tensor("weight of the norm", norm.weight, torch.float32, (facts.WIDTH,), 16)
        require_tensor("bias of the norm", norm.bias, torch.float32, (facts.WIDTH,), 16)


def require_output(problem: OperandProblem, out: Operand) -> None:
    """Refuse outputs that do not hold what is written."""
    shape = (problem.tokens, problem.heads, facts.WIDTH)
    dtype = torch.float8_e4m3fn if problem.coded else torch.bfloat16
    require_tensor("values", out.values, dtype, shape, 8)
    if (out.scales is not None) is not problem.coded:
        raise InvalidArgument(
            "scales", None, "scales exactly where codes leave", f"coded={problem.coded}."
        )
    if out.scales is not None:
        require_tensor("scales", out.scales, torch.float32, shape[:2], 4)


def _pointers(form: OperandForm, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return what the entry takes; None becomes a pointer that is not read."""
    elements = (Uint32, Uint32, Int64, Uint32, Uint32, Uint32, Float32)
    alignments = (8, 16, 8, 16, 16, 4 if form.coded else 8, 4)
    places = zip(elements, tensors, alignments, strict=True)
    return tuple(pointer(element, tensor, alignment) for element, tensor, alignment in places)
