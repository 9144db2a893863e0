"""Hold a server beside another one, or beside a checkpoint that is computed here.

Both score the same texts. Positions are compared as everywhere; and two paired tests say whether
one side predicts the texts better: McNemar's over next tokens that were right, and a sign-flip test
over the mean log-probability of each text. Each says how many would decide what was seen.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

from degarble.harness.base.errors import Undecided
from degarble.harness.probe.answers import Position, same_token
from degarble.harness.probe.judging import (
    Cause,
    ProbedCheck,
    ProbeFinding,
    Status,
    compare,
    judge,
    limit_of,
)
from degarble.harness.probe.paired_tests import (
    mcnemar,
    prompts_for_answers,
    prompts_for_mean,
    sign_flip,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from degarble.harness.probe.server import ProbedServer, Prompt
    from degarble.harness.probe.session import Session

_SIGNIFICANT = 0.001
_TOP = 20


class Side(Protocol):
    """What scores a text."""

    @property
    def name(self) -> str:
        """Return what it is called."""

    @property
    def gives_ids(self) -> bool:
        """Return whether tokens can be named by their ids."""

    def score_text(self, text: Prompt, *, ids: bool) -> tuple[Position, ...]:
        """Return the log-probabilities of a text's tokens, by ids or by their texts."""


@dataclass(frozen=True)
class ServerSide:
    """Another server."""

    server: ProbedServer

    @property
    def name(self) -> str:
        """Return its address."""
        return self.server.name

    @property
    def gives_ids(self) -> bool:
        """Return whether tokens can be named by their ids."""
        return self.server.ids

    def score_text(self, text: Prompt, *, ids: bool) -> tuple[Position, ...]:
        """Return the log-probabilities of a text's tokens, by ids or by their texts."""
        server = self.server
        if isinstance(text, tuple):
            return server.score(text)
        if ids:
            return server.score(server.tokenize(text))
        return replace(server, ids=False).score(text)


@dataclass
class Against:
    """What the comparison of two sides found."""

    name: str
    result: ProbedCheck
    texts: int = 0
    tokens: int = 0
    right: tuple[int, int] = (0, 0)  # next tokens that only one side predicts
    answers_p: float = 1.0
    answers_needed: int | None = None
    means: list[float] = field(default_factory=list)  # nats a token, ours less theirs, a text
    means_p: float = 1.0
    means_needed: int | None = None

    @property
    def findings(self) -> list[ProbeFinding]:
        """Return what was found."""
        return self.result.findings

    @property
    def sentence(self) -> str:
        """Return both tests in words."""
        answers = f"p = {self.answers_p:.2g}{_needed(self.answers_needed, 'tokens')}"
        return (
            f"{self.texts} texts, {self.tokens:,} tokens. Right on one side alone: "
            f"{self.right[0]} and {self.right[1]}, {answers}. "
            f"Mean log-probability {fmean(self.means or [0.0]):+.3g} nats a token, "
            f"p = {self.means_p:.2g}{_needed(self.means_needed, 'texts')}."
        )


def _needed(count: int | None, what: str) -> str:
    return "" if count is None else f" ({count:,} {what} would decide)"


def against(
    session: Session, other: Side, tell: Callable[[str], None], keep: Callable[[Against], None]
) -> None:
    """Score all texts on both sides and compare; `keep` gets the record that is filled."""
    if not session.server.offers("prompt log-probabilities"):
        raise Undecided(
            f"--against {other.name}", "a server without prompt log-probabilities",
            "texts that both sides score", "Allow echo with logprobs, or prompt_logprobs.",
        )  # fmt: skip
    found = Against(other.name, ProbedCheck("against"))
    keep(found)
    found.result.unit = "texts"
    try:
        _score_all(found, session, other, tell)
    finally:
        _test(found)


def _score_all(found: Against, session: Session, other: Side, tell: Callable[[str], None]) -> None:
    apart = 0
    this = ServerSide(session.server)
    ids = this.gives_ids and other.gives_ids
    for number, text in enumerate(session.options.texts):
        tell(f"text {number + 1} of {len(session.options.texts)} on both sides")
        ours, theirs = this.score_text(text, ids=ids), other.score_text(text, ids=ids)
        ours, theirs = _known(ours), _known(theirs)
        if not _same_tokens(ours, theirs):
            apart += 1
            continue
        _add(found, number, (ours, theirs))
    if apart > len(session.options.texts) / 2:
        found.findings.append(
            ProbeFinding(
                "against", "the two sides read other tokens",
                f"{apart} of {len(session.options.texts)} texts have other tokens on the other "
                "side: two models, or two tokenizers.",
                remedy="Compare two servers of the same model.",
            )
        )  # fmt: skip


def _known(positions: Sequence[Position]) -> tuple[Position, ...]:
    return tuple(position for position in positions if position.logprob is not None)


def _same_tokens(ours: Sequence[Position], theirs: Sequence[Position]) -> bool:
    """Return whether both sides split a text alike."""
    if len(ours) != len(theirs) or not ours:
        return False
    return all(same_token(a.token, b.token) for a, b in zip(ours, theirs, strict=True))


def _add(found: Against, number: int, sides: tuple[Sequence[Position], ...]) -> None:
    ours, theirs = sides
    found.texts += 1
    found.tokens += len(ours)
    found.result.comparisons.append(compare(ours, theirs, number))
    right = [
        (_is_right(a), _is_right(b)) for a, b in zip(ours, theirs, strict=True) if a.top and b.top
    ]
    first, second = found.right
    found.right = (
        first + sum(a and not b for a, b in right),
        second + sum(b and not a for a, b in right),
    )
    pairs = [(a.logprob or 0.0, b.logprob or 0.0) for a, b in zip(ours, theirs, strict=True)]
    found.means.append(fmean(a - b for a, b in pairs))


def _is_right(position: Position) -> bool:
    return same_token(position.token, position.likeliest)


def _test(found: Against) -> None:
    found.answers_p = mcnemar(*found.right)
    found.answers_needed = prompts_for_answers(*found.right, found.tokens)
    found.means_p = sign_flip(found.means)
    found.means_needed = prompts_for_mean(found.means)


def judge_against(found: Against, results: Sequence[ProbedCheck], rounding: str | None) -> None:
    """Turn the comparison into findings: by the limit, and by the tests."""
    limit = limit_of("against", results, rounding)
    judge(
        found.result, limit,
        Cause(
            "the two sides give different log-probabilities",
            "Judge each of them by itself (degarble probe), and capture the same prompt on both: "
            "degarble compare says which component differs first.",
        ),
    )  # fmt: skip
    mean = fmean(found.means or [0.0])
    # A rounding moves each text in its own direction: a mean of less than the limit is no loss.
    if found.means_p < _SIGNIFICANT and abs(mean) > limit / max(1.0, math.sqrt(found.texts)):
        found.result.status = Status.DIFFERS
        better = "the other side" if mean < 0 else "this server"
        found.findings.append(
            ProbeFinding(
                "against", f"{better} predicts the texts better, and that is no chance",
                found.sentence, measured=abs(mean), limit=limit,
            )
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# A checkpoint that is computed here, as `degarble generate` does


@contextmanager
def local_side(folder: Path) -> Iterator[Side]:
    """Open a checkpoint as a side."""
    # Imports torch, which asking servers does without.
    from degarble.harness.probe.local import open_local  # noqa: PLC0415

    with open_local(folder, _TOP) as side:
        yield side
