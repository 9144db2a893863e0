"""Sizes and weights of the hyper-connections (mHC), shared by mixing.py and its compiled form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MixingFacts:
    """Streams, Sinkhorn iterations, and the two epsilons."""

    streams: int
    iterations: int
    epsilon: float
    norm_epsilon: float


@dataclass(frozen=True)
class MixingWeights:
    """fn [N, S*D], base [N], scale [3] (head collapse: [S, S*D], [S], [1])."""

    fn: Tensor
    base: Tensor
    scale: Tensor
