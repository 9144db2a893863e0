"""Derive the loader map of a known engine from the model tables: vLLM 0.33 for V4 and V3.2.

`engine_map` turns two layouts, the checkpoint's and the engine's, into renames of prefixes, paths
and suffixes, stacks for fusions, and splits for the sharding style. Each rule is derived from one
parameter of each kind, and the finished map is applied to all of these kinds as a check.

Formats that vLLM builds: for V4, FP8 linears whatever the file holds, with NVFP4 or MXFP4 experts,
the drafter's like the others; for V3.2, what the quantisation config says of each module, with the
indexer's wk dequantised. vLLM's mappers know DeepSeek's names of V4 and transformers' of V3.2; for
other spellings the map carries a caveat that its renames are ours. Names are those of vLLM's
models, without the module `routed_experts` that 0.33 puts around the parameters of experts.

Source: vLLM 0.33 models/deepseek_v4, models/deepseek_v32.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import PartnersMismatch, UnknownName
from degarble.harness.checkpoint.audit.loader.maps import (
    Convert,
    Elsewhere,
    EngineLayout,
    LoaderMap,
    NameOutcome,
    NameRules,
    Rename,
    Split,
    Stack,
)
from degarble.harness.checkpoint.audit.loader.sources import require_unfused
from degarble.harness.checkpoint.audit.structure.inventory import (
    Inventory,
    stored_recipe,
)
from degarble.harness.model.family import family_of
from degarble.harness.model.layouts import Layout, layout_named
from degarble.harness.model.parameters import Parameter, parameters
from degarble.harness.model.sharding import sharding_styles
from degarble.harness.model.tensors import PartKind, parts_of, slots, suffixes_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Fusion
    from degarble.harness.model.recipes import Formats, Recipe
    from degarble.harness.model.sharding import ShardCut

ENGINES = ("vllm",)
_DIVISORS = "compressed-tensors"
_NO_DRAFTER = "the checkpoint has no drafter"


class Ranks(NamedTuple):
    """Numbers of tensor-parallel, expert-parallel and pipeline ranks."""

    tp: int = 1
    ep: int = 1
    pp: int = 1


ONE_RANK = Ranks()


def engine_map(
    inventory: Inventory, engine: str, ranks: Ranks = ONE_RANK, built: Recipe | None = None
) -> LoaderMap:
    """Return the map by which an engine loads a checkpoint of this inventory.

    `built`: the formats that it builds, where the engine does not choose them itself.
    """
    config = inventory.config
    if engine not in ENGINES:
        raise UnknownName.among("engine", engine, ENGINES)
    require_unfused(inventory, engine)
    source = inventory.layout.with_recipe(stored_recipe(inventory))
    layout = layout_for(inventory, engine)
    recipe, converted = (built, ()) if built else _engine_recipe(inventory, source)
    return _Maker(config, source, layout.with_recipe(recipe), ranks).make(converted)


def layout_for(inventory: Inventory, name: str) -> Layout:
    """Return an engine's layout with the checkpoint's scale convention, and drafter if present."""
    layout = layout_named(name, inventory.config)
    if inventory.layout.suffixes == _DIVISORS:  # another method, with parameters of its own
        layout = replace(layout, suffixes=_DIVISORS)
    blocks = {parameter.parameter.block for parameter in inventory.stored}
    if not any(block is not None and block.is_drafter for block in blocks):
        layout = replace(layout, no_drafter=_NO_DRAFTER)
    return layout


def _engine_recipe(inventory: Inventory, source: Layout) -> tuple[Recipe, tuple[Convert, ...]]:
    """Return the formats that vLLM builds, and the conversions that it makes on loading."""
    config, stored = inventory.config, source.recipe_for(inventory.config)
    if inventory.fused:
        return stored, ()  # fused for this engine already, so it is built in the stored formats
    linears = [(linear.parameter, linear.weight) for linear in inventory.linears]
    recipe, decoded = family_of(config).recipe_in_vllm(config, linears, stored, source.suffixes)
    return recipe, tuple(Convert(pattern, "BF16") for pattern in decoded)


class _Path(NamedTuple):
    """A kind of parameter with its path in the checkpoint and in the engine, and its fusion."""

    parameter: Parameter
    before: str
    after: str
    fusion: Fusion | None


class _Maker:
    """Builder of one map from two layouts."""

    def __init__(self, config: Config, source: Layout, engine: Layout, ranks: Ranks) -> None:
        self._config = config
        self._source = source
        self._engine = engine
        self._ranks = ranks
        fusions = {row: fusion for fusion in engine.fusions for row in fusion.members}
        self._kinds = [
            parameter for parameter in _one_of_each_kind(config) if not self._omitted(parameter)
        ]
        self._paths = [
            _Path(
                kind,
                source.path_of(kind, config),
                engine.path_of(kind, config),
                fusions.get(kind.row.name),
            )
            for kind in self._kinds
        ]

    def make(self, converted: tuple[Convert, ...]) -> LoaderMap:
        """Return the finished map."""
        loader_map = LoaderMap(
            f"{self._engine.name} for {self._config.family}",
            EngineLayout(self._engine, self._engine.recipe, "vllm"),
            *self._ranks,
            convert=converted,
            elsewhere=tuple(self._elsewhere()),
            rename=tuple(dict.fromkeys((*self._path_renames(), *self._suffix_renames()))),
            stack=() if self._source.fusions else tuple(self._stacks()),
            caveats=tuple(self._caveats()),
        )
        try:
            loader_map = replace(loader_map, split=tuple(dict.fromkeys(self._splits())))
            self._try(loader_map)
        except PartnersMismatch:
            pass  # a finding: the proof lays the same parameters out, and meets it again
        return loader_map

    def _caveats(self) -> Iterator[str]:
        if self._source.fusions:
            yield (
                f"the {self._engine.name} loader for {self._config.family} has no names for stacked"
                " experts; this is one that copies parameters by their own names"
            )
        elif self._source.spelling is not family_of(self._config).spelling_in_vllm:
            yield (
                f"the {self._engine.name} mapper for {self._config.family} does not know the names"
                f" of this checkpoint ({self._source.spelling}); these renames are degarble's"
            )

    def _omitted(self, parameter: Parameter) -> bool:
        layouts = (self._source, self._engine)
        return any(layout.omits(parameter, self._config) for layout in layouts)

    def _elsewhere(self) -> Iterator[Elsewhere]:
        """Yield a rule for each prefix that another model's loader reads, with the reason."""
        seen = set()
        for parameter in _one_of_each_kind(self._config):
            reason = self._engine.omits(parameter, self._config)
            block = parameter.block
            if not reason or reason == _NO_DRAFTER or block is None:
                continue
            prefix = _prefix(self._source.path_of(parameter, self._config))
            if prefix not in seen:
                seen.add(prefix)
                yield Elsewhere(f"^{re.escape(prefix)}", reason)

    def _path_renames(self) -> Iterator[Rename]:
        """Yield renames of whole paths first, then of the prefixes of blocks."""
        beginnings: dict[str, Counter[str]] = defaultdict(Counter)
        for path in self._paths:
            before, after = _prefix(path.before), _prefix(path.after)
            if path.before.removeprefix(before) == path.after.removeprefix(after):
                beginnings[before][after] += 1
            # The engine puts another module between the block and the rest of the path.
            elif path.after.endswith(path.before.removeprefix(before)):
                inner = path.after.removesuffix(path.before.removeprefix(before))
                beginnings[before][inner] += 1
        # The most frequent new prefix is renamed as such; other paths get rules of their own.
        usual = {before: counts.most_common(1)[0][0] for before, counts in beginnings.items()}
        general = {}
        specific = {}
        for path in self._paths:
            before = _prefix(path.before)
            moved = usual.get(before, before) + path.before.removeprefix(before)
            end = r"(?=\.)" if path.parameter.kind.has_suffix else "$"
            if moved != path.after:
                pattern, replacement = _numbered(path.parameter, path.before, path.after)
                specific[f"^{pattern}{end}"] = replacement
            elif usual.get(before, before) != before:
                pattern, replacement = _numbered(path.parameter, before, usual[before])
                general[f"^{pattern}"] = replacement
        if "^" in general:  # what stands outside of blocks has no beginning: name it by itself
            del general["^"]
            for path in self._paths:
                if path.parameter.block is None and path.before != path.after:
                    end = r"(?=\.)" if path.parameter.kind.has_suffix else "$"
                    specific[f"^{re.escape(path.before)}{end}"] = path.after
        # Longer paths first: `ffn.gate.bias` begins like `ffn.gate`.
        ordered = sorted(specific.items(), key=lambda rule: -len(rule[0]))
        yield from (Rename(*rule) for rule in (*ordered, *general.items()))

    def _suffix_renames(self) -> Iterator[Rename]:
        """Yield renames of suffixes; where one suffix becomes several, rare ones come first."""
        pairs: dict[str, dict[str, list[_Path]]] = defaultdict(lambda: defaultdict(list))
        for path in self._paths:
            ours, theirs = (self._format(side, path) for side in (self._source, self._engine))
            if ours.weight != theirs.weight:
                continue  # another format has other parts, whatever they are called
            for part in (stored.part for stored in parts_of(path.parameter, ours)):
                if part is not PartKind.VALUE:
                    before = suffixes_named(self._source.suffixes).suffix(part, ours.weight)
                    after = suffixes_named(self._engine.suffixes).suffix(part, ours.weight)
                    pairs[before][after].append(path)
        for before, by_after in pairs.items():
            ordered = sorted(by_after.items(), key=lambda item: len(item[1]))
            for after, paths in ordered[:-1]:
                for path in paths:
                    # Suffixes are renamed after paths, so the pattern is that of the engine's path.
                    pattern, _ = _numbered(path.parameter, path.after, path.after, groups=False)
                    yield Rename(f"^({pattern}){re.escape(before)}$", rf"\1{after}")
            after = ordered[-1][0]
            if after != before:
                yield Rename(f"{re.escape(before)}$", after)

    def _format(self, layout: Layout, path: _Path) -> Formats:
        return layout.recipe_for(self._config).format_of(path.parameter)

    def _stacks(self) -> Iterator[Stack]:
        """Yield one rule for each member of a fused parameter."""
        rules = {}
        for parameter, _, after, fusion in self._paths:
            if fusion is None:
                continue
            fused = self._engine.path_of(parameter, self._config, fusion.target)
            own = after.removeprefix(fused.removesuffix(fusion.target))
            pattern, _ = _numbered(parameter, own, own, name="expert")
            into = f".{fusion.target}{'_' if fusion.stacked else '.'}"
            slot = fusion.members.index(parameter.row.name)
            rules[rf"\.{pattern}\."] = Stack(rf"\.{pattern}\.", into, slot)
        yield from rules.values()

    def _splits(self) -> Iterator[Split]:
        """Yield one rule for each stored part of a parameter that the engine shards."""
        style = sharding_styles(self._config)["vllm"]
        for path in self._paths:
            parameter = path.parameter
            cut = style.get(parameter.row.name)
            # Expert parallelism keeps each expert whole.
            if cut is None or (parameter.expert is not None and self._ranks.ep > 1):
                continue
            yield from self._split(path, cut)

    def _split(self, path: _Path, cut: ShardCut) -> Iterator[Split]:
        parameter, fusion = path.parameter, path.fusion
        for slot in slots(self._config, self._engine, self._partners(parameter, fusion)):
            if slot.parameter.name != parameter.name or not slot.shape:
                continue
            formats = self._format(self._engine, path)
            unit = next(s.unit for s in parts_of(parameter, formats) if s.part is slot.part)
            name, _ = _numbered(parameter, slot.tensor, slot.tensor, groups=False)
            # One block scale covers unit[dim] weights, so it is cut in smaller multiples.
            multiple = max(cut.multiple // unit[cut.dim], 1)
            yield Split(f"^{name}$", cut.dim, multiple)

    def _partners(self, parameter: Parameter, fusion: Fusion | None) -> list[Parameter]:
        if fusion is None:
            return [parameter]
        return [
            kind
            for kind in self._kinds
            if kind.row.name in fusion.members
            and (kind.block, kind.expert) == (parameter.block, parameter.expert)
        ]

    def _try(self, loader_map: LoaderMap) -> None:
        """Assert that the map leads one parameter of each kind to the engine's own name."""
        wanted = {slot.key: slot for slot in slots(self._config, self._engine, self._kinds)}
        rules = NameRules(loader_map, {slot.tensor for slot in wanted.values()})
        for slot in slots(self._config, self._source, self._kinds):
            place = wanted.get(slot.key)
            sides = (self._source, self._engine)
            formats = {side.recipe_for(self._config).format_of(slot.parameter) for side in sides}
            if place is None or len(formats) > 1:
                continue
            name = rules.resolve(slot.tensor)
            assert name.outcome is NameOutcome.PLACED, f"{slot.tensor} is {name}"
            assert name.target == place.tensor, f"{slot.tensor} goes to {name.target}"


def _one_of_each_kind(config: Config) -> list[Parameter]:
    """Return each row once for each kind of block and each drafter block, with two experts."""
    found: dict[tuple[object, ...], Parameter] = {}
    for parameter in parameters(config):
        block = parameter.block
        if parameter.expert not in (None, 0, 1):
            continue
        kind: tuple[object, ...] = ()
        if block is not None:
            drafter = block.index if block.is_drafter else None
            kind = (block.scope, drafter, block.layer_type, block.mlp_type)
        found.setdefault((kind, parameter.row.name, parameter.expert), parameter)
    return list(found.values())


def _prefix(path: str) -> str:
    """Return a path up to and including its block's number; empty outside blocks."""
    match = re.match(r"(?:model\.)?(?:layers|mtp)\.\d+\.(?:mtp_block\.)?", path)
    return match[0] if match else ""


def _numbered(
    parameter: Parameter, before: str, after: str, *, groups: bool = True, name: str = ""
) -> tuple[str, str]:
    """Return a pattern for a path with any layer and expert number, and its replacement.

    `groups` False: numbers are matched without being captured. A drafter's number stays as it is.
    """
    pattern = re.escape(before)
    block = parameter.block
    number = 0
    kinds = []
    if block is not None and not block.is_drafter:
        kinds.append(
            (rf"layers\.{block.index}\.", f"layers.{block.index}.", r"layers\.", "layers.", "")
        )
    if parameter.expert is not None:
        e = parameter.expert
        kinds.append((rf"experts\.{e}\.", f"experts.{e}.", r"experts\.", "experts.", name))
    for escaped, plain, start, plain_start, group in kinds:
        if escaped not in pattern:
            continue
        number += 1
        digits = rf"(?P<{group}>\d+)" if group else r"(\d+)" if groups else r"\d+"
        pattern = pattern.replace(escaped, rf"{start}{digits}\.", 1)
        after = after.replace(plain, rf"{plain_start}\{number}.", 1)
    return pattern, after
