"""Records passed between the web side and the computing thread: bounds, requests, results.

An Ask is one sequence; a request holds one for each prompt and each of its `n` choices. Imports no
sibling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from degarble.harness.inference.generation import Finish, Limits
    from degarble.harness.inference.sampling import Sampling

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Bounds:
    """Limits of one request, one connection, and all requests together."""

    body_bytes: int = 4 << 20
    prompt_tokens: int = 8192
    new_tokens: int = 1024
    sequences: int = 256  # that run or wait, all requests together
    memory_bytes: int = 4 << 30  # of all requests together, estimated before they are taken
    connections: int = 1024
    seconds: float = 600.0  # of one request, waiting included
    head_seconds: float = 10.0  # until a request's head is complete
    body_seconds: float = 30.0
    stall_seconds: float = 60.0  # that a client may leave an answer untaken
    quiet_seconds: float = 15.0  # of a stream without results, after which a comment is sent
    drain_seconds: float = 30.0  # that running requests are given when the server ends


@dataclass(frozen=True)
class Ask:
    """One sequence: its prompt, its sampling and limits, and which probabilities are wanted.

    `top`: None for none, else how many of the likeliest tokens besides the chosen one.
    `silent_begin`: the server put the prompt's first token in front; it is not returned.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    top: int | None = None
    scores_prompt: bool = False
    silent_begin: bool = False


@dataclass(frozen=True)
class Scored:
    """A token with its text and its log-probability, which is None for the first token."""

    number: int
    text: str
    log_probability: float | None
    likeliest: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A result of one sequence: text that is final, and the tokens since the last piece.

    `new_tokens` counts all of the sequence, an end token included.
    """

    place: int
    text: str
    new_tokens: int
    tokens: tuple[Scored, ...] = ()
    of_prompt: bool = False
    finish: Finish | None = None


@dataclass(frozen=True)
class Failed:
    """One sequence that ended with an error."""

    place: int
    error: Exception


Heard = Piece | Failed
