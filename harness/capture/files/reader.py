"""Read a capture: open it, validate it, return its tensors, and summarise it as text.

Torch is imported only where a tensor is asked for, so that an old run is summarised without it.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from degarble.harness.base.errors import InvalidArgument, Undecided, UnreadableFile
from degarble.harness.base.files import read_small_file
from degarble.harness.capture.files.records import (
    AGAIN,
    FORMAT,
    MANIFEST,
    PART_NAME,
    VERSION,
    JsonObject,
    Phase,
    file_of,
    malformed,
    read_json_object,
    read_part,
    require_known_types,
    run_text,
)
from degarble.harness.report.number_text import visible
from degarble.harness.report.progress import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor

    from degarble.harness.capture.files.records import (
        CapturedCall,
        CapturedStep,
        CapturedTensor,
        CapturePart,
    )
    from degarble.harness.model.components import Component


# --------------------------------------------------------------------------------------------------
# Read a capture: steps, calls, and tensors whose bytes are checked against their hashes.
#
# A complete capture has exactly the parts of its manifest. Of an incomplete one, whose run was
# killed, the parts that exist are read. Tensors are read on demand, so a capture larger than memory
# opens at once. Format version 1 is still read.

LARGEST_MANIFEST = 64 << 20
# safetensors' word to numpy's; what numpy lacks is read as codes of the same width
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64",
    "F64": "float64", "BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8", "F8_E8M0": "uint8",
}  # fmt: skip
_TORCH = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64",
    "F64": "float64", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Capture:
    """Recorded tensors of one run. `facts` is what the manifest states (docs/capture.md)."""

    path: Path
    facts: Mapping[str, Any]
    complete: bool
    tool_version: str
    hash: str  # of the manifest, and through it of every tensor, where the capture is complete
    parts: tuple[CapturePart, ...]
    steps: tuple[CapturedStep, ...]
    calls: tuple[CapturedCall, ...]
    places: Mapping[str, CapturePart]

    def __repr__(self) -> str:
        state = "" if self.complete else ", incomplete"
        return f"Capture({visible(self.path.name)}: {run_text(self)}{state})"

    @classmethod
    def open(cls, path: Path | str) -> Capture:
        """Open a capture and check all of it but the tensors' bytes."""
        path = Path(path)
        text = _manifest_text(path)
        manifest = JsonObject(read_json_object(text, MANIFEST), MANIFEST)
        _require_known(path, manifest)
        complete = manifest.raw.get("complete")
        if not isinstance(complete, bool):
            raise malformed(f"{MANIFEST}: complete", complete, "true or false")
        parts = tuple(_parts(path, manifest, complete=complete))
        places = _places(parts)
        calls = tuple(call for part in parts for call in part.calls)
        steps = tuple(step for part in parts for step in part.steps)
        if complete and len(calls) != manifest.count("calls"):
            raise malformed(f"{MANIFEST}: calls", manifest.raw["calls"], f"{len(calls)}")
        tool = JsonObject(manifest.record("tool"), f"{MANIFEST}: tool").text("version")
        digest = hashlib.sha256(text).hexdigest()
        facts = manifest.record("facts")
        require_known_types(facts)
        capture = cls(path, facts, complete, tool, digest, parts, steps, calls, places)
        capture._require_consistent()
        return capture

    def require_complete(self) -> None:
        """Refuse to judge a part of a run as if it were the whole."""
        if not self.complete:
            raise Undecided(
                f"capture {self.path.name}", "incomplete", "a capture whose run came to its end",
                "Capture the run again, or add --partial to judge the calls that are there.",
            )  # fmt: skip

    def read(self, kept: CapturedTensor) -> bytearray:
        """The bytes of a tensor, checked against their hash."""
        if kept.at is None:
            raise InvalidArgument(
                "tensor", "statistics only", "a tensor whose bytes were captured",
                "Capture again without --statistics-only.",
            )  # fmt: skip
        part = self.places[kept.at]
        data = part.read(kept.at)
        if hashlib.sha256(data).hexdigest() != kept.sha256:
            name = f"{part.path.name}: tensor {visible(kept.at[:200])}"
            raise malformed(name, "other bytes", "the bytes that were hashed")
        return data

    def array(self, kept: CapturedTensor) -> NDArray[Any]:
        """A tensor for numpy; BF16 and 8-bit floats, which it lacks, as codes."""
        return np.frombuffer(self.read(kept), _NUMPY[kept.dtype]).reshape(kept.shape)

    def tensor(self, kept: CapturedTensor) -> Tensor:
        """A tensor for torch, in its own dtype."""
        import torch  # noqa: PLC0415  an old run is told without torch

        data, dtype = self.read(kept), getattr(torch, _TORCH[kept.dtype])
        if not data:
            return torch.empty(kept.shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(kept.shape)

    def inputs(self, call: CapturedCall) -> dict[str, Tensor]:
        """Return the inputs of a call, as they were before it ran."""
        return {name: self.tensor(kept) for name, kept in call.inputs.items()}

    def outputs(self, call: CapturedCall) -> dict[str, Tensor]:
        """Return the outputs of a call."""
        return {name: self.tensor(kept) for name, kept in call.outputs.items()}

    def by_component(self) -> dict[str, list[CapturedCall]]:
        """Group the calls by component, in the order in which they ran."""
        found: dict[str, list[CapturedCall]] = defaultdict(list)
        for call in self.calls:
            found[call.component].append(call)
        return dict(found)

    def damage(self) -> Iterator[str]:
        """Read every stored tensor; tell of each whose bytes are not those that were hashed."""
        for kept in self._stored():
            try:
                self.read(kept)
            except UnreadableFile as error:
                yield str(error)

    def require_undamaged(self) -> None:
        """Read every stored tensor; refuse the first whose bytes are not those that were hashed."""
        for kept in self._stored():
            self.read(kept)

    def _stored(self) -> Iterable[CapturedTensor]:
        """Return a record of each stored tensor; several for one with several hashes."""
        kept = (kept for call in self.calls for _, kept in call.sites() if kept.at is not None)
        return {(tensor.at, tensor.sha256): tensor for tensor in kept}.values()

    def _require_consistent(self) -> None:
        numbers = {step.number for step in self.steps}
        for place, call in enumerate(self.calls):
            name = f"call {call.number} ({call.component})"
            if call.number != place or call.step not in numbers:
                raise malformed(name, (call.number, call.step), f"number {place}, of a known step")
            for site, kept in call.sites():
                if kept.at is not None:
                    self._require_stored(f"{name}: {site}", kept)

    def _require_stored(self, name: str, kept: CapturedTensor) -> None:
        part = self.places.get(str(kept.at))
        if part is None:
            raise malformed(name, kept.at, "a tensor of one of the parts")
        stored = part.tensors[str(kept.at)]
        if (stored.dtype, stored.end - stored.begin) != (kept.dtype, kept.nbytes):
            found = f"{stored.dtype} {list(stored.shape)}"
            raise malformed(name, found, f"{kept.dtype} {list(kept.shape)}")


def _places(parts: tuple[CapturePart, ...]) -> dict[str, CapturePart]:
    places: dict[str, CapturePart] = {}
    for part in parts:
        for name in part.tensors:
            if places.setdefault(name, part) is not part:
                raise malformed(f"{part.path.name}: tensor {visible(name[:200])}", "twice", "once")
    return places


def _manifest_text(path: Path) -> bytes:
    try:
        return read_small_file(path / MANIFEST, LARGEST_MANIFEST)
    except UnreadableFile as error:
        raise UnreadableFile(
            error.name, error.value, f"a capture: a folder with {MANIFEST}, {error.expectation}",
            "Record one with degarble capture.",
        ) from error  # fmt: skip


def _require_known(path: Path, manifest: JsonObject) -> None:
    found = manifest.raw.get("format"), manifest.raw.get("version")
    if found[0] != FORMAT:
        raise UnreadableFile(
            str(path / MANIFEST), found[0], f"format {FORMAT}", "Name the folder of a capture."
        )
    if type(found[1]) is not int or not 1 <= found[1] <= VERSION:
        raise UnreadableFile(
            f"{path / MANIFEST}: version", found[1], f"1 to {VERSION}",
            "Read it with the version of degarble that wrote it, or a newer one.",
        )  # fmt: skip


def _parts(path: Path, manifest: JsonObject, *, complete: bool) -> Iterator[CapturePart]:
    """Return the parts in order: those of the manifest, or those that a killed run left."""
    if not complete:
        numbers = sorted(
            int(m[1]) for each in path.iterdir() if (m := PART_NAME.fullmatch(each.name))
        )
        for place, number in enumerate(numbers):
            if place != number:
                raise malformed(file_of(place), "missing", f"a part in front of {file_of(number)}")
            yield read_part(path / file_of(number))
        return
    listed = manifest.raw.get("parts")
    if not isinstance(listed, list):
        raise malformed(f"{MANIFEST}: parts", listed, "a list")
    for number, raw in enumerate(listed):
        stated = JsonObject(raw, f"{MANIFEST}: part {number}")
        file = file_of(number)
        if stated.text("file") != file:
            raise malformed(f"{MANIFEST}: part {number}", stated.raw["file"], file)
        if not (path / file).exists():
            raise UnreadableFile(file, "missing", "every part of the manifest", AGAIN)
        part = read_part(path / file)
        said = (stated.count("bytes"), stated.text("head_sha256"))
        if said != (part.size, part.head_sha256):
            raise malformed(file, f"{part.size} bytes, another head", "the part of the manifest")
        yield part


# --------------------------------------------------------------------------------------------------
# Summarise a capture in a few lines of text, without torch and without its checkpoint.
#
# The first line says whether the capture is complete.


def capture_lines(capture: Capture) -> list[str]:
    """Summarise a capture: source, steps, size."""
    kept = [tensor for call in capture.calls for _, tensor in call.sites()]
    stored = {tensor.at: tensor.nbytes for tensor in kept if tensor.at is not None}
    components = {call.component for call in capture.calls}
    steps = Counter(step.phase for step in capture.steps)
    tokens = Counter[Phase]()
    for step in capture.steps:
        tokens[step.phase] += len(step.tokens)
    lines = [
        _state(capture),
        f"  run         {_run(capture.facts)}",
        f"  steps       {_steps(steps, tokens)}",
        f"  calls       {len(capture.calls):,} of {len(components):,} components",
        f"  tensors     {len(kept):,}, {len(stored):,} stored: {size(sum(stored.values()))}",
    ]
    changed = [call for call in capture.calls if call.changed]
    if changed:
        names = f"{changed[0].component} ({', '.join(changed[0].changed)})"
        lines.append(f"  changed     {len(changed):,} calls wrote into their inputs, first {names}")
    return lines


def capture_document(capture: Capture) -> dict[str, Any]:
    """Return the same summary as a JSON document."""
    return {
        "complete": capture.complete,
        "hash": capture.hash,
        "steps": len(capture.steps),
        "calls": len(capture.calls),
        "components": len({call.component for call in capture.calls}),
        "changed": sum(bool(call.changed) for call in capture.calls),
        "facts": dict(capture.facts),
    }


def _state(capture: Capture) -> str:
    if capture.complete:
        return f"Capture {capture.hash[:12]}, complete, by degarble {capture.tool_version}"
    return f"Capture, incomplete: its run ended before its time, by degarble {capture.tool_version}"


def _run(facts: Mapping[str, Any]) -> str:
    source = facts.get("source")
    name = source.get("name") if isinstance(source, dict) else None
    told = [name, facts.get("family"), facts.get("backend"), facts.get("arithmetic")]
    return visible(", ".join(str(each) for each in told if each)) or "not stated"


def _steps(steps: Counter[Phase], tokens: Counter[Phase]) -> str:
    lines = [
        f"{steps[phase]:,} of {phase} ({tokens[phase]:,} tokens)" for phase in Phase if steps[phase]
    ]
    return ", ".join(lines) or "none"


# --------------------------------------------------------------------------------------------------
# Validate the indices in a capture that come from outside the model: token ids, positions, bounds.
#
# The twin uses them as indices, so one that is out of range would crash it. No kernel computed
# them, so a capture that holds such a value is rejected, naming call and input. What components
# compute is judged whatever it holds; engine/localise/tensor_forms.py checks its shape and dtype.

_INTEGERS = ("I64", "I32", "I16", "I8", "U32", "U16", "U8")
_FROM_OUTSIDE = ("tokens", "positions", "offsets")
_MOST = 1 << 31


def require_usable_inputs(
    capture: Capture, components: Iterable[Component], vocabulary: int
) -> None:
    """Refuse a call whose inputs no run of its component can have had."""
    known = {component.name: component for component in components}
    for call in capture.calls:
        component = known.get(call.component)
        if component is None:
            continue
        for each in component.inputs:
            kept = call.inputs.get(each.name)
            if kept is not None and each.via in _FROM_OUTSIDE:
                most = vocabulary if each.via == "tokens" else _MOST
                _require_indices(capture, call, each.name, kept, most)
        # A filter of tokens cuts what has a row for each, and nothing else.
        if not any(kept.rows is not None for kept in call.inputs.values()):
            _require_offsets(capture, call)


def _require_indices(
    capture: Capture, call: CapturedCall, name: str, kept: CapturedTensor, most: int
) -> None:
    if kept.dtype not in _INTEGERS or len(kept.shape) != 1:
        found = f"{kept.dtype} {list(kept.shape)}"
        raise malformed(_named(call, name), found, "integers in one row")
    values = _values(capture, kept)
    if values is None or not len(values):
        return
    least, largest = int(values.min()), int(values.max())
    if least < 0 or largest >= most:
        text = f"numbers from 0 and below {most}"
        raise malformed(_named(call, name), (least, largest), text)


def _require_offsets(capture: Capture, call: CapturedCall) -> None:
    """Refuse sequences that do not follow each other over all rows."""
    offsets, positions = call.inputs.get("token_offsets"), call.inputs.get("positions")
    values = None if offsets is None else _values(capture, offsets)
    if values is None or positions is None:
        return
    found = values.tolist()
    ends = len(found) > 1 and (found[0], found[-1]) == (0, positions.shape[0])
    if not ends or any(a >= b for a, b in pairwise(found)):
        text = f"from 0 up to {positions.shape[0]}, each larger than the one in front"
        raise malformed(_named(call, "token_offsets"), found[:8], text)


def _values(capture: Capture, kept: CapturedTensor) -> Tensor | None:
    return None if kept.at is None else capture.tensor(kept)


def _named(call: CapturedCall, name: str) -> str:
    return f"call {call.number} ({call.component}): {name}"
