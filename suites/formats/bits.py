"""Compare tensors bit by bit and report count, first place, both patterns and both values.

NaN equals NaN whatever its payload: the definition's float32 arithmetic leaves the payload to the
CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def differences(found: Tensor, expected: Tensor) -> str:
    """Return "" if all bits agree, else one line about where and how they do not."""
    assert found.dtype is expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    size = found.element_size()
    left, right = (tensor.contiguous().view(_BITS[size]) for tensor in (found, expected))
    wrong = left != right
    if found.is_floating_point():
        wrong &= ~(found.isnan() & expected.isnan())
    if not bool(wrong.any()):
        return ""
    first = tuple(int(index) for index in wrong.nonzero()[0])
    mask = (1 << (8 * size)) - 1
    codes = " instead of ".join(f"{int(bits[first]) & mask:#x}" for bits in (left, right))
    values = " instead of ".join(str(tensor[first].item()) for tensor in (found, expected))
    return f"{int(wrong.sum())} of {wrong.numel()} differ, first at {first}: {codes}, {values}"
