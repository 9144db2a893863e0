"""Coarsen a graph to the tensors that a run recorded: a span is all that lies between two of them.

An engine that fuses kernels, or a dump of few tensors, shows less than the traced model computes.
Every recorded tensor is then computed from its nearest recorded ancestors. Where these are the
inputs of its own component, the component stays as it is; else it becomes a span that runs every
component in between. A span that contains attention needs all earlier rows of its inputs.

A span's components are computed one after the other in float64. What an engine stores on the way is
unknown, so a budget has to admit both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.references.traced.graph import Graph, StretchKind, TracedComponent, ViewEdge
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from degarble.references.traced.trace import Ref

_INPUTS = ("tokens", "positions")
# Nothing is stored on the way; of any other kind nobody knows what an engine's kernel stores.
_STORED_ONCE = frozenset({BoundaryKind.LINEAR, BoundaryKind.EMBEDDING, StretchKind.RESIDUAL})


@dataclass(frozen=True)
class ComponentSpan(TracedComponent):
    """Components that ran between recorded tensors, in their order."""

    parts: tuple[TracedComponent, ...] = ()
    edges: Mapping[int, ViewEdge] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_along_tokens(self) -> bool:
        """Return whether a token's result depends on the tokens before it."""
        kinds = {BoundaryKind.ATTENTION, BoundaryKind.CACHE}
        return any(part.kind in kinds or part.is_recurrent for part in self.parts)


def tensor_names(graph: Graph) -> dict[str, int]:
    """Return the recordable tensors: `layers.0.mlp.gate.logits`, without `.out`."""
    return {
        maker if output == "out" else f"{maker}.{output}": number
        for number, (maker, output) in graph.makers.items()
    }


def coarsened(graph: Graph, recorded: Iterable[str]) -> Graph:
    """Return the graph of a run that recorded tokens, positions and these tensors."""
    names = tensor_names(graph)
    known = {graph.trace.tokens.number, graph.trace.positions.number}
    for name in recorded:
        if name not in names:
            raise InvalidArgument(
                "recorded tensor", name, f"one of this model's {len(names)} tensors",
                "Name the checkpoint that was run, and a reference of the same model.",
            )  # fmt: skip
        known.add(names[name])
    if len(known) == len(_INPUTS):
        raise InvalidArgument(
            "recorded tensors", "none", "a tensor of the model at least",
            "Record the result of a module.",
        )  # fmt: skip
    by_name = {component.name: component for component in graph.components}
    components: list[TracedComponent] = []
    makers: dict[int, tuple[str, str]] = {}
    for component in graph.components:
        outputs = {name: ref for name, ref in component.outputs.items() if ref.number in known}
        if not outputs:
            continue
        parts = _parts(graph, by_name, component, known)
        if len(parts) == 1 and component.kind in _STORED_ONCE:
            made = replace(component, outputs=outputs)
        elif len(parts) == 1 and component.kind is BoundaryKind.EXPERTS:
            made = replace(component, outputs=outputs, is_fused=True)
        else:
            made = _span(graph, component, parts, outputs, known)
        components.append(made)
        makers |= {ref.number: (made.name, name) for name, ref in outputs.items()}
    return Graph(graph.trace, tuple(components), graph.edges, makers, graph.again)


def _sources(graph: Graph, component: TracedComponent) -> list[Ref]:
    found = []
    for ref in component.inputs.values():
        edge = graph.edges.get(ref.number)
        found.append(ref if edge is None else edge.sources[0])
    return found


def _parts(
    graph: Graph, by_name: Mapping[str, TracedComponent], last: TracedComponent, known: set[int]
) -> list[TracedComponent]:
    """Return the components between known tensors and the results of the last, in their order."""
    wanted, names = [last], {last.name}
    while wanted:
        for source in _sources(graph, wanted.pop()):
            if source.number in known:
                continue
            maker, _ = graph.makers[source.number]
            if maker not in names:
                names.add(maker)
                wanted.append(by_name[maker])
    return [component for component in graph.components if component.name in names]


def _span(
    graph: Graph,
    last: TracedComponent,
    parts: Sequence[TracedComponent],
    outputs: Mapping[str, Ref],
    known: set[int],
) -> ComponentSpan:
    inputs: dict[str, Ref] = {}
    ends = {graph.trace.tokens: "tokens", graph.trace.positions: "positions"}
    for part in parts:
        for given, source in zip(part.inputs, _sources(graph, part), strict=True):
            if source.number not in known or source in inputs.values():
                continue
            name = ends.get(source, given)
            count = sum(each == name or each.startswith(f"{name}_") for each in inputs)
            inputs[f"{name}_{count + 1}" if count else name] = source
    parameters = dict.fromkeys(name for part in parts for name in part.parameters)
    edges = {
        ref.number: graph.edges[ref.number]
        for part in parts
        for ref in part.inputs.values()
        if ref.number in graph.edges
    }
    return ComponentSpan(
        last.name if _is_one(parts, last) else f"{last.name}.span", StretchKind.SPAN, inputs,
        dict(outputs), tuple(number for part in parts for number in part.operations),
        tuple(parameters), last.module, parts=tuple(parts), edges=edges,
    )  # fmt: skip


def _is_one(parts: Sequence[TracedComponent], last: TracedComponent) -> bool:
    """Return whether the others only prepare what the last is given: angles, a cache, a gate."""
    free = {BoundaryKind.ROTARY, BoundaryKind.CACHE, BoundaryKind.ACTIVATION}
    return all(part.kind in free for part in parts if part is not last)
