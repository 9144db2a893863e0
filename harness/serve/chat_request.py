"""Read a chat completion request: messages, tools, thinking, choices.

Tools go into the system message, as in the official encoding. Fields that the encodings have no
text for are errors: pictures, several parts, forced calls, formats of the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError
from degarble.harness.chat.turns import CHAT, EFFORTS, THINKING, TOOLS, Style, is_tool
from degarble.harness.serve.completion_request import (
    MOST_LIKELIEST,
    Asked,
    How,
    common,
    encoded,
    require_model,
)
from degarble.harness.serve.fields import Fields, shown
from degarble.harness.serve.refusals import wrong, wrong_input

if TYPE_CHECKING:
    from degarble.harness.serve.served_model import Desk

ROLES = ("system", "developer", "user", "assistant", "tool")
_LAST = ("user", "developer", "tool")
_MOST_MESSAGES = 4096


def chat_asked(raw: dict[str, Any], desk: Desk) -> Asked:
    """Read a request for a chat completion."""
    fields = Fields(raw)
    require_model(fields, desk)
    messages, tools = _messages(fields), _tools(fields)
    chat = desk.chat(_style(fields))
    # The sequences are filled in below, when all fields have been read.
    asked = common(fields, Asked((), 1, chat=chat))
    top = fields.whole("top_logprobs", 0, MOST_LIKELIEST)
    wants_scores = fields.flag("logprobs")
    if top is not None and not wants_scores:
        raise wrong("top_logprobs", "only beside logprobs: true")
    wanted = _new_tokens(fields, desk)
    how = How.read(fields, desk)
    form = fields.inner("response_format")
    if form is not None:
        form.only("type", "text")
        form.end()
    fields.end()
    try:
        text = chat.encode(_with_tools(messages, tools))
    except DegarbleError as error:
        raise wrong_input("messages", error) from error
    except RecursionError as error:
        raise wrong("messages", "arguments of a call are nested too deeply") from error
    # The encoding writes BOS itself.
    prompt = encoded(text, desk, "messages", begin=False)
    scores = (top or 0) if wants_scores else None
    return replace(
        asked,
        asks=tuple(how.asks(prompt, asked.choices, wanted, desk.bounds.new_tokens, scores)),
    )


def _new_tokens(fields: Fields, desk: Desk) -> int | None:
    """Read the token limit by its new name, or by its old one."""
    new = fields.whole("max_completion_tokens", 1, desk.bounds.new_tokens)
    old = fields.whole("max_tokens", 1, desk.bounds.new_tokens)
    if new is not None and old is not None and new != old:
        raise wrong("max_tokens", f"{old} beside max_completion_tokens {new}; give one")
    return old if new is None else new


def _style(fields: Fields) -> Style:
    """Read whether and how hard the model should think."""
    effort = fields.any("reasoning_effort")
    thinking = fields.inner("thinking")
    kind = None
    if thinking is not None:
        kind = thinking.text("type")
        thinking.end()
        if kind not in ("enabled", "disabled"):
            raise wrong("thinking.type", f"{shown(kind)} is not enabled or disabled")
    if effort is not None and effort not in (*EFFORTS, "none"):
        known = ", ".join((*EFFORTS, "none"))
        raise wrong("reasoning_effort", f"{shown(effort)}; this model's encoding knows {known}")
    # An effort implies thinking; without one the default is plain chat.
    if effort not in (None, "none"):
        if kind == "disabled":
            raise wrong("reasoning_effort", "beside thinking that is disabled")
        return Style(THINKING, effort)
    if kind == "enabled" and effort == "none":
        raise wrong("reasoning_effort", '"none" beside thinking that is enabled')
    return Style(THINKING if kind == "enabled" else CHAT)


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Read the functions that the model may call; none where calls are forbidden."""
    found = fields.any("tools")
    if found is not None and (not isinstance(found, list) or not all(map(is_tool, found))):
        raise wrong("tools", f"{shown(found)} is not {TOOLS}", "invalid_type")
    choice = fields.any("tool_choice")
    if choice not in (None, "auto", "none"):
        raise wrong("tool_choice", f"{shown(choice)} is not supported", "unsupported_value")
    fields.only("parallel_tool_calls", True)
    return [] if choice == "none" else found or []


def _with_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    # The official encoding puts tools into the system message; one is added where there is none.
    if not tools:
        return messages
    if messages[0]["role"] == "system":
        return [messages[0] | {"tools": tools}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": tools}, *messages]


def _messages(fields: Fields) -> list[dict[str, Any]]:
    found = fields.any("messages")
    if not isinstance(found, list) or not found:
        raise wrong("messages", "a list of one message at least is expected", "invalid_type")
    if len(found) > _MOST_MESSAGES:
        raise wrong("messages", f"{len(found)} messages; a request may bring {_MOST_MESSAGES}")
    made = [_message(each, f"messages[{number}]") for number, each in enumerate(found)]
    if made[-1]["role"] not in _LAST:
        raise wrong("messages", f"the last one is of one of {', '.join(_LAST)}")
    return made


def _message(found: object, path: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise wrong(path, f"{shown(found)} is no object", "invalid_type")
    fields = Fields(found, f"{path}.")
    role = fields.text("role")
    if role not in ROLES:
        raise wrong(f"{path}.role", f"{shown(role)} is not one of {', '.join(ROLES)}")
    made: dict[str, Any] = {"role": role}
    content = _content(fields, path)
    if content is not None:
        made["content"] = content
    if role == "assistant":
        for name in ("reasoning_content", "tool_calls"):
            if fields.has(name):
                made[name] = _calls(fields, path) if name == "tool_calls" else fields.text(name)
        fields.only("refusal")
    if role == "tool":
        made["tool_call_id"] = fields.text("tool_call_id")
    fields.end()
    if "content" not in made and "tool_calls" not in made:
        raise wrong(f"{path}.content", "is required", "missing_required_parameter")
    return made


def _content(fields: Fields, path: str) -> str | None:
    """Read a text, or a single text part: no source says how several are joined."""
    if not fields.has("content"):
        return None
    found = fields.any("content")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict):
        part = Fields(found[0], f"{path}.content[0].")
        part.only("type", "text")
        found = part.text("text")
        part.end()
    if not isinstance(found, str):
        told = f"{shown(found)} is no text; of parts one text is supported"
        raise wrong(f"{path}.content", told, "invalid_type")
    return found


def _calls(fields: Fields, path: str) -> list[dict[str, Any]]:
    found = fields.any("tool_calls")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise wrong(f"{path}.tool_calls", "a list of calls is expected", "invalid_type")
    made = []
    for number, each in enumerate(found):
        call = Fields(each, f"{path}.tool_calls[{number}].")
        number_of_call = call.text("id", "")
        call.only("type", "function")
        function = call.inner("function") or Fields({}, f"{path}.tool_calls[{number}].function.")
        named = {"name": function.text("name"), "arguments": function.text("arguments")}
        function.end()
        call.end()
        made.append({"id": number_of_call, "type": "function", "function": named})
    return made
