"""Check for disk space before anything is written.

An output of known size that does not fit raises UnwritablePath with both sizes. If other programs
fill the disk later, harness.checkpoint.write.disk raises.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from pathlib import Path


def free_bytes(path: Path) -> int:
    """Return the free bytes where `path` is, or would be made."""
    while not path.exists() and path != path.parent:
        path = path.parent
    told = os.statvfs(path)
    return told.f_bavail * told.f_frsize


def require_space(path: Path, needed: int) -> None:
    """Raise where `needed` bytes do not fit."""
    free = free_bytes(path)
    if free < needed:
        raise UnwritablePath(
            shown(str(path)),
            f"{free} bytes free",
            f"{needed} bytes of room for what is still to be written",
            "Make room or choose another disk, then run the same command again.",
        )
