"""Packing orders of models without tables: names tell which norm and which rows a matrix meets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.commands.audit.audit import AuditRequest, audit
from degarble.harness.formats.dialects import MODELOPT
from degarble.harness.formats.number_formats import NVFP4
from degarble.harness.formats.quantise import quantise

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

WIDTH, INNER = 256, 512
_RULE = "numbers.nibble_order_likely"


def _written(folder: Path, seed: int, swapped: str = "", *, sandwich: bool = False) -> Path:
    """Write two layers whose gains and rows go with the columns that meet them, as trained ones do.

    Large gains go with small columns.
    """
    generator = torch.Generator().manual_seed(seed)

    def profile(width: int) -> Tensor:
        return torch.randn(width, generator=generator).exp()

    tensors: dict[str, Tensor] = {}

    def linear(module: str, rows: Tensor, columns: Tensor) -> None:
        value = torch.randn(len(rows), len(columns), generator=generator)
        made = quantise(value * rows[:, None] * columns / 64, NVFP4, MODELOPT)
        codes = made.codes
        if module == swapped:
            codes = (codes << 4) | (codes >> 4)
        assert made.tensor_scale is not None
        tensors[f"{module}.weight"] = codes
        tensors[f"{module}.weight_scale"] = made.block_scale.view(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale_2"] = made.tensor_scale

    for number in range(2):
        layer = f"model.layers.{number}"
        gains = [profile(WIDTH), profile(WIDTH)]
        for kind, gain in zip(("input", "post_attention"), gains, strict=True):
            tensors[f"{layer}.{kind}_layernorm.weight"] = gain.bfloat16()
        if sandwich:
            tensors[f"{layer}.pre_feedforward_layernorm.weight"] = profile(WIDTH).bfloat16()
        inner = profile(INNER)
        for leaf in ("q_proj", "k_proj", "v_proj"):
            linear(f"{layer}.self_attn.{leaf}", torch.ones(WIDTH), 1 / gains[0])
        linear(f"{layer}.mlp.gate_proj", torch.ones(INNER), 1 / gains[1])
        linear(f"{layer}.mlp.up_proj", inner, 1 / gains[1])
        linear(f"{layer}.mlp.down_proj", torch.ones(WIDTH), 1 / inner)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def _found(folder: Path) -> list[str]:
    made = audit(AuditRequest(folder))
    return [str(each.module) for each in made.findings if each.rule == _RULE]


@pytest.mark.parametrize("leaf", ["", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
def test_swapped_nibbles_of_one_matrix_are_found(tmp_path: Path, seed: int, leaf: str) -> None:
    module = f"model.layers.1.{leaf}" if leaf else ""
    assert _found(_written(tmp_path, seed, module)) == ([module] if leaf else [])


def test_other_wiring_is_left_undecided(tmp_path: Path, seed: int) -> None:
    module = "model.layers.1.mlp.up_proj"
    assert _found(_written(tmp_path, seed, module, sandwich=True)) == []
