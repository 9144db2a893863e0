"""Time our kernels and those of others on the same operands, and hold outputs against float64.

A row is one shape. Its kernels take turns in one process, each as a CUDA graph over buffer sets
that leave nothing in the cache. Every kernel runs once before: its output is compared with float64
by relative L2 and by the largest error, and a second run must give the same bits. A kernel that is
absent or fails is reported with the reason, and the others are timed.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from degarble.suites.bench import runner
from degarble.suites.bench.runner import COPY, Arm, Reading, Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

OURS = "degarble"
PEAK = "cuBLAS peak"
EMPTY = "empty node"
CEILINGS = (COPY, PEAK, EMPTY)  # neither ours nor a peer
_LONG = 300  # characters of a reason


class Unavailable(Exception):
    """A kernel of others cannot run here; the text says why."""


class DeviceLostError(Exception):
    """A kernel left the device unusable; nothing more can run in this process."""


class Call(NamedTuple):
    """A kernel on one set of buffers; `result` is what float64 is compared with."""

    run: Callable[[], object]
    result: Callable[[], Tensor] | None = None
    repeats: bool = True  # a second run on the same buffers has to give the same bits


@dataclass(frozen=True)
class Contender:
    """A kernel of a row; `make` gets the number of a buffer set."""

    name: str
    make: Callable[[int], Call]


def absent(name: str, why: str) -> Contender:
    """Return a kernel that is known not to take the shape."""

    def make(_number: int) -> Call:
        raise Unavailable(why)

    return Contender(name, make)


def of_arm(name: str, arm: Arm) -> Contender:
    """Return the kernel of another bench's arm, which other suites compare with its definition."""
    return Contender(name, lambda number: Call(arm.make(number)))


class Outcome(NamedTuple):
    """Readings of a row by kernel, and the names of the peers among them."""

    readings: Readings
    peers: tuple[str, ...]

    @property
    def ours(self) -> Reading:
        return self.readings[OURS]

    @property
    def best(self) -> str:
        """The fastest peer."""
        return min(self.peers, key=lambda name: self.readings[name].median)


@dataclass(frozen=True)
class Goal:
    """What a row has to reach; `of` is the kernel that the value needs, "" for any peer."""

    text: str
    value: Callable[[Outcome], float]
    wanted: float
    of: str = OURS
    at_least: bool = True


def of_best(wanted: float) -> Goal:
    return Goal("of the best peer", lambda of: of.ours.times(of.best), wanted, "")


def of_copy(wanted: float) -> Goal:
    return Goal("of a copy", lambda of: of.ours.share_of(COPY), wanted, COPY)


def of_peak(wanted: float) -> Goal:
    def value(of: Outcome) -> float:
        return of.ours.speed / of.readings[PEAK].speed

    return Goal("of the BF16 peak", value, wanted, PEAK)


def over_empty(wanted: float) -> Goal:
    def value(of: Outcome) -> float:
        return 1 / of.ours.times(EMPTY)

    return Goal("of an empty node", value, wanted, EMPTY, at_least=False)


@dataclass(frozen=True)
class Row:
    """One shape: kernels, the float64 result of buffer set 0, and what is wanted."""

    name: str
    contenders: Sequence[Contender]
    moved: int = 0
    operations: int = 0
    reference: Callable[[], Tensor] | None = None
    goals: Sequence[Goal] = ()
    sets: int = 0  # of buffers; 0: as many as leave nothing in the cache
    repeats: int = runner.REPEATS
    ceilings: Sequence[Arm] = ()
    other_bytes: Mapping[str, int] = field(default_factory=dict)  # of kernels that move others
    exact: bool = False  # our output has to be the reference, bit for bit

    def ready(self) -> Row:
        return self

    def arm(self, contender: Contender) -> Arm:
        """Return what is timed."""
        moved = self.other_bytes.get(contender.name, self.moved)
        sets = self.sets or runner.sets_for(self.moved)
        return Arm(
            contender.name, lambda number: contender.make(number).run, moved, self.operations,
            sets=sets, repeats=self.repeats,
        )  # fmt: skip


@dataclass(frozen=True)
class LargeRow:
    """A row whose operands are made when it is measured, and not before."""

    name: str
    ready: Callable[[], Row]


@dataclass(frozen=True)
class TimedRow:
    """A row that other processes help to time; `record` returns what `measure` would."""

    name: str
    record: Callable[[int, Clock], dict[str, Any]]


class Clock(Protocol):
    """Where arms are timed."""

    def captured(self, arm: Arm) -> Any: ...

    def replayed(self, graphs: Sequence[Any], rounds: int) -> list[tuple[float, ...]]: ...

    def wait(self) -> None: ...

    def release(self) -> None: ...


class Gpu:
    """CUDA graphs of the installed GPU."""

    def captured(self, arm: Arm) -> Any:
        return runner.captured(arm)

    def replayed(self, graphs: Sequence[Any], rounds: int) -> list[tuple[float, ...]]:
        return runner.replayed(graphs, rounds)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


# ---- one row -------------------------------------------------------------------------------------


def error_of(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return relative L2 and the largest error over the largest number; NaN where one is."""
    away, wanted = got.double() - wanted, wanted.double()
    size, largest = wanted.norm(), wanted.abs().max()
    return float(away.norm() / size), float(away.abs().max() / largest)


def tried(contender: Contender, clock: Clock, wanted: Tensor | None) -> dict[str, Any]:
    """Run a kernel on buffer set 0, and compare its output."""
    call = contender.make(0)
    call.run()
    clock.wait()
    if call.result is None:
        return {}
    got = call.result().clone()
    said: dict[str, Any] = {}
    if wanted is not None:
        if got.shape != wanted.shape:
            raise Unavailable(f"returned {tuple(got.shape)}, not {tuple(wanted.shape)}")
        said["relative_l2"], said["largest"] = error_of(got, wanted)
    if call.repeats:
        call.run()
        clock.wait()
        said["same_bits_twice"] = bool(torch.equal(got, call.result()))
    return said


def reason_of(error: BaseException) -> str:
    """Return a failure in one line."""
    text = " ".join(str(error).split())[:_LONG]
    return text if isinstance(error, Unavailable) else f"{type(error).__name__}: {text}"


def measure(
    row: Row, rounds: int, clock: Clock, lost: Mapping[str, str], at: Callable[[str], object]
) -> dict[str, Any]:
    """Return the record of a row; `lost` has kernels that broke the device, and how.

    `at` is called with the name of each kernel before it runs.
    """
    arms: dict[str, dict[str, Any]] = {}
    graphs: dict[str, tuple[Arm, Any]] = {}
    wanted = None if row.reference is None else row.reference()
    for contender in row.contenders:
        said = arms.setdefault(contender.name, {})
        if contender.name in lost:
            said["reason"] = lost[contender.name]
            continue
        at(contender.name)
        arm = row.arm(contender)
        try:
            said |= tried(contender, clock, wanted)
            graphs[contender.name] = arm, clock.captured(arm)
        except Exception as error:  # noqa: BLE001  whatever a kernel of others raises is its reason
            said.clear()
            said["reason"] = reason_of(error)
            del error
            require_usable(clock, contender.name, said["reason"])
        clock.release()
    at("")
    for arm in row.ceilings:
        graphs[arm.name] = arm, clock.captured(arm)
    readings = _timed(graphs, rounds, clock)
    for name, reading in readings.items():
        low, high = reading.quartiles
        arms.setdefault(name, {}).update(
            microseconds=reading.median * 1e6, low=low * 1e6, high=high * 1e6
        )
    made = _judged(row, readings)
    if row.exact and "relative_l2" in arms[OURS]:
        made["goals"].append(_record("difference", arms[OURS]["relative_l2"], 0.0))
    return {"arms": arms, **made}


def _record(text: str, value: float, wanted: float, *, at_least: bool = False) -> dict[str, Any]:
    met = value >= wanted if at_least else value <= wanted
    return {"text": text, "value": value, "wanted": wanted, "at_least": at_least, "met": met}


def require_usable(clock: Clock, name: str, why: str) -> None:
    """Raise where a failure left the device unusable."""
    try:
        clock.wait()
    except Exception as error:
        raise DeviceLostError(name, why) from error


def _timed(graphs: Mapping[str, tuple[Arm, Any]], rounds: int, clock: Clock) -> Readings:
    readings: Readings = {}
    if graphs:
        seconds = clock.replayed([graph for _, graph in graphs.values()], rounds)
        for (arm, _), each in zip(graphs.values(), seconds, strict=True):
            readings[arm.name] = Reading(arm, each, readings)
    return readings


def _judged(row: Row, readings: Readings) -> dict[str, Any]:
    """Return the ratio to the fastest peer, goals, and rates of our kernel."""
    # Another form of ours is no peer.
    peers = tuple(n for n in readings if not n.startswith(OURS) and n not in CEILINGS)
    outcome, made = Outcome(readings, peers), dict[str, Any](goals=[])
    if OURS not in readings:
        return made
    if peers:
        made |= {"best": outcome.best, "ratio": outcome.ours.times(outcome.best)}
    if row.operations:
        made["teraflops"] = outcome.ours.speed * 1e-12
    if COPY in readings:
        made["of_copy"] = outcome.ours.share_of(COPY)
    for goal in row.goals:
        if goal.of in readings or (not goal.of and peers):
            value = goal.value(outcome)
            made["goals"].append(_record(goal.text, value, goal.wanted, at_least=goal.at_least))
    return made
