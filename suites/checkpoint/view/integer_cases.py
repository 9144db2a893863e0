"""Integer checkpoints as AutoAWQ, AutoGPTQ, compressed-tensors and torchao write them.

The packers of AutoAWQ and AutoGPTQ are derived anew from what these projects publish; the others
are the libraries' own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # awq/utils/packing_utils.py: order_map of the packer


def write(folder: Path, tensors: dict[str, Tensor], stated: dict[str, Any] | None) -> Path:
    """Write a checkpoint of one shard with its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "m.safetensors")
    config: dict[str, Any] = {"model_type": "llama"}
    if stated is not None:
        config["quantization_config"] = stated
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack rows of integers into int32: number `order[i]` of a word at its bits i * `bits`."""
    count = 32 // bits
    groups = numbers.long().reshape(numbers.shape[0], -1, count)
    places = range(count) if order is None else order
    total = sum(groups[..., place] << (bits * position) for position, place in enumerate(places))
    assert isinstance(total, torch.Tensor)
    return ((total + 2**31) % 2**32 - 2**31).int()


def awq(module: str, codes_NK: Tensor, zeros_NG: Tensor, scales_NG: Tensor) -> dict[str, Tensor]:
    """AutoAWQ WQLinear_GEMM.from_linear: everything transposed, words along N, interleaved."""
    return {
        f"{module}.qweight": words(codes_NK.T, 4, AWQ_ORDER),
        f"{module}.qzeros": words(zeros_NG.T, 4, AWQ_ORDER),
        f"{module}.scales": scales_NG.T.half(),
    }


def gptq(
    module: str,
    codes_NK: Tensor,
    zeros_NG: Tensor,
    scales_NG: Tensor,
    facts: tuple[int, int, Tensor],
) -> dict[str, Tensor]:
    """AutoGPTQ QuantLinear.pack: words along K, zero points less `facts[1]` (1 in v1) along N."""
    bits, less, index_K = facts
    return {
        f"{module}.qweight": words(codes_NK, bits).T,
        f"{module}.qzeros": words(zeros_NG.T - less, bits),
        f"{module}.scales": scales_NG.T.half(),
        f"{module}.g_idx": index_K.int(),
    }
