"""Generate from prompts token by token, sample, and compute the perplexity of a text."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.chat.tokenizer import IncrementalDecoder, Stops
from degarble.references.model import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Many

    from torch import Tensor

    from degarble.harness.chat.tokenizer import Tokenizer
    from degarble.harness.inference.model import LogitsModel


# --------------------------------------------------------------------------------------------------
# Sampling: greedy, or with temperature and top-p. A draw depends on the seed and on the number of
# tokens drawn before for the same prompt, never on the rest of the batch. All arithmetic is
# float64; ties go to the lower id. Logits that are not finite are an error, since a token would
# hide a broken model. A capture continues, because broken runs are what it is for.


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 takes the likeliest token each time."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    goes_on: bool = False

    def sampler(self) -> Sampler:
        """A sampler for one prompt."""
        return Sampler(self)


class Sampler:
    """Sampler of one prompt's tokens, with its own random draws."""

    def __init__(self, sampling: Sampling) -> None:
        self._how = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)
        self.drawn = 0

    def __call__(self, logits_V: Tensor) -> int:
        """Choose the next token."""
        values = logits_V.detach().double().cpu()
        wrong = int((~values.isfinite()).sum())
        if wrong and self._how.goes_on:
            self.drawn += 1
            return int(values.where(values.isfinite(), -torch.inf).argmax())
        if wrong:
            raise InvalidArgument(
                f"logits of new token {self.drawn}", f"{wrong} of {values.numel()} not finite",
                "finite logits", "Audit the checkpoint: degarble audit CKPT.",
            )  # fmt: skip
        self.drawn += 1
        if self._how.temperature == 0:
            return int(values.argmax())  # of several largest ones the first
        # Trap: a tiny temperature makes quotients infinite; only those below the peak may be.
        share = torch.softmax((values - values.max()) / self._how.temperature, dim=-1)
        ordered, numbers = torch.sort(share, descending=True, stable=True)
        total = ordered.cumsum(0)
        kept = int((total < self._how.top_p).sum()) + 1  # the one that reaches the share is in
        kept = min(kept, len(total))
        drawn = torch.rand((), generator=self._random, dtype=torch.float64) * total[kept - 1]
        place = int(torch.searchsorted(total[:kept], drawn, right=True))
        return int(numbers[min(place, kept - 1)])


# --------------------------------------------------------------------------------------------------
# Generation: prompts of different lengths in one batch, with KV caches. A prompt ends at an end
# token, a stop text, its token limit or the model's context, and the next one takes its place at
# once. Results do not depend on the batch: pieces of prefill depend only on the prompt, and each
# prompt has its own random draws. Batching changes nothing but the order of sums in a matrix
# product.

MOST_CONCURRENT = 16  # prompts that take part in a step, at most
PREFILL_TOKENS = 2048  # tokens of one prompt that a step takes in
STEP_TOKENS = 8192  # tokens of a step beyond which no further prompt joins


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
class Continuation:
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
class GenerationTiming:
    """Timing of a run: prompts until their first token, and the tokens after it."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    new_tokens: int = 0  # beyond each prompt's first
    new_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens a second, all prompts together; None where each had one at most."""
        return self.new_tokens / self.new_seconds if self.new_tokens else None


class RunningPrompt:
    """One prompt that takes part in steps, with its own way to choose tokens and to end."""

    def __init__(
        self,
        model: LogitsModel,
        continuation: Continuation,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.continuation = continuation
        self._context = model.context
        self._ends = tokenizer.ends if tokenizer else frozenset[int]()
        self._growing = IncrementalDecoder(tokenizer) if tokenizer else None
        self._sampler = continuation.sampler or sampling.sampler()
        self._stops = Stops(limits.stops)
        self._new_tokens = limits.new_tokens

    @property
    def ready(self) -> bool:
        """Whether the model has taken all tokens, so that the next one can be chosen."""
        return self.continuation.fed == len(self.continuation.all_ids)

    def next_piece(self) -> list[int]:
        """Return the ids that the next step feeds."""
        continuation = self.continuation
        return continuation.all_ids[continuation.fed : continuation.fed + PREFILL_TOKENS]

    def take(self, logits: Tensor) -> str:
        """Choose the next token, and see whether it ends the text; the text that is certain now."""
        continuation, stops, growing = self.continuation, self._stops, self._growing
        number = self._sampler(logits)
        continuation.ids.append(number)
        piece = ""
        if number in self._ends:
            continuation.finish = Finish.END
        else:
            piece = stops.add(growing.add(number)) if growing else ""
            if stops.hit is not None:
                continuation.finish = Finish.STOP
            elif len(continuation.ids) >= self._new_tokens:
                continuation.finish = Finish.LENGTH
            elif len(continuation.all_ids) >= self._context:
                continuation.finish = Finish.CONTEXT
        if continuation.finish not in (None, Finish.STOP) and growing:
            piece += stops.add(growing.rest())
            if stops.hit is None:
                piece += stops.rest()
        continuation.text += piece
        return piece


def require_fitting(model: LogitsModel, name: str, continuation: Continuation) -> None:
    """Refuse a prompt that the model cannot continue."""
    config, prompt = model.config, continuation.prompt
    if not prompt or continuation.fed >= len(prompt):
        raise InvalidArgument(name, "no tokens", "one token at least", "Say something.")
    strange = [each for each in prompt if not 0 <= each < config.vocab_size]
    if strange:
        raise InvalidArgument(
            name, strange[0], f"ids below {config.vocab_size}",
            "Use the tokenizer of this very model.",
        )  # fmt: skip
    if len(prompt) >= model.context:
        raise InvalidArgument(
            name, f"{len(prompt)} tokens",
            f"fewer than the model's context of {model.context}",
            "Shorten the prompt.",
        )  # fmt: skip


def has_room(active: Many[RunningPrompt], coming: Continuation) -> bool:
    """Return whether one more prompt fits into a step; the first prompt always fits."""
    if not active:
        return True
    taken = sum(len(prompt.next_piece()) for prompt in active)
    size = taken + min(PREFILL_TOKENS, len(coming.prompt) - coming.fed)
    return len(active) < MOST_CONCURRENT and size <= STEP_TOKENS


class Generation:
    """Generates for several prompts with one model."""

    def __init__(
        self,
        model: LogitsModel,
        tokenizer: Tokenizer | None = None,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        self.pace = GenerationTiming()

    def run(
        self,
        continuations: Many[Continuation],
        on_text: Callable[[Continuation, str], None] | None = None,
    ) -> None:
        """Continue all prompts; `on_text` receives every piece of text as soon as it is certain."""
        for number, continuation in enumerate(continuations, 1):
            require_fitting(self._model, f"prompt {number}", continuation)
        how = (self._tokenizer, self._sampling, self._limits)
        waiting = [RunningPrompt(self._model, speech, *how) for speech in reversed(continuations)]
        active: list[RunningPrompt] = []
        while waiting or active:
            while waiting and has_room(active, waiting[-1].continuation):
                active.append(waiting.pop())
            self._step(active, on_text)
            active = [prompt for prompt in active if prompt.continuation.finish is None]

    def _step(
        self, active: list[RunningPrompt], on_text: Callable[[Continuation, str], None] | None
    ) -> None:
        begin = time.perf_counter()
        pieces = [running_prompt.next_piece() for running_prompt in active]
        logits = self._model.next_logits(
            [running_prompt.continuation.sequence for running_prompt in active],
            [torch.tensor(piece) for piece in pieces],
        )
        ready = [n for n, running_prompt in enumerate(active) if running_prompt.ready]
        fresh = any(not running_prompt.continuation.ids for running_prompt in active)
        for number in ready:
            prompt = active[number]
            piece = prompt.take(logits[number])
            if on_text is not None and (piece or prompt.continuation.finish):
                on_text(prompt.continuation, piece)
        seconds = time.perf_counter() - begin
        if fresh:
            self.pace.prompt_seconds += seconds
            self.pace.prompt_tokens += sum(len(piece) for piece in pieces)
        else:
            self.pace.new_seconds += seconds
            self.pace.new_tokens += len(ready)


# --------------------------------------------------------------------------------------------------
# Perplexity: the log-probability of every token, and the mean. The text is one sequence, so every
# token has its full context; probabilities are those of one forward pass. Layers take
# PERPLEXITY_TOKENS tokens at a time with their caches, as engines prefill; a text of at most that
# many is one pass. The head takes rows in pieces, because the logits of a whole text would not fit
# in memory.

PERPLEXITY_TOKENS = 8192  # tokens that go through the layers together
_LOGITS = 1 << 24  # of one block of rows: 128 MiB in float64


@dataclass(frozen=True)
class TokenLikelihoods:
    """Natural logarithms of the probabilities of all tokens but the first."""

    log_probabilities: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Mean negative logarithm, in nats a token."""
        return -math.fsum(self.log_probabilities) / len(self.log_probabilities)

    @property
    def perplexity(self) -> float:
        """Return the exponential of the loss; infinite if float64 overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


def token_likelihoods(
    model: LogitsModel,
    ids: list[int],
    on_text: Callable[[int], None] | None = None,
    piece: int = PERPLEXITY_TOKENS,
) -> TokenLikelihoods:
    """Evaluate a text; `on_text` receives the number of tokens evaluated so far."""
    context = model.context
    if not 2 <= len(ids) <= context:
        raise InvalidArgument(
            "text", f"{len(ids)} tokens", f"2 to {context}, the model's context",
            "Choose another text, or a part of it.",
        )  # fmt: skip
    tokens, sequence, found = torch.tensor(ids), Sequence(), []
    for begin in range(0, len(ids) - 1, piece):
        new = tokens[begin : min(begin + piece, len(ids) - 1)]
        hidden = model.hidden([sequence], [new])
        found.append(_of_targets(model, hidden, tokens[begin + 1 : begin + 1 + len(new)]))
        if on_text is not None:
            on_text(begin + len(new))
    values = torch.cat(found)
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise InvalidArgument(
            "log-probabilities", f"{wrong} of {len(values)} not finite", "finite numbers",
            "Audit the checkpoint: degarble audit CKPT.",
        )  # fmt: skip
    return TokenLikelihoods(tuple(values.tolist()))


def _of_targets(model: LogitsModel, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [T] of the targets, in float64."""
    rows, found = max(1, _LOGITS // model.config.vocab_size), []
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        logits = model.logits(part).double()
        chosen = logits.gather(1, wanted[:, None]).squeeze(1)
        found.append(chosen - logits.logsumexp(-1))
    return torch.cat(found)
