"""Cached code is read where nobody else can write, and refused by name elsewhere."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.files import make_private, read_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SOMEBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one entry of one file, under a folder of its own."""
    folder = tmp_path / "above" / "kernels"
    make_private(folder)
    (folder / "entry").mkdir(mode=0o700)
    (folder / "entry" / "code").write_bytes(b"code")
    return folder


def read(folder: Path) -> bytes:
    files = read_private(folder, "entry", ("code",))
    assert files is not None
    return files["code"]


def given_away(name: str) -> Callable[[Path], None]:
    return lambda folder: os.chown(folder / name, SOMEBODY, SOMEBODY)


def opened_up(name: str, mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod(mode)


def linked_elsewhere(folder: Path) -> None:
    (folder / "entry").rename(folder.parent / "moved")
    (folder / "entry").symlink_to(folder.parent / "moved")


def file_linked(folder: Path) -> None:
    (folder / "entry" / "code").rename(folder.parent / "moved")
    (folder / "entry" / "code").symlink_to(folder.parent / "moved")


def a_pipe(folder: Path) -> None:
    (folder / "entry" / "code").unlink()
    os.mkfifo(folder / "entry" / "code")


def readable_entry_of_shared_files(folder: Path) -> None:
    (folder / "entry").chmod(0o755)
    (folder / "entry" / "code").chmod(0o664)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(given_away("."), marks=as_root, id="folder of another user"),
        pytest.param(given_away("entry"), marks=as_root, id="entry of another user"),
        pytest.param(given_away("entry/code"), marks=as_root, id="file of another user"),
        pytest.param(opened_up(".", 0o770), id="group may write"),
        pytest.param(opened_up(".", 0o1777), id="anybody may write, sticky"),
        pytest.param(opened_up("entry", 0o757), id="anybody may write an entry"),
        pytest.param(opened_up("..", 0o777), id="anybody may write above"),
        readable_entry_of_shared_files,
        linked_elsewhere,
        file_linked,
        a_pipe,
    ],
)
def test_what_others_could_have_written_is_refused(
    change: Callable[[Path], None], folder: Path
) -> None:
    assert read(folder) == b"code"
    change(folder)
    with pytest.raises(UnreadableFile, match=r"cache of compiled kernels .*DEGARBLE_KERNEL_CACHE"):
        read(folder)


@pytest.mark.parametrize(
    "change",
    [
        opened_up("..", 0o1777),
        opened_up(".", 0o755),
        opened_up("entry/code", 0o664),  # by a umask of 002, in an entry that is closed
    ],
)
def test_what_only_its_owner_can_write_is_read(
    change: Callable[[Path], None], folder: Path
) -> None:
    change(folder)
    assert read(folder) == b"code"


def test_a_link_to_a_private_folder_is_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert read(tmp_path / "link") == b"code"


def test_a_folder_that_is_made_is_the_callers_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_private(folder, "other", ("code",)) is None
    assert read_private(folder, "entry", ("code", "more")) is None
    assert read_private(folder / "none", "entry", ("code",)) is None
