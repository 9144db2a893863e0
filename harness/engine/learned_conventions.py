"""Learn from a run by which conventions it computes, where nobody declared them.

A value that is not the one assumed is learned only if it explains discrepancies and fits all
witnesses: every component that it concerns and that agrees with its twin under some value has to
agree under this one, and be clearly nearer to its twin: a wider budget alone explains nothing. A
component that disagrees under every value is sick and no witness; it stays a finding, and sick
components have to be the minority. A component that agrees under both values leans to the one whose
twin is clearly nearer: leaning to the assumed value is a veto. Most conventions need two witnesses:
one component alone that departs from the rest of its model is a finding, never a convention. What
was recorded without its tensors cannot testify, so nothing is learned of its role.

The search knows neither twins nor tensors: it is given components, roles, and one question.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.engine.conventions import (
    CONTRADICTED,
    DECLARED,
    LEARNED,
    REGISTRY,
    ConventionUsed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from degarble.harness.engine.conventions import Convention
    from degarble.references.numerics import Numerics

    Values = Mapping[str, Any]  # by the convention's name

LEANS = 2.0  # times the squared distance to the twin that a component is nearer to
_CHANGED = 3  # conventions of one role whose values are changed together, at most
_ASKED_FIRST = 4  # components that differ; where none of them agrees, the others are not asked


@dataclass(frozen=True)
class Learned:
    """One group of values, and the components that told them apart from the assumed ones."""

    values: Values
    witnesses: tuple[str, ...]
    sick: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fit:
    """How one component stands to its twin: judged and found right, or not, and how far off.

    `distance` is the squared length of the difference over all calls.
    """

    agrees: bool
    differs: bool
    distance: float


@dataclass
class Evidence:
    """What is known of a run: the role of each component, and how it fits under some values.

    `unknown` components were not recorded with their tensors.
    """

    roles: Mapping[str, str]
    fit: Callable[[str, Values], Fit]
    assumed: Values
    unknown: frozenset[str] = frozenset()
    _known: dict[tuple[str, tuple[tuple[str, Any], ...]], Fit] = field(default_factory=dict)

    def of(self, component: str, values: Values) -> Fit:
        """Answer once how a component fits."""
        key = component, tuple(sorted(values.items(), key=lambda pair: pair[0]))
        if key not in self._known:
            self._known[key] = self.fit(component, values)
        return self._known[key]

    def differs(self, component: str) -> bool:
        """Whether it differs from its twin under the assumed values."""
        return self.of(component, {}).differs

    def allows(self, component: str, values: Values) -> bool:
        """Whether it agrees under other values, and does not lean to the assumed ones."""
        other, own = self.of(component, values), self.of(component, {})
        return other.agrees and (own.differs or LEANS * own.distance >= other.distance)

    def supports(self, component: str, values: Values) -> bool:
        """Whether it agrees under other values, and is clearly nearer to that twin.

        A budget is not enough: where that of another value is wider, it would cover a gain as well.
        """
        other, own = self.of(component, values), self.of(component, {})
        leans = max((REGISTRY[name].leans for name in values if name in REGISTRY), default=LEANS)
        return other.agrees and leans * other.distance < own.distance

    def components(self, role: str) -> list[str]:
        """Return the components of a role, in the order of the run."""
        return [name for name, own in self.roles.items() if own == role]


@dataclass(frozen=True)
class _Option:
    """Values that fit one role: who needs them, and who is sick."""

    values: Values
    witnesses: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()


def learn(conventions: Sequence[Convention], evidence: Evidence) -> tuple[Learned, ...]:
    """Return the values that a run shows; conventions that share a component are tried together."""
    found = []
    for group in _groups(conventions, evidence):
        learned = _jointly(group, evidence)
        if learned is not None:
            found.append(learned)
    return tuple(found)


def assumed_conventions(numerics: Numerics, family: str) -> dict[str, Any]:
    """Return every convention's value by which a twin computes."""
    return {name: each.assumed(numerics, family) for name, each in REGISTRY.items()}


def conventions_used(declared: Values, evidence: Evidence) -> tuple[ConventionUsed, ...]:
    """Say which conventions a run follows: declared ones, contradicted ones, and learned ones.

    What was declared is never replaced: where the numbers fit another value, that is a finding.
    """
    open_ones = [each for each in REGISTRY.values() if each.learned and each.name not in declared]
    found = [
        ConventionUsed(name, value, LEARNED, REGISTRY[name].words(value), len(each.witnesses))
        for each in learn(open_ones, evidence)
        for name, value in each.values.items()
    ]
    held = {name: REGISTRY[name] for name in declared if REGISTRY[name].learned}
    against = {
        name: (value, len(each.witnesses))
        for each in learn(list(held.values()), evidence)
        for name, value in each.values.items()
    }
    for name, value in declared.items():
        words = REGISTRY[name].words(value)
        if name in against:
            fits, count = against[name]
            found.append(ConventionUsed(name, value, CONTRADICTED, words, count, fits))
        else:
            found.append(ConventionUsed(name, value, DECLARED, words))
    return tuple(found)


def _groups(conventions: Sequence[Convention], evidence: Evidence) -> list[list[Convention]]:
    """Put conventions together that concern a role in common that differs somewhere."""
    odd = {role for name, role in evidence.roles.items() if evidence.differs(name)}
    groups: list[list[Convention]] = []
    for convention in conventions:
        here = convention.roles & odd
        if not here or _lonely(convention, evidence):
            continue
        near = [group for group in groups if any(here & other.roles for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(each for group in near for each in group), convention])
    return groups


def _lonely(convention: Convention, evidence: Evidence) -> bool:
    """Whether too few components are there to show a convention."""
    return sum(role in convention.roles for role in evidence.roles.values()) < convention.witnesses


def _jointly(group: Sequence[Convention], evidence: Evidence) -> Learned | None:
    """Choose one option a role so that all roles have the same values, with the fewest changes."""
    present = dict.fromkeys(evidence.roles.values())
    roles = [role for role in present if any(role in each.roles for each in group)]
    odd = [role for role in roles if any(map(evidence.differs, evidence.components(role)))]
    options = [_options(role, group, evidence) for role in odd]
    best: Learned | None = None
    for chosen in product(*options):
        values = {name: value for each in chosen for name, value in each.values.items()}
        if not values or (best is not None and len(values) >= len(best.values)):
            continue
        if not _consistent(values, dict(zip(odd, chosen, strict=True)), group):
            continue
        witnesses = _witnesses(values, chosen, odd, group, evidence)
        sick = tuple(name for each in chosen for name in each.sick)
        least = max(each.witnesses for each in group if each.name in values)
        if witnesses is not None and len(witnesses) >= max(least, len(sick) + 1):
            best = Learned(values, witnesses, sick)
    return best


def _concerning(role: str, values: Values, group: Sequence[Convention]) -> dict[str, Any]:
    return {
        each.name: values[each.name] for each in group if each.name in values and role in each.roles
    }


def _consistent(values: Values, picked: Mapping[str, _Option], group: Sequence[Convention]) -> bool:
    """Whether every role has exactly the values that concern it; a sick role has no say."""
    return all(
        not option.witnesses or _concerning(role, values, group) == dict(option.values)
        for role, option in picked.items()
    )


def _witnesses(
    values: Values,
    chosen: Sequence[_Option],
    odd: Sequence[str],
    group: Sequence[Convention],
    evidence: Evidence,
) -> tuple[str, ...] | None:
    """Return all components that speak for the values; None where one speaks against them."""
    found = [name for each in chosen for name in each.witnesses]
    for name, role in evidence.roles.items():
        concerned = _concerning(role, values, group)
        if not concerned:
            continue
        if name in evidence.unknown:
            return None
        if role in odd:
            continue
        if not evidence.allows(name, concerned):
            return None
        if evidence.supports(name, concerned):
            found.append(name)
    return tuple(found)


def _options(role: str, group: Sequence[Convention], evidence: Evidence) -> list[_Option]:
    """Return the values that fit a role, those with the fewest changes first.

    Where no value fits any component that differs, all of them are sick: the role has no say.
    """
    names = evidence.components(role)
    odd = [name for name in names if evidence.differs(name)]
    found: list[_Option] = []
    for values in _changes([each for each in group if role in each.roles], evidence.assumed):
        if found and len(values) > len(found[0].values) and not found[0].sick:
            break
        if not any(evidence.allows(name, values) for name in odd[:_ASKED_FIRST]):
            continue
        if not all(evidence.allows(name, values) for name in names if name not in odd):
            continue
        good = tuple(name for name in names if evidence.supports(name, values))
        found.append(_Option(values, good, tuple(name for name in odd if name not in good)))
    # One component that fits one value and another that fits another are no single convention.
    cured = {name for each in found for name in each.witnesses}
    whole = [each for each in found if not cured & set(each.sick)]
    return whole or ([_Option(MappingProxyType({}), (), tuple(odd))] if not cured else [])


def _changes(conventions: Sequence[Convention], assumed: Values) -> Iterator[dict[str, Any]]:
    """Go through other values of one convention, then of two together, and so on."""
    others = {
        each.name: [value for value in each.values if value != assumed.get(each.name)]
        for each in conventions
    }
    for count in range(1, min(_CHANGED, len(others)) + 1):
        for names in combinations(others, count):
            for values in product(*(others[name] for name in names)):
                yield dict(zip(names, values, strict=True))
