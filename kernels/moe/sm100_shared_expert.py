"""Shared expert on Blackwell (sm_100a), NVFP4 or FP8: gate and up, clamped SwiGLU, down.

Composes kernels and has none of its own; problem, weights and the order of steps are those of
sm90_shared_expert. NVFP4 uses the grouped products of sm100_moe_nvfp4, FP8 those of
sm100_gemm_fp8_block.

Nothing waits on the host; a call allocates its output and intermediates. Compiled but never run.
Shape letters: T tokens, D hidden, F width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.kernels.gemm import contract
from degarble.kernels.gemm import sm100_gemm_fp8_block as fp8
from degarble.kernels.moe import sm90_shared_expert as hopper
from degarble.kernels.moe import sm100_moe_nvfp4 as moe
from degarble.kernels.moe.problem import GATE_AND_UP
from degarble.kernels.runtime.operands import require_tensor
from degarble.kernels.runtime.targets import SM100A

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.moe.problem import MoeProblem
    from degarble.kernels.moe.sm90_moe_nvfp4 import MoeWeights
    from degarble.kernels.runtime.compiling import CompileSettings


def shared_expert_nvfp4(
    x_TD: Tensor, weights: MoeWeights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]; `weights` hold one expert."""
    return hopper.one_expert(x_TD, weights, problem, settings, moe, SM100A)


def shared_expert_fp8(
    x_TD: Tensor, weights: hopper.Fp8Weights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]."""
    hopper.require_tokens(x_TD, problem)
    require_weights(problem, weights)
    contract.require_place((x_TD, *weights), SM100A)
    return hopper.fp8_products(x_TD, weights, problem, settings, fp8.KERNEL)


def require_weights(problem: MoeProblem, weights: hopper.Fp8Weights) -> None:
    """Raise unless the matrices have the problem's extents; a product takes its own from them."""
    hidden, width = problem.hidden, problem.width
    for name, codes, shape in (
        ("w13", weights.w13, (GATE_AND_UP * width, hidden)),
        ("w2", weights.w2, (hidden, width)),
    ):
        require_tensor(
            f"codes of {name}", codes, torch.float8_e4m3fn, shape, contract.TMA_ALIGNMENT
        )
