"""What is written to a parameter: every tensor that a loader sends there, cut for one rank.

Owns the single writes of a proof, right and wrong ones, worked out for one parameter at a time.
What is alike for the experts of a stack is judged once: same slot, same extents, same type, and the
parameter that belongs there. Kept honest by suites/checkpoint/test_loader_proof.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.anatomy.types import Box
from degarble.harness.checkpoint.loader_fill import NO_SLOT, judge_write, piece
from degarble.harness.checkpoint.loader_names import Splits
from degarble.harness.checkpoint.loader_targets import Member

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.loader_fill import Wrong
    from degarble.harness.checkpoint.loader_maps import LoaderMap
    from degarble.harness.checkpoint.loader_routes import Routes
    from degarble.harness.checkpoint.loader_sources import Source
    from degarble.harness.checkpoint.loader_targets import Key, RankTargets, Target


class Transfer(NamedTuple):
    """A box of a stored tensor that is written to a box of a parameter.

    `made_from`: the stored tensors behind a converted one, which has no bytes of its own.
    """

    source: str
    source_box: Box
    target_box: Box
    made_from: tuple[str, ...] = ()


class Written(NamedTuple):
    """One write that was tried. `taken`: the box of the source; `wrong`: the rule it breaks."""

    source: Source
    key: Key | None
    member: Member
    taken: Box
    wrong: Wrong | None

    @property
    def arrives(self) -> bool:
        """Whether bytes reach the parameter, right or wrong."""
        return self.wrong is None or self.wrong.written


class Writer:
    """Works out what is written to one parameter of one rank."""

    def __init__(self, loader_map: LoaderMap, routes: Routes) -> None:
        self.routes = routes
        self.splits = Splits(loader_map.split)
        self._tp = loader_map.tp

    def transfers(self, held: RankTargets, target: Target) -> tuple[Transfer, ...]:
        """Return what reaches a parameter."""
        return tuple(
            Transfer(each.source.name, each.taken, each.member.box, each.source.made_from)
            for each in self.writes(held, target)
            if each.arrives
        )

    def writes(self, held: RankTargets, target: Target) -> Iterator[Written]:
        """Yield every write that is tried."""
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


def _member(target: Target, local: int | None, slot: int | None) -> tuple[Key | None, Member]:
    """Find the slot that a tensor is written to; without a number, it is the whole parameter."""
    if slot is not None:
        key = (local, slot)
        return key, target.members.get(key, NO_SLOT)
    if len(target.members) == 1:
        return next(iter(target.members.items()))
    return None, Member(Box.whole(target.shape))
