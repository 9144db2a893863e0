"""Collect which boxes of stored tensors any rank reads: the source side of a loader proof.

Experts of a stack that are read alike are kept as one range of numbers, and expanded only when one
of them is looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.checkpoint.audit.loader.boxes import cover

if TYPE_CHECKING:
    from degarble.harness.checkpoint.audit.loader.routes import Placed
    from degarble.harness.checkpoint.audit.loader.sources import Source
    from degarble.harness.model.types import Box

Slot = tuple[str, int | None]  # a parameter by name, and the slot that a rule names


class Reads:
    """The boxes that ranks read, merged over ranks."""

    def __init__(self) -> None:
        self._alone: dict[tuple[str, Box | None], tuple[Box, ...]] = {}
        self._alike: dict[Slot, dict[range | None, tuple[Box, ...]]] = {}
        self._by_expert: dict[Slot, dict[int | None, tuple[Box, ...]]] = {}

    def add(self, source: Source, box: Box) -> None:
        """Add one box of one tensor."""
        key = source.name, source.inside
        known = self._alone.get(key, ())
        if box not in known:
            self._alone[key] = (*known, box)

    def add_alike(self, slot: Slot, experts: range | None, box: Box) -> None:
        """Add the same box of the tensors of a range of experts; None: of the one tensor."""
        by_range = self._alike.setdefault(slot, {})
        known = by_range.get(experts, ())
        if box not in known:
            by_range[experts] = (*known, box)

    def missing(self, target: str, expert: int | None, placed: Placed) -> tuple[Box, ...]:
        """Return the boxes of a placed tensor that no rank reads."""
        source = placed.source
        alike = self._alike_of((target, placed.slot)).get(expert, ())
        alone = self._alone.get((source.name, source.inside), ())
        return cover(source.shape, alike + alone).missing

    def _alike_of(self, slot: Slot) -> dict[int | None, tuple[Box, ...]]:
        if slot not in self._by_expert:
            found: dict[int | None, tuple[Box, ...]] = {}
            for experts, boxes in self._alike.get(slot, {}).items():
                # Ranks have the same experts or none in common, so no number comes twice.
                found.update(dict.fromkeys((None,) if experts is None else experts, boxes))
            self._by_expert[slot] = found
        return self._by_expert[slot]
