"""Run a traced model: its components in order, on the tokens of several sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from degarble.references.model import ForwardPass, RowBuffer
from degarble.references.traced.evaluate import joined, view_of
from degarble.references.traced.family import (
    STATE,
    is_sequential,
    keeps_state,
    traced_pairs,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.references.model import Sequence, TokenBatch
    from degarble.references.traced.family import TracedModel
    from degarble.references.traced.graph import Graph


class TracedForward(ForwardPass):
    """The forward pass over a traced model's bound components.

    What it keeps of a token are the logits already: the head is a component as any other.
    """

    def __init__(self, bound: TracedModel) -> None:
        super().__init__(bound, bound.config)
        self.config = bound.config
        config: Any = bound.config  # a TracedConfig
        self._graph: Graph = config.graph
        self._components = traced_pairs(config, bound.recipe)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits themselves."""
        return hidden

    def hidden(self, step: TokenBatch, sequences: list[Sequence]) -> Tensor:
        """Return the logits of every token."""
        trace = self._graph.trace
        values = {trace.tokens.number: step.tokens, trace.positions.number: step.positions}
        for component, traced in self._components:
            if traced is None:
                continue  # the quantisation of an input is a part of the linear after it
            given = {name: self._value(values, ref.number) for name, ref in traced.inputs.items()}
            if self.bound.quantises(component.name):
                given = dict(self.bound(f"{component.name}.act_quant", x=given["x"]))
            sequential = is_sequential(traced)
            if sequential:
                given |= {"positions": step.positions, "token_offsets": step.token_offsets}
            if keeps_state(traced):
                given |= self._earlier(component.name, given, sequences)
            made = self.bound(component.name, **given)
            if keeps_state(traced):
                kept = {n: rows for n, rows in given.items() if n not in traced.whole}
                self._keep(component.name, kept, step, sequences)
            for name, ref in traced.outputs.items():
                values[ref.number] = made[name]
        return self._value(values, trace.logits.number)

    def _value(self, values: dict[int, Tensor], number: int) -> Tensor:
        edge = self._graph.edges.get(number)
        return values[number] if edge is None else view_of(self._graph.trace, edge, values, number)

    def _earlier(
        self, name: str, given: Mapping[str, Tensor], sequences: list[Sequence]
    ) -> dict[str, Tensor]:
        found = {}
        for key in given:
            rows = [sequence.traced.get(f"{name}.{key}") for sequence in sequences]
            kept = [row.all() for row in rows if row is not None]
            if kept and key not in {"positions", "token_offsets"}:
                found[f"{STATE}{key}"] = joined(kept)
        return found

    def _keep(
        self,
        name: str,
        given: Mapping[str, Tensor],
        step: TokenBatch,
        sequences: list[Sequence],
    ) -> None:
        for key, rows in given.items():
            if key.startswith(STATE) or key in {"positions", "token_offsets"}:
                continue
            for sequence, span in zip(sequences, step.spans, strict=True):
                new, at = rows[span], f"{name}.{key}"
                held = sequence.traced.get(at)
                if held is not None and held.all().shape[1:] != new.shape[1:]:
                    new, held = joined([held.all(), new]), None  # as many columns as tokens
                if held is None:
                    held = sequence.traced[at] = RowBuffer()
                held.append(new)
