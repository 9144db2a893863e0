"""Capture chosen requests of a live server by id, while other requests go on.

One capture is open at a time. Requests open and close it, into a folder that the operator named; a
request never names a path. Captured requests run in steps of their own, so that a capture holds
nothing of others; batching changes no token. Each step is written whole or, where it would exceed
the bytes asked for, not at all, and then the capture ends. A full disk ends the capture, but no
request.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from degarble.harness.base.errors import DegarbleError
from degarble.harness.capture.capture import CaptureSettings, facts_of
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import CaptureRequest, RequestSelection
from degarble.harness.capture.recorder import Recorder
from degarble.harness.serve.messages import ApiError, bad_input

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from degarble.harness.capture.files.records import CapturedStep
    from degarble.harness.capture.files.writer import PendingCall
    from degarble.harness.inference.model import OpenModel

CAPTURE_PATH = "/capture"
CapturedSequence = Any  # of the engine, which knows this module


class _Whole:
    """A sink that forwards whole steps, up to a number of bytes."""

    def __init__(self, writer: CaptureWriter, nbytes: int) -> None:
        self._writer, self._left = writer, nbytes
        self._step: CapturedStep | None = None
        self._calls: list[PendingCall] = []
        self._seen: set[int] = set()
        self.full = False

    def step(self, step: CapturedStep) -> None:
        """Begin a step."""
        self._step, self._calls = step, []

    def call(self, call: PendingCall) -> None:
        """Keep a call until its step has ended."""
        for tensor in (*call.inputs.values(), *call.outputs.values()):
            if id(tensor.payload) not in self._seen:
                self._seen.add(id(tensor.payload))
                self._left -= tensor.payload.nbytes
        self.full |= self._left < 0
        if self.full:
            self._calls = []
        else:
            self._calls.append(call)

    def end(self) -> None:
        """Write the step."""
        self._seen.clear()
        if self._step is not None and not self.full:
            self._writer.step(self._step)
            for call in self._calls:
                self._writer.call(call)
        self._step, self._calls = None, []


class _Open:
    """One open capture."""

    def __init__(self, folder: Path, model: OpenModel, request: CaptureRequest) -> None:
        bound = model.logits_model.bound
        request.wanted.require_choosing(bound.calls)
        self.folder, self.selection = folder, RequestSelection(request)
        facts = facts_of(model.checkpoint.root, model, CaptureSettings(request.wanted))
        self.writer = CaptureWriter(
            folder, facts | {"backend": "torch", "asked": request.document()}
        )
        self.sink = _Whole(self.writer, request.nbytes)
        self.recorder = Recorder(self.sink, request.wanted)
        self.plain = dict(bound.calls)
        self.recorder.wrap(bound)
        self.watched = dict(bound.calls)
        bound.calls.update(self.plain)
        self.lines: list[CapturedSequence] = []
        self.error: Exception | None = None

    @property
    def ended(self) -> str | None:
        """Return what ended it, or None."""
        if self.error is not None:
            return "error"
        return "bytes" if self.sink.full else "seconds" if self.selection.late else None

    def document(self) -> dict[str, Any]:
        """Return its state as a JSON document."""
        return {
            "capture": self.folder.name, "requests": self.selection.ids, "ended": self.ended,
            "calls": self.writer.tally.calls, "asked": self.selection.asked.document(),
            "error": None if self.error is None else str(self.error),
        }  # fmt: skip


class RequestCapture:
    """Opens and closes captures (web side) and captures steps (computing thread)."""

    def __init__(self, folder: Path, model: OpenModel) -> None:
        self._folder, self._model = folder, model
        self._lock = threading.Lock()  # held while a captured step runs
        self._open: _Open | None = None
        self._number = 0

    def start(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Open a capture of requests that arrive from now on."""
        with self._lock:
            if self._open is not None:
                message = f"{self._open.folder.name} is open; end it first"
                raise ApiError(409, message, None, "capture_open")
            try:
                request = CaptureRequest.of_json(raw)
                self._open = _Open(self._free(), self._model, request)
            except DegarbleError as error:
                raise bad_input("capture", error) from error
            return {"state": "open"} | self._open.document()

    def state(self) -> dict[str, Any]:
        """Return the state of the current capture."""
        found = self._open
        return {"state": "closed"} if found is None else {"state": "open"} | found.document()

    def stop(self) -> dict[str, Any]:
        """Close the capture; what was captured is complete on disk."""
        with self._lock:
            found, self._open = self._open, None
            if found is None:
                raise ApiError(409, "no capture is open", None, "capture_closed")
            return {"state": "closed"} | _closed(found)

    def close(self) -> None:
        """Close an open capture when the server ends."""
        if self._open is not None:
            self.stop()

    def _free(self) -> Path:
        while True:
            self._number += 1
            folder = self._folder / f"capture-{self._number:04}"
            if not folder.exists():
                return folder

    def parted(self, lines: Sequence[CapturedSequence]) -> list[list[CapturedSequence]]:
        """Split the lines of a step: captured ones get steps of their own."""
        if self._open is None:
            return [list(lines)]
        mine = [line for line in lines if self._takes(line)]
        others = [line for line in lines if line not in mine]
        return [group for group in (others, mine) if group]

    def _takes(self, line: CapturedSequence) -> bool:
        found = self._open
        if found is None or found.ended is not None:
            return False
        if line in found.lines:
            return True
        # A request that has begun would lack its beginning.
        if line.continuation.fed or found.selection.owner(line.request) is None:
            return False
        found.lines.append(line)
        return True

    @contextmanager
    def watching(
        self, lines: Sequence[CapturedSequence], pieces: Sequence[Sequence[int]]
    ) -> Iterator[None]:
        """Record a step if all its lines are captured."""
        with self._lock:
            found = self._open
            # Trap: after the end of a capture its lines share steps with others again.
            mine = found is not None and all(line in found.lines for line in lines)
            if found is None or found.error is not None or found.ended is not None or not mine:
                yield
                return
            calls = self._model.logits_model.bound.calls
            calls.update(found.watched)
            try:
                _begin(found, lines, pieces)
                yield
            finally:
                calls.update(found.plain)
            try:
                found.sink.end()
            except (DegarbleError, OSError) as error:
                found.error = error


def _begin(
    found: _Open, lines: Sequence[CapturedSequence], pieces: Sequence[Sequence[int]]
) -> None:
    starts = [line.continuation.fed for line in lines]
    tokens = [token for piece in pieces for token in piece]
    positions = [
        start + n for start, piece in zip(starts, pieces, strict=True) for n in range(len(piece))
    ]
    numbers = [found.lines.index(line) for line in lines]
    owners = [n for n, piece in zip(numbers, pieces, strict=True) for _ in piece]
    decodes = all(start and len(piece) == 1 for start, piece in zip(starts, pieces, strict=True))
    found.recorder.begin(Phase.DECODE if decodes else Phase.PREFILL, tokens, positions, owners)


def _closed(found: _Open) -> dict[str, Any]:
    fields = found.document()
    sequences = [
        {
            "prompt": list(line.sequence_request.prompt),
            "new": line.continuation.ids,
            "text": line.continuation.text,
            "finish": line.continuation.finish,
        }
        for line in found.lines
    ]
    with found.writer as writer:
        if found.error is None:
            tally = writer.finish(
                sequences=sequences, requests=found.selection.ids, ended=fields["ended"]
            )
            fields["calls"] = tally.calls
    return fields
