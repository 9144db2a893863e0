"""One audit of a checkpoint of full size, in a process of its own.

`python -m degarble.suites.bench.peak_full_size MODEL LAYOUT FOLDER MAP OUT` runs `degarble audit`
on FOLDER without the numbers and with the loader map, writes its JSON to OUT, and prints exit
status, seconds, CPU seconds and the peak of resident memory in bytes. With --write before them it
writes the checkpoint instead: true heads over holes, 95 shards. MODEL is pro or small.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

SHARDS = 95


def config_of(model: str) -> Config:
    """Return V4-Pro, or a small model of the same family."""
    from degarble.harness.model.config.config import V4_PRO, small_v4  # noqa: PLC0415  cold start

    return V4_PRO if model == "pro" else small_v4(num_attention_heads=16, o_groups=8)


def write(model: str, layout: str, folder: Path) -> None:
    """Write the checkpoint; in a process of its own, because it needs more memory than auditing."""
    from degarble.suites.support.synthetic.checkpoints import (  # noqa: PLC0415  not in what is measured
        Synthetic,
        write_checkpoint,
    )

    write_checkpoint(folder, Synthetic(config_of(model), layout), sparse=True, shards=SHARDS)


def main(*arguments: str) -> None:
    """Measure the command once, imports included; or write what it reads."""
    model, layout, folder, loader, out = arguments[-5:]
    if "--write" in arguments:
        write(model, layout, Path(folder))
        return
    start = time.perf_counter()
    from degarble.harness.cli.main import main as command  # noqa: PLC0415  its imports count

    options = ["--only", "structure", "--loader", loader, "--json", out, "--quiet"]
    status = command(["audit", folder, *options])
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{status} {seconds} {time.process_time()} {peak_bytes()}\n")


def peak_bytes() -> int:
    """Return the high-water mark. Trap: getrusage's survives exec, and would be the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
