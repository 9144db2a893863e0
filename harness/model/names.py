"""Name maps: which box of which source tensor becomes which box of which target tensor.

A map connects two layouts of a model that hold the same recipe: DeepSeek's own names,
transformers', ModelOpt's and vLLM's fused parameters. It is a list of moves. Every move states
source, target, and what happens to the elements' type: nothing, a view of the same bytes, or a
cast. The inverse is the same list read backwards, so a map loses only what it lists as unmapped,
with the reason. Between different recipes values change; that is a conversion and needs more than
a map.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import LayoutMismatch, UnknownName
from degarble.harness.model.parameters import parameters
from degarble.harness.model.tensors import slots

if TYPE_CHECKING:
    from collections.abc import Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.storage import Part
    from degarble.harness.model.types import Box, Dtype


class Typing(StrEnum):
    """What happens to the type of the elements in a move."""

    SAME = "same"
    VIEW = "view"  # the same bytes under another name: uint8 for E8M0, U8 for I8
    CAST = "cast"  # values kept, bytes not: bf16 norms held in fp32, int64 ids in int32


class Place(NamedTuple):
    """One side of a move."""

    tensor: str
    box: Box
    dtype: Dtype


class Move(NamedTuple):
    """One part of one parameter, from its place in the source to its place in the target."""

    parameter: str
    part: Part
    shape: tuple[int, ...]
    source: Place
    target: Place

    @property
    def typing(self) -> Typing:
        """Return how the elements' type changes."""
        if self.source.dtype == self.target.dtype:
            return Typing.SAME
        floats = {self.source.dtype, self.target.dtype} <= {"BF16", "F32"}
        integers = {self.source.dtype, self.target.dtype} <= {"I32", "I64"}
        return Typing.CAST if floats or integers else Typing.VIEW


@dataclass(frozen=True)
class NameMap:
    """All moves between two layouts, and what has a place on one side only."""

    source: Layout
    target: Layout
    moves: tuple[Move, ...]
    unmapped: tuple[tuple[str, str], ...]  # (parameter, reason)

    def inverse(self) -> NameMap:
        """Return the map that goes back."""
        back = tuple(move._replace(source=move.target, target=move.source) for move in self.moves)
        return NameMap(self.target, self.source, back, self.unmapped)

    @cached_property
    def by_target(self) -> Mapping[str, tuple[Move, ...]]:
        """Return the moves that fill each target tensor, in row order."""
        return _grouped(self.moves, "target")

    @cached_property
    def by_source(self) -> Mapping[str, tuple[Move, ...]]:
        """Return the moves that each source tensor takes part in."""
        return _grouped(self.moves, "source")

    def filling(self, tensor: str) -> tuple[Move, ...]:
        """Return what fills one target tensor; an unknown one is refused."""
        if tensor not in self.by_target:
            raise UnknownName.among("target tensor", tensor, self.by_target)
        return self.by_target[tensor]


def _grouped(moves: tuple[Move, ...], side: str) -> dict[str, tuple[Move, ...]]:
    groups: dict[str, list[Move]] = {}
    for move in moves:
        groups.setdefault(getattr(move, side).tensor, []).append(move)
    return {
        tensor: tuple(sorted(group, key=lambda move: getattr(move, side).box.ranges))
        for tensor, group in groups.items()
    }


def name_map(config: Config, source: Layout, target: Layout) -> NameMap:
    """Map the tensors of `source` to those of `target`; both must hold one recipe."""
    recipes = source.recipe_for(config), target.recipe_for(config)
    if recipes[0].rules != recipes[1].rules:
        raise LayoutMismatch(
            f"recipe of layout {target.name}",
            recipes[1].name,
            f"{recipes[0].name}, which layout {source.name} holds",
            "Give both one recipe by Layout.with_recipe; convert the values beforehand.",
        )
    places = {slot.key: slot for slot in slots(config, target)}
    moves = []
    for slot in slots(config, source):
        place = places.get(slot.key)
        if place is not None:
            ends = (Place(each.tensor, each.box, each.dtype) for each in (slot, place))
            moves.append(Move(*slot.key, slot.shape, *ends))
    unmapped = []
    for parameter in parameters(config):
        reason = source.omits(parameter, config) or target.omits(parameter, config)
        if reason:
            unmapped.append((parameter.name, reason))
    return NameMap(source, target, tuple(moves), tuple(unmapped))
