"""Spoil bytes and tokens of sound files, one at a time, drawn from a seed.

Headers, indices, configs and folders are mutated, with tokens that parsers are known to stumble
over. Nothing here knows how the files are read.
"""

from __future__ import annotations

import json
import os
import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

LENGTHS = (0, 1, 2, 7, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 100_000_001)
NUMBERS = (
    "-1", "0", "1", "3", "65536", "1000000000", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1e3", "1e999", "0.5", "-0", "01", "1" * 5000, "NaN", "Infinity",
)  # fmt: skip
OTHERS = (
    "null", "true", "[]", "{}", "[[]]", '""', '"F128"', '"U8"', '"a"', '"\\ud800"', '"\\u0000"',
    '"\\u001b[31m"', '"\xff"', "[" * 3000, '{"a":' * 3000, "[1,2,3]", '{"dtype":"U8"}', ",", ":",
    '"', "}", "]", " " * 100, "'a'", "/**/", "\x00", '"deepseek_v32"', '"moe"', '["a", 1, null]',
)  # fmt: skip
NAMES = (
    "../a.safetensors", "../../a.safetensors", "/etc/passwd", "/dev/zero", "a/../b.safetensors",
    "..\\a.safetensors", "", ".", "..", "a", "a.bin", ".a.safetensors", "a\0.safetensors",
    "a\n.safetensors", "\u202eb.safetensors", "x" * 256 + ".safetensors", "none.safetensors",
    "~/a.safetensors", "$HOME.safetensors", "%2e%2e/a.safetensors", "CON.safetensors",
)  # fmt: skip
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|[\[\]{},:]|true|false|null')


def spoil_text(rng: Random, text: bytes) -> bytes:
    """Spoil JSON text in one place: by token, by bytes, or by cutting it off."""
    way = rng.randrange(6)
    if way <= 2:
        tokens = list(_TOKEN.finditer(text))
        token = rng.choice(tokens)
        pool = NUMBERS if token.group()[:1].isdigit() and rng.random() < 0.7 else OTHERS
        return text[: token.start()] + rng.choice(pool).encode("latin-1") + text[token.end() :]
    start = rng.randrange(len(text))
    stop = min(len(text), start + rng.randrange(1, 9))
    if way == 3:
        return text[:start] + rng.randbytes(stop - start) + text[stop:]
    if way == 4:
        return text[:start] + text[stop:]
    return text[:start]


def spoil_shard(rng: Random, raw: bytes) -> bytes:
    """Spoil one safetensors file: its length, its header, its members or its data."""
    (length,) = struct.unpack("<Q", raw[:8])
    text, data = raw[8 : 8 + length], raw[8 + length :]
    way = rng.randrange(8)
    if way == 0:
        return struct.pack("<Q", rng.choice(LENGTHS)) + raw[8:]
    if way == 1:
        return raw[: rng.randrange(len(raw))]
    if way == 2:
        return raw + rng.randbytes(rng.randrange(1, 20))
    if way == 3:
        bit = rng.randrange((8 + length) * 8)
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)
    text = _spoil_members(rng, text) if way <= 5 else spoil_text(rng, text)
    return struct.pack("<Q", len(text)) + text + data


def _spoil_members(rng: Random, text: bytes) -> bytes:
    """Spoil the meaning and keep the grammar: offsets, extents, dtypes, keys twice."""
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    tensor = header[name]
    match rng.randrange(7):
        case 0:
            tensor["data_offsets"][rng.randrange(2)] += rng.choice((-8, -1, 1, 8, 2**40))
        case 1:
            tensor["shape"].insert(rng.randrange(len(tensor["shape"]) + 1), rng.choice((0, 2, -1)))
        case 2:
            tensor["dtype"] = rng.choice(("U8", "F32", "F64", "F4", "I3", "f32", "", "F8_E8M0"))
        case 3:
            header[name], header[other] = header[other], header[name]
        case 4:
            header[name] = dict(header[other])
        case 5:
            tensor[rng.choice(("dtype", "shape", "data_offsets", "more"))] = rng.choice(
                (None, 1, "a", [], {}, [1, 2], [True, False], [0.0, 1.0])
            )
        case _:
            whole = json.dumps(header)
            member = f"{json.dumps(name)}: {json.dumps(header[other])}"
            return f"{whole[:-1]}, {member}}}".encode()
    return json.dumps(header, ensure_ascii=rng.random() < 0.5).encode()


def spoil_index(rng: Random, text: bytes) -> bytes:
    """Spoil an index: names of shards above all."""
    index = json.loads(text)
    weight_map = index["weight_map"]
    name = rng.choice(list(weight_map))
    match rng.randrange(8):
        case 0 | 1 | 2:
            weight_map[name] = rng.choice(NAMES)
        case 3:
            weight_map[rng.choice(("new", "", "\x1b[2J", name + " "))] = weight_map.pop(name)
        case 4:
            weight_map[name] = rng.choice((None, 1, [], {}, True, ["a.safetensors"]))
        case 5:
            whole = json.dumps(index)
            return whole.replace(
                json.dumps(name), f'{json.dumps(name)}: "b", {json.dumps(name)}', 1
            ).encode()
        case _:
            return spoil_text(rng, text)
    return json.dumps(index).encode()


def spoil_config(rng: Random, text: bytes) -> bytes:
    """Spoil a config: mostly one value."""
    if rng.random() < 0.2:
        return spoil_text(rng, text)
    config = json.loads(text)
    key = rng.choice(list(config))
    token = rng.choice(NUMBERS + OTHERS).encode("latin-1")
    mark = b'"put the token here"'
    config[key] = "put the token here"
    return json.dumps(config).encode().replace(mark, token)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


FOLDER_FAULTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "folder": _replace(lambda path: path.mkdir()),
    "pipe": _replace(os.mkfifo),
    "link to itself": _replace(lambda path: path.symlink_to(path.name)),
    "link to nowhere": _replace(lambda path: path.symlink_to("nowhere")),
    "link to a device": _replace(lambda path: path.symlink_to("/dev/zero")),
    "link to a process file": _replace(lambda path: path.symlink_to("/proc/self/status")),
    "link to its folder": _replace(lambda path: path.symlink_to(".")),
    "empty": lambda path: path.write_bytes(b""),
    "pickle": lambda path: path.write_bytes(b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."),
    "zip": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(200)),
    "not to be read": lambda path: path.chmod(0),
}
