"""Targets inside their source, and sources inside their target, are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.checkpoint.write.disk import require_separate_folders
from degarble.suites.checkpoint.structure_cases import V4, write
from degarble.suites.commands.calls import call

if TYPE_CHECKING:
    from pathlib import Path

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
    source, target, told = NESTED[what]
    with pytest.raises(InvalidArgument, match=told):
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
