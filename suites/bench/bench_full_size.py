"""A checkpoint of full size: structure audit, loader proof and sharding plan, heads alone.

`degarble audit` runs over sparse checkpoints of V4-Pro in 95 shards (true heads over holes, about
0.9 TB in appearance and some 80 MB on disk), each in a process of its own: seconds from start to
end, memory, and the resulting plan. These steps read only heads and configs, so a full checkpoint
costs the same. What the page cache holds is not controlled.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from degarble.suites.bench.timing import Neighbours, Section, Settings, Table, Target

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PACKAGES = ("torch", "numpy")
SECONDS = 60.0
PEAK_BYTES = 1_000_000_000
SMALL = 1024  # below this size the small model stands in
RUNS = (
    ("official", "vllm:tp=8"),
    ("nvfp4-experts", "vllm:tp=8"),
    ("nvfp4-experts", "vllm:tp=8,ep=8"),
)
_PROGRAM = "degarble.suites.bench.peak_full_size"


class Reading(NamedTuple):
    """What one run of the command took, and what it said."""

    status: int
    seconds: float
    cpu_seconds: float
    peak: int
    said: Mapping[str, Any]


def run(settings: Settings) -> Section:
    """Write, audit, and remove what was written."""
    model = "pro" if settings.size >= SMALL else "small"
    readings: dict[tuple[str, str], Reading] = {}
    with tempfile.TemporaryDirectory() as folder, Neighbours() as neighbours:
        for layout in dict.fromkeys(layout for layout, _ in RUNS):
            target = Path(folder) / layout
            _call(model, layout, target, "none", "none", write=True)
            for key in RUNS:
                if key[0] == layout:
                    readings[key] = _measured(model, layout, target, key[1])
            shutil.rmtree(target)
    worst = max(readings.values(), key=lambda each: each.seconds)
    targets = (
        Target("seconds from start to end", worst.seconds, SECONDS, at_least=False),
        Target(
            "peak resident bytes",
            max(each.peak for each in readings.values()),
            PEAK_BYTES,
            at_least=False,
        ),
        Target(
            "healthy checkpoints raise no error (1 = yes)",
            float(all(each.status == 0 for each in readings.values())),
            1.0,
        ),
    )
    return Section(
        key="full-size",
        title="A checkpoint of full size: structure, loader proof, sharding plan",
        tables=(_times(readings), _plans(readings)),
        targets=targets,
        notes=(
            "`degarble audit CKPT --only structure --loader MAP --json FILE`, one process",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _measured(model: str, layout: str, target: Path, loader: str) -> Reading:
    out = target.parent / "said.json"
    status, seconds, cpu, peak = _call(model, layout, target, loader, str(out)).split()
    said = json.loads(out.read_text(encoding="utf-8"))
    return Reading(int(status), float(seconds), float(cpu), int(peak), said)


def _call(
    model: str, layout: str, target: Path, loader: str, out: str, *, write: bool = False
) -> str:
    arguments = [*(["--write"] if write else []), model, layout, str(target), loader, out]
    command = [sys.executable, "-m", _PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _times(readings: Mapping[tuple[str, str], Reading]) -> Table:
    rows = tuple(
        (
            f"V4-Pro, {layout}",
            loader,
            f"{each.said['bytes'] / 1e9:.0f}",
            f"{each.said['tensors']:,}",
            f"{each.said['loader']['counts']['transfers']:,}",
            f"{each.seconds:.1f}",
            f"{each.cpu_seconds:.1f}",
            f"{each.peak / 1e6:.0f}",
        )
        for (layout, loader), each in readings.items()
    )
    header = ("checkpoint", "map", "GB", "tensors", "writes proven", "s", "CPU s", "peak MB")
    return Table("Time and memory", header, rows)


def _plans(readings: Mapping[tuple[str, str], Reading]) -> Table:
    rows = []
    for (layout, loader), each in readings.items():
        sizes = [rank["bytes"] for rank in each.said["loader"]["shares"]]
        experts = {tuple(rank["experts"]) for rank in each.said["loader"]["shares"]}
        cells = f"{min(sizes) / 1e9:.1f}", f"{max(sizes) / 1e9:.1f}"
        rows.append((f"V4-Pro, {layout}", loader, str(len(sizes)), str(len(experts)), *cells))
    header = ("checkpoint", "map", "ranks", "groups of experts", "least GB a rank", "most GB")
    return Table("The plan that came out", header, tuple(rows))
