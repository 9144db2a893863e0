"""Import the modules of a command with the garbage collector off.

torch and its dependents make several hundred thousand objects, none of them garbage; collecting
would take a fifth of the import time. Afterwards the objects are frozen, so that later collections
skip them. In a process that already has torch, such as a test run, nothing changes.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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
