"""Recover which whole numbers were used or chosen instead: experts, entries, tokens, positions."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import CANNOT_RUN
from degarble.harness.engine.diagnose.trial import distance, is_by_row, make, rows_of
from degarble.harness.engine.faults.model_faults import FaultVariant, with_inputs, with_outputs
from degarble.harness.engine.recover.differences import by_value
from degarble.harness.engine.recover.stated import operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from degarble.harness.engine.faults.model_faults import CallRecord, ComponentContext

    Tensors = Mapping[str, Tensor]

MOST_READ = 4  # numbers that became others
MOST_STRUCK = 6  # values among which the changed one is looked for
MOST_VALUES = 1 << 10  # that a number may have become
MOST_TRIED = 24  # rows of a trial
FEWEST = 2  # rows that show each change
FEWEST_LOST = 4  # choices of what is never chosen
_LEFT = 1e-3  # of the difference
_ROLLS = (1, -1, 2, -2)


# ---- chosen --------------------------------------------------------------------------------------


def other_choices(record: CallRecord) -> Iterator[FaultVariant]:
    """Yield numbers that stand for others wherever they are chosen, in any order of a row."""
    for name, right in record.expected.items():
        seen = record.outputs.get(name)
        if right.is_floating_point() or right.ndim != 2 or right.dtype is torch.uint8:
            continue
        read = {} if seen is None or seen.shape != right.shape else _read(seen, right)
        if read:
            words = " and ".join(f"{old} is {new}" for old, new in sorted(read.items()))
            what = "" if len(record.expected) == 1 else f" of {name}"
            change = with_outputs(partial(choices_by, name, read))
            yield FaultVariant(f"in the choices{what} {words}, wherever it stands", change)


@operation
def choices_by(name: str, read: Mapping[int, int], _inputs: Tensors, outputs: Tensors) -> Tensors:
    """Return outputs of which one has other whole numbers."""
    right = outputs[name]
    return {**outputs, name: by_value(read, right)}


def _read(seen: Tensor, right: Tensor) -> dict[int, int]:
    """Return which number became which, read off what rows lost and gained; empty if unclear."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for made, own in zip(seen.tolist(), right.tolist(), strict=True):
        if made == own:
            continue
        lost, gained = Counter(own) - Counter(made), Counter(made) - Counter(own)
        if len(lost) == len(gained) == 1:
            votes[next(iter(lost))][next(iter(gained))] += 1
    read = {old: new.most_common(1)[0][0] for old, new in votes.items()}
    if len(read) > MOST_READ or sum(map(Counter.total, votes.values())) < FEWEST:
        return {}
    return read


def never_chosen(calls: Sequence[CallRecord]) -> Iterator[FaultVariant]:
    """Yield the last numbers, the first or a single one, if no row chooses what some rows had to.

    Their scores are taken for ones that lose against all others.
    """
    for name, right in calls[0].expected.items():
        if right.is_floating_point() or right.ndim != 2 or right.dtype is torch.uint8:
            continue
        pairs = [(call.outputs.get(name), call.expected[name]) for call in calls]
        scored = _scores(calls[0], right)
        if scored is None or any(a is None or a.shape != b.shape for a, b in pairs):
            continue
        seen = {number for made, _ in pairs if made is not None for number in _numbers(made)}
        wanted = {number for _, own in pairs for number in _numbers(own)}
        due = sorted(wanted - seen)
        lost = torch.isin(torch.cat([own.reshape(-1) for _, own in pairs]), torch.tensor(due))
        if not seen or int(lost.sum()) < FEWEST_LOST:
            continue
        if due[0] > max(seen):
            words = f"nothing after {max(seen)} is chosen, where {due[0]} had to be"
            none = partial(_loses, scored, max(seen) + 1, None)
        elif due[-1] < min(seen):
            words = f"nothing before {min(seen)} is chosen, where {due[-1]} had to be"
            none = partial(_loses, scored, 0, min(seen))
        elif len(due) == 1:
            words = f"{due[0]} is never chosen"
            none = partial(_loses, scored, due[0], due[0] + 1)
        else:
            continue
        yield FaultVariant(words, with_inputs(none))


def _numbers(chosen: Tensor) -> list[int]:
    """Return the different numbers that were chosen; -1 stands for none."""
    found: list[int] = chosen[chosen >= 0].unique().tolist()
    return found


def _scores(record: CallRecord, chosen: Tensor) -> str | None:
    """Return the only input that has a number for everything that may be chosen in each row."""
    found = [
        name
        for name, given in record.inputs.items()
        if given.is_floating_point() and given.ndim == 2 and len(given) == len(chosen)
        and chosen.numel() and given.shape[1] > int(chosen.max())
    ]  # fmt: skip
    return found[0] if len(found) == 1 else None


@operation
def _loses(name: str, begin: int, end: int | None, inputs: Tensors) -> Tensors:
    """Return inputs in which some columns are less than all others."""
    scores = inputs[name].clone()
    scores[:, begin:end] = -torch.inf
    return {**inputs, name: scores}


# ---- given ---------------------------------------------------------------------------------------


def other_numbers_given(context: ComponentContext, record: CallRecord) -> Iterator[FaultVariant]:
    """Yield inputs that are those of the row before, and whole numbers that stood for others."""
    if not is_by_row(context, record):
        return
    for name, given in record.inputs.items():
        if given.dtype is torch.uint8 or not given.ndim:
            continue
        for by in _ROLLS:
            side = "before" if by > 0 else "after"
            yield FaultVariant(
                f"each row has the {name} of the row {abs(by)} {side} it in its call, around the"
                " end",
                with_inputs(partial(rolled, name, by)),
            )
        if not given.is_floating_point():
            yield from _replaced(context, record, name)


@operation
def rolled(name: str, by: int, inputs: Tensors) -> Tensors:
    """Return inputs of which one has its rows moved."""
    return {**inputs, name: inputs[name].roll(by, 0)}


@operation
def numbers_by(name: str, read: Mapping[int, int], inputs: Tensors) -> Tensors:
    """Return inputs of which one has other whole numbers."""
    return {**inputs, name: by_value(read, inputs[name])}


def _replaced(context: ComponentContext, record: CallRecord, name: str) -> Iterator[FaultVariant]:
    given = record.inputs[name].flatten(1) if record.inputs[name].ndim > 1 else (
        record.inputs[name][:, None]
    )  # fmt: skip
    wrong = _wrong_rows(record)
    if wrong is None or not bool(wrong.any()):
        return
    struck, spared = given[wrong].unique().tolist(), set(given[~wrong].unique().tolist())
    few = [value for value in struck if value not in spared] or struck
    values = range(int(given.max()) + 1)
    if len(few) > MOST_STRUCK or len(values) > MOST_VALUES:
        return
    rows = wrong.nonzero().flatten()
    part = rows_of(record, rows[:: -(-len(rows) // MOST_TRIED)])
    before = distance(part.outputs, part.expected)
    # Where no row has the other number, one that is read as it cannot be told from an exchange.
    pairs = [(a, b, False) for a in few for b in values if a != b]
    pairs += [(a, b, True) for a in few for b in values if a < b or (b not in few and a != b)]
    for one, other, both in pairs:
        read = {one: other, other: one} if both else {one: other}
        words = f"{one} is {other}" + (f" and {other} is {one}" if both else "")
        variant = FaultVariant(
            f"among the numbers of the input {name} {words}, wherever it stands",
            with_inputs(partial(numbers_by, name, read)),
        )
        try:
            made = make(context, part, variant)
        except CANNOT_RUN:
            continue
        if made is not None and distance(part.outputs, made.outputs) <= _LEFT * before:
            yield variant


def _wrong_rows(record: CallRecord) -> Tensor | None:
    found = None
    for name, right in record.expected.items():
        seen = record.outputs.get(name)
        if seen is None or seen.shape != right.shape or not right.ndim:
            return None
        apart = (seen.double() != right.double()).flatten(1).any(1) if right.ndim > 1 else (
            seen != right
        )  # fmt: skip
        if right.is_floating_point() and right.itemsize > 1:
            gap = (seen.double() - right.double()).reshape(len(right), -1).norm(dim=1)
            apart = gap > 2.0**-7 * right.double().reshape(len(right), -1).norm(dim=1)
        found = apart if found is None else found | apart
    return found
