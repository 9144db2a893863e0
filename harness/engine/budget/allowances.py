"""Per-element error allowances, and their aggregation over rows, tiles, heads and other places.

An aggregate bounds three measures of a place: length, gain and steps. The bounds follow Bernstein's
inequality. For independent terms with variances v, each between 0 and c, the sum exceeds its mean
by more than sqrt(2 L v) + L c / 3 with probability MISTAKEN at most; L = log(1 / MISTAKEN).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MISTAKEN = 1e-12  # probability that a place of a healthy run exceeds its bound
WIDTH = 10
_LOG = math.log(1 / MISTAKEN)
_SUMS = 7  # of WIDTH; the maxima follow


@dataclass(frozen=True, eq=False)
class Allowances:
    """Sums and maxima of places, along a last axis of WIDTH.

    Indices 0 to 6 are sums: squares, their squares, largest gain, squares of the gain terms,
    counted steps, expected steps, variance of steps. Indices 7 to 9 are maxima: largest square,
    largest gain term, largest count of one step. Only index 4, the counted steps, is a measurement;
    all others say what is allowed.
    """

    stack: Array

    @classmethod
    def of(
        cls, sums: Sequence[Array], maxima: Sequence[Array], starts: NDArray[np.int64]
    ) -> Allowances:
        """Join elements [m, K] in runs of columns: [m, runs, WIDTH].

        A step counts 1 at most, so its variance is at most its mean.
        """
        stack = np.ones((sums[0].shape[0], len(starts), WIDTH))
        for k, term in enumerate(sums):
            stack[..., k] = np.add.reduceat(term, starts, axis=1)
        # The variance of the steps is bounded by their mean.
        stack[..., _SUMS - 1] = stack[..., _SUMS - 2]
        for k, term in enumerate(maxima):
            stack[..., _SUMS + k] = np.maximum.reduceat(term, starts, axis=1)
        return cls(stack)

    def put(self, at: NDArray[np.int64], into: Array) -> None:
        """Add these places to another stack at indices `at`; an index may repeat."""
        # np.add.at sums repeated indices; `into[at] +=` would keep the last one only.
        np.add.at(into[..., :_SUMS], at, self.stack[..., :_SUMS])
        np.maximum.at(into[..., _SUMS:], at, self.stack[..., _SUMS:])

    def folded(self, labels: NDArray[np.int64], count: int) -> Allowances:
        """Join all places that share a label; leave out negative labels."""
        kept = labels >= 0
        out = np.zeros((count, WIDTH))
        np.add.at(out[:, :_SUMS], labels[kept], self.stack[kept][:, :_SUMS])
        np.maximum.at(out[:, _SUMS:], labels[kept], self.stack[kept][:, _SUMS:])
        return Allowances(out)

    def in_runs(self, per: int, axis: int) -> Allowances:
        """Join every `per` neighbours along an axis."""
        count = self.stack.shape[axis]
        if per == 1 or not count:
            return self
        starts = np.arange(0, count, per)
        parts = (
            joined.reduceat(part, starts, axis=axis)
            for joined, part in (
                (np.add, self.stack[..., :_SUMS]),
                (np.maximum, self.stack[..., _SUMS:]),
            )
        )
        return Allowances(np.concatenate(tuple(parts), axis=-1))

    def joined(self, axis: int = 0) -> Allowances:
        """Join all places along an axis."""
        sums = self.stack[..., :_SUMS].sum(axis)
        largest = self.stack[..., _SUMS:].max(axis, initial=0.0)
        return Allowances(np.concatenate((sums, largest), axis=-1))

    def repeated(self, count: Array | float) -> Allowances:
        """Let `count` elements err together: the sum varies more, its mean and steps do not."""
        factors = np.ones((*np.shape(count), WIDTH))
        factors[..., [1, 3, 7, 8]] = np.expand_dims(count, -1)
        return Allowances(self.stack * factors)

    def shared(self, members: Array, known: int) -> Allowances:
        """Let places round together in groups of `members`; lengths and gains leave out `known`.

        `known` members are already accounted for. A step counts by the mean of its group; where
        more are known than the group has, by their sum.
        """
        made = self.repeated(np.maximum(members / known, 1.0)).stack
        more = np.maximum(known / members, 1.0)
        # Indices 4 to 6 are the steps: a group of equal roundings counts once, by its mean.
        made[..., 4:7] /= members[..., None]
        made[..., 6] *= more
        made[..., 9] *= more
        return Allowances(made)

    @property
    def length(self) -> Array:
        """Return the largest length of a place's difference."""
        squares, fourth, largest = (self.stack[..., k] for k in (0, 1, 7))
        # Bernstein: mean of the squares + sqrt(2 L v) + L c / 3.
        bound = squares + np.sqrt(2 * _LOG * fourth) + _LOG / 3 * largest
        allowed: Array = np.sqrt(bound)
        return allowed

    @property
    def pull(self) -> Array:
        """Return the largest sum of reference times difference."""
        most, squares, largest = (self.stack[..., k] for k in (2, 3, 8))
        allowed: Array = most + np.sqrt(2 * _LOG * squares) + _LOG / 3 * largest
        return allowed

    @property
    def stepped(self) -> Array:
        """Return the steps that were counted."""
        found: Array = self.stack[..., 4]
        return found

    @property
    def steps(self) -> Array:
        """Return the largest number of steps; an element's variance is at most its mean."""
        mean, variance, largest = (self.stack[..., k] for k in (5, 6, 9))
        allowed: Array = mean + np.sqrt(2 * _LOG * variance) + _LOG / 3 * largest
        return allowed
