"""Record the component calls of a bound model: inputs before a call, outputs and writes after it.

Kernels that replaced a component are recorded as well. A recorder changes nothing that it records.
An error of the writer is raised at the next call. The statistics-only mode keeps no tensors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from degarble.harness.capture.files.types import Phase, Step
from degarble.harness.capture.files.writer import Sent, SentCall
from degarble.harness.capture.filter import Wanted, whole_sites
from degarble.harness.capture.snapshots import Snapshots, same, statistics_of
from degarble.harness.model.components import components

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.capture.snapshots import Snapshot
    from degarble.harness.formats.weight import Weight
    from degarble.references.binding import Bound


class Sink(Protocol):
    """Receiver of steps and calls: a CaptureWriter, or a run in memory."""

    def step(self, step: Step) -> None:
        """Begin a forward pass."""
        ...

    def call(self, call: SentCall) -> None:
        """Take one call."""
        ...


class Taken(NamedTuple):
    """A tensor on its way to the writer, and the copy that it is compared with later."""

    sent: Sent
    snapshot: Snapshot


class Recorder:
    """Sends calls to a writer. `begin` a step before its first call."""

    def __init__(
        self,
        writer: Sink,
        wanted: Wanted | None = None,
        *,
        statistics_only: bool = False,
    ) -> None:
        self._writer = writer
        self._wanted = wanted or Wanted()
        self._statistics_only = statistics_only
        self._snapshots = Snapshots(stored=not statistics_only)
        self._whole: dict[str, frozenset[str]] = {}
        self._steps = 0
        self._tokens = 0
        self._rows: tuple[int, ...] | None = None

    def wrap(self, bound: Bound) -> None:
        """See every wanted call of a model from now on."""
        for component in components(bound.config):
            self._whole[component.name] = whole_sites(component)
        for name, call in list(bound.calls.items()):
            if self._wanted.takes(name):
                bound.calls[name] = partial(self._run, name, call)

    def begin(
        self, phase: Phase, tokens: Sequence[int], positions: Sequence[int], owners: Sequence[int]
    ) -> None:
        """Begin a forward pass; `owners` is the sequence of each token."""
        step = Step(self._steps, phase, tuple(tokens), tuple(positions), tuple(owners))
        self._steps += 1
        self._tokens = len(tokens)
        self._rows = self._wanted.rows(positions)
        self._writer.step(step)

    @property
    def idle(self) -> bool:
        """Return whether the filter drops all of this step."""
        return self._rows == ()

    def chooses(self, component: str) -> bool:
        """Return whether the filter includes this component."""
        return self._wanted.takes(component)

    def before(self, component: str, inputs: Mapping[str, Tensor]) -> dict[str, Taken]:
        """Take what a component is given."""
        return {name: self._taken(component, name, each) for name, each in inputs.items()}

    def after(
        self,
        component: str,
        taken: dict[str, Taken],
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
    ) -> None:
        """Take what it returned, and see whether its inputs are still what they were."""
        changed = tuple(
            n for n, each in inputs.items() if not self._kept(component, n, each, taken)
        )
        made = {name: self._taken(component, name, each) for name, each in outputs.items()}
        both = [{name: each.sent for name, each in side.items()} for side in (taken, made)]
        self._writer.call(SentCall(self._steps - 1, component, both[0], both[1], changed))

    def _run(
        self,
        name: str,
        call: ComponentCall,
        inputs: Mapping[str, Tensor],
        weights: Mapping[str, Weight],
    ) -> Mapping[str, Tensor]:
        if self.idle:
            return call(inputs, weights)
        taken = self.before(name, inputs)
        outputs = call(inputs, weights)
        self.after(name, taken, inputs, outputs)
        return outputs

    def _taken(self, component: str, name: str, tensor: Tensor) -> Taken:
        chosen, rows = self._chosen(component, name, tensor)
        told = statistics_of(chosen) if self._statistics_only else None
        snapshot = self._snapshots.take(chosen)
        return Taken(Sent(snapshot.payload, tuple(chosen.shape), rows, told), snapshot)

    def _kept(self, component: str, name: str, tensor: Tensor, taken: Mapping[str, Taken]) -> bool:
        chosen, _ = self._chosen(component, name, tensor)
        return same(taken[name].snapshot, chosen)

    def _chosen(
        self, component: str, name: str, tensor: Tensor
    ) -> tuple[Tensor, tuple[int, ...] | None]:
        """Return the rows of the chosen tokens; a tensor without one row a token stays whole."""
        rows = self._rows
        whole = name in self._whole.get(component, ())
        if rows is None or whole or not tensor.ndim or tensor.shape[0] != self._tokens:
            return tensor, None
        return tensor[torch.tensor(rows, device=tensor.device)], rows
