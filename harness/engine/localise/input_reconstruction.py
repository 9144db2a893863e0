"""Reconstruct each component's inputs from its producers' outputs, and compare them.

If a memory's producers were not captured, the calls of a sequence are joined into one prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.localise.discrepancy import source_of
from degarble.harness.engine.localise.recorded_run import same_bits
from degarble.harness.engine.localise.replay import STATE, Batch, is_ragged
from degarble.harness.model.config.config import compressor_windows
from degarble.harness.model.family import VIEW, family_of
from degarble.harness.model.sites import Port, Site
from degarble.harness.model.types import LayerType
from degarble.references.facts import rows_kept
from degarble.references.traced.evaluate import joined

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep, CapturedTensor
    from degarble.harness.engine.localise.recorded_run import RecordedRun
    from degarble.harness.engine.localise.replay import TwinComponents
    from degarble.harness.model.components import Component, Input


# --------------------------------------------------------------------------------------------------
# Inputs from their producers.
#
# Inputs are rebuilt from three sources: outputs of the same step, repeated or cut as
# harness.model.components says; tokens, positions and offsets of the step; memory (`state_*`)
# from earlier steps of the same sequences. Values are compared bit for bit, in the narrower dtype
# where two were recorded. Where a producer was not captured, or a sequence began before the
# capture, nothing is claimed.
#
# Shape letters: T tokens, B sequences, R state rows.

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
class SequencePart:
    """The tokens of one sequence in a step: their rows, and the positions around them."""

    owner: int
    tokens: slice
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Return the first position after this step."""
        return self.start + self.count


def parts_of(step: CapturedStep) -> list[SequencePart]:
    """Return the sequences of a step, in order."""
    parts: list[SequencePart] = []
    begin = 0
    for at in range(1, len(step.tokens) + 1):
        if at == len(step.tokens) or step.sequences[at] != step.sequences[begin]:
            owner, start = step.sequences[begin], step.positions[begin]
            parts.append(SequencePart(owner, slice(begin, at), start, at - begin))
            begin = at
    return parts


class InputReconstruction:
    """The edges of a run; calls are looked up by step and component."""

    def __init__(self, known: TwinComponents, run: RecordedRun) -> None:
        self._known = known
        self._run = run
        self._steps = {step.number: step for step in run.steps}
        self._calls = {(call.step, call.component): call for call in run.calls}
        self._shifts: dict[str, bool] = {}  # by layer
        self._histories: dict[
            tuple[Site, str], dict[int, list[tuple[int, SequencePart, Tensor | None]]]
        ] = {}  # of a producer, in a form in which its output arrives

    @cached_property
    def _parts(self) -> dict[int, list[SequencePart]]:
        return {number: parts_of(step) for number, step in self._steps.items()}

    def broken(self, call: CapturedCall, inputs: Mapping[str, Tensor] | None = None) -> list[Edge]:
        """Return the inputs of a call that differ from its producers' outputs."""
        component = self._known.components[call.component]
        named = {each.name for each in component.inputs if not each.name.startswith(STATE)}
        # Filtered rows cannot be compared with whole outputs.
        if not named & call.inputs.keys() or any(
            tensor.rows is not None for tensor in call.inputs.values()
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
        if not any(tensor is not None and tensor.numel() for tensor in (implied, captured)):
            return None  # no rows, and no tensor of no rows, are the same
        if implied is not None and captured is not None and alike(implied, captured):
            return None
        if captured is not None and self._is_read_back(call, component, each.name, captured):
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
            return self._state(step, component, each.name, call.inputs.get(each.name))
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
        if each.via:
            config = self._known.twin.config
            arrived = family_of(config).arrived(config, each.via, made)
            if arrived is None:
                return False, None
            made = arrived
        rows = call.inputs[each.name].shape[:1]
        if rows and made.ndim and made.shape[0] == len(step.tokens) != rows[0]:
            stops = [part.tokens.stop for part in self._parts[step.number]]
            count, rest = divmod(rows[0], len(stops))
            if count and not rest:  # norm and head may run on each sequence's last tokens only
                return True, made[[at for stop in stops for at in range(stop - count, stop)]]
        return True, made

    def _state(
        self, step: CapturedStep, component: Component, name: str, kept: CapturedTensor | None
    ) -> tuple[bool, Tensor | None]:
        """Concatenate what earlier steps left for every sequence of this step."""
        source = source_of(component, name)
        if source is None:
            return False, None
        own, found, parts = name in _POOLED_STATE, [], self._parts[step.number]
        starts = [part.start for part in parts]
        rows = kept.shape[0] if kept and kept.shape else 0
        # A memory that forgets keeps the last rows of every sequence, of a short one all.
        held = rows_kept(rows, starts) if rows < sum(starts) else starts
        for part, count in zip(parts, held, strict=True):
            made = self._before(step, part, source, _view_of(component, name))
            if made is None:
                return False, None
            if own:
                made = made[-1:] or self._empty(step, component, name)
                if not made:
                    return False, None
            found += self._window(name, self._remembered(component, part.start, count, made))
        if not found:
            return True, None
        return True, torch.stack(found) if own else joined(found)

    def _is_read_back(
        self, call: CapturedCall, component: Component, name: str, captured: Tensor
    ) -> bool:
        """Tell whether earlier rows of a cache are those that it gave back in the last step.

        A cache that rounds its rows gives back others than were put in.
        """
        if component.kind != "traced.cache" or not name.startswith(STATE):
            return False
        source, found = Site(component.name, Port.OUT, name.removeprefix(STATE)), []
        for part in self._parts[call.step]:
            if not part.start:
                continue
            before = [n for n, parts in self._parts.items() if n < call.step and any(
                each.owner == part.owner for each in parts
            )]  # fmt: skip
            made = self._output(max(before), source) if before else None
            rows = None if made is None else self._rows_of(made, max(before), part.owner)
            if rows is None or len(rows) != part.start:
                return False
            found.append(rows)
        return bool(found) and alike(torch.cat(found), captured)

    def _rows_of(self, made: Tensor, number: int, owner: int) -> Tensor | None:
        """Return the rows of one sequence among those of all whole caches of a step."""
        parts = self._parts[number]
        if len(made) != sum(part.stop for part in parts):
            return None  # a cache that forgets
        place = next(n for n, part in enumerate(parts) if part.owner == owner)
        whole: Tensor = made.split([part.stop for part in parts])[place]
        return whole

    def _remembered(
        self, component: Component, earlier: int, held: int, tensors: list[Tensor]
    ) -> list[Tensor]:
        """Return the last rows: those that later tokens attend to, or more where these are held."""
        config = self._known.twin.config
        needed = family_of(config).rows_needed(config, component, earlier)
        if needed is None or not tensors:
            return tensors
        return [torch.cat(tensors)[max(0, earlier - max(needed, held)) :]]

    def _window(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        """Return the last rows of the window only: V4's attention is given no others."""
        config = self._known.twin.config
        reach = family_of(config).earlier_window(config)
        if name != "state_window" or not tensors or reach is None:
            return tensors
        # Each part has at least one row, so the last `reach` parts cover the window.
        rows = torch.cat(tensors[-max(1, reach) :])
        # Trap: with a window of one token, rows[-0:] would return all rows.
        return [rows[max(0, len(rows) - reach) :]]

    def _before(
        self, step: CapturedStep, part: SequencePart, source: Site, via: str
    ) -> list[Tensor] | None:
        """Return a producer's output for a sequence in earlier steps; None if not known."""
        history = self._history(source, via).get(part.owner, ())
        found, reached = [], 0
        for number, earlier, tensor in history:
            if number >= step.number:
                break
            # A gap: some of the sequence's earlier rows were not captured.
            if tensor is None or earlier.start != reached:
                return None
            reached = earlier.stop
            found.append(tensor)
        return found if reached == part.start else None

    def _history(
        self, source: Site, via: str
    ) -> Mapping[int, list[tuple[int, SequencePart, Tensor | None]]]:
        """Return all that a producer output, by sequence; cached."""
        known = self._histories.get((source, via))
        if known is None:
            known = self._histories[source, via] = {}
            config = self._known.twin.config
            for number in sorted(self._steps):
                whole = self._output(number, source)
                if via and whole is not None:
                    whole = family_of(config).arrived(config, via, whole)
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
        counts = [part.stop // ratio - part.start // ratio for part in parts]
        return made.split(counts)[place] if sum(counts) == len(made) else None

    def _empty(self, step: CapturedStep, component: Component, name: str) -> list[Tensor]:
        """Return a pool's state before a sequence begins; empty if its width was not captured."""
        source = source_of(component, name.removeprefix(STATE))
        made = None if source is None else self._output(step.number, source)
        if made is None or component.block is None:
            return []
        rows = component.block.ratio * compressor_windows(component.block)
        return [made.new_zeros(rows, made.shape[1])]


def _view_of(component: Component, name: str) -> str:
    """Return the view in which a memory's rows arrived; empty where they are as they were made."""
    kept = (each for each in component.inputs if each.name == name.removeprefix(STATE))
    return next((each.via for each in kept if each.via.startswith(VIEW)), "")


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


# --------------------------------------------------------------------------------------------------
# Joined calls: one prefill of a sequence whose memory has no captured producer.
#
# The rows, entries and positions of all steps are concatenated, with the offsets of a single
# sequence and without memory. The twin runs that call once, and every step's outputs are judged
# against it at the same positions. However a prompt was cut, into chunks or token by token, it is
# compared with the same prefill. Two ways of cutting it therefore differ by at most their two
# budgets, plus the twin's response to the difference of their inputs.
#
# Elsewhere the code above has shown that each call's memory is what the earlier ones left, and
# replaying the calls one by one is equivalent. Calls that do not cover a sequence from its
# beginning are left out.

if TYPE_CHECKING:
    Piece = tuple[Batch, int, SequencePart]  # a call, and the index and rows of a sequence in it

MOST = 4  # sequences that are joined, the shortest first
_OFFSETS = "entry_offsets"
_POOLED = ("state_latent", "state_gate")


def lacks_producers(component: Component, calls: Mapping[str, Sequence[CapturedCall]]) -> bool:
    """Tell whether a component has memory whose producers were not captured in every step."""
    own = {call.step for call in calls.get(component.name, ())}
    if not is_ragged(component) or len(own) < 2:
        return False
    for each in component.inputs:
        source = source_of(component, each.name) if each.name.startswith(STATE) else None
        new = each.name.removeprefix(STATE)
        if source is None or not any(new in call.inputs for call in calls[component.name]):
            continue  # rows of another attention form, not used in this run
        kept = {
            call.step
            for call in calls.get(source.component, ())
            if (made := call.outputs.get(source.name or "out")) is not None and made.rows is None
        }
        if own - kept:
            return True
    return False


def without_memory(batch: Batch, steps: Mapping[int, CapturedStep]) -> Batch:
    """Mark a call after a sequence's beginning as not replayable if its memory was not captured."""
    begun = any(part.start for part in parts_of(steps[batch.calls[0].step]))
    if not begun or any(name.startswith(STATE) for name in batch.inputs):
        return batch
    return replace(batch, lacking="its memory was not captured")


def joined_prefill(
    component: Component, batches: Sequence[Batch], steps: Mapping[int, CapturedStep]
) -> Iterator[Batch]:
    """Yield one prefill for each sequence that was given its tokens in several calls."""
    found: dict[int, list[Piece]] = {}
    for batch in sorted(batches, key=lambda each: each.calls[0].number):
        for place, part in enumerate(parts_of(steps[batch.calls[0].step])):
            found.setdefault(part.owner, []).append((batch, place, part))
    whole = [pieces for pieces in found.values() if len(pieces) > 1 and _covers(pieces)]
    for pieces in sorted(whole, key=lambda each: each[-1][2].stop)[:MOST]:
        made = _joined(component, pieces, steps)
        if made is not None:
            yield made


def _covers(pieces: Sequence[Piece]) -> bool:
    """Tell whether the calls hold every row of a sequence, from its first token on."""
    reached = 0
    for batch, _, part in pieces:
        sides = (*batch.calls[0].inputs.values(), *batch.calls[0].outputs.values())
        # A gap, or captured rows that a filter thinned out.
        if part.start != reached or any(side.rows is not None for side in sides):
            return False
        reached = part.stop
    return True


def _joined(
    component: Component, pieces: Sequence[Piece], steps: Mapping[int, CapturedStep]
) -> Batch | None:
    first, stop = pieces[0][0], pieces[-1][2].stop
    inputs: dict[str, Tensor] = {}
    for each in component.inputs:
        name = each.name
        made: Tensor | None = None
        if each.via == "offsets":
            # One sequence from position 0 to its end.
            made = torch.tensor([0, stop])
        elif name in _POOLED:
            made = _nothing(component, first, name)
        elif name.startswith(STATE) or name not in first.inputs:
            continue
        else:
            made = _below(
                component, [batch.inputs.get(name) for batch, *_ in pieces], pieces, steps
            )
        if made is None:
            return None
        inputs[name] = made
    outputs: dict[str, Tensor] = {}
    for name in first.outputs.keys() - {_OFFSETS, *_POOLED}:
        made = _below(component, [batch.outputs.get(name) for batch, *_ in pieces], pieces, steps)
        if made is not None and component.role.endswith(".scores"):
            # Another sequence of the batch may have had more entries.
            made = made[:, : _keys(component, pieces)]
        if made is not None:
            outputs[name] = made
    calls = tuple(batch.calls[0] for batch, *_ in pieces)
    spans = tuple(slice(part.start, part.stop) for *_, part in pieces)
    counts = torch.tensor([part.count for *_, part in pieces])
    step_of = torch.tensor([call.step for call in calls]).repeat_interleave(counts)
    return Batch(component, calls, inputs, outputs, step_of, torch.arange(stop), spans)


def _below(
    component: Component,
    tensors: Sequence[Tensor | None],
    pieces: Sequence[Piece],
    steps: Mapping[int, CapturedStep],
) -> Tensor | None:
    """Concatenate the rows of one sequence; None where those of one step are not known."""
    known: list[Tensor] = []
    for whole, (batch, place, _) in zip(tensors, pieces, strict=True):
        made = None
        if whole is not None and whole.ndim:
            made = _cut(component, whole, parts_of(steps[batch.calls[0].step]), place)
        if made is None:
            return None
        known.append(made)
    if known[0].ndim == 2 and len({tensor.shape[1] for tensor in known}) > 1:
        # Pad entries that do not exist yet: a masked score (-inf), or no choice (-1).
        none = -torch.inf if known[0].is_floating_point() else -1
        widest = max(tensor.shape[1] for tensor in known)
        known = [
            torch.nn.functional.pad(tensor, (0, widest - tensor.shape[1]), value=none)
            for tensor in known
        ]
    return torch.cat(known)


def _keys(component: Component, pieces: Sequence[Piece]) -> int:
    """Return how many keys a sequence has at its end."""
    ratio = component.block.ratio if component.block is not None else 0
    return pieces[-1][2].stop // max(1, ratio)


def _cut(
    component: Component, whole: Tensor, parts: Sequence[SequencePart], place: int
) -> Tensor | None:
    """Return the rows of one sequence of a step, or the entries that it completed."""
    if whole.shape[0] == sum(part.count for part in parts):
        return whole[parts[place].tokens]
    ratio = component.block.ratio if component.block is not None else 0
    if not ratio:
        return None
    counts = [part.stop // ratio - part.start // ratio for part in parts]
    return whole.split(counts)[place] if sum(counts) == whole.shape[0] else None


def _nothing(component: Component, first: Batch, name: str) -> Tensor | None:
    """Return a pool's empty memory, as before a sequence."""
    made = first.inputs.get(name.removeprefix(STATE))
    if made is None or component.block is None:
        return None
    rows = component.block.ratio * compressor_windows(component.block)
    return made.new_zeros(1, rows, made.shape[1])
