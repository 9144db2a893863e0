from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.faults.family import Case
from degarble.harness.engine.faults.registry import MODEL_FAULTS
from degarble.harness.engine.faults.scales import scale_count as m02
from degarble.harness.formats.number_formats import MXFP4, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.diagnosing import double
from degarble.suites.engine.weights import heavy_tailed

PAIRS = [
    (m02.inject_missing, m02.signature_missing),
    (m02.inject_applied_twice, m02.signature_applied_twice),
]


@pytest.mark.parametrize("index", [0, 1])
def test_each_variant_knows_itself_and_not_the_other(index: int, seed: int) -> None:
    twin = quantise(heavy_tailed(16, 64, seed), NVFP4)
    damaged = PAIRS[index][0](twin)
    assert damaged is not None
    case = Case(twin, damaged, torch.ones(16, dtype=torch.bool))
    own, other = PAIRS[index][1](case), PAIRS[1 - index][1](case)
    assert own is not None
    assert other is not None
    assert (own.reproduced, other.reproduced) == (1.0, 0.0)


def test_a_format_without_tensor_scale_cannot_have_it(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), MXFP4)
    assert [inject(tensor) for inject, _ in PAIRS] == [None, None]


def test_another_scale_is_read_from_as_many_blocks_as_quantiles_are_taken_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch refuses more than 2^24, which 16,000 tokens of eight experts have."""
    most, asked_of, true = 512, [], torch.Tensor.quantile

    def quantile(self: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        asked_of.append(len(self))
        return true(self, q)

    monkeypatch.setattr(m02, "_MOST", most)
    monkeypatch.setattr(torch.Tensor, "quantile", quantile)
    model, place = double("v4", "nvfp4-full"), "layers.1.attn.wo_b.act_quant"
    fault = MODEL_FAULTS["M02.another"]
    way = next(iter(fault.ways(model.planting(place))))
    (sight,) = model.sights(place, way, calls=1)
    found = list(fault.signature(model.naming(place), sight))
    assert found[0].where["scale"] == way.where["scale"]
    assert sight.outputs["block_scale"].numel() > most
    assert [each <= most for each in asked_of] == [True]
