"""Headers are read as the safetensors package reads them, and refused where the format says so."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from degarble.harness.base.errors import UnreadableFile
from degarble.harness.checkpoint.read import safetensors_files
from degarble.harness.checkpoint.read.safetensors_files import read_header
from degarble.harness.checkpoint.read.types import DTYPE_BITS, LARGEST_HEADER, MOST_DIMENSIONS
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.suites.checkpoint.reading_cases import entry, header_of, oracle_of, write_raw

if TYPE_CHECKING:
    from collections.abc import Callable

F32 = entry("F32", [2], 0, 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


# Written by the package, read by us


NAMES = st.text(st.characters(codec="utf-8"), max_size=20).filter(
    lambda name: name != "__metadata__"
)
WRITABLE = sorted(set(TORCH_DTYPES) - {"F4"})
SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(WRITABLE), SHAPES), min_size=1, max_size=6),
    st.none()
    | st.dictionaries(NAMES, st.text(st.characters(codec="utf-8"), max_size=9), max_size=3),
)
def test_reads_what_the_package_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, tuple[str, list[int]]],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    raw = save(
        {
            name: torch.zeros(shape, dtype=TORCH_DTYPES[dtype])
            for name, (dtype, shape) in tensors.items()
        },
        metadata,
    )
    path.write_bytes(raw)
    header = read_header(path)
    oracle = oracle_of(raw)
    assert header.entries.keys() == oracle.keys() == tensors.keys()
    for name, found in header.entries.items():
        assert (found.dtype, list(found.shape)) == (oracle[name]["dtype"], oracle[name]["shape"])
        assert raw[found.begin : found.end] == bytes(oracle[name]["data"])
    assert header.metadata == (metadata or {})
    assert header.file_size == len(raw)
    assert list(header.entries) == [name for name in header_of(path) if name != "__metadata__"]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_package(path: Path, dtype: str) -> None:
    write_raw(path, {"a": entry(dtype, [8], 0, DTYPE_BITS[dtype])}, bytes(DTYPE_BITS[dtype]))
    oracle = oracle_of(path.read_bytes())["a"]
    found = read_header(path).entries["a"]
    assert (found.dtype, list(found.shape), found.nbytes) == (dtype, [8], len(oracle["data"]))


def test_the_package_has_no_dtype_that_we_lack(path: Path) -> None:
    write_raw(path, {"a": entry("F3", [8], 0, 3)}, bytes(3))
    with pytest.raises(safetensors.SafetensorError, match="unknown variant") as told:
        oracle_of(path.read_bytes())
    listed = str(told.value).split("expected one of")[1].split(" at line")[0]
    assert {name.strip("` ") for name in listed.split(",")} == set(DTYPE_BITS)


def test_headers_that_no_writer_emits_but_the_format_allows(path: Path) -> None:
    text = (
        b'{ "b\\u00e9" :\n{"shape" : [ 2 ], "data_offsets":[4, 8], "dtype":"F16"},'
        b'"__metadata__":{"k":"v"},"a":{"dtype":"U8","data_offsets":[0,4],"shape":[4,1]},'
        b'"e":{"dtype":"I64","shape":[0,9],"data_offsets":[4,4]}}   '
    )
    write_raw(path, text, b"abcdefgh")
    header = read_header(path)
    oracle = oracle_of(path.read_bytes())
    assert {name: list(each.shape) for name, each in header.entries.items()} == {
        name: each["shape"] for name, each in oracle.items()
    }
    assert list(header.entries) == ["bé", "a", "e"]
    assert header.metadata == {"k": "v"}


def test_no_tensor_at_all(path: Path) -> None:
    write_raw(path, {})
    assert not read_header(path).entries


# Refused, each with its name and place


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": F32 | {"dtype": "F128"}}, bytes(8), "a dtype of safetensors"),
        ({"a": F32 | {"dtype": 7}}, bytes(8), "a dtype by name"),
        ({"a": F32 | {"shape": [-2]}}, bytes(8), "integers and not negative"),
        ({"a": F32 | {"shape": [2.0]}}, bytes(8), "integers and not negative"),
        ({"a": F32 | {"shape": [True, 2]}}, bytes(8), "integers and not negative"),
        ({"a": F32 | {"shape": "2"}}, bytes(8), "integers and not negative"),
        ({"a": F32 | {"shape": [3]}}, bytes(8), "12 bytes, as F32 [3] has"),
        ({"a": F32 | {"shape": [2**62, 2**62, 0]}}, bytes(8), "product is below"),
        ({"a": F32 | {"shape": [10**30]}}, bytes(8), "product is below"),
        ({"a": F32 | {"shape": [1] * (MOST_DIMENSIONS + 1)}}, bytes(8), "at most 64"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8), "begin <= end"),
        ({"a": F32 | {"data_offsets": [-8, 0]}}, bytes(8), "not negative"),
        ({"a": F32 | {"data_offsets": [0, 8, 8]}}, bytes(8), "two offsets"),
        ({"a": F32 | {"data_offsets": [0]}}, bytes(8), "two offsets"),
        ({"a": F32 | {"data_offsets": None}}, bytes(8), "two offsets"),
        ({"a": F32 | {"data_offsets": [2**64 - 8, 2**64]}}, bytes(8), "end <= 8"),
        ({"a": F32}, bytes(7), "end <= 7"),
        ({"a": F32}, bytes(9), "1 bytes that belong to no tensor"),
        ({"a": F32, "b": entry("F32", [2], 4, 12)}, bytes(12), "overlaps a"),
        ({"a": F32, "b": F32}, bytes(8), "overlaps a"),
        ({"a": F32, "b": entry("U8", [1], 9, 10)}, bytes(10), "leaves a gap behind a"),
        ({"a": entry("U8", [1], 1, 2)}, bytes(2), "leaves a gap behind the header"),
        ({"a": entry("F4", [3], 0, 1)}, bytes(2), "whole bytes"),
        ({"a": F32 | {"more": 1}}, bytes(8), "an object of dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "shape": [0]}}, b"", "an object of dtype, shape"),
        ({"a": [1]}, b"", "an object of dtype, shape"),
        ({"__metadata__": {"a": 1}}, b"", "an object of texts"),
        ({"__metadata__": "a"}, b"", "an object of texts"),
        (b'{"a":1,"a":1}', b"", "an object of dtype, shape"),
        (b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"1"}}', b"", "each key once"),
        (b'{"__metadata__":{"a":"1","a":"2"}}', b"", "stated twice"),
        (b' {"a":1}', b"", "an object that begins at once"),
        (b"[]", b"", "an object that begins at once"),
        (b"", b"", "an object that begins at once"),
        (b'{"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}}', bytes(1), "one JSON value"),
    ],
)
def test_refuses_headers(path: Path, header: Any, data: bytes, says: str) -> None:
    write_raw(path, header, data)
    with pytest.raises(UnreadableFile, match=r"model\.safetensors.* at byte \d+") as refused:
        read_header(path)
    assert says in str(refused.value)


def test_refuses_a_tensor_stated_twice_alike(path: Path) -> None:
    text = json.dumps({"a": F32})
    write_raw(path, f"{text[:-1]},{text[1:]}".encode(), bytes(8))
    with pytest.raises(UnreadableFile, match="each key once"):
        read_header(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, LARGEST_HEADER + 1, 3, 2**31])
def test_refuses_lengths_beyond_the_limit_or_the_file(path: Path, length: int) -> None:
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(UnreadableFile, match="length of the header at byte 0"):
        read_header(path)


@pytest.mark.parametrize("size", range(8))
def test_refuses_files_without_a_length(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    with pytest.raises(UnreadableFile, match="length of the header"):
        read_header(path)


def test_refuses_every_truncation(path: Path) -> None:
    write_raw(path, {"a": F32, "b": entry("U8", [3], 8, 11)}, bytes(11))
    whole = path.read_bytes()
    read_header(path)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(UnreadableFile):
            read_header(path)


def test_the_number_of_tensors_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "MOST_TENSORS", 3)
    write_raw(path, {str(i): entry("U8", [0], 0, 0) for i in range(3)})
    assert len(read_header(path).entries) == 3
    write_raw(path, {str(i): entry("U8", [0], 0, 0) for i in range(4)})
    with pytest.raises(UnreadableFile, match="at most 3 tensors"):
        read_header(path)


# What is no regular file


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.close()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _broken(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [_pipe, _device, _loop, _broken, lambda path: path.mkdir()])
def test_refuses_what_is_no_regular_file(path: Path, make: Callable[[Path], None]) -> None:
    make(path)
    with pytest.raises(UnreadableFile, match=r"model\.safetensors"):
        read_header(path)


def test_refuses_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes only
    _socket(Path("s"))
    with pytest.raises(UnreadableFile, match="a regular file"):
        read_header(tmp_path / "s")


def test_refuses_a_path_that_cannot_exist(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 300, "none"):
        with pytest.raises(UnreadableFile, match="a file that can be read"):
            read_header(tmp_path / name)


def test_follows_a_link_to_a_regular_file(path: Path, tmp_path: Path) -> None:
    write_raw(tmp_path / "blob", {"a": F32}, bytes(8))
    path.symlink_to("blob")
    assert read_header(path).entries["a"].file == path


# The check itself is shown a fault: without it, each of these files would be accepted


@pytest.mark.parametrize(
    ("check", "header", "data"),
    [
        ("_require_filled", {"a": F32, "b": F32}, bytes(8)),
        ("_require_filled", {"a": F32}, bytes(9)),
    ],
)
def test_disabling_a_check_shows(
    path: Path, monkeypatch: pytest.MonkeyPatch, check: str, header: object, data: bytes
) -> None:
    write_raw(path, header, data)
    with pytest.raises(UnreadableFile):
        read_header(path)
    monkeypatch.setattr(safetensors_files, check, lambda _header: None)
    assert read_header(path).entries
