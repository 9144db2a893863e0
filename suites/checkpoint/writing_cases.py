"""A small checkpoint to write: plan, producer, ending, and what a target must look like meanwhile.

Imports neither torch nor numpy, so that hundreds of processes can start from it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.write.disk import DISK, PARTIAL_SUFFIX
from degarble.harness.checkpoint.write.manifest import MANIFEST, UNFINISHED
from degarble.harness.checkpoint.write.plan import PlannedTensor, WritePlan
from degarble.harness.checkpoint.write.writer import (
    CONFIG,
    CompanionFiles,
    ShardedWriter,
    begin,
    finish,
    write_shard,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from degarble.harness.checkpoint.write.disk import Disk

ENDING = CompanionFiles(
    {CONFIG: b'{"model_type": "none"}', "tokenizer.json": b"{}", "inference/model.py": b"# none\n"},
    {"total_parameters": 12},
)


def small_plan(seed: str = "1") -> WritePlan:
    """Plan twelve tensors in six shards; the fifth shard holds a tensor without elements."""
    tensors = [
        PlannedTensor(f"layers.{i}.weight", dtype, (0 if i == 9 else 30 + i, 8), f"pair {i // 2}")
        for i, dtype in enumerate(["U8", "BF16", "F32", "F8_E4M3"] * 3)
    ]
    return WritePlan.from_tensors(tensors, shard_bytes=1300, sources={"seed": seed})


def produce(tensor: PlannedTensor) -> Iterator[bytes]:
    """Yield bytes that follow from the tensor's name, in pieces of 100."""
    data = hashlib.shake_128(tensor.name.encode()).digest(tensor.nbytes)
    for begin_ in range(0, len(data), 100):
        yield data[begin_ : begin_ + 100]


def produce_or_die(tensor: PlannedTensor) -> Iterator[bytes]:
    """Produce; at the tensor that the environment names, die as if memory had run out."""
    if tensor.name == os.environ.get("DEGARBLE_SUITE_DIES_AT"):
        os.kill(os.getpid(), signal.SIGKILL)
    yield from produce(tensor)


def write_all(target: Path, plan: WritePlan, disk: Disk = DISK) -> None:
    """Write the small checkpoint, every operation on the given disk."""
    begin(target, plan, disk=disk)
    for shard in plan.shards:
        write_shard(target, shard, produce, disk)
    finish(target, plan, ENDING, disk)


def write_one_by_one(target: Path, plan: WritePlan, disk: Disk = DISK) -> None:
    """Write the same, tensor by tensor."""
    with ShardedWriter(target, plan, disk=disk) as writer:
        for shard in plan.shards:
            for tensor in shard.tensors:
                writer.add(tensor.name, tensor.dtype, tensor.shape, produce(tensor))
        writer.finish(ENDING)


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its path there."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def broken_promises(root: Path, whole: dict[str, bytes]) -> list[str]:
    """List what an unfinished target must never show; `whole` is how it will end."""
    found = tree(root)
    broken = [
        f"{name} appeared with other bytes"
        for name, data in found.items()
        if name in whole and whole[name] != data
    ]
    temporary = [name for name in found if name.endswith(PARTIAL_SUFFIX)]
    journal = [name for name in found if name.startswith(UNFINISHED)]
    strange = found.keys() - whole.keys() - set(temporary) - set(journal)
    broken += [f"{name} is a stranger" for name in strange]
    missing = whole.keys() - found.keys()
    if MANIFEST in found and missing - {CONFIG}:
        broken.append(f"{MANIFEST} appeared before {sorted(missing - {CONFIG})}")
    if CONFIG in found and missing:
        broken.append(f"{CONFIG} appeared before {sorted(missing)}")
    if missing and found and not (root / UNFINISHED).is_dir():
        broken.append("unfinished without its mark")
    broken += [
        f"{shard} is recorded, but missing"
        for shard in (Path(name).stem for name in journal if name.endswith(".safetensors.json"))
        if shard not in found
    ]
    return broken


@contextmanager
def quick_folder() -> Iterator[Path]:
    """Make a folder in memory, where fsync costs nothing, or wherever temporary files lie."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if usable else None) as folder:
        yield Path(folder)
