"""Both chat encodings as golden strings, rule by rule, and sentences of an encoder's file."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.chat import conversation
from degarble.harness.chat.conversation import (
    CHAT,
    NO_TEMPLATES,
    THINKING,
    PromptTemplates,
    Style,
    read_templates,
)
from degarble.harness.chat.encode_v4 import encode
from degarble.harness.chat.encode_v32 import encode as encode_v32_encode
from degarble.suites.chat.talk_cases import (
    ENCODER,
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
    from pathlib import Path

    from degarble.harness.chat.conversation import Message


# --------------------------------------------------------------------------------------------------
# V4's encoding as golden strings, rule by rule of the facts (section 12.2).

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TALK = Style(CHAT, wordings=WORDINGS)
THINK = Style(THINKING, wordings=WORDINGS)
HISTORY = [
    system("S"),
    user("A"),
    answer("B", reasoning_content="r1"),
    user("C"),
]


def test_one_question() -> None:
    assert encode([user("Hi")], TALK) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert encode([user("Hi")], THINK) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"
    assert encode([user("Hi")], replace(TALK, begin=False)) == "<｜User｜>Hi<｜Assistant｜></think>"


def test_history_without_and_with_thinking() -> None:
    turns = f"{BOS}S<｜User｜>A<｜Assistant｜></think>B{EOS}<｜User｜>C<｜Assistant｜>"
    assert encode(HISTORY, TALK) == f"{turns}</think>"
    assert encode(HISTORY, THINK) == f"{turns}<think>"
    kept = (
        f"{BOS}S<｜User｜>A<｜Assistant｜><think>r1</think>B{EOS}<｜User｜>C<｜Assistant｜><think>"
    )
    assert encode(HISTORY, replace(THINK, drop_thinking=False)) == kept
    # Tools keep what was thought, whatever is asked for.
    tools = encode([system("S", tools=[TOOL]), *HISTORY[1:]], THINK)
    assert tools == kept.replace("S<", f"S\n\n{TOOLS_TEXT}<", 1)


def test_earlier_messages_decide_and_are_left_out() -> None:
    before, new = HISTORY[:3], HISTORY[3:]
    for style in (TALK, THINK, replace(THINK, drop_thinking=False)):
        whole = encode(HISTORY, style)
        first = encode(new, style, context=before)
        assert whole.endswith(first)
        assert first.startswith("<｜User｜>C")
    developer: list[Message] = [{"role": "developer", "content": "D"}, user("A")]
    assert encode([user("C")], THINK, context=developer) == "<｜User｜>C<｜Assistant｜><think>"


def test_developers_words_and_reminders() -> None:
    developer = {"role": "developer", "content": "D", "tools": [TOOL]}
    assert encode([developer], TALK) == (f"{BOS}<｜User｜>D\n\n{TOOLS_TEXT}<｜Assistant｜></think>")
    plain = {"role": "developer", "content": "D"}
    asked = encode([plain, answer("x"), user("C")], THINK)
    assert asked == f"{BOS}x{EOS}<｜User｜>C<｜Assistant｜><think>"  # dropped before the question
    reminder = {"role": "latest_reminder", "content": "now"}
    assert encode([user("A"), reminder], TALK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜></think><｜latest_reminder｜>now"
    )
    with pytest.raises(InvalidArgument, match="developer"):
        encode([{"role": "developer", "content": ""}], TALK)


CALLED = answer(
    None, tool_calls=[call("1", "f", '{"a": "x"}'), call("2", "g", '{"b": 2}')],
    reasoning_content="need",
)  # fmt: skip
CALL_TEXT = (
    "\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n'
    '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)


def test_tool_results_are_a_user_message_in_the_order_of_the_calls() -> None:
    messages = [
        system("S", tools=[TOOL]), user("A"), CALLED, result("2", "two"), result("1", "one"),
        user("and?"),
    ]  # fmt: skip
    assert encode(messages, THINK) == (
        f"{BOS}S\n\n{TOOLS_TEXT}<｜User｜>A<｜Assistant｜><think>need</think>{CALL_TEXT}{EOS}"
        "<｜User｜><tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nand?"
        "<｜Assistant｜><think>"
    )


def test_results_follow_the_last_calls_and_a_task_keeps_its_question_apart() -> None:
    later = answer("", tool_calls=[call("3", "h", "{}")])
    asked = [user("A"), CALLED, result("1", "x"), later, result("2", "two"), result("3", "three")]
    assert encode(asked, TALK).endswith(  # "2" is no call of the last answer: nothing moves
        "<｜User｜><tool_result>two</tool_result>\n\n<tool_result>three</tool_result>"
        "<｜Assistant｜></think>"
    )
    apart = [user("A", task="query"), user("B")]
    assert encode(apart, TALK) == f"{BOS}<｜User｜>A<｜User｜>B<｜Assistant｜></think>"


def test_contents_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    text = encode([user("A"), CALLED, result("1", parts)], TALK)
    assert "<tool_result>a\n\n[Unsupported image]\n\nb</tool_result>" in text


def test_response_format_follows_tools() -> None:
    message = system("S", tools=[TOOL], response_format={"type": "object", "k": "ü"})
    assert encode([message, user("A")], TALK) == (
        f"{BOS}S\n\n{TOOLS_TEXT}\n\n## Response Format:\n\nObey:\n"
        '{"type": "object", "k": "ü"}<｜User｜>A<｜Assistant｜></think>'
    )


@pytest.mark.parametrize("task", ["query", "authority", "domain", "read_url", "title"])
def test_tasks(task: str) -> None:
    assert encode([user("A", task=task)], TALK) == f"{BOS}<｜User｜>A<｜{task}｜>"
    titled = [user("A"), answer("B", task="title")]
    assert encode(titled, TALK) == f"{BOS}<｜User｜>A<｜Assistant｜></think>B{EOS}<｜title｜>"


def test_the_task_action_follows_the_assistants_mark() -> None:
    assert encode([user("A", task="action")], TALK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜></think><｜action｜>"
    )
    # What answers a task has no reasoning.
    done = encode([user("A", task="action"), answer("yes", reasoning_content="r")], THINK)
    assert done == f"{BOS}<｜User｜>A<｜Assistant｜><think><｜action｜>yes{EOS}"


def test_effort_stands_in_front_of_everything_and_only_where_there_is_thinking() -> None:
    hard = replace(THINK, effort="max")
    assert encode([user("A")], hard).startswith(f"{BOS}Think hard.\nVery hard.\n\n<｜User｜>")
    assert encode([user("A")], replace(hard, mode=CHAT)) == encode([user("A")], TALK)
    for effort in ("low", "high"):
        assert encode([user("A")], replace(THINK, effort=effort)) == encode([user("A")], THINK)


def test_an_answer_to_be_continued_has_no_end() -> None:
    assert encode([user("A"), answer("B", wo_eos=True)], TALK).endswith("</think>B")


@pytest.mark.parametrize(
    ("messages", "style", "error", "match"),
    [
        ([{"content": "x"}], TALK, InvalidArgument, "message 0"),
        ([{"role": "usr"}], TALK, UnknownName, "Did you mean user"),
        ([user("A")], replace(TALK, mode="deep"), UnknownName, "mode"),
        ([user("A")], replace(TALK, effort="maximal"), UnknownName, "effort"),
        ([user("A", task="quest")], TALK, UnknownName, "task"),
        ([{"role": "user", "content": [{"type": "text"}]}], TALK, InvalidArgument, "content of"),
        ([system("S", tools=[{"name": "f"}])], TALK, InvalidArgument, "tools of a message"),
        ([answer("", tool_calls=[5])], TALK, InvalidArgument, "tool call = 5"),
        ([CALLED, result("1", ["x"])], TALK, InvalidArgument, "part of a tool's result"),
        ([system("S", tools=[TOOL])], Style(), UnreadableFile, "wording of tools"),
        ([user("A")], Style(THINKING, "max"), UnreadableFile, "wording of effort max"),
    ],
)
def test_what_has_no_text_is_refused_by_name(
    messages: list[Message], style: Style, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        encode(messages, style)


# --------------------------------------------------------------------------------------------------
# V3.2's encoding as golden strings, rule by rule of the facts (section 24).

ENCODE_V32_CALLED = answer(
    "", tool_calls=[call("1", "f", '{"a": "x"}'), call("2", "g", '{"b": 2}')],
    reasoning_content="need",
)  # fmt: skip
ENCODE_V32_CALL_TEXT = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="g">\n'
    '<｜DSML｜parameter name="b" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)


def test_the_assistants_mark_belongs_to_the_question() -> None:
    assert encode_v32_encode([user("Hi")], TALK) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert encode_v32_encode([user("Hi")], THINK) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"


def test_content_stands_in_front_of_the_calls() -> None:
    said = encode_v32_encode([user("A"), {**ENCODE_V32_CALLED, "content": "B"}], TALK)
    assert said == f"{BOS}<｜User｜>A<｜Assistant｜></think>B{ENCODE_V32_CALL_TEXT}{EOS}"
    with pytest.raises(InvalidArgument, match="content of message 2"):
        encode_v32_encode([user("A"), ENCODE_V32_CALLED, result("1", ["x"])], TALK)


def test_reasoning_before_the_last_question_is_dropped_or_kept_out() -> None:
    turns = f"{BOS}S<｜User｜>A<｜Assistant｜></think>B{EOS}<｜User｜>C<｜Assistant｜>"
    assert encode_v32_encode(HISTORY, TALK) == f"{turns}</think>"
    assert encode_v32_encode(HISTORY, THINK) == f"{turns}<think>"
    # Only what follows the last question shows its reasoning, also where nothing is dropped.
    assert encode_v32_encode(HISTORY, replace(THINK, drop_thinking=False)) == f"{turns}<think>"


def test_calls_and_their_results() -> None:
    messages = [user("A"), ENCODE_V32_CALLED, result("1", "one"), result("2", "two")]
    results = (
        "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>"
    )
    assert encode_v32_encode(messages, THINK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜><think>need</think>{ENCODE_V32_CALL_TEXT}{EOS}{results}\n\n<think>"
    )
    assert encode_v32_encode(messages, TALK) == (
        f"{BOS}<｜User｜>A<｜Assistant｜></think>{ENCODE_V32_CALL_TEXT}{EOS}{results}\n\n</think>"
    )
    open_ended = encode_v32_encode(messages[:3], TALK)
    assert open_ended.endswith("\n\n<function_results>\n<result>one</result>")


def test_developers_words_follow_their_blocks() -> None:
    developer = {
        "role": "developer", "content": "D", "tools": [TOOL], "response_format": {"a": 1},
    }  # fmt: skip
    assert encode_v32_encode([developer], THINK) == (
        f"{BOS}<｜User｜>\n\n{TOOLS_TEXT}\n\n## Response Format:\n\nObey:\n"
        '{"a": 1}\n\n# The user\'s message is: D<｜Assistant｜><think>'
    )
    assert (
        encode_v32_encode([developer, user("C")], THINK)
        == f"{BOS}<｜User｜>C<｜Assistant｜><think>"
    )


def test_a_prefix_is_continued() -> None:
    assert encode_v32_encode([user("A"), answer("Be", prefix=True)], TALK).endswith("</think>Be")


def test_encode_v32_earlier_messages_decide_and_are_left_out() -> None:
    for style in (TALK, THINK):
        assert encode_v32_encode(HISTORY, style).endswith(
            encode_v32_encode(HISTORY[3:], style, context=HISTORY[:3])
        )
    developer: list[Message] = [{"role": "developer", "content": "D"}]
    assert (
        encode_v32_encode([user("C")], THINK, context=developer)
        == "<｜User｜>C<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([user("A"), answer("B")], "neither reasoning nor tool calls"),
        ([user("A"), result("1", "x")], "one for each call"),
        ([user("A"), ENCODE_V32_CALLED, *[result("1", "x")] * 3], "message 4"),
        ([result("1", "x")], "message 0"),
    ],
)
def test_encode_v32_what_has_no_text_is_refused_by_name(
    messages: list[Message], match: str
) -> None:
    with pytest.raises(InvalidArgument, match=match):
        encode_v32_encode(messages, THINK)


def test_unknown_roles_are_refused_by_name() -> None:
    with pytest.raises(UnknownName, match="latest_reminder"):
        encode_v32_encode([{"role": "latest_reminder", "content": "x"}], TALK)


# --------------------------------------------------------------------------------------------------
# Sentences out of an encoder's file: parsed and never run, known by fingerprint, or refused.


@pytest.mark.parametrize("place", conversation.PLACES)
def test_they_are_found_without_running_the_file(tmp_path: Path, place: str) -> None:
    path = tmp_path / place / "encoding_dsv4.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(ENCODER)
    prompt_templates = read_templates(tmp_path, "encoding_dsv4")
    assert dict(prompt_templates.texts) == dict(WORDINGS.texts)
    assert prompt_templates.source == path
    assert sorted(prompt_templates.unknown) == [
        "effort max",
        "tools",
    ]  # these are not the official ones


def test_a_known_text_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = WORDINGS.texts["tools"]
    marks = {"tools": (hashlib.sha256(text.encode()).hexdigest(),)}
    monkeypatch.setattr(conversation, "FINGERPRINTS", marks)
    assert WORDINGS.unknown == []
    assert PromptTemplates({"tools": text + " "}, None).unknown == ["tools"]


def test_a_checkpoint_without_an_encoder(tmp_path: Path) -> None:
    assert read_templates(tmp_path, "encoding_dsv4") is NO_TEMPLATES
    with pytest.raises(UnreadableFile, match="Copy the folder `encoding`"):
        NO_TEMPLATES.text("tools")


@pytest.mark.parametrize(
    "raw", [b"def (", b"\xff\xfe", b"x = " + b"(" * 500, b"#" * (conversation.LARGEST_FILE + 1)]
)
def test_a_file_that_is_no_python_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "encoding_dsv4.py").write_bytes(raw)
    with pytest.raises(UnreadableFile):
        read_templates(tmp_path, "encoding_dsv4")
