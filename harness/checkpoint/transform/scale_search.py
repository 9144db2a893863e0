"""From values to ModelOpt NVFP4 by a scale rule, and how much of the error the format explains.

Owns the three rules. `amax`: the tensor scale is A / (6 * 448), a block's largest magnitude becomes
6; that is ModelOpt's default, bit for bit. `mse`: the same tensor scale, and of the 17 block scales
from 8 codes below to 8 above (an octave each way) the one with the least squared error. `four-over-
six`: tensor scale A / (6 * 256), and per block 6 or 4 for its largest magnitude, 6 if both are
equal: ModelOpt's rule for the scales, with the choice by squared error.

Owns the floor: what the `mse` search leaves with the same tensor scale, measured on every 32nd row.
Error over floor is 1 at best; a healthy amax quantisation of weights has about 1.17.

Refuses values that are not finite. Kept honest by suites/checkpoint/transform/test_scale_search.py.
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

FLOOR_ROWS = 32
_OCTAVE = tuple(move for step in range(1, 9) for move in (-step, step))
_SEARCHES = {
    "mse": Search((6.0,), (0, *_OCTAVE)),
    "four-over-six": Search((6.0, 4.0)),
}


class ScaleRule(StrEnum):
    """How block scales are chosen; the words of the command line."""

    AMAX = "amax"
    MSE = "mse"
    FOUR_OVER_SIX = "four-over-six"

    @property
    def full_scale(self) -> float:
        """What the largest magnitude of a tensor is divided by."""
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
    """Some rows: packed codes and E4M3 bytes."""

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
        """Compare what was made, as it will be stored, with the values it was made from."""
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
