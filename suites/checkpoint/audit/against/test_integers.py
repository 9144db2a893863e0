"""Integers by group against the weights that they were made from: healthy ones, planted faults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from degarble.harness.checkpoint.view.view import Checkpoint
from degarble.harness.formats.number_formats import BLOCK_FORMATS
from degarble.harness.formats.quantise import quantise
from degarble.suites.checkpoint.number_cases import channels, matrix
from degarble.suites.checkpoint.view.integer_cases import awq, gptq, write
from degarble.suites.support.audits import audit_against

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from degarble.harness.checkpoint.audit.findings import Finding

LEVELS = ("error", "warning")
NAMES = [f"layers.{layer}.{part}" for layer in range(3) for part in ("q", "o")]


def weights(seed: int) -> dict[str, Tensor]:
    return {
        name: matrix(seed + number, 128, 256, channels(seed + number, 256))
        for number, name in enumerate(NAMES)
    }


def made(weight: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, zero points and scales of groups of 32 columns that have equal numbers in `index`."""
    order = index.argsort(stable=True)
    tensor = quantise(weight[:, order], BLOCK_FORMATS["UINT4_G32"])
    codes = torch.empty(weight.shape, dtype=torch.long)
    codes[:, order] = tensor.element_codes().long()
    assert tensor.zero_point is not None
    return codes, tensor.zero_point.long(), tensor.block_scale


def shuffled(seed: int) -> Tensor:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(256) // 32)[order]


def audited(folder: Path, seed: int, scheme: str, fault: str = "") -> list[Finding]:
    plain = weights(seed)
    (folder / "bf16").mkdir(parents=True)
    save_file(
        {f"{name}.weight": each for name, each in plain.items()}, folder / "bf16/m.safetensors"
    )
    tensors: dict[str, Tensor] = {}
    index = shuffled(seed) if scheme == "act-order" else torch.arange(256) // 32
    for name, weight in plain.items():
        codes, zeros, scales = made(weight, index)
        if name == NAMES[2]:
            codes, zeros, scales = damaged(fault, (codes, zeros, scales))
        own = torch.arange(256) // 32 if fault == "g_idx ignored" and name == NAMES[2] else index
        tensors |= (
            awq(name, codes, zeros, scales)
            if scheme == "awq"
            else gptq(name, codes, zeros, scales, (4, 0, own))
        )
    stated: dict[str, Any] = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    write(folder / "int4", tensors, {"quant_method": "awq"} if scheme == "awq" else stated)
    with (
        Checkpoint.open(folder / "int4") as checkpoint,
        Checkpoint.open(folder / "bf16") as reference,
    ):
        return [
            each
            for each in audit_against(checkpoint, reference).findings
            if each.level.value in LEVELS
        ]


def damaged(fault: str, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    codes, zeros, scales = parts
    pairs = codes.reshape(len(codes), -1, 2)
    return {
        "": parts,
        "g_idx ignored": parts,
        "zero point off by one": (codes, (zeros - 1).clamp(min=0), scales),
        "nibble order": (pairs.flip(-1).reshape(codes.shape), zeros, scales),
        "group shifted by one": (codes, zeros.roll(1, 1), scales.roll(1, 1)),
        "scale of the neighbour group": (codes, zeros, scales.roll(1, 1)),
    }[fault]


@pytest.mark.parametrize("scheme", ["awq", "gptq", "act-order"])
def test_healthy_integers_have_no_findings(tmp_path: Path, seed: int, scheme: str) -> None:
    assert audited(tmp_path, seed, scheme) == []


@pytest.mark.parametrize("scheme", ["awq", "gptq", "act-order"])
@pytest.mark.parametrize(
    "fault",
    [
        "zero point off by one",
        "nibble order",
        "group shifted by one",
        "scale of the neighbour group",
    ],
)
def test_planted_faults_are_found(tmp_path: Path, seed: int, scheme: str, fault: str) -> None:
    findings = audited(tmp_path, seed, scheme, fault)
    assert findings
    assert all(NAMES[2] in finding.message for finding in findings)


def test_an_ignored_order_is_found(tmp_path: Path, seed: int) -> None:
    findings = audited(tmp_path, seed, "act-order", "g_idx ignored")
    assert findings
    assert all(NAMES[2] in finding.message for finding in findings)
