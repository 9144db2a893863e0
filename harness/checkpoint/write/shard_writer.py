"""Write one shard from its plan and a producer, streamed to disk and hashed on the way.

`write_shard` runs for any shard of a plan, in any process or on any machine. Memory is one chunk of
the producer's; chunks larger than a buffer are written in pieces. A finished shard is only read
again. A producer that yields more or fewer bytes than planned raises an error with the tensor's
name, and the shard does not appear.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.write.disk import DISK, writing
from degarble.harness.checkpoint.write.journal import Journal
from degarble.harness.checkpoint.write.manifest import ShardRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.write.disk import Disk, Partial
    from degarble.harness.checkpoint.write.plan import PlannedTensor, ShardPlan

    Chunk = bytes | bytearray | memoryview | Tensor

BUFFER_BYTES = 16 << 20


class Producer(Protocol):
    """A source of the bytes of planned tensors; every call yields the same bytes.

    Tensors of one shard are requested in the plan's order, so what neighbours share may be kept.
    """

    def __call__(self, tensor: PlannedTensor, /) -> Iterable[Chunk]:
        """Yield the bytes of one tensor, in chunks of at most 64 MiB."""
        ...


class ShardSink:
    """A writer of one shard's tensors, in the plan's order."""

    def __init__(self, shard: ShardPlan, partial: Partial) -> None:
        self._shard = shard
        self._partial = partial
        self._digest = hashlib.sha256()
        self._hashes: dict[str, str | None] = {}
        self._nbytes = 0
        self._append(memoryview(shard.head()))

    @property
    def is_full(self) -> bool:
        """Whether every tensor of the shard was added."""
        return len(self._hashes) == len(self._shard.tensors)

    def add(self, tensor: PlannedTensor, chunks: Iterable[Chunk]) -> None:
        """Write the next tensor."""
        expected = self._shard.tensors[len(self._hashes)]
        assert tensor == expected, "tensors come in the plan's order"
        digest, left = hashlib.sha256(), tensor.nbytes
        for chunk in chunks:
            data = bytes_of(chunk)
            left -= data.nbytes
            if left < 0:
                break
            for begin in range(0, data.nbytes, BUFFER_BYTES):
                piece = data[begin : begin + BUFFER_BYTES]
                digest.update(piece)
                self._append(piece)
        if left:
            raise ShapeMismatch(
                f"bytes of tensor {shown(tensor.name)}",
                "more than planned" if left < 0 else f"{tensor.nbytes - left}",
                f"{tensor.nbytes}, as {tensor.dtype} {list(tensor.shape)} has",
                "Its producer is at fault; nothing was written under the shard's name.",
            )
        self._hashes[tensor.name] = digest.hexdigest()

    def record(self) -> ShardRecord:
        """Return the record of the written shard."""
        assert self.is_full, "a shard ends behind its last tensor"
        return ShardRecord(self._shard.file, self._nbytes, self._digest.hexdigest(), self._hashes)

    def _append(self, data: memoryview) -> None:
        self._partial.write(data)
        self._digest.update(data)
        self._nbytes += data.nbytes


def write_shard(
    target: Path, shard: ShardPlan, produce: Producer, disk: Disk = DISK
) -> ShardRecord:
    """Write one shard of a target that was begun; a finished one is only read again."""
    journal = Journal.join(target, shard.plan, disk)
    known = journal.verified(shard)
    if known is not None:
        return known
    with writing(target / shard.file, disk) as partial:
        sink = ShardSink(shard, partial)
        for tensor in shard.tensors:
            sink.add(tensor, produce(tensor))
        record = sink.record()
    journal.add(record)
    return record


def write_hollow_shard(target: Path, shard: ShardPlan, disk: Disk = DISK) -> ShardRecord:
    """Write a valid header, and holes for data: a file of full size that takes no room."""
    journal = Journal.join(target, shard.plan, disk)
    known = journal.recorded(shard)
    if known is not None:
        return known
    head = shard.head()
    nbytes = len(head) + shard.data_bytes
    with writing(target / shard.file, disk) as partial:
        partial.write(memoryview(head))
        partial.extend(nbytes)
    record = ShardRecord(shard.file, nbytes, None, {tensor.name: None for tensor in shard.tensors})
    journal.add(record)
    return record


def bytes_of(chunk: Any) -> memoryview:
    """View a chunk as bytes: anything with a buffer, or a tensor of any dtype in main memory."""
    if hasattr(chunk, "data_ptr"):
        chunk = _array_of(chunk)
    try:
        view = memoryview(chunk)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise DtypeMismatch(
            "chunk",
            type(chunk).__name__,
            "bytes without gaps, or a tensor",
            "Yield bytes, memoryviews, arrays or tensors in main memory.",
        ) from error


def _array_of(tensor: Tensor) -> Any:
    import torch  # noqa: PLC0415  copying bytes from file to file needs no torch

    if tensor.device.type != "cpu":
        raise DtypeMismatch(
            "chunk", tensor.device, "a tensor in main memory", "Copy it to the CPU first."
        )
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
