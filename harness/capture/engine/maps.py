"""Describe where an engine holds our tensors: module, argument or result, columns, rank's share.

A sighting is one component and, for each of its tensors, a place in the engine. A place names a
module (`model.layers.0.attn.wq_b`) or a method of an object after a colon
(`model.layers.0.ffn.experts:router.select_experts`), an argument or result of its call, the columns
if the engine fused several components into one tensor, and the rank's share. Imports no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.files.types import site_of
from degarble.harness.model.sites import Port

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD = ":"  # behind it: attributes, and a method of what they lead to


class Of(StrEnum):
    """Which side of a call shows a tensor."""

    ARGUMENT = "argument"
    RESULT = "result"


class Rows(StrEnum):
    """Meaning of a row of a tensor."""

    TOKENS = "tokens"
    LAST = "last"  # tokens, of which the last one of each sequence is meant
    SEQUENCES = "sequences"


class Held(StrEnum):
    """One rank's share of a tensor."""

    WHOLE = "whole"  # as every other rank has it
    PART = "part"  # a run of one dimension, in the order of ranks
    TERM = "term"  # a term of the sum over ranks


@dataclass(frozen=True)
class Share:
    """A rank's share of a tensor.

    `extents`: of PART, the whole extent of each slot along `dim`. Where an engine fused slots, a
    rank has its part of the first, then its part of the second. Padding behind the last is cut off.
    """

    held: Held = Held.WHOLE
    extents: tuple[int, ...] = ()
    dim: int = -1

    def __post_init__(self) -> None:
        if (self.held is Held.PART) != bool(self.extents) or any(n < 1 for n in self.extents):
            raise InvalidArgument(
                f"share ({self.held})", self.extents, "extents of the whole, for a part alone",
                "Correct the engine's map.",
            )  # fmt: skip


WHOLE, TERM = Share(), Share(Held.TERM)


def part(*extents: int, dim: int = -1) -> Share:
    """Return a shard of one tensor, or of several consecutive slots."""
    return Share(Held.PART, extents, dim)


@dataclass(frozen=True)
class Seen:
    """Place of one tensor. `at`: number or keyword of an argument, number of a result."""

    module: str
    of: Of = Of.RESULT
    at: int | str = 0
    columns: tuple[int, int] | None = None
    share: Share = WHOLE
    rows: Rows = Rows.TOKENS

    def __post_init__(self) -> None:
        if self.columns is not None and not 0 <= self.columns[0] < self.columns[1]:
            raise InvalidArgument(
                f"columns of {self.module}", self.columns, "begin and end, the smaller one first",
                "Correct the engine's map.",
            )  # fmt: skip


@dataclass(frozen=True)
class Sighting:
    """One component and its places. Tensors that the engine does not expose are left out."""

    component: str
    inputs: Mapping[str, Seen] = field(default_factory=lambda: MappingProxyType({}))
    outputs: Mapping[str, Seen] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for port, names in ((Port.IN, self.inputs), (Port.OUT, self.outputs)):
            for name in names:
                site_of(self.component, port, name)


def taken(module: str, at: int | str = 0, share: Share = WHOLE) -> Seen:
    """An argument of a module's call."""
    return Seen(module, Of.ARGUMENT, at, share=share)


def made(
    module: str, at: int = 0, share: Share = WHOLE, columns: tuple[int, int] | None = None
) -> Seen:
    """A result of a module's call."""
    return Seen(module, Of.RESULT, at, columns, share)
