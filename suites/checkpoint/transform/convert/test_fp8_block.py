from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.checkpoint.audit.rules import Level
from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.harness.checkpoint.transform.convert.prove import prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.dialects import CANONICAL
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.converting_cases import broken, converted, damage, source

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "layers.0.attn.wo_a"


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
@pytest.mark.parametrize("kind", ["nvfp4-full", "compressed-tensors", "bf16", "official"])
def test_each_source_becomes_fp8(kind: str, scale: str, tmp_path: Path) -> None:
    proof = converted(kind, tmp_path / "out", "fp8-block", scale=scale)
    assert proof.holds, list(proof.lines())
    name = "layers.0.attn.wq_b"
    with Checkpoint.open(source(kind)) as before, Checkpoint.open(tmp_path / "out") as after:
        fmt = after.stored(name).format
        assert fmt is not None
        assert fmt.name == {"fp32": "FP8_128X128_F32", "ue8m0": "FP8_128X128_UE8M0"}[scale]
        if before.stored(name).format is None or kind == "nvfp4-full":
            made = quantise(before.stored(name).values(), fmt, CANONICAL)
            assert torch.equal(after.weight(name).codes, made.codes)  # type: ignore[arg-type]
            assert torch.equal(after.weight(name).block_scale, made.block_scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bf16", "official", "v32"])
def test_the_output_is_what_its_config_says(kind: str, tmp_path: Path) -> None:
    """V4's FP8 experts have fp32 scales, and a word of their own in the config."""
    assert converted(kind, tmp_path / "out", "fp8-block").holds
    with Checkpoint.survey(tmp_path / "out") as after:
        assert not [each for each in audit_structure(after) if each.level is Level.ERROR]
        if kind != "v32":
            assert after.config["expert_dtype"] == "fp8"
            experts = after.stored("layers.0.ffn.experts.0.w1").format
            assert experts is not None
            assert experts.name == "FP8_128X128_F32"


def test_scale_formats_change_both_ways_without_loss(tmp_path: Path) -> None:
    """V3.2 has powers of two in fp32: to UE8M0 and back yields its bytes."""
    first = converted("v32", tmp_path / "e8m0", "fp8-block")
    assert first.exact == len(first.tensors)
    convert(tmp_path / "e8m0", tmp_path / "fp32", "fp8-block", {"scale": "fp32"})
    assert prove(tmp_path / "e8m0", tmp_path / "fp32").holds
    with Checkpoint.open(source("v32")) as before, Checkpoint.open(tmp_path / "fp32") as after:
        assert before.entries.keys() == after.entries.keys()
        assert all(before.raw(name) == after.raw(name) for name in before.entries)


def test_mxfp4_experts_become_fp8_exactly(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "fp8-block", only=("*.experts.*",))
    assert proof.exact == len(proof.tensors) > 0


def test_all_ones_scales_are_seen_even_where_codes_fit_them(tmp_path: Path) -> None:
    """Origin, fault 5: on a grid of step one, values stay within half a step and are lost."""
    converted("nvfp4-full", tmp_path / "out", "fp8-block", scale="fp32", only=(MODULE,))
    with Checkpoint.open(source("nvfp4-full")) as before:
        values = before.stored(MODULE).values()
    ones = values.to(torch.float8_e4m3fn)
    damage(tmp_path / "out", f"{MODULE}.weight", lambda _: ones)
    damage(tmp_path / "out", f"{MODULE}.scale", torch.ones_like)
    (found,) = prove(source("nvfp4-full"), tmp_path / "out").broken
    assert found.beyond == 0
    assert "scales are not the largest magnitude over 448" in found.faults[0]


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_scales_of_ones_alone_are_seen(scale: str, tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "fp8-block", scale=scale, only=(MODULE,))
    ones = {"fp32": torch.ones_like, "ue8m0": lambda t: torch.full_like(t.view(torch.uint8), 127)}
    damage(tmp_path / "out", f"{MODULE}.scale", ones[scale])
    assert broken("nvfp4-full", tmp_path / "out") == [MODULE]


def test_reciprocal_and_shifted_scales_are_seen(tmp_path: Path) -> None:
    converted("bf16", tmp_path / "out", "fp8-block", scale="fp32", only=("layers.0.attn.wq_b",))
    name = "layers.0.attn.wq_b.scale"
    damage(tmp_path / "out", name, torch.reciprocal)
    assert broken("bf16", tmp_path / "out") == ["layers.0.attn.wq_b"]
    damage(tmp_path / "out", name, lambda scale: scale.reciprocal() * 2)
    assert broken("bf16", tmp_path / "out") == ["layers.0.attn.wq_b"]
