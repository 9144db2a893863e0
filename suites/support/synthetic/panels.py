"""Quantise bfloat16 to FP8 with UE8M0 scales a 128x128 block, by a table of all bfloat16 numbers.

Fast twin of `quantise(values, FP8_128X128_UE8M0, CANONICAL)` for bfloat16 values in whole blocks,
equal bit for bit. Dividing by a power of two is exact in bfloat16, so the code of an element
follows from 16 bits; the table of codes and the scale of a block both come from harness.formats.
Values of other extents use the definition.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.formats.codec import decode_array, encode_array
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.number_formats import E4M3, FP8_1X128_UE8M0, FP8_128X128_UE8M0, UE8M0
from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_BLOCK = 128


def quantise_panels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [M, K] and scale codes [M/128, K/128], both as bytes."""
    rows, columns = values.shape
    if rows % _BLOCK or columns % _BLOCK:
        made = quantise(values, FP8_128X128_UE8M0, CANONICAL)
        return made.codes.view(torch.uint8), made.block_scale.view(torch.uint8)
    x_RrCc = values.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale_RC = _scales(x_RrCc.abs().amax((1, 3)))
    factor_R1C1 = decode_array(scale_RC, UE8M0).reciprocal().bfloat16()[:, None, :, None]
    bits = (x_RrCc * factor_R1C1).view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(_codes()[bits]).reshape(rows, columns), scale_RC


def _scales(amax_RC: Tensor) -> Tensor:
    """Return the scale of each block: of a row that has the block's amax and zeros."""
    row = torch.zeros((amax_RC.numel(), _BLOCK), dtype=torch.bfloat16)
    row[:, 0] = amax_RC.reshape(-1)
    scales = quantise(row, FP8_1X128_UE8M0, CANONICAL).block_scale.view(torch.uint8)
    return scales.reshape(amax_RC.shape)


@cache
def _codes() -> NDArray[np.uint8]:
    """Tabulate the E4M3 code of every finite bfloat16 number; NaN where there is none."""
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    codes: NDArray[np.uint8] = encode_array(bits.view(torch.bfloat16).float(), E4M3).numpy()
    return codes
