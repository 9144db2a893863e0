"""Bytes of shards, mapped and not read: the window through which tensors are seen.

Owns the mappings of one checkpoint's files and the release of pages. A mapping is private: writing
into a tensor changes this process alone, is lost when pages are released, and never reaches the
file. Every access asks whether the file is still the one whose header was read, because a file
that shrinks under a mapping would end the process.

Refuses files that changed, and any use after close. Kept honest by
suites/checkpoint/read/test_mapped.py.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.base.input_files import regular_file
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.read.types import TensorEntry

# A private writable mapping of a large file must not count as memory that could be needed.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # its value on Linux; named since 3.13
_STEP = 64 << 10  # what one page fault may map around itself (fault_around_bytes of Linux)


class MappedFiles:
    """The shards of one checkpoint, each mapped when it is first asked for."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = sizes
        self._open: dict[Path, tuple[mmap.mmap, os.stat_result]] = {}
        self._closed = False

    def raw(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of one tensor, without copying."""
        return memoryview(self._mapping(entry.file))[entry.begin : entry.end]

    def chunks(self, entry: TensorEntry, size: int) -> Iterator[memoryview]:
        """Yield the bytes of one tensor by pieces; each one's pages are released behind it."""
        for begin in range(entry.begin, entry.end, size):
            end = min(begin + size, entry.end)
            yield memoryview(self._mapping(entry.file))[begin:end]
            self.release(entry._replace(begin=begin, end=end))

    def release(self, entry: TensorEntry | None = None) -> None:
        """Give back the memory of pages that were read: of one tensor, or all of them."""
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
        """Refuse further use; memory goes when the last tensor over it goes."""
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
                raise _changed(path, status.st_size, self._sizes[path])
            flags, access = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return mmap.mmap(descriptor, status.st_size, flags, access), status

    def _require_same(self, path: Path, status: os.stat_result) -> None:
        try:
            now = path.stat()
        except OSError as error:
            raise _changed(path, error.strerror, status.st_size) from error
        facts = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
        if any(getattr(now, fact) != getattr(status, fact) for fact in facts):
            raise _changed(path, now.st_size, status.st_size)


def _changed(path: Path, found: object, expected: int) -> UnreadableFile:
    return UnreadableFile(
        f"{shown(str(path))}: size",
        found,
        f"the file of {expected} bytes whose header was read",
        "It changed meanwhile; open the checkpoint again when nothing writes to it.",
    )
