"""Derive a loader map of any model from transformers' names and what an engine fuses.

Which tensors belong to a model follows from its parameters and transformers' conversion mapping;
which parts each of them has (codes, scales) from its partners: the same module of other layers and
experts. An engine that fuses modules holds their parts as slots; experts that files hold one by one
are slots of a stack. Where the engine's source was read (engine_sources.py), it says which; a
packing table says it where there is no source, and for names whose way through it is not plain.

A file of rules may start from such a map (`base`). Its own rules come first, and are judged by what
belongs in each slot.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument, Refused
from degarble.harness.checkpoint.audit.loader.engine_sources import Cut
from degarble.harness.checkpoint.audit.loader.maps import (
    DerivedNames,
    ListedParameter,
    LoaderMap,
    NameOutcome,
    RankCut,
    ResolvedName,
)
from degarble.harness.checkpoint.audit.structure.inventory import (
    Inventory,
    ModuleCheck,
    StoredParameter,
)
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.converted import ConvertedWeights
from degarble.harness.checkpoint.view.modules import PLAIN_DTYPES
from degarble.harness.checkpoint.view.quantisation_configs import InputFormats
from degarble.harness.model.layouts import Layout, Spelling
from degarble.harness.model.parameters import Parameter, Row
from degarble.harness.model.recipes import BF16
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import Block, Dtype, Kind, LayerType, MlpType

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from degarble.harness.checkpoint.audit.loader.engine_maps import Ranks
    from degarble.harness.checkpoint.audit.loader.engine_sources import ModelLoader
    from degarble.harness.checkpoint.view.converted import NamingRules, ParameterSource
    from degarble.harness.checkpoint.view.view import Checkpoint

_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_SECOND = re.compile(r"down|w2$|output")  # transformers' names of the matrix that comes second
_STACKED = "*"  # in a pattern of transformers: the number of an expert


@dataclass(frozen=True)
class DerivedEngine:
    """How an engine names and fuses the modules of a model.

    `packed`: the parts of each fused module, in order. `stacks`: names of the stacks of experts'
    first and second matrices; None where they are those of transformers. `loader`: what the
    engine's own source says; it comes first. `origin`: where all this is from, for reports.
    """

    name: str
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacks: tuple[str, str] | None = None
    loader: ModelLoader | None = None
    origin: str = ""


class _Module(NamedTuple):
    """A module that belongs to the model, whether the checkpoint has it or not."""

    name: str
    parameter: str  # of transformers
    expert: int | None = None
    slot: int = 0
    slots: int = 1
    shape: tuple[int, ...] | None = None  # of its values, where the model states it


class _Part(NamedTuple):
    """What a tensor of a role is like, by most of its modules."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


class _Place(NamedTuple):
    """One slot of an engine's parameter."""

    target: str
    key: tuple[int | None, int]
    slots: int
    part: PartKind
    like: _Part
    parameter: Parameter
    cut: Cut = Cut()


def derived_map(
    checkpoint: Checkpoint, config: Any, rules: NamingRules, engine: DerivedEngine, ranks: Ranks
) -> LoaderMap:
    """Return the map by which an engine loads a model that transformers describes."""
    if ranks.pp != 1 or (ranks.tp != 1 and engine.loader is None):
        raise InvalidArgument(
            f"ranks of {engine.name}", f"tp={ranks.tp}, pp={ranks.pp}",
            "pp=1, and tp=1 without the engine's source: how it cuts parameters is not derived",
            f"Pass --loader {engine.name}, --vllm-source DIR, or a file that lists a rank's"
            " parameters and splits.",
        )  # fmt: skip
    return _Deriving(checkpoint, config, rules, engine).map(ranks)


class _Deriving:
    """Collects modules, their parts, and the places of these."""

    def __init__(
        self, checkpoint: Checkpoint, config: Any, rules: NamingRules, engine: DerivedEngine
    ) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._rules, self._engine = rules, engine
        self._converted = ConvertedWeights(checkpoint, rules)
        self._undecided: list[str] = []
        self._modules = {each.name: each for each in self._expected()}
        self._parts = {name: self._stored(name) for name in self._modules}
        self._likes = self._likenesses()

    def map(self, ranks: Ranks) -> LoaderMap:
        """Return the map."""
        places: dict[str, dict[tuple[int | None, int], _Place]] = defaultdict(dict)
        resolved: dict[str, ResolvedName] = {}
        layout = Layout(self._engine.name, self._config.family, Spelling.HUGGINGFACE, "", BF16)
        inventory = Inventory(self._config, layout)
        for module in self._modules.values():
            parts = self._parts[module.name]
            parameter = self._parameter(module)
            if parts:
                plain = any(part is PartKind.VALUE for part in parts)
                check = ModuleCheck(BF16 if plain else None)
                inventory.stored.append(StoredParameter(parameter, module.name, check))
            for part, like in self._wanted(module).items():
                entry = parts.get(part)
                place = self._place(module, part, like, parameter)
                if isinstance(place, str):  # the engine has no such parameter
                    if entry is not None:
                        resolved[entry.name] = ResolvedName(NameOutcome.DROPPED, place)
                    continue
                places[place.target].setdefault(place.key, place)
                if entry is not None:
                    resolved[entry.name] = ResolvedName(
                        NameOutcome.PLACED, place.target,
                        place.key[1] if place.slots > 1 or place.key[0] is not None else None,
                        place.key[0],
                    )  # fmt: skip
        holds = {
            target: {key: (place.parameter, place.part) for key, place in members.items()}
            for target, members in places.items()
        }
        listed = tuple(_listed(target, members, ranks) for target, members in places.items())
        cuts = {target: _rank_cut(target, members, ranks) for target, members in places.items()}
        return LoaderMap(
            f"{self._engine.name} for {self._config.raw.get('model_type')}", listed, *ranks,
            derived=DerivedNames(
                inventory, resolved, holds, self._unexpected, self._tied_apart(),
                {target: cut for target, cut in cuts.items() if cut is not None},
                self._engine.origin, tuple(self._undecided),
            ),
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------------
    # Modules that belong to the model

    def _expected(self) -> Iterator[_Module]:
        for name, shape in self._rules.wanted.items():
            source = self._converted.sources.get(name)
            if source is None:
                module = name.removesuffix(".weight")
                yield _Module(module, name, shape=shape)
            elif source.converter is None:
                yield _Module(_own(name, source)[0], name, shape=shape)
            else:
                yield from self._several(name, shape, source)

    def _several(
        self, name: str, shape: tuple[int, ...], source: ParameterSource
    ) -> Iterator[_Module]:
        """Yield the modules that transformers joins into one parameter."""
        patterns = source.converter.source_patterns
        for slot, pattern in enumerate(patterns):
            modules = source.modules.get(pattern, [])
            if not all(_STACKED in each for each in patterns):
                yield from (_Module(each, f"{name}.{slot}") for each in modules)
                continue
            known = {_expert_of(module): module for module in modules}
            first = next(iter(modules), None) or self._sibling(source, patterns, pattern)
            for expert in range(shape[0]):
                module = known.get(expert) or _with_expert(first, expert)
                yield _Module(module, name, expert, slot, len(patterns))

    def _sibling(self, source: ParameterSource, patterns: list[str], pattern: str) -> str:
        """Return a module's name for a pattern that no stored one has."""
        other = next(each for each in patterns if source.modules.get(each))
        leaf = pattern.removesuffix(".weight").rpartition(".")[2]
        return f"{source.modules[other][0].rpartition('.')[0]}.{leaf}"

    @cached_property
    def _unexpected(self) -> tuple[str, ...]:
        return tuple(self._converted.unexpected)

    def _tied_apart(self) -> tuple[tuple[str, str], ...]:
        """Return modules that are stored under two names with two values."""
        found = []
        for name, source in self._converted.sources.items():
            if source.converter is None:
                first, *others = _own(name, source)
                found += [(first, each) for each in others if not self._alike(first, each)]
        return tuple(found)

    def _alike(self, first: str, other: str) -> bool:
        sides = [
            [bytes(self._checkpoint.raw(entry.name)) for entry in self._stored(each).values()]
            for each in (first, other)
        ]
        return sides[0] == sides[1]

    # ----------------------------------------------------------------------------------------------
    # Parts of a module

    def _stored(self, module: str) -> dict[PartKind, Any]:
        table = self._checkpoint.table
        if module not in table.suffixes:
            return {}
        try:
            parts = dict(table.parts(module))
        except Refused:  # two tensors for one part: the structure audit reports it
            return {}
        codes = parts.get(PartKind.CODES)
        if codes is not None and codes.dtype in PLAIN_DTYPES and len(parts) == 1:
            return {PartKind.VALUE: codes}
        return parts

    def _likenesses(self) -> dict[str, dict[PartKind, _Part]]:
        """Return what the parts of every role are like, by most of its quantised modules."""
        counted: dict[str, dict[PartKind, Counter[_Part]]] = defaultdict(
            lambda: defaultdict(Counter)
        )
        for name, parts in self._parts.items():
            for part, entry in parts.items():
                like = _Part(entry.name.removeprefix(name), entry.dtype, tuple(entry.shape))
                counted[_role(name)][part][like] += 1
        return {
            role: {part: counts.most_common(1)[0][0] for part, counts in parts.items()}
            for role, parts in counted.items()
        }

    def _wanted(self, module: _Module) -> dict[PartKind, _Part]:
        """Return the parts that a module has to have."""
        own, role = self._parts[module.name], self._likes.get(_role(module.name), {})
        if PartKind.VALUE in own or (not own and PartKind.CODES not in role):
            like = role.get(PartKind.VALUE, _Part(".weight", "BF16", module.shape or ()))
            entry = own.get(PartKind.VALUE)
            suffix = like.suffix if entry is None else entry.name.removeprefix(module.name)
            if entry is None and module.name == module.parameter:
                suffix = ""
            dtype = like.dtype if entry is None else entry.dtype
            return {PartKind.VALUE: _Part(suffix, dtype, module.shape or like.shape)}
        wanted = dict(role)
        wanted.pop(PartKind.VALUE, None)
        scale = wanted.get(PartKind.TENSOR_SCALE)
        stated = InputFormats(self._checkpoint.quantisation.values())
        if (
            scale is not None
            and PartKind.INPUT_SCALE not in wanted
            and stated.of(module.name, "") is not None
        ):
            suffix = ".input_global_scale" if "global" in scale.suffix else ".input_scale"
            wanted[PartKind.INPUT_SCALE] = _Part(suffix, scale.dtype, scale.shape)
        return wanted

    # ----------------------------------------------------------------------------------------------
    # Places in the engine

    def _parameter(self, module: _Module) -> Parameter:
        found = _LAYER.search(module.name)
        block = None
        if found is not None:
            block = Block("layers", int(found[1]), LayerType.TRACED, MlpType.TRACED, 0)
        name = module.name.removesuffix(".weight")
        shape = module.shape
        if shape is None:
            likes = self._likes.get(_role(module.name), {})
            shape = next((likes[p].shape for p in likes if p in _WEIGHTS), ())
        row = Row(name, module.parameter, "", Kind.PLAIN, Dtype.BF16, name)
        return Parameter(name, shape, row, block, module.expert)

    def _place(
        self, module: _Module, part: PartKind, like: _Part, parameter: Parameter
    ) -> _Place | str:
        """Return where a part belongs; a name alone where the engine has no such parameter."""
        stored = f"{module.name}{like.suffix}"
        if self._engine.loader is not None:
            found = self._engine.loader.place(stored)
            # A fused parameter of which the model lacks a part is loaded in a way not followed.
            whole = all(self._has_tensor(each) for each in found.partners)
            if found.target and whole:
                key = (found.expert, found.slot)
                return _Place(found.target, key, found.slots, part, like, parameter, found.cut)
            if found.certain and not found.target:
                return found.renamed
            self._undecided.append(stored)
        return self._by_table(module, part, like, parameter)

    def _has_tensor(self, name: str) -> bool:
        owner, tail = _owner(name)
        return owner in self._modules or self._has(_owner_module(owner, tail))

    def _by_table(
        self, module: _Module, part: PartKind, like: _Part, parameter: Parameter
    ) -> _Place:
        suffix = like.suffix
        if module.expert is not None:
            stack = module.parameter.removesuffix(".weight")
            if self._engine.stacks:
                parent, _, leaf = stack.rpartition(".")
                first, second = self._engine.stacks
                # Experts without a gate have one matrix in each of both stacks.
                stack = f"{parent}.{second if _SECOND.match(leaf) else first}"
            tail = suffix.replace(".", "_", 1)
            plain = part is PartKind.VALUE and not self._engine.stacks
            target = stack if plain else f"{stack}{tail}"
            return _Place(target, (module.expert, module.slot), module.slots, part, like, parameter)
        owner, tail = _owner(f"{module.name}{suffix}")
        parent, _, leaf = owner.rpartition(".")
        for whole, leaves in self._engine.packed.items():
            siblings = [_owner_module(f"{parent}.{each}", tail) for each in leaves]
            if leaf in leaves and all(self._has(each) for each in siblings):
                target = f"{parent}.{whole}{tail}"
                return _Place(
                    target, (None, leaves.index(leaf)), len(leaves), part, like, parameter
                )
        return _Place(f"{module.name}{suffix}", (None, 0), 1, part, like, parameter)

    def _has(self, names: tuple[str, str]) -> bool:
        return any(name in self._modules for name in names)


def _own(name: str, source: ParameterSource) -> list[str]:
    """Return the modules of a tied parameter, that of its own name first."""
    return sorted(source, key=lambda module: module != name.removesuffix(".weight"))


_WEIGHTS = (PartKind.VALUE, PartKind.CODES)


def _owner(tensor: str) -> tuple[str, str]:
    """Split a tensor's name into its linear and the rest: `.weight_scale`, `.bias`."""
    owner, _, tail = tensor.rpartition(".")
    return owner, f".{tail}"


def _owner_module(linear: str, tail: str) -> tuple[str, str]:
    """Return the names that a linear's module, or its bias, may have among the modules."""
    return (f"{linear}.bias", f"{linear}.bias") if tail == ".bias" else (linear, f"{linear}.weight")


def _role(module: str) -> str:
    return _NUMBER.sub("#", module)


def _expert_of(module: str) -> int:
    return int(_NUMBER.findall(module)[-1])


def _with_expert(module: str, expert: int) -> str:
    *_, last = _NUMBER.finditer(module)
    return f"{module[: last.start()]}{expert}{module[last.end() :]}"


def _listed(
    target: str, members: Mapping[tuple[int | None, int], _Place], ranks: Ranks
) -> ListedParameter:
    """Return one parameter of the engine: the slots of a fused one lie along its first axis."""
    first = next(iter(members.values()))
    by_slot = {key[1]: place for key, place in members.items()}
    scalar = not first.like.shape
    extents = tuple(
        1 if scalar else by_slot.get(slot, first).like.shape[0] for slot in range(first.slots)
    )
    rest = first.like.shape[1:]
    fused = first.slots > 1
    shape = (sum(extents), *rest) if fused or not scalar else ()
    experts = [key[0] for key in members if key[0] is not None]
    if experts:
        count = 1 + max(experts)
        if count % ranks.ep:
            raise InvalidArgument(
                "ep", ranks.ep, f"a divisor of the {count} experts of {shown(target)}",
                "Choose another number of expert-parallel ranks.",
            )  # fmt: skip
        shape = (count // ranks.ep, *(shape or (1,)))
    cut = _rank_cut(target, members, ranks)
    if cut is not None:
        axis = cut.dim + bool(experts)
        if fused and cut.dim == 0:
            extents = tuple(e // pieces for e, pieces in zip(extents, cut.pieces, strict=True))
        extent = sum(extents) if fused and cut.dim == 0 else shape[axis] // cut.pieces[0]
        shape = (*shape[:axis], extent, *shape[axis + 1 :])
    return ListedParameter(
        target, first.like.dtype, shape, extents if fused else (), experts=bool(experts)
    )


_BY_INPUTS = (".qweight", ".qzeros", ".scales")  # AWQ and GPTQ hold [inputs, outputs]
_ROWS_OF_A_VOCABULARY = 64  # vLLM pads their number to a multiple


def _rank_cut(
    target: str, members: Mapping[tuple[int | None, int], _Place], ranks: Ranks
) -> RankCut | None:
    """Return how ranks share a parameter; None where each has all of it."""
    first = next(iter(members.values()))
    cut, shape = first.cut, first.like.shape
    if ranks.tp == 1 or (ranks.ep > 1 and first.key[0] is not None) or not shape:
        return None
    if not cut.known:
        raise InvalidArgument(
            "tp", ranks.tp, f"1: how vLLM cuts {shown(target)} is not plain from its source",
            "Pass a file that lists a rank's parameters and splits.",
        )  # fmt: skip
    if cut.dim is None:
        return None
    dim = 1 - cut.dim if first.like.suffix in _BY_INPUTS else cut.dim
    by_slot = {key[1]: place.like.shape for key, place in members.items()}
    shapes = [by_slot.get(slot, shape) for slot in range(first.slots)]
    if dim >= len(shape) or all(each[dim] == 1 for each in shapes):
        return None  # one scale, or a bias of all ranks' sum
    pieces = [ranks.tp] * first.slots
    if cut.heads is not None and first.slots == 3:
        pieces[1:] = [min(ranks.tp, cut.heads)] * 2  # each key head lies on several ranks
    unit = _ROWS_OF_A_VOCABULARY if cut.padded else 1
    for extent, count in zip((each[dim] for each in shapes), pieces, strict=True):
        if extent % count or ranks.tp % count or extent % unit:
            raise InvalidArgument(
                "tp", ranks.tp, f"a divisor of {extent}, dimension {dim} of {shown(target)}"
                + (f", in multiples of {unit} rows" if unit > 1 else ""),
                "Choose another number of ranks.",
            )  # fmt: skip
    return RankCut(dim, tuple(pieces))
