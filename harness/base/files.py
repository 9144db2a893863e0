"""Open the files that a user names, make writes durable, and read cached code from private folders.

Input files are regular files, opened without blocking and of bounded size. Without fsync of its
folder a rename may be lost. Cached code is loaded only from folders that nobody else could have
written to.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnreadableFile, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# --------------------------------------------------------------------------------------------------
# Durable writes
#
# Sources: POSIX rename(2), fsync(2) on Linux ("calling fsync() does not necessarily ensure that the
# entry in the directory containing the file has also reached disk").

# Some network file systems have no fsync for folders; their own rules say when a rename lasts.
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF})


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # files may be put there, but nobody may list or sync it
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Files that a user names
#
# A pipe without a writer would block the open, a device has no end, and a sparse file can be larger
# than any memory. So kind and size of a file are checked before its first byte is read.

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


# --------------------------------------------------------------------------------------------------
# Folders of cached code
#
# Whoever can write cached code, a kernel or a compiled loop, runs it as the user who loads it. So
# the folder and its entries must belong to the caller or to root, and be writable by the owner
# alone. Open descriptors are checked, never a path that another user could exchange in between.

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class CachedCode:
    """The kind of code in a cache, and how its user names another folder."""

    what: str
    elsewhere: str


CODE_OF_KERNELS = CachedCode(
    "compiled kernels", "DEGARBLE_KERNEL_CACHE names another folder, or off."
)
CODE_OF_LOOPS = CachedCode("compiled loops", "NUMBA_CACHE_DIR names another folder.")


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the default folder of the user's caches."""
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "degarble"


def make_private(folder: Path) -> None:
    """Make a folder for the caller alone; its parents get the usual permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def read_private(
    folder: Path, entry: str, files: Sequence[str], code: CachedCode = CODE_OF_KERNELS
) -> dict[str, bytes] | None:
    """Return the files of an entry, None where one is missing; raise where others can write."""
    try:
        with opened_private(folder, code) as outer, _opened(entry, outer, code) as inner:
            state = os.fstat(inner)
            _require_private(folder / entry, state, code)
            hidden = not state.st_mode & _OTHERS  # nobody else reaches its files, whatever they say
            return {
                name: _read(folder / entry / name, inner, code, hidden=hidden) for name in files
            }
    except FileNotFoundError:
        return None


def require_private_tree(folder: Path, code: CachedCode) -> None:
    """Raise for a folder in which others could have written anything, at any depth.

    Once it is closed to others, only its owner adds to it.
    """
    with opened_private(folder, code) as outer:
        hidden = not os.fstat(outer).st_mode & _OTHERS
        for place, folders, files, descriptor in os.fwalk(".", dir_fd=outer):
            _require_private(folder / place, os.fstat(descriptor), code, modes=not hidden)
            for name in (*folders, *files):
                with suppress(FileNotFoundError):  # another process replaced it just now
                    state = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    path = folder / place / name
                    if not (stat.S_ISREG(state.st_mode) or stat.S_ISDIR(state.st_mode)):
                        raise _unsafe(path, "not an ordinary file", code)
                    _require_private(path, state, code, modes=not hidden)


@contextmanager
def opened_private(folder: Path, code: CachedCode = CODE_OF_KERNELS) -> Iterator[int]:
    """Yield the descriptor of a folder after checking every parent."""
    real = Path(os.path.realpath(folder))
    descriptor = os.open(real.anchor, _FOLDER)
    try:
        for name in real.parts[1:]:
            _require_parent(real, os.fstat(descriptor), code)
            try:
                below = os.open(name, _FOLDER, dir_fd=descriptor)
            except NotADirectoryError as error:  # also a link that was put here just now
                raise _unsafe(folder, "not a folder", code) from error
            os.close(descriptor)
            descriptor = below
        _require_private(folder, os.fstat(descriptor), code)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_private_file(path: Path, code: CachedCode) -> Iterator[int]:
    """Yield the descriptor of a regular file that nobody else could have written to."""
    try:
        with opened_private(path.parent, code) as folder:
            descriptor = os.open(path.name, _FILE, dir_fd=folder)
    except OSError as error:
        raise _unopened(path, error) from error
    try:
        state = os.fstat(descriptor)
        _require_regular(path, state.st_mode)
        _require_private(path, state, code)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened(entry: str, folder: int, code: CachedCode) -> Iterator[int]:
    try:
        descriptor = os.open(entry, _FOLDER, dir_fd=folder)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise _unsafe(Path(entry), error.strerror or "not a folder", code) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(path: Path, folder: int, code: CachedCode, *, hidden: bool) -> bytes:
    try:
        descriptor = os.open(path.name, _FILE, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unsafe(path, error.strerror or "not a file", code) from error
    with os.fdopen(descriptor, "rb") as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise _unsafe(path, "not an ordinary file", code)
        _require_private(path, state, code, modes=not hidden)
        return file.read()


def _require_private(
    path: Path, state: os.stat_result, code: CachedCode, *, modes: bool = True
) -> None:
    if state.st_uid not in (0, os.geteuid()):
        raise _unsafe(path, f"owned by user {state.st_uid}", code)
    if modes and state.st_mode & _OTHERS_WRITE:
        raise _unsafe(path, f"mode {stat.S_IMODE(state.st_mode):o}", code)


def _require_parent(path: Path, state: os.stat_result, code: CachedCode) -> None:
    """Raise for a parent in which anybody may exchange the folder; the sticky bit prevents that."""
    if state.st_mode & stat.S_IWOTH and not state.st_mode & stat.S_ISVTX:
        raise _unsafe(path, "in a folder that anybody may write", code)


def _unsafe(path: Path, found: str, code: CachedCode) -> UnreadableFile:
    return UnreadableFile(
        f"cache of {code.what} {path}", found,
        "a folder owned by you or root and writable by nobody else: its code is run",
        f"Remove it if you did not make it (rm -r '{path}'), or close it: chmod -R go-w '{path}'."
        f" {code.elsewhere}",
    )  # fmt: skip
