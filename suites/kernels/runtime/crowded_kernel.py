"""A kernel that keeps more numbers alive than a large block of threads has registers for."""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, cute
from cutlass.cute.runtime import make_ptr

from degarble.kernels.runtime.compiling import (
    CompiledKernel,
    CompileSettings,
    any_stream,
    compile_kernel,
)
from degarble.kernels.runtime.targets import Target

ALIVE = 96
STRIDE = 1024


def scale_by_sum(numbers: cute.Tensor, thread: cutlass.Int32) -> None:
    """Write each number times the sum of all: none can be dropped before the last is read."""
    read = [numbers[thread + place * STRIDE] for place in range(ALIVE)]
    total = sum(read[1:], start=read[0])
    for place, number in enumerate(read):
        numbers[thread + place * STRIDE] = number * total


@cute.kernel
def crowded_kernel(gNumbers: cute.Pointer) -> None:
    thread, _, _ = cute.arch.thread_idx()
    scale_by_sum(cute.make_tensor(gNumbers, cute.make_layout(ALIVE * STRIDE)), thread)


@cute.jit
def launch_crowded(gNumbers: cute.Pointer, threads: cutlass.Constexpr, stream: CUstream) -> None:
    crowded_kernel(gNumbers).launch(grid=[1, 1, 1], block=[threads, 1, 1], stream=stream)


def compile_crowded(threads: int, target: Target, settings: CompileSettings) -> CompiledKernel:
    pointer = make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    return compile_kernel(launch_crowded, (pointer, threads, any_stream()), target, settings)
