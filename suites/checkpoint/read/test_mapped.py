"""Mappings share pages with the file, never change it, and notice when it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, UnreadableFile
from degarble.harness.checkpoint.read.file_access import MappedFiles
from degarble.harness.checkpoint.read.safetensors_files import read_header
from degarble.suites.checkpoint.reading_cases import entry, write_raw

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.read.types import TensorEntry

SIZE = 300_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    half = SIZE // 2
    write_raw(
        path,
        {"a": entry("U8", [half], 0, half), "b": entry("U8", [half], half, SIZE)},
        bytes(i % 251 for i in range(SIZE)),
    )
    return path


def mapped(path: Path) -> tuple[MappedFiles, TensorEntry]:
    header = read_header(path)
    return MappedFiles({path: header.file_size}), header.entries["b"]


def test_bytes_are_those_of_the_file(path: Path) -> None:
    files, b = mapped(path)
    assert files.raw(b) == path.read_bytes()[-SIZE // 2 :]
    assert b"".join(files.chunks(b, 1000)) == files.raw(b)
    assert len(list(files.chunks(b, 1000))) == SIZE // 2 // 1000


def test_writing_stays_in_the_process_and_is_lost_on_release(path: Path) -> None:
    before = path.read_bytes()
    files, b = mapped(path)
    files.raw(b)[:4] = b"\xff" * 4
    assert bytes(files.raw(b)[:4]) == b"\xff" * 4
    assert path.read_bytes() == before
    files.release(b)
    assert files.raw(b) == before[-SIZE // 2 :]


@pytest.mark.parametrize("whole", [True, False])
def test_release_gives_memory_back(tmp_path: Path, whole: bool) -> None:
    path, size = tmp_path / "model.safetensors", 64 << 20
    write_raw(path, {"a": entry("U8", [size], 0, size)})
    os.truncate(path, path.stat().st_size + size)
    # Resident memory is the process's: ask one that does nothing else.
    code = (
        "import sys, pathlib\n"
        "from degarble.harness.checkpoint.read.file_access import MappedFiles\n"
        "from degarble.harness.checkpoint.read.safetensors_files import read_header\n"
        "def resident():\n"
        "    line = next(l for l in open('/proc/self/status') if l.startswith('VmRSS'))\n"
        "    return int(line.split()[1]) // 1024\n"
        "header = read_header(pathlib.Path(sys.argv[1]))\n"
        "files = MappedFiles({header.file: header.file_size})\n"
        "a, start = header.entries['a'], resident()\n"
        "assert not any(files.raw(a)[::4096])\n"
        "read = resident()\n"
        "files.release(a if sys.argv[2] == 'False' else None)\n"
        "print(read - start, resident() - start)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(path), str(whole)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read, released = map(int, told.split())
    assert read >= 60, "the fault that release cures"
    assert released <= 4


def test_a_file_that_shrinks_is_refused_before_it_is_touched(path: Path) -> None:
    files, b = mapped(path)
    files.raw(b)
    os.truncate(path, 1000)
    with pytest.raises(UnreadableFile, match="changed meanwhile"):
        files.raw(b)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_is_replaced_or_gone_is_refused(path: Path, when: str) -> None:
    files, b = mapped(path)
    if when == "after":
        files.raw(b)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(UnreadableFile, match="changed meanwhile"):
        files.raw(b)
    path.unlink()
    with pytest.raises(UnreadableFile):
        files.raw(b)


def test_closed_files_are_refused_and_old_views_live_on(path: Path) -> None:
    files, b = mapped(path)
    view = files.raw(b)
    tensor = torch.frombuffer(view, dtype=torch.uint8)
    files.close()
    with pytest.raises(InvalidArgument, match="closed"):
        files.raw(b)
    assert int(tensor[-1]) == (SIZE - 1) % 251
