"""Write and read one part of a capture: a safetensors file with an index in its header.

A part `part-000000.safetensors` is written under a temporary name, so a part under its own name is
whole, even after a kill. The index (steps and calls, JSON) is in the header's `__metadata__` with
its SHA-256. Any safetensors reader opens the tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.durable import sync_file, sync_folder
from degarble.harness.base.errors import UnwritablePath
from degarble.harness.base.input_files import read_span, regular_file
from degarble.harness.capture.files.types import (
    DTYPE_BYTES,
    FORMAT,
    VERSION,
    Call,
    Fields,
    Step,
    malformed,
    object_of,
)
from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

NAME = re.compile(r"part-(\d{6})\.safetensors")
_LENGTH_BYTES = 8
_LARGEST_HEAD = 100_000_000  # the format's own limit
_ALIGNED = 8


class Stored(NamedTuple):
    """One tensor of a part, with the offset of its bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Part:
    """Header of a part."""

    path: Path
    number: int
    head_sha256: str
    size: int
    tensors: dict[str, Stored]
    steps: tuple[Step, ...]
    calls: tuple[Call, ...]

    def read(self, name: str) -> bytearray:
        """Return the bytes of one tensor."""
        stored = self.tensors[name]
        with regular_file(self.path) as (descriptor, status):
            if status.st_size != self.size:  # before room is made for what is not there
                told = f"{self.path.name}: size"
                raise malformed(told, f"{status.st_size} bytes", f"{self.size}, as when opened")
            with open(descriptor, "rb", 0, closefd=False) as file:
                file.seek(stored.begin)
                data = bytearray(stored.end - stored.begin)
                left = memoryview(data)
                while left and (count := file.readinto(left)):
                    left = left[count:]
        if left:
            raise malformed(f"{self.path.name}: tensor {name}", "end of file", f"{len(data)} bytes")
        return data


def file_of(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:06}.safetensors"


def head_of(
    number: int,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    steps: Sequence[Step],
    calls: Sequence[Call],
) -> bytes:
    """Spell the head of a part: (name, dtype, shape) in the order of the data, and the index."""
    index = _spelled(
        {"steps": [each.to_json() for each in steps], "calls": [each.to_json() for each in calls]}
    )
    head: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "part": str(number),
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "index": index.decode(),
        }
    }
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = _spelled(head)
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_part(path: Path, head: bytes, datas: Iterable[memoryview]) -> None:
    """Write a part under a temporary name and rename it; `sync` makes it durable later."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb", buffering=0) as file:
            for data in (memoryview(head), *datas):
                left = data
                while left:
                    left = left[file.write(left) or 0 :]
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UnwritablePath(
            path.name, error.strerror or str(error), "room for the capture",
            "Make room, or capture less: see --layers, --components, --tokens, --statistics-only.",
        ) from error  # fmt: skip


def sync(folder: Path, files: Iterable[str]) -> None:
    """Return when the parts, and their names, are durable."""
    try:
        for file in files:
            sync_file(folder / file)
        sync_folder(folder)
    except OSError as error:
        raise UnwritablePath(
            str(folder), error.strerror or str(error), "a place that keeps what is written",
            "Choose another place.",
        ) from error  # fmt: skip


def read_part(path: Path) -> Part:
    """Read and check the head of a part; the data are not touched."""
    with regular_file(path) as (descriptor, status):
        size = status.st_size
        if size < _LENGTH_BYTES:
            raise malformed(f"{path.name}: size", f"{size} bytes", "a head and its data")
        length = int.from_bytes(read_span(path, descriptor, _LENGTH_BYTES, 0), "little")
        if not 0 < length <= min(_LARGEST_HEAD, size - _LENGTH_BYTES):
            raise malformed(f"{path.name}: length of the head", length, f"inside {size} bytes")
        text = read_span(path, descriptor, length, _LENGTH_BYTES)
    head_sha256 = hashlib.sha256(length.to_bytes(_LENGTH_BYTES, "little") + text).hexdigest()
    head = object_of(text, f"{path.name}: head")
    metadata = Fields(head.pop("__metadata__", None), f"{path.name}: __metadata__")
    number, steps, calls = _index(path, metadata)
    tensors = _tensors(path, head, _LENGTH_BYTES + length, size)
    return Part(path, number, head_sha256, size, tensors, steps, calls)


def _index(path: Path, metadata: Fields) -> tuple[int, tuple[Step, ...], tuple[Call, ...]]:
    found = [metadata.text(each) for each in ("format", "version", "part")]
    name = NAME.fullmatch(path.name)
    expected = [FORMAT, str(VERSION), str(int(name[1])) if name else ""]
    if found != expected:
        raise malformed(f"{path.name}: format, version and part", found, str(expected))
    index = metadata.text("index").encode()  # object_of refused lone surrogates
    if hashlib.sha256(index).hexdigest() != metadata.text("index_sha256"):
        raise malformed(f"{path.name}: index", "other bytes", "the bytes that were hashed")
    raw = object_of(index, f"{path.name}: index")
    steps, calls = raw.get("steps"), raw.get("calls")
    if not isinstance(steps, list) or not isinstance(calls, list):
        raise malformed(f"{path.name}: index", sorted(raw), "lists of steps and calls")
    return (
        int(found[2]),
        tuple(Step.of_json(each, f"{path.name}: step {n}") for n, each in enumerate(steps)),
        tuple(Call.of_json(each, f"{path.name}: call {n}") for n, each in enumerate(calls)),
    )


def _tensors(path: Path, head: dict[str, Any], begin: int, size: int) -> dict[str, Stored]:
    """Return the tensors in the order of their data, which must fill the file without a gap."""
    made, end = {}, 0
    for name, raw in head.items():
        told = f"{path.name}: tensor {visible(name[:200])}"
        taken = Fields(raw, told)
        dtype, shape, offsets = (
            taken.text("dtype"),
            taken.counts("shape"),
            taken.counts("data_offsets"),
        )
        nbytes = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
        if dtype not in DTYPE_BYTES or offsets != (end, end + nbytes):
            expectation = f"[{end}, {end + nbytes}], as {dtype} {list(shape)} has"
            raise malformed(told, list(offsets), expectation)
        made[name] = Stored(dtype, shape, begin + end, begin + end + nbytes)
        end += nbytes
    if begin + end != size:
        raise malformed(f"{path.name}: size", f"{size} bytes", f"{begin + end}, as its head says")
    return made


def _spelled(raw: object) -> bytes:
    return json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()
