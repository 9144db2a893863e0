"""Chat by the template that a checkpoint brings: Jinja, rendered in the sandbox of transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, MissingDependency, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.chat.chat import AssistantTurn, Chat
from degarble.harness.chat.conversation import THINKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from degarble.harness.chat.conversation import Message, Style

FILES = ("chat_template.jinja", "tokenizer_config.json")
_LARGEST = 4 << 20


@dataclass(frozen=True)
class TemplateChat(Chat):
    """A chat template with the special tokens that it may name."""

    template: str
    tokens: Mapping[str, str]

    def encode(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to the place where the assistant speaks."""
        try:
            from transformers.utils.chat_template_utils import (  # noqa: PLC0415  heavy
                render_jinja_template,
            )
        except ImportError as error:
            raise MissingDependency(
                "transformers", "absent", "the package that renders chat templates",
                "pip install 'degarble[models]'",
            ) from error  # fmt: skip
        plain = [
            {key: value for key, value in message.items() if key != "tools"} for message in messages
        ]
        tools = next((list(message["tools"]) for message in messages if message.get("tools")), None)
        try:
            render: Any = render_jinja_template  # it returns a pair, whatever it states
            texts, _ = render(
                [plain], tools=tools, chat_template=self.template, add_generation_prompt=True,
                enable_thinking=self.style.mode == THINKING, **self.tokens,
            )  # fmt: skip
        except Exception as error:  # a template raises what it likes
            raise InvalidArgument(
                "conversation", f"{type(error).__name__}: {error}",
                "messages that the model's chat template renders",
                "Look at chat_template in tokenizer_config.json, or leave --chat out.",
            ) from error  # fmt: skip
        text: str = texts[0]
        return text

    def parse(self, text: str, *, whole: bool = True) -> AssistantTurn:
        """Return the assistant's text as it is, without the tokens that end it."""
        del whole
        end = self.tokens.get("eos_token")
        return AssistantTurn(text.removesuffix(end) if end else text, "", ())


def template_chat(folder: Path, style: Style) -> TemplateChat:
    """Read the chat template of a checkpoint."""
    config = _stated(folder / FILES[1])
    template: Any = config.get("chat_template")
    if (folder / FILES[0]).is_file():
        template = read_small_file(folder / FILES[0], _LARGEST).decode("utf-8", "replace")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise UnreadableFile(
            "chat template", f"none in {folder.name}", " or ".join(FILES),
            "Copy it from the model's own repository, or leave --chat out.",
        )  # fmt: skip
    tokens = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
    return TemplateChat(None, style, template, tokens)


def _text(token: Any) -> str:
    held = token.get("content") if isinstance(token, dict) else token
    return held if isinstance(held, str) else ""


def _stated(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_small_file(path, _LARGEST))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            str(path), str(error), "a JSON object", "Repair it, or remove it."
        ) from error
    return found if isinstance(found, dict) else {}
