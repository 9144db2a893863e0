"""Scalar scales: shared by partners, in modules of their own and in stacks; no factor inside."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from degarble.suites.checkpoint.structure_cases import (
    V4,
    V32,
    audited,
    errors,
    replant,
    told,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("healthy") / "c", V4, "nvfp4-full")


@pytest.mark.parametrize(
    ("name", "rule", "level"),
    [
        ("mlp.experts.3.up_proj", "partners.tensor_scale", "error"),
        ("mlp.shared_experts.up_proj", "partners.tensor_scale", "error"),
        ("self_attn.kv_proj", "partners.tensor_scale_fusable", "warning"),
        ("self_attn.compressor.gate_proj", "partners.tensor_scale_fusable", "warning"),
        ("self_attn.compressor.indexer.gate_proj", "partners.tensor_scale_fusable", "warning"),
    ],
)
def test_a_partner_with_its_own_scale_is_told(
    tmp_path: Path, full: Path, name: str, rule: str, level: str
) -> None:
    scale = f"model.layers.1.{name}.weight_scale_2"

    def change(tensors: Tensors) -> None:
        tensors[scale] = tensors[scale] * 0.5

    (found,) = told(audited(replant(full, tmp_path / "c", change)), rule)
    assert (found.level, found.layer) == (level, 1)
    assert found.evidence["ratio"] == pytest.approx(2)
    assert scale in found.message


@pytest.mark.parametrize("suffix", ["weight_scale_2", "input_scale"])
def test_a_stack_is_compared_column_by_column(tmp_path: Path, suffix: str) -> None:
    healthy = write(tmp_path / "a", V4, "vllm", "nvfp4-experts")
    name = f"model.layers.1.ffn.experts.w13_{suffix}"

    def change(tensors: Tensors) -> None:
        tensors[name][2, 1] *= 3

    found = audited(replant(healthy, tmp_path / "b", change))
    rule = "partners.tensor_scale" if suffix == "weight_scale_2" else "partners.input_scale"
    (apart,) = told(found, rule)
    assert f"{name}[2, 1]" in apart.message
    assert apart.evidence["ratio"] == pytest.approx(3)


def test_all_scales_with_their_input_scale_inside_are_told(tmp_path: Path) -> None:
    config = replace(V4, n_routed_experts=16)
    healthy = write(tmp_path / "a", config, "nvfp4-full")
    assert errors(audited(healthy)) == set()

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith(".weight_scale_2"):
                inputs = tensors[name.replace("weight_scale_2", "input_scale")]
                tensors[name] = tensors[name] * inputs

    found = told(audited(replant(healthy, tmp_path / "b", change)), "scales.input_scale_inside")
    rows = {
        each.tensor.split(".")[-2] for each in found if each.tensor and "experts." in each.tensor
    }
    assert rows == {"gate_proj", "up_proj", "down_proj"}
    # Of the dead experts, whose scales are tiny anyway, nothing is said.
    assert 3 * 3 * 12 < sum(each.count for each in found) <= 3 * 3 * 16


def test_a_small_scale_that_no_input_scale_explains_is_another_rules_business(
    tmp_path: Path, full: Path
) -> None:
    name = "model.layers.1.mlp.experts.0.down_proj.weight_scale_2"

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] * 1e-20

    assert told(audited(replant(full, tmp_path / "c", change)), "scales.input_scale_inside") == []


def test_divisors_are_read_as_divisors(tmp_path: Path) -> None:
    healthy = write(tmp_path / "a", V32, "compressed-tensors")
    assert errors(audited(healthy)) == set()
    module = "model.layers.1.mlp.experts.0.down_proj"

    def change(tensors: Tensors) -> None:
        inputs = 1 / tensors[f"{module}.input_global_scale"]
        tensors[f"{module}.weight_global_scale"] = tensors[f"{module}.weight_global_scale"] / inputs

    (inside,) = told(audited(replant(healthy, tmp_path / "b", change)), "scales.input_scale_inside")
    assert inside.module == module
