"""Access control: a bearer token where one is set, and local host names where none is.

The check precedes every path but /health. A token is compared in constant time and never written
anywhere. Without a token only requests that name this machine as their host are answered, so that a
web page whose name was pointed here (DNS rebinding) reads nothing.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from degarble.harness.serve.messages import LOOPBACK
from degarble.harness.serve.refusals import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

OPEN = ("/health", "/health/live", "/health/ready")
_SCHEME = "bearer "


class Gate:
    """Admits or rejects a request. `hosts`: names that are answered without a token."""

    def __init__(self, token: str | None, hosts: frozenset[str] | None) -> None:
        self._token = None if token is None else token.encode()
        self._hosts = hosts

    @classmethod
    def of(cls, host: str, token: str | None, *, anyone: bool) -> Gate:
        """Make the gate of a server on this host; `anyone`: any name is accepted."""
        return cls(token, None if anyone else frozenset({*LOOPBACK, host.lower()}))

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Refuse whom the gate does not know."""
        if path in OPEN:
            return
        if self._token is not None:
            given = headers.get("authorization", "")
            known = given[: len(_SCHEME)].lower() == _SCHEME
            said = given[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
            if not (hmac.compare_digest(said, self._token) and known):
                raise ApiError(401, "the token is missing or wrong", None, "invalid_api_key")
        elif self._hosts is not None and _name(headers.get("host", "")) not in self._hosts:
            told = "this server answers requests to this machine's own name alone"
            raise ApiError(403, told, None, "unknown_host")


def _name(host: str) -> str:
    """Return a host without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
