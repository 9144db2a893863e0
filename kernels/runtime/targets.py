"""GPU architectures that kernels are compiled for, one record each.

Compiling for a target proves nothing about running on it. sm_100a kernels are compiled and
inspected here, for want of a B200; `pytest -m b200` runs them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import MissingDevice, UnknownName

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Target:
    """A GPU architecture, by its ptxas name.

    The `a` in the name allows architecture-specific instructions and gives up forward
    compatibility.
    """

    name: str
    capability: tuple[int, int]
    shared_memory_bytes: int  # the most that one thread block may use
    tensor_memory_columns: int  # 0 where there is no tensor memory, hence no tcgen05
    converts_e2m1: bool  # cvt to and from e2m1x2 and ue8m0x2 exists


# Shared memory: CUDA C++ Programming Guide 13.0, technical specifications per compute capability.
# Conversions: PTX ISA 9.1, cvt; sm_90a is rejected by ptxas.
SM90A = Target("sm_90a", (9, 0), 227 * 1024, tensor_memory_columns=0, converts_e2m1=False)
SM100A = Target("sm_100a", (10, 0), 227 * 1024, tensor_memory_columns=512, converts_e2m1=True)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (SM90A, SM100A)}
)


def target(name: str) -> Target:
    """Return the target of this name; raise with the nearest known names otherwise."""
    if name not in TARGETS:
        raise UnknownName.among("target", name, TARGETS)
    return TARGETS[name]


def target_of_device(device: int = 0) -> Target:
    """Return the target of an installed GPU; raise without a GPU or without kernels for it."""
    known = ", ".join(f"{t.name} (compute capability {t.capability})" for t in TARGETS.values())
    if not torch.cuda.is_available():
        raise MissingDevice(
            "CUDA device",
            device,
            "an NVIDIA GPU with a driver that this torch can use",
            f"Compiling needs no GPU: name a target instead. Known: {known}.",
        )
    capability = torch.cuda.get_device_capability(device)
    for candidate in TARGETS.values():
        if candidate.capability == capability:
            return candidate
    raise MissingDevice(
        f"CUDA device {torch.cuda.get_device_name(device)}",
        capability,
        "a compute capability that kernels exist for",
        f"Known: {known}.",
    )
