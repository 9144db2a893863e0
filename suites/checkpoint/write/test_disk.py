from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.write.disk import (
    DISK,
    Disk,
    Partial,
    make_folders,
    remove_abandoned,
    write_file,
    writing,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with writing(path, DISK) as partial:
        partial.write(memoryview(b"abc"))
        assert not path.exists()
        assert len(list(tmp_path.iterdir())) == 1
    assert path.read_bytes() == b"abc"

    def fail() -> None:
        with writing(path, DISK) as partial:
            partial.write(memoryview(b"other"))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"abc"
    assert list(tmp_path.iterdir()) == [path]


def test_temporary_names_differ_and_suit_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    partials = [Partial(path, DISK) for _ in range(3)]
    assert len({each.name for each in tmp_path.iterdir()}) == 3
    for partial in partials:
        partial.commit()
    assert list(tmp_path.iterdir()) == [path]


def test_a_hole_takes_no_room_and_reads_as_zeros(tmp_path: Path) -> None:
    with writing(tmp_path / "file", DISK) as partial:
        partial.write(memoryview(b"head"))
        partial.extend(1 << 30)
    status = (tmp_path / "file").stat()
    assert status.st_size == 1 << 30
    assert status.st_blocks * 512 < 1 << 20
    with (tmp_path / "file").open("rb") as file:
        assert file.read(6) == b"head\0\0"


def test_abandoned_files_go_and_living_ones_stay(tmp_path: Path) -> None:
    alive = Partial(tmp_path / "alive", DISK)
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from degarble.harness.checkpoint.write.disk import DISK, Partial\n"
        "Partial(Path(sys.argv[1]), DISK).write(memoryview(b'half'))\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "dead")], check=True)
    (tmp_path / ".dead.notours").write_bytes(b"")
    (tmp_path / ".link.1.partial").symlink_to(tmp_path / ".dead.notours")
    assert len(list(tmp_path.iterdir())) == 4
    remove_abandoned(tmp_path, DISK)
    left = {path.name.split(".")[1] for path in tmp_path.iterdir()}
    assert left == {"alive", "dead", "link"}
    assert (tmp_path / ".dead.notours").exists()
    alive.commit()
    assert (tmp_path / "alive").exists()


def test_a_locked_file_without_its_lock_would_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a writer that takes no lock loses its file to the next run."""
    monkeypatch.setattr("degarble.harness.checkpoint.write.disk.fcntl.flock", lambda *_: None)
    partial = Partial(tmp_path / "file", DISK)
    remove_abandoned(tmp_path, DISK)
    with pytest.raises(FileNotFoundError):
        partial.commit()
    partial.abandon()


class FailingDisk(Disk):
    def __init__(self, operation: str, error: int) -> None:
        def fail(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        setattr(self, operation, fail)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename", "sync_folder"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_the_system_refuses_is_refused_by_name(
    operation: str, error: int, told: str, tmp_path: Path
) -> None:
    with pytest.raises(UnwritablePath, match=told) as caught:
        write_file(tmp_path / "file", b"abc", FailingDisk(operation, error))
    assert caught.value.name == str(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["file"])


def test_an_error_while_cleaning_up_does_not_hide_the_first(tmp_path: Path) -> None:
    disk = FailingDisk("write", errno.ENOSPC)
    disk.remove = disk.close = disk.write  # type: ignore[method-assign, assignment]
    with pytest.raises(UnwritablePath, match="disk is full"):
        write_file(tmp_path / "file", b"abc", disk)


def test_folders_without_sync_are_tolerated_and_other_failures_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: int) -> None:
        def fsync(_descriptor: int) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr("degarble.harness.checkpoint.write.disk.os.fsync", fsync)

    failing(errno.EINVAL)
    DISK.sync_folder(tmp_path)
    failing(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        DISK.sync_folder(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = os.write
    monkeypatch.setattr(
        "degarble.harness.checkpoint.write.disk.os.write", lambda to, data: genuine(to, data[:3])
    )
    write_file(tmp_path / "file", b"0123456789", DISK)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_folders_are_made_with_those_above(tmp_path: Path) -> None:
    make_folders(tmp_path / "a" / "b" / "c", DISK)
    make_folders(tmp_path / "a" / "b" / "c", DISK)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UnwritablePath, match="no folder"):
        make_folders(tmp_path / "file" / "inner", DISK)
