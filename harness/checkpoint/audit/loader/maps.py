"""Describe how an engine loads a checkpoint: its parameters, and rename, stack and split rules.

A loader applies its rules to each stored tensor in this order: convert, skip, elsewhere, rename,
stack, split. Patterns are Python regular expressions, found by search rather than matched from the
start; a stack takes an expert's number from the group `expert`. docs/loader-maps.md explains each
field with an example.

Patterns from files are untrusted: those that could take for ever to search are rejected, as are
patterns that do not compile and replacements that name unknown groups.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.model.config.json_file import ARCHITECTURES
from degarble.harness.model.types import Dtype

if TYPE_CHECKING:
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.recipes import Recipe
    from degarble.harness.model.storage import Part

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
        f"a readable config.json of {' or '.join(ARCHITECTURES)}, and names that fit it",
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
    reads: frozenset[Part] | None = None
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
class Listed:
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
class Engine:
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


@dataclass(frozen=True)
class LoaderMap:
    """All rules by which an engine loads. `rank`: prove one rank alone; None: all ranks.

    `caveats`: in which respects the map differs from the engine's own; a proof repeats them.
    """

    name: str
    parameters: Engine | tuple[Listed, ...]
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
        if not isinstance(self.parameters, Engine):
            names = [each.name for each in self.parameters]
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
