"""Read a checkpoint's folder, its index and the headers of its shards, and trust none of them.

Every violation of the format raises UnreadableFile with file, tensor and byte offset.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from degarble.harness.base.errors import Refused, UnreadableFile
from degarble.harness.base.files import read_small_file, read_span, regular_file
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import (
    DTYPE_BITS,
    LARGEST_HEADER,
    LARGEST_INDEX,
    LARGEST_METADATA,
    LONGEST_ENTRY,
    MOST_DIMENSIONS,
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


# --------------------------------------------------------------------------------------------------
# Headers: everything that the format requires is checked. The header is at most 100 MB and inside
# the file, each key is there once, dtypes are known, integers are not negative, a tensor's size is
# the product of its extents, and the data fill the file without overlap or gap. A folder, pipe or
# device is never opened. Links are followed, because the cache of the Hugging Face hub is made of
# links; read_shards reports those that leave the checkpoint.
#
# Source: huggingface/safetensors README (format) and tensor.rs (its own checks), version 0.8.

_LENGTH_BYTES = 8
_LARGEST_COUNT = (1 << 63) - 1
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})

# 2^63 - 1 has 19 digits.
_INTEGER = rb"(?:0|[1-9][0-9]{0,18})"
# What every known writer emits; anything else that is JSON takes the slow way, to the same end.
_VALUE = (
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:%b(?:,%b)*+)?)\],"data_offsets":\[(%b),(%b)\]\}'
    % ((_INTEGER,) * 4)
)
_PLAIN_VALUE = re.compile(_VALUE)
# A comma, a name without escapes and its value: 300,000 follow one another.
_NAME = rb'"([^"\\\x00-\x1f]++)"'
_NEXT_TENSOR = re.compile(b"," + _NAME + b":" + _VALUE)
_BLANK = rb"[ \t\n\r]*+"
_NEXT_SHARD = re.compile(_BLANK.join((b"", b",", _NAME, b":", _NAME)))


def read_header(path: Path) -> Header:
    """Read and check the header of one file; its data are not touched."""
    with regular_file(path) as (descriptor, status):
        length = _header_length(path, descriptor, status.st_size)
        text = read_span(path, descriptor, length, _LENGTH_BYTES)
    data_begin = _LENGTH_BYTES + length
    parser = _HeaderParser(path, text, data_begin, status.st_size)
    header = Header(path, *parser.parse(), data_begin, status.st_size)
    _require_filled(header)
    return header


def _header_length(path: Path, descriptor: int, size: int) -> int:
    name = f"{shown(str(path))}: length of the header at byte 0"
    if size < _LENGTH_BYTES:
        raise UnreadableFile(name, f"{size} bytes in all", "8 bytes", "Download the file again.")
    length = int.from_bytes(read_span(path, descriptor, _LENGTH_BYTES, 0), "little")
    if length > LARGEST_HEADER:
        raise UnreadableFile(
            name, length, f"at most {LARGEST_HEADER}", "This is no safetensors file."
        )
    if length + _LENGTH_BYTES > size:
        raise UnreadableFile(
            name,
            length,
            f"at most {size - _LENGTH_BYTES}, what the file holds",
            "The file is cut off inside its header; download it again.",
        )
    return length


class _HeaderParser:
    """A parser from the text of one header to checked entries."""

    def __init__(self, path: Path, text: bytes, data_begin: int, file_size: int) -> None:
        self._path = path
        self._text = text
        self._data_begin = data_begin
        self._data_size = file_size - data_begin
        self._scan = ObjectScanner(text, shown(str(path)), _LENGTH_BYTES)
        self._sound: dict[tuple[bytes, bytes], tuple[str, tuple[int, ...], int]] = {}

    def parse(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """Return entries in the header's order, and the metadata."""
        scan = self._scan
        # The format allows no blanks before the object.
        if self._text[:1] != b"{":
            scan.refuse("header", self._text[:40], "an object that begins at once")
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        seen: set[str] = set()
        for name in scan.members(seen):
            if name == _METADATA:
                metadata = self._metadata()
            elif len(entries) >= MOST_TENSORS:
                scan.refuse("tensor", name, f"at most {MOST_TENSORS} tensors")
            else:
                entries[name] = self._entry(name)
            self._like_others(entries, seen)
        scan.finish()
        return entries, metadata

    def _like_others(self, entries: dict[str, TensorEntry], seen: set[str]) -> None:
        """Read on while tensors have a shape and dtype that were found sound, and nothing is odd.

        What is odd is left to who asks for the next name.
        """
        text, position, most = self._text, self._scan.position, MOST_TENSORS - len(entries)
        path, first, size = self._path, self._data_begin, self._data_size
        while most and (found := _NEXT_TENSOR.match(text, position, position + LONGEST_ENTRY)):
            quoted, dtype, extents, *offsets = found.groups()
            like = self._sound.get((dtype, extents))
            begin, end = map(int, offsets)
            if like is None or end - begin != like[2] or end > size:
                break
            try:
                name = quoted.decode()
            except UnicodeDecodeError:
                break
            if name in seen or name == _METADATA:
                break
            seen.add(name)
            entries[name] = TensorEntry(name, like[0], like[1], path, first + begin, first + end)
            position, most = found.end(), most - 1
        self._scan.position = position

    def _metadata(self) -> dict[str, str]:
        found = self._scan.value(LARGEST_METADATA)
        texts = isinstance(found, dict) and all(isinstance(each, str) for each in found.values())
        if not texts:
            self._scan.refuse(_METADATA, found, "an object of texts")
        return dict(found)

    def _entry(self, name: str) -> TensorEntry:
        match = _PLAIN_VALUE.match(
            self._text, self._scan.position, self._scan.position + LONGEST_ENTRY
        )
        if match is None:
            dtype, shape, begin, end = self._any_value(name)
        else:
            self._scan.position = match.end()
            dtype = match[1].decode()
            shape = tuple(map(int, match[2].split(b","))) if match[2] else ()
            begin, end = int(match[3]), int(match[4])
        self._require_sound(name, dtype, shape, begin, end)
        dtype, first = sys.intern(dtype), self._data_begin
        if match is not None:
            # A few dozen shapes and dtypes serve 300,000 tensors: hold each of them once.
            like = self._sound.setdefault((match[1], match[2]), (dtype, shape, end - begin))
            shape = like[1]
        return TensorEntry(name, dtype, shape, self._path, first + begin, first + end)

    def _any_value(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        found = self._scan.value()
        if not isinstance(found, dict) or found.keys() != _KEYS:
            self._refuse(name, found, "an object of dtype, shape and data_offsets")
        shape, offsets = found["shape"], found["data_offsets"]
        if not isinstance(found["dtype"], str):
            self._refuse(name, found["dtype"], "a dtype by name")
        if not _are_counts(shape):
            self._refuse(name, shape, "extents that are integers and not negative")
        if not _are_counts(offsets) or len(offsets) != 2:
            self._refuse(name, offsets, "two offsets that are integers and not negative")
        return found["dtype"], tuple(shape), offsets[0], offsets[1]

    def _require_sound(
        self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int
    ) -> None:
        """Raise for a tensor that contradicts itself or leaves the file."""
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            self._refuse(name, dtype, f"a dtype of safetensors: {', '.join(DTYPE_BITS)}")
        if len(shape) > MOST_DIMENSIONS:
            self._refuse(name, f"{len(shape)} dimensions", f"at most {MOST_DIMENSIONS}")
        total = bits
        for extent in shape:
            total *= extent
            if total > _LARGEST_COUNT:
                self._refuse(name, shape, "extents whose product is below 2^63 bits")
        if total % 8:
            self._refuse(name, f"{dtype} {shape}", "whole bytes")
        if not begin <= end <= self._data_size:
            limit = f"begin <= end <= {self._data_size}, the bytes after the header"
            self._refuse(name, f"data_offsets [{begin}, {end}]", limit)
        if end - begin != total // 8:
            text = f"{total // 8} bytes, as {dtype} {list(shape)} has"
            self._refuse(name, f"data_offsets [{begin}, {end}]: {end - begin} bytes", text)

    def _refuse(self, name: str, value: object, expectation: str) -> NoReturn:
        self._scan.refuse(f"tensor {shown(name)}", value, expectation)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _require_filled(header: Header) -> None:
    """Raise for data that overlap, leave gaps, or do not reach the end of the file."""
    position, before = header.data_begin, "the header"
    for entry in sorted(
        header.entries.values(), key=lambda tensor_entry: (tensor_entry.begin, tensor_entry.end)
    ):
        if entry.begin != position:
            fault = "overlaps" if entry.begin < position else "leaves a gap after"
            raise UnreadableFile(
                f"{shown(str(header.file))}: tensor {shown(entry.name)} at byte {entry.begin}",
                f"{fault} {shown(before)}",
                f"data that begin at byte {position}",
                "Its writer is at fault; write the file again.",
            )
        position, before = entry.end, entry.name
    if position != header.file_size:
        raise UnreadableFile(
            f"{shown(str(header.file))} at byte {position}",
            f"{header.file_size - position} bytes that belong to no tensor",
            "the end of the file",
            "Its writer is at fault, or the file was appended to; write it again.",
        )


# --------------------------------------------------------------------------------------------------
# Folder and index: `model.safetensors.index.json` is bounded and has each key once. Reported are
# missing shards, tensors in two shards, tensors that only index or headers have, and shards that
# the index does not list. A shard's name must be a plain file name: one with a separator, `..` or
# control characters could leave the folder or hide, so its file is not opened. Pickled files are
# reported and never opened.

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill"})
_LONGEST_FILE_NAME = 255
_MOST_FILES = 100_000


@dataclass(frozen=True)
class CheckpointIndex:
    """The content of one index file."""

    file: Path
    weight_map: Mapping[str, str]  # tensor to the name of its shard
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointFolder:
    """The files of a checkpoint's folder, by use."""

    shards: tuple[Path, ...]
    indices: tuple[Path, ...]
    pickled: tuple[Path, ...]


def list_folder(root: Path) -> CheckpointFolder:
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
    return CheckpointFolder(tuple(shards), tuple(indices), tuple(pickled))


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


def read_index(path: Path, problems: Problems) -> CheckpointIndex:
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
    return CheckpointIndex(path, weight_map, metadata)


def _weight_map(scan: ObjectScanner, path: Path, problems: Problems) -> dict[str, str]:
    found: dict[str, str] = {}
    verdicts: dict[str, str] = {}
    seen: set[str] = set()
    safe: dict[bytes, str] = {}
    for tensor in scan.members(seen):
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
        safe[shard.encode()] = found[tensor] = shard
        _like_others(scan, safe, found, seen)
    return found


def _like_others(
    scan: ObjectScanner, safe: Mapping[bytes, str], found: dict[str, str], seen: set[str]
) -> None:
    """Read on while tensors lie in shards whose names are known to be safe, and nothing is odd."""
    data, position, most = scan.data, scan.position, MOST_TENSORS - len(found)
    while most and (match := _NEXT_SHARD.match(data, position, position + LONGEST_ENTRY)):
        shard = safe.get(match[2])
        try:
            tensor = match[1].decode()
        except UnicodeDecodeError:
            break
        if shard is None or tensor in seen:
            break
        seen.add(tensor)
        found[tensor] = shard
        position, most = match.end(), most - 1
    scan.position = position


def read_shards(
    root: Path, folder: CheckpointFolder, index: CheckpointIndex | None, problems: Problems
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
    headers: list[Header], index: CheckpointIndex | None, problems: Problems
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
    entries: Mapping[str, TensorEntry],
    headers: list[Header],
    index: CheckpointIndex,
    problems: Problems,
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
