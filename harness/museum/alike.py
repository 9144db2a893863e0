"""Decide which faults the data cannot distinguish: those with the same effect on the same calls.

Two faults form one class at a place if, in every call of the discrepancy, the outputs under the
named fault have the names and shapes of those under the planted one, and 999 of 1,000 elements are
equal. Both are computed by the twin on the inputs that the candidate received, call after call, so
that ways with memory or random numbers repeat what they did. On an edge the received inputs are
taken as the planted fault's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.calls import MOST_WAYS, with_earlier
from degarble.harness.engine.diagnose.trial import make
from degarble.harness.engine.localise.recorded_run import by_component
from degarble.harness.museum.cases import equal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.diagnose.diagnose import Named
    from degarble.harness.engine.faults.model_faults import Scene, Sight, Way
    from degarble.harness.engine.localise.attribution import Trouble
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.references.binding import Bound

    Tensors = Mapping[str, Tensor]

ALIKE = 0.999  # of the elements; the rest are roundings of sums in another order


@dataclass(eq=False)
class Remade:
    """The twin's outputs with a planted way, for each call of the planted run."""

    twin: Bound
    component: str
    way: Way
    run: InMemoryRun

    @cached_property
    def _calls(self) -> list[tuple[Tensors, Tensors]]:
        faulty = self.way.apply(self.twin.calls[self.component])
        weights = self.twin.weights_of(self.component)
        made: list[tuple[Tensors, Tensors]] = []
        with torch.inference_mode():
            for call in by_component(self.run).get(self.component, ()):
                inputs = self.run.inputs(call)
                try:
                    made.append((inputs, dict(faulty(inputs, weights))))
                except CANNOT_RUN:
                    return made
        return made

    def of(self, sight: Sight) -> Tensors | None:
        """Return the outputs of the call with these inputs; None if the run has no such call."""
        for inputs, outputs in self._calls:
            if equal(sight.inputs, inputs):
                return {
                    name: each.to(sight.outputs[name].dtype) if name in sight.outputs else each
                    for name, each in outputs.items()
                }
        return None


def same_effect(planted: Remade, trouble: Trouble, first: Named) -> bool:
    """Return whether a named cause has the planted one's effect in every call."""
    assert trouble.sight is not None, "it was diagnosed"
    calls = with_earlier((trouble.sight, *trouble.more))
    return all(_same(planted, trouble.scene, call, first) for call in calls)


def _same(planted: Remade, scene: Scene, call: Sight, first: Named) -> bool:
    if call.implied:
        wanted: Tensors | None = {n: call.inputs[n] for n in call.implied if n in call.inputs}
    else:
        wanted = planted.of(call)
    if wanted is None:
        return False
    for way in _ways(scene, call, first):
        with torch.inference_mode():
            made = make(scene, call, way)
        if made is not None and alike(made.outputs, wanted):
            return True
    return False


def _ways(scene: Scene, call: Sight, first: Named) -> Iterator[Way]:
    """Yield the named way; for a fault that varies from call to call, all its proposals."""
    yield first.way
    if first.fault.per_call:
        yield from islice(first.fault.signature(scene, call), MOST_WAYS)


def alike(made: Tensors, wanted: Tensors) -> bool:
    """Return whether all wanted tensors are there with nearly all elements bit-equal."""
    for name, each in wanted.items():
        other = made.get(name)
        if other is None or other.shape != each.shape:
            return False
        # NaN equals NaN here.
        same = (other == each) | ((other != other) & (each != each))  # noqa: PLR0124  NaN
        if same.numel() and float(same.double().mean()) < ALIKE:
            return False
    return True
