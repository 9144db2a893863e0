"""Long runs over a sparse checkpoint, for whoever watches their memory. A program of its own.

`python -m degarble.suites.checkpoint.transform.convert.memory_runs write|quantise|convert FOLDER`
writes a V4 in BF16 (true heads over holes), quantises it, or converts it and proves the output;
with two workers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from degarble.harness.checkpoint.transform.convert.job import job_for, prove
from degarble.harness.checkpoint.transform.quantise.calibration import Amax, Calibration
from degarble.harness.checkpoint.transform.quantise.job import QuantiseJob, target_layout
from degarble.harness.model.config.config import small_v4
from degarble.harness.model.parameters import parameters
from degarble.harness.model.recipes import recipe_named
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

CONFIG = small_v4(
    num_hidden_layers=2,
    compress_ratios=(0, 4, 0),
    num_hash_layers=1,
    hidden_size=2048,
    moe_intermediate_size=4096,
    n_routed_experts=8,
    vocab_size=256,
)
SHARD = 100_000_000


def main(mode: str, folder: Path) -> None:
    """Do one of the three."""
    source, target = folder / "source", folder / "target"
    if mode == "write":
        write_checkpoint(source, Synthetic(CONFIG, "bf16"), sparse=True)
    elif mode == "quantise":
        recipe = recipe_named("nvfp4-full", CONFIG)
        found = {p.name: Amax(8.0, 1) for p in parameters(CONFIG) if _scaled(recipe.format_of(p))}
        job = QuantiseJob(
            source, target_layout(CONFIG, recipe), calibration=Calibration.from_records(found)
        )
        job.run(target, workers=2, shard_bytes=SHARD)
    else:
        job_for(source, "nvfp4").run(target, workers=2, shard_bytes=SHARD)
        proof = prove(source, target, workers=2)
        assert proof.holds, list(proof.lines())


def _scaled(formats: object) -> bool:
    return getattr(formats, "activation", "") == "NVFP4"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
