"""What Hopper's tensor core leaves of FP8 products: a slack beside that of float32 sums.

Owns the bound of a step. A step of `wgmma` takes 32 products of 8-bit codes and C; all are aligned
to the largest nominal exponent among them and cut 2^-13 below it (MMA-Sim 2.1.1, package mmasim),
so that each of the 33 terms loses less than 2^-13 of the largest. Kernels add such sums to float32
behind every 128 of K, where a stage begins anew from zero. Largest terms are read off the data:
products by the extremes of a step's rows, C by the partial sum of its stage. Scales are constant
within a stage and change nothing.

It holds for a candidate that says so, component by component (`fraction_bits` of a manifest); one
that does not is held to float32. Refuses nothing: fewer bits than the chip keeps are not believed.
Kept honest by suites/engine/budget/test_tensor_core.py, against the steps in integers.
Shape letters: M rows, N outputs, K summed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.engine.budget.budget import Budget

HOPPER_FP8_BITS = 13
FP8_ACTIVATIONS = ("FP8_1X128_UE8M0", "FP8_1X128_F32")
STEP = 32  # of K that one instruction takes of 8-bit operands; PTX ISA 9.1, wgmma
PROMOTED = 128  # of K behind which a sum goes to float32: the extent of a scale


def cut_in_steps(made: Budget, x_MK: Tensor, w_NK: Tensor, bits: int) -> Budget:
    """Add what steps of so many fraction bits may lose."""
    slack = made.slack + lost_in_steps(x_MK, w_NK, bits).reshape(made.slack.shape)
    words = f"FP8 products in steps of {STEP}, each term cut 2^-{bits} below the largest of a step"
    return replace(made, slack=slack, derivation=(*made.derivation, words))


def lost_in_steps(x_MK: Tensor, w_NK: Tensor, bits: int) -> Tensor:
    """The bound [M, N]."""
    lost = x_MK.new_zeros(x_MK.shape[0], w_NK.shape[0])
    for stage in range(0, x_MK.shape[1], PROMOTED):
        partial = torch.zeros_like(lost)
        for begin in range(stage, min(stage + PROMOTED, x_MK.shape[1]), STEP):
            x, w = x_MK[:, begin : begin + STEP], w_NK[:, begin : begin + STEP]
            largest = x.abs().amax(1)[:, None] * w.abs().amax(1)[None]
            lost += (STEP + 1) * 2.0**-bits * torch.maximum(largest, partial.abs())
            partial += x @ w.T
    return lost
