"""Record what a target holds: manifest.json when finished, plan and finished shards before that."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import Refused, UnreadableFile, UnwritablePath
from degarble.harness.base.files import read_small_file, regular_file
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import LARGEST_INDEX, shown
from degarble.harness.checkpoint.write.disk import (
    make_folders,
    refusing,
    remove_abandoned,
    write_file,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.write.disk import Disk
    from degarble.harness.checkpoint.write.plan import ShardPlan, WritePlan


# --------------------------------------------------------------------------------------------------
# manifest.json: the content hashes of a finished target, and the mark of an unfinished one.
#
# The content hash covers names, dtypes, shapes and bytes of all tensors, independent of shards. A
# manifest holds no time and no machine, so two runs of one plan write the same one. Hashes are
# plain SHA-256 of the bytes; a shard's equals the output of `sha256sum`. A shard of holes has none.
# The folder `degarble-unfinished` marks a target that is still being written.

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
    def from_bytes(cls, data: bytes) -> FileRecord:
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


# --------------------------------------------------------------------------------------------------
# The journal of an unfinished target. The folder `degarble-unfinished` in the target holds
# `plan.json` (the plan in short, its sources, and the version of degarble) and one record for each
# finished shard. A record is written after its shard is durable, so a run that is killed at any
# moment loses at most the shards it was writing. The folder is removed once the manifest is
# durable; until then no reader accepts the target.
#
# Resuming with another plan, other sources or another version raises an error, and so does a target
# folder that holds anything else.

PLAN = "plan.json"
_NAMES = {"plan": "plan (keys of producers)", "version": "version of degarble"}


class WriteJournal:
    """The progress of one target. `begin` it once; workers `join` it."""

    def __init__(self, target: Path, plan: str, disk: Disk, manifest: Manifest | None) -> None:
        self.target = target
        self.manifest = manifest
        self._plan = plan
        self._disk = disk

    @classmethod
    def begin(
        cls, target: Path, plan: WritePlan, disk: Disk, *, resume: bool = True
    ) -> WriteJournal:
        """Mark the target as unfinished, or open what an earlier run of this plan left there."""
        ours = {"schema": SCHEMA, "version": VERSION, **plan.facts()}
        manifest = _look_into(target, ours, resume=resume)
        if manifest and _is_whole(target, manifest):
            journal = cls(target, plan.hash, disk, manifest)
            if _is_marked(target):  # the run ended between its last file and the mark's removal
                journal.close()
            return journal
        folder = target / UNFINISHED
        make_folders(folder, disk)
        for path in (target, folder):
            remove_abandoned(path, disk)
        if not (folder / PLAN).exists():
            write_file(folder / PLAN, _spelled(ours), disk)
        return cls(target, plan.hash, disk, manifest)

    @classmethod
    def join(cls, target: Path, plan: str, disk: Disk) -> WriteJournal:
        """Open the journal of a target that was begun with this plan."""
        marker = target / UNFINISHED / PLAN
        manifest = Manifest.read(target) if (target / MANIFEST).exists() else None
        stated = _marked_plan(marker) or (manifest.plan if manifest else {})
        if stated.get("plan") != plan:
            raise UnwritablePath(
                shown(str(target)),
                f"plan {stated.get('plan')}",
                f"a target that was begun with plan {plan}",
                "Begin the target first, with the plan that the shard belongs to.",
            )
        return cls(target, plan, disk, manifest)

    @property
    def is_finished(self) -> bool:
        """Whether the target is complete already."""
        return self.manifest is not None and not _is_marked(self.target)

    def recorded(self, shard: ShardPlan) -> ShardRecord | None:
        """Return the record of a finished shard whose file has the recorded size."""
        record = self._record(shard.file)
        if record is None or record.tensors.keys() != {tensor.name for tensor in shard.tensors}:
            return None
        return record if _size(self.target / shard.file) == record.nbytes else None

    def verified(self, shard: ShardPlan) -> ShardRecord | None:
        """Return the record of a finished shard after hashing its file again.

        A changed shard of an unfinished target is written anew; in a finished target it raises.
        """
        record = self.recorded(shard)
        if record is None or record.sha256 is None:
            return record
        path = self.target / shard.file
        if hash_of_file(path) == record.sha256:
            return record
        if self.is_finished:
            raise UnwritablePath(
                shown(str(path)),
                "other bytes than its manifest says",
                "a finished shard as it was written",
                "Somebody changed it. Move it away and run again: it is written anew.",
            )
        return None

    def add(self, record: ShardRecord) -> None:
        """Record a shard; its file is durable already."""
        path = self._path(record.file)
        write_file(path, _spelled({"plan": self._plan, **record.as_dict()}), self._disk)

    def forget(self, files: Iterable[str]) -> None:
        """Mark shards as unfinished again, because they may hold bytes of two sources."""
        for file in files:
            with refusing(self._path(file)):
                self._disk.remove(self._path(file))

    def abandon(self, *, keep: bool) -> None:
        """Remove the mark of a target in which no shard was finished; otherwise change nothing.

        `keep`: the folder existed before, and stays.
        """
        folder = self.target / UNFINISHED
        with refusing(folder):
            for each in (self.target, folder):
                remove_abandoned(each, self._disk)
            names = {path.name for path in self.target.iterdir()}
            if names == {UNFINISHED} and not any(folder.glob("*.json.json")):
                for path in sorted(folder.iterdir(), key=lambda each: each.name == PLAN):
                    self._disk.remove(path)
                self._disk.remove_folder(folder)
                if not keep:
                    self._disk.remove_folder(self.target)

    def close(self) -> None:
        """Remove the mark and what workers left there. The manifest is durable already."""
        folder = self.target / UNFINISHED
        remove_abandoned(self.target, self._disk)
        with refusing(folder):
            # The plan goes last: a folder without it would not be known as ours.
            for path in sorted(folder.iterdir(), key=lambda each: (each.name == PLAN, each.name)):
                self._disk.remove(path)
            self._disk.remove_folder(folder)
            self._disk.sync_folder(self.target)

    def _path(self, file: str) -> Path:
        return self.target / UNFINISHED / f"{file}.json"

    def _record(self, file: str) -> ShardRecord | None:
        if self.manifest:
            return self.manifest.shards.get(file)
        try:
            raw = read_object(self._path(file))
            return record_from(file, raw) if raw["plan"] == self._plan else None
        except UnreadableFile:
            return None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def _look_into(target: Path, ours: Mapping[str, Any], *, resume: bool) -> Manifest | None:
    """Return the manifest of a finished run of this plan; raise for anything in the way."""
    with refusing(target):
        if not target.exists():
            return None
        names = sorted(path.name for path in target.iterdir())
    marked = _marked_plan(target / UNFINISHED / PLAN)
    begun = marked is not None
    if not begun and MANIFEST not in names:
        others = [name for name in names if name != UNFINISHED]
        if others:
            raise _in_the_way(target, f"holds {len(others)} other files, such as {others[0]}")
        return None
    if not resume:
        raise _in_the_way(target, "holds an unfinished output" if begun else "is finished already")
    if marked is not None:
        _require_same(target, marked, ours, "an unfinished output")
    if MANIFEST not in names:
        return None
    try:
        manifest = Manifest.read(target)
    except Refused as error:
        raise _in_the_way(target, f"holds a {MANIFEST} that is not ours: {error}") from error
    stated = {"schema": SCHEMA, "version": manifest.version, **manifest.plan}
    _require_same(target, stated, ours, "a finished checkpoint")
    return manifest


def _marked_plan(marker: Path) -> dict[str, Any] | None:
    """Return the plan that an unfinished target records, or None without a mark.

    Another run may remove the mark at any moment; then the result is None as well.
    """
    if not marker.exists():
        return None
    try:
        return read_object(marker)
    except UnreadableFile:
        if marker.exists():
            raise
        return None


def _require_same(
    target: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str
) -> None:
    """Raise with the first difference of two plans."""
    for name in ours:
        known, wanted = theirs.get(name), ours[name]
        if known == wanted:
            continue
        if isinstance(known, dict) and isinstance(wanted, dict):
            keys = sorted({*known, *wanted})
            key = next(key for key in keys if known.get(key) != wanted.get(key))
            name, known, wanted = f"{name}[{key}]", known.get(key), wanted.get(key)  # noqa: PLW2901  named to the point
        raise UnwritablePath(
            shown(str(target)),
            f"{what} {_with(_NAMES.get(name, name), known)}",
            f"a new folder, or one begun {_with(_NAMES.get(name, name), wanted)}",
            "Choose another target. Remove this one only if it is not needed.",
        )


def _with(name: str, value: object) -> str:
    return f"without {name}" if value is None else f"with {name} = {value}"


def _in_the_way(target: Path, found: str) -> UnwritablePath:
    return UnwritablePath(
        shown(str(target)), found, "a new or an empty folder", "Choose another target."
    )


def _is_marked(target: Path) -> bool:
    return (target / UNFINISHED).exists()


def _is_whole(target: Path, manifest: Manifest) -> bool:
    """Return whether every file of the manifest is there.

    Companion files count only while the target is marked. In a finished target the writer compares
    those that programs read; its owner may change the others.
    """
    sizes = {name: record.nbytes for name, record in manifest.shards.items()}
    if _is_marked(target):
        sizes |= {name: record.nbytes for name, record in manifest.files.items()}
    return all(_size(target / name) == nbytes for name, nbytes in sizes.items())


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _spelled(raw: Mapping[str, Any]) -> bytes:
    return (json.dumps(raw, ensure_ascii=False, sort_keys=True) + "\n").encode()
