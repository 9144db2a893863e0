"""Run a conversation with a checkpoint, turn by turn: `degarble generate --interactive`.

The sequence of tokens so far is reused and read again only where it no longer matches the history.
One stream of random numbers serves all turns. When the context is full, a new conversation begins
with the latest message, and a notice is printed. After an error nothing has changed, so the
conversation can go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.generate.generate import message_of
from degarble.harness.inference.generation import Finish, Pace, Speech
from degarble.references.state import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    from degarble.harness.chat.chat import Chat
    from degarble.harness.generate.generate import Talker


@dataclass(frozen=True)
class Question:
    """A user's message, as the model will read it after the history."""

    ids: list[int]
    messages: list[dict[str, Any]]


class Dialogue:
    """A conversation with history; tokens that the model has read are not read again."""

    def __init__(self, talker: Talker) -> None:
        self._talker = talker
        self._messages: list[dict[str, Any]] = []
        self._seen: list[int] = []
        self._sequence = Sequence()
        self._sampler = talker.manner.sampling.sampler()
        self.pace = Pace()

    def say(self, said: str, heard: Callable[[Speech, str], None] | None = None) -> Speech:
        """Send a message and generate the answer; both stay in the history."""
        return self.answer(self.hear(said), heard)

    def hear(self, said: str) -> Question:
        """Add a user's message; if the model cannot read it, raise and change nothing."""
        context = self._talker.model.speaker.context
        question = self._question(said, self._seen, self._messages)
        if len(question.ids) >= context and self._seen:
            question = self._question(said, [], [])
            if len(question.ids) < context:
                self._talker.tell(f"(the context of {context:,} tokens is full: starting anew)")
        if len(question.ids) >= context:
            raise InvalidArgument(
                "what was said", f"{len(question.ids)} tokens",
                f"fewer than the model's context of {context}", "Say it in fewer words.",
            )  # fmt: skip
        self._talker.tell_strange()
        return question

    def _question(self, said: str, seen: list[int], messages: list[dict[str, Any]]) -> Question:
        talker = self._talker
        if talker.chat is None:
            ids = talker.ids(said, begin=False) if seen else talker.ids_of(said)
            return Question([*seen, *ids], messages)
        new = [{"role": "user", "content": said}] if messages else talker.opening(said)
        return Question(talker.ids_of([*messages, *new]), [*messages, *new])

    def answer(
        self, question: Question, heard: Callable[[Speech, str], None] | None = None
    ) -> Speech:
        """Hear the answer; one that is interrupted stays in the history as far as it came."""
        length = self._sequence.length
        known = length < len(question.ids) and question.ids[:length] == self._seen[:length]
        sequence = self._sequence if known else Sequence()
        speech = Speech(question.ids, sequence, sampler=self._sampler)
        # An answer that is interrupted leaves a sequence that has seen more than the history.
        self._sequence = Sequence()
        generation = self._talker.generation()
        try:
            generation.run([speech], heard)
        except KeyboardInterrupt:
            self._keep(question, speech)
            raise
        self._sequence, self.pace = speech.sequence, generation.pace
        self._keep(question, speech)
        return speech

    def _keep(self, question: Question, speech: Speech) -> None:
        self._seen = speech.all_ids[:-1] if speech.finish is Finish.END else speech.all_ids
        if self._talker.chat is not None:
            self._messages = [*question.messages, _answer(self._talker.chat, speech)]


def _answer(chat: Chat, speech: Speech) -> dict[str, Any]:
    """Return the answer as a message; one that leaves the encoding is kept as text."""
    found: dict[str, Any] | None = message_of(chat, speech)["message"]
    return found or {"role": "assistant", "content": speech.text}
