"""Summarise block scales, and how they correlate with the codes that they scale.

ScaleStatistics come from counts of scale bytes or from float32 scales. A scale is ordinary if it is
above the smallest normal number of its format: there it was rounded by a relative step, and the
largest code of its block follows from the quantiser's rule. The lookup tables of the compiled E2M1
loop are made here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.formats.fast.buffers import values_of
from degarble.harness.formats.number_formats import E2M1, ELEMENT_FORMATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.checkpoint.audit.statistics.loops import E2M1Tables
    from degarble.harness.formats.number_formats import ElementFormat


@dataclass(frozen=True)
class ScaleStatistics:
    """Counts of block scales. From `subnormal` on, only of blocks that are not all zero.

    subnormal    below the smallest normal number of the scale's format
    at_largest   the largest number of the format: where a scale was clipped, or just fits
    distinct     different positive values; `powers_of_two` counts scales, not values
    far          share that is 2^20 or more away from the median
    """

    count: int
    not_finite: int
    negative: int
    zero: int
    subnormal: int
    at_largest: int
    below_largest: int
    powers_of_two: int
    distinct: int
    far: float
    smallest: float  # of the positive ones; NaN without any
    largest: float


@dataclass(frozen=True)
class Pairing:
    """Correlation of scale and energy over the blocks, with its degrees of freedom."""

    freedom: float
    correlation: float


def of_bytes(
    counts: NDArray[np.int64], used: NDArray[np.int64], fmt: ElementFormat
) -> ScaleStatistics:
    """Summarise byte scales from the counts of all scales, and of those over codes."""
    return _summary(values_of(fmt).astype(np.float64), counts, used, fmt)


def of_floats(scales: NDArray[np.float32], used: NDArray[np.bool_]) -> ScaleStatistics:
    """Summarise float32 scales; `used`: those of blocks that are not all zero."""
    values, at, counts = np.unique(
        scales.reshape(-1), return_inverse=True, return_counts=True, equal_nan=False
    )
    over_codes = np.bincount(at.reshape(-1)[used.reshape(-1)], minlength=len(values))
    return _summary(values.astype(np.float64), counts, over_codes, ELEMENT_FORMATS["FP32"])


def _summary(
    values: NDArray[np.float64],
    counts: NDArray[np.int64],
    used: NDArray[np.int64],
    fmt: ElementFormat,
) -> ScaleStatistics:
    finite = np.isfinite(values)
    seen = finite & (values > 0) & (used > 0)
    kept, often = values[seen], used[seen]
    ranked = np.sort(values[finite])
    below = ranked[-2] if len(ranked) > 1 else fmt.largest
    return ScaleStatistics(
        count=int(counts.sum()),
        not_finite=int(counts[~finite].sum()),
        negative=int(counts[finite & (values < 0)].sum()),
        zero=int(counts[values == 0].sum()),
        subnormal=int(often[kept < fmt.smallest_normal].sum()),
        at_largest=int(often[kept == fmt.largest].sum()),
        below_largest=int(often[kept == below].sum()),
        powers_of_two=int(often[np.frexp(kept)[0] == 0.5].sum()),
        distinct=len(kept),
        far=share_far(np.log2(kept), often, 20),
        smallest=float(kept.min()) if len(kept) else float("nan"),
        largest=float(kept.max()) if len(kept) else float("nan"),
    )


def share_far(places: NDArray[Any], counts: NDArray[Any], distance: float) -> float:
    """Return the share of a histogram at least `distance` away from its median."""
    total = counts.sum()
    if not total:
        return 0.0
    order = np.argsort(places)
    middle = places[order][np.searchsorted(np.cumsum(counts[order]), total / 2)]
    return float(counts[np.abs(places - middle) >= distance].sum() / total)


def ordinary(fmt: ElementFormat) -> NDArray[np.bool_]:
    """Return a mask of the bytes of a scale format that are ordinary scales."""
    values = values_of(fmt)
    return np.isfinite(values) & (values > fmt.smallest_normal)


@cache
def e2m1_tables(scale_format: str, block: int) -> E2M1Tables:
    """Return the lookup tables of the loop over E2M1 blocks."""
    from degarble.harness.checkpoint.audit.statistics.loops import E2M1Tables  # noqa: PLC0415  numba

    values = values_of(ELEMENT_FORMATS[scale_format]).astype(np.float64)
    kept = np.where(np.isfinite(values), values, 0.0)
    # E2M1 values are multiples of 1/2, so sums of their squares are multiples of 1/4.
    quarters = np.arange(4 * int(E2M1.largest) ** 2 * block + 1, dtype=np.float64)
    return E2M1Tables(kept * kept / 4, _log2(kept), _log2(quarters))


def _log2(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return binary logarithms; NaN for numbers that are not positive."""
    logs = np.full(numbers.shape, np.nan)
    np.log2(numbers, out=logs, where=numbers > 0)
    return logs.astype(np.float32)


def pairing_of(scale_RC: NDArray[np.float64], energy_RC: NDArray[np.float64]) -> Pairing:
    """Correlate the logarithms of scales and of code energies, about the means of rows."""
    kept = (scale_RC > 0) & (energy_RC > 0)
    counts = kept.sum(1, keepdims=True)
    centred = []
    for values in (scale_RC, energy_RC):
        logs = np.where(kept, np.log2(np.where(kept, values, 1.0)), 0.0)
        centred.append((logs - logs.sum(1, keepdims=True) / np.maximum(counts, 1)) * kept)
    x, y = centred
    freedom = float(np.maximum(counts - 1, 0).sum())
    return Pairing(
        freedom, correlation(float((x * x).sum()), float((y * y).sum()), float((x * y).sum()))
    )


def correlation(xx: float, yy: float, xy: float) -> float:
    """Return xy over the root of xx yy; NaN where one of them does not vary."""
    # Sums of squares about a mean are differences: below this they are rounding, not variation.
    return xy / (xx * yy) ** 0.5 if min(xx, yy) > 1e-6 else float("nan")
