"""List the parameters that each engine rank holds, and what belongs in each of their slots.

A parameter has members: the slots of a fused one, the experts of a stack. If it comes from the
model's layout and sharding plan, each member has a truth: the part of a logical parameter that
belongs there, and its box. Members of an engine's own list have none, so only names, shapes and
coverage are checked.

Ranks that hold equal shapes share one set of targets; RankTargets resolves the experts and rows of
each rank by position.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.boxes import Cover, cover
from degarble.harness.checkpoint.audit.loader.maps import Engine
from degarble.harness.model.parameters import parameters
from degarble.harness.model.storage import Part, parts_of
from degarble.harness.model.tensors import slots
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from degarble.harness.checkpoint.audit.loader.maps import Listed, LoaderMap
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Formats
    from degarble.harness.model.sharding import Plan
    from degarble.harness.model.types import Block

Key = tuple[int | None, int]  # an expert's number on its rank, and a slot


class Truth(NamedTuple):
    """What belongs in a member: a box of one part, in coordinates of the unsharded stored part."""

    parameter: Parameter
    part: Part
    box: Box


class Member(NamedTuple):
    """One slot of a parameter. `position`, `part`: the expected parameter and part, if known."""

    box: Box
    position: int | None = None
    part: Part | None = None


@dataclass
class Target:
    """A parameter, shared by every rank that holds these shapes."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    members: dict[Key, Member] = field(default_factory=dict)
    stacked: bool = False  # its first dimension counts experts
    cover_of_all: Cover = field(default_factory=lambda: Cover((), ()))

    def settle(self) -> None:
        """Compute shape and cover once all members are present."""
        boxes = tuple(member.box for member in self.members.values())
        extents = zip(*(box.ranges for box in boxes), strict=True)
        self.shape = tuple(max(stop for _, stop in ranges) for ranges in extents)
        self.cover_of_all = cover(self.shape, boxes)


@dataclass(frozen=True)
class RankTargets:
    """All parameters of one rank. `first_expert`: model-wide number of its first expert.

    `targets` and `held` are the same objects for ranks that are alike in them. `held` lists logical
    parameters by the position that members name; `cutter` returns the box of each on this rank.
    """

    rank: int
    tp_rank: int
    first_expert: int
    targets: dict[str, Target]
    held: Sequence[Parameter] = ()
    cutter: Cutter | None = None

    def truth(self, member: Member) -> Truth | None:
        """Return what belongs in a member; None for parameters of an engine's own list."""
        if member.position is None or member.part is None:
            return None
        assert self.cutter is not None, "a position comes from anatomy"
        parameter = self.held[member.position]
        found = self.cutter.cut(parameter)
        assert found is not None, "what a rank lists it holds"
        return Truth(parameter, member.part, found[1][member.part])


def ranks_of(loader_map: LoaderMap) -> range:
    """Return the ranks that a map covers."""
    if loader_map.rank is not None:
        return range(loader_map.rank, loader_map.rank + 1)
    return range(loader_map.pp * max(loader_map.tp, loader_map.ep))


class EngineTargets:
    """The parameters of each rank, in the names and shapes of an engine's layout.

    The latest result is cached, because ranks are requested one after the other.
    """

    def __init__(self, config: Config, layout: Layout, plan: Plan) -> None:
        self._config = config
        self._layout = layout
        self._plan = plan
        self._by_expert: dict[int | None, list[Parameter]] = defaultdict(list)
        for parameter in parameters(config):
            if not layout.omits(parameter, config):
                self._by_expert[parameter.expert].append(parameter)
        self._held: tuple[object, list[Parameter]] = (None, [])
        self._targets: tuple[object, dict[str, Target]] = (None, {})
        self._last: RankTargets | None = None

    def __call__(self, ranks: Iterable[int]) -> Iterator[RankTargets]:
        """Yield the parameters of each of these ranks."""
        for rank in ranks:
            if self._last is None or self._last.rank != rank:
                self._last = self._of(rank)
            yield self._last

    def _of(self, rank: int) -> RankTargets:
        experts = self._plan.experts_of(rank)
        cutter = Cutter(self._layout.recipe_for(self._config).format_of, self._plan, rank)
        # One expert stands for all of a rank: they are cut alike, and so the shapes of this list
        # identify the targets.
        kinds = [*self._by_expert[None], *self._by_expert[experts.start]]
        shapes = tuple(found and found[0].shape for found in map(cutter.cut, kinds))
        here = (experts, tuple(shape is None for shape in shapes))
        if self._held[0] != here:
            self._held = here, self._held_by(experts, cutter)
        held = self._held[1]
        if self._targets[0] != (shapes, len(experts)):
            # The names of experts differ between ranks, and nothing else does.
            made = self._targets_of(held, experts, cutter)
            self._targets = (shapes, len(experts)), made
        tp_rank = rank % self._plan.ranks_per_stage % self._plan.tp
        return RankTargets(rank, tp_rank, experts.start, self._targets[1], held, cutter)

    def _held_by(self, experts: range, cutter: Cutter) -> list[Parameter]:
        return [
            parameter
            for expert in (None, *experts)
            for parameter in self._by_expert[expert]
            if cutter.cut(parameter) is not None
        ]

    def _targets_of(
        self, held: list[Parameter], experts: range, cutter: Cutter
    ) -> dict[str, Target]:
        local = []
        for parameter in held:
            found = cutter.cut(parameter)
            assert found is not None, "what a rank lists it holds"
            number = None if parameter.expert is None else parameter.expert - experts.start
            local.append(replace(parameter, shape=found[0].shape, expert=number))
        return _targets(self._config, self._layout, local)


def _targets(config: Config, layout: Layout, local: list[Parameter]) -> dict[str, Target]:
    """Lay out the parameters of one rank; a member names its parameter by position."""
    orders = {row: i for each in layout.fusions for i, row in enumerate(each.members)}
    stacked = {row for each in layout.fusions if each.stacked for row in each.members}
    positions = {parameter.name: position for position, parameter in enumerate(local)}
    targets: dict[str, Target] = {}
    for slot in slots(config, layout, local):
        row = slot.parameter.row.name
        target = targets.get(slot.tensor)
        if target is None:
            target = Target(slot.tensor, str(slot.dtype), stacked=row in stacked)
            targets[slot.tensor] = target
        # A parameter outside fusions has slot 0 alone.
        key = (slot.parameter.expert if target.stacked else None, orders.get(row, 0))
        target.members[key] = Member(slot.box, positions[slot.parameter.name], slot.part)
    for target in targets.values():
        target.settle()
    return targets


class Cutter:
    """Cuts parameters for one rank; experts of one block are cut alike and share one result."""

    def __init__(self, format_of: Callable[[Parameter], Formats], plan: Plan, rank: int) -> None:
        self._format_of = format_of
        self._plan = plan
        self._rank = rank
        self._known: dict[tuple[str, Block | None], tuple[Box, dict[Part, Box]] | None] = {}

    def cut(self, parameter: Parameter) -> tuple[Box, dict[Part, Box]] | None:
        """Return the box of a parameter and the boxes of its parts; None where it is not held."""
        key = (parameter.row.name, parameter.block)
        if key not in self._known:
            self._known[key] = self._cut(parameter)
        return self._known[key]

    def _cut(self, parameter: Parameter) -> tuple[Box, dict[Part, Box]] | None:
        box = self._plan.box_on(parameter, self._rank)
        if box is None:
            return None
        stored = parts_of(parameter, self._format_of(parameter))
        return box, {each.part: each.box_of(box, parameter.name) for each in stored}


def listed_targets(loader_map: LoaderMap, ranks: Iterable[int]) -> Iterator[RankTargets]:
    """Yield each rank's parameters from a list; stacks give the number of experts a rank."""
    assert not isinstance(loader_map.parameters, Engine), "a list of parameters"
    targets = {each.name: _listed(each) for each in loader_map.parameters}
    experts = max((each.shape[0] for each in loader_map.parameters if each.experts), default=0)
    for rank in ranks:
        # A list has no plan: rank r holds the r-th share of experts, modulo ep.
        first = rank % loader_map.ep * experts if loader_map.ep > 1 else 0
        yield RankTargets(rank, rank % loader_map.tp, first, targets)


def _listed(each: Listed) -> Target:
    target = Target(each.name, each.dtype, stacked=each.experts)
    axis = int(each.experts)
    experts: list[int | None] = list(range(each.shape[0])) if each.experts else [None]
    extents = each.slots or ((each.shape[axis],) if len(each.shape) > axis else (None,))
    for expert in experts:
        first = 0
        for number, extent in enumerate(extents):
            lead = () if expert is None else ((expert, expert + 1),)
            rows = () if extent is None else ((first, first + extent),)
            rest = tuple((0, extent) for extent in each.shape[axis + len(rows) :])
            target.members[expert, number] = Member(Box((*lead, *rows, *rest)))
            first += extent or 0
    target.settle()
    return target
