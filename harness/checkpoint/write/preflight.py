"""Room on a disk, asked for before anything is written.

Owns the one question whether an output of known size fits. Refuses, as UnwritablePath, with both
sizes. What other programs write meanwhile it cannot know; a disk that fills up later is refused by
harness.checkpoint.write.disk. Kept honest by suites/checkpoint/write/test_preflight.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from pathlib import Path


def free_bytes(path: Path) -> int:
    """Bytes that may still be written where `path` is, or would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    told = os.statvfs(path)
    return told.f_bavail * told.f_frsize


def require_space(path: Path, needed: int) -> None:
    """Refuse when `needed` bytes do not fit."""
    free = free_bytes(path)
    if free < needed:
        raise UnwritablePath(
            shown(str(path)),
            f"{free} bytes free",
            f"{needed} bytes of room for what is still to be written",
            "Make room or choose another disk, then run the same command again.",
        )
