"""Check the GPU and the output D of a GEMM entry point, and allocate D.

Dtypes, shapes, strides and addresses of the operands are checked by kernels.runtime.operands.
Shape letters: M, N of D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import MissingDevice
from degarble.kernels.runtime.operands import require_device, require_tensor
from degarble.kernels.runtime.targets import target_of_device

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.gemm.problem import GemmProblem
    from degarble.kernels.runtime.targets import Target

TMA_ALIGNMENT = 16  # of addresses and row strides in bytes; PTX ISA 9.1, tensor maps


def require_place(tensors: tuple[Tensor, ...], target: Target) -> int:
    """Return the number of the GPU that holds all tensors; raise if it is not of the target."""
    device = require_device(tensors)
    found = target_of_device(device)
    if found is not target:
        raise MissingDevice(
            "target", found.name, target.name, "Use the kernel that was written for this GPU."
        )
    return device


def require_output(problem: GemmProblem, out_MN: Tensor) -> None:
    """Raise unless D is a contiguous BF16 tensor [M, N] on an address that TMA can store to."""
    shape = (problem.rows, problem.columns)
    require_tensor("D", out_MN, torch.bfloat16, shape, TMA_ALIGNMENT)


def empty_output(problem: GemmProblem, device: torch.device) -> Tensor:
    """Allocate D uninitialised; the kernel writes every element."""
    return torch.empty(problem.rows, problem.columns, dtype=torch.bfloat16, device=device)
