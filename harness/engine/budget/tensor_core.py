"""The error that Hopper's tensor core adds to FP8 products (truncated accumulation), as slack.

A step of `wgmma` takes 32 products of 8-bit codes and the accumulator C. All 33 terms are aligned
to the largest nominal exponent among them and cut 2^-13 below it (MMA-Sim 2.1.1, package mmasim),
so each term loses less than 2^-13 of the largest. Kernels add such sums to float32 after every 128
of K, and a stage begins again from zero. The largest terms are read off the data: products by the
extremes of a step's rows, C by the partial sum of its stage. Scales are constant within a stage and
do not matter.

The bound applies only to components whose candidate declares it (`fraction_bits` of a manifest);
all others are judged as float32.

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
STEP = 32  # of K per instruction for 8-bit operands; PTX ISA 9.1, wgmma
PROMOTED = 128  # of K after which a sum is added to float32: the extent of a scale


def cut_in_steps(made: Budget, x_MK: Tensor, w_NK: Tensor, bits: int) -> Budget:
    """Add the loss of steps with so many fraction bits to a budget."""
    slack = made.slack + lost_in_steps(x_MK, w_NK, bits).reshape(made.slack.shape)
    words = f"FP8 products in steps of {STEP}, each term cut 2^-{bits} below the largest of a step"
    return replace(made, slack=slack, derivation=(*made.derivation, words))


def lost_in_steps(x_MK: Tensor, w_NK: Tensor, bits: int) -> Tensor:
    """Return the bound of the loss [M, N]."""
    lost = x_MK.new_zeros(x_MK.shape[0], w_NK.shape[0])
    for stage in range(0, x_MK.shape[1], PROMOTED):
        # The accumulator starts again from zero in every stage.
        partial = torch.zeros_like(lost)
        for begin in range(stage, min(stage + PROMOTED, x_MK.shape[1]), STEP):
            x, w = x_MK[:, begin : begin + STEP], w_NK[:, begin : begin + STEP]
            largest = x.abs().amax(1)[:, None] * w.abs().amax(1)[None]
            # STEP products and the accumulator, each cut below the largest of them.
            lost += (STEP + 1) * 2.0**-bits * torch.maximum(largest, partial.abs())
            partial += x @ w.T
    return lost
