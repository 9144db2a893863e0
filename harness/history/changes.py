"""Find the nights that moved a series, and explain each change by commits and facts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from degarble.harness.history.records import Measure, StoredRun
    from degarble.harness.history.store import Nights
    from degarble.harness.report.verdict import Verdict


# --------------------------------------------------------------------------------------------------
# Change-point detection: find the night that moved a series, over thousands of series at once.
#
# A series is one number a night: the mean over the night's runs. Its baseline is what is more than
# LONGEST nights old, or what followed its last change; its noise is the standard deviation there.
# The mean of the last 2, 3, 5 and 8 nights is compared with the baseline by Student's statistic,
# converted to a normal deviate (Wallace 1959), so that a short baseline needs a larger move. The
# threshold shares ALARMS_A_YEAR among all series, windows and nights.
#
# Four rules keep a healthy store free of alarms:
#   single nights  One night never makes a change: its weight is limited so that two nights that
#                  agree suffice, however far out it is.
#   heavy tails    Noise with heavy tails counts as normal noise that is as rare, by the tails of
#                  all series so far.
#   correlation    Noise that carries over to the next night widens the threshold.
#   no noise       A series that never moved (bit-equal runs) has the least noise of its measure.
#
# The first night of a change is the one that splits old from new best; it determines the commits.
# Shape letters: N nights, S series.

if TYPE_CHECKING:
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Places = NDArray[np.intp]

WINDOWS = (2, 3, 5, 8)
LONGEST = WINDOWS[-1]
LEARNED = 12  # nights of a baseline that say how far its nights lie apart
TESTED = 20  # nights of a baseline before anything is tested; in between the tails are learned
LEARNING = TESTED + LONGEST - 1  # nights before the first that is tested: its window is no baseline
ALARMS_A_YEAR = 0.25  # over all series; a quarter of what is promised: noise is not quite normal
NIGHTS_A_YEAR = 365
_COUNTS = 1.2  # of what each of two equal nights needs for a change
_WILD, _MANY = 4.0, 0.25  # deviate, and share of series: a night on which everything is wild
_MOST_CARRIED = 0.9  # correlation of neighbouring nights


@dataclass(frozen=True)
class Change:
    """A change of a series: `first` is the first night of its new level, `found` its detection."""

    series: int
    first: int
    last_before: int  # the night before, where the series had a value: -1 where unknown
    found: int
    before: float
    after: float
    noise: float  # standard deviation of a night
    deviate: float  # normal deviate of the test that found it

    @property
    def size(self) -> float:
        """The move in units of the noise of a night."""
        return (self.after - self.before) / self.noise


def threshold(series: int) -> float:
    """Return the normal deviate that so many series may exceed ALARMS_A_YEAR times a year."""
    tests = NIGHTS_A_YEAR * max(1, series) * len(WINDOWS)
    # Two-sided, and divided among all tests (Bonferroni).
    return NormalDist().inv_cdf(1 - ALARMS_A_YEAR / tests / 2)


def changes_of(values_NS: Floats, floors_S: Floats | float = 0.0) -> list[Change]:
    """Process the nights in order and return every change; NaN is a night without a value.

    `floors_S` is the least noise of each series.
    """
    if values_NS.ndim != 2:
        raise ShapeMismatch(
            "values", values_NS.shape, "nights x series", "Give one row a night."
        )  # fmt: skip
    watch = ChangeDetector(values_NS.shape[1], floors_S)
    return [change for night, row in enumerate(values_NS) for change in watch.add_night(night, row)]


class ChangeDetector:
    """The state of all series between two nights."""

    def __init__(self, series: int, floors_S: Floats | float = 0.0) -> None:
        self._floor = np.broadcast_to(np.maximum(floors_S, 1e-12), (series,))
        self._threshold = threshold(series)
        self._needed = _needed(self._threshold)
        zeros = np.zeros(series)
        self._count, self._mean = zeros.copy(), zeros.copy()  # of the baseline's level
        self._spread, self._degrees = zeros.copy(), zeros.copy()  # squares and their freedom
        self._carried = zeros.copy()  # sum of products of neighbouring nights
        self._before = zeros.copy()  # the last night that joined the baseline, from its mean
        self._recent = np.full((LONGEST, series), np.nan)  # newest last
        self._nights = np.full((LONGEST, series), -1, np.int64)
        self._joined = np.full(series, -1, np.int64)
        self._tails = _Tails()

    def add_night(self, night: int, values_S: Floats) -> Iterator[Change]:
        """Process one night; yield the changes that it reveals."""
        here = np.isfinite(values_S)
        self._join(self._recent[0], self._nights[0], here)
        for kept, new in ((self._recent, values_S), (self._nights, night)):
            if here.all():
                kept[:-1] = kept[1:]
                kept[-1] = new
            else:
                kept[:-1] = np.where(here, kept[1:], kept[:-1])
                kept[-1] = np.where(here, new, kept[-1])
        at = np.flatnonzero(here & (self._count >= TESTED) & self._worth_a_look())
        for series, deviate in zip(at, self._deviates(at) if len(at) else (), strict=True):
            if abs(deviate) > self._threshold:
                yield self._changed(int(series), night, float(deviate))

    @property
    def noise(self) -> Floats:
        """Standard deviation of a night, series by series."""
        deviation: Floats = np.sqrt(self._spread / np.maximum(self._degrees, 1.0))
        noise: Floats = np.maximum(deviation, self._floor)
        return noise

    def _join(self, values: Floats, nights: NDArray[np.int64], here: Bools) -> None:
        """Add the oldest recent night to the baseline; a wild one is clipped to the limit."""
        joins = here & np.isfinite(values)
        if not joins.any():
            return
        away = np.where(joins, values - self._mean, 0.0)
        learned = joins & (self._count >= LEARNED)
        if learned.any():
            noise, free = self.noise, self._degrees
            # Standard deviation of a new night less the baseline's mean.
            apart = noise * np.sqrt(1 + 1 / np.maximum(self._count, 1.0))
            self._tails.add_night(_as_normal(np.abs(away) / apart, np.maximum(free, 1.0))[learned])
            limit = self._most_of_a_night() * noise
            away = np.where(learned, np.clip(away, -limit, limit), away)
        self._count = self._count + joins
        # Welford's update of the mean and of the sum of squares.
        step = away / np.maximum(self._count, 1.0)
        self._carried += away * np.where(joins, self._before, 0.0)
        # Trap: the first value lies away from nothing.
        self._before = np.where(joins, np.where(self._count > 1, away, 0.0), self._before)
        self._spread += away * (away - step)
        self._mean += step
        self._degrees += joins & (self._count > 1)
        self._joined = np.where(joins, nights, self._joined)

    def _most_of_a_night(self) -> Floats:
        """Return the largest weight of one night, in units of noise."""
        at = np.minimum(self._degrees, len(self._needed) - 1).astype(np.int64)
        # Standard deviation of the mean of two nights less the baseline's mean, in units of noise.
        apart = np.sqrt(0.5 + 1 / np.maximum(self._count, 1.0))
        return np.asarray(_COUNTS * self._needed[at] * apart, np.float64)

    def _worth_a_look(self) -> Bools:
        """Return where a window is far out before corrections, which only lessen its deviate."""
        noise = self._threshold * self.noise
        sums = np.zeros(len(self._mean))
        worth = np.zeros(len(self._mean), np.bool_)
        for back in range(LONGEST):
            sums = sums + self._recent[-1 - back]
            window = back + 1
            if window in WINDOWS:
                worth |= np.abs(sums - window * self._mean) > math.sqrt(window) * noise
        return worth

    def _deviates(self, at: Places) -> Floats:
        """Return the largest deviate of all windows of the series `at`, with its sign."""
        units, carried = self._units(at), self._correlation(at)
        totals, count = np.cumsum(units[::-1], axis=0), self._count[at]
        best = np.zeros(len(at))
        for window in WINDOWS:
            # Variance of a window's sum: correlated nights, and the baseline's own mean.
            inner = sum((1 - k / window) * carried**k for k in range(1, window))
            variance = window * (1 + 2 * inner) + window * window / count
            t = totals[window - 1] / np.sqrt(variance)
            best = np.where(np.abs(t) > np.abs(best), t, best)
        return np.copysign(_as_normal(np.abs(best), self._degrees[at]), best)

    def _units(self, at: Places) -> Floats:
        """Return the recent nights in units of each series' noise, clipped as single nights are."""
        units = (self._recent[:, at] - self._mean[at]) / self.noise[at]
        limit = self._most_of_a_night()[at]
        return np.clip(self._tails.tamed(units), -limit, limit)

    def _correlation(self, at: Places) -> Floats:
        """Return the correlation of neighbouring nights: of all series, or one if clearly more."""
        moved = self._spread > 0
        found = np.divide(self._carried, self._spread, out=np.zeros(len(moved)), where=moved)
        common = float(found[moved].mean()) if moved.any() else 0.0
        # About two standard errors of the correlation of independent nights.
        chance = 2 / np.sqrt(np.maximum(self._degrees[at], 1.0))
        return np.clip(np.maximum(found[at] - chance, common), 0.0, _MOST_CARRIED)

    def _changed(self, series: int, night: int, deviate: float) -> Change:
        """Return a change of one series, and make its new level the baseline."""
        nights = self._nights[:, series]
        start = _split(
            (self._recent[:, series] - self._mean[series])
            * math.copysign(1 / float(self.noise[series]), deviate)
        )
        old = int(nights[start - 1]) if start else -1
        new = self._recent[start:, series].copy()
        change = Change(
            series=series,
            first=int(nights[start]),
            last_before=old if old >= 0 else int(self._joined[series]),
            found=night,
            before=float(self._mean[series]),
            after=float(np.median(new)),
            noise=float(self.noise[series]),
            deviate=deviate,
        )
        self._count[series], self._mean[series] = len(new), float(new.mean())
        self._before[series] = 0.0
        self._joined[series] = night
        self._recent[:, series], self._nights[:, series] = np.nan, -1
        return change


def _needed(least: float) -> Floats:
    """Return Student's t that is as rare as a normal deviate `least`, by degrees of freedom."""
    free = np.maximum(np.arange(1000.0), 1.0)
    factor = (8 * free + 3) / (8 * free + 1)  # Wallace's formula turned round
    with np.errstate(over="ignore"):
        found: Floats = np.sqrt(free * np.expm1((least * factor) ** 2 / free))
    return found


def _as_normal(t: Floats, free: Floats) -> Floats:
    """Return the normal deviate that is as rare as Student's t of so many degrees."""
    found: Floats = (8 * free + 1) / (8 * free + 3) * np.sqrt(free * np.log1p(t * t / free))
    return found


def _split(units: Floats) -> int:
    """Return where the new level begins, given recent nights in units of noise from the old one."""
    starts = np.flatnonzero(np.isfinite(units))
    sums = np.array([units[k:].sum() / math.sqrt(len(units) - k) for k in starts])
    start = int(starts[int(sums.argmax())])
    for _ in range(2):  # by likelihood: each night is old or new, with the new level as found
        level = float(units[start:].mean())
        gains = np.array([(level * units[k:] - level * level / 2).sum() for k in starts])
        start = int(starts[int(gains.argmax())])
    return start


class _Tails:
    """Tail distribution of distances from the baseline, over all series so far."""

    _step, _bins = 0.05, 400  # of normal deviates
    _seldom = 2000  # nights of series before their tails mean anything

    def __init__(self) -> None:
        self._counts = np.zeros(self._bins, np.int64)
        self._scored_nights = 0  # the count of nights when the scores were made
        self._grid = np.arange(self._bins + 1) * self._step
        self._scores = self._grid

    def add_night(self, deviates: Floats) -> None:
        """Count one night of all series; skip a night on which all are wild: one event, no tail."""
        if (deviates > _WILD).mean() > _MANY:
            return
        at = np.minimum(deviates / self._step, self._bins - 1).astype(np.int64)
        self._counts += np.bincount(at, minlength=self._bins)
        total = int(self._counts.sum())
        if total < self._seldom or total < 1.2 * self._scored_nights:
            return
        self._scored_nights = total
        beyond = np.cumsum(self._counts[::-1])[::-1] + 1
        beyond = np.append(beyond, beyond[-1])  # the last bin holds all that is farther out
        normal = NormalDist()
        scores = [normal.inv_cdf(1 - min(1.0, each / (total + 1)) / 2) for each in beyond]
        self._scores = np.minimum(np.maximum.accumulate(scores), self._grid)

    def tamed(self, units: Floats) -> Floats:
        """Return distances shrunk to those of equally rare normal noise."""
        sizes = np.abs(units)
        least = np.minimum(sizes, np.interp(sizes, self._grid, self._scores))
        signed: Floats = np.copysign(least, units)
        return signed


# --------------------------------------------------------------------------------------------------
# Explain a history: which series moved, when, between which commits, and what else changed.
#
# Each detected change gets its dates, the two runs between which it happened, and the facts
# (commit, checkpoint, driver, versions) that differ between them. A change is red where it goes the
# bad way by more than its measure allows.

_COMMIT = 12  # characters of a commit that a sentence shows
_FACT = "{name} {old} -> {new}"


@dataclass(frozen=True)
class ExplainedChange:
    """One change of a series: from `before` to `after`, starting with the night `first`."""

    measure: str
    place: str
    first: str
    last_before: str  # the night before with a value, or ""
    found: str
    before: float
    after: float
    noise: float
    deviate: float
    worse: bool
    red: bool
    good: str = ""  # commit of the last night before
    bad: str = ""  # commit of the first night
    differs: tuple[tuple[str, str, str], ...] = ()  # fact, before, after

    @property
    def size(self) -> float:
        """The move in standard deviations of a night."""
        return (self.after - self.before) / self.noise

    @property
    def commits(self) -> str:
        """The range of commits that contains the cause, in git's notation."""
        if not self.good and not self.bad:
            return ""
        if self.good == self.bad:
            return self.bad[:_COMMIT]
        return f"{self.good[:_COMMIT]}..{self.bad[:_COMMIT]}"

    @property
    def sentence(self) -> str:
        """A summary in one line."""
        when = f"in the night {self.first}"
        if self.last_before:
            when += f" (the one before: {self.last_before})"
        move = f"{self.place}: {number(self.before)} -> {number(self.after)} {when}"
        if self.commits:
            kind = "commits" if ".." in self.commits else "the commit stayed"
            move += f", {kind} {self.commits}"
        others = [
            _FACT.format(name=name, old=old or "none", new=new or "none")
            for name, old, new in self.differs
        ]
        return f"{move}; {', '.join(others)}" if others else move


def explained_changes(history: Nights, measure: Measure) -> list[ExplainedChange]:
    """Return every change of a history, the latest first, then the largest."""
    floors = measure.floor
    changes = [
        _explained(change, history, measure) for change in changes_of(history.values, floors)
    ]
    return sorted(changes, key=lambda change: (change.first, abs(change.deviate)), reverse=True)


def _explained(change: Change, history: Nights, measure: Measure) -> ExplainedChange:
    old = history.runs[change.last_before][-1] if change.last_before >= 0 else None
    new = history.runs[change.first][0]
    worse = (change.after - change.before) * measure.worse > 0
    share = abs(change.after - change.before) / (abs(change.before) or 1.0)
    return ExplainedChange(
        measure=measure.name,
        place=history.places[change.series],
        first=history.nights[change.first],
        last_before=old.night if old is not None else "",
        found=history.nights[change.found],
        before=change.before,
        after=change.after,
        noise=change.noise,
        deviate=change.deviate,
        worse=worse,
        red=worse and share > measure.red,
        good=old.commit if old is not None else "",
        bad=new.commit,
        differs=_changed_facts(old, new),
    )


def _changed_facts(old: StoredRun | None, new: StoredRun) -> tuple[tuple[str, str, str], ...]:
    if old is None:
        return ()
    names = sorted({*old.facts, *new.facts})
    pairs = ((name, old.facts.get(name, ""), new.facts.get(name, "")) for name in names)
    return tuple((name, mine, theirs) for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True)
class PlaceDifference:
    """The numbers of two runs at one place; None where a run has no value there."""

    measure: str
    place: str
    first: float | None
    second: float | None

    @property
    def move(self) -> float:
        """The distance; infinite where one run has no value."""
        if self.first is None or self.second is None:
            return float("inf")
        return abs(self.second - self.first)


def place_differences(
    first: dict[str, dict[str, float]], second: dict[str, dict[str, float]]
) -> list[PlaceDifference]:
    """Compare the numbers of two runs; those that moved most come first."""
    differences = [
        PlaceDifference(measure, place, mine.get(place), theirs.get(place))
        for measure in sorted({*first, *second})
        for mine, theirs in [(first.get(measure, {}), second.get(measure, {}))]
        for place in sorted({*mine, *theirs})
    ]
    return sorted(differences, key=lambda difference: -difference.move)


def last_green(runs: Sequence[StoredRun], green: Verdict) -> StoredRun | None:
    """Return the latest run with the verdict `green`."""
    return next((run for run in reversed(runs) if run.verdict is green), None)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    plural = noun if count == 1 or noun.endswith("s") else f"{noun}s"
    return f"{count:,} {plural}"


def bands(values: Sequence[float], most: int) -> list[tuple[float, float] | None]:
    """Group neighbouring nights into at most `most` bands; return each band's least and largest."""
    line = np.asarray(values, np.float64)
    per = max(1, -(-len(line) // most))
    out: list[tuple[float, float] | None] = []
    for start in range(0, len(line), per):
        part = line[start : start + per]
        part = part[np.isfinite(part)]
        out.append((float(part.min()), float(part.max())) if len(part) else None)
    return out
