"""Write a capture: hash and store tensors and calls in a thread of its own.

The manifest says `complete` only when every part is on disk. Equal bytes are stored once, whatever
sites they belong to. The caller waits only while the memory bound is reached. An error of the
system is raised at the next call or at the end, whichever comes first; what was written before
stays readable. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from degarble.harness.base.errors import UnwritablePath
from degarble.harness.base.version import VERSION as TOOL_VERSION
from degarble.harness.capture.files import records
from degarble.harness.capture.files.records import (
    FORMAT,
    MANIFEST,
    VERSION,
    CapturedCall,
    CapturedStep,
    CapturedTensor,
    site_of,
)
from degarble.harness.model.sites import Port
from degarble.harness.report.files import usable_folder, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PART_BYTES = 64 << 20
PART_CALLS = 2048
PART_SECONDS = 2.0  # a slow run loses at most this much, and the step in which it dies
MEMORY_BYTES = 512 << 20  # that wait to be written
_BACKGROUND = 10  # niceness of the writing thread: the run goes first


@dataclass(eq=False)
class Payload:
    """Immutable bytes of one tensor; one object for all its sites."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | None
    stored: bool = True
    sha256: str = ""
    at: str | None = None
    sent: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = 0 if self.data is None else self.data.nbytes


class PendingTensor(NamedTuple):
    """A tensor at a site, before it is written: its payload with shape and rows there."""

    payload: Payload
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    statistics: Mapping[str, float] | None = None


@dataclass
class PendingCall:
    """A call on its way."""

    step: int
    component: str
    inputs: dict[str, PendingTensor]
    outputs: dict[str, PendingTensor]
    changed: tuple[str, ...] = ()


class CaptureTotals(NamedTuple):
    """What was written so far."""

    calls: int
    tensors: int
    stored_bytes: int
    shown_bytes: int  # what the same sites would take without sharing


class CaptureWriter:
    """Writes one capture. Use it as a context; it is complete only if `finish` was called."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        memory_bytes: int = MEMORY_BYTES,
        part_bytes: int = PART_BYTES,
        part_seconds: float = PART_SECONDS,
        name: str = "--out",
    ) -> None:
        """`name` is what the caller's user calls the folder, for refusals."""
        require_free(folder, name)
        self.folder = usable_folder(name, folder)
        self._facts = dict(facts)
        self._memory_bytes = memory_bytes
        part_bytes = min(part_bytes, max(1, memory_bytes // 4))
        self._pack = _Packer(folder, part_bytes, part_seconds)
        self._waiting: deque[CapturedStep | PendingCall | None] = deque()
        self._changed = threading.Condition()
        self._in_memory = 0
        self._hurry = False
        self._finished = False
        self._error: BaseException | None = None
        write_text(folder / MANIFEST, self._manifest(complete=False))
        self._thread = threading.Thread(target=self._work, name="capture", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        if not self._finished and not self._pack.written:
            # Nothing was captured: a refusal leaves nothing half-written.
            with suppress(OSError):
                (self.folder / MANIFEST).unlink()

    def step(self, step: CapturedStep) -> None:
        """Begin a forward pass; the calls that follow belong to it."""
        self._send(step, 0)

    def call(self, call: PendingCall) -> None:
        """Take one call. Waits while too much is in memory; raises what writing met."""
        fresh = 0
        for tensor in (*call.inputs.values(), *call.outputs.values()):
            if not tensor.payload.sent:
                tensor.payload.sent = True
                fresh += tensor.payload.nbytes
        self._send(call, fresh)

    def finish(self, **more: Any) -> CaptureTotals:
        """Write what is left and mark the capture complete; `more` facts are known only now."""
        self._stop()
        if self._error is not None:
            raise self._error
        records.sync(self.folder, [each["file"] for each in self._pack.written])
        self._facts |= more
        write_text(self.folder / MANIFEST, self._manifest(complete=True))
        self._finished = True
        return self.tally

    @property
    def tally(self) -> CaptureTotals:
        """What was taken so far."""
        return self._pack.tally

    def _send(self, item: CapturedStep | PendingCall, nbytes: int) -> None:
        with self._changed:
            while self._in_memory and self._in_memory + nbytes > self._memory_bytes:
                if self._error is not None:
                    break
                self._hurry = True
                self._changed.notify_all()
                self._changed.wait()
            if self._error is not None:
                raise self._error
            self._in_memory += nbytes
            self._waiting.append(item)
            self._changed.notify_all()

    def _stop(self) -> None:
        if self._thread.is_alive():
            with self._changed:
                self._waiting.append(None)
                self._changed.notify_all()
            self._thread.join()

    def _work(self) -> None:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND)
        try:
            while (item := self._next()) is not None:
                if isinstance(item, CapturedStep):
                    self._pack.steps.append(item)
                else:
                    self._pack.add(item)
                if self._pack.is_due():
                    self._flush()
            self._flush()
        except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
            with self._changed:
                self._error = error
                self._waiting.clear()
                self._changed.notify_all()

    def _next(self) -> CapturedStep | PendingCall | None:
        with self._changed:
            while not self._waiting:
                if self._hurry:
                    break
                self._changed.wait()
            if self._waiting:
                return self._waiting.popleft()
        self._flush()
        return self._next()

    def _flush(self) -> None:
        self._pack.flush()
        with self._changed:
            self._in_memory -= self._pack.take_freed()
            self._hurry = False
            self._changed.notify_all()

    def _manifest(self, *, complete: bool) -> str:
        raw = {
            "format": FORMAT,
            "version": VERSION,
            "complete": complete,
            "tool": {"name": "degarble", "version": TOOL_VERSION},
            "facts": self._facts,
            "parts": self._pack.written if complete else [],
            "calls": self._pack.tally.calls if complete else None,
        }
        return json.dumps(raw, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


class _Packer:
    """Gathers calls into parts. Lives in the writing thread."""

    def __init__(self, folder: Path, part_bytes: int, part_seconds: float) -> None:
        self.steps: list[CapturedStep] = []
        self.written: list[dict[str, Any]] = []
        self.tally = CaptureTotals(0, 0, 0, 0)
        self._folder = folder
        self._part_bytes = part_bytes
        self._part_seconds = part_seconds
        self._calls: list[CapturedCall] = []
        self._payloads: list[Payload] = []
        self._gathered = 0
        self._freed = 0
        self._begun = time.monotonic()
        self._known: dict[tuple[str, str], str] = {}  # dtype and hash to the stored tensor's name

    def add(self, sent: PendingCall) -> None:
        """Hash what a call brings, and keep it for the part that comes."""
        number = self.tally.calls
        both = [
            {name: self._kept(tensor, number, f"{site_of(sent.component, port, name)}")
             for name, tensor in side.items()}
            for port, side in ((Port.IN, sent.inputs), (Port.OUT, sent.outputs))
        ]  # fmt: skip
        call = CapturedCall(number, sent.step, sent.component, both[0], both[1], sent.changed)
        self._calls.append(call)
        shown = sum(kept.nbytes for side in both for kept in side.values())
        tensors = self.tally.tensors + sum(map(len, both))
        self.tally = self.tally._replace(
            calls=number + 1, tensors=tensors, shown_bytes=self.tally.shown_bytes + shown
        )

    def is_due(self) -> bool:
        """Return whether a part is large enough to be written."""
        return (
            self._gathered >= self._part_bytes
            or len(self._calls) >= PART_CALLS
            or time.monotonic() - self._begun >= self._part_seconds
        )

    def flush(self) -> None:
        """Write what was gathered as one part."""
        self._begun = time.monotonic()
        if not (self._calls or self.steps):
            return
        named = [(str(each.at), each.dtype, each.shape) for each in self._payloads]
        number = len(self.written)
        head = records.head_of(number, named, self.steps, self._calls)
        datas = [each.data for each in self._payloads if each.data is not None]
        file = records.file_of(number)
        records.write_part(self._folder / file, head, datas)
        self.written.append(
            {
                "file": file,
                "bytes": len(head) + self._gathered,
                "head_sha256": hashlib.sha256(head).hexdigest(),
            }
        )
        self.tally = self.tally._replace(stored_bytes=self.tally.stored_bytes + self._gathered)
        for payload in self._payloads:
            payload.data = None
        self._freed += self._gathered
        self._gathered = 0
        self.steps, self._calls, self._payloads = [], [], []

    def take_freed(self) -> int:
        """Return the bytes released since the last call."""
        freed, self._freed = self._freed, 0
        return freed

    def _kept(self, sent: PendingTensor, call: int, site: str) -> CapturedTensor:
        payload = sent.payload
        if not payload.sha256:
            self._take(payload, f"{call:06} {site}")
        return CapturedTensor(
            payload.dtype, sent.shape, payload.sha256, payload.at, sent.rows, sent.statistics
        )

    def _take(self, payload: Payload, name: str) -> None:
        """Hash a payload; gather it, unless its bytes are known."""
        assert payload.data is not None, "a payload is hashed before it is let go"
        payload.sha256 = hashlib.sha256(payload.data).hexdigest()
        key = (payload.dtype, payload.sha256)
        if payload.stored:
            payload.at = self._known.setdefault(key, name)
        if payload.at == name:
            self._payloads.append(payload)
            self._gathered += payload.nbytes
        else:
            payload.data = None
            self._freed += payload.nbytes


def require_free(folder: Path, name: str = "--out") -> None:
    """Refuse a folder in which a capture or a checkpoint lies; makes nothing."""
    require_no_checkpoint(folder, name)
    taken = (folder / MANIFEST).exists()
    if folder.is_dir():
        taken = taken or any(records.PART_NAME.fullmatch(path.name) for path in folder.iterdir())
    if taken:
        raise UnwritablePath(
            name,
            str(folder),
            "a folder without a capture",
            f"Choose another folder, or remove what a killed run left: rm -r '{folder}'",
        )


def require_no_checkpoint(folder: Path, name: str = "--out") -> None:
    """Refuse the folder of a checkpoint: its manifest and its shards would no longer be alone."""
    if folder.is_dir() and any(
        path.name == "config.json"
        or (path.suffix == ".safetensors" and not records.PART_NAME.fullmatch(path.name))
        for path in folder.iterdir()
    ):
        raise UnwritablePath(
            name, str(folder), "a folder without a checkpoint", "Choose another folder."
        )
