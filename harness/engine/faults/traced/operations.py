"""Faults of traced operations: a step that is left out, another constant, another function.

A traced component is a list of operations, so that a wrong one is the same list with one operation
exchanged. What a component computes decides the family of its faults: M24 norms, M25
activations, M26 and M27 routers, M28 rotations, M23 residuals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from degarble.harness.engine.faults.model_faults import FaultVariant, ModelFault, with_facts
from degarble.harness.model.components import components
from degarble.harness.report.number_text import number
from degarble.references.traced.trace import Operation, ParameterRef, Ref, named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
    from degarble.references.traced.family import TracedFacts

STEPS = 32  # rows on which constants are fitted
_LOW, _HIGH, _GRID = -6.0, 6.0, 49  # powers of ten around a constant
_TURNS = 40  # of the search between two points of the grid
_GOLDEN = (math.sqrt(5) - 1) / 2
_EXPLAINED = 0.5  # of the difference that the best constant may leave
_EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_SMALL = 0.05  # constants below are added under a root or a quotient
_DIGITS = (1, 2, 3, 4)
_TINY = 1e-300


@dataclass(frozen=True)
class Exchanged:
    """A function in place of an ATen operator, under the operator's name."""

    operator: str
    function: Callable[..., Any]

    def name(self) -> str:
        """Return the operator's name."""
        return self.operator

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute."""
        return self.function(*arguments, **keywords)


def traced_facts(context: ComponentContext) -> TracedFacts:
    """Return the facts of a traced component."""
    found: Any = context.bound.bound_to(context.name)[1]
    return found  # type: ignore[no-any-return]


def variant_of(
    context: ComponentContext, words: str, apply: Any, **where: str | float
) -> FaultVariant:
    """Return a variant whose words name the component."""
    return FaultVariant(f"{words} in {context.name}", apply, where)


def apart(x: Tensor) -> Tensor:
    """Take even places first, then odd ones: pairs become halves."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def side_by_side(x: Tensor) -> Tensor:
    """Interleave both halves: halves become pairs."""
    made: Tensor = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return made


def others_of(context: ComponentContext) -> Iterator[ComponentContext]:
    """Yield the other components of the model."""
    for component in components(context.bound.config, context.recipe):
        if component.name != context.name and component.name in context.bound.calls:
            yield replace(context, component=component)


def with_operation(facts: TracedFacts, number: int, operation: Operation) -> TracedFacts:
    """Return the facts of a component with one operation exchanged."""
    trace = facts.graph.trace
    operations = (*trace.operations[:number], operation, *trace.operations[number + 1 :])
    changed = replace(facts.graph, trace=replace(trace, operations=operations))
    return replace(facts, graph=changed)


def steps_of(context: ComponentContext) -> Iterator[tuple[int, Operation]]:
    """Yield a component's operations with their numbers in the trace."""
    facts = traced_facts(context)
    for at in facts.traced.operations:
        yield at, facts.graph.trace.operations[at]


def _exchanged(
    context: ComponentContext, at: int, operation: Operation, words: str, where: dict[str, Any]
) -> FaultVariant:
    change: Any = partial(with_operation, number=at, operation=operation)
    return FaultVariant(words, with_facts(context, change), where)


# --------------------------------------------------------------------------------------------------
# A step that is left out

_DONE = {
    "add": "adding", "add_": "adding", "sub": "subtracting", "sub_": "subtracting",
    "mul": "multiplying by", "mul_": "multiplying by", "div": "dividing by",
    "div_": "dividing by", "pow": "the power of", "clamp": "the clamp", "tanh": "tanh",
    "neg": "the sign", "sigmoid": "the sigmoid", "silu": "SiLU", "gelu": "GELU", "relu": "ReLU",
    "_softmax": "the softmax", "rsqrt": "the root", "sqrt": "the root",
    "masked_fill": "the mask of", "clamp_min": "the clamp", "clamp_max": "the clamp",
}  # fmt: skip


def _left_out(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield each step that returns one of the tensors that it is given."""
    facts = traced_facts(context)
    tensors = facts.graph.trace.tensors
    for at, operation in steps_of(context):
        done = _DONE.get(operation.name)
        if done is None or len(operation.results) != 1:
            continue
        shape = tensors[operation.results[0]].shape
        for place, argument in enumerate(operation.arguments[:2]):
            known = isinstance(argument, (Ref, ParameterRef))
            if known and _shape_of(facts, argument) == shape:
                passes = Exchanged(operation.name, _nth(place))
                rest = [each for n, each in enumerate(operation.arguments[:2]) if n != place]
                words = f"{context.name} without {done} {_named(facts, rest)}".rstrip()
                other = replace(operation, function=passes, keywords={})
                yield _exchanged(context, at, other, words, {"left out": done})
    yield from _clamps_left_out(context)


def _clamps_left_out(context: ComponentContext) -> Iterator[FaultVariant]:
    """Yield the component without any of its clamps, where it has several."""
    clamps = [each for each in steps_of(context) if each[1].name in _CLAMPS]
    if len(clamps) < 2:
        return

    def change(facts: TracedFacts) -> TracedFacts:
        for at, operation in clamps:
            passes = replace(operation, function=Exchanged(operation.name, _nth(0)), keywords={})
            facts = with_operation(facts, at, passes)
        return facts

    words = f"{context.name} without its clamps"
    yield FaultVariant(words, with_facts(context, change), {"left out": "the clamps"})


_CLAMPS = named("clamp clamp_ clamp_min clamp_max")


def _nth(place: int) -> Callable[..., Any]:
    return lambda *arguments: arguments[place]


def _shape_of(facts: TracedFacts, argument: Any) -> tuple[int, ...]:
    trace = facts.graph.trace
    if isinstance(argument, Ref):
        return trace.tensors[argument.number].shape
    held = trace.parameters.get(argument.name)
    return tuple(trace.buffers[argument.name].shape) if held is None else held.shape


def _named(facts: TracedFacts, arguments: list[Any]) -> str:
    """Say what the other operand of a step is."""
    for argument in arguments:
        if isinstance(argument, ParameterRef):
            return argument.name.rpartition(".")[2]
        if isinstance(argument, Ref):
            names = {ref.number: name for name, ref in facts.traced.inputs.items()}
            maker = _maker(facts, argument.number)
            return names.get(argument.number) or (f"its {maker}" if maker else "the rest")
        if isinstance(argument, float | int) and not isinstance(argument, bool):
            return number(argument)
    return ""


def _maker(facts: TracedFacts, tensor: int) -> str:
    """Return the operation that made a tensor of a component."""
    for at in facts.traced.operations:
        operation = facts.graph.trace.operations[at]
        if tensor in operation.results:
            return operation.name.strip("_")
    return ""


# --------------------------------------------------------------------------------------------------
# Another function in place of a step


def _quick(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_SOFT: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("SiLU", lambda x, **_: functional.silu(x)),
    ("GELU", lambda x, **_: functional.gelu(x)),
    ("GELU by tanh", lambda x, **_: functional.gelu(x, approximate="tanh")),
    ("quick GELU", _quick),
    ("ReLU", lambda x, **_: functional.relu(x)),
    ("the sigmoid", lambda x, **_: torch.sigmoid(x)),
    ("tanh", lambda x, **_: torch.tanh(x)),
)
_FUNCTIONS: Mapping[str, tuple[tuple[str, Callable[..., Any]], ...]] = {
    "silu": _SOFT, "gelu": _SOFT, "relu": _SOFT,
    "_softmax": (("sigmoid", lambda x, *_: torch.sigmoid(x)),),
    "sigmoid": (
        ("softmax", lambda x: torch.softmax(x, -1)),
        ("the root of softplus", lambda x: functional.softplus(x).sqrt()),
    ),
    "mean": (("the sum", torch.sum),),
    "cos": (("the sine", torch.sin),),
    "sin": (("the cosine", torch.cos),),
    "pow": (("the magnitude", lambda x, _power: x.abs()),),
}  # fmt: skip


def _other_functions(context: ComponentContext) -> Iterator[FaultVariant]:
    for at, operation in steps_of(context):
        for words, function in _FUNCTIONS.get(operation.name, ()):
            other = replace(operation, function=Exchanged(operation.name, function))
            done = operation.name.strip("_")
            text = f"{words} in place of {done} in {context.name}"
            yield _exchanged(context, at, other, text, {"function": words})
    if context.component.kind == "traced.norm":
        yield FaultVariant(
            f"{context.name} with the mean of a row taken away first",
            _centred,
            {"function": "mean"},
        )


def _centred(call: Any) -> Any:
    def faulty(inputs: Mapping[str, Tensor], weights: Mapping[str, Any]) -> Any:
        x = inputs["x"].double()
        return call({**inputs, "x": x - x.mean(-1, keepdim=True)}, weights)

    return faulty


# --------------------------------------------------------------------------------------------------
# Another constant

_WITH_CONSTANTS = named(
    "add sub mul div rsub add_ sub_ mul_ div_ clamp clamp_min native_layer_norm _fused_rms_norm"
)


def _constants(context: ComponentContext) -> Iterator[tuple[int, Operation, int, float]]:
    """Yield the numbers that a component computes with: operation, place, value."""
    for at, operation in steps_of(context):
        if operation.name not in _WITH_CONSTANTS:
            continue
        for place, argument in enumerate(operation.arguments):
            if isinstance(argument, float | int) and not isinstance(argument, bool):
                yield at, operation, place, float(argument)


def _with_constant(
    context: ComponentContext, at: int, operation: Operation, place: int, value: float
) -> FaultVariant:
    own = operation.arguments[place]
    arguments = (*operation.arguments[:place], value, *operation.arguments[place + 1 :])
    words = f"{number(value, 4)} in place of {number(float(own), 4)} in {context.name}"
    return _exchanged(
        context, at, replace(operation, arguments=arguments), words, {"constant": value}
    )


def _planted_constants(context: ComponentContext) -> Iterator[FaultVariant]:
    for at, operation, place, value in _constants(context):
        if not 0 < abs(value) < math.inf:
            continue
        others = (1e-2, 1e-1) if abs(value) < _SMALL else (value * 1.05, value * 2)
        if abs(value) >= 1e-15:  # what keeps a quotient from 0 / 0 alone has no effect
            for other in others:
                yield _with_constant(context, at, operation, place, other)


def _fitted_constants(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield known other values of each constant, and the one that fits the outputs."""
    rows = rows_of(record)
    for at, operation, place, value in _constants(context):
        make = partial(_with_constant, context, at, operation, place)

        def left(other: float, make: Any = make) -> float:
            return distance_of(context, rows, make(other))

        small = abs(value) < _SMALL
        named = _EPSILONS if small else (0.0, 1.0, value**2, math.sqrt(abs(value)), 2 * value,
                                         value / 2, -value, 1 / value)  # fmt: skip
        found = fitted_number(left, value or 1.0)
        for other in dict.fromkeys((*named, *found)):
            if other != value:
                yield make(other)


def rows_of(record: CallRecord, count: int = STEPS) -> CallRecord:
    """Return the rows of a record that differ most, where each row stands for itself."""
    sides = (record.inputs, record.outputs, record.expected)
    heights = {side.shape[0] for part in sides for side in part.values() if side.ndim}
    if len(heights) != 1 or max(heights) <= count:
        return record
    far = torch.zeros(max(heights), dtype=torch.float64)
    for name, out in record.outputs.items():
        expected = record.expected.get(name)
        if expected is not None and expected.shape == out.shape and out.ndim:
            gap = (out.double() - expected.double()).abs().nan_to_num(1.0, 1.0, 1.0)
            far += gap.reshape(len(far), -1).sum(1)
    chosen = far.topk(count).indices.sort().values

    def part(side: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor[chosen] if tensor.ndim else tensor for name, tensor in side.items()}

    inputs, outputs, expected_rows = (part(side) for side in sides)
    return replace(
        record, inputs=inputs, outputs=outputs, expected=expected_rows, rows=(), owners=()
    )


def distance_of(context: ComponentContext, record: CallRecord, variant: FaultVariant) -> float:
    """Return the squared distance that a variant leaves; infinite where it cannot run."""
    try:
        made = variant.apply(context.call)(record.inputs, context.weights)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
        return math.inf
    total = 0.0
    for name, out in record.outputs.items():
        if name not in made or made[name].shape != out.shape:
            return math.inf
        total += float((made[name].double() - out.double()).square().sum())
    return total if math.isfinite(total) else math.inf


def fitted_number(left: Callable[[float], float], start: float) -> tuple[float, ...]:
    """Return the number that leaves least, with few digits where these leave as little.

    Empty where no number leaves less than a part of what `start` leaves.
    """
    exponents = torch.linspace(_LOW, _HIGH, _GRID, dtype=torch.float64).tolist()
    far = [left(start * 10**exponent) for exponent in exponents]
    best = min(range(len(far)), key=far.__getitem__)
    low, high = (exponents[min(max(n, 0), len(far) - 1)] for n in (best - 1, best + 1))
    for _ in range(_TURNS):
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if left(start * 10**a) <= left(start * 10**b):
            high = b
        else:
            low = a
    value = start * 10 ** ((low + high) / 2)
    before, after = left(start), left(value)
    if not after < _EXPLAINED * before:
        return ()
    short = [float(f"{value:.{digits}g}") for digits in _DIGITS]
    near = [each for each in short if left(each) <= 1.05 * after + _TINY]
    return (*near[:2], value)


# --------------------------------------------------------------------------------------------------
# The faults, under the family of what the component computes

_FAMILIES: Mapping[str, str] = {
    "traced.norm": "M24", "traced.module": "M24", "traced.stretch": "M24",
    "traced.embedding": "M24", "traced.activation": "M25", "traced.gated": "M25",
    "traced.router": "M26", "traced.topk": "M26", "traced.rotary": "M28", "traced.rotation": "M28",
    "traced.residual": "M23",
}  # fmt: skip


def of_kinds(*kinds: str) -> Callable[[ComponentContext], bool]:
    """Return whether a component is of one of some kinds."""
    return lambda context: context.component.kind in kinds


def _faults(family: str) -> Iterator[ModelFault]:
    here = of_kinds(*(kind for kind, own in _FAMILIES.items() if own == family))
    yield ModelFault(
        f"{family}.step_left_out", "A step is left out", "everything after it is off",
        "Compare the steps of this module with those of the model's definition.", here, _left_out,
    )  # fmt: skip
    yield ModelFault(
        f"{family}.constant", "A step computes with another constant",
        "off by a function of one number", "Read the constant from the model's config.",
        here, _planted_constants, _fitted_constants,
    )  # fmt: skip
    yield ModelFault(
        f"{family}.other_function", "A step goes through another function",
        "off everywhere, hardly where numbers are small",
        "Take the function that the model's config names.", here, _other_functions,
    )  # fmt: skip


TRACED_OPERATION_FAULTS = tuple(
    fault for family in dict.fromkeys(_FAMILIES.values()) for fault in _faults(family)
)
