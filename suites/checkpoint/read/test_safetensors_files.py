"""Read headers, indexes and JSON of untrusted files; every violation is an error with its place."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import tracemalloc
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
from degarble.harness.checkpoint.read import safetensors_files as index_module
from degarble.harness.checkpoint.read.json_scan import ObjectScanner
from degarble.harness.checkpoint.read.safetensors_files import (
    list_folder,
    read_header,
    read_index,
    unsafe_reason,
)
from degarble.harness.checkpoint.read.types import (
    DTYPE_BITS,
    EXAMPLES_KEPT,
    LARGEST_HEADER,
    LONGEST_ENTRY,
    MOST_DIMENSIONS,
    ProblemKind,
    Problems,
)
from degarble.harness.checkpoint.view.stored import TORCH_DTYPES
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.checkpoint.write.manifest import UNFINISHED
from degarble.suites.checkpoint.reading_cases import (
    entry,
    header_of,
    oracle_of,
    write_raw,
    write_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# The pull parser reads what the standard decoder reads, and refuses what must not be read.


def scan(text: bytes) -> dict[str, Any]:
    scanner = ObjectScanner(text, "some.json")
    found = {key: scanner.value() for key in scanner.members()}
    scanner.finish()
    return found


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=5),
    st.booleans(),
    st.sampled_from([None, 1, "\t"]),
)
def test_reads_as_the_standard_decoder(
    found: dict[str, Any], ascii_only: bool, indent: int | str | None
) -> None:
    text = json.dumps(found, ensure_ascii=ascii_only, indent=indent)
    assert scan(text.encode()) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "an object"),
        (b"[]", "an object"),
        (b"null", "an object"),
        (b'{"a":1,"a":2}', "each key once"),
        (b'{"a":1,"\\u0061":2}', "each key once"),
        (b'{"a":{"b":1,"b":2}}', "'b' is stated twice"),
        (b'{"a":1', "a comma or the end"),
        (b'{"a":1,}', "a string"),
        (b'{"a" 1}', "a colon"),
        (b"{1:1}", "a string"),
        (b'{"a":NaN}', "NaN is no JSON"),
        (b'{"a":-Infinity}', "-Infinity is no JSON"),
        (b'{"a":1}x', "the end of the JSON text"),
        (b'{"\\ud800":1}', "UTF-8"),
        (b'{"a":["\\udc00"]}', "one JSON value"),
        (b'{"a":{"\\ud800":1}}', "one JSON value"),
        (b'{"\xff":1}', "UTF-8"),
        (b'{"a":"\xff"}', "one JSON value"),
        (b'{"a\n":1}', "a string"),
        (b'{"\\x":1}', "UTF-8"),
        (b'{"a":' + b"1" * 5000 + b"}", "one JSON value"),
        (b'{"a":' + b"[" * 15000 + b"]" * 15000 + b"}", "one JSON value"),
        (b'{"a":"' + b"x" * LONGEST_ENTRY + b'"}', f"at most {LONGEST_ENTRY} bytes"),
        (b'{"' + b"x" * LONGEST_ENTRY + b'":1}', f"at most {LONGEST_ENTRY} bytes"),
    ],
)
def test_refuses_with_the_place(text: bytes, says: str) -> None:
    with pytest.raises(UnreadableFile, match=r"some\.json: .* at byte \d+") as refused:
        scan(text)
    assert says in str(refused.value)
    assert str(refused.value).isprintable()


def test_offsets_count_from_the_start_of_the_file() -> None:
    scanner = ObjectScanner(b'{"a":?}', "some.json", first=8)
    assert next(scanner.members()) == "a"
    with pytest.raises(UnreadableFile, match="at byte 13"):
        scanner.value()


def test_a_window_cuts_no_character() -> None:
    text = '{"a":"' + "€" * 100 + '","b":1}'
    for largest in range(320, 324):
        scanner = ObjectScanner(text.encode(), "some.json")
        members = scanner.members()
        next(members)
        assert scanner.value(largest) == "€" * 100
        assert next(members) == "b"


def test_a_long_text_is_refused_without_being_built() -> None:
    text = b'{"a' + b"\\n" * (4 << 20)
    tracemalloc.start()
    with pytest.raises(UnreadableFile, match="a string"):
        scan(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# --------------------------------------------------------------------------------------------------
# Headers are read as the safetensors package reads them, and refused where the format says so.

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
    for name, tensor_entry in header.entries.items():
        assert (tensor_entry.dtype, list(tensor_entry.shape)) == (
            oracle[name]["dtype"],
            oracle[name]["shape"],
        )
        assert raw[tensor_entry.begin : tensor_entry.end] == bytes(oracle[name]["data"])
    assert header.metadata == (metadata or {})
    assert header.file_size == len(raw)
    assert list(header.entries) == [name for name in header_of(path) if name != "__metadata__"]


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_of_the_package(path: Path, dtype: str) -> None:
    write_raw(path, {"a": entry(dtype, [8], 0, DTYPE_BITS[dtype])}, bytes(DTYPE_BITS[dtype]))
    oracle = oracle_of(path.read_bytes())["a"]
    tensor_entry = read_header(path).entries["a"]
    assert (tensor_entry.dtype, list(tensor_entry.shape), tensor_entry.nbytes) == (
        dtype,
        [8],
        len(oracle["data"]),
    )


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
    assert {name: list(tensor_entry.shape) for name, tensor_entry in header.entries.items()} == {
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
        ({"a": F32, "b": entry("U8", [1], 9, 10)}, bytes(10), "leaves a gap after a"),
        ({"a": entry("U8", [1], 1, 2)}, bytes(2), "leaves a gap after the header"),
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
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', bytes(1), "two offsets"),
        (b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"", "not negative"),
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


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except UnreadableFile as error:
        return str(error)


_NEVER = re.compile(rb"(?!)")
_TENSORS = [
    b',"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}',
    b',"c":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}',
]
_ODD = [
    b"",
    b',"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}',  # twice
    b',"b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"d":{"dtype":"F32","shape":[2],"data_offsets":[24,31]}',
    b',"d":{"dtype":"F32","shape":[2],"data_offsets":[24,40]}',
    b',"d":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}',
    b',"d":{"dtype":"F32","shape":[2],"data_offsets":[2400,2408]}',  # beyond the file
    b',"d":{"dtype":"F32","shape":[3],"data_offsets":[24,36]}',
    b',"d":{"dtype":"F33","shape":[2],"data_offsets":[24,32]}',
    b',"d":{"shape":[2],"dtype":"F32","data_offsets":[24,32]}',
    b', "d" : {"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"\\u0062":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"\xff":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"\xc3\xa4":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"__metadata__":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b',"__metadata__":{"format":"pt"}',
    b',"' + b"x" * LONGEST_ENTRY + b'":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}',
    b",",
    b"}",
    b",1",
]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("odd", _ODD)
def test_tensors_like_others_are_read_as_one_by_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes, place: int
) -> None:
    first = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    text = b"".join([first, *_TENSORS[:place], odd, *_TENSORS[place:], b"}"])
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32 if odd else 24))
    for most in (1 << 20, 3):
        monkeypatch.setattr(safetensors_files, "MOST_TENSORS", most)
        at_once = _told(lambda: read_header(path))
        with monkeypatch.context() as context:
            context.setattr(safetensors_files, "_NEXT_TENSOR", _NEVER)
            assert _told(lambda: read_header(path)) == at_once
    if not odd:
        assert list(read_header(path).entries) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b',"a":"1.safetensors"',
        b',"b":"1.safetensors"',
        b',"d":"2.safetensors"',
        b',"d":"../1.safetensors"',
        b',"d":1',
        b' , \n"d"\t: "1.safetensors"',
        b',"\\u0062":"1.safetensors"',
        b',"\xff":"1.safetensors"',
        b',"d":"1\\u002esafetensors"',
        b',"' + b"x" * LONGEST_ENTRY + b'":"1.safetensors"',
        b",",
        b"}",
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_an_index_is_read_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes, place: int
) -> None:
    lines = [b',"b":"1.safetensors"', b',"c":"1.safetensors"']
    text = b"".join([b'{"a":"1.safetensors"', *lines[:place], odd, *lines[place:], b"}"])
    (tmp_path / "i.json").write_bytes(b'{"weight_map":' + text + b"}")

    def read() -> Any:
        problems = Problems(strict=False)
        index = read_index(tmp_path / "i.json", problems)
        return list(index.weight_map.items()), problems.counts, problems.found

    for most in (1 << 20, 3):
        monkeypatch.setattr(safetensors_files, "MOST_TENSORS", most)
        at_once = _told(read)
        with monkeypatch.context() as context:
            context.setattr(safetensors_files, "_NEXT_SHARD", _NEVER)
            assert str(_told(read)) == str(at_once)


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


# --------------------------------------------------------------------------------------------------
# Index and headers must tell one story, and no name may lead out of the folder.

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [{"a.weight": torch.zeros(2, 2)}, {"b.weight": torch.ones(3), "c": torch.ones(1)}]
    write_shards(tmp_path, shards)
    return tmp_path


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads((folder / INDEX).read_text())
    change(found)
    (folder / INDEX).write_text(json.dumps(found))


def test_a_sound_checkpoint_has_no_problem(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    assert not checkpoint.problems.found
    assert sorted(checkpoint.entries) == ["a.weight", "b.weight", "c"]
    assert [shard.tensors for shard in checkpoint.shards] == [1, 2]
    assert checkpoint.index is not None
    assert checkpoint.index.weight_map["c"] == TWO


def test_without_an_index_all_shards_are_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.index is None
    assert len(checkpoint.entries) == 3


def test_one_file_is_a_checkpoint(folder: Path) -> None:
    assert list(Checkpoint.open(folder / ONE).entries) == ["a.weight"]


def test_another_index_name_is_taken_when_it_is_the_only_one(folder: Path) -> None:
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    opened = Checkpoint.open(folder)
    assert opened.index is not None
    assert opened.index.file.name == "other.safetensors.index.json"


# Every disagreement has a kind; a strict opening refuses the fatal ones


def _lose(folder: Path) -> None:
    (folder / TWO).unlink()


def _cut(folder: Path) -> None:
    raw = (folder / TWO).read_bytes()
    (folder / TWO).write_bytes(raw[:-1])


def _forget(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].pop("c"))


def _invent(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(d=TWO))


def _misplace(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(c=ONE))


def _escape(folder: Path) -> None:
    change_index(folder, lambda index: index["weight_map"].update(c=f"../{folder.name}/{TWO}"))


def _double(folder: Path) -> None:
    (folder / ONE).write_bytes((folder / TWO).read_bytes())
    change_index(folder, lambda index: index["weight_map"].pop("a.weight"))
    change_index(folder, lambda index: index["weight_map"].update({"b.weight": ONE}))


def _stray(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes((folder / ONE).read_bytes())


def _pickled(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _miscount(folder: Path) -> None:
    change_index(folder, lambda index: index["metadata"].update(total_size=1))


def _break_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "deepseek_v4"}')


def _link_away(folder: Path) -> None:
    other = folder.parent / f"{folder.name}-elsewhere"
    other.mkdir()
    (folder / TWO).rename(other / TWO)
    (folder / TWO).symlink_to(other / TWO)


def _interrupt(folder: Path) -> None:
    (folder / UNFINISHED).mkdir()


DISAGREEMENTS: list[tuple[Callable[[Path], None], ProblemKind, str]] = [
    (_lose, ProblemKind.UNREADABLE_SHARD, TWO),
    (_cut, ProblemKind.UNREADABLE_SHARD, TWO),
    (_forget, ProblemKind.NOT_IN_INDEX, "tensor c at byte"),
    (_invent, ProblemKind.NOT_IN_HEADER, "tensor d"),
    (_misplace, ProblemKind.IN_OTHER_SHARD, "tensor c at byte"),
    (_escape, ProblemKind.UNSAFE_NAME, "shard of tensor c at byte"),
    (_double, ProblemKind.IN_TWO_SHARDS, "tensor b.weight at byte"),
    (_stray, ProblemKind.STRAY_SHARD, "more.safetensors"),
    (_pickled, ProblemKind.UNPICKLED, "pytorch_model.bin"),
    (_miscount, ProblemKind.TOTAL_SIZE, "total_size"),
    (_break_index, ProblemKind.UNREADABLE_INDEX, "each key once"),
    (_break_config, ProblemKind.UNREADABLE_CONFIG, "missing"),
    (_link_away, ProblemKind.FOREIGN_LINK, "a file inside"),
    (_interrupt, ProblemKind.UNFINISHED, UNFINISHED),
]


@pytest.mark.parametrize(("spoil", "kind", "says"), DISAGREEMENTS)
def test_each_disagreement_is_reported_and_the_fatal_ones_refused(
    folder: Path, spoil: Callable[[Path], None], kind: ProblemKind, says: str
) -> None:
    spoil(folder)
    surveyed = Checkpoint.survey(folder)
    problems = [problem for problem in surveyed.problems.found if problem.kind is kind]
    assert problems, f"nothing of {kind} in {surveyed.problems.found}"
    assert says in str(problems[0].error)
    assert problems[0].file
    if kind.is_fatal:
        with pytest.raises(type(problems[0].error)):
            Checkpoint.open(folder)
    else:
        assert Checkpoint.open(folder).problems.counts[kind] == 1


def test_every_kind_of_problem_is_shown_once() -> None:
    known = {kind for _, kind, _ in DISAGREEMENTS}
    # A method is judged by the tensors beside it: suites/checkpoint/view/test_view.py.
    assert known | {ProblemKind.UNKNOWN_METHOD} == set(ProblemKind)


def test_a_tensor_in_two_shards_is_read_where_the_index_says(folder: Path) -> None:
    shards = [{"a": torch.zeros(2), "b": torch.ones(1)}, {"a": torch.ones(2), "c": torch.ones(1)}]
    write_shards(folder, shards)
    for shard, value in ((ONE, 0.0), (TWO, 1.0)):
        weight_map = {"a": shard, "b": ONE, "c": TWO}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        checkpoint = Checkpoint.survey(folder)
        assert checkpoint.problems.counts == {ProblemKind.IN_TWO_SHARDS: 1}
        assert checkpoint.tensor("a").tolist() == [value, value]


def test_what_is_left_of_a_damaged_checkpoint_can_be_read(folder: Path) -> None:
    _cut(folder)
    checkpoint = Checkpoint.survey(folder)
    assert list(checkpoint.entries) == ["a.weight"]
    assert checkpoint.tensor("a.weight").tolist() == [[0, 0], [0, 0]]
    assert set(checkpoint.problems.counts) == {ProblemKind.UNREADABLE_SHARD}


def test_links_of_a_hub_cache_are_no_problem(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--some--model"
    blobs, snapshot = model / "blobs", model / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate((ONE, TWO, INDEX)):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    checkpoint = Checkpoint.open(snapshot)
    assert not checkpoint.problems.found
    assert checkpoint.tensor("b.weight").tolist() == [1, 1, 1]


def test_problems_are_counted_and_not_hoarded(folder: Path) -> None:
    more = {f"t{i}": TWO for i in range(EXAMPLES_KEPT + 50)}
    change_index(folder, lambda index: index["weight_map"].update(more))
    problems = Checkpoint.survey(folder).problems
    assert problems.counts[ProblemKind.NOT_IN_HEADER] == EXAMPLES_KEPT + 50
    assert len(problems.found) == EXAMPLES_KEPT


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".a.safetensors",
        "..safetensors",
        "a.bin",
        "a.safetensors/..",
        "a\0.safetensors",
        "a\x1b[2J.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        "",
    ],
)
def test_unsafe_names_are_refused_unopened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsafe_reason(name)
    change_index(folder, lambda index: index["weight_map"].update(c=name))
    with pytest.raises(UnreadableFile, match="Do not open this checkpoint") as refused:
        Checkpoint.open(folder)
    assert str(refused.value).isprintable()
    monkeypatch.setattr(index_module, "unsafe_reason", lambda _name: "")
    index = read_index(folder / INDEX, Problems(strict=True))
    assert index.weight_map["c"] == name, "the rule, disabled, lets it through"


def test_usual_names_are_safe() -> None:
    for name in (ONE, "model.safetensors", "a b+c~1.safetensors", "модель.safetensors"):
        assert unsafe_reason(name) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "weight_map"),
        ("[]", "an object"),
        ('{"weight_map": []}', "an object"),
        ('{"weight_map": {"a": 1}}', "a string"),
        ('{"weight_map": {"a": "b.safetensors"}', "the end of the object"),
        ('{"weight_map": {}, "weight_map": {}}', "each key once"),
        ('{"metadata": {"a": NaN}, "weight_map": {}}', "NaN"),
        ("", "an object"),
    ],
)
def test_refuses_what_is_no_index(folder: Path, text: str, says: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(UnreadableFile, match=INDEX) as refused:
        Checkpoint.open(folder)
    assert says in str(refused.value)


def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LARGEST_INDEX", 10)
    with pytest.raises(UnreadableFile, match="at most 10 bytes"):
        Checkpoint.open(folder)
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "MOST_TENSORS", 2)
    with pytest.raises(UnreadableFile, match="at most 2 tensors"):
        Checkpoint.open(folder)
    (folder / INDEX).unlink()
    with pytest.raises(UnreadableFile, match="more than 2 tensors"):
        Checkpoint.open(folder)
    monkeypatch.undo()
    monkeypatch.setattr(index_module, "_MOST_FILES", 1)
    with pytest.raises(UnreadableFile, match="more than 1 files"):
        Checkpoint.open(folder)


def test_only_pickled_files_are_refused_and_reported(tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "consolidated.00.pth", "a.ckpt", "b.pkl"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert len(list_folder(tmp_path).pickled) == 4
    with pytest.raises(UnreadableFile, match="4 pickled"):
        Checkpoint.open(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UnreadableFile):
            Checkpoint.survey(path)
