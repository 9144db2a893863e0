"""Encode a conversation as the text that DeepSeek-V3.2 was trained on.

It differs from V4 in order: the assistant's mark belongs to the question, tool results follow the
calls in a block of their own, and a turn that thinks must contain reasoning or a call. Messages are
mappings as in OpenAI's API, with `reasoning_content`, `tools`, `response_format` and `prefix`.
Sentences come from conversation.py, marks from special_tokens.py.

Source: facts of encoding_dsv32, section 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.conversation import (
    THINKING,
    Style,
    extras,
    last_question,
    question_text,
    require_known,
)
from degarble.harness.chat.dsml import ToolCall, write_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.chat.conversation import Message

STEM = "encoding_dsv32"  # the official encoder's file
CALLS = "function_calls"  # the name of the block in DSML
KNOWS_EFFORT = False
ROLES = ("system", "developer", "user", "tool", "assistant")
_REQUEST = "\n\n# The user's message is: "  # in front of a developer's content


def encode(messages: Sequence[Message], style: Style, context: Sequence[Message] = ()) -> str:
    """Render a conversation up to the place where the assistant speaks.

    `context` was rendered before: it affects how what follows is rendered, and is left out itself.
    """
    full = [*context, *messages]
    require_known(full, ROLES, style)
    begin = len(context)
    if style.mode == THINKING and style.drop_thinking:
        last = last_question(full)
        kept = [i for i, each in enumerate(full) if i >= last or each["role"] != "developer"]
        full, begin = [full[index] for index in kept], sum(index < begin for index in kept)
    start = marks.BOS if style.begin and not context else ""
    return start + "".join(_text(full, index, style) for index in range(begin, len(full)))


def _text(messages: Sequence[Message], index: int, style: Style) -> str:
    message = messages[index]
    match message["role"]:
        case "system":
            return (message.get("content") or "") + extras(message, style)
        case "developer":
            content = extras(message, style) + _REQUEST + question_text(message)
            return _question(content, messages, index, style)
        case "user":
            return _question(message.get("content") or "", messages, index, style)
        case "tool":
            return _result(messages, index, style)
        case _:
            return _answer(messages, index, style)


def _question(content: str, messages: Sequence[Message], index: int, style: Style) -> str:
    thinks = style.mode == THINKING and index == last_question(messages)
    return f"{marks.USER}{content}{marks.ASSISTANT}{marks.THINK if thinks else marks.END_THINK}"


def _result(messages: Sequence[Message], index: int, style: Style) -> str:
    """Render one tool's result; the first opens the block, the last closes it."""
    caller = index - 1
    while caller >= 0 and messages[caller]["role"] == "tool":
        caller -= 1
    calls = messages[caller].get("tool_calls") or () if caller >= 0 else ()
    number = index - caller
    if caller < 0 or messages[caller]["role"] != "assistant" or number > len(calls):
        raise InvalidArgument(
            f"message {index}", "a tool's result", "one for each call of the assistant before it",
            "Put the calls into the assistant's message, in order.",
        )  # fmt: skip
    content = f"\n<result>{messages[index].get('content') or ''}</result>"
    opened = "\n\n<function_results>" if number == 1 else ""
    if number < len(calls):
        return opened + content
    thinks = style.mode == THINKING and index >= last_question(messages)
    closed = f"\n</function_results>\n\n{marks.THINK if thinks else marks.END_THINK}"
    return opened + content + closed


def _answer(messages: Sequence[Message], index: int, style: Style) -> str:
    message, reasoning = messages[index], ""
    calls = [ToolCall.from_openai(call) for call in message.get("tool_calls") or ()]
    content = message.get("content") or ""
    if message.get("prefix") and not calls:
        return content  # the model goes on from here
    if style.mode == THINKING and index > last_question(messages):
        thought = message.get("reasoning_content")
        if not thought and not calls:
            raise InvalidArgument(
                f"message {index}", "neither reasoning nor tool calls",
                "reasoning_content, or tool calls, after the last question in thinking mode",
                "Give the reasoning, or encode in chat mode.",
            )  # fmt: skip
        reasoning = (thought or "") + marks.END_THINK
    tail = write_calls(calls, CALLS, lenient=False) if calls else ""
    return reasoning + content + tail + marks.EOS
