"""What a GEMM's torch entry point demands beyond kernels.runtime.operands: its GPU, and D.

Owns the refusal of GPUs that a form was not written for, and D itself: its contract and its
allocation. Kept honest by suites/kernels/gemm/test_contract.py. Shape letters: M, N of D
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
    """Refuse tensors that are not all on one GPU of a target; return the GPU's number."""
    device = require_device(tensors)
    found = target_of_device(device)
    if found is not target:
        raise MissingDevice(
            "target", found.name, target.name, "Use the kernel that was written for this GPU."
        )
    return device


def require_output(problem: GemmProblem, out_MN: Tensor) -> None:
    """Refuse a D that does not hold what is written."""
    shape = (problem.rows, problem.columns)
    require_tensor("D", out_MN, torch.bfloat16, shape, TMA_ALIGNMENT)


def empty_output(problem: GemmProblem, device: torch.device) -> Tensor:
    """Allocate D; every number of it is written."""
    return torch.empty(problem.rows, problem.columns, dtype=torch.bfloat16, device=device)
