"""Read tensors by position into reused buffers, for one pass over a whole checkpoint.

A mapping costs a page fault for every few kilobytes, more than counting the values in them. A read
into a warm buffer does not, leaves no page in memory, and raises an error instead of SIGBUS where a
file shrinks. Trap: a returned tensor is overwritten when the same part of the next rows is read.

Files other than those whose headers were read raise an error. One reader serves one thread.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.input_files import regular_file
from degarble.harness.checkpoint.read.tensors import tensor_over
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.view.stored import keep_pages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.checkpoint.read.types import TensorEntry
    from degarble.harness.checkpoint.view.stored import StoredWeight

_ALIGNMENT = 64  # bytes: a cache line
_SMALL = 1 << 12  # bytes: scalars and the like get memory of their own


class PositionedReader:
    """A reader of tensor parts into a few buffers. Use it as a context: it holds files open."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = sizes
        self._files: dict[Path, int] = {}
        self._open = ExitStack()
        self._buffers: list[NDArray[np.uint8]] = []
        self._taken: dict[str, int] = {}  # which buffer a tensor of the present weight uses

    def over(self, stored: StoredWeight) -> StoredWeight:
        """Return a weight that is read by this reader; the previous one loses its buffers."""
        self._taken.clear()
        return replace(stored, read=self._read, release=keep_pages)

    def ahead(self, path: Path, begin: int, end: int) -> None:
        """Ask the system to prefetch a part of a file."""
        size = min(end, self._sizes[path]) - begin
        if size > 0 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file(path), begin, size, os.POSIX_FADV_WILLNEED)

    def _read(self, entry: TensorEntry) -> Tensor:
        size = entry.nbytes
        target = np.empty(size, np.uint8) if size <= _SMALL else self._buffer(entry.name, size)
        done = 0
        while done < size:
            got = os.preadv(self._file(entry.file), [target.data[done:]], entry.begin + done)
            if not got:
                raise _changed(entry.file, entry.begin + done, self._sizes[entry.file])
            done += got
        return tensor_over(entry, target.data)

    def _buffer(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return a buffer for a tensor; the same one as long as the weight is the same."""
        index = self._taken.setdefault(name, len(self._taken))
        if index == len(self._buffers):
            self._buffers.append(np.empty(0, np.uint8))
        if self._buffers[index].size < size:
            fresh = np.empty(size + _ALIGNMENT, np.uint8)
            self._buffers[index] = fresh[-fresh.ctypes.data % _ALIGNMENT :]
        return self._buffers[index][:size]

    def _file(self, path: Path) -> int:
        if path not in self._files:
            descriptor, status = self._open.enter_context(regular_file(path))
            if status.st_size != self._sizes[path]:
                raise _changed(path, status.st_size, self._sizes[path])
            self._files[path] = descriptor
        return self._files[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()


def _changed(path: Path, found: int, expected: int) -> UnreadableFile:
    return UnreadableFile(
        f"{shown(str(path))}: size",
        found,
        f"the file of {expected} bytes whose header was read",
        "It changed meanwhile; open the checkpoint again when nothing writes to it.",
    )
