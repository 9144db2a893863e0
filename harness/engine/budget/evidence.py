"""Decide which rows, heads or experts a difference is certainly in, each by its own budget.

A faint fault may put no single element beyond its budget, and then every rounding that fell the
other way looks like the fault, in healthy heads and experts as well. So a place counts only where
it alone is beyond its budget, and places are named only where all others together are within
theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from degarble.harness.engine.budget.budget import HEADROOM, Budget, judge
from degarble.harness.formats.arrays import FORMAT_OF_DTYPE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

Place = TypeVar("Place", int, str)
MOST_PLACES = 64  # of one kind; with more, only single elements count


@dataclass(frozen=True, eq=False)
class Evidence:
    """Candidate and twin with the bound of their difference; `certain`: some elements exceed it."""

    candidate: Tensor
    twin: Tensor
    slack: Tensor
    certain: bool

    @classmethod
    def of(cls, pair: tuple[Tensor, Tensor], slack: Tensor | None, *, certain: bool) -> Evidence:
        """Build evidence; without slack, and for codes, only the differing elements are known."""
        bound = torch.empty(0) if slack is None else slack.expand(pair[1].shape)
        return cls(*pair, bound, certain)

    def only(
        self, struck: Collection[Place], places: Mapping[Place, Tensor], *, columns: bool = False
    ) -> list[Place]:
        """Return the places that are certainly faulty; empty if none, all, or not all of them.

        `struck` holds the places with differing elements. `places` are masks of the leading
        extents, or of columns.
        """
        if not self._can_judge or len(places) > MOST_PLACES:
            found = [place for place in places if place in struck]
            return found if self.certain and len(found) < len(places) else []
        found = [
            place
            for place, mask in places.items()
            if (self.certain and place in struck) or self._ratio(mask, columns=columns) > 1
        ]
        others = [mask for place, mask in places.items() if place not in found]
        if not found or not others:
            return []
        # Places are named only if all others together are healthy.
        rest = torch.stack(others).any(0)
        return found if self._ratio(rest, columns=columns) <= HEADROOM else []

    @property
    def _can_judge(self) -> bool:
        known = self.candidate.dtype in FORMAT_OF_DTYPE and self.candidate.dtype.itemsize > 1
        # One-byte codes and integers can only be compared for equality.
        return known and self.slack.shape == self.twin.shape and bool(self.slack.isfinite().all())

    def _ratio(self, mask: Tensor, *, columns: bool) -> float:
        """Return the difference of a part in units of its own budget."""
        sides = (self.candidate, self.twin, self.slack)
        c, t, slack = (side[..., mask] if columns else side[mask] for side in sides)
        if not c.numel():
            return 0.0
        c, t, slack = (side.reshape(len(side), -1) for side in (c, t, slack))
        return judge(c, t, Budget(FORMAT_OF_DTYPE[c.dtype], slack, ())).worst.ratio
