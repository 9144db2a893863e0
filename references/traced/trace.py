"""Trace the forward pass of a transformers model once, on the meta device, without weights.

Every operation of the pass is recorded with the module that ran it. A module that is judged as a
unit is a boundary: one without children (a linear, a norm, a router), a bank of experts, and the
attention function that transformers looks up in its registry. What lies between boundaries are
plain operations: rotations, residual sums, gated products. TOKENS is a prime, so that an extent
that depends on the number of tokens is recognised, and a trace serves any number of them.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from degarble.harness.base.errors import DegarbleError, InvalidArgument, NotBuilt
from degarble.references.traced.attention import MASK, MASKED, MaskOperator, facts_of, unpadded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor


def operator_name(function: Any) -> str:
    """Return the name of an ATen operator without its overload."""
    return str(function.name()).removeprefix("aten::").partition(".")[0]


def named(text: str) -> frozenset[str]:
    """Return the words of a text: names of operators."""
    return frozenset(text.split())


TOKENS = 1009  # of a call that is traced for any number of them
_NO_TOKENS = 2_147_483_647  # a prime that no extent is: of a function on tensors of given shapes
_NO_EXTENT = 1 << 40  # slices to the end of an axis say 2^63 - 1
# Operators that move or copy elements and compute none.
VIEWS = named(
    """
    view _unsafe_view reshape transpose permute slice split split_with_sizes unsqueeze
    squeeze expand select clone detach alias contiguous t unbind chunk narrow movedim
    flatten empty new_empty lift_fresh unfold
    """
)
_FILLS = named("zeros zeros_like ones ones_like full full_like scalar_tensor")
_EACH = named("eq ne where")  # of those that work on each element, what models count blocks with
_COMPARISONS = {"gt": False, "ge": False, "lt": True, "le": True}  # of a length that is short
_ITEM = torch.ops.aten._local_scalar_dense.default  # noqa: SLF001  what .item() is
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "convolution"})
EXPERTS_GATE = "_apply_gate"  # a method of every module of transformers' experts interface
# A method of models that count positions by the tokens themselves, past those of padding.
_FROM_TOKENS = "create_position_ids_from_input_ids"
EXPERTS = "degarble"  # the name of the tracer's function of experts in transformers' registry
EAGER = "eager"  # transformers' name of its plain attention, and of masks that are added to scores


class BoundaryKind(StrEnum):
    """What a boundary computes, as far as a budget has to know."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    NORM = "norm"
    ACTIVATION = "activation"
    ROTARY = "rotary"  # cosines and sines of positions
    ATTENTION = "attention"
    CACHE = "cache"  # what earlier calls left of a sequence, and the new rows
    ROUTER = "router"
    TOPK = "topk"  # the choice among a router's logits
    EXPERTS = "experts"
    MODULE = "module"  # any other leaf


class Ref(NamedTuple):
    """A tensor of the trace, by its number."""

    number: int


class ParameterRef(NamedTuple):
    """A parameter or buffer, by its name in the model."""

    name: str


class ExtentRef(NamedTuple):
    """An extent that is a multiple of the number of tokens."""

    factor: int


@dataclass(frozen=True)
class TracedTensor:
    """Shape and dtype of a traced tensor, and a number that views of one memory share."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    token_axis: int | None  # None for a tensor without one
    rows: int = 1  # of a token along its axis
    columns: tuple[int, ...] = ()  # further axes of tokens, such as those that are attended to


@dataclass(frozen=True)
class Operation:
    """One call of an ATen operator. `arguments` hold Ref, ParameterRef and ExtentRef."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    results: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # of the results
    module: str  # path of the innermost module that ran it
    mutated: tuple[int, ...] = ()  # memory that it writes into

    @property
    def name(self) -> str:
        """Return the operator's name without its overload."""
        return operator_name(self.function)

    def reads(self) -> Iterator[Ref | ParameterRef]:
        """Yield the tensors that it reads."""
        yield from _references((*self.arguments, *self.keywords.values()))


@dataclass(frozen=True)
class Boundary:
    """A module or function whose inputs and outputs are recorded."""

    path: str
    kind: BoundaryKind
    inputs: Mapping[str, Ref]
    outputs: tuple[Ref, ...]
    operations: tuple[int, int]  # those that it ran, as a range
    facts: Mapping[str, Any] = field(default_factory=dict)


class ModuleExit(NamedTuple):
    """What a module returned, and how many boundaries and operations had run by then."""

    path: str
    outputs: tuple[Ref, ...]
    boundaries: int
    operations: int


@dataclass(frozen=True)
class Trace:
    """A whole forward pass, in order."""

    tensors: tuple[TracedTensor, ...]
    operations: tuple[Operation, ...]
    boundaries: tuple[Boundary, ...]
    modules: tuple[ModuleExit, ...]  # in the order in which they returned
    tokens: Ref
    positions: Ref
    logits: Ref
    parameters: Mapping[str, TracedTensor]
    buffers: Mapping[str, Tensor]  # values of those that no checkpoint holds
    overwritten: frozenset[int] = frozenset()  # memory that the pass writes into again
    most_tokens: float = math.inf  # of a sequence, before the model changes its frequencies


def _references(arguments: Any) -> Iterator[Ref | ParameterRef]:
    if isinstance(arguments, (Ref, ParameterRef)):
        yield arguments
    elif isinstance(arguments, (tuple, list)) and not isinstance(arguments, ExtentRef):
        for argument in arguments:
            yield from _references(argument)


class _Tracer(TorchDispatchMode):
    """Records operations while a model runs on the meta device."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not
        self.tokens = tokens
        self.tensors: list[TracedTensor] = []
        self.operations: list[Operation] = []
        self.boundaries: list[Boundary] = []
        self.modules: list[ModuleExit] = []
        self.path: list[str] = []
        self.within: str | None = None  # the boundary that is running
        self.positions: Tensor | None = None
        self.overwritten: set[int] = set()  # memory that operations write into
        self.uniform: dict[int, Tensor] = {}  # values of tensors, by identity
        self.most_tokens = math.inf  # of a sequence, before frequencies change
        # By identity: views of the positions, what counts the longest sequence, whether it is long.
        self._positional: set[int] = set()
        self._lengths: set[int] = set()
        self._is_long: dict[int, bool] = {}
        self._numbers: dict[int, int] = {}
        named = [*model.named_parameters(), *model.named_buffers()]
        # An id may be reused once its object dies; some models replace a buffer while they run.
        self._kept = [tensor for _, tensor in named]
        self._parameters = {id(tensor): name for name, tensor in named}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator on meta tensors, and record it."""
        del types
        keywords = dict(kwargs or {})
        if func is _ITEM and (args[0].dtype is torch.bool or id(args[0]) in self._lengths):
            # Else models ask masks and positions alone: is nothing padded, is nothing packed?
            return self._is_long.get(id(args[0]), True)
        # Named before the call: an operator that writes into its argument returns the argument.
        arguments = tuple(self._named(argument) for argument in args)
        named = {name: self._named(argument) for name, argument in keywords.items()}
        result = func(*args, **keywords)
        written = [
            argument
            for schema, argument in zip(func._schema.arguments, args, strict=False)  # noqa: SLF001
            if schema.alias_info is not None and schema.alias_info.is_write
        ]
        mutated = tuple(_storage(tensor) for tensor in _tensors(written))
        self.overwritten.update(mutated)
        elsewhere = self._out_of_place(func, args)
        if elsewhere is not None:
            # The module's result stays what it was; who reads the tensor from now on reads another.
            func, mutated = elsewhere, ()
            del self._numbers[id(result)]
        results = tuple(self.number(tensor) for tensor in _tensors(result))
        self._note_uniform(operator_name(func), func, args, result)
        self._note_length(operator_name(func), args, result)
        path = self._here
        dtypes = tuple(tensor.dtype for tensor in _tensors(result))
        if self._counts_tokens(func, args, result):
            # Models without an argument for positions count from the length of their cache.
            func, named = torch.ops.aten.view.default, {}
            arguments = self._named(self.positions), self._named([self.tokens])
        self.operations.append(Operation(func, arguments, named, results, dtypes, path, mutated))
        return result

    def _note_uniform(self, name: str, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Keep the value of a result whose elements are all the same, such as numbers of blocks."""
        known = [self.uniform.get(id(each)) for each in args if isinstance(each, torch.Tensor)]
        if not isinstance(result, torch.Tensor):
            return
        if name in _FILLS:
            stated = name.startswith(("full", "scalar"))
            value: Any = args[-1] if stated else name.startswith("ones")
        elif not known or any(each is None for each in known):
            return
        elif name in VIEWS | {"_to_copy"}:
            value = known[0]
        elif name in _EACH:
            with _disable_current_modes():
                value = func(*(self.uniform.get(id(each), each) for each in args))
        else:
            return
        self.uniform[id(result)] = torch.as_tensor(value)

    def _note_length(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Notice a model that compares its longest sequence: no sequence is that long."""
        first = id(args[0]) if args else 0
        positional = first == id(self.positions) or first in self._positional
        if positional and name in VIEWS:
            self._positional.add(id(result))
        elif (positional and name == "max") or (first in self._lengths and name == "add"):
            self._lengths.add(id(result))
        elif first in self._lengths and name in _COMPARISONS and isinstance(args[1], (int, float)):
            self._is_long[id(result)] = _COMPARISONS[name]
            self.most_tokens = min(self.most_tokens, args[1])

    def _counts_tokens(self, func: Any, args: tuple[Any, ...], result: Any) -> bool:
        """Return whether a result is the number of each token in the pass: its position."""
        if operator_name(func) != "arange" or result.shape != (self.tokens,):
            return False
        return args in {(self.tokens,), (0, self.tokens), (0, self.tokens, 1)}

    def _out_of_place(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Return the operator that leaves its argument alone, where that is a module's result."""
        name = operator_name(func)
        plain = getattr(torch.ops.aten, name[:-1], None) if name[-1:] == "_" else None
        if plain is None or not isinstance(args[0], torch.Tensor):
            return None
        number = self._numbers.get(id(args[0]))
        made = any(ref.number == number for each in self.boundaries for ref in each.outputs)
        overload = func._overloadname  # noqa: SLF001
        return getattr(plain, overload, None) if made else None

    @property
    def _here(self) -> str:
        return self.path[-1] if self.path else ""

    def number(self, tensor: Tensor) -> int:
        """Return a tensor's number; a new one if it was not seen before."""
        found = self._numbers.get(id(tensor))
        if found is None:
            found = self._numbers[id(tensor)] = len(self.tensors)
            self._kept.append(tensor)
            self.tensors.append(_described(tensor, self.tokens))
        return found

    def _named(self, argument: Any) -> Any:
        return (
            tree_map(self.name, argument)
            if isinstance(argument, (list, tuple))
            else (self.name(argument))
        )

    def name(self, argument: Any) -> Any:
        """Return an argument with its tensors as references, and its extents by the tokens."""
        if isinstance(argument, torch.Tensor):
            name = self._parameters.get(id(argument))
            if name is None and id(argument) not in self._numbers:
                if argument.is_meta:  # numbers that were lost when the model was built
                    raise NotBuilt(
                        "tensor of the model", (*argument.shape,),
                        f"a parameter, a buffer or a result of the pass, in {self._here}",
                        "Register a family with a reference of its own for this model.",
                    )  # fmt: skip
                return argument.clone()  # a constant, such as a list that a tensor is indexed with
            return Ref(self.number(argument)) if name is None else ParameterRef(name)
        whole = isinstance(argument, int) and not isinstance(argument, bool)
        # A trace of few tokens is for that number alone.
        if whole and self.tokens >= TOKENS and argument and not argument % self.tokens:
            return ExtentRef(argument // self.tokens) if abs(argument) < _NO_EXTENT else argument
        return argument


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _described(tensor: Tensor, tokens: int) -> TracedTensor:
    shape = tuple(tensor.shape)
    storage = _storage(tensor)
    along = tuple(axis for axis, extent in enumerate(shape) if extent == tokens)
    if along:
        return TracedTensor(shape, tensor.dtype, storage, along[0], columns=along[1:])
    # Several rows a token, such as its heads.
    if tokens >= TOKENS and shape and not shape[0] % tokens and shape[0]:
        return TracedTensor(shape, tensor.dtype, storage, 0, shape[0] // tokens)
    return TracedTensor(shape, tensor.dtype, storage, None)


def is_boundary(module: nn.Module) -> bool:
    """Return whether a module is judged as a unit: a leaf, or a bank of experts.

    A convolution along the tokens is part of the recurrent operations around it. So are matrices
    stacked for all heads, and experts outside of transformers' interface.
    """
    if isinstance(module, nn.Conv1d):
        return module.kernel_size == (1,)
    if any(each.ndim == 3 for each in module.parameters(recurse=False)):
        return hasattr(module, EXPERTS_GATE)
    return not any(True for _ in module.children())


def trace(config: Any, dtype: torch.dtype, tokens: int = TOKENS) -> Trace:
    """Trace the causal language model that transformers makes of a config.

    Operations that cut the tokens into chunks or run over them one by one are right for the traced
    number of tokens alone.
    """
    # In inference mode composite operators would be recorded whole, not as what they consist of.
    with (
        torch.inference_mode(mode=False),
        _disable_current_modes(),
        _StandIns().installed() as stand_ins,
    ):
        model = _traceable(config, dtype)
        buffers = _buffers_of(model)
        stand_ins.tracer = _Tracer(model, tokens)
        return _traced(model, buffers, stand_ins.tracer)


def _traced(model: nn.Module, buffers: Mapping[str, Tensor], tracer: _Tracer) -> Trace:
    with ExitStack() as stack:
        for path, module in model.named_modules():
            _watch(tracer, path, module, stack)
        ids = torch.zeros(1, tracer.tokens, dtype=torch.int64, device="meta")
        positions = torch.zeros_like(ids)
        tokens, at = Ref(tracer.number(ids)), Ref(tracer.number(positions))
        tracer.positions = positions
        with torch.no_grad(), tracer:
            # With a mask of its own transformers does not look for packed sequences in positions.
            mask = torch.ones(1, tracer.tokens, dtype=torch.bool, device="meta")
            try:
                logits = model(
                    input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True
                ).logits
            except DegarbleError:
                raise
            except Exception as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise NotBuilt(
                    "architecture", type(model).__name__,
                    f"a forward pass that runs without weights: {said[0]}",
                    "Register a family with a reference of its own for this model.",
                ) from error  # fmt: skip
    held = [*model.named_parameters(), *model.named_buffers()]
    parameters = {
        name: _described(tensor, tracer.tokens) for name, tensor in held if name not in buffers
    }
    return Trace(
        tuple(tracer.tensors), tuple(tracer.operations), tuple(tracer.boundaries),
        tuple(tracer.modules), tokens, at, Ref(tracer.number(logits)), parameters, dict(buffers),
        frozenset(tracer.overwritten), tracer.most_tokens,
    )  # fmt: skip


def trace_function(
    function: Callable[..., Any], inputs: Mapping[str, Any], parameters: nn.Module
) -> tuple[Trace, dict[str, Ref], dict[str, Ref]]:
    """Trace one function on tensors of the shapes of its inputs; return its ends as well.

    `parameters` holds what it reads by name besides; it is a module on the meta device.
    """
    with torch.inference_mode(mode=False), _disable_current_modes(), torch.no_grad():
        tracer = _Tracer(parameters, _NO_TOKENS)
        given = {
            name: each.to("meta") if isinstance(each, torch.Tensor) else each
            for name, each in inputs.items()
        }
        none = torch.empty(0, dtype=torch.int64, device="meta")
        refs = {
            name: Ref(tracer.number(each))
            for name, each in given.items()
            if isinstance(each, torch.Tensor)
        }
        outside = Ref(tracer.number(none))
        with tracer:
            made = function(given, parameters)
        ends = {name: Ref(tracer.number(each)) for name, each in made.items()}
    held = {name: _described(each, _NO_TOKENS) for name, each in parameters.named_parameters()}
    found = Trace(
        tuple(tracer.tensors), tuple(tracer.operations), (), (), outside, outside,
        next(iter(ends.values())), held, {},
    )  # fmt: skip
    return found, refs, ends


def _watch(tracer: _Tracer, path: str, module: nn.Module, stack: ExitStack) -> None:
    """Keep the path of the running module, and record boundaries."""
    signature = inspect.signature(module.forward)
    begun: list[tuple[int, dict[str, Ref]]] = []

    def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        tracer.path.append(path)
        if tracer.within is not None or not is_boundary(module):
            return
        tracer.within = path
        bound = signature.bind(*args, **named).arguments
        inputs = {
            name: Ref(tracer.number(tensor))
            for name, tensor in bound.items()
            if isinstance(tensor, torch.Tensor)
        }
        begun.append((len(tracer.operations), inputs))

    def after(_module: nn.Module, _args: Any, _named: Any, returned: Any) -> None:
        tracer.path.pop()
        made = returned.values() if isinstance(returned, dict) else (returned,)
        outputs = tuple(Ref(tracer.number(tensor)) for tensor in _tensors(tuple(made)))
        if tracer.within is None and path:
            run = len(tracer.boundaries), len(tracer.operations)
            tracer.modules.append(ModuleExit(path, outputs, *run))
        if tracer.within != path:
            return
        tracer.within = None
        begin, inputs = begun.pop()
        # A module that returns its input (a dropout, an identity) computes nothing.
        if not set(outputs) <= set(inputs.values()):
            span = begin, len(tracer.operations)
            facts = {"module": module}
            kind = _kind_of(module, inputs, tracer.operations[slice(*span)])
            tracer.boundaries.append(Boundary(path, kind, inputs, outputs, span, facts))

    for hook in (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ):
        stack.callback(hook.remove)


def _kind_of(
    module: nn.Module, inputs: Mapping[str, Ref], operations: Sequence[Operation]
) -> BoundaryKind:
    """Classify a boundary by what it holds and does; its name counts for nothing."""
    names = {operation.name for operation in operations}
    if type(module).forward is nn.Linear.forward:
        return BoundaryKind.LINEAR
    if type(module).forward is nn.Embedding.forward:
        return BoundaryKind.EMBEDDING
    if hasattr(module, EXPERTS_GATE):
        return BoundaryKind.EXPERTS
    if "topk" in names:
        return BoundaryKind.ROUTER
    if {"cos", "sin"} <= names:
        return BoundaryKind.ROTARY
    if names & {"rsqrt", "native_layer_norm", "_fused_rms_norm"} and not names & PRODUCTS:
        return BoundaryKind.NORM
    if len(inputs) == 1 and not any(True for _ in module.parameters()):
        return BoundaryKind.ACTIVATION
    return BoundaryKind.MODULE


class _StandIns:
    """Stands in for functions that transformers looks up while a model is traced.

    Attention, masks and experts come from registries, the cache is a class. Each stand-in records
    what it is given, and returns memory of the right form.
    """

    def __init__(self) -> None:
        self.tracer: _Tracer | None = None
        self._masks: dict[int, Any] = {}
        self._kept: list[Tensor] = []  # an id may be reused once its object dies

    @contextmanager
    def installed(self) -> Iterator[_StandIns]:
        """Register the functions, for as long as the context lasts."""
        from transformers.cache_utils import Cache  # noqa: PLC0415  heavy, as the next ones
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415
        from transformers.modeling_utils import AttentionInterface  # noqa: PLC0415

        def update(_cache: Any, keys: Any, values: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
            return self.cache(layer_idx, key=keys, value=values)

        def update_indexer(_cache: Any, keys: Any, layer_idx: int) -> Any:
            return self.cache(layer_idx, key=keys)[0]

        def interface(_registry: Any, _name: str, own: Any) -> Any:
            def attention(module: nn.Module, *given: Any, **named: Any) -> Any:
                operands = dict(
                    zip(("query", "key", "value", "attention_mask"), given, strict=False)
                )
                return self.attention(own, module, operands | named)

            return attention

        masks = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping  # noqa: SLF001
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, self.experts)
        try:
            with (
                mock.patch.object(AttentionInterface, "get_interface", interface),
                mock.patch.dict(masks, {EAGER: self.mask}),
                mock.patch.object(Cache, "update", update),
                mock.patch.object(Cache, "update_indexer", update_indexer),
            ):
                yield self
        finally:
            # `del registry[...]` acts on a copy.
            ALL_EXPERTS_FUNCTIONS._global_mapping.pop(EXPERTS)  # noqa: SLF001

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Any,
        dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> Tensor:
        """Return a mask as eager attention adds it, and remember by which function it admits."""
        tracer = self._running
        with _disable_current_modes():
            made = torch.empty(batch_size, 1, q_length, kv_length, dtype=dtype, device="meta")
        self._kept.append(made)
        mask_function = partial(unpadded, mask_function, tracer.uniform)
        self._masks[id(made)] = mask_function
        extents = tuple(map(tracer.name, (q_length, kv_length)))
        tracer.operations.append(
            Operation(
                MaskOperator(mask_function, dtype), extents, {}, (tracer.number(made),), (dtype,),
                tracer.path[-1] if tracer.path else "",
            )
        )  # fmt: skip
        return made

    def attention(self, own: Any, module: nn.Module, given: Mapping[str, Any]) -> Any:
        """Record a call of attention: its operands, and the facts that it is given.

        A function that computes something else than attention's definition is recorded as what it
        consists of.
        """
        named = dict(given)
        query, key, value, attention_mask = (
            named.pop(name, None) for name in ("query", "key", "value", "attention_mask")
        )
        forms = {"query": query, "key": key, "value": value}
        facts = facts_of(own, module, forms, named)
        if facts is None:
            return own(module, query, key, value, attention_mask, **named)
        refs = {name: self._ref(tensor) for name, tensor in forms.items()}
        facts[MASK] = self._masks.get(id(attention_mask))
        if attention_mask is not None and facts[MASK] is None:
            # One that the model computes.
            refs[MASK] = self._ref(attention_mask.clamp(min=MASKED))
        for name, fact in named.items():
            if isinstance(fact, torch.Tensor):
                reference = self._running.name(fact)
                if isinstance(reference, ParameterRef):
                    facts[name] = reference
        heads, count, width = query.shape[1], query.shape[2], value.shape[-1]
        tracer = self._running
        begin = len(tracer.operations)
        out = torch.empty((1, count, heads, width), dtype=query.dtype, device="meta")
        span = begin, len(tracer.operations)
        outputs, kind = (self._ref(out),), BoundaryKind.ATTENTION
        tracer.boundaries.append(Boundary(tracer.path[-1], kind, refs, outputs, span, facts))
        return out, None

    def cache(self, layer: int, **rows: Tensor) -> tuple[Tensor, ...]:
        """Record new rows of a cache, and return as many."""
        tracer = self._running
        refs = {name: self._ref(tensor) for name, tensor in rows.items()}
        begin = len(tracer.operations)
        made = tuple(tensor.clone() for tensor in rows.values())
        span = begin, len(tracer.operations)
        outputs = tuple(map(self._ref, made))
        facts = {"layer": layer}
        tracer.boundaries.append(
            Boundary(tracer.path[-1], BoundaryKind.CACHE, refs, outputs, span, facts)
        )
        return made

    def experts(self, _module: nn.Module, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return memory: what experts compute is defined by hand."""
        return torch.empty_like(hidden_states)

    @property
    def _running(self) -> _Tracer:
        assert self.tracer is not None, "a model runs only while it is traced"
        return self.tracer

    def _ref(self, tensor: Tensor) -> Ref:
        return Ref(self._running.number(tensor))


def refused_config(kind: str, error: Exception) -> InvalidArgument:
    """Return the refusal of a config with which transformers itself builds no model."""
    said = str(error).strip().splitlines() or [""]
    return InvalidArgument(
        "config.json", kind,
        f"settings that transformers builds this model from ({type(error).__name__}: {said[0]})",
        "Compare config.json with the one in the model's own repository.",
    )  # fmt: skip


def as_loaded(model: Any, dtype: torch.dtype) -> Any:
    """Hold in float32 what loading a checkpoint keeps in it: biases of routers, decays of states.

    Building a model from its config alone makes all of it in one dtype.
    """
    from transformers.core_model_loading import build_glob_alternation  # noqa: PLC0415  heavy

    plan = model._get_dtype_plan(dtype)  # noqa: SLF001  no other way to ask
    if plan:
        kept, groups, _ = build_glob_alternation(list(plan))
        for name, held in model.state_dict(keep_vars=True).items():
            found = kept.search(name)
            if found is not None and held.is_floating_point():
                held.data = held.data.to(plan[groups[str(found.lastgroup)]])
    return model


def built(config: Any, dtype: torch.dtype, **chosen: str) -> nn.Module:
    """Return transformers' model of a config on the meta device, as loading a checkpoint types it.

    `chosen` names implementations of attention and experts.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  heavy

    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False, **chosen
            )
        except Exception as error:
            raise refused_config(config.model_type, error) from error
    found: nn.Module = as_loaded(model, dtype).eval()
    return found


def buffers_as_built(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the buffers that no checkpoint holds as building a model in a dtype does.

    Tables that are computed in torch's default dtype are coarser than those of a loaded model.
    """
    before = torch.get_default_dtype()
    with torch.inference_mode(mode=False), _disable_current_modes():
        model = built(config, dtype)
        torch.set_default_dtype(dtype)
        try:
            return _buffers_of(model)
        finally:
            torch.set_default_dtype(before)


def _traceable(config: Any, dtype: torch.dtype) -> nn.Module:
    """Return the model to trace; raise where it counts positions by padding."""
    found = built(config, dtype, attn_implementation=EAGER, experts_implementation=EXPERTS)
    counting = next((each for each in found.modules() if hasattr(each, _FROM_TOKENS)), None)
    if counting is not None:
        raise NotBuilt(
            "positions", type(counting).__name__, "positions that follow from how many tokens came",
            "Register a family with a reference of its own for this model.",
        )  # fmt: skip
    return found


def _buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Compute the buffers that no checkpoint holds, as transformers does after loading."""
    found: dict[str, Tensor] = {}
    initialise: Any = model._init_weights  # noqa: SLF001
    known = dict(model.named_modules())
    for path, module in model.named_modules():
        names = [
            name
            for name in module._non_persistent_buffers_set  # noqa: SLF001
            if module._buffers.get(name) is not None  # noqa: SLF001
        ]
        if not names:
            continue
        held = {name: module._buffers[name] for name in names}  # noqa: SLF001
        for name, buffer in held.items():
            module._buffers[name] = torch.full(  # noqa: SLF001
                buffer.shape, math.nan if buffer.is_floating_point() else 0, dtype=buffer.dtype,
                device="cpu",
            )  # fmt: skip
        try:
            with torch.no_grad():
                initialise(module)
                # Some models compute a buffer where they initialise a module around it.
                around = path
                while around and any(module._buffers[name].isnan().any() for name in names):  # noqa: SLF001
                    around = around.rpartition(".")[0]
                    initialise(known[around])
        except AttributeError as error:  # transformers knows the module by another model's names
            raise NotBuilt(
                "buffers", path, f"those that transformers computes: {error}",
                "Register a family with a reference of its own for this model.",
            ) from error  # fmt: skip
        for name, buffer in held.items():
            value = module._buffers[name]  # noqa: SLF001
            module._buffers[name] = buffer  # noqa: SLF001
            if value.is_floating_point() and bool(value.isnan().any()):
                raise NotBuilt(
                    "buffer", f"{path}.{name}", "a buffer that follows from the config",
                    "Register a family with a reference of its own for this model.",
                )  # fmt: skip
            found[f"{path}.{name}"] = value
    return found
