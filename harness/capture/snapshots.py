"""Copy tensors for a capture, share the copies of equal bytes, and compute statistics.

A tensor at the same address with the same bytes is the same snapshot, so what one component returns
and the next takes is copied once. Bytes decide; the address only says where to look. The cache of
copies is bounded. Statistics are float64 and cover finite values only.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.capture.files.writer import Payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KEPT_BYTES = 256 << 20  # copies that are kept to be recognised

WORDS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16",
        torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint32: "U32",
        torch.int32: "I32", torch.float32: "F32", torch.uint64: "U64", torch.int64: "I64",
        torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)  # fmt: skip
_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_Place = tuple[object, ...]


class Snapshot(NamedTuple):
    """Bytes of a tensor at one moment, with the writer's record of them."""

    codes: Tensor  # flat integers; a NaN equals itself
    payload: Payload


class Snapshots:
    """Takes snapshots and recognises tensors."""

    def __init__(self, *, stored: bool = True, kept_bytes: int = KEPT_BYTES) -> None:
        self._stored = stored
        self._room = kept_bytes
        self._held: OrderedDict[_Place, Snapshot] = OrderedDict()

    def take(self, tensor: Tensor) -> Snapshot:
        """Return the snapshot of a tensor's present bytes."""
        place = _place(tensor)
        # Taken out here and put back below: the order is that of last use, for eviction.
        found = self._held.pop(place, None)
        if found is None or not same(found, tensor):
            if found is not None:
                self._room += found.payload.nbytes
            found = self._copied(tensor)
            self._room -= found.payload.nbytes
        self._held[place] = found
        while self._room < 0 and self._held:
            _, old = self._held.popitem(last=False)
            self._room += old.payload.nbytes
        return found

    def _copied(self, tensor: Tensor) -> Snapshot:
        flat = torch.empty(tensor.numel(), dtype=_code_type(tensor))
        flat.copy_(_codes(tensor).reshape(-1))
        # As a list of bytes, so that the writer needs no torch.
        data = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
        made = Payload(WORDS[tensor.dtype], tuple(tensor.shape), data, self._stored)
        return Snapshot(flat, made)


def same(snapshot: Snapshot, tensor: Tensor) -> bool:
    """Return whether a tensor still holds the bytes of a snapshot."""
    codes, kept = _codes(tensor).reshape(-1).to("cpu"), snapshot.codes
    if codes.dtype is not kept.dtype or codes.numel() != kept.numel():
        return False
    # A fifth of the time of torch.equal, and it wakes no threads that the captured run needs.
    return not _memcmp(codes.data_ptr(), kept.data_ptr(), kept.nbytes)


def statistics_of(tensor: Tensor) -> dict[str, float]:
    """Count, what is not finite, and the size of the rest."""
    found: dict[str, float] = {"count": tensor.numel()}
    if not tensor.numel() or tensor.dtype is torch.float8_e8m0fnu:
        return found
    x = tensor.detach().to(torch.float64)
    if tensor.dtype.is_floating_point:
        finite = x[x.isfinite()]
        found |= {"nan": int(x.isnan().sum()), "inf": int(x.isinf().sum())}
        x = finite
    if not x.numel():
        return found
    low, high = x.aminmax()
    return found | {
        "zeros": int((x == 0).sum()),
        "min": float(low),
        "max": float(high),
        "mean": float(x.mean()),
        # Trap: squares of finite float64 may overflow; scaled by the largest they do not.
        "rms": _rms(x),
    }


def _rms(x: Tensor) -> float:
    largest = float(x.abs().max())
    return largest * float((x / largest).square().mean().sqrt()) if largest else 0.0


def _place(tensor: Tensor) -> _Place:
    """Return a tensor's address and layout; contiguous rows are the same in any shape."""
    if tensor.is_contiguous():
        return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.numel()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _code_type(tensor: Tensor) -> torch.dtype:
    if tensor.dtype not in WORDS:
        raise DtypeMismatch(
            "captured tensor", str(tensor.dtype), "a dtype that safetensors can spell",
            "View it as integers of its width, or leave its component out.",
        )  # fmt: skip
    return _CODES[tensor.dtype.itemsize]


def _codes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_code_type(tensor))
