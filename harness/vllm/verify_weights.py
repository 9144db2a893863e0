"""Verify that each routed expert holds, after loading, the bytes of its tensors in the file.

A capture shows all experts of a layer as one block, and the loader proof predicts what the loader
should do. If shards of two experts are exchanged, neither blames an expert. So samples of every
matrix are taken as it is handed to the loader, and compared with their place in memory afterwards.
Needs no vLLM.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import LayoutMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

SAMPLES = 4096  # bytes of a matrix, evenly spread: exchanged shards differ in most of them
_FEW = 3
# Matrices that a rank cuts along rows, and along columns.
_NAME = re.compile(
    r"^layers\.(?P<layer>\d+)\.ffn\.experts\.(?P<expert>\d+)\.(?P<part>w[123])\.(?P<kind>weight|weight_scale)$"
)
_HALF = {"w1": 0, "w3": 1}


class Readback:
    """Samples of the experts' matrices by layer, expert, part and kind."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self._samples: dict[tuple[int, int, str, str], Tensor] = {}

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand weights on, and keep samples of the routed experts'."""
        for name, tensor in weights:
            found = _NAME.match(name)
            if found is not None:
                key = (int(found["layer"]), int(found["expert"]), found["part"], found["kind"])
                self._samples[key] = sampled(self._share(tensor, found["part"]))
            yield name, tensor

    def _share(self, tensor: Tensor, part: str) -> Tensor:
        return tensor.chunk(self._ranks, dim=0 if part in _HALF else 1)[self._rank]

    def require(self, layer: int, experts: Any, held: Iterable[tuple[int, int]]) -> int:
        """Compare a layer's parameters; `held` pairs an expert's number with its place here."""
        compared, wrong = 0, []
        for expert, place in held:
            for part, kind in ((p, k) for p in ("w1", "w2", "w3") for k in _KINDS):
                wanted = self._samples.get((layer, expert, part, kind))
                if wanted is None:
                    continue
                compared += 1
                if not torch.equal(
                    sampled(matrix_of(experts, place, part, kind)).cpu(), wanted.cpu()
                ):
                    wrong.append(f"layers.{layer}.ffn.experts.{expert}.{part}.{kind}")
        if wrong:
            raise LayoutMismatch(
                "experts after loading", f"{len(wrong)} of {compared} matrices hold other bytes,"
                f" as {', '.join(wrong[:_FEW])}",
                "each the bytes of its own tensor",
                "vLLM's loader put shards of experts elsewhere: look at its expert mapping.",
            )  # fmt: skip
        return compared


_KINDS = ("weight", "weight_scale")


def matrix_of(experts: Any, place: int, part: str, kind: str) -> Tensor:
    """Return the matrix of an expert in vLLM's fused parameters."""
    fused: Tensor = getattr(experts, f"{'w13' if part in _HALF else 'w2'}_{kind}").data[place]
    return fused.chunk(2, dim=0)[_HALF[part]] if part in _HALF else fused


def sampled(tensor: Tensor) -> Tensor:
    """Return bytes evenly spread over a matrix, and its last one."""
    flat = tensor.contiguous().view(torch.uint8).reshape(-1)
    step = max(1, flat.numel() // SAMPLES) | 1  # odd: no column is met again and again
    return torch.cat((flat[::step], flat[-1:]))
