"""One step of the large run, in a process of its own: `... peak_quantise_large STEP SIZE FOLDER`.

Steps: `write` (the synthetic source, in BF16), `quantise` and `quantise-2` (one and two workers),
`convert` and `prove` (the same weights by `convert --to nvfp4`). Prints bytes read, bytes written
and seconds; loops are compiled before the clock starts. SIZE is the hidden size of the bench.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.convert.job import job_for, prove
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from degarble.harness.model.config.config import Config

SHARDS = 8
SHARD_BYTES = 400_000_000
WIDE = 4096  # hidden size of the full run: 84 experts a layer make 8.5 GB in BF16
EXPERTS = 84


def config_of(size: int) -> Config:
    """Return a V4 of two layers, of at least 8 GB from the usual size of a bench on."""
    full = size >= WIDE
    width = WIDE if full else 256
    return small_v4(
        num_hidden_layers=2,
        compress_ratios=(0, 4, 0),
        num_hash_layers=1,
        hidden_size=width,
        moe_intermediate_size=width // 2,
        n_routed_experts=EXPERTS if full else 8,
        vocab_size=256,
    )


def size_of(folder: Path) -> int:
    """Return the bytes of all shards in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def job_of(size: int, source: Path) -> QuantiseJob:
    """Return the job of the bench."""
    config = config_of(size)
    recipe = recipe_named("nvfp4-full", config)
    wanted = [each for each in parameters(config) if recipe.format_of(each).activation == "NVFP4"]
    calibration = Calibration.of({each.name: Amax(8.0, 1) for each in wanted})
    return QuantiseJob(source, target_layout(config, recipe), calibration=calibration)


def step(name: str, size: int, folder: Path) -> tuple[int, int]:
    """Do one step; return bytes read and bytes written."""
    source, target = folder / "source", folder / name.removesuffix("-2").replace("prove", "convert")
    if name == "write":
        write_checkpoint(source, Synthetic(config_of(size), "bf16"), shards=SHARDS)
        return 0, size_of(source)
    if name == "convert":
        job_for(source, "nvfp4").run(target, shard_bytes=SHARD_BYTES)
    elif name == "prove":
        proof = prove(source, target)
        assert proof.holds, list(proof.lines())
        return size_of(source) + size_of(target), 0
    else:
        workers = 2 if name.endswith("-2") else 1
        job_of(size, source).run(target, workers=workers, shard_bytes=SHARD_BYTES)
    return size_of(source), size_of(target)


def main(name: str, size: str, folder: str) -> None:
    """Do one step and say what it took."""
    torch.set_num_threads(1)
    if name != "write":
        from degarble.harness.checkpoint.transform.convert import worker_imports  # noqa: PLC0415  compiles

        assert worker_imports.READY
    start = time.perf_counter()
    read, written = step(name, int(size), Path(folder))
    sys.stdout.write(f"{read} {written} {time.perf_counter() - start}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
