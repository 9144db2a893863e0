"""Layers and experts that the config does not count are errors in any family; drafters are not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.suites.checkpoint.reading_cases import write_shards

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CONFIG = {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 2}


def _tensors(layers: int = 2, experts: int = 2) -> dict[str, Tensor]:
    names = [
        f"model.layers.{i}.experts.{e}.w1.weight" for i in range(layers) for e in range(experts)
    ]
    return {name: torch.ones(4, 4) for name in (*names, "lm_head.weight")}


def _rules(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] = CONFIG) -> set[str]:
    write_shards(folder, [tensors])
    (folder / "config.json").write_text(json.dumps(config))
    with Checkpoint.survey(folder) as checkpoint:
        found = audit_structure(checkpoint)
    return {each.rule for each in found if each.level == "error"}


@pytest.mark.parametrize(
    ("layers", "experts", "told"),
    [
        (2, 2, set()),
        (3, 2, {"structure.uncounted"}),
        (1, 2, {"structure.missing_block"}),
        (2, 3, {"structure.uncounted"}),
        (2, 1, {"structure.missing_expert"}),
    ],
)
def test_counts_of_an_unknown_family(
    tmp_path: Path, layers: int, experts: int, told: set[str]
) -> None:
    assert _rules(tmp_path, _tensors(layers, experts)) == told


def test_a_drafter_behind_the_layers_is_no_uncounted_layer(tmp_path: Path) -> None:
    drafter = {f"model.layers.2.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "mlp.up")}
    assert not _rules(tmp_path, _tensors() | drafter)


def test_scales_of_one_format_have_one_name(tmp_path: Path) -> None:
    def module(layer: int, suffix: str) -> dict[str, Tensor]:
        name = f"model.layers.{layer}.up.weight"
        codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}{suffix}": torch.ones(1, 1)}

    tensors = module(0, "_scale_inv") | module(1, "_scale_inv")
    config = {"model_type": "llama", "num_hidden_layers": 2}
    assert not _rules(tmp_path / "a", tensors, config)
    tensors |= module(2, "_scale")
    config["num_hidden_layers"] = 3
    assert _rules(tmp_path / "b", tensors, config) == {"scales.name"}


def test_an_nvfp4_scale_under_another_name_is_told(tmp_path: Path) -> None:
    parts = {
        "weight": torch.ones(16, 16, dtype=torch.uint8),
        "weight_scale_inv": torch.ones(16, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(1),
    }
    tensors = {f"model.layers.0.up.{name}": tensor for name, tensor in parts.items()}
    config = {"model_type": "llama", "num_hidden_layers": 1}
    assert _rules(tmp_path, tensors, config) == {"structure.unreadable_module"}
