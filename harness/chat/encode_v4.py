"""Encode a conversation as the text that DeepSeek-V4 was trained on.

Tool results move into user messages, reasoning of earlier turns is dropped unless there are tools,
and each turn of the assistant ends with EOS. Messages are mappings as in OpenAI's API, with the
additions of the official encoder: `reasoning_content`, `tools`, `response_format`, `task`,
`wo_eos`. Sentences come from conversation.py, marks from special_tokens.py.

Source: facts of encoding_dsv4, section 12.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.conversation import (
    THINKING,
    Style,
    extras,
    last_question,
    question_text,
    require_known,
)
from degarble.harness.chat.dsml import ToolCall, as_json, write_calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from degarble.harness.chat.conversation import Message

STEM = "encoding_dsv4"  # the official encoder's file
CALLS = "tool_calls"  # the name of the block in DSML
KNOWS_EFFORT = True
ROLES = ("system", "developer", "user", "tool", "latest_reminder", "assistant")
_ANSWERS = ("assistant", "latest_reminder")
_KEPT = ("user", "system", "tool", "latest_reminder", "assistant")


def encode(messages: Sequence[Message], style: Style, context: Sequence[Message] = ()) -> str:
    """Render a conversation up to the place where the assistant speaks.

    `context` was rendered before: it affects how what follows is rendered, and is left out itself.
    """
    require_known((*context, *messages), ROLES, style, in_parts=True)
    before, new = _merged(context), _merged(messages)
    full, begin = _in_call_order([*before, *new]), len(before)
    drop = style.drop_thinking and not any(each.get("tools") for each in full)
    if style.mode == THINKING and drop:
        kept = _kept(full)
        full, begin = [full[index] for index in kept], sum(index < begin for index in kept)
    parts = [_Part(full, index, style, drop) for index in range(begin, len(full))]
    start = marks.BOS if style.begin and not context else ""
    effort = _effort(style) if full and not begin else ""
    return start + effort + "".join(part.text() for part in parts)


def _effort(style: Style) -> str:
    """Return the sentence about effort that precedes everything; only thinking has one."""
    if style.mode != THINKING or style.effort is None:
        return ""
    if style.effort == "max" or f"effort {style.effort}" in style.wordings.texts:
        return style.wordings.text(f"effort {style.effort}")
    return ""  # the first release says nothing for "high", the later ones nothing for "low"


def _merged(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Move tool results, and user text that follows them, into blocks of one user message."""
    made: list[dict[str, Any]] = []
    for message in messages:
        role = message["role"]
        if role not in ("tool", "user"):
            made.append(dict(message))
            continue
        content, open_user = message.get("content"), bool(made) and "blocks" in made[-1]
        if role == "tool":
            number = message.get("tool_call_id", "")
            block = {"type": "tool_result", "tool_use_id": number, "content": content or ""}
        else:
            block = {"type": "text", "text": content or ""}
            open_user = open_user and made[-1].get("task") is None
        if open_user:
            made[-1]["blocks"].append(block)
            continue
        kept = {"task": message["task"]} if role == "user" and "task" in message else {}
        made.append({"role": "user", "blocks": [block], **kept})
    return made


def _in_call_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put each user message's tool results into the order in which the assistant called."""
    order: dict[str, int] = {}
    for message in messages:
        if message["role"] == "assistant" and message.get("tool_calls"):
            numbered = enumerate(message["tool_calls"])
            order = {call["id"]: at for at, call in numbered if call.get("id")}
        blocks = message.get("blocks")
        if blocks and order:
            results = [block for block in blocks if block["type"] == "tool_result"]
            results.sort(key=lambda block: order.get(block["tool_use_id"], 0))
            ready = iter(results)
            message["blocks"] = [
                next(ready) if block["type"] == "tool_result" else block for block in blocks
            ]
    return messages


def _kept(messages: list[dict[str, Any]]) -> list[int]:
    """List the messages that stay: all but developer messages before the last question."""
    last = last_question(messages)
    return [i for i, message in enumerate(messages) if i >= last or message["role"] in _KEPT]


@dataclass(frozen=True)
class _Part:
    """One message at its index. `drop`: reasoning of earlier turns is left out."""

    messages: Sequence[Mapping[str, Any]]
    index: int
    style: Style
    drop: bool
    message: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", self.messages[self.index])

    def text(self) -> str:
        """Return the message, and the mark that hands over to the assistant."""
        made = getattr(self, f"_{self.message['role']}")()
        following = self.messages[self.index + 1 :]
        if following and following[0]["role"] not in _ANSWERS:
            return f"{made}"
        return f"{made}{self._handover()}"

    def _system(self) -> str:
        return (self.message.get("content") or "") + extras(self.message, self.style)

    def _developer(self) -> str:
        return marks.USER + question_text(self.message) + extras(self.message, self.style)

    def _user(self) -> str:
        return marks.USER + "\n\n".join(_block(block) for block in self.message["blocks"])

    def _latest_reminder(self) -> str:
        return marks.REMINDER + (self.message.get("content") or "")

    def _assistant(self) -> str:
        message, before = self.message, self.messages[self.index - 1] if self.index else {}
        reasoning = ""
        current = not self.drop or self.index > last_question(self.messages)
        if self.style.mode == THINKING and before.get("task") is None and current:
            reasoning = (message.get("reasoning_content") or "") + marks.END_THINK
        calls = [ToolCall.from_openai(call) for call in message.get("tool_calls") or ()]
        tail = write_calls(calls, CALLS, lenient=True) if calls else ""
        end = "" if message.get("wo_eos") else marks.EOS
        return reasoning + (message.get("content") or "") + tail + end

    def _handover(self) -> str:
        task = self.message.get("task")
        thinks = self.style.mode == THINKING
        if task is not None:
            if task not in marks.TASKS:
                raise UnknownName.among("task", task, marks.TASKS)
            opening = marks.ASSISTANT + (marks.THINK if thinks else marks.END_THINK)
            return (opening if task == "action" else "") + marks.TASKS[task]
        if self.message["role"] not in ("user", "developer"):
            return ""
        asked = not self.drop or self.index >= last_question(self.messages)
        return marks.ASSISTANT + (marks.THINK if thinks and asked else marks.END_THINK)


def _content_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidArgument(
            "part of a tool's result", part, "a mapping with a type",
            "Write parts as OpenAI's API has them.",
        )  # fmt: skip
    return str(part.get("text", "")) if kind == "text" else f"[Unsupported {kind}]"


def _block(block: Mapping[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind != "tool_result":
        return f"[Unsupported {kind}]"
    content = block.get("content", "")
    if isinstance(content, list):
        content = "\n\n".join(_content_part(part) for part in content)
    return f"<tool_result>{content if isinstance(content, str) else as_json(content)}</tool_result>"
