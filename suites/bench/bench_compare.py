"""Comparing a BF16 pair on one core: in memory beside a plain torch loop, and from mapped files.

Arms: `compare` with everything that it reports, and a loop as one would write it in torch (cosine,
relative L2, gain, steps, identical share; whole tensors, nothing by rows or tiles). Both must
return the same for the pair. Bytes are those of both sides, read once. The files are read once
before, so that the figure is that of the page cache and not of a disk. Resident memory is the peak
of a process of its own, interpreter and torch included.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from degarble.harness.engine.compare.compare import compare
from degarble.suites.bench.bench_formats import weights
from degarble.suites.bench.timing import (
    Neighbours,
    Reading,
    Section,
    Settings,
    Table,
    Target,
    interleave,
    paired_ratio,
)

if TYPE_CHECKING:
    from torch import Tensor

PACKAGES = ("torch", "numba", "numpy", "safetensors")
IN_MEMORY, FROM_FILE = 6.0, 3.0  # GB of pair a second
RESIDENT = 0.8e9
TENSORS = 5
OURS, PLAIN = "degarble", "plain torch loop"


def pair(size: int) -> tuple[Tensor, Tensor]:
    """A reference, and a candidate of which one value in sixteen is a step away."""
    reference = weights(size)
    generator = torch.Generator().manual_seed(size + 1)
    moved = torch.randint(0, 16, reference.shape, generator=generator, dtype=torch.int16) == 0
    return (reference.view(torch.int16) + moved.short()).view(torch.bfloat16), reference


def plain(candidate: Tensor, reference: Tensor) -> tuple[float, float, float, int, float]:
    """Cosine, relative L2, gain, largest step, identical share, by whole tensors in float32."""
    c, r = candidate.float().flatten(), reference.float().flatten()
    difference = c - r
    steps = (_ordinals(candidate) - _ordinals(reference)).abs().max()
    return (
        float(torch.cosine_similarity(c, r, dim=0)),
        float(difference.norm() / r.norm()),
        float(c.dot(r) / r.dot(r)),
        int(steps),
        float((candidate == reference).double().mean()),
    )


def _ordinals(values: Tensor) -> Tensor:
    codes = values.contiguous().view(torch.int16).int()
    return torch.where(codes < 0, -(codes & 0x7FFF), codes)


def run(settings: Settings) -> Section:
    """Measure on one core, whatever the settings say of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Neighbours() as neighbours:
            table, targets = _in_memory(settings)
            stored, more = _from_file(settings.size)
    finally:
        torch.set_num_threads(threads)
    return Section(
        key="compare",
        title="Comparing a pair on one core",
        tables=(table, stored),
        targets=(*targets, *more),
        notes=(
            f"BF16, {settings.size} x {settings.size}, {settings.rounds} rounds",
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _in_memory(settings: Settings) -> tuple[Table, list[Target]]:
    candidate, reference = pair(settings.size)
    total = candidate.nbytes + reference.nbytes
    arms = {
        OURS: lambda: compare(candidate, reference),
        PLAIN: lambda: plain(candidate, reference),
    }
    corner = slice(min(256, settings.size))
    same = _say_the_same(candidate[corner, corner], reference[corner, corner])
    readings = interleave(arms, settings.rounds)
    rows = tuple(
        (name, f"{reading.median * 1e3:.1f}", f"{_rate(reading, total):.2f}")
        for name, reading in readings.items()
    )
    times = paired_ratio(readings[PLAIN], readings[OURS])[0]
    return Table("In memory", ("arm", "ms", "GB/s of pair"), rows), [
        Target("both arms say the same (1 = yes)", float(same), 1.0),
        Target("GB/s of pair in memory", _rate(readings[OURS], total), IN_MEMORY),
        Target("times as fast as the plain loop", times, 1.0),
    ]


def _say_the_same(candidate: Tensor, reference: Tensor) -> bool:
    """Whether both arms agree. Trap: sums of millions in float32 would make a cosine above 1."""
    found = compare(candidate, reference)
    cosine, relative, gain, steps, identical = plain(candidate, reference)
    near = (
        (float(found.total.cosine), cosine),
        (float(found.total.relative_l2), relative),
        (float(found.total.gain), gain),
    )
    return (
        all(abs(ours - theirs) < 1e-3 for ours, theirs in near)
        and found.ulps == steps
        and abs(found.identical - identical) < 1e-12
    )


def _rate(reading: Reading, total: int) -> float:
    return total / reading.median / 1e9


def _from_file(size: int) -> tuple[Table, list[Target]]:
    """Compare two files in a process of its own, where memory can be read."""
    with tempfile.TemporaryDirectory() as folder:
        for name, side in zip(("candidate", "reference"), pair(size), strict=True):
            tensors = {f"x.{number}": side.clone() for number in range(TENSORS)}
            save_file(tensors, Path(folder) / f"{name}.safetensors")
            del tensors
        command = [sys.executable, "-m", "degarble.suites.bench.peak_compare", folder]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    total, seconds, peak = int(said[-3]), float(said[-2]), int(said[-1])
    rate = total / seconds / 1e9
    row = (f"{TENSORS} tensors", f"{total / 1e9:.2f}", f"{rate:.2f}", f"{peak / 1e6:.0f}")
    header = ("two files in the page cache", "GB of pair", "GB/s of pair", "peak resident MB")
    return Table("From mapped files", header, (row,)), [
        Target("GB/s of pair from a cached file", rate, FROM_FILE),
        Target("peak resident bytes", float(peak), RESIDENT, at_least=False),
    ]
