"""Diagnose equal discrepancies once: what explains one component is tried first on those like it.

Thirty layers with one fault differ in thirty components. The first of them is searched through all
known faults; the others are proved with what explains it, each on its own calls. What it does not
explain is searched by itself.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from degarble.harness.engine.diagnose.diagnose import Diagnosed, diagnose
from degarble.harness.engine.faults.registry import faults_for
from degarble.harness.engine.faults.weight_faults import kept

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from degarble.harness.engine.faults.model_faults import CallRecord, ModelFault
    from degarble.harness.engine.localise.discrepancy import Discrepancy

_NOT_SEARCHED = (
    "Its cause was not searched: none of the causes of {} earlier origins is its own. Mend those"
    " first, and check again."
)


class Representatives:
    """The discrepancies of a run that were diagnosed so far, by what a cause depends on.

    At most `most` of them are searched; after that, only what explains an earlier one is tried.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self._left = self._most = most
        self._known: dict[Hashable, dict[str, tuple[str, Diagnosed]]] = {}

    def diagnose(self, discrepancy: Discrepancy) -> Diagnosed:
        """Return the diagnosis of a discrepancy that has a record."""
        known = self._known.setdefault(_form(discrepancy), {})
        for component, earlier in known.values():
            told = diagnose(
                discrepancy.context, _records(discrepancy), _faults_of(discrepancy, earlier)
            )
            if told.named and told.named[0].id == earlier.named[0].id:
                return replace(told, like=component)
        if not self._left:
            return Diagnosed((), (), 0, _NOT_SEARCHED.format(self._most))
        self._left -= 1
        told = diagnose(discrepancy.context, _records(discrepancy))
        if told.named:
            known.setdefault(told.named[0].id, (discrepancy.component, told))
        return told


def _records(discrepancy: Discrepancy) -> list[CallRecord]:
    assert discrepancy.record is not None, "a call that is missing has no cause to search"
    return [discrepancy.record, *discrepancy.more]


def _form(discrepancy: Discrepancy) -> Hashable:
    """Return what causes depend on: the role, what is wrong, how weights are stored, which part."""
    stored = tuple(
        (weight.form.name if weight.form else "", weight.stored, weight.shape)
        for weight in kept(discrepancy.context)
    )
    where = frozenset(discrepancy.where)
    return discrepancy.context.role, discrepancy.kind, discrepancy.name, stored, where


def _faults_of(discrepancy: Discrepancy, earlier: Diagnosed) -> Iterable[ModelFault]:
    """Return the faults of the first cause, and those that explained as much."""
    first = earlier.named[0]
    ids = {name for text in (first.id, *first.alternatives) for name in text.split(" + ")}
    return [fault for fault in faults_for(discrepancy.context) if fault.id in ids]
