"""Small sources for conversions, written once a session, and damage done to what was converted."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.model.config.config import small_v4, small_v32
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from degarble.harness.checkpoint.transform.units import ConversionProof
    from degarble.harness.model.config.config import Config

V4 = small_v4(n_routed_experts=3, num_hidden_layers=2, compress_ratios=(4, 128, 0))
V32 = small_v32(num_hidden_layers=2, n_routed_experts=4)
KINDS: dict[str, tuple[Config, str]] = {
    "official": (V4, "official"),
    "nvfp4-full": (V4, "nvfp4-full"),
    "nvfp4-experts": (V4, "nvfp4-experts"),
    "compressed-tensors": (V4, "compressed-tensors"),
    "bf16": (V4, "bf16"),
    "v32": (V32, "official"),
    "v32-nvfp4": (V32, "nvfp4-full"),
}
_FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)


@lru_cache
def source(kind: str) -> Path:
    """Write a source of one kind, once."""
    target = Path(_FOLDER.name) / kind
    config, layout = KINDS[kind]
    write_checkpoint(target, Synthetic(config, layout, seed=11), shards=2)
    return target


def converted(kind: str, target: Path, to: str, **options: object) -> ConversionProof:
    """Convert a source and prove the output."""
    convert(source(kind), target, to, options)
    return prove(source(kind), target)


def damage(target: Path, tensor: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change the bytes of one tensor on disk; `change` takes and returns its elements."""
    with Checkpoint.open(target) as checkpoint:
        entry = checkpoint.entry(tensor)
        changed = change(checkpoint.tensor(tensor).clone())
    data = changed.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(data) == entry.nbytes
    with entry.file.open("r+b") as file:
        file.seek(entry.begin)
        before = file.read(entry.nbytes)
        assert before != data, "this damage changes nothing"
        file.seek(entry.begin)
        file.write(data)


def broken(kind: str, target: Path) -> list[str]:
    """Name the tensors whose proof fails."""
    return [proof.tensor for proof in prove(source(kind), target).broken]
