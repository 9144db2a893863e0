"""One session: prompts, first answers, and what the checks share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnusableServer
from degarble.harness.probe.judging import compare
from degarble.harness.probe.passages import long_ids, long_text
from degarble.harness.probe.server import Ask, RefusedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.probe.answers import Answer, Position
    from degarble.harness.probe.judging import ProbedCheck, ProbedComparison
    from degarble.harness.probe.server import ProbedServer, Prompt

PROMPTS = 8  # that each check asks
NEW_TOKENS = 8
GIVEN, DEFAULT, OWN = "given", "default", "written by the model"
OWN_IDS = "ids that the model drew"
_LEAST_TOKENS = 128  # of a prompt that is cut at a border
_CHARACTERS = 8  # a token, at most, in the texts that long prompts are made of


@dataclass(frozen=True)
class ProbeOptions:
    """What a probe does."""

    texts: tuple[Prompt, ...]  # all of them texts, or all of them ids
    rounding: str | None = None  # what is served, where the user says so
    max_prompt_tokens: int = 2048
    new_tokens: int = NEW_TOKENS
    prompts: str = GIVEN  # where the texts are from

    @property
    def plain_texts(self) -> tuple[str, ...]:
        """Return the prompts that are texts."""
        return tuple(text for text in self.texts if isinstance(text, str))

    @property
    def gives_ids(self) -> bool:
        """Return whether the prompts are ids, so that no tokenizer is needed."""
        return bool(self.texts) and not self.plain_texts


@dataclass
class Session:
    """A server that is probed, with what was gathered so far."""

    server: ProbedServer
    options: ProbeOptions
    cold: list[Answer] = field(default_factory=list)  # the very first answers
    base: list[Answer] = field(default_factory=list)  # the same again: what a cache gives
    scored: tuple[Position, ...] = ()  # of the latest prompt, without its answer
    tail: tuple[Position, ...] = ()  # of its answer's tokens
    _exact: dict[str, Prompt] = field(default_factory=dict)
    _long: tuple[Prompt, tuple[str, ...]] | None = None

    def prompt(self, number: int) -> Prompt:
        """Return a prompt: ids where the server's tokenizer is known, else the text."""
        texts = self.options.texts
        return self.exact(texts[number % len(texts)])

    def exact(self, text: Prompt) -> Prompt:
        """Return a text as the server is asked: the same text is tokenised once."""
        if not self.server.ids or isinstance(text, tuple):
            return text
        if text not in self._exact:
            self._exact[text] = self.server.tokenize(text)
        return self._exact[text]

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts of the checks."""
        return [self.prompt(number) for number in range(min(PROMPTS, len(self.options.texts)))]

    def asks(self, new_tokens: int | None = None) -> list[Ask]:
        """Return the requests of the first answers."""
        tokens = self.options.new_tokens if new_tokens is None else new_tokens
        return [Ask(prompt, tokens) for prompt in self.prompts]

    @property
    def most_tokens(self) -> int:
        """Return how long a prompt may be: the option, or what the model takes."""
        context = self.server.context or self.options.max_prompt_tokens
        return max(0, min(self.options.max_prompt_tokens, context - 64))

    def cut(self, tokens: int, first: int = 0) -> Prompt | None:
        """Return a long prompt of so many tokens; None where the server shows no tokens.

        `first` begins at another text.
        """
        if self.options.gives_ids:
            return long_ids(self.options.texts, tokens, PROMPTS + first)
        characters = _CHARACTERS * self.most_tokens
        text = long_text(self.options.plain_texts, characters, PROMPTS + first)
        if self.server.ids:
            ids = self.exact(text)
            return ids[:tokens] if isinstance(ids, tuple) and len(ids) >= tokens else None
        if not self.server.offers("prompt log-probabilities"):
            return None
        if self._long is None:
            # Characters a token are not known yet: a first piece of the text tells.
            piece = text[:2000].rsplit(" ", 1)[0]
            share = len(piece) / max(1, len(self.server.score(piece)))
            self._long = self._longest(text, share)
        found = self._long[1]
        return "".join(found[:tokens]) if first == 0 and len(found) >= tokens else None

    def _longest(self, text: str, share: float) -> tuple[Prompt, tuple[str, ...]]:
        """Return the longest piece of a text that the server takes, with its tokens."""
        most = self.most_tokens
        while True:
            whole = text[: math.ceil(share * most)].rsplit(" ", 1)[0]
            try:
                return whole, tuple(p.token for p in self.server.score(whole))
            except RefusedRequest:
                if most < _LEAST_TOKENS:
                    raise
                most //= 2

    def about(self, tokens: int, first: int = 0) -> str:
        """Return a text of about so many tokens, by the stated lengths of the first prompts."""
        texts = self.options.plain_texts
        counts = [(a.prompt_tokens or 0, len(t)) for a, t in zip(self.cold, texts, strict=False)]
        share = sum(size for _, size in counts) / max(1, sum(count for count, _ in counts))
        size = round(tokens * share) if any(count for count, _ in counts) else 4 * tokens
        return long_text(texts, size, PROMPTS + first)[:size].rsplit(" ", 1)[0]

    def longer(self, text: Prompt, number: int) -> Prompt:
        """Return a text after the words of another one, as nothing else in a session asks it."""
        texts = self.options.texts
        other = texts[(number + 3) % len(texts)]
        words = other if isinstance(other, tuple) else other.split()
        return joined(words[: max(3, len(words) // 2)], text)

    def beginning(self, number: int) -> Prompt:
        """Return the first few words of a text."""
        text = self.options.texts[number]
        return text[:6] if isinstance(text, tuple) else " ".join(text.split(" ")[:6])

    def prefilled(self, prompt: Prompt, answer: Answer, number: int) -> ProbedComparison | None:
        """Compare an answer's tokens as they were decoded with the same tokens as a prompt."""
        count = self.server.writable(answer)
        longer = self.server.continued(prompt, answer, count) if count else None
        if longer is None:
            return None
        positions = answer.positions[:count]
        whole = self.server.score(longer)
        self.scored = whole[: len(whole) - count]
        self.tail = scores = whole[-count:]
        if len(scores) < count or any(
            one.token.strip() != other.token.strip()
            for one, other in zip(scores, positions, strict=True)
        ):
            return None
        return replace(
            compare(positions, scores, number),
            body=self.server.call(Ask(prompt, count)).body,
        )


def joined(words: Sequence[str] | Sequence[int], text: Prompt) -> Prompt:
    """Return a text after some words of another one."""
    if isinstance(text, tuple):
        return (*(word for word in words if isinstance(word, int)), *text)
    return f"{' '.join(map(str, words))} {text}"


def add_answer(
    session: Session,
    result: ProbedCheck,
    asked: tuple[int, Ask],
    answer: Answer | UnusableServer,
    how: str,
) -> None:
    """Compare an answer with the first one of its prompt; a failure becomes a note."""
    number, ask = asked
    if isinstance(answer, UnusableServer):
        result.notes.append(f"no answer {how}: {answer.shown_value}")
        return
    base = session.base[number]
    made = compare(base.positions, answer.positions, number, how)
    result.comparisons.append(replace(made, body=session.server.call(ask).body))
    result.texts_apart += base.text != answer.text
