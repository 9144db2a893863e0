from __future__ import annotations

import hashlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.write.manifest import (
    MANIFEST,
    UNFINISHED,
    FileRecord,
    Manifest,
    ShardRecord,
    content_hash,
    hash_of_file,
    require_finished,
)
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import CompanionFiles, write
from degarble.suites.checkpoint.writing_cases import ENDING, produce, small_plan, write_all

if TYPE_CHECKING:
    from pathlib import Path

PLAN = small_plan()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_all(tmp_path / "target", PLAN)
    return tmp_path / "target"


def test_hashes_are_those_of_the_files(root: Path) -> None:
    manifest = Manifest.read(root)
    names = [*manifest.shards, *manifest.files]
    told = subprocess.run(["sha256sum", *names], cwd=root, capture_output=True, check=True)
    found = dict(line.split()[::-1] for line in told.stdout.decode().splitlines())
    records: dict[str, ShardRecord | FileRecord] = {**manifest.shards, **manifest.files}
    assert {name: record.sha256 for name, record in records.items()} == found
    assert all(record.nbytes == (root / name).stat().st_size for name, record in records.items())
    present = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert {*names, MANIFEST} == present


def test_hashes_of_tensors_are_those_of_their_bytes(root: Path) -> None:
    manifest = Manifest.read(root)
    for shard in PLAN.shards:
        for tensor in shard.tensors:
            data = b"".join(produce(tensor))
            stated = manifest.shards[shard.file].tensors[tensor.name]
            assert stated == hashlib.sha256(data).hexdigest()


def test_reading_gives_what_was_written(root: Path) -> None:
    manifest = Manifest.read(root)
    assert manifest.to_bytes() == (root / MANIFEST).read_bytes()
    assert manifest.hash == hash_of_file(root / MANIFEST)
    assert manifest.plan == PLAN.facts()


def test_content_does_not_depend_on_shards(tmp_path: Path) -> None:
    tensors = [tensor for shard in PLAN.shards for tensor in shard.tensors]
    manifests = [
        write(tmp_path / str(number), WritePlan.of(order, shard_bytes=size), produce, ENDING)
        for number, (order, size) in enumerate([(tensors, 1300), (tensors[::-1], 1 << 20)])
    ]
    assert manifests[0].content == manifests[1].content
    assert manifests[0].hash != manifests[1].hash


def test_content_depends_on_everything_else() -> None:
    tensor = ("a", "U8", (2, 3), "0" * 64)
    others = [
        ("b", *tensor[1:]),
        ("a", "I8", *tensor[2:]),
        ("a", "U8", (3, 2), tensor[3]),
        ("a", "U8", (2, 3), "1" * 64),
        ("a", "U8", (2, 3), None),
    ]
    hashes = {content_hash([each]) for each in [tensor, *others]}
    hashes.add(content_hash([tensor, ("b", *tensor[1:])]))
    assert len(hashes) == 7


def test_planted_changes_are_told(root: Path) -> None:
    manifest = Manifest.read(root)
    assert list(manifest.differences(root)) == []
    flipped, cut, gone = (root / PLAN.shards[number].file for number in range(3))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    (root / "config.json").write_bytes(b"{}")
    told = list(manifest.differences(root))
    assert [line.split(":")[0] for line in told] == [
        flipped.name,
        cut.name,
        gone.name,
        "config.json",
    ]
    assert "sha256" in told[0]
    assert "bytes instead of" in told[1]
    assert "No such file" in told[2]


def test_holes_have_no_hash(tmp_path: Path) -> None:
    plan = WritePlan.of([PlannedTensor("a", "BF16", (1 << 20, 1 << 10))])
    manifest = write(tmp_path / "target", plan, None)
    assert Manifest.read(tmp_path / "target") == manifest
    assert list(manifest.differences(tmp_path / "target")) == []
    assert manifest.shards[plan.shards[0].file].sha256 is None


def spoiled(root: Path, change: dict[str, Any]) -> None:
    raw = json.loads((root / MANIFEST).read_text())
    (root / MANIFEST).write_text(json.dumps(raw | change))


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"shards": {"x": {}}},
        {"shards": {"x": {"bytes": "many", "sha256": None, "tensors": {}}}},
        {"shards": []},
        {"files": {"x": 1}},
        {"files": {"../x": {"bytes": 1, "sha256": ""}}},
        {"shards": {"/etc/x": {"bytes": 1, "sha256": "", "tensors": {}}}},
        {"plan": 1},
        {"tool": {}},
    ],
)
def test_what_is_no_manifest_is_refused(change: dict[str, Any], root: Path) -> None:
    spoiled(root, change)
    with pytest.raises(UnreadableFile, match=r"manifest\.json"):
        Manifest.read(root)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1, "schema": 1}', "{} {}"])
def test_what_is_no_json_object_is_refused(text: str, root: Path) -> None:
    (root / MANIFEST).write_text(text)
    with pytest.raises(UnreadableFile, match=r"manifest\.json"):
        Manifest.read(root)


def test_unfinished_folders_are_refused(root: Path) -> None:
    require_finished(root)
    (root / UNFINISHED).mkdir()
    with pytest.raises(UnreadableFile, match="unfinished"):
        require_finished(root)


def test_the_same_run_gives_the_same_manifest(tmp_path: Path) -> None:
    hashes = {
        write(tmp_path / str(workers), PLAN, produce, ENDING, workers=workers).hash
        for workers in (1, 2)
    }
    assert len(hashes) == 1
    changed = CompanionFiles({**ENDING.files, "config.json": b"{}"}, ENDING.index_metadata)
    assert write(tmp_path / "other", PLAN, produce, changed).hash not in hashes
