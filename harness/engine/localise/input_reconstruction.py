"""Reconstruct each component's inputs from its producers' outputs, and compare them.

Inputs are rebuilt from three sources: outputs of the same step, repeated or cut as
harness.model.wiring says; tokens, positions and offsets of the step's record; memory (`state_*`)
from earlier steps of the same sequences. Values are compared bit for bit, in the narrower dtype
where two were recorded. Where a producer was not captured, or a sequence began before the capture,
nothing is claimed.

Shape letters: T tokens, B sequences, R state rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.localise.attribution import source_of
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.engine.localise.replay import STATE
from degarble.harness.model.config.config import V4Config, compressor_windows
from degarble.harness.model.types import LayerType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor
    from degarble.harness.engine.localise.recorded_run import SeenRun
    from degarble.harness.engine.localise.replay import Known
    from degarble.harness.model.components import Component, Input
    from degarble.harness.model.sites import Site

_ENTRIES = ("compressor.pool", "compressor.write")
_POOLED_STATE = ("state_latent", "state_gate")
_TURNING = ("attn.q_head_norm_rope", "attn.kv_norm_rope", "attn.inverse_rope")


@dataclass(frozen=True, eq=False)
class Edge:
    """An input of one call that differs from what its producers imply; None means no tensor."""

    call: CapturedCall
    component: Component
    name: str
    implied: Tensor | None
    captured: Tensor | None
    source: Site | None


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in a step: their rows, and the positions around them."""

    owner: int
    tokens: slice
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the first position after this step."""
        return self.start + self.count


def parts_of(step: CapturedStep) -> list[Part]:
    """Return the sequences of a step, in order."""
    found: list[Part] = []
    begin = 0
    for at in range(1, len(step.tokens) + 1):
        if at == len(step.tokens) or step.sequences[at] != step.sequences[begin]:
            owner, start = step.sequences[begin], step.positions[begin]
            found.append(Part(owner, slice(begin, at), start, at - begin))
            begin = at
    return found


class Wires:
    """The edges of a run; calls are looked up by step and component."""

    def __init__(self, known: Known, run: SeenRun) -> None:
        self._known = known
        self._run = run
        self._steps = {step.number: step for step in run.steps}
        self._calls = {(call.step, call.component): call for call in run.calls}
        self._shifts: dict[str, bool] = {}  # by layer
        self._histories: dict[Site, dict[int, list[tuple[int, Part, Tensor | None]]]] = {}

    @cached_property
    def _parts(self) -> dict[int, list[Part]]:
        return {number: parts_of(step) for number, step in self._steps.items()}

    def broken(self, call: CapturedCall, inputs: Mapping[str, Tensor] | None = None) -> list[Edge]:
        """Return the inputs of a call that differ from its producers' outputs."""
        component = self._known.components[call.component]
        named = {each.name for each in component.inputs if not each.name.startswith(STATE)}
        # Filtered rows cannot be compared with whole outputs.
        if not named & call.inputs.keys() or any(
            each.rows is not None for each in call.inputs.values()
        ):
            return []
        if not named <= call.inputs.keys() | {"expanded"}:
            return []  # inputs of another module, whose producers are unknown
        found = []
        for each in component.inputs:
            edge = self._broken(call, component, each, inputs)
            if edge is not None:
                found.append(edge)
        return found

    def implied(self, call: CapturedCall) -> dict[str, Tensor]:
        """Return all inputs that producers imply, where they are known."""
        component = self._known.components[call.component]
        found = {}
        for each in component.inputs:
            kept = call.inputs.get(each.name)
            known, value = self._value(call, component, each)
            if kept is not None and known and value is not None:
                found[each.name] = value
        return found

    def _broken(
        self,
        call: CapturedCall,
        component: Component,
        each: Input,
        inputs: Mapping[str, Tensor] | None,
    ) -> Edge | None:
        kept = call.inputs.get(each.name)
        if kept is None and not each.name.startswith(STATE):
            return None
        if kept is not None and self._same_bytes(call, each, kept):
            return None
        known, implied = self._value(call, component, each)
        if not known:
            return None
        captured = None
        if kept is not None:
            captured = (inputs if inputs is not None else self._run.inputs(call))[each.name]
        if not any(each is not None and each.numel() for each in (implied, captured)):
            return None  # no rows, and no tensor of no rows, are the same
        if implied is not None and captured is not None and alike(implied, captured):
            return None
        if each.via == "positions" and self._turned_together(component):
            return None
        return Edge(call, component, each.name, implied, captured, source_of(component, each.name))

    def _turned_together(self, component: Component) -> bool:
        """Tell whether a sliding-window layer's rotations all use positions with one common shift.

        Such a layer depends on differences of positions alone: the rotations of q, k and output
        cancel the shift.
        """
        block, role = component.block, component.role
        if block is None or block.layer_type is not LayerType.SLIDING or role not in _TURNING:
            return False
        if block.prefix not in self._shifts:
            prefix = component.name.removesuffix(role)
            self._shifts[block.prefix] = self._shift_of([prefix + each for each in _TURNING])
        return self._shifts[block.prefix]

    def _shift_of(self, names: list[str]) -> bool:
        found: set[int] = set()
        for number, step in self._steps.items():
            # Positions by the step's own record.
            implied = self._outside(step, "positions")
            for name in names:
                call = self._calls.get((number, name))
                if call is None or "positions" not in call.inputs:
                    return False
                captured = self._run.inputs(call)["positions"]
                if captured.shape != implied.shape:
                    return False
                found |= set((captured.to(torch.int64) - implied).tolist())
        return len(found) == 1

    def _same_bytes(self, call: CapturedCall, each: Input, kept: CapturedTensor) -> bool:
        """Tell whether hashes prove that an input is its producer's output; no tensor is read."""
        if each.via or len(each.sources) != 1 or not kept.sha256:
            return False
        made = self._kept(call.step, each.sources[0])
        return (
            made is not None
            and (made.sha256, made.dtype) == (kept.sha256, kept.dtype)
            and made.nbytes == kept.nbytes
        )

    def _kept(self, step: int, source: Site) -> CapturedTensor | None:
        call = self._calls.get((step, source.component))
        return None if call is None else call.outputs.get(source.name or "out")

    def _output(self, step: int, source: Site) -> Tensor | None:
        call = self._calls.get((step, source.component))
        if call is None or (source.name or "out") not in call.outputs:
            return None
        if call.outputs[source.name or "out"].rows is not None:
            return None
        return self._run.outputs(call)[source.name or "out"]

    def _value(
        self, call: CapturedCall, component: Component, each: Input
    ) -> tuple[bool, Tensor | None]:
        """Return whether an input's value is known, and the value: None if none should arrive."""
        step = self._steps[call.step]
        if each.via == "state":
            return self._state(step, component, each.name)
        if each.via in {"tokens", "positions", "offsets"}:
            return True, self._outside(step, each.via)
        if len(each.sources) != 1:
            return False, None
        made = self._output(call.step, each.sources[0])
        if made is None:
            return False, None
        return self._arrived(made, each, call, step)

    def _outside(self, step: CapturedStep, word: str) -> Tensor:
        if word == "offsets":
            bounds = [0, *(part.tokens.stop for part in self._parts[step.number])]
            return torch.tensor(bounds)
        return torch.tensor(step.tokens if word == "tokens" else step.positions)

    def _arrived(
        self, made: Tensor, each: Input, call: CapturedCall, step: CapturedStep
    ) -> tuple[bool, Tensor | None]:
        """Return an output in the form in which it enters the next component."""
        config = self._known.twin.config
        if each.via == "streams":
            assert isinstance(config, V4Config), "only V4 has streams"
            return True, made.unsqueeze(1).expand(-1, config.hc_mult, *made.shape[1:])
        if each.via in {"latent", "rope"}:
            assert not isinstance(config, V4Config), "only V3.2 cuts rows"
            width = config.kv_lora_rank
            return True, made[..., :width] if each.via == "latent" else made[..., width:]
        if each.via:
            return False, None
        rows = call.inputs[each.name].shape[:1]
        if rows and made.ndim and made.shape[0] == len(step.tokens) != rows[0]:
            last = [part.tokens.stop - 1 for part in self._parts[step.number]]
            if rows[0] == len(last):
                return True, made[last]  # norm and head may run on each sequence's last token only
        return True, made

    def _state(
        self, step: CapturedStep, component: Component, name: str
    ) -> tuple[bool, Tensor | None]:
        """Concatenate what earlier steps left for every sequence of this step."""
        source = source_of(component, name)
        if source is None:
            return False, None
        own, found = name in _POOLED_STATE, []
        for part in self._parts[step.number]:
            made = self._before(step, part, source)
            if made is None:
                return False, None
            if own:
                made = made[-1:] or self._empty(step, component, name)
                if not made:
                    return False, None
            found += self._window(name, made)
        if not found:
            return True, None
        return True, torch.stack(found) if own else torch.cat(found)

    def _window(self, name: str, made: list[Tensor]) -> list[Tensor]:
        """Return the last rows of the window only: V4's attention is given no others."""
        config = self._known.twin.config
        if name != "state_window" or not made or not isinstance(config, V4Config):
            return made
        reach = config.sliding_window - 1
        # Each part has at least one row, so the last `reach` parts cover the window.
        rows = torch.cat(made[-max(1, reach) :])
        # Trap: with a window of one token, rows[-0:] would return all rows.
        return [rows[max(0, len(rows) - reach) :]]

    def _before(self, step: CapturedStep, part: Part, source: Site) -> list[Tensor] | None:
        """Return a producer's output for a sequence in earlier steps; None if not known."""
        history = self._history(source).get(part.owner, ())
        found, reached = [], 0
        for number, earlier, made in history:
            if number >= step.number:
                break
            # A gap: some of the sequence's earlier rows were not captured.
            if made is None or earlier.start != reached:
                return None
            reached = earlier.stop
            found.append(made)
        return found if reached == part.start else None

    def _history(self, source: Site) -> Mapping[int, list[tuple[int, Part, Tensor | None]]]:
        """Return all that a producer output, by sequence; cached."""
        known = self._histories.get(source)
        if known is None:
            known = self._histories[source] = {}
            for number in sorted(self._steps):
                whole = self._output(number, source)
                for place, part in enumerate(self._parts[number]):
                    made = None if whole is None else self._cut(whole, number, place, source)
                    known.setdefault(part.owner, []).append((number, part, made))
        return known

    def _cut(self, made: Tensor, number: int, place: int, source: Site) -> Tensor | None:
        """Return the rows, entries or carried state of one sequence of a step."""
        parts = self._parts[number]
        component = self._known.components[source.component]
        if source.name in _POOLED_STATE:
            return made[place] if len(made) == len(parts) else None
        if component.block is None or not component.role.endswith(_ENTRIES):
            return made[parts[place].tokens]
        ratio = component.block.ratio
        # Entries that each sequence completed in this step.
        counts = [each.stop // ratio - each.start // ratio for each in parts]
        return made.split(counts)[place] if sum(counts) == len(made) else None

    def _empty(self, step: CapturedStep, component: Component, name: str) -> list[Tensor]:
        """Return a pool's state before a sequence begins; empty if its width was not captured."""
        source = source_of(component, name.removeprefix(STATE))
        made = None if source is None else self._output(step.number, source)
        if made is None or component.block is None:
            return []
        rows = component.block.ratio * compressor_windows(component.block)
        return [made.new_zeros(rows, made.shape[1])]


def alike(implied: Tensor, captured: Tensor) -> bool:
    """Tell whether two tensors hold the same values, in the narrower of their dtypes."""
    if implied.numel() != captured.numel():
        return False
    implied = implied.reshape(captured.shape)
    if implied.dtype == captured.dtype:
        return same_bits(implied, captured)
    if not (implied.is_floating_point() and captured.is_floating_point()):
        wide = implied.to(torch.int64) if not implied.is_floating_point() else implied.double()
        return bool((wide == captured.to(wide.dtype)).all())
    narrow = min((implied.dtype, captured.dtype), key=lambda each: each.itemsize)
    return same_bits(implied.to(narrow), captured.to(narrow))
