"""Read a completion request: turn the fields of OpenAI's API into sequences.

Completions and chats share sampling, limits, choices, streaming and stops. OpenAI's defaults hold
(temperature 1, and for completions 16 new tokens). Without a seed one is drawn; choice n of a
prompt draws from seed + n. A field that this server cannot honour is an error, unless it has the
value that means none.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError
from degarble.harness.inference.generation import Limits
from degarble.harness.inference.sampling import Sampling
from degarble.harness.serve.fields import Fields, shown
from degarble.harness.serve.messages import Ask
from degarble.harness.serve.refusals import ApiError, wrong, wrong_input

if TYPE_CHECKING:
    from degarble.harness.chat.chat import Chat
    from degarble.harness.serve.served_model import Desk

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
class Asked:
    """One request. Choice `n` of prompt `p` has the index p * choices + n."""

    asks: tuple[Ask, ...]
    choices: int
    stream: bool = False
    usage_wanted: bool = False
    echo: bool = False
    chat: Chat | None = None

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts, each prompt counted once, as OpenAI counts."""
        return sum(len(each.prompt) for each in self.asks[:: self.choices])


def completion_asked(raw: dict[str, Any], desk: Desk) -> Asked:
    """Read a request for completions."""
    fields = Fields(raw)
    require_model(fields, desk)
    prompts = _prompts(fields, desk)
    echo, top = fields.flag("echo"), fields.whole("logprobs", 0, MOST_LIKELIEST)
    asked = common(fields, Asked((), 1, echo=echo))
    wanted = fields.whole("max_tokens", 0 if echo else 1, desk.bounds.new_tokens)
    fields.only("best_of", asked.choices)
    fields.only("suffix", "")
    how = How.read(fields, desk)
    fields.end()
    made = [
        replace(ask, scores_prompt=echo and top is not None)
        for prompt in prompts
        for ask in how.asks(prompt, asked.choices, wanted, COMPLETION_TOKENS, top)
    ]
    return replace(asked, asks=tuple(made))


@dataclass(frozen=True)
class How:
    """Sampling and stops of all choices."""

    desk: Desk
    sampling: Sampling
    stops: tuple[str, ...]

    @classmethod
    def read(cls, fields: Fields, desk: Desk) -> How:
        """Read the fields; raise on those of other samplers."""
        seed = fields.whole("seed", -_SEEDS, _SEEDS - 1)
        sampling = Sampling(
            fields.number("temperature", 1.0, 0, 2),
            fields.number("top_p", 1.0, 0, 1),
            secrets.randbits(62) if seed is None else seed % _SEEDS,
        )
        fields.only("presence_penalty", 0, 0.0)
        fields.only("frequency_penalty", 0, 0.0)
        fields.only("logit_bias", {})
        fields.any("user")  # a name for the operator's books; this server keeps none
        return cls(desk, sampling, fields.texts("stop", MOST_STOPS))

    def asks(
        self, prompt: Prompt, choices: int, wanted: int | None, usual: int, top: int | None
    ) -> list[Ask]:
        """Make the sequences of one prompt, one a choice."""
        room = self.desk.context - len(prompt.ids)
        if room < max(1, wanted or 0):
            told = (
                f"this model's context is {self.desk.context} tokens, and {len(prompt.ids)} of the"
                f" prompt with {wanted or 1} new ones are more"
            )
            raise ApiError(400, told, "max_tokens", "context_length_exceeded")
        tokens = min(usual, room) if wanted is None else wanted
        limits = Limits(tokens, self.stops)
        seed = self.sampling.seed
        return [
            Ask(
                prompt.ids,
                replace(self.sampling, seed=(seed + number) % _SEEDS),
                limits,
                top,
                silent_begin=prompt.silent_begin,
            )
            for number in range(choices)
        ]


def require_model(fields: Fields, desk: Desk) -> None:
    """Refuse a request for another model."""
    name = fields.text("model")
    if name != desk.name:
        told = f"the model {shown(name)} is not served here; {shown(desk.name)} is"
        raise ApiError(404, told, "model", "model_not_found")


def common(fields: Fields, asked: Asked) -> Asked:
    """Read the number of choices, and whether the answer is streamed."""
    choices = fields.whole("n", 1, MOST_CHOICES) or 1
    stream, options = fields.flag("stream"), fields.inner("stream_options")
    if options is not None and not stream:
        raise wrong("stream_options", "only beside stream: true")
    usage = options.flag("include_usage") if options else False
    if options is not None:
        options.only("include_obfuscation", False)
        options.end()
    return replace(asked, choices=choices, stream=stream, usage_wanted=usage)


def _prompts(fields: Fields, desk: Desk) -> list[Prompt]:
    """Read one or several texts or lists of ids."""
    found = fields.any("prompt")
    if found is None:
        raise wrong("prompt", "is required", "missing_required_parameter")
    single = isinstance(found, str) or (isinstance(found, list) and found and _is_id(found[0]))
    several = [found] if single else found
    if not isinstance(several, list) or not several:
        raise wrong("prompt", f"{shown(found)} is no text, list of ids, or list of these")
    if len(several) > MOST_PROMPTS:
        raise wrong("prompt", f"{len(several)} prompts; a request may bring {MOST_PROMPTS}")
    return [_prompt(each, desk) for each in several]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompt(said: object, desk: Desk) -> Prompt:
    if isinstance(said, str):
        return encoded(said, desk, "prompt", begin=True)
    if not isinstance(said, list) or not said or not all(map(_is_id, said)):
        raise wrong("prompt", f"{shown(said)} is no text and no list of ids", "invalid_type")
    known = desk.model.config.vocab_size
    strange = [each for each in said if not 0 <= each < known]
    if strange:
        raise wrong("prompt", f"id {shown(strange[0])}; ids are below {known}")
    return _within(Prompt(tuple(said)), desk, "prompt")


def encoded(text: str, desk: Desk, param: str, *, begin: bool) -> Prompt:
    """Encode a text; `begin`: BOS comes first unless the text has it."""
    try:
        bare = desk.tokenizer.encode(text, begin=False)
        ids = desk.tokenizer.encode(text) if begin else bare
    except DegarbleError as error:
        raise wrong_input(param, error) from error
    if not bare:
        raise wrong(param, "a text of one token at least is expected")
    return _within(Prompt(tuple(ids), len(ids) > len(bare)), desk, param)


def _within(prompt: Prompt, desk: Desk, param: str) -> Prompt:
    most = min(desk.bounds.prompt_tokens, desk.context - 1)
    if len(prompt.ids) > most:
        told = f"{len(prompt.ids)} tokens; this server takes {most}"
        raise ApiError(400, f"{param}: {told}", param, "context_length_exceeded")
    return prompt
