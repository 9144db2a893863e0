"""Bounds, sequences and results that pass between web side and computing thread; API errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError

if TYPE_CHECKING:
    from degarble.harness.inference.generation import Finish, Limits, Sampling


# --------------------------------------------------------------------------------------------------
# A request holds one SequenceRequest for each prompt and each of its `n` choices.

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
class SequenceRequest:
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
class ScoredToken:
    """A token with its text and its log-probability, which is None for the first token."""

    number: int
    text: str
    log_probability: float | None
    likeliest: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True)
class TextPiece:
    """A result of one sequence: text that is final, and the tokens since the last piece.

    `new_tokens` counts all of the sequence, an end token included.
    """

    place: int
    text: str
    new_tokens: int
    tokens: tuple[ScoredToken, ...] = ()
    of_prompt: bool = False
    finish: Finish | None = None


@dataclass(frozen=True)
class FailedSequence:
    """One sequence that ended with an error."""

    place: int
    error: Exception


SequenceResult = TextPiece | FailedSequence


# --------------------------------------------------------------------------------------------------
# API errors as OpenAI's clients read them: a status, and an error object of four fields.
#
# A mistake in a request is 400 with the name of the parameter; a failure of the model is 500 and
# says so. No answer holds a traceback.

WRONG_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """An error that is sent to a client."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def document(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, WRONG_REQUEST if self.status < 500 else SERVER_ERROR)
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def headers(self) -> dict[str, str]:
        """Return the extra headers of the answer."""
        made = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return made | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def bad_parameter(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Make the error of one parameter's value."""
    return ApiError(400, f"{param}: {message}", param, code)


def bad_input(param: str, error: DegarbleError) -> ApiError:
    """Make the API error of one of our own errors about the request."""
    return ApiError(400, str(error), param, "invalid_value")


def model_failure(error: Exception) -> ApiError:
    """Make the error of a failed model run; details of our own mistakes are not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DegarbleError):
        return ApiError(500, str(error), None, "model_failed")
    return ApiError(500, "degarble failed; its own output says where", None, "internal_error")


def timed_out(seconds: float) -> ApiError:
    """Make the error of a request that took too long."""
    return ApiError(504, f"not done within {seconds:g} s", None, "timeout")


def server_stopping() -> ApiError:
    """Make the error of a request that arrives while the server ends."""
    return ApiError(503, "the server is stopping", None, "stopping", retry_after=5)
