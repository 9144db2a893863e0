"""manifest.json: the content hashes of a finished target, and the mark of an unfinished one.

The content hash covers names, dtypes, shapes and bytes of all tensors, independent of shards. A
manifest holds no time and no machine, so two runs of one plan write the same one. Hashes are plain
SHA-256 of the bytes; a shard's equals the output of `sha256sum`. A shard of holes has none. The
folder `degarble-unfinished` marks a target that is still being written.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.input_files import read_small_file, regular_file
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.write.plan import WritePlan

MANIFEST = "manifest.json"
UNFINISHED = "degarble-unfinished"
SCHEMA = 1
_PIECE = 16 << 20
_REMEDY = "Write the checkpoint again, or remove the file to do without its hashes."


class ShardRecord(NamedTuple):
    """One finished shard. Hashes are None where it holds holes instead of data."""

    file: str
    nbytes: int
    sha256: str | None
    tensors: Mapping[str, str | None]

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON, without the file's name."""
        return {"bytes": self.nbytes, "sha256": self.sha256, "tensors": dict(self.tensors)}


class FileRecord(NamedTuple):
    """One file next to the shards."""

    nbytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileRecord:
        """Return the record of `data`."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """The plan, shards, files and hashes of a finished target."""

    plan: Mapping[str, Any]  # WritePlan.facts()
    content: str
    shards: Mapping[str, ShardRecord]
    files: Mapping[str, FileRecord]
    version: str = VERSION

    @classmethod
    def merge(
        cls, plan: WritePlan, records: Iterable[ShardRecord], files: Mapping[str, FileRecord]
    ) -> Manifest:
        """Merge the records of all shards, in any order."""
        found = {record.file: record for record in records}
        shards = {shard.file: found[shard.file] for shard in plan.shards}
        lines = (
            (tensor.name, tensor.dtype, tensor.shape, shards[shard.file].tensors[tensor.name])
            for shard in plan.shards
            for tensor in shard.tensors
        )
        return cls(plan.facts(), content_hash(lines), shards, dict(files))

    @property
    def hash(self) -> str:
        """The name of this checkpoint, under which a report's page is kept."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the manifest's JSON; the same content gives the same bytes."""
        raw = {
            "schema": SCHEMA,
            "tool": {"name": "degarble", "version": self.version},
            "plan": dict(self.plan),
            "content": self.content,
            "shards": {name: record.as_dict() for name, record in self.shards.items()},
            "files": {
                name: {"bytes": record.nbytes, "sha256": record.sha256}
                for name, record in sorted(self.files.items())
            },
        }
        return (json.dumps(raw, ensure_ascii=False, indent=1) + "\n").encode()

    @classmethod
    def read(cls, root: Path) -> Manifest:
        """Read the manifest of a folder."""
        path = root / MANIFEST
        raw = read_object(path)
        try:
            if raw["schema"] != SCHEMA:
                raise _no_manifest(path, f"schema {raw['schema']!r}")
            shards = {name: record_from(name, each) for name, each in raw["shards"].items()}
            files = {
                name: FileRecord(int(each["bytes"]), str(each["sha256"]))
                for name, each in raw["files"].items()
            }
            strange = next((name for name in (*shards, *files) if not is_inside(name)), None)
            if strange is not None:
                raise _no_manifest(path, f"file {strange!r}")
            plan, version = dict(raw["plan"]), str(raw["tool"]["version"])
            return cls(plan, str(raw["content"]), shards, files, version)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _no_manifest(path, f"{type(error).__name__}: {error}") from error

    def differences(self, root: Path) -> Iterator[str]:
        """Hash every file of the manifest again and list what differs. Reads everything."""
        for name, record in self.shards.items():
            yield from _difference(root / name, record.nbytes, record.sha256)
        for name, stated in self.files.items():
            yield from _difference(root / name, stated.nbytes, stated.sha256)


def record_from(file: str, raw: Mapping[str, Any]) -> ShardRecord:
    """Return the record of one shard from its JSON form."""
    tensors = {str(name): _hash_or_none(each) for name, each in raw["tensors"].items()}
    return ShardRecord(file, int(raw["bytes"]), _hash_or_none(raw["sha256"]), tensors)


def content_hash(
    tensors: Iterable[tuple[str, str, tuple[int, ...], str | None]],
) -> str:
    """Hash (name, dtype, shape, sha256) of all tensors; independent of order and of shards."""
    digest = hashlib.sha256()
    for name, dtype, shape, sha256 in sorted(tensors, key=lambda each: each[0]):
        line = [name, dtype, list(shape), sha256]
        digest.update(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def hash_of_file(path: Path) -> str:
    """Hash a regular file in pieces."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_PIECE))
    with regular_file(path) as (descriptor, _), open(descriptor, "rb", 0, closefd=False) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def is_inside(name: str) -> bool:
    """Return whether a file's name is a plain relative path that stays inside and is not hidden."""
    path = PurePosixPath(name)
    plain = name == str(path) and name.isprintable() and "\\" not in name
    hidden = any(part.startswith(".") for part in path.parts)
    return plain and not path.is_absolute() and bool(path.parts) and not hidden


def require_finished(root: Path) -> None:
    """Raise for a folder that is still being written, or whose writing was interrupted."""
    if (root / UNFINISHED).exists():
        raise UnreadableFile(
            shown(str(root)),
            f"unfinished: it holds {UNFINISHED}/",
            "a finished checkpoint",
            "Run the command that writes it again; it goes on where it ended.",
        )


def read_object(path: Path) -> dict[str, Any]:
    """Read one JSON object of bounded size, each key once."""
    scan = ObjectScanner(read_small_file(path, LARGEST_INDEX), shown(str(path)))
    found = scan.value(LARGEST_INDEX)
    scan.finish()
    if not isinstance(found, dict):
        scan.refuse("value", found, "a JSON object")
    return found


def _hash_or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _no_manifest(path: Path, found: str) -> UnreadableFile:
    return UnreadableFile(
        shown(str(path)), found, f"a manifest of degarble, schema {SCHEMA}", _REMEDY
    )


def _difference(path: Path, nbytes: int, sha256: str | None) -> Iterator[str]:
    try:
        status: os.stat_result = path.stat()
    except OSError as error:
        yield f"{path.name}: {error.strerror}"
        return
    if status.st_size != nbytes:
        yield f"{path.name}: {status.st_size} bytes instead of {nbytes}"
    elif sha256 is not None and (found := hash_of_file(path)) != sha256:
        yield f"{path.name}: sha256 {found} instead of {sha256}"
