"""Bounds on how far a converted value may be from its source, and the scales of a panel of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from degarble.harness.formats.number_formats import ElementFormat

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.number_formats import BlockFormat

NOTHING, BFLOAT16, ELEMENT, FACTOR = range(4)  # kinds
ONE_ROUNDING = 2.0**-22  # of products and quotients in float32 on the way
FACTOR_ROUNDING = 2.0**-23  # of a divisor that became a factor


class PanelScales(NamedTuple):
    """Scales that codes are multiplied by; `first` rows of the first block lie above the panel."""

    scales: Tensor  # [blocks of rows, blocks of columns], float64
    block: tuple[int, int]
    first: int = 0

    def cut(self, begin: int, end: int) -> Self:
        """Return the scales of rows `begin` to `end`."""
        high = self.block[0]
        begin, end = begin + self.first, end + self.first
        scales = self.scales[begin // high : -(-end // high)]
        return self._replace(scales=scales, first=begin % high)

    def full(self, shape: tuple[int, ...]) -> Tensor:
        """Return the scale of every element."""
        rows = self.scales.repeat_interleave(self.block[0], 0)[self.first :]
        return rows.repeat_interleave(self.block[1], 1)[: shape[0], : shape[1]]


@dataclass(frozen=True)
class ErrorBound:
    """The largest allowed distance of a value from its source; `allowed` defines each kind."""

    kind: int
    mantissa: int = 0
    lowest: int = 0  # exponent below which the grid is as fine as there

    def allowed(self, source: Tensor, step: Tensor) -> Tensor:
        """Return the bound of every element."""
        if self.kind == NOTHING:
            return torch.zeros_like(source)
        if self.kind == FACTOR:
            return source.abs() * FACTOR_ROUNDING
        if self.kind == BFLOAT16:
            step = torch.ones_like(source)
        exponent = torch.frexp(source / step).exponent.clamp(min=self.lowest + 1) - 1
        half = torch.exp2((exponent - self.mantissa - 1).double())
        return half * step + source.abs() * ONE_ROUNDING


NO_BOUND = ErrorBound(NOTHING)
BFLOAT16_BOUND = ErrorBound(BFLOAT16, 7, -126)  # half a unit in the last place, float32 on the way
FACTOR_BOUND = ErrorBound(FACTOR)  # the one rounding of a divisor that becomes a factor


def element_bound(fmt: BlockFormat) -> ErrorBound:
    """Return half the distance of the codes around each value, times the scale there."""
    assert isinstance(fmt.element, ElementFormat), "recipes write floats"
    # The top code also takes what the rounding of an E4M3 scale pushes above it, by up to 1/16.
    return ErrorBound(ELEMENT, fmt.element.mantissa_bits, fmt.element.min_exponent)
