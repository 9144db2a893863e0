"""Read bytes by mapping and by position, and detect files that change meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, Refused, UnreadableFile
from degarble.harness.checkpoint.read.file_access import MappedFiles, SourceState, read_small
from degarble.harness.checkpoint.read.safetensors_files import read_header
from degarble.harness.checkpoint.transform.convert.job import job_for
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import MANIFEST, UNFINISHED
from degarble.harness.checkpoint.write.writer import write
from degarble.suites.checkpoint.converting_cases import source as convertible
from degarble.suites.checkpoint.reading_cases import entry, write_raw, write_shards
from degarble.suites.checkpoint.transform.quantise.test_job import SHARD, job_of, source_of
from degarble.suites.checkpoint.writing_cases import tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from degarble.harness.checkpoint.read.types import TensorEntry


# --------------------------------------------------------------------------------------------------
# Mappings share pages with the file, never change it, and notice when it changes.

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
def test_release_frees_memory(tmp_path: Path, whole: bool) -> None:
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
    text = subprocess.run(
        [sys.executable, "-c", code, str(path), str(whole)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read, released = map(int, text.split())
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


# --------------------------------------------------------------------------------------------------
# Small tensors are read by position, from many files, and from none that shrank.


def test_every_tensor_has_its_own_bytes(tmp_path: Path) -> None:
    shards = [
        {f"{s}.{i}": torch.tensor([s, i], dtype=torch.int32) for i in range(5)} for s in (0, 1)
    ]
    write_shards(tmp_path, shards)
    with Checkpoint.open(tmp_path) as checkpoint:
        found = dict(read_small(checkpoint.entries.values()))
    assert len(found) == 10
    for shard in shards:
        for name, tensor in shard.items():
            assert found[name] == tensor.numpy().tobytes()


def test_a_file_that_shrank_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": torch.zeros(4), "b": torch.ones(4)}])
    with Checkpoint.open(tmp_path) as checkpoint:
        (file,) = {entry.file for entry in checkpoint.entries.values()}
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size - 3)
        with pytest.raises(UnreadableFile, match="13 bytes"):
            list(read_small(checkpoint.entries.values()))


# --------------------------------------------------------------------------------------------------
# A source that changes while a job reads it is refused, and no shard of two sources is kept.


def rewrite(path: Path) -> None:
    """Write other bytes of the same length, as a second download does."""
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    later = path.stat().st_mtime_ns + 1_000_000  # whatever the clock of the file system resolves
    os.utime(path, ns=(later, later))


def swap(path: Path) -> None:
    """Put another file there with the same size and time."""
    status = path.stat()
    spare = path.with_name("spare")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    spare.write_bytes(data)
    os.utime(spare, ns=(status.st_atime_ns, status.st_mtime_ns))
    spare.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


CHANGES: dict[str, Callable[[Path], object]] = {
    "rewritten": rewrite,
    "swapped": swap,
    "cut": cut,
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return source_of(tmp_path, "v4", "bf16")


def shard_of(source: Path) -> Path:
    return next(iter(sorted(source.glob("*.safetensors"))))


def changing(change: Callable[[Path], object], path: Path, after: int) -> Callable[..., None]:
    """Listen to finished shards, and change the source behind one of them."""
    heard: list[object] = []

    def listen(*shard: object) -> None:
        heard.append(shard)
        if len(heard) == after:
            change(path)

    return listen


def test_quantise_resumes_after_the_shards_written_before_a_change(
    source: Path, tmp_path: Path
) -> None:
    target, job = tmp_path / "target", job_of(source, "v4", "nvfp4-full")
    sound = shutil.copytree(source, tmp_path / "sound", copy_function=shutil.copy2)
    listen = changing(rewrite, shard_of(source), 2)
    with pytest.raises(Refused):
        job.run(target, shard_bytes=SHARD, progress=listen)
    assert not (target / MANIFEST).exists()
    assert not (target / "config.json").exists()
    records = [path.name for path in (target / UNFINISHED).glob("*.safetensors.json")]
    assert len(records) == 2  # those that were made before; the third is not believed
    shutil.rmtree(source)
    sound.rename(source)
    job.run(target, shard_bytes=SHARD)
    job.run(tmp_path / "again", shard_bytes=SHARD)
    assert tree(target) == tree(tmp_path / "again")


@pytest.mark.parametrize("kind", ["rewritten", "deleted"])
def test_a_change_after_the_last_shard_is_refused_as_well(
    source: Path, tmp_path: Path, kind: str
) -> None:
    job, path = job_of(source, "v4", "nvfp4-full"), source / "config.json"
    plan = job.plan(shard_bytes=SHARD)
    listen = changing(CHANGES[kind], path, len(plan.shards))
    with pytest.raises(Refused):
        job.run(tmp_path / "target", progress=listen, plan=plan)
    assert not (tmp_path / "target" / MANIFEST).exists()


@pytest.mark.parametrize("kind", CHANGES)
def test_convert_accepts_nothing_of_a_source_that_changed(tmp_path: Path, kind: str) -> None:
    source = shutil.copytree(convertible("official"), tmp_path / "source")
    job = job_for(source, "bf16")
    listen = changing(CHANGES[kind], shard_of(source), 1)
    with pytest.raises(Refused):
        job.run(tmp_path / "target", shard_bytes=400_000, progress=listen)
    assert not (tmp_path / "target" / MANIFEST).exists()


def test_only_what_is_read_counts_and_the_file_is_named(source: Path) -> None:
    state = SourceState.from_source(source)
    (source / "notes.txt").write_text("x")
    shard_of(source).chmod(0o600)
    os.link(shard_of(source), source.parent / "another name")
    state.require_unchanged()
    assert state.is_unchanged
    (source / "more.safetensors").write_bytes(b"")
    with pytest.raises(UnreadableFile, match="while it was read"):
        state.require_unchanged()


def test_a_source_refused_before_the_first_shard_leaves_nothing(
    source: Path, tmp_path: Path
) -> None:
    class Refusing:
        def __call__(self, _tensor: Any) -> Any:
            raise UnreadableFile("tensor", "x", "y", "z")

    plan = job_of(source, "v4", "nvfp4-full").plan(shard_bytes=SHARD)
    for there in (False, True):
        target = tmp_path / f"target-{there}"
        if there:
            target.mkdir()
        with pytest.raises(UnreadableFile):
            write(target, plan, Refusing())
        assert target.exists() == there
        assert not there or list(target.iterdir()) == []
