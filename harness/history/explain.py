"""Explain a history: which series moved, when, between which commits, and what else changed.

Each detected change gets its dates, the two runs between which it happened, and the facts (commit,
checkpoint, driver, versions) that differ between them. A change is red where it goes the bad way by
more than its measure allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from degarble.harness.history.changes import changes_of
from degarble.harness.report.number_text import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.history.changes import Change
    from degarble.harness.history.records import Measure
    from degarble.harness.history.rows import Told
    from degarble.harness.history.store import Nights
    from degarble.harness.report.verdict import Verdict

_COMMIT = 12  # characters of a commit that a sentence shows
_FACT = "{name} {old} -> {new}"


@dataclass(frozen=True)
class Moved:
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


def moved(history: Nights, measure: Measure) -> list[Moved]:
    """Return every change of a history, the latest first, then the largest."""
    floors = measure.floor
    found = [_told(each, history, measure) for each in changes_of(history.values, floors)]
    return sorted(found, key=lambda each: (each.first, abs(each.deviate)), reverse=True)


def _told(change: Change, history: Nights, measure: Measure) -> Moved:
    old = history.runs[change.last_before][-1] if change.last_before >= 0 else None
    new = history.runs[change.first][0]
    worse = (change.after - change.before) * measure.worse > 0
    share = abs(change.after - change.before) / (abs(change.before) or 1.0)
    return Moved(
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
        differs=_facts_apart(old, new),
    )


def _facts_apart(old: Told | None, new: Told) -> tuple[tuple[str, str, str], ...]:
    if old is None:
        return ()
    names = sorted({*old.facts, *new.facts})
    pairs = ((name, old.facts.get(name, ""), new.facts.get(name, "")) for name in names)
    return tuple((name, mine, theirs) for name, mine, theirs in pairs if mine != theirs)


@dataclass(frozen=True)
class Apart:
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


def apart(first: dict[str, dict[str, float]], second: dict[str, dict[str, float]]) -> list[Apart]:
    """Compare the numbers of two runs; those that moved most come first."""
    found = [
        Apart(measure, place, mine.get(place), theirs.get(place))
        for measure in sorted({*first, *second})
        for mine, theirs in [(first.get(measure, {}), second.get(measure, {}))]
        for place in sorted({*mine, *theirs})
    ]
    return sorted(found, key=lambda each: -each.move)


def last_green(runs: Sequence[Told], green: Verdict) -> Told | None:
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
