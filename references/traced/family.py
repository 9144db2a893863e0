"""The family of every causal language model that transformers can build.

A config is the model's own config.json; structure, wiring and definitions come from one trace of
its forward pass. Components of it are called like those of the hand-written families: named rows of
all tokens of a call, sequences one after the other.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from degarble.harness.base.errors import InvalidArgument, NotBuilt, Undecided
from degarble.harness.formats.number_formats import FP8_1X128_F32, FP8_1X128_UE8M0, FP8_128X128_F32
from degarble.harness.formats.weight import Weight
from degarble.harness.model.components import Component, Input, quantised_input
from degarble.harness.model.family import VIEW
from degarble.harness.model.parameters import Parameter, Row, parameter_named
from degarble.harness.model.recipes import UNQUANTISED, Recipe
from degarble.harness.model.sites import Port, Site
from degarble.harness.model.types import Block, Dtype, Kind, LayerType, MlpType
from degarble.references import linears
from degarble.references.binding import BoundModel, FetchedWeights
from degarble.references.facts import (
    ModelFacts,
    formats_by_block,
    local_name,
    rows_kept,
    spans_of,
)
from degarble.references.linears import (
    InputQuantiser,
    activation_values,
    holds_codes,
    largest_scale,
    table_rows,
    weight_rows,
    weight_values,
    with_powers_of_two,
)
from degarble.references.numerics import BlockScaleUse, DecodedOperands, InputQuantisation, cast
from degarble.references.traced.attention import FIRST_KEY, MASK, admitted_keys
from degarble.references.traced.definitions import (
    EXPERTS_OUT,
    EachOperation,
    Roundings,
    cache_scale,
    compute,
)
from degarble.references.traced.evaluate import joined, view_of
from degarble.references.traced.graph import Graph, StretchKind, TracedComponent, cut, name_of
from degarble.references.traced.spans import ComponentSpan, coarsened
from degarble.references.traced.trace import BoundaryKind, refused_config, trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from degarble.references.facts import Inputs, Outputs, Span, Weights

FAMILY = "traced"
_LAYER = re.compile(r"layers\.(\d+)\.")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_KINDS: Mapping[BoundaryKind | StretchKind, Kind] = {
    BoundaryKind.LINEAR: Kind.LINEAR,
    BoundaryKind.EXPERTS: Kind.LINEAR,
    BoundaryKind.EMBEDDING: Kind.EMBEDDING,
    BoundaryKind.NORM: Kind.NORM,
}
STATE = "state_"


@dataclass(frozen=True)
class TracedConfig:
    """A model of transformers: its config.json as text, and the dtype that it computes in."""

    text: str
    dtype: str = "bfloat16"
    recorded: tuple[str, ...] = ()  # tensors of a run that recorded few; empty: every one
    cache: str = ""  # the format of cached keys and values, by stored scales; empty: as they are
    family: ClassVar[str] = FAMILY

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> TracedConfig:
        """Read a config.json."""
        stated = raw.get("dtype", raw.get("torch_dtype"))
        return cls(
            json.dumps(dict(raw), sort_keys=True), stated if stated in _DTYPES else "bfloat16"
        )

    @cached_property
    def graph(self) -> Graph:
        """Return the components that a run shows; transformers is imported here."""
        return coarsened(self.whole, self.recorded) if self.recorded else self.whole

    @property
    def whole(self) -> Graph:
        """Return all traced components."""
        return _graph(self.text, self.dtype)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """Return the config.json."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids."""
        return int(self.graph.trace.tensors[self.graph.trace.logits.number].shape[-1])

    @property
    def hidden_size(self) -> int:
        """Return the width of the states between layers."""
        graph = self.graph
        embeddings = (c for c in graph.components if c.kind is BoundaryKind.EMBEDDING)
        outputs = (ref for component in embeddings for ref in component.outputs.values())
        return int(max((graph.trace.tensors[ref.number].shape[-1] for ref in outputs), default=0))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype that the model computes in."""
        return _DTYPES[self.dtype]

    @property
    def max_position_embeddings(self) -> int | None:
        """Return how many positions the model has."""
        return self.raw.get("max_position_embeddings")

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """Return the decoder layers."""
        numbers = [component.layer for component in self.graph.components]
        count = 1 + max((number for number in numbers if number is not None), default=-1)
        return tuple(_block(number) for number in range(count))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return the decoder layers; drafters have no reference."""
        return self.layers

    @property
    def drafters(self) -> int:
        """Return 0."""
        return 0


def _block(number: int) -> Block:
    return Block("layers", number, LayerType.TRACED, MlpType.TRACED, 0)


@lru_cache(maxsize=4)
def _graph(text: str, dtype: str) -> Graph:
    config = transformers_config(text)

    @lru_cache(maxsize=8)
    def again(tokens: int) -> Graph:
        return cut(trace(config, _DTYPES[dtype], tokens), again)

    return cut(trace(config, _DTYPES[dtype]), again)


def _number_of(stated: dict[str, Any]) -> Any:
    """Return a number that JSON lacks, as transformers 5 spells it: {"__float__": "Infinity"}."""
    return float(stated["__float__"]) if {*stated} == {"__float__"} else stated


def transformers_config(text: str) -> Any:
    """Return transformers' own config of a config.json; a checkpoint's code is never run."""
    from transformers import (  # noqa: PLC0415  heavy
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
    )

    raw = json.loads(text, object_hook=_number_of)
    kind, code = raw.pop("model_type", None), raw.pop("auto_map", None)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        expected = "an architecture of transformers"
        if code is not None:
            expected += "; a checkpoint's code is never run"
        raise InvalidArgument(
            "model_type", kind, expected,
            "Update transformers, or register a family with a reference of its own: an entry point"
            " of degarble.families, as docs/architecture.md describes.",
        )  # fmt: skip
    raw.pop("quantization_config", None)
    try:
        config = AutoConfig.for_model(kind, **raw)
    except Exception as error:
        raise refused_config(kind, error) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NotBuilt(
            "model_type", kind, "a causal language model of transformers",
            "Register a family with a reference of its own for this model.",
        )  # fmt: skip
    return config


# --------------------------------------------------------------------------------------------------
# Components and parameters


def site_name(name: str) -> str:
    """Return a name that the grammar of sites has: lower case, words that begin with a letter."""
    words: list[str] = []
    for word in name.split("."):
        plain = re.sub(r"[^a-z0-9_]", "_", word.lower())
        if words and not plain[:1].isalpha() and not (words[-1] == "layers" and len(words) == 1):
            words[-1] += f"_{plain}"
        else:
            words.append(f"{plain}_" if plain in set(Port) else plain)
    return ".".join(words)


def is_sequential(component: TracedComponent) -> bool:
    """Return whether a token's result depends on the tokens before it."""
    return component.kind is BoundaryKind.ATTENTION or keeps_state(component)


def keeps_state(component: TracedComponent) -> bool:
    """Return whether it reads what earlier calls left."""
    if isinstance(component, ComponentSpan):
        return component.is_along_tokens
    return component.kind is BoundaryKind.CACHE or component.is_recurrent


def traced_components(config: TracedConfig, recipe: Recipe) -> tuple[Component, ...]:
    """List the components of the trace, with the quantised inputs of a recipe."""
    return tuple(component for component, _ in _pairs(config, recipe))


def traced_pairs(
    config: TracedConfig, recipe: Recipe | None = None
) -> tuple[tuple[Component, TracedComponent | None], ...]:
    """Return the components with what was traced; a quantisation of an input was not."""
    return _pairs(config, recipe or Recipe("bf16", ()))


@lru_cache(maxsize=8)
def _pairs(
    config: TracedConfig, recipe: Recipe
) -> tuple[tuple[Component, TracedComponent | None], ...]:
    found: list[tuple[Component, TracedComponent | None]] = []
    for component, traced in zip(_plain(config), config.graph.components, strict=True):
        if traced.kind is BoundaryKind.LINEAR:
            known: Any = config
            weight = parameter_named(known, component.weights[0])
            *quantised, linear = quantised_input(component, (weight,), recipe)
            found += [(each, None) for each in quantised]
            found.append((linear, traced))
        else:
            found.append((component, traced))
    return tuple(found)


@lru_cache(maxsize=8)
def _plain(config: TracedConfig) -> tuple[Component, ...]:
    """Return the components without quantised inputs."""
    graph = config.graph
    names = {component.name: site_name(component.name) for component in graph.components}
    found = []
    for traced in graph.components:
        name = names[traced.name]
        layer = traced.layer
        block = None if layer is None else config.layers[layer]
        inputs = [
            _input(graph, names, input_name, ref.number)
            for input_name, ref in traced.inputs.items()
        ]
        if is_sequential(traced):
            needed = [n for n in traced.inputs if n not in {*traced.whole, "positions"}]
            kept = needed if keeps_state(traced) else []
            if "positions" not in traced.inputs:
                inputs.append(Input("positions", (), "positions"))
            inputs.append(Input("token_offsets", (), "offsets"))
            inputs += [Input(f"{STATE}{each}", (), "state") for each in kept]
        role = name.removeprefix(f"{block.prefix}.") if block else name
        read = (each for each in traced.parameters if each not in graph.trace.buffers)
        # The matrix of a linear comes first, its bias after it.
        weights = tuple(map(logical_name, sorted(read, key=lambda each: each.endswith("bias"))))
        weights += cache_scales(config, traced)
        found.append(
            Component(
                name, role, block, tuple(inputs), tuple(traced.outputs), weights,
                kind=f"traced.{traced.kind}",
            )
        )  # fmt: skip
    return tuple(found)


def _input(graph: Graph, names: Mapping[str, str], name: str, number: int) -> Input:
    if number == graph.trace.positions.number:
        return Input(name, (), "positions")
    if number == graph.trace.tokens.number:
        return Input(name, (), "tokens")
    via, edge = "", graph.edges.get(number)
    if edge is not None:
        (source,) = edge.sources
        number, via = source.number, f"{VIEW}{number}"
        if number in (graph.trace.positions.number, graph.trace.tokens.number):
            return Input(name, (), via)
    if number not in graph.makers:
        return Input(name, (), "")  # of an operation that no model has
    component, output = graph.makers[number]
    site = Site(names[component], Port.OUT, "" if output == "out" else output)
    return Input(name, (site,), via)


def arrived(config: TracedConfig, via: str, made: Tensor) -> Tensor | None:
    """Return an output as the view of it that a component is given; None for no view."""
    edge = config.graph.edges.get(int(via.removeprefix(VIEW))) if via.startswith(VIEW) else None
    if edge is None or len(edge.sources) != 1:
        return None
    (source,) = edge.sources
    number = int(via.removeprefix(VIEW))
    return view_of(config.graph.trace, edge, {source.number: made}, number)


def rows_needed(config: TracedConfig, component: Component, earlier: int) -> int | None:
    """Return how many earlier rows the next token attends to in what a cache gives it."""
    reader = _readers(config).get(component.name)
    if reader is None or "mask" in reader.inputs:
        return None
    admitted = admitted_keys(reader.facts.get("mask"), 1, earlier + 1)[0, :earlier].nonzero()
    return earlier - int(admitted[0]) if len(admitted) else 0


@lru_cache(maxsize=8)
def _readers(config: TracedConfig) -> Mapping[str, TracedComponent]:
    """Return the attention that reads each cache, by the cache's name."""
    graph = config.graph
    caches = {
        ref.number: site_name(each.name)
        for each in graph.components
        if each.kind is BoundaryKind.CACHE
        for ref in each.outputs.values()
    }
    found: dict[str, TracedComponent] = {}
    for each in graph.components:
        key = each.inputs.get("key")
        if each.kind is BoundaryKind.ATTENTION and key is not None:
            edge = graph.edges.get(key.number)
            sources = () if edge is None else edge.sources
            numbers = (key.number, *(ref.number for ref in sources))
            found |= {caches[number]: each for number in numbers if number in caches}
    return found


def logical_name(parameter: str) -> str:
    """Return our name of a parameter of the model."""
    return site_name(name_of(parameter))


@lru_cache(maxsize=8)
def traced_parameters(config: TracedConfig) -> tuple[Parameter, ...]:
    """List every parameter that a component reads."""
    graph, found = config.graph, dict[str, Parameter]()
    for traced in graph.components:
        for name in traced.parameters:
            held = graph.trace.parameters.get(name)
            known = found.get(logical_name(name))
            if known is not None and known.row.hf != name:
                raise NotBuilt(
                    "parameters", f"{known.row.hf} and {name}",
                    "parameters of different layers or modules, by their names",
                    "Register a family with a reference of its own for this model.",
                )  # fmt: skip
            if held is None or known is not None:
                continue
            layer = traced.layer
            block = None if layer is None else config.layers[layer]
            kind = _KINDS.get(traced.kind, Kind.PLAIN)
            if kind is Kind.LINEAR and not (name.endswith(".weight") or len(held.shape) == 3):
                kind = Kind.PLAIN
            reader = local_name(site_name(traced.name), block)
            row = Row(local_name(logical_name(name), block), name, "", kind, Dtype.BF16, reader)
            found[logical_name(name)] = Parameter(logical_name(name), held.shape, row, block)
        for name in cache_scales(config, traced):
            block = None if traced.layer is None else config.layers[traced.layer]
            reader = local_name(site_name(traced.name), block)
            row = Row(local_name(name, block), name, "", Kind.PLAIN, Dtype.F32, reader)
            found[name] = Parameter(name, (), row, block)
    return tuple(found.values())


def cache_scales(config: TracedConfig, traced: TracedComponent) -> tuple[str, ...]:
    """Return our names of the scales by which a component caches keys and values."""
    parts = traced.parts if isinstance(traced, ComponentSpan) else (traced,)
    return tuple(
        logical_name(cache_scale(part.module, side))
        for part in parts
        if config.cache and part.kind is BoundaryKind.CACHE
        for side in part.inputs
    )


def cached_heads(config: TracedConfig) -> dict[str, int]:
    """Return how many heads share each cache, by our names of its scales."""
    graph = config.graph
    return {
        logical_name(cache_scale(part.module, side)): graph.trace.tensors[ref.number].shape[1]
        for each in graph.components
        for part in (each.parts if isinstance(each, ComponentSpan) else (each,))
        if config.cache and part.kind is BoundaryKind.CACHE
        for side, ref in part.inputs.items()
    }


def cache_quantiser(config: TracedConfig, scale: Tensor) -> InputQuantiser:
    """Return how rows of keys or values [T, G, D] are cached, by one scale or one a head."""
    own = scale.reshape(()) if scale.numel() == 1 else scale.reshape(1, -1)
    return InputQuantiser(config.cache, own)


# --------------------------------------------------------------------------------------------------
# Calls


@dataclass(frozen=True)
class TracedFacts(ModelFacts):
    """What a component is bound to."""

    graph: Graph
    traced: TracedComponent
    config: Any

    def norm_epsilon(self, weight: str) -> float:
        """Raise: an epsilon is a constant of the trace."""
        raise NotImplementedError(weight)

    def parameter(self, weights: Weights) -> ComponentParameters:
        """Return the values of parameters by their names in the model."""
        return ComponentParameters(self, weights)

    def activation(self, weight: str) -> str | None:
        """Return the recipe's format; a run may leave all inputs as they are."""
        if self.numerics.switches.quantised_inputs is InputQuantisation.NONE:
            return None
        form = super().activation(weight)
        rounds = self.block_scales is not BlockScaleUse.STATED and form == FP8_1X128_F32.name
        return FP8_1X128_UE8M0.name if rounds else form

    @property
    def summed_over_ranks(self) -> bool:
        """Return whether ranks split a linear along its input: what attention or a gate returns."""
        number = self.traced.inputs["x"].number
        edge = self.graph.edges.get(number)
        maker, _ = self.graph.makers.get(edge.sources[0].number if edge else number, ("", ""))
        made = next((each for each in self.graph.components if each.name == maker), None)
        last = made.parts[-1] if isinstance(made, ComponentSpan) else made
        return last is not None and last.kind in {BoundaryKind.ATTENTION, StretchKind.GATED}

    @property
    def block_scales(self) -> BlockScaleUse:
        """Return how a run treats the scales of FP8 blocks."""
        switches = self.numerics.switches
        experts = self.traced.kind is BoundaryKind.EXPERTS
        return switches.expert_block_scales if experts else switches.block_scales

    def with_powers_of_two(self, name: str, weight: Weight) -> Weight:
        """Return a weight in FP8 blocks with scales that are powers of two; others as they are."""
        form = self.formats.get(name, UNQUANTISED).weight
        return with_powers_of_two(weight) if form == FP8_128X128_F32.name else weight

    def quantiser(self, form: str, scale: Tensor | None) -> InputQuantiser:
        """Return how a run quantises to a format, by a stored scale where there is one."""
        stepwise = self.numerics.switches.quantised_inputs is InputQuantisation.STEPWISE
        return InputQuantiser(
            form, scale, self.numerics.store if stepwise else None,
            self.numerics.decoded if self.numerics.operands is DecodedOperands.BOTH else None,
        )  # fmt: skip

    def multiplied(self, x: Tensor, weight: Weight, *, coded: bool) -> tuple[Tensor, Weight]:
        """Return an input and the weight that it is multiplied by, where that has factors for it.

        Factors are multiplied into the input and stored, before its codes are made where there are
        codes, or decoded into the weight.
        """
        if weight.channel_scale is None:
            return x, weight
        if not (coded or self.applies_factors):
            whole = weight.value is None  # products read a plain value as it is
            return x, weight if whole else Weight(
                value=weight.values(torch.float64), from_codes=weight.from_codes
            )
        return x if coded else self.with_factors(x, weight).to(x.dtype), weight.without_factors()

    def with_factors(self, x: Tensor, weight: Weight) -> Tensor:
        """Return an input times the factors of a weight, as memory holds the product."""
        if weight.channel_scale is None:
            return x
        return cast(x.double() * weight.channel_scale.double(), self.numerics.store)

    @property
    def applies_factors(self) -> bool:
        """Return whether a run multiplies inputs by their factors."""
        return self.numerics.switches.input_factors_applied and not self.numerics.exact

    def quantised_operand(self, x: Tensor, weights: Weights) -> tuple[Tensor, InputQuantiser]:
        """Return an input with its factors, and how it is quantised."""
        return self.with_factors(x, next(iter(weights.values()))), self.of_input(weights)

    def of_input(self, weights: Weights) -> InputQuantiser:
        """Return how the input of the linear that has these weights is quantised."""
        form = self.activation(next(iter(weights)))
        assert form is not None, "bound only where inputs are quantised"
        return self.quantiser(form, largest_scale(weights.values()))

    @property
    def roundings(self) -> Roundings:
        """Return what a run stores on the way to the outputs."""
        if isinstance(self.traced, ComponentSpan) or not self.stores_operations:
            return Roundings()
        return EachOperation(sums=self.numerics.switches.expert_sums_stored)

    @property
    def stores_operations(self) -> bool:
        """Return whether a run stores the result of every operation, as eager code does."""
        switches = self.numerics.switches
        stored = switches.operations_stored
        if self.traced.kind is BoundaryKind.ATTENTION:
            stored = switches.attention_operations_stored
        elif self.traced.kind is BoundaryKind.EXPERTS:
            stored = switches.expert_operations_stored
        return stored and not self.numerics.exact

    def stored(self, output: str, value: Tensor) -> Tensor:
        """Return an output in the dtype in which the model holds it."""
        if not value.is_floating_point() or self.numerics.exact:
            return value
        dtype = self.graph.trace.tensors[self.traced.outputs[output].number].dtype
        wide = dtype in {torch.float32, torch.complex64}
        return cast(value, torch.float32 if wide else self.numerics.store)


class ComponentParameters:
    """The parameters that a call reads, by their names in the model, in float64."""

    def __init__(self, facts: TracedFacts, weights: Weights) -> None:
        self._facts, self._weights = facts, weights
        self._read: dict[str, Weight] = {}

    def __call__(self, name: str) -> Tensor:
        """Return all values of a parameter."""
        buffers = self._facts.graph.trace.buffers
        if name in buffers:
            return buffers[name]
        return weight_values(self._weight(name), torch.float64, self._facts.numerics)

    def count(self, name: str) -> int:
        """Return the extent of a parameter's first axis."""
        return self._weight(name).shape[0]

    def entry(self, name: str, number: int) -> Tensor:
        """Return one entry of the first axis, such as an expert; no other is decoded."""
        part = slice(number, number + 1)
        return weight_rows(self._weight(name), part, torch.float64, self._facts.numerics)[0]

    def table(self, name: str, numbers: Tensor) -> Tensor:
        """Return some rows of a table; a plain one is widened in these alone."""
        buffers = self._facts.graph.trace.buffers
        if name in buffers or self._weight(name).is_decoded:
            return self(name)[numbers]
        return table_rows(self._weight(name), numbers, torch.float64)

    def quantiser(self, name: str, expert: int | None = None) -> InputQuantiser | None:
        """Return how the input of a weight is quantised, for one of its experts."""
        local, facts = self._local(name), self._facts
        form = facts.activation(local)
        if form is None:
            return None
        scale = self._weight(name).input_scale
        if scale is not None and expert is not None and scale.ndim:
            shared = facts.numerics.switches.expert_input_scale_shared
            scale = scale.amax() if shared else scale[expert]
        made = facts.quantiser(form, None if scale is None else scale.float().reshape(()))
        within = expert is not None and name.endswith(EXPERTS_OUT)
        parts = facts.numerics.switches.expert_width_parts if within else 1
        return made if parts == 1 else replace(made, ranks=parts)

    def short_summed(
        self, name: str, number: int, x: Tensor, quantiser: InputQuantiser
    ) -> Tensor | None:
        """Return the product of a stack's entry as a tensor core sums FP8; None where none does."""
        weight, numerics = self._weight(name), self._facts.numerics
        return linears.short_summed_entry(x, quantiser, weight, number, numerics)

    def cached(self, module: str, side: str) -> InputQuantiser | None:
        """Return how keys or values are cached."""
        facts = self._facts
        scale = self._weights.get(self._local(cache_scale(module, side)))
        if scale is None or facts.numerics.exact or not facts.numerics.switches.cache_quantised:
            return None
        return cache_quantiser(facts.config, scale.values(torch.float32))

    def _weight(self, name: str) -> Weight:
        if name not in self._read:
            self._read[name] = self._weights[self._local(name)]
        return self._read[name]

    def _local(self, name: str) -> str:
        return local_name(logical_name(name), self._facts.block)


def computed(facts: TracedFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Compute a component as it was traced."""
    if isinstance(facts.traced, ComponentSpan):
        require_plain_activations(facts, weights)
    _require_first_frequencies(facts, inputs)
    made = compute(facts.graph, facts.traced, inputs, facts.parameter(weights), facts.roundings)
    return {name: facts.stored(name, value) for name, value in made.items()}


def _require_first_frequencies(facts: TracedFacts, inputs: Inputs) -> None:
    """Raise where the longest sequence of a call decides by which frequencies all rows turn."""
    positions, most = facts.graph.trace.positions, facts.graph.trace.most_tokens
    for name, ref in facts.traced.inputs.items():
        if ref == positions and int(inputs[name].max()) >= most:
            raise Undecided(
                f"{facts.traced.name}: position", int(inputs[name].max()),
                f"less than {most}, from where on this model changes its frequencies",
                "Capture shorter prompts, or fewer new tokens.",
            )  # fmt: skip


def require_plain_activations(facts: TracedFacts, weights: Weights) -> None:
    """Raise if a linear within a span quantises what it is given: its codes may step either way."""
    for name in weights:
        if facts.activation(name) is not None:
            raise Undecided(
                f"{facts.traced.name}: activations", facts.activation(name),
                f"the input of {name} recorded, so that its codes are known",
                "Record the inputs of quantised linears as well.",
            )  # fmt: skip


def act_quant(facts: TracedFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Quantise the input of a linear."""
    x, quantiser = facts.quantised_operand(inputs["x"], weights)
    return quantiser.codes(x)


def linear(facts: TracedFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Apply a linear, with its bias where it has one."""
    name = next(weight for weight in weights if weight.endswith("weight"))
    numerics = facts.numerics
    out = linears.short_summed(inputs, facts.activation(name), weights[name], numerics)
    if out is None:
        x = activation_values(inputs, facts.activation(name), numerics.products, numerics)
        x, weight = facts.multiplied(x, weights[name], coded=holds_codes(inputs))
        out = linears.product(x, weight, numerics.products, numerics)
    for bias in weights:
        if bias != name:
            out = out + weights[bias].values(out.dtype)
    return {"out": facts.stored("out", out)}


def sequential(facts: TracedFacts, inputs: Inputs, weights: Weights) -> Outputs:
    """Compute a component sequence by sequence, after what earlier calls left of each."""
    made = [
        {name: rows[-count:] for name, rows in computed(facts, given, weights).items()}
        for given, count in by_sequence(facts.traced, inputs)
    ]
    return {name: joined(part[name] for part in made) for name in made[0]}


def by_sequence(traced: TracedComponent, inputs: Inputs) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Yield the inputs of each sequence, and how many rows of the outputs are asked for."""
    spans = spans_of(inputs)
    if traced.kind is BoundaryKind.ATTENTION:
        lengths = rows_kept(inputs["key"].shape[0], [span.stop for span in spans])
        begun = 0
        for span, length in zip(spans, lengths, strict=True):
            keys = slice(begun, begun + length)
            begun += length
            given = {
                name: inputs[name][span.tokens if name in {"query", MASK} else keys]
                for name in traced.inputs
            }
            if MASK in given:
                given[MASK] = given[MASK][..., :length]
            given[FIRST_KEY] = torch.tensor(span.stop - length)
            yield given, span.count
        return
    begun, at, earlier = 0, 0, _earlier(inputs, spans)
    for span, length in zip(spans, earlier, strict=True):
        given = {}
        for name in traced.inputs:
            state = inputs.get(f"{STATE}{name}")
            if name in traced.whole:
                given[name] = inputs[name][at : at + span.stop]
                continue
            if name == "positions":
                given[name] = torch.arange(span.stop)
                continue
            rows = inputs[name][span.tokens]
            if state is not None:
                rows = joined([state[begun : begun + length].to(rows.dtype), rows])
            given[name] = rows
        begun += length
        at += span.stop
        whole = traced.kind is BoundaryKind.CACHE
        yield given, length + span.count if whole else span.count


def _earlier(inputs: Inputs, spans: tuple[Span, ...]) -> list[int]:
    states = [rows.shape[0] for name, rows in inputs.items() if name.startswith(STATE)]
    return rows_kept(states[0] if states else 0, [span.start for span in spans])


class TracedModel(BoundModel):
    """A bound model whose calls are traced components."""

    config: Any  # a TracedConfig

    def coarsened(self, recorded: Iterable[str]) -> TracedModel:
        """Return the same model, of which a run recorded these tensors alone."""
        config = replace(self.config, recorded=tuple(recorded))
        return TracedModel(config, self.numerics, self.weights, self.recipe)

    def _bind(self, recipe: Recipe | None) -> None:
        graph: Graph = self.config.graph
        formats = formats_by_block(self.config, recipe)
        makers: dict[str, TracedFacts] = {}
        for component, traced in reversed(traced_pairs(self.config, recipe)):
            if traced is None:
                self._bind_quantisation(component, makers[component.name])
                continue
            block = component.block
            held = formats.get(block, {})
            facts = TracedFacts(self.config, self.numerics, block, held, graph, traced)
            makers[f"{component.name}.act_quant"] = facts
            function: Any = computed
            if traced.kind is BoundaryKind.LINEAR:
                function = linear
            elif is_sequential(traced):
                function = sequential
            self.calls[component.name] = partial(function, facts)
            self._take(component, facts, component.weights)
        # Bound from the last one to the first: a quantisation needs the facts of its linear.
        self.calls = dict(reversed(self.calls.items()))

    def _bind_quantisation(self, component: Component, facts: TracedFacts) -> None:
        linear = component.name.removesuffix(".act_quant")
        weights = self._bound_to[linear][0].weights[:1]
        if facts.activation(local_name(weights[0], component.block)) is None:
            return  # a run that leaves inputs as they are
        self.calls[component.name] = partial(act_quant, facts)
        self._take(component, facts, weights)

    def _take(self, component: Component, facts: TracedFacts, weights: tuple[str, ...]) -> None:
        local = {local_name(weight, component.block): weight for weight in weights}
        again = facts.with_powers_of_two if facts.block_scales is BlockScaleUse.BOTH else None
        self._fetched[component.name] = FetchedWeights(self, local, again)
        self._bound_to[component.name] = component, facts
        self._inputs[component.name] = frozenset(each.name for each in component.inputs)
