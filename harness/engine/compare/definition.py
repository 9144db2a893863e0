"""The reference definition of a row comparison: slow, and for every dtype.

Values are compared in float64. What is not finite on either side is left out of sums, magnitudes
and ulps, and counted in the census. An ulp belongs to the format of the candidate: a reference of
another dtype is rounded to it once, to nearest even, before steps are counted and codes compared;
the sums use the unrounded reference. Integers and booleans step by 1. Complex numbers raise.

Shape letters: M rows, K columns, S cells along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from degarble.harness.base.errors import DtypeMismatch
from degarble.harness.formats.arrays import FORMAT_OF_DTYPE, codes_of, decode_array, encode_array
from degarble.harness.formats.types import NanRule, Overflow, Rounding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.formats.types import ElementFormat


@dataclass(frozen=True, eq=False)
class RowFacts:
    """The results for some rows; `first` is row and column of the first mismatch of kinds."""

    cells: NDArray[np.float64]  # [M, S, 4]: rr, cc, rd, dd
    counts: NDArray[np.int64]  # [M, 3]: identical, outward, inward
    ulps: NDArray[np.uint64]  # [M]
    census: NDArray[np.int64]  # NaN and infinities of the candidate, of the reference, mismatched
    first: tuple[int, int] | None


def compare_definition(
    candidate_MK: Tensor, reference_MK: Tensor, cell: int, fmt: ElementFormat | None = None
) -> RowFacts:
    """Compare rows; with `fmt` both hold codes of that format, one per byte."""
    c, r = values_of_any(candidate_MK, fmt), values_of_any(reference_MK, fmt)
    kinds = [_kinds(side) for side in (c, r)]
    known = (kinds[0] == 0) & (kinds[1] == 0)
    steps, identical = _steps(candidate_MK, reference_MK, fmt)
    x, y = np.where(known, c, 0.0), np.where(known, r, 0.0)
    d = x - y
    outward, inward = abs(x) > abs(y), abs(x) < abs(y)
    mismatched = np.argwhere(kinds[0] != kinds[1])
    return RowFacts(
        cells=np.stack([_by_cell(p, cell) for p in (y * y, x * x, y * d, d * d)], axis=-1),
        counts=np.stack([identical.sum(1), outward.sum(1), inward.sum(1)], axis=-1),
        ulps=np.where(known, steps, np.uint64(0)).max(axis=1, initial=np.uint64(0)),
        census=np.array(
            [*(f(side) for side in kinds for f in (_nans, _infinities)), len(mismatched)]
        ),
        first=(int(mismatched[0][0]), int(mismatched[0][1])) if len(mismatched) else None,
    )


def values_of_any(tensor: Tensor, fmt: ElementFormat | None = None) -> NDArray[np.float64]:
    """Return the numbers of a tensor of any dtype in float64."""
    if fmt is None and tensor.dtype is torch.float8_e8m0fnu:
        fmt, tensor = FORMAT_OF_DTYPE[tensor.dtype], tensor.view(torch.uint8)
    if fmt is not None:
        values: NDArray[np.float64] = decode_array(tensor, fmt).double().numpy()
        return values
    if tensor.dtype.is_complex:
        raise DtypeMismatch(
            "tensor", tensor.dtype, "real numbers", "Compare real and imaginary parts apart."
        )
    plain: NDArray[np.float64] = tensor.to(torch.float64).numpy()
    return plain


def _kinds(values: NDArray[np.float64]) -> NDArray[np.int8]:
    """Classify values: finite (0), NaN (1), infinity (2), minus infinity (3)."""
    kinds = np.isnan(values) + 2 * np.isposinf(values) + 3 * np.isneginf(values)
    small: NDArray[np.int8] = kinds.astype(np.int8)
    return small


def _nans(kinds: NDArray[np.int8]) -> int:
    return int((kinds == 1).sum())


def _infinities(kinds: NDArray[np.int8]) -> int:
    return int((kinds > 1).sum())


def _by_cell(products_MK: NDArray[np.float64], cell: int) -> NDArray[np.float64]:
    """Sum runs of `cell` columns; the last run may be short."""
    rows, width = products_MK.shape
    count = -(-width // cell)
    padded = np.zeros((rows, count * cell))
    padded[:, :width] = products_MK
    sums: NDArray[np.float64] = padded.reshape(rows, count, cell).sum(-1)
    return sums


def _steps(
    candidate: Tensor, reference: Tensor, fmt: ElementFormat | None
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return distances in ulps of the candidate's format, and which codes are equal."""
    own = fmt or FORMAT_OF_DTYPE.get(candidate.dtype)
    if own is None:
        return _plain_steps(candidate, reference)
    codes = [candidate, reference] if fmt else [codes_of(candidate), _rounded(reference, own)]
    a, b = (side.to(torch.int64).numpy() for side in codes)
    return _apart(a, b, own.sign_mask, own.magnitude_mask), a == b


def _rounded(reference: Tensor, fmt: ElementFormat) -> Tensor:
    """Return the codes of the reference in the candidate's format."""
    if FORMAT_OF_DTYPE.get(reference.dtype) is fmt:
        return codes_of(reference)
    values = torch.from_numpy(values_of_any(reference))
    if not fmt.signed:
        values = values.abs()
    return encode_array(values, fmt, Rounding.NEAREST_EVEN, Overflow.IEEE, NanRule.LARGEST)


def _plain_steps(
    candidate: Tensor, reference: Tensor
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Count steps of float64, and of whole numbers."""
    if candidate.dtype is torch.float64:
        a = candidate.contiguous().view(torch.int64).numpy()
        b = torch.from_numpy(values_of_any(reference)).view(torch.int64).numpy()
        # Sign mask and magnitude mask of float64, as signed 64-bit integers.
        return _apart(a, b, -(1 << 63), (1 << 63) - 1), a == b
    a, b = values_of_any(candidate), values_of_any(reference)
    # Infinite distances are cut so that they fit into uint64.
    far = np.nan_to_num(np.abs(a - b), nan=0.0, posinf=2.0**62)
    return np.rint(far).astype(np.uint64), a == b


def _apart(
    a: NDArray[np.int64], b: NDArray[np.int64], sign: int, magnitude: int
) -> NDArray[np.uint64]:
    """Return how many representable numbers lie between two codes."""
    am, bm = (a & magnitude).astype(np.uint64), (b & magnitude).astype(np.uint64)
    same = (a & sign) == (b & sign)
    return np.where(same, np.maximum(am, bm) - np.minimum(am, bm), am + bm)
