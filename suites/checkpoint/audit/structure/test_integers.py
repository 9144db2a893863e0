"""What configs state about integer weights against the shards, for a model that is unknown here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.checkpoint.audit.structure.structure import audit_structure
from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint import structure_cases
from degarble.suites.checkpoint.view.integer_cases import awq, gptq, write

if TYPE_CHECKING:
    from pathlib import Path

    from degarble.harness.checkpoint.audit.findings import Finding

HEALTHY: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}


def judged(
    folder: Path, stated: dict[str, Any], *, zero: int = 8, shuffled: bool = False
) -> list[Finding]:
    codes = torch.arange(16 * 256).reshape(16, 256) % 16
    zeros, scales = torch.full((16, 2), zero), torch.full((16, 2), 0.01)
    index = torch.arange(256) // 128
    index = index.flip(0) if shuffled else index
    tensors = (
        awq("layers.0.q", codes, zeros, scales)
        if stated["quant_method"] == "awq"
        else gptq("layers.0.q", codes, zeros, scales, (4, 1, index))
    )
    write(folder, tensors, stated)
    with Checkpoint.survey(folder) as checkpoint:
        return [each for each in audit_structure(checkpoint) if each.rule.startswith("config.")]


@pytest.mark.parametrize(
    "stated",
    [
        HEALTHY,
        {"quant_method": "gptq"},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "gemm"},
    ],
)
def test_true_statements_are_silent(tmp_path: Path, stated: dict[str, Any]) -> None:
    assert judged(tmp_path, stated) == []


def test_a_byte_may_hold_a_code_of_fewer_bits(tmp_path: Path) -> None:
    # compressed-tensors stores W4A8 as signed bytes.
    tensors = {
        "layers.0.q.weight": (torch.arange(16 * 256).reshape(16, 256) % 16 - 8).to(torch.int8),
        "layers.0.q.weight_scale": torch.full((16, 2), 0.01),
    }
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": 128}}
    stated = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    write(tmp_path, tensors, stated | {"config_groups": {"group_0": group}})
    with Checkpoint.survey(tmp_path) as checkpoint:
        found = [each for each in audit_structure(checkpoint) if each.rule.startswith("config.")]
    assert found == []


def packed_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Quantise the experts of a checkpoint as AutoAWQ does, by group of 32."""
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        made = quantise(tensors.pop(name), BLOCK_FORMATS["UINT4_G32"])
        assert made.zero_point is not None
        parts = (made.element_codes(), made.zero_point.int(), made.block_scale)
        packed = awq(name.removesuffix(".weight"), *parts)
        tensors |= {part: tensor.contiguous() for part, tensor in packed.items()}


def test_experts_of_a_known_model_may_be_integers(tmp_path: Path) -> None:
    source = structure_cases.write(tmp_path / "bf16", structure_cases.V32, "official", "bf16")
    target = structure_cases.replant(source, tmp_path / "awq", packed_experts)
    stated = {"quant_method": "awq", "bits": 4, "group_size": 32}

    def state(raw: dict[str, Any]) -> None:
        raw["quantization_config"] = stated

    structure_cases.reconfigure(target, "config.json", state)
    findings = structure_cases.audited(target)
    assert structure_cases.errors(findings) == set(), findings

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(".qzeros"))
        tensors[name] = tensors[name][:-1].contiguous()

    broken = structure_cases.replant(target, tmp_path / "cut", cut)
    found = structure_cases.told(structure_cases.audited(broken), "structure.unreadable_module")
    assert len(found) == 1
    assert ".qzeros" in found[0].message


def test_columns_in_order_may_be_called_act_order(tmp_path: Path) -> None:
    assert judged(tmp_path / "a", {**HEALTHY, "desc_act": True}, shuffled=True) == []
    assert judged(tmp_path / "b", {**HEALTHY, "desc_act": True}) == []


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({"bits": 8}, "config.contradicts", "has codes of 4 bits; config.json.*states 8 bits"),
        ({"group_size": 64}, "config.block_size_built", "one scale for 128 columns.*groups of 64"),
        ({"group_size": -1}, "config.block_size_built", "one scale for 128 columns.*whole rows"),
    ],
)
def test_false_statements_are_reported(
    tmp_path: Path, change: dict[str, Any], rule: str, text: str
) -> None:
    (finding,) = judged(tmp_path, HEALTHY | change)
    assert finding.rule == rule
    assert re.search(text, finding.message)


def test_an_order_that_engines_ignore_is_reported(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path, HEALTHY, shuffled=True)
    assert finding.rule == "config.contradicts"
    assert "g_idx" in finding.message


def test_zero_points_that_engines_ignore_are_reported(tmp_path: Path) -> None:
    (finding,) = judged(tmp_path, HEALTHY, zero=7)
    assert finding.rule == "config.contradicts"
    assert "zero points other than 8" in finding.message
