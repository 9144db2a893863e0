"""Read loader maps from YAML or JSON: `--loader MAP` takes an engine by name with ranks, or a file.

Reading is strict: every key known and given once, every value of its type; errors name the place in
the file. A file may start from an engine's own map (`base`); its rules then precede those of the
base. docs/loader-maps.md is the manual.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.audit.loader.engine_maps import (
    ENGINES,
    ONE_RANK,
    Ranks,
    engine_map,
)
from degarble.harness.checkpoint.audit.loader.maps import (
    AS_STORED,
    ONE_SCALE,
    Convert,
    Elsewhere,
    EngineLayout,
    Fill,
    ListedParameter,
    LoaderMap,
    Rename,
    Split,
    Stack,
    unknown_parameters,
)
from degarble.harness.checkpoint.audit.structure.inventory import take_inventory
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.recipes import Recipe, recipe_from_yaml
from degarble.harness.model.tensors import PartKind
from degarble.harness.model.types import RECIPE_NAMES, Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint

    Derive = Callable[[str, Ranks], LoaderMap]  # of an engine by name

_LARGEST_MAP = 16 << 20  # an engine's list of 3,000 parameters has 0.3 MB
_MOST_DIGITS = 9
_SUFFIXES = (".yaml", ".yml", ".json")
_NUMBERS = ("tp", "ep", "pp", "rank")
_LISTS: dict[str, type] = {
    "elsewhere": Elsewhere,
    "rename": Rename,
    "stack": Stack,
    "split": Split,
    "fill": Fill,
    "convert": Convert,
}
_KEYS = ("name", "base", "parameters", "skip", "caveats", *_NUMBERS, *_LISTS)
# str(parameter.dtype), so that a list of parameters can be written by a loop over a model.
_TORCH = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.int32": "I32",
    "torch.int64": "I64",
}


def read_loader_map(
    argument: str, checkpoint: Checkpoint, derive: Derive | None = None
) -> LoaderMap:
    """Return the map that `--loader` names: `vllm`, `vllm:tp=8,ep=8`, or a file.

    `derive` makes an engine's map of a model whose family has no tables.
    """
    names = checkpoint.names
    inventory = None if names is None else take_inventory(names)
    if checkpoint.model is not None:
        derive = None
    if not argument.endswith(_SUFFIXES):
        engine, colon, ranks = argument.partition(":")
        numbers = _ranks(ranks) if colon else ONE_RANK
        if derive is not None:
            return derive(engine, numbers)
        return engine_map(_known(inventory, engine), engine, numbers)
    path = Path(argument)
    try:
        text = read_small_file(path, _LARGEST_MAP).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            shown(argument), str(error), "a text in UTF-8", "Point to a loader map."
        ) from error
    return loader_map_from_text(text, inventory, derive)


def loader_map_from_text(
    text: str, inventory: Inventory | None, derive: Derive | None = None
) -> LoaderMap:
    """Parse a map in YAML or JSON; `inventory`: of the checkpoint that it will load."""
    raw = _mapping("map", _parsed(text), _KEYS)
    loader_map = _base(raw, inventory, derive)
    changes: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "name":
            changes[key] = _text(key, value)
        elif key in _NUMBERS:
            changes[key] = value
        elif key == "parameters":
            changes[key] = _parameters(value, inventory)
        elif key in ("skip", "caveats"):
            changes[key] = (*_texts(key, value), *getattr(loader_map, key))
        elif key in _LISTS:
            rules = tuple(
                _rule(f"{key}[{i}]", key, each) for i, each in enumerate(_list(key, value))
            )
            changes[key] = (*rules, *getattr(loader_map, key))
    return replace(loader_map, **changes)


def _base(raw: dict[str, Any], inventory: Inventory | None, derive: Derive | None) -> LoaderMap:
    """Return the map that the file's rules extend: an engine's, or an empty one."""
    if "base" in raw:
        engine = _text("base", raw["base"])
        numbers = {key: raw[key] for key in _NUMBERS if key in raw and key != "rank"}
        if derive is not None:
            return derive(engine, Ranks(**numbers))
        return engine_map(_known(inventory, engine), engine, Ranks(**numbers))
    if "parameters" not in raw:
        raise _refused("parameters", "missing", f"this key, or base: {' or '.join(ENGINES)}")
    return LoaderMap(
        _text("name", raw.get("name", "unnamed")), _parameters(raw["parameters"], inventory)
    )


def _known(inventory: Inventory | None, engine: str) -> Inventory:
    if engine not in ENGINES:
        raise UnknownName(
            "loader map",
            engine,
            f"{' or '.join(ENGINES)}, with ranks as in vllm:tp=8,ep=8, or a file"
            f" ({', '.join(_SUFFIXES)})",
            "See docs/loader-maps.md.",
        )
    if inventory is None:
        raise unknown_parameters(f"loader map {engine}")
    return inventory


def _ranks(text: str) -> Ranks:
    numbers: dict[str, int] = {}
    for each in text.split(","):
        key, _, number = each.partition("=")
        fits = number.isdecimal() and len(number) <= _MOST_DIGITS
        if key not in Ranks._fields or key in numbers or not fits:
            raise _refused("ranks", each, "tp=N, ep=N and pp=N, each once, separated by commas")
        numbers[key] = int(number)
    return Ranks(**numbers)


def _parsed(text: str) -> object:
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_unique)
        return _StrictLoader(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableFile(
            "loader map", str(error), "YAML or JSON", "See docs/loader-maps.md for an example."
        ) from error


def _parameters(
    value: object, inventory: Inventory | None
) -> EngineLayout | tuple[ListedParameter, ...]:
    raw = _mapping("parameters", value, None)
    if "layout" not in raw:
        return tuple(_listed(name, each) for name, each in raw.items())
    _mapping("parameters", value, ("layout", "recipe", "style"))
    recipe = raw.get("recipe", AS_STORED)
    made: str | Recipe = AS_STORED
    if isinstance(recipe, dict):
        config = _known(inventory, ENGINES[0]).config
        made = recipe_from_yaml(yaml.safe_dump(recipe), config)
    elif recipe in (*RECIPE_NAMES, AS_STORED):
        made = str(recipe)
    else:
        raise UnknownName.among("parameters: recipe", recipe, (*RECIPE_NAMES, AS_STORED))
    style = _text("parameters: style", raw.get("style", "vllm"))
    return EngineLayout(_text("parameters: layout", raw["layout"]), made, style)


def _listed(name: str, value: object) -> ListedParameter:
    place = f"parameters: {shown(name)}"
    raw = _mapping(place, value, ("dtype", "shape", "slots", "experts"))
    for key in ("dtype", "shape"):
        if key not in raw:
            raise _refused(f"{place}.{key}", "missing", "this key")
    dtype = _text(f"{place}.dtype", raw["dtype"])
    experts = raw.get("experts", False)
    if not isinstance(experts, bool):
        raise _refused(f"{place}.experts", experts, "true or false")
    return ListedParameter(
        name,
        _TORCH.get(dtype, dtype),
        tuple(_list(f"{place}.shape", raw["shape"])),
        tuple(_list(f"{place}.slots", raw.get("slots", []))),
        experts,
    )


def _rule(place: str, key: str, value: object) -> object:
    made = _LISTS[key]
    known = {field.name: field for field in fields(made)}
    raw = _mapping(place, value, known)
    texts = {"match", "to", "into", "reason", "suffix"}
    for name, each in raw.items():
        if name in texts:
            _text(f"{place}.{name}", each)
    for name, each in known.items():
        if name not in raw and _is_required(each):
            raise _refused(f"{place}.{name}", "missing", "this key")
    if key == "convert":
        raw = _conversion(place, raw)
    if key == "fill" and (
        isinstance(raw["value"], bool) or not isinstance(raw["value"], (int, float))
    ):
        raise _refused(f"{place}.value", raw["value"], "a number")
    return made(**raw)


def _conversion(place: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Convert the values of a conversion rule to our types."""
    made = dict(raw)
    if "reads" in raw:
        parts = {str(part): part for part in PartKind}
        names = _texts(f"{place}.reads", raw["reads"])
        for name in names:
            if name not in parts:
                raise UnknownName.among(f"{place}.reads", name, parts)
        made["reads"] = frozenset(parts[name] for name in names)
    block = raw.get("block")
    if block is not None and block != ONE_SCALE:
        extents = _list(f"{place}.block", block)
        if len(extents) != 2:
            raise _refused(f"{place}.block", block, f"[rows, columns], or {ONE_SCALE}")
        made["block"] = tuple(extents)
    if "scale" in raw:
        if raw["scale"] not in list(Dtype):
            raise UnknownName.among(f"{place}.scale", raw["scale"], Dtype)
        made["scale"] = Dtype(raw["scale"])
    return made


def _is_required(each: Any) -> bool:
    return each.default is each.default_factory  # both are dataclasses.MISSING


def _mapping(place: str, value: object, known: Iterable[str] | None) -> dict[str, Any]:
    """Raise unless the value is a mapping with text keys, all of them known."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _refused(place, value, "a mapping with names as its keys")
    for key in value:
        if known is not None and key not in known:
            raise UnknownName.among(f"{place}: key", key, known)
    return value


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _refused(place, value, "a list")
    return value


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refused(place, value, "a text")
    return value


def _texts(place: str, value: object) -> list[str]:
    return [_text(f"{place}[{i}]", each) for i, each in enumerate(_list(place, value))]


def _refused(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(f"loader map: {name}", value, expectation, "See docs/loader-maps.md.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _refused("key", key, "each key once")
        found[key] = value
    return found


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that rejects repeated keys: YAML would silently keep the last one.

    It rejects aliases as well: with them a small text can expand into an unbounded tree.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; raise for an alias."""
        if self.check_event(yaml.AliasEvent):
            raise _refused("alias", "an alias", "text without aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; raise for a repeated key."""
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str) or name in seen:
                raise _refused("key", name, "a text, each one once")
            seen.add(name)
        return super().construct_mapping(node, deep=deep)
