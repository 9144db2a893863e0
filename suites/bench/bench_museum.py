"""The whole museum: every fault planted in several places, 200 healthy runs, and what was said.

Tables by strength and by family, with the targets of the product. Shares have Wilson's interval at
95 %. Only the last target is a time, so load on the machine changes no other figure. With fewer
than 15 rounds a small part is run, as a trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.museum.cases import KEYS
from degarble.harness.museum.museum import (
    WHOLE,
    MuseumExtent,
    chosen,
    effect_text,
    percent,
    run_museum,
)
from degarble.harness.museum.scores import (
    by_family,
    by_strength,
    classes,
    has_effect,
    is_missed,
)
from degarble.suites.bench.timing import Section, Settings, Table, Target

if TYPE_CHECKING:
    from degarble.harness.museum.museum import Museum
    from degarble.harness.museum.scores import MuseumScore

PACKAGES = ("torch",)
LONGEST = 3600.0  # seconds on two cores
_SMALL = MuseumExtent(plants=1, healthy=2)
_HEADER = ("plants", "localised", "cause named first", "wrong cause")


def run(settings: Settings) -> Section:
    """Run it, and say what came of it."""
    whole = settings.rounds >= Settings().rounds
    faults = chosen(()) if whole else chosen(("M10.nibble_order",))
    return section(run_museum(faults, WHOLE if whole else _SMALL, settings.threads))


def section(museum: Museum) -> Section:
    """The tables and targets of a museum."""
    strengths = tuple(
        (name, *_cells(count, three)) for name, count, *three in by_strength(museum.outcomes)
    )
    families = tuple(
        (name, *_cells(count, three))
        for name, (count, _, *three) in by_family(museum.outcomes).items()
    )
    misses = tuple(
        (each.fault, each.component, effect_text(each.effect), each.place.value, each.named or "-")
        for each in museum.outcomes
        if is_missed(each)
    )
    tables = [
        Table("By effect in units of budget", ("effect", *_HEADER), strengths),
        Table("By family, from 3x", ("family", *_HEADER), families),
    ]
    strict = tuple((s.claim.strip(), percent(s)) for s in museum.scores if s.wanted is None)
    tables.append(Table("Without classes of the same data effect", ("share", "measured"), strict))
    pairs = tuple((f"{a}, {b}", str(n)) for (a, b), n in classes(museum.outcomes).items())
    if pairs:
        tables.append(Table("Pairs that made the same of the data", ("pair", "seen"), pairs))
    if misses:
        header = ("fault", "component", "effect", "place", "named")
        tables.append(Table("Missed", header, misses))
    return Section(
        "museum", "The museum of faults", tuple(tables), _targets(museum), _notes(museum)
    )


def _cells(count: int, three: list[MuseumScore]) -> tuple[str, ...]:
    return (str(count), *(percent(each) for each in three))


def _targets(museum: Museum) -> tuple[Target, ...]:
    claims = tuple(
        Target(f"{each.claim}: {percent(each)}", each.share, each.wanted, each.at_least)
        for each in museum.scores
        if each.total and each.wanted is not None
    )
    return (*claims, Target("seconds in all", museum.seconds, LONGEST, at_least=False))


def _notes(museum: Museum) -> tuple[str, ...]:
    faults = {each.fault for each in museum.outcomes}
    effective = sum(map(has_effect, museum.outcomes))
    without = ", ".join(museum.without_effect) or "none"
    cases = ", ".join(map(str, KEYS))
    return (
        f"{len(faults)} faults planted {len(museum.outcomes)} times into {cases}",
        f"{effective} plants have an effect; without effect wherever they were planted: {without}",
        f"fewer than three plants with an effect: {', '.join(museum.thin) or 'no family'}",
        f"{len(museum.healthy)} healthy runs: seeds, lengths, batches, switches, orders, controls",
        f"{len(museum.repeats)} cases run twice: races, and healthy candidates",
        "both are the trained small models of references/tiny",
        "localised: its component is blamed and no other one; an edge is compared bit for bit",
        "named: first, or one that makes the same of the same calls is first (docs/faults.md)",
    )
