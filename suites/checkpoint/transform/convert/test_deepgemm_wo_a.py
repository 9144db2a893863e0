from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.layouts import unpack_scales
from degarble.suites.checkpoint.converting_cases import (
    V4,
    broken,
    converted,
    damage,
    source,
)
from degarble.suites.support.synthetic.checkpoints import Synthetic, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

GPUS = ("sm90", "sm100")
OWN = "layers.0.attn.wo_a"
GROUPS, ROWS = V4.o_groups, V4.o_lora_rank
COLUMNS = V4.num_attention_heads * V4.head_dim // V4.o_groups


@pytest.mark.parametrize(
    ("kind", "gpu", "per", "direction"),
    [
        *product(
            ["nvfp4-full", "official", "bf16"], ["sm90", "sm100"], ["block", "tensor"], ["decode"]
        ),
        ("bf16", "sm90", "block", "encode"),
        ("bf16", "sm100", "tensor", "encode"),
    ],
)
def test_every_form_holds_its_promise(
    kind: str, gpu: str, per: str, direction: str, tmp_path: Path
) -> None:
    options = {"gpu": gpu, "per": per, "direction": direction}
    proof = converted(kind, tmp_path / "out", "deepgemm-wo-a", **options)
    assert proof.holds, list(proof.lines())
    with Checkpoint.open(tmp_path / "out") as after, Checkpoint.open(source(kind)) as before:
        weight, scale = after.entry(f"{OWN}.weight"), after.entry(f"{OWN}.weight_scale_inv")
        values = before.stored(OWN).values().reshape(GROUPS, ROWS, COLUMNS)
        codes = after.tensor(weight.name).float()
        stored = after.tensor(scale.name)
    assert (weight.dtype, weight.shape) == ("F8_E4M3", (GROUPS, ROWS, COLUMNS))
    blocks = -(-COLUMNS // 128)
    if gpu == "sm90":
        assert (scale.dtype, scale.shape) == ("F32", (GROUPS, ROWS // 128, blocks))
        factor = stored.repeat_interleave(128, 1)
    else:
        assert (scale.dtype, scale.shape) == ("I32", (GROUPS, -(-blocks // 4), ROWS))
        exponents = unpack_scales(stored.transpose(-1, -2), blocks)
        factor = torch.exp2(exponents.float() - 127)
    factor = factor.repeat_interleave(128, 2)[..., :COLUMNS]
    output = codes * factor if direction == "decode" else codes / factor
    assert (output - values).abs().max() < values.abs().max() / 16
    if per == "tensor":
        assert factor.unique().numel() == 1
        wanted = values.abs().max() / 448
        found = factor.flatten()[0] if direction == "decode" else 1 / factor.flatten()[0]
        assert wanted * 0.999 < found < wanted * (1.001 if gpu == "sm90" else 2)


def test_codes_and_scales_of_fp8_stay_as_they_are(tmp_path: Path) -> None:
    proof = converted("official", tmp_path / "out", "deepgemm-wo-a", gpu="sm90")
    assert proof.exact == len(proof.tensors)
    with Checkpoint.open(tmp_path / "out") as after, Checkpoint.open(source("official")) as before:
        assert after.raw(f"{OWN}.weight") == before.raw(f"{OWN}.weight")


def _mixed_up(words: Tensor) -> Tensor:
    return words.view(torch.uint8).reshape(*words.shape, 4).flip(-1).contiguous()


@pytest.mark.parametrize(
    ("gpu", "fault"),
    [
        ("sm90", torch.ones_like),
        ("sm90", torch.reciprocal),
        ("sm90", lambda scale: scale * 1.01),
        ("sm100", lambda words: torch.full_like(words, 0x7F7F7F7F)),
        ("sm100", _mixed_up),
        ("sm100", lambda words: words.roll(1, 0)),
        ("sm100", lambda words: torch.cat([words[:, :, 1:], words[:, :, :1] + 1], -1)),
    ],
    ids=["ones", "reciprocal", "gain", "packed ones", "byte order", "groups", "one row"],
)
def test_wrong_scales_are_detected(
    gpu: str, fault: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """Origin, faults 1, 2 and 5: what is wrong about DeepGEMM's block scales."""
    converted("nvfp4-full", tmp_path / "out", "deepgemm-wo-a", gpu=gpu)
    damage(tmp_path / "out", f"{OWN}.weight_scale_inv", fault)
    assert broken("nvfp4-full", tmp_path / "out") == [f"{OWN}.weight"]


def test_groups_in_another_order_are_detected(tmp_path: Path) -> None:
    converted("nvfp4-full", tmp_path / "out", "deepgemm-wo-a")
    damage(tmp_path / "out", f"{OWN}.weight", lambda codes: codes.view(torch.uint8).roll(1, 0))
    assert broken("nvfp4-full", tmp_path / "out") == [f"{OWN}.weight"]


def test_scales_of_another_rank_or_dtype_are_named(tmp_path: Path) -> None:
    """Origin, faults 1 and 2: a 1-D scale, and E4M3 scales, where a block scale is wanted."""
    for gpu, other in (("sm90", "sm100"), ("sm100", "sm90")):
        target = tmp_path / gpu
        converted("nvfp4-full", target, "deepgemm-wo-a", gpu=gpu)
        text = (target / "conversion.json").read_text()
        (target / "conversion.json").write_text(text.replace(f'"{gpu}"', f'"{other}"'))
        proof = prove(source("nvfp4-full"), target)
        assert not proof.holds
        assert any(
            "weight_scale_inv is" in fault
            for tensor_proof in proof.broken
            for fault in tensor_proof.faults
        )


def test_other_sources_and_options_are_refused(tmp_path: Path) -> None:
    """Origin, fault 3: arguments that a changed signature misses are refused, never guessed."""
    with pytest.raises(LayoutMismatch, match=r"V3\.2 has one output projection"):
        convert(source("v32"), tmp_path / "out", "deepgemm-wo-a")
    with pytest.raises(UnknownName, match="sm100"):
        convert(source("bf16"), tmp_path / "out", "deepgemm-wo-a", {"gpu": "sm10"})
    with pytest.raises(UnknownName, match="option of deepgemm-wo-a"):
        convert(source("bf16"), tmp_path / "out", "deepgemm-wo-a", {"block_shape": 128})


def test_groups_that_are_no_multiple_of_a_scale_are_refused_by_name(tmp_path: Path) -> None:
    """As in a very small model: 32 rows a group, where one scale stands for 128."""
    config = replace(V4, o_lora_rank=32)
    write_checkpoint(tmp_path / "made", Synthetic(config, "official", seed=1))
    rows = config.o_groups * 32
    text = rf"rows of layers\.0\.attn\.wo_a = {rows}: expected {config.o_groups} groups of .*128"
    with pytest.raises(ShapeMismatch, match=text):
        convert(tmp_path / "made", tmp_path / "out", "deepgemm-wo-a", {"gpu": "sm90"})
    assert not (tmp_path / "out").exists()
