"""Sums of squares and products of a candidate and its reference, and the metrics that follow.

Letters: r the reference, c the candidate, d = c - r the difference. A pair of letters is the sum of
their products. Sums of several chunks, calls or places add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.base.errors import ShapeMismatch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def all_finite(values: Tensor) -> bool:
    """Tell whether no value is NaN or infinite; a finite sum shows it in one pass."""
    wide = values.float() if values.dtype.itemsize == 1 else values  # torch cannot sum FP8
    # The sum may overflow, so that only a look at all of them denies it.
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())


@dataclass
class PairSums:
    """Sums over all elements of a pair; a metric is NaN where it is undefined (a zero side).

    A wrong scale has a perfect cosine, so the gain belongs beside it. The product is summed
    itself: from `rd` a candidate that is far too small would have no digits of it left.
    """

    rr: float = 0.0
    cc: float = 0.0
    rc: float = 0.0
    dd: float = 0.0

    @classmethod
    def of(cls, candidate: Tensor, reference: Tensor) -> PairSums:
        """Sum over one pair of tensors of one shape."""
        if candidate.shape != reference.shape:
            raise ShapeMismatch(
                "candidate", tuple(candidate.shape), f"the reference's {tuple(reference.shape)}",
                "Compare tensors of one site.",
            )  # fmt: skip
        sums = cls()
        sums.add(*(side.double().flatten() for side in (candidate, reference)))
        return sums

    def add(self, candidate: Tensor, reference: Tensor) -> None:
        """Add a pair of flat float64 tensors; one object may stand for two equal ones."""
        square = float(reference @ reference)
        self.rr += square
        if candidate is reference:
            self.cc, self.rc = self.cc + square, self.rc + square
            return
        difference = candidate - reference
        self.cc += float(candidate @ candidate)
        self.rc += float(candidate @ reference)
        self.dd += float(difference @ difference)

    def merge(self, other: PairSums) -> None:
        """Add the sums of other elements."""
        self.rr, self.cc = self.rr + other.rr, self.cc + other.cc
        self.rc, self.dd = self.rc + other.rc, self.dd + other.dd

    @property
    def cosine(self) -> float:
        """Return the cosine of the angle between both sides."""
        length = math.sqrt(self.rr) * math.sqrt(self.cc)
        # Trap: min(1.0, NaN) is 1.0, and min(NaN, 1.0) is NaN.
        return max(min(self.rc / length, 1.0), -1.0) if length else math.nan

    @property
    def relative_l2(self) -> float:
        """Return the difference's length over the reference's."""
        return math.sqrt(self.dd / self.rr) if self.rr else math.nan

    @property
    def gain(self) -> float:
        """Return the least-squares factor that brings the reference nearest to the candidate."""
        return self.rc / self.rr if self.rr else math.nan


# --------------------------------------------------------------------------------------------------
# Sums of many places: rows, tiles, heads. Four are kept, `rr`, `cc`, `rd` and `dd`. The gain is
# 1 + rd / rr, so that a gain of 1.000001 keeps its digits. Sums of sums are records of the same
# kind, so heads, experts and halves are folds of rows or columns.


@dataclass(frozen=True, eq=False)
class ErrorSums:
    """Sums of products, one entry per place, over elements that are finite on both sides."""

    stack: NDArray[np.float64]  # [..., 4]: rr, cc, rd, dd
    rr: NDArray[np.float64] = field(init=False, repr=False)
    cc: NDArray[np.float64] = field(init=False, repr=False)
    rd: NDArray[np.float64] = field(init=False, repr=False)
    dd: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for at, name in enumerate(("rr", "cc", "rd", "dd")):
            object.__setattr__(self, name, self.stack[..., at])

    @property
    def cosine(self) -> NDArray[np.float64]:
        """Return the cosine of the angle between both sides; NaN where one of them is zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float64] = (self.rr + self.rd) / np.sqrt(self.rr) / np.sqrt(self.cc)
        clipped: NDArray[np.float64] = np.clip(found, -1.0, 1.0)
        return clipped

    @property
    def relative_l2(self) -> NDArray[np.float64]:
        """Return the difference's length over the reference's; infinite for a zero reference."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: NDArray[np.float64] = np.sqrt(self.dd) / np.sqrt(self.rr)
        return found

    @property
    def gain(self) -> NDArray[np.float64]:
        """Return the least-squares factor that maps the reference to the candidate."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1.0 + self.rd / self.rr

    def folded(self, labels: NDArray[np.int64], count: int) -> ErrorSums:
        """Add up the places that share a label; leave out negative labels."""
        if labels.shape != self.rr.shape:
            raise ShapeMismatch(
                "labels", labels.shape, f"{self.rr.shape}, one a place", "Label every place once."
            )
        kept = labels >= 0
        out = np.zeros((count, 4))
        np.add.at(out, labels[kept], self.stack[kept])
        return ErrorSums(out)

    @property
    def total(self) -> ErrorSums:
        """Return the sum over all places, without extent."""
        return ErrorSums(self.stack.reshape(-1, 4).sum(0))
