"""How many elements of a place stepped, whatever their size: sums of difference over allowance.

Owns the measure in steps of the format. With most = slack + spacing an element counts |d| / most,
1 at most. |RN(s + e) - RN(s)| is |e| on average, since a boundary lies between both with
probability |e| / spacing; so a place counts sum(slack / most) on average at most, and what chance
adds. Lengths and gains are owned by the largest elements; here every element has one voice, and
outliers hide nothing. A signed sum has the same bound and is never larger: it would add nothing.

One error that a row shares (a norm's root, a scale) makes no roundings alike: given the error, each
element steps or not by its own last digits. What does round alike has the same last digits:
* in one row, elements that are equal but for sign and powers of two: few numbers of 8 bits times
  one factor, weight rows that stand there twice;
* rows that are equal, as those of one token, for a block of columns.
Such a group counts by its mean, which varies no more than one of its members does. Groups are read
off the twin: one that is none makes the level weaker, and never an alarm.

Refuses nothing. Kept honest by suites/engine/budget/test_steps.py. Shapes: M rows, K columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from degarble.harness.formats.types import ElementFormat

    Array = NDArray[np.float64]

BLOCK = 64  # columns in which rows may be equal: rotated features differ where others do not
_FLOAT64_BITS = 52  # of its mantissa
_NARROW = 10  # bits of a mantissa; of wider ones hardly two are equal by chance


class AlikeRows:
    """Rows that are equal but for sign and powers of two, by blocks of columns."""

    def __init__(self, shape: tuple[int, int], block: int = BLOCK) -> None:
        height, self._width = shape
        self.starts = np.arange(0, self._width, block)
        self._digests = np.zeros((height, len(self.starts)))

    def add(self, part: slice, t_MK: Array) -> None:
        """Look at the next rows of the twin."""
        with np.errstate(invalid="ignore"):
            seen = np.add.reduceat(t_MK * _probe(self._width), self.starts, axis=1)
        self._digests[part] = np.where(np.isfinite(seen), seen, 0.0)

    def members(self) -> Array:
        """How many rows each one is equal to, itself counted [M, blocks]."""
        found = np.ones(self._digests.shape)
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
    """How many of its row each element is equal to; None in a format where few are."""
    bits = output.mantissa_bits
    if bits > _NARROW:
        return None
    classes = 1 << bits
    mantissas = (t_MK.view(np.int64) >> (_FLOAT64_BITS - bits)) & (classes - 1)
    keys = mantissas + (np.arange(len(t_MK)) * classes)[:, None]
    counts = np.bincount(keys.reshape(-1)).astype(np.float64)
    found: Array = counts[keys]
    return found


def counted(d: Array, e: Array, most: Array, alike: Array | None) -> Array:
    """What every element counts, 1 at most, and what on average [2, M, K]; 0 where it must not."""
    both = np.zeros((2, *d.shape))
    np.divide(d, most, out=both[0], where=most > 0)
    np.divide(e, most, out=both[1], where=most > 0)
    np.minimum(both[0], 1.0, out=both[0])
    return both if alike is None else both / alike
