"""Read a checkpoint's folder and index, and compare the index with the shards' headers.

Reads `model.safetensors.index.json` (bounded, each key once) and reports missing shards, tensors in
two shards, tensors that only index or headers have, and shards that the index does not list. A
shard's name must be a plain file name: one with a separator, `..` or control characters could leave
the folder or hide, so its file is not opened. Pickled files are reported and never opened.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import Refused, UnreadableFile
from degarble.harness.base.input_files import read_small_file
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.safetensors_file import read_header
from degarble.harness.checkpoint.read.types import (
    LARGEST_INDEX,
    LARGEST_METADATA,
    MOST_TENSORS,
    Header,
    ProblemKind,
    Problems,
    TensorEntry,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill"})
_LONGEST_FILE_NAME = 255
_MOST_FILES = 100_000
_PLAIN_NAME = re.compile(rb'"([^"\\\x00-\x1f/]{1,255})"')


@dataclass(frozen=True)
class Index:
    """The content of one index file."""

    file: Path
    weight_map: Mapping[str, str]  # tensor to the name of its shard
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Folder:
    """The files of a checkpoint's folder, by use."""

    shards: tuple[Path, ...]
    indices: tuple[Path, ...]
    pickled: tuple[Path, ...]


def look_into(root: Path) -> Folder:
    """List a folder; nothing in it is opened."""
    shards, indices, pickled = [], [], []
    for path in _listed(root):
        if path.name.startswith("."):
            continue
        if path.name.endswith(_SUFFIX):
            shards.append(path)
        elif path.name.endswith(f"{_SUFFIX}.index.json"):
            indices.append(path)
        elif path.suffix in _PICKLED:
            pickled.append(path)
    return Folder(tuple(shards), tuple(indices), tuple(pickled))


def _listed(root: Path) -> list[Path]:
    found = []
    try:
        for path in root.iterdir():
            found.append(path)
            if len(found) > _MOST_FILES:
                raise UnreadableFile(
                    shown(str(root)),
                    f"more than {_MOST_FILES} files",
                    "the folder of one checkpoint",
                    "Point to the folder that holds its shards.",
                )
    except OSError as error:
        raise UnreadableFile(
            shown(str(root)),
            error.strerror,
            "the folder of a checkpoint, or one safetensors file",
            "Check the path and its permissions.",
        ) from error
    return sorted(found)


def unsafe_reason(name: object) -> str:
    """Return why a shard's name is unsafe; empty where it is safe."""
    if not isinstance(name, str) or not name.endswith(_SUFFIX):
        return f"it does not end with {_SUFFIX}"
    if "/" in name or "\\" in name or name.startswith("."):
        return "it is a path, or hidden, and no plain file name"
    if not name.isprintable():
        return "it has control characters"
    return "it is too long" if len(name.encode()) > _LONGEST_FILE_NAME else ""


def read_index(path: Path, problems: Problems) -> Index:
    """Read an index file; shards with unsafe names are reported and left out."""
    scan = ObjectScanner(read_small_file(path, LARGEST_INDEX), shown(str(path)))
    weight_map: dict[str, str] | None = None
    metadata: dict[str, Any] = {}
    for key in scan.members():
        if key == "weight_map":
            weight_map = _weight_map(scan, path, problems)
        else:
            value = scan.value(LARGEST_METADATA)
            if key == "metadata" and isinstance(value, dict):
                metadata = value
    scan.finish()
    if weight_map is None:
        scan.refuse("weight_map", "missing", "an object from tensor to shard")
    return Index(path, weight_map, metadata)


def _weight_map(scan: ObjectScanner, path: Path, problems: Problems) -> dict[str, str]:
    found: dict[str, str] = {}
    verdicts: dict[str, str] = {}
    for tensor in scan.members():
        if len(found) >= MOST_TENSORS:
            scan.refuse("tensor", tensor, f"at most {MOST_TENSORS} tensors")
        shard = sys.intern(scan.string())
        if shard not in verdicts:
            verdicts[shard] = unsafe_reason(shard)
        if verdicts[shard]:
            error = UnreadableFile(
                f"{shown(str(path))}: shard of tensor {shown(tensor)} at byte {scan.position}",
                shard,
                f"the name of a safetensors file in the same folder, but {verdicts[shard]}",
                "Do not open this checkpoint before you know who wrote its index.",
            )
            problems.report(ProblemKind.UNSAFE_NAME, path.name, tensor, error)
            continue
        found[tensor] = shard
    return found


def read_shards(
    root: Path, folder: Folder, index: Index | None, problems: Problems
) -> Iterator[Header]:
    """Read the headers of all shards: those that the index names, or all files without an index."""
    if index is None:
        paths = list(folder.shards)
    else:
        named = dict.fromkeys(index.weight_map.values())
        paths = sorted(root / name for name in named)
        for path in folder.shards:
            if path.name not in named:
                error = UnreadableFile(
                    shown(str(path)), "not named", f"a shard of {index.file.name}", "Remove it."
                )
                problems.report(ProblemKind.STRAY_SHARD, path.name, None, error)
    for path in paths:
        try:
            header = read_header(path)
        except Refused as error:
            problems.report(ProblemKind.UNREADABLE_SHARD, path.name, None, error)
            continue
        _report_link(root, path, problems)
        yield header


def _report_link(root: Path, path: Path, problems: Problems) -> None:
    """Report a link that leaves the checkpoint, unless a hub cache made it."""
    if not path.is_symlink():
        return
    target, home = path.resolve(), root.resolve()
    if not is_of_hub_cache(root, path) and not target.is_relative_to(home):
        error = UnreadableFile(
            shown(str(path)), str(target), f"a file inside {home}", "Check that it belongs there."
        )
        problems.report(ProblemKind.FOREIGN_LINK, path.name, None, error)


def is_of_hub_cache(root: Path, path: Path) -> bool:
    """Return whether the hub's cache made a link, so that the file it points to belongs here.

    huggingface_hub: <model>/snapshots/<revision>/<file> links to <model>/blobs/<hash>.
    """
    home = root.resolve()
    return home.parent.name == "snapshots" and path.resolve().parent == home.parent.parent / "blobs"


def gather(
    headers: list[Header], index: Index | None, problems: Problems
) -> dict[str, TensorEntry]:
    """Merge the tensors of all shards, and compare them with the index."""
    entries: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.entries.items():
            if name in entries:
                files = f"{entries[name].file.name} and {entry.file.name}"
                error = _disagreement(entry, files, "one shard a tensor")
                problems.report(ProblemKind.IN_TWO_SHARDS, entry.file.name, name, error)
                if index is None or index.weight_map.get(name) != entry.file.name:
                    continue
            entries[name] = entry
        if len(entries) > MOST_TENSORS:
            raise UnreadableFile(
                shown(str(header.file.parent)),
                f"more than {MOST_TENSORS} tensors",
                "a checkpoint of fewer",
                "This is no model that is known.",
            )
    if index is not None:
        _compare(entries, headers, index, problems)
    return entries


def _compare(
    entries: Mapping[str, TensorEntry], headers: list[Header], index: Index, problems: Problems
) -> None:
    readable = {header.file.name for header in headers}
    for name, entry in entries.items():
        stated = index.weight_map.get(name)
        if stated is None:
            error = _disagreement(entry, "not in the index", f"a line in {index.file.name}")
            problems.report(ProblemKind.NOT_IN_INDEX, entry.file.name, name, error)
        elif stated != entry.file.name:
            error = _disagreement(entry, entry.file.name, f"{shown(stated)}, as the index says")
            problems.report(ProblemKind.IN_OTHER_SHARD, entry.file.name, name, error)
    for name, shard in index.weight_map.items():
        if name not in entries and shard in readable:
            error = UnreadableFile(
                f"{shown(str(index.file))}: tensor {shown(name)}",
                shard,
                "a shard that holds it",
                "Download the shard and the index of one revision.",
            )
            problems.report(ProblemKind.NOT_IN_HEADER, shard, name, error)
    total = index.metadata.get("total_size")
    stored = sum(entry.nbytes for entry in entries.values())
    if total is not None and total != stored and not problems.counts:
        error = UnreadableFile(
            f"{shown(str(index.file))}: total_size",
            total,
            f"{stored}, the bytes of all tensors",
            "Write the index again.",
        )
        problems.report(ProblemKind.TOTAL_SIZE, index.file.name, None, error)


def _disagreement(entry: TensorEntry, found: str, expectation: str) -> UnreadableFile:
    return UnreadableFile(
        f"{shown(str(entry.file))}: tensor {shown(entry.name)} at byte {entry.begin}",
        found,
        expectation,
        "Download the shards and the index of one revision.",
    )
