"""Torch tensors over mapped bytes, with the table from stored dtypes to torch dtypes.

A tensor shares memory with the mapping where its bytes are aligned for its dtype, and is copied
elsewhere. A dtype that torch lacks raises an error; its bytes can still be read.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.checkpoint.read.types import TensorEntry

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "F4": torch.float4_e2m1fn_x2,  # two codes an element: torch's last extent is half
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "C64": torch.complex64,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }
)


def tensor_over(entry: TensorEntry, raw: memoryview) -> Tensor:
    """Return the tensor whose bytes are `raw`, sharing memory where alignment allows."""
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise DtypeMismatch(
            f"tensor {shown(entry.name)}",
            entry.dtype,
            f"a dtype that torch holds: {', '.join(TORCH_DTYPES)}",
            "Read its bytes with raw().",
        )
    shape = entry.shape
    if entry.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise ShapeMismatch(
                f"tensor {shown(entry.name)}", shape, "an even last extent", "Read it with raw()."
            )
        shape = (*shape[:-1], shape[-1] // 2)
    if not entry.nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(shape)
