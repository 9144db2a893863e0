"""Find rows of an output that an earlier call wrote by their numbers."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.model_faults import CallRecord
from degarble.harness.engine.recover.earlier_calls import earlier_rows
from degarble.harness.engine.recover.maps import Sides

ROWS = (7, 2, 5, 3)


def sides(seen: torch.Tensor, right: torch.Tensor) -> list[Sides]:
    return [Sides("out", seen, right, torch.full_like(right, 1e-9))]


def record(seen: torch.Tensor, right: torch.Tensor) -> CallRecord:
    return CallRecord({}, {"out": seen}, {"out": right}, rows=ROWS)


def stale(right: torch.Tensor, most: int, first: int = 1) -> torch.Tensor:
    seen, parts = right.clone(), right.split(ROWS)
    made = seen.split(ROWS)
    for call in range(first, len(ROWS)):
        count = min(most, ROWS[call], ROWS[call - 1])
        made[call][:count] = parts[call - 1][:count]
    return seen


def right() -> torch.Tensor:
    return torch.randn(sum(ROWS), 6, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize(
    ("most", "first", "words"),
    [
        (1, 1, "the first row of each call holds what the call before wrote there"),
        (2, 1, "the first 2 rows of each call hold what the call before wrote there"),
        (1, 2, "wrote there, from call 2 of those recorded on"),
    ],
)
def test_rows_of_the_call_before_are_told(most: int, first: int, words: str) -> None:
    seen = stale(right(), most, first)
    (variant,) = earlier_rows(sides(seen, right()), record(seen, right()))
    assert words in variant.words
    made = variant.apply(lambda _inputs, _weights: {"out": right()})({}, {})
    assert torch.equal(made["out"], seen)


def test_as_many_rows_as_two_calls_have_are_a_lower_bound() -> None:
    rows, good = (3, 3), right()[:6]
    seen = torch.cat((good[:3], good[:3]))
    calls = CallRecord({}, {"out": seen}, {"out": good}, rows=rows)
    (variant,) = earlier_rows(sides(seen, good), calls)
    assert variant.words.startswith("at least the first 3 rows")


@pytest.mark.parametrize("call", [1, 3])
def test_equal_rows_do_not_tell_when_it_begins_or_ends(call: int) -> None:
    """A condition is stated only where the rows of other calls differ from those before."""
    good = right()
    parts = good.split(ROWS)
    parts[call][:2] = parts[call - 1][:2]
    seen = stale(good, 2)
    (variant,) = earlier_rows(sides(seen, good), record(seen, good))
    assert variant.words == "the first 2 rows of each call hold what the call before wrote there"


def test_equal_rows_do_not_tell_how_many_they_are() -> None:
    good = right()
    for call in (1, 2, 3):
        good.split(ROWS)[call][1] = good[1]
    seen = stale(good, 1)
    (variant,) = earlier_rows(sides(seen, good), record(seen, good))
    assert variant.words.startswith("at least the first row of each call")


def test_rows_of_no_call_are_not_told() -> None:
    seen = stale(right(), 2)
    seen[-1] += 1
    assert not list(earlier_rows(sides(seen, right()), record(seen, right())))


def test_other_calls_stay_as_they_are() -> None:
    seen = stale(right(), 2)
    (variant,) = earlier_rows(sides(seen, right()), record(seen, right()))
    other = torch.ones(4, 6)
    made = variant.apply(lambda _inputs, _weights: {"out": other})({}, {})
    assert torch.equal(made["out"], other)
