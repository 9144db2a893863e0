from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.view import Checkpoint
from degarble.harness.formats.block_formats import NVFP4
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.convert.converting_cases import broken, converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["official", "bf16", "v32"])
def test_weights_are_quantised_as_modelopt_does_with_shared_scales(
    kind: str, tmp_path: Path
) -> None:
    proof = converted(kind, tmp_path / "out", "nvfp4")
    assert proof.holds, list(proof.lines())
    names = [f"layers.1.ffn.experts.1.{part}" for part in ("w1", "w3")]
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        values = [before.stored(name).values() for name in names]
        amax = torch.stack([each.abs().max() for each in values]).max()
        for name, own in zip(names, values, strict=True):
            made, found = quantise(own, NVFP4, MODELOPT, amax=amax), after.weight(name)
            assert torch.equal(found.codes, made.codes)  # type: ignore[arg-type]
            assert torch.equal(found.block_scale, made.block_scale)  # type: ignore[arg-type]
            assert found.tensor_scale == made.tensor_scale
            assert found.input_scale is None


def _doubled(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().mul(2).to(scale.dtype)


def test_wrong_nibbles_and_wrong_tensor_scales_are_seen(tmp_path: Path) -> None:
    converted("v32", tmp_path / "out", "nvfp4", only=("layers.1.ffn.experts.*",))
    stem = "model.layers.1.mlp.experts.0"
    damage(tmp_path / "out", f"{stem}.gate_proj.weight", lambda c: c // 16 + c % 16 * 16)
    damage(tmp_path / "out", f"{stem}.up_proj.weight_scale_2", torch.reciprocal)
    damage(
        tmp_path / "out", f"{stem}.down_proj.weight_scale", lambda s: s.float().mul(2).to(s.dtype)
    )
    parts = ("gate_proj", "up_proj", "down_proj")
    assert sorted(broken("v32", tmp_path / "out")) == sorted(f"{stem}.{part}" for part in parts)
