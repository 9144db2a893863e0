"""Run one capture of a running engine on one rank: open it on request, close it once.

A session holds the rank's folder, the recorder and the choice of sequences of a batch. The engine
calls it with every batch before the forward pass; between captures nothing of ours is installed. At
the limit of bytes or seconds recording stops, whole steps stay, and the capture records which limit
ended it. A capture without a single call is an error that names the likely reason.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.capture.engine.taps import Run, Taps, tapped
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import Roll
from degarble.harness.capture.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from torch import nn

    from degarble.harness.capture.engine.maps import Sighting
    from degarble.harness.capture.options import Asked


class Scheduled(NamedTuple):
    """New tokens of one request in the batch that comes."""

    request: str
    start: int
    tokens: Sequence[int]


class EngineCapture:
    """A capture under way. `batch` goes in front of every forward pass, `close` ends it."""

    def __init__(
        self, folder: Path, model: nn.Module, sightings: Iterable[Sighting], asked: Asked
    ) -> None:
        places = list(sightings)
        asked.wanted.require_choosing(each.component for each in places)
        self._roll = Roll(asked)
        self._stack = ExitStack()
        self._writer = self._stack.enter_context(CaptureWriter(folder, {}))
        recorder = Recorder(self._writer, asked.wanted)
        self._taps = Taps(places, recorder, asked.nbytes)
        try:
            self._stack.enter_context(tapped(model, self._taps))
        except BaseException:
            self._stack.close()
            raise

    def batch(self, scheduled: Sequence[Scheduled]) -> None:
        """Announce a batch: the rows of its tensors are these tokens, in this order."""
        if self._roll.late:
            self._taps.begin([])
            return
        self._taps.begin(
            [Run(self._roll.owner(each.request), each.start, each.tokens) for each in scheduled]
        )

    @property
    def state(self) -> dict[str, Any]:
        """Return the progress of the capture."""
        ended = "bytes" if self._taps.full else "seconds" if self._roll.late else None
        failed = None if self._taps.error is None else str(self._taps.error)
        calls = self._writer.tally.calls
        return {"requests": list(self._roll.ids), "calls": calls, "ended": ended, "error": failed}

    def close(self) -> dict[str, Any]:
        """End it: what was taken is whole on the disk, and the engine is as it was."""
        try:
            self._taps.end()
            found = self.state
            if self._taps.error is None:
                tally = self._writer.finish(requests=found["requests"], ended=found["ended"])
                found["calls"] = tally.calls
        finally:
            self._stack.close()
        if self._taps.error is not None:
            raise self._taps.error
        return found | {"unseen": self._taps.unseen}


def require_calls(state: dict[str, Any]) -> None:
    """Refuse a capture in which nothing came."""
    if state["calls"]:
        return
    if state["requests"]:
        raise InvalidArgument(
            "capture", "no call of a component, though requests ran",
            "an engine that calls its modules",
            "Start it without recorded graphs: --enforce-eager.",
        )  # fmt: skip
    raise InvalidArgument(
        "capture", "no request that was asked for came", "a request while the capture is open",
        "Send it with the X-Request-Id that was asked for, or ask for the next ones.",
    )  # fmt: skip
