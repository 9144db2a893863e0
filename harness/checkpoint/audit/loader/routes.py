"""Route every stored tensor to a parameter under a loader map, by name alone.

Each tensor is identified, converted if a rule says so, and resolved by the name rules. Placed
tensors are kept by parameter and expert. Unplaced ones are kept by identity, so that the finding on
an unwritten parameter can name the tensor that should have filled it, and its outcome.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.names import NameRules, Outcome
from degarble.harness.checkpoint.audit.loader.sources import Conversions, identified
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from degarble.harness.checkpoint.audit.loader.findings import LoaderFindings
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.loader.names import Resolved
    from degarble.harness.checkpoint.audit.loader.sources import Conversion, Source
    from degarble.harness.checkpoint.audit.loader.targets import Truth
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.storage import Part

Identity = tuple[str, "Part | None"]  # of a parameter by name


class Placed(NamedTuple):
    """A source with its destination slot. `slot` None: the whole parameter."""

    source: Source
    slot: int | None


class Routes:
    """Destinations of all stored tensors. `known`: names of the engine's parameters."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        loader_map: LoaderMap,
        inventory: Inventory | None,
        known: Container[str],
        findings: LoaderFindings,
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.placed: dict[str, dict[int | None, list[Placed]]] = {}
        self.lost: dict[Identity, tuple[Source, Resolved]] = {}
        self.converted: dict[str, Conversion | None] = {}  # by parameter
        self._table = checkpoint.table
        self._inventory = inventory
        self._findings = findings
        self._rules = NameRules(loader_map, known)
        self._conversions = Conversions(loader_map, checkpoint.table)
        self._reasons = {each.match: each.reason for each in loader_map.elsewhere}
        self._converts = bool(loader_map.convert)

    def follow(self) -> None:
        """Route every stored tensor, and the tensors that conversions make."""
        for source in identified(self._table, self._inventory):
            conversion = self._conversion_of(source)
            if conversion is not None and source.part in conversion.reads:
                self.outcomes[source.name] = Outcome.CONVERTED
            else:
                self.outcomes[source.name] = self._place(source, needed=conversion is None)
        for conversion in self.converted.values():
            if conversion is not None:
                self._findings.conversion(conversion)
                for source in self._conversions.made(conversion):
                    self._place(source, needed=True)

    def dead(self) -> list[tuple[str, str]]:
        """Return (kind, pattern) of the rules that matched nothing."""
        return self._rules.dead() + self._conversions.dead()

    def leading_to(self, tensor: str) -> set[str]:
        """Return the parameters to which a stored tensor is sent."""
        return {
            target
            for target, by_expert in self.placed.items()
            for group in by_expert.values()
            for source, _ in group
            if tensor == source.name or tensor in source.made_from
        }

    def all_placed(self) -> Iterator[tuple[str, int | None, Placed]]:
        """Yield (parameter, expert, source with slot) for every source that is placed."""
        for target, by_expert in self.placed.items():
            for expert, group in by_expert.items():
                for placed in group:
                    yield target, expert, placed

    def fate(self, truth: Truth) -> str:
        """Describe the outcome of the tensor that belongs in a slot."""
        key = (truth.parameter.name, truth.part)
        if key in self.lost:
            source, resolved = self.lost[key]
            return f"{shown(source.name)} belongs there and is {resolved.outcome}"
        return self._places.get(key, f"the checkpoint has no {key[1]} of {key[0]}")

    @cached_property
    def _places(self) -> Mapping[Identity, str]:
        """Describe, for every placed tensor by identity, where it goes."""
        return {
            (source.parameter.name, source.part): f"{shown(source.name)} belongs there and goes to"
            f" {shown(target)}"
            for target, by_expert in self.placed.items()
            for group in by_expert.values()
            for source, _ in group
            if source.parameter is not None
        }

    def _conversion_of(self, source: Source) -> Conversion | None:
        if not self._converts or source.parameter is None or self._inventory is None:
            return None
        if source.inside is not None:
            return None  # a fused tensor is loaded as it is
        name = source.parameter.name
        if name not in self.converted:
            self.converted[name] = self._conversions.of(self._inventory.by_name[name])
        return self.converted[name]

    def _place(self, source: Source, *, needed: bool) -> Outcome:
        """Route one source; `needed` False: a conversion does not read it."""
        resolved = self._rules.resolve(source.name)
        if resolved.outcome is Outcome.PLACED:
            expert, slot = resolved.expert, resolved.slot
            # A stored fused tensor goes to the engine's fused parameter slot by slot.
            if source.inside is not None and slot is None and source.parameter is not None:
                expert, slot = source.parameter.expert, source.order
            by_expert = self.placed.setdefault(resolved.target, {})
            by_expert.setdefault(expert, []).append(Placed(source, slot))
        elif resolved.outcome is Outcome.ELSEWHERE:
            reason = self._reasons[resolved.by]
            self._findings.elsewhere(resolved.by, reason)
            if source.parameter is not None:
                self.lost[source.parameter.name, source.part] = (source, resolved)
        elif source.parameter is None:
            self._findings.none_of_ours(source, resolved)
        elif needed:
            self.lost[source.parameter.name, source.part] = (source, resolved)
        return resolved.outcome
