"""One quantising run over a synthetic checkpoint, in a process of its own.

`python -m degarble.suites.bench.peak_checkpoint_quantise LAYOUT SIZE FOLDER` prints bytes read,
seconds, and the peak of resident memory in bytes. SIZE is the hidden size. A small run before it
compiles the loops and is not counted. With `--rival NAME` in front, another package quantises the
same weights, each read from the same files and nothing written; then it prints our seconds for the
whole run, its seconds for the weights alone, and the share of weights with equal bytes, of those
that share no scale. One thread for all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.bench import peers_formats as peers
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config


def config_of(size: int) -> Config:
    """Return a V4 of two layers whose experts are as wide as its hidden size, within bounds."""
    width = max(128, size // 128 * 128)
    return small_v4(
        num_hidden_layers=2,
        compress_ratios=(0, 4, 0),
        num_hash_layers=1,
        hidden_size=width,
        moe_intermediate_size=max(128, width // 256 * 128),
        n_routed_experts=8,
        vocab_size=256,
    )


def write(layout: str, size: int, folder: Path) -> None:
    """Write a source; in a process of its own, because it needs more memory than quantising."""
    write_checkpoint(folder / "source", Synthetic(config_of(size), layout))


def run(layout: str, size: int, folder: Path, rival: str = "") -> tuple[float, ...]:
    """Quantise a source, and return bytes read and seconds, or how a rival compares."""
    command = [sys.executable, "-m", "degarble.suites.bench.peak_checkpoint_quantise", "--write"]
    subprocess.run([*command, layout, str(size), str(folder)], check=True)
    config, source, target = config_of(size), folder / "source", folder / "target"
    recipe = recipe_named("nvfp4-full", config)
    wanted = [each for each in parameters(config) if recipe.format_of(each).activation == "NVFP4"]
    calibration = Calibration.of({each.name: Amax(8.0, 1) for each in wanted})
    job = QuantiseJob(source, target_layout(config, recipe), calibration=calibration)
    start = time.perf_counter()
    job.run(target)
    seconds = time.perf_counter() - start
    read = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    found = (seconds, *rivalled(rival, source, target)) if rival else (read, seconds)
    shutil.rmtree(folder)
    return found


def rivalled(name: str, source: Path, target: Path) -> tuple[float, float]:
    """Quantise every NVFP4 weight of the target by another package; return seconds and equality."""
    seconds, equal = 0.0, []
    with peers.quiet(), Checkpoint.open(source) as before, Checkpoint.open(target) as after:
        assert after.names is not None
        for logical, parameter in after.names.present.items():
            made = after.stored(logical)
            if made.format != NVFP4:
                continue
            start = time.perf_counter()
            value = before.stored(logical).weight().value
            assert value is not None
            codes, scales = peers.QUANTISERS[name](value)()
            seconds += time.perf_counter() - start
            if parameter.row.name.endswith((".w2", ".wq_b", ".wo_b")):
                ours = made.weight()
                assert ours.codes is not None
                assert ours.block_scale is not None
                same = torch.equal(codes, ours.codes) and torch.equal(scales, ours.block_scale)
                equal.append(same)
            before.release()
    return seconds, sum(equal) / len(equal)


def main(*arguments: str) -> None:
    """Measure once, after a small run; or write a source."""
    torch.set_num_threads(1)
    layout, size, folder = arguments[-3:]
    if "--rival" in arguments:
        found = run(layout, int(size), Path(folder), arguments[1])
        sys.stdout.write(" ".join(map(str, found)) + "\n")
        return
    if "--write" in arguments:
        write(layout, int(size), Path(folder))
        return
    run(layout, 128, Path(folder))
    read, seconds = run(layout, int(size), Path(folder))
    sys.stdout.write(f"{read} {seconds} {_peak_bytes()}\n")


def _peak_bytes() -> int:
    """Return the high-water mark. Trap: getrusage's survives exec, and would be the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
