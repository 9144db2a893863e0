"""Recipes: which weights and activations a checkpoint quantises, and to which formats.

A recipe is a table of rules; **the first rule whose pattern matches decides**, and what no rule
matches stays unquantised (BF16). A pattern is a logical parameter name in which `*` stands for any
run of characters, dots included. Only LINEAR parameters can be quantised; `unmatched` lists the
patterns that match none of them.

A custom recipe is YAML: `name`, optionally `base` (a built-in recipe, consulted after the rules),
and `rules`, a list of {match, weight, activation}; `activation` may be left out for none. Unknown
and repeated keys, aliases, unknown formats, and quantised activations of an unquantised weight are
errors.

What a built-in recipe says is a family's own: ModelFamily.rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_text
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.model.parameters import parameters
from degarble.harness.model.registry import registered_for
from degarble.harness.model.types import RECIPE_NAMES, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.parameters import Parameter

BF16 = "BF16"  # as stored by the source: no quantisation, no scales
WEIGHT_FORMATS = frozenset(
    {BF16, "NVFP4", "MXFP4", "MXFP8", "FP8_128X128_UE8M0", "FP8_128X128_F32"}
)
ACTIVATION_FORMATS = frozenset({BF16, "NVFP4", "MXFP8", "FP8_1X128_UE8M0", "FP8_1X128_F32"})
# What other tools write as well. A row of activations is a token; its scale may be stored.
READ_WEIGHTS = frozenset({BF16, *BLOCK_FORMATS})
READ_ACTIVATIONS = ACTIVATION_FORMATS | {"FP8_ROW", "INT8_ROW", "MXFP4"}
_LARGEST_FILE = 1 << 20
# PyYAML's constructors let out whatever Python raises: for `!!int x`, `!!bool x`, 2020-99-99.
_YAML_ERRORS = (
    yaml.YAMLError,
    RecursionError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


class Formats(NamedTuple):
    """Formats of one linear's weight and of its input activations."""

    weight: str
    activation: str


UNQUANTISED = Formats(BF16, BF16)


@dataclass(frozen=True)
class Rule:
    """One line of a recipe."""

    match: str
    weight: str
    activation: str = BF16

    def __post_init__(self) -> None:
        if self.weight not in READ_WEIGHTS:
            raise UnknownName.among("weight", self.weight, READ_WEIGHTS)
        if self.activation not in READ_ACTIVATIONS:
            raise UnknownName.among("activation", self.activation, READ_ACTIVATIONS)
        if self.weight == BF16 and self.activation != BF16:
            raise InvalidArgument(
                f"activation of {self.match}",
                self.activation,
                "BF16 with a BF16 weight",
                "Quantise the weight too, or leave the activation out.",
            )

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the pattern as a regular expression over whole names."""
        return re.compile(".*".join(re.escape(part) for part in self.match.split("*")))

    @property
    def formats(self) -> Formats:
        """Return the formats that the rule chooses."""
        return Formats(self.weight, self.activation)


@dataclass(frozen=True)
class Recipe:
    """A name and its rules, first match first."""

    name: str
    rules: tuple[Rule, ...]

    def format_of(self, parameter: Parameter) -> Formats:
        """Return the formats of a parameter's weight and of the activations in front of it."""
        if parameter.kind is not Kind.LINEAR:
            return UNQUANTISED
        name = parameter.name
        found = self._of_name.get(name)
        if found is None:
            matching = (rule.formats for rule in self.rules if rule.pattern.fullmatch(name))
            found = self._of_name[name] = next(matching, UNQUANTISED)
        return found

    @cached_property
    def _of_name(self) -> dict[str, Formats]:
        """The formats of linears that were asked for: several steps ask for each of 70,000."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Send a worker no answers."""
        return {"name": self.name, "rules": self.rules}

    @property
    def all_formats(self) -> frozenset[str]:
        """Return every format that a rule states, of weights and of activations."""
        return frozenset(name for rule in self.rules for name in rule.formats)

    def unmatched(self, config: Config) -> tuple[str, ...]:
        """Return the patterns that decide nothing for `config`: no linear, or all taken before."""
        open_rules = dict(enumerate(self.rules))
        for parameter in parameters(config):
            if parameter.kind is not Kind.LINEAR:
                continue
            hits = (
                i for i, rule in enumerate(self.rules) if rule.pattern.fullmatch(parameter.name)
            )
            open_rules.pop(next(hits, -1), None)
            if not open_rules:
                break
        return tuple(rule.match for rule in open_rules.values())


def recipe_named(name: str, config: Config) -> Recipe:
    """Return a built-in recipe; what it says depends on the family."""
    if name not in RECIPE_NAMES:
        raise UnknownName.among("recipe", name, RECIPE_NAMES)
    rules = () if name == "bf16" else registered_for(config).rules(name, config)
    return Recipe(name, rules)


def recipe_from_file(path: Path, config: Config) -> Recipe:
    """Read a custom recipe from a YAML file."""
    return recipe_from_yaml(read_small_text(path, _LARGEST_FILE), config)


def recipe_from_yaml(text: str, config: Config) -> Recipe:
    """Read a custom recipe from YAML text."""
    try:
        raw = _StrictLoader(text).get_single_data()
    except _YAML_ERRORS as error:
        raise UnreadableFile(
            "recipe", str(error), "plain YAML", "See docs/anatomy.md for an example."
        ) from error
    raw = _keys("recipe", raw, required=("name", "rules"), optional=("base",))
    lines = raw["rules"]
    if not isinstance(lines, list) or not lines:
        raise _refused("rules", lines, "a list of rules")
    rules = tuple(_rule(f"rules[{i}]", line) for i, line in enumerate(lines))
    if "base" in raw:
        rules += recipe_named(raw["base"], config).rules
    if not isinstance(raw["name"], str) or raw["name"] in RECIPE_NAMES:
        raise _refused("name", raw["name"], "a text that no built-in recipe has as its name")
    return Recipe(raw["name"], rules)


def _rule(where: str, line: object) -> Rule:
    raw = _keys(where, line, required=("match", "weight"), optional=("activation",))
    for key, value in raw.items():
        if not isinstance(value, str):
            raise _refused(f"{where}.{key}", value, "a text")
    for key, known in (("weight", WEIGHT_FORMATS), ("activation", ACTIVATION_FORMATS)):
        if raw.get(key, BF16) not in known:
            raise UnknownName.among(f"{where}.{key}", raw[key], known)
    return Rule(**raw)


def _keys(
    where: str, raw: object, required: Iterable[str], optional: Iterable[str]
) -> dict[str, Any]:
    """Refuse what is no mapping, lacks a key, or has one that means nothing."""
    known = {*required, *optional}
    if not isinstance(raw, dict):
        raise _refused(where, raw, f"a mapping with {', '.join(sorted(known))}")
    for key in raw:
        if key not in known:
            raise UnknownName.among(f"{where} key", key, known)
    for key in required:
        if key not in raw:
            raise _refused(f"{where}.{key}", "missing", "this key")
    return raw


def _refused(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(name, value, expectation, "See docs/anatomy.md for an example.")


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that raises on repeated keys: YAML would silently keep the last one."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases: a few lines of them stand for more text than a machine can hold."""
        if self.check_event(yaml.AliasEvent):
            raise _refused("recipe", "an alias", "a table without aliases")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping whose keys differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise _refused("recipe key", key, "each key once")
        return super().construct_mapping(node, deep=deep)
