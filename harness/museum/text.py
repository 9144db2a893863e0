"""Render the museum's result as plain text: claims, strengths, families, and every miss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from degarble.harness.museum.plants import Cause, Place
from degarble.harness.museum.scores import (
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
    wilson,
)
from degarble.harness.report.number_text import number, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from degarble.harness.museum.museum import Museum
    from degarble.harness.museum.plants import Outcome
    from degarble.harness.museum.repeats import Repeated
    from degarble.harness.museum.scores import Score

_SHOWN = 40  # misses in the terminal; the JSON has all of them


def lines(museum: Museum) -> list[str]:
    """Return the report: what was run, the claims, the tables, the misses."""
    return [
        *_first(museum),
        *_claims(museum),
        *_tables(museum),
        *_classes(museum),
        *_misses(museum),
    ]


def percent(score: Score) -> str:
    """Return a share with its interval; a dash if nothing was counted."""
    if not score.total:
        return "-"
    low, high = wilson(score.hits, score.total)
    return f"{100 * score.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def target(score: Score) -> str:
    """Return a score's target; a dash if it has none."""
    if score.wanted is None:
        return "-"
    return f"{'>=' if score.at_least else '<='} {100 * score.wanted:g} %"


def effect(value: float) -> str:
    """Return an effect in units of budget."""
    if math.isnan(value):
        return "no budget"
    return "an edge" if math.isinf(value) else f"{number(value, 3)}x"


def _first(museum: Museum) -> Iterator[str]:
    effective = sum(map(has_effect, museum.outcomes))
    faults = len({each.fault for each in museum.outcomes})
    yield (
        f"{faults} {'fault' if faults == 1 else 'faults'} planted {len(museum.outcomes)} times, "
        f"{effective} with an effect; {len(museum.healthy)} healthy runs; "
        f"{len(museum.repeats)} run twice; {museum.seconds:.0f} s"
    )


def _claims(museum: Museum) -> Iterator[str]:
    yield ""
    for each in museum.scores:
        if each.total:
            met = "MISSED" if not each.met else "met" if each.wanted is not None else ""
            yield (
                f"  {each.claim:40} {each.hits:>5,} of {each.total:>5,}  {percent(each):26}"
                f" {target(each):8} {met}".rstrip()
            )


def _tables(museum: Museum) -> Iterator[str]:
    header = f"{'plants':>7} {'localised':26} {'named first':26} {'wrong cause':26}"
    yield from ("", f"  {'effect':10} {header}".rstrip())
    for name, count, *three in by_strength(museum.outcomes):
        yield _row(name, count, three)
    yield from ("", f"  {'from 3x':10} {header}".rstrip())
    for name, (count, _, *three) in by_family(museum.outcomes).items():
        yield _row(name, count, three)


def _row(name: str, count: int, three: Sequence[Score]) -> str:
    cells = "".join(f" {percent(each):26}" for each in three)
    return f"  {name:10} {count:>7}{cells}".rstrip()


def _classes(museum: Museum) -> Iterator[str]:
    found = classes(museum.outcomes)
    if found:
        yield from ("", "Made the same of the data, so that none can tell which of the two it is:")
        yield from (f"  {one} and {other}: {count}" for (one, other), count in found.items())


def _misses(museum: Museum) -> Iterator[str]:
    if museum.without_effect:
        names = ", ".join(museum.without_effect)
        yield from ("", f"No effect wherever it was planted, so not counted: {names}")
    if museum.thin:
        yield from ("", f"Fewer than three plants with an effect: {', '.join(museum.thin)}")
    missed = [each for each in museum.outcomes if is_missed(each)]
    for each in missed[:_SHOWN]:
        yield from ("", *_miss(each))
    if len(missed) > _SHOWN:
        yield f"... and {len(missed) - _SHOWN} more; --json has all of them"
    for run in museum.alarms:
        yield from ("", f"ALARM on a healthy run: {run.case}")
        yield from (f"  {visible(alarm)}" for alarm in run.alarms)
    for twice in museum.repeats:
        if not twice.right:
            yield from ("", *_twice(twice))


def _twice(each: Repeated) -> Iterator[str]:
    blamed = ", ".join(each.blamed[:3]) or "nobody"
    if not each.fault:
        yield f"ALARM on a healthy case that was run twice: {each.case}: {blamed}"
        return
    yield f"MISSED {each.fault} in {each.component}, run twice: {each.verdict}, blamed {blamed}"
    yield f"  planted   {visible(each.way)}; {each.case}"


def _miss(outcome: Outcome) -> Iterator[str]:
    yield f"MISSED {outcome.fault} in {outcome.component} ({effect(outcome.effect)})"
    yield f"  planted   {visible(outcome.way)}; {outcome.case}"
    if outcome.place is not Place.EXACT:
        blamed = ", ".join(outcome.blamed) or "nobody"
        yield f"  blamed    {blamed}; it is {', '.join(outcome.truth)}"
    if outcome.cause is Cause.WRONG:
        yield f"  named     {outcome.named}"
    if outcome.sentence:
        yield f"  said      {visible(outcome.sentence)}"
