"""Damage a checkpoint, a capture or the text files of a model in one place, drawn from a seed.

A mutation says whether the damaged copy may still be accepted: damage to bytes that a length or a
hash covers must be refused, a changed value in a text may be legal. A capture is also changed and
then signed again, because a file that somebody made on purpose has hashes that fit.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.suites.checkpoint.view.hostile_cases import (
    FOLDER_FAULTS,
    LENGTHS,
    NAMES,
    spoil_config,
    spoil_index,
    spoil_shard,
    spoil_text,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

MANIFEST = "manifest.json"
_CAPTURE_WAYS, _SIGNED_WAYS = 20, 9
_DEEP = 40_000  # nesting at which a recursive reader runs out of stack
_HUGE = 1 << 40  # a hole that nobody may read whole
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**53 + 1, 2**61, 2**63 - 1, 2**64, -(2**63),
    10**40, 0.5, -0.0, 1e308, 1e-320, math.nan, math.inf, -math.inf, "", "a", "0", "BF16", "F32",
    "I64", "\ud800", "\x00", "\x1b[31m", "\u202e", "x" * 5000, "../../etc/passwd", "/dev/zero",
    [], {}, [[]], [None], [1, 2], ["a"], {"a": 1}, {"": None}, [[[[[[]]]]]], [-1], [2**61] * 3,
)  # fmt: skip


class Mutation(NamedTuple):
    """What was done, and whether every command has to refuse the result."""

    kind: str
    detail: str
    refused: bool = False


@dataclass
class PartBytes:
    """One part of a capture, taken apart."""

    head: dict[str, Any]
    index: dict[str, Any]
    data: bytes


class CaptureBytes:
    """A capture taken apart, to be changed and written with hashes that fit again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        self.parts = [_taken_apart(path) for path in part_files(folder)]

    def calls(self) -> list[dict[str, Any]]:
        """Return every call of every part."""
        return [call for part in self.parts for call in part.index["calls"]]

    def kept(self) -> list[dict[str, Any]]:
        """Return the record of every tensor at every site."""
        sides = [call[side] for call in self.calls() for side in ("inputs", "outputs")]
        return [kept for side in sides for kept in side.values()]

    def replace_data(self, change: Callable[[str, dict[str, Any], bytes], bytes]) -> None:
        """Give tensors other bytes of the same length, and hash them again."""
        hashes = {}
        for part in self.parts:
            made = bytearray()
            for name, stored in part.head.items():
                begin, end = stored["data_offsets"]
                changed = change(name, stored, part.data[begin:end])
                made += changed
                hashes[name] = hashlib.sha256(changed).hexdigest()
            part.data = bytes(made)
        for kept in self.kept():
            if kept.get("at") in hashes:
                kept["sha256"] = hashes[kept["at"]]

    def lay_out_again(self) -> None:
        """Let data offsets follow dtypes and shapes; data are cut or filled with zeros."""
        width = {"BOOL": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "F64": 8}
        for part in self.parts:
            made = bytearray()
            for stored in part.head.values():
                begin, end = stored["data_offsets"]
                size = math.prod(stored["shape"]) * width.get(stored["dtype"], 1)
                data = part.data[begin:end][:size].ljust(size, b"\0")
                stored["data_offsets"] = [len(made), len(made) + size]
                made += data
            part.data = bytes(made)
        self.replace_data(lambda _name, _stored, data: data)

    def write(self) -> None:
        """Write everything back, signed."""
        listed: list[dict[str, Any]] = []
        for path, part in zip(part_files(self.folder), self.parts, strict=True):
            index = json.dumps(part.index).encode("utf-8", "surrogatepass")
            metadata = {
                "format": "degarble-capture", "version": "1", "part": str(len(listed)),
                "index_sha256": hashlib.sha256(index).hexdigest(), "index": index.decode(),
            }  # fmt: skip
            text = json.dumps({"__metadata__": metadata, **part.head}).encode()
            text += b" " * (-len(text) % 8)
            head = struct.pack("<Q", len(text)) + text
            path.write_bytes(head + part.data)
            listed.append(
                {"file": path.name, "bytes": len(head) + len(part.data),
                 "head_sha256": hashlib.sha256(head).hexdigest()}
            )  # fmt: skip
        if self.manifest.get("complete"):
            self.manifest["parts"] = listed
        (self.folder / MANIFEST).write_text(json.dumps(self.manifest))


def _taken_apart(path: Path) -> PartBytes:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8 : 8 + length])
    index = json.loads(head.pop("__metadata__")["index"])
    return PartBytes(head, index, raw[8 + length :])


def part_files(folder: Path) -> list[Path]:
    """Return the parts of a capture in order."""
    return sorted(folder.glob("part-*.safetensors"))


def places_in(raw: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value, in document order."""
    found: list[tuple[Any, Any]] = []
    pairs = raw.items() if isinstance(raw, dict) else enumerate(raw)
    for key, value in list(pairs):
        found.append((raw, key))
        if isinstance(value, (dict, list)):
            found += places_in(value)
    return found


def change_json(rng: Random, raw: Any) -> str:
    """Change, drop, double or rename one value of a JSON document in place."""
    places = places_in(raw)
    if not places:
        return "nothing to change"
    container, key = rng.choice(places)
    value, way = container[key], rng.randrange(10)
    if way == 0:
        del container[key]
        return f"dropped {key!r}"
    if way == 1 and isinstance(container, dict):
        new = rng.choice(("", "\ud800", "a", "\x00", f"{key} ", "x" * 300, *NAMES))
        container[new] = container.pop(key)
        return f"renamed {key!r} to {new!r}"
    if way == 2 and isinstance(container, list):
        container.insert(key, value)
        return f"doubled element {key}"
    near = _near(rng, value) if way < 7 else None
    new = rng.choice(VALUES) if near is None else near
    container[key] = new
    return f"{key!r}: {str(value)[:60]!r} became {str(new)[:60]!r}"


def _near(rng: Random, value: Any) -> Any:
    """Return a value of the same type, close to what was there."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, 0, value + 2**32))
    if isinstance(value, float):
        return rng.choice((value * 2, -value, value + 1, 0.0, int(value) if value < 1e9 else 1))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + "a", value.upper(), value[::-1], "", value * 3))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value[::-1], []))
    return None


def write_json(path: Path, raw: Any) -> None:
    """Write what may hold surrogates and numbers that JSON lacks."""
    path.write_bytes(json.dumps(raw).encode())


def _change_text_file(rng: Random, path: Path) -> Mutation:
    """Change one value of a JSON file, or its text."""
    way = rng.randrange(12)
    text = path.read_bytes()
    if way <= 6:
        raw = json.loads(text)
        detail = change_json(rng, raw)
        write_json(path, raw)
        return Mutation("value", f"{path.name}: {detail}")
    if way <= 9:
        path.write_bytes(spoil_text(rng, text))
        return Mutation("text", path.name)
    wild = {
        "deep": b"[" * _DEEP, "deep object": b'{"a":' * _DEEP, "empty": b"", "blank": b" " * 99,
        "zip": b"PK\x03\x04" + bytes(60), "pickle": b"\x80\x04\x95\0\0\0\0\0\0\0\0.",
        "utf-16": text.decode("utf-8", "replace").encode("utf-16"), "bom": b"\xef\xbb\xbf" + text,
        "latin": text[:-2] + b'\xff"}', "doubled": text + text, "list": b"[" + text + b"]",
        "digits": b'{"a": ' + b"9" * 5000 + b"}", "nul": b"\0" * 64, "null": b"null",
    }  # fmt: skip
    name = rng.choice(sorted(wild))
    path.write_bytes(wild[name])
    return Mutation("text", f"{path.name}: {name}")


def _special(path: Path, kind: str) -> None:
    """Put something that is no regular file in the place of one."""
    path.unlink()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.bind(str(path))
        if not path.exists():  # the path is too long for a socket
            os.mkfifo(path)
    else:
        path.symlink_to({"zero": "/dev/zero", "full": "/dev/full", "null": "/dev/null"}[kind])


SPECIALS: dict[str, Callable[[Path], object]] = {
    **{name: fault for name, fault in FOLDER_FAULTS.items() if name != "not to be read"},
    "socket": lambda path: _special(path, "socket"),
    "endless device": lambda path: _special(path, "zero"),
    "full device": lambda path: _special(path, "full"),
    "null device": lambda path: _special(path, "null"),
    "giant hole": lambda path: os.truncate(path, _HUGE),
}


def _replace_file(rng: Random, path: Path, *, refused: bool) -> Mutation:
    name = rng.choice(sorted(SPECIALS))
    SPECIALS[name](path)
    return Mutation("special file", f"{path.name}: {name}", refused)


def shard_files(folder: Path) -> list[Path]:
    """Return the shards of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def _zero_head(rng: Random, path: Path) -> Mutation:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    ways = {
        "length zero": bytes(8) + raw[8:],
        "length zero, nothing else": bytes(8),
        "length zero, zeros": bytes(len(raw)),
        "zeroed head": raw[:8] + bytes(length) + raw[8 + length :],
        "zeroed beginning": bytes(8 + length) + raw[8 + length :],
        "no tensors": struct.pack("<Q", 8) + b"{}      ",
        "no tensors, data": struct.pack("<Q", 8) + b"{}      " + raw[8 + length :],
        "other length": struct.pack("<Q", rng.choice([n for n in LENGTHS if n != length]))
        + raw[8:],
    }
    name = rng.choice(sorted(ways))
    path.write_bytes(ways[name])
    return Mutation("zero head", f"{path.name}: {name}", refused=True)


def _damage_bytes(rng: Random, path: Path) -> Mutation:
    """Cut, extend or overwrite the data of a safetensors file."""
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    way = rng.randrange(4)
    if way == 0:
        path.write_bytes(raw[: rng.randrange(len(raw))])
        return Mutation("cut", path.name, refused=True)
    if way == 1:
        path.write_bytes(bytes(raw) + rng.randbytes(rng.randrange(1, 99)))
        return Mutation("extended", path.name, refused=True)
    first = rng.randrange(8 + length, len(raw))
    if way == 2:
        raw[first] ^= 1 << rng.randrange(8)
    else:
        size = min(len(raw) - first, rng.choice((1, 2, 4, 64, 4096)))
        fills = (bytes(size), b"\xff" * size, b"\x80\x7f" * size, rng.randbytes(size))
        before = bytes(raw[first : first + size])
        raw[first : first + size] = rng.choice(fills)[:size]
        if bytes(raw[first : first + size]) == before:
            raw[first] ^= 1
    path.write_bytes(raw)
    return Mutation("data bytes", f"{path.name} at {first}", refused=True)


def _swap(rng: Random, files: list[Path]) -> Mutation:
    one, other = rng.sample(files, 2)
    spare = one.with_name("spare")
    same = one.read_bytes() == other.read_bytes()
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    return Mutation("swapped", f"{one.name} and {other.name}", refused=not same)


def _leave_over(rng: Random, folder: Path) -> Mutation:
    name = rng.choice(
        (".model.safetensors.1-2.partial", "extra.safetensors", "model.bin", "degarble-unfinished",
         "x.safetensors.index.json", "\udcff.safetensors", "a\nb.safetensors", "tokenizer.part",
         "part-000001.safetensors", "part-000099.safetensors", ".hidden", "consolidated.pt")
    )  # fmt: skip
    path = folder / name
    with suppress(OSError):
        rng.choice((lambda: path.write_bytes(b""), path.mkdir, lambda: os.mkfifo(path),
                    lambda: path.symlink_to("nowhere")))()  # fmt: skip
    return Mutation("leftover", repr(name))


def mutate_checkpoint(rng: Random, folder: Path) -> Mutation:
    """Damage one thing of a checkpoint."""
    shards = shard_files(folder)
    shard, way = rng.choice(shards), rng.randrange(20)
    if way <= 4:
        shard.write_bytes(spoil_shard(rng, shard.read_bytes()))
        return Mutation("head", shard.name)
    if way <= 6:
        return _zero_head(rng, shard)
    if way <= 8:
        return _damage_bytes(rng, shard)
    if way <= 10:
        index = folder / "model.safetensors.index.json"
        index.write_bytes(spoil_index(rng, index.read_bytes()))
        return Mutation("index", index.name)
    if way <= 12:
        config = folder / "config.json"
        config.write_bytes(spoil_config(rng, config.read_bytes()))
        return Mutation("config", config.name)
    if way <= 15:
        return _change_text_file(rng, rng.choice(sorted(folder.glob("*.json"))))
    if way <= 17:
        needed = [*shards, folder / "config.json", folder / "model.safetensors.index.json"]
        optional = [path for path in sorted(folder.iterdir()) if path not in needed]
        path = rng.choice([*needed, *optional])
        return _replace_file(rng, path, refused=path in shards)
    if way == 18:
        return _swap(rng, shards if len(shards) > 1 else sorted(folder.iterdir()))
    return _leave_over(rng, folder)


def mutate_capture(rng: Random, folder: Path) -> Mutation:
    """Damage one thing of a capture, or change it and sign it again."""
    parts, way = part_files(folder), rng.randrange(_CAPTURE_WAYS)
    if way <= _SIGNED_WAYS:
        return _signed(rng, folder)
    part = rng.choice(parts)
    if way <= 11:
        return _damage_bytes(rng, part)
    if way == 12:
        return _zero_head(rng, part)
    if way == 13:
        before = part.read_bytes()
        part.write_bytes(spoil_shard(rng, before))
        return Mutation("head", part.name, refused=part.read_bytes() != before)
    if way <= 15:
        return _change_text_file(rng, folder / MANIFEST)
    if way <= 17:
        return _replace_file(rng, rng.choice([*parts, folder / MANIFEST]), refused=True)
    if way == 18 and len(parts) > 1:
        return _swap(rng, parts)
    return _leave_over(rng, folder)


def signs_again(seed: int) -> bool:
    """Tell whether mutate_capture signs a capture again for a seed."""
    return random.Random(seed).randrange(_CAPTURE_WAYS) <= _SIGNED_WAYS


def _signed(rng: Random, folder: Path) -> Mutation:
    """Change the meaning of a capture; every length and hash fits afterwards."""
    taken = CaptureBytes(folder)
    detail = rng.choice(_SIGNED)(rng, taken)
    with suppress(ValueError, OverflowError, MemoryError):
        taken.write()
    return Mutation("signed", detail)


def _change_call(rng: Random, taken: CaptureBytes) -> str:
    return change_json(rng, rng.choice(taken.calls()))


def _change_step(rng: Random, taken: CaptureBytes) -> str:
    return change_json(rng, rng.choice([part.index for part in taken.parts])["steps"])


def _change_facts(rng: Random, taken: CaptureBytes) -> str:
    return change_json(rng, taken.manifest["facts"])


def _change_stored(rng: Random, taken: CaptureBytes) -> str:
    """Give a stored tensor, and all that name it, another dtype or shape."""
    part = rng.choice([part_bytes for part_bytes in taken.parts if part_bytes.head])
    name = rng.choice(sorted(part.head))
    stored = part.head[name]
    shape = list(stored["shape"])
    if rng.random() < 0.4:
        stored["dtype"] = rng.choice(("BF16", "F32", "I64", "I32", "U8", "BOOL", "F64", "F16"))
    else:
        shape = rng.choice(
            ([], [0], [1], [math.prod(shape)], shape[:-1], [*shape, 1], [1, *shape], shape[::-1],
             [each + 1 for each in shape], [each // 2 for each in shape], [0, *shape[1:]],
             [*shape[:-1], 0], [2, *shape])
        )  # fmt: skip
    for kept in taken.kept():
        if kept.get("at") == name:
            kept["dtype"], kept["shape"] = stored["dtype"], list(shape)
            if "rows" in kept and (not shape or len(kept["rows"]) != shape[0]):
                del kept["rows"]
    stored["shape"] = shape
    taken.lay_out_again()
    return f"{name}: {stored['dtype']} {shape}"


def _change_data(rng: Random, taken: CaptureBytes) -> str:
    """Fill some tensors with numbers that a run hardly gives."""
    fills = (b"\xff", b"\x00", b"\x80\x7f", b"\xc0\x7f\x00\x00", b"\xff\xff\xff\x7f", b"\x00\x80")
    fill, share = rng.choice(fills), rng.choice((0.02, 0.2, 1.0))

    def change(_name: str, _stored: dict[str, Any], data: bytes) -> bytes:
        if not data or rng.random() > share:
            return data
        if rng.random() < 0.5:
            return (fill * len(data))[: len(data)]
        made = bytearray(data)
        first = rng.randrange(len(data))
        made[first : first + 8] = (fill * 8)[: len(made[first : first + 8])]
        return bytes(made)

    taken.replace_data(change)
    return f"data filled with {fill!r}"


def _change_order(rng: Random, taken: CaptureBytes) -> str:
    """Drop, double, swap or move calls; they are numbered again."""
    part = rng.choice([part_bytes for part_bytes in taken.parts if part_bytes.index["calls"]])
    calls = part.index["calls"]
    place, way = rng.randrange(len(calls)), rng.randrange(5)
    if way == 0:
        del calls[place]
    elif way == 1:
        calls.insert(place, json.loads(json.dumps(calls[place])))
    elif way == 2:
        rng.shuffle(calls)
    elif way == 3:
        other = rng.choice(calls)
        calls[place]["component"], other["component"] = (
            other["component"],
            calls[place]["component"],
        )
    else:
        other = rng.choice(calls)
        side = rng.choice(("inputs", "outputs"))
        calls[place][side], other[side] = other[side], calls[place][side]
    for number, call in enumerate(taken.calls()):
        call["number"] = number
    taken.manifest["calls"] = len(taken.calls())
    return ("dropped", "doubled", "shuffled", "components swapped", "tensors swapped")[way]


def _change_site(rng: Random, taken: CaptureBytes) -> str:
    """Rename, drop or exchange the tensors of one call."""
    call = rng.choice(taken.calls())
    side = call[rng.choice(("inputs", "outputs"))]
    if not side:
        return "nothing to change"
    name = rng.choice(sorted(side))
    kept = side.pop(name)
    way = rng.randrange(4)
    if way == 1:
        side[rng.choice(("out", "x", "index", "\ud800", "weights", ""))] = kept
    elif way == 2:
        side[name] = dict(rng.choice(taken.kept() or [kept]))
    elif way == 3:
        side[name] = kept | {"rows": list(range(kept["shape"][0] if kept["shape"] else 0))}
    call["changed"] = [each for each in call["changed"] if each in call["inputs"]]
    return f"{call['component']}: {name}, way {way}"


def _mark_incomplete(_rng: Random, taken: CaptureBytes) -> str:
    taken.manifest |= {"complete": False, "parts": [], "calls": None}
    return "incomplete"


_SIGNED = (
    _change_call, _change_call, _change_step, _change_facts, _change_facts, _change_stored,
    _change_stored, _change_data, _change_order, _change_site, _change_site, _mark_incomplete,
)  # fmt: skip


def mutate_texts(rng: Random, folder: Path) -> Mutation:
    """Damage a config, a tokenizer, or what else a model reads as text; or reshape a scale."""
    way = rng.randrange(10)
    texts = [path for path in sorted(folder.glob("*.json")) if "index" not in path.name]
    path = rng.choice(texts)
    if way <= 6:
        return _change_text_file(rng, path)
    if way == 7:
        return _replace_file(rng, path, refused=False)
    return _reshape_tensor(rng, rng.choice(shard_files(folder)))


def _reshape_tensor(rng: Random, path: Path) -> Mutation:
    """State another shape of as many elements, or another dtype of as many bytes."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    head = json.loads(raw[8 : 8 + length])
    name = rng.choice(sorted(each for each in head if each != "__metadata__"))
    tensor = head[name]
    count = math.prod(tensor["shape"])
    same = {"BF16": "F16", "F16": "BF16", "F32": "I32", "U8": "F8_E4M3", "F8_E4M3": "U8"}
    if rng.random() < 0.3:
        tensor["dtype"] = same.get(tensor["dtype"], tensor["dtype"])
    else:
        shapes = [[count], [1, count], [count, 1], tensor["shape"][::-1]]
        tensor["shape"] = rng.choice(shapes + ([[]] if count == 1 else []))
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    return Mutation("reshaped", f"{name}: {tensor['dtype']} {tensor['shape']}")


def mutated_copy(
    mutate: Callable[[Random, Path], Mutation], seed: int, base: Path, copy: Path
) -> Mutation:
    """Copy a base and damage the copy; the same seed gives the same damage."""
    shutil.copytree(base, copy)
    rng = random.Random(seed)
    return mutate(rng, copy)
