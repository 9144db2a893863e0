from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.compare.compare import closeness
from degarble.harness.engine.faults.scales import scale_count, scale_direction
from degarble.harness.formats.number_formats import MXFP4, NVFP4, ScaleDirection
from degarble.harness.formats.quantise import dequantise, quantise
from degarble.suites.engine.weights import heavy_tailed


@pytest.mark.parametrize("direction", ScaleDirection)
def test_the_gain_is_that_of_the_family(direction: ScaleDirection, seed: int) -> None:
    """M01 gives s^-2, M02 gives 1/s or s, whichever way the scale is stored."""
    tensor = quantise(heavy_tailed(16, 64, seed), NVFP4).with_direction(direction)
    right = dequantise(tensor, torch.float64)
    s = float(tensor.decode_scale)
    for inject, gain in (
        (scale_direction.inject, s**-2),
        (scale_count.inject_missing, 1 / s),
        (scale_count.inject_applied_twice, s),
    ):
        damaged = inject(tensor)
        assert damaged is not None
        assert damaged.direction is direction
        found = closeness(dequantise(damaged, torch.float64), right)
        assert found.gain == pytest.approx(gain, rel=1e-5)
        assert found.cosine == pytest.approx(1.0)


def test_a_format_without_tensor_scale_cannot_have_it(seed: int) -> None:
    assert scale_direction.inject(quantise(heavy_tailed(4, 32, seed), MXFP4)) is None
