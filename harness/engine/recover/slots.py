"""Say which slots of a cache hold something else, and what: zeros, or the rows of other slots.

What a cache gives are the rows of whole sequences, earlier calls' and this one's, one after the
other. A wrong row is looked up among the right ones. Then a rule is sought that separates wrong
from right slots in all calls: by their number, or by their age.

Shape letters: S rows of all sequences of a call, F numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.faults.model_faults import FaultVariant, with_outputs
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

CACHE = "traced.cache"
FEWEST = 3  # slots that are so many apart: any two are
FEWEST_ROWS = 2  # wrong rows
MOST_ROWS = 1 << 12
MOST_LISTED = 4
MOST_AWAY = 256  # slots
SAID = 3  # rules that hold as well


@operation
class SlotRule(NamedTuple):
    """Slots by number, or by age (1 is the newest): a range, and every so many of it."""

    feature: str
    low: int
    high: int | None = None
    step: int = 1

    @property
    def words(self) -> str:
        """Say which slots these are."""
        if self.feature == "age":
            return self._of_ages()
        if self.feature == "earlier":
            return "the slots that earlier calls wrote"
        if self.feature == "new":
            return "the slots that the call wrote"
        if self.step > 1:
            return f"every {self.step}. slot from {self.low} on"
        if self.high is None:
            return f"the slots from {self.low} on" if self.low else "all slots"
        kind = "row" if self.feature == "row" else "slot"
        of = " of a call" if self.feature == "row" else ""
        if self.low == self.high:
            return f"{kind} {self.low}{of}"
        return f"{kind}s {self.low} to {self.high}{of}"

    @property
    def is_one(self) -> bool:
        """Whether the words name a single slot."""
        return self.step > 1 or self.low == self.high

    def _of_ages(self) -> str:
        if self.low == 1:
            return "the newest slot" if self.high == 1 else f"the {self.high} newest slots"
        assert self.high is not None, "ages have an end"
        ends = (self.low - 1, self.high - 1)
        if ends[0] == ends[1]:
            return f"the slot {ends[0]} before the newest"
        return f"the slots {ends[0]} to {ends[1]} before the newest"

    def holds(self, rows: SlotRows) -> Tensor:
        """Mark the rows [S] for which it holds."""
        if self.feature in {"new", "earlier"}:
            return rows.new if self.feature == "new" else ~rows.new
        value = {"age": rows.age, "row": torch.arange(len(rows.slot))}.get(self.feature, rows.slot)
        inside = (value >= self.low) & ((value - self.low) % self.step == 0)
        return inside if self.high is None else inside & (value <= self.high)


@dataclass(frozen=True, eq=False)
class SlotRows:
    """What each row [S] of a cache's output is."""

    slot: Tensor
    age: Tensor
    new: Tensor
    begin: Tensor  # row at which its sequence begins
    length: Tensor  # of its sequence

    @classmethod
    def of(cls, inputs: Tensors, count: int) -> SlotRows | None:
        """Read them off positions and offsets; None where the rows are not whole sequences."""
        if not {"positions", "token_offsets"} <= inputs.keys():
            return None
        spans = [(a, b) for a, b in pairwise(inputs["token_offsets"].tolist()) if b > a]
        lengths = [int(inputs["positions"][b - 1]) + 1 for _, b in spans]
        if sum(lengths) != count:
            return None
        parts, begin = [], 0
        for (a, b), length in zip(spans, lengths, strict=True):
            slot = torch.arange(length)
            same = torch.ones_like(slot)
            parts.append((slot, length - slot, slot >= length - (b - a), begin * same,
                          length * same))  # fmt: skip
            begin += length
        return cls(*(torch.cat(side) for side in zip(*parts, strict=True))) if parts else None


@operation
class SlotContent(NamedTuple):
    """What a slot holds: zeros, or the row of a slot so many away of the same sequence."""

    away: int | None = None

    @property
    def words(self) -> str:
        """Say what the slots hold."""
        if self.away is None:
            return "zeros"
        side = "after" if self.away > 0 else "before"
        return f"the row of the slot {abs(self.away)} {side}"

    def made(self, right: Tensor, rows: SlotRows) -> Tensor:
        """Return what each row would be; its own where there is no such slot."""
        if self.away is None:
            return torch.zeros_like(right)
        source = rows.slot + self.away
        inside = (source >= 0) & (source < rows.length)
        return right[rows.begin + torch.where(inside, source, rows.slot)]


def rules_of_slots(
    context: ComponentContext, calls: Sequence[CallRecord]
) -> Iterator[list[FaultVariant]]:
    """Yield groups of rules that give the wrong rows of all calls, and no other."""
    if context.component.kind != CACHE:
        return
    wrong: dict[str, list[tuple[Tensor, Tensor, SlotRows, Tensor]]] = {}
    for record in calls:
        for name, right in record.expected.items():
            seen = record.outputs.get(name)
            rows = SlotRows.of(record.inputs, len(right))
            if seen is None or seen.shape != right.shape or rows is None or len(right) > MOST_ROWS:
                return
            bad = (seen != right).flatten(1).any(1)
            sides = (seen.flatten(1), right.flatten(1), rows, bad)
            wrong.setdefault(name, []).append(sides)
    struck = {name: own for name, own in wrong.items() if any(bool(o[3].any()) for o in own)}
    if not struck or sum(int(o[3].sum()) for own in struck.values() for o in own) < FEWEST_ROWS:
        return
    names = tuple(struck)
    every = [one for own in struck.values() for one in own]
    for content in _contents(every):
        rules = list(_rules(content, every))
        if rules:
            yield [_variant(names, content, rule, len(wrong)) for rule in rules[:SAID]]


def written_rows(record: CallRecord, count: int) -> Tensor | None:
    """Mark the rows [S] of a cache that the call wrote; None where nobody knows."""
    rows = SlotRows.of(record.inputs, count)
    return None if rows is None else rows.new


@operation
def written_otherwise(
    name: str, of: Callable[[Tensor], Tensor], inputs: Tensors, outputs: Tensors
) -> Tensors:
    """Return what a cache gives, with the rows that the call wrote changed as a matrix."""
    right = outputs[name]
    rows = SlotRows.of(inputs, len(right))
    if rows is None:
        return outputs
    made, new = right.clone(), right[rows.new]
    changed = of(new.reshape(-1, right.shape[-1]).double())
    made[rows.new] = changed.reshape(new.shape).to(right.dtype)
    return {**outputs, name: made}


def _variant(
    names: tuple[str, ...], content: SlotContent, rule: SlotRule, outputs: int
) -> FaultVariant:
    what = "" if len(names) == outputs else f" ({' and '.join(names)})"
    words = f"{rule.words}{what} {'holds' if rule.is_one else 'hold'} {content.words}"
    return FaultVariant(words, with_outputs(partial(slots_changed, names, content, rule)))


def _contents(every: Sequence[tuple[Tensor, Tensor, SlotRows, Tensor]]) -> Iterator[SlotContent]:
    """Yield what the first wrong row may hold, of what all wrong rows hold."""
    seen, right, rows, bad = next(one for one in every if bool(one[3].any()))
    at = int(bad.nonzero()[0])
    found = []
    if not bool(seen[at].any()):
        found.append(SlotContent())
    own = (rows.begin == rows.begin[at]) & (right == seen[at]).all(1)
    away = (rows.slot[own] - rows.slot[at]).tolist()
    found += [SlotContent(by) for by in sorted(away, key=abs) if 0 < abs(by) <= MOST_AWAY]
    for content in found:
        if all(bool((content.made(r, where)[b] == s[b]).all()) for s, r, where, b in every):
            yield content


def _rules(
    content: SlotContent, every: Sequence[tuple[Tensor, Tensor, SlotRows, Tensor]]
) -> Iterator[SlotRule]:
    """Yield the rules that mark all wrong rows, and no right one that would show it."""
    shows = [(content.made(r, where) != r).any(1) for _, r, where, _ in every]
    slots = sorted({at for _, _, where, b in every for at in where.slot[b].tolist()})
    ages = sorted({at for _, _, where, b in every for at in where.age[b].tolist()})
    lines = sorted({at for *_, b in every for at in b.nonzero().flatten().tolist()})
    step = gcd(*(at - slots[0] for at in slots))
    tried = [
        SlotRule("slot", 0), SlotRule("new", 0), SlotRule("earlier", 0),
        SlotRule("age", ages[0], ages[-1]), SlotRule("slot", slots[0], slots[-1]),
        SlotRule("slot", slots[0]), SlotRule("row", lines[0], lines[-1]),
    ]  # fmt: skip
    if step > 1 and len(slots) >= FEWEST:
        tried.append(SlotRule("slot", slots[0] % step, None, step))
    for rule in tried:
        if all(
            torch.equal(rule.holds(where) & shown, b)
            for (_, _, where, b), shown in zip(every, shows, strict=True)
        ):
            yield rule
            if rule == SlotRule("slot", 0):
                return  # others mark what shows it alone


@operation
def slots_changed(
    names: tuple[str, ...],
    content: SlotContent,
    rule: SlotRule,
    inputs: Tensors,
    outputs: Tensors,
) -> Tensors:
    """Return what a cache gives with other rows in some slots."""
    made = dict(outputs)
    for name in names:
        right = outputs[name]
        rows = SlotRows.of(inputs, len(right))
        if rows is not None:
            where = rule.holds(rows).reshape(-1, *[1] * (right.ndim - 1))
            made[name] = torch.where(where, content.made(right, rows), right)
    return made
