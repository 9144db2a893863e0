from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.transform.quantise.job import (
    QuantiseJob,
    run_job,
    target_layout,
    weight_only,
)
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.harness.model.recipes import recipe_named
from degarble.harness.model.storage import Part
from degarble.suites.checkpoint.converting_cases import (
    KINDS,
    broken,
    converted,
    damage,
    source,
)

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


@pytest.mark.parametrize("to", ["nvfp4", "nvfp4-lossless"])
def test_weights_alone_are_declared_as_such(to: str, tmp_path: Path) -> None:
    """Told NVFP4, engines would read an input_scale that is not there."""
    assert converted("official", tmp_path / "out", to).holds
    with Checkpoint.open(tmp_path / "out") as made:
        assert not any(name.endswith("input_scale") for name in made.entries)
        for stated in made.quantisation.values():
            text = json.dumps(stated)
            assert "W4A16_NVFP4" in text
            assert '"NVFP4"' not in text
            assert "input_activations" not in text
        assert not [each for each in audit_structure(made) if each.level is Level.ERROR]


def test_weights_alone_never_stand_beside_quantised_activations(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="without input scales"):
        converted("nvfp4-experts", tmp_path / "out", "nvfp4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["bf16", "v32"])
def test_bytes_are_those_of_quantise(kind: str, tmp_path: Path) -> None:
    converted(kind, tmp_path / "out", "nvfp4")
    config, _ = KINDS[kind]
    recipe = weight_only(recipe_named("nvfp4-full", config))
    job = QuantiseJob(source(kind), target_layout(config, recipe), lossless=False)
    run_job(job, tmp_path / "quantised")
    compared = 0
    with (
        Checkpoint.open(tmp_path / "out") as ours,
        Checkpoint.open(tmp_path / "quantised") as theirs,
    ):
        assert ours.names is not None
        assert theirs.names is not None
        for name in ours.names.present.keys() & theirs.names.present.keys():
            one, other = ours.stored(name), theirs.stored(name)
            if one.format == NVFP4:
                compared += 1
                assert other.format == NVFP4
                for part in (Part.CODES, Part.BLOCK_SCALE, Part.TENSOR_SCALE):
                    pair = (
                        ours.raw(one.form.parts[part].name),
                        theirs.raw(other.form.parts[part].name),
                    )
                    assert pair[0] == pair[1], (name, part)
    assert compared >= 20
