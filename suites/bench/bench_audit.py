"""Auditing the numbers of checkpoints: rate of one core, of the disk, memory, and where time goes.

Synthetic checkpoints in three layouts, NVFP4 experts at full size (8 GB at the default size),
official and BF16 at a quarter. Each is audited in a process of its own by one thread, from the page
cache. Then the largest one cold: its files are dropped from the cache before every turn, and read
in order by plain reads in the turn before, which is the disk's sequential rate.

A rate of one core is bytes over processor seconds of the process, system time included, so that
other load does not count. A projection multiplies and is labelled so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from degarble.suites.bench.timing import Neighbours, Section, Settings, Table, Target

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGES = ("torch", "numba", "numpy")
RATE = 1.2e9  # bytes a second and core
COLD_SHARE = 0.8  # of the disk's sequential rate
PEAK_BYTES = 1_000_000_000
FULL_SIZE = 881e9  # bytes of the V4-Pro checkpoint that started this
FULL_BYTES = 8.2e9  # of the largest synthetic one at the default size
_LARGEST = "nvfp4-experts"
_LAYOUTS = {_LARGEST: 1.0, "official": 0.25, "bf16": 0.25}
_WORKER = "degarble.suites.bench.peak_audit"


def run(settings: Settings) -> Section:
    """Measure every layout cached, and the largest one cold."""
    wanted = FULL_BYTES * (settings.size / Settings().size) ** 2
    with tempfile.TemporaryDirectory() as folder, Neighbours() as neighbours:
        found = {}
        for layout, share in _LAYOUTS.items():
            target = Path(folder) / layout
            _call("write", layout, settings.size, int(share * wanted), target)
            found[layout] = _call("cached", target, min(settings.rounds, 5))
            if layout == _LARGEST:
                against = _call("against", target, min(settings.rounds, 3))
                cold = _call("cold", target, min(settings.rounds, 3), settings.threads)
    largest = found[_LARGEST]
    hours = FULL_SIZE / largest["rate"] / 3600
    return Section(
        key="audit",
        title="Auditing the numbers of checkpoints",
        tables=(_rates(found, against), _cold(cold), _profile(largest)),
        targets=(
            Target("GB a second and core, cached, NVFP4", largest["rate"] / 1e9, RATE / 1e9),
            Target(
                "share of the disk's sequential rate, cold",
                cold["rate"] / cold["disk"],
                COLD_SHARE,
            ),
            Target(
                "peak resident bytes",
                max(each["peak"] for each in (*found.values(), against, cold)),
                PEAK_BYTES,
                at_least=False,
            ),
        ),
        notes=(
            f"{largest['bytes'] / 1e9:.2f} GB at size {settings.size}, the others a quarter of it",
            f"881 GB at that rate: {hours:.2f} core hours (size / rate; storage not counted)",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _call(*arguments: object) -> dict[str, Any]:
    """Run one step in a process of its own, where memory and processor time can be read."""
    command = [sys.executable, "-m", _WORKER, *map(str, arguments)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def _rates(found: Mapping[str, Mapping[str, Any]], against: Mapping[str, Any]) -> Table:
    header = (
        "run, one thread",
        "GB",
        "weights",
        "GB/s and core",
        "GB/s by the clock",
        "peak resident MB",
    )
    runs = [(f"V4, {layout}", each) for layout, each in found.items()]
    runs.append((f"V4, {_LARGEST}, --against itself", against))
    rows = [
        (
            name,
            f"{each['bytes'] / 1e9:.2f}",
            f"{each['weights']:,}",
            f"{each['rate'] / 1e9:.2f}",
            f"{each['clock_rate'] / 1e9:.2f}",
            f"{each['peak'] / 1e6:.0f}",
        )
        for name, each in runs
    ]
    return Table("From the page cache", header, tuple(rows))


def _cold(cold: Mapping[str, Any]) -> Table:
    header = ("arm", "GB/s by the clock, median", "turns")
    rows = (
        ("plain reads of 16 MiB in order", f"{cold['disk'] / 1e9:.2f}", str(cold["turns"])),
        (
            f"audit, {cold['workers']} threads",
            f"{cold['rate'] / 1e9:.2f}",
            str(cold["turns"]),
        ),
    )
    return Table("Files dropped from the page cache before every turn", header, rows)


def _profile(largest: Mapping[str, Any]) -> Table:
    rows = tuple(
        (name, f"{seconds / largest['profiled']:.0%}") for name, seconds in largest["profile"]
    )
    return Table("Where the time of a cached audit goes", ("step", "share of the clock"), rows)
