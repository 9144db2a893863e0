"""A turn in pieces: however it is cut, it gives what the whole gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.chat import encode_v4
from degarble.harness.chat.chat import Chat
from degarble.harness.chat.conversation import CHAT, THINKING, Style
from degarble.harness.chat.dsml import ToolCall, write_calls
from degarble.harness.chat.special_tokens import EOS
from degarble.harness.serve.replies import CONTENT, REASONING, StreamParser

if TYPE_CHECKING:
    from collections.abc import Sequence

CALL = ToolCall("weather", '{"town": "Kiel", "days": 2}')
CALLS = write_calls([CALL, CALL], "tool_calls", lenient=False)


def parted(
    pieces: Sequence[str], mode: str = CHAT
) -> tuple[dict[str, str], tuple[ToolCall, ...], str | None]:
    parting = StreamParser(Chat(encode_v4, Style(mode)))
    found = [parting.add(piece) for piece in pieces]
    found.append(parting.end())
    said: dict[str, str] = {}
    for piece in found:
        for where, text in piece.texts.items():
            said[where] = said.get(where, "") + text
    return said, found[-1].calls, found[-1].problem


@pytest.mark.parametrize(
    ("mode", "text", "said", "calls"),
    [
        (CHAT, "w1 w2", {CONTENT: "w1 w2"}, 0),
        (CHAT, "a < b\n\n<｜DS", {CONTENT: "a < b\n\n<｜DS"}, 0),
        (CHAT, "look" + CALLS, {CONTENT: "look"}, 2),
        (CHAT, CALLS, {}, 2),
        (THINKING, "hm</think>so", {REASONING: "hm", CONTENT: "so"}, 0),
        (THINKING, "hm</think>" + CALLS, {REASONING: "hm"}, 2),
        (THINKING, "</think>so" + CALLS, {CONTENT: "so"}, 2),
    ],
)
def test_a_turn_is_parted_however_it_is_cut(
    mode: str, text: str, said: dict[str, str], calls: int
) -> None:
    for size in (1, 2, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parted(pieces, mode) == (said, (CALL,) * calls, None), size


@pytest.mark.parametrize(
    ("mode", "text", "said", "problem"),
    [
        (THINKING, "never done", {REASONING: "never done"}, "an end of thinking"),
        (CHAT, "a<think>b", {CONTENT: "a<think>b"}, "without marks"),
        (CHAT, "x" + CALLS[:-20], {CONTENT: "x" + CALLS[:-20]}, "tool calls, character"),
        (
            THINKING,
            "hm</think>x" + CALLS[:-20],
            {REASONING: "hm", CONTENT: "x" + CALLS[:-20]},
            "tool calls, character",
        ),
        (CHAT, f"a{EOS}b", {CONTENT: f"a{EOS}b"}, "at the end"),
    ],
)
def test_what_leaves_the_encoding_is_shown_as_it_is(
    mode: str, text: str, said: dict[str, str], problem: str
) -> None:
    for size in (1, 5, len(text)):
        found = parted([text[at : at + size] for at in range(0, len(text), size)], mode)
        assert found[:2] == (said, ())
        assert problem in (found[2] or "")


def test_nothing_of_a_mark_is_shown_before_it_is_certain() -> None:
    parting = StreamParser(Chat(encode_v4, Style(THINKING)))
    assert parting.add("hm</thi").texts == {REASONING: "hm"}
    assert parting.add("s").texts == {REASONING: "</this"}
    assert parting.add("</think>so\n\n<").texts == {CONTENT: "so"}
