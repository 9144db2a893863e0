"""The computing thread: continuous batching of all sequences, and scores of their tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from degarble.harness.chat.tokenizer import IncrementalDecoder
from degarble.harness.inference.generation import (
    Continuation,
    Finish,
    Limits,
    RunningPrompt,
    Sampling,
    has_room,
)
from degarble.harness.serve.messages import (
    ApiError,
    FailedSequence,
    ScoredToken,
    SequenceRequest,
    SequenceResult,
    TextPiece,
    server_stopping,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from degarble.harness.chat.tokenizer import Tokenizer
    from degarble.harness.inference.model import LogitsModel
    from degarble.harness.serve.capturing import RequestCapture
    from degarble.harness.serve.metrics import Metrics


# --------------------------------------------------------------------------------------------------
# Log-probabilities of tokens, with the likeliest alternatives, and each token's own text. They are
# natural logarithms in float64 of the model's own distribution, before temperature and top_p. The
# texts of a sequence's tokens add up to its text.

_LOGITS = 1 << 22  # of one block of rows: 32 MiB in float64


class Scoring:
    """The scores of one sequence, token by token."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._growing = IncrementalDecoder(tokenizer)

    def first(self, number: int) -> ScoredToken:
        """Score the token that begins everything: nothing predicts it."""
        return ScoredToken(number, self._growing.add(number), None)

    def token(self, number: int, logits_V: Tensor) -> ScoredToken:
        """Score one token by the logits at its position."""
        values = logits_V.double().log_softmax(-1)
        likeliest = tuple((n, self.text_of(n), float(values[n])) for n in _best(values, self._top))
        return ScoredToken(number, self._growing.add(number), float(values[number]), likeliest)

    def prompt(
        self, model: LogitsModel, hidden: Tensor, targets: Sequence[int]
    ) -> Iterator[ScoredToken]:
        """Score tokens of a prompt; row n of `hidden` predicts target n."""
        rows = max(1, _LOGITS // model.config.vocab_size)
        for begin in range(0, len(targets), rows):
            wanted = targets[begin : begin + rows]
            logits = model.logits(hidden[begin : begin + len(wanted)])
            yield from (self.token(n, row) for n, row in zip(wanted, logits, strict=True))

    def rest(self) -> str:
        """Return the text of tokens that end inside a character."""
        return self._growing.rest()

    def text_of(self, number: int) -> str:
        """Return the text of a token alone."""
        return self._tokenizer.decode([number])


def _best(values_V: Tensor, count: int) -> list[int]:
    """Return the ids of the largest values; ties go to the lowest id."""
    if count == 0:
        return []
    least = values_V.topk(min(count, len(values_V))).values[-1]
    near = (values_V >= least).nonzero().squeeze(1)  # more than `count` where some are equal
    order = values_V[near].sort(descending=True, stable=True).indices
    found: list[int] = near[order[:count]].tolist()
    return found


# --------------------------------------------------------------------------------------------------
# Waiting requests are admitted first come, first served. A sequence whose client disconnected
# leaves before the next step and makes room for one that waits. Batching changes no token, as in
# harness/inference/generation.py, whose RunningPrompt, pieces and room are used here. Results are
# passed to `send` in this thread; it must return at once.
#
# A step that fails ends the sequences in it and no other; logits that are not finite end their own
# sequence alone.

if TYPE_CHECKING:
    Tell = Callable[[SequenceResult], None]


@dataclass
class Ticket:
    """The sequences of one request. `dropped`: nobody waits for them any more."""

    send: Tell
    request: str = ""  # its id
    dropped: bool = False
    begin: float = field(default_factory=time.monotonic)


class RunningSequence:
    """One sequence, from its arrival to its end."""

    def __init__(self, ticket: Ticket, place: int, request: SequenceRequest) -> None:
        self.ticket, self.place, self.sequence_request = ticket, place, request
        self.continuation = Continuation(list(request.prompt))
        self.running_prompt: RunningPrompt | None = None
        self.scoring: Scoring | None = None
        self._unsent: list[ScoredToken] = []

    @property
    def request(self) -> str:
        """Return the id of the request, and the index in it."""
        return f"{self.ticket.request}-{self.place}"

    def join(self, model: LogitsModel, tokenizer: Tokenizer) -> RunningPrompt:
        """Make the RunningPrompt that takes part in steps."""
        request = self.sequence_request
        self.running_prompt = RunningPrompt(
            model, self.continuation, tokenizer, request.sampling, request.limits
        )
        if request.top is not None:
            self.scoring = Scoring(tokenizer, request.top)
        return self.running_prompt

    def send(
        self, text: str, tokens: Sequence[ScoredToken] = (), *, of_prompt: bool = False
    ) -> None:
        """Send text and tokens to the request."""
        continuation = self.continuation
        self.ticket.send(
            TextPiece(
                self.place,
                text,
                len(continuation.ids),
                tuple(tokens),
                of_prompt,
                continuation.finish,
            )
        )

    def score_prompt(self, model: LogitsModel, begin: int, hidden: Tensor) -> None:
        """Score the prompt's tokens that the step's rows predict."""
        prompt, scoring = self.sequence_request.prompt, self.scoring
        if scoring is None or not self.sequence_request.scores_prompt or begin >= len(prompt):
            return
        first = (
            [scoring.first(prompt[0])]
            if begin == 0 and not self.sequence_request.silent_begin
            else []
        )
        targets = prompt[begin + 1 : begin + 1 + len(hidden)]
        self.send("", [*first, *scoring.prompt(model, hidden, targets)], of_prompt=True)

    def take(self, logits: Tensor) -> bool:
        """Choose the next token; return whether it was the first."""
        assert self.running_prompt is not None, "a line joins before it runs"
        continuation = self.continuation
        if self.sequence_request.limits.new_tokens == 0:
            continuation.finish = Finish.LENGTH
            self.send("")
            return False
        text = self.running_prompt.take(logits)
        if self.scoring is not None and continuation.finish is not Finish.END:
            self._unsent.append(self.scoring.token(continuation.ids[-1], logits))
        if text or continuation.finish is not None:
            tokens, self._unsent = self._unsent, []
            self.send(text, tokens)
        return len(continuation.ids) == 1


class Engine:
    """The computing thread and its interface for requests."""

    def __init__(
        self,
        model: LogitsModel,
        tokenizer: Tokenizer,
        most: int,
        metrics: Metrics,
        switch: RequestCapture | None = None,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._most, self._metrics, self._switch = most, metrics, switch
        # Guards `_waiting` and `_stopped`; notified on new work, a drop and the end.
        self._changed = threading.Condition()
        self._waiting: deque[RunningSequence] = deque()
        self._active: list[RunningSequence] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="degarble-engine", daemon=True)
        self.ready = False
        self.failure: Exception | None = None
        self._ended: Callable[[], None] | None = None

    def start(self, ended: Callable[[], None] | None = None) -> None:
        """Start; ready once the model has chosen a first token. `ended` is called at the end."""
        self._ended = ended
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current step; sequences that still run or wait get an error."""
        with self._changed:
            self._stopped = True
            self.ready = False
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.is_alive():
            self._thread.join()

    @property
    def load(self) -> tuple[int, int]:
        """Return how many sequences run, and how many wait."""
        return len(self._active), len(self._waiting)

    def submit(self, requests: Sequence[SequenceRequest], tell: Tell, request: str = "") -> Ticket:
        """Accept all sequences of one request, or none of them."""
        ticket = Ticket(tell, request)
        if len(requests) > self._most:
            message = (
                f"{len(requests)} choices in one request; {self._most} may run and wait in all"
            )
            raise ApiError(400, message, "n", "invalid_value")
        with self._changed:
            if self._stopped:
                raise server_stopping()
            # Dropped sequences leave before the next step, so they hold no place.
            taken = sum(not sequence.ticket.dropped for sequence in (*self._waiting, *self._active))
            if taken + len(requests) > self._most:
                message = f"{taken} sequences run or wait, {self._most} may; try again"
                raise ApiError(429, message, None, "queue_full", retry_after=1)
            self._waiting.extend(
                RunningSequence(ticket, n, sequence_request)
                for n, sequence_request in enumerate(requests)
            )
            self._changed.notify()
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Release a request's sequences; those that have ended are not affected."""
        ticket.dropped = True
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._begin()
        except Exception as error:  # noqa: BLE001  reported to the caller of start
            self.failure = error
        while self._admit():
            groups = [self._active]
            if self._switch is not None:
                groups = self._switch.parted(self._active)
            self._active = [line for group in groups if group for line in self._step(group)]
        for line in (*self._active, *self._waiting):
            line.ticket.send(FailedSequence(line.place, server_stopping()))
        self._active, self._waiting = [], deque()
        if self._ended is not None:
            self._ended()

    def _begin(self) -> None:
        """Prove that the model runs: compute one token after the begin token."""
        continuation = Continuation([self._tokenizer.begin or 0])
        prompt = RunningPrompt(self._model, continuation, self._tokenizer, Sampling(), Limits(1))
        ids = [torch.tensor(prompt.next_piece())]
        prompt.take(self._model.next_logits([continuation.sequence], ids)[0])
        with self._changed:
            self.ready = not self._stopped

    def _admit(self) -> bool:
        """Wait for work and admit what there is room for; return False at the end."""
        with self._changed:
            while not (self._stopped or self.failure or self._waiting or self._active):
                self._changed.wait()
            if self._stopped or self.failure:
                self._stopped = True
                return False
            self._active = [sequence for sequence in self._active if self._wanted(sequence)]
            self._waiting = deque(sequence for sequence in self._waiting if self._wanted(sequence))
            prompts = [
                sequence.running_prompt
                for sequence in self._active
                if sequence.running_prompt is not None
            ]
            # In order of arrival: the first one without room blocks those after it.
            while self._waiting and has_room(prompts, self._waiting[0].continuation):
                line = self._waiting.popleft()
                prompts.append(line.join(self._model, self._tokenizer))
                self._active.append(line)
                self._metrics.observe("queue_seconds", time.monotonic() - line.ticket.begin)
        return True

    def _wanted(self, line: RunningSequence) -> bool:
        if line.ticket.dropped:
            self._metrics.count("sequences_total", end="dropped")
        return not line.ticket.dropped

    def _step(self, active: list[RunningSequence]) -> list[RunningSequence]:
        """Compute one step of some lines; return those that go on."""
        begin = time.perf_counter()
        starts = [sequence.continuation.fed for sequence in active]
        pieces = [
            sequence.running_prompt.next_piece()
            for sequence in active
            if sequence.running_prompt is not None
        ]
        # Prompt tokens: a sequence without new ids is still in its prompt.
        fresh = sum(
            len(p)
            for p, sequence in zip(pieces, active, strict=True)
            if not sequence.continuation.ids
        )
        try:
            with self._watching(active, pieces):
                hidden = self._model.hidden(
                    [sequence.continuation.sequence for sequence in active],
                    [torch.tensor(p) for p in pieces],
                )
                rows = hidden.split([len(piece) for piece in pieces])
                logits = self._model.logits(torch.stack([row[-1] for row in rows]))
        except Exception as error:  # noqa: BLE001  whatever it is, it ends these sequences alone
            self._metrics.count("step_failures_total")
            for line in active:
                self._fail(line, error)
            return []
        self._metrics.count("prompt_tokens_total", fresh)
        left = [
            line
            for line, start, row, predicted in zip(active, starts, rows, logits, strict=True)
            if self._take_result(line, start, row, predicted)
        ]
        self._metrics.observe("step_seconds", time.perf_counter() - begin)
        self._metrics.observe("step_sequences", len(active))
        return left

    def _watching(
        self, active: list[RunningSequence], pieces: list[list[int]]
    ) -> AbstractContextManager[None]:
        if self._switch is None:
            return nullcontext()
        return self._switch.watching(active, pieces)

    def _take_result(
        self, line: RunningSequence, start: int, hidden: Tensor, logits: Tensor
    ) -> bool:
        """Give one sequence its result of a step; return whether it goes on."""
        assert line.running_prompt is not None, "a line joins before it runs"
        try:
            line.score_prompt(self._model, start, hidden)
            if line.running_prompt.ready:
                before = len(line.continuation.ids)
                if line.take(logits):
                    waited = time.monotonic() - line.ticket.begin
                    self._metrics.observe("first_token_seconds", waited)
                self._metrics.count("new_tokens_total", len(line.continuation.ids) - before)
        except Exception as error:  # noqa: BLE001  as in a step, but of one sequence
            self._fail(line, error)
            return False
        if line.continuation.finish is not None:
            self._metrics.count("sequences_total", end=str(line.continuation.finish))
            return False
        return True

    def _fail(self, line: RunningSequence, error: Exception) -> None:
        self._metrics.count("sequences_total", end="failed")
        line.ticket.send(FailedSequence(line.place, error))
