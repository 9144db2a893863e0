"""Find prompts in words that the probed model knows.

A tokenizer may know none of the default words: one of whole words in another language, of proteins,
of a test. All unknown words are one token then, and prompts that differ are the same to the server.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument, UnusableServer
from degarble.harness.probe.judging import compare
from degarble.harness.probe.server import (
    SPECIAL,
    Ask,
    ProbedServer,
    Prompt,
    find_model,
    find_scores,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.probe.answers import Answer
    from degarble.harness.probe.client import Client

OWN_TEXTS = 16
_OWN_TOKENS = 32
_LENGTH = 48  # characters of a text at least
_WORDS, _LETTERS = 6, 4  # words that are tried, and letters that each has at least
_EQUAL = 1e-9  # nats: no healthy server gives two prompts such numbers


def known_texts(server: ProbedServer, texts: Sequence[str], *, given: bool) -> tuple[str, ...]:
    """Return the texts, or such as the model itself writes where it does not know their words.

    Texts that the user gave stay; they are refused where their words are seen to be one token.
    """
    words, seen = _words(texts), _sees_tokens(server)
    try:
        if not _are_one(server, words):
            return tuple(texts)
        own = () if given else own_texts(server, texts)
    except UnusableServer:  # the checks say what it refuses
        return tuple(texts)
    if len(own) >= _WORDS:
        return own
    if not seen:  # a server that reads no prompt looks the same; the checks find it
        return tuple(texts)
    raise InvalidArgument(
        "--prompts", f"{' and '.join(words[:2])}: one token to {server.name}",
        "prompts in words that the server's tokenizer knows",
        "Write some into FILE, one a line, and give --prompts FILE.",
    )  # fmt: skip


def same_tokens(server: ProbedServer, one: Prompt, other: Prompt) -> bool:
    """Return whether two prompts are seen to be the same tokens to the server."""
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    if not _sees_tokens(server):
        return False
    return _tokens(server, one) == _tokens(server, other)


def texts_from_ids(client: Client, model: str | None) -> tuple[str, ...]:
    """Return texts that a model writes after a few ids, where it refuses the default words."""
    server = ProbedServer(client)
    try:
        find_model(server, model)
        return own_texts(server, [tuple(range(n + 3, n + 7)) for n in range(OWN_TEXTS)])
    except UnusableServer:  # the first refusal says more
        return ()


def ids_of_model(client: Client, model: str | None) -> tuple[Prompt, ...]:
    """Return prompts of ids that a model draws, for a server without a tokenizer.

    Empty where the server takes no ids, or does not name its tokens by ids.
    """
    server = ProbedServer(client)
    starts = [tuple(range(n + 3, n + 7)) for n in range(OWN_TEXTS)]
    try:
        find_model(server, model)
        find_scores(server, starts[0])
        if not server.ids:
            return ()
        found: dict[Prompt, None] = {}
        for number, start in enumerate(starts):
            ask = Ask(start, _OWN_TOKENS, {"temperature": 1, "seed": number})
            drawn = server.complete(ask).positions
            found[(*start, *(p.number for p in drawn if p.number is not None))] = None
    except UnusableServer:  # the first refusal says more
        return ()
    return tuple(found)


def own_texts(server: ProbedServer, texts: Sequence[Prompt]) -> tuple[str, ...]:
    """Return texts that the model writes after these, when it draws its tokens."""
    found: dict[str, None] = {}
    text = ""
    for number in range(2 * OWN_TEXTS):
        fields: dict[str, Any] = {"temperature": 1}
        fields |= {"seed": number} if server.offers("seed") else {}
        ask = Ask(texts[number % len(texts)], _OWN_TOKENS, fields)
        # Trap: some servers write special tokens out, and read them again as text.
        drawn = SPECIAL.sub(" ", server.complete(ask).text)
        text = " ".join([*text.split(), *drawn.split()])
        if len(text) >= _LENGTH:
            found[text] = None
            text = ""
        if len(found) == OWN_TEXTS:
            break
    return tuple(found)


def _words(texts: Sequence[str]) -> list[str]:
    """Return words of different texts."""
    found: dict[str, None] = {}
    for text in texts:
        longest = max(text.split(), key=lambda word: (word.isalpha(), len(word)), default="")
        if longest:
            found[longest] = None
    return list(found)[:_WORDS]


def _are_one(server: ProbedServer, words: Sequence[str]) -> bool:
    """Return whether at least half of the words are the same to the server as the word before."""
    if len(words) < _LETTERS:
        return False
    if _sees_tokens(server):
        tokens = [_tokens(server, word) for word in words]
        same = sum(one == other for one, other in pairwise(tokens))
    elif server.offers("log-probabilities"):
        answers = [server.complete(Ask(word, 1)) for word in words]
        same = sum(_equal(one, other) for one, other in pairwise(answers))
    else:
        return False
    return 2 * same >= len(words) - 1


def _equal(one: Answer, other: Answer) -> bool:
    made = compare(one.positions, other.positions, 0)
    return bool(made.distances) and made.parted is None and made.size < _EQUAL


def _sees_tokens(server: ProbedServer) -> bool:
    return not server.chat_only and (
        server.offers("tokenize") or server.offers("prompt log-probabilities")
    )


def _tokens(server: ProbedServer, text: str) -> tuple[object, ...]:
    if server.offers("tokenize"):
        return server.tokenize(text)
    return tuple(position.token for position in server.score(text))
