"""Compute the progress of a long run: bytes done of the total, rate, time left. Imports no sibling.

Use in a command: `with terminal.work("quantise", total_bytes) as progress:`, then
`progress.advance(nbytes, what)` from any thread after each finished piece. Small and frequent
pieces are fine, since drawing is bounded. `progress.skip(nbytes)` is for what an earlier run
finished: it counts as done, but not for the rate. `progress.expect(nbytes)` adds work that becomes
known late; `progress.step(what)` names slow work without bytes. Lower layers take
`progress.advance` as a function and no terminal.

The rate covers the last half minute, so the time left follows the present speed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_WINDOW = 30.0  # seconds that the rate looks back
_SPACING = 0.25  # seconds between two points that it remembers
_SETTLED = 1.0  # seconds before a rate is told


@dataclass(frozen=True)
class ProgressState:
    """Progress of a run at one moment. `rate` is bytes a second, None while it is unknown."""

    doing: str
    done: int
    total: int
    elapsed: float
    rate: float | None
    step: str

    @property
    def share(self) -> float:
        """Share of the work that is done; 1 if there is none."""
        return min(1.0, self.done / self.total) if self.total > 0 else 1.0

    @property
    def left(self) -> float | None:
        """Seconds left at this rate."""
        return max(0, self.total - self.done) / self.rate if self.rate else None

    def text(self, width: int = 100) -> str:
        """Format the progress in at most `width` columns; the least important part goes first."""
        rate = "" if self.rate is None else f"{size(self.rate)}/s"
        left = "" if self.left is None else f"{duration(self.left)} left"
        if self.total <= 0:
            return f"{self.doing}  {self.step}".rstrip()[: max(0, width)]
        percent = f"{math.floor(self.share * 100)} %"
        amount = f"{size(self.done)} of {size(self.total)}"
        for parts in (
            (self.doing, percent, amount, rate, left, self.step),
            (self.doing, percent, amount, rate, left),
            (self.doing, percent, left),
            (self.doing, percent),
        ):
            line = "  ".join(part for part in parts if part)
            if len(line) <= width:
                return line
        return percent[: max(0, width)]


class Progress:
    """Counts what is done, and shows it after each piece. Any thread may call it."""

    def __init__(
        self,
        doing: str,
        total: int,
        show: Callable[[ProgressState], None] = lambda _pace: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing, self._total = doing, total
        self._show, self._clock = show, clock
        self._begun = clock()
        self._done = 0
        self._step = ""
        self._points: deque[tuple[float, int]] = deque([(self._begun, 0)])
        self._lock = threading.Lock()

    def advance(self, nbytes: int, step: str = "") -> None:
        """Count bytes as done; `step` names what comes next, or what was done."""
        with self._lock:
            self._done += nbytes
            self._step = step or self._step
            self._remember()
            self._show(self._pace())

    def step(self, what: str) -> None:
        """Name what is being done."""
        self.advance(0, what)

    def expect(self, nbytes: int) -> None:
        """Add work that is known of only now; the rate begins anew."""
        with self._lock:
            self._total += nbytes
            self._points = deque([(self._clock(), self._done)])
            self._show(self._pace())

    def skip(self, nbytes: int) -> None:
        """Count bytes that an earlier run had done: they say nothing about the rate."""
        with self._lock:
            self._done += nbytes
            self._points = deque((when, done + nbytes) for when, done in self._points)

    @property
    def pace(self) -> ProgressState:
        """Return the present progress."""
        with self._lock:
            return self._pace()

    def _remember(self) -> None:
        now = self._clock()
        if now - self._points[-1][0] >= _SPACING:
            self._points.append((now, self._done))
        # Trap: one point older than the window stays, or a single slow piece would have no rate.
        while len(self._points) > 2 and self._points[1][0] <= now - _WINDOW:
            self._points.popleft()

    def _pace(self) -> ProgressState:
        now = self._clock()
        since, before = self._points[0]
        took, gone = now - since, self._done - before
        rate = gone / took if took >= _SETTLED and gone else None
        return ProgressState(
            self._doing, self._done, self._total, now - self._begun, rate, self._step
        )


def size(nbytes: float) -> str:
    """Write a number of bytes in decimal units, three digits."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        nbytes /= 1000
        if nbytes < 999.5:
            return f"{nbytes:.{_places(nbytes)}f} {unit}"
    return f"{nbytes / 1000:.2f} TB"


def _places(value: float) -> int:
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def duration(seconds: float) -> str:
    """Write a time in the two units that matter."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
