"""The imports of a command, made without looking for garbage among them.

Owns `importing`: torch and what stands on it make several hundred thousand objects, none of them
garbage, and a fifth of the time of importing them would go into looking. Afterwards they are set
aside, so that later collections do not walk them either. In a process that has torch already, as
that of a suite, nothing changes. Refuses nothing. Kept honest by suites/cli/test_imports.py.
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
