"""Record the progress of an unfinished target: its plan and its finished shards.

The folder `degarble-unfinished` in the target holds `plan.json` (the plan in short, its sources,
and the version of degarble) and one record for each finished shard. A record is written after its
shard is durable, so a run that is killed at any moment loses at most the shards it was writing. The
folder is removed once the manifest is durable; until then no reader accepts the target.

Resuming with another plan, other sources or another version raises an error, and so does a target
folder that holds anything else.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import Refused, UnreadableFile, UnwritablePath
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.read.types import shown
from degarble.harness.checkpoint.write.disk import (
    make_folders,
    refusing,
    remove_abandoned,
    write_file,
)
from degarble.harness.checkpoint.write.manifest import (
    MANIFEST,
    SCHEMA,
    UNFINISHED,
    Manifest,
    ShardRecord,
    hash_of_file,
    read_object,
    record_from,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from degarble.harness.checkpoint.write.disk import Disk
    from degarble.harness.checkpoint.write.plan import ShardPlan, WritePlan

PLAN = "plan.json"
_NAMES = {"plan": "plan (keys of producers)", "version": "version of degarble"}


class Journal:
    """The progress of one target. `begin` it once; workers `join` it."""

    def __init__(self, target: Path, plan: str, disk: Disk, manifest: Manifest | None) -> None:
        self.target = target
        self.manifest = manifest
        self._plan = plan
        self._disk = disk

    @classmethod
    def begin(cls, target: Path, plan: WritePlan, disk: Disk, *, resume: bool = True) -> Journal:
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
        for each in (target, folder):
            remove_abandoned(each, disk)
        if not (folder / PLAN).exists():
            write_file(folder / PLAN, _spelled(ours), disk)
        return cls(target, plan.hash, disk, manifest)

    @classmethod
    def join(cls, target: Path, plan: str, disk: Disk) -> Journal:
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
            "Choose another target. Remove this one only if nobody needs it.",
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
