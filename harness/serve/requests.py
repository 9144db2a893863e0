"""Read completion and chat requests of OpenAI's API; every field is used, or is an error."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from degarble.harness.base.errors import DegarbleError
from degarble.harness.chat.conversation import CHAT, EFFORTS, THINKING, TOOLS, Style, is_tool
from degarble.harness.inference.generation import Limits, Sampling
from degarble.harness.serve.messages import ApiError, SequenceRequest, bad_input, bad_parameter

if TYPE_CHECKING:
    from degarble.harness.chat.chat import Chat
    from degarble.harness.serve.served_model import ServedModel


# --------------------------------------------------------------------------------------------------
# A body, field by field. JSON is strict: UTF-8, one object, no key twice, no NaN, bounded depth.
# `null` means absent, as in OpenAI's API. `end` raises on fields that nothing has read.

_SHOWN = 80


def read_object(body: bytes) -> dict[str, Any]:
    """Read a body that must be one JSON object."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(
            400, f"body: no UTF-8 at byte {error.start}", None, "invalid_json"
        ) from error
    try:
        found = json.loads(text, parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"body: no JSON: {message[:200]}", None, "invalid_json") from error
    if not isinstance(found, dict):
        raise ApiError(400, "body: a JSON object is expected", None, "invalid_json")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key occurs twice")
    return made


def shown(value: object) -> str:
    """Return a value of a request, short and printable, for a message."""
    try:
        # ASCII, so that control characters of a request reach no terminal or log.
        text = ascii(value)
    except RecursionError:
        return "a value nested deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class RequestFields:
    """An object that is read field by field; `path` precedes its names in messages."""

    def __init__(self, raw: dict[str, Any], path: str = "") -> None:
        # null counts as absent, as in OpenAI's API.
        self._left = {key: value for key, value in raw.items() if value is not None}
        self._path = path

    def named(self, name: str) -> str:
        """Return a field's name from the body on."""
        return f"{self._path}{name}"

    def any(self, name: str) -> Any:
        """Take any value; None where it is absent."""
        return self._left.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether a field is there and was not taken yet."""
        return name in self._left

    def text(self, name: str, default: str | None = None) -> str:
        """Take a text; without a default it is required."""
        found = self.any(name)
        if found is None and default is not None:
            return default
        if found is None:
            raise bad_parameter(self.named(name), "is required", "missing_required_parameter")
        if not isinstance(found, str):
            raise bad_parameter(self.named(name), f"{shown(found)} is no text", "invalid_type")
        return found

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Take true or false."""
        found = self.any(name)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise bad_parameter(
                self.named(name), f"{shown(found)} is not true or false", "invalid_type"
            )
        return found

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Take a number within its range."""
        found = self.any(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise bad_parameter(self.named(name), f"{shown(found)} is no number", "invalid_type")
        if not low <= found <= high or not math.isfinite(found):
            raise self._outside(name, found, low, high)
        return float(found)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Take a whole number within its range; None where it is absent."""
        found = self.any(name)
        if found is None:
            return None
        # bool is a subclass of int: true is no whole number.
        if isinstance(found, bool) or not isinstance(found, int):
            raise bad_parameter(
                self.named(name), f"{shown(found)} is no whole number", "invalid_type"
            )
        if not low <= found <= high:
            raise self._outside(name, found, low, high)
        return found

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Take a text or a list of texts, none of them empty."""
        found = self.any(name)
        several = [found] if isinstance(found, str) else found or []
        if not isinstance(several, list) or not all(isinstance(each, str) for each in several):
            raise bad_parameter(
                self.named(name), f"{shown(found)} is no text or list", "invalid_type"
            )
        if len(several) > most or "" in several:
            raise bad_parameter(self.named(name), f"at most {most} texts, none of them empty")
        return tuple(several)

    def inner(self, name: str) -> RequestFields | None:
        """Take an object; None where it is absent."""
        found = self.any(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise bad_parameter(self.named(name), f"{shown(found)} is no object", "invalid_type")
        return RequestFields(found, f"{self.named(name)}.")

    def require_one_of(self, name: str, *values: object) -> None:
        """Refuse a field whose value would have an effect that this server does not have."""
        found = self.any(name)
        # Types are compared as well: 1 is not true.
        if found is not None and not any(type(found) is type(v) and found == v for v in values):
            allowed = " or ".join(["leave it out", *(f"give {json.dumps(v)}" for v in values)])
            message = f"{shown(found)} is not supported; {allowed}"
            raise bad_parameter(self.named(name), message, "unsupported_value")

    def end(self) -> None:
        """Refuse what is left."""
        for name in self._left:
            raise bad_parameter(
                shown(self.named(name))[1:-1], "is not supported", "unsupported_parameter"
            )

    def _outside(self, name: str, found: float, low: float, high: float) -> ApiError:
        return bad_parameter(self.named(name), f"{shown(found)} is not within {low:g} and {high:g}")


# --------------------------------------------------------------------------------------------------
# Completions.
#
# Completions and chats share sampling, limits, choices, streaming and stops. OpenAI's defaults hold
# (temperature 1, and for completions 16 new tokens). Without a seed one is drawn; choice n of a
# prompt draws from seed + n. A field that this server cannot honour is an error, unless it has the
# value that means none.

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_PROMPTS = 64
MOST_LIKELIEST = 20
COMPLETION_TOKENS = 16  # OpenAI's default
_SEEDS = 1 << 63


@dataclass(frozen=True)
class Prompt:
    """Ids, and whether the server put the first of them in front."""

    ids: tuple[int, ...]
    silent_begin: bool = False


@dataclass(frozen=True)
class CompletionRequest:
    """One request. Choice `n` of prompt `p` has the index p * choices + n."""

    sequences: tuple[SequenceRequest, ...]
    choices: int
    stream: bool = False
    usage_wanted: bool = False
    echo: bool = False
    chat: Chat | None = None

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts, each prompt counted once, as OpenAI counts."""
        return sum(len(ask.prompt) for ask in self.sequences[:: self.choices])


def read_completion(raw: dict[str, Any], served: ServedModel) -> CompletionRequest:
    """Read a request for completions."""
    fields = RequestFields(raw)
    require_model(fields, served)
    prompts = _prompts(fields, served)
    echo, top = fields.flag("echo"), fields.integer("logprobs", 0, MOST_LIKELIEST)
    request = read_choices(fields, CompletionRequest((), 1, echo=echo))
    wanted = fields.integer("max_tokens", 0 if echo else 1, served.bounds.new_tokens)
    fields.require_one_of("best_of", request.choices)
    fields.require_one_of("suffix", "")
    sampling_options = SamplingOptions.read(fields, served)
    fields.end()
    requests = [
        replace(sequence_request, scores_prompt=echo and top is not None)
        for prompt in prompts
        for sequence_request in sampling_options.sequence_requests(
            prompt, request.choices, wanted, COMPLETION_TOKENS, top
        )
    ]
    return replace(request, sequences=tuple(requests))


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling and stops of all choices."""

    model: ServedModel
    sampling: Sampling
    stops: tuple[str, ...]

    @classmethod
    def read(cls, fields: RequestFields, served: ServedModel) -> SamplingOptions:
        """Read the fields; raise on those of other samplers."""
        seed = fields.integer("seed", -_SEEDS, _SEEDS - 1)
        sampling = Sampling(
            fields.number("temperature", 1.0, 0, 2),
            fields.number("top_p", 1.0, 0, 1),
            secrets.randbits(62) if seed is None else seed % _SEEDS,
        )
        fields.require_one_of("presence_penalty", 0, 0.0)
        fields.require_one_of("frequency_penalty", 0, 0.0)
        fields.require_one_of("logit_bias", {})
        fields.any("user")  # a name for the operator's books; this server keeps none
        return cls(served, sampling, fields.texts("stop", MOST_STOPS))

    def sequence_requests(
        self, prompt: Prompt, choices: int, wanted: int | None, usual: int, top: int | None
    ) -> list[SequenceRequest]:
        """Make the sequences of one prompt, one a choice."""
        room = self.model.context - len(prompt.ids)
        if room < max(1, wanted or 0):
            message = (
                f"this model's context is {self.model.context} tokens, and {len(prompt.ids)} of the"
                f" prompt with {wanted or 1} new ones are more"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        tokens = min(usual, room) if wanted is None else wanted
        limits = Limits(tokens, self.stops)
        seed = self.sampling.seed
        return [
            SequenceRequest(
                prompt.ids,
                replace(self.sampling, seed=(seed + number) % _SEEDS),
                limits,
                top,
                silent_begin=prompt.silent_begin,
            )
            for number in range(choices)
        ]


def require_model(fields: RequestFields, served: ServedModel) -> None:
    """Refuse a request for another model."""
    name = fields.text("model")
    if name != served.name:
        message = f"the model {shown(name)} is not served here; {shown(served.name)} is"
        raise ApiError(404, message, "model", "model_not_found")


def read_choices(fields: RequestFields, request: CompletionRequest) -> CompletionRequest:
    """Read the number of choices, and whether the answer is streamed."""
    choices = fields.integer("n", 1, MOST_CHOICES) or 1
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is not None and not stream:
        raise bad_parameter("stream_options", "only with stream: true")
    usage = options.flag("include_usage") if options else False
    if options is not None:
        options.require_one_of("include_obfuscation", False)
        options.end()
    return replace(request, choices=choices, stream=stream, usage_wanted=usage)


def _prompts(fields: RequestFields, served: ServedModel) -> list[Prompt]:
    """Read one or several texts or lists of ids."""
    found = fields.any("prompt")
    if found is None:
        raise bad_parameter("prompt", "is required", "missing_required_parameter")
    single = isinstance(found, str) or (isinstance(found, list) and found and _is_id(found[0]))
    several = [found] if single else found
    if not isinstance(several, list) or not several:
        raise bad_parameter("prompt", f"{shown(found)} is no text, list of ids, or list of these")
    if len(several) > MOST_PROMPTS:
        raise bad_parameter("prompt", f"{len(several)} prompts; a request may bring {MOST_PROMPTS}")
    return [_prompt(each, served) for each in several]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(said: object, served: ServedModel) -> Prompt:
    if isinstance(said, str):
        return encode_text(said, served, "prompt", begin=True)
    if not isinstance(said, list) or not said or not all(map(_is_id, said)):
        raise bad_parameter(
            "prompt", f"{shown(said)} is no text and no list of ids", "invalid_type"
        )
    known = served.model.config.vocab_size
    strange = [each for each in said if not 0 <= each < known]
    if strange:
        raise bad_parameter("prompt", f"id {shown(strange[0])}; ids are below {known}")
    return _within(Prompt(tuple(said)), served, "prompt")


def encode_text(text: str, served: ServedModel, param: str, *, begin: bool) -> Prompt:
    """Encode a text; `begin`: BOS comes first unless the text has it."""
    try:
        bare = served.tokenizer.encode(text, begin=False)
        ids = served.tokenizer.encode(text) if begin else bare
    except DegarbleError as error:
        raise bad_input(param, error) from error
    if not bare:
        raise bad_parameter(param, "a text of one token at least is expected")
    return _within(Prompt(tuple(ids), len(ids) > len(bare)), served, param)


def _within(prompt: Prompt, served: ServedModel, param: str) -> Prompt:
    most = min(served.bounds.prompt_tokens, served.context - 1)
    if len(prompt.ids) > most:
        message = f"{len(prompt.ids)} tokens; this server takes {most}"
        raise ApiError(400, f"{param}: {message}", param, "context_length_exceeded")
    return prompt


# --------------------------------------------------------------------------------------------------
# Chats: messages, tools, thinking, choices. Tools go into the system message, as in the official
# encoding. Fields that the encodings have no text for are errors: pictures, several parts, forced
# calls, formats of the answer.

ROLES = ("system", "developer", "user", "assistant", "tool")
_LAST = ("user", "developer", "tool")
_MOST_MESSAGES = 4096


def read_chat(raw: dict[str, Any], served: ServedModel) -> CompletionRequest:
    """Read a request for a chat completion."""
    fields = RequestFields(raw)
    require_model(fields, served)
    messages, tools = _messages(fields), _tools(fields)
    chat = served.chat(_style(fields))
    # The sequences are filled in below, when all fields have been read.
    request = read_choices(fields, CompletionRequest((), 1, chat=chat))
    top = fields.integer("top_logprobs", 0, MOST_LIKELIEST)
    wants_scores = fields.flag("logprobs")
    if top is not None and not wants_scores:
        raise bad_parameter("top_logprobs", "only with logprobs: true")
    wanted = _new_tokens(fields, served)
    sampling_options = SamplingOptions.read(fields, served)
    form = fields.inner("response_format")
    if form is not None:
        form.require_one_of("type", "text")
        form.end()
    fields.end()
    try:
        text = chat.encode(_with_tools(messages, tools))
    except DegarbleError as error:
        raise bad_input("messages", error) from error
    except RecursionError as error:
        raise bad_parameter("messages", "arguments of a call are nested too deeply") from error
    # The encoding writes BOS itself.
    prompt = encode_text(text, served, "messages", begin=False)
    scores = (top or 0) if wants_scores else None
    return replace(
        request,
        sequences=tuple(
            sampling_options.sequence_requests(
                prompt, request.choices, wanted, served.bounds.new_tokens, scores
            )
        ),
    )


def _new_tokens(fields: RequestFields, served: ServedModel) -> int | None:
    """Read the token limit by its new name, or by its old one."""
    new = fields.integer("max_completion_tokens", 1, served.bounds.new_tokens)
    old = fields.integer("max_tokens", 1, served.bounds.new_tokens)
    if new is not None and old is not None and new != old:
        raise bad_parameter("max_tokens", f"{old} with max_completion_tokens {new}; give one")
    return old if new is None else new


def _style(fields: RequestFields) -> Style:
    """Read whether and how hard the model should think."""
    effort = fields.any("reasoning_effort")
    thinking = fields.inner("thinking")
    kind = None
    if thinking is not None:
        kind = thinking.text("type")
        thinking.end()
        if kind not in ("enabled", "disabled"):
            raise bad_parameter("thinking.type", f"{shown(kind)} is not enabled or disabled")
    if effort is not None and effort not in (*EFFORTS, "none"):
        known = ", ".join((*EFFORTS, "none"))
        raise bad_parameter(
            "reasoning_effort", f"{shown(effort)}; this model's encoding knows {known}"
        )
    # An effort implies thinking; without one the default is plain chat.
    if effort not in (None, "none"):
        if kind == "disabled":
            raise bad_parameter("reasoning_effort", "with thinking that is disabled")
        return Style(THINKING, effort)
    if kind == "enabled" and effort == "none":
        raise bad_parameter("reasoning_effort", '"none" with thinking that is enabled')
    return Style(THINKING if kind == "enabled" else CHAT)


def _tools(fields: RequestFields) -> list[dict[str, Any]]:
    """Read the functions that the model may call; none where calls are forbidden."""
    found = fields.any("tools")
    if found is not None and (not isinstance(found, list) or not all(map(is_tool, found))):
        raise bad_parameter("tools", f"{shown(found)} is not {TOOLS}", "invalid_type")
    choice = fields.any("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad_parameter("tool_choice", f"{shown(choice)} is not supported", "unsupported_value")
    fields.require_one_of("parallel_tool_calls", True)
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


def _messages(fields: RequestFields) -> list[dict[str, Any]]:
    found = fields.any("messages")
    if not isinstance(found, list) or not found:
        raise bad_parameter(
            "messages", "a list of one message at least is expected", "invalid_type"
        )
    if len(found) > _MOST_MESSAGES:
        raise bad_parameter(
            "messages", f"{len(found)} messages; a request may bring {_MOST_MESSAGES}"
        )
    made = [_message(each, f"messages[{number}]") for number, each in enumerate(found)]
    if made[-1]["role"] not in _LAST:
        raise bad_parameter("messages", f"the last one is of one of {', '.join(_LAST)}")
    return made


def _message(found: object, path: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise bad_parameter(path, f"{shown(found)} is no object", "invalid_type")
    fields = RequestFields(found, f"{path}.")
    role = fields.text("role")
    if role not in ROLES:
        raise bad_parameter(f"{path}.role", f"{shown(role)} is not one of {', '.join(ROLES)}")
    made: dict[str, Any] = {"role": role}
    content = _content(fields, path)
    if content is not None:
        made["content"] = content
    if role == "assistant":
        for name in ("reasoning_content", "tool_calls"):
            if fields.has(name):
                made[name] = _calls(fields, path) if name == "tool_calls" else fields.text(name)
        fields.require_one_of("refusal")
    if role == "tool":
        made["tool_call_id"] = fields.text("tool_call_id")
    fields.end()
    if "content" not in made and "tool_calls" not in made:
        raise bad_parameter(f"{path}.content", "is required", "missing_required_parameter")
    return made


def _content(fields: RequestFields, path: str) -> str | None:
    """Read a text, or a single text part: no source says how several are joined."""
    if not fields.has("content"):
        return None
    found = fields.any("content")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], dict):
        part = RequestFields(found[0], f"{path}.content[0].")
        part.require_one_of("type", "text")
        found = part.text("text")
        part.end()
    if not isinstance(found, str):
        message = f"{shown(found)} is no text; of parts one text is supported"
        raise bad_parameter(f"{path}.content", message, "invalid_type")
    return found


def _calls(fields: RequestFields, path: str) -> list[dict[str, Any]]:
    found = fields.any("tool_calls")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise bad_parameter(f"{path}.tool_calls", "a list of calls is expected", "invalid_type")
    made = []
    for number, each in enumerate(found):
        call = RequestFields(each, f"{path}.tool_calls[{number}].")
        number_of_call = call.text("id", "")
        call.require_one_of("type", "function")
        function = call.inner("function") or RequestFields(
            {}, f"{path}.tool_calls[{number}].function."
        )
        named = {"name": function.text("name"), "arguments": function.text("arguments")}
        function.end()
        call.end()
        made.append({"id": number_of_call, "type": "function", "function": named})
    return made
