"""Statistics of synthetic weights, and a random generator keyed by name.

A draw depends on the seed and the name alone, on every machine, so any tensor can be made again
without the others. Only integers, sums, products, quotients and square roots are used, which
IEEE 754 fixes to the last bit.

Source of the mixing: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014),
finaliser of splitmix64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_PIECE = 1 << 16  # numbers made at once: they stay in the cache


@dataclass(frozen=True)
class Statistics:
    """Distribution of weights like a trained model's. Shares are fractions, gains are factors."""

    degrees_of_freedom: int = 6  # of Student's t: fewer have heavier tails
    outlier_share: float = 1 / 128  # of the input channels, the same ones wherever K is the same
    outlier_gain: float = 4.0
    row_spread: int = 8  # gains of rows: 2^0, 2^-1/2, ..., so many of them
    dead_share: float = 1 / 64  # of the experts: tiny weights, reached by no calibration token
    dead_exponent: int = -12  # their weights are smaller by this power of two
    input_amax: float = 64.0  # largest activation that a calibration saw is up to this

    def __post_init__(self) -> None:
        limits = {
            "degrees_of_freedom": (3, 64),
            "outlier_share": (0, 1),
            "outlier_gain": (1, 1024),
            "row_spread": (1, 16),
            "dead_share": (0, 1),
            "dead_exponent": (-64, 0),
            "input_amax": (2**-10, 2**20),
        }
        for field in fields(self):
            low, high = limits[field.name]
            value = getattr(self, field.name)
            whole = isinstance(field.default, float) or isinstance(value, int)
            if not whole or not low <= value <= high:
                raise InvalidArgument(
                    f"statistics.{field.name}",
                    value,
                    f"{'a number' if isinstance(field.default, float) else 'an integer'}"
                    f" from {low} to {high}",
                    "Leave it out for a model like the released ones.",
                )


class Numbers:
    """Random numbers by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def word(self, name: str) -> int:
        """Return 64 random bits."""
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:8], "big")

    def share(self, name: str) -> float:
        """Return a number from 0 to 1, without 1."""
        return (self.word(name) >> 11) * 2.0**-53

    def below(self, name: str, limit: int, count: int) -> NDArray[np.int64]:
        """Return `count` integers below `limit`, which is at most 2^32."""
        high = words(self.word(name), count) >> np.uint64(32)
        return (high * np.uint64(limit) >> np.uint64(32)).astype(np.int64)

    def normal(self, name: str, count: int) -> NDArray[np.float64]:
        """Return `count` numbers of mean 0 and variance 1: sums of twelve uniform ones."""
        return np.concatenate(
            [_normal(self.word(name), begin, end) for begin, end in _pieces(count)]
        )

    def student(self, name: str, count: int, degrees: int) -> NDArray[np.float64]:
        """Return `count` numbers of Student's t: a normal one over the root of a chi square."""
        return np.concatenate(
            [_student(self.word(name), begin, end, degrees) for begin, end in _pieces(count)]
        )


def words(key: int, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Return 64 random bits for each position from `first` on."""
    x = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    x *= _GOLDEN
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


def _pieces(count: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _PIECE, count)) for begin in range(0, max(count, 1), _PIECE)]


def _uniform_sums(key: int, begin: int, end: int) -> NDArray[np.float64]:
    """Sum the four 16-bit quarters of a word, about 0: a variance of 4/12 in units of 2^16."""
    bits = words(key, end - begin, begin).view(np.uint16).reshape(-1, 4)
    # A sum of four is exact in 18 bits, whatever the order of the machine's bytes.
    total = bits[:, 0].astype(np.float64)
    for quarter in range(1, 4):
        total += bits[:, quarter]
    total -= 4 * 32767.5
    total *= 2.0**-16
    return total


def _normal(key: int, begin: int, end: int) -> NDArray[np.float64]:
    total = _uniform_sums(key, begin, end)
    for part in (1, 2):
        total += _uniform_sums(_derived(key, part), begin, end)
    return total


def _student(key: int, begin: int, end: int, degrees: int) -> NDArray[np.float64]:
    square = np.zeros(end - begin)
    for part in range(degrees):
        each = _uniform_sums(_derived(key, 3 + part), begin, end)
        each *= each
        square += each
    square *= 3.0 / degrees  # one sum of four has variance 1/3
    normal = _normal(key, begin, end)
    normal /= np.sqrt(square)
    return normal


def _derived(key: int, part: int) -> int:
    return int(words(key, 1, (1 << 40) + part)[0])
