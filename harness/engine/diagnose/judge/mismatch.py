"""A wrong matrix product as the search for causes sees it: elements, box and sample.

`Wrong` holds candidate and twin, the elements beyond their own budget, the box of rows and columns
around these, and a sample of a few rows and columns (the worst, and healthy ones between) that
rejects most explanations cheaply.

Shape letters: M rows, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from degarble.harness.engine.budget.budget import HEADROOM, spacing
from degarble.harness.engine.compare.compare import values_of_any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget
    from degarble.harness.engine.diagnose.judge.product import Product

_ROWS, _COLUMNS = 16, 128  # of a sample: three quarters the worst, one quarter spread evenly


class Part(NamedTuple):
    """Some rows and columns of the output, as indices."""

    rows: Tensor
    columns: Tensor

    def of(self, matrix: Tensor) -> Tensor:
        """Return these rows and columns of a matrix."""
        return matrix[self.rows][:, self.columns]


class Made(NamedTuple):
    """The output that an explanation predicts, and its budget."""

    output: Tensor
    budget: Budget


@dataclass(frozen=True, eq=False)
class Explanation:
    """One known fault; `rank`: 0 has no parameter, 1 a named one, 2 a fitted number.

    `make` returns the whole output, or a part of it. `words` complete "... reproduces the
    candidate".
    """

    fault: str
    title: str
    words: str
    make: Callable[[Part | None], Made]
    rank: int = 0


@dataclass(frozen=True, eq=False)
class Wrong:
    """A candidate [M, N] that differs from its product."""

    product: Product
    candidate: Tensor
    exact: Tensor  # float64
    twin: Tensor
    budget: Budget

    @cached_property
    def excess(self) -> Tensor:
        """Return the difference of every element in units of its own budget."""
        return excess_of(self.candidate, self.twin, self.budget)

    @cached_property
    def finite(self) -> bool:
        """Tell whether the candidate's values are all finite."""
        return bool(self.candidate.isfinite().all())

    @cached_property
    def beyond(self) -> Tensor:
        """Return the elements beyond the healthy worst case: where to look for the fault."""
        # The margin absorbs the rounding of the quotient.
        return self.excess > HEADROOM * (1 + 2.0**-20)

    @cached_property
    def box(self) -> Part:
        """Return the rows and the columns with such an element; all of them if none has one."""
        whole = tuple(torch.arange(extent) for extent in self.twin.shape)
        if not bool(self.beyond.any()):
            return Part(*whole)
        return Part(*(self.beyond.any(axis).nonzero().flatten() for axis in (1, 0)))

    @cached_property
    def is_whole(self) -> tuple[bool, bool]:
        """Tell whether the box has (nearly) all rows, and all columns."""
        counts = (len(self.box.rows), len(self.box.columns))
        return counts[0] >= 0.97 * self.twin.shape[0], counts[1] >= 0.97 * self.twin.shape[1]

    @cached_property
    def sample(self) -> Part:
        """Return the worst rows and columns, and some between them."""
        # One infinite element would dominate every sum.
        shortened = self.excess.clamp(max=1e6)
        return Part(_chosen(shortened.sum(1), _ROWS), _chosen(shortened.sum(0), _COLUMNS))


def excess_of(candidate: Tensor, twin: Tensor, budget: Budget) -> Tensor:
    """Return each element's difference in units of its budget; infinite where kinds differ."""
    c, t = (values_of_any(side) for side in (candidate, twin))
    slack = budget.slack.expand(twin.shape).double().numpy()
    known = np.isfinite(c) & np.isfinite(t)
    t, c = np.where(known, t, 0.0), np.where(known, c, 0.0)
    most = np.where(slack > 0, slack + spacing(np.abs(t) + slack, budget.output), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(c == t, 0.0, np.abs(c - t) / most * HEADROOM)
    alike = candidate.isfinite() & twin.isfinite()
    excess: Tensor = torch.from_numpy(found)
    excess[~alike] = torch.inf
    return excess


def _chosen(weights: Tensor, count: int) -> Tensor:
    worst = weights.topk(min(len(weights), count * 3 // 4)).indices
    spread = torch.linspace(0, len(weights) - 1, max(1, count // 4)).long()
    found: Tensor = torch.cat((worst, spread)).unique()
    return found
