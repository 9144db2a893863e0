"""Outputs of a run beside those of its twin: which elements are equal."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.localise.tensor_forms import count_equal, equal_elements


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
)
def test_equal_elements_are_counted_by_value(dtype: torch.dtype) -> None:
    """0 equals -0, and a NaN equals a NaN of other bits."""
    values = torch.arange(-40, 40).to(dtype).reshape(8, 10)
    other = values.clone()
    other[3, 4] += 1
    if dtype.is_floating_point:
        values[0, :4] = torch.tensor([0.0, float("nan"), float("inf"), float("nan")])
        other[0, :4] = torch.tensor([-0.0, float("nan"), float("-inf"), 1.0])
        other[0, 1] = -other[0, 1]
    wrong = 3 if dtype.is_floating_point else 1
    for a, b in ((values, other), (values.T, other.T), (values[:, :0], other[:, :0])):
        assert count_equal(a, b) == int(equal_elements(a, b).sum())
    assert count_equal(values, other) == 80 - wrong
