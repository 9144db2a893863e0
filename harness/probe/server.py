"""Find out what a server offers, and ask it in the way it knows.

Servers differ in endpoints and fields. Each is tried once with a small request; what is refused is
kept by name with the server's own reason, and checks that need it are left out by that name.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnknownName, UnusableServer, printable
from degarble.harness.probe.answers import Answer, AnswerReader, Position, same_token
from degarble.harness.probe.client import Call, LimitReached, Reply

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from degarble.harness.probe.client import Client

Prompt = str | tuple[int, ...]

COMPLETIONS, CHAT, MODELS, TOKENIZE = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize",
)  # fmt: skip
SPECIAL = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")  # as tokenizers spell their special tokens
_TEXTS = 4  # prompts that are tried, until one is continued
_TOPS = (20, 5, 1)  # likeliest tokens that are asked for, until the server accepts
_SHOWN = 160
_TOO_MUCH = (400, 413, 422)
NO_TOKENIZER = "prompts are token ids, because no tokenizer is known"

# What a check may need, and what to do where a server lacks it.
FEATURES = {
    "completions": "Serve /v1/completions.",
    "log-probabilities": "Allow them: vLLM --max-logprobs 20; llama.cpp n_probs.",
    "prompt log-probabilities": "Allow echo with logprobs, or vLLM's prompt_logprobs.",
    "chat": "Serve /v1/chat/completions with a chat template.",
    "chat log-probabilities": "Allow logprobs and top_logprobs in chats.",
    "tokenize": "Serve /tokenize, as vLLM and SGLang do.",
    "prompts as ids": "Accept a list of token ids as prompt.",
    "several choices": "Accept n.",
    "seed": "Accept seed.",
    "stream": "Accept stream.",
}


class RefusedRequest(UnusableServer):
    """A request that is too much for a server: it can say so, and serves others."""


@dataclass(frozen=True)
class Ask:
    """One completion that is wanted: a prompt, how many new tokens, and further fields."""

    prompt: Prompt
    new_tokens: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProbedServer:
    """A server as the checks use it."""

    client: Client
    model: str = ""
    card: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)  # feature to the server's reason
    top: int = 0
    ids: bool = False  # tokens come as ids, so that prompts can be exact
    chat_only: bool = False
    scored_by: str = ""  # "echo" or "prompt_logprobs"
    echo_new: int = 0  # new tokens that an echo needs
    joint: str | None = None  # what stands between a prompt and the text that continues it
    usage_notes: list[str] = field(default_factory=list)
    seen: list[tuple[dict[str, Any], Answer]] = field(default_factory=list)  # bodies, answers

    @property
    def name(self) -> str:
        """Return the address."""
        return self.client.url

    def offers(self, *features: str) -> bool:
        """Return whether the server has all of these."""
        return not any(feature in self.lacks for feature in features)

    @property
    def context(self) -> int | None:
        """Return how many tokens the model takes, where the server says so."""
        found = self.card.get("max_model_len") or self.card.get("context_length")
        return found if isinstance(found, int) and found > 0 else None

    # ---------------------------------------------------------------------------------------------
    # Requests

    def call(self, ask: Ask) -> Call:
        """Return the request of one completion, greedy unless its fields say otherwise."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": ask.new_tokens}
        if self.chat_only:
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            body["prompt"] = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        body |= self._scores(chat=self.chat_only)
        return Call(CHAT if self.chat_only else COMPLETIONS, body | ask.fields)

    def _scores(self, *, chat: bool) -> dict[str, Any]:
        wanted = "chat log-probabilities" if chat else "log-probabilities"
        if not self.top or not self.offers(wanted):
            return {}
        made: dict[str, Any] = {"logprobs": True, "top_logprobs": self.top} if chat else {
            "logprobs": self.top
        }  # fmt: skip
        return made | ({"return_tokens_as_token_ids": True} if self.ids else {})

    def complete(self, ask: Ask) -> Answer:
        """Answer one request."""
        call = self.call(ask)
        return self._read(call, self.client.ask(call.path, call.body))[0]

    def choices(self, ask: Ask) -> list[Answer]:
        """Answer one request with all its choices."""
        call = self.call(ask)
        return self._read(call, self.client.ask(call.path, call.body))

    def together(self, asks: Sequence[Ask]) -> list[Answer | UnusableServer]:
        """Answer several requests that are sent at once."""
        calls = [self.call(ask) for ask in asks]
        made: list[Answer | UnusableServer] = []
        for call, reply in zip(calls, self.client.together(calls), strict=True):
            try:
                made.append(
                    reply if isinstance(reply, UnusableServer) else self._read(call, reply)[0]
                )
            except UnusableServer as error:
                made.append(error)
        return made

    def score(self, prompt: Prompt) -> tuple[Position, ...]:
        """Return the log-probabilities of a prompt's own tokens, as prefill computes them."""
        if self.scored_by == "prompt_logprobs":
            return self._prompt_scores(prompt)
        # Not every server takes max_tokens 0; the one new token is then dropped.
        positions = self.complete(Ask(prompt, self.echo_new, {"echo": True})).positions
        return positions[: max(0, len(positions) - self.echo_new)]

    def _prompt_scores(self, prompt: Prompt) -> tuple[Position, ...]:
        ids = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        call = self.call(Ask(ids, 1, {"prompt_logprobs": self.top}))
        reply = self.client.ask(call.path, call.body)
        self._read(call, reply)
        choice = reply.document["choices"][0]
        return AnswerReader(self._named(call)).prompt_scores(choice.get("prompt_logprobs"), ids)

    def chat(self, messages: list[dict[str, Any]], new_tokens: int, **fields: Any) -> Answer:
        """Answer a conversation greedily."""
        body = {"model": self.model, "messages": messages, "temperature": 0}
        body |= {"max_tokens": new_tokens} | self._scores(chat=True) | fields
        call = Call(CHAT, body)
        return self._read(call, self.client.ask(CHAT, body))[0]

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> tuple[int, ...]:
        """Return the ids of a text or of a conversation, by the server's own tokenizer."""
        body: dict[str, Any] = {"model": self.model}
        body |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        reply = self.client.ask(TOKENIZE, body)
        ids = reply.document.get("tokens")
        if reply.status != 200 or not isinstance(ids, list) or not ids:
            raise self._refused(TOKENIZE, reply)
        if not all(isinstance(number, int) for number in ids):
            raise self._refused(TOKENIZE, reply)
        return tuple(ids)

    def continued(self, prompt: Prompt, answer: Answer, tokens: int) -> Prompt | None:
        """Return a prompt with the first tokens of its answer; None where it cannot be written."""
        new = answer.positions[:tokens]
        if isinstance(prompt, tuple):
            numbers = [position.number for position in new]
            return None if None in numbers else (*prompt, *(n for n in numbers if n is not None))
        if "\N{REPLACEMENT CHARACTER}" in answer.text or any(p.number is not None for p in new):
            return None
        # Trap: a special token that is written out is read again as text, or as an unknown word.
        if any(SPECIAL.fullmatch(position.token.strip()) for position in new):
            return None
        return f"{prompt}{self.joint or ''}{''.join(position.token for position in new)}"

    def writable(self, answer: Answer) -> int:
        """Return how many tokens of an answer can be written into a prompt: as ids, all."""
        if self.ids:
            return len(answer.positions)
        special = (
            number
            for number, position in enumerate(answer.positions)
            if SPECIAL.fullmatch(position.token.strip())
        )
        return next(special, len(answer.positions))

    def _read(self, call: Call, reply: Reply) -> list[Answer]:
        if reply.status != 200 or _is_error(reply):
            raise self._refused(call.path, reply)
        found = AnswerReader(self._named(call)).answers(reply)
        for answer in found:
            self._look_at_usage(call, answer, len(found))
            self.seen.append((call.body or {}, answer))
        return found

    def _look_at_usage(self, call: Call, answer: Answer, choices: int) -> None:
        """Note where the counts of an answer cannot be: more tokens than were allowed or shown."""
        body, new = call.body or {}, answer.new_tokens
        prompt, echo = body.get("prompt"), bool(body.get("echo"))
        if isinstance(prompt, list) and answer.prompt_tokens not in (None, len(prompt)):
            self.usage_notes.append(
                f"prompt_tokens {answer.prompt_tokens} for a prompt of {len(prompt)} ids"
            )
        if new is None or choices > 1 or "reasoning_effort" in body:
            return
        most, shown = body.get("max_tokens"), len(answer.positions)
        if isinstance(most, int) and new > max(most, int(echo)):  # vLLM makes one to score a prompt
            self.usage_notes.append(f"completion_tokens {new} where max_tokens was {most}")
        # The end token may be counted without being shown.
        elif shown and not echo and not shown - 1 <= new <= shown + 1:
            self.usage_notes.append(f"completion_tokens {new} with {shown} tokens in the answer")

    def _refused(self, path: str, reply: Reply) -> UnusableServer:
        kind = RefusedRequest if reply.status in _TOO_MUCH else UnusableServer
        return kind(
            f"{self.name}{path}", reply.reason, "an answer (status 200)",
            "Look at the server's log; --token-file gives a token.",
        )  # fmt: skip

    def _named(self, call: Call) -> str:
        return f"{self.name}{call.path}"


# --------------------------------------------------------------------------------------------------
# Find out what is offered.


def explore(client: Client, model: str | None, texts: Sequence[Prompt]) -> ProbedServer:
    """Try each feature once; raise where nothing can be asked, or not within the limits."""
    with within_limits(client):
        return _explored(client, model, texts)


@contextmanager
def within_limits(client: Client) -> Iterator[None]:
    """Refuse a server that used up the limits before there was anything to judge."""
    try:
        yield
    except LimitReached as limit:
        raise UnusableServer(
            client.url, f"the limit of {limit.args[0]} was reached",
            "a server that shows what it offers before that",
            "Allow more: --time-limit SECONDS, --requests N.",
        ) from limit  # fmt: skip


def _explored(client: Client, model: str | None, texts: Sequence[Prompt]) -> ProbedServer:
    server = ProbedServer(client)
    find_model(server, model)
    text = _find_completions(server, texts)
    _find_chat(server, text, texts)
    # Some servers show log-probabilities in chats alone.
    without = not server.offers("log-probabilities") and server.offers("chat log-probabilities")
    why = "chats alone show log-probabilities" if without else ""
    why = why if server.offers("completions") else "chats alone are served"
    if why:
        if not server.offers("chat"):
            reason = f"completions: {server.lacks['completions']}; chat: {server.lacks['chat']}"
            raise UnusableServer(
                server.name, printable(reason, _SHOWN), "completions or chats that are answered",
                "Give the model's name with --model, and a token with --token-file.",
            )  # fmt: skip
        server.chat_only = True
        server.lacks |= dict.fromkeys(("prompts as ids", "prompt log-probabilities"), why)
        if not server.offers("chat log-probabilities"):
            server.lacks["log-probabilities"] = server.lacks["chat log-probabilities"]
        else:
            server.lacks.pop("log-probabilities", None)
    else:
        _find_tokenizer(server, text)
        _find_prompt_scores(server, text, texts)
    _find_fields(server, text)
    return server


def find_model(server: ProbedServer, model: str | None) -> None:
    """Find the model that requests name: the given one, or the first that is listed."""
    reply = server.client.ask(MODELS)
    if reply.status in (401, 403):
        raise UnusableServer(
            f"{server.name}{MODELS}", reply.reason, "a token that the server accepts",
            "Write it into a file, and give --token-file FILE.",
        )  # fmt: skip
    if reply.status in (429, 503):
        raise UnusableServer(
            f"{server.name}{MODELS}", reply.reason, "a server that is ready",
            "Wait until it has loaded its model, or has less to do, and probe it again.",
        )  # fmt: skip
    cards = reply.document.get("data")
    known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    names = [str(card.get("id")) for card in known if isinstance(card.get("id"), str)]
    if model is None and not names:
        raise UnusableServer(
            f"{server.name}{MODELS}", _without_models(reply), "a list of models",
            "Give the address of an OpenAI-compatible server, or the model with --model.",
        )  # fmt: skip
    if model is not None and names and model not in names:
        raise UnknownName.among("--model", model, names)
    server.model = model or names[0]
    server.card = next((card for card in known if card.get("id") == server.model), {})


def _without_models(reply: Reply) -> str:
    """Say what came in place of a list of models."""
    if reply.status != 200 or _is_error(reply):
        return reply.reason
    return "an empty list" if reply.document.get("data") == [] else "JSON without a list"


def _find_completions(server: ProbedServer, texts: Sequence[Prompt]) -> Prompt:
    """Find how completions show log-probabilities; return a text that the model continues."""
    text = texts[0]
    for text in texts[:_TEXTS]:
        plain = Ask(text, 2)
        reply, reason = _tried(server, plain)
        if reason:
            server.lacks |= dict.fromkeys(("completions", "log-probabilities"), reason)
            return text
        answer = server._read(server.call(plain), reply)[0]  # noqa: SLF001  found out here
        if answer.text:
            break
    find_scores(server, text)
    return text


def find_scores(server: ProbedServer, text: Prompt) -> None:
    """Find how many likeliest tokens a completion shows, and whether tokens come as ids."""
    plain = Ask(text, 1)
    # Without a tokenizer a token has no other name than its id.
    named = {"return_tokens_as_token_ids": True} if isinstance(text, tuple) else {}
    for top in _TOPS:
        reply, reason = _tried(server, Ask(text, 1, {"logprobs": top, **named}))
        if reason:
            continue
        answer = server._read(server.call(plain), reply)[0]  # noqa: SLF001  found out here
        if answer.positions:
            server.top = top
            break
    else:
        server.lacks["log-probabilities"] = reason or "none came back"
        return
    wanted = {"logprobs": top, "return_tokens_as_token_ids": True}
    reply, reason = _tried(server, Ask(text, 1, wanted))
    if not reason:
        positions = server._read(server.call(plain), reply)[0].positions  # noqa: SLF001  as above
        server.ids = bool(positions) and positions[0].number is not None


def _find_tokenizer(server: ProbedServer, text: Prompt) -> None:
    if isinstance(text, tuple):
        server.lacks["tokenize"] = NO_TOKENIZER
        return
    try:
        ids = server.tokenize(text)
    except UnusableServer as error:
        server.lacks["tokenize"] = str(error.value)
        server.lacks["prompts as ids"] = "the tokenizer is not known"
        server.ids = False
        return
    _, reason = _tried(server, Ask(ids, 1))
    if reason:
        server.lacks["prompts as ids"] = reason
        server.ids = False


def _find_prompt_scores(server: ProbedServer, text: Prompt, texts: Sequence[Prompt]) -> None:
    wanted = "prompt log-probabilities"
    if not server.offers("log-probabilities"):
        server.lacks[wanted] = server.lacks["log-probabilities"]
        return
    reason = "the prompt's tokens did not come back"
    given = isinstance(text, tuple) or not server.ids
    prompt = text if given else server.tokenize(str(text))
    for way, server.echo_new in (("echo", 0), ("echo", 1), ("prompt_logprobs", 1)):
        if way == "prompt_logprobs" and not server.ids:
            break
        server.scored_by = way
        try:
            found = server.score(prompt)
        except UnusableServer as error:
            reason = str(error.value)
            continue
        if len(found) > 1 and any(p.logprob is not None and p.top for p in found[1:]):
            if server.ids or _find_joint(server, texts):
                return
            reason = "a prompt and its answer do not come back as the same tokens"
    server.scored_by = ""
    server.lacks[wanted] = reason
    if not server.ids:
        _find_joint(server, texts)


def _find_joint(server: ProbedServer, texts: Sequence[Prompt]) -> bool:
    """Find what to write between a prompt and its answer, so that both keep their tokens."""
    answers: list[tuple[Prompt, Answer]] = []
    for text in texts[: 2 * _TEXTS]:  # some end before there is anything to write
        answer = server.complete(Ask(text, 2))
        if server.writable(answer):
            answers.append((text, answer))
        if len(answers) == _TEXTS:
            break
    for joint in ("", " "):
        server.joint = joint
        if answers and all(_keeps_tokens(server, *pair) for pair in answers):
            return True
    return False


def _keeps_tokens(server: ProbedServer, text: Prompt, answer: Answer) -> bool:
    """Return whether a prompt and its answer, written as one text, are the same tokens."""
    count = server.writable(answer)
    longer = server.continued(text, answer, count)
    if longer is None:
        return False
    try:
        if not server.scored_by:  # their number alone is known
            after = server.complete(Ask(longer, 1)).prompt_tokens
            before = answer.prompt_tokens
            return None in (before, after) or after == (before or 0) + count
        found = server.score(longer)[-count:]
    except UnusableServer:  # two words that became one are unknown to some tokenizers
        return False
    return all(map(same_token, (p.token for p in found), (p.token for p in answer.positions)))


def _find_chat(server: ProbedServer, text: Prompt, texts: Sequence[Prompt]) -> None:
    if isinstance(text, tuple):
        server.lacks |= dict.fromkeys(("chat", "chat log-probabilities"), NO_TOKENIZER)
        return
    body: dict[str, Any] = {"model": server.model, "max_tokens": 1, "temperature": 0}
    first = Call(CHAT, body | {"messages": [{"role": "user", "content": text}]})
    _, reason = _sent(server, first)
    if reason:
        server.lacks |= dict.fromkeys(("chat", "chat log-probabilities"), reason)
        return
    top = server.top or _TOPS[1]
    body |= {"logprobs": True, "top_logprobs": top}
    for words in (text, *(other for other in texts if other != text))[:_TEXTS]:
        wanted = Call(CHAT, body | {"messages": [{"role": "user", "content": words}]})
        reply, reason = _sent(server, wanted)
        answer = None if reason else AnswerReader(CHAT).answers(reply)[0]
        if answer is None or answer.text or answer.positions:
            break  # else it ended at once: another text may be continued
    if answer is not None and answer.positions and answer.positions[0].top:
        server.top = top
        return
    server.lacks["chat log-probabilities"] = reason or "none came back"


def _find_fields(server: ProbedServer, text: Prompt) -> None:
    tries = {"several choices": {"n": 2, "temperature": 1}, "seed": {"seed": 7, "temperature": 1}}
    for feature, fields in tries.items():
        reply, reason = _tried(server, Ask(text, 1, fields))
        if reason:
            server.lacks[feature] = reason
        elif feature == "several choices" and not _has_choices(reply, 2):
            server.lacks[feature] = "one choice came back where two were asked for"
    reply, reason = _tried(server, Ask(text, 1, {"stream": True}))
    if reason or not reply.events:
        server.lacks["stream"] = reason or "no events came back"


def _has_choices(reply: Reply, count: int) -> bool:
    choices = reply.document.get("choices")
    return isinstance(choices, list) and len(choices) == count


def _tried(server: ProbedServer, ask: Ask) -> tuple[Reply, str]:
    return _sent(server, server.call(ask))


def _sent(server: ProbedServer, call: Call) -> tuple[Reply, str]:
    """Send a request that a server may refuse; return its answer, or the reason why not."""
    try:
        reply = server.client.ask(call.path, call.body)
    except UnusableServer as error:  # no JSON, or nothing at all: it may know other requests
        return Reply(0, {}), str(error.value)
    return reply, "" if reply.status == 200 and not _is_error(reply) else reply.reason


def _is_error(reply: Reply) -> bool:
    """Return whether an error came in place of choices: some servers send it with status 200."""
    return bool(reply.document.get("error")) and not reply.document.get("choices")
