"""Cut a trace into components: its boundaries, and the operations between them.

A component is the shortest stretch between tensors that a run records: what boundaries return, and
what they are given. A tensor that a boundary is given is either a view of one that another returned
(an edge), or the result of operations in between (a component of its own, such as a residual sum).
Components are named by their module's path, `layers.3.self_attn.q_proj`, and by what they do where
no module computes them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from degarble.harness.base.errors import NotBuilt
from degarble.references.traced.attention import MASK
from degarble.references.traced.trace import VIEWS, BoundaryKind, ParameterRef, Ref, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from degarble.references.traced.trace import Boundary, ModuleExit, Operation, Trace

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
# Operators that combine tokens.
_ALONG = named(
    """
    convolution cumsum bmm baddbmm linalg_solve_triangular tril triu constant_pad_nd
    """
) | {MASK}
# In chunks of the tokens, or one after the other: operations are those of one number of tokens.
_CHUNKED = named("constant_pad_nd linalg_solve_triangular convolution")
_BATCHED = frozenset({"bmm", "baddbmm"})
_MOVES = VIEWS | {"_to_copy"}
_TURNS = named(
    """
    mul add sub neg cat copy_ stack addcmul
    """
)


_ANY = frozenset({BoundaryKind.ACTIVATION, BoundaryKind.MODULE})
_BY_HAND = frozenset({BoundaryKind.ATTENTION, BoundaryKind.CACHE, BoundaryKind.EXPERTS})


class StretchKind(StrEnum):
    """What operations between boundaries compute."""

    ROTATION = "rotation"  # RoPE: with cosines and sines
    RESIDUAL = "residual"
    GATED = "gated"  # the product of an activated gate with another projection
    CHOICE = "choice"  # of earlier tokens, by scores
    STRETCH = "stretch"  # anything else
    SPAN = "span"  # several components, of which a run recorded only the ends


@dataclass(frozen=True)
class TracedComponent:
    """A component: the tensors that it takes and makes, and the operations in between."""

    name: str
    kind: BoundaryKind | StretchKind
    inputs: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    operations: tuple[int, ...]
    parameters: tuple[str, ...]
    module: str
    facts: Mapping[str, object] = field(default_factory=dict)

    is_recurrent: bool = False  # its operations run along the tokens
    is_rectangular: bool = False  # with a mask of tokens by tokens, and not in chunks
    is_fused: bool = False  # an engine's own kernels ran it: what they store is unknown
    whole: frozenset[str] = frozenset()  # inputs that hold earlier tokens as well, from a cache

    @property
    def layer(self) -> int | None:
        """Return the layer's number; None outside of the layers."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True)
class ViewEdge:
    """How an input comes from what was recorded earlier: views alone."""

    sources: tuple[Ref, ...]
    operations: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """All components of a trace in the order in which they run."""

    trace: Trace
    components: tuple[TracedComponent, ...]
    edges: Mapping[int, ViewEdge]  # by the tensor that a component is given
    makers: Mapping[int, tuple[str, str]]  # component and output, by tensor
    again: Callable[[int], Graph]  # the same model, traced at another number of tokens


def name_of(path: str) -> str:
    """Return `layers.3.mlp.gate` for `model.layers.3.mlp.gate`; ends lose the prefix as well."""
    match = _LAYER.search(path)
    if match:
        return f"layers.{match[1]}.{path[match.end() :]}".rstrip(".")
    return path.removeprefix("model.").removeprefix("language_model.")


class _Cutter:
    """Collects components while it walks the boundaries in order."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.components: list[TracedComponent] = []
        self.edges: dict[int, ViewEdge] = {}
        self.makers: dict[int, tuple[str, str]] = {}
        self._known = {trace.tokens.number, trace.positions.number}
        self._owner: dict[int, int] = {}  # the operation that made a tensor first
        self._names: Counter[str] = Counter()
        self._kinds: dict[str, BoundaryKind | StretchKind] = {}
        self._whole: set[int] = set()  # tensors that hold earlier tokens as well
        for number, operation in enumerate(trace.operations):
            for result in operation.results:
                self._owner.setdefault(result, number)

    def boundary(self, boundary: Boundary) -> None:
        """Add a boundary, and what computes its inputs."""
        for ref in self._named_inputs(boundary).values():
            self.demand(ref, boundary.path, boundary.operations[0])
        span = tuple(range(*boundary.operations))
        inputs = self._named_inputs(boundary)
        function = boundary.kind in {BoundaryKind.ATTENTION, BoundaryKind.CACHE}
        name = self._once(name_of(boundary.path) + (f".{boundary.kind}" if function else ""))
        names = self._output_names(boundary)
        parameters = _parameters(self._trace.operations[number] for number in span)
        if boundary.kind is BoundaryKind.EXPERTS:  # defined by hand, so nothing was traced inside
            own = f"{boundary.path}."
            parameters = tuple(
                parameter for parameter in self._trace.parameters if parameter.startswith(own)
            )
        parameters += tuple(
            fact.name for fact in boundary.facts.values() if isinstance(fact, ParameterRef)
        )
        made = TracedComponent(
            name, boundary.kind, inputs, dict(zip(names, boundary.outputs, strict=True)),
            span, parameters, boundary.path, boundary.facts,
            is_recurrent=boundary.kind in _ANY and self._combines_tokens(span),
        )  # fmt: skip
        for part in self._without_choice(made):
            self._add(part)

    def _output_names(self, boundary: Boundary) -> list[str]:
        if boundary.kind is BoundaryKind.CACHE:
            return list(boundary.inputs)
        count = len(boundary.outputs)
        if count == 1:
            return ["out"]
        if boundary.kind is BoundaryKind.ROTARY:
            return ["cos", "sin"]
        found = [f"out{number}" for number in range(count)]
        if boundary.kind is BoundaryKind.ROUTER and count == 3:
            # Models return the three in any order.
            tensors = [self._trace.tensors[ref.number] for ref in boundary.outputs]
            chosen = min(tensor.shape[-1] for tensor in tensors)
            named = [
                "experts" if not tensor.dtype.is_floating_point
                else "weights" if tensor.shape[-1] == chosen
                else "logits"
                for tensor in tensors
            ]  # fmt: skip
            found = named if len({*named}) == count else found
        return found

    def _without_choice(self, router: TracedComponent) -> tuple[TracedComponent, ...]:
        """Part a router into its logits and the choice among them, where that needs nothing else.

        A choice can then be judged by the logits that a run really had.
        """
        if router.kind is not BoundaryKind.ROUTER:
            return (router,)
        for name in router.outputs:
            parts = self._parted(router, name)
            if parts:
                return parts
        return (router,)

    def _parted(self, router: TracedComponent, name: str) -> tuple[TracedComponent, ...]:
        operations, end = self._trace.operations, router.operations[-1] + 1
        logits = router.outputs[name]
        rest = {other: ref for other, ref in router.outputs.items() if other != name}
        made = tuple(
            number for number in self._back_to_known(logits, end)[0] if number in router.operations
        )
        self._known.add(logits.number)
        ways = [self._back_to_known(ref, end) for ref in rest.values()]
        self._known.discard(logits.number)
        chosen = tuple(sorted({number for taken, _ in ways for number in taken}))
        if (
            not ways
            or any(sources != (logits,) for _, sources in ways)
            or any(operations[number].name == "topk" for number in made)
        ):
            return ()
        kind = BoundaryKind.TOPK if {*rest} == {"weights", "experts"} else StretchKind.STRETCH
        return (
            replace(
                router, outputs={name: logits}, operations=made,
                parameters=_parameters(operations[number] for number in made),
            ),
            replace(
                router, name=f"{router.name}.{BoundaryKind.TOPK}", kind=kind,
                inputs={"logits": logits}, outputs=rest, operations=chosen,
                parameters=_parameters(operations[number] for number in chosen),
            ),
        )  # fmt: skip

    def _named_inputs(self, boundary: Boundary) -> dict[str, Ref]:
        """Name inputs alike in all models: `x` for states, `tokens`, `experts`, `weights`."""
        if boundary.kind in {BoundaryKind.ATTENTION, BoundaryKind.CACHE}:
            return dict(boundary.inputs)
        span = self._trace.operations[slice(*boundary.operations)]
        read = {each for operation in span for each in operation.reads()}
        experts = boundary.kind is BoundaryKind.EXPERTS
        found: dict[str, Ref] = {}
        for name, ref in boundary.inputs.items():
            tensor = self._trace.tensors[ref.number]
            if not experts and ref not in read:
                continue  # such as the states that tell a rotary embedding its dtype
            known = {self._trace.tokens: "tokens", self._trace.positions: "positions"}.get(ref)
            if known is None and experts and not tensor.dtype.is_floating_point:
                known = "experts"
            elif known is None:
                known = "weights" if experts and "x" in found else "x"
            found[name if known in found else known] = ref
        return found

    def module(self, module: ModuleExit) -> None:
        """Make known what a module returns: a sum of experts, the result of a layer."""
        for ref in module.outputs:
            traced = self._trace.tensors[ref.number]
            if traced.token_axis is None or traced.rows > 1:
                continue  # a recurrent state; or rows of which nobody knows whose they are
            self.demand(ref, module.path, module.operations, is_result=True)

    def demand(self, ref: Ref, consumer: str, before: int, *, is_result: bool = False) -> None:
        """Make a tensor known: as an edge where it is a view, else by a component."""
        if ref.number in self._known or ref.number in self.edges:
            return
        operations, sources = self._back_to_known(ref, before)
        named = [self._trace.operations[number] for number in operations]
        pairs = self._makes_pairs(ref, named)
        along = pairs or self._combines_tokens(operations)
        if along:
            # Computed from the first token on, it needs no cache: new rows of every call will do.
            cached = {source.number for source in sources if self._is_cached(source)}
            self._known -= cached
            operations, sources = self._back_to_known(ref, before)
            self._known |= cached
            named = [self._trace.operations[number] for number in operations]
        elif all(operation.name in _MOVES for operation in named) and len(sources) == 1:
            self.edges[ref.number] = ViewEdge(sources, operations)
            return
        kind = self._kind(ref, named, sources)
        if along and not self._trace.tensors[ref.number].dtype.is_floating_point:
            kind = StretchKind.CHOICE if any(each.name == "topk" for each in named) else kind
        # What only depends on the number of tokens is given their positions, to count them.
        inputs = self._input_names(kind, sources or (self._trace.positions,))
        self._add(
            TracedComponent(
                self._name(kind, named, consumer, is_result=is_result), kind, inputs,
                {"out": ref}, operations, _parameters(named), named[-1].module,
                is_recurrent=along,
                is_rectangular=pairs and not {each.name for each in named} & _CHUNKED,
                whole=frozenset(name for name, each in inputs.items() if self._is_whole(each)),
            )
        )  # fmt: skip

    def _makes_pairs(self, ref: Ref, operations: list[Operation]) -> bool:
        """Return whether operations make a matrix of tokens by tokens."""
        made = [ref.number, *(result for each in operations for result in each.results)]
        return any(self._trace.tensors[number].columns for number in made)

    def _combines_tokens(self, operations: Iterable[int]) -> bool:
        """Return whether operations may run along the tokens."""
        named = [self._trace.operations[number] for number in operations]
        return _combines_tokens(named) or any(map(self._takes_some, named))

    def _takes_some(self, operation: Operation) -> bool:
        """Return whether an operation takes some of the tokens, as loops and shifts do."""
        if operation.name not in {"select", "slice", "unbind"}:
            return False
        source, axis = (*operation.arguments, 0)[:2]
        if not isinstance(source, Ref):
            return False
        traced = self._trace.tensors[source.number]
        if traced.token_axis is None or axis % len(traced.shape) != traced.token_axis:
            return False
        made = self._trace.tensors[operation.results[0]]
        return operation.name != "slice" or traced.shape != made.shape

    def _is_cached(self, ref: Ref) -> bool:
        return self._kinds.get(self.makers.get(ref.number, ("", ""))[0]) is BoundaryKind.CACHE

    def _is_whole(self, ref: Ref) -> bool:
        edge = self.edges.get(ref.number)
        sources = (ref,) if edge is None else edge.sources
        return any(source.number in self._whole for source in sources)

    def _require_known(self, component: TracedComponent) -> None:
        """Raise where a component reads what nobody gives it: a tensor from before the pass."""
        if component.kind in _BY_HAND:
            return
        given = {ref.number for ref in component.inputs.values()}
        for number in component.operations:
            operation = self._trace.operations[number]
            for read in operation.reads():
                if isinstance(read, Ref) and read.number not in given:
                    raise NotBuilt(
                        "operation", f"{operation.name} in {component.name}",
                        "operands that follow from tokens, positions and parameters",
                        "Register a family with a reference of its own for this model.",
                    )  # fmt: skip
            given.update(operation.results)

    def _add(self, component: TracedComponent) -> None:
        self._require_known(component)
        self.components.append(component)
        self._kinds[component.name] = component.kind
        if component.kind is BoundaryKind.CACHE or (
            component.kind is not BoundaryKind.ATTENTION
            and not component.is_recurrent
            and any(map(self._is_whole, component.inputs.values()))
        ):
            self._whole |= {ref.number for ref in component.outputs.values()}
        for output, ref in component.outputs.items():
            self._known.add(ref.number)
            self.makers[ref.number] = component.name, output

    def _back_to_known(self, ref: Ref, before: int) -> tuple[tuple[int, ...], tuple[Ref, ...]]:
        """Return the operations that make a tensor from known ones, and these."""
        wanted, taken, sources = {ref.number}, [], []
        memory = {self._trace.tensors[ref.number].storage}
        last = self._owner.get(ref.number, -1)
        if last < 0:
            return (), (ref,)
        # Writes into memory come later than the operation that made its tensor.
        for number in range(before - 1, -1, -1):
            operation = self._trace.operations[number]
            writes = memory & set(operation.mutated)
            if number > last and not writes:
                continue
            if not writes and not wanted & set(operation.results):
                continue
            taken.append(number)
            last = max(last, number)
            for read in operation.reads():
                if isinstance(read, Ref):
                    if read.number in self._known:
                        if read not in sources:
                            sources.append(read)
                    else:
                        wanted.add(read.number)
                        memory.add(self._trace.tensors[read.number].storage)
        return tuple(reversed(taken)), tuple(reversed(sources))

    def _kind(self, ref: Ref, operations: list[Operation], sources: tuple[Ref, ...]) -> StretchKind:
        names = {operation.name for operation in operations} - _MOVES
        makers = [self.makers.get(source.number, ("", ""))[0] for source in sources]
        kinds = {self._kinds[maker] for maker in makers if maker}
        if BoundaryKind.ROTARY in kinds and names <= _TURNS and names != {"add"}:
            return StretchKind.ROTATION
        shapes = {self._trace.tensors[source.number].shape[-1] for source in sources}
        width = self._trace.tensors[ref.number].shape[-1]
        if names <= {"add", "mul"} and "add" in names and len(sources) == 2 and shapes == {width}:
            return StretchKind.RESIDUAL
        if names == {"mul"} and len(sources) == 2:
            return StretchKind.GATED
        return StretchKind.STRETCH

    def _name(
        self, kind: StretchKind, operations: list[Operation], consumer: str, *, is_result: bool
    ) -> str:
        path = name_of(operations[-1].module)
        stem = f"{path}.{kind}" if path else str(kind)
        if kind in {StretchKind.STRETCH, StretchKind.CHOICE}:
            stem = f"{name_of(consumer)}.result" if is_result else f"{name_of(consumer)}_input"
        return self._once(stem)

    def _once(self, stem: str) -> str:
        """Number what a model runs more than once in a pass."""
        self._names[stem] += 1
        count = self._names[stem]
        return stem if count == 1 else f"{stem}_{count}"

    def _input_names(self, kind: StretchKind, sources: tuple[Ref, ...]) -> dict[str, Ref]:
        """Name what operations between boundaries read, by what made it."""
        kinds = self._kinds
        found: dict[str, Ref] = {}
        # The latest result is the branch that joins; a residual stream is older.
        order = {component.name: number for number, component in enumerate(self.components)}
        ranked = sorted(
            sources, key=lambda ref: -order.get(self.makers.get(ref.number, ("", ""))[0], -1)
        )
        for source in ranked:
            maker, output = self.makers.get(source.number, ("", ""))
            name = "x"
            if source == self._trace.positions:
                name = "positions"
            elif kinds.get(maker) is BoundaryKind.ROTARY and output != "out":
                name = output
            elif kind is StretchKind.RESIDUAL and "x" in found:
                name = "residual"
            elif kind is StretchKind.GATED:
                name = "gate" if kinds.get(maker) is BoundaryKind.ACTIVATION else "up"
            count = sum(each == name or each.startswith(f"{name}_") for each in found)
            found[f"{name}_{count + 1}" if count else name] = source
        return found


def _combines_tokens(operations: Iterable[Operation]) -> bool:
    """Return whether operations may run along the tokens; products with weights do not."""
    weights: set[int] = set()  # views of parameters
    for operation in operations:
        reads = list(operation.reads())
        fixed = [isinstance(read, ParameterRef) or read.number in weights for read in reads]
        if operation.name in _ALONG and not (operation.name in _BATCHED and any(fixed)):
            return True
        if operation.name in _MOVES and all(fixed):
            weights.update(operation.results)
    return False


def _parameters(operations: Iterable[Operation]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for operation in operations:
        for read in operation.reads():
            if isinstance(read, ParameterRef):
                names[read.name] = None
    return tuple(names)


def cut(trace: Trace, again: Callable[[int], Graph]) -> Graph:
    """Cut a trace into components; `again` traces the model at another number of tokens."""
    cutter = _Cutter(trace)
    exits = iter((*trace.modules, None))
    waiting = next(exits)
    for number, boundary in enumerate(trace.boundaries):
        while waiting is not None and waiting.boundaries <= number:
            cutter.module(waiting)
            waiting = next(exits)
        cutter.boundary(boundary)
    while waiting is not None:
        cutter.module(waiting)
        waiting = next(exits)
    cutter.demand(trace.logits, "logits", len(trace.operations))
    return Graph(trace, tuple(cutter.components), cutter.edges, cutter.makers, again)
