"""Parse a finished assistant turn into reasoning, content and tool calls.

Departures from the encoding (no end of thinking, a special token inside a content, text after the
calls) are errors with their position: a garbled model fails here first, and the position is
evidence. A turn that was cut off at its token limit has no EOS; `whole` says whether that is an
error.

Source: facts of the official encoders, section 12.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.dsml import ToolCall, read
from degarble.harness.chat.special_tokens import DSML, END_THINK, EOS, STRUCTURE
from degarble.harness.chat.turns import THINKING


@dataclass(frozen=True)
class Turn:
    """One turn of the assistant."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of a conversation."""
        made: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = [call.document() for call in self.calls]
        return made


def parse(text: str, mode: str, block: str, *, whole: bool = True) -> Turn:
    """Parse a turn; `block` names the family's tool calls."""
    reasoning, rest, opening = "", text, f"\n\n<{DSML}{block}"
    if mode == THINKING:
        reasoning, mark, rest = text.partition(END_THINK)
        if not mark or opening in reasoning:
            raise _refused("reasoning", reasoning, f"an end of thinking, {END_THINK}")
    content, called, calls_text = rest.partition(opening)
    calls: list[ToolCall] = []
    if called and EOS not in content:
        calls = read(calls_text, block)
    else:
        content, mark, behind = rest.partition(EOS)
        if behind or (whole and not mark):
            raise _refused("turn", behind or content[-40:], f"{EOS} at the end, once")
    for name, said in (("content", content), ("reasoning", reasoning)):
        for mark in STRUCTURE:
            if mark in said:
                raise _refused(name, mark, "a text without marks of the encoding")
    return Turn(content, reasoning, tuple(calls))


def _refused(name: str, found: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} of the completion", found[-200:], expected,
        "The model left the encoding; read its text as it is.",
    )  # fmt: skip
