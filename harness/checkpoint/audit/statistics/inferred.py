"""Define the result of an inference from statistics: a value, its confidence and the evidence.

A value is given only where both its evidence and its lead over the next best value are far beyond
chance; otherwise `because` says what was missing. `confidence` is one minus the probability of such
evidence by chance, over all values tried and for independent draws. Real weights are only nearly
independent: hence the wide margin, and never more than CERTAIN. Imports no sibling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CERTAIN = 0.999999
FAR = 6.0  # standard deviations of evidence, and of its distance to the next best value


@dataclass(frozen=True)
class Inferred:
    """One inference. `value` None: undecided. `evidence`: a score for each value tried.

    `lead`: of the best over the next best, or over zero, in standard deviations.
    """

    about: str
    value: str | None
    confidence: float
    because: str
    evidence: Mapping[str, float]
    lead: float = 0.0

    @property
    def is_decided(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


def undecided(
    about: str, because: str, evidence: Mapping[str, float] | None = None, lead: float = 0.0
) -> Inferred:
    """Return an inference without a value."""
    return Inferred(about, None, 0.0, because, MappingProxyType(dict(evidence or {})), lead)


def best_of(about: str, scores: Mapping[str, float], because: str) -> Inferred:
    """Return the value of highest score, in standard deviations, if it leads by FAR."""
    evidence = MappingProxyType(dict(scores))
    ranked = sorted(
        (name for name in scores if math.isfinite(scores[name])), key=lambda name: -scores[name]
    )
    if not ranked:
        return undecided(about, "nothing varies that could tell", scores)
    first = ranked[0]
    second = scores[ranked[1]] if len(ranked) > 1 else 0.0
    lead = min(scores[first], scores[first] - max(second, 0.0))
    if lead < FAR:
        told = f"{first} leads by {max(lead, 0.0):.1f} standard deviations; {FAR:.0f} are asked for"
        return undecided(about, told, scores, lead)
    return Inferred(about, first, confidence_of(lead, len(scores)), because, evidence, lead)


def confidence_of(deviations: float, tried: int = 1) -> float:
    """Return the confidence of a lead in standard deviations, over the number of values tried."""
    return max(0.0, min(CERTAIN, 1.0 - tried * math.erfc(deviations / math.sqrt(2))))
