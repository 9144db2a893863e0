"""Wait for a condition or a process without judging a test by the clock.

No test passes or fails by how long it took: a machine that four other processes share is slower,
not wrong. HANG_SECONDS only ends what would never end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HANG_SECONDS = 900.0


def until(holds: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
    """Wait until `holds()` is true; fail where that never happens."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
