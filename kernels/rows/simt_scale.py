"""Multiply numbers by one factor: float32 or BF16 in, float32 or BF16 out, a thread a number.

Entry point: `scale(values, problem, settings)`. One source for sm_90a and sm_100a. It scales the
indexer's weights of heads by a factor that is no power of two, and widens BF16 ones, on the GPU
between two kernels of a step.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
"""

from functools import cache
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import ScaleForm, ScaleProblem
from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
    current_stream,
)
from degarble.kernels.runtime.operands import pointer, require_device, require_tensor
from degarble.kernels.runtime.targets import TARGETS, target_of_device

ELEMENTS = {"bf16": (BFloat16, 2), "fp32": (Float32, 4)}
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}
FLAT = 1 << 31


@cute.kernel
def scale_kernel(
    values: Any, out: Any, count: Int32, factor: Float32, form: cutlass.Constexpr
) -> None:
    """Scale one number."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = Int32(block) * facts.SCALE_THREADS + Int32(thread)
    if place < count:
        made = ops.multiply_rn(Float32(values[place]), factor)
        out[place] = ELEMENTS[form.out][0](made)


@cute.jit
def launch_scale(
    pointers: tuple[cute.Pointer, ...],
    extents: tuple[Int32, ...],
    factor: Float32,
    form: cutlass.Constexpr,
    stream: CUstream,
) -> None:
    """Launch; extents are the count and thread blocks."""
    count, blocks = extents
    values, out = (cute.make_tensor(each, cute.make_layout(FLAT)) for each in pointers)
    scale_kernel(values, out, count, factor, form).launch(
        grid=[blocks, 1, 1], block=[facts.SCALE_THREADS, 1, 1], stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


@cache
def compile_form(form: ScaleForm, settings: CompileSettings) -> CompiledKernel:
    """Compile a form; needs no GPU."""
    extents = (Int32(1), Int32(1))
    arguments = (_pointers(form, (None, None)), extents, Float32(1.0), form, any_stream())
    return compile_kernel(launch_scale, arguments, TARGETS[form.target], settings)


def scale(
    values: Tensor, problem: ScaleProblem, settings: CompileSettings, *, out: Tensor | None = None
) -> Tensor:
    """Return the values times the factor, in the dtype that the problem names, on their GPU."""
    if out is None:
        out = torch.empty(values.shape, dtype=TORCH[problem.out], device=values.device)
    for name, tensor, kind in (("values", values, problem.source), ("scaled", out, problem.out)):
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
        require_tensor(name, flat, TORCH[kind], (problem.count,), ELEMENTS[kind][1])
    device = require_device((values, out))
    if problem.count:
        form = facts.choose_scale_form(problem, target_of_device(device).name)
        extents = (Int32(problem.count), Int32(problem.blocks))
        pointers = _pointers(form, (values, out))
        kernel = compile_form(form, settings)
        kernel(pointers, extents, Float32(problem.factor), current_stream(device))
    return out


def _pointers(form: ScaleForm, tensors: tuple[Tensor | None, Tensor | None]) -> tuple[Any, ...]:
    """Return the kernel's pointers; None becomes a pointer that is not read."""
    kinds = zip((form.source, form.out), tensors, strict=True)
    return tuple(pointer(ELEMENTS[k][0], tensor, ELEMENTS[k][1]) for k, tensor in kinds)
