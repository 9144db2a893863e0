"""An encoder as it lies beside a checkpoint, with sentences of our own, and a conversation.

The official sentences are not repeated in this repository; what counts here is where they go.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from degarble.harness.chat.conversation import PromptTemplates

ENCODER = '''
"""An encoder: this text is parsed, and must never be run."""
raise SystemExit("was run")
dsml_token: str = "x"
TOOLS_TEMPLATE = """Call <{dsml_token}tool_calls>, think in {thinking_start_token}.

{tool_schemas}
Think until {thinking_end_token}.
"""
response_format_template: str = "## Response Format:\\n\\nObey:\\n{schema}"
REASONING_EFFORT_MAX = (
    "Think hard.\\n"
    "Very hard.\\n\\n"
)
computed = "a" + "b"
'''
WORDINGS = PromptTemplates(
    MappingProxyType(
        {
            "tools": (
                "Call <{dsml_token}tool_calls>, think in {thinking_start_token}.\n\n{tool_schemas}"
                "\nThink until {thinking_end_token}.\n"
            ),
            "response format": "## Response Format:\n\nObey:\n{schema}",
            "effort max": "Think hard.\nVery hard.\n\n",
        }
    ),
    None,
)
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
TOOLS_TEXT = (
    "Call <｜DSML｜tool_calls>, think in <think>.\n\n"
    '{"name": "weather", "parameters": {}}\nThink until </think>.\n'
)


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": number,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def system(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def answer(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(number: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": number, "content": content}
