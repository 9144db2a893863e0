"""Read the bytes of shards, by mapping or by position, and detect files that change meanwhile."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.files import regular_file
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.read.types import TensorEntry


# --------------------------------------------------------------------------------------------------
# Mappings are private: a write to a tensor changes this process alone, is lost when its pages are
# released, and never reaches the file. Every access checks that the file is still the one whose
# header was read, because a file that shrinks under a mapping would end the process (SIGBUS). A
# changed file, and any use after close(), raises an error.

# A private writable mapping of a large file must not count as memory that could be needed.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # its value on Linux; named since 3.13
_STEP = 64 << 10  # what one page fault may map around itself (fault_around_bytes of Linux)


class MappedFiles:
    """The shards of one checkpoint, each mapped at its first use."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = sizes
        self._open: dict[Path, tuple[mmap.mmap, os.stat_result]] = {}
        self._closed = False

    def raw(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, without copying."""
        return memoryview(self._mapping(entry.file))[entry.begin : entry.end]

    def chunks(self, entry: TensorEntry, size: int) -> Iterator[memoryview]:
        """Yield the bytes of one tensor in pieces; each piece's pages are released after it."""
        for begin in range(entry.begin, entry.end, size):
            end = min(begin + size, entry.end)
            yield memoryview(self._mapping(entry.file))[begin:end]
            self.release(entry._replace(begin=begin, end=end))

    def release(self, entry: TensorEntry | None = None) -> None:
        """Release the memory of pages that were read: of one tensor, or of all."""
        known = list(self._open.values()) if entry is None else []
        if entry is not None and entry.file in self._open:
            mapping, _ = self._open[entry.file]
            first = entry.begin // _STEP * _STEP
            last = min(-(-entry.end // _STEP) * _STEP, len(mapping))
            if last > first:
                mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
        for mapping, _ in known:
            mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Make further use an error; memory is freed with the last tensor that uses it."""
        self._closed = True
        self._open.clear()

    def _mapping(self, path: Path) -> mmap.mmap:
        if self._closed:
            raise InvalidArgument(
                "checkpoint", "closed", "an open one", "Read tensors before close()."
            )
        known = self._open.get(path)
        if known is None:
            known = self._open[path] = self._map(path)
        mapping, status = known
        self._require_same(path, status)
        return mapping

    def _map(self, path: Path) -> tuple[mmap.mmap, os.stat_result]:
        with regular_file(path) as (descriptor, status):
            if status.st_size != self._sizes[path]:
                raise changed_file(path, status.st_size, self._sizes[path])
            # Private: a write to a tensor copies its page, and never reaches the file.
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptor, status.st_size, flags, access), status

    def _require_same(self, path: Path, status: os.stat_result) -> None:
        try:
            now = path.stat()
        except OSError as error:
            raise changed_file(path, error.strerror, status.st_size) from error
        facts = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
        if any(getattr(now, fact) != getattr(status, fact) for fact in facts):
            raise changed_file(path, now.st_size, status.st_size)


def changed_file(path: Path, found: object, expected: int) -> UnreadableFile:
    """Return the error of a file that is another one than when its header was read."""
    return UnreadableFile(
        f"{shown(str(path))}: size",
        found,
        f"the file of {expected} bytes whose header was read",
        "It changed meanwhile; open the checkpoint again when nothing writes to it.",
    )


# --------------------------------------------------------------------------------------------------
# Small reads: a page fault into a mapping fetches megabytes around itself where the system reads
# ahead, and a checkpoint has 140,000 scalar scales. A file shorter than its header promised raises
# an error.

# A hint that macOS lacks; without it the result is the same.
_RANDOM = getattr(os, "POSIX_FADV_RANDOM", None)


def read_small(entries: Iterable[TensorEntry]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each tensor; meant for tensors of a few bytes."""
    ordered = sorted(entries, key=lambda tensor_entry: (tensor_entry.file, tensor_entry.begin))
    for file, group in groupby(ordered, key=lambda tensor_entry: tensor_entry.file):
        with regular_file(file) as (descriptor, _):
            if _RANDOM is not None:
                os.posix_fadvise(descriptor, 0, 0, _RANDOM)
            for entry in group:
                found = os.pread(descriptor, entry.nbytes, entry.begin)
                if len(found) != entry.nbytes:
                    raise UnreadableFile(
                        f"{shown(str(file))}: tensor {shown(entry.name)} at byte {entry.begin}",
                        f"{len(found)} bytes",
                        f"{entry.nbytes} bytes, as its header says",
                        "The file changed meanwhile; open the checkpoint again.",
                    )
                yield entry.name, found


# --------------------------------------------------------------------------------------------------
# Changes of a source, by inode, size and time of its files: a long job reads its source for hours.
# If a file is rewritten, cut or replaced meanwhile, the target mixes shards of two sources, and all
# its hashes still match.

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
    def from_source(cls, source: Path) -> SourceState:
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
