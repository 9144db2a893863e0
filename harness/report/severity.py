"""Severity of a block on a report page. Imports no sibling."""

from __future__ import annotations

from enum import StrEnum


class Tone(StrEnum):
    """Severity of a sentence or bar. It is never shown by colour alone."""

    PLAIN = "plain"
    NOTE = "note"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"

    @property
    def weight(self) -> int:
        """Order of tones, the worst one highest."""
        return list(Tone).index(self)
