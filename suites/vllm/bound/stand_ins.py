"""Compute what the plugin's kernels compute, by definition: stand-ins where there is no GPU.

Weights are exact in NVFP4 and have known values. A stand-in reads operands as the kernel would
(scales in 128x4 order, codes low nibble first), so operands in another order give another product.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from degarble.harness.formats.layouts import SWIZZLE_128X4, from_layout

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

BLOCK = 16
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_nvfp4(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Codes [..., N, K / 2] and E4M3 scales [..., N, K / 16] of a weight of this shape."""
    *leading, inner = shape
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*leading, inner // 2), generator=made, dtype=torch.uint8)
    scales = torch.rand(*leading, inner // BLOCK, generator=made) + 0.5
    return codes, scales.to(torch.float8_e4m3fn)


def decoded(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Values [..., N, K] in float32; scales linear, as a checkpoint has them."""
    values = torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(-2)
    return values * scales.float().repeat_interleave(BLOCK, -1) * tensor_scale


def linear_order(storage: Tensor, rows: int, blocks: int) -> Tensor:
    """E4M3 scales in the order of a checkpoint, out of 128x4 order."""
    return from_layout(storage, SWIZZLE_128X4, rows, blocks).view(torch.float8_e4m3fn)


def product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Rows by a weight, rounded once to BF16."""
    return (x_MK.double() @ weight_NK.double().T).to(torch.bfloat16)


def by_nvfp4(x_MK: Tensor, input_scale: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What gemm_nvfp4 reads of its weight; activations stay as they are."""
    codes, storage, tensor_scale = weight
    assert input_scale.shape == tensor_scale.shape == (1,)
    rows, blocks = codes.shape[0], codes.shape[1] * 2 // BLOCK
    return product(x_MK, decoded(codes, linear_order(storage, rows, blocks), tensor_scale))


def by_w4a16(x_MK: Tensor, weight: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What gemm_w4a16 reads: scales linear; no more than 64 rows."""
    assert x_MK.shape[0] <= 64
    return product(x_MK, decoded(*weight))


def by_fp8(codes_MK: Tensor, scales_MG: Tensor, weight_NK: Tensor, scales_HG: Tensor) -> Tensor:
    """What gemm_fp8_block reads: float32 scales of 1 x 128 and 128 x 128."""
    assert scales_MG.dtype == scales_HG.dtype == torch.float32
    a = codes_MK.float() * scales_MG.repeat_interleave(128, 1)[:, : codes_MK.shape[1]]
    spread = scales_HG.repeat_interleave(128, 0).repeat_interleave(128, 1)
    b = weight_NK.float() * spread[: weight_NK.shape[0], : weight_NK.shape[1]]
    return product(a, b)


def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's parameters believe in a group of one rank, without one."""
    parameter = import_module("vllm.model_executor.parameter")
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    for module in (parameter, import_module("vllm.distributed")):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
