"""Whatever ends a run, and whenever: no promise breaks, and the next run ends as it would have."""

from __future__ import annotations

import errno
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.checkpoint.write import disk as disk_module
from degarble.harness.checkpoint.write.disk import Disk
from degarble.harness.checkpoint.write.manifest import UNFINISHED, WriteJournal
from degarble.suites.checkpoint.writing_cases import (
    broken_promises,
    quick_folder,
    small_plan,
    tree,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


# --------------------------------------------------------------------------------------------------
# A disk that loses power: what could be on it after each operation of a run.
#
# SIGKILL leaves the system's memory alone; a power cut does not. `LoggedDisk` does what it is told
# and writes down what; `survivors` replays the first operations of a log and yields what POSIX lets
# a disk hold after a cut there: bytes that were never synced may be gone, or zeros, and names that
# no sync of their folder followed may be old or new.

Operation = tuple[str, Path, object]


class LoggedDisk(Disk):
    """Performs and notes every operation; an open file is noted by the name that it has."""

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self._paths: dict[int, Path] = {}

    def make_folder(self, path: Path) -> None:
        self.log.append(("make_folder", path, None))
        super().make_folder(path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self.log.append(("create", path, None))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        self.log.append(("write", self._paths[descriptor], bytes(data)))
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.log.append(("sync", self._paths[descriptor], None))
        super().sync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self.log.append(("rename", source, target))
        super().rename(source, target)
        for descriptor in [each for each, path in self._paths.items() if path == source]:
            self._paths[descriptor] = target

    def sync_folder(self, path: Path) -> None:
        self.log.append(("sync_folder", path, None))
        super().sync_folder(path)

    def remove(self, path: Path) -> None:
        self.log.append(("remove", path, None))
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self.log.append(("remove_folder", path, None))
        super().remove_folder(path)


@dataclass
class _File:
    """Bytes as programs see them, and as the disk has them."""

    seen: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    """Names as programs see them, and as the disk has them."""

    seen: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


def survivors(log: list[Operation], root: Path) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Yield (which cut, path to bytes or None for a folder), three outcomes an operation."""
    top = _Folder()
    for number, operation in enumerate([None, *log]):
        if operation:
            _replay(top, root, operation)
        cut = f"cut behind operation {number} {operation[:2] if operation else ''}"
        yield f"{cut}, nothing more survives", dict(_left(top, new_names=False, zeros=False))
        yield f"{cut}, names survive", dict(_left(top, new_names=True, zeros=False))
        yield f"{cut}, names and sizes survive", dict(_left(top, new_names=True, zeros=True))


def lay_out(files: dict[str, bytes | None], root: Path) -> None:
    """Make a real folder of what survived."""
    for name, data in sorted(files.items()):
        path = root / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def _folder(top: _Folder, root: Path, path: Path) -> _Folder:
    for part in path.relative_to(root).parts:
        inner = top.seen[part]
        assert isinstance(inner, _Folder)
        top = inner
    return top


def _replay(top: _Folder, root: Path, operation: Operation) -> None:
    kind, path, extra = operation
    if kind == "sync_folder":
        folder = _folder(top, root, path)
        folder.synced = dict(folder.seen)
        return
    names = _folder(top, root, path.parent).seen
    entry = names.get(path.name)
    if kind == "make_folder":
        names.setdefault(path.name, _Folder())
    elif kind == "create":
        names[path.name] = _File()
    elif kind in ("remove", "remove_folder"):
        names.pop(path.name, None)
    elif kind == "rename":
        assert isinstance(extra, Path)
        _folder(top, root, extra.parent).seen[extra.name] = names.pop(path.name)
    else:
        assert isinstance(entry, _File)
        if kind == "write":
            assert isinstance(extra, bytes)
            entry.seen += extra
        else:
            entry.synced = entry.seen


def _left(folder: _Folder, *, new_names: bool, zeros: bool) -> Iterator[tuple[str, bytes | None]]:
    for name, entry in (folder.seen if new_names else folder.synced).items():
        if isinstance(entry, _File):
            lost = len(entry.seen) - len(entry.synced)
            yield name, entry.synced + bytes(lost if zeros else 0)
        else:
            yield name, None
            for inner, data in _left(entry, new_names=new_names, zeros=zeros):
                yield f"{name}/{inner}", data


# --------------------------------------------------------------------------------------------------
# Whatever ends a run, and whenever: no promise is broken, and the next run ends as it would have.
#
# Killed from outside at random moments, before every operation on the disk, and in the middle of a
# write; power cuts behind every operation, by a model of the disk; a full disk, a quota, a read-
# only target. Each gate is shown a writer that forgets something.

PLAN = small_plan()


@pytest.fixture
def folder() -> Iterator[Path]:
    with quick_folder() as path:
        yield path


def doomed(mode: str, seed: int, trials: int) -> dict[str, Any]:
    """Run a mode of doomed_runs in a process of its own, from which light children fork."""
    command = [sys.executable, "-m", "degarble.suites.checkpoint.doomed_runs"]
    done = subprocess.run(
        [*command, mode, str(seed), str(trials)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("mode", "trials", "least"),
    [
        ("moments", 40, 10),
        ("operations", 40, 40),
        ("bytes", 20, 20),
        ("file-size", 10, 10),
        ("read-only", 1, 1),
        ("together", 20, 0),
        pytest.param("moments", 200, 50, marks=pytest.mark.slow),
        pytest.param("operations", 100_000, 150, marks=pytest.mark.slow),
        pytest.param("bytes", 200, 200, marks=pytest.mark.slow),
        pytest.param("file-size", 100, 100, marks=pytest.mark.slow),
    ],
)
def test_dead_runs_leave_nothing_half_written(
    mode: str, trials: int, least: int, seed: int
) -> None:
    found = doomed(mode, seed, trials)
    assert found["broken"] == []
    assert found["killed"] >= least


def power_cut_faults(folder: Path, disk: LoggedDisk, *, resume: bool) -> list[str]:
    """Cut the power behind every operation of one run; list what is broken then, or afterwards."""
    target = folder / "run" / "target"
    target.parent.mkdir()
    write_all(target, PLAN, disk)
    whole = tree(target)
    faults = []
    outcomes = list(survivors(disk.log, target.parent))
    different = {tuple(sorted(files.items())): (sentence, files) for sentence, files in outcomes}
    for number, (text, files) in enumerate(different.values()):
        place = folder / f"cut-{number}"
        lay_out(files, place)
        root = place / "target"
        if root.exists():
            faults += [f"{text}: {promise}" for promise in broken_promises(root, whole)]
        if resume:
            write_all(root, PLAN)
            if tree(root) != whole:
                faults.append(f"{text}: another end")
    ends = [{name: data for name, data in files.items() if data} for _, files in outcomes[-3:]]
    if any(end != {f"target/{name}": data for name, data in whole.items()} for end in ends):
        faults.append("what was declared complete did not survive")
    return faults


def test_power_may_fail_after_every_operation(folder: Path) -> None:
    disk = LoggedDisk()
    assert power_cut_faults(folder, disk, resume=True) == []
    assert len(disk.log) > 150


class ForgetfulDisk(LoggedDisk):
    """Leaves out one kind of operation."""

    def __init__(self, forgotten: str) -> None:
        super().__init__()
        setattr(self, forgotten, lambda *_: None)


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_a_forgotten_sync_is_detected(forgotten: str, folder: Path) -> None:
    assert power_cut_faults(folder, ForgetfulDisk(forgotten), resume=False)


def test_a_rename_before_the_sync_is_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hasty(self: disk_module.Partial) -> None:
        self._disk.rename(self._temporary, self.path)
        self._disk.sync(self._open)
        self._close()
        self._disk.sync_folder(self.path.parent)

    monkeypatch.setattr(disk_module.Partial, "commit", hasty)
    assert power_cut_faults(folder, LoggedDisk(), resume=False)


def test_config_before_the_rest_is_detected(folder: Path) -> None:
    """The promise itself: a judge that misses a config.json among missing files is no judge."""
    target = folder / "target"
    write_all(target, PLAN)
    whole = tree(target)
    (target / UNFINISHED).mkdir()
    assert broken_promises(target, whole) == []
    (target / PLAN.shards[0].file).unlink()
    assert len(broken_promises(target, whole)) == 2


def half_written(target: Path) -> None:
    """Leave two finished shards and a mark."""

    class Stopped(Exception):
        pass

    class StoppingDisk(Disk):
        shards = 0

        def rename(self, source: Path, target: Path) -> None:
            self.shards += target.suffix == ".safetensors"
            if self.shards == 3:
                raise Stopped
            super().rename(source, target)

    with pytest.raises(Stopped):
        write_all(target, PLAN, StoppingDisk())


def damage(target: Path) -> None:
    path = target / PLAN.shards[1].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_shard_is_written_anew(folder: Path) -> None:
    write_all(folder / "whole", PLAN)
    half_written(folder / "target")
    damage(folder / "target")
    write_all(folder / "target", PLAN)
    assert tree(folder / "target") == tree(folder / "whole")


def test_resuming_without_a_check_is_detected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(folder / "whole", PLAN)
    half_written(folder / "target")
    damage(folder / "target")
    monkeypatch.setattr(WriteJournal, "verified", WriteJournal.recorded)
    write_all(folder / "target", PLAN)
    assert tree(folder / "target") != tree(folder / "whole")


class FullDisk(Disk):
    """Has room for so many bytes, and fails as the system does."""

    def __init__(self, room: int, error: int) -> None:
        self._room = room
        self._error = error

    def write(self, descriptor: int, data: memoryview) -> None:
        fitting = data[: self._room]
        self._room -= fitting.nbytes
        super().write(descriptor, fitting)
        if fitting.nbytes < data.nbytes:
            raise OSError(self._error, "no room")


@pytest.mark.parametrize(
    ("error", "told"), [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota is used up")]
)
def test_a_full_disk_is_refused_and_nothing_is_lost(
    error: int, told: str, folder: Path, seed: int
) -> None:
    write_all(folder / "whole", PLAN)
    whole = tree(folder / "whole")
    chance = random.Random(seed)
    for trial in range(20):
        target = folder / f"target-{trial}"
        room = chance.randrange(sum(map(len, whole.values())))
        with pytest.raises(UnwritablePath, match=told) as caught:
            write_all(target, PLAN, FullDisk(room, error))
        assert str(target) in str(caught.value)
        assert "run the same command again" in caught.value.remedy
        assert broken_promises(target, whole) == []
        assert not [name for name in tree(target) if name.endswith(".partial")]
        kept = {name for name in tree(target) if name.endswith(".safetensors")}
        write_all(target, PLAN)
        assert tree(target) == whole
        assert kept <= whole.keys()


def test_a_disk_that_is_really_full(folder: Path) -> None:
    """A file system of its own with 16 KiB, where the system allows to mount one."""
    write_all(folder / "whole", PLAN)
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs root; the limit on file sizes stands for it")
    try:
        with pytest.raises(UnwritablePath, match=r"bytes free|disk is full"):
            write_all(small / "target", PLAN)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("degarble.harness.checkpoint.write.writer.require_space", lambda *_: None)
            with pytest.raises(UnwritablePath, match="disk is full"):
                write_all(small / "target", PLAN)
        assert broken_promises(small / "target", tree(folder / "whole")) == []
        shutil.rmtree(small / "target")
    finally:
        subprocess.run(["umount", small], check=True)
