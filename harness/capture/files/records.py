"""Records of a capture and their JSON, the facts of its manifest, and the parts that hold both.

See docs/capture.md. Everything here imports without torch, numpy or a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from degarble.harness.base.errors import DegarbleError, UnreadableFile, UnwritablePath
from degarble.harness.base.files import read_span, regular_file, sync_file, sync_folder
from degarble.harness.model.sites import Port, Site
from degarble.harness.report.number_text import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


# --------------------------------------------------------------------------------------------------
# Record types of a capture: stored tensor, step, call; and their JSON. See docs/capture.md.
#
# A call is one run of one component: inputs are taken before it, outputs after it. A step is one
# forward pass over tokens of some sequences: their prompts (prefill), or one token each (decode).

FORMAT, VERSION = "degarble-capture", 1
MANIFEST = "manifest.json"
AGAIN = "Capture the run again."

# safetensors' word to bytes an element
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
        **dict.fromkeys(("U32", "I32", "F32"), 4),
        **dict.fromkeys(("U64", "I64", "F64"), 8),
    }
)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_DIMENSIONS = 16
_LARGEST = 1 << 62
_LARGEST_INDEX = 1 << 31  # of a token, position or sequence
_LARGEST_TENSOR = 1 << 44  # bytes; extents are counted as if none were 0
_MOST_VALUES = 8_000_000  # of one JSON text: Python takes up to 70 bytes for each


class Phase(StrEnum):
    """Kind of a step: whole prompts, or one token for each sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


class CapturedTensor(NamedTuple):
    """One tensor at one site. `rows` are those that a filter kept, None if it is whole."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    at: str | None = None  # name of the stored tensor with these bytes; None: statistics only
    rows: tuple[int, ...] | None = None
    statistics: Mapping[str, float] | None = None

    @property
    def nbytes(self) -> int:
        """Size of its bytes, stored or not."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Spell it; what does not apply is left out."""
        lists = {"shape": list(self.shape), "rows": None if self.rows is None else list(self.rows)}
        found = self._asdict() | lists
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def of_json(cls, raw: Any, name: str) -> CapturedTensor:
        """Check and read what to_json spelled."""
        taken = JsonObject(raw, name)
        dtype = taken.text("dtype")
        if dtype not in DTYPE_BYTES:
            raise malformed(f"{name}: dtype", dtype, "a dtype of safetensors")
        shape, sha256 = taken.counts("shape"), taken.text("sha256")
        # Trap: [2**61, 0] has no elements, and no library can make a tensor of it.
        extents = math.prod(max(1, each) for each in shape) * DTYPE_BYTES[dtype]
        if len(shape) > _MOST_DIMENSIONS or extents > _LARGEST_TENSOR:
            raise malformed(f"{name}: shape", list(shape), "the shape of a tensor")
        if not _SHA256.fullmatch(sha256):
            raise malformed(f"{name}: sha256", sha256, "64 hexadecimal digits")
        rows = taken.counts("rows") if "rows" in taken.raw else None
        if rows is not None and (not shape or len(rows) != shape[0]):
            raise malformed(f"{name}: rows", len(rows), f"one for each row of {list(shape)}")
        at = taken.text("at") if "at" in taken.raw else None
        return cls(dtype, shape, sha256, at, rows, taken.numbers("statistics"))


@dataclass(frozen=True)
class CapturedStep:
    """One forward pass. `sequences` names the sequence of each token."""

    number: int
    phase: Phase
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    sequences: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Spell it."""
        lists = {name: list(getattr(self, name)) for name in ("tokens", "positions", "sequences")}
        return {"number": self.number, "phase": str(self.phase), **lists}

    @classmethod
    def of_json(cls, raw: Any, name: str) -> CapturedStep:
        """Check and read what to_json spelled."""
        taken = JsonObject(raw, name)
        phase = taken.text("phase")
        if phase not in set(Phase):
            raise malformed(f"{name}: phase", phase, " or ".join(Phase))
        lists = [taken.counts(each) for each in ("tokens", "positions", "sequences")]
        largest = max((max(each, default=0) for each in lists), default=0)
        if largest >= _LARGEST_INDEX:
            raise malformed(name, largest, f"ids, positions and sequences below {_LARGEST_INDEX}")
        if len({len(each) for each in lists}) != 1:
            raise malformed(name, [len(each) for each in lists], "lists of one length")
        return cls(taken.count("number"), Phase(phase), *lists)


@dataclass(frozen=True)
class CapturedCall:
    """One run of one component. `changed` names the inputs that it overwrote."""

    number: int
    step: int
    component: str
    inputs: Mapping[str, CapturedTensor] = field(default_factory=dict)
    outputs: Mapping[str, CapturedTensor] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def sites(self) -> Iterator[tuple[Site, CapturedTensor]]:
        """Every tensor with its place, inputs first."""
        for port, found in ((Port.IN, self.inputs), (Port.OUT, self.outputs)):
            for name, kept in found.items():
                yield site_of(self.component, port, name), kept

    def to_json(self) -> dict[str, Any]:
        """Spell it."""
        return {
            "number": self.number,
            "step": self.step,
            "component": self.component,
            "inputs": {name: kept.to_json() for name, kept in self.inputs.items()},
            "outputs": {name: kept.to_json() for name, kept in self.outputs.items()},
            "changed": list(self.changed),
        }

    @classmethod
    def of_json(cls, raw: Any, name: str) -> CapturedCall:
        """Check and read what to_json spelled."""
        taken = JsonObject(raw, name)
        component = taken.text("component")
        sides: list[dict[str, CapturedTensor]] = []
        try:
            name = f"{name} ({site_of(component, Port.OUT, 'out').component})"
        except DegarbleError as error:
            raise malformed(f"{name}: component", component, "a component's name") from error
        for side, port in (("inputs", Port.IN), ("outputs", Port.OUT)):
            found = taken.record(side)
            try:
                sites = {each: site_of(component, port, each) for each in found}
            except DegarbleError as error:
                raise malformed(f"{name}: {side}", sorted(found), "names of sites") from error
            sides.append(
                {n: CapturedTensor.of_json(found[n], f"{name}: {s}") for n, s in sites.items()}
            )
        changed = taken.raw.get("changed")
        if not isinstance(changed, list) or not all(each in sides[0] for each in changed):
            raise malformed(f"{name}: changed", changed, "names of inputs")
        number, step = taken.count("number"), taken.count("step")
        return cls(number, step, component, sides[0], sides[1], tuple(changed))


def site_of(component: str, port: Port, name: str) -> Site:
    """Return the site of an input or output; the output `out` has the component's plain name."""
    return Site(component, port, "" if port is Port.OUT and name == "out" else name)


class JsonObject:
    """An object of JSON, its fields checked as they are taken."""

    def __init__(self, raw: Any, name: str) -> None:
        if not isinstance(raw, dict):
            raise malformed(name, raw, "a JSON object")
        self.raw: dict[str, Any] = raw
        self._name = name

    def text(self, field_name: str) -> str:
        """A string."""
        found = self.raw.get(field_name)
        if not isinstance(found, str):
            raise malformed(f"{self._name}: {field_name}", found, "a text")
        return found

    def count(self, field_name: str) -> int:
        """An integer that is not negative."""
        found = self.raw.get(field_name)
        if type(found) is not int or not 0 <= found < _LARGEST:
            raise malformed(f"{self._name}: {field_name}", found, "a count")
        return found

    def counts(self, field_name: str) -> tuple[int, ...]:
        """A list of counts."""
        found = self.raw.get(field_name)
        if not isinstance(found, list) or not all(
            type(each) is int and 0 <= each < _LARGEST for each in found
        ):
            raise malformed(f"{self._name}: {field_name}", found, "a list of counts")
        return tuple(found)

    def record(self, field_name: str) -> dict[str, Any]:
        """An object."""
        found = self.raw.get(field_name)
        if not isinstance(found, dict):
            raise malformed(f"{self._name}: {field_name}", found, "a JSON object")
        return found

    def numbers(self, field_name: str) -> dict[str, float] | None:
        """An object of finite numbers, or nothing."""
        if field_name not in self.raw:
            return None
        found = self.record(field_name)
        if not all(type(each) in (int, float) and math.isfinite(each) for each in found.values()):
            raise malformed(f"{self._name}: {field_name}", found, "finite numbers")
        return found


def read_json_object(text: bytes, name: str) -> dict[str, Any]:
    """Read one JSON object; doubled keys and numbers that JSON lacks are refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key occurs twice")
        return made

    def no_constant(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > _MOST_VALUES:
        raise malformed(name, f"{values} commas and brackets", f"at most {_MOST_VALUES}")
    try:
        raw = json.loads(text.decode(), object_pairs_hook=once, parse_constant=no_constant)
        if b"\\ud" in text.lower():  # half of a pair is no text: nothing could write it again
            json.dumps(raw, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise malformed(name, str(error), "JSON in UTF-8") from error
    return JsonObject(raw, name).raw


def malformed(name: str, value: object, expectation: str) -> UnreadableFile:
    """Refuse a part of a capture."""
    return UnreadableFile(name, value, expectation, f"The capture is damaged. {AGAIN}")


# --------------------------------------------------------------------------------------------------
# Types of the facts that a capture's manifest records about its run.
#
# A capture may hold other facts, and lack any of these or leave it null. A fact of a wrong type is
# rejected when the capture is opened, so readers need no check of their own.

if TYPE_CHECKING:
    Test = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _object_of(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_source(value: Any) -> bool:
    texts = ("name", "path", "fingerprint", "content")
    return _is_object(value) and all(isinstance(value.get(n), str | None) for n in texts)


def _is_filter(value: Any) -> bool:
    """Return whether each entry is absent or a list of names, numbers and ranges."""
    entry = _list_of(lambda each: isinstance(each, str | int) or _list_of(_is_count)(each))
    return _object_of(lambda each: each is None or entry(each))(value)


def _is_budget(value: Any) -> bool:
    counts, lists = ("bytes", "estimate", "whole"), ("layers_left_out", "tokens_left_out")
    texts = _list_of(_is_text)
    return (
        _is_object(value)
        and all(_is_count(value.get(name)) for name in counts)
        and all(texts(value.get(name)) for name in lists)
    )


def _is_sequence(value: Any) -> bool:
    ids = _list_of(_is_count)
    return _is_object(value) and all(ids(value.get(name, [])) for name in ("prompt", "new"))


BIASES = "biases"  # the fact that lists components whose module adds a bias

FACTS: Mapping[str, tuple[Test, str]] = {
    "source": (_is_source, "an object of texts"),
    "config": (_is_object, "an object"),
    "recipe": (_list_of(_object_of(_is_text)), "a list of rules"),
    "filters": (_is_filter, "an object of lists"),
    "budget": (_is_budget, "counts of bytes, and lists of what was left out"),
    "statistics_only": (lambda value: isinstance(value, bool), "true or false"),
    "new_tokens": (_is_count, "a count"),
    "versions": (_object_of(_is_text), "an object of texts"),
    "conventions": (_is_object, "an object"),
    "by_backend": (_list_of(_is_text), "a list of components"),
    "fell_to_torch": (_list_of(_is_text), "a list of components"),
    BIASES: (_list_of(_is_text), "a list of components"),
    "fraction_bits": (_object_of(_is_count), "an object of counts"),
    "sequences": (_list_of(_is_sequence), "a list of prompts with their new tokens"),
    **dict.fromkeys(
        ("family", "backend", "arithmetic", "form", "sums", "device"), (_is_text, "a text")
    ),
}


def require_known_types(facts: Mapping[str, Any]) -> None:
    """Refuse the first fact of another type than readers rely on."""
    for name, (test, expectation) in FACTS.items():
        value = facts.get(name)
        if value is not None and not test(value):
            raise malformed(f"facts: {name}", value, expectation)


# --------------------------------------------------------------------------------------------------
# Write and read one part of a capture: a safetensors file with an index in its header.
#
# A part `part-000000.safetensors` is written under a temporary name, so a part under its own name
# is whole, even after a kill. The index (steps and calls, JSON) is in the header's `__metadata__`
# with its SHA-256. Any safetensors reader opens the tensors.

PART_NAME = re.compile(r"part-(\d{6})\.safetensors")
_LENGTH_BYTES = 8
_LARGEST_HEAD = 100_000_000  # the format's own limit
_ALIGNED = 8


class PartTensor(NamedTuple):
    """One tensor of a part, with the offset of its bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Recorded(Protocol):
    """Steps and calls of a run, whatever holds them."""

    @property
    def steps(self) -> Sequence[CapturedStep]:
        """Return the forward passes."""

    @property
    def calls(self) -> Sequence[CapturedCall]:
        """Return the calls of components."""


def run_text(run: Recorded) -> str:
    """Say how much a run holds, in one short line."""
    components = len({call.component for call in run.calls})
    counts = {"call": len(run.calls), "component": components, "step": len(run.steps)}
    calls, parts, steps = (
        f"{count:,} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items()
    )
    return f"{calls} of {parts} in {steps}"


@dataclass(frozen=True, repr=False)
class CapturePart:
    """Header of a part."""

    path: Path
    number: int
    head_sha256: str
    size: int
    tensors: dict[str, PartTensor]
    steps: tuple[CapturedStep, ...]
    calls: tuple[CapturedCall, ...]

    def __repr__(self) -> str:
        return f"CapturePart({self.path.name}: {run_text(self)}, {len(self.tensors):,} tensors)"

    def read(self, name: str) -> bytearray:
        """Return the bytes of one tensor."""
        stored = self.tensors[name]
        with regular_file(self.path) as (descriptor, status):
            if status.st_size != self.size:  # before room is made for what is not there
                text = f"{self.path.name}: size"
                raise malformed(text, f"{status.st_size} bytes", f"{self.size}, as when opened")
            with open(descriptor, "rb", 0, closefd=False) as file:
                file.seek(stored.begin)
                data = bytearray(stored.end - stored.begin)
                left = memoryview(data)
                while left and (count := file.readinto(left)):
                    left = left[count:]
        if left:
            raise malformed(f"{self.path.name}: tensor {name}", "end of file", f"{len(data)} bytes")
        return data


def file_of(number: int) -> str:
    """Return the file name of a part."""
    return f"part-{number:06}.safetensors"


def head_of(
    number: int,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    steps: Sequence[CapturedStep],
    calls: Sequence[CapturedCall],
) -> bytes:
    """Spell the head of a part: (name, dtype, shape) in the order of the data, and the index."""
    index = _spelled(
        {"steps": [step.to_json() for step in steps], "calls": [call.to_json() for call in calls]}
    )
    head: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "part": str(number),
            "index_sha256": hashlib.sha256(index).hexdigest(),
            "index": index.decode(),
        }
    }
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = _spelled(head)
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_part(path: Path, head: bytes, datas: Iterable[memoryview]) -> None:
    """Write a part under a temporary name and rename it; `sync` makes it durable later."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb", buffering=0) as file:
            for data in (memoryview(head), *datas):
                left = data
                while left:
                    left = left[file.write(left) or 0 :]
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UnwritablePath(
            path.name, error.strerror or str(error), "room for the capture",
            "Make room, or capture less: see --layers, --components, --tokens, --statistics-only.",
        ) from error  # fmt: skip


def sync(folder: Path, files: Iterable[str]) -> None:
    """Return when the parts, and their names, are durable."""
    try:
        for file in files:
            sync_file(folder / file)
        sync_folder(folder)
    except OSError as error:
        raise UnwritablePath(
            str(folder), error.strerror or str(error), "a place that keeps what is written",
            "Choose another place.",
        ) from error  # fmt: skip


def read_part(path: Path) -> CapturePart:
    """Read and check the head of a part; the data are not touched."""
    with regular_file(path) as (descriptor, status):
        size = status.st_size
        if size < _LENGTH_BYTES:
            raise malformed(f"{path.name}: size", f"{size} bytes", "a head and its data")
        length = int.from_bytes(read_span(path, descriptor, _LENGTH_BYTES, 0), "little")
        if not 0 < length <= min(_LARGEST_HEAD, size - _LENGTH_BYTES):
            raise malformed(f"{path.name}: length of the head", length, f"inside {size} bytes")
        text = read_span(path, descriptor, length, _LENGTH_BYTES)
    head_sha256 = hashlib.sha256(length.to_bytes(_LENGTH_BYTES, "little") + text).hexdigest()
    head = read_json_object(text, f"{path.name}: head")
    metadata = JsonObject(head.pop("__metadata__", None), f"{path.name}: __metadata__")
    number, steps, calls = _index(path, metadata)
    tensors = _tensors(path, head, _LENGTH_BYTES + length, size)
    return CapturePart(path, number, head_sha256, size, tensors, steps, calls)


def _index(
    path: Path, metadata: JsonObject
) -> tuple[int, tuple[CapturedStep, ...], tuple[CapturedCall, ...]]:
    found = [metadata.text(each) for each in ("format", "version", "part")]
    name = PART_NAME.fullmatch(path.name)
    expected = [FORMAT, str(VERSION), str(int(name[1])) if name else ""]
    if found != expected:
        raise malformed(f"{path.name}: format, version and part", found, str(expected))
    index = metadata.text("index").encode()  # object_of refused lone surrogates
    if hashlib.sha256(index).hexdigest() != metadata.text("index_sha256"):
        raise malformed(f"{path.name}: index", "other bytes", "the bytes that were hashed")
    raw = read_json_object(index, f"{path.name}: index")
    steps, calls = raw.get("steps"), raw.get("calls")
    if not isinstance(steps, list) or not isinstance(calls, list):
        raise malformed(f"{path.name}: index", sorted(raw), "lists of steps and calls")
    return (
        int(found[2]),
        tuple(CapturedStep.of_json(step, f"{path.name}: step {n}") for n, step in enumerate(steps)),
        tuple(CapturedCall.of_json(call, f"{path.name}: call {n}") for n, call in enumerate(calls)),
    )


def _tensors(path: Path, head: dict[str, Any], begin: int, size: int) -> dict[str, PartTensor]:
    """Return the tensors in the order of their data, which must fill the file without a gap."""
    made, end = {}, 0
    for name, raw in head.items():
        text = f"{path.name}: tensor {visible(name[:200])}"
        taken = JsonObject(raw, text)
        dtype, shape, offsets = (
            taken.text("dtype"),
            taken.counts("shape"),
            taken.counts("data_offsets"),
        )
        nbytes = math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
        if dtype not in DTYPE_BYTES or offsets != (end, end + nbytes):
            expectation = f"[{end}, {end + nbytes}], as {dtype} {list(shape)} has"
            raise malformed(text, list(offsets), expectation)
        made[name] = PartTensor(dtype, shape, begin + end, begin + end + nbytes)
        end += nbytes
    if begin + end != size:
        raise malformed(f"{path.name}: size", f"{size} bytes", f"{begin + end}, as its head says")
    return made


def _spelled(raw: object) -> bytes:
    return json.dumps(raw, separators=(",", ":"), allow_nan=False).encode()
