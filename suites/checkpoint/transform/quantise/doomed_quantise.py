"""Quantising runs that die, as doomed_runs has them. A program of its own.

`python -m degarble.suites.checkpoint.transform.quantise.doomed_quantise SEED MODE=TRIALS ...`
prints JSON, as doomed_runs does. Children are forked from a process that has compiled every loop,
so that a run takes a fraction of a second; it has one thread, or a child could hang. Modes:
`moments`, `file-size`, `read-only`, and `full`: a file system of its own that is too small, where
one can be mounted.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.write import writer
from degarble.suites.checkpoint.doomed_runs import MODES, Court, refused
from degarble.suites.checkpoint.transform.quantise.test_job import SHARD, job_of, source_of
from degarble.suites.checkpoint.writing_cases import quick_folder

if TYPE_CHECKING:
    from pathlib import Path


def full(court: Court, chance: random.Random, trials: int) -> None:
    """Let the disk fill up at a random byte; then make room, and run to the end."""
    total = sum(map(len, court.whole.values()))
    for trial in range(trials):
        room = chance.randrange(16 << 10, total * 9 // 10)
        small = court.folder / f"small-{trial}"
        small.mkdir()
        size = f"size={room}"
        command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(small)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return  # nobody but root may mount; the limit on file sizes stands for it
        try:
            target = small / "target"
            refused(court, target, lambda: unasked(court, target), f"full, trial {trial}")  # noqa: B023  ends within the turn
            subprocess.run(["mount", "-o", "remount,size=1g", str(small)], check=True)
            court.take_up(target, f"full, trial {trial}, with room")
        finally:
            subprocess.run(["umount", str(small)], check=True)


def unasked(court: Court, target: Path) -> None:
    """Write without asking for room beforehand, so that it ends in the middle of the work."""
    vars(writer)["require_space"] = lambda *_: None  # in this child alone
    court.ways[0](target)


def main(seed: str, *asked: str) -> None:
    """Run each mode and print what came of all of them."""
    torch.set_num_threads(1)
    with quick_folder() as folder:
        job = job_of(source_of(folder, "v4", "official"), "v4", "nvfp4-experts", lossless=False)
        court = Court(folder, (partial(job.run, shard_bytes=SHARD),))
        for each in asked:
            mode, _, trials = each.partition("=")
            {**MODES, "full": full}[mode](court, random.Random(seed), int(trials))
    sys.stdout.write(json.dumps({"killed": court.killed, "broken": court.broken}))


if __name__ == "__main__":
    main(*sys.argv[1:])
