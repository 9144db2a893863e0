from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.report.files import (
    is_stream,
    require_folder,
    usable_folder,
    whole_file,
    write_text,
)


def test_text_is_written_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old", encoding="utf-8")
    write_text(target, "new ≠\n")
    assert target.read_bytes() == "new ≠\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "a.txt"
    write_text(target, "old")
    monkeypatch.setattr("degarble.harness.report.files.os.fsync", full)
    with pytest.raises(UnwritablePath, match="No space left on device"):
        write_text(target, "new")
    assert target.read_text(encoding="utf-8") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_name_is_durable_before_a_text_counts_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    genuine = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.fstat(descriptor).st_ino == tmp_path.stat().st_ino
            synced.append([path.name for path in tmp_path.iterdir()])
        genuine(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "a.txt", "new")
    assert synced == [["a.txt"]]


def test_a_folder_without_read_permission_takes_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = os.open

    def hidden(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, "Permission denied")
        return genuine(path, flags, *rest)

    monkeypatch.setattr("degarble.harness.base.files.os.open", hidden)
    write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "new"


def test_a_file_of_a_library_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    with whole_file(target) as temporary:
        temporary.write_bytes(b"old")
        assert target.exists() is False
    with pytest.raises(UnwritablePath), whole_file(target) as temporary:
        temporary.with_name("none").read_bytes()
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_a_pipe_takes_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    """Renaming a file over /dev/null would break the machine of who runs as root."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "new\n")
    assert os.read(reader, 100) == b"new\n"
    os.close(reader)
    assert is_stream(pipe)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_full_device_is_refused_and_stays_a_device() -> None:
    full = Path("/dev/full")
    if not is_stream(full):
        pytest.skip("a system without /dev/full")
    with pytest.raises(UnwritablePath, match="No space left on device"):
        write_text(full, "x")
    assert is_stream(full)


def test_what_a_link_leads_to_is_replaced_and_not_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == "new"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritablePath):
        write_text(tmp_path / "none" / "a.txt", "x")


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    folder = usable_folder("--out", tmp_path / "a" / "b")
    assert folder.is_dir()
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_only_probed_is_not_created(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    require_folder("--report", tmp_path / "there" / "b" / "c")
    assert list((tmp_path / "there").iterdir()) == []
    require_folder("--report", tmp_path / "there")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(UnwritablePath, match="--report"):
        require_folder("--report", tmp_path / "file" / "c")


def test_a_file_in_the_way_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x", encoding="utf-8")
    with pytest.raises(UnwritablePath, match=r"--out = .*File exists"):
        usable_folder("--out", tmp_path / "a")


def test_a_place_that_takes_no_files_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.open", read_only)
    with pytest.raises(UnwritablePath, match=r"--out = .*Read-only file system"):
        usable_folder("--out", tmp_path)
