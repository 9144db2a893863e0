"""Text files that are there whole or not at all.

Owns writing: a temporary name beside the target, fsync, rename; pipes and devices take the text as
it comes, because a rename would put a file in their place. Refuses, as UnwritablePath and
before any work is lost, a folder that cannot be made or written; removes what it began.
What keeps it honest: suites/record/test_files.py (read-only folder, file in the way, full disk).
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from degarble.harness.errors import UnwritablePath

if TYPE_CHECKING:
    from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`; a reader sees the old file or the new one, never a part."""
    if is_stream(path):
        _send(path, text)
        return
    path = path.resolve() if path.is_symlink() else path  # what a link leads to is replaced
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(str(path), error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def is_stream(path: Path) -> bool:
    """Tell whether `path` is a pipe or a device: it takes text, and must never be replaced."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _send(path: Path, text: str) -> None:
    try:
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    except OSError as error:
        raise _unwritable(str(path), error) from error


def usable_folder(name: str, folder: Path) -> Path:
    """Make `folder` where it is missing, and prove by doing that a file can be written there."""
    probe = folder / f".probe.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise _unwritable(name, error, str(folder)) from error
    return folder


def require_folder(name: str, folder: Path) -> None:
    """Prove that `folder` can be made and written, and leave nothing behind."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        usable_folder(name, folder)
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def _unwritable(name: str, error: OSError, value: str | None = None) -> UnwritablePath:
    return UnwritablePath(
        name,
        value if value is not None else (error.strerror or type(error).__name__),
        "a place where a file can be written"
        + (f" ({error.strerror})" if value is not None and error.strerror else ""),
        "Choose another place, or make room and permission there.",
    )
