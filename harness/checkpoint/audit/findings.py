"""Define findings (broken rule, place, evidence, remedy) and the table RULES of all audit rules.

Similar findings are merged: a rule broken in many experts of one layer is one finding, with a count
and its first examples, because a checkpoint has 300,000 tensors. Numbers and names in a finding
come from files, so they are shown bounded and printable.

To add a rule, define it in rules.py or value_rules.py. docs/audit.md lists RULES.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.checkpoint.audit import rules, value_rules
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.audit.rules import AuditRule, Level


def _table(*tables: tuple[AuditRule, ...]) -> Mapping[str, AuditRule]:
    found: dict[str, AuditRule] = {}
    for rule in (rule for table in tables for rule in table):
        assert rule.id not in found, f"two rules are called {rule.id}"
        found[rule.id] = rule
    return MappingProxyType(found)


RULES: Mapping[str, AuditRule] = _table(rules.STRUCTURE_RULES, value_rules.VALUE_RULES)

_EXAMPLES = 8
_EXPERT = re.compile(r"(\bexperts\.)(\d{1,9})(?!\d)")
_NUMBER = re.compile(r"\d+")
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")  # of a layer or an expert; not the digit of `w1`


class FindingLocation(NamedTuple):
    """The tensor, module and layer of a finding. A drafter's layer follows the decoder's.

    With a layer, findings of that layer which differ only in the expert are merged; without, those
    of all layers. `spread`: a cause common to several layers; its findings whose names differ only
    in indices are merged into one, which lists the layers.
    """

    tensor: str | None = None
    module: str | None = None
    layer: int | None = None
    spread: str | None = None


NOWHERE = FindingLocation()


@dataclass(frozen=True)
class Finding:
    """A broken rule: at one place, or at `count` places that differ only in their indices.

    `tensor`, `module` and `message` describe the first; `evidence` has examples of the others.
    `by_layer`: how many in each layer, where one cause spans several; `layer` is None then.
    """

    level: Level
    rule: str
    tensor: str | None
    module: str | None
    layer: int | None
    message: str
    evidence: Mapping[str, Any]
    remedy: str
    count: int = 1
    by_layer: Mapping[int, int] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers that the finding covers."""
        alone = () if self.layer is None else (self.layer,)
        return tuple(sorted(self.by_layer)) or alone

    def to_json(self) -> dict[str, Any]:
        """Return plain data for a JSON report."""
        return {
            "level": str(self.level),
            "rule": self.rule,
            "tensor": self.tensor,
            "module": self.module,
            "layer": self.layer,
            "layers": list(self.layers),
            "message": self.message,
            "evidence": dict(self.evidence),
            "remedy": self.remedy,
            "count": self.count,
        }


@dataclass
class _Group:
    """Similar findings, merged while they are collected."""

    rule: AuditRule
    first: FindingLocation
    message: str
    remedy: str
    evidence: Mapping[str, Any]
    count: int = 0
    examples: list[str] = field(default_factory=list)
    experts: set[int] = field(default_factory=set)
    layers: Counter[int] = field(default_factory=Counter)


class Findings:
    """Collector that merges similar findings; `sorted()` returns them, the worst first."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int | None, str], _Group] = {}

    def add(
        self,
        rule: AuditRule,
        place: FindingLocation,
        message: str,
        remedy: str,
        /,
        **evidence: object,
    ) -> None:
        """Add one finding; of similar ones, message and evidence of the first are kept."""
        assert RULES.get(rule.id) is rule, f"{rule.id} is in no table of RULES"
        name = place.tensor or place.module or ""
        anywhere = place.layer is None or place.spread is not None
        numbers = _NUMBER if place.spread is None else _INDEX
        # Names that differ only in the replaced indices share a key, and so a finding.
        alike = numbers.sub("*", name) if anywhere else _EXPERT.sub(r"\1*", name)
        layer = None if anywhere else place.layer
        key = (rule.id, layer, f"{alike or message} {place.spread or ''}")
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(rule, place, message, remedy, evidence)
        group.count += 1
        if name and len(group.examples) < _EXAMPLES:
            group.examples.append(shown(name))
        if place.spread is not None and place.layer is not None:
            group.layers[place.layer] += 1
        expert = _EXPERT.search(name)
        if expert:
            group.experts.add(int(expert[2]))

    def sorted(self) -> list[Finding]:
        """Return the findings: by level, rule, layer and name."""
        return in_order(map(_told, self._groups.values()))


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings for reading: by level, rule, layer and name."""
    return sorted(
        findings,
        key=lambda finding: (
            finding.level.weight,
            finding.rule,
            -1 if finding.layer is None else finding.layer,
            finding.tensor or finding.module or "",
        ),
    )


def _told(group: _Group) -> Finding:
    place, evidence, message = group.first, dict(group.evidence), group.message
    if group.count > 1:
        evidence["examples"] = group.examples
        message += f" And {group.count - 1} more like it"
        message += f", experts {format_ranges(group.experts)}" if group.experts else ""
        message += f", layers {format_ranges(group.layers)}." if len(group.layers) > 1 else "."
    return Finding(
        group.rule.level,
        group.rule.id,
        place.tensor and shown(place.tensor),
        place.module and shown(place.module),
        None if len(group.layers) > 1 else place.layer,
        message,
        MappingProxyType(evidence),
        group.remedy,
        group.count,
        MappingProxyType(dict(group.layers) if len(group.layers) > 1 else {}),
    )


def format_ranges(numbers: Iterable[int]) -> str:
    """Return a set of numbers as text, by its runs: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
