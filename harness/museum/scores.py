"""Score the museum's outcomes: shares with confidence intervals, by strength and by family.

From three budgets on a fault must be localised to its component alone, and no wrong cause may be
named. A plant below one budget has no effect and is not counted, unless another component is blamed
for it. What the engine cannot judge for want of a budget counts as missed, never as without effect.
Intervals are Wilson's.

Causes are scored by classes of the same effect on the data (plants.py), and also strictly, by the
fault's own name alone; strict shares have no target, since no engine can distinguish the members of
a class.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.museum.plants import CauseAnswer, PlaceAnswer, PlantOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from degarble.harness.museum.plants import RepeatedRun

_Z = 1.959964  # 95 % on two sides
STRONG = 3.0  # budgets from which on every fault must be localised
BINS = (("below 1", 0.0, 1.0), ("1 to 3", 1.0, 3.0), ("3 to 10", 3.0, 10.0), ("from 10", 10.0, 0.0))


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share; [0, 1] if nothing was counted."""
    if not total:
        return 0.0, 1.0
    share, square = hits / total, _Z**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    reach = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    reach /= 1 + square / total
    return max(0.0, middle - reach), min(1.0, middle + reach)


@dataclass(frozen=True)
class MuseumScore:
    """A claim, and how often it held; a share without target accompanies one that has it."""

    claim: str
    hits: int
    total: int
    wanted: float | None = 0.0
    at_least: bool = True

    @property
    def share(self) -> float:
        """Return the share of what was counted; NaN if nothing was."""
        return self.hits / self.total if self.total else math.nan

    @property
    def met(self) -> bool:
        """Return whether the target is met; it is if nothing was counted."""
        if not self.total or self.wanted is None:
            return True
        return self.share >= self.wanted if self.at_least else self.share <= self.wanted

    def document(self) -> dict[str, Any]:
        """Return the score as plain data."""
        low, high = wilson(self.hits, self.total)
        return {
            "claim": self.claim, "hits": self.hits, "total": self.total, "share": self.share,
            "interval": [low, high], "wanted": self.wanted, "at_least": self.at_least,
            "met": self.met,
        }  # fmt: skip


@dataclass(frozen=True)
class HealthyRun:
    """One healthy run, and its false alarms, of which there should be none."""

    case: str
    alarms: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    seconds: float = 0.0


def has_effect(outcome: PlantOutcome) -> bool:
    """Return whether a plant counts: its effect is at least one budget, or cannot be judged."""
    return math.isnan(outcome.effect) or outcome.effect >= 1


def is_strong(outcome: PlantOutcome) -> bool:
    """Return whether it must be found."""
    return math.isnan(outcome.effect) or outcome.effect >= STRONG


def is_missed(outcome: PlantOutcome) -> bool:
    """Return whether the engine's answer about a plant is wrong or missing."""
    if not has_effect(outcome):
        return outcome.place is not PlaceAnswer.NOWHERE
    if not is_strong(outcome):
        return outcome.place in (PlaceAnswer.ELSEWHERE, PlaceAnswer.ALSO_ELSEWHERE)
    return outcome.place is not PlaceAnswer.EXACT or outcome.cause is CauseAnswer.WRONG


def scores(
    outcomes: Sequence[PlantOutcome],
    healthy: Sequence[HealthyRun],
    repeats: Sequence[RepeatedRun] = (),
) -> tuple[MuseumScore, ...]:
    """Return the claims of the museum."""
    strong = [outcome for outcome in outcomes if is_strong(outcome)]
    told = [outcome for outcome in strong if _is_right(outcome)]
    without = [outcome for outcome in told if outcome.left_out is not None]
    weak = [outcome for outcome in outcomes if not has_effect(outcome)]
    races = [repeat for repeat in repeats if repeat.fault]
    same = [repeat for repeat in repeats if not repeat.fault]
    return (
        _score("localised to the component, from 3x", strong, _is_exact, 0.98),
        _score("cause named first, from 3x", strong, _is_named, 0.90),
        _score("  strictly: by its own name", strong, lambda o: o.cause is CauseAnswer.FIRST, None),
        _score("wrong cause named, from 3x", strong, _is_wrong, 0.02, at_least=False),
        _score("  strictly: any other name", strong, _is_other, None, at_least=False),
        _score("its family left out: localised", without, _is_exact, 0.98),
        _score("its family left out: no known fault", without, _says_unknown, 0.98),
        _score(
            "  strictly: nothing named", without, lambda o: o.left_out is CauseAnswer.UNKNOWN, None
        ),
        _score("blamed below 1x", weak, is_missed, 0.0, at_least=False),
        _score("alarms on healthy runs", healthy, lambda h: bool(h.alarms), 0.0, at_least=False),
        _score("healthy runs judged", healthy, lambda h: not h.undecided, 1.0),
        _score("run twice: UNSTABLE, at its component", races, lambda r: r.right, 0.98),
        _score("run twice: alarms on healthy runs", same, lambda r: r.differs, 0.0, at_least=False),
    )


def classes(outcomes: Iterable[PlantOutcome]) -> dict[tuple[str, str], int]:
    """Return pairs of faults with the same effect on the data, and how often that occurred."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for outcome in outcomes:
        for cause, named in (
            (outcome.cause, outcome.named),
            (outcome.left_out, outcome.left_named),
        ):
            if cause is CauseAnswer.SAME:
                found[min(outcome.fault, named), max(outcome.fault, named)] += 1
    return dict(sorted(found.items()))


def by_strength(
    outcomes: Sequence[PlantOutcome],
) -> list[tuple[str, int, MuseumScore, MuseumScore, MuseumScore]]:
    """Return localised, named first, wrongly named and number, for each bin of effect."""
    rows = []
    for name, low, high in BINS:
        inside = [o for o in outcomes if o.effect >= low and (o.effect < high or not high)]
        rows.append((name, inside))
    rows.append(("no budget", [o for o in outcomes if math.isnan(o.effect)]))
    return [(name, len(inside), *_three(inside)) for name, inside in rows if inside]


def by_family(
    outcomes: Iterable[PlantOutcome],
) -> dict[str, tuple[int, int, MuseumScore, MuseumScore, MuseumScore]]:
    """Return by family: plants, those that count, and the three scores from three budgets on."""
    groups: dict[str, list[PlantOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.family].append(outcome)
    found = {}
    for family, group in sorted(groups.items()):
        strong = [plant_outcome for plant_outcome in group if is_strong(plant_outcome)]
        found[family] = (len(group), sum(map(has_effect, group)), *_three(strong))
    return found


def _three(group: Sequence[PlantOutcome]) -> tuple[MuseumScore, MuseumScore, MuseumScore]:
    return (
        _score("localised", group, _is_exact, 0.98),
        _score("named first", group, _is_named, 0.90),
        _score("wrong", group, _is_wrong, 0.02, at_least=False),
    )


def _score(
    claim: str,
    group: Sequence[Any],
    holds: Callable[[Any], bool],
    wanted: float | None,
    *,
    at_least: bool = True,
) -> MuseumScore:
    return MuseumScore(claim, sum(map(holds, group)), len(group), wanted, at_least)


def _is_exact(outcome: PlantOutcome) -> bool:
    return outcome.place is PlaceAnswer.EXACT


def _is_right(outcome: PlantOutcome) -> bool:
    return outcome.place in (PlaceAnswer.EXACT, PlaceAnswer.ALSO_ELSEWHERE)


def _is_named(outcome: PlantOutcome) -> bool:
    return outcome.cause in (CauseAnswer.FIRST, CauseAnswer.SAME)


def _is_other(outcome: PlantOutcome) -> bool:
    return outcome.cause in (CauseAnswer.SAME, CauseAnswer.BESIDE, CauseAnswer.WRONG)


def _is_wrong(outcome: PlantOutcome) -> bool:
    return outcome.cause is CauseAnswer.WRONG


def _says_unknown(outcome: PlantOutcome) -> bool:
    """Return whether, without its family, no fault was named, or one with the same effect."""
    return outcome.left_out in (CauseAnswer.UNKNOWN, CauseAnswer.SAME)
