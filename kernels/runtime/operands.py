"""Check the tensors of an entry point and make the pointers that a kernel takes.

Kernels read bits: a tensor with another dtype, shape, stride or alignment raises and is never
converted. All tensors of a launch have to be on one CUDA device.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

DTYPES = {  # as problems name them
    "bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip
# CUDA driver API 13.0, CU_SHAREDMEM_CARVEOUT_DEFAULT. Trap: where a launch bounds registers and
# names no carveout, the DSL asks a GPU for its shared memory, and compiling needs no GPU.
DRIVERS_CHOICE = -1


def require_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], alignment: int
) -> None:
    """Raise unless a tensor has this dtype, shape and alignment and is contiguous."""
    if tensor.dtype is not dtype:
        raise DtypeMismatch(name, tensor.dtype, str(dtype), "Convert it; the kernel reads bits.")
    if tuple(tensor.shape) != shape:
        raise ShapeMismatch(
            name, tuple(tensor.shape), f"{shape}, as the problem says", "Build the problem from it."
        )
    if not tensor.is_contiguous():
        raise LayoutMismatch(
            f"strides of {name}", tensor.stride(), "a contiguous tensor", "Copy it: contiguous()."
        )
    if tensor.data_ptr() % alignment:
        raise LayoutMismatch(
            f"address of {name}",
            tensor.data_ptr() % alignment,
            f"a multiple of {alignment} bytes",
            "Copy it into memory of its own.",
        )


def require_device(tensors: Iterable[Tensor | None]) -> int:
    """Return the number of the one CUDA device that holds the tensors; raise otherwise."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    device = next(iter(devices))
    if len(devices) > 1 or device.type != "cuda":
        names = sorted(str(device) for device in devices)
        raise InvalidArgument("devices of the tensors", names, "one CUDA device", "Move them.")
    return device.index or 0


def processors_of(device: int) -> int:
    """Return the number of multiprocessors of a device."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def pointer(element: Any, tensor: Tensor | None, alignment: int) -> Any:
    """Return a device pointer; for None one to compile with, which nothing reads."""
    if tensor is None:
        return _null_pointer(element, alignment)
    make, space = _pointer_maker()
    return make(element, tensor.data_ptr(), space, alignment)


@cache
def _null_pointer(element: Any, alignment: int) -> Any:
    make, space = _pointer_maker()
    # Any aligned non-null address will do: compiling does not read it.
    return make(element, alignment, space, alignment)


@cache
def _pointer_maker() -> tuple[Any, Any]:
    # Looked up once: a launch makes ten pointers, and an import costs a microsecond of each.
    space = import_module("cutlass.cute").AddressSpace.gmem
    return import_module("cutlass.cute.runtime").make_ptr, space
