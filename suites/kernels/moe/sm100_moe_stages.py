"""Compute what stages of FC1 have to hold on sm_100a, byte by byte from the operands' definitions.

The image of the first tile has rows of codes as TMA swizzles them, gate above up, then scales in
words of four by 128 rows. It uses none of the kernels' own addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from degarble.harness.formats.layouts import SWIZZLE_128X4, ceil_div, from_layout
from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.moe import problem as moe

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.suites.kernels.moe.moe_checks import Case

ROW_BYTES = 128  # of codes in a stage, and of the swizzle


def image_of(case: Case, given: Any, workspace: Any) -> Tensor:
    """Return FC1's stages of the first tile by the definition of each byte."""
    p, form = case.problem, moe.forms_of(case.problem, case.target)[0].gemm
    expert, w13 = int(workspace.plan.experts[0]), given.weights.w13
    rows, lanes = len(workspace.x.codes), tensor_memory.LANES
    of_a = from_layout(workspace.x.scales, SWIZZLE_128X4, rows, p.hidden // 16)[:lanes]
    of_b = [
        from_layout(each, SWIZZLE_128X4, p.width, p.hidden // 16) for each in w13.scales[expert]
    ]
    steps = ceil_div(p.hidden, form.tactic.inner)
    made = np.zeros((steps, facts.transaction_bytes(form)), np.uint8)
    sides = (
        (workspace.x.codes[:lanes], of_a),
        (w13.codes[expert].flatten(0, 1), torch.cat(of_b)),
    )
    for step in range(steps):
        at = 0
        for codes, _ in sides:
            part = swizzled(codes[:, step * ROW_BYTES : (step + 1) * ROW_BYTES])
            made[step, at : at + len(part)] = part
            at += len(part)
        for _, scales in sides:
            part = tiled(scales[:, step * 16 : (step + 1) * 16])
            made[step, at : at + len(part)] = part
            at += len(part)
    return torch.from_numpy(made)


def swizzled(codes: Tensor) -> Any:
    """Return rows of a stage as TMA leaves them, zeros where K is over; PTX ISA 9.1, 5.5.6."""
    rows, width = codes.shape
    held = np.zeros((rows, ROW_BYTES), np.uint8)
    held[:, :width] = codes.numpy()
    at = np.arange(rows)[:, None] * ROW_BYTES + np.arange(ROW_BYTES)
    made = np.empty(rows * ROW_BYTES, np.uint8)
    made[at ^ at >> 3 & 0x70] = held  # 16 bytes each, exchanged by the row modulo 8
    return made


def tiled(scales: Tensor) -> Any:
    """Return scales of a stage: by 128 rows, then words of K; 16 bytes a lane."""
    rows, blocks = scales.shape
    made = np.zeros((rows // 128, 4, 32, 4, 4), np.uint8)
    for row in range(rows):
        line = np.zeros(16, np.uint8)
        line[:blocks] = scales[row].numpy()
        made[row // 128, :, row % 32, row % 128 // 32] = line.reshape(4, 4)
    return made.reshape(-1)
