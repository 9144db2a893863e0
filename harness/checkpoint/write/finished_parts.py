"""Keep the finished parts of a run in a folder until its result is written.

A run that is killed leaves the folder, and the same command goes on from there. Each part is a file
of its own, whole or absent. `plan.json` says what the parts depend on; those of anything else are
dropped. A part that cannot be read counts as not finished.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.version import VERSION
from degarble.harness.checkpoint.write.disk import (
    DISK,
    make_folders,
    refusing,
    remove_abandoned,
    write_file,
)
from degarble.harness.checkpoint.write.manifest import PLAN, read_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class FinishedParts:
    """Parts by name; names and parts are JSON."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self._plan = json.loads(_spelled({"version": VERSION, **facts}))
        self._begin()

    def read(self, name: object) -> Any:
        """Return a part that this run or an earlier one finished; None without one."""
        try:
            raw = read_object(self._path(name))
            text = _spelled(raw["part"])
        except (UnreadableFile, KeyError):
            return None
        whole = raw.get("name") == json.loads(_spelled(name)) and raw.get("sha256") == _hash(text)
        return raw["part"] if whole else None

    def add(self, name: object, part: object) -> None:
        """Keep a finished part; it is on the disk when this returns."""
        if not self.folder.exists():  # another run of the same command has ended
            self._begin()
        text = _spelled(part)
        kept = {"name": name, "part": part, "sha256": _hash(text)}
        write_file(self._path(name), _spelled(kept).encode(), DISK)

    def close(self) -> None:
        """Remove the folder: the result is written."""
        if self.folder.exists():
            remove_abandoned(self.folder, DISK)
            self._clear()
            with refusing(self.folder):
                DISK.remove_folder(self.folder)
            with suppress(OSError):  # others may have unfinished parts there
                DISK.remove_folder(self.folder.parent)

    def _begin(self) -> None:
        """Make the folder, or open what an earlier run left there."""
        make_folders(self.folder, DISK)
        remove_abandoned(self.folder, DISK)
        try:
            known: object = read_object(self.folder / PLAN)
        except UnreadableFile:
            known = None
        if known != self._plan:
            self._clear()
            write_file(self.folder / PLAN, _spelled(self._plan).encode(), DISK)

    def _clear(self) -> None:
        # The plan goes first: records without it are not read.
        with refusing(self.folder):
            for path in sorted(self.folder.glob("*.json"), key=lambda each: each.name != PLAN):
                DISK.remove(path)

    def _path(self, name: object) -> Path:
        return self.folder / f"{_hash(_spelled(name))[:32]}.json"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _spelled(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, allow_nan=False) + "\n"
