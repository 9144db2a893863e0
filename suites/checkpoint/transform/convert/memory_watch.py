"""How much memory a command and all its descendants take together, at most.

Counts the proportional share of every page (Pss of proc(5)), so that what processes share counts
once, and the pages of mapped files as long as they are resident. Samples are some milliseconds
apart; a peak between two of them is not seen.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS_BETWEEN = 0.05


class Watched(NamedTuple):
    """A command that ended, the peak in bytes, and the largest number of its processes."""

    status: int
    told: str
    peak: int
    processes: int


def watched(*command: str, each: Callable[[], None] = lambda: None) -> Watched:
    """Run a command to its end; call `each` after every look at it."""
    peak = most = 0
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while process.poll() is None:
            family = _family(process.pid)
            peak = max(peak, sum(map(_share, family)))
            most = max(most, len(family))
            each()
            time.sleep(SECONDS_BETWEEN)
        assert process.stdout is not None
        return Watched(process.returncode, process.stdout.read(), peak, most)


def _family(root: int) -> set[int]:
    """Return a process and its descendants."""
    family, fresh = {root}, {root}
    while fresh:
        fresh = {child for process in fresh for child in _children(process)} - family
        family |= fresh
    return family


def _children(process: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def _share(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0) * 1024
