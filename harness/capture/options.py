"""Parse a request to capture from a live server: request ids, filters, limits.

The client sends an id as X-Request-Id, and servers add words around it. So an id matches if it is
one or several whole words of the server's id. Without ids the next N requests are captured. A
capture ends at its limit of bytes or seconds, or when a client closes it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.filter import Wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_BYTES = 1 << 30  # of tensors, on each rank
MOST_REQUESTS = 64
MOST_SECONDS = 3600.0
_BYTES, _SECONDS = 256 << 20, 600.0
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WORDS = ("layers", "components", "tokens")


@dataclass(frozen=True)
class Asked:
    """Options of one capture of a live server. `requests`: ids; if empty, the next `count` ones."""

    wanted: Wanted = field(default_factory=Wanted)
    requests: tuple[str, ...] = ()
    count: int = 1
    nbytes: int = _BYTES
    seconds: float = _SECONDS

    @classmethod
    def of_json(cls, raw: Mapping[str, Any]) -> Asked:
        """Read what a client asks for."""
        known = {"requests", "count", "max_bytes", "seconds", *_WORDS}
        strange = sorted(raw.keys() - known)
        if strange:
            raise _wrong("capture", strange[0], f"one of {', '.join(sorted(known))}")
        words = []
        for name in _WORDS:
            said = raw.get(name)
            if said is not None and not (isinstance(said, str) and len(said) <= 1000):
                raise _wrong(name, said, "a text as --layers, --components and --tokens take")
            words.append(said)
        requests = raw.get("requests") or []
        if not isinstance(requests, list) or len(requests) > MOST_REQUESTS:
            raise _wrong("requests", requests, f"a list of at most {MOST_REQUESTS} ids")
        for each in requests:
            if not (isinstance(each, str) and REQUEST_ID.fullmatch(each)):
                raise _wrong("requests", each, "ids of letters, digits, and . _ : -")
        return cls(
            Wanted.of(*words),
            tuple(dict.fromkeys(requests)),
            int(_number(raw, "count", len(requests) or 1, 1, MOST_REQUESTS)),
            int(_number(raw, "max_bytes", _BYTES, 1, MOST_BYTES)),
            _number(raw, "seconds", _SECONDS, 1, MOST_SECONDS),
        )

    def document(self) -> dict[str, Any]:
        """Return the options as JSON, as of_json reads them."""
        found: dict[str, Any] = {
            name: None if words is None else ",".join(words)
            for name, words in self.wanted.document().items()
        }
        found |= {"requests": list(self.requests), "count": self.count}
        return found | {"max_bytes": self.nbytes, "seconds": self.seconds}


class Roll:
    """Which requests are captured, in the order in which they came."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.ids: list[str] = []
        self._ends = time.monotonic() + asked.seconds

    @property
    def late(self) -> bool:
        """Return whether the time limit is exceeded."""
        return time.monotonic() > self._ends

    def owner(self, request: str) -> int | None:
        """Return the sequence number of a request, or None if it is not to be captured."""
        if request in self.ids:
            return self.ids.index(request)
        if self.late or len(self.ids) >= self._room or not self._matches(request):
            return None
        self.ids.append(request)
        return len(self.ids) - 1

    @property
    def _room(self) -> int:
        return MOST_REQUESTS if self.asked.requests else self.asked.count

    def _matches(self, request: str) -> bool:
        if not self.asked.requests:
            return True
        return any(
            re.search(rf"(?:^|-){re.escape(each)}(?:-|$)", request) for each in self.asked.requests
        )


def _number(raw: Mapping[str, Any], name: str, usual: float, low: float, high: float) -> float:
    found = raw.get(name)
    if found is None:
        return usual
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not low <= found <= high:
        raise _wrong(name, found, f"a number from {low:g} to {high:g}")
    return found


def _wrong(name: str, value: object, expectation: str) -> InvalidArgument:
    return InvalidArgument(name, str(value)[:200], expectation, "See docs/capture.md.")
