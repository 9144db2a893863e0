"""Written shards and checkpoints: bytes, order, bounds, and what is refused."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    ShapeMismatch,
    UnreadableFile,
    UnwritablePath,
    WorkerLost,
)
from degarble.harness.checkpoint.read.safetensors_files import INDEX_NAME
from degarble.harness.checkpoint.read.types import ProblemKind
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.disk import Disk
from degarble.harness.checkpoint.write.manifest import MANIFEST, UNFINISHED, Manifest, WriteJournal
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import (
    BUFFER_BYTES,
    CONFIG,
    CompanionFiles,
    ShardedWriter,
    begin,
    bytes_of,
    finish,
    write,
    write_hollow_shard,
    write_shard,
)
from degarble.suites.checkpoint.writing_cases import (
    ENDING,
    produce,
    produce_or_die,
    small_plan,
    tree,
    write_all,
    write_one_by_one,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


PLAN = small_plan()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def test_others_read_what_is_written(target: Path) -> None:
    write(target, PLAN, produce, ENDING)
    index = json.loads((target / INDEX_NAME).read_text())
    assert index["metadata"] == {"total_parameters": 12, "total_size": PLAN.data_bytes}
    for shard in PLAN.shards:
        with safe_open(target / shard.file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for tensor in shard.tensors:
                assert index["weight_map"].pop(tensor.name) == shard.file
                found = opened.get_tensor(tensor.name)
                assert tuple(found.shape) == tensor.shape
                data = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert data == b"".join(produce(tensor))
    assert index["weight_map"] == {}
    with Checkpoint.open(target) as checkpoint:
        assert set(checkpoint.entries) == {
            planned_tensor.name for s in PLAN.shards for planned_tensor in s.tensors
        }


def test_every_way_of_writing_gives_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one", PLAN, produce, ENDING)
    write(tmp_path / "pool", PLAN, produce, ENDING, workers=2)
    write_all(tmp_path / "parts", PLAN)
    write_one_by_one(tmp_path / "tensors", PLAN)
    trees = [tree(tmp_path / name) for name in ("one", "pool", "parts", "tensors")]
    assert all(each == trees[0] for each in trees)
    assert set(trees[0]) == {
        *(shard.file for shard in PLAN.shards),
        *ENDING.files,
        INDEX_NAME,
        MANIFEST,
    }


def test_shards_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one", PLAN, produce, ENDING)
    begin(tmp_path / "two", PLAN)
    for shard in PLAN.shards[::-1]:
        write_shard(tmp_path / "two", shard, produce)
    finish(tmp_path / "two", PLAN, ENDING)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_progress_reports_every_shard(target: Path) -> None:
    told: list[tuple[str, str]] = []
    write(target, PLAN, produce, progress=lambda shard, done: told.append((shard.file, done.file)))
    assert told == [(shard.file, shard.file) for shard in PLAN.shards]


def test_writing_again_changes_nothing(target: Path) -> None:
    manifest = write(target, PLAN, produce, ENDING)
    times = {path: path.stat().st_mtime_ns for path in target.rglob("*")}

    def never(_: PlannedTensor) -> Iterator[bytes]:
        raise AssertionError

    assert write(target, PLAN, never, ENDING) == manifest
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == times
    with pytest.raises(UnwritablePath, match=r"another config\.json"):
        write(target, PLAN, never, CompanionFiles({CONFIG: b"[]"} | {"tokenizer.json": b"{}"}))


def test_a_finished_checkpoint_whose_config_was_overwritten_is_not_taken_for_done(
    target: Path,
) -> None:
    write(target, PLAN, produce, ENDING)
    whole = (target / CONFIG).read_bytes()
    (target / CONFIG).write_bytes(whole + b" ")
    with pytest.raises(UnwritablePath, match=r"config\.json.*other content"):
        write(target, PLAN, produce, ENDING)
    (target / CONFIG).unlink()
    write(target, PLAN, produce, ENDING)
    assert (target / CONFIG).read_bytes() == whole


def test_finish_names_the_shard_that_is_missing(target: Path) -> None:
    begin(target, PLAN)
    for shard in PLAN.shards[1:]:
        write_shard(target, shard, produce)
    with pytest.raises(UnwritablePath, match=r"model-00001-of-00006\.safetensors = 'not written'"):
        finish(target, PLAN)
    assert (target / UNFINISHED).exists()


def test_readers_refuse_what_is_not_finished(target: Path) -> None:
    begin(target, PLAN)
    for open_ in (Checkpoint.open, Checkpoint.survey):
        with pytest.raises(UnreadableFile, match=r"unfinished.*Run the command that writes it"):
            open_(target)
    write_shard(target, PLAN.shards[0], produce)
    with pytest.raises(UnreadableFile, match=r"unfinished.*Run the command that writes it again"):
        Checkpoint.open(target)
    with Checkpoint.survey(target) as checkpoint:
        assert checkpoint.problems.counts[ProblemKind.UNFINISHED] == 1
        assert set(checkpoint.entries) == {tensor.name for tensor in PLAN.shards[0].tensors}
    write(target, PLAN, produce, ENDING)
    Checkpoint.open(target).close()


def test_a_file_in_the_way_stays(target: Path) -> None:
    begin(target, PLAN)
    (target / "tokenizer.json").write_bytes(b"mine")
    with pytest.raises(UnwritablePath, match=r"tokenizer\.json.*other content"):
        write(target, PLAN, produce, ENDING)
    assert (target / "tokenizer.json").read_bytes() == b"mine"
    (target / "tokenizer.json").write_bytes(ENDING.files["tokenizer.json"])
    write(target, PLAN, produce, ENDING)


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/x", "a/../x", "a//x", "a\\x", ".hidden", "a/.hidden", "a\nb"),
        *("x/", INDEX_NAME, MANIFEST, "other.safetensors", f"{UNFINISHED}/x"),
    ],
)
def test_unsafe_names_of_extra_files_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="file next to the shards"):
        CompanionFiles({name: b""})


def test_a_full_disk_is_reported_before_anything_is_written(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("degarble.harness.checkpoint.write.disk.free_bytes", lambda _: 10_000)
    with pytest.raises(UnwritablePath, match=r"10000 bytes free.*12\d{3} bytes of room"):
        begin(target, PLAN)
    assert not target.exists()
    begin(target, PLAN, hollow=True)


def test_free_space_is_required_for_missing_shards_only(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(target, PLAN)
    for shard in PLAN.shards[:4]:
        write_shard(target, shard, produce)
    monkeypatch.setattr("degarble.harness.checkpoint.write.disk.free_bytes", lambda _: 10_000)
    write(target, PLAN, produce, ENDING)


def test_a_dead_worker_is_named_with_its_shard_and_the_rest_is_kept(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEGARBLE_SUITE_DIES_AT", "layers.6.weight")
    with pytest.raises(WorkerLost, match=r"shard model-00004-of-00006\.safetensors.*SIGKILL"):
        write(target, PLAN, produce_or_die, ENDING, workers=2)
    assert not (target / CONFIG).exists()
    assert sum((target / shard.file).exists() for shard in PLAN.shards[:3]) >= 2
    monkeypatch.delenv("DEGARBLE_SUITE_DIES_AT")
    write(target, PLAN, produce_or_die, ENDING)
    write(target.with_name("whole"), PLAN, produce, ENDING)
    assert tree(target) == tree(target.with_name("whole"))


def peak_while_writing(target: Path, chunks: Callable[[], Iterable[bytes]]) -> int:
    """Return the most bytes that were held at once while 256 MiB went through."""
    plan = WritePlan.from_tensors([PlannedTensor("x", "U8", (1 << 28,))], shard_bytes=1 << 30)
    tracemalloc.start()
    try:
        write(target, plan, lambda _: chunks())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_stays_bounded(target: Path) -> None:
    stream = peak_while_writing(target, lambda: (bytes(1 << 20) for _ in range(1 << 8)))
    assert stream < 8 << 20
    held = peak_while_writing(target.with_name("held"), lambda: [bytes(1 << 27), bytes(1 << 27)])
    assert held >= 1 << 28, "planted: a producer that holds everything is seen"


class TestShardedWriter:
    def test_order_is_the_plans(self, target: Path) -> None:
        with ShardedWriter(target, PLAN) as writer:
            with pytest.raises(InvalidArgument, match="order"):
                writer.add("layers.1.weight", "BF16", (31, 8), [])
            assert writer.wants("layers.0.weight")

    @pytest.mark.parametrize(("dtype", "shape"), [("I8", (30, 8)), ("U8", (8, 30))])
    def test_what_is_written_is_what_was_planned(
        self, dtype: str, shape: tuple[int, ...], target: Path
    ) -> None:
        with ShardedWriter(target, PLAN) as writer, pytest.raises(InvalidArgument, match="planned"):
            writer.add("layers.0.weight", dtype, shape, [])

    def test_finished_shards_are_passed_over(self, target: Path) -> None:
        begin(target, PLAN)
        write_shard(target, PLAN.shards[0], produce)
        asked = []
        with ShardedWriter(target, PLAN) as writer:
            for shard in PLAN.shards:
                for tensor in shard.tensors:
                    if writer.wants(tensor.name):
                        asked.append(tensor.name)
                    writer.add(*tensor[:3], produce(tensor))
            writer.finish(ENDING)
        assert asked == [
            planned_tensor.name for shard in PLAN.shards[1:] for planned_tensor in shard.tensors
        ]

    def test_leaving_early_leaves_finished_shards_only(self, target: Path) -> None:
        with ShardedWriter(target, PLAN) as writer:
            for tensor in [*PLAN.shards[0].tensors, PLAN.shards[1].tensors[0]]:
                writer.add(*tensor[:3], produce(tensor))
            with pytest.raises(InvalidArgument, match="end before layers"):
                writer.finish()
        assert [name for name in tree(target) if not name.startswith(UNFINISHED)] == [
            PLAN.shards[0].file
        ]

    def test_an_error_of_the_producer_ends_the_writer(self, target: Path) -> None:
        first = PLAN.shards[0].tensors[0]
        with ShardedWriter(target, PLAN) as writer:
            with pytest.raises(ShapeMismatch):
                writer.add(*first[:3], [b"too few"])
            with pytest.raises(InvalidArgument, match="after an error"):
                writer.add(*first[:3], produce(first))
        assert [name for name in tree(target) if name.endswith(".partial")] == []
        write_one_by_one(target, PLAN)

    def test_nothing_may_be_added_after_the_end(self, target: Path) -> None:
        last = PLAN.shards[-1].tensors[-1]
        write_all(target, PLAN)
        with ShardedWriter(target, PLAN) as writer:
            for shard in PLAN.shards:
                for tensor in shard.tensors:
                    writer.add(*tensor[:3], [])
            with pytest.raises(InvalidArgument, match="after the end"):
                writer.add(last.name, last.dtype, last.shape, [])
            assert writer.finish(ENDING) == Manifest.read(target)


@pytest.mark.parametrize(
    "chunk",
    [
        b"\1\2\3\4",
        bytearray(b"\1\2\3\4"),
        memoryview(b"\1\2\3\4"),
        np.array([[0x0201], [0x0403]], "<u2"),
        torch.tensor([[0x0201], [0x0403]], dtype=torch.int16),
        torch.tensor([1, 2, 3, 4], dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor([0x0201, 0x0403], dtype=torch.int16).view(torch.bfloat16),
        torch.tensor([1, 9, 2, 9, 3, 9, 4, 9], dtype=torch.uint8)[::2],
        torch.nn.Parameter(torch.tensor([0x04030201]).int().view(torch.float32)),
    ],
)
def test_chunks_are_taken_as_their_bytes(chunk: Any) -> None:
    assert bytes(bytes_of(chunk)) == b"\1\2\3\4"


def test_empty_and_scalar_chunks() -> None:
    assert bytes(bytes_of(torch.empty(0, 3))) == b""
    assert bytes(bytes_of(np.empty((3, 0)))) == b""
    assert bytes(bytes_of(torch.tensor(1.0))) == b"\0\0\x80\x3f"


@pytest.mark.parametrize("chunk", ["text", 7, [1, 2], np.zeros((4, 4))[:, ::2], None])
def test_what_is_no_run_of_bytes_is_refused(chunk: Any) -> None:
    with pytest.raises(DtypeMismatch, match="chunk"):
        bytes_of(chunk)


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match="main memory"):
        bytes_of(torch.empty(3, device="meta"))


def test_a_shard_is_head_and_tensors(tmp_path: Path) -> None:
    begin(tmp_path / "target", PLAN)
    for shard in PLAN.shards:
        record = write_shard(tmp_path / "target", shard, produce)
        data = (tmp_path / "target" / shard.file).read_bytes()
        assert data == shard.head() + b"".join(
            b"".join(produce(tensor)) for tensor in shard.tensors
        )
        assert record.sha256 == hashlib.sha256(data).hexdigest()
        assert record.nbytes == len(data)


def test_a_finished_shard_is_not_produced_again(tmp_path: Path) -> None:
    begin(tmp_path, PLAN)
    record = write_shard(tmp_path, PLAN.shards[0], produce)

    def never(_: PlannedTensor) -> Iterator[bytes]:
        raise AssertionError

    assert write_shard(tmp_path, PLAN.shards[0], never) == record
    with pytest.raises(AssertionError):
        write_shard(tmp_path, PLAN.shards[1], never)


@pytest.mark.parametrize(
    ("chunks", "told"),
    [([b"12"], "2'"), ([], "0'"), ([b"12", b"345"], "more"), ([b"12345678"], "more")],
)
def test_other_bytes_than_planned_are_refused(
    chunks: list[bytes], told: str, tmp_path: Path
) -> None:
    plan = WritePlan.from_tensors([PlannedTensor("the one", "U8", (4,))])
    begin(tmp_path, plan)
    before = tree(tmp_path)
    with pytest.raises(ShapeMismatch, match="the one") as caught:
        write_shard(tmp_path, plan.shards[0], lambda _: chunks)
    assert told in str(caught.value)
    assert tree(tmp_path) == before


class CountingDisk(Disk):
    largest = 0

    def write(self, descriptor: int, data: memoryview) -> None:
        self.largest = max(self.largest, data.nbytes)
        super().write(descriptor, data)


def test_large_chunks_are_written_by_pieces(tmp_path: Path) -> None:
    size = 2 * BUFFER_BYTES + 1
    plan = WritePlan.from_tensors([PlannedTensor("x", "U8", (size,))])
    begin(tmp_path, plan)
    disk = CountingDisk()
    data = memoryview(bytearray(size))
    record = write_shard(tmp_path, plan.shards[0], lambda _: [data], disk)
    assert disk.largest == BUFFER_BYTES
    assert record.tensors["x"] == hashlib.sha256(data).hexdigest()


def test_a_hollow_shard_has_a_true_head_and_no_data(tmp_path: Path) -> None:
    plan = WritePlan.from_tensors(
        [PlannedTensor("x", "BF16", (1 << 20, 1 << 10)), *PLAN.shards[0].tensors]
    )
    begin(tmp_path, plan, hollow=True)
    shard = plan.shards[0]
    record = write_hollow_shard(tmp_path, shard)
    path = tmp_path / shard.file
    assert path.stat().st_size == len(shard.head()) + shard.data_bytes == record.nbytes
    assert path.stat().st_blocks * 512 < 1 << 20
    with path.open("rb") as file:
        assert file.read(len(shard.head())) == shard.head()
    assert write_hollow_shard(tmp_path, shard) == record
    assert WriteJournal.join(tmp_path, plan.hash, Disk()).verified(shard) == record
