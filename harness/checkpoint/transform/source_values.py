"""Decode stored rows to float32 quickly, before a conversion quantises them again.

`row_values` returns the same numbers as Weight.values(float32), bit for bit: by table for MXFP4 and
NVFP4, by whole rows of blocks for FP8, and by the definition for any other format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.formats.arrays import decode_array
from degarble.harness.formats.block_formats import MXFP4
from degarble.harness.formats.element_formats import E2M1, E4M3, UE8M0
from degarble.harness.formats.fast.threads import values_of
from degarble.harness.formats.types import NibbleOrder

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.weight import Weight


def row_values(weight: Weight) -> Tensor:
    """Return rows [M, K] as float32; bfloat16 stays bfloat16, which is exact as well."""
    storage = weight.storage
    if storage is None:
        assert weight.value is not None, "a weight without codes has values"
        plain = weight.value
        return plain if plain.dtype in (torch.bfloat16, torch.float32) else plain.float()
    assert weight.codes is not None, "a weight with a storage has codes"
    assert weight.block_scale is not None, "codes have scales"
    if storage.format == MXFP4 and storage.nibble_order is NibbleOrder.LOW_EVEN:
        return _mxfp4(weight.codes, weight.block_scale)
    if storage.format.element == E4M3 and storage.format.block[0] > 1 and len(storage.shape) == 2:
        return _panels(weight.codes, weight.block_scale, storage.format.block)
    return weight.values(torch.float32)


def _mxfp4(codes: Tensor, block_scale: Tensor) -> Tensor:
    from degarble.harness.formats.fast import loops as fast_loops  # noqa: PLC0415  imports numba

    with np.errstate(all="ignore"):
        # Every product of a scale and a code, [256 * 16] float32 as bits.
        table = (values_of(UE8M0)[:, None] * values_of(E2M1)).view(np.uint32).reshape(-1)
    packed = codes.contiguous().numpy().reshape(-1)
    scales = np.repeat(block_scale.contiguous().numpy().reshape(-1), 2)
    out = np.empty(packed.size * 2, np.uint32)
    fast_loops.decode_blocks(packed, scales, table, out, False)
    return torch.from_numpy(out.view(np.float32)).view(*codes.shape[:-1], -1)


def _panels(codes: Tensor, block_scale: Tensor, block: tuple[int, int]) -> Tensor:
    values = codes.view(torch.float8_e4m3fn).float()
    scales = block_scale if block_scale.dtype is torch.float32 else decode_array(block_scale, UE8M0)
    for panel, row in enumerate(range(0, values.shape[0], block[0])):
        spread = scales[panel].repeat_interleave(block[1])[: values.shape[1]]
        values[row : row + block[0]] *= spread
    return values
