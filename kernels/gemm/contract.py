"""State what TMA asks of operands, and check the GPU of several launches at once.

A descriptor checks the GPU of a single kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import MissingDevice
from degarble.kernels.runtime.operands import require_device
from degarble.kernels.runtime.targets import target_of_device

if TYPE_CHECKING:
    from torch import Tensor

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
