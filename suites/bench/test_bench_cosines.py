"""The cosines' bench: what it captures and draws, what counts as missed, its refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import EXIT_REFUSED
from degarble.suites.bench import bench_cosines as bench
from degarble.suites.bench.cosine_stacks import Layer, Twin, calibrated, decode_scale

if TYPE_CHECKING:
    from torch import Tensor


class Noisy(Twin):
    """The twin with an output that is a twentieth off."""

    def through(self, layer: Layer) -> Tensor:
        out = super().through(layer)
        return out + 0.05 * out.std() * torch.randn(out.shape, generator=torch.Generator())


def test_the_small_model_and_a_part_of_v4_pro_reach_their_ceilings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = bench.captured(24, "cpu")
    assert [layer.kind for layer in small] == [*["linear"] * 4, "shared expert", "experts"]
    assert not bench.table(small, Twin())
    large = list(bench.drawn_layers(8, "cpu", scale=32))
    assert len(bench.table(large, Noisy())) == len(large)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| tiny wq_a | linear | 0.97")
    assert lines[-1].endswith("| 0.988 |")


def test_outliers_and_scales_are_what_they_say() -> None:
    generator = torch.Generator().manual_seed(1)
    x = bench.activations(64, 2048, generator).float()
    size = x.square().mean(0).sqrt()
    assert 8 < float(size.max() / size.median()) < 64
    assert 0.003 < float((size > 7 * size.median()).float().mean()) < 0.03
    layer = next(each for each in bench.drawn_layers(8, "cpu", scale=32) if each.experts)
    first, second = calibrated(layer, 0)
    assert first == decode_scale(layer.x)
    assert second > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and this shows its absence")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == EXIT_REFUSED
    assert "CUDA device" in capsys.readouterr().err
