from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.faults.family import Case
from degarble.harness.engine.faults.gain import gain_match, same_scales
from degarble.harness.formats.number_formats import MXFP4, NVFP4
from degarble.harness.formats.quantise import quantise
from degarble.suites.engine.weights import heavy_tailed

if TYPE_CHECKING:
    from degarble.harness.formats.quantise import QuantisedTensor


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (1.0, 1.0 + 2 * 2.0**-23, True),
        (1.0, 1.0 + 3 * 2.0**-23, False),
        (1.0, 1.0 - 2.0**-24, True),
        (0.0, 0.0, True),
        (1.0, -1.0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
        (float("inf"), float("inf"), True),
    ],
)
def test_scales_are_the_same_within_two_roundings(left: float, right: float, same: bool) -> None:
    assert bool(same_scales(torch.tensor(left), torch.tensor(right))) is same


def _experts(seed: int) -> QuantisedTensor:
    weight = heavy_tailed(4, 32, seed, 3)
    return quantise(weight, NVFP4, amax=weight.float().abs().amax((1, 2)))


def test_one_expert_of_three(seed: int) -> None:
    twin = _experts(seed)
    assert twin.tensor_scale is not None
    doubled = replace(twin, tensor_scale=twin.tensor_scale * 2)
    scales = twin.tensor_scale.clone()
    scales[1] *= 2
    suspect = replace(twin, tensor_scale=scales)
    match = gain_match(Case(twin, suspect, torch.ones(12, dtype=torch.bool)), doubled, "2 * s")
    assert match is not None
    assert match.reproduced == 1.0
    assert match.evidence.endswith("values become 2.000 times as large.")


def test_several_experts_are_counted(seed: int) -> None:
    twin = _experts(seed)
    assert twin.tensor_scale is not None
    doubled = replace(twin, tensor_scale=twin.tensor_scale * 2)
    scales = twin.tensor_scale * torch.tensor([2.0, 2.0, 3.0])
    suspect = replace(twin, tensor_scale=scales)
    match = gain_match(Case(twin, suspect, torch.ones(12, dtype=torch.bool)), doubled, "2 * s")
    assert match is not None
    assert match.reproduced == pytest.approx(2 / 3)
    assert "in 66.7 % of 3 scales" in match.evidence


def test_a_format_without_tensor_scale_has_no_such_fault(seed: int) -> None:
    tensor = quantise(heavy_tailed(4, 32, seed), MXFP4)
    case = Case(tensor, tensor, torch.ones(4, dtype=torch.bool))
    assert gain_match(case, None, "1 / s") is None
