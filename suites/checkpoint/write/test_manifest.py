"""Hashes of finished targets, and the journal of unfinished ones."""

from __future__ import annotations

import hashlib
import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import UnreadableFile, UnwritablePath
from degarble.harness.checkpoint.write.disk import DISK
from degarble.harness.checkpoint.write.manifest import (
    MANIFEST,
    UNFINISHED,
    FileRecord,
    Manifest,
    ShardRecord,
    WriteJournal,
    content_hash,
    hash_of_file,
    require_finished,
)
from degarble.harness.checkpoint.write.manifest import PLAN as PLAN_FILE
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import CompanionFiles, finish, write, write_shard
from degarble.suites.checkpoint.writing_cases import ENDING, produce, small_plan, tree, write_all

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
        write(
            tmp_path / str(number), WritePlan.from_tensors(order, shard_bytes=size), produce, ENDING
        )
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


def test_planted_changes_are_reported(root: Path) -> None:
    manifest = Manifest.read(root)
    assert list(manifest.differences(root)) == []
    flipped, cut, gone = (root / PLAN.shards[number].file for number in range(3))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    (root / "config.json").write_bytes(b"{}")
    lines = list(manifest.differences(root))
    assert [line.split(":")[0] for line in lines] == [
        flipped.name,
        cut.name,
        gone.name,
        "config.json",
    ]
    assert "sha256" in lines[0]
    assert "bytes instead of" in lines[1]
    assert "No such file" in lines[2]


def test_holes_have_no_hash(tmp_path: Path) -> None:
    plan = WritePlan.from_tensors([PlannedTensor("a", "BF16", (1 << 20, 1 << 10))])
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


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def tensors() -> list[PlannedTensor]:
    return [tensor for shard in PLAN.shards for tensor in shard.tensors]


def plans_that_differ() -> dict[str, WritePlan]:
    """What is different, as the refusal names it, and the plan."""
    listed = tensors()
    first = listed[0]
    sizes: Any = {"shard_bytes": 1300}
    common: Any = {"sources": {"seed": "1"}}
    return {
        "sources[seed]": WritePlan.from_tensors(listed, **sizes, sources={"seed": "2"}),
        "sources[model]": WritePlan.from_tensors(
            listed, **sizes, sources={"seed": "1", "model": "x"}
        ),
        "metadata[format]": WritePlan.from_tensors(
            listed, **sizes, **common, metadata={"format": "np"}
        ),
        "shard_bytes": WritePlan.from_tensors(listed, shard_bytes=1301, **common),
        "shards": WritePlan.from_tensors(
            [*listed, PlannedTensor("z", "U8", (999,))], **sizes, **common
        ),
        "heads[model-00001-of-00006.safetensors]": WritePlan.from_tensors(
            [first._replace(name="other"), *listed[1:]], **sizes, **common
        ),
        "plan (keys of producers)": WritePlan.from_tensors(
            [tensor._replace(key=tensor.key + "x") for tensor in listed], **sizes, **common
        ),
    }


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("named", plans_that_differ())
def test_another_plan_is_refused_by_what_differs(named: str, finished: bool, target: Path) -> None:
    WriteJournal.begin(target, PLAN, DISK)
    write_shard(target, PLAN.shards[0], produce)
    if finished:
        for shard in PLAN.shards:
            write_shard(target, shard, produce)
        finish(target, PLAN, ENDING)
    before = tree(target)
    with pytest.raises(UnwritablePath) as caught:
        WriteJournal.begin(target, plans_that_differ()[named], DISK)
    what = "a finished checkpoint" if finished else "an unfinished output"
    text = str(caught.value)
    assert f"{what} with {named} =" in text or f"{what} without {named}" in text
    assert "None" not in text
    assert tree(target) == before


def test_another_version_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WriteJournal.begin(target, PLAN, DISK)
    monkeypatch.setattr("degarble.harness.checkpoint.write.manifest.VERSION", "99.0")
    with pytest.raises(UnwritablePath, match="version of degarble"):
        WriteJournal.begin(target, PLAN, DISK)


def test_a_folder_with_something_else_is_refused(target: Path) -> None:
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(UnwritablePath, match=r"1 other files, such as notes\.txt"):
        WriteJournal.begin(target, PLAN, DISK)
    assert tree(target) == {"notes.txt": b"mine"}


def test_a_foreign_manifest_is_refused(target: Path) -> None:
    target.mkdir()
    (target / MANIFEST).write_text('{"name": "a browser extension"}')
    with pytest.raises(UnwritablePath, match="not ours"):
        WriteJournal.begin(target, PLAN, DISK)


def test_a_file_in_place_of_the_folder_is_refused(target: Path) -> None:
    target.write_text("mine")
    with pytest.raises(UnwritablePath, match="no folder"):
        WriteJournal.begin(target, PLAN, DISK)
    assert target.read_text() == "mine"


def test_an_empty_folder_and_a_bare_mark_are_taken(target: Path) -> None:
    (target / UNFINISHED).mkdir(parents=True)
    journal = WriteJournal.begin(target, PLAN, DISK)
    assert not journal.is_finished
    assert (target / UNFINISHED / PLAN_FILE).exists()


def test_without_resuming_nothing_that_exists_is_touched(target: Path) -> None:
    WriteJournal.begin(target, PLAN, DISK, resume=False)
    with pytest.raises(UnwritablePath, match="unfinished output"):
        WriteJournal.begin(target, PLAN, DISK, resume=False)
    WriteJournal.begin(target, PLAN, DISK)
    write_all(target, PLAN)
    with pytest.raises(UnwritablePath, match="finished already"):
        WriteJournal.begin(target, PLAN, DISK, resume=False)


def test_workers_join_only_what_was_begun_with_their_plan(target: Path) -> None:
    target.mkdir()
    with pytest.raises(UnwritablePath, match="begun with plan"):
        WriteJournal.join(target, PLAN.hash, DISK)
    WriteJournal.begin(target, PLAN, DISK)
    WriteJournal.join(target, PLAN.hash, DISK)
    with pytest.raises(UnwritablePath, match="begun with plan"):
        WriteJournal.join(target, small_plan("2").hash, DISK)


def test_finished_shards_are_found_by_their_records(target: Path) -> None:
    journal = WriteJournal.begin(target, PLAN, DISK)
    first, second = PLAN.shards[:2]
    assert journal.verified(first) is None
    record = write_shard(target, first, produce)
    assert journal.verified(first) == record
    assert journal.verified(second) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": "other"}', '{"plan": 1, "bytes": []}'])
def test_a_spoiled_record_counts_as_none(text: str, target: Path) -> None:
    journal = WriteJournal.begin(target, PLAN, DISK)
    shard = PLAN.shards[0]
    write_shard(target, shard, produce)
    (target / UNFINISHED / f"{shard.file}.json").write_text(text)
    assert journal.verified(shard) is None
    write_shard(target, shard, produce)
    assert journal.verified(shard) is not None


@pytest.mark.parametrize("change", ["cut", "flip", "gone", "tensors"])
def test_a_shard_that_is_not_as_recorded_is_not_taken(change: str, target: Path) -> None:
    journal = WriteJournal.begin(target, PLAN, DISK)
    shard = PLAN.shards[0]
    path = target / shard.file
    write_shard(target, shard, produce)
    data = path.read_bytes()
    note = target / UNFINISHED / f"{shard.file}.json"
    if change == "cut":
        path.write_bytes(data[:-1])
    elif change == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif change == "gone":
        path.unlink()
    else:
        raw = json.loads(note.read_text())
        raw["tensors"].popitem()
        note.write_text(json.dumps(raw))
    assert journal.verified(shard) is None
    assert (journal.recorded(shard) is None) == (change != "flip"), "only reading tells a flip"


def test_a_changed_shard_of_a_finished_checkpoint_stays(target: Path) -> None:
    write_all(target, PLAN)
    path = target / PLAN.shards[2].file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UnwritablePath, match="other bytes than its manifest says"):
        write_all(target, PLAN)
    path.unlink()
    write_all(target, PLAN)
    assert path.read_bytes() == data
    assert not (target / UNFINISHED).exists()


def test_only_the_mark_is_left_to_remove(target: Path) -> None:
    """A run that ended behind its last file is finished by the next look at it."""
    write_all(target, PLAN)
    whole = tree(target)
    (target / UNFINISHED).mkdir()
    assert WriteJournal.begin(target, PLAN, DISK).is_finished
    assert tree(target) == whole
    (target / UNFINISHED).mkdir()
    (target / "config.json").unlink()
    assert not WriteJournal.begin(target, PLAN, DISK).is_finished
    finish(target, PLAN, ENDING)
    assert tree(target) == whole


def test_other_files_of_workers_are_deleted_with_the_mark(target: Path) -> None:
    WriteJournal.begin(target, PLAN, DISK)
    (target / UNFINISHED / "notes of a worker").write_text("x")
    write_all(target, PLAN)
    assert not (target / UNFINISHED).exists()
