"""V3.2's encoding as golden strings, rule by rule of the facts (section 24)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.chat.conversation import CHAT, THINKING, Style
from degarble.harness.chat.encode_v32 import encode
from degarble.suites.chat.talk_cases import (
    TOOL,
    TOOLS_TEXT,
    WORDINGS,
    answer,
    call,
    result,
    system,
    user,
)

if TYPE_CHECKING:
    from degarble.harness.chat.conversation import Message

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TALK = Style(CHAT, wordings=WORDINGS)
THINK = Style(THINKING, wordings=WORDINGS)
HISTORY = [system("S"), user("A"), answer("B", reasoning_content="r1"), user("C")]
CALLED = answer(
    "", tool_calls=[call("1", "f", '{"a": "x"}'), call("2", "g", '{"b": 2}')],
    reasoning_content="need",
)  # fmt: skip
CALL_TEXT = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n'
    '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)


def test_the_assistants_mark_belongs_to_the_question() -> None:
    assert encode([user("Hi")], TALK) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert encode([user("Hi")], THINK) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"


def test_content_stands_in_front_of_the_calls() -> None:
    said = encode([user("A"), {**CALLED, "content": "B"}], TALK)
    assert said == f"{BOS}<｜User｜>A<｜Assistant｜></think>B{CALL_TEXT}{EOS}"
    with pytest.raises(InvalidArgument, match="content of message 2"):
        encode([user("A"), CALLED, result("1", ["x"])], TALK)


def test_reasoning_before_the_last_question_is_dropped_or_kept_out() -> None:
    turns = f"{BOS}S<｜User｜>A<｜Assistant｜></think>B{EOS}<｜User｜>C<｜Assistant｜>"
    assert encode(HISTORY, TALK) == f"{turns}</think>"
    assert encode(HISTORY, THINK) == f"{turns}<think>"
    # Only what follows the last question shows its reasoning, also where nothing is dropped.
    assert encode(HISTORY, replace(THINK, drop_thinking=False)) == f"{turns}<think>"


def test_calls_and_their_results() -> None:
    messages = [user("A"), CALLED, result("1", "one"), result("2", "two")]
    results = (
        "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>"
    )
    assert encode(messages, THINK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜><think>need</think>{CALL_TEXT}{EOS}{results}\n\n<think>"
    )
    assert encode(messages, TALK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜></think>{CALL_TEXT}{EOS}{results}\n\n</think>"
    )
    open_ended = encode(messages[:3], TALK)
    assert open_ended.endswith("\n\n<function_results>\n<result>one</result>")


def test_developers_words_stand_behind_their_blocks() -> None:
    developer = {
        "role": "developer", "content": "D", "tools": [TOOL], "response_format": {"a": 1},
    }  # fmt: skip
    assert encode([developer], THINK) == (
        f"{BOS}<｜User｜>\n\n{TOOLS_TEXT}\n\n## Response Format:\n\nObey:\n"
        '{"a": 1}\n\n# The user\'s message is: D<｜Assistant｜><think>'
    )
    assert encode([developer, user("C")], THINK) == f"{BOS}<｜User｜>C<｜Assistant｜><think>"


def test_a_prefix_is_continued() -> None:
    assert encode([user("A"), answer("Be", prefix=True)], TALK).endswith("</think>Be")


def test_what_was_said_before_decides_and_is_left_out() -> None:
    for style in (TALK, THINK):
        assert encode(HISTORY, style).endswith(encode(HISTORY[3:], style, context=HISTORY[:3]))
    developer: list[Message] = [{"role": "developer", "content": "D"}]
    assert encode([user("C")], THINK, context=developer) == "<｜User｜>C<｜Assistant｜><think>"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([user("A"), answer("B")], "neither reasoning nor tool calls"),
        ([user("A"), result("1", "x")], "one for each call"),
        ([user("A"), CALLED, *[result("1", "x")] * 3], "message 4"),
        ([result("1", "x")], "message 0"),
    ],
)
def test_what_has_no_text_is_refused_by_name(messages: list[Message], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        encode(messages, THINK)


def test_unknown_roles_are_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="latest_reminder"):
        encode([{"role": "latest_reminder", "content": "x"}], TALK)
