"""Map modules of torch models to components: by a map, by name, or for transformers' DeepSeek."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.capture.files.records import Phase, site_of
from degarble.harness.model.family import family_of
from degarble.harness.model.sites import Port
from degarble.harness.model.types import LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, nn

    from degarble.harness.capture.recorder import CopiedTensor, Recorder
    from degarble.harness.model.config.config import Config, V4Config, V32Config
    from degarble.harness.model.types import Block


# --------------------------------------------------------------------------------------------------
# Map modules of any torch model to components, and name their tensors.
#
# A place says: these modules, run one after the other, are this component, and their tensors have
# these names. A module may belong to several places; one that fuses components supplies the inputs
# of the first and the outputs of the last. Tensors of [batch, time, ...] become one row a token.
# `places_by_name` makes a map for an unknown model, with one component for each leaf module.
#
# Modules that run in another order than their place says are an error.

_BLOCK = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_HASHED_BYTES = 1 << 26  # copied to the host at a time
_PLAIN = MappingProxyType({0: "x"})
_OUT = MappingProxyType({(0, 0): "out"})


@dataclass(frozen=True)
class ModulePlace:
    """Modules that are a component.

    `inputs`: of the first module, argument to name. `outputs`: (which module, which of the tensors
    that it returns) to name; tensors of one name lie side by side.

    >>> from degarble import ModulePlace
    >>> ModulePlace("layers.0.mlp", ("model.layers.0.mlp.up", "model.layers.0.mlp.down")).component
    'layers.0.mlp'
    """

    component: str
    modules: tuple[str, ...]
    inputs: Mapping[Any, str] = field(default_factory=lambda: _PLAIN)
    outputs: Mapping[tuple[int, int], str] = field(default_factory=lambda: _OUT)

    def __post_init__(self) -> None:
        for port, names in ((Port.IN, self.inputs), (Port.OUT, self.outputs)):
            for name in names.values():
                site_of(self.component, port, name)


@dataclass
class _PlaceProgress:
    """A place that is on its way."""

    next: int = 0
    taken: dict[str, CopiedTensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


class ModuleRecorder:
    """Hooks that feed a recorder. Use `recording`."""

    def __init__(self, recorder: Recorder, places: Iterable[ModulePlace]) -> None:
        self._recorder = recorder
        self._places = [place for place in places if recorder.chooses(place.component)]
        self._under: dict[str, _PlaceProgress] = {}
        self._shape = (0, 0)

    def install(self, model: nn.Module, stack: ExitStack) -> None:
        """Hook every module of the map, and the model itself for its steps."""
        known = dict(model.named_modules())
        by_module: dict[str, list[tuple[ModulePlace, int]]] = defaultdict(list)
        for place in self._places:
            for number, name in enumerate(place.modules):
                if name not in known:
                    raise UnknownName.among(f"module of {place.component}", name, known)
                by_module[name].append((place, number))
        begin = model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        stack.callback(begin.remove)
        for name, members in by_module.items():
            before, after = partial(self._before, members), partial(self._after, members)
            module = known[name]
            for hook in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ):
                stack.callback(hook.remove)

    def _begin(self, _model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A forward pass: its token ids are the first tensor, [batch, time] or [time]."""
        first = next(
            (each for each in (named.get("input_ids"), *given, *named.values())
             if isinstance(each, torch.Tensor)), None,
        )  # fmt: skip
        if first is None or not first.ndim:
            raise InvalidArgument(
                "model", "no tensor", "a tensor of tokens as its first argument",
                "Call the model with its tokens.",
            )  # fmt: skip
        extents = first.shape[:-1] if first.is_floating_point() else first.shape
        batch, time = (extents[0], extents[1]) if len(extents) > 1 else (1, *extents, 1)[:2]
        self._shape = (batch, time)
        cache: Any = named.get("past_key_values")
        past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
        ids = [0] * (batch * time)
        if not first.is_floating_point() and first.ndim <= 2:
            ids = first.reshape(-1).tolist()
        positions = list(range(past, past + time)) * batch
        owners = [number for number in range(batch) for _ in range(time)]
        phase = Phase.DECODE if past and time == 1 else Phase.PREFILL
        self._under.clear()
        self._recorder.begin(phase, ids, positions, owners)

    def _before(
        self,
        members: list[tuple[ModulePlace, int]],
        _module: nn.Module,
        given: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        if self._recorder.idle:
            return
        for place, number in members:
            if number:
                continue
            under = self._under[place.component] = _PlaceProgress()
            for key, name in place.inputs.items():
                under.inputs[name] = self._rows(_argument(place, key, given, named))
            under.taken = self._recorder.before(place.component, under.inputs)

    def _after(
        self,
        members: list[tuple[ModulePlace, int]],
        _module: nn.Module,
        _given: tuple[Any, ...],
        _named: dict[str, Any],
        returned: Any,
    ) -> None:
        if self._recorder.idle:
            return
        tensors = returned if isinstance(returned, (tuple, list)) else [returned]
        for place, number in members:
            under = self._under.get(place.component)
            if under is None or under.next != number:
                raise InvalidArgument(
                    f"module of {place.component}", place.modules[number],
                    f"modules that run in the order {', '.join(place.modules)}",
                    "Correct the map from modules to sites.",
                )  # fmt: skip
            under.next += 1
            for (which, at), name in place.outputs.items():
                if which == number:
                    under.parts[name].append(self._rows(_returned(place, number, tensors, at)))
            if under.next == len(place.modules):
                self._finish(place, self._under.pop(place.component))

    def _finish(self, place: ModulePlace, under: _PlaceProgress) -> None:
        outputs = {
            name: parts[0] if len(parts) == 1 else torch.cat(parts, -1)
            for name, parts in under.parts.items()
        }
        self._recorder.after(place.component, under.taken, under.inputs, outputs)

    def _rows(self, tensor: Tensor) -> Tensor:
        """Merge batch and time, so that there is one row a token."""
        if tensor.ndim >= 2 and tuple(tensor.shape[:2]) == self._shape:
            return tensor.flatten(0, 1)
        return tensor


@contextmanager
def recording(
    model: nn.Module, places: Iterable[ModulePlace], recorder: Recorder
) -> Iterator[None]:
    """Record every forward pass of a model; the hooks are removed on exit."""
    with ExitStack() as stack:
        ModuleRecorder(recorder, places).install(model, stack)
        yield


def weights_hash(model: nn.Module) -> str:
    """Return SHA-256 over every parameter and buffer: name, dtype, shape and bytes.

    Buffers that are left out of the state dict count too: scales often live in such buffers.
    """
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        _hash_tensor(digest, name, tensor)
    return digest.hexdigest()


def _hash_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    if hasattr(tensor, "__tensor_flatten__"):  # a quantised tensor of torchao is a wrapper
        for inner in tensor.__tensor_flatten__()[0]:
            _hash_tensor(digest, f"{name}.{inner}", getattr(tensor, inner))
        return
    if tensor.is_meta:
        return  # it has no bytes
    flat = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    for piece in flat.detach().contiguous().reshape(-1).view(torch.uint8).split(_HASHED_BYTES):
        digest.update(memoryview(piece.cpu().numpy()))


def places_by_name(model: nn.Module) -> list[ModulePlace]:
    """Map each leaf module to a component of its own, named after it."""
    found: dict[str, str] = {}
    if next(model.children(), None) is None:
        return [ModulePlace(component_of(type(model).__name__), ("",))]
    for name, module in model.named_modules():
        if name and next(module.children(), None) is None:
            component = component_of(name)
            if component in found:
                raise InvalidArgument(
                    "module", name, f"another name than {found[component]} as a component",
                    "Write the map from modules to sites yourself.",
                )  # fmt: skip
            found[component] = name
    return [ModulePlace(component, (name,)) for component, name in found.items()]


def with_bias(model: nn.Module, places: Iterable[ModulePlace]) -> list[str]:
    """Return the components whose last module adds a bias."""
    modules = dict(model.named_modules())
    return [
        place.component
        for place in places
        if getattr(modules.get(place.modules[-1]), "bias", None) is not None
    ]


def component_of(module: str) -> str:
    """`model.layers.3.mlp.0` as the name of a component: `layers.3.mlp_0`."""
    match = _BLOCK.search(module)
    prefix = f"layers.{int(match[1])}." if match else ""
    words: list[str] = []
    for word in module[match.end() if match else 0 :].split("."):
        plain = re.sub(r"[^a-z0-9_]", "_", word.lower())
        if words and not plain[:1].isalpha():
            words[-1] += f"_{plain}"
        else:
            plain = plain if plain[:1].isalpha() else f"m{plain}"
            words.append(f"{plain}_" if plain in set(Port) else plain)
    return prefix + ".".join(words)


def _argument(
    place: ModulePlace, key: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> Tensor:
    found = given[key] if isinstance(key, int) and key < len(given) else named.get(str(key))
    if isinstance(key, int) and key >= len(given) and len(named) > key - len(given):
        found = list(named.values())[key - len(given)]
    return _required(place, f"argument {key}", found)


def _returned(place: ModulePlace, number: int, tensors: Any, at: int) -> Tensor:
    found = tensors[at] if at < len(tensors) else None
    return _required(place, f"tensor {at} that {place.modules[number]} returns", found)


def _required(place: ModulePlace, name: str, found: Any) -> Tensor:
    if not isinstance(found, torch.Tensor):
        raise InvalidArgument(
            f"{name}, for {place.component}", type(found).__name__, "a tensor",
            "Correct the map from modules to sites.",
        )  # fmt: skip
    return found


# --------------------------------------------------------------------------------------------------
# Map the modules of transformers' deepseek_v4 and deepseek_v32 to components.
#
# Modules are found by name; transformers is not imported. Only tensors that mean the same on both
# sides are mapped. Not mapped: the indexer's weights, which transformers scales later; V3.2's
# wkv_b, which receives all cached rows there; whatever has no module (attention itself, rotations,
# pooled entries); drafters. A module that fuses components supplies the inputs of the first and the
# outputs of the last.

_V4_ATTENTION = {
    "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj", "wkv": "kv_proj",
    "wo_a": "o_a_proj", "wo_b": "o_b_proj",
}  # fmt: skip
_V32_ATTENTION = {
    "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wo": "o_proj",
    "indexer.wq_b": "indexer.wq_b", "indexer.wk": "indexer.wk",
}  # fmt: skip


def places_of(config: Config) -> list[ModulePlace]:
    """Return the map for the causal language model that transformers makes of a config."""
    return family_of(config).module_places(config)


def v4_places(config: V4Config) -> list[ModulePlace]:
    """Map the modules of transformers' deepseek_v4."""
    places = [place for block in config.layers for place in _v4_block(block)]
    return _with_ends([*places, ModulePlace("hc_head", ("model.hc_head",), {0: "streams"})])


def v32_places(config: V32Config) -> list[ModulePlace]:
    """Map the modules of transformers' deepseek_v32."""
    return _with_ends([place for block in config.layers for place in _v32_block(block)])


def _with_ends(places: list[ModulePlace]) -> list[ModulePlace]:
    embed = ModulePlace("embed", ("model.embed_tokens",), {0: "tokens"})
    return [embed, *places, ModulePlace("norm", ("model.norm",)), ModulePlace("head", ("lm_head",))]


def _v4_block(block: Block) -> Iterator[ModulePlace]:
    ours, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    mixed = {(0, 0): "post", (0, 1): "mix", (0, 2): "out"}
    for half, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
        yield ModulePlace(f"{ours}{half}.hc_pre", (f"{theirs}{half}_hc",), {0: "streams"}, mixed)
        yield ModulePlace(f"{ours}{half}.norm", (theirs + norm,))
    attention = f"{theirs}self_attn."
    for name, module in _V4_ATTENTION.items():
        yield ModulePlace(f"{ours}attn.{name}", (attention + module,))
    if block.ratio:
        yield _projections(f"{ours}attn.compressor.proj", f"{attention}compressor.")
    if block.layer_type is LayerType.SPARSE:
        indexer = f"{attention}compressor.indexer."
        yield ModulePlace(f"{ours}attn.indexer.wq_b", (f"{indexer}q_b_proj",))
        yield _projections(f"{ours}attn.indexer.compressor.proj", indexer)
    yield from _experts(f"{ours}ffn.", f"{theirs}mlp")


def _projections(component: str, module: str) -> ModulePlace:
    modules = (f"{module}kv_proj", f"{module}gate_proj")
    return ModulePlace(component, modules, outputs={(0, 0): "latent", (1, 0): "gate"})


def _v32_block(block: Block) -> Iterator[ModulePlace]:
    ours, theirs = f"{block.prefix}.", f"model.{block.prefix}."
    # Their norms see the sum that ours makes of x and residual.
    for half, norm in (("attn", "input_layernorm"), ("ffn", "post_attention_layernorm")):
        yield ModulePlace(f"{ours}{half}.norm", (theirs + norm,))
    for name, module in _V32_ATTENTION.items():
        yield ModulePlace(f"{ours}attn.{name}", (f"{theirs}self_attn.{module}",))
    if block.mlp_type is MlpType.DENSE:
        yield from _gated(f"{ours}ffn.", f"{theirs}mlp.")
    else:
        yield from _experts(f"{ours}ffn.", f"{theirs}mlp")


def _gated(ours: str, theirs: str) -> Iterator[ModulePlace]:
    """Gate and up are one linear of ours; what lies between them and down has no module."""
    modules = (f"{theirs}gate_proj", f"{theirs}up_proj")
    yield ModulePlace(f"{ours}w13", modules, outputs={(0, 0): "out", (1, 0): "out"})
    yield ModulePlace(f"{ours}w2", (f"{theirs}down_proj",))


def _experts(ours: str, theirs: str) -> Iterator[ModulePlace]:
    yield ModulePlace(f"{ours}gate", (f"{theirs}.gate",))
    routed = {(0, 1): "weights", (0, 2): "experts"}
    yield ModulePlace(f"{ours}topk", (f"{theirs}.gate",), {}, routed)
    experts = f"{theirs}.experts"
    yield ModulePlace(f"{ours}experts.w13", (experts,), {0: "x", 1: "experts"}, {})
    yield ModulePlace(f"{ours}experts.combine", (experts,), {2: "weights"}, {(0, 0): "out"})
    yield from _gated(f"{ours}shared.", f"{theirs}.shared_experts.")
    yield ModulePlace(f"{ours}moe_sum", (theirs,), {})
