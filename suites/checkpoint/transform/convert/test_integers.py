"""Integers by group change their dialect, and no value changes; what cannot be kept is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.transform.convert.job import convert, prove
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.view.integer_cases import awq, gptq, write
from degarble.suites.checkpoint.view.test_schemes import every_pair

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

_STATED: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}


def _source(folder: Path, *, least: int = 0) -> Path:
    """Write AWQ with every code under every zero point from `least`."""
    codes, zeros, scales = every_pair(4)
    tensors = awq("model.layers.0.mlp.up_proj", codes, zeros.clamp(min=least), scales)
    return write(folder, {**tensors, "lm_head.weight": torch.ones(4, 8)}, _STATED)


def _values(folder: Path) -> Tensor:
    with Checkpoint.open(folder) as checkpoint:
        return checkpoint.weight("model.layers.0.mlp.up_proj").values(torch.float64).clone()


def _bytes(folder: Path) -> dict[str, bytes]:
    with Checkpoint.open(folder) as checkpoint:
        return {name: bytes(checkpoint.raw(name)) for name in checkpoint.entries}


@pytest.mark.parametrize(
    "way", [("pack-quantized", "awq"), ("gptq", "awq"), ("gptq", "pack-quantized", "awq")]
)
def test_a_round_trip_restores_every_byte(tmp_path: Path, way: tuple[str, ...]) -> None:
    folders = [_source(tmp_path / "source", least=1 if "gptq" in way else 0)]
    for number, to in enumerate(way):
        folders.append(tmp_path / str(number))
        convert(folders[-2], folders[-1], to)
        assert prove(folders[-2], folders[-1]).exact == 1
    for before, after in pairwise(folders):
        assert torch.equal(_values(before), _values(after))
    assert _bytes(folders[0]) == _bytes(folders[-1])
    config = json.loads((folders[-1] / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == ("awq", 4, 128)
    assert config["modules_to_not_convert"] == ["lm_head"]


def test_columns_in_another_order_go_with_their_groups(tmp_path: Path, seed: int) -> None:
    codes, zeros, scales = every_pair(8)
    index = torch.arange(codes.shape[1]) // 128
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    tensors = gptq("model.layers.0.mlp.up_proj", codes, zeros + 1, scales, (8, 1, index))
    source = write(tmp_path / "source", tensors, {"quant_method": "gptq", "bits": 8})
    convert(source, tmp_path / "packed", "pack-quantized")
    assert torch.equal(_values(source), _values(tmp_path / "packed"))
    convert(tmp_path / "packed", tmp_path / "back", "gptq")
    assert _bytes(source) == _bytes(tmp_path / "back")
    with pytest.raises(LayoutMismatch, match="columns in another order"):
        convert(source, tmp_path / "awq", "awq")


def test_decoding_is_proven_with_zero_points_and_factors(tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    convert(source, tmp_path / "plain", "bf16")
    assert prove(source, tmp_path / "plain").holds
    tensors = {"a.weight": torch.arange(8 * 128).reshape(8, 128).to(torch.uint8),
               "a.weight_scale": torch.full((16, 1), 0.1),
               "a.pre_quant_scale": torch.arange(1.0, 129.0)}  # fmt: skip
    factors = write(
        tmp_path / "f", tensors, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    )
    convert(factors, tmp_path / "decoded", "bf16")
    assert prove(factors, tmp_path / "decoded").holds


def test_what_a_dialect_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = _source(tmp_path / "source")
    with pytest.raises(LayoutMismatch, match="a zero point of 0"):
        convert(source, tmp_path / "gptq", "gptq")
    tensors = {"a.weight": torch.zeros(8, 128, dtype=torch.uint8),
               "a.weight_scale": torch.full((16, 1), 0.1)}  # fmt: skip
    stated = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    modelopt = write(tmp_path / "modelopt", tensors, stated)
    with pytest.raises(LayoutMismatch, match="float16 does not hold"):
        convert(modelopt, tmp_path / "awq", "awq")
    factors = {**tensors, "a.pre_quant_scale": torch.ones(128)}
    with pytest.raises(LayoutMismatch, match="factors of its input"):
        convert(write(tmp_path / "f", factors, stated), tmp_path / "p", "pack-quantized")
    convert(modelopt, tmp_path / "packed", "pack-quantized")
    with Checkpoint.open(modelopt) as one, Checkpoint.open(tmp_path / "packed") as other:
        values = [each.weight("a").values(torch.float64) for each in (one, other)]
        assert torch.equal(*values)
