"""Multiply numbers by one factor: float32 or BF16 in, float32 or BF16 out, a thread a number.

One source for sm_90a and sm_100a. It scales the indexer's weights of heads by a factor that is no
power of two, and widens BF16 ones, on the GPU between two kernels of a step.

Allocates only what it returns and never waits for the GPU, so it may be captured in a graph.
"""

from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, cute
from torch import Tensor

from degarble.harness.formats import scalar_ops as ops
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import ScaleForm, ScaleProblem
from degarble.kernels.runtime.kernel import Kernel, LaunchContext, Operand, Storage
from degarble.kernels.runtime.pdl import EARLY, follow

STORAGE = {
    "bf16": Storage(BFloat16, torch.bfloat16, 2), "fp32": Storage(Float32, torch.float32, 4),
}  # fmt: skip
FLAT = 1 << 31


@cute.kernel
def scale_kernel(
    values: Any, out: Any, count: Int32, factor: Float32, form: cutlass.Constexpr
) -> None:
    """Scale one number."""
    follow()
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = Int32(block) * facts.SCALE_THREADS + Int32(thread)
    if place < count:
        made = ops.multiply_rn(Float32(values[place]), factor)
        out[place] = STORAGE[form.out].element(made)


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
    values, out = (cute.make_tensor(pointer, cute.make_layout(FLAT)) for pointer in pointers)
    scale_kernel(values, out, count, factor, form).launch(
        grid=[blocks, 1, 1], block=[facts.SCALE_THREADS, 1, 1], use_pdl=EARLY, stream=stream
    )


# ---- host ----------------------------------------------------------------------------------------


def _numbers(of: LaunchContext[ScaleProblem, ScaleForm]) -> tuple[Any, ...]:
    return (of.problem.count, of.problem.blocks), of.problem.factor


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1) if tensor.is_contiguous() else tensor


_Operand = Operand[ScaleProblem]
KERNEL = Kernel[ScaleProblem, ScaleForm](
    entry=launch_scale,
    operands=(
        _Operand("values", lambda of: STORAGE[of.source], lambda p: (p.count,), checked=_flat),
        _Operand(
            "out",
            lambda of: STORAGE[of.out],
            lambda p: (p.count,),
            output=True,
            label="scaled",
            checked=_flat,
            shape_of="values",
        ),
    ),
    choose_form=facts.choose_scale_form,
    kinds=((Int32,) * 2, Float32),
    numbers=_numbers,
    work=lambda problem: problem.count,
)
compile_form = KERNEL.compile_form
