"""List the writes that a loader makes to each parameter of a rank, both right and wrong ones.

Experts of a stack with the same slot, extents and dtype are checked once. `whole` accepts a
parameter in one step where all of its writes are alike and right: a full-size model has two million
writes. `writes` lists them one by one, and both ways must agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.coverage import NO_SLOT, judge_write, piece
from degarble.harness.checkpoint.audit.loader.names import Splits
from degarble.harness.checkpoint.audit.loader.targets import Member
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.audit.loader.coverage import Wrong
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap
    from degarble.harness.checkpoint.audit.loader.routes import Placed, Routes
    from degarble.harness.checkpoint.audit.loader.sources import Source
    from degarble.harness.checkpoint.audit.loader.targets import Key, RankTargets, Target


class Transfer(NamedTuple):
    """A box of a stored tensor that is written to a box of a parameter.

    `made_from`: the stored tensors of a converted source, which has no bytes of its own.
    """

    source: str
    source_box: Box
    target_box: Box
    made_from: tuple[str, ...] = ()


class Written(NamedTuple):
    """An attempted write. `taken`: the box of the source; `wrong`: the rule that it breaks."""

    source: Source
    key: Key | None
    member: Member
    taken: Box
    wrong: Wrong | None

    @property
    def arrives(self) -> bool:
        """Whether bytes reach the parameter, right or wrong."""
        return self.wrong is None or self.wrong.written


class Alike(NamedTuple):
    """Right writes of one slot with the same source box for all experts of a rank."""

    slot: int | None  # as the rules name it
    experts: range | None
    taken: Box


class Writer:
    """Computes the writes to one parameter of one rank."""

    def __init__(self, loader_map: LoaderMap, routes: Routes) -> None:
        self.routes = routes
        self.splits = Splits(loader_map.split)
        self._tp = loader_map.tp
        self._uniform: dict[str, tuple[Placed, ...]] = {}
        self._belongs: dict[str, tuple[object, range | None, bool]] = {}

    def whole(self, held: RankTargets, target: Target) -> tuple[Alike, ...]:
        """Return the writes that fill a parameter exactly once; empty if that is not certain."""
        group, experts = self._uniform_of(target), None
        if target.stacked:
            experts = range(held.first_expert, held.first_expert + target.shape[0])
        if (
            not group
            or any(target.cover_of_all)
            or len(group) * (1 if experts is None else len(experts)) != len(target.members)
            or not self._belong(held, target, experts)
        ):
            return ()
        alike = []
        for source, slot in group:
            _, member = _member(target, 0 if target.stacked else None, slot)
            taken, wrong = self._judged(held, target, source, member)
            if wrong is not None:
                return ()
            alike.append(Alike(slot, experts, taken))
        return tuple(alike)

    def _uniform_of(self, target: Target) -> tuple[Placed, ...]:
        """Return one expert's sources if all experts have alike ones, each slot once."""
        if target.name not in self._uniform:
            groups = list(self.routes.placed.get(target.name, {}).items())
            kinds = {tuple(map(_kind, group)) for _, group in groups}
            slots = [placed.slot for placed in groups[0][1]] if groups else []
            # Same slots, shapes and types for every expert, and no slot twice.
            fits = (
                len(kinds) == 1
                and all((expert is not None) == target.stacked for expert, _ in groups)
                and (None not in slots or len(target.members) == 1)
                and len(set(slots)) == len(slots)
            )
            self._uniform[target.name] = tuple(groups[0][1]) if fits else ()
        return self._uniform[target.name]

    def _belong(self, held: RankTargets, target: Target, experts: range | None) -> bool:
        """Return whether every source belongs in its slot; cached for ranks that are alike."""
        known = self._belongs.get(target.name)
        # Ranks that hold equal parameters share one list, so identity is enough.
        if known is None or known[0] is not held.held or known[1] != experts:
            known = held.held, experts, self._compare(held, target, experts)
            self._belongs[target.name] = known
        return known[2]

    def _compare(self, held: RankTargets, target: Target, experts: range | None) -> bool:
        placed = self.routes.placed[target.name]
        for local, expert in ((None, None),) if experts is None else enumerate(experts):
            if expert not in placed:
                return False
            for source, slot in placed[expert]:
                key, member = _member(target, local, slot)
                position = member.position
                if key is None or member is NO_SLOT:
                    return False
                if position is not None and source.parameter is not held.held[position]:
                    return False
        return True

    def transfers(self, held: RankTargets, target: Target) -> tuple[Transfer, ...]:
        """Return the transfers that reach a parameter."""
        return tuple(
            Transfer(
                each.source.name,
                each.source.stored(each.taken),
                each.member.box,
                each.source.made_from,
            )
            for each in self.writes(held, target)
            if each.arrives
        )

    def writes(self, held: RankTargets, target: Target) -> Iterator[Written]:
        """Yield every attempted write."""
        experts = target.shape[0] if target.stacked else 0
        # What is alike for all experts of a stack is judged once.
        alike: dict[tuple[object, ...], tuple[Box, Wrong | None]] = {}
        for expert, group in self.routes.placed.get(target.name, {}).items():
            local = None
            if target.stacked and expert is not None:
                local = expert - held.first_expert
                if not 0 <= local < experts:
                    continue  # another rank's
            for source, slot in group:
                key, member = _member(target, local, slot)
                truth = held.truth(member)
                if truth is not None and source.parameter is not truth.parameter:
                    yield Written(source, key, member, *self._judged(held, target, source, member))
                    continue
                kind = (key and key[1], source.shape, source.dtype, source.part)
                found = alike.get(kind)
                if found is None:
                    found = alike[kind] = self._judged(held, target, source, member)
                yield Written(source, key, member, *found)

    def _judged(
        self, held: RankTargets, target: Target, source: Source, member: Member
    ) -> tuple[Box, Wrong | None]:
        taken = piece(source.shape, self.splits.of(target.name), self._tp, held.tp_rank)
        truth = held.truth(member)
        return taken, judge_write(source, taken, target.dtype, member, truth)


def _kind(placed: Placed) -> tuple[object, ...]:
    source = placed.source
    return placed.slot, source.shape, source.dtype, source.part


def _member(target: Target, local: int | None, slot: int | None) -> tuple[Key | None, Member]:
    """Return the slot that a tensor is written to; without a number, the whole parameter."""
    if slot is not None:
        key = (local, slot)
        return key, target.members.get(key, NO_SLOT)
    if len(target.members) == 1:
        return next(iter(target.members.items()))
    return None, Member(Box.whole(target.shape))
