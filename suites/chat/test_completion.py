"""Turns taken apart: reasoning, content, calls; and what left the encoding, by name."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.chat import AssistantTurn, parse
from degarble.harness.chat.conversation import CHAT, THINKING, Style
from degarble.harness.chat.dsml import ToolCall
from degarble.harness.chat.encode_v4 import CALLS, encode
from degarble.harness.chat.special_tokens import EOS
from degarble.suites.chat.talk_cases import user

CALL = ToolCall("f", '{"a": "x"}')


@pytest.mark.parametrize("mode", [CHAT, THINKING])
@pytest.mark.parametrize("calls", [(), (CALL,), (CALL, ToolCall("g", '{"b": [1, 2]}'))])
@pytest.mark.parametrize("content", ["", "hello\n\nworld"])
def test_what_was_encoded_is_read_back(
    mode: str, calls: tuple[ToolCall, ...], content: str
) -> None:
    turn = AssistantTurn(content, "because" if mode == THINKING else "", calls)
    style, question = Style(mode), [user("A")]
    text = encode([*question, turn.message()], style)
    said = text.removeprefix(encode(question, style))
    assert parse(said, mode, CALLS) == turn


def test_a_turn_that_was_cut_off() -> None:
    assert parse("half a sen", CHAT, CALLS, whole=False) == AssistantTurn("half a sen", "", ())
    with pytest.raises(InvalidArgument, match="at the end, once"):
        parse("half a sen", CHAT, CALLS)


@pytest.mark.parametrize(
    ("text", "mode", "match"),
    [
        (f"no end of thinking{EOS}", THINKING, "reasoning of the completion"),
        (f"\n\n<｜DSML｜tool_calls>\n</think>{EOS}", THINKING, "reasoning of the completion"),
        (f"a{EOS}b", CHAT, "turn of the completion"),
        (f"a{EOS}{EOS}", CHAT, "turn of the completion"),
        (f"a<think>b{EOS}", CHAT, "content of the completion"),
        (f"a｜DSML｜b{EOS}", CHAT, "content of the completion"),
        (f"<think>a</think>b{EOS}", THINKING, "reasoning of the completion"),
        (f"\n\n<｜DSML｜tool_calls>\nnothing{EOS}", CHAT, "tool calls, character 2"),
    ],
)
def test_what_left_the_encoding_is_refused_by_name(text: str, mode: str, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        parse(text, mode, CALLS)
