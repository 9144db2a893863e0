"""The chat encoding of a checkpoint: the encoder and parser of its family, with its own templates.

V3.2 has no reasoning effort, so asking it for one is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat import encode_v4, encode_v32
from degarble.harness.chat.completion import parse
from degarble.harness.chat.prompt_templates import wordings_beside
from degarble.harness.model.config.config import V4Config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from degarble.harness.chat.completion import Turn
    from degarble.harness.chat.turns import Message, Style
    from degarble.harness.model.config.config import Config


@dataclass(frozen=True)
class Chat:
    """Encoder and parser of one model in one style."""

    family: Any  # the module with encode, CALLS and STEM
    style: Style

    def encode(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the place where the assistant speaks."""
        text: str = self.family.encode(messages, self.style)
        return text

    def parse(self, text: str, *, whole: bool = True) -> Turn:
        """Parse the assistant's text."""
        return parse(text, self.style.mode, self.family.CALLS, whole=whole)


def chat_of(config: Config, folder: Path, style: Style) -> Chat:
    """Return the chat of a model whose checkpoint is in `folder`."""
    family: Any = encode_v4 if isinstance(config, V4Config) else encode_v32
    if family is encode_v32 and style.effort is not None:
        raise InvalidArgument(
            "--effort", style.effort, "a V4 model: V3.2's encoding knows no effort", "Leave it out."
        )
    return Chat(family, replace(style, wordings=wordings_beside(folder, family.STEM)))
