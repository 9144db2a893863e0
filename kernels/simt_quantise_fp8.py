"""Quantise BF16 to E4M3 with a scale for 128 values of a row: plain, or behind a clamped SwiGLU.

Owns what stands in front of sm90_gemm_fp8_block, for sm_90a and sm_100a: canonical numerics of
FP8_1X128, scales in float32 or, rounded up, UE8M0, both row-major [M, K / 128]. A thread has 16
values, eight lanes a block; its largest magnitude goes round by shuffles. A NaN is left out of that
and stays a NaN.

The wrapper checks and launches, allocates no more than what it returns, and never waits for the
GPU, so it may be captured in a graph. Refuses other dtypes, shapes, strides and alignments by name.
Kept honest by suites/kernels/test_simt_quantise_fp8.py: compiled for every target, and on an H200
equal to harness.formats byte for byte. Shape letters: M rows, K columns, G = K / 128 blocks
"""

from functools import cache
from typing import Any, NamedTuple

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from torch import Tensor

from degarble.harness.formats import scalar_codecs as codecs
from degarble.harness.formats import scalar_ops as ops
from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.common import fp8_quantise_problem as facts
from degarble.kernels.common.compiling import (
    CompiledKernel,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.common.fp8_quantise_problem import Fp8Form, Fp8Problem
from degarble.kernels.common.nvfp4_words import (
    block_amax,
    emit,
    loaded,
    numbers_of,
    store,
    swiglu_words,
)
from degarble.kernels.common.operands import pointer, require_device, require_tensor
from degarble.kernels.common.settings import CompileSettings
from degarble.kernels.common.targets import TARGETS, target_of_device

SCALES = {"float32": (Float32, torch.float32, 4), "ue8m0": (Uint8, torch.uint8, 1)}
FLAT = 1 << 30


class Fp8Quantised(NamedTuple):
    """What a launch writes: codes as torch.float8_e4m3fn [M, K], and scales [M, G]."""

    codes: Tensor
    scales: Tensor


# ---- device --------------------------------------------------------------------------------------


def words_of(values: Any, place: tuple[Any, Any, Any], form: Fp8Form) -> list[Any]:
    """Return the words of 16 values, whatever makes them."""
    row, part, parts = (Int64(number) for number in place)
    if form.source == "values":
        return loaded(values, row * parts + part)
    gate = 2 * row * parts + part
    return swiglu_words(loaded(values, gate), loaded(values, gate + parts), form.limit)


def scale_of(amax: Any, form: Fp8Form) -> tuple[Any, Any]:
    """Return a block's scale as it is stored, and its number."""
    raw = ops.multiply_rn(ops.maximum(amax, facts.AMAX_FLOOR), facts.SHARE)
    if form.scales == "float32":
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
    """Quantise 16 values a thread; lanes behind the last row go along, and write nothing."""
    values, codes, scales = tensors
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = Int64(block) * facts.THREADS + Int64(thread)
    known = ops.select(at < Int64(rows) * Int64(parts), at, Int64(0))
    row = known // Int64(parts)
    part = known - row * Int64(parts)
    words = words_of(values, (row, part, Int64(parts)), form)
    amax = block_amax(words)
    for distance in cutlass.range_constexpr(3):
        amax = ops.maximum(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << distance))
    stored, scale = scale_of(amax, form)
    scaled = [ops.divide_rn(number, scale) for number in numbers_of(words)]
    if at < Int64(rows) * Int64(parts):
        store(codes, at, e4m3_words(scaled))
        if part % facts.LANES == 0:
            scales[at // facts.LANES] = stored


@cute.jit
def launch_quantise(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch a form on extents that are known now: rows, threads of a row, thread blocks."""
    rows, parts, blocks = extents
    shapes = ((8, FLAT), (4, FLAT), (1, FLAT))
    values, codes, scales = (
        cute.make_tensor(address, cute.make_layout(shape, stride=(1, shape[0])))
        for address, shape in zip(pointers, shapes, strict=True)
    )
    flat = cute.make_tensor(scales.iterator, cute.make_layout(FLAT))
    quantise_kernel((values, codes, flat), rows, parts, form).launch(
        grid=[blocks, 1, 1], block=[facts.THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: Fp8Form, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    extents = tuple(Int32(1) for _ in range(3))
    arguments = (_pointers(form.scales, (None,) * 3), extents, form, any_stream())
    return compile_kernel(launch_quantise, arguments, TARGETS[form.target], settings)


def quantise_fp8(
    values_MK: Tensor,
    problem: Fp8Problem,
    settings: CompileSettings,
    *,
    out: Fp8Quantised | None = None,
) -> Fp8Quantised:
    """Quantise BF16 values, or gate and up halves, as the problem says, on their GPU."""
    out = out or empty_outputs(problem, values_MK.device)
    shape = (problem.rows, problem.columns)
    require_tensor("values", values_MK, torch.bfloat16, (problem.rows, problem.input_columns), 32)
    require_tensor("codes", out.codes, torch.float8_e4m3fn, shape, 16)
    _, dtype, alignment = SCALES[problem.scales]
    require_tensor("scales", out.scales, dtype, (problem.rows, problem.blocks), alignment)
    device = require_device((values_MK, *out))
    if problem.rows:
        form = facts.choose_form(problem, target_of_device(device).name)
        parts = problem.columns // facts.VALUES
        extents = (problem.rows, parts, ceil_div(problem.rows * parts, facts.THREADS))
        compile_form(form, settings)(
            _pointers(form.scales, (values_MK, *out)),
            tuple(map(Int32, extents)),
            current_stream(device),
        )
    return out


def empty_outputs(problem: Fp8Problem, device: torch.device) -> Fp8Quantised:
    """Allocate what a launch writes; every byte of it is written."""
    shape, dtype = (problem.rows, problem.columns), SCALES[problem.scales][1]
    return Fp8Quantised(
        torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(problem.rows, problem.blocks, dtype=dtype, device=device),
    )


def _pointers(scales: str, tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return the pointers to values, codes and scales; None becomes one that is not read."""
    element, _, alignment = SCALES[scales]
    return tuple(map(pointer, (Uint32, Uint32, element), tensors, (32, 16, alignment)))
