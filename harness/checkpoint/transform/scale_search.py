"""Quantise values to ModelOpt's NVFP4 by a scale rule, and measure the error above its floor.

With A the largest magnitude of the tensor, the rules are:
  amax           tensor scale A / (6 * 448); a block's largest magnitude becomes 6. ModelOpt's
                 default, bit for bit.
  mse            the same tensor scale; of the 17 block scales from 8 codes below to 8 above (an
                 octave each way) the one with the least squared error.
  four-over-six  tensor scale A / (6 * 256); a block's largest magnitude becomes 6 or 4, whichever
                 has the smaller squared error, 6 if equal. ModelOpt's rule for the scales.

The floor is the error of the `mse` search with the same tensor scale, measured on every 32nd row.
Error over floor is 1 at best; a healthy amax quantisation of weights has about 1.17.
Values that are not finite raise an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats.fast.modelopt import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Search,
    measure,
    quantise_modelopt,
    search_modelopt,
)

if TYPE_CHECKING:
    from torch import Tensor

# Every 32nd row is sampled for the floor.
FLOOR_ROWS = 32
# Moves of the E4M3 code: with 3 mantissa bits, 8 codes are an octave.
_OCTAVE = tuple(move for step in range(1, 9) for move in (-step, step))
_SEARCHES = {
    "mse": Search((6.0,), (0, *_OCTAVE)),
    "four-over-six": Search((6.0, 4.0)),
}


class ScaleRule(StrEnum):
    """The rule that chooses block scales; values are those of the command line."""

    AMAX = "amax"
    MSE = "mse"
    FOUR_OVER_SIX = "four-over-six"

    @property
    def full_scale(self) -> float:
        """The divisor of a tensor's largest magnitude."""
        # If a block's largest becomes 4, its scale grows by 6 / 4: 256 * 1.5 = 384 is within 448.
        return 6.0 * (256.0 if self is ScaleRule.FOUR_OVER_SIX else 448.0)


def tensor_scale(amax: float, rule: ScaleRule) -> float:
    """Return the decode scale of a tensor; 1 for zeros, whose blocks all have scale 1."""
    if amax == 0.0:
        return 1.0
    scale = float(np.float32(amax) / np.float32(rule.full_scale))
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise InvalidArgument(
            "largest magnitude of a weight",
            amax,
            "one whose tensor scale lies within 2^-100 to 2^100",
            "No trained weight is as small or as large: audit the source.",
        )
    return scale


class Quantised(NamedTuple):
    """Quantised rows: packed codes and E4M3 bytes."""

    codes: Tensor
    block_scale: Tensor


def quantise_rows(values: Tensor, scale: float, rule: ScaleRule) -> Quantised:
    """Quantise rows [M, K] of float32 or bfloat16 by a rule; one thread."""
    if rule is ScaleRule.AMAX:
        return Quantised(*quantise_modelopt(values, scale, threads=1))
    return Quantised(*search_modelopt(values, scale, _SEARCHES[rule], threads=1))


@dataclass
class Errors:
    """Squared errors, added up row block by row block in a fixed order."""

    energy: float = 0.0
    error: float = 0.0
    sampled: float = 0.0
    floor: float = 0.0

    def add(self, first_row: int, values: Tensor, made: Quantised, scale: float) -> None:
        """Compare decoded rows, as they will be stored, with the values they were made from."""
        found = measure(values, *made, scale)
        self.energy += found.energy
        self.error += found.error
        start = -first_row % FLOOR_ROWS
        sample = values[start::FLOOR_ROWS].contiguous()
        if sample.numel():
            codes, block_scale = (each[start::FLOOR_ROWS].contiguous() for each in made)
            self.sampled += measure(sample, codes, block_scale, scale).error
            best = quantise_rows(sample, scale, ScaleRule.MSE)
            self.floor += measure(sample, *best, scale).error

    @property
    def relative(self) -> float:
        """Relative error in the 2-norm; 0 for zeros."""
        return (self.error / self.energy) ** 0.5 if self.energy else 0.0

    @property
    def over_floor(self) -> float | None:
        """Error over the floor, both of the sampled rows; None where the floor is 0."""
        return (self.sampled / self.floor) ** 0.5 if self.floor else None
