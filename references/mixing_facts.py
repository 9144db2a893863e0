"""What mHC is told: its sizes and its weights; its compiled twin needs them as well."""

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
