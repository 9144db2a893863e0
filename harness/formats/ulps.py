"""Distance between tensors in ulps: how many representable numbers apart their elements are.

A code's ordinal is its magnitude code with the sign of the number, so that neighbours differ by one
across binades, through zero and into the subnormals. -0 and +0 share ordinal 0. An infinity is one
step beyond the largest finite number. Two NaN are at distance 0, a NaN and a number at
`nan_distance(fmt)`, which exceeds every distance of numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.formats.arrays import FORMAT_OF_DTYPE, codes_of, is_nan_array
from degarble.harness.formats.codec import is_nan

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.types import ElementFormat


def nan_distance(fmt: ElementFormat) -> int:
    """Return the distance between a NaN and any number."""
    return fmt.code_count


def ordinal(code: int, fmt: ElementFormat) -> int:
    """Return the index of a code on the number line; for a NaN the result is meaningless."""
    magnitude = code & fmt.magnitude_mask
    return -magnitude if code & fmt.sign_mask else magnitude


def ulp_distance(code: int, other: int, fmt: ElementFormat) -> int:
    """Return the steps between two codes: the definition."""
    if is_nan(code, fmt) or is_nan(other, fmt):
        return 0 if is_nan(code, fmt) and is_nan(other, fmt) else nan_distance(fmt)
    return abs(ordinal(code, fmt) - ordinal(other, fmt))


def ordinal_array(codes: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the int64 ordinals of codes."""
    code = codes.to(torch.int64)
    magnitude = code & fmt.magnitude_mask
    return torch.where((code & fmt.sign_mask) != 0, -magnitude, magnitude)


def ulp_distance_array(codes: Tensor, others: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the int64 steps between two tensors of codes: the fast twin."""
    if codes.shape != others.shape:
        raise ShapeMismatch(
            "tensors to compare",
            (tuple(codes.shape), tuple(others.shape)),
            "one shape",
            "Broadcast on purpose before measuring a distance.",
        )
    code, other = codes.to(torch.int64), others.to(torch.int64)
    distance = (ordinal_array(code, fmt) - ordinal_array(other, fmt)).abs()
    nan, other_nan = is_nan_array(code, fmt), is_nan_array(other, fmt)
    distance[nan & other_nan] = 0
    distance[nan ^ other_nan] = nan_distance(fmt)
    return distance


def value_ulp_distance(values: Tensor, others: Tensor) -> Tensor:
    """Return the int64 steps between two tensors of one torch float dtype."""
    if values.dtype is not others.dtype:
        raise DtypeMismatch(
            "tensors to compare",
            (values.dtype, others.dtype),
            "one dtype: an ulp belongs to a format",
            "Round both to the format whose ulps are meant, by a named rule.",
        )
    codes, other_codes = codes_of(values), codes_of(others)
    return ulp_distance_array(codes, other_codes, FORMAT_OF_DTYPE[values.dtype])
