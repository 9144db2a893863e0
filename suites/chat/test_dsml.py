"""Tool calls in DSML: golden strings from the grammar, the way back, departures by name."""

from __future__ import annotations

import json

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.dsml import ToolCall, read_calls, write_calls
from degarble.harness.chat.special_tokens import EOS

CALLS = [
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
    assert write_calls(CALLS, "tool_calls", lenient=True) == GOLDEN
    other = GOLDEN.replace("tool_calls", "function_calls")
    assert write_calls(CALLS, "function_calls", lenient=False) == other


@pytest.mark.parametrize("end", ["", EOS])
def test_what_was_written_is_read_back(end: str) -> None:
    assert read_calls(GOLDEN.removeprefix(OPENING) + end, "tool_calls") == CALLS


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
        assert write_calls(map(ToolCall.of, calls), "tool_calls", lenient=lenient) == GOLDEN


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
        (">Ulm</｜DSML｜parameter>\n", ">Ulm</｜DSML｜parameter>", "a line's end behind a param"),
        ('name="days"', 'name="city"', "each parameter once"),
        ("</｜DSML｜invoke>\n</", "</｜DSML｜invoke></", "a line's end behind an invoke"),
        ("</｜DSML｜tool_calls>", "</｜DSML｜tool_calls> and so on", "nothing behind the closing"),
        ("</｜DSML｜tool_calls>", "", "an invoke, or the closing mark"),
    ],
)
def test_a_departure_from_the_grammar_is_refused_by_name(old: str, new: str, expected: str) -> None:
    assert old in GOLDEN
    wrong = GOLDEN.replace(old, new).removeprefix(OPENING)
    with pytest.raises(InvalidArgument, match=expected):
        read_calls(wrong, "tool_calls")


def test_calls_are_spelt_as_in_the_api() -> None:
    assert ToolCall.of(CALLS[0].document()) == CALLS[0]
    with pytest.raises(InvalidArgument, match="tool call"):
        ToolCall.of({"name": "f"})
