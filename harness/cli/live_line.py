"""Progress for people: one line that repaints itself on a screen, rare plain lines elsewhere.

Owns when and where a Pace is written: on a screen at most ten times a second, in place, gone at the
end; into a file or a pipe one line a minute at most and one for each twentieth of the work at most,
so a run of hours leaves twenty lines in a log and a short one none.
What keeps it honest: suites/cli/test_live_line.py.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from degarble.harness.report.progress import Pace

_REPAINT = 0.1  # seconds
_PLAIN = 60.0  # seconds
_STEPS = 20  # plain lines of one run at most
_COLUMNS = 80  # where a screen does not tell its own
_CLEAR = "\r\x1b[K"


class LiveLine:
    """The line on a screen. Call it with a pace; `end()` removes it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._painted: float | None = None

    def __call__(self, pace: Pace) -> None:
        """Paint it, unless that was done just now."""
        now = self._clock()
        if self._painted is not None and now - self._painted < _REPAINT:
            return
        self._painted = now
        # Trap: a line as wide as the screen wraps, and then cannot be removed.
        text = visible(pace.text(self._columns() - 1)).replace("\n", " ")
        self._stream.write(f"{_CLEAR}{text}")
        self._stream.flush()

    def end(self) -> None:
        """Leave the screen as it was."""
        if self._painted is not None:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
        except (OSError, ValueError):
            return _COLUMNS


class PlainLines:
    """Lines for a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told, self._step = 0.0, 0

    def __call__(self, pace: Pace) -> None:
        """Write a line where one is due."""
        step = int(pace.share * _STEPS)
        if pace.elapsed - self._told < _PLAIN or step <= self._step or step >= _STEPS:
            return
        self._told, self._step = pace.elapsed, step
        self._stream.write(f"{visible(pace.text())}\n")
        self._stream.flush()

    def end(self) -> None:
        """Nothing is left to remove."""
