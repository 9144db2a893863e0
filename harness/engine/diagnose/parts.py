"""Separate the calls or sequences in which a fault acts from the healthy ones.

A fault may act in one phase, in one call or on one sequence. A variant that explains it there
changes the others as well, so no proof over every call holds. Calls or sequences that match the
healthy twin need no explanation; the cause is searched in the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.diagnose.sample import calls_in, sequences_in
from degarble.harness.engine.diagnose.trial import make, proof
from degarble.harness.engine.faults.model_faults import FaultVariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

_NOTHING = FaultVariant("nothing", lambda call: call)
_MOST = 64  # calls or sequences examined at most


def differing_parts(
    scene: ComponentContext, sights: Sequence[CallRecord]
) -> Iterator[tuple[str, list[CallRecord]]]:
    """Yield what remains without the healthy calls, then without the healthy sequences.

    Each comes with a description; nothing is yielded where all of them differ.
    """
    calls = [call for sight in sights for call in calls_in(sight)]
    wrong = _unhealthy(scene, calls)
    if 0 < len(wrong) < len(calls):
        yield f"in {len(wrong)} of {len(calls)} calls, the others are healthy", wrong
    # Only the differing calls are split into sequences.
    apart = [each for call in wrong for each in sequences_in(scene, call)]
    left = _unhealthy(scene, apart) if len(apart) > len(wrong) else apart
    if 0 < len(left) < len(apart):
        told = f"of {len(left)} of {len(apart)} sequences of these calls, the others are healthy"
        yield told, left


def _unhealthy(scene: ComponentContext, sights: Sequence[CallRecord]) -> list[CallRecord]:
    if len(sights) > _MOST:
        return []
    return [each for each in sights if not _is_healthy(scene, each)]


def _is_healthy(scene: ComponentContext, sight: CallRecord) -> bool:
    made = make(scene, sight, _NOTHING)
    return made is not None and proof(scene, sight, made).ratio <= HEADROOM
