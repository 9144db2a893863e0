"""Make a capture of a traced model from the tensors that some engine recorded, however few.

Each step gives its tokens, their positions and sequences, and tensors by their names in the trace,
one row a token. A component's call is written once all of its tensors are there. What reads earlier
tokens is given the rows that earlier steps recorded; where these are missing, as after a hit in a
prefix cache, its call is left out and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.capture.files.records import Phase
from degarble.harness.model.components import components
from degarble.references.traced.evaluate import view_of
from degarble.references.traced.family import (
    STATE,
    TracedConfig,
    is_sequential,
    keeps_state,
    site_name,
)
from degarble.references.traced.spans import ComponentSpan, tensor_names
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from degarble.harness.capture.recorder import Recorder
    from degarble.references.traced.graph import Graph, TracedComponent

SPAN = ".span"  # behind the name of the last of several components that are judged as one
_SHOWN = 3  # spans that are listed, and results that would split one


@dataclass(frozen=True)
class RecordedStep:
    """One forward pass: tokens, positions and sequences by row, and recorded tensors by name.

    `given`: what a component was given, where that was recorded apart from what others returned.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    tensors: Mapping[str, Tensor]
    given: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class _SequenceRows:
    """The rows of a step that belong to one sequence."""

    number: int
    rows: slice
    start: int  # position of the first


@dataclass
class TensorRun:
    """Writes the calls of a traced model from recorded tensors, step by step."""

    config: Any  # a TracedConfig
    recorder: Recorder
    unknown: frozenset[str] = frozenset()  # "tokens", "positions": what depends on them is left out
    left_out: Counter[str] = field(default_factory=Counter)  # components whose calls lack tensors
    _earlier: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._graph: Graph = self.config.graph
        self._names = tensor_names(self.config.whole)
        self._components = tuple(zip(components(self.config), self._graph.components, strict=True))
        self._kept = {
            ref.number
            for _, traced in self._components
            if keeps_state(traced)
            for ref in traced.inputs.values()
        }

    def step(self, step: RecordedStep) -> None:
        """Write one forward pass."""
        spans = _sequences(step)
        trace = self._graph.trace
        rows = {
            trace.tokens.number: torch.tensor(step.tokens),
            trace.positions.number: torch.tensor(step.positions),
        }
        for name, tensor in step.tensors.items():
            rows[self._names[name]] = self._as_traced(name, tensor, len(step.tokens), len(spans))
        one_each = all(span.rows.stop - span.rows.start == 1 and span.start for span in spans)
        phase = Phase.DECODE if one_each else Phase.PREFILL
        self.recorder.begin(phase, step.tokens, step.positions, step.sequences)
        for component, traced in self._components:
            call = self._call(traced, rows, spans)
            if call is not None and not isinstance(traced, ComponentSpan):
                for name, tensor in step.given.get(component.name, {}).items():
                    call[0][name] = self._rows_of(traced.inputs[name].number, tensor)
            if call is not None and self._is_of_last_rows(call[1], len(step.tokens)):
                call = self._last_rows(call, spans)
            if call is None:
                self.left_out[component.name] += 1
                continue
            taken = self.recorder.before(component.name, call[0])
            self.recorder.after(component.name, taken, *call)
        for number in self._kept & rows.keys():
            for span in spans:
                self._earlier.setdefault((number, span.number), []).append(rows[number][span.rows])

    def _is_of_last_rows(self, outputs: Mapping[str, Tensor], tokens: int) -> bool:
        return any(tensor.shape[0] != tokens for tensor in outputs.values())

    def _last_rows(
        self, call: tuple[dict[str, Tensor], dict[str, Tensor]], spans: Sequence[_SequenceRows]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Keep each sequence's last row of the inputs: an engine computes logits of these alone."""
        tokens, last = spans[-1].rows.stop, [span.rows.stop - 1 for span in spans]
        inputs = {
            name: tensor[last] if tensor.shape[0] == tokens else tensor
            for name, tensor in call[0].items()
        }
        return inputs, call[1]

    def _rows_of(self, number: int, tensor: Tensor) -> Tensor:
        traced = self._graph.trace.tensors[number]
        extents = [extent for at, extent in enumerate(traced.shape) if at != traced.token_axis]
        extents = extents[1:] if traced.token_axis and traced.shape[0] == 1 else extents
        return tensor.reshape(tensor.shape[0], *extents)

    def _as_traced(self, name: str, tensor: Tensor, tokens: int, sequences: int) -> Tensor:
        traced = self._graph.trace.tensors[self._names[name]]
        extents = [extent for at, extent in enumerate(traced.shape) if at != traced.token_axis]
        extents = extents[1:] if traced.token_axis and traced.shape[0] == 1 else extents
        count = tensor.shape[0] if tensor.ndim else 0
        by_sequence = self._names[name] == self._graph.trace.logits.number and count == sequences
        if tensor.numel() != count * math.prod(extents) or not (count == tokens or by_sequence):
            raise ShapeMismatch(
                name, list(tensor.shape), f"{tokens} rows of {extents}",
                "Name the model that was run: --model CKPT.",
            )  # fmt: skip
        return tensor.reshape(count, *extents)

    def _call(
        self, traced: TracedComponent, rows: dict[int, Tensor], spans: Sequence[_SequenceRows]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        trace = self._graph.trace
        unknown = {
            number
            for word, number in (
                ("tokens", trace.tokens.number), ("positions", trace.positions.number)
            )
            if word in self.unknown
        }  # fmt: skip
        if unknown & {ref.number for ref in traced.inputs.values()}:
            return None
        if "positions" in self.unknown and is_sequential(traced):
            return None
        inputs: dict[str, Tensor] = {}
        for name, ref in traced.inputs.items():
            edge = self._graph.edges.get(ref.number)
            if ref.number in rows:
                inputs[name] = rows[ref.number]
            elif edge is not None and edge.sources[0].number in rows:
                inputs[name] = view_of(trace, edge, rows, ref.number)
            else:
                return None
        outputs = {
            name: rows[ref.number] for name, ref in traced.outputs.items() if ref.number in rows
        }
        if len(outputs) != len(traced.outputs):
            return None
        if is_sequential(traced):
            starts = torch.tensor([0, *(span.rows.stop for span in spans)])
            inputs |= {"positions": rows[trace.positions.number]}
            inputs |= {"token_offsets": starts}
        if keeps_state(traced):
            state = self._state(traced, spans)
            if state is None:
                return None
            inputs |= state
        return inputs, outputs

    def _state(
        self, traced: TracedComponent, spans: Sequence[_SequenceRows]
    ) -> dict[str, Tensor] | None:
        """Return the earlier rows of every input; None where a sequence lacks some."""
        found = {}
        for name, ref in traced.inputs.items():
            parts = [
                part for span in spans for part in self._earlier.get((ref.number, span.number), ())
            ]
            if sum(len(part) for part in parts) != sum(span.start for span in spans):
                return None
            if parts:
                found[f"{STATE}{name}"] = torch.cat(parts)
        return found


def _sequences(step: RecordedStep) -> list[_SequenceRows]:
    found: list[_SequenceRows] = []
    begin = 0
    for at in range(1, len(step.sequences) + 1):
        if at == len(step.sequences) or step.sequences[at] != step.sequences[begin]:
            found.append(
                _SequenceRows(step.sequences[begin], slice(begin, at), step.positions[begin])
            )
            begin = at
    return found


@dataclass(frozen=True)
class Coverage:
    """What recorded tensors decide: components judged alone, and spans judged as a whole."""

    alone: tuple[str, ...]
    spans: Mapping[str, tuple[str, ...]]  # components within, by span
    uncovered: tuple[str, ...]  # components of the model that nothing recorded depends on
    dump_next: Mapping[str, tuple[str, ...]]  # components whose results would split a span

    @classmethod
    def from_config(cls, config: TracedConfig) -> Coverage:
        """Read it off the graph."""
        components = config.graph.components
        found = {site_name(c.name): c for c in components if isinstance(c, ComponentSpan)}
        spans = {name: tuple(part.name for part in c.parts) for name, c in found.items()}
        alone = tuple(c.name for c in components if site_name(c.name) not in spans)
        covered = {*alone, *(name for parts in spans.values() for name in parts)}
        return cls(
            alone, spans,
            tuple(c.name for c in config.whole.components if c.name not in covered),
            {name: _splits(component) for name, component in found.items()},
        )  # fmt: skip

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Coverage | None:
        """Read it off a capture's facts; None of a run that recorded every tensor."""
        return cls.from_config(recorded_config(facts)) if facts.get("recorded") else None

    @property
    def judged_alone(self) -> int:
        """Count the components in which a fault is placed exactly."""
        return len(self.alone) + len(self.spans) - len(self.wide)

    def wide_lines(self) -> list[str]:
        """Say of the widest spans what they hold, and what to dump to split them."""
        wide = self.wide
        lines = []
        for name in sorted(wide, key=lambda each: -len(wide[each]))[:_SHOWN]:
            names = ", ".join(self.dump_next[name][:_SHOWN])
            then = f"; to split it, dump {names}" if names else ""
            lines.append(f"{name}: {len(wide[name])} components judged as one{then}")
        return lines

    def lines(self) -> list[str]:
        """Say what is judged as one, and what is not covered."""
        count = len(self.uncovered)
        first = ", ".join(self.uncovered[:_SHOWN])
        rest = f"not covered: {first}{f' and {count - _SHOWN} more' if count > _SHOWN else ''}"
        return [*self.wide_lines(), *([rest] if count else [])]

    def document(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "alone": list(self.alone),
            "spans": {
                name: {"components": list(parts), "dump_next": list(self.dump_next[name])}
                for name, parts in self.wide.items()
            },
            "uncovered": list(self.uncovered),
        }

    @property
    def wide(self) -> dict[str, tuple[str, ...]]:
        """Return the spans in which a fault is not placed in one component."""
        return {name: parts for name, parts in self.spans.items() if name.endswith(SPAN)}


def _splits(span: ComponentSpan) -> tuple[str, ...]:
    """Return components whose results would divide a span best: linears, attention and norms."""
    kinds = {BoundaryKind.LINEAR, BoundaryKind.ATTENTION, BoundaryKind.EXPERTS, BoundaryKind.NORM}
    return tuple(part.name for part in span.parts[:-1] if part.kind in kinds)


def recorded_config(facts: Mapping[str, Any]) -> TracedConfig:
    """Return the traced config of a capture's facts, coarsened to what was recorded."""
    whole = TracedConfig.of(facts["config"])
    return TracedConfig(whole.text, whole.dtype, tuple(facts.get("recorded", ())))
