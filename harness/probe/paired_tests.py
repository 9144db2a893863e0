"""Exact paired tests, and how many prompts would decide."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import NormalDist, fmean, pstdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENUMERATED = 16  # differences up to which all signs are enumerated: 65,536 sums
_DRAWS = 20_000
_SIGNIFICANCE, _POWER = 0.01, 0.9
_MOST = 1_000_000


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Return the probability of at least this many successes."""
    if successes <= 0:
        return 1.0
    if probability in (0.0, 1.0):
        return probability
    logs = math.log(probability), math.log1p(-probability)
    terms = (
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * logs[0] + (trials - k) * logs[1]
        for k in range(successes, trials + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the exact two-sided p-value of McNemar's test, from the discordant pairs."""
    discordant = first_only + second_only
    if discordant == 0:
        return 1.0
    return min(1.0, 2 * binomial_tail(max(first_only, second_only), discordant, 0.5))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of a sign-flip permutation test of the mean difference.

    Up to 16 differences it is exact: all signs are enumerated. Beyond, 20,000 draws with a fixed
    seed, and the p-value that never is below one in as many.
    """
    values = [value for value in differences if value != 0.0]
    if not values:
        return 1.0
    observed = abs(math.fsum(values))
    near = observed * (1 - 1e-12)  # sums of another order are the same sum
    if len(values) <= _ENUMERATED:
        signs = product((1, -1), repeat=len(values))
        sums = (abs(sum(s * v for s, v in zip(sign, values, strict=True))) for sign in signs)
        return sum(total >= near for total in sums) / float(2 ** len(values))
    draw = random.Random(0)  # noqa: S311  a permutation test
    hits = 0
    for _ in range(_DRAWS):
        bits = draw.getrandbits(len(values))
        hits += abs(sum(v if bits >> n & 1 else -v for n, v in enumerate(values))) >= near
    return (hits + 1) / (_DRAWS + 1)


def prompts_for_answers(first_only: int, second_only: int, pairs: int) -> int | None:
    """Return how many pairs McNemar's test needs at these shares: 1 %, with a power of 90 %.

    None where no discordant pair was seen, or both kinds are equally frequent.
    """
    if pairs == 0 or first_only == second_only:
        return None
    one, other = first_only / pairs, second_only / pairs
    alpha, power = _quantiles()
    both, apart = one + other, one - other
    root = alpha * math.sqrt(both) + power * math.sqrt(max(both - apart**2, 0.0))
    return min(_MOST, math.ceil((root / apart) ** 2))


def prompts_for_mean(differences: Sequence[float]) -> int | None:
    """Return how many differences decide that their mean is not zero: 1 %, with a power of 90 %."""
    if len(differences) < 2:
        return None
    mean, spread = fmean(differences), pstdev(differences)
    if mean == 0.0:
        return None
    alpha, power = _quantiles()
    return max(2, min(_MOST, math.ceil(((alpha + power) * spread / mean) ** 2)))


def _quantiles() -> tuple[float, float]:
    normal = NormalDist()
    return normal.inv_cdf(1 - _SIGNIFICANCE / 2), normal.inv_cdf(_POWER)
