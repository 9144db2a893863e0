"""Quantise BF16 to E4M3 with a scale per 128 values of a row, plain, after SwiGLU or inverse RoPE.

codes [M, K] and scales [M, G], row-major, with the canonical numerics of FP8_1X128; scales in
float32, or in UE8M0, rounded up. Output of this kernel is A of the fp8_block GEMMs; sm_90a,
sm_100a. A thread has 16 values, eight lanes a block: read, (SwiGLU or inverse RoPE, rounded to
BF16), fold the largest magnitude over eight lanes by shuffles, divide by the scale, convert, store
16 codes; every eighth lane stores the scale. No shared memory, no barriers. NaN is ignored by the
largest magnitude and stays NaN as a code. With `turned`, rows are heads side by side, and inverse
RoPE as in simt_inverse_rope rotates the last 64 values of each first; a position outside the table
makes them NaN.

Shape letters: M rows, K columns, G = K / 128 blocks.
"""

from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute

from degarble.harness.formats import scalar_ops as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.primitives import kv_problem
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.device_words import (
    NAN,
    block_amax,
    emit,
    load_turn,
    loaded,
    numbers_of,
    put,
    registers_of,
    store,
    swiglu_words,
    turned_words,
    vectors,
    words_at,
)
from degarble.kernels.primitives.quantise_problem import Fp8Form, Fp8Problem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Presence, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

SCALES = {
    "float32": Storage(Float32, torch.float32, 4), "ue8m0": Storage(Uint8, torch.uint8, 1),
}  # fmt: skip
FLAT = 1 << 30
WORDS_OF_CHUNK, CHUNKS = 4, 2  # of 16 bytes, of a thread's values


class HeadVectors(NamedTuple):
    """Heads in vectors of eight values, RoPE table, positions, number of known positions."""

    values: Any
    table: Any
    positions: Any
    known: Any


# ---- device --------------------------------------------------------------------------------------


def words_of(values: Any, place: tuple[Any, Any, Any], form: Fp8Form) -> list[Any]:
    """Return the words of 16 values: read, gated, or rotated."""
    row, part, parts = (Int64(number) for number in place)
    if form.turned:
        registers = registers_of(WORDS_OF_CHUNK, CHUNKS)
        read_heads(values, registers, (row, part, parts), form.turned)
        return [word for chunk in range(CHUNKS) for word in words_at(registers, chunk)]
    if form.source == "values":
        return loaded(values, row * parts + part)
    # A row of the input is gate, then up: 2 K values.
    gate = 2 * row * parts + part
    return swiglu_words(loaded(values, gate), loaded(values, gate + parts), form.limit)


@cute.jit
def read_heads(
    heads: HeadVectors, registers: Any, place: tuple[Any, Any, Any], width: cutlass.Constexpr
) -> None:
    """Read 16 values of heads, and apply inverse RoPE to those that it covers."""
    row, part, parts = place
    for chunk in cutlass.range_constexpr(CHUNKS):
        at = CHUNKS * (row * parts + part) + chunk
        cute.autovec_copy(heads.values[None, at], registers[None, chunk])
    group = facts.group_of(part, width)
    if group >= 0:
        position = Int64(heads.positions[row])
        for chunk in cutlass.range_constexpr(CHUNKS):
            turn = registers_of(WORDS_OF_CHUNK, 2)
            turn.fill(NAN)
            if (position >= 0) & (position < Int64(heads.known)):
                load_turn(heads.table, turn, (position, CHUNKS * group + chunk))
            numbers = numbers_of(words_at(registers, chunk))
            put(registers, chunk, turned_words(numbers, turn, back=True))


def scale_of(amax: Any, kind: str) -> tuple[Any, Any]:
    """Return a block's scale as stored and as a number."""
    raw = ops.multiply_rn(ops.maximum(amax, facts.AMAX_FLOOR), facts.SHARE)
    if kind == "float32":
        return raw, raw
    code = codecs.ue8m0_encode(raw)
    return Uint8(code), codecs.ue8m0_decode(code)


def e4m3_words(numbers: list[Any]) -> list[Any]:
    """Return the codes of numbers, four a word."""
    text = """{
        .reg .b16 p0, p1;
        cvt.rn.satfinite.e4m3x2.f32 p0, {$r1}, {$r0};
        cvt.rn.satfinite.e4m3x2.f32 p1, {$r3}, {$r2};
        mov.b32 {$w0}, {p0, p1};
    }"""
    return [emit(text, Uint32, *numbers[i : i + 4]) for i in range(0, len(numbers), 4)]


@cute.kernel
def quantise_kernel(
    tensors: tuple[Any, ...], rows: Int32, parts: Int32, form: cutlass.Constexpr
) -> None:
    """Quantise 16 values a thread; lanes past the last row compute and write nothing."""
    follow()
    values, codes, scales = tensors
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = Int64(block) * facts.FP8_THREADS + Int64(thread)
    # All lanes take part in the shuffles, so surplus ones read the first values.
    known = ops.select(at < Int64(rows) * Int64(parts), at, Int64(0))
    row = known // Int64(parts)
    part = known - row * Int64(parts)
    words = words_of(values, (row, part, Int64(parts)), form)
    amax = block_amax(words)
    # Eight lanes have a block of 128: fold by 1, 2, 4.
    for distance in cutlass.range_constexpr(3):
        amax = ops.maximum(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << distance))
    stored, scale = scale_of(amax, form.scales)
    scaled = [ops.divide_rn(number, scale) for number in numbers_of(words)]
    if at < Int64(rows) * Int64(parts):
        store(codes, at, e4m3_words(scaled))
        # One lane of the eight stores the scale.
        if part % facts.LANES == 0:
            scales[at // facts.LANES] = stored


@cute.jit
def launch_quantise(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch on rows, threads of a row, thread blocks, positions of the RoPE table."""
    rows, parts, blocks, *known = extents
    shapes = ((8, FLAT), (4, FLAT), (1, FLAT))
    values, codes, scales = (
        cute.make_tensor(address, cute.make_layout(shape, stride=(1, shape[0])))
        for address, shape in zip(pointers[:3], shapes, strict=True)
    )
    if cutlass.const_expr(form.turned):
        heads, table, positions = pointers[0], *pointers[3:]
        read, turns = (vectors(address, WORDS_OF_CHUNK) for address in (heads, table))
        values = HeadVectors(read, turns, vectors(positions, 0), known[0])
    flat = cute.make_tensor(scales.iterator, cute.make_layout(FLAT))
    quantise_kernel((values, codes, flat), rows, parts, form).launch(
        grid=[blocks, 1, 1], block=[facts.FP8_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _kinds(form: Fp8Form) -> tuple[Any, ...]:
    return ((Int32,) * (4 if form.turned else 3),)


def _numbers(of: LaunchContext[Fp8Problem, Fp8Form]) -> tuple[Any, ...]:
    problem = of.problem
    parts = problem.columns // facts.FP8_VALUES
    extents = (problem.rows, parts, ceil_div(problem.rows * parts, facts.FP8_THREADS))
    return ((*extents, problem.positions) if problem.turned else extents,)


_Operand = Operand[Fp8Problem]
_TURNED = Presence[Fp8Problem](
    lambda of: bool(of.turned),
    "Give them where heads are turned back.",
    required="a table and positions",
    superfluous="none, as the problem says",
)
KERNEL = Kernel[Fp8Problem, Fp8Form](
    entry=launch_quantise,
    operands=(
        _Operand(
            "values", Storage(Uint32, torch.bfloat16, 32), lambda p: (p.rows, p.input_columns)
        ),
        _Operand(
            "codes",
            Storage(Uint32, torch.float8_e4m3fn, 16),
            lambda p: (p.rows, p.columns),
            output=True,
        ),
        _Operand("scales", lambda of: SCALES[of.scales], lambda p: (p.rows, p.blocks), output=True),
        _Operand(
            "turns",
            Storage(Float32, torch.float32, 16),
            lambda p: (p.positions, kv_problem.TABLE_WIDTH),
            _TURNED,
            passed=False,
        ),
        _Operand(
            "positions", Storage(Int64, torch.int64, 8), lambda p: (p.rows,), _TURNED, passed=False
        ),
    ),
    choose_form=facts.choose_fp8_form,
    kinds=_kinds,
    numbers=_numbers,
    work=lambda problem: problem.rows,
)
compile_form = KERNEL.compile_form
