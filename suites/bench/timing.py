"""Measure arms side by side: interleaved rounds, medians, quartiles, paired ratios, peak memory.

A Reading is what one arm took, a Target is a claim with the number that it must reach, a Section is
one bench's part of docs/figures.md.

Arms take turns within a round, and each round starts with another arm, so that a disturbance hits
all of them; a ratio is the median over rounds of ratios within a round. The load of other processes
is measured meanwhile and printed with the figures.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


TURN_SECONDS = 0.02


@dataclass(frozen=True)
class Settings:
    """How long and on what a bench runs."""

    size: int = 7168  # rows and columns of the matrices
    rounds: int = 15
    threads: int = 2
    peers: bool = True  # whether outside packages take part


@dataclass(frozen=True)
class Reading:
    """Seconds of one arm, one entry a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile."""
        return quartiles(self.seconds)


@dataclass(frozen=True)
class Target:
    """A claim: what was measured must be at least (or, if not at_least, at most) `wanted`."""

    claim: str
    measured: float
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """Whether the claim held in this run."""
        return self.measured >= self.wanted if self.at_least else self.measured <= self.wanted


@dataclass(frozen=True)
class Table:
    """One table of a section."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """What one bench says: tables, targets, and what a reader must know about them."""

    key: str
    title: str
    tables: tuple[Table, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...]


def quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile; of a single number, twice that number."""
    if len(numbers) == 1:
        return numbers[0], numbers[0]
    first, _, third = statistics.quantiles(numbers, n=4, method="inclusive")
    return first, third


def interleave(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Reading]:
    """Run every arm twice to warm up, then `rounds` times by turns.

    A turn of a quick arm is several calls, TURN_SECONDS in all, and counts by their mean: after a
    slow arm the first call would measure whose data the caches hold.
    """
    calls = {name: _calls_a_turn(arm) for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                arm = arms[name]
                taken = 0.0
                for _ in range(calls[name]):
                    start = time.perf_counter()
                    result = arm()
                    taken += time.perf_counter() - start
                    del result  # freed outside of the measured time
                seconds[name].append(taken / calls[name])
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: Reading(tuple(taken)) for name, taken in seconds.items()}


def _calls_a_turn(arm: Callable[[], object]) -> int:
    arm()
    start = time.perf_counter()
    arm()
    return max(1, math.ceil(TURN_SECONDS / (time.perf_counter() - start)))


def paired_ratio(slow: Reading, fast: Reading) -> tuple[float, float, float]:
    """Return the median and the quartiles of slow / fast within a round."""
    ratios = [a / b for a, b in zip(slow.seconds, fast.seconds, strict=True)]
    return statistics.median(ratios), *quartiles(ratios)


def pin(threads: int) -> list[int]:
    """Confine this process to the first `threads` CPUs that it may use, and torch to as many."""
    import torch  # noqa: PLC0415  the affinity has to be known to its thread pool

    cpus: list[int] = []
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)
    return cpus


class Neighbours:
    """Measures what other processes took of the machine while a block ran."""

    def __enter__(self) -> Self:
        self._start = (_busy_seconds(), time.process_time(), time.perf_counter())
        return self

    def __exit__(self, *_exception: object) -> None:
        busy, own, wall = (
            now - then
            for now, then in zip(
                (_busy_seconds(), time.process_time(), time.perf_counter()),
                self._start,
                strict=True,
            )
        )
        self.cores = max(0.0, (busy - own) / wall)


def _busy_seconds() -> float:
    """Return the CPU time that all processes together have used, or 0 where nobody says."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts = (
        int(field) for field in stat.read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def peak_bytes(work: Callable[[], object]) -> int | None:
    """Return by how much the resident memory of this process rises at most during `work`.

    What the caller holds already does not count. None where the kernel keeps no resettable mark.
    """
    mark = Path("/proc/self/clear_refs")
    try:
        mark.write_text("5")  # resets VmHWM: proc(5)
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    result = work()
    peak = _status_bytes("VmHWM") - before
    del result
    return peak


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    message = f"/proc/self/status has no {field}"
    raise AssertionError(message)


def machine(packages: Sequence[str]) -> str:
    """Return CPU, cores, kernel and versions in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        fields = {name.strip(): text.strip() for name, _, text in lines}
        numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
        model = f"{fields.get('model name', model)} ({numbers})"
    versions = [f"Python {platform.python_version()}"]
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    return f"{model}, {os.cpu_count()} cores, {platform.system()}; {', '.join(versions)}"
