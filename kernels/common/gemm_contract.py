"""What a GEMM's torch entry point demands of tensors: dtype, shape, stride, address, place.

Owns the refusals that every form shares, and the pointers that a launch passes. Nothing is copied,
cast or padded silently: what a kernel would misread is refused with a remedy. Kept honest by
suites/kernels/common/test_gemm_contract.py. Shape letters: M rows of D, N columns of D, K inner
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.common.targets import target_of_device

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.common.gemm_problem import GemmProblem
    from degarble.kernels.common.targets import Target

TMA_ALIGNMENT = 16  # of addresses and row strides; PTX ISA 9.1, tensor maps


def require(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], alignment: int
) -> None:
    """Refuse a tensor that the kernel would misread."""
    if tensor.dtype is not dtype:
        raise DtypeMismatch(name, tensor.dtype, str(dtype), "Convert it; the kernel reads bits.")
    if tuple(tensor.shape) != shape:
        raise ShapeMismatch(
            name, tuple(tensor.shape), f"{shape}, as the problem says", "Build the problem from it."
        )
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            f"strides of {name}",
            tensor.stride(),
            "a contiguous tensor, K along rows",
            "Copy it: contiguous().",
        )
    if tensor.data_ptr() % alignment:
        raise LayoutMismatch(
            f"address of {name}",
            tensor.data_ptr() % alignment,
            f"a multiple of {alignment} bytes",
            "Copy it into memory of its own.",
        )


def require_place(tensors: tuple[Tensor, ...], target: Target) -> int:
    """Refuse tensors that are not all on one GPU of a target; return the GPU's number."""
    devices = {tensor.device for tensor in tensors}
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        names = sorted(str(device) for device in devices)
        raise InvalidArgument("devices of the tensors", names, "one CUDA device", "Move them.")
    found = target_of_device(device.index or 0)
    if found is not target:
        raise MissingDevice(
            "target", found.name, target.name, "Use the kernel that was written for this GPU."
        )
    return device.index or 0


def require_output(problem: GemmProblem, out_MN: Tensor) -> None:
    """Refuse a D that does not hold what is written."""
    shape = (problem.rows, problem.columns)
    require("D", out_MN, torch.bfloat16, shape, TMA_ALIGNMENT)


def empty_output(problem: GemmProblem, device: torch.device) -> Tensor:
    """Allocate D; every number of it is written."""
    return torch.empty(problem.rows, problem.columns, dtype=torch.bfloat16, device=device)


def processors(device: int) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def pointer(element: Any, tensor: Tensor | None, alignment: int = TMA_ALIGNMENT) -> Any:
    """Return a device pointer; without a tensor one to compile with, which nothing reads."""
    from cutlass import cute  # noqa: PLC0415  the refusals above need no DSL
    from cutlass.cute.runtime import make_ptr  # noqa: PLC0415

    address = alignment if tensor is None else tensor.data_ptr()
    return make_ptr(element, address, cute.AddressSpace.gmem, assumed_align=alignment)
