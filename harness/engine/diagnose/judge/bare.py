"""Operations that belong to no model, as components of one: the search for causes takes them so.

Every product is a linear of a trace that is written down; other operations are traced on tensors
of the shapes that they were given. Catalogue, twin, budgets and words are those of traced models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.diagnose import diagnose
from degarble.harness.engine.diagnose.judge.report import Causes, NamedCause
from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext
from degarble.harness.engine.faults.registry import faults_of_kernel
from degarble.harness.engine.faults.traced.unquantised import unquantised_faults
from degarble.harness.formats.layouts import LINEAR
from degarble.harness.formats.number_formats import NibbleOrder, ScaleDirection
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import component_named
from degarble.harness.model.recipes import BF16, READ_ACTIVATIONS, Formats, Recipe
from degarble.references.linears import BLOCK_SCALE, CODES, TENSOR_SCALE, X, decode_activations
from degarble.references.numerics import DecodedOperands, Numerics
from degarble.references.traced.family import TracedConfig, TracedModel, logical_name, site_name
from degarble.references.traced.graph import Graph, StretchKind, TracedComponent, name_of
from degarble.references.traced.trace import BoundaryKind, Ref, Trace, TracedTensor, trace_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from degarble.harness.engine.diagnose.judge.product import MatrixOperand, Product
    from degarble.harness.engine.faults.model_faults import ModelFault
    from degarble.harness.formats.quantise import QuantisedTensor
    from degarble.harness.model.parameters import Parameter

_TOKENS = 1009  # any number: products have rows of their own


class BareProduct(NamedTuple):
    """A weight with its bias, and the dtype of what is returned."""

    weight: Weight
    bias: Weight | None
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Config(TracedConfig):
    """The config of products that stand side by side; two are equal only if they are the same."""

    made: Graph | None = None
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def whole(self) -> Graph:
        """Return the written graph."""
        assert self.made is not None, "made with one"
        return self.made


@dataclass(frozen=True, eq=False)
class _Operands(Recipe):
    """The formats of operands as they were given."""

    formats: Mapping[str, Formats] = field(default_factory=dict)
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def format_of(self, parameter: Parameter) -> Formats:
        """Return the formats of a weight, and of the input in front of it."""
        return self.formats.get(parameter.name, Formats(BF16, BF16))


def bare_context(
    name: str,
    products: Mapping[str, BareProduct],
    activation: str | None = None,
    operands: DecodedOperands = DecodedOperands.EXACT,
) -> ComponentContext:
    """Return one of several products as a component; `activation`: the format of its codes."""
    graph, weights = _graph(products), _Weights(products)
    config: Any = _Config("{}", made=graph)
    formats = {
        logical_name(f"{each}.weight"): Formats(
            _format(product.weight), (activation or BF16) if each == name else BF16
        )
        for each, product in products.items()
    }
    recipe = _Operands("operands", (), formats)
    numerics = Numerics.twin().with_switches(decoded_operands=operands)
    dtype = products[name].dtype
    if dtype is not torch.float32:
        numerics = replace(numerics, store=dtype)
    bound = TracedModel(config, numerics, weights, recipe)
    component = component_named(config, site_name(name_of(name)), recipe)
    return ComponentContext(bound, component, recipe)


def _format(weight: Weight) -> str:
    return BF16 if weight.storage is None else weight.storage.format.name


class _Weights(dict[str, Weight]):
    """Weights and biases by our names."""

    def __init__(self, products: Mapping[str, BareProduct]) -> None:
        super().__init__()
        for name, product in products.items():
            self[logical_name(f"{name}.weight")] = product.weight
            if product.bias is not None:
                self[logical_name(f"{name}.bias")] = product.bias


def _graph(products: Mapping[str, BareProduct]) -> Graph:
    tensors: list[TracedTensor] = []
    parameters: dict[str, TracedTensor] = {}
    components, makers = [], {}

    def tensor(shape: tuple[int, ...], dtype: torch.dtype, axis: int | None) -> Ref:
        tensors.append(TracedTensor(shape, dtype, len(tensors), axis))
        return Ref(len(tensors) - 1)

    tokens, positions = (tensor((1, _TOKENS), torch.int64, 1) for _ in range(2))
    out = tokens
    for name, product in products.items():
        count, width = product.weight.shape
        x = tensor((1, _TOKENS, width), product.dtype, 1)
        out = tensor((1, _TOKENS, count), product.dtype, 1)
        own = [f"{name}.weight", f"{name}.bias"][: 1 + (product.bias is not None)]
        for parameter, shape in zip(own, ((count, width), (count,)), strict=False):
            parameters[parameter] = TracedTensor(shape, product.dtype, -1, None)
        components.append(
            TracedComponent(
                name_of(name), BoundaryKind.LINEAR, {X: x}, {"out": out}, (), tuple(own), name
            )
        )
        makers[out.number] = name_of(name), "out"
    trace = Trace((*tensors,), (), (), (), tokens, positions, out, parameters, {})
    graph = Graph(trace, (*components,), {}, makers, lambda _tokens: graph)
    return graph


# --------------------------------------------------------------------------------------------------
# An operation of any kind: traced on tensors of the shapes that it was given


class BareOperation(NamedTuple):
    """A function of inputs and parameters by name, whose outputs it returns by name."""

    name: str
    kind: BoundaryKind | StretchKind
    function: Callable[..., Mapping[str, Tensor]]
    inputs: Mapping[str, Any]
    parameters: Mapping[str, Tensor]


def operation_causes(operation: BareOperation, outputs: Mapping[str, Tensor]) -> Causes:
    """Search what explains an operation that differs; nothing where it cannot be traced."""
    try:
        context, inputs = _operation_context(operation, outputs)
        with torch.no_grad():
            expected = context.call(inputs, context.weights)
        forms = {name: tensor.shape for name, tensor in expected.items()}
        if forms != {name: tensor.shape for name, tensor in outputs.items()}:
            return Causes()
        return causes_of(context, [CallRecord(inputs, outputs, expected)])
    except _UNTRACED:
        return Causes()  # it asks for values, or for a budget that has no derivation


_UNTRACED = (*CANNOT_RUN, NotImplementedError, TypeError, AttributeError)


def _operation_context(
    operation: BareOperation, outputs: Mapping[str, Tensor]
) -> tuple[ComponentContext, dict[str, Tensor]]:
    name = _NO_NAME.sub("_", operation.name).strip("_") or "operation"
    root, held = nn.Module(), nn.Module()
    for key, value in operation.parameters.items():
        held.register_parameter(key, nn.Parameter(value.double().to("meta"), requires_grad=False))
    root.add_module(name, held)
    wide = {
        key: each.double() if isinstance(each, Tensor) and each.is_floating_point() else each
        for key, each in operation.inputs.items()
    }

    def function(given: Mapping[str, Any], module: nn.Module) -> Mapping[str, Tensor]:
        return operation.function(given, dict(module.get_submodule(name).named_parameters()))

    trace, inputs, ends = trace_function(function, wide, root)
    tensors = list(trace.tensors)
    for key, ref in ends.items():
        dtype = outputs[key].dtype if key in outputs else torch.float32
        tensors[ref.number] = replace(tensors[ref.number], dtype=dtype)
    trace = replace(trace, tensors=(*tensors,))
    read = tuple(f"{name}.{key}" for key in operation.parameters)
    component = TracedComponent(
        name, operation.kind, inputs, ends, tuple(range(len(trace.operations))), read, name
    )
    makers = {ref.number: (name, key) for key, ref in ends.items()}
    graph = Graph(trace, (component,), {}, makers, lambda _tokens: graph)
    config: Any = _Config("{}", made=graph)
    recipe = _Operands("operands", ())
    numerics = Numerics.twin()
    dtypes = {output.dtype for output in outputs.values()} - {torch.float32}
    if dtypes:
        numerics = replace(numerics, store=dtypes.pop())
    weights = {
        logical_name(f"{name}.{key}"): Weight(value=value.detach().cpu())
        for key, value in operation.parameters.items()
    }
    bound = TracedModel(config, numerics, weights, recipe)
    known = component_named(config, site_name(name), recipe)
    # Traced at these extents, it cannot be cut to some rows.
    whole = tuple(replace(each, via="state") for each in known.inputs)
    context = ComponentContext(bound, replace(known, inputs=whole), recipe)
    return context, {key: wide[key] for key in inputs}


_NO_NAME = re.compile(r"\W+")


# --------------------------------------------------------------------------------------------------
# A call of one product


class BareCall(NamedTuple):
    """A product by its name, and what came out of it [rows, N]."""

    name: str
    product: Product
    output: Tensor


def product_causes(
    call: BareCall,
    reference: Mapping[str, Tensor],
    others: Mapping[str, BareProduct] = MappingProxyType({}),
    more: Sequence[tuple[Product, Tensor]] = (),
    only: frozenset[str] | None = None,
) -> Causes:
    """Search what explains a product that differs.

    `reference` holds operands as they were before they were quantised. `others` are further
    products by name, whose weights it may have taken; `more` are further calls of this one. With
    `only`, nothing else is tried than these faults.
    """
    product, name = call.product, call.name
    (form, inputs), plain = _inputs(product.x), reference.get("x")
    bias = None if product.bias is None else Weight(value=product.bias)
    own = BareProduct(stored_weight(product.w), bias, product.dtype)
    context = bare_context(name, {**others, name: own}, form, product.operands)
    if form is not None and plain is not None:
        inputs[X] = plain.reshape(-1, plain.shape[-1])
    records = [_record(context, inputs, call.output)]
    for each, output in more:
        kind, given = _inputs(each.x)
        if kind == form:
            records.append(_record(context, given, output))
    faults = faults_of_kernel(context)
    if reference:
        quantised = {"x": product.x.quantised, "w": product.w.quantised}
        faults += unquantised_faults(reference, quantised)
    if only is not None:
        faults = [fault for fault in faults if fault.id in only]
    names = {site_name(name_of(each)): each for each in (*others, name)}
    return causes_of(context, records, faults, names)


def _record(context: ComponentContext, inputs: Mapping[str, Tensor], output: Tensor) -> CallRecord:
    with torch.no_grad():
        expected = context.call(inputs, context.weights)
    return CallRecord(inputs, {"out": output}, expected)


def causes_of(
    context: ComponentContext,
    records: Sequence[CallRecord],
    faults: Iterable[ModelFault] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Causes:
    """Search what explains calls of a component; `names` are those of the caller by ours."""
    found = diagnose(context, records, faults)
    named = tuple(
        NamedCause(
            cause.id, " and ".join(fault.title for fault in cause.faults), cause.evidence,
            cause.ratio, cause.variant.words.replace(context.name, "it"),
            names.get(str(cause.variant.where.get("taken")), ""), cause.variant.words,
        )
        for cause in found.named
    )  # fmt: skip
    tried = tuple(each.fault for each in found.excluded)
    return Causes(named, tried, found.described, found.confidence, found.wanted)


def stored_weight(operand: MatrixOperand) -> Weight:
    """Return an operand as a weight, in the format in which it is stored."""
    if operand.quantised is not None:
        return Weight.of(operand.quantised)
    return Weight(value=operand.values)


def _inputs(x: MatrixOperand) -> tuple[str | None, dict[str, Tensor]]:
    """Return an input as a linear takes it: codes with their format, or plain numbers."""
    tensor = x.quantised
    if tensor is None or tensor.format.name not in READ_ACTIVATIONS:
        return None, {X: x.values}
    for form, inputs in _coded(tensor):
        made = decode_activations(inputs, form, torch.float64).reshape(x.values.shape)
        if torch.equal(made.float(), x.values.float()):
            return form, inputs
    return None, {X: x.values}


def _coded(tensor: QuantisedTensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
    plain = tensor.with_layout(LINEAR)
    if plain.format.packed:
        plain = plain.with_nibble_order(NibbleOrder.LOW_EVEN)
    if plain.tensor_scale is not None:
        plain = plain.with_direction(ScaleDirection.DECODE)
    scale = plain.tensor_scale
    codes, blocks = plain.codes, plain.block_scale
    if scale is not None and scale.ndim:
        codes, blocks, scale = codes.flatten(0, -2), blocks.flatten(0, -2), scale.flatten()
    found = {CODES: codes, BLOCK_SCALE: blocks}
    yield tensor.format.name, found if scale is None else {**found, TENSOR_SCALE: scale}
