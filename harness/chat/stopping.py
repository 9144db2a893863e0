"""Find stop strings in streamed text, also where they spread over several tokens.

Text that may become a stop is held back, so that no part of a stop is ever shown. An empty stop is
an error, because it would end every text at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stops:
    """A text that arrives in pieces and ends where the first stop begins."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidArgument("--stop", "", "a text of one character at least", "Leave it out.")
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def add(self, piece: str) -> str:
        """Take a piece; return what can no longer be the beginning of a stop."""
        text = self._held + piece
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The one that is complete first, however the pieces are cut; of several, the longest.
            place, self.hit = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._held = ""
            return text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back when no stop came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
