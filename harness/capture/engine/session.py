"""Capture a running engine on one rank: hook its modules, and open and close one capture a time."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.capture.engine.maps import METHOD, CallSide, RowMeaning
from degarble.harness.capture.files.records import Phase
from degarble.harness.capture.files.writer import CaptureWriter
from degarble.harness.capture.options import RequestSelection
from degarble.harness.capture.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from degarble.harness.capture.engine.graphs import GraphCopies, RecordedGraph
    from degarble.harness.capture.engine.maps import ComponentMap, TensorLocation
    from degarble.harness.capture.options import CaptureRequest


# --------------------------------------------------------------------------------------------------
# Tap one rank of a running engine: hook modules, wrap methods, emit one call a component.
#
# The rows of the chosen sequences are copied as they appear. After each forward pass the recorder
# gets the calls in the order of the map. Tensors are never changed, and leaving the context removes
# every hook. Padding after a batch's last token is ignored.
#
# The engine must go on in every case: an error is kept in `error`, and recording stops. `unseen`
# lists places that were never called: an engine that replays CUDA graphs calls no module, and what
# it computes is seen through `copies`, which were recorded into its graphs (engine/graphs.py).

_CORRECT = "Correct the engine's map."
REPLAYED = "replayed"  # the fact that lists the steps that were computed by replayed graphs


class RequestTokens(NamedTuple):
    """New tokens of one request in a batch. `owner`: its sequence number; None: not wanted."""

    owner: int | None
    start: int  # position of the first of them
    tokens: Sequence[int]


class _CopySource(NamedTuple):
    """Where to copy from: a tensor of one call, and which of its rows."""

    module: str
    of: CallSide
    at: int | str
    rows: RowMeaning
    paired: bool | None


@dataclass(frozen=True)
class _ChosenRows:
    """Which rows of a batch belong to wanted requests: how many there are, and where they lie."""

    rows: Mapping[RowMeaning, tuple[int, Tensor]]

    @classmethod
    def from_runs(cls, runs: Sequence[RequestTokens]) -> _ChosenRows:
        at: list[int] = []
        last: list[int] = []
        begin = 0
        for run in runs:
            end = begin + len(run.tokens)
            if run.owner is not None:
                at += range(begin, end)
                last.append(end - 1)
            begin = end
        mine = [number for number, run in enumerate(runs) if run.owner is not None]
        found = {
            RowMeaning.TOKENS: (begin, at),
            RowMeaning.LAST: (begin, last),
            RowMeaning.SEQUENCES: (len(runs), mine),
        }
        return cls({rows: (count, torch.tensor(each)) for rows, (count, each) in found.items()})

    def copied(self, shown: _CopySource, tensor: Tensor) -> Tensor:
        """Copy the chosen rows of a tensor into memory of our own."""
        count, rows = self.rows[shown.rows]
        if not tensor.ndim or tensor.shape[0] < count:
            raise InvalidArgument(
                f"{shown.of} {shown.at} of {shown.module}", list(tensor.shape),
                f"{count} rows at least, one for each of the batch's {shown.rows}", _CORRECT,
            )  # fmt: skip
        return tensor.detach()[rows.to(tensor.device)].to("cpu")


class Taps:
    """Recorded tensors of one rank. `tapped` installs it; call `begin` before a forward pass."""

    def __init__(
        self,
        sightings: Iterable[ComponentMap],
        recorder: Recorder,
        nbytes: int = 1 << 62,
        copies: GraphCopies | None = None,
    ) -> None:
        self._sightings = [
            component_map
            for component_map in sightings
            if recorder.chooses(component_map.component)
        ]
        self._recorder = recorder
        self._left = nbytes
        self._copies = copies
        self._wanted: dict[str, dict[_CopySource, None]] = {}
        for sighting in self._sightings:
            for seen in (*sighting.inputs.values(), *sighting.outputs.values()):
                for place in seen.alternatives:
                    self._wanted.setdefault(place.module, {})[_copy_source(place)] = None
        self._runs: list[RequestTokens] = []
        self._chosen: _ChosenRows | None = None
        self._found: dict[_CopySource, Tensor] = {}
        self._ever: set[str] = set()
        self._paired: dict[str, bool] = {}
        self._steps, self._from_graph = 0, False
        self.replayed: list[int] = []  # steps whose tensors a replayed graph wrote
        self.error: Exception | None = None
        self.full = False

    @property
    def unseen(self) -> list[str]:
        """Modules and methods of the map that never ran."""
        return [module for module in self._wanted if module not in self._ever]

    def install(self, model: nn.Module, stack: ExitStack) -> None:
        """Watch every place of the map."""
        modules = dict(model.named_modules())
        for place, shown in self._wanted.items():
            name, _, method = place.partition(METHOD)
            if name not in modules:
                raise UnknownName.among("module of the engine's map", name, modules)
            before = partial(self._before, place, tuple(shown))
            after = partial(self._after, place, tuple(shown))
            if method:
                _wrap(place, modules[name], method, before, after, stack)
                continue
            stack.callback(modules[name].register_forward_pre_hook(
                lambda _module, given, named, before=before: before(given, named), with_kwargs=True
            ).remove)  # fmt: skip
            stack.callback(modules[name].register_forward_hook(
                lambda _module, _given, returned, after=after: after(returned)
            ).remove)  # fmt: skip

    def begin(self, runs: Sequence[RequestTokens]) -> None:
        """Begin a forward pass; what the last one showed goes to the recorder."""
        # The last pass ends only here: its logits are computed after the forward pass returned.
        self.end()
        if self.error is None and not self.full and any(run.owner is not None for run in runs):
            self._runs, self._chosen = list(runs), _ChosenRows.from_runs(runs)
        self._from_graph = False

    def from_graph(self, recorded: RecordedGraph) -> None:
        """Take what a replay wrote, as hooks take it in a pass that calls the modules."""
        if self._chosen is None:
            return
        self._from_graph = True
        self._ever |= recorded.places
        for source, buffer in recorded.copies.items():
            self._guarded(partial(self._take, cast("_CopySource", source), buffer))

    def end(self) -> None:
        """Emit the calls of a pass, including what came after it, such as logits."""
        self._chosen = None
        found, self._found = self._found, {}
        if found and self.error is None and not self.full:
            self._guarded(lambda: self._emit(found))

    def _emit(self, found: Mapping[_CopySource, Tensor]) -> None:
        wanted = [run for run in self._runs if run.owner is not None]
        tokens = [token for run in wanted for token in run.tokens]
        positions = [run.start + n for run in wanted for n in range(len(run.tokens))]
        owners = [run.owner or 0 for run in wanted for _ in run.tokens]
        # A one-token prompt starts at position 0, so it is a prefill and not a decoding step.
        new = all(len(run.tokens) == 1 and run.start for run in wanted)
        self._recorder.begin(Phase.DECODE if new else Phase.PREFILL, tokens, positions, owners)
        if self._from_graph:
            self.replayed.append(self._steps)
        self._steps += 1
        if self._recorder.idle:
            return
        for sighting in self._sightings:
            sides = [
                {name: _columns(place, found[_copy_source(place)])
                 for name, seen in side.items() for place in seen.alternatives
                 if _copy_source(place) in found}
                for side in (sighting.inputs, sighting.outputs)
            ]  # fmt: skip
            if any(sides):
                taken = self._recorder.before(sighting.component, sides[0])
                self._recorder.after(sighting.component, taken, sides[0], sides[1])

    def _before(self, place: str, shown: Sequence[_CopySource], given: Any, named: Any) -> None:
        recorded = self._recorded
        if self._chosen is None and recorded is None:
            return
        paired = isinstance(_argument_at(1, given, named), torch.Tensor)
        self._paired[place] = paired
        for source in shown:
            if source.of is CallSide.ARGUMENT and source.paired in (None, paired):
                self._guarded(partial(self._take, source, _argument(source, given, named)))
        (self._ever if recorded is None else recorded.places).add(place)

    def _after(self, place: str, shown: Sequence[_CopySource], returned: Any) -> None:
        if self._chosen is None and self._recorded is None:
            return
        results = returned if isinstance(returned, (tuple, list)) else [returned]
        for source in shown:
            if source.of is CallSide.RESULT and source.paired in (None, self._paired[place]):
                at = int(source.at)
                found = results[at] if at < len(results) else None
                self._guarded(partial(self._take, source, found))

    @property
    def _recorded(self) -> RecordedGraph | None:
        return None if self._copies is None else self._copies.current

    def _take(self, shown: _CopySource, tensor: Any) -> None:
        if self._chosen is None and self._recorded is None:
            return
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"{shown.of} {shown.at} of {shown.module}", type(tensor).__name__, "a tensor",
                _CORRECT,
            )  # fmt: skip
        if self._copies is not None and self._recorded is not None:
            self._copies.keep(shown, tensor)
            return
        if shown in self._found:
            raise InvalidArgument(
                shown.module, "ran twice in one forward pass", "one run a pass", _CORRECT
            )
        assert self._chosen is not None, "rows were chosen, or a graph is being recorded"
        copied = self._chosen.copied(shown, tensor)
        self._left -= copied.numel() * copied.element_size()
        if self._left < 0:
            self.full, self._chosen, self._found = True, None, {}
        else:
            self._found[shown] = copied

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run our own work: whatever it meets, the engine goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  reported when the capture ends
            self.error, self._chosen, self._found = error, None, {}


@contextmanager
def tapped(model: nn.Module, taps: Taps) -> Iterator[Taps]:
    """Install hooks and wraps in a model, and remove all of them on exit."""
    with ExitStack() as stack:
        taps.install(model, stack)
        try:
            yield taps
        finally:
            taps.end()


def _copy_source(seen: TensorLocation) -> _CopySource:
    return _CopySource(seen.module, seen.of, seen.at, seen.rows, seen.paired)


def _columns(seen: TensorLocation, tensor: Tensor) -> Tensor:
    """Return the columns of one component as a tensor of its own."""
    if seen.columns is None:
        return tensor
    begin, end = seen.columns
    if tensor.shape[-1] < end:
        raise InvalidArgument(
            f"{seen.of} {seen.at} of {seen.module}", list(tensor.shape), f"{end} columns at least",
            _CORRECT,
        )  # fmt: skip
    return tensor[..., begin:end].contiguous()


def _argument(shown: _CopySource, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """An argument by number, or by name; by number also among those that were given by name."""
    return _argument_at(shown.at, given, named)


def _argument_at(at: int | str, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    if isinstance(at, str):
        return named.get(at)
    if at < len(given):
        return given[at]
    behind = list(named.values())
    return behind[at - len(given)] if at - len(given) < len(behind) else None


def _wrap(
    place: str,
    module: nn.Module,
    path: str,
    before: Callable[[Any, Any], None],
    after: Callable[[Any], None],
    stack: ExitStack,
) -> None:
    """Watch a method of what a module's attributes lead to, on that one object alone."""
    *way, name = path.split(".")
    holder: Any = module
    for word in way:
        holder = getattr(holder, word, None)
    own = getattr(holder, name, None)
    if not callable(own):
        raise InvalidArgument(place, "absent", "a method of the engine's model", _CORRECT)

    def watched(*given: Any, **named: Any) -> Any:
        before(given, named)
        returned = own(*given, **named)
        after(returned)
        return returned

    assert name not in vars(holder), "a method that is watched twice would stay watched"
    object.__setattr__(holder, name, watched)
    stack.callback(partial(object.__delattr__, holder, name))


# --------------------------------------------------------------------------------------------------
# Run one capture of a running engine on one rank: open it on request, close it once.
#
# A session holds the rank's folder, the recorder and the choice of sequences of a batch. The engine
# calls it with every batch before the forward pass; between captures nothing of ours is installed.
# At the limit of bytes or seconds recording stops, whole steps stay, and the capture records which
# limit ended it. A capture without a single call is an error that names the likely reason.


class Scheduled(NamedTuple):
    """New tokens of one request in the batch that comes."""

    request: str
    start: int
    tokens: Sequence[int]


class EngineCapture:
    """A capture under way. `batch` goes in front of every forward pass, `close` ends it."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        sightings: Iterable[ComponentMap],
        request: CaptureRequest,
        facts: Mapping[str, Any] = MappingProxyType({}),
        copies: GraphCopies | None = None,
    ) -> None:
        places = list(sightings)
        request.wanted.require_choosing(place.component for place in places)
        self._selection = RequestSelection(request)
        self._stack = ExitStack()
        self._writer = self._stack.enter_context(CaptureWriter(folder, facts))
        recorder = Recorder(self._writer, request.wanted)
        self._taps = Taps(places, recorder, request.nbytes, copies)
        try:
            self._stack.enter_context(tapped(model, self._taps))
        except BaseException:
            self._stack.close()
            raise

    def batch(self, scheduled: Sequence[Scheduled]) -> None:
        """Announce a batch: the rows of its tensors are these tokens, in this order."""
        if self._selection.late:
            self._taps.begin([])
            return
        self._taps.begin(
            [
                RequestTokens(self._selection.owner(each.request), each.start, each.tokens)
                for each in scheduled
            ]
        )

    def replayed(self, scheduled: Sequence[Scheduled], recorded: RecordedGraph) -> None:
        """Announce a batch that a graph has just computed, and take what its nodes copied."""
        self.batch(scheduled)
        self._taps.from_graph(recorded)

    def require_sound(self) -> None:
        """Raise what a hook met while graphs were recorded."""
        if self._taps.error is not None:
            raise self._taps.error

    @property
    def state(self) -> dict[str, Any]:
        """Return the progress of the capture."""
        ended = "bytes" if self._taps.full else "seconds" if self._selection.late else None
        failed = None if self._taps.error is None else str(self._taps.error)
        calls = self._writer.tally.calls
        return {
            "requests": list(self._selection.ids),
            "calls": calls,
            "replayed": len(self._taps.replayed),
            "ended": ended,
            "error": failed,
        }

    def close(self) -> dict[str, Any]:
        """End it: what was taken is whole on the disk, and the engine is as it was."""
        try:
            self._taps.end()
            found = self.state
            if self._taps.error is None:
                steps = {REPLAYED: self._taps.replayed} if self._taps.replayed else {}
                tally = self._writer.finish(
                    requests=found["requests"], ended=found["ended"], **steps
                )
                found |= {"calls": tally.calls, "replayed": len(self._taps.replayed)}
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
        "capture", "no matching request arrived", "a request while the capture is open",
        "Send it with the requested X-Request-Id, or capture the next ones.",
    )  # fmt: skip
