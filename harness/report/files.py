"""Write files atomically and durably: a file exists whole or not at all.

Every write ends with fsync, because a full disk may be noticed only there, and with fsync of the
folder, because a rename may be lost without it. Pipes and devices are written directly: a rename
would replace them with a file.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.base.files import sync_file, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`; a reader sees the old file or the new one, never a part."""
    with whole_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary file to be written, which then takes the place of `path`, or goes to it.

    Its content is on the disk before it has the name; after an error nothing of it is left.
    """
    streams = is_stream(path)
    path = path.resolve() if path.is_symlink() else path  # what a link leads to is replaced
    temporary: Path | None = None
    try:
        temporary = _beside(path) if not streams else _anywhere(path)
        yield temporary
        if streams:
            with temporary.open("rb") as source, path.open("wb", buffering=0) as target:
                shutil.copyfileobj(source, target)
        else:
            sync_file(temporary)
            temporary.replace(path)
            sync_folder(path.parent)
    except OSError as error:
        raise _unwritable(str(path), error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def _beside(path: Path) -> Path:
    """Make an empty file in the folder of `path`, so that it can be renamed to it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.open("xb").close()
    return temporary


def _anywhere(path: Path) -> Path:
    """Make an empty file where temporary files lie: the folder of a device takes none."""
    descriptor, name = tempfile.mkstemp(suffix=f".{path.name}")
    os.close(descriptor)
    return Path(name)


def is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe or a device: it takes text, and must never be replaced."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def usable_folder(name: str, folder: Path) -> Path:
    """Make `folder` if it is missing, and test by writing that a file can be written there."""
    probe = folder / f".probe.{os.getpid()}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise _unwritable(name, error, str(folder)) from error
    return folder


def require_folder(name: str, folder: Path) -> None:
    """Test that `folder` can be made and written, and leave nothing there."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        usable_folder(name, folder)
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _unwritable(name: str, error: OSError, value: str | None = None) -> UnwritablePath:
    return UnwritablePath(
        name,
        value if value is not None else (error.strerror or type(error).__name__),
        "a place where a file can be written"
        + (f" ({error.strerror})" if value is not None and error.strerror else ""),
        "Choose another place, or make room and permission there.",
    )
