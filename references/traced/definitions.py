"""What a traced component computes, in float64: attention and experts by hand, the rest as traced.

Shape letters: T tokens of a sequence, H query heads, D width of a head or of a state, E experts,
K chosen of them, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from degarble.harness.base.errors import NotBuilt
from degarble.references.traced.attention import SINK, attended
from degarble.references.traced.evaluate import from_rows, run, to_rows, view_of
from degarble.references.traced.spans import ComponentSpan
from degarble.references.traced.trace import (
    TOKENS,
    VIEWS,
    BoundaryKind,
    ParameterRef,
    operator_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from degarble.references.linears import InputQuantiser
    from degarble.references.traced.evaluate import Parameters
    from degarble.references.traced.graph import Graph, TracedComponent
    from degarble.references.traced.trace import Trace, TracedTensor


_FEWEST = 6  # bits of the tokens of a trace at their exact number: chunks of recurrent operations
NARROW = frozenset({torch.bfloat16, torch.float16})
EXPERTS_OUT = "down_proj"  # what experts multiply last, whose inputs ranks may have in part


class Roundings:
    """What a run stores on the way to a component's outputs: nothing."""

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an operation's result, rounded where a run stores it in a dtype."""
        del dtype
        return value

    def shares(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return attention's shares as they are multiplied."""
        return self.operation(value, dtype)

    def between(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what one component of a span hands to the next."""
        del dtype
        return value

    def sums(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of a token's experts so far."""
        del dtype
        return value

    def quantised(self, value: Tensor, quantiser: InputQuantiser) -> Tensor:
        """Return an operand as it is multiplied once it was quantised."""
        return quantiser(value)

    def summed(self, coded: Tensor, product: Tensor, summed: Tensor) -> Tensor:
        """Return the product of codes as a tensor core sums it, which is near the exact one."""
        del coded, product
        return summed

    def over_ranks(self, product: Tensor, operands: tuple[Tensor, Tensor]) -> Tensor:
        """Return a product x w^T to which several ranks may each contribute a term."""
        del operands
        return product


class EachOperation(Roundings):
    """Every result of a narrow dtype is stored, as eager code does."""

    def __init__(self, *, sums: bool) -> None:
        self._sums = sums  # of experts, after each one

    def sums(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a sum in the dtype of the result, or as it is."""
        return self.operation(value, dtype) if self._sums else value

    def operation(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a result as memory of the dtype holds it; float32 counts as exact."""
        narrow = value.is_floating_point() and dtype in NARROW
        return value.to(dtype).to(value.dtype) if narrow else value


@dataclass(frozen=True)
class _Steps:
    """Roundings to the dtype in which a component's results are held."""

    roundings: Roundings
    dtype: torch.dtype

    def __call__(self, value: Tensor) -> Tensor:
        """Store an operation's result."""
        return self.roundings.operation(value, self.dtype)

    def shares(self, value: Tensor) -> Tensor:
        """Store attention's shares."""
        return self.roundings.shares(value, self.dtype)

    def sums(self, value: Tensor) -> Tensor:
        """Store the sum of a token's experts so far."""
        return self.roundings.sums(value, self.dtype)

    def quantised(self, value: Tensor, quantiser: InputQuantiser | None) -> Tensor:
        """Quantise an operand that is held in this dtype."""
        if quantiser is None:
            return value
        return self.roundings.quantised(value, quantiser)


class _Storing(TorchDispatchMode):
    """Stores the result of every operation that computes."""

    def __init__(self, stored: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self._stored = stored

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and store its result."""
        del types
        result = func(*args, **(kwargs or {}))
        name = operator_name(func)
        moves = name in VIEWS or not isinstance(result, torch.Tensor)
        return result if moves or not result.is_floating_point() else self._stored(result)


def compute(
    graph: Graph,
    component: TracedComponent,
    inputs: Mapping[str, Tensor],
    parameter: Parameters,
    roundings: Roundings,
) -> dict[str, Tensor]:
    """Return a component's outputs, given rows of one sequence from its first token.

    `roundings` are those of a run that stores what the traced model stores on the way.
    """
    if isinstance(component, ComponentSpan):
        return _one_after_the_other(graph, component, inputs, parameter, roundings)
    trace = graph.trace
    if component.kind is BoundaryKind.CACHE:
        return {
            name: _Steps(roundings, rows.dtype).quantised(
                rows, parameter.cached(component.module, name)
            )
            for name, rows in inputs.items()
        }
    by_hand = _BY_HAND.get(component.kind)
    if by_hand is not None:
        dtype = trace.tensors[component.outputs["out"].number].dtype
        return {"out": by_hand(component, inputs, parameter, _Steps(roundings, dtype))}
    forms = {name: trace.tensors[ref.number] for name, ref in component.inputs.items()}
    given = {
        name: rows.double() if rows.is_floating_point() else rows for name, rows in inputs.items()
    }
    tokens = length = _tokens(forms, given)
    own, at = trace, component
    if component.is_rectangular:
        if length > TOKENS:  # a choice of fewer keys than there are needs as many in the trace
            own, at = _traced_at(graph, component, _prime_above(length))
    elif component.is_recurrent:
        # Later tokens change no earlier result, so a trace of more tokens serves as well.
        tokens = _prime_above(length)
        own, at = _traced_at(graph, component, tokens)
    values: dict[int, Tensor] = {}
    for name, ref in at.inputs.items():
        rows, form = given[name], forms[name]
        if tokens > length and form.token_axis is not None:
            rows = torch.cat([rows, rows[-1:].expand(tokens - length, *rows.shape[1:])])
        values[ref.number] = from_rows(rows, form)
    operations = (own.operations[number] for number in at.operations)
    try:
        run(operations, values, parameter, tokens, stored=roundings.operation)
    except (RuntimeError, LookupError) as error:
        raise NotBuilt(
            "component", component.name,
            f"operations that run for any number of tokens: {str(error).splitlines()[0]}",
            "Register a family with a reference of its own for this model.",
        ) from error  # fmt: skip
    outputs = {name: ref.number for name, ref in at.outputs.items()}
    form_of = {name: trace.tensors[ref.number] for name, ref in component.outputs.items()}
    made = {name: to_rows(values[number], form_of[name]) for name, number in outputs.items()}
    return {name: _cut_to(length, rows, form_of[name]) for name, rows in made.items()}


def _cut_to(length: int, rows: Tensor, form: TracedTensor) -> Tensor:
    """Leave out rows, and columns for tokens that are attended to, past a number of tokens."""
    if form.token_axis is None or rows.shape[0] <= length:
        return rows
    for axis in form.columns:
        rows = rows.narrow(axis - len(form.shape), 0, length)
    return rows[:length]


def cache_scale(module: str, side: str) -> str:
    """Return the name of the scale by which an attention module's keys or values are cached."""
    return f"{module}.{side[0]}_scale"


def _one_after_the_other(
    graph: Graph,
    span: ComponentSpan,
    inputs: Mapping[str, Tensor],
    parameter: Parameters,
    roundings: Roundings,
) -> dict[str, Tensor]:
    trace = graph.trace
    rows = {ref.number: inputs[name] for name, ref in span.inputs.items()}
    for part in span.parts:
        given = {
            name: rows[ref.number]
            if ref.number in rows
            else view_of(trace, span.edges[ref.number], rows, ref.number)
            for name, ref in part.inputs.items()
        }
        made = compute(graph, part, given, parameter, roundings)
        for name, ref in part.outputs.items():
            whole = made[name].contiguous()  # for views of it that the trace makes
            rows[ref.number] = roundings.between(whole, trace.tensors[ref.number].dtype)
    return {name: rows[ref.number] for name, ref in span.outputs.items()}


def _prime_above(count: int) -> int:
    """Return a prime that is no width of a model by chance, one of few."""
    bits = max(_FEWEST, (count + 3).bit_length())
    return next(
        n for n in range((1 << bits) - 1, count, -1) if all(n % d for d in range(2, isqrt(n) + 1))
    )


def _tokens(forms: Mapping[str, TracedTensor], inputs: Mapping[str, Tensor]) -> int:
    along = (name for name, form in forms.items() if form.token_axis is not None)
    return next((inputs[name].shape[0] for name in along), 1)


def _traced_at(
    graph: Graph, component: TracedComponent, tokens: int
) -> tuple[Trace, TracedComponent]:
    """Return a component as it is traced at a number of tokens."""
    again = graph.again(tokens)
    found = next((each for each in again.components if each.name == component.name), None)
    if found is None or found.inputs.keys() != component.inputs.keys():
        raise NotBuilt(
            "component", component.name, "the same operands at any number of tokens",
            "Register a family with a reference of its own for this model.",
        )  # fmt: skip
    return again.trace, found


def attention(
    component: TracedComponent,
    inputs: Mapping[str, Tensor],
    parameter: Parameters,
    stored: _Steps,
) -> Tensor:
    """Return softmax attention [T, H, D]."""
    sink = component.facts.get(SINK)
    column = parameter(sink.name) if isinstance(sink, ParameterRef) else None
    return attended(inputs, component.facts, column, stored)


def experts(
    component: TracedComponent,
    inputs: Mapping[str, Tensor],
    parameter: Parameters,
    stored: _Steps,
) -> Tensor:
    """Return the weighted sum over the chosen experts [T, D]; an expert out of range adds nothing.

    transformers says of its expert modules how they store their weights: whether a gate exists,
    whether matrices are transposed, whether there are biases.
    """
    module: Any = component.facts["module"]
    if not hasattr(module, "_apply_gate"):
        raise NotBuilt(
            "experts", type(module).__name__, "a module of transformers' experts interface",
            "Register a family with a reference of its own for this model.",
        )  # fmt: skip
    x_TD, chosen_TK = inputs["x"].double(), inputs["experts"]
    weights_TK = inputs["weights"].double()
    first = "gate_up_proj" if module.has_gate else "up_proj"
    out = torch.zeros(x_TD.shape[0], x_TD.shape[1], dtype=torch.float64)
    prefix = component.module
    count = parameter.count(f"{prefix}.{first}")
    for number in chosen_TK[(chosen_TK >= 0) & (chosen_TK < count)].unique().tolist():
        token, slot = (chosen_TK == number).nonzero(as_tuple=True)
        hidden = _product(module, parameter, f"{prefix}.{first}", number, x_TD[token], stored)
        with _Storing(stored):
            gate = module._apply_gate if module.has_gate else module.act_fn  # noqa: SLF001
            hidden = gate(hidden)
        made = _product(module, parameter, f"{prefix}.{EXPERTS_OUT}", number, hidden, stored)
        weighted = made * weights_TK[token, slot, None]
        if inputs["weights"].dtype in NARROW:
            weighted = stored(weighted)
        out = stored.sums(out.index_add(0, token, stored.sums(weighted)))
    return out


def _product(
    module: Any,
    parameter: Parameters,
    name: str,
    expert: int,
    x: Tensor,
    stored: _Steps,
) -> Tensor:
    weight, quantiser = parameter.entry(name, expert), parameter.quantiser(name, expert)
    coded = stored.quantised(x, quantiser)
    made = coded @ (weight if module.is_transposed else weight.T)
    if quantiser is not None and not module.is_transposed:
        with _disable_current_modes():
            summed = parameter.short_summed(name, expert, x, quantiser)
        if summed is not None:
            made = stored.roundings.summed(coded, made, summed.to(made.dtype))
    if name.endswith(EXPERTS_OUT):
        rows = weight.T if module.is_transposed else weight
        made = stored.roundings.over_ranks(made, (coded, rows))
    made = stored(made)
    return stored(made + parameter.entry(f"{name}_bias", expert)) if module.has_bias else made


_BY_HAND: Mapping[Any, Callable[..., Tensor]] = MappingProxyType(
    {BoundaryKind.ATTENTION: attention, BoundaryKind.EXPERTS: experts}
)
