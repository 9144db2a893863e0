"""Prompts in words that a server knows: default words that are all one token raise no alarm."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, UnusableServer
from degarble.harness.inference.model import open_model
from degarble.harness.probe.answers import Answer, Position
from degarble.harness.probe.client import Client, RequestLimits
from degarble.harness.probe.passages import PASSAGES
from degarble.harness.probe.probe import probe
from degarble.harness.probe.session import DEFAULT, OWN, ProbeOptions
from degarble.harness.probe.vocabulary import known_texts, same_tokens
from degarble.harness.report.verdict import Verdict
from degarble.suites.probe.small_model import SmallConfig
from degarble.suites.probe.stand_in import Manner, ScoringEngine, serving
from degarble.suites.serve.talking_cases import write_speaker

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = ("lighthouse", "boils", "subtract", "Saturday", "newspaper", "bread", "ventricle")


@dataclass
class WordServer:
    """Knows some words; every other word is token 0."""

    words: tuple[str, ...]
    features: tuple[str, ...] = ("tokenize", "log-probabilities", "seed")
    name: str = "http://server"
    chat_only: bool = False
    writes: bool = True
    asked: list[Any] = field(default_factory=list)

    def offers(self, *features: str) -> bool:
        return all(feature in self.features for feature in features)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(1 + self.words.index(w) if w in self.words else 0 for w in text.split())

    def score(self, text: str) -> tuple[Position, ...]:
        return tuple(Position(f"t{n}", -1.0, {}) for n in self.tokenize(text))

    def complete(self, ask: Any) -> Answer:
        self.asked.append(ask)
        if ask.new_tokens == 1:
            value = -1.0 - sum(self.tokenize(ask.prompt))
            return Answer("w", (Position("w", value, {"w": value, "v": value - 1}),))
        if not self.writes:
            raise UnusableServer("/v1/completions", "400", "an answer", "Look.")
        return Answer(f"one own text of the model<pad>, its number {len(self.asked)} and no more")


SEEN = pytest.mark.parametrize(
    "features",
    [("tokenize",), ("prompt log-probabilities",), ("log-probabilities",)],
    ids=["tokenizer", "echo", "numbers"],
)


@SEEN
def test_texts_in_known_words_stay(features: tuple[str, ...]) -> None:
    server: Any = WordServer(KNOWN, features)
    lines = tuple(f"a text of {word}" for word in KNOWN)
    assert known_texts(server, lines, given=False) == lines


@SEEN
def test_unknown_default_words_are_replaced_by_what_the_model_writes(
    features: tuple[str, ...],
) -> None:
    server: Any = WordServer((), features)
    found = known_texts(server, PASSAGES, given=False)
    assert found
    assert all(text.startswith("one own text of the model , its") for text in found)


def test_given_prompts_of_unknown_words_are_refused_where_that_is_seen() -> None:
    server: Any = WordServer(())
    with pytest.raises(InvalidArgument, match=r"one token to http://server"):
        known_texts(server, PASSAGES, given=True)
    blind: Any = WordServer((), ("log-probabilities",))
    assert known_texts(blind, PASSAGES, given=True) == PASSAGES


def test_a_server_that_writes_nothing_keeps_the_texts() -> None:
    server: Any = WordServer((), writes=False)
    assert known_texts(server, PASSAGES, given=False) == PASSAGES


def test_two_prompts_of_unknown_words_are_the_same_tokens() -> None:
    server: Any = WordServer(KNOWN)
    assert same_tokens(server, "nobody bread", "knows bread")
    assert not same_tokens(server, "bread", "boils")
    assert not same_tokens(server, (1, 2), (1, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("words") / "model")


@pytest.mark.parametrize("unknown", ["w6", "?"], ids=["one token", "refused"])
@pytest.mark.slow
def test_a_healthy_server_of_other_words_raises_no_alarm(folder: Path, unknown: str) -> None:
    tokenizer = folder / "tokenizer.json"
    raw = json.loads(tokenizer.read_text())
    raw["model"]["unk_token"] = unknown
    tokenizer.write_text(json.dumps(raw))
    with (
        open_model(folder) as model,
        serving(model, SmallConfig(3, width=32), Manner(engine=ScoringEngine)) as url,
    ):
        options = ProbeOptions(PASSAGES, max_prompt_tokens=140, prompts=DEFAULT)
        result = probe(Client(url, None, RequestLimits(rate=1e6)), options)
    assert result.verdict is Verdict.AGREES, result.findings
    assert result.options.prompts == OWN
