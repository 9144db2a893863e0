"""Join a sequence's calls into one prefill, where its memory's producers were not captured.

The rows, entries and positions of all steps are concatenated, with the offsets of a single sequence
and without memory. The twin runs that call once, and every step's outputs are judged against it at
the same positions. However a prompt was cut, into chunks or token by token, it is compared with the
same prefill. Two ways of cutting it therefore differ by at most their two budgets, plus the twin's
response to the difference of their inputs.

Only then is this needed: neither the state that arrived nor its absence proves anything. Elsewhere
input_reconstruction.py has shown that each call's memory is what the earlier ones left, and
replaying the calls one by one is equivalent. Calls that do not cover a sequence from its beginning
are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from degarble.harness.engine.localise.attribution import source_of
from degarble.harness.engine.localise.input_reconstruction import parts_of
from degarble.harness.engine.localise.replay import STATE, Batch, is_ragged
from degarble.harness.model.config.config import compressor_windows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.files.records import CapturedCall, CapturedStep
    from degarble.harness.engine.localise.input_reconstruction import Part
    from degarble.harness.model.components import Component

    Piece = tuple[Batch, int, Part]  # a call, and the index and rows of a sequence in it

MOST = 4  # sequences that are joined, the shortest first
_OFFSETS = "entry_offsets"
_POOLED = ("state_latent", "state_gate")


def unvouched(component: Component, calls: Mapping[str, Sequence[CapturedCall]]) -> bool:
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


def joined(
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
        if part.start != reached or any(each.rows is not None for each in sides):
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
    if known[0].ndim == 2 and len({each.shape[1] for each in known}) > 1:
        # Pad entries that do not exist yet: a masked score (-inf), or no choice (-1).
        none = -torch.inf if known[0].is_floating_point() else -1
        widest = max(each.shape[1] for each in known)
        known = [
            torch.nn.functional.pad(each, (0, widest - each.shape[1]), value=none) for each in known
        ]
    return torch.cat(known)


def _keys(component: Component, pieces: Sequence[Piece]) -> int:
    """Return how many keys a sequence has at its end."""
    ratio = component.block.ratio if component.block is not None else 0
    return pieces[-1][2].stop // max(1, ratio)


def _cut(component: Component, whole: Tensor, parts: Sequence[Part], place: int) -> Tensor | None:
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
