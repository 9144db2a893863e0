"""The chat encoding of a checkpoint: which family's, and with whose wordings.

Owns the pairing of a model's family with its encoder and its parser.
Refuses an effort where the family knows none. Kept honest by suites/chat/test_chat.py.
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
    """How a model is spoken to."""

    family: Any  # the module with encode, CALLS and STEM
    style: Style

    def encode(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the place where the assistant speaks."""
        text: str = self.family.encode(messages, self.style)
        return text

    def parse(self, text: str, *, whole: bool = True) -> Turn:
        """Take what the assistant said apart."""
        return parse(text, self.style.mode, self.family.CALLS, whole=whole)


def chat_of(config: Config, folder: Path, style: Style) -> Chat:
    """The chat of a model whose checkpoint lies in `folder`."""
    family: Any = encode_v4 if isinstance(config, V4Config) else encode_v32
    if family is encode_v32 and style.effort is not None:
        raise InvalidArgument(
            "--effort", style.effort, "a V4 model: V3.2's encoding knows no effort", "Leave it out."
        )
    return Chat(family, replace(style, wordings=wordings_beside(folder, family.STEM)))
