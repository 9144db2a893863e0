"""Find rows of an output that an earlier call wrote, by their numbers.

The calls of a component stand in one record, one after the other. A wrong row is looked up among
the rows of the calls before; what one row suggests has to give all wrong rows and no other one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from degarble.harness.engine.faults.model_faults import FaultVariant, with_outputs
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord
    from degarble.harness.engine.recover.maps import Sides

FEWEST = 4  # numbers that differ
MOST_BACK = 4  # calls
MOST_SOURCES = 16  # rows with the numbers of the first wrong one
MISSED = 1e-3  # of the numbers of a row, that roundings may move


@operation
class EarlierRows(NamedTuple):
    """The first rows of calls, from one call on, hold rows of the call so many before."""

    rows: tuple[int, ...]  # of each call
    most: int
    back: int
    shift: int  # rows further down than their own
    first: int  # call from which on it holds
    last: int | None  # call with which it ends

    def places(self) -> Tensor:
        """Return the row that each row holds; its own where it holds no other."""
        begins = [0, *accumulate(self.rows)]
        where = torch.arange(begins[-1])
        for call in range(max(self.first, self.back), len(self.rows)):
            if self.last is not None and call > self.last:
                break
            other = call - self.back
            own = min(self.most, self.rows[call], self.rows[other] - self.shift)
            if own > 0:
                begin = begins[other] + self.shift
                where[begins[call] : begins[call] + own] = torch.arange(begin, begin + own)
        return where


def earlier_rows(sides: Sequence[Sides], record: CallRecord) -> Iterator[FaultVariant]:
    """Yield the rules by which wrong rows hold those of calls before."""
    rows = record.rows
    wrong = [each for each in sides if _differs(each).any()]
    if len(rows) < 2 or len(wrong) != 1 or len(record.expected[wrong[0].output]) != sum(rows):
        return
    side = _by_token(wrong[0], sum(rows))
    for rule in _rules(side, rows):
        change = partial(_written_before, side.output, rule)
        open_above = _gives(side, rule._replace(most=rule.most + 1))
        words = f"{'at least ' if open_above else ''}{_words(rule)}"
        yield FaultVariant(words, with_outputs(change))


def _by_token(side: Sides, count: int) -> Sides:
    """Return a row for each token, its heads side by side."""
    seen, right, allowed = (x.reshape(count, -1) for x in (side.seen, side.right, side.allowed))
    return replace(side, seen=seen, right=right, allowed=allowed)


def _differs(side: Sides) -> Tensor:
    return ~side.equal(side.seen, side.right, side.allowed)


def _rules(side: Sides, rows: tuple[int, ...]) -> Iterator[EarlierRows]:
    unlike = _differs(side)
    struck = unlike.any(1)
    if int(unlike.sum()) < FEWEST or not bool(side.seen[struck].isfinite().all()):
        return
    begins = [0, *accumulate(rows)]
    call_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    within = torch.arange(len(struck)) - torch.tensor(begins)[call_of]
    at = struck.nonzero().flatten()
    count = int(within[at].max()) + 1
    one = int(at[0])
    first, last = int(call_of[at[0]]), int(call_of[at[-1]])
    near = side.equal(side.seen[one], side.right[: begins[first]], side.allowed[one])
    alike = (near.double().mean(1) >= 1 - MISSED).nonzero().flatten().tolist()
    tried: dict[tuple[int, int], None] = {}
    for source in alike[::-1][:MOST_SOURCES]:
        back = first - int(call_of[source])
        shift = int(within[source]) - int(within[one])
        if back <= MOST_BACK and shift >= 0:
            tried[shift, back] = None
    for shift, back in sorted(tried):
        rule = EarlierRows(rows, count, back, shift, first, last)
        if not _gives(side, rule):
            continue
        # Rows that are the same in both calls do not tell when it begins and ends.
        spans = [(back, None), (first, None), (back, last)]
        wider = (rule._replace(first=begin, last=end) for begin, end in spans)
        yield next((each for each in wider if _gives(side, each)), rule)


def _gives(side: Sides, rule: EarlierRows) -> bool:
    made = side.right[rule.places()]
    given = side.equal(side.seen, made, side.allowed).double().mean(1) >= 1 - MISSED
    return bool(given.all())


def _words(rule: EarlierRows) -> str:
    which = "row" if rule.most == 1 else f"{rule.most} rows"
    of = "the call before" if rule.back == 1 else f"the call {rule.back} before"
    down = f", {rule.shift} further down" if rule.shift else ""
    when = ""
    if rule.last is not None:
        when = f", in calls {rule.first} to {rule.last} of those recorded"
        if rule.first == rule.last:
            when = f", in call {rule.first} of those recorded alone"
    elif rule.first > rule.back:
        when = f", from call {rule.first} of those recorded on"
    hold = "holds" if rule.most == 1 else "hold"
    return f"the first {which} of each call {hold} what {of} wrote there{down}{when}"


@operation
def _written_before(
    output: str, rule: EarlierRows, _inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    right = outputs[output]
    if len(right) != sum(rule.rows):
        return outputs  # of other calls: what they wrote is not known
    return {**outputs, output: right[rule.places()]}
