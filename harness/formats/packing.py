"""Pack two 4-bit codes into a byte along K, and unpack them.

Every known producer puts the even K index into the low nibble; the reverse is a named variant,
because one checkpoint family stored it. `pack_pair`, `low_nibble` and `high_nibble` use operators
on non-negative integers only, so that they run on ints, tensors and CuTe DSL values.
Shape letters: K elements, P = K / 2 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.types import NibbleOrder

if TYPE_CHECKING:
    from torch import Tensor


def pack_pair(low: Any, high: Any) -> Any:
    """Join two codes below 16 into one byte."""
    return low + high * 16


def low_nibble(byte: Any) -> Any:
    """Return the low half of a byte."""
    return byte % 16


def high_nibble(byte: Any) -> Any:
    """Return the high half of a byte."""
    return byte // 16


def pack_nibbles(codes_K: Tensor, order: NibbleOrder = NibbleOrder.LOW_EVEN) -> Tensor:
    """Pack uint8 codes [..., K] into bytes [..., K / 2]."""
    require_bytes("codes", codes_K)
    if codes_K.ndim == 0 or codes_K.shape[-1] % 2:
        raise ShapeMismatch(
            "last extent of the codes",
            tuple(codes_K.shape),
            "an even number of codes along K",
            "Pad K to an even extent with code 0 before packing.",
        )
    if codes_K.numel() and int(codes_K.max()) > 0xF:
        raise InvalidArgument(
            "4-bit code",
            int(codes_K.max()),
            "codes from 0 to 15",
            "Pack codes, one a byte, not bytes that are packed already.",
        )
    even_P, odd_P = codes_K[..., 0::2], codes_K[..., 1::2]
    if order is NibbleOrder.HIGH_EVEN:
        even_P, odd_P = odd_P, even_P
    packed_P: Tensor = pack_pair(even_P, odd_P)
    return packed_P


def unpack_nibbles(packed_P: Tensor, order: NibbleOrder = NibbleOrder.LOW_EVEN) -> Tensor:
    """Unpack bytes [..., P] into uint8 codes [..., 2 P]."""
    require_bytes("packed codes", packed_P)
    if packed_P.ndim == 0:
        raise ShapeMismatch(
            "packed codes", (), "at least one dimension", "Pass a tensor of bytes [..., K / 2]."
        )
    halves = [low_nibble(packed_P), high_nibble(packed_P)]
    if order is NibbleOrder.HIGH_EVEN:
        halves.reverse()
    return torch.stack(halves, dim=-1).flatten(-2)


def require_bytes(name: str, tensor: Tensor) -> None:
    """Raise if a tensor does not hold raw bytes."""
    if tensor.dtype is not torch.uint8:
        raise DtypeMismatch(
            name,
            tensor.dtype,
            "torch.uint8",
            "Reinterpret bytes with view(torch.uint8); never cast numerically.",
        )
