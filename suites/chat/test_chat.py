"""Chats of both families: finished turns and tool calls, written and read back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.chat import AssistantTurn, chat_of, parse
from degarble.harness.chat.conversation import CHAT, THINKING, Style
from degarble.harness.chat.dsml import ToolCall, read_calls, write_calls
from degarble.harness.chat.encode_v4 import CALLS, encode
from degarble.harness.chat.special_tokens import EOS
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.suites.chat.talk_cases import ENCODER, TOOL, TOOLS_TEXT, system, user

if TYPE_CHECKING:
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# A model's family chooses the encoding, and its checkpoint the wordings.


def test_each_family_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "encoding_dsv4.py").write_text(ENCODER)
    asked = [system("S", tools=[TOOL]), user("A")]
    v4 = chat_of(small_v4(), tmp_path, Style(THINKING))
    assert TOOLS_TEXT in v4.encode(asked)
    v32 = chat_of(small_v32(), tmp_path, Style())
    assert v32.style.wordings.source is None  # that encoder is V4's
    block = '>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜'
    said = f"\n\n<｜DSML｜function_calls{block}function_calls>"
    assert v32.parse(said).calls == (ToolCall("f", "{}"),)
    with pytest.raises(InvalidArgument, match="knows no effort"):
        chat_of(small_v32(), tmp_path, Style(THINKING, "high"))
    said = f"why</think>\n\n<｜DSML｜tool_calls{block}tool_calls>"
    assert v4.parse(said).reasoning == "why"


# --------------------------------------------------------------------------------------------------
# Turns taken apart: reasoning, content, calls; and what left the encoding, by name.

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


# --------------------------------------------------------------------------------------------------
# Tool calls in DSML: golden strings from the grammar, the way back, departures by name.

DSML_CALLS = [
    ToolCall("weather", '{"city": "Ulm", "days": 3, "exact": true, "near": ["Bonn"], "x": null}'),
    ToolCall("now", "{}"),
]
GOLDEN = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="near" string="false">["Bonn"]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="x" string="false">null</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="now">\n'
    "\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>"
)
OPENING = "\n\n<｜DSML｜tool_calls"


def test_calls_are_written_as_the_grammar_has_them() -> None:
    assert write_calls(DSML_CALLS, "tool_calls", lenient=True) == GOLDEN
    other = GOLDEN.replace("tool_calls", "function_calls")
    assert write_calls(DSML_CALLS, "function_calls", lenient=False) == other


@pytest.mark.parametrize("end", ["", EOS])
def test_what_was_written_is_read_back(end: str) -> None:
    assert read_calls(GOLDEN.removeprefix(OPENING) + end, "tool_calls") == DSML_CALLS


@pytest.mark.parametrize("value", ['a "b" \\ \n c', "", "<think>", "日本", "1", "a</b>"])
def test_strings_travel_unescaped(value: str) -> None:
    call = ToolCall("f", json.dumps({"k": value}, ensure_ascii=False))
    text = write_calls([call], "tool_calls", lenient=True)
    assert f'string="true">{value}</｜DSML｜parameter>' in text
    (back,) = read_calls(text.removeprefix(OPENING), "tool_calls")
    assert json.loads(back.arguments) == {"k": value}


def test_arguments_may_come_as_a_mapping() -> None:
    given = {"city": "Ulm", "days": 3, "exact": True, "near": ["Bonn"], "x": None}
    calls = [
        {"function": {"name": "weather", "arguments": given}},
        {"function": {"name": "now", "arguments": {}}},
    ]
    for lenient in (False, True):
        assert (
            write_calls(map(ToolCall.from_openai, calls), "tool_calls", lenient=lenient) == GOLDEN
        )


def test_characters_stay_themselves() -> None:
    call = ToolCall("f", '{"k": {"ü": "日"}}')
    assert '>{"ü": "日"}<' in write_calls([call], "tool_calls", lenient=True)


def test_arguments_that_are_no_json() -> None:
    call = ToolCall("f", "not json")
    text = write_calls([call], "tool_calls", lenient=True)
    assert '<｜DSML｜parameter name="arguments" string="true">not json<' in text
    with pytest.raises(InvalidArgument, match="arguments of f"):
        write_calls([call], "tool_calls", lenient=False)
    with pytest.raises(InvalidArgument, match="a JSON object"):
        write_calls([ToolCall("f", "[1]")], "tool_calls", lenient=True)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("tool_calls>\n<", "tool_calls><", "the end of the opening mark"),
        ("<｜DSML｜invoke", "<｜DSML｜involve", "an invoke, or the closing mark"),
        ('name="now">\n', "now>\n", "of the invoke"),
        ('string="false">3', 'string="no">3', "of one parameter"),
        (">Ulm</｜DSML｜parameter>", ">Ulm", "of one parameter"),
        (">Ulm</｜DSML｜parameter>\n", ">Ulm</｜DSML｜parameter>", "a line's end after a param"),
        ('name="days"', 'name="city"', "each parameter once"),
        ("</｜DSML｜invoke>\n</", "</｜DSML｜invoke></", "a line's end after an invoke"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls> and so on", "nothing after the closing"),
        ("</｜DSML｜tool_calls>", "", "an invoke, or the closing mark"),
    ],
)
def test_a_departure_from_the_grammar_is_refused_by_name(old: str, new: str, expected: str) -> None:
    assert old in GOLDEN
    wrong = GOLDEN.replace(old, new).removeprefix(OPENING)
    with pytest.raises(InvalidArgument, match=expected):
        read_calls(wrong, "tool_calls")


def test_calls_are_spelt_as_in_the_api() -> None:
    assert ToolCall.from_openai(DSML_CALLS[0].document()) == DSML_CALLS[0]
    with pytest.raises(InvalidArgument, match="tool call"):
        ToolCall.from_openai({"name": "f"})
