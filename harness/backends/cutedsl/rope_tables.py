"""RoPE tables for the attention kernels: 32 cosines and 32 sines of every position.

Angles are computed in float64 from the model's rope alone: a frequency per pair, blended by YaRN if
the rope names it, times the position; each cosine and sine is rounded once to float32. Nothing is
imported from the references, which have their own formula. Tables grow by doubling and are cached.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.model.types import Rope

_FEWEST = 1024  # positions of a table
_RAMP = 1e-3  # the width of YaRN's ramp where it has none, as the official code has it


class Turns:
    """Tables by rope, grown to the largest requested position."""

    def __init__(self) -> None:
        self._tables: dict[Rope, Tensor] = {}

    def reaching(self, rope: Rope, positions: Tensor) -> Tensor:
        """Return a table [P, 2 * pairs] that covers all of these positions, on their device."""
        last = int(positions.max()) if positions.numel() else 0
        known = self._tables.get(rope)
        if known is None or len(known) <= last or known.device != positions.device:
            count = max(_FEWEST, 1 << last.bit_length())
            known = self._tables[rope] = table_of(rope, count).to(positions.device)
        return known


def table_of(rope: Rope, positions: int) -> Tensor:
    """Return cosines, then sines, of positions from 0 on."""
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies(rope)
    return (torch.cat((angle.cos(), angle.sin()), dim=1) * rope.scale).float()


def frequencies(rope: Rope) -> Tensor:
    """Return the angle of each pair at position 1."""
    pairs = rope.dims // 2
    base = torch.tensor([rope.theta ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    yarn = rope.yarn
    if yarn is None:
        return base
    bounds = [
        pairs * math.log(yarn.original_max_position_embeddings / (2.0 * math.pi * turns))
        / math.log(rope.theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    ]  # fmt: skip
    if yarn.truncate:
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], rope.dims - 1)
    ramp = (torch.arange(pairs, dtype=torch.float64) - low) / (high - low or _RAMP)
    slowed = ramp.clamp(0.0, 1.0)
    return base * (1.0 - slowed + slowed / yarn.factor)
