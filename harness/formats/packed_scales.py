"""Pack power-of-two scales as DeepGEMM reads them on SM100: four UE8M0 bytes to an int32, MN-major.

The result is int32 [..., M, P] with strides (1, A), where P = ceil(Ks / 4) and A is M rounded up to
4. The byte order itself is layouts.PACKED_MN. An fp32 scale has to be a power of two from 2**-127
to 2**127: rounding any other (zero, infinity and NaN too) would change every product.
Shape letters: M rows, Ks scale columns, P packed columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.arrays import decode_array, encode_array
from degarble.harness.formats.element_formats import UE8M0
from degarble.harness.formats.layouts import PACKED_MN, ceil_div, from_layout, round_up, to_layout

if TYPE_CHECKING:
    from torch import Tensor


def exact_ue8m0(scales: Tensor) -> Tensor:
    """Return the UE8M0 codes of fp32 scales that are powers of two already."""
    if scales.dtype is not torch.float32:
        raise DtypeMismatch(
            "scales", scales.dtype, "torch.float32", "Pass UE8M0 bytes as they are, as uint8."
        )
    magnitude = scales.abs().nan_to_num(0.0)
    codes = encode_array(magnitude, UE8M0)
    wrong = decode_array(codes, UE8M0) != scales
    if bool(wrong.any()):
        raise InvalidArgument(
            f"scales, {int(wrong.sum())} of {scales.numel()}",
            float(scales[wrong][0]),
            "exact powers of two from 2**-127 to 2**127",
            "Quantise again with power-of-two scales; rounding a scale changes the weights.",
        )
    return codes


def pack_scales(scales_MK: Tensor, rows_per_scale: int = 1, rows: int | None = None) -> Tensor:
    """Pack fp32 or UE8M0 (uint8) scales [..., Ms, Ks] into int32 [..., rows, P].

    Each scale row is repeated for `rows_per_scale` rows and cut at `rows`.
    """
    codes_MK = scales_MK if scales_MK.dtype is torch.uint8 else exact_ue8m0(scales_MK)
    if codes_MK.ndim < 2:
        raise ShapeMismatch(
            "scales", tuple(codes_MK.shape), "rows and scale columns", "Add the missing dimension."
        )
    if rows_per_scale < 1:
        raise InvalidArgument(
            "rows_per_scale", rows_per_scale, "at least 1", "Check the granularity of the scales."
        )
    covered = codes_MK.shape[-2] * rows_per_scale
    rows = covered if rows is None else rows
    if ceil_div(rows, rows_per_scale) != codes_MK.shape[-2]:
        raise ShapeMismatch(
            "rows",
            rows,
            f"a number that {codes_MK.shape[-2]} scale rows of {rows_per_scale} cover",
            "Check the granularity of the scales.",
        )
    codes_MK = codes_MK.repeat_interleave(rows_per_scale, dim=-2)[..., :rows, :]
    storage = to_layout(codes_MK, PACKED_MN)
    word_shape = (ceil_div(codes_MK.shape[-1], 4), round_up(rows, 4), 4)
    words = storage.reshape(*storage.shape[:-1], *word_shape).view(torch.int32).squeeze(-1)
    return words.transpose(-1, -2)[..., :rows, :]


def unpack_scales(packed_MP: Tensor, columns: int) -> Tensor:
    """Return the UE8M0 codes [..., M, columns] of packed int32 scales."""
    if packed_MP.dtype is not torch.int32:
        raise DtypeMismatch(
            "packed scales", packed_MP.dtype, "torch.int32", "Pack them with pack_scales."
        )
    if packed_MP.ndim < 2 or packed_MP.shape[-1] != ceil_div(columns, 4):
        raise LayoutMismatch(
            f"packed scales of {columns} columns",
            tuple(packed_MP.shape),
            f"a last extent of {ceil_div(columns, 4)} words",
            "Pass the number of scale columns before packing.",
        )
    *leading, rows, packed_columns = packed_MP.shape
    words = packed_MP.new_zeros((*leading, packed_columns, round_up(rows, 4)))
    words[..., :rows] = packed_MP.transpose(-1, -2)
    return from_layout(words.flatten(-2).view(torch.uint8), PACKED_MN, rows, columns)
