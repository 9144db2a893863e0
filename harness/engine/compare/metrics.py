"""Cosine similarity, relative L2 and gain of one tensor against another, summed in float64.

None of them is a verdict. A wrong scale has a perfect cosine, so the gain is reported with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from degarble.harness.base.errors import ShapeMismatch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Closeness:
    """Distances of a candidate from its reference; NaN where undefined (a zero tensor).

    `gain` is the least-squares factor g that brings g * reference nearest to the candidate.
    """

    cosine: float
    relative_l2: float
    gain: float


def closeness(candidate: Tensor, reference: Tensor) -> Closeness:
    """Measure `candidate` against `reference`."""
    if candidate.shape != reference.shape:
        raise ShapeMismatch(
            "candidate",
            tuple(candidate.shape),
            f"the reference's {tuple(reference.shape)}",
            "Compare tensors of one site.",
        )
    c, r = candidate.double().flatten(), reference.double().flatten()
    cc, rr, cr = (float(a @ b) for a, b in ((c, c), (r, r), (c, r)))
    distance = float((c - r).norm())
    return Closeness(
        cosine=_ratio(cr, math.sqrt(cc) * math.sqrt(rr)),
        relative_l2=_ratio(distance, math.sqrt(rr)),
        gain=_ratio(cr, rr),
    )


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan
