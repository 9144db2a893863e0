"""Route stored tensors to parameters, and list what each rank reads of them and writes.

Placed tensors are kept by parameter and expert.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.checkpoint.audit.loader.findings import NO_SLOT, judge_write, piece
from degarble.harness.checkpoint.audit.loader.maps import NameOutcome, NameRules, Split, Splits
from degarble.harness.checkpoint.audit.loader.sources import Conversions, identified
from degarble.harness.checkpoint.audit.loader.targets import Member, cover
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.model.types import Box

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from degarble.harness.checkpoint.audit.loader.findings import LoaderFindings, WrongWrite
    from degarble.harness.checkpoint.audit.loader.maps import LoaderMap, ResolvedName
    from degarble.harness.checkpoint.audit.loader.sources import MatchedConversion, SourceTensor
    from degarble.harness.checkpoint.audit.loader.targets import (
        ExpectedContent,
        Key,
        RankTargets,
        TargetParameter,
    )
    from degarble.harness.checkpoint.audit.structure.inventory import Inventory
    from degarble.harness.checkpoint.view.view import Checkpoint
    from degarble.harness.model.tensors import PartKind


# --------------------------------------------------------------------------------------------------
# Routes, by name alone. Each tensor is identified, converted if a rule says so, and resolved by the
# name rules. Unplaced tensors are kept by identity, so that the finding on an unwritten parameter
# can name the tensor that should have filled it, and its outcome.

Identity = tuple[str, "PartKind | None"]  # of a parameter by name


class RoutedTensor(NamedTuple):
    """A source with its destination slot. `slot` None: the whole parameter."""

    source: SourceTensor
    slot: int | None


class Routes:
    """Destinations of all stored tensors. `known`: names of the engine's parameters."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        loader_map: LoaderMap,
        inventory: Inventory | None,
        known: Container[str],
        findings: LoaderFindings,
    ) -> None:
        self.outcomes: dict[str, NameOutcome] = {}
        self.placed: dict[str, dict[int | None, list[RoutedTensor]]] = {}
        self.lost: dict[Identity, tuple[SourceTensor, ResolvedName]] = {}
        self.converted: dict[str, MatchedConversion | None] = {}  # by parameter
        self._table = checkpoint.table
        self._inventory = inventory
        self._findings = findings
        self._rules = NameRules(loader_map, known)
        self._conversions = Conversions(loader_map, checkpoint.table)
        self._reasons = {elsewhere.match: elsewhere.reason for elsewhere in loader_map.elsewhere}
        self._converts = bool(loader_map.convert)

    def follow(self) -> None:
        """Route every stored tensor, and the tensors that conversions make."""
        for source in identified(self._table, self._inventory):
            conversion = self._conversion_of(source)
            if conversion is not None and source.part in conversion.reads:
                self.outcomes[source.name] = NameOutcome.CONVERTED
            else:
                self.outcomes[source.name] = self._place(source, needed=conversion is None)
        for conversion in self.converted.values():
            if conversion is not None:
                self._findings.conversion(conversion)
                for source in self._conversions.outputs(conversion):
                    self._place(source, needed=True)

    def dead(self) -> list[tuple[str, str]]:
        """Return (kind, pattern) of the rules that matched nothing."""
        return self._rules.dead() + self._conversions.dead()

    def leading_to(self, tensor: str) -> set[str]:
        """Return the parameters to which a stored tensor is sent."""
        return {
            target
            for target, by_expert in self.placed.items()
            for group in by_expert.values()
            for source, _ in group
            if tensor == source.name or tensor in source.made_from
        }

    def all_placed(self) -> Iterator[tuple[str, int | None, RoutedTensor]]:
        """Yield (parameter, expert, source with slot) for every source that is placed."""
        for target, by_expert in self.placed.items():
            for expert, group in by_expert.items():
                for placed in group:
                    yield target, expert, placed

    def outcome_of(self, truth: ExpectedContent) -> str:
        """Describe the outcome of the tensor that belongs in a slot."""
        key = (truth.parameter.name, truth.part)
        if key in self.lost:
            source, resolved = self.lost[key]
            return f"{shown(source.name)} belongs there and is {resolved.outcome}"
        return self._places.get(key, f"the checkpoint has no {key[1]} of {key[0]}")

    @cached_property
    def _places(self) -> Mapping[Identity, str]:
        """Describe, for every placed tensor by identity, where it goes."""
        return {
            (source.parameter.name, source.part): f"{shown(source.name)} belongs there and goes to"
            f" {shown(target)}"
            for target, by_expert in self.placed.items()
            for group in by_expert.values()
            for source, _ in group
            if source.parameter is not None
        }

    def _conversion_of(self, source: SourceTensor) -> MatchedConversion | None:
        if not self._converts or source.parameter is None or self._inventory is None:
            return None
        if source.inside is not None:
            return None  # a fused tensor is loaded as it is
        name = source.parameter.name
        if name not in self.converted:
            self.converted[name] = self._conversions.matching(self._inventory.by_name[name])
        return self.converted[name]

    def _place(self, source: SourceTensor, *, needed: bool) -> NameOutcome:
        """Route one source; `needed` False: a conversion does not read it."""
        resolved = self._rules.resolve(source.name)
        if resolved.outcome is NameOutcome.PLACED:
            expert, slot = resolved.expert, resolved.slot
            # A stored fused tensor goes to the engine's fused parameter slot by slot.
            if source.inside is not None and slot is None and source.parameter is not None:
                expert, slot = source.parameter.expert, source.order
            by_expert = self.placed.setdefault(resolved.target, {})
            by_expert.setdefault(expert, []).append(RoutedTensor(source, slot))
        elif resolved.outcome is NameOutcome.ELSEWHERE:
            reason = self._reasons[resolved.by]
            self._findings.elsewhere(resolved.by, reason)
            if source.parameter is not None:
                self.lost[source.parameter.name, source.part] = (source, resolved)
        elif source.parameter is None:
            self._findings.add_unknown(source, resolved)
        elif needed:
            self.lost[source.parameter.name, source.part] = (source, resolved)
        return resolved.outcome


# --------------------------------------------------------------------------------------------------
# Boxes of stored tensors that any rank reads. Experts of a stack that are read alike are kept as
# one range of numbers, and expanded only when one of them is looked up.

SlotKey = tuple[str, int | None]  # a parameter by name, and the slot that a rule names


class Reads:
    """The boxes that ranks read, merged over ranks."""

    def __init__(self) -> None:
        self._alone: dict[tuple[str, Box | None], tuple[Box, ...]] = {}
        self._alike: dict[SlotKey, dict[range | None, tuple[Box, ...]]] = {}
        self._by_expert: dict[SlotKey, dict[int | None, tuple[Box, ...]]] = {}

    def add(self, source: SourceTensor, box: Box) -> None:
        """Add one box of one tensor."""
        key = source.name, source.inside
        known = self._alone.get(key, ())
        if box not in known:
            self._alone[key] = (*known, box)

    def add_range(self, slot: SlotKey, experts: range | None, box: Box) -> None:
        """Add the same box of the tensors of a range of experts; None: of the one tensor."""
        by_range = self._alike.setdefault(slot, {})
        known = by_range.get(experts, ())
        if box not in known:
            by_range[experts] = (*known, box)

    def missing(self, target: str, expert: int | None, placed: RoutedTensor) -> tuple[Box, ...]:
        """Return the boxes of a placed tensor that no rank reads."""
        source = placed.source
        alike = self._alike_of((target, placed.slot)).get(expert, ())
        alone = self._alone.get((source.name, source.inside), ())
        return cover(source.shape, alike + alone).missing

    def _alike_of(self, slot: SlotKey) -> dict[int | None, tuple[Box, ...]]:
        if slot not in self._by_expert:
            found: dict[int | None, tuple[Box, ...]] = {}
            for experts, boxes in self._alike.get(slot, {}).items():
                # Ranks have the same experts or none in common, so no number comes twice.
                found.update(dict.fromkeys((None,) if experts is None else experts, boxes))
            self._by_expert[slot] = found
        return self._by_expert[slot]


# --------------------------------------------------------------------------------------------------
# All writes to one parameter of a rank, both right and wrong ones. Experts of a stack with the same
# slot, extents and dtype are checked once. `whole` accepts a parameter in one step where all of its
# writes are alike and right: a full-size model has two million writes. `writes` lists them one by
# one, and both ways must agree.


class Transfer(NamedTuple):
    """A box of a stored tensor that is written to a box of a parameter.

    `made_from`: the stored tensors of a converted source, which has no bytes of its own.
    """

    source: str
    source_box: Box
    target_box: Box
    made_from: tuple[str, ...] = ()


class AttemptedWrite(NamedTuple):
    """An attempted write. `taken`: the box of the source; `wrong`: the rule that it breaks."""

    source: SourceTensor
    key: Key | None
    member: Member
    taken: Box
    wrong: WrongWrite | None

    @property
    def arrives(self) -> bool:
        """Whether bytes reach the parameter, right or wrong."""
        return self.wrong is None or self.wrong.written


class EqualWrites(NamedTuple):
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
        derived = loader_map.derived
        self._cuts = {} if derived is None else derived.cuts
        self._uniform: dict[str, tuple[RoutedTensor, ...]] = {}
        self._belongs: dict[str, tuple[object, range | None, bool]] = {}

    def fill_once(self, held: RankTargets, target: TargetParameter) -> tuple[EqualWrites, ...]:
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
            taken, wrong = self._judged(held, target, RoutedTensor(source, slot), member)
            if wrong is not None:
                return ()
            alike.append(EqualWrites(slot, experts, taken))
        return tuple(alike)

    def _uniform_of(self, target: TargetParameter) -> tuple[RoutedTensor, ...]:
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

    def _belong(self, held: RankTargets, target: TargetParameter, experts: range | None) -> bool:
        """Return whether every source belongs in its slot; cached for ranks that are alike."""
        known = self._belongs.get(target.name)
        # Ranks that hold equal parameters share one list, so identity is enough.
        if known is None or known[0] is not held.parameters or known[1] != experts:
            known = held.parameters, experts, self._compare(held, target, experts)
            self._belongs[target.name] = known
        return known[2]

    def _compare(self, held: RankTargets, target: TargetParameter, experts: range | None) -> bool:
        placed = self.routes.placed[target.name]
        for local, expert in ((None, None),) if experts is None else enumerate(experts):
            if expert not in placed:
                return False
            for source, slot in placed[expert]:
                key, member = _member(target, local, slot)
                position = member.position
                if key is None or member is NO_SLOT:
                    return False
                if position is not None and source.parameter is not held.parameters[position]:
                    return False
        return True

    def transfers(self, held: RankTargets, target: TargetParameter) -> tuple[Transfer, ...]:
        """Return the transfers that reach a parameter."""
        return tuple(
            Transfer(
                write.source.name,
                write.source.stored(write.taken),
                write.member.box,
                write.source.made_from,
            )
            for write in self.writes(held, target)
            if write.arrives
        )

    def writes(self, held: RankTargets, target: TargetParameter) -> Iterator[AttemptedWrite]:
        """Yield every attempted write."""
        experts = target.shape[0] if target.stacked else 0
        # What is alike for all experts of a stack is judged once.
        alike: dict[tuple[object, ...], tuple[Box, WrongWrite | None]] = {}
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
                    judged = self._judged(held, target, RoutedTensor(source, slot), member)
                    yield AttemptedWrite(source, key, member, *judged)
                    continue
                kind = (key and key[1], source.shape, source.dtype, source.part)
                found = alike.get(kind)
                if found is None:
                    found = self._judged(held, target, RoutedTensor(source, slot), member)
                    alike[kind] = found
                yield AttemptedWrite(source, key, member, *found)

    def _judged(
        self, held: RankTargets, target: TargetParameter, placed: RoutedTensor, member: Member
    ) -> tuple[Box, WrongWrite | None]:
        source, cut = placed.source, self._cuts.get(target.name)
        if cut is None or self.splits.rule_for(target.name) is not None:
            taken = piece(source.shape, self.splits.rule_for(target.name), self._tp, held.tp_rank)
        else:
            slot = placed.slot or 0
            pieces = cut.pieces[slot] if slot < len(cut.pieces) else self._tp
            number = held.tp_rank * pieces // self._tp
            taken = piece(source.shape, Split("cut", cut.dim), pieces, number)
        truth = held.truth(member)
        return taken, judge_write(source, taken, target.dtype, member, truth)


def _kind(placed: RoutedTensor) -> tuple[object, ...]:
    source = placed.source
    return placed.slot, source.shape, source.dtype, source.part


def _member(
    target: TargetParameter, local: int | None, slot: int | None
) -> tuple[Key | None, Member]:
    """Return the slot that a tensor is written to; without a number, the whole parameter."""
    if slot is not None:
        key = (local, slot)
        return key, target.members.get(key, NO_SLOT)
    if len(target.members) == 1:
        return next(iter(target.members.items()))
    return None, Member(Box.whole(target.shape))
