"""What both chat encodings share: style, checks of messages, sentences of the encoder file."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnknownName, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.dsml import ToolCall, as_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Prompt sentences that models were trained on, read from the encoder file of a checkpoint.
#
# The official repositories ship `encoding/encoding_dsv4.py` (or `_dsv32.py`) with the weights. The
# sentences are theirs, so they are read from there and not repeated here. The file is parsed, never
# run: only assignments of plain strings count. Texts are compared with known fingerprints; another
# text is used all the same, and reported by `unknown`.
#
# Without such a file, tools, response formats and efforts are errors: a paraphrase would be another
# prompt.

PLACES = ("encoding", ".", "inference")  # folders of a checkpoint, in this order
LARGEST_FILE = 1 << 20
# A wording, and the names by which the encoders of the two families know it.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tools": ("TOOLS_TEMPLATE", "TOOLS_SYSTEM_TEMPLATE"),
        "response format": ("response_format_template",),
        "effort max": ("REASONING_EFFORT_MAX",),
        "effort high": ("REASONING_EFFORT_HIGH",),
    }
)
# sha256 of the texts that were read in public copies of the official encoders.
FINGERPRINTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tools": ("09b7269daaddbeaf11a3ed55c07b1846c35162b841d8b4301bbe0449879d1fd8",),
        "effort max": (
            "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7",  # first release
            "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c",  # 0731 and 0813
        ),
    }
)


@dataclass(frozen=True)
class PromptTemplates:
    """The sentences of one encoder; `source` is its file, None where a checkpoint has none."""

    texts: Mapping[str, str]
    source: Path | None

    def text(self, name: str) -> str:
        """Return one sentence."""
        if name not in self.texts:
            found = (
                "no encoder in the checkpoint's folder" if self.source is None else str(self.source)
            )
            raise UnreadableFile(
                f"wording of {name}",
                found,
                f"{' or '.join(NAMES[name])} in encoding/encoding_dsv4.py or encoding_dsv32.py",
                "Copy the folder `encoding` of the official repository into the checkpoint.",
            )
        return self.texts[name]

    @property
    def unknown(self) -> list[str]:
        """Name the sentences that differ from those of the public copies."""
        return [
            name
            for name, text in self.texts.items()
            if name in FINGERPRINTS
            and hashlib.sha256(text.encode()).hexdigest() not in FINGERPRINTS[name]
        ]


NO_TEMPLATES = PromptTemplates(MappingProxyType({}), None)


def read_templates(folder: Path, stem: str) -> PromptTemplates:
    """Find the encoder `stem` in a checkpoint's folder, and read its sentences."""
    for place in PLACES:
        path = folder / place / f"{stem}.py"
        if path.is_file():
            return PromptTemplates(MappingProxyType(_texts(path)), path)
    return NO_TEMPLATES


def _texts(path: Path) -> dict[str, str]:
    raw = read_small_file(path, LARGEST_FILE)
    try:
        constants = _constants(ast.parse(raw.decode()))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise UnreadableFile(
            "encoder", f"{path}: {error}", "a Python file with its texts as constants",
            "Copy it from the official repository again, or remove it.",
        ) from error  # fmt: skip
    return {
        name: constants[known]
        for name, spellings in NAMES.items()
        for known in spellings
        if known in constants
    }


def _constants(module: ast.Module) -> dict[str, str]:
    """Collect the module-level names of a file to which a plain string is assigned."""
    found = {}
    for statement in module.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({t.id: value.value for t in targets if isinstance(t, ast.Name)})
    return found


# --------------------------------------------------------------------------------------------------
# Style, checks of messages, extra blocks. Unknown roles, modes and efforts are errors, and so are
# messages that are no mappings with a role.

if TYPE_CHECKING:
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
    wordings: PromptTemplates = NO_TEMPLATES


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
            ToolCall.from_openai(call)


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
    asked = [i for i, message in enumerate(messages) if message["role"] in ("user", "developer")]
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
