"""A source that changes while a job reads it is refused, and no shard of two sources is kept."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import Refused, UnreadableFile
from degarble.harness.checkpoint.read.file_access import SourceState
from degarble.harness.checkpoint.transform.convert.job import job_for
from degarble.harness.checkpoint.transform.quantise.job import plan_job, run_job
from degarble.harness.checkpoint.write.manifest import MANIFEST, UNFINISHED
from degarble.harness.checkpoint.write.writer import write
from degarble.suites.checkpoint.converting_cases import source as convertible
from degarble.suites.checkpoint.transform.quantise.test_job import SHARD, job_of, source_of
from degarble.suites.checkpoint.writing_cases import tree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


def test_quantise_goes_on_behind_the_shards_that_were_made_before_a_change(
    source: Path, tmp_path: Path
) -> None:
    target, job = tmp_path / "target", job_of(source, "v4", "nvfp4-full")
    sound = shutil.copytree(source, tmp_path / "sound", copy_function=shutil.copy2)
    listen = changing(rewrite, shard_of(source), 2)
    with pytest.raises(Refused):
        run_job(job, target, shard_bytes=SHARD, progress=listen)
    assert not (target / MANIFEST).exists()
    assert not (target / "config.json").exists()
    records = [path.name for path in (target / UNFINISHED).glob("*.safetensors.json")]
    assert len(records) == 2  # those that were made before; the third is not believed
    shutil.rmtree(source)
    sound.rename(source)
    run_job(job, target, shard_bytes=SHARD)
    run_job(job, tmp_path / "again", shard_bytes=SHARD)
    assert tree(target) == tree(tmp_path / "again")


@pytest.mark.parametrize("kind", ["rewritten", "deleted"])
def test_a_change_behind_the_last_shard_is_refused_as_well(
    source: Path, tmp_path: Path, kind: str
) -> None:
    job, path = job_of(source, "v4", "nvfp4-full"), source / "config.json"
    planned = plan_job(job, shard_bytes=SHARD)
    listen = changing(CHANGES[kind], path, len(planned.plan.shards))
    with pytest.raises(Refused):
        run_job(job, tmp_path / "target", progress=listen, planned=planned)
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
    state = SourceState.of(source)
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

    plan = plan_job(job_of(source, "v4", "nvfp4-full"), shard_bytes=SHARD).plan
    for there in (False, True):
        target = tmp_path / f"target-{there}"
        if there:
            target.mkdir()
        with pytest.raises(UnreadableFile):
            write(target, plan, Refusing())
        assert target.exists() == there
        assert not there or list(target.iterdir()) == []
