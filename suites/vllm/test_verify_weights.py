"""Shards of experts that the loader put elsewhere are named; where they belong, nothing is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from degarble.harness.base.errors import LayoutMismatch
from degarble.harness.vllm.verify_weights import SAMPLES, Readback, sampled

EXPERTS, WIDTH, HIDDEN = 3, 8, 32


def stored() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    shapes = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
    return {
        f"layers.1.ffn.experts.{n}.{part}.{kind}": torch.randint(
            0, 256, shape, generator=made, dtype=torch.uint8
        )
        for n in range(EXPERTS)
        for part, shape in shapes.items()
        for kind in ("weight", "weight_scale")
    }


def loaded(tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> Any:
    """Fused parameters as vLLM's loader leaves them."""

    def of(n: int, part: str, kind: str) -> torch.Tensor:
        whole = tensors[f"layers.1.ffn.experts.{n}.{part}.{kind}"]
        return whole.chunk(ranks, dim=1 if part == "w2" else 0)[rank]

    fused = {}
    for kind in ("weight", "weight_scale"):
        both = [torch.cat((of(n, "w1", kind), of(n, "w3", kind))) for n in range(EXPERTS)]
        fused[f"w13_{kind}"] = torch.nn.Parameter(torch.stack(both), requires_grad=False)
        down = torch.stack([of(n, "w2", kind) for n in range(EXPERTS)])
        fused[f"w2_{kind}"] = torch.nn.Parameter(down, requires_grad=False)
    return SimpleNamespace(**fused)


HELD = [(n, n) for n in range(EXPERTS)]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2)])
def test_what_is_where_it_belongs_passes(rank: int, ranks: int) -> None:
    tensors, readback = stored(), Readback(rank, ranks)
    assert list(readback.watched(tensors.items())) == list(tensors.items())
    assert readback.require(1, loaded(tensors, rank, ranks), HELD) == 18
    assert readback.require(2, loaded(tensors, rank, ranks), HELD) == 0  # nobody handed any


@pytest.mark.parametrize("plant", ["w2 of two experts", "gate and up", "another rank's columns"])
def test_exchanged_shards_are_named(plant: str) -> None:
    tensors, readback = stored(), Readback(0, 2)
    list(readback.watched(tensors.items()))
    experts = loaded(tensors, 0, 2)
    if plant == "w2 of two experts":
        experts.w2_weight.data[[0, 2]] = experts.w2_weight.data[[2, 0]]
        words = r"2 of 18 .*layers\.1\.ffn\.experts\.0\.w2\.weight, .*experts\.2\.w2\.weight"
    elif plant == "gate and up":
        experts.w13_weight_scale.data[1] = experts.w13_weight_scale.data[1].roll(WIDTH // 2, 0)
        words = r"experts\.1\.w1\.weight_scale, .*experts\.1\.w3\.weight_scale"
    else:
        experts = loaded(tensors, 1, 2)
        words = "18 of 18"
    with pytest.raises(LayoutMismatch, match=words):
        readback.require(1, experts, HELD)


def test_samples_reach_the_end_of_a_large_matrix() -> None:
    matrix = torch.zeros(1024, 1024, dtype=torch.uint8)
    changed = matrix.clone()
    changed[-1, -1] = 1
    assert not torch.equal(sampled(matrix), sampled(changed))
    assert SAMPLES // 2 < len(sampled(matrix)) < 2 * SAMPLES
