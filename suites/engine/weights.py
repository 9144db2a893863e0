"""Weights for the suites of the engine: heavy tails, rows and columns of unlike size."""

from __future__ import annotations

import torch
from torch import Tensor


def heavy_tailed(rows: int, columns: int, seed: int, *leading: int) -> Tensor:
    """Draw a BF16 weight [..., rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*leading, rows, columns)
    values = torch.randn(shape, generator=generator) ** 3
    values *= torch.randn((*leading, rows, 1), generator=generator).exp()
    values *= torch.randn((*leading, 1, columns), generator=generator).mul(0.5).exp()
    return (values * 0.02).to(torch.bfloat16)
