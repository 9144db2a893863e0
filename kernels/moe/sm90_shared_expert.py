"""Shared expert on Hopper (sm_90a), NVFP4 or FP8: gate and up, clamped SwiGLU, requantised, down.

Composes kernels and has none of its own. NVFP4: every token visits one expert, by the grouped
products of sm90_moe_nvfp4 with SwiGLU and requantisation in the epilogue. FP8 (128 x 128 blocks of
weights, 1 x 128 of activations): gate and up are one product of sm90_gemm_fp8_block, and SwiGLU
precedes the second quantisation in simt_quantise_fp8.

Nothing waits on the host; a call allocates its output and intermediates.
Shape letters: T tokens, D hidden, F width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.gemm import contract
from degarble.kernels.gemm import sm90_gemm_fp8_block as fp8
from degarble.kernels.gemm.problem import FP8_BLOCK, GemmProblem
from degarble.kernels.moe import sm90_moe_nvfp4 as moe
from degarble.kernels.moe.problem import GATE_AND_UP, MoeProblem
from degarble.kernels.primitives.quantise_problem import FP8_BLOCK as BLOCK
from degarble.kernels.primitives.quantise_problem import Fp8Problem
from degarble.kernels.quantise.simt_quantise_fp8 import quantise_fp8
from degarble.kernels.runtime.operands import require_tensor
from degarble.kernels.runtime.targets import SM90A

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.kernels.gemm.problem import GemmForm
    from degarble.kernels.runtime.compiling import CompileSettings
    from degarble.kernels.runtime.kernel import Kernel
    from degarble.kernels.runtime.targets import Target


class Fp8Weights(NamedTuple):
    """The shared expert's matrices, w1 above w3: E4M3 codes, scales of 128 x 128 blocks."""

    w13: Tensor  # [2 F, D]
    w13_scales: Tensor  # float32 or UE8M0 bytes [2 F / 128, D / 128]
    w2: Tensor  # [D, F]
    w2_scales: Tensor  # [ceil(D / 128), F / 128]


def problem_of(tokens: int, hidden: int, width: int, limit: float | None) -> MoeProblem:
    """Return the problem of an expert that every token visits."""
    return MoeProblem(tokens, hidden, width, experts=1, chosen=1, routed=1, limit=limit)


def shared_expert_nvfp4(
    x_TD: Tensor, weights: moe.MoeWeights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]; `weights` hold one expert."""
    return one_expert(x_TD, weights, problem, settings, moe, SM90A)


def one_expert(
    x_TD: Tensor,
    weights: moe.MoeWeights,
    problem: MoeProblem,
    settings: CompileSettings,
    grouped: Any,
    target: Target,
) -> Tensor:
    """Run every token through the one expert, by a target's module of grouped products."""
    if problem.slots != problem.tokens or problem.routed != 1:
        raise ShapeMismatch(
            "experts of a shared expert",
            (problem.chosen, problem.routed),
            "one expert, which every token visits",
            "Use sm90_shared_expert.problem_of.",
        )
    device = x_TD.device
    chosen = torch.zeros(problem.tokens, 1, dtype=torch.int32, device=device)
    routing = moe.Routing(chosen, torch.ones(problem.tokens, 1, device=device))
    given = moe.MoeInputs(x_TD, routing, weights)
    moe.require_given(problem, given)
    contract.require_place(tuple(moe.tensors_of(given)), target)
    job = grouped.job_of(problem, settings)
    workspace = moe.empty_workspace(job, device)
    if problem.tokens:
        grouped.products(job, given, workspace)
    # All tokens visit one expert, so rows are in the order of tokens; padding follows.
    return workspace.out[: problem.tokens]


def shared_expert_fp8(
    x_TD: Tensor, weights: Fp8Weights, problem: MoeProblem, settings: CompileSettings
) -> Tensor:
    """Return the shared expert's output, BF16 [T, D]."""
    require_tokens(x_TD, problem)
    contract.require_place((x_TD, *weights), SM90A)
    return fp8_products(x_TD, weights, problem, settings, fp8.KERNEL)


def require_tokens(x_TD: Tensor, problem: MoeProblem) -> None:
    """Raise if FP8 blocks do not divide the extents, or x does not fit the problem."""
    if problem.hidden % BLOCK or problem.width % BLOCK:
        raise ShapeMismatch(
            "hidden and width of an FP8 expert",
            (problem.hidden, problem.width),
            f"multiples of {BLOCK}: w1 and w3 have blocks of their own",
            "Pad with zeros.",
        )
    require_tensor("x", x_TD, torch.bfloat16, (problem.tokens, problem.hidden), 32)


def fp8_products(
    x_TD: Tensor,
    weights: Fp8Weights,
    problem: MoeProblem,
    settings: CompileSettings,
    gemm: Kernel[GemmProblem, GemmForm],
) -> Tensor:
    """Quantise x, multiply, quantise SwiGLU of the result, multiply; `gemm` is the target's."""
    # The weights decide the scale format of activations too: a product takes one for both.
    scales = "ue8m0" if weights.w13_scales.dtype is torch.uint8 else "float32"

    def product(
        values: Tensor, of_values: Fp8Problem, columns: int, b: Tensor, b_scales: Tensor
    ) -> Tensor:
        a = quantise_fp8(values, of_values, settings)
        inner = of_values.columns
        of_product = GemmProblem(values.shape[0], columns, inner, FP8_BLOCK.name, scales)
        return gemm.run_one(
            of_product, settings, a=a.codes, a_scales=a.scales, b=b, b_scales=b_scales
        )

    of_x = Fp8Problem(problem.tokens, problem.hidden, scales, "values", None)
    of_halves = Fp8Problem(problem.tokens, problem.width, scales, "swiglu", problem.limit)
    halves = product(x_TD, of_x, GATE_AND_UP * problem.width, weights.w13, weights.w13_scales)
    return product(halves, of_halves, problem.hidden, weights.w2, weights.w2_scales)
