"""Read code that this process will run from folders that nobody else could have written into.

Whoever can write a cached kernel runs code as the user who loads it. So the folder and the entry
have to belong to the caller or to root, and be writable by the owner alone. All is asked of open
descriptors, never of a path that another user could exchange in between.
"""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.errors import UnreadableFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private(folder: Path) -> None:
    """Make a folder for the caller alone; its parents as usual."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def read_private(folder: Path, entry: str, files: Sequence[str]) -> dict[str, bytes] | None:
    """Return the files of an entry, None where one is missing; refuse what others can write."""
    try:
        with opened_private(folder) as outer, _opened(entry, outer) as inner:
            state = os.fstat(inner)
            _require_private(folder / entry, state)
            hidden = not state.st_mode & _OTHERS  # nobody else reaches its files, whatever they say
            return {name: _read(folder / entry / name, inner, hidden=hidden) for name in files}
    except FileNotFoundError:
        return None


@contextmanager
def opened_private(folder: Path) -> Iterator[int]:
    """Give the descriptor of a folder, every parent of which has been checked."""
    real = Path(os.path.realpath(folder))
    descriptor = os.open(real.anchor, _FOLDER)
    try:
        for name in real.parts[1:]:
            _require_parent(real, os.fstat(descriptor))
            try:
                below = os.open(name, _FOLDER, dir_fd=descriptor)
            except NotADirectoryError as error:  # also a link that was put here just now
                raise _unsafe(folder, "not a folder") from error
            os.close(descriptor)
            descriptor = below
        _require_private(folder, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened(entry: str, folder: int) -> Iterator[int]:
    try:
        descriptor = os.open(entry, _FOLDER, dir_fd=folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise _unsafe(Path(entry), error.strerror or "not a folder") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path, folder: int, *, hidden: bool) -> bytes:
    try:
        descriptor = os.open(path.name, _FILE, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unsafe(path, error.strerror or "not a file") from error
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise _unsafe(path, "not an ordinary file")
        _require_private(path, state, modes=not hidden)
        return file.read()


def _require_private(path: Path, state: os.stat_result, *, modes: bool = True) -> None:
    if state.st_uid not in (0, os.geteuid()):
        raise _unsafe(path, f"owned by user {state.st_uid}")
    if modes and state.st_mode & _OTHERS_WRITE:
        raise _unsafe(path, f"mode {stat.S_IMODE(state.st_mode):o}")


def _require_parent(path: Path, state: os.stat_result) -> None:
    """Refuse a parent in which anybody may exchange the folder; the sticky bit prevents that."""
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise _unsafe(path, "in a folder that anybody may write")


def _unsafe(path: Path, found: str) -> UnreadableFile:
    return UnreadableFile(
        f"cache of compiled kernels {path}", found,
        "a folder that you or root own, and nobody else can write: its code is run",
        f"Remove it if you did not make it (rm -r '{path}'), or close it: chmod -R go-w '{path}'."
        " DEGARBLE_KERNEL_CACHE names another folder, or off.",
    )  # fmt: skip
