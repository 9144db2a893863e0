"""API errors as OpenAI's clients read them: a status, and an error object of four fields.

A mistake in a request is 400 with the name of the parameter; a failure of the model is 500 and says
so. No answer holds a traceback.
"""

from __future__ import annotations

from typing import Any

from degarble.harness.base.errors import DegarbleError

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
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    def headers(self) -> dict[str, str]:
        """Return the extra headers of the answer."""
        made = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return made | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def wrong(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Make the error of one parameter's value."""
    return ApiError(400, f"{param}: {message}", param, code)


def wrong_input(param: str, error: DegarbleError) -> ApiError:
    """Make the API error of one of our own errors about the request."""
    return ApiError(400, str(error), param, "invalid_value")


def of_model(error: Exception) -> ApiError:
    """Make the error of a failed model run; details of our own mistakes are not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DegarbleError):
        return ApiError(500, str(error), None, "model_failed")
    return ApiError(500, "degarble failed; its own output says where", None, "internal_error")


def late(seconds: float) -> ApiError:
    """Make the error of a request that took too long."""
    return ApiError(504, f"not done within {seconds:g} s", None, "timeout")


def stopping() -> ApiError:
    """Make the error of a request that arrives while the server ends."""
    return ApiError(503, "the server is stopping", None, "stopping", retry_after=5)
