"""Build answers in OpenAI's form: parse streamed turns, whole answers and chunks of a stream."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import Refused
from degarble.harness.chat.conversation import THINKING
from degarble.harness.chat.special_tokens import DSML, END_THINK
from degarble.harness.chat.tokenizer import Stops
from degarble.harness.inference.generation import Finish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from degarble.harness.chat.chat import Chat
    from degarble.harness.chat.dsml import ToolCall
    from degarble.harness.serve.messages import ScoredToken, SequenceRequest, TextPiece
    from degarble.harness.serve.requests import CompletionRequest
    from degarble.harness.serve.served_model import ServedModel


# --------------------------------------------------------------------------------------------------
# Streamed turns: reasoning, content and tool calls. No part of a mark that may still be completed
# is shown. Calls are shown when the turn is whole and parses; a text that leaves the encoding is
# shown unchanged, with the reason. The pieces add up to what parsing the whole turn gives.

REASONING, CONTENT, CALLS = "reasoning_content", "content", "calls"


@dataclass
class ParsedPiece:
    """The fields that a piece adds to. `problem`: where the turn left the encoding."""

    texts: dict[str, str] = field(default_factory=dict)  # field of a message to text
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None

    def add(self, where: str, text: str) -> None:
        """Append to a field."""
        if text:
            self.texts[where] = self.texts.get(where, "") + text


class StreamParser:
    """The parser of one turn."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._whole = ""
        self._opening = f"\n\n<{DSML}{chat.family.CALLS}"
        thinks = chat.style.mode == THINKING
        self._where = REASONING if thinks else CONTENT
        self._mark = END_THINK if thinks else self._opening
        self._stops = Stops((self._mark,))
        self._shown = 0  # characters that are out, marks included
        self._unsent = ""  # the text of calls, and their opening

    def add(self, piece: str) -> ParsedPiece:
        """Take a piece; return what is certain."""
        parsed_piece = ParsedPiece()
        self._whole += piece
        while self._where != CALLS:
            said = self._stops.add(piece)
            parsed_piece.add(self._where, said)
            self._shown += len(said)
            if self._stops.hit is None:
                return parsed_piece
            piece = self._whole[self._shown + len(self._mark) :]
            if self._where == CONTENT:
                self._where, self._unsent = CALLS, self._mark
                break
            self._where, self._shown = CONTENT, self._shown + len(self._mark)
            self._mark = self._opening
            self._stops = Stops((self._mark,))
        self._unsent += piece
        return parsed_piece

    def end(self) -> ParsedPiece:
        """Return what was held back, and the calls, or why the turn cannot be parsed."""
        piece = ParsedPiece()
        if self._where != CALLS:
            piece.add(self._where, self._stops.rest())
        try:
            piece.calls = self._chat.parse(self._whole, whole=False).calls
        except Refused as error:
            piece.problem = str(error)
        if not piece.calls:
            piece.add(CONTENT, self._unsent)
        return piece


# --------------------------------------------------------------------------------------------------
# Answers. Each choice turns a piece into the delta that a stream shows, and is the sum of its
# deltas; so a stream put together is the whole answer.

_REASONS = {Finish.END: "stop", Finish.STOP: "stop"}
Change = dict[str, Any]


def _reason(finish: Finish | None) -> str | None:
    return None if finish is None else _REASONS.get(finish, "length")


class CompletionChoice:
    """One choice of a completion."""

    def __init__(
        self, place: int, request: SequenceRequest, served: ServedModel, *, echo: bool
    ) -> None:
        self._place, self._request = place, request
        self._offset = 0  # of the next token in the text
        self._whole: Change = self._change("", None)
        self._opening = ""
        if echo:
            shown = served.tokenizer.decode(
                request.prompt[1:] if request.silent_begin else request.prompt
            )
            self._opening = shown + (served.gap if request.limits.new_tokens else "")

    def begin(self) -> list[Change]:
        """Return the delta that a stream begins with."""
        # A scored echo is sent with the prompt's first scores, in `add`.
        if not self._opening or self._request.scores_prompt:
            return []
        return [self._added(self._change(self._opening, None))]

    def add(self, piece: TextPiece) -> list[Change]:
        """Add a piece; return its delta."""
        text = piece.text
        if piece.of_prompt and self._opening:
            text, self._opening = self._opening, ""
        change = self._change(text, _reason(piece.finish))
        if self._request.top is not None:
            change["logprobs"] = self._scores(piece.tokens)
        return [self._added(change)]

    def complete(self) -> Change:
        """Return the choice so far."""
        return self._whole

    def _change(self, text: str, reason: str | None) -> Change:
        return {"index": self._place, "text": text, "logprobs": None, "finish_reason": reason}

    def _added(self, change: Change) -> Change:
        whole = self._whole
        whole["text"] += change["text"]
        whole["finish_reason"] = change["finish_reason"]
        for name, values in (change["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"].setdefault(name, []).extend(values)
        return change

    def _scores(self, tokens: Iterable[ScoredToken]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token in tokens:
            made["tokens"].append(token.text)
            made["token_logprobs"].append(token.log_probability)
            best: dict[str, float] = {}
            for _, text, value in token.likeliest:
                best.setdefault(text, value)  # of tokens with one text the likeliest
            made["top_logprobs"].append(None if token.log_probability is None else best)
            made["text_offset"].append(self._offset)
            self._offset += len(token.text)
        return made


class ChatChoice:
    """One choice of a chat completion."""

    def __init__(self, place: int, request: SequenceRequest, parting: StreamParser) -> None:
        self._place, self._scored = place, request.top is not None
        self._parser = parting
        self._message: Change = {"role": "assistant", "content": ""}
        self._scores: list[Change] = []
        self._finish: str | None = None
        self._problem: str | None = None

    def begin(self) -> list[Change]:
        """Return the delta that a stream begins with."""
        return [self._change({"role": "assistant", "content": ""}, None)]

    def add(self, piece: TextPiece) -> list[Change]:
        """Add a piece; return its delta."""
        made = [self._deltas(self._parser.add(piece.text), piece.tokens)]
        if piece.finish is not None:
            made.append(self._deltas(self._parser.end()))
            calls = "tool_calls" in self._message
            self._finish = "tool_calls" if calls else _reason(piece.finish)
            last = self._change({}, self._finish)
            if self._problem is not None:
                last["not_a_message"] = self._problem
            made.append([last])
        return [change for changes in made for change in changes]

    def complete(self) -> Change:
        """Return the choice so far."""
        made = {
            "index": self._place,
            "message": self._message,
            "logprobs": {"content": self._scores, "refusal": None} if self._scored else None,
            "finish_reason": self._finish,
        }
        return made if self._problem is None else made | {"not_a_message": self._problem}

    def _change(self, delta: Change, reason: str | None) -> Change:
        return {"index": self._place, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _deltas(self, parted: ParsedPiece, tokens: Iterable[ScoredToken] = ()) -> list[Change]:
        message: Change = self._message
        delta: Change = dict(parted.texts)
        for name, text in parted.texts.items():
            message[name] = message.get(name, "") + text
        if parted.calls:
            numbered = [
                {"id": f"call_{uuid.uuid4().hex[:24]}", **call.document()} for call in parted.calls
            ]
            message["tool_calls"] = numbered
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(numbered)]
            message["content"] = message["content"] or None
        self._problem = parted.problem or self._problem
        scores = [_score(token) for token in tokens]
        self._scores += scores
        if not delta and not scores:
            return []
        change = self._change(delta, None)
        if self._scored:
            change["logprobs"] = {"content": scores, "refusal": None}
        return [change]


def _score(token: ScoredToken) -> Change:
    best = [_spelt(text, value) for _, text, value in token.likeliest]
    return _spelt(token.text, token.log_probability) | {"top_logprobs": best}


def _spelt(text: str, value: float | None) -> Change:
    told = "\N{REPLACEMENT CHARACTER}" in text  # a part of a character: its bytes are not known
    return {"token": text, "logprob": value, "bytes": None if told else list(text.encode())}


class ApiReply:
    """The answer to one request."""

    def __init__(
        self, completion_request: CompletionRequest, served: ServedModel, request: str | None = None
    ) -> None:
        self._request, self._served = completion_request, served
        kind = "cmpl" if completion_request.chat is None else "chatcmpl"
        self._head = {
            "id": f"{kind}-{request or uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": served.mark,
        }
        self._choices = [
            self._choice(n, sequence_request)
            for n, sequence_request in enumerate(completion_request.sequences)
        ]
        self._new = [0] * len(completion_request.sequences)

    def _choice(self, place: int, request: SequenceRequest) -> CompletionChoice | ChatChoice:
        if self._request.chat is None:
            return CompletionChoice(place, request, self._served, echo=self._request.echo)
        return ChatChoice(place, request, StreamParser(self._request.chat))

    def begin(self) -> list[Change]:
        """Return the chunks that a stream begins with."""
        return [self._chunk(change) for choice in self._choices for change in choice.begin()]

    def add(self, piece: TextPiece) -> list[Change]:
        """Add a piece; return its chunks."""
        self._new[piece.place] = piece.new_tokens
        return [self._chunk(change) for change in self._choices[piece.place].add(piece)]

    def end(self) -> list[Change]:
        """Return the chunk with the usage, where it is wanted."""
        if not self._request.usage_wanted:
            return []
        return [self._document(stream=True) | {"choices": [], "usage": self._usage()}]

    def complete(self) -> Change:
        """Return the whole answer."""
        choices = [choice.complete() for choice in self._choices]
        return self._document() | {"choices": choices, "usage": self._usage()}

    def _chunk(self, change: Change) -> Change:
        made = self._document(stream=True) | {"choices": [change]}
        return made | {"usage": None} if self._request.usage_wanted else made

    def _document(self, *, stream: bool = False) -> Change:
        kind = "text_completion"
        if self._request.chat is not None:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"object": kind, **self._head}

    def _usage(self) -> Change:
        prompt, new = self._request.prompt_tokens, sum(self._new)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
