"""Record which kernel and tactic computed each component, and why a reference did otherwise.

Launches are counted by component while the run lasts. The table goes into manifests and is printed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_WIDTH = 26  # of a role


class Launch(NamedTuple):
    """One launch: the stem of the kernel's file, and the tactic or form that was chosen."""

    kernel: str
    tactic: str

    def __str__(self) -> str:
        return f"{self.kernel} [{self.tactic}]" if self.tactic else self.kernel


@dataclass
class KernelTable:
    """Launches by component, and reasons of components without a kernel."""

    target: str
    reasons: Mapping[str, str]
    launches: dict[str, Counter[Launch]] = field(default_factory=dict)

    def note(self, component: str, launches: Iterable[Launch]) -> None:
        """Count what a component's call launched."""
        self.launches.setdefault(component, Counter()).update(launches)

    def components_by(self, kernel: str) -> list[str]:
        """Components that a kernel computed, alone or with others."""
        return [
            component
            for component, counted in self.launches.items()
            if any(launch.kernel == kernel for launch in counted)
        ]

    def document(self) -> dict[str, Any]:
        """Return kernels with their calls, and reasons, by component, as JSON."""
        kernels = {
            component: [
                {"kernel": launch.kernel, "tactic": launch.tactic, "launches": count}
                for launch, count in sorted(counted.items())
            ]
            for component, counted in self.launches.items()
        }
        return {"target": self.target, "kernels": kernels, "reference": dict(self.reasons)}

    def lines(self) -> list[str]:
        """Format the table by role."""
        return table_lines(self.document())


def table_lines(document: Mapping[str, Any]) -> list[str]:
    """Format a manifest's table: one line for each role and set of kernels, or a role's reason."""
    lines = [f"Kernels on {document.get('target', 'an unknown target')}, by component:"]
    lines += [f"  {role:<{_WIDTH}} {words}" for role, words in kernels_by_role(document).items()]
    reasons = _mapping(document, "reference")
    for role, members in _by_role(reasons).items():
        why = dict.fromkeys(reasons[name] for name in members)
        lines += [f"  {role:<{_WIDTH}} reference: {reason}" for reason in why]
    return lines


def kernels_by_role(document: Mapping[str, Any]) -> dict[str, str]:
    """Kernels with tactics and counts of launches, of each role."""
    kernels, found = _mapping(document, "kernels"), {}
    for role, members in _by_role(kernels).items():
        counted: Counter[str] = Counter()
        for name in members:
            for each in kernels[name]:
                counted[str(Launch(each["kernel"], each["tactic"]))] += each["launches"]
        words = ", ".join(f"{launch} x{count}" for launch, count in counted.items())
        found[role] = words or "not called"
    return found


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, dict) else {}


def _by_role(components: Iterable[str]) -> dict[str, Sequence[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for component in components:
        found[Site(component, Port.OUT).role].append(component)
    return dict(found)
