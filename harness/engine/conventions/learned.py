"""Infer the undeclared arithmetic conventions of a run from how well its components fit.

A value other than the assumed one is learned only if it explains discrepancies, and if more
components show it than speak against it. A witness agrees with its twin under the value and is
clearly nearer to that twin: a wider budget alone explains nothing. A component speaks against a
value if it agrees under the assumed one and either disagrees under the other, or is clearly nearer
to the assumed twin. Outvoted, it is judged by the value that the others show: so one component that
departs from its model is a finding, whichever way it departs, and never a convention. A component
that disagrees under every value is no evidence and stays a finding, however many there are. For a
convention whose witnesses only have to agree, such components must be the minority.

Most conventions need two witnesses. One suffices where the run shows the same habit elsewhere, as
eager code that stores every result does in norms and in experts, and where it is a hundred times
nearer under the habit's value: roundings that a fault makes by chance do not fit that well. What
was recorded without its tensors cannot testify, so nothing is learned of its role.

Conventions that share a component are learned together. Each role that differs proposes the values
that cure it; then every role is judged under the union of the proposals. So a role whose numbers
one convention does not change (unquantised weights, under decoded operands) follows the other
roles, and one that needs two conventions gets both.

The search knows neither twins nor tensors, only components, roles, and the function `fit`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, combinations, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.engine.conventions.registry import (
    CONTRADICTED,
    DECLARED,
    INPUTS,
    LEARNED,
    REGISTRY,
    ConventionUsed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from degarble.harness.engine.conventions.registry import Convention
    from degarble.references.numerics import Numerics

    Values = Mapping[str, Any]  # by the convention's name
    _Key = tuple[str, tuple[tuple[str, Any], ...]]

LEANS = 2.0  # factor between squared distances that makes a twin clearly nearer
_PLAINLY = 100.0  # the same factor for a witness that is the only one: a tenth of the length
_CHANGED = 3  # conventions of one role whose values are changed together, at most
_APART = frozenset({INPUTS})  # that may be changed beside these: which numbers are multiplied
_COSTLY = frozenset({"traced.experts"})  # roles whose values are changed one after the other
_CLIMBED = 2  # of their differing components, the nearest
_ASKED_FIRST = 4  # differing components tried first, nearest first; if none agrees, skip the others


@dataclass(frozen=True)
class LearnedConvention:
    """A value that is not the assumed one, and the components that tell the two apart."""

    name: str
    value: Any
    witnesses: tuple[str, ...]


@dataclass(frozen=True)
class ConventionFit:
    """How one component compares with its twin: the verdict and the distance.

    Both flags are false where it could not be judged. `distance` is the squared length of the
    difference over all calls. Where single codes may legally step, a few rows make up most of it;
    `unlike` is then the share of outputs that are not equal.
    """

    agrees: bool
    differs: bool
    distance: float
    unlike: float = math.inf


@dataclass
class ConventionEvidence:
    """The components of a run with their roles, and how each fits under given values.

    `unknown` components were recorded without their tensors; those that are not `is_coded` hold and
    take nothing in codes. `gap` returns a fit without a verdict, which costs a part of one with it:
    its distances are those of `fit` where this one agrees. None: they may be others. `announce`
    is called with components that will be looked at next, so that they can be judged at once.
    `formats` are those of the recipe, None where it is not known; `ranks` shared the run.
    """

    roles: Mapping[str, str]
    fit: Callable[[str, Values], ConventionFit]
    assumed: Values
    unknown: frozenset[str] = frozenset()
    announce: Callable[[Sequence[str], Values], None] = lambda _components, _values: None
    is_coded: Callable[[str], bool] = lambda _component: True
    gap: Callable[[str, Values], ConventionFit | None] = lambda _component, _values: None
    formats: frozenset[str] | None = None
    ranks: int = 1
    _known: dict[_Key, ConventionFit] = field(default_factory=dict)
    _gaps: dict[_Key, ConventionFit | None] = field(default_factory=dict)

    def fit_of(self, component: str, values: Values) -> ConventionFit:
        """Return how a component fits; cached."""
        key = _key(component, values)
        if key not in self._known:
            self._known[key] = self.fit(component, values)
        return self._known[key]

    def may_show(self, convention: Convention) -> bool:
        """Tell whether the run has a format, or ranks, that a convention is about."""
        if convention.of_ranks and self.ranks == 1:
            return False
        known = self.formats is None or not convention.formats
        return known or not convention.formats.isdisjoint(self.formats or ())

    def differs(self, component: str) -> bool:
        """Tell whether it differs from its twin under the assumed values."""
        return self.fit_of(component, {}).differs

    def allows(self, component: str, values: Values) -> bool:
        """Tell whether it agrees under other values without clearly preferring the assumed ones."""
        other, own = self.fit_of(component, values), self.fit_of(component, {})
        return other.agrees and (own.differs or LEANS * own.distance >= other.distance)

    def supports(
        self, component: str, values: Values, without: Values = MappingProxyType({})
    ) -> bool:
        """Tell whether it agrees under these values, and is clearly nearer than under `without`.

        Agreement is not enough: a wider budget under another value would cover a gain as well.
        """
        other, own = self.fit_of(component, values), self.fit_of(component, without)
        return other.agrees and _is_nearer(other, own, values)

    def may_support(self, component: str, values: Values) -> bool:
        """Tell whether it supports these values should it agree; no budget is derived."""
        other = self._compared(component, values)
        return other is None or _is_nearer(other, self.fit_of(component, {}), values)

    def nearness(self, component: str, own: ConventionFit, values: Values) -> float:
        """Return what is left of a distance; a budget is derived only where it has to be."""
        return _nearness(self._compared(component, values) or self.fit_of(component, values), own)

    def _compared(self, component: str, values: Values) -> ConventionFit | None:
        key = _key(component, values)
        if key not in self._known and key not in self._gaps:
            self._gaps[key] = self.gap(component, values)
        return self._known.get(key) or self._gaps[key]

    def components(self, role: str) -> list[str]:
        """Return the components of a role, in the order of the run."""
        return [name for name, own in self.roles.items() if own == role]


def _key(component: str, values: Values) -> _Key:
    return component, tuple(sorted(values.items(), key=lambda pair: pair[0]))


def _is_nearer(other: ConventionFit, own: ConventionFit, values: Values) -> bool:
    leans = max((REGISTRY[name].leans for name in values if name in REGISTRY), default=LEANS)
    return leans * other.distance < own.distance or leans * other.unlike < own.unlike


def _nearness(other: ConventionFit, own: ConventionFit) -> float:
    """Return which share of a distance, or of the outputs that are not equal, is left.

    Once few outputs differ, a code that steps in one row may be all of the distance.
    """
    pairs = ((other.distance, own.distance), (other.unlike, own.unlike))
    return min((a / b for a, b in pairs if 0 < b < math.inf), default=math.inf)


def learn(
    conventions: Sequence[Convention], evidence: ConventionEvidence, declared: Iterable[str] = ()
) -> tuple[LearnedConvention, ...]:
    """Return the values that a run shows; among equal explanations keep `declared` ones."""
    found: list[LearnedConvention] = []
    for group in _groups(conventions, evidence):
        found += _Search(group, evidence, frozenset(declared), tuple(found)).learned()
    return tuple(found)


def assumed_conventions(numerics: Numerics, family: str) -> dict[str, Any]:
    """Return the value of every convention by which a twin computes."""
    return {name: convention.assumed(numerics, family) for name, convention in REGISTRY.items()}


def conventions_used(declared: Values, evidence: ConventionEvidence) -> tuple[ConventionUsed, ...]:
    """Return the conventions that a run follows: declared, contradicted and learned ones.

    A declared value is never replaced: where the numbers fit another value, that is a finding.
    """
    shown = (e for e in REGISTRY.values() if e.learned and evidence.may_show(e))
    learnable = [e.among_ranks(evidence.ranks) for e in shown]
    conventions = learn(learnable, evidence, declared)
    used = [
        ConventionUsed(e.name, e.value, LEARNED, REGISTRY[e.name].words(e.value), len(e.witnesses))
        for e in conventions
        if e.name not in declared
    ]
    against = {e.name: (e.value, len(e.witnesses)) for e in conventions if e.name in declared}
    for name, value in declared.items():
        words = REGISTRY[name].words(value)
        if name in against:
            fits, count = against[name]
            used.append(ConventionUsed(name, value, CONTRADICTED, words, count, fits))
        else:
            used.append(ConventionUsed(name, value, DECLARED, words))
    return tuple(used)


def _groups(
    conventions: Sequence[Convention], evidence: ConventionEvidence
) -> list[list[Convention]]:
    """Group conventions that share a role; keep only those that concern a differing component."""
    present = frozenset(evidence.roles.values())
    # Roles with a component that differs; conventions of other roles explain nothing.
    odd = {role for name, role in evidence.roles.items() if evidence.differs(name)}
    groups: list[list[Convention]] = []
    for convention in conventions:
        if not convention.roles & odd or _lonely(convention, evidence):
            continue
        if convention.of_codes and not _finds_codes(convention, evidence):
            continue
        here = convention.roles & present
        # Groups that share a role present in the run are merged.
        near = [group for group in groups if any(here & other.roles for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(each for group in near for each in group), convention])
    return groups


def _finds_codes(convention: Convention, evidence: ConventionEvidence) -> bool:
    roles = evidence.roles.items()
    return any(evidence.is_coded(name) for name, role in roles if role in convention.roles)


def _lonely(convention: Convention, evidence: ConventionEvidence) -> bool:
    """Tell whether a convention concerns too few components to be learned."""
    needed = 1 if convention.habit else convention.witnesses
    return sum(role in convention.roles for role in evidence.roles.values()) < needed


@dataclass(frozen=True)
class _Stand:
    """How the components of a role react to values: cured, still different, or against them."""

    witnesses: tuple[str, ...] = ()
    sick: tuple[str, ...] = ()
    against: tuple[str, ...] = ()


class _Search:
    """The search for the values of conventions that share roles."""

    def __init__(
        self,
        group: Sequence[Convention],
        evidence: ConventionEvidence,
        declared: frozenset[str],
        earlier: Sequence[LearnedConvention] = (),
    ) -> None:
        self._group, self._evidence, self._declared = group, evidence, declared
        self._earlier = {learned.name: learned.witnesses for learned in earlier}
        present = dict.fromkeys(evidence.roles.values())
        self._roles = [
            role for role in present if any(role in convention.roles for convention in group)
        ]
        self._odd = [
            role for role in self._roles if any(map(evidence.differs, evidence.components(role)))
        ]

    def learned(self) -> list[LearnedConvention]:
        """Return the values that leave the fewest components sick, and of these the fewest changes.

        A value that cures a role by chance hides the true ones, if other roles are against it. So a
        role that is left sick proposes again, up to all its changes.
        """
        deep: set[str] = set()
        while True:
            values, conventions = self._best(deep)
            against = any(self._against(role, values) for role in self._roles)
            left = {role for role in self._odd if against or self._is_sick(role, values)} - deep
            if not left:
                return conventions
            deep |= left

    def _best(self, deep: set[str]) -> tuple[Values, list[LearnedConvention]]:
        ranked: list[tuple[int, int, int, dict[str, Any]]] = []
        for values in self._unions(deep):
            stands = [self._stand(role, self._concerning(role, values)) for role in self._odd]
            if all(stands):
                sick = sum(len(stand.sick) for stand in stands if stand is not None)
                sick += sum(len(self._against(role, values)) for role in self._roles)
                # Prefer few sick components, then declared values unchanged, then few changes.
                ranked.append((sick, len(values.keys() & self._declared), len(values), values))
        for *_, values in sorted(ranked, key=lambda each: each[:3]):
            found = self._witnesses_of(values)
            if found is not None:
                return values, found
        return {}, []

    def _is_sick(self, role: str, values: Values) -> bool:
        stand = self._stand(role, self._concerning(role, values))
        return stand is None or bool(stand.sick)

    def _against(self, role: str, values: Values) -> tuple[str, ...]:
        stand = self._stand(role, self._concerning(role, values))
        return () if stand is None else stand.against

    def _unions(self, deep: set[str]) -> list[dict[str, Any]]:
        """Join the roles' proposals in every way without a contradiction; each role may abstain."""
        unions: list[dict[str, Any]] = [{}]
        for role in self._odd:
            for proposed in self._proposals(role, unions, deep=role in deep):
                for known in tuple(unions):
                    if all(known.get(name, value) == value for name, value in proposed.items()):
                        joined = {**known, **proposed}
                        if joined not in unions:
                            unions.append(joined)
        return unions

    def _proposals(self, role: str, shown: Sequence[Values], *, deep: bool) -> list[Values]:
        """Return the values that cure components of a role, those with the fewest changes first.

        Unless `deep`, stop at the number of changes that cures all of them; what other roles have
        shown is tried first, alone and with one change more.
        """
        evidence = self._evidence
        conventions = [e for e in self._group if role in e.roles]
        costly = role in _COSTLY
        found: list[Values] = []
        if costly or not deep:
            first = self._climbed if costly else self._beside
            for values in first(role, conventions, shown):
                stand = self._stand(role, values)
                if stand is None or not stand.witnesses:
                    continue
                if not (deep or stand.sick or stand.against):
                    return [values]
                found += [values] if costly else []
        odd = self._nearest(role)
        nearest_first = [*odd, *(n for n in evidence.components(role) if n not in odd)]
        cured = 0  # changes after which no component of the role stays sick
        changes = _changes(conventions, evidence.assumed, 1 if costly else None)
        if costly:  # one at a time, but habits together, and ranks' parts with them
            several = [e for e in conventions if e.habit or e.of_ranks]
            changes = chain(changes, _changes(several, evidence.assumed))
        for values in changes:
            if cured and len(values) > cured and not deep:
                break
            # Without a component that is nearer there is no witness, whatever the budgets say.
            if not any(evidence.may_support(name, values) for name in nearest_first):
                continue
            if not any(evidence.allows(name, values) for name in odd[:_ASKED_FIRST]):
                continue
            stand = self._stand(role, values)
            if stand is not None and stand.witnesses:
                found.append(values)
                cured = cured or (0 if stand.sick or stand.against else len(values))
        return found

    def _climbed(
        self,
        role: str,
        conventions: Sequence[Convention],
        shown: Sequence[Values],
    ) -> Iterator[Values]:
        """Yield values with which a component agrees, changed one by one, the nearest first.

        Independent roundings add up, so each true value brings the twin nearer: the largest first.
        """
        evidence = self._evidence
        bases = {str(base): base for base in (self._concerning(role, each) for each in shown)}
        nested = sorted(bases.values(), key=len, reverse=True)
        for name, base in product(self._nearest(role)[:_CLIMBED], nested):
            values, near = base, evidence.fit_of(name, base)
            while not near.agrees:
                others = [
                    {**values, **change}
                    for change in _changes(
                        [e for e in conventions if e.name not in values], evidence.assumed, most=1
                    )
                    if not any(e.idle & values.keys() for e in conventions if e.name in change)
                ]
                if not others:
                    break
                best = min(others, key=partial(evidence.nearness, name, near))
                nearer = evidence.fit_of(name, best)
                if LEANS * _nearness(nearer, near) > 1:
                    break
                values, near = best, nearer
            if near.agrees and values:
                yield values
                return

    def _nearest(self, role: str) -> list[str]:
        """Return the differing components of a role, the nearest to its twin first."""
        evidence = self._evidence
        odd = [name for name in evidence.components(role) if evidence.differs(name)]
        return sorted(odd, key=lambda name: evidence.fit_of(name, {}).distance)

    def _beside(
        self, role: str, conventions: Sequence[Convention], shown: Sequence[Values]
    ) -> Iterator[Values]:
        """Yield what other roles have shown and concerns a role, alone and with one change more."""
        assumed = self._evidence.assumed
        for values in shown:
            base = self._concerning(role, values)
            if base:
                yield base
                others = [e for e in conventions if e.name not in base]
                for change in _changes(others, assumed, most=1):
                    yield {**base, **change}

    def _concerning(self, role: str, values: Values) -> dict[str, Any]:
        return {e.name: values[e.name] for e in self._group if e.name in values and role in e.roles}

    def _stand(self, role: str, values: Values) -> _Stand | None:
        """Return how a role reacts to values; None where one of its components cannot testify."""
        evidence, names = self._evidence, self._evidence.components(role)
        odd = [name for name in names if evidence.differs(name)]
        if not values:
            return _Stand(sick=tuple(odd))
        # Recorded without tensors: these components could contradict, so nothing is learned.
        if any(name in evidence.unknown for name in names):
            return None
        evidence.announce(names, values)
        good = tuple(name for name in names if evidence.supports(name, values))
        return _Stand(
            good,
            tuple(name for name in odd if name not in good),
            tuple(n for n in names if n not in odd and not evidence.allows(n, values)),
        )

    def _witnesses_of(self, values: Values) -> list[LearnedConvention] | None:
        """Return the witnesses of each value; None where one has too few, or cannot be judged."""
        stands = {role: self._stand(role, self._concerning(role, values)) for role in self._roles}
        shown: dict[str, tuple[str, ...]] = {}
        outvoted: dict[str, int] = {}
        for convention in self._group:
            if convention.name not in values:
                continue
            own = [stands[role] for role in self._roles if role in convention.roles]
            known = [stand for stand in own if stand is not None]
            if len(known) < len(own):
                return None
            shown[convention.name] = tuple(
                n for stand in known for n in stand.witnesses
                if self._shows(n, convention.name, values)
            )  # fmt: skip
            outvoted[convention.name] = sum(
                len(stand.against) + (len(stand.sick) if convention.leans < LEANS else 0)
                for stand in known
            )
        for convention in self._group:
            if convention.name in values:
                names = shown[convention.name]
                plain = self._is_plain(convention, names, values)
                needed = 1 if plain or self._is_habit(convention, shown) else convention.witnesses
                if len(names) < max(needed, outvoted[convention.name] + 1):
                    return None
        return [LearnedConvention(name, values[name], found) for name, found in shown.items()]

    def _is_habit(self, convention: Convention, shown: Mapping[str, tuple[str, ...]]) -> bool:
        """Tell whether the run shows the habit of a convention in another one as well."""
        return convention.habit != "" and any(
            REGISTRY[name].habit == convention.habit and len(found) >= REGISTRY[name].witnesses
            for name, found in {**self._earlier, **shown}.items()
            if name != convention.name and name in REGISTRY
        )

    def _is_plain(self, convention: Convention, shown: Sequence[str], values: Values) -> bool:
        """Tell whether a component shows a habit so well that it needs no second one."""
        return convention.habit != "" and any(
            _PLAINLY * self._evidence.fit_of(name, concerned).distance
            < self._evidence.fit_of(name, others).distance
            for name in shown
            for concerned, others in (self._with_and_without(name, convention.name, values),)
        )

    def _with_and_without(
        self, component: str, name: str, values: Values
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values that concern a component, and these without one of them."""
        concerned = self._concerning(self._evidence.roles[component], values)
        return concerned, {other: value for other, value in concerned.items() if other != name}

    def _shows(self, component: str, name: str, values: Values) -> bool:
        """Tell whether a component is clearly nearer with this value than with only the others."""
        concerned, others = self._with_and_without(component, name, values)
        return not others or self._evidence.supports(component, concerned, others)


def _changes(
    conventions: Sequence[Convention], assumed: Values, most: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield other values of one convention, then of two together, and so on."""
    others = {
        convention.name: [
            value for value in convention.values if value != assumed.get(convention.name)
        ]
        for convention in conventions
    }
    most = _CHANGED + len(_APART & others.keys()) if most is None else most
    for count in range(1, min(most, len(others)) + 1):
        for names in combinations(others, count):
            if any(e.idle & set(names) for e in conventions if e.name in names):
                continue
            for values in product(*(others[name] for name in names)):
                yield dict(zip(names, values, strict=True))
