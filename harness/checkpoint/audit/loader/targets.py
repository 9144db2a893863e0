"""List the parameters that each engine rank holds, and what belongs in each of their slots."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.checkpoint.audit.loader.maps import EngineLayout
from degarble.harness.checkpoint.read.types import DTYPE_BITS, shown
from degarble.harness.model.parameters import parameters
from degarble.harness.model.tensors import PartKind, parts_of, slots
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from degarble.harness.checkpoint.audit.loader.maps import (
        DerivedNames,
        ListedParameter,
        LoaderMap,
    )
    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.model.config.config import Config
    from degarble.harness.model.layouts import Layout
    from degarble.harness.model.parameters import Parameter
    from degarble.harness.model.recipes import Formats
    from degarble.harness.model.sharding import ShardingPlan
    from degarble.harness.model.types import Block


# --------------------------------------------------------------------------------------------------
# Which elements of a tensor a set of boxes leaves out or covers twice. A box is a range of indices
# in each dimension. One dimension is cut wherever a box begins or ends, and each slab is covered
# recursively by the rest of its boxes. Results are cached by shape and boxes: a stack of 384
# experts costs as much as two, and 61 layers as much as one. No loop visits elements.
#
# `byte_runs` maps a box to byte ranges of its file, and raises if sub-byte elements do not begin
# and end at a whole byte.

Ranges = tuple[tuple[int, int], ...]


class Cover(NamedTuple):
    """Disjoint boxes of a tensor: those that no box covers, and those that at least two cover."""

    missing: tuple[Box, ...]
    twice: tuple[Box, ...]


@lru_cache(maxsize=4096)
def cover(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Cover:
    """Return which elements of `shape` the boxes, all inside it, leave out or cover twice."""
    for box in boxes:
        inside = len(box.ranges) == len(shape) and all(
            0 <= first <= last <= extent
            for (first, last), extent in zip(box.ranges, shape, strict=True)
        )
        assert inside, f"{box} leaves {shape}"
    held = tuple(box.ranges for box in boxes if box.count)
    if 0 in shape:
        return Cover((), ())
    missing, twice = _sweep(shape, held)
    return Cover(tuple(map(Box, missing)), tuple(map(Box, twice)))


@lru_cache(maxsize=65536)
def _sweep(
    shape: tuple[int, ...], held: tuple[Ranges, ...]
) -> tuple[tuple[Ranges, ...], tuple[Ranges, ...]]:
    """Return the ranges that none of `held` covers, and those that two do."""
    # No dimension is left: one element, in as many boxes as there are.
    if not shape:
        return ((),) if not held else (), ((),) if len(held) > 1 else ()
    if not held:
        return (tuple((0, extent) for extent in shape),), ()
    missing: list[Ranges] = []
    twice: list[Ranges] = []
    for slab, inner in _slabs(shape[0], held):
        none, two = _sweep(shape[1:], inner)
        missing.extend((slab, *ranges) for ranges in none)
        twice.extend((slab, *ranges) for ranges in two)
    return tuple(missing), tuple(twice)


def _slabs(
    extent: int, held: tuple[Ranges, ...]
) -> Iterator[tuple[tuple[int, int], tuple[Ranges, ...]]]:
    """Cut the first dimension where boxes begin or end; merge neighbours with equal rests."""
    events: dict[int, list[tuple[int, Ranges]]] = {0: [], extent: []}
    # Each box has two events: the first makes it active, the second removes it.
    for number, ((first, last), *rest) in enumerate(held):
        inner = tuple(rest)
        events.setdefault(first, []).append((number, inner))
        events.setdefault(last, []).append((number, inner))
    active: dict[int, Ranges] = {}
    begin, before = 0, None
    cuts = sorted(events)
    for here in cuts[:-1]:
        for number, inner in events[here]:
            if number in active:
                del active[number]
            else:
                active[number] = inner
        inside = tuple(sorted(active.values()))
        # Emit a slab only where the active boxes change, so equal neighbours merge.
        if inside != before:
            if before is not None:
                yield (begin, here), before
            begin, before = here, inside
    assert before is not None, "an extent has at least one slab"
    yield (begin, extent), before


def joined(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Return the union of boxes as few disjoint boxes: the complement of the complement."""
    return cover(shape, cover(shape, boxes).missing).missing


@dataclass(frozen=True)
class ByteRuns:
    """Byte runs of equal length in a file: `first`, repeated by (count, step), outermost first.

    Iterate for (begin, end) of each run.
    """

    first: int
    length: int
    repeats: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of runs."""
        return prod(count for count, _ in self.repeats)

    @property
    def nbytes(self) -> int:
        """Total bytes of all runs."""
        return self.count * self.length

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for steps in product(*(range(0, count * step, step) for count, step in self.repeats)):
            begin = self.first + sum(steps)
            yield begin, begin + self.length


def byte_runs(entry: TensorEntry, box: Box) -> ByteRuns:
    """Return the bytes of the file that hold a box of a stored tensor."""
    assert len(box.ranges) == len(entry.shape), f"{box} in {entry.shape}"
    if not box.count:
        return ByteRuns(entry.begin, 0, ((0, 1),))
    bits, whole = DTYPE_BITS[entry.dtype], len(entry.shape)
    # Trailing dimensions that the box takes as a whole, and the one before them, lie in one piece.
    while whole and box.ranges[whole - 1] == (0, entry.shape[whole - 1]):
        whole -= 1
    whole = max(whole - 1, 0)
    steps = [bits * prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    first = sum(start * step for (start, _), step in zip(box.ranges, steps, strict=True))
    length = bits * prod(box.shape[whole:])
    repeats = tuple(
        (extent, step) for extent, step in zip(box.shape[:whole], steps[:whole], strict=True)
    )
    if first % 8 or length % 8 or any(step % 8 for _, step in repeats):
        raise ShapeMismatch(
            f"box of {shown(entry.name)}",
            list(box.ranges),
            f"whole bytes of {entry.dtype}",
            "Cut between bytes.",
        )
    runs = tuple((count, step // 8) for count, step in repeats if count != 1)
    return ByteRuns(entry.begin + first // 8, length // 8, runs)


# --------------------------------------------------------------------------------------------------
# Parameters of each rank. A parameter has members: the slots of a fused one, the experts of a
# stack. If it comes from the model's layout and sharding plan, each member has a truth: the part of
# a logical parameter that belongs there, and its box. Members of an engine's own list have none, so
# only names, shapes and coverage are checked.
#
# Ranks that hold equal shapes share one set of targets; RankTargets resolves the experts and rows
# of each rank by position.

Key = tuple[int | None, int]  # an expert's number on its rank, and a slot


class ExpectedContent(NamedTuple):
    """What belongs in a member: a box of one part, in coordinates of the unsharded stored part."""

    parameter: Parameter
    part: PartKind
    box: Box


_ANYWHERE = Box(())


class Member(NamedTuple):
    """One slot of a parameter. `position`, `part`: the expected parameter and part, if known."""

    box: Box
    position: int | None = None
    part: PartKind | None = None


@dataclass
class TargetParameter:
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

    `targets` and `parameters` are the same objects for ranks that are alike in them. `parameters`
    lists logical parameters by the position that members name; `cutter` returns the box of each on
    this rank.
    """

    rank: int
    tp_rank: int
    first_expert: int
    targets: dict[str, TargetParameter]
    parameters: Sequence[Parameter] = ()
    cutter: Cutter | None = None

    def truth(self, member: Member) -> ExpectedContent | None:
        """Return what belongs in a member; None for parameters of an engine's own list."""
        if member.position is None or member.part is None:
            return None
        parameter = self.parameters[member.position]
        if self.cutter is None:  # a derived list: no rank cuts a tensor, and extents tell the rest
            return ExpectedContent(parameter, member.part, _ANYWHERE)
        found = self.cutter.cut(parameter)
        assert found is not None, "what a rank lists it holds"
        return ExpectedContent(parameter, member.part, found[1][member.part])


def ranks_of(loader_map: LoaderMap) -> range:
    """Return the ranks that a map covers."""
    if loader_map.rank is not None:
        return range(loader_map.rank, loader_map.rank + 1)
    return range(loader_map.pp * max(loader_map.tp, loader_map.ep))


class EngineTargets:
    """The parameters of each rank, in the names and shapes of an engine's layout.

    The latest result is cached, because ranks are requested one after the other.
    """

    def __init__(self, config: Config, layout: Layout, plan: ShardingPlan) -> None:
        self._config = config
        self._layout = layout
        self._plan = plan
        self._by_expert: dict[int | None, list[Parameter]] = defaultdict(list)
        for parameter in parameters(config):
            if not layout.omits(parameter, config):
                self._by_expert[parameter.expert].append(parameter)
        self._held: tuple[object, list[Parameter]] = (None, [])
        self._targets: tuple[object, dict[str, TargetParameter]] = (None, {})
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
    ) -> dict[str, TargetParameter]:
        local = []
        for parameter in held:
            found = cutter.cut(parameter)
            assert found is not None, "what a rank lists it holds"
            number = None if parameter.expert is None else parameter.expert - experts.start
            local.append(replace(parameter, shape=found[0].shape, expert=number))
        return _targets(self._config, self._layout, local)


def _targets(config: Config, layout: Layout, local: list[Parameter]) -> dict[str, TargetParameter]:
    """Lay out the parameters of one rank; a member names its parameter by position."""
    orders = {row: i for fusion in layout.fusions for i, row in enumerate(fusion.members)}
    stacked = {row for fusion in layout.fusions if fusion.stacked for row in fusion.members}
    positions = {parameter.name: position for position, parameter in enumerate(local)}
    targets: dict[str, TargetParameter] = {}
    for slot in slots(config, layout, local):
        row = slot.parameter.row.name
        target = targets.get(slot.tensor)
        if target is None:
            target = TargetParameter(slot.tensor, str(slot.dtype), stacked=row in stacked)
            targets[slot.tensor] = target
        # A parameter outside fusions has slot 0 alone.
        key = (slot.parameter.expert if target.stacked else None, orders.get(row, 0))
        target.members[key] = Member(slot.box, positions[slot.parameter.name], slot.part)
    for target in targets.values():
        target.settle()
    return targets


class Cutter:
    """Cuts parameters for one rank; experts of one block are cut alike and share one result."""

    def __init__(
        self, format_of: Callable[[Parameter], Formats], plan: ShardingPlan, rank: int
    ) -> None:
        self._format_of = format_of
        self._plan = plan
        self._rank = rank
        self._known: dict[tuple[str, Block | None], tuple[Box, dict[PartKind, Box]] | None] = {}

    def cut(self, parameter: Parameter) -> tuple[Box, dict[PartKind, Box]] | None:
        """Return the box of a parameter and the boxes of its parts; None where it is not held."""
        key = (parameter.row.name, parameter.block)
        if key not in self._known:
            self._known[key] = self._cut(parameter)
        return self._known[key]

    def _cut(self, parameter: Parameter) -> tuple[Box, dict[PartKind, Box]] | None:
        box = self._plan.box_on(parameter, self._rank)
        if box is None:
            return None
        stored = parts_of(parameter, self._format_of(parameter))
        return box, {part.part: part.box_of(box, parameter.name) for part in stored}


def listed_targets(loader_map: LoaderMap, ranks: Iterable[int]) -> Iterator[RankTargets]:
    """Yield each rank's parameters from a list; stacks give the number of experts a rank."""
    assert not isinstance(loader_map.parameters, EngineLayout), "a list of parameters"
    targets = {parameter.name: _listed(parameter) for parameter in loader_map.parameters}
    derived = loader_map.derived
    known = [] if derived is None else _known_content(targets, derived)
    experts = max(
        (parameter.shape[0] for parameter in loader_map.parameters if parameter.experts), default=0
    )
    for rank in ranks:
        # A list has no plan: rank r holds the r-th share of experts, modulo ep.
        first = rank % loader_map.ep * experts if loader_map.ep > 1 else 0
        held = []
        if derived is not None:
            held = [derived.holds[target][_moved(key, first)][0] for target, key in known]
        yield RankTargets(rank, rank % loader_map.tp, first, targets, held)


def _known_content(
    targets: Mapping[str, TargetParameter], derived: DerivedNames
) -> list[tuple[str, Key]]:
    """Let members name what belongs there by position; return the slot of each position."""
    known: list[tuple[str, Key]] = []
    for name, target in targets.items():
        holds = derived.holds.get(name, {})
        for key, member in target.members.items():
            if key in holds:
                target.members[key] = member._replace(position=len(known), part=holds[key][1])
                known.append((name, key))
    return known


def _moved(key: Key, first: int) -> Key:
    return (None if key[0] is None else key[0] + first, key[1])


def _listed(parameter: ListedParameter) -> TargetParameter:
    target = TargetParameter(parameter.name, parameter.dtype, stacked=parameter.experts)
    axis = int(parameter.experts)
    experts: list[int | None] = list(range(parameter.shape[0])) if parameter.experts else [None]
    extents = parameter.slots or (
        (parameter.shape[axis],) if len(parameter.shape) > axis else (None,)
    )
    for expert in experts:
        first = 0
        for number, extent in enumerate(extents):
            lead = () if expert is None else ((expert, expert + 1),)
            rows = () if extent is None else ((first, first + extent),)
            rest = tuple((0, extent) for extent in parameter.shape[axis + len(rows) :])
            target.members[expert, number] = Member(Box((*lead, *rows, *rest)))
            first += extent or 0
    target.settle()
    return target
