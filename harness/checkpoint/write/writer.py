"""Write a checkpoint that is never half-written: begin, shards, finish."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    Refused,
    ShapeMismatch,
    UnwritablePath,
    WorkerLost,
)
from degarble.harness.base.files import read_small_file
from degarble.harness.checkpoint.read.safetensors_files import INDEX_NAME
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, shown
from degarble.harness.checkpoint.write.disk import (
    DISK,
    Partial,
    make_folders,
    refusing,
    remove_abandoned,
    require_space,
    write_file,
    writing,
)
from degarble.harness.checkpoint.write.manifest import (
    MANIFEST,
    UNFINISHED,
    FileRecord,
    Manifest,
    ShardRecord,
    WriteJournal,
    is_inside,
)
from degarble.harness.checkpoint.write.workers import run_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.read.file_access import SourceState
    from degarble.harness.checkpoint.write.disk import Disk
    from degarble.harness.checkpoint.write.plan import PlannedTensor, ShardPlan, WritePlan
    from degarble.harness.checkpoint.write.workers import Workers


# --------------------------------------------------------------------------------------------------
# One shard, streamed to disk and hashed on the way. `write_shard` runs for any shard of a plan, in
# any process or on any machine. Memory is one chunk of the producer's; chunks larger than a buffer
# are written in pieces. A finished shard is only read again. A producer that yields more or fewer
# bytes than planned raises an error with the tensor's name, and the shard does not appear.

if TYPE_CHECKING:
    Chunk = bytes | bytearray | memoryview | Tensor

BUFFER_BYTES = 16 << 20


class TensorProducer(Protocol):
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
        assert self.is_full, "a shard ends after its last tensor"
        return ShardRecord(self._shard.file, self._nbytes, self._digest.hexdigest(), self._hashes)

    def _append(self, data: memoryview) -> None:
        self._partial.write(data)
        self._digest.update(data)
        self._nbytes += data.nbytes


def write_shard(
    target: Path, shard: ShardPlan, produce: TensorProducer, disk: Disk = DISK
) -> ShardRecord:
    """Write one shard of a target that was begun; a finished one is only read again."""
    journal = WriteJournal.join(target, shard.plan, disk)
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
    journal = WriteJournal.join(target, shard.plan, disk)
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


# --------------------------------------------------------------------------------------------------
# The whole checkpoint. `begin` marks the target and checks what could fail. Shards appear one by
# one, each whole. `finish` writes the companion files, the index, the manifest and last
# config.json, without which no engine loads the folder; then the mark is removed. After an
# interruption at any moment the same call resumes and yields the same bytes.
#
# `write` does all of it, with one process or several. `ShardedWriter` takes tensors one by one, in
# the plan's order. A cluster calls `begin`, `write_shard` for each shard, `finish`.

CONFIG = "config.json"
# Index and manifest name each tensor once: name, shard and hash stay below this.
_BYTES_OF_A_LINE = 512


@dataclass(frozen=True)
class CompanionFiles:
    """The files to write next to the shards, by name, and entries of the index's metadata."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    index_metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.files:
            taken = name in (INDEX_NAME, MANIFEST) or name.endswith(".safetensors")
            if taken or not is_inside(name) or name.startswith(f"{UNFINISHED}/"):
                raise InvalidArgument(
                    "file next to the shards",
                    name,
                    "a relative path inside the target that nothing else has",
                    "Rename it.",
                )


def write(
    target: Path,
    plan: WritePlan,
    produce: TensorProducer | None,
    ending: CompanionFiles | None = None,
    *,
    workers: Workers = 1,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
) -> Manifest:
    """Write a whole checkpoint, or resume one. Without a producer its shards are holes.

    With several workers the producer is pickled to other processes, so it must be importable there.
    """
    work = partial(_write_one, target, produce)
    with beginning(target, plan, hollow=produce is None):
        make_shards(target, plan, work, workers, progress=progress)
    return finish(target, plan, ending)


@contextmanager
def beginning(target: Path, plan: WritePlan, *, hollow: bool = False) -> Iterator[None]:
    """Begin a target; remove its mark if the source is rejected before the first shard is finished.

    A full disk or a lost worker does not reject the source: the same call resumes.
    """
    keep = target.exists()
    journal = begin(target, plan, hollow=hollow)
    try:
        yield
    except (UnwritablePath, WorkerLost):
        raise
    except Refused:
        if not journal.is_finished:
            journal.abandon(keep=keep)
        raise


def make_shards(
    target: Path,
    plan: WritePlan,
    work: Callable[[ShardPlan], ShardRecord],
    workers: Workers,
    *,
    source: SourceState | None = None,
    progress: Callable[[ShardPlan, ShardRecord], None] | None = None,
) -> None:
    """Write every shard of a target that was begun; the source must not change meanwhile.

    Shards that may hold bytes of two sources are forgotten, so that the next run writes them anew.
    """
    unproven = {shard.file for shard in plan.shards}
    try:
        for shard, record in run_each(work, plan.shards, workers, "shard {0.file}".format):
            if source is not None:
                source.require_unchanged()
            unproven.discard(shard.file)
            if progress:
                progress(shard, record)
    except Refused:
        if source is not None and not source.is_unchanged:
            WriteJournal.join(target, plan.hash, DISK).forget(unproven)
        raise


def begin(
    target: Path,
    plan: WritePlan,
    *,
    resume: bool = True,
    hollow: bool = False,
    disk: Disk = DISK,
) -> WriteJournal:
    """Make or open the target, check for space, and mark it as unfinished."""
    if not target.exists():
        _require_room(target, plan.shards, hollow=hollow)
    journal = WriteJournal.begin(target, plan, disk, resume=resume)
    if not journal.is_finished:
        missing = [shard for shard in plan.shards if journal.recorded(shard) is None]
        _require_room(target, missing, hollow=hollow)
    return journal


def finish(
    target: Path, plan: WritePlan, ending: CompanionFiles | None = None, disk: Disk = DISK
) -> Manifest:
    """Write the files next to the shards, and declare the checkpoint complete."""
    ending = ending or CompanionFiles()
    journal = WriteJournal.join(target, plan.hash, disk)
    records = []
    for shard in plan.shards:
        record = journal.recorded(shard)
        if record is None:
            raise UnwritablePath(
                shown(str(target / shard.file)),
                "not written",
                "every shard of the plan",
                "Write it with write_shard, then finish again.",
            )
        records.append(record)
    files = {**ending.files, INDEX_NAME: _index(plan, ending.index_metadata)}
    manifest = Manifest.merge(
        plan, records, {name: FileRecord.from_bytes(data) for name, data in files.items()}
    )
    if journal.is_finished:
        _require_equal(target, manifest, journal.manifest)
        for name in sorted(files, key=lambda each: (each == CONFIG, each)):
            if name.endswith(".json"):  # programs read it: what a checkpoint says of itself
                _put(target, name, files[name], disk)
        return manifest
    last = files.pop(CONFIG, None)
    for name in sorted(files, key=lambda each: (each == INDEX_NAME, each)):
        _put(target, name, files[name], disk)
    _put(target, MANIFEST, manifest.to_bytes(), disk)
    # Engines accept a folder once it has config.json, so this file is the last one.
    if last is not None:
        _put(target, CONFIG, last, disk)
    journal.close()
    return manifest


class ShardedWriter:
    """A writer that takes the tensors of a plan in order, one at a time; use it as a context.

    Tensors of shards that an earlier run finished are skipped; their chunks are not requested.
    """

    def __init__(
        self, target: Path, plan: WritePlan, *, resume: bool = True, disk: Disk = DISK
    ) -> None:
        self._target = target
        self._plan = plan
        self._disk = disk
        self._journal = begin(target, plan, resume=resume, disk=disk)
        self._coming = iter([(shard, tensor) for shard in plan.shards for tensor in shard.tensors])
        self._next = next(self._coming, None)
        self._shard: ShardPlan | None = None
        self._partial: Partial | None = None  # None within a shard that is finished already
        self._sink: ShardSink | None = None
        self._ended = False

    def wants(self, name: str) -> bool:
        """Return whether the next tensor, which must be `name`, will be written (or skipped)."""
        shard, tensor = self._expected(name)
        if tensor.name != name:
            raise InvalidArgument(
                "next tensor", shown(name), shown(tensor.name), "Add tensors in the plan's order."
            )
        if self._shard is not shard:
            self._enter(shard)
        return self._sink is not None

    def add(self, name: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> None:
        """Write the next tensor of the plan."""
        self.wants(name)
        shard, tensor = self._expected(name)
        if (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
            raise InvalidArgument(
                f"tensor {shown(name)}",
                f"{dtype} {tuple(shape)}",
                f"{tensor.dtype} {tensor.shape}, as planned",
                "Plan what is written.",
            )
        if self._sink:
            with self._guarded(shard):
                self._sink.add(tensor, chunks)
                if self._sink.is_full:
                    self._leave()
        self._next = next(self._coming, None)

    def finish(self, ending: CompanionFiles | None = None) -> Manifest:
        """Declare the checkpoint complete."""
        if self._next is not None:
            raise InvalidArgument(
                "tensors",
                f"end before {shown(self._next[1].name)}",
                f"all {self._plan.tensors} of the plan",
                "Add the rest, then finish.",
            )
        return finish(self._target, self._plan, ending, self._disk)

    def close(self) -> None:
        """Keep finished shards and remove an unfinished one."""
        self._ended = True
        self._sink, partial = None, self._partial
        self._partial = None
        if partial:
            partial.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expected(self, name: str) -> tuple[ShardPlan, PlannedTensor]:
        if self._ended or self._next is None:
            raise InvalidArgument(
                f"tensor {shown(name)}",
                "added after the end" if self._next is None else "added after an error",
                "a writer that still expects tensors",
                "Make a new writer: it resumes after the finished shards.",
            )
        return self._next

    def _enter(self, shard: ShardPlan) -> None:
        """Open the next shard, unless it is finished."""
        self._shard = shard
        if self._journal.verified(shard) is None:
            with self._guarded(shard):
                self._partial = Partial(self._target / shard.file, self._disk)
                self._sink = ShardSink(shard, self._partial)

    def _leave(self) -> None:
        """Give the shard its final name, then record it."""
        assert self._sink
        assert self._partial
        self._partial.commit()
        self._partial = None
        self._journal.add(self._sink.record())
        self._sink = None

    @contextmanager
    def _guarded(self, shard: ShardPlan) -> Iterator[None]:
        with refusing(self._target / shard.file):
            try:
                yield
            except BaseException:
                self.close()
                raise


def _write_one(target: Path, produce: TensorProducer | None, shard: ShardPlan) -> ShardRecord:
    if produce is None:
        return write_hollow_shard(target, shard)
    return write_shard(target, shard, produce)


def _require_room(target: Path, shards: Iterable[ShardPlan], *, hollow: bool) -> None:
    lines = data = 0
    for shard in shards:
        lines += len(shard.tensors)
        data += 0 if hollow else shard.data_bytes
    require_space(target, data + lines * _BYTES_OF_A_LINE)


def _index(plan: WritePlan, metadata: Mapping[str, Any]) -> bytes:
    """Return the content of model.safetensors.index.json."""
    raw = {
        "metadata": {**metadata, "total_size": plan.data_bytes},
        "weight_map": {
            tensor.name: shard.file
            for shard in sorted(plan.shards, key=lambda shard_plan: shard_plan.number)
            for tensor in shard.tensors
        },
    }
    return (json.dumps(raw, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode()


def _put(target: Path, name: str, data: bytes, disk: Disk) -> None:
    """Write a missing file; an existing one with other bytes stays and raises."""
    path = target / name
    if path.parent.is_dir():
        remove_abandoned(path.parent, disk)
    if not path.exists():
        make_folders(path.parent, disk)
        write_file(path, data, disk)
    elif read_small_file(path, max(LARGEST_INDEX, len(data))) != data:
        raise UnwritablePath(
            shown(str(path)),
            "there already, with other content",
            "no file, or the same one",
            "Move it away and run again.",
        )


def _require_equal(target: Path, ours: Manifest, theirs: Manifest | None) -> None:
    """Raise where a finished target has other companion files than this run would write."""
    assert theirs is not None
    for name in sorted({*ours.files, *theirs.files}):
        if ours.files.get(name) != theirs.files.get(name):
            raise UnwritablePath(
                shown(str(target)),
                f"a finished checkpoint with another {name}",
                "a new folder, or one that is finished with the same files",
                "Choose another target.",
            )
