"""Read from vLLM's source how a class names, fuses and cuts the parameters of a model.

Three things say where a stored tensor goes. The class's mapper (`hf_to_vllm_mapper`: prefixes,
substrings, suffixes, stacked names) and the lists of its `load_weights` rename it; the modules that
its `__init__` builds say whether that name exists; the class of the layer there says how ranks cut
it. vLLM is neither imported nor run (class_sources.py).

A module with a loop of its own in `load_weights` may do more than its lists say, and some modules
are built in ways that are not followed. A name that leads nowhere there is not known to be lost:
`Placement.certain` tells the two apart.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.audit.loader.class_sources import (
    Built,
    Const,
    External,
    Merged,
    Several,
    SourceClass,
    SourceReader,
    SourceTree,
)
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_REGISTRY = "vllm.model_executor.models.registry"
_MODELS = "vllm.model_executor.models"
_VERSION = "vllm._version"
EXPERTS = ("FusedMoE", "SharedFusedMoE", "MoERunner")
# How ranks cut the parameters of a layer: dimension of a matrix, None where every rank has all.
_CUT: Mapping[str, int | None] = {
    "QKVParallelLinear": 0, "MergedColumnParallelLinear": 0, "ColumnParallelLinear": 0,
    "RowParallelLinear": 1, "ReplicatedLinear": None, "VocabParallelEmbedding": 0,
}  # fmt: skip
_LEAVES = (*_CUT, "LinearBase", "Attention", "MLAAttention", *EXPERTS)
_TORCH = ("LayerNorm", "Linear", "Embedding", "Conv1d", "RMSNorm", "GroupNorm")  # torch's own
_LAYERS = ".layers."  # in the names of the modules that define them
_QKV = {"q": 0, "k": 1, "v": 2}
_OWN_EXPERTS = ("gate_proj", "down_proj", "up_proj")
_STACKS = ("w13", "w2")
_MAPPER_PARTS = ("regex", "substr", "stacked", "prefix", "suffix")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d{1,9})(\..*)")
_SHARD_TUPLE = 3  # (parameter, stored name, shard)


class Cut(NamedTuple):
    """How ranks cut a parameter. `dim` None: not at all; `heads`: of its keys and values."""

    known: bool = False
    dim: int | None = None
    heads: int | None = None  # of a fused query, key and value: number of key heads
    padded: bool = False  # rows of a vocabulary, which vLLM pads


@dataclass(frozen=True)
class Placement:
    """Where a stored tensor goes. `slot` of `slots`; `expert` of a stack.

    `partners`: the stored names of all slots. `target` empty: the class has no such parameter;
    `certain` False: a part of the loader that was not read may still have one.
    """

    target: str = ""
    slot: int = 0
    slots: int = 1
    expert: int | None = None
    partners: tuple[str, ...] = ()
    renamed: str = ""
    certain: bool = True
    cut: Cut = field(default_factory=Cut)


@dataclass(frozen=True)
class _Rules:
    """What one `load_weights` does with names."""

    mapper: tuple[tuple[str, Any, Any], ...] = ()  # (kind, pattern, replacement) in order
    stacked: tuple[tuple[str, str, int], ...] = ()  # parameter, stored name, slot
    replaced: tuple[tuple[str, str], ...] = ()
    skipped: tuple[str, ...] = ()
    automatic: bool = True  # children load themselves, by rules of their own
    plain: bool = True  # nothing else changes names on their way


class _Stacked(NamedTuple):
    """A rule that stacks a tensor, (parameter, stored name, slot), and the rules that it is of."""

    entry: tuple[str, str, int]
    rules: _Rules


class _Leaf(NamedTuple):
    """A parameter's layer in the tree, the path to it, and the rest of the name."""

    path: str
    layer: Built
    rest: str
    owner: Built


@dataclass(frozen=True)
class EngineSource:
    """The sources of vLLM below a folder."""

    tree: SourceTree
    version: str

    @property
    def name(self) -> str:
        """Name and version of the engine."""
        return f"vLLM {self.version}".strip()

    @classmethod
    def installed(cls) -> EngineSource | None:
        """Return the sources of the installed vLLM; None where there is none."""
        found = importlib.util.find_spec("vllm")  # of a package without parents: not imported
        if found is None or found.origin is None:
            return None
        try:
            number = version("vllm")
        except PackageNotFoundError:
            number = ""
        return cls.at(Path(found.origin).parent, number)

    @classmethod
    def at(cls, folder: Path, number: str = "") -> EngineSource:
        """Return the sources in a folder: a package `vllm`, or one that holds it."""
        root = folder.parent if folder.name == "vllm" else folder
        tree = SourceTree(root)
        if tree.module(_REGISTRY) is None:
            raise UnreadableFile(
                shown(str(folder)), "no vllm/model_executor/models/registry.py in it",
                "the folder of vLLM's package, or the one that holds it",
                "Unpack vLLM's wheel, and pass the folder: --vllm-source FOLDER.",
            )  # fmt: skip
        return cls(tree, number or _stated_version(tree))

    def class_of(self, architecture: str) -> SourceClass | None:
        """Return the class that loads an architecture; None where vLLM has none of its own."""
        found = self.registered().get(architecture)
        if found is None:
            return None
        where, name = found
        module = self.tree.module(where if "." in where else f"{_MODELS}.{where}")
        made = None if module is None else self.tree.find(module, name)
        return made if isinstance(made, SourceClass) else None

    def registered(self) -> dict[str, tuple[str, str]]:
        """Return module and class of every architecture of text alone."""
        registry = self.tree.module(_REGISTRY)
        table = None if registry is None else registry.names.get("_TEXT_GENERATION_MODELS")
        found = _constant(table) if table is not None else None
        return found if isinstance(found, dict) else {}

    def loader(self, architecture: str, config: Mapping[str, Any]) -> ModelLoader | None:
        """Return how vLLM loads a model of this config; None where it has no class for it."""
        cls = self.class_of(architecture)
        return None if cls is None else ModelLoader(self, cls, config)


class ModelLoader:
    """What vLLM's class of one model does with stored names."""

    def __init__(self, source: EngineSource, cls: SourceClass, config: Mapping[str, Any]) -> None:
        self._source, self._tree, self.cls = source, source.tree, cls
        self._config = config
        self._reader = SourceReader(source.tree, config, _LEAVES, _LAYERS)
        self._rules: dict[int, _Rules | None] = {}
        self._places: dict[str, Placement] = {}
        self._stored = ""  # the name that is being placed

    @property
    def origin(self) -> str:
        """Say which class of which vLLM this is."""
        where = self.cls.module.name.replace(".", "/")
        return f"{self.cls.name} of {self._source.name} ({where}.py), as its source says"

    @cached_property
    def model(self) -> Built:
        """Return the tree of the model's modules."""
        return self._reader.build(self.cls)

    def place(self, stored: str) -> Placement:
        """Return where a stored tensor goes."""
        numbered = _EXPERT.fullmatch(stored)
        if numbered is None:
            return self._place(stored)
        # Experts of a layer are loaded alike.
        first = self._place(f"{numbered[1]}0{numbered[3]}")
        if first.expert is None:
            return self._place(stored)
        return replace(first, expert=int(numbered[2]))

    def _place(self, stored: str) -> Placement:
        if stored not in self._places:
            self._stored = stored
            self._places[stored] = self._in(self.model, stored, "")[0]
        return self._places[stored]

    # ----------------------------------------------------------------------------------------------
    # Names, from the outermost module inwards

    def _in(
        self, module: Built, name: str, path: str, above: _Stacked | None = None
    ) -> list[Placement]:
        """Return the places of a name below a module that loads by its own rules, at least one."""
        rules = self._rules_of(module) or _Rules()
        mapped = _mapped(rules, name)
        if mapped is None:
            return [Placement(certain=False)]  # left out on purpose
        new, entry = mapped
        # A tensor keeps the slot that an outer mapper gave it.
        stack = above if entry is None else _Stacked(entry, rules)
        lost: list[Placement] = []
        for candidate, chosen in self._candidates(rules, new, stack):
            found: list[Placement] = []
            for leaf, own in self._reach(module, candidate, path, (rules, chosen)):
                if own is not None:
                    found += own
                elif leaf is not None:
                    found.append(self._placement(leaf, rules, chosen))
            placed = [each for each in found if each.target]
            if placed:
                return placed
            lost += found
        sure = rules.plain and self._ends_in_the_open(module, new) is False
        if lost:
            return [replace(each, certain=each.certain and rules.plain) for each in lost]
        return [Placement(renamed=f"{path}.{new}" if path else new, certain=sure)]

    def _ends_in_the_open(self, module: Any, name: str) -> bool:
        """Return whether a name leads to an attribute of which nothing is known."""
        head, _, rest = name.partition(".")
        if isinstance(module, Several):
            return any(self._ends_in_the_open(each, rest) for each in module.every()) or (
                not module.every()
            )
        if not isinstance(module, Built) or head not in module.attributes:
            return False
        values = module.attributes[head]
        known = [each for each in values if isinstance(each, (Built, Several))]
        if not known:
            return not any(isinstance(each, Const) for each in values)
        return any(self._ends_in_the_open(each, rest) for each in known)

    def _candidates(
        self, rules: _Rules, new: str, stack: _Stacked | None
    ) -> Iterator[tuple[str, _Stacked | None]]:
        """Yield (name in the module, rule that stacks it), the likeliest first."""
        if stack is not None:
            yield new, stack
        renamed = [new]
        for before, after in rules.replaced:
            renamed += [each.replace(before, after) for each in renamed if before in each]
        for each in dict.fromkeys(renamed):
            for entry in rules.stacked:
                parameter, part, _ = entry
                if part in each:
                    yield each.replace(part, parameter, 1), _Stacked(entry, rules)
            yield each, None

    def _reach(
        self, module: Built, name: str, path: str, given: tuple[_Rules, _Stacked | None]
    ) -> Iterator[tuple[_Leaf | None, list[Placement] | None]]:
        """Yield the layers that a name leads to, or the places that a child finds itself."""
        head, _, rest = name.partition(".")
        here = f"{path}.{head}" if path else head
        for child in self._children(module, head):
            if self._is_leaf(child):
                yield _Leaf(here, child, rest, module), None
            elif not rest:
                continue
            elif isinstance(child, Built) and given[0].automatic and self._rules_of(child):
                yield None, self._in(child, rest, here, given[1])
            elif isinstance(child, Several):
                yield from self._reach_item(child, rest, here, given)
            elif isinstance(child, Built):
                yield from self._reach(child, rest, here, given)

    def _reach_item(
        self, several: Several, name: str, path: str, given: tuple[_Rules, _Stacked | None]
    ) -> Iterator[tuple[_Leaf | None, list[Placement] | None]]:
        head, _, rest = name.partition(".")
        if not head.isdecimal():
            return
        number = int(head)
        items = several.every()
        if not several.numbered:
            items = several.items[number] if number < len(several.items) else ()
        wrapper = Built(External("item"), {}, {head: items})
        yield from self._reach(wrapper, f"{head}.{rest}" if rest else head, path, given)

    def _children(self, module: Built, name: str) -> tuple[Any, ...]:
        known = module.attributes.get(name, ())
        found = tuple(each for each in known if isinstance(each, (Built, Several)))
        if not found and name in ("weight", "bias") and isinstance(module.kind, SourceClass):
            bases = self._tree.bases(module.kind)
            if any(isinstance(each, External) and each.leaf in _TORCH for each in bases):
                return (Built(External("torch.nn.Parameter")),)
        return found

    def _is_leaf(self, child: Any) -> bool:
        if not isinstance(child, Built):
            return False
        if isinstance(child.kind, External) or self._reader.is_leaf(child.kind):
            return True
        return any(each.endswith("Parameter") for each in child.classes(self._tree))

    def _placement(self, leaf: _Leaf, rules: _Rules, stack: _Stacked | None) -> Placement:
        classes = leaf.layer.classes(self._tree)
        if any(each in EXPERTS for each in classes):
            return self._expert(leaf, rules)
        cut = self._cut(leaf, classes)
        target = f"{leaf.path}.{leaf.rest}" if leaf.rest else leaf.path
        if "." in leaf.rest:  # a layer has no modules inside
            return Placement(renamed=target, certain=rules.plain)
        if stack is None:
            return Placement(target, cut=cut)
        (parameter, part, slot), stacking = stack
        members = {e[2]: _leaf(e[1]) for e in stacking.stacked if _same(e[0], parameter)}
        before, found, after = self._stored.rpartition(_leaf(part))
        partners = tuple(f"{before}{members[each]}{after}" for each in sorted(members) if found)
        return Placement(target, slot, len(members), partners=partners, cut=cut)

    def _expert(self, leaf: _Leaf, rules: _Rules) -> Placement:
        number, _, rest = leaf.rest.partition(".")
        gate, down, up = self._expert_names(leaf.layer)
        part, _, suffix = rest.partition(".")
        if not number.isdecimal():
            known = leaf.rest.startswith(("w13_", "w2_"))
            return Placement(f"{leaf.path}.{leaf.rest}" if known else "", certain=False)
        order = {gate: (0, 0), up: (0, 1), down: (1, 0)}
        if part not in order or not part:
            return Placement(renamed=f"{leaf.path}.{leaf.rest}", certain=rules.plain)
        stack, slot = order[part]
        slots = 2 if stack == 0 and up else 1
        cut = Cut(known=True, dim=1 if stack else 0)
        suffix = suffix.replace(".", "_")
        return Placement(
            f"{leaf.path}.{_STACKS[stack]}_{suffix}", slot, slots, int(number), cut=cut
        )

    def _expert_names(self, layer: Built) -> tuple[str, ...]:
        """Return the stored names of gate, down and up: of the layer, else of a class's loader."""
        own = layer.arguments.get("ckpt_names", ())
        stated = tuple(each[0].value for s in own if isinstance(s, Several) for each in s.items
                       if each and isinstance(each[0], Const))  # fmt: skip
        if len(stated) == len(_OWN_EXPERTS):
            return stated
        return self._named_by_loaders or _OWN_EXPERTS

    @cached_property
    def _named_by_loaders(self) -> tuple[str, ...]:
        for base in self._tree.bases(self.cls):
            module = base.module if isinstance(base, SourceClass) else None
            for node in () if module is None else module.names.values():
                for call in ast.walk(node):
                    if isinstance(call, ast.Call):
                        given = {k.arg: _constant(k.value) for k in call.keywords}
                        keys = [f"ckpt_{each}_name" for each in _OWN_EXPERTS]
                        if all(isinstance(given.get(key), str) for key in keys):
                            return tuple(given[key] for key in keys)
        return ()

    # ----------------------------------------------------------------------------------------------
    # Ranks

    def _cut(self, leaf: _Leaf, classes: Sequence[str]) -> Cut:
        kind = next((each for each in classes if each in _CUT), None)
        if kind is None:
            # Norms and gates are whole on every rank; parameters of a layer's own may be cut.
            names = (*classes, *leaf.owner.classes(self._tree))
            return Cut(known=any(each.endswith(("Norm", "Norm1P", "Linear")) for each in names))
        whole = _stated(leaf.layer, "disable_tp")
        if whole is True:
            return Cut(known=True)
        if kind == "VocabParallelEmbedding":
            return Cut(known=True, dim=0, padded=True)
        if kind == "QKVParallelLinear":
            total = _stated(leaf.layer, "total_num_kv_heads")
            if total is None:
                total = _stated(leaf.layer, "total_num_heads")
            known = isinstance(total, int)
            return Cut(known=known, dim=0, heads=total if known else None)
        known = whole is False or "disable_tp" not in leaf.layer.arguments
        return Cut(known=known, dim=_CUT[kind])

    # ----------------------------------------------------------------------------------------------
    # Rules of one load_weights

    def _rules_of(self, module: Built) -> _Rules | None:
        if id(module) not in self._rules:
            self._rules[id(module)] = None
            if isinstance(module.kind, SourceClass):
                found = self._tree.attribute(module.kind, "load_weights")
                if found is not None and isinstance(found[1], ast.FunctionDef):
                    self._rules[id(module)] = self._read(module, found[0], found[1])
        return self._rules[id(module)]

    def _read(self, module: Built, owner: SourceClass, method: ast.FunctionDef) -> _Rules:
        rules = _Rules(automatic=False, plain=False)
        given = method.args.args[1].arg if len(method.args.args) > 1 else ""
        for node in ast.walk(method):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            keywords = {each.arg: each.value for each in node.keywords}
            if name == "AutoWeightsLoader":
                skipped = self._texts(module, owner, keywords)
                rules = replace(rules, automatic=True, skipped=skipped)
            mapper = keywords.get("mapper")
            if mapper is None and name == "apply" and isinstance(called, ast.Attribute):
                mapper = called.value
            if mapper is not None:
                for each in self._reader.value(module, owner, mapper):
                    rules = replace(rules, mapper=tuple(_parts_of(each)))
            if name == "load_weights" and isinstance(called, ast.Attribute):
                above = self._above(module, owner, called.value)
                first = node.args[0] if node.args else None
                direct = isinstance(first, ast.Name) and first.id == given
                rules = replace(above or rules, plain=direct and not _assigned(method, given))
        stacked = dict.fromkeys((*_stacked_rules(rules.mapper), *_tuples(method, owner)))
        return replace(
            rules, stacked=tuple(stacked), replaced=tuple(_replacements(method)),
            plain=rules.plain and rules.automatic,
        )  # fmt: skip

    def _above(self, module: Built, owner: SourceClass, node: ast.expr) -> _Rules | None:
        """Return the rules of super().load_weights, where a method calls it."""
        is_super = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "super"
        order = self._tree.bases(owner)[1:]
        for base in order if is_super else ():
            if isinstance(base, SourceClass):
                found = self._tree.attribute(base, "load_weights")
                if found is not None and isinstance(found[1], ast.FunctionDef):
                    return self._read(module, found[0], found[1])
        return None

    def _texts(
        self, module: Built, owner: SourceClass, keywords: Mapping[str | None, ast.expr]
    ) -> tuple[str, ...]:
        found: list[str] = []
        for key in ("skip_prefixes", "skip_substrs"):
            for each in self._reader.value(module, owner, keywords[key]) if key in keywords else ():
                items = each.items if isinstance(each, Several) else []
                found += [c[0].value for c in items if c and isinstance(c[0], Const)]
        return tuple(each for each in found if isinstance(each, str))


# --------------------------------------------------------------------------------------------------
# A mapper's parts, and lists of tuples


def _parts_of(mapper: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (kind, pattern, replacement) of a WeightsMapper, in the order in which it applies."""
    merged = [mapper]
    while any(isinstance(each, Merged) for each in merged):
        merged = [
            side
            for each in merged
            for side in ((each.first, each.second) if isinstance(each, Merged) else (each,))
        ]
    for kind in _MAPPER_PARTS:
        for each in merged:
            given = each.arguments.get(f"orig_to_new_{kind}", ()) if isinstance(each, Built) else ()
            for table in given:
                if isinstance(table, Const) and isinstance(table.value, dict):
                    for pattern, value in table.value.items():
                        yield kind, pattern, _plain(value)


def _plain(value: Any) -> Any:
    """Return what a mapper's entry says: a text, None, or (text, shard)."""
    if not isinstance(value, tuple) or not value:
        return value
    first = value[0]
    if isinstance(first, Const):
        return first.value
    if isinstance(first, Several):
        return tuple(item[0].value for item in first.items if item and isinstance(item[0], Const))
    return first


def _stacked_rules(parts: Sequence[tuple[str, Any, Any]]) -> Iterator[tuple[str, str, int]]:
    for kind, pattern, value in parts:
        if kind == "stacked" and isinstance(value, tuple) and len(value) == 2:
            slot = _QKV.get(value[1], value[1])
            if isinstance(slot, int) and isinstance(pattern, str):
                yield value[0], pattern, slot


def _tuples(method: ast.FunctionDef, owner: SourceClass) -> Iterator[tuple[str, str, int]]:
    """Yield the (parameter, stored name, shard) of lists in a method, and of methods it calls."""
    called = {
        node.func.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    own = [node for node in owner.node.body if isinstance(node, ast.FunctionDef)]
    for body in (method, *(each for each in own if each.name in called and each is not method)):
        for node in ast.walk(body):
            for each in node.elts if isinstance(node, (ast.List, ast.Tuple)) else ():
                entry = _constant(each)
                if isinstance(entry, tuple) and len(entry) == _SHARD_TUPLE:
                    parameter, part, shard = entry
                    slot = _QKV.get(shard, -1) if isinstance(shard, str) else shard
                    if isinstance(parameter, str) and isinstance(part, str) and _is_slot(slot):
                        yield parameter, part, slot


def _is_slot(shard: object) -> bool:
    return type(shard) is int and shard >= 0


def _replacements(method: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the (before, after) of `.replace("before", "after")` in a method."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = [_constant(each) for each in node.args]
            if node.func.attr == "replace" and len(values) >= 2:
                before, after = values[:2]
                if isinstance(before, str) and isinstance(after, str) and before:
                    yield before, after


def _assigned(method: ast.FunctionDef, name: str) -> bool:
    """Return whether a method binds one of its arguments anew."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        for node in ast.walk(method)
    )


def _mapped(rules: _Rules, name: str) -> tuple[str, tuple[str, str, int] | None] | None:
    """Apply a mapper as WeightsMapper does; None where the name is left out."""
    stack: tuple[str, str, int] | None = None
    for kind, pattern, value in rules.mapper:
        new = value
        if kind == "regex":
            text = _pattern(pattern)
            if text is None or not (isinstance(new, str) or new is None):
                continue
            if re.search(text, name):
                if new is None:
                    return None
                name = re.sub(text, new, name)
            continue
        if not isinstance(pattern, str):
            continue
        applies = {"prefix": name.startswith, "suffix": name.endswith}.get(kind, name.__contains__)
        if not applies(pattern):
            continue
        if new is None:
            return None
        if kind == "stacked":
            slot = _QKV.get(new[1], new[1])
            stack = (new[0], pattern, slot) if isinstance(slot, int) else None
            name = name.replace(pattern, new[0], 1)
        elif kind == "suffix":
            name = new.join(name.rsplit(pattern, 1))
        else:
            name = name.replace(pattern, new, 1)
    return name, stack


def _pattern(key: Any) -> str | None:
    """Return the text of re.compile("..."), or of a plain key."""
    if isinstance(key, str):
        return key
    first = key.positional[0] if isinstance(key, Built) and key.positional else ()
    return first[0].value if first and isinstance(first[0], Const) else None


def _leaf(name: str) -> str:
    return name.strip(".").rpartition(".")[2]


def _same(parameter: str, other: str) -> bool:
    return parameter.strip(".") == other.strip(".")


def _stated(layer: Built, name: str) -> Any:
    value = layer.arguments.get(name, ())
    return value[0].value if len(value) == 1 and isinstance(value[0], Const) else None


def _constant(node: ast.AST) -> Any:
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None


def _stated_version(tree: SourceTree) -> str:
    module = tree.module(_VERSION)
    for name in ("__version__", "version"):
        value = None if module is None else _constant(module.names.get(name, ast.Pass()))
        if isinstance(value, str):
            return value
    return ""
