"""How far one tensor is from another, in few numbers, each accumulated in float64.

Owns cosine, relative L2 and gain. None of them is a verdict: a wrong scale has a perfect cosine,
which is why the gain stands beside it. Refuses tensors of different shapes.
What keeps it honest: suites/engine/compare/test_metrics.py, against closed forms.
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
    """A candidate beside its reference. NaN where a number has no meaning (a zero tensor).

    `gain` is the factor g that brings g * reference nearest to the candidate (least squares).
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
