"""A checkpoint of 8.5 GB from begin to end: written, quantised, converted, proven.

Rates of each step on one core and of two workers, the memory of all processes together (sampled by
suites/checkpoint/transform/convert/memory_watch.py), and the time that 881 GB would take: size over
rate. Disk and network count only as far as this machine's page cache lets them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from degarble.suites.bench.timing import Neighbours, Section, Settings, Table, Target
from degarble.suites.checkpoint.transform.convert.memory_watch import watched

PACKAGES = ("torch", "numba", "numpy")
PEAK_BYTES = 1_000_000_000
LEAST_BYTES = 8_000_000_000
PROVE_RATE = 300e6
FULL_SIZE = 881e9  # bytes of the V4-Pro checkpoint that was written
STEPS = ("write", "quantise", "quantise-2", "convert", "prove")
WORDS = {
    "write": "write_checkpoint, synthetic values included, one core",
    "quantise": "quantise BF16 to nvfp4-full with report, one core",
    "quantise-2": "the same, two workers",
    "convert": "convert --to nvfp4, one core",
    "prove": "its proof, source and output read, one core",
}


class Step(NamedTuple):
    """What one step took. `peak`: memory of all its processes together."""

    read: float
    written: float
    seconds: float
    peak: int

    @property
    def rate(self) -> float:
        """Bytes a second: of what is read, or of what is written where nothing is."""
        return (self.read or self.written) / self.seconds


def run(settings: Settings) -> Section:
    """Measure every step once."""
    found: dict[str, Step] = {}
    with Neighbours() as neighbours, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in STEPS:
            if step.startswith("quantise"):
                shutil.rmtree(folder / "quantise", ignore_errors=True)
            found[step] = _measured(step, settings.size, folder)
    peak = max(each.peak for step, each in found.items() if step != "write")
    read, rate = found["quantise"].read, found["quantise"].rate
    return Section(
        key="checkpoint-large",
        title="A checkpoint larger than memory allows",
        tables=(_table(found),),
        targets=(
            Target("bytes of the source", read, LEAST_BYTES),
            Target("peak of all processes, bytes", peak, PEAK_BYTES, at_least=False),
            Target("proof: bytes a second and core", found["prove"].rate, PROVE_RATE),
        ),
        notes=(
            _projection(rate, found["quantise-2"].rate),
            f"other processes took {neighbours.cores:.2f} cores of this machine meanwhile",
        ),
    )


def _projection(alone: float, together: float) -> str:
    """Spell the arithmetic of the full size."""
    seconds = FULL_SIZE / alone
    return (
        f"881 GB read by quantise: 881e9 / {alone:.3g} bytes a second = {seconds:.0f} s ="
        f" {seconds / 3600:.2f} h on one core,"
        f" {FULL_SIZE / together / 3600:.2f} h with two workers;"
        " a disk that is slower than this bounds it instead"
    )


def _measured(step: str, size: int, folder: Path) -> Step:
    program = (sys.executable, "-m", "degarble.suites.bench.peak_quantise_large")
    done = watched(*program, step, str(size), str(folder))
    assert done.status == 0, done.told
    read, written, seconds = map(float, done.told.split()[-3:])
    return Step(read, written, seconds, done.peak)


def _table(found: dict[str, Step]) -> Table:
    rows = tuple(
        (
            WORDS[step],
            f"{each.read / 1e9:.2f}",
            f"{each.written / 1e9:.2f}",
            f"{each.seconds:.1f}",
            f"{each.rate / 1e6:.0f}",
            f"{each.peak / 1e6:.0f}",
        )
        for step, each in found.items()
    )
    header = ("step", "GB read", "GB written", "seconds", "MB/s", "peak MB, all processes")
    return Table("Steps", header, rows)
