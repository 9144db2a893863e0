"""Ctrl-C while a command still imports: it ends at once, with the status of an interrupted one.

Owns `interruptible`. An exception that is raised inside torch's or numpy's own start ends in C++
code that aborts the process, or is told as a broken installation; nothing has been written by then,
so there is nothing to put in order. Everywhere else Ctrl-C is the exception that it always was.
Where somebody else decided about Ctrl-C, or in another thread, nothing changes. Refuses nothing.
Kept honest by suites/cli/test_interrupts.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

EXIT_INTERRUPTED = 130
TOLD = "\ndegarble: interrupted\n"
_STARTING = ("torch", "numpy")


@contextmanager
def interruptible() -> Iterator[None]:
    """Decide about Ctrl-C inside, and leave it as it was."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupted(number: int, frame: FrameType | None) -> None:
    if any(map(_is_starting, _STARTING)):
        sys.stderr.write(TOLD)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    signal.default_int_handler(number, frame)


def _is_starting(name: str) -> bool:
    """Whether a module is being imported at this moment; Python says so on its spec."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
