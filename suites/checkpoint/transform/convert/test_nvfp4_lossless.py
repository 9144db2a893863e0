from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.converting_cases import broken, converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path


def test_no_value_changes_and_codes_stay(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "nvfp4-lossless")
    assert proof.holds
    assert proof.exact == len(proof.tensors) > 0
    with Checkpoint.open(source("official")) as before, Checkpoint.open(tmp_path / "out") as after:
        first = "layers.0.ffn.experts.0"
        assert after.raw(f"{first}.w1.weight") == before.raw(f"{first}.w1.weight")
        scales = [after.weight(f"{first}.{part}").tensor_scale for part in ("w1", "w3")]
        assert scales[0] == scales[1]
        assert after.quantisation["config.json"]["moe_quant_algo"] == "W4A16_NVFP4"


def test_a_scale_off_by_one_exponent_is_seen(tmp_path: Path) -> None:
    converted("official", tmp_path / "out", "nvfp4-lossless")
    name = "layers.0.ffn.experts.0.w2"
    damage(tmp_path / "out", f"{name}.weight_scale_2", lambda scale: scale * 2)
    assert broken("official", tmp_path / "out") == [name]


def copied(tmp_path: Path) -> Path:
    target = tmp_path / "in"
    target.mkdir()
    for path in source("official").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("apart", [6, 20])
def test_partners_are_judged_together(apart: int, tmp_path: Path) -> None:
    """w1 and w3 share a tensor scale: far apart they are refused, otherwise nothing is lost."""
    changed = copied(tmp_path)
    stem = "layers.0.ffn.experts.1"
    damage(changed, f"{stem}.w3.scale", lambda scale: scale.view(torch.uint8) - apart)
    if apart > 17:
        with pytest.raises(LayoutMismatch, match=r"experts\.1\.w1, layers\.0\.ffn\.experts\.1\.w3"):
            convert(changed, tmp_path / "out", "nvfp4-lossless")
        assert not (tmp_path / "out").exists()
        return
    convert(changed, tmp_path / "out", "nvfp4-lossless")
    assert prove(changed, tmp_path / "out").holds
    with Checkpoint.open(tmp_path / "out") as made:
        assert made.weight(f"{stem}.w1").tensor_scale == made.weight(f"{stem}.w3").tensor_scale


def test_exponents_too_far_apart_are_refused_by_name(tmp_path: Path) -> None:
    config_source = copied(tmp_path)

    def deep(scale: torch.Tensor) -> torch.Tensor:
        codes = scale.view(torch.uint8)
        codes[3, 1] = int(codes.max()) - 30
        return codes

    damage(config_source, "layers.0.ffn.experts.1.w2.scale", deep)
    with pytest.raises(LayoutMismatch, match=r"exponents of layers\.0\.ffn\.experts\.1\.w2"):
        convert(config_source, tmp_path / "out", "nvfp4-lossless")
    assert not (tmp_path / "out").exists()


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="none in MXFP4"):
        convert(source("nvfp4-full"), tmp_path / "out", "nvfp4-lossless")
