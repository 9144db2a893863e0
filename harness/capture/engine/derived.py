"""Derive the map of an engine's modules to a traced model from what the engine declares itself.

vLLM says which modules it fuses (`packed_modules_mapping`, the stacked names of
`hf_to_vllm_mapper`), and its layers' classes say what a module does and how ranks share it. The
modules of SGLang have the same names and layouts. A module is found by its path: the one that
transformers uses, or the one into which the engine packs it. No engine is imported here.

| engine | traced |
|---|---|
| a linear, norm or embedding of one path | that component |
| `qkv_proj`, `gate_up_proj`, any packed linear | each packed linear, in some columns |
| a norm that is given a residual | the sum before it, and the norm |
| `SiluAndMul` and its kin | the activation and the gated product |
| attention: q, k, v as they are attended to | the rotations' results, the cache, attention |
| experts: states, router's logits, chosen experts | the router's results, experts |

What stays unknown in between is judged as one (references/traced/spans.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.maps import (
    METHOD,
    TERM,
    WHOLE,
    CallSide,
    CapturedRankShare,
    ComponentMap,
    RowMeaning,
    ShareKind,
    TensorLocation,
)
from degarble.references.traced.family import site_name
from degarble.references.traced.graph import StretchKind, name_of
from degarble.references.traced.trace import BoundaryKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from degarble.references.traced.graph import Graph, TracedComponent
    from degarble.references.traced.trace import Ref

_COLUMN, _ROW, _REPLICATED = "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear"
_LOGITS = "logits_processor"
_ROUTER = "router.select_experts"
# What both engines pack where nothing else is declared (the order is that of the columns).
PACKED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    }
)


@dataclass(frozen=True)
class EngineModule:
    """A module of an engine: its class and bases by name, and what says how ranks share it."""

    path: str
    classes: tuple[str, ...] = ()
    parted: bool | None = None  # its columns or rows are divided among ranks; None: as the class
    reduced: bool = True  # its result is summed over ranks
    methods: tuple[str, ...] = ()  # of its attributes, that a capture may watch

    def is_a(self, *names: str) -> bool:
        """Return whether it is of one of these classes."""
        return any(name in self.classes for name in names)


@dataclass(frozen=True)
class EngineTree:
    """The modules of an engine's model, what it packs, and how many ranks share it."""

    modules: tuple[EngineModule, ...]
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PACKED)
    ranks: int = 1

    @classmethod
    def from_paths(
        cls, paths: Iterable[str], packed: Mapping[str, tuple[str, ...]] = PACKED, ranks: int = 1
    ) -> EngineTree:
        """Make a tree of modules of which only the paths are known, as a dump shows them."""
        return cls(tuple(EngineModule(path) for path in paths), packed, ranks)

    @classmethod
    def from_model(cls, model: Any, ranks: int) -> EngineTree:
        """Read the tree of a running engine's model."""
        modules, packed = [], dict(PACKED)
        for path, module in model.named_modules():
            packed |= declared_packing(module)
            parted = getattr(module, "disable_tp", None)
            router = getattr(module, "router", None)
            modules.append(
                EngineModule(
                    path,
                    tuple(each.__name__ for each in type(module).__mro__[:-1]),
                    None if parted is None else not parted,
                    bool(getattr(module, "reduce_results", True)),
                    (_ROUTER,) if hasattr(router, "select_experts") else (),
                )
            )
        return cls(tuple(modules), packed, ranks)

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> EngineTree:
        """Read what `document` wrote."""
        modules = tuple(
            EngineModule(
                each["path"], tuple(each["classes"]), each["parted"], each["reduced"],
                tuple(each["methods"]),
            )
            for each in raw["modules"]
        )  # fmt: skip
        packed = {name: tuple(parts) for name, parts in raw["packed"].items()}
        return cls(modules, packed, raw["ranks"])

    def document(self) -> dict[str, Any]:
        """Return the tree as JSON."""
        return {
            "modules": [
                {
                    "path": each.path, "classes": list(each.classes), "parted": each.parted,
                    "reduced": each.reduced, "methods": list(each.methods),
                }
                for each in self.modules
            ],
            "packed": {name: list(parts) for name, parts in self.packed.items()},
            "ranks": self.ranks,
        }  # fmt: skip


def declared_packing(module: Any) -> dict[str, tuple[str, ...]]:
    """Return what a class of vLLM declares: packed name to the names of its parts, in order."""
    found: dict[str, tuple[str, ...]] = {}
    declared = getattr(type(module), "packed_modules_mapping", None)
    if isinstance(declared, dict):
        found |= {name: tuple(parts) for name, parts in declared.items()}
    mapper = getattr(type(module), "hf_to_vllm_mapper", None)
    stacked: dict[str, list[tuple[int, str]]] = {}
    for part, (whole, shard) in getattr(mapper, "orig_to_new_stacked", {}).items():
        order = "qkv".index(shard) if isinstance(shard, str) and shard in "qkv" else shard
        if isinstance(order, int):
            stacked.setdefault(_leaf(whole), []).append((order, _leaf(part)))
    return found | {
        name: tuple(part for _, part in sorted(parts)) for name, parts in stacked.items()
    }


def _leaf(name: str) -> str:
    return name.strip(".").rpartition(".")[2]


def derived_maps(tree: EngineTree, graph: Graph) -> list[ComponentMap]:
    """Return where an engine shows the tensors of a traced model, component by component."""
    found = _Derived(tree, graph)
    for module in tree.modules:
        found.add(module)
    maps = found.maps()
    if not maps:
        raise InvalidArgument(
            "engine's modules", len(tree.modules), f"paths such as {graph.components[0].module}",
            "Capture the model that the config describes.",
        )  # fmt: skip
    return maps


class _Derived:
    """Collects locations, module by module. The first that shows a tensor is its producer's."""

    def __init__(self, tree: EngineTree, graph: Graph) -> None:
        self._tree, self._graph = tree, graph
        self._by_path: dict[str, list[TracedComponent]] = {}
        for component in graph.components:
            self._by_path.setdefault(name_of(component.module), []).append(component)
        self._known = {name_of(module.path) for module in tree.modules}
        self._inputs: dict[str, dict[str, TensorLocation]] = {}
        self._outputs: dict[str, dict[str, TensorLocation]] = {}
        self._late: dict[int, TensorLocation] = {}  # shown by a consumer alone

    def maps(self) -> list[ComponentMap]:
        """Return the maps in the order in which components run."""
        for number, location in self._late.items():
            maker = self._graph.makers.get(number)
            if maker is not None:
                self._outputs.setdefault(maker[0], {}).setdefault(maker[1], location)
        return [
            ComponentMap(
                site_name(component.name),
                self._inputs.get(component.name, {}),
                self._outputs.get(component.name, {}),
            )
            for component in self._graph.components
            if component.name in self._inputs or component.name in self._outputs
        ]

    def add(self, module: EngineModule) -> None:
        """Add what one module shows."""
        path = name_of(module.path)
        parent, _, leaf = path.rpartition(".")
        here = self._by_path.get(path, [])
        if path == _LOGITS:
            self._head(module)
        elif self._is_gated(module, parent, leaf):
            self._gated(module, parent)
        elif leaf == "attn" or module.is_a("Attention", "RadixAttention", "MLAAttention"):
            self._attention(module, parent)
        elif any(component.kind is BoundaryKind.EXPERTS for component in here):
            self._experts(module, here)
        elif here:
            self._one(module, here)
        elif leaf in self._tree.packed:
            prefix = f"{parent}." if parent else ""
            parts = [self._by_path.get(prefix + part) for part in self._tree.packed[leaf]]
            if all(parts):
                self._linears(module, [part[0] for part in parts if part])

    def _shown(self, ref: Ref, location: TensorLocation, *, result: bool) -> None:
        """Note where a tensor is seen; what returned it comes before what was given it."""
        edge = self._graph.edges.get(ref.number)
        number = ref.number if edge is None else edge.sources[0].number
        maker = self._graph.makers.get(number)
        if maker is None:
            return
        if result:
            self._outputs.setdefault(maker[0], {})[maker[1]] = location
        else:
            self._late.setdefault(number, location)

    def _given(self, component: TracedComponent, name: str, location: TensorLocation) -> None:
        self._inputs.setdefault(component.name, {})[name] = location
        self._shown(component.inputs[name], location, result=False)

    def _width(self, ref: Ref) -> int:
        traced = self._graph.trace.tensors[ref.number]
        return math.prod(
            extent for at, extent in enumerate(traced.shape) if at != traced.token_axis
        )

    def _slots(
        self, location: TensorLocation, refs: Sequence[Ref], *, parted: bool, least: int = 1
    ) -> list[TensorLocation]:
        """Return the columns of each tensor in one that holds them side by side."""
        found, begin = [], 0
        for ref in refs:
            width, ranks = self._width(ref), self._tree.ranks if parted else 1
            own = max(width // ranks, min(width, least))
            share = WHOLE
            if ranks > 1:
                share = CapturedRankShare(
                    ShareKind.PART, (width,), copies=max(1, own * ranks // width)
                )
            columns = None if len(refs) == 1 else (begin, begin + own)
            found.append(replace(location, columns=columns, share=share))
            begin += own
        return found

    def _one(self, module: EngineModule, here: Sequence[TracedComponent]) -> None:
        component = here[0]
        if component.kind is BoundaryKind.NORM:
            self._norm(module, component)
        elif component.kind is BoundaryKind.LINEAR:
            self._linears(module, [component])
        elif component.kind is BoundaryKind.ROUTER and "logits" in component.outputs:
            self._given(component, "x", _argument(module.path))
            self._shown(component.outputs["logits"], _result(module.path), result=True)
        elif component.kind is BoundaryKind.EMBEDDING or (
            component.kind is BoundaryKind.MODULE and len(component.inputs) == 1
        ):
            (name,) = component.inputs
            if name != "tokens":
                self._given(component, name, _argument(module.path))
            self._shown(component.outputs["out"], _result(module.path), result=True)

    def _linears(self, module: EngineModule, components: Sequence[TracedComponent]) -> None:
        parted = module.parted if module.parted is not None else not module.is_a(_REPLICATED)
        row = module.is_a(_ROW) or (
            not module.classes and len(components) == 1 and self._is_row(components[0])
        )
        x, out = _argument(module.path), _result(module.path)
        if parted and row:
            (x,) = self._slots(x, [components[0].inputs["x"]], parted=True)
        for component in components:
            self._given(component, "x", x)
        refs = [component.outputs["out"] for component in components]
        heads = self._head_width(components)
        locations = self._slots(out, refs, parted=parted and not row, least=heads)
        if row and parted and not module.reduced and self._tree.ranks > 1:
            locations = [replace(each, share=TERM) for each in locations]
        for ref, location in zip(refs, locations, strict=True):
            self._shown(ref, location, result=True)

    def _is_row(self, component: TracedComponent) -> bool:
        """Return whether a linear's input is divided among ranks: attention's or a gated result."""
        edge = self._graph.edges.get(component.inputs["x"].number)
        number = component.inputs["x"].number if edge is None else edge.sources[0].number
        maker = self._graph.makers.get(number, ("", ""))[0]
        kinds = {c.name: c.kind for c in self._graph.components}
        return kinds.get(maker) in {BoundaryKind.ATTENTION, StretchKind.GATED}

    def _head_width(self, components: Sequence[TracedComponent]) -> int:
        """Return the width of a head, which ranks never divide; 1 outside of attention."""
        parent = components[0].module.rpartition(".")[0]
        for component in self._by_path.get(name_of(parent), ()):
            if component.kind is BoundaryKind.ATTENTION:
                return self._graph.trace.tensors[component.inputs["key"].number].shape[-1]
        return 1

    def _norm(self, module: EngineModule, norm: TracedComponent) -> None:
        source = norm.inputs["x"]
        maker = self._graph.makers.get(source.number, ("", ""))[0]
        added = next((c for c in self._graph.components if c.name == maker), None)
        # Trap: of fewer key heads than ranks each rank has a whole one, as another rank has it.
        least = self._graph.trace.tensors[norm.outputs["out"].number].shape[-1]
        heads = self._slots(
            _argument(module.path), [source], parted=self._by_heads(norm), least=least
        )
        plain, out = heads[0], replace(_result(module.path), share=heads[0].share)
        if added is not None and added.kind is StretchKind.RESIDUAL and len(added.inputs) == 2:
            branch = replace(_argument(module.path), paired=True)
            total = replace(
                _result(module.path, 1), paired=True, otherwise=replace(plain, paired=False)
            )
            self._given(added, "x", branch)
            self._given(added, "residual", replace(_argument(module.path, 1), paired=True))
            self._inputs.setdefault(norm.name, {})["x"] = total
            self._shown(source, total, result=True)
        else:
            self._given(norm, "x", plain)
        self._shown(norm.outputs["out"], out, result=True)

    def _by_heads(self, norm: TracedComponent) -> bool:
        """Return whether a norm is one of heads, which ranks divide."""
        traced = self._graph.trace.tensors[norm.outputs["out"].number]
        return len(traced.shape) == 4

    def _is_gated(self, module: EngineModule, parent: str, leaf: str) -> bool:
        if any(name.endswith("AndMul") for name in module.classes):
            return True
        packed = any(f"{parent}.{name}" in self._known for name in ("gate_up_proj",))
        return leaf == "act_fn" and not module.classes and packed

    def _gated(self, module: EngineModule, parent: str) -> None:
        gated = [c for c in self._by_path.get(parent, ()) if c.kind is StretchKind.GATED]
        if not gated:
            return
        (product,) = gated[:1]
        (location,) = self._slots(_result(module.path), [product.outputs["out"]], parted=True)
        self._shown(product.outputs["out"], location, result=True)

    def _attention(self, module: EngineModule, parent: str) -> None:
        here = self._by_path.get(parent, ())
        attention = next((c for c in here if c.kind is BoundaryKind.ATTENTION), None)
        cache = next((c for c in here if c.kind is BoundaryKind.CACHE), None)
        if attention is None or cache is None:
            return
        least = self._graph.trace.tensors[attention.inputs["key"].number].shape[-1]
        for at, (component, name) in enumerate(
            ((attention, "query"), (cache, "key"), (cache, "value"))
        ):
            (location,) = self._slots(
                _argument(module.path, at), [component.inputs[name]], parted=True, least=least
            )
            self._given(component, name, location)
        (out,) = self._slots(_result(module.path), [attention.outputs["out"]], parted=True)
        self._shown(attention.outputs["out"], out, result=True)

    def _experts(self, module: EngineModule, here: Sequence[TracedComponent]) -> None:
        (experts,) = (c for c in here if c.kind is BoundaryKind.EXPERTS)
        self._given(experts, "x", _argument(module.path, "hidden_states"))
        if _ROUTER in module.methods:
            choice = f"{module.path}{METHOD}{_ROUTER}"
            for at, name in enumerate(("weights", "experts")):
                self._given(experts, name, _result(choice, at))
        # With shared experts the result is a sum of both, which is another tensor.
        shares = module.is_a("SharedFusedMoE") or any(
            known.startswith(f"{experts.name.rpartition('.')[0]}.shared") for known in self._known
        )
        if not shares:
            location = _result(module.path)
            if not module.reduced and self._tree.ranks > 1:
                location = replace(location, share=TERM)
            self._shown(experts.outputs["out"], location, result=True)

    def _head(self, module: EngineModule) -> None:
        maker = self._graph.makers.get(self._graph.trace.logits.number, ("", ""))[0]
        head = next((c for c in self._graph.components if c.name == maker), None)
        if head is not None and head.kind is BoundaryKind.LINEAR:
            x = replace(_argument(module.path, 1), rows=RowMeaning.SEQUENCES)
            self._inputs.setdefault(head.name, {})["x"] = x
            out = replace(_result(module.path), rows=RowMeaning.SEQUENCES)
            self._shown(head.outputs["out"], out, result=True)


def _argument(module: str, at: int | str = 0) -> TensorLocation:
    return TensorLocation(module, CallSide.ARGUMENT, at)


def _result(module: str, at: int = 0) -> TensorLocation:
    return TensorLocation(module, CallSide.RESULT, at)
