"""A model larger than memory: one pass over 15 GB of streamed weights, beside the disk's own rate.

The checkpoint has V4-Flash's widths and four layers, one of each type; it is written once and
removed. Estimates for V4-Pro and V3.2 are the bytes of their official layouts over the measured
rate. Every expert has to be visited, or the pass would be too cheap: routers are balanced first.
The disk's rate is that of reading the same files from a cold cache, in the same process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from degarble.harness.checkpoint.read.types import DTYPE_BITS
from degarble.harness.model.config.config import V3_2, V4_PRO
from degarble.harness.model.layouts import layout_named
from degarble.harness.model.tensors import tensors_of
from degarble.harness.report.progress import duration
from degarble.suites.bench.timing import Neighbours, Section, Settings, Table, Target

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

PACKAGES = ("torch", "numba", "numpy")
TOKENS = 1024
SHARE_OF_DISK = 0.35
RESIDENT = 3e9
FULL_WIDTH = 4096  # V4-Flash's; smaller settings run a smaller model


def official_bytes(config: Config) -> int:
    """Bytes of the main model's tensors in the official layout."""
    main = replace(config, num_nextn_predict_layers=0)
    layout = layout_named("official", main)
    return sum(
        prod(each.shape) * DTYPE_BITS[str(each.dtype)] // 8 for each in tensors_of(main, layout)
    )


def run(settings: Settings) -> Section:
    """Write, run, estimate."""
    width = FULL_WIDTH if settings.size >= FULL_WIDTH else 256
    tokens = TOKENS if settings.size >= FULL_WIDTH else 64
    command = [sys.executable, "-m", "degarble.suites.bench.peak_streaming"]
    with tempfile.TemporaryDirectory() as place, Neighbours() as neighbours:
        folder = str(Path(place) / "checkpoint")
        subprocess.run([*command, "--write", folder, str(width)], check=True)
        subprocess.run([*command, "--balance", folder, str(tokens)], check=True)
        done = subprocess.run(
            [*command, folder, str(tokens)], capture_output=True, text=True, check=True
        )
    seconds, read, share, resident, disk = map(float, done.stdout.split())
    rate = read / seconds
    cells = (seconds, read / 1e9, rate / 1e9, disk / 1e9, rate / disk, resident / 1e9)
    measured = Table(
        f"One forward pass of {tokens} tokens, bf16 arithmetic",
        ("seconds", "GB", "GB/s", "disk, cold, GB/s", "share of the disk", "peak resident GB"),
        (tuple(f"{cell:.2f}" for cell in cells),),
    )
    sizes = {"V4-Pro": official_bytes(V4_PRO), "V3.2": official_bytes(V3_2)}
    estimates = Table(
        "Estimates: bytes of the official layout / measured rate, not run",
        ("model", "GB", "one pass that visits every expert"),
        tuple((name, f"{size / 1e9:.0f}", duration(size / rate)) for name, size in sizes.items()),
    )
    return Section(
        key="streaming",
        title="Models larger than memory",
        tables=(measured, estimates),
        targets=(
            Target("share of the disk's cold sequential rate", rate / disk, SHARE_OF_DISK),
            Target("peak resident bytes", resident, RESIDENT, at_least=False),
            Target("share of experts visited", share, 1.0),
        ),
        notes=(
            f"synthetic, official layout, V4-Flash's widths ({width}), 4 layers of all types",
            "an estimate holds for a prompt of about as many tokens on as many cores",
            "each new token costs a pass over the weights that it visits",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )
