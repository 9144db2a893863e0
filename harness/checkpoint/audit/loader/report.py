"""Deduplicate findings of a loader proof that share a cause.

A skipped tensor leaves its place unwritten, and a tensor in another one's place displaces that one.
Each such pair is one finding: the consequence appears in the text of its cause.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.names import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.checkpoint.audit.loader.names import Resolved
    from degarble.harness.checkpoint.audit.loader.routes import Identity
    from degarble.harness.checkpoint.audit.loader.sources import Source
    from degarble.harness.checkpoint.audit.loader.targets import Key, Target, Truth
    from degarble.harness.model.types import Box


class Missing(NamedTuple):
    """Unwritten boxes of a parameter, with what belongs in the slots that they overlap."""

    target: Target
    boxes: tuple[Box, ...]
    empty: Mapping[Key, Truth | None]
    rank: int


def key_of(truth: Truth) -> Identity:
    """Return the identity, parameter name and part, of what belongs in a slot."""
    return truth.parameter.name, truth.part


def is_told(resolved: Resolved) -> bool:
    """Return whether an unplaced tensor gets a finding; one that another loader reads does not."""
    return resolved.outcome is not Outcome.ELSEWHERE


class Told:
    """Tensors and slots that have a finding already.

    `sources`: tensors with a finding; `taken`: tensors whose slot has one. `left`: parameters that
    a tensor leaves unwritten.
    """

    def __init__(self) -> None:
        self.sources: set[Identity] = set()
        self.taken: set[Identity] = set()
        self.left: dict[Identity, dict[str, None]] = defaultdict(dict)

    def wrong(self, source: Source, truth: Truth | None) -> None:
        """Record a wrong write: its tensor and its slot."""
        if source.parameter is not None:
            self.sources.add((source.parameter.name, source.part))
        if truth is not None:
            self.places([truth])

    def places(self, truths: Iterable[Truth]) -> None:
        """Record slots that have a finding."""
        self.taken.update(map(key_of, truths))

    def leaves(self, truths: Iterable[Truth], target: str) -> None:
        """Record a parameter that stays unwritten because of tensors that have a finding."""
        for truth in truths:
            self.left[key_of(truth)][target] = None
