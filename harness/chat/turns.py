"""What both chat encodings share: the style of a conversation, checks of messages, extra blocks.

Unknown roles, modes and efforts are errors, and so are messages that are no mappings with a role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.dsml import ToolCall, as_json
from degarble.harness.chat.prompt_templates import NOWHERE, Wordings

if TYPE_CHECKING:
    from collections.abc import Sequence

    Message = Mapping[str, Any]

CHAT, THINKING = "chat", "thinking"
MODES = (CHAT, THINKING)
EFFORTS = ("low", "high", "max")
TOOLS = 'a list of {"type": "function", "function": {...}}'
TOOLS_REMEDY = "Write tools as OpenAI's API has them."


@dataclass(frozen=True)
class Style:
    """How a conversation is rendered. `begin`: BOS comes first."""

    mode: str = CHAT
    effort: str | None = None
    drop_thinking: bool = True
    begin: bool = True
    wordings: Wordings = NOWHERE


def require_known(
    messages: Sequence[Message], roles: Sequence[str], style: Style, *, in_parts: bool = False
) -> None:
    """Refuse what no encoding has a text for; `in_parts`: tool results may be lists of parts."""
    if style.mode not in MODES:
        raise UnknownName.among("mode", style.mode, MODES)
    if style.effort is not None and style.effort not in EFFORTS:
        raise UnknownName.among("effort", style.effort, EFFORTS)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidArgument(
                f"message {number}", message, "a mapping with a role and a content",
                "Write messages as OpenAI's API has them.",
            )  # fmt: skip
        if message["role"] not in roles:
            raise UnknownName.among(f"role of message {number}", message["role"], roles)
        _require_texts(number, message, in_parts=in_parts)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise InvalidArgument(
                f"tool_calls of message {number}", calls, "a list", "Write calls as a list."
            )
        for call in calls:
            ToolCall.of(call)


def _require_texts(number: int, message: Message, *, in_parts: bool) -> None:
    """Refuse contents in parts, whose spelling in Python would stand in the prompt."""
    for key in ("content", "reasoning_content"):
        said = message.get(key)
        if said is None or isinstance(said, str) or (message["role"] == "tool" and in_parts):
            continue
        raise InvalidArgument(
            f"{key} of message {number}", said, "a text", "Join its parts into one text.",
        )  # fmt: skip


def last_question(messages: Sequence[Message]) -> int:
    """Return the index of the last user or developer message, -1 without one."""
    asked = [i for i, each in enumerate(messages) if each["role"] in ("user", "developer")]
    return asked[-1] if asked else -1


def question_text(message: Message) -> str:
    """Return the content of a developer message, which must have one."""
    content = message.get("content")
    if not content or not isinstance(content, str):
        raise InvalidArgument(
            "content of a developer message", content, "a text", "Say what the developer says."
        )
    return content


def extras(message: Message, style: Style) -> str:
    """Return the blocks about tools and response format that follow a message."""
    made = ""
    tools = message.get("tools")
    if tools:
        if not isinstance(tools, list) or not all(map(is_tool, tools)):
            raise InvalidArgument("tools of a message", tools, TOOLS, TOOLS_REMEDY)
        schemas = "\n".join(as_json(tool["function"]) for tool in tools)
        made += "\n\n" + filled(
            style.wordings.text("tools"),
            tool_schemas=schemas,
            dsml_token=marks.DSML,
            thinking_start_token=marks.THINK,
            thinking_end_token=marks.END_THINK,
        )
    if message.get("response_format"):
        schema = as_json(message["response_format"])
        made += "\n\n" + filled(style.wordings.text("response format"), schema=schema)
    return made


def is_tool(tool: object) -> bool:
    """Return whether this is a function as OpenAI's API has it."""
    return isinstance(tool, dict) and isinstance(tool.get("function"), dict)


def filled(template: str, **values: str) -> str:
    """Fill a template of the encoder; raise if it has fields that we do not know."""
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            "template of the encoder", str(error), f"fields among {', '.join(sorted(values))}",
            "Copy the encoder from the official repository again.",
        ) from error  # fmt: skip
