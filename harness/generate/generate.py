"""Run `degarble generate`: prompts, conversations, and texts to evaluate."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.backends.registry import kernels_of, require_backend, use_backend
from degarble.harness.base.errors import InvalidArgument, Refused, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.chat import special_tokens as marks
from degarble.harness.chat.chat import Chat, chat_of
from degarble.harness.chat.conversation import TOOLS, TOOLS_REMEDY, Style, is_tool
from degarble.harness.chat.template import TemplateChat, template_chat
from degarble.harness.chat.tokenizer import Tokenizer
from degarble.harness.inference.generation import (
    Continuation,
    Finish,
    Generation,
    GenerationTiming,
    Limits,
    Sampling,
    TokenLikelihoods,
    token_likelihoods,
)
from degarble.harness.inference.model import open_model
from degarble.harness.model.family import family_of
from degarble.references.model import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.backends.pairings import Paired
    from degarble.harness.backends.registry import AskedBackend
    from degarble.harness.inference.model import OpenModel


# --------------------------------------------------------------------------------------------------
# A prompt is plain text, or a conversation in the family's chat encoding. Nothing is compared here,
# so the JSON has null as its verdict.

LARGEST_FILE = 256 << 20  # of prompts, or of a text
_NAMED = 8  # unknown words that a warning names
_MARKS = (marks.USER, marks.ASSISTANT, marks.END_THINK)


@dataclass(frozen=True)
class GenerationOptions:
    """Options of generation. `chat`: prompts are a user's messages, not the beginning of a text."""

    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    chat: bool = False
    style: Style = field(default_factory=Style)
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """Generated text of each prompt, with timing."""

    prompts: tuple[Any, ...]
    speeches: tuple[Continuation, ...]
    pace: GenerationTiming
    chat: Chat | None

    def document(self) -> dict[str, Any]:
        """The machine's view of it."""
        pairs = zip(self.prompts, self.speeches, strict=True)
        return {
            "texts": [self._one(prompt, continuation) for prompt, continuation in pairs],
            "tokens_per_second": self.pace.tokens_per_second,
            "prompt_seconds": self.pace.prompt_seconds,
            "new_token_seconds": self.pace.new_seconds,
        }

    def line(self) -> str:
        """Return the timing as one line."""
        new = sum(len(speech.ids) for speech in self.speeches)
        rate = self.pace.tokens_per_second
        text = f"{new:,} new {'token' if new == 1 else 'tokens'}"
        prompt = f"{self.pace.prompt_tokens:,} of prompts in {self.pace.prompt_seconds:.2f} s"
        return f"{text}{'' if rate is None else f', {rate:.1f} tokens/s'}; {prompt}"

    def _one(self, prompt: object, continuation: Continuation) -> dict[str, Any]:
        made: dict[str, Any] = {
            "prompt": prompt,
            "prompt_tokens": len(continuation.prompt),
            "text": continuation.text,
            "tokens": continuation.ids,
            "finish": continuation.finish,
        }
        if self.chat is not None:
            made |= message_of(self.chat, continuation)
        return made


def message_of(chat: Chat, continuation: Continuation) -> dict[str, Any]:
    """Parse generated text into a message; if it leaves the encoding, return it with the reason."""
    try:
        turn = chat.parse(continuation.text, whole=False)
    except Refused as error:
        return {"message": None, "not_a_message": str(error)}
    return {"message": turn.message()}


class TextGenerator:
    """An open model with its tokenizer, in one manner."""

    def __init__(
        self, model: OpenModel, manner: GenerationOptions, tell: Callable[[str], None] | None = None
    ) -> None:
        self.model = model
        self.manner = manner
        self.notify = tell or (lambda _told: None)  # what a person should know apart from the text
        self._strange: Counter[str] = Counter()  # words that the tokenizer does not know
        self._notified: set[str] = set()
        checkpoint, config = model.checkpoint, model.config
        self.tokenizer = Tokenizer.of_checkpoint(
            checkpoint.root, checkpoint.config, config.vocab_size
        )
        self.chat: Chat | None = None
        if manner.chat and family_of(config).has_chat_template:
            self.chat = template_chat(checkpoint.root, manner.style)
        elif manner.chat:
            self._require_marks()
            self.chat = chat_of(config, checkpoint.root, manner.style)

    @property
    def knows_chat(self) -> bool:
        """Return whether the tokenizer has the special tokens of a conversation."""
        return self.tokenizer.knows(*_MARKS)

    def ids_of(self, prompt: object) -> list[int]:
        """Ids of a text, or of a conversation."""
        if isinstance(prompt, str) and not self.tokenizer.encode(prompt, begin=False):
            raise InvalidArgument(
                "prompt", prompt, "a text of one token at least, besides the begin token",
                "Give a prompt, or use --interactive.",
            )  # fmt: skip
        if self.chat is None:
            if not isinstance(prompt, str):
                raise InvalidArgument(
                    "prompt", prompt, "a text", "Add --chat for prompts that are conversations."
                )
            return self.ids(prompt)
        if isinstance(prompt, list):
            self._require_own_words(prompt)
        messages = prompt if isinstance(prompt, list) else self.opening(str(prompt))
        # A template writes the token that begins a text where the model was trained with it.
        return self.ids(self.chat.encode(messages), begin=not isinstance(self.chat, TemplateChat))

    def ids(self, text: str, *, begin: bool = True) -> list[int]:
        """Ids of a text as it is; words that the tokenizer does not know are kept in mind."""
        ids = self.tokenizer.encode(text, begin=begin)
        self._strange.update(self.tokenizer.unknown(text))
        return ids

    def warn_of_unknown_words(self) -> None:
        """Say once of every word that the tokenizer does not know it: the model never gets it."""
        new = {word: count for word, count in self._strange.items() if word not in self._notified}
        self._strange.clear()
        if new:
            self._notified |= new.keys()
            self.notify(unknown_words_line(new))

    def opening(self, said: str) -> list[dict[str, Any]]:
        """A conversation that begins with what a user says."""
        system: dict[str, Any] = {"role": "system", "content": self.manner.system or ""}
        if self.manner.tools:
            system["tools"] = list(self.manner.tools)
        wanted = self.manner.system is not None or self.manner.tools
        return [*([system] if wanted else []), {"role": "user", "content": said}]

    def speak(
        self, prompts: list[Any], on_text: Callable[[Continuation, str], None] | None = None
    ) -> GenerationResult:
        """Continue every prompt."""
        continuations = [Continuation(self.ids_of(prompt)) for prompt in prompts]
        self.warn_of_unknown_words()
        generation = self.generation()
        generation.run(continuations, on_text)
        return GenerationResult(tuple(prompts), tuple(continuations), generation.pace, self.chat)

    def generation(self) -> Generation:
        """A fresh loop in this manner."""
        manner = self.manner
        return Generation(self.model.logits_model, self.tokenizer, manner.sampling, manner.limits)

    def surprise(self, text: str, on_text: Callable[[int], None] | None = None) -> TokenLikelihoods:
        """How surprised the model is by a text."""
        ids = self.ids(text)
        self.warn_of_unknown_words()
        return token_likelihoods(self.model.logits_model, ids, on_text)

    def _require_own_words(self, messages: list[Any]) -> None:
        """A conversation brings its system message and its tools; others would go unheard."""
        given = {"--system": self.manner.system is not None, "--tools": bool(self.manner.tools)}
        for flag in (flag for flag, wanted in given.items() if wanted):
            raise InvalidArgument(
                flag, "with a conversation of a file", "the conversation's own messages alone",
                "Write it into the conversation's system message.",
            )  # fmt: skip
        if not messages:
            raise InvalidArgument("prompt", messages, "one message at least", "Say something.")

    def _require_marks(self) -> None:
        if not self.knows_chat:
            raise InvalidArgument(
                "--chat", "a tokenizer without the marks of a conversation", " and ".join(_MARKS),
                "Leave --chat out: the model continues plain text.",
            )  # fmt: skip


@contextmanager
def open_text_generator(
    source: Path, arithmetic: str | None, backend: AskedBackend
) -> Iterator[tuple[OpenModel, Paired]]:
    """Open a model that speaks by a backend's kernels, or by the references alone."""
    require_backend(backend.name)
    with open_model(source, arithmetic, switches=backend.conventions) as model:
        if backend.graph:
            from degarble.harness.backends.graph.decoder import speak_by_layers  # noqa: PLC0415  our kernels

            yield model, speak_by_layers(model, kernels_of(backend), backend.graph)
        else:
            yield model, use_backend(model.logits_model.bound, backend, model.recipe)


def unknown_words_line(words: Mapping[str, int]) -> str:
    """Name the words that a tokenizer does not know, and say how many they are."""
    named = [f"{word!r}{f' ({count} times)' if count > 1 else ''}" for word, count in words.items()]
    more = "" if len(named) <= _NAMED else f", and {len(named) - _NAMED} more"
    total = sum(words.values())
    what = "1 word is" if total == 1 else f"{total} words are"
    return (
        f"warning: {what} unknown to the tokenizer and reach the model as one and the same id: "
        f"{', '.join(named[:_NAMED])}{more}"
    )


def likelihood_document(found: TokenLikelihoods) -> dict[str, Any]:
    """The machine's view of a text's evaluation."""
    return {
        "tokens": len(found.log_probabilities),
        "loss": found.loss,
        "perplexity": found.perplexity,
        "log_probabilities": list(found.log_probabilities),
    }


def prompts_from(path: Path) -> list[Any]:
    """Read prompts: one a line, or, in a .jsonl file, a text or a conversation a line."""
    # Trap: splitlines also cuts at U+2028, which JSON leaves inside its texts, and at form feeds.
    text = text_from("--prompts", path).replace("\r\n", "\n")
    lines = {n: line for n, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise UnreadableFile(
            "--prompts", str(path), "one prompt a line", "Write a prompt into the file."
        )
    if not _is_json(path):
        return list(lines.values())
    return [_json(path, number, line) for number, line in lines.items()]


def _is_json(path: Path) -> bool:
    return path.suffix == ".jsonl"


def _json(path: Path, number: int, line: str) -> Any:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            f"{path}: line {number}", str(error), "a JSON text, or a list of messages",
            "Write one JSON value a line.",
        ) from error  # fmt: skip
    if not isinstance(found, str | list):
        raise InvalidArgument(
            f"{path}: line {number}", found, "a JSON text, or a list of messages",
            "Write one JSON value a line.",
        )  # fmt: skip
    return found


def tools_from(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the functions that a model may call: a JSON list as in OpenAI's API."""
    try:
        found = json.loads(text_from("--tools", path))
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(
            "--tools", f"{path}: {error}", "a JSON list of functions", "Repair the file."
        ) from error
    if not isinstance(found, list) or not all(map(is_tool, found)):
        raise InvalidArgument("--tools", found, TOOLS, TOOLS_REMEDY)
    return tuple(found)


def text_from(name: str, path: Path) -> str:
    """Read a file of text."""
    raw = read_small_file(path, LARGEST_FILE)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            name, f"{path}: {error.reason} at byte {error.start}", "a text in UTF-8",
            "Save the file as UTF-8.",
        ) from error  # fmt: skip


def finished(continuation: Continuation) -> str:
    """Explain why a text ended, if it did not end by itself."""
    return {Finish.LENGTH: "token limit", Finish.CONTEXT: "end of the model's context"}.get(
        continuation.finish or Finish.END, ""
    )


# --------------------------------------------------------------------------------------------------
# Turn by turn: `degarble generate --interactive`.
#
# The sequence of tokens so far is reused and read again only where it no longer matches the
# history. One stream of random numbers serves all turns. When the context is full, a new
# conversation begins with the latest message, and a notice is printed. After an error nothing has
# changed, so the conversation can go on.


@dataclass(frozen=True)
class EncodedMessage:
    """A user's message, as the model will read it after the history."""

    ids: list[int]
    messages: list[dict[str, Any]]


class Dialogue:
    """A conversation with history; tokens that the model has read are not read again."""

    def __init__(self, generator: TextGenerator) -> None:
        self._talker = generator
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self._sequence = Sequence()
        self._sampler = generator.manner.sampling.sampler()
        self.pace = GenerationTiming()

    def send(
        self, said: str, on_text: Callable[[Continuation, str], None] | None = None
    ) -> Continuation:
        """Send a message and generate the answer; both stay in the history."""
        return self.answer(self.add_user_message(said), on_text)

    def add_user_message(self, said: str) -> EncodedMessage:
        """Add a user's message; if the model cannot read it, raise and change nothing."""
        context = self._talker.model.logits_model.context
        question = self._question(said, self._ids, self._messages)
        if len(question.ids) >= context and self._ids:
            question = self._question(said, [], [])
            if len(question.ids) < context:
                self._talker.notify(f"(the context of {context:,} tokens is full: starting anew)")
        if len(question.ids) >= context:
            raise InvalidArgument(
                "what was said", f"{len(question.ids)} tokens",
                f"fewer than the model's context of {context}", "Say it in fewer words.",
            )  # fmt: skip
        self._talker.warn_of_unknown_words()
        return question

    def _question(
        self, said: str, seen: list[int], messages: list[dict[str, Any]]
    ) -> EncodedMessage:
        generator = self._talker
        if generator.chat is None:
            ids = generator.ids(said, begin=False) if seen else generator.ids_of(said)
            return EncodedMessage([*seen, *ids], messages)
        new = [{"role": "user", "content": said}] if messages else generator.opening(said)
        return EncodedMessage(generator.ids_of([*messages, *new]), [*messages, *new])

    def answer(
        self, question: EncodedMessage, on_text: Callable[[Continuation, str], None] | None = None
    ) -> Continuation:
        """Hear the answer; one that is interrupted stays in the history as far as it came."""
        length = self._sequence.length
        known = length < len(question.ids) and question.ids[:length] == self._ids[:length]
        sequence = self._sequence if known else Sequence()
        continuation = Continuation(question.ids, sequence, sampler=self._sampler)
        # An answer that is interrupted leaves a sequence that has seen more than the history.
        self._sequence = Sequence()
        generation = self._talker.generation()
        try:
            generation.run([continuation], on_text)
        except KeyboardInterrupt:
            self._keep(question, continuation)
            raise
        self._sequence, self.pace = continuation.sequence, generation.pace
        self._keep(question, continuation)
        return continuation

    def _keep(self, question: EncodedMessage, continuation: Continuation) -> None:
        self._ids = (
            continuation.all_ids[:-1] if continuation.finish is Finish.END else continuation.all_ids
        )
        if self._talker.chat is not None:
            self._messages = [*question.messages, _answer(self._talker.chat, continuation)]


def _answer(chat: Chat, continuation: Continuation) -> dict[str, Any]:
    """Return the answer as a message; one that leaves the encoding is kept as text."""
    found: dict[str, Any] | None = message_of(chat, continuation)["message"]
    return found or {"role": "assistant", "content": continuation.text}
