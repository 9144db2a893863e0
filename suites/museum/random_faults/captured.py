"""A captured run, of kernels or an engine, into which random faults are planted afterwards.

The run is replayed: a call that receives what was captured returns what was captured, to the bit. A
fault is planted around that, so what it does not change stays the kernel's own; what it changes,
and all that follows from it, is computed by the reference in float32.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.capture.files.reader import Capture
from degarble.harness.commands.check.check import as_recorded
from degarble.harness.engine.conventions.registry import conventions_in
from degarble.harness.engine.localise.localise import localise
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.inference.model import open_model
from degarble.suites.museum.random_faults.stages import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.base.protocols import ComponentCall
    from degarble.harness.capture.files.records import CapturedStep
    from degarble.harness.engine.localise.localise import Localised
    from degarble.harness.engine.localise.recorded_run import InMemoryRun
    from degarble.references.binding import BoundModel

    Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class CapturedCalls:
    """What the calls of one component received and returned, by step."""

    calls: tuple[tuple[Tensors, Tensors], ...]

    def known(self, inputs: Tensors) -> Tensors | None:
        """Return the outputs captured for these inputs; None where they were never given."""
        for given, outputs in self.calls:
            shared = given.keys() & inputs.keys()
            if shared and all(_are_same(given[name], inputs[name]) for name in shared):
                return outputs
        return None


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers; one may be kept in a wider type."""
    if one.dtype is other.dtype or not (one.is_floating_point() and other.is_floating_point()):
        return same_bits(one, other)
    return one.shape == other.shape and torch.equal(one.to(other.dtype), other)


def replaying(
    captured: CapturedCalls, weights: Mapping[str, Any], call: ComponentCall
) -> ComponentCall:
    """Return a call that gives what was captured, as long as inputs and weights are those."""
    own = dict(weights)

    def replayed(inputs: Tensors, weights: Mapping[str, Any]) -> Tensors:
        same = all(weights[name] is weight for name, weight in own.items())
        outputs = captured.known(inputs) if same else None
        made = call(inputs, weights)
        return made if outputs is None else {**made, **outputs}

    return replayed


@dataclass(eq=False)
class CapturedStage(Stage):
    """A captured run and the model that judges it."""

    captured: Capture | None = None

    @classmethod
    def open(cls, path: Path, checkpoint: Path) -> CapturedStage:
        """Open a capture, whose checkpoint may have moved."""
        capture = Capture.open(path)
        model = open_model(checkpoint, switches=conventions_in(capture.facts))
        twin = as_recorded(model.logits_model.bound, capture)
        candidate = _in_float32(twin)
        for name, calls in _captured_calls(capture).items():
            weights = candidate.weights_of(name)
            candidate.calls[name] = replaying(calls, weights, candidate.calls[name])
        return cls(path.name, candidate, twin, model.recipe, (), captured=capture)

    def steps(self, seed: int = 0) -> list[CapturedStep]:
        """Return the captured steps; with a seed the same ones of other tokens."""
        assert self.captured is not None, "opened from a capture"
        if not seed:
            return list(self.captured.steps)
        drawn, most = random.Random(f"tokens {seed}"), int(self.twin.config.vocab_size) - 4
        return [
            replace(step, tokens=tuple(drawn.randrange(4, most) for _ in step.tokens))
            for step in self.captured.steps
        ]

    def localised(self, run: InMemoryRun) -> Localised:
        """Judge a whole run: conventions are learned from what is healthy."""
        return localise(self.twin, self.recipe, run)

    def replayed(self) -> float:
        """Return the share of captured calls that the replay gave to the bit."""
        assert self.captured is not None, "opened from a capture"
        made = {(call.step, call.component): self.healthy.outputs(call)
                for call in self.healthy.calls}  # fmt: skip
        same = [
            all(
                same_bits(tensor, made[call.step, call.component][name])
                for name, tensor in self.captured.outputs(call).items()
            )
            for call in self.captured.calls
            if (call.step, call.component) in made
        ]
        return sum(same) / max(1, len(self.captured.calls))


def _in_float32(twin: BoundModel) -> BoundModel:
    numerics = replace(twin.numerics, products=torch.float32, work=torch.float32)
    return type(twin)(twin.config, numerics, twin.weights, twin.recipe)


def _captured_calls(capture: Capture) -> dict[str, CapturedCalls]:
    found: dict[str, list[tuple[Tensors, Tensors]]] = {}
    for call in capture.calls:
        sides = (dict(capture.inputs(call)), dict(capture.outputs(call)))
        found.setdefault(call.component, []).append(sides)
    return {name: CapturedCalls(tuple(calls)) for name, calls in found.items()}
