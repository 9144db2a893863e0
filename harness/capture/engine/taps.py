"""Tap one rank of a running engine: hook modules, wrap methods, emit one call a component.

The rows of the chosen sequences are copied as they appear. After each forward pass the recorder
gets the calls in the order of the map. Tensors are never changed, and leaving the context removes
every hook. Padding after a batch's last token is ignored.

The engine must go on in every case: an error is kept in `error`, and recording stops. `unseen`
lists places that were never called: an engine that replays CUDA graphs calls no module.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import InvalidArgument, UnknownName
from degarble.harness.capture.engine.maps import METHOD, Of, Rows
from degarble.harness.capture.files.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from degarble.harness.capture.engine.maps import Seen, Sighting
    from degarble.harness.capture.recorder import Recorder

_CORRECT = "Correct the engine's map."


class Run(NamedTuple):
    """New tokens of one request in a batch. `owner`: its sequence number; None: not wanted."""

    owner: int | None
    start: int  # position of the first of them
    tokens: Sequence[int]


class _Shown(NamedTuple):
    """Where to copy from: a tensor of one call, and which of its rows."""

    module: str
    of: Of
    at: int | str
    rows: Rows


@dataclass(frozen=True)
class _Chosen:
    """Which rows of a batch belong to wanted requests: how many there are, and where they lie."""

    rows: Mapping[Rows, tuple[int, Tensor]]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Chosen:
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
            Rows.TOKENS: (begin, at),
            Rows.LAST: (begin, last),
            Rows.SEQUENCES: (len(runs), mine),
        }
        return cls({rows: (count, torch.tensor(each)) for rows, (count, each) in found.items()})

    def copied(self, shown: _Shown, tensor: Tensor) -> Tensor:
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
        self, sightings: Iterable[Sighting], recorder: Recorder, nbytes: int = 1 << 62
    ) -> None:
        self._sightings = [each for each in sightings if recorder.chooses(each.component)]
        self._recorder = recorder
        self._left = nbytes
        self._wanted: dict[str, dict[_Shown, None]] = {}
        for each in self._sightings:
            for seen in (*each.inputs.values(), *each.outputs.values()):
                self._wanted.setdefault(seen.module, {})[_shown(seen)] = None
        self._runs: list[Run] = []
        self._chosen: _Chosen | None = None
        self._found: dict[_Shown, Tensor] = {}
        self._ever: set[str] = set()
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

    def begin(self, runs: Sequence[Run]) -> None:
        """Begin a forward pass; what the last one showed goes to the recorder."""
        # The last pass ends only here: its logits are computed after the forward pass returned.
        self.end()
        if self.error is None and not self.full and any(run.owner is not None for run in runs):
            self._runs, self._chosen = list(runs), _Chosen.of(runs)

    def end(self) -> None:
        """Emit the calls of a pass, including what came after it, such as logits."""
        self._chosen = None
        found, self._found = self._found, {}
        if found and self.error is None and not self.full:
            self._guarded(lambda: self._emit(found))

    def _emit(self, found: Mapping[_Shown, Tensor]) -> None:
        wanted = [run for run in self._runs if run.owner is not None]
        tokens = [token for run in wanted for token in run.tokens]
        positions = [run.start + n for run in wanted for n in range(len(run.tokens))]
        owners = [run.owner or 0 for run in wanted for _ in run.tokens]
        # A one-token prompt starts at position 0, so it is a prefill and not a decoding step.
        new = all(len(run.tokens) == 1 and run.start for run in wanted)
        self._recorder.begin(Phase.DECODE if new else Phase.PREFILL, tokens, positions, owners)
        if self._recorder.idle:
            return
        for each in self._sightings:
            sides = [
                {name: _columns(seen, found[_shown(seen)]) for name, seen in side.items()
                 if _shown(seen) in found}
                for side in (each.inputs, each.outputs)
            ]  # fmt: skip
            if any(sides):
                taken = self._recorder.before(each.component, sides[0])
                self._recorder.after(each.component, taken, sides[0], sides[1])

    def _before(self, place: str, shown: Sequence[_Shown], given: Any, named: Any) -> None:
        if self._chosen is None:
            return
        for each in shown:
            if each.of is Of.ARGUMENT:
                self._guarded(partial(self._take, each, _argument(each, given, named)))
        self._ever.add(place)

    def _after(self, _place: str, shown: Sequence[_Shown], returned: Any) -> None:
        if self._chosen is None:
            return
        results = returned if isinstance(returned, (tuple, list)) else [returned]
        for each in shown:
            if each.of is Of.RESULT:
                at = int(each.at)
                found = results[at] if at < len(results) else None
                self._guarded(partial(self._take, each, found))

    def _take(self, shown: _Shown, tensor: Any) -> None:
        if self._chosen is None:
            return
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"{shown.of} {shown.at} of {shown.module}", type(tensor).__name__, "a tensor",
                _CORRECT,
            )  # fmt: skip
        if shown in self._found:
            raise InvalidArgument(
                shown.module, "ran twice in one forward pass", "one run a pass", _CORRECT
            )
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
        except Exception as error:  # noqa: BLE001  it is told when the capture ends
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


def _shown(seen: Seen) -> _Shown:
    return _Shown(seen.module, seen.of, seen.at, seen.rows)


def _columns(seen: Seen, tensor: Tensor) -> Tensor:
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


def _argument(shown: _Shown, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """An argument by number, or by name; by number also among those that were given by name."""
    at = shown.at
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
