"""Write files durably: temporary name, fsync, rename, fsync; check folders and space."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from degarble.harness.base.errors import InvalidArgument, UnwritablePath
from degarble.harness.base.files import sync_folder
from degarble.harness.checkpoint.read.types import shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Every operation that changes a disk goes through one `Disk`, so that suites can log operations,
# cut the power between any two, or make them fail. A file under its final name is complete and
# durable. A file that is being written has a temporary name that no other writer uses and no reader
# takes for a shard. Its writer holds a lock on it, which ends with the process (flock(2)): an
# unlocked temporary file is left over from a killed run and may be removed.

PARTIAL_SUFFIX = ".partial"
_LONGEST_STEM = 200  # a file name has 255 bytes, and the token needs room
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the largest allowed file size is reached",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EEXIST: "something of that name is in the way",
    errno.ENOTDIR: "a part of the path is no folder",
    errno.ENAMETOOLONG: "the name is too long",
}
_NEEDS_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def unwritable(path: Path, error: OSError) -> UnwritablePath:
    """Return an error that says why the system rejected a write, and what to do."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    full = error.errno in _NEEDS_ROOM
    return UnwritablePath(
        shown(str(path)),
        reason,
        "room for the output" if full else "a place that can be written",
        ("Make room" if full else "Choose another place or mend this one")
        + " and run the same command again: what is finished is kept, and it goes on from there.",
    )


class Disk:
    """The disk operations, one or two system calls each."""

    def make_folder(self, path: Path) -> None:
        """Make one folder; it may exist."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file that must not exist, locked for as long as it is open."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Without locks the file is written all the same; its leftovers are never removed.
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        """Append all of `data`."""
        while data:
            data = data[os.write(descriptor, data) :]

    def extend(self, descriptor: int, size: int) -> None:
        """Set a file's size; what was never written is a hole and reads as zeros."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Make the file's bytes durable."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file, which also unlocks it."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name; an existing file of that name is replaced."""
        source.replace(target)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        sync_folder(path)

    def remove(self, path: Path) -> None:
        """Remove a file; it may be missing."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder; it may be missing."""
        with suppress(FileNotFoundError):
            path.rmdir()


DISK = Disk()


class Partial:
    """A file under its temporary name. commit() renames it to `path`; abandon() removes it."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self._disk = disk
        token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._temporary = path.with_name(f".{path.name[:_LONGEST_STEM]}.{token}{PARTIAL_SUFFIX}")
        self._descriptor: int | None = disk.create(self._temporary)

    def write(self, data: memoryview) -> None:
        """Append all of `data`."""
        self._disk.write(self._open, data)

    def extend(self, size: int) -> None:
        """Set the file's size."""
        self._disk.extend(self._open, size)

    def commit(self) -> None:
        """Make the bytes durable, then the name."""
        self._disk.sync(self._open)
        # Trap: renamed before it is closed, so that no other writer takes it for abandoned.
        self._disk.rename(self._temporary, self.path)
        self._close()
        self._disk.sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Remove the temporary file; never hides the error that led here."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._disk.remove(self._temporary)

    @property
    def _open(self) -> int:
        assert self._descriptor is not None, "written after its end"
        return self._descriptor

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._disk.close(descriptor)


@contextmanager
def writing(path: Path, disk: Disk) -> Iterator[Partial]:
    """Write a file that appears whole or not at all; system errors become UnwritablePath."""
    with refusing(path):
        partial = Partial(path, disk)
        try:
            yield partial
            partial.commit()
        except BaseException:
            partial.abandon()
            raise


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Convert system errors to an UnwritablePath that names `path`."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def write_file(path: Path, data: bytes, disk: Disk) -> None:
    """Write a small file in one piece."""
    with writing(path, disk) as partial:
        partial.write(memoryview(data))


def make_folders(path: Path, disk: Disk) -> None:
    """Make a folder and its parents, each durably."""
    with refusing(path):
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for each in reversed(missing):
            disk.make_folder(each)
            disk.sync_folder(each.parent)


def remove_abandoned(folder: Path, disk: Disk) -> None:
    """Remove temporary files that no living writer locks: those of killed runs."""
    with refusing(folder):
        for path in sorted(folder.glob(f".*{PARTIAL_SUFFIX}")):
            if _is_abandoned(path):
                disk.remove(path)


def _is_abandoned(path: Path) -> bool:
    """Return whether its writer has ended; False where the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Separate folders. A target inside its source would be read as part of it, and a target around its
# source would write over what is read. The check runs before any long read.


def require_separate_folders(source: Path, target: Path) -> None:
    """Raise for a target that is, contains, or lies inside the source; links are followed."""
    read, written = source.resolve(), target.resolve()
    if read.is_dir() and written.is_relative_to(read):
        where = "outside the source"
    elif read.is_relative_to(written):
        where = "that does not contain the source"
    else:
        return
    raise InvalidArgument(
        "target",
        shown(str(target)),
        f"a folder {where}, {shown(str(source))}",
        "Choose another target: a checkpoint inside another one is taken for a part of it.",
    )


# --------------------------------------------------------------------------------------------------
# Disk space, before anything is written. If other programs fill the disk later, the write raises.


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
