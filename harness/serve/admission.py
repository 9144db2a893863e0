"""Admit requests: bearer token or local host names, and one bound for the memory of all."""

from __future__ import annotations

import hmac
import threading
from typing import TYPE_CHECKING, Self

from degarble.harness.inference.generation import MOST_CONCURRENT, PREFILL_TOKENS
from degarble.harness.model.family import family_of
from degarble.harness.serve.messages import LOOPBACK, ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from degarble.harness.model.config.config import Config
    from degarble.harness.serve.messages import SequenceRequest


# --------------------------------------------------------------------------------------------------
# Access. The check precedes every path but /health. A token is compared in constant time and never
# written anywhere. Without a token only requests that name this machine as their host are answered,
# so that a web page whose name was pointed here (DNS rebinding) reads nothing.

OPEN_PATHS = ("/health", "/health/live", "/health/ready")
_SCHEME = "bearer "


class AccessControl:
    """Admits or rejects a request. `hosts`: names that are answered without a token."""

    def __init__(self, token: str | None, hosts: frozenset[str] | None) -> None:
        self._token = None if token is None else token.encode()
        self._hosts = hosts

    @classmethod
    def for_host(cls, host: str, token: str | None, *, anyone: bool) -> AccessControl:
        """Make the gate of a server on this host; `anyone`: any name is accepted."""
        return cls(token, None if anyone else frozenset({*LOOPBACK, host.lower()}))

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse whom the gate does not know."""
        if path in OPEN_PATHS:
            return
        if self._token is not None:
            given = headers.get("authorization", "")
            known = given[: len(_SCHEME)].lower() == _SCHEME
            said = given[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
            if not (hmac.compare_digest(said, self._token) and known):
                raise ApiError(401, "the token is missing or wrong", None, "invalid_api_key")
        elif self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            message = "this server answers requests to this machine's own name alone"
            raise ApiError(403, message, None, "unknown_host")


def _name(host: str) -> str:
    """Return a host without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


# --------------------------------------------------------------------------------------------------
# Memory of all requests in flight, estimated before they are accepted. Bounding the number of
# requests is not enough: 64 prompts whose tokens are all returned with their 20 likeliest take 10
# KB for each token. So each request holds a share of one bound from the first byte of its body to
# the last of its answer. Where none is left it gets an error and may try again.

# Bytes, measured with tracemalloc on 64-bit CPython and rounded up.
PARSED = 24  # of a byte of JSON: `{},` is an object of 64 bytes and its place in a list
_ID = 48  # of a prompt's token: the number, and its places in a tuple, a list and a text
_NEW = 1_000  # of a new token: its piece, its change, its place in the answer
_SCORED = 2_000  # of a token that is returned with its probability
_LIKELY = 650  # of each likely token returned with it
_STATE = 16  # of a value that a layer remembers: float32, in buffers that grow to twice their rows


class MemoryBound:
    """The bytes that all requests together may hold. Thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """Return what the requests in flight hold now."""
        return self._taken

    def share(self) -> MemoryShare:
        """Begin a request; it holds nothing yet."""
        return MemoryShare(self)

    def take(self, nbytes: int, held: int) -> None:
        """Add `nbytes` to a request that holds `held`, or raise."""
        if held + nbytes > self._most:
            message = (
                f"this request would take about {_mib(held + nbytes)};"
                f" all requests together may take {_mib(self._most)} (--max-memory)"
            )
            raise ApiError(400, message, None, "request_too_large")
        with self._lock:
            if self._taken + nbytes > self._most:
                message = (
                    f"the requests in flight take {_mib(self._taken)} of {_mib(self._most)}, and"
                    f" this one needs about {_mib(nbytes)} more; try again"
                )
                raise ApiError(429, message, None, "memory_full", retry_after=5)
            self._taken += nbytes

    def release(self, nbytes: int) -> None:
        """Release `nbytes`."""
        with self._lock:
            self._taken -= nbytes


class MemoryShare:
    """The bytes of one request. Use it as a context that ends with the answer."""

    def __init__(self, bound: MemoryBound) -> None:
        self._bound = bound
        self._held = 0

    def grow(self, nbytes: int) -> None:
        """Hold more, or raise."""
        self._bound.take(nbytes, self._held)
        self._held += nbytes

    def resize(self, nbytes: int) -> None:
        """Hold this many bytes in place of the present ones."""
        if nbytes > self._held:
            self.grow(nbytes - self._held)
        else:
            self._bound.release(self._held - nbytes)
            self._held = nbytes

    def transfer(self) -> MemoryShare:
        """Transfer everything to a share that outlives this one."""
        share = MemoryShare(self._bound)
        share._held, self._held = self._held, 0
        return share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release everything."""
        held, self._held = self._held, 0
        self._bound.release(held)


def bytes_of(requests: Iterable[SequenceRequest], config: Config) -> int:
    """Estimate what the sequences of a request take until their answer is sent."""
    listed = list(requests)
    states = sorted((_state_bytes(request, config) for request in listed), reverse=True)
    return sum(map(_told_bytes, listed)) + sum(states[:MOST_CONCURRENT])  # the others wait


def _told_bytes(request: SequenceRequest) -> int:
    new, prompt = request.limits.new_tokens, len(request.prompt)
    told = prompt * _ID + new * _NEW
    if request.top is None:
        return told
    scored = new + (prompt if request.scores_prompt else 0)
    return told + scored * (_SCORED + request.top * _LIKELY)


def _state_bytes(request: SequenceRequest, config: Config) -> int:
    """Estimate the cached state of one sequence when it is complete."""
    tokens = len(request.prompt) + request.limits.new_tokens
    return family_of(config).cached_values(config, tokens, PREFILL_TOKENS) * _STATE


def _mib(nbytes: int) -> str:
    return f"{-(-nbytes >> 20)} MiB"
