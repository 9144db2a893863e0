"""Open files that a user names: regular files only, without blocking, and of bounded size.

A pipe without a writer would block the open, a device has no end, and a sparse file can be larger
than any memory. So kind and size of a file are checked before its first byte is read.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile, printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PIECE = 1 << 24
_LONGEST_NAME = 300


@contextmanager
def regular_file(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file for reading; yield its descriptor and status."""
    try:
        # Trap: opening a pipe would wait for its writer, so ask first and open without waiting.
        _require_regular(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise _unopened(path, error) from error
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
        yield descriptor, status
    finally:
        os.close(descriptor)


def read_small_file(path: Path, largest: int) -> bytes:
    """Read a whole regular file of at most `largest` bytes."""
    with regular_file(path) as (descriptor, status):
        if status.st_size > largest:
            most = (
                f"at most {largest >> 20} MiB" if largest >= 1 << 20 else f"at most {largest} bytes"
            )
            raise UnreadableFile(
                _named(path), f"{status.st_size:,} bytes", most, "Point to the right file."
            )
        return read_span(path, descriptor, status.st_size, 0)


def read_small_text(path: Path, largest: int) -> str:
    """Read a whole regular file of text in UTF-8."""
    try:
        return read_small_file(path, largest).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            _named(path), f"{error.reason} at byte {error.start}", "a text in UTF-8",
            "Save the file as UTF-8.",
        ) from error  # fmt: skip


def read_span(path: Path, descriptor: int, length: int, position: int) -> bytes:
    """Read exactly `length` bytes from `position` on."""
    parts = []
    while length:
        try:
            part = os.pread(descriptor, min(length, _PIECE), position)
        except OSError as error:
            raise _unopened(path, error) from error
        if not part:
            raise UnreadableFile(
                f"{_named(path)} at byte {position}",
                "end of file",
                f"{length} more bytes",
                "The file shrank while it was read; wait until it is written, then try again.",
            )
        parts.append(part)
        position += len(part)
        length -= len(part)
    return b"".join(parts)


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise UnreadableFile(
            _named(path),
            stat.filemode(mode),
            "a regular file, or a link to one",
            "Put the file itself there.",
        )


def _unopened(path: Path, error: Exception) -> UnreadableFile:
    reason = getattr(error, "strerror", None) or str(error)
    return UnreadableFile(
        _named(path), reason, "a file that can be read", "Check the path and its permissions."
    )


def _named(path: Path) -> str:
    return printable(str(path), _LONGEST_NAME)
