"""Loader proofs over what `degarble convert` writes: fused for vLLM, decoded, quantised again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.checkpoint.transform.convert.job import convert
from degarble.suites.checkpoint.audit.loader.loader_cases import Raw, proven
from degarble.suites.checkpoint.audit.loader.loader_moves import require_claims
from degarble.suites.checkpoint.converting_cases import source
from degarble.suites.checkpoint.structure_cases import V4, errors, replant, told, write

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

VLLM: Raw = {"base": "vllm", "tp": 2}


@pytest.mark.parametrize(
    ("kind", "to", "options"),
    [
        ("official", "vllm", {}),
        ("nvfp4-full", "vllm", {}),
        ("compressed-tensors", "vllm", {}),
        ("v32-nvfp4", "vllm", {}),
        ("nvfp4-full", "bf16", {}),
        ("official", "fused-compressor", {}),
        ("v32", "fp8-block", {}),
        ("v32", "nvfp4", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_conversions_load_every_element(
    tmp_path: Path, kind: str, to: str, options: dict[str, object]
) -> None:
    convert(source(kind), tmp_path / "out", to, options)
    proof = proven(tmp_path / "out", VLLM)
    assert errors(proof.findings) == set()
    assert proof.unread == {}
    assert proof.unwritten == {}
    require_claims(proof)


def test_input_scales_that_nobody_measured_stay_unwritten(tmp_path: Path) -> None:
    convert(source("official"), tmp_path / "out", "nvfp4-lossless", {})
    proof = proven(tmp_path / "out", VLLM)
    assert errors(proof.findings) == {"loader.unwritten"}
    assert {name.rpartition(".")[2] for _, name in proof.unwritten} == {
        "w13_input_scale",
        "w2_input_scale",
    }


def test_a_backends_order_is_told(tmp_path: Path) -> None:
    convert(source("nvfp4-experts"), tmp_path / "out", "vllm", {"backend": "trtllm"})
    found = proven(tmp_path / "out", VLLM).findings
    assert any("order of trtllm kernels" in each.message for each in told(found, "loader.caveat"))


def test_a_row_short_of_a_fused_tensor_is_found(tmp_path: Path) -> None:
    name = "model.layers.1.attn.fused_wqa_wkv.weight"

    def shorten(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].view(torch.uint8)[:-1].view(torch.float8_e4m3fn).contiguous()

    folder = write(tmp_path / "whole", V4, "vllm")
    proof = proven(replant(folder, tmp_path / "short", shorten), VLLM)
    assert errors(proof.findings) == {"loader.shape"}
    (found,) = told(proof.findings, "loader.shape")
    assert found.tensor == name


def test_a_fused_tensor_that_is_skipped_is_told_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "vllm")
    raw = {**VLLM, "skip": [r"layers\.1\.ffn\.experts\.w13_weight$"]}
    proof = proven(folder, raw)
    assert errors(proof.findings) == {"loader.skipped"}
    assert {name for _, name in proof.unwritten} == {"model.layers.1.ffn.experts.w13_weight"}
    (found,) = told(proof.findings, "loader.skipped")
    assert "w13_weight stays as the engine found it" in found.message


def test_fused_checkpoints_are_proven_against_their_own_engine_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", V4, "vllm")
    with pytest.raises(LayoutMismatch, match="prove the checkpoint that it was made from"):
        proven(folder, {"parameters": {"a": {"dtype": "U8", "shape": [1]}}})
