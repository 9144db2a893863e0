"""Who may ask: a token where one is set, and names of this machine where none is.

Owns the check in front of every path but /health. A token is compared in constant time and never
written anywhere. Without one only requests that name this machine as their host are answered, so
that a page in a browser, whose name was pointed here, reads nothing.
Kept honest by suites/serve/test_auth.py.
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
    """Lets a request in, or refuses it. `hosts`: the names that are answered without a token."""

    def __init__(self, token: str | None, hosts: frozenset[str] | None) -> None:
        self._token = None if token is None else token.encode()
        self._hosts = hosts

    @classmethod
    def of(cls, host: str, token: str | None, *, anyone: bool) -> Gate:
        """The gate of a server on this host; `anyone`: any name will do."""
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
    """A host without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
