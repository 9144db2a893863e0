"""Print progress: one line that is repainted on a terminal, occasional plain lines elsewhere.

A terminal is repainted at most ten times a second, and the line is erased at the end. A file or a
pipe gets at most one line a minute and at most one for each twentieth of the work, so a run of
hours leaves twenty lines in a log and a short one none.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from degarble.harness.report.progress import ProgressState

_REPAINT = 0.1  # seconds
_PLAIN = 60.0  # seconds
_STEPS = 20  # plain lines of one run at most
_COLUMNS = 80  # where a screen does not tell its own
_CLEAR = "\r\x1b[K"


class LiveLine:
    """Progress line on a screen. Call it with a pace; `end()` removes it."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._painted: float | None = None

    def __call__(self, pace: ProgressState) -> None:
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

    def __call__(self, pace: ProgressState) -> None:
        """Write a line where one is due."""
        step = int(pace.share * _STEPS)
        if pace.elapsed - self._told < _PLAIN or step <= self._step or step >= _STEPS:
            return
        self._told, self._step = pace.elapsed, step
        self._stream.write(f"{visible(pace.text())}\n")
        self._stream.flush()

    def end(self) -> None:
        """Nothing is left to remove."""
