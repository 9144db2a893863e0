"""Record types of a capture: stored tensor, step, call; and their JSON. See docs/capture.md.

A call is one run of one component: inputs are taken before it, outputs after it. A step is one
forward pass over tokens of some sequences: their prompts (prefill), or one token each (decode).
Imports no sibling.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import DegarbleError, UnreadableFile
from degarble.harness.model.sites import Port, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class Kept(NamedTuple):
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
    def of_json(cls, raw: Any, name: str) -> Kept:
        """Check and read what to_json spelled."""
        taken = Fields(raw, name)
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
class Step:
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
    def of_json(cls, raw: Any, name: str) -> Step:
        """Check and read what to_json spelled."""
        taken = Fields(raw, name)
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
class Call:
    """One run of one component. `changed` names the inputs that it overwrote."""

    number: int
    step: int
    component: str
    inputs: Mapping[str, Kept] = field(default_factory=dict)
    outputs: Mapping[str, Kept] = field(default_factory=dict)
    changed: tuple[str, ...] = ()

    def sites(self) -> Iterator[tuple[Site, Kept]]:
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
    def of_json(cls, raw: Any, name: str) -> Call:
        """Check and read what to_json spelled."""
        taken = Fields(raw, name)
        component = taken.text("component")
        sides: list[dict[str, Kept]] = []
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
            sides.append({n: Kept.of_json(found[n], f"{name}: {s}") for n, s in sites.items()})
        changed = taken.raw.get("changed")
        if not isinstance(changed, list) or not all(each in sides[0] for each in changed):
            raise malformed(f"{name}: changed", changed, "names of inputs")
        number, step = taken.count("number"), taken.count("step")
        return cls(number, step, component, sides[0], sides[1], tuple(changed))


def site_of(component: str, port: Port, name: str) -> Site:
    """Return the site of an input or output; the output `out` has the component's plain name."""
    return Site(component, port, "" if port is Port.OUT and name == "out" else name)


class Fields:
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


def object_of(text: bytes, name: str) -> dict[str, Any]:
    """Read one JSON object; doubled keys and numbers that JSON lacks are refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a key stands twice")
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
    return Fields(raw, name).raw


def malformed(name: str, value: object, expectation: str) -> UnreadableFile:
    """Refuse a part of a capture."""
    return UnreadableFile(name, value, expectation, f"The capture is damaged. {AGAIN}")
