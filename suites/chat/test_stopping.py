"""Stops, wherever the pieces of a text are cut."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.tokenizer import Stops


def through(text: str, stops: list[str], size: int) -> tuple[str, str | None]:
    made, out = Stops(stops), ""
    for begin in range(0, len(text), size):
        out += made.add(text[begin : begin + size])
        assert not any(stop in out for stop in stops)
        if made.hit is not None:
            return out, made.hit
    return out + made.rest(), None


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "shown", "hit"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", None),
        ("aaab", ["aab"], "a", "aab"),
        ("ends with a beginning: tw", ["two"], "ends with a beginning: tw", None),
        ("x\n\nUser: y", ["\nUser:", "User"], "x\n\n", "User"),
        ("abc", ["c", "bc"], "a", "bc"),
    ],
)
def test_nothing_of_a_stop_is_shown(
    text: str, stops: list[str], shown: str, hit: str | None, size: int
) -> None:
    assert through(text, stops, size) == (shown, hit)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--stop"):
        Stops(["x", ""])
