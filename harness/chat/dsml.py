"""Write and parse tool calls in DSML, DeepSeek's markup.

Both families share the grammar apart from the block's name. A string is written as it is, anything
else as JSON. So a string that contains the closing mark cannot be told from its end, and is read as
the grammar has it. Every departure from the grammar is an error with its position. Nothing is
repaired, because a call that is half right is a finding.

Source: facts of the official encoders, sections 12.2, 12.3 and 24.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.special_tokens import DSML, EOS

if TYPE_CHECKING:
    from collections.abc import Iterable

_INVOKE, _END_INVOKE = f"<{DSML}invoke", f"</{DSML}invoke>"
_PARAMETER, _END_PARAMETER = f"<{DSML}parameter", f"</{DSML}parameter>"
_NAME = re.compile(r'\s*name="(.*?)">\n')
_ASSIGNED = re.compile(r' name="(.*?)" string="(true|false)">(.*)', re.DOTALL)


class ToolCall(NamedTuple):
    """One call: a function's name, and its arguments as a JSON text."""

    name: str
    arguments: str

    @classmethod
    def from_openai(cls, call: Mapping[str, Any]) -> ToolCall:
        """Read a call that is written as in OpenAI's API."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, dict) or not {"name", "arguments"} <= function.keys():
            raise InvalidArgument(
                "tool call", call, "a mapping with function: {name, arguments}",
                "Write tool calls as OpenAI's API has them.",
            )  # fmt: skip
        arguments = function["arguments"]
        return cls(
            function["name"], as_json(arguments) if isinstance(arguments, dict) else arguments
        )

    def document(self) -> dict[str, Any]:
        """Spell the call as OpenAI's API does."""
        return {"type": "function", "function": self._asdict()}


def as_json(value: object) -> str:
    """Return JSON with every character as itself; what UTF-8 cannot hold is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value)
    return text


def write_calls(calls: Iterable[ToolCall], block: str, *, lenient: bool) -> str:
    """Return the block of calls; `lenient` turns arguments that are no JSON into one string."""
    invokes = "\n".join(_invoke(call, lenient=lenient) for call in calls)
    return f"\n\n<{DSML}{block}>\n{invokes}\n</{DSML}{block}>"


def _invoke(call: ToolCall, *, lenient: bool) -> str:
    parameters = "\n".join(
        f'{_PARAMETER} name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else as_json(value)}{_END_PARAMETER}"
        for key, value in _arguments(call, lenient=lenient).items()
    )
    return f'{_INVOKE} name="{call.name}">\n{parameters}\n{_END_INVOKE}'


def _arguments(call: ToolCall, *, lenient: bool) -> dict[str, Any]:
    try:
        found = json.loads(call.arguments)
    except (TypeError, ValueError):
        found = None
        if lenient:
            return {"arguments": call.arguments}
    if not isinstance(found, dict):
        raise InvalidArgument(
            f"arguments of {call.name}", call.arguments, "a JSON object as text",
            "Encode the arguments as one JSON object.",
        )  # fmt: skip
    return found


def read_calls(text: str, block: str) -> list[ToolCall]:
    """Read what follows the block's opening mark: calls, the closing mark, then EOS or nothing."""
    reader, calls, closing = _Reader(text), [], f"</{DSML}{block}>"
    reader.expect(">\n", "the end of the opening mark")
    while not reader.skip(closing):
        calls.append(_call(reader))
    rest = reader.rest()
    if rest not in ("", EOS):
        raise reader.refused(rest, "nothing after the closing mark but the end")
    return calls


def _call(reader: _Reader) -> ToolCall:
    reader.expect(_INVOKE, "an invoke, or the closing mark")
    (name,) = reader.match(_NAME, 'name="..." of the invoke')
    given: dict[str, str] = {}
    reader.skip("\n")  # an invoke without parameters has an empty line in their place
    while not reader.skip(_END_INVOKE):
        reader.expect(_PARAMETER, "a parameter, or the end of the invoke")
        body = reader.until(_END_PARAMETER, "the end of the parameter")
        found = _ASSIGNED.fullmatch(body)
        if found is None or DSML in body:
            raise reader.refused(body, 'name="..." string="true|false">VALUE of one parameter')
        key, is_string, value = found.groups()
        reader.expect("\n", "a line's end after a parameter")
        if key in given:
            raise reader.refused(key, "each parameter once")
        given[key] = as_json(value) if is_string == "true" else value
    reader.expect("\n", "a line's end after an invoke")
    spelt = ", ".join(f"{as_json(key)}: {value}" for key, value in given.items())
    return ToolCall(name, f"{{{spelt}}}")


class _Reader:
    """A position in a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rest(self) -> str:
        return self._text[self._at :]

    def skip(self, mark: str) -> bool:
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) * found
        return found

    def expect(self, mark: str, what: str) -> None:
        if not self.skip(mark):
            raise self.refused(self.rest()[:60], what)

    def match(self, pattern: re.Pattern[str], what: str) -> tuple[str, ...]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self.refused(self.rest()[:60], what)
        self._at = found.end()
        return found.groups()

    def until(self, mark: str, what: str) -> str:
        end = self._text.find(mark, self._at)
        if end < 0:
            raise self.refused(self.rest()[:60], what)
        found = self._text[self._at : end]
        self._at = end + len(mark)
        return found

    def refused(self, found: str, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"tool calls, character {self._at}", found, what,
            "The model left the grammar of DSML; read the text as it is.",
        )  # fmt: skip
