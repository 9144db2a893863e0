"""Count how many elements of a place stepped to a neighbour, regardless of their size.

With most = slack + spacing, an element counts |d| / most, at most 1. |RN(s + e) - RN(s)| is |e| on
average, since a rounding boundary lies between both with probability |e| / spacing. So a place
counts at most sum(slack / most) on average, plus chance. Lengths and gains are dominated by the
largest elements; here all elements weigh the same, and outliers hide nothing. A signed sum has the
same bound and is never larger, so it would add nothing.

An error that a whole row shares (a norm's root, a scale) does not make roundings alike: given the
error, each element steps or not by its own last digits. Elements with equal last digits do round
alike:

* in one row, elements that are equal but for sign and powers of two: few 8-bit numbers times one
  factor, or weight rows that occur twice;
* equal rows, such as those of one token, for a block of columns.

Such a group counts by its mean, which varies no more than one member does. Groups are read off the
twin; a wrong group weakens the level but never raises a false alarm.

Shape letters: M rows, K columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.formats.types import ElementFormat

    Array = NDArray[np.float64]

BLOCK = 64  # columns compared at once: rotated features differ even where the others are equal
_FLOAT64_BITS = 52  # mantissa bits
_NARROW = 10  # mantissa bits; in wider formats elements are hardly ever equal by chance


class AlikeRows:
    """Detects rows that are equal but for sign and powers of two, by blocks of columns."""

    def __init__(self, shape: tuple[int, int], block: int = BLOCK) -> None:
        height, self._width = shape
        self.starts = np.arange(0, self._width, block)
        self._digests = np.zeros((height, len(self.starts)))

    def add(self, part: slice, t_MK: Array) -> None:
        """Add the next rows of the twin."""
        with np.errstate(invalid="ignore"):
            # A random projection of each block: equal blocks have equal projections.
            seen = np.add.reduceat(t_MK * _probe(self._width), self.starts, axis=1)
        self._digests[part] = np.where(np.isfinite(seen), seen, 0.0)

    def members(self) -> Array:
        """Return how many rows equal each one, itself included [M, blocks]."""
        found = np.ones(self._digests.shape)
        # Mantissas ignore sign and powers of two.
        mantissas = np.frexp(np.abs(self._digests))[0]
        for at in range(len(self.starts) if len(found) > 1 else 0):
            column = mantissas[:, at]
            _, group, counts = np.unique(column, return_inverse=True, return_counts=True)
            found[:, at] = np.where(column > 0, counts[group.reshape(-1)], 1)
        return found


@lru_cache(maxsize=16)
def _probe(width: int) -> Array:
    drawn: Array = np.random.default_rng(0).standard_normal(width)
    return drawn


def alike_in_row(t_MK: Array, output: ElementFormat) -> Array | None:
    """Return how many elements of its row each one equals; None in formats where few do."""
    bits = output.mantissa_bits
    if bits > _NARROW:
        return None
    classes = 1 << bits
    # The leading mantissa bits; keys are unique per row and mantissa.
    mantissas = (t_MK.view(np.int64) >> (_FLOAT64_BITS - bits)) & (classes - 1)
    keys = mantissas + (np.arange(len(t_MK)) * classes)[:, None]
    counts = np.bincount(keys.reshape(-1)).astype(np.float64)
    found: Array = counts[keys]
    return found


def counted(d: Array, e: Array, most: Array, alike: Array | None) -> Array:
    """Return each element's count, at most 1, and its allowed mean [2, M, K]; 0 where most is 0."""
    both = np.zeros((2, *d.shape))
    np.divide(d, most, out=both[0], where=most > 0)
    np.divide(e, most, out=both[1], where=most > 0)
    np.minimum(both[0], 1.0, out=both[0])
    return both if alike is None else both / alike
