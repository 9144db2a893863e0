"""Import a command's modules: without garbage collection, and ended at once by Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


# --------------------------------------------------------------------------------------------------
# Import the modules of a command with the garbage collector off.
#
# torch and its dependents make several hundred thousand objects, none of them garbage; collecting
# would take a fifth of the import time. Afterwards the objects are frozen, so that later
# collections skip them. In a process that already has torch, such as a test run, nothing changes.

HEAVY = "torch"


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing inside; what exists at the end is never looked at again."""
    if HEAVY in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# --------------------------------------------------------------------------------------------------
# End the process at once on Ctrl-C while a command is still importing.
#
# An exception raised inside torch's or numpy's initialisation ends in C++ code that aborts the
# process, or is reported as a broken installation. Nothing has been written by then, so nothing
# needs cleaning up. Everywhere else Ctrl-C raises KeyboardInterrupt as usual. If another handler is
# installed, or in another thread, nothing changes.
#
# A compiler of kernels or loops loses an exception that is raised in one of its callbacks, or turns
# it into another one, or aborts over a module that is half built. Ctrl-C waits until it is done.

EXIT_INTERRUPTED = 130
INTERRUPTED_MESSAGE = "\ndegarble: interrupted\n"
_STARTING = ("torch", "numpy")
_COMPILERS = ("cutlass", "llvmlite", "numba")
_WAIT = 0.05  # seconds


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
        sys.stderr.write(INTERRUPTED_MESSAGE)
        sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    if _is_compiling(frame):
        main = threading.main_thread().ident  # its system calls have to end as well
        again = threading.Timer(_WAIT, signal.pthread_kill, (main, number))
        again.daemon = True
        again.start()
        return
    signal.default_int_handler(number, frame)


def _is_compiling(frame: FrameType | None) -> bool:
    """Whether a module of a compiler has called this code, directly or not."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _COMPILERS:
            return True
        frame = frame.f_back
    return False


def _is_starting(name: str) -> bool:
    """Whether a module is being imported at this moment; Python says so on its spec."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))
