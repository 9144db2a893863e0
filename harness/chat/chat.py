"""The chat encoding of a checkpoint: encode conversations, parse finished assistant turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.conversation import THINKING, read_templates
from degarble.harness.chat.dsml import ToolCall, read_calls
from degarble.harness.chat.special_tokens import DSML, END_THINK, EOS, STRUCTURE
from degarble.harness.model.family import family_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from degarble.harness.chat.conversation import Message, Style
    from degarble.harness.model.config.config import Config


# --------------------------------------------------------------------------------------------------
# Finished turns: reasoning, content and tool calls.
#
# Departures from the encoding (no end of thinking, a special token inside a content, text after the
# calls) are errors with their position: a garbled model fails here first, and the position is
# evidence. A turn that was cut off at its token limit has no EOS; `whole` says whether that is an
# error.
#
# Source: facts of the official encoders, section 12.3.


@dataclass(frozen=True)
class AssistantTurn:
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


def parse(text: str, mode: str, block: str, *, whole: bool = True) -> AssistantTurn:
    """Parse a turn; `block` names the family's tool calls."""
    reasoning, rest, opening = "", text, f"\n\n<{DSML}{block}"
    if mode == THINKING:
        reasoning, mark, rest = text.partition(END_THINK)
        if not mark or opening in reasoning:
            raise _refused("reasoning", reasoning, f"an end of thinking, {END_THINK}")
    content, called, calls_text = rest.partition(opening)
    calls: list[ToolCall] = []
    if called and EOS not in content:
        calls = read_calls(calls_text, block)
    else:
        content, mark, behind = rest.partition(EOS)
        if behind or (whole and not mark):
            raise _refused("turn", behind or content[-40:], f"{EOS} at the end, once")
    for name, said in (("content", content), ("reasoning", reasoning)):
        for mark in STRUCTURE:
            if mark in said:
                raise _refused(name, mark, "a text without marks of the encoding")
    return AssistantTurn(content, reasoning, tuple(calls))


def _refused(name: str, found: str, expected: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} of the completion", found[-200:], expected,
        "The model left the encoding; read its text as it is.",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Encoder and parser of a family, with its own templates. V3.2 has no reasoning effort, so asking it
# for one is an error.


@dataclass(frozen=True)
class Chat:
    """Encoder and parser of one model in one style."""

    family: Any  # the module with encode, CALLS and STEM
    style: Style

    def encode(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the place where the assistant speaks."""
        text: str = self.family.encode(messages, self.style)
        return text

    def parse(self, text: str, *, whole: bool = True) -> AssistantTurn:
        """Parse the assistant's text."""
        return parse(text, self.style.mode, self.family.CALLS, whole=whole)


def chat_of(config: Config, folder: Path, style: Style) -> Chat:
    """Return the chat of a model whose checkpoint is in `folder`."""
    family: Any = family_of(config).chat_encoder()
    if style.effort is not None and not family.KNOWS_EFFORT:
        raise InvalidArgument(
            "--effort", style.effort, "a V4 model: V3.2's encoding knows no effort", "Leave it out."
        )
    return Chat(family, replace(style, wordings=read_templates(folder, family.STEM)))
