"""Wrong slots of a cache are identified by number, by age, or by their row in a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.recover.slots import CACHE, SlotRows, rules_of_slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Wrong = Callable[[Tensor, SlotRows], Tensor]

LENGTHS = ((9, 14), (10, 15), (20,), (11, 16, 21))
WRITTEN = ((9, 14), (1, 1), (20,), (1, 1, 1))


def calls(wrong: Wrong, *, both: bool = False) -> list[CallRecord]:
    """Return calls of a cache whose keys, or keys and values, are wrong."""
    found = []
    for number, (lengths, written) in enumerate(zip(LENGTHS, WRITTEN, strict=True)):
        ends = torch.tensor([0, *torch.tensor(written).cumsum(0).tolist()])
        positions = torch.cat(
            [torch.arange(n - w, n) for n, w in zip(lengths, written, strict=True)]
        )
        inputs = {"positions": positions, "token_offsets": ends}
        drawn = torch.Generator().manual_seed(number)
        right = {
            name: torch.randn(sum(lengths), 2, 4, generator=drawn) for name in ("key", "value")
        }
        rows = SlotRows.of(inputs, sum(lengths))
        assert rows is not None
        seen = dict(right)
        for name in ("key", "value") if both else ("key",):
            seen[name] = wrong(right[name], rows)
        found.append(CallRecord(inputs, seen, right, step=number))
    return found


def told(records: list[CallRecord], kind: str = CACHE) -> list[str]:
    context: Any = SimpleNamespace(component=SimpleNamespace(kind=kind))
    group = next(rules_of_slots(context, records), [])
    for variant in group:
        for record in records:
            known: Any = lambda _inputs, _weights, own=record: dict(own.expected)  # noqa: E731
            made = variant.apply(known)(record.inputs, {})
            assert all(torch.equal(made[name], seen) for name, seen in record.outputs.items())
    return [variant.words for variant in group]


def zeros(where: Callable[[SlotRows], Tensor]) -> Wrong:
    return lambda right, rows: torch.where(where(rows)[:, None, None], 0.0, right)


def before(right: Tensor, rows: SlotRows) -> Tensor:
    return right[rows.begin + (rows.slot - 1).clamp(min=0)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (before, ["all slots (key) hold the row of the slot 1 before"]),
        (zeros(lambda rows: rows.age == 1), ["the newest slot (key) holds zeros"]),
        (zeros(lambda rows: rows.slot == 5), ["slot 5 (key) holds zeros"]),
        (zeros(lambda rows: rows.slot % 4 == 3), ["every 4. slot from 3 on (key) holds zeros"]),
        (zeros(lambda rows: ~rows.new), ["the slots that earlier calls wrote (key) hold zeros"]),
        (zeros(lambda rows: (rows.slot > 2) & (rows.slot < 7)), ["slots 3 to 6 (key) hold zeros"]),
        (
            zeros(lambda rows: torch.arange(len(rows.slot)) == 12),
            ["row 12 of a call (key) holds zeros"],
        ),
        (zeros(lambda rows: (rows.slot * 7 + rows.age) % 5 == 1), []),
    ],
)
def test_slots_are_told_by_the_rule_that_separates_them(wrong: Wrong, words: list[str]) -> None:
    assert told(calls(wrong)) == words


def test_keys_and_values_with_the_same_slots_are_told_together() -> None:
    wrong = zeros(lambda rows: rows.slot == 5)
    assert told(calls(wrong, both=True)) == ["slot 5 holds zeros"]


def test_rows_of_no_slot_and_other_kinds_are_not_told() -> None:
    assert told(calls(lambda right, rows: right * (1 + (rows.slot == 5)[:, None, None]))) == []
    assert told(calls(zeros(lambda rows: rows.slot == 5)), "traced.attention") == []
    assert told(calls(lambda right, _rows: right)) == []
