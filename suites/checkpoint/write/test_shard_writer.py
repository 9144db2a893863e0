from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.checkpoint.write.disk import Disk
from degarble.harness.checkpoint.write.manifest import WriteJournal
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import (
    BUFFER_BYTES,
    begin,
    bytes_of,
    write_hollow_shard,
    write_shard,
)
from degarble.suites.checkpoint.writing_cases import produce, small_plan, tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLAN = small_plan()


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
        assert data == shard.head() + b"".join(b"".join(produce(each)) for each in shard.tensors)
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
    plan = WritePlan.of([PlannedTensor("the one", "U8", (4,))])
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
    plan = WritePlan.of([PlannedTensor("x", "U8", (size,))])
    begin(tmp_path, plan)
    disk = CountingDisk()
    data = memoryview(bytearray(size))
    record = write_shard(tmp_path, plan.shards[0], lambda _: [data], disk)
    assert disk.largest == BUFFER_BYTES
    assert record.tensors["x"] == hashlib.sha256(data).hexdigest()


def test_a_hollow_shard_has_a_true_head_and_no_data(tmp_path: Path) -> None:
    plan = WritePlan.of([PlannedTensor("x", "BF16", (1 << 20, 1 << 10)), *PLAN.shards[0].tensors])
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
