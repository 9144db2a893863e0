"""Finished parts of a run: kept until it ends, whole or absent, and those of other runs dropped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.checkpoint.write import finished_parts
from degarble.harness.checkpoint.write.disk import DISK, Disk
from degarble.harness.checkpoint.write.finished_parts import FinishedParts

if TYPE_CHECKING:
    from pathlib import Path

FACTS = {"capture": "a", "conventions": [["b", True]]}
PART = {"rows": [1, 2.5, {"float": "nan"}], "text": "\N{GREEK SMALL LETTER MU}"}


def test_parts_of_the_same_run_are_read_until_it_ends(tmp_path: Path) -> None:
    FinishedParts(tmp_path / "kept", FACTS).add(["a", 1], PART)
    again = FinishedParts(tmp_path / "kept", FACTS)
    assert again.read(["a", 1]) == PART
    assert again.read(["a", 2]) is None
    again.close()
    assert not (tmp_path / "kept").exists()


def test_parts_of_another_run_are_dropped(tmp_path: Path) -> None:
    FinishedParts(tmp_path, FACTS).add("a", PART)
    assert FinishedParts(tmp_path, {**FACTS, "capture": "b"}).read("a") is None
    assert FinishedParts(tmp_path, FACTS).read("a") is None


@pytest.mark.parametrize(
    "change", [lambda t: t[:-9], lambda t: t.replace("2.5", "3.5"), lambda _: "{}"]
)
def test_a_part_that_was_damaged_is_not_finished(tmp_path: Path, change: Any) -> None:
    parts = FinishedParts(tmp_path, FACTS)
    parts.add("a", PART)
    (path,) = (each for each in tmp_path.iterdir() if each.name != "plan.json")
    path.write_text(change(path.read_text()))
    assert parts.read("a") is None
    parts.add("a", PART)
    assert parts.read("a") == PART


class Killed(BaseException):
    """The process ends here."""


class KilledDisk(Disk):
    """Ends the process at one of its operations; its open files are closed then, as by a kill."""

    def __init__(self, last: int) -> None:
        self.last = last
        self._open: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name != "last":
            if not self.last:
                for descriptor in self._open:
                    os.close(descriptor)
                self._open.clear()
                raise Killed
            self.last -= 1
        return super().__getattribute__(name)

    def create(self, path: Path) -> int:
        """Create a file that is closed when the process ends."""
        descriptor = super().create(path)
        self._open.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close a file."""
        super().close(descriptor)
        self._open.discard(descriptor)


def test_a_kill_at_any_moment_leaves_whole_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for last in range(60):
        folder = tmp_path / str(last)
        monkeypatch.setattr(finished_parts, "DISK", KilledDisk(last))
        try:
            parts = FinishedParts(folder, FACTS)
            for number in range(2):
                parts.add(number, PART)
            parts.close()
        except Killed:
            pass
        else:
            break
        monkeypatch.setattr(finished_parts, "DISK", DISK)
        again = FinishedParts(folder, FACTS)
        assert all(again.read(number) in (None, PART) for number in range(2))
        again.close()
        assert not folder.exists()
    assert last > 20
