"""The shared expert on Blackwell, in NVFP4 or FP8: gate and up, clamped SwiGLU, requantised, down.

Owns two entry points that put kernels together, and no kernel; problem and weights are those of
sm90_shared_expert. In NVFP4 every token visits one expert: the grouped products of sm100_moe_nvfp4,
with SwiGLU and requantisation in the epilogue. In FP8 gate and up are one product of
sm100_gemm_fp8_block, and SwiGLU is in front of the second quantisation by simt_quantise_fp8.

No host waits; a call allocates its output and what lies between its steps. Refuses other dtypes,
shapes, strides and alignments by name. Compiled, never run: kept honest by
suites/kernels/test_sm100_shared_expert.py as far as that reaches.
Shape letters: T tokens, D hidden, F width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from degarble.harness.errors import ShapeMismatch
from degarble.kernels import sm90_moe_nvfp4 as hopper
from degarble.kernels import sm100_gemm_fp8_block as fp8
from degarble.kernels import sm100_moe_nvfp4 as moe
from degarble.kernels.common import gemm_contract as contract
from degarble.kernels.common.fp8_quantise_problem import BLOCK, Fp8Problem
from degarble.kernels.common.gemm_problem import FP8_BLOCK, GemmProblem
from degarble.kernels.common.moe_problem import GATE_AND_UP
from degarble.kernels.common.operands import require_tensor
from degarble.kernels.common.targets import SM100A
from degarble.kernels.simt_quantise_fp8 import quantise_fp8
from degarble.kernels.sm90_gemm_fp8_block import Fp8Operands

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.common.moe_problem import MoeProblem
    from degarble.kernels.common.settings import CompileSettings
    from degarble.kernels.sm90_shared_expert import Fp8Weights


def shared_expert_nvfp4(
    x_TD: Tensor, weights: hopper.MoeWeights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]; `weights` hold one expert."""
    if problem.slots != problem.tokens or problem.routed != 1:
        raise ShapeMismatch(
            "experts of a shared expert",
            (problem.chosen, problem.routed),
            "one expert, which every token visits",
            "Use sm90_shared_expert.problem_of.",
        )
    device = x_TD.device
    chosen = torch.zeros(problem.tokens, 1, dtype=torch.int32, device=device)
    routing = hopper.Routing(chosen, torch.ones(problem.tokens, 1, device=device))
    given = hopper.Given(x_TD, routing, weights)
    hopper.require_given(problem, given)
    contract.require_place(tuple(hopper.tensors_of(given)), SM100A)
    job = moe.job_of(problem, settings)
    workspace = hopper.empty_workspace(job, device)
    if problem.tokens:
        moe.products(job, given, workspace)
    return workspace.out[: problem.tokens]  # rows are in the order of tokens: all visit one expert


def shared_expert_fp8(
    x_TD: Tensor, weights: Fp8Weights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]."""
    tokens, hidden, width = problem.tokens, problem.hidden, problem.width
    if hidden % BLOCK or width % BLOCK:
        raise ShapeMismatch(
            "hidden and width of an FP8 expert",
            (hidden, width),
            f"multiples of {BLOCK}: w1 and w3 have blocks of their own",
            "Pad with zeros.",
        )
    require_tensor("x", x_TD, torch.bfloat16, (tokens, hidden), 32)
    require_weights(problem, weights)
    scales = "ue8m0" if weights.w13_scales.dtype is torch.uint8 else "float32"
    contract.require_place((x_TD, *weights), SM100A)

    def product(values: Tensor, of_values: Fp8Problem, codes: Tensor, of_codes: Tensor) -> Tensor:
        a = quantise_fp8(values, of_values, settings)
        columns, inner = codes.shape
        of_product = GemmProblem(tokens, columns, inner, FP8_BLOCK.name, scales)
        return fp8.gemm_fp8_block(
            Fp8Operands(a.codes, a.scales, codes, of_codes), of_product, settings
        )

    of_x = Fp8Problem(tokens, hidden, scales, "values", None)
    of_halves = Fp8Problem(tokens, width, scales, "swiglu", problem.limit)
    halves = product(x_TD, of_x, weights.w13, weights.w13_scales)
    return product(halves, of_halves, weights.w2, weights.w2_scales)


def require_weights(problem: MoeProblem, weights: Fp8Weights) -> None:
    """Refuse matrices of other extents: a product takes its own from them."""
    hidden, width = problem.hidden, problem.width
    for name, codes, shape in (
        ("w13", weights.w13, (GATE_AND_UP * width, hidden)),
        ("w2", weights.w2, (hidden, width)),
    ):
        require_tensor(
            f"codes of {name}", codes, torch.float8_e4m3fn, shape, contract.TMA_ALIGNMENT
        )
