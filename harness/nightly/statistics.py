"""Judge a text statistic over prompts: paired differences, confidence interval, detectable drift.

Each prompt gives one number for candidate, twin and BF16 reference; the drift is the mean of
candidate minus twin. The healthy range follows from twin minus reference: a candidate may stray
from its twin by less than the format itself does from BF16 (that mean with its own interval), or by
one BF16 step of the statistic if that is more. A gate is red only if the drift's whole interval
lies outside. A gate that could not detect a drift that matters decides nothing.

Student's quantile is Wallace's closed form (1959), within 1 % from 5 prompts on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from degarble.harness.base.errors import Undecided
from degarble.harness.report.number_text import number
from degarble.harness.report.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

FEWEST = 4  # prompts
CONFIDENCE = 0.999
POWER = 0.8
_STEP = 2.0**-8  # of BF16: what rounding alone may do to a statistic


@dataclass(frozen=True)
class Gate:
    """One statistic over the prompts: `low` to `high` is the interval of the drift."""

    name: str
    unit: str
    prompts: int
    candidate: float
    twin: float
    reference: float
    low: float
    high: float
    healthy: float
    smallest: float  # smallest drift that these prompts detect with probability POWER
    matters: float  # drift that a gate must detect
    finite: bool = True

    @property
    def drift(self) -> float:
        """Return the mean of candidate minus twin."""
        return self.candidate - self.twin

    @property
    def verdict(self) -> Verdict:
        """Return DIFFERS only if the whole interval lies outside the healthy range."""
        if not self.finite or self.low > self.healthy or self.high < -self.healthy:
            return Verdict.DIFFERS
        return Verdict.UNDECIDED if self.smallest > self.matters else Verdict.AGREES

    @property
    def sentence(self) -> str:
        """Return drift, interval, healthy range and detectable drift as text."""
        if not self.finite:
            return f"{self.name} of the candidate is not finite."
        shown = [number(each, 3) for each in (self.drift, self.low, self.high, self.healthy)]
        told = (
            f"{self.name}: drift {shown[0]} {self.unit} [{shown[1]}, {shown[2]}], healthy up to "
            f"{shown[3]}; {self.prompts} prompts show {number(self.smallest, 3)} with "
            f"{POWER:.0%} power."
        )
        if self.verdict is not Verdict.UNDECIDED:
            return told
        return f"{told} A drift of {number(self.matters, 3)} has to be seen: {self._advice}"

    @property
    def _advice(self) -> str:
        if abs(self.twin - self.reference) >= self.matters:
            return "the format alone costs more, so this statistic cannot judge it."
        # The detectable drift falls with the square root of the number of prompts.
        wanted = math.ceil(self.prompts * (self.smallest / self.matters) ** 2)
        return f"give about {wanted:,} prompts."


def gate(
    name: str,
    unit: str,
    candidate: Sequence[float],
    twin: Sequence[float],
    reference: Sequence[float],
    matters: float,
) -> Gate:
    """Judge one statistic, a number a prompt; `matters` is the drift that must be detectable."""
    count = len(candidate)
    if count < FEWEST:
        raise Undecided("prompts of a text gate", count, f"{FEWEST} at least", "Give more prompts.")
    for voice, numbers in (("twin", twin), ("reference", reference)):
        wild = sum(not math.isfinite(each) for each in numbers)
        if wild:
            raise Undecided(
                f"{name} of the {voice}", f"not finite on {wild} of {count} prompts", "numbers",
                "The text gates need a twin and a reference that can be measured: check these.",
            )  # fmt: skip
    if not all(map(math.isfinite, candidate)):
        unknown = math.nan
        means = (math.nan, fmean(twin), fmean(reference))
        blank = (unknown, unknown, unknown, unknown, matters)
        return Gate(name, unit, count, *means, *blank, finite=False)
    own, of_format = _apart(candidate, twin), _apart(twin, reference)
    # Two-sided Student interval of the mean paired difference.
    wide = quantile(count - 1, (1 + CONFIDENCE) / 2)
    half = wide * stdev(own) / math.sqrt(count)
    of_format_half = wide * stdev(of_format) / math.sqrt(count)
    healthy = max(abs(fmean(of_format)) + of_format_half, abs(fmean(twin)) * _STEP)
    # Drift beyond the healthy range that these prompts detect with probability POWER.
    more = quantile(count - 1, POWER) * stdev(own) / math.sqrt(count)
    middle = fmean(own)
    means = (fmean(candidate), fmean(twin), fmean(reference))
    seen = (middle - half, middle + half, healthy, healthy + half + more)
    return Gate(name, unit, count, *means, *seen, matters)


def _apart(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [mine - theirs for mine, theirs in zip(first, second, strict=True)]


def quantile(degrees: int, probability: float) -> float:
    """Return Student's quantile by Wallace's approximation, for probabilities from one half on."""
    # Wallace (1959), solved for t: z (8 n + 3) / (8 n + 1) = sqrt(n ln(1 + t^2 / n)).
    z = NormalDist().inv_cdf(probability) * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(z * z / degrees))
