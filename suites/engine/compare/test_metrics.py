from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.base.errors import ShapeMismatch
from degarble.harness.engine.compare.compare import closeness


@pytest.mark.parametrize("factor", [1.0, -1.0, 0.5, 1e-20, 3e20])
def test_a_factor_is_a_gain_and_leaves_the_cosine(factor: float) -> None:
    reference = torch.tensor([3.0, -4.0])
    found = closeness(reference * factor, reference)
    assert found.gain == pytest.approx(factor, rel=1e-6)
    assert found.cosine == pytest.approx(math.copysign(1.0, factor))
    assert found.relative_l2 == pytest.approx(abs(factor - 1), rel=1e-6, abs=1e-6)


def test_what_stands_at_a_right_angle() -> None:
    found = closeness(torch.tensor([0.0, 5.0]), torch.tensor([5.0, 0.0]))
    assert (found.cosine, found.gain) == (0.0, 0.0)
    assert found.relative_l2 == pytest.approx(math.sqrt(2))


def test_a_zero_reference_has_no_closeness() -> None:
    found = closeness(torch.ones(2), torch.zeros(2))
    assert all(math.isnan(v) for v in (found.cosine, found.relative_l2, found.gain))


def test_small_differences_of_large_tensors_are_not_lost() -> None:
    """In float32 the sum of a million squares would round this away."""
    reference = torch.ones(1_000_000)
    candidate = reference.clone()
    candidate[0] += 1e-3
    assert closeness(candidate, reference).relative_l2 == pytest.approx(1e-6, rel=1e-3)


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeMismatch, match="candidate"):
        closeness(torch.ones(2), torch.ones(1, 2))
