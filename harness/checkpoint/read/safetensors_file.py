"""Parse a safetensors header without trusting it, and check it against the file.

Checks everything that the format requires: the length of the header (at most 100 MB, inside the
file), each key once, known dtypes, integers that are not negative, extents whose product is the
tensor's size, and data that fill the file without overlap or gap. Every violation raises
UnreadableFile with file, tensor and byte offset. A folder, pipe or device is never opened. Links
are followed, because the cache of the Hugging Face hub is made of links (index.py reports those
that leave the checkpoint).

Source: huggingface/safetensors README (format) and tensor.rs (its own checks), version 0.8.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, NoReturn

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.base.input_files import read_span, regular_file
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.types import (
    DTYPE_BITS,
    LARGEST_HEADER,
    LARGEST_METADATA,
    LONGEST_ENTRY,
    MOST_DIMENSIONS,
    MOST_TENSORS,
    Header,
    TensorEntry,
    shown,
)

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH_BYTES = 8
_LARGEST_COUNT = (1 << 63) - 1
_METADATA = "__metadata__"
_KEYS = frozenset({"dtype", "shape", "data_offsets"})

# 2^63 - 1 has 19 digits.
_INTEGER = rb"(?:0|[1-9][0-9]{0,18})"
# What every known writer emits; anything else that is JSON takes the slow way, to the same end.
_PLAIN_VALUE = re.compile(
    rb'\{"dtype":"([A-Z0-9_]{1,16})","shape":\[((?:%b(?:,%b)*+)?)\],"data_offsets":\[(%b),(%b)\]\}'
    % ((_INTEGER,) * 4)
)


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
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def parse(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        """Return entries in the header's order, and the metadata."""
        scan = self._scan
        # The format allows no blanks before the object.
        if self._text[:1] != b"{":
            scan.refuse("header", self._text[:40], "an object that begins at once")
        entries: dict[str, TensorEntry] = {}
        metadata: dict[str, str] = {}
        for name in scan.members():
            if name == _METADATA:
                metadata = self._metadata()
                continue
            if len(entries) >= MOST_TENSORS:
                scan.refuse("tensor", name, f"at most {MOST_TENSORS} tensors")
            entries[name] = self._entry(name)
        scan.finish()
        return entries, metadata

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
        # A few dozen shapes and dtypes serve 300,000 tensors: hold each of them once.
        shape = self._shapes.setdefault(shape, shape)
        first = self._data_begin
        return TensorEntry(name, sys.intern(dtype), shape, self._path, first + begin, first + end)

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
            limit = f"begin <= end <= {self._data_size}, the bytes behind the header"
            self._refuse(name, f"data_offsets [{begin}, {end}]", limit)
        if end - begin != total // 8:
            told = f"{total // 8} bytes, as {dtype} {list(shape)} has"
            self._refuse(name, f"data_offsets [{begin}, {end}]: {end - begin} bytes", told)

    def _refuse(self, name: str, value: object, expectation: str) -> NoReturn:
        self._scan.refuse(f"tensor {shown(name)}", value, expectation)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _require_filled(header: Header) -> None:
    """Raise for data that overlap, leave gaps, or do not reach the end of the file."""
    position, before = header.data_begin, "the header"
    for entry in sorted(header.entries.values(), key=lambda each: (each.begin, each.end)):
        if entry.begin != position:
            fault = "overlaps" if entry.begin < position else "leaves a gap behind"
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
