"""Generate from prompts of different lengths in one batch, token by token, with KV caches.

A prompt ends at an end token, a stop text, its token limit or the model's context, and the next one
takes its place at once. Results do not depend on the batch: pieces of prefill depend only on the
prompt, and each prompt has its own random draws. Batching changes nothing but the order of sums in
a matrix product.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.stopping import Stops
from degarble.harness.chat.tokenizer import Growing
from degarble.harness.inference.sampling import Sampling
from degarble.references.state import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.chat.tokenizer import Tokenizer
    from degarble.harness.inference.sampling import Sampler
    from degarble.harness.inference.speaker import Speaker

SIDE_BY_SIDE = 16  # prompts that take part in a step, at most
PIECE = 2048  # tokens of one prompt that a step takes in
STEP = 8192  # tokens of a step beyond which no further prompt joins


class Finish(StrEnum):
    """Reason why a text ends."""

    END = "end"  # an end token
    STOP = "stop"  # a text that was asked for
    LENGTH = "length"  # the limit of new tokens
    CONTEXT = "context"  # the model's positions are used up


@dataclass(frozen=True)
class Limits:
    """When to end: new tokens, stops."""

    new_tokens: int = 128
    stops: tuple[str, ...] = ()


@dataclass(eq=False)
class Speech:
    """One prompt and its continuation. `sequence` may hold the first `fed` tokens already."""

    prompt: list[int]
    sequence: Sequence = field(default_factory=Sequence)
    ids: list[int] = field(default_factory=list)  # new tokens, an end token included
    text: str = ""
    finish: Finish | None = None
    sampler: Sampler | None = None  # whose draws go on; by default a fresh one

    @property
    def fed(self) -> int:
        """How many tokens the model has seen."""
        return self.sequence.length

    @property
    def all_ids(self) -> list[int]:
        """The prompt, and what follows."""
        return [*self.prompt, *self.ids]


@dataclass
class Pace:
    """Timing of a run: prompts until their first token, and the tokens after it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0  # beyond each prompt's first
    new_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a second, all prompts together; None where each had one at most."""
        return self.new_tokens / self.new_seconds if self.new_tokens else None


class Voice:
    """One prompt that takes part in steps, with its own way to choose tokens and to end."""

    def __init__(
        self,
        speaker: Speaker,
        speech: Speech,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.speech = speech
        self._context = speaker.context
        self._ends = tokenizer.ends if tokenizer else frozenset[int]()
        self._growing = Growing(tokenizer) if tokenizer else None
        self._sampler = speech.sampler or sampling.sampler()
        self._stops = Stops(limits.stops)
        self._new_tokens = limits.new_tokens

    @property
    def ready(self) -> bool:
        """Whether the model has taken all tokens, so that the next one can be chosen."""
        return self.speech.fed == len(self.speech.all_ids)

    def next_piece(self) -> list[int]:
        """Return the ids that the next step feeds."""
        speech = self.speech
        return speech.all_ids[speech.fed : speech.fed + PIECE]

    def take(self, logits: Tensor) -> str:
        """Choose the next token, and see whether it ends the text; the text that is certain now."""
        speech, stops, growing = self.speech, self._stops, self._growing
        number = self._sampler(logits)
        speech.ids.append(number)
        piece = ""
        if number in self._ends:
            speech.finish = Finish.END
        else:
            piece = stops.add(growing.add(number)) if growing else ""
            if stops.hit is not None:
                speech.finish = Finish.STOP
            elif len(speech.ids) >= self._new_tokens:
                speech.finish = Finish.LENGTH
            elif len(speech.all_ids) >= self._context:
                speech.finish = Finish.CONTEXT
        if speech.finish not in (None, Finish.STOP) and growing:
            piece += stops.add(growing.rest())
            if stops.hit is None:
                piece += stops.rest()
        speech.text += piece
        return piece


def require_fitting(speaker: Speaker, name: str, speech: Speech) -> None:
    """Refuse a prompt that the model cannot continue."""
    config, prompt = speaker.config, speech.prompt
    if not prompt or speech.fed >= len(prompt):
        raise InvalidArgument(name, "no tokens", "one token at least", "Say something.")
    strange = [each for each in prompt if not 0 <= each < config.vocab_size]
    if strange:
        raise InvalidArgument(
            name, strange[0], f"ids below {config.vocab_size}",
            "Use the tokenizer of this very model.",
        )  # fmt: skip
    if len(prompt) >= speaker.context:
        raise InvalidArgument(
            name, f"{len(prompt)} tokens",
            f"fewer than the model's context of {speaker.context}",
            "Shorten the prompt.",
        )  # fmt: skip


def has_room(active: Many[Voice], coming: Speech) -> bool:
    """Return whether one more prompt fits into a step; the first prompt always fits."""
    if not active:
        return True
    taken = sum(len(each.next_piece()) for each in active)
    size = taken + min(PIECE, len(coming.prompt) - coming.fed)
    return len(active) < SIDE_BY_SIDE and size <= STEP


class Generation:
    """Generates for several prompts with one model."""

    def __init__(
        self,
        speaker: Speaker,
        tokenizer: Tokenizer | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._speaker = speaker
        self._tokenizer = tokenizer
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        self.pace = Pace()

    def run(
        self, speeches: Many[Speech], heard: Callable[[Speech, str], None] | None = None
    ) -> None:
        """Continue all prompts; `heard` receives every piece of text as soon as it is certain."""
        for number, speech in enumerate(speeches, 1):
            require_fitting(self._speaker, f"prompt {number}", speech)
        how = (self._tokenizer, self._sampling, self._limits)
        waiting = [Voice(self._speaker, speech, *how) for speech in reversed(speeches)]
        active: list[Voice] = []
        while waiting or active:
            while waiting and has_room(active, waiting[-1].speech):
                active.append(waiting.pop())
            self._step(active, heard)
            active = [each for each in active if each.speech.finish is None]

    def _step(self, active: list[Voice], heard: Callable[[Speech, str], None] | None) -> None:
        begin = time.perf_counter()
        pieces = [each.next_piece() for each in active]
        logits = self._speaker.next_logits(
            [each.speech.sequence for each in active], [torch.tensor(piece) for piece in pieces]
        )
        ready = [n for n, each in enumerate(active) if each.ready]
        fresh = any(not each.speech.ids for each in active)
        for number in ready:
            voice = active[number]
            piece = voice.take(logits[number])
            if heard is not None and (piece or voice.speech.finish):
                heard(voice.speech, piece)
        seconds = time.perf_counter() - begin
        if fresh:
            self.pace.prompt_seconds += seconds
            self.pace.prompt_tokens += sum(len(piece) for piece in pieces)
        else:
            self.pace.new_seconds += seconds
            self.pace.new_tokens += len(ready)
