"""What of a proof is told already: one cause is one finding, its consequences are in the words.

Owns the account of which stored tensors and which places have an error of their own. A tensor that
is skipped leaves its place unwritten; a tensor that lies in another one's place leaves that one
without: neither is told twice. Kept honest by suites/checkpoint/audit/loader/test_loader_faults.py.
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
    """Boxes of a parameter that nothing was sent to, and what belongs in the slots around them."""

    target: Target
    boxes: tuple[Box, ...]
    empty: Mapping[Key, Truth | None]
    rank: int


def key_of(truth: Truth) -> Identity:
    """Return the identity of what belongs in a place."""
    return truth.parameter.name, truth.part


def is_told(resolved: Resolved) -> bool:
    """Tell whether a tensor without a place has a finding: not where another loader reads it."""
    return resolved.outcome is not Outcome.ELSEWHERE


class Told:
    """Gathers what has a finding. `sources`: tensors; `taken`: those whose place has one.

    `left`: parameters that a tensor leaves unwritten.
    """

    def __init__(self) -> None:
        self.sources: set[Identity] = set()
        self.taken: set[Identity] = set()
        self.left: dict[Identity, dict[str, None]] = defaultdict(dict)

    def wrong(self, source: Source, truth: Truth | None) -> None:
        """Take in a wrong write."""
        if source.parameter is not None:
            self.sources.add((source.parameter.name, source.part))
        if truth is not None:
            self.places([truth])

    def places(self, truths: Iterable[Truth]) -> None:
        """Take in places that have a finding."""
        self.taken.update(map(key_of, truths))

    def leaves(self, truths: Iterable[Truth], target: str) -> None:
        """Take in that a parameter stays unwritten because of tensors that have a finding."""
        for truth in truths:
            self.left[key_of(truth)][target] = None
