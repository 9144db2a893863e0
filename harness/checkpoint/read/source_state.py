"""Detect changes of a source during a long job, by inode, size and time of its files.

A long job reads its source for hours. If a file is rewritten, cut or replaced meanwhile, the target
mixes shards of two sources, and all its hashes still match.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_READ = (".safetensors", ".json")


class _FileState(NamedTuple):
    """The facts that change with a file's content; not its mode or number of links."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class SourceState:
    """The state of a source's files. Take it before the source is opened."""

    source: Path
    files: Mapping[Path, _FileState]

    @classmethod
    def of(cls, source: Path) -> SourceState:
        """Return the state of every file that a job may read; nothing is opened."""
        return cls(source, _states(source))

    @property
    def is_unchanged(self) -> bool:
        """Whether every file is as it was."""
        return _states(self.source) == self.files

    def require_unchanged(self) -> None:
        """Raise if a file was changed, replaced, removed or added."""
        found = _states(self.source)
        for path in sorted(self.files.keys() | found.keys()):
            before, now = self.files.get(path), found.get(path)
            if before != now:
                raise UnreadableFile(
                    f"{shown(str(path))} while it was read",
                    _told(now),
                    f"the file that was planned, {_told(before)}",
                    "Run the same command again when nothing writes to the source.",
                )


def _states(source: Path) -> dict[Path, _FileState]:
    if not source.is_dir():
        paths = [source]
    else:
        with os.scandir(source) as entries:
            names = sorted(entry.name for entry in entries)
        paths = [source / name for name in names if name.endswith(_READ) and name[0] != "."]
    found = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # gone, or a link to nowhere: as if it were not there
            continue
        if stat.S_ISREG(status.st_mode):
            found[path] = _FileState(status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def _told(state: _FileState | None) -> str:
    return "absent" if state is None else f"{state.size} bytes, written at {state.mtime_ns} ns"
