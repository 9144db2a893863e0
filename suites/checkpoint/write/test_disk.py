"""Durable files: whole or not at all, separate folders, space on the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, UnwritablePath
from degarble.harness.checkpoint.write.disk import (
    DISK,
    Disk,
    Partial,
    free_bytes,
    make_folders,
    remove_abandoned,
    require_separate_folders,
    require_space,
    write_file,
    writing,
)
from degarble.suites.checkpoint.structure_cases import V4, write
from degarble.suites.commands.calls import call

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


# --------------------------------------------------------------------------------------------------
# Targets inside their source, and sources inside their target, are refused by name.

NESTED = {
    "the same": ("a", "a", "outside the source"),
    "inside the source": ("a", "a/b", "outside the source"),
    "inside, not yet there": ("a", "a/new/c", "outside the source"),
    "around the source": ("a/b", "a", "does not contain the source"),
    "around a file": ("a/b/file.safetensors", "a/b", "does not contain the source"),
    "through a link": ("link", "a/b/new", "outside the source"),
}


@pytest.mark.parametrize("what", NESTED)
def test_nested_folders_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file.safetensors").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    source, target, text = NESTED[what]
    with pytest.raises(InvalidArgument, match=text):
        require_separate_folders(tmp_path / source, tmp_path / target)


def test_neighbours_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    require_separate_folders(tmp_path / "a", tmp_path / "ab")
    require_separate_folders(tmp_path / "a", tmp_path / "b" / "a")


def test_both_commands_refuse_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outer = tmp_path / "outer"
    source = write(outer / "made", V4, "official")
    before = sorted(tmp_path.rglob("*"))
    for command in (("quantise", "--recipe", "bf16"), ("convert", "--to", "bf16")):
        for target in (source, source / "new", outer):
            done = call(capsys, command[0], source, target, *command[1:])
            assert done.status == 2
            assert done.err.startswith("degarble: REFUSED: target = ")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def thousand_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of which root could write 4,000 bytes more than everybody else."""
    told = SimpleNamespace(f_bavail=10, f_bfree=50, f_frsize=100, f_bsize=4096)
    monkeypatch.setattr("degarble.harness.checkpoint.write.disk.os.statvfs", lambda _: told)


@pytest.mark.usefixtures("thousand_free")
def test_room_is_what_everybody_may_write(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) == 1000
    require_space(tmp_path, 1000)
    with pytest.raises(UnwritablePath, match=r"1000 bytes free'.*1001 bytes of room"):
        require_space(tmp_path, 1001)


def test_a_place_that_is_not_there_yet_has_its_parents_room(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "a" / "b") > 0
