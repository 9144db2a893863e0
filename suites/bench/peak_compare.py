"""One comparison of two safetensors files, in a process of its own.

`python -m degarble.suites.bench.peak_compare FOLDER` compares all tensors of FOLDER's candidate and
reference three times, and prints bytes of the pair, seconds of the fastest time, and the peak of
resident memory in bytes. The first time compiles the loops and fills the page cache.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.engine.compare.compare import compare_stored

TIMES = 3


def run(folder: Path) -> tuple[int, float]:
    """Return bytes of the pair, and the seconds of the fastest of some times."""
    fastest, total = float("inf"), 0
    with (
        Checkpoint.open(folder / "candidate.safetensors") as candidate,
        Checkpoint.open(folder / "reference.safetensors") as reference,
    ):
        for _ in range(TIMES):
            start, total = time.perf_counter(), 0
            for name, entry in reference.entries.items():
                compare_stored((candidate, name), (reference, name))
                total += entry.nbytes + candidate.entry(name).nbytes
            fastest = min(fastest, time.perf_counter() - start)
    return total, fastest


def main(folder: str) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    total, seconds = run(Path(folder))
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    sys.stdout.write(f"{total} {seconds} {peak}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
