"""Read answers of OpenAI's interface: texts, and the distribution that each token came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnusableServer, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from degarble.harness.probe.client import Reply

_ID = "token_id:"  # how vLLM writes a token where ids are wanted in place of texts
_SHOWN = 100


@dataclass(frozen=True)
class Position:
    """A token and the distribution that it came from.

    `top` maps the likeliest tokens to natural logarithms of their probabilities. Nothing predicts
    the first token of a text: its `logprob` is None.
    """

    token: str
    logprob: float | None
    top: Mapping[str, float]

    @property
    def number(self) -> int | None:
        """Return the token's id where the server gives ids."""
        digits = self.token.removeprefix(_ID)
        return int(digits) if digits != self.token and digits.isdecimal() else None

    @property
    def likeliest(self) -> str:
        """Return the likeliest token."""
        return max(self.top, key=lambda token: self.top[token], default=self.token)

    def log_probability_of(self, token: str) -> float | None:
        """Return a token's log-probability; None where it is not among the likeliest."""
        # Some servers write a blank in front of a token of the text, and none in this table.
        found = self.top.get(token)
        return self.top.get(token.strip()) if found is None else found


@dataclass(frozen=True)
class Answer:
    """One choice: its text, its tokens, and what the server says it used."""

    text: str
    positions: tuple[Position, ...] = ()
    finish: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    prompt: tuple[Position, ...] = ()  # scores of the prompt's own tokens
    prompt_ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens, without the blanks around them."""
        return tuple(position.token.strip() for position in self.positions)


def token_of(number: int) -> str:
    """Return a token as it is named by its id."""
    return f"{_ID}{number}"


def same_token(one: str, other: str) -> bool:
    """Return whether two spellings are the same token; blanks around it do not count."""
    return one.strip() == other.strip()


class AnswerReader:
    """Reads the answers to one path; `path` is named in errors."""

    def __init__(self, path: str) -> None:
        self._path = path

    def answers(self, reply: Reply) -> list[Answer]:
        """Read all choices of an answer that came whole, or as a stream."""
        if reply.events:
            return self._streamed(reply)
        choices = reply.document.get("choices")
        if not isinstance(choices, list) or not choices:
            raise self._wrong(choices, "a list of choices")
        usage = _usage(reply.document)
        return [self._choice(choice, usage) for choice in choices]

    def _choice(self, choice: object, usage: tuple[int | None, int | None]) -> Answer:
        if not isinstance(choice, dict):
            raise self._wrong(choice, "a choice")
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else choice.get("text")
        if isinstance(message, dict):
            text = f"{_reasoning(message)}{text or ''}"
        if not isinstance(text, str):
            raise self._wrong(text, "a text")
        finish = choice.get("finish_reason")
        ids = choice.get("prompt_token_ids") or []
        return Answer(
            text,
            tuple(self.positions(choice.get("logprobs"))),
            finish if isinstance(finish, str) else None,
            *usage,
            prompt_ids=tuple(ids) if isinstance(ids, list) and all(map(_is_id, ids)) else (),
        )

    def positions(self, scores: object) -> list[Position]:
        """Read the log-probabilities of a choice, of a completion or a chat."""
        if scores is None:
            return []
        if not isinstance(scores, dict):
            raise self._wrong(scores, "log-probabilities")
        if "content" in scores:
            return [self._chat_position(entry) for entry in self._list(scores["content"])]
        tokens, values = scores.get("tokens") or [], scores.get("token_logprobs") or []
        tops = scores.get("top_logprobs") or [None] * len(tokens)
        if not all(isinstance(part, list) for part in (tokens, values, tops)) or not (
            len(tokens) == len(values) == len(tops)
        ):
            raise self._wrong(sorted(scores), "as many log-probabilities as tokens")
        return [
            Position(str(token), self._number(value), self._top(top))
            for token, value, top in zip(tokens, values, tops, strict=True)
        ]

    def _chat_position(self, entry: object) -> Position:
        if not isinstance(entry, dict):
            raise self._wrong(entry, "a token with its log-probability")
        top = entry.get("top_logprobs") or []
        if not isinstance(top, list) or not all(isinstance(each, dict) for each in top):
            raise self._wrong(top, "the likeliest tokens")
        pairs = {str(each.get("token")): each.get("logprob") for each in reversed(top)}
        return Position(
            str(entry.get("token")), self._number(entry.get("logprob")), self._top(pairs)
        )

    def prompt_scores(self, found: object, ids: tuple[int, ...]) -> tuple[Position, ...]:
        """Read vLLM's `prompt_logprobs`: tables by id, one a token of the prompt."""
        if found is None:  # a field that the server does not know
            return ()
        if not isinstance(found, list) or len(found) != len(ids):
            raise self._wrong(type(found).__name__, f"log-probabilities of {len(ids)} tokens")
        made = []
        for number, table in zip(ids, found, strict=True):
            entries = table if isinstance(table, dict) else {}
            top = {
                f"{_ID}{key}": value.get("logprob") if isinstance(value, dict) else value
                for key, value in entries.items()
            }
            known = self._top(top)
            made.append(Position(f"{_ID}{number}", known.get(f"{_ID}{number}"), known))
        return tuple(made)

    def _top(self, found: object) -> dict[str, float]:
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._wrong(found, "a table of the likeliest tokens")
        made = {str(token): self._number(value) for token, value in found.items()}
        return {token: value for token, value in made.items() if value is not None}

    def _number(self, value: object) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(value, "a number as log-probability")
        # JSON has no infinity: servers write a large negative number in its place.
        try:
            return float(value)
        except OverflowError as error:
            raise self._wrong("a number of many digits", "a log-probability") from error

    def _list(self, value: object) -> list[object]:
        """Return a list; what is left out, or null, is empty."""
        if value is not None and not isinstance(value, list):
            raise self._wrong(value, "a list")
        return value or []

    def _streamed(self, reply: Reply) -> list[Answer]:
        """Put the choices of a stream together."""
        parts: dict[int, list[Answer]] = {}
        usage: tuple[int | None, int | None] = (None, None)
        for event in reply.events:
            usage = _usage(event) if isinstance(event.get("usage"), dict) else usage
            for choice in self._list(event.get("choices")):
                if not isinstance(choice, dict):
                    raise self._wrong(choice, "a choice")
                delta = choice.get("delta")
                if isinstance(delta, dict):
                    content = {"content": delta.get("content") or ""}
                    reasoning = {"reasoning": _reasoning(delta)}
                    choice = {**choice, "message": content | reasoning}  # noqa: PLW2901  the same choice, in the form of a whole answer
                index = choice.get("index")
                place = index if isinstance(index, int) else 0
                parts.setdefault(place, []).append(self._choice(choice, (None, None)))
        if not parts:
            raise self._wrong("a stream without choices", "a choice")
        return [_joined(parts[place], usage) for place in sorted(parts)]

    def _wrong(self, value: object, expectation: str) -> UnusableServer:
        return UnusableServer(
            self._path, printable(repr(value), _SHOWN), f"{expectation}, as in OpenAI's interface",
            "Look at what this server answers there: curl with the same body.",
        )  # fmt: skip


def _joined(parts: Iterable[Answer], usage: tuple[int | None, int | None]) -> Answer:
    text, finish = "", None
    positions: list[Position] = []
    for part in parts:
        text += part.text
        finish = part.finish or finish
        positions += part.positions
    return Answer(text, tuple(positions), finish, *usage)


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return what a model thought before it answered; servers have two names for it."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def _usage(document: Mapping[str, Any]) -> tuple[int | None, int | None]:
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None, None
    prompt, new = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return (prompt if _is_id(prompt) else None), (new if _is_id(new) else None)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# --------------------------------------------------------------------------------------------------
# Two distributions of one position. Only the likeliest tokens are known of each, so all numbers are
# lower bounds: a token that is in one list alone has at most the least probability of the other.

_LEAST = 1e-12


def distance(one: Position, other: Position) -> float:
    """Return how far two distributions are apart: the weighted RMS of log-probabilities, in nats.

    A token's weight is its mean probability, so what is never chosen does not count.
    """
    pairs = _pairs(one, other)
    weight = math.fsum((math.exp(p) + math.exp(q)) / 2 for p, q in pairs)
    if weight < _LEAST:
        return 0.0
    moved = math.fsum((math.exp(p) + math.exp(q)) / 2 * (p - q) ** 2 for p, q in pairs)
    return math.sqrt(moved / weight)


def divergence(one: Position, other: Position) -> float:
    """Return a lower bound of the KL divergence, in nats: listed tokens, and the rest as one."""
    pairs = _pairs(one, other)
    rest_p = max(1.0 - math.fsum(math.exp(p) for p, _ in pairs), _LEAST)
    rest_q = max(1.0 - math.fsum(math.exp(q) for _, q in pairs), _LEAST)
    known = math.fsum(math.exp(p) * (p - q) for p, q in pairs)
    return max(0.0, known + rest_p * math.log(rest_p / rest_q))


def slope(base: Sequence[Position], other: Sequence[Position]) -> float | None:
    """Return by which factor differences to the likeliest token grew; None where none is known.

    Rounding leaves it at one; a temperature does not.
    """
    pairs = []
    for one, two in zip(base, other, strict=False):
        best = one.likeliest
        least, top = one.top.get(best), two.log_probability_of(best)
        for token, value in one.top.items():
            found = two.log_probability_of(token)
            if token != best and least is not None and top is not None and found is not None:
                pairs.append((value - least, found - top))
    scale = math.fsum(x * x for x, _ in pairs)
    return math.fsum(x * y for x, y in pairs) / scale if scale > 1e-3 else None


def _pairs(one: Position, other: Position) -> list[tuple[float, float]]:
    made = []
    for token in {**one.top, **other.top}:
        p, q = one.log_probability_of(token), other.log_probability_of(token)
        # A bound where one list lacks the token; equal where the bound allows that.
        p_known = min(q or 0.0, _least(one)) if p is None else p
        q_known = min(p_known, _least(other)) if q is None else q
        made.append((min(p_known, 0.0), min(q_known, 0.0)))
    scored = one.logprob is not None and other.logprob is not None
    if not made and scored and same_token(one.token, other.token):
        made.append((min(one.logprob or 0.0, 0.0), min(other.logprob or 0.0, 0.0)))
    return made


def _least(position: Position) -> float:
    return min(position.top.values(), default=0.0)
