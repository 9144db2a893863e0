"""A disk that loses power: what could be on it after each operation of a run.

SIGKILL leaves the system's memory alone; a power cut does not. `LoggedDisk` does what it is told
and writes down what; `survivors` replays the first operations of a log and yields what POSIX lets a
disk hold after a cut there: bytes that were never synced may be gone, or zeros, and names that no
sync of their folder followed may be old or new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.write.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterator

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
