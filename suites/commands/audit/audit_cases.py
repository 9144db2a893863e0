"""Make checkpoints to audit: one healthy, once a session, and copies with faults in their bytes.

The faults are of several levels and kinds, so that tables, maps and pages have something to show.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load_file, save_file

from degarble.suites.checkpoint.audit.planted_numbers import CONFIG, STATISTICS, Bytes
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def healthy_checkpoint(factory: pytest.TempPathFactory) -> Path:
    """Give the healthy checkpoint; nobody may change it."""
    target = factory.getbasetemp() / "audited" / "small-v4"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        model = Synthetic(CONFIG, "nvfp4-experts", seed=5, statistics=STATISTICS)
        write_checkpoint(target, model, shards=2)
    return target


def sick_checkpoint(factory: pytest.TempPathFactory) -> Path:
    """Give one with a NaN, a lost scale, a zero norm and a copied matrix; not to be changed."""
    target = factory.getbasetemp() / "audited" / "sick-v4"
    if not target.exists():
        shutil.copytree(healthy_checkpoint(factory), target)
        (target / "manifest.json").unlink()  # its hashes would tell every change by themselves
        stored = Bytes(target)
        for expert in range(3):
            stored.set(f"layers.1.ffn.experts.{expert}.w1.weight_scale_2", np.float32("nan"))
        stored.set("layers.2.ffn.experts.2.w2.weight_scale_2", 0.0)
        stored.set("layers.0.attn_norm.weight", 0)
        for part in ("weight", "scale"):
            stored.set(f"layers.2.attn.wkv.{part}", stored[f"layers.1.attn.wkv.{part}"])
    return target


def without(source: Path, target: Path, ending: str) -> Path:
    """Copy a checkpoint, less every tensor whose name ends so; its index still names them."""
    shutil.copytree(source, target)
    for shard in sorted(target.glob("*.safetensors")):
        tensors = {n: t for n, t in load_file(shard).items() if not n.endswith(ending)}
        save_file(tensors, shard)
    return target
