"""Slots of decoding tokens: what is refused, and the rule on integers."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import CHOSEN, ENTRIES, KINDS, WINDOW, SlotsProblem


def test_refuses_by_name() -> None:
    with pytest.raises(UnknownName, match="kind of slots"):
        SlotsProblem(1, 4, "neighbours", 1, 8)
    with pytest.raises(InvalidArgument, match="width of a window = 9"):
        SlotsProblem(1, 9, WINDOW, 1, 8)
    for name, told in (
        ("width", {"width": 0}), ("columns", {"columns": 0}), ("ratio", {"ratio": 0}),
        ("sequences", {"sequences": 0}), ("tokens", {"tokens": -1}),
    ):  # fmt: skip
        given = {"tokens": 1, "width": 4, "kind": ENTRIES, "sequences": 1, "columns": 8} | told
        with pytest.raises(ShapeMismatch, match=name):
            SlotsProblem(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [0, 1, 126, 127, 128, 500])
def test_a_window_ends_with_the_token_and_never_shares_a_column(position: int) -> None:
    numbers = [facts.number_of(WINDOW, place, position, 128) for place in range(128)]
    assert numbers[-1] == position
    end = facts.end_of(WINDOW, position, 128, 1)
    seen = [each for each in numbers if 0 <= each < end]
    assert seen == list(range(max(0, position - 127), position + 1))
    assert len({facts.column_of(WINDOW, each, 128) for each in seen}) == len(seen)


def test_entries_are_visible_from_their_last_token_on() -> None:
    seen = [facts.end_of(ENTRIES, position, 100, 4) for position in range(9)]
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert facts.end_of(ENTRIES, 10_000, 100, 4) == 100
    assert facts.end_of(CHOSEN, 0, 100, 4) == 100
    assert all(facts.number_of(kind, 7, 90, 8) == 7 for kind in KINDS if kind != WINDOW)


def test_parts_of_a_list_cover_it() -> None:
    assert SlotsProblem(3, 129, ENTRIES, 3, 200).blocks == (3, 2)
    assert SlotsProblem(0, 1, ENTRIES, 3, 200).blocks == (0, 1)
