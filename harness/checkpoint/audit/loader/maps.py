"""Describe how an engine loads a checkpoint, and apply its name rules to stored tensors.

A loader applies its rules to each stored tensor in this order: convert, skip, elsewhere, rename,
stack, split. docs/loader-maps.md explains each field with an example.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.model.family import model_types
from degarble.harness.model.types import Dtype

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.tensors import PartKind


# --------------------------------------------------------------------------------------------------
# Maps. Patterns are Python regular expressions, found by search rather than matched from the start;
# a stack takes an expert's number from the group `expert`. Patterns from files are untrusted: those
# that could take for ever to search are rejected, as are patterns that do not compile and
# replacements that name unknown groups.

AS_STORED = "as stored"
EXPERT_GROUP = "expert"
VALUES, FP8 = "BF16", "FP8"  # what a conversion can make
ONE_SCALE = "tensor"  # in place of a block shape: one scale for the whole weight
# Bounds on numbers in a map, so that a hostile one cannot exhaust memory.
_MOST_RANKS = 4096
_MOST_EXPERTS = 1 << 16
_MOST_RULES = 1000  # of one kind
_MOST_DIMENSIONS = 8
_LONGEST_PATTERN = 500
_MOST_REPEATS = 3  # of unbounded length, so that matching stays polynomial
_LITERAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # an escaped sign, or a set of them
_REPEAT = re.compile(r"[*+]|\{\d*,\d*\}")
_REPEATED_GROUP = re.compile(r"\)[*+{]")


def unknown_parameters(name: str) -> InvalidArgument:
    """Return the error for a map that needs a config which is absent, unreadable or unknown."""
    return InvalidArgument(
        name,
        "parameters that cannot be derived",
        f"a readable config.json of {' or '.join(model_types())}, and names that fit it",
        "For another model pass --loader FILE.yaml that lists the engine's parameters:"
        " docs/loader-maps.md, `parameters`.",
    )


def compiled(what: str, pattern: str, replacement: str | None = None) -> re.Pattern[str]:
    """Compile a pattern and try its replacement; raise for what Python rejects."""
    _require_quick(what, pattern, replacement or "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a set that Python will read otherwise one day
            found = re.compile(pattern)
            if replacement is not None:
                # The empty alternative matches with every group unset: enough for a template.
                re.compile(f"{pattern}|").sub(replacement, "", count=1)
    except (re.error, IndexError, RecursionError, OverflowError, Warning) as error:
        value = pattern if replacement is None else f"{pattern} -> {replacement}"
        raise InvalidArgument(
            what, value, f"a regular expression ({error})", "See docs/loader-maps.md."
        ) from error
    return found


def _require_quick(what: str, pattern: str, replacement: str) -> None:
    """Reject patterns that could make a search, or a name, grow without bound."""
    plain = _LITERAL.sub("x", pattern)
    if max(len(pattern), len(replacement)) > _LONGEST_PATTERN:
        expectation = f"at most {_LONGEST_PATTERN} signs"
    elif _REPEATED_GROUP.search(plain):
        expectation = "no repeated group: it can take for ever to search"
    elif len(_REPEAT.findall(plain)) > _MOST_REPEATS:
        expectation = f"at most {_MOST_REPEATS} repeats of any length"
    else:
        return
    raise InvalidArgument(what, pattern, expectation, "Write several rules in its place.")


@dataclass(frozen=True)
class Rename:
    """A rule that replaces every occurrence of a pattern in a name."""

    match: str
    to: str

    def __post_init__(self) -> None:
        compiled("rename", self.match, self.to)


@dataclass(frozen=True)
class Stack:
    """A rule that sends a tensor to one slot of a fused parameter, if the new name is one."""

    match: str
    into: str
    slot: int = 0

    def __post_init__(self) -> None:
        compiled("stack", self.match, self.into)
        _require_count("stack: slot", self.slot, 0)


@dataclass(frozen=True)
class Split:
    """A rule that cuts a dimension of a stored tensor into one piece a rank, in multiples.

    It applies to parameters whose name contains the pattern; the first matching rule counts.
    Tensors without that dimension (scalars) are repeated.
    """

    match: str
    dim: int
    multiple: int = 1

    def __post_init__(self) -> None:
        compiled("split", self.match)
        _require_count("split: dim", self.dim, 0)
        _require_count("split: multiple", self.multiple, 1)


@dataclass(frozen=True)
class Fill:
    """A rule for parameters that hold a constant before anything is loaded."""

    match: str
    value: float

    def __post_init__(self) -> None:
        compiled("fill", self.match)


@dataclass(frozen=True)
class Elsewhere:
    """A rule for tensors that another loader reads, with the reason."""

    match: str
    reason: str

    def __post_init__(self) -> None:
        compiled("elsewhere", self.match)


@dataclass(frozen=True)
class Convert:
    """A rule that recomputes a weight before renaming; `match` is searched in module names.

    `reads`: parts that go into it; None: codes and all weight scales. `block`: rows and columns of
    one new scale, ONE_SCALE, or None where the map does not say. `scale`: dtype of the new scale.
    """

    match: str
    to: Literal["BF16", "FP8"]
    reads: frozenset[PartKind] | None = None
    block: tuple[int, int] | Literal["tensor"] | None = None
    scale: Dtype = Dtype.F32
    suffix: str = ".weight_scale_inv"  # under which name the new scale goes on

    def __post_init__(self) -> None:
        compiled("convert", self.match)
        if self.to not in (VALUES, FP8):
            raise UnknownName.among("convert: to", self.to, (VALUES, FP8))
        if isinstance(self.block, tuple):
            for extent in self.block:
                _require_count("convert: block", extent, 1)


@dataclass(frozen=True)
class ListedParameter:
    """A parameter from an engine's own list, the same on every rank.

    `slots`: extents of the slots of a fused one, along its first dimension after the experts'.
    `experts`: its first dimension counts the experts of a rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slots: tuple[int, ...] = ()
    experts: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise UnknownName.among(f"dtype of {self.name}", self.dtype, DTYPE_BITS)
        for extent in (*self.shape, *self.slots):
            _require_count(f"shape of {self.name}", extent, 0)
        _require_count(f"dimensions of {self.name}", len(self.shape), 0, _MOST_DIMENSIONS)
        if self.experts and self.shape:
            _require_count(f"experts of {self.name}", self.shape[0], 1, _MOST_EXPERTS)
        axis = int(self.experts)
        rows = self.shape[axis] if len(self.shape) > axis else 0
        if (self.slots and sum(self.slots) != rows) or (self.experts and not self.shape):
            raise InvalidArgument(
                f"slots of {self.name}",
                list(self.slots),
                f"extents that add up to {rows}, dimension {axis} of {list(self.shape)}",
                "See docs/loader-maps.md.",
            )


@dataclass(frozen=True)
class EngineLayout:
    """Parameters derived from an engine's layout, a recipe of formats and a sharding style.

    Layout and recipe by name, or as records; AS_STORED: whatever formats the checkpoint has.
    """

    layout: str | Layout
    recipe: str | Recipe = AS_STORED
    style: str = "vllm"

    @property
    def name(self) -> str:
        """Name of the layout."""
        return self.layout if isinstance(self.layout, str) else self.layout.name


class RankCut(NamedTuple):
    """A dimension of a stored tensor that ranks share, and into how many pieces in each slot.

    Fewer pieces than ranks: neighbouring ranks hold the same one (key heads).
    """

    dim: int
    pieces: tuple[int, ...]


@dataclass(frozen=True)
class DerivedNames:
    """What a derived map knows: the model's tensors, where each goes, and what belongs in a slot.

    `holds`: by target and (expert, slot), the parameter and its part. `cuts`: of parameters that
    ranks share. `origin`: what said so, for reports; `undecided`: tensors of which it does not.
    """

    inventory: Inventory
    resolved: Mapping[str, ResolvedName]
    holds: Mapping[str, Mapping[tuple[int | None, int], tuple[Parameter, PartKind]]]
    unexpected: tuple[str, ...] = ()  # stored tensors that the model does not have
    tied_apart: tuple[tuple[str, str], ...] = ()  # one parameter stored twice, with two values
    cuts: Mapping[str, RankCut] = field(default_factory=dict)
    origin: str = ""
    undecided: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoaderMap:
    """All rules by which an engine loads. `rank`: prove one rank alone; None: all ranks.

    `caveats`: in which respects the map differs from the engine's own; a proof repeats them.
    """

    name: str
    parameters: EngineLayout | tuple[ListedParameter, ...]
    tp: int = 1
    ep: int = 1
    pp: int = 1
    rank: int | None = None
    convert: tuple[Convert, ...] = ()
    skip: tuple[str, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()
    rename: tuple[Rename, ...] = ()
    stack: tuple[Stack, ...] = ()
    split: tuple[Split, ...] = ()
    fill: tuple[Fill, ...] = ()
    caveats: tuple[str, ...] = ()
    derived: DerivedNames | None = None

    def __post_init__(self) -> None:
        for name in ("tp", "ep", "pp"):
            _require_count(name, getattr(self, name), 1, _MOST_RANKS)
        ranks = self.pp * max(self.tp, self.ep)
        _require_count("all ranks, pp * max(tp, ep)", ranks, 1, _MOST_RANKS)
        if self.rank is not None:
            _require_count("rank", self.rank, 0, ranks - 1)
        for name in ("convert", "skip", "elsewhere", "rename", "stack", "split", "fill"):
            _require_count(f"rules of kind {name}", len(getattr(self, name)), 0, _MOST_RULES)
        for pattern in self.skip:
            compiled("skip", pattern)
        if not isinstance(self.parameters, EngineLayout):
            names = [parameter.name for parameter in self.parameters]
            counts = Counter(names)
            twice = [name for name, count in counts.items() if count > 1] if names else ["none"]
            if twice:
                raise InvalidArgument(
                    "parameters", twice[:3], "each parameter once, and at least one", "List them."
                )


def _require_count(name: str, value: object, lowest: int, highest: int = 1 << 40) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidArgument(
            name, value, f"an integer from {lowest} to {highest}", "See docs/loader-maps.md."
        )


# --------------------------------------------------------------------------------------------------
# Name rules: skip, elsewhere, rename, stack. A pattern is searched for only in names that contain
# the literal text which each of its matches must contain: a shortcut that does not change the
# outcome. Names longer than LONGEST_NAME are dropped without a search: no parameter has one, and
# searching a hostile one could take for ever.


class NameOutcome(StrEnum):
    """Result of the rules for one stored tensor."""

    PLACED = "placed"
    CONVERTED = "converted"  # into other tensors, which are placed
    SKIPPED = "skipped"
    ELSEWHERE = "elsewhere"
    DROPPED = "dropped"


class ResolvedName(NamedTuple):
    """Destination of a name. `slot` None: the whole parameter. `by`: the deciding pattern."""

    outcome: NameOutcome
    target: str = ""
    slot: int | None = None
    expert: int | None = None
    by: str = ""


LONGEST_NAME = 256
_MOST_DIGITS = 9

_PLAIN = re.compile(r"[A-Za-z0-9_ \-]")
_ESCAPED = frozenset(".-_+*?()[]{}^$|\\/")


def needed_literal(pattern: str) -> str:
    """Return the longest text that every match of a pattern contains, or an empty one."""
    runs, run, depth, index = [""], "", 0, 0
    if "(?" in pattern.replace("(?P<", "").replace("(?=", "").replace("(?:", ""):
        return ""  # flags and lookbehinds are not parsed
    while index < len(pattern):
        sign, step = pattern[index], 1
        following = pattern[index + 1 : index + 2]
        if sign == "\\" and following in _ESCAPED:
            sign, step = following, 2
        elif sign == "|" and depth == 0:
            return ""
        elif not _PLAIN.match(sign):
            sign = ""
            if pattern[index] == "\\":
                step = 2
            elif pattern[index] == "[":
                step = _class_length(pattern, index)
            depth += {"(": 1, ")": -1}.get(pattern[index], 0)
        optional = pattern[index + step : index + step + 1] in {"*", "?", "{"}
        if sign and depth == 0 and not optional:
            run += sign
            # `a+` may match more than one, so the run ends after it.
            if pattern[index + step : index + step + 1] != "+":
                index += step
                continue
        runs.append(run)
        run = ""
        index += step
    return max([*runs, run], key=len)


def _class_length(pattern: str, index: int) -> int:
    end = index + 1
    if pattern[end : end + 1] == "^":
        end += 1
    end += 1  # a bracket in first place is meant literally
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return end + 1 - index


class _Pattern:
    """A compiled pattern, with a text that each of its matches contains."""

    def __init__(self, what: str, text: str) -> None:
        self.text = text
        self.literal = needed_literal(text)
        self.expression = compiled(what, text)
        self.used = False

    def search(self, name: str) -> re.Match[str] | None:
        if self.literal not in name:
            return None
        found = self.expression.search(name)
        self.used = self.used or found is not None
        return found


class NameRules:
    """The name rules of one map. `known`: names of the engine's parameters."""

    def __init__(self, loader_map: LoaderMap, known: Container[str]) -> None:
        self._known = known
        self._skip = [_Pattern("skip", each) for each in loader_map.skip]
        self._elsewhere = [
            _Pattern("elsewhere", elsewhere.match) for elsewhere in loader_map.elsewhere
        ]
        self._rename = [
            (_Pattern("rename", rename.match), rename.to) for rename in loader_map.rename
        ]
        self._stack = [(_Pattern("stack", stack.match), stack) for stack in loader_map.stack]
        self._derived = {} if loader_map.derived is None else loader_map.derived.resolved

    def resolve(self, stored: str) -> ResolvedName:
        """Return the destination of one stored tensor's name."""
        found = self._by_rules(stored)
        if found.outcome is NameOutcome.DROPPED or not found.by:
            known = self._derived.get(stored)  # what no rule of a file concerns
            if known is not None and found.target in {"", stored}:
                return known
        return found

    def _by_rules(self, name: str) -> ResolvedName:
        if len(name) > LONGEST_NAME:
            return ResolvedName(NameOutcome.DROPPED, name)
        for pattern in self._skip:
            if pattern.search(name):
                return ResolvedName(NameOutcome.SKIPPED, by=pattern.text)
        for pattern in self._elsewhere:
            if pattern.search(name):
                return ResolvedName(NameOutcome.ELSEWHERE, by=pattern.text)
        # Checking the literal here saves a call; a full model runs this eight million times.
        for pattern, replacement in self._rename:
            if pattern.literal in name and pattern.search(name):
                name = pattern.expression.sub(replacement, name)
                if len(name) > LONGEST_NAME:  # before the next rule makes it longer still
                    return ResolvedName(NameOutcome.DROPPED, name)
        for pattern, stack in self._stack:
            match = pattern.search(name) if pattern.literal in name else None
            if match is None:
                continue
            # sub() keeps the parsed template; expand() parses it again for each of 280,000 names.
            target = pattern.expression.sub(stack.into, name, count=1)
            if target in self._known:
                number = match.groupdict().get(EXPERT_GROUP) or ""
                counts = number.isdecimal() and len(number) <= _MOST_DIGITS
                expert = int(number) if counts else None
                return ResolvedName(NameOutcome.PLACED, target, stack.slot, expert, pattern.text)
        if name in self._known:
            return ResolvedName(NameOutcome.PLACED, name)
        return ResolvedName(NameOutcome.DROPPED, name)

    def dead(self) -> list[tuple[str, str]]:
        """Return (kind, pattern) of the rules that matched no name so far."""
        kinds = {
            "skip": self._skip,
            "elsewhere": self._elsewhere,
            "rename": [pattern for pattern, _ in self._rename],
            "stack": [pattern for pattern, _ in self._stack],
        }
        return [
            (kind, pattern.text)
            for kind, patterns in kinds.items()
            for pattern in patterns
            if not pattern.used
        ]


class Splits:
    """The split rules of a map, looked up by parameter: the first matching rule counts."""

    def __init__(self, splits: tuple[Split, ...]) -> None:
        self._splits = [(_Pattern("split", split.match), split) for split in splits]
        self._known: dict[str, Split | None] = {}

    def rule_for(self, target: str) -> Split | None:
        """Return the rule, or None where every rank holds the whole parameter."""
        if target not in self._known:
            found = (split for pattern, split in self._splits if pattern.search(target))
            self._known[target] = next(found, None)
        return self._known[target]

    def dead(self) -> list[tuple[str, str]]:
        """Return the rules that matched no parameter so far."""
        return [("split", pattern.text) for pattern, _ in self._splits if not pattern.used]
