"""Diagnose faults whose damage differs from call to call: races, stale graphs, workspaces.

Each call is diagnosed by itself, together with the tensors of the same component in earlier calls.
A fault holds if one of its variants explains every call that the plain twin does not. This runs
only where no variant explains all calls alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from degarble.harness.engine.budget.budget import HEADROOM
from degarble.harness.engine.diagnose.sample import calls_in
from degarble.harness.engine.diagnose.trial import make, proof, proposed
from degarble.harness.engine.faults.model_faults import FaultVariant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from degarble.harness.engine.diagnose.trial import Proof
    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext, ModelFault

MOST_CALLS = 8  # calls examined at most
MOST_WAYS = 64  # variants of a fault tried on one call
_NOTHING = FaultVariant("nothing", lambda call: call)


@dataclass(frozen=True, eq=False)
class CallByCall:
    """A fault that explains every call, each by its own variant; the worst of the proofs."""

    fault: ModelFault
    way: FaultVariant
    proof: Proof
    calls: int


def call_by_call(
    scene: ComponentContext, sights: Sequence[CallRecord], faults: Iterable[ModelFault]
) -> Iterator[CallByCall]:
    """Yield each fault that explains every call by a variant of its own."""
    calls = with_earlier(sights)[-MOST_CALLS:]
    spoilt = [each for each in calls if _holds(scene, each, _NOTHING) is None]
    for fault in faults:
        if not fault.per_call or not spoilt or not fault.sits(scene):
            continue
        found = []
        for call in spoilt:
            best = _first(scene, call, fault)
            if best is None:
                break
            found.append(best)
        else:
            way, worst = max(found, key=lambda each: each[1].ratio)
            yield CallByCall(fault, way, worst, len(found))


def with_earlier(sights: Sequence[CallRecord]) -> list[CallRecord]:
    """Return single calls in the order of their steps, each with those before it."""
    single = [call for each in sights for call in calls_in(each)]
    ordered = sorted(single, key=lambda each: each.step)
    found = []
    for at, each in enumerate(ordered):
        # Do not list an earlier call twice.
        known = {id(other.outputs) for other in each.earlier}
        more = (other for other in ordered[:at] if id(other.outputs) not in known)
        found.append(replace(each, earlier=(*each.earlier, *more)))
    return found


def _first(
    scene: ComponentContext, call: CallRecord, fault: ModelFault
) -> tuple[FaultVariant, Proof] | None:
    for way in islice(proposed(fault, scene, call), MOST_WAYS):
        found = _holds(scene, call, way)
        if found is not None:
            return way, found
    return None


def _holds(scene: ComponentContext, call: CallRecord, way: FaultVariant) -> Proof | None:
    """Return the proof that a variant explains a call; None where it does not."""
    made = make(scene, call, way)
    found = None if made is None else proof(scene, call, made)
    return found if found is not None and found.ratio <= HEADROOM else None
