"""The machine under a bench: CPUs, neighbours, memory, and work in a process of its own.

`python -m degarble.suites.bench.machine MODULE:FUNCTION ARGUMENTS` calls a function in a fresh
process, and prints a line of JSON: what it returned, seconds with its imports, processor seconds,
and the peak of resident memory. ARGUMENTS is a list in JSON.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        self._start = _times()
        return self

    def __exit__(self, *_exception: object) -> None:
        busy, own, wall = (now - then for now, then in zip(_times(), self._start, strict=True))
        self.cores = max(0.0, (busy - own) / wall)


def _times() -> tuple[float, float, float]:
    """Return CPU time of all processes, of this one and its ended children, and the clock's."""
    own = os.times()
    children = own.children_user + own.children_system
    return _busy_seconds(), time.process_time() + children, time.monotonic()


def _busy_seconds() -> float:
    """Return the CPU time that all processes together have used, or 0 where nobody says."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts = (
        int(field) for field in stat.read_text().splitlines()[0].split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def peak_rise(work: Callable[[], object]) -> int | None:
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
    """Trap: the high-water mark of getrusage survives exec, and would be the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def peak_resident() -> int:
    """Highest resident memory of this process so far, all libraries included."""
    return _status_bytes("VmHWM")


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


def read_all(paths: Sequence[Path], limit: float = float("inf")) -> int:
    """Read files in order by plain reads, up to so many bytes; return how many were read."""
    buffer, done = memoryview(bytearray(16 << 20)), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while done < limit and (count := file.readinto(buffer)):
                done += count
    return done


def drop_from_cache(paths: Sequence[Path]) -> None:
    """Write files back and drop them from the page cache; needs no rights.

    A host's cache below it stays.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class ChildResult(NamedTuple):
    """What a function returned in a process of its own, and what it took there."""

    result: Any
    seconds: float  # imports of its module included
    cpu_seconds: float
    peak: int  # of resident memory, all libraries included


def child_command(function: str, *arguments: object) -> list[str]:
    """Return the command that calls `module:function` in a process of its own."""
    return [sys.executable, "-m", __name__, function, json.dumps(arguments, default=str)]


def in_child(function: str, *arguments: object) -> ChildResult:
    """Call `module:function` in a process of its own, where memory can be read."""
    line = child_command(function, *arguments)
    return child_result(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout)


def child_result(said: str) -> ChildResult:
    return ChildResult(*json.loads(said.splitlines()[-1]))


def _child(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    start = time.perf_counter()
    result = getattr(import_module(module), name)(*json.loads(arguments))
    seconds = time.perf_counter() - start
    told = (result, seconds, time.process_time(), peak_resident())
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    _child(*sys.argv[1:])
