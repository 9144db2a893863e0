"""Quotients without the GPU's tests of their range, on a CPU."""

from __future__ import annotations

import pytest
import torch

from degarble.kernels.primitives.device_words import quotient_in_range

pytestmark = pytest.mark.needs("cutlass")


@pytest.mark.parametrize(
    "odd", [1, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 9, 11, 13, 15))]
)
def test_a_mean_over_the_columns_of_whole_rows_is_rounded_once(odd: int) -> None:
    """All mantissas; a power of two changes none of it, up to the bounds of normal numbers."""
    columns = odd * 1024
    for first in range(0x3F80_0000, 0x4000_0000, 1 << 20):
        numbers = torch.arange(first, first + (1 << 20)).to(torch.int32).view(torch.float32)
        assert torch.equal(
            quotient_in_range(numbers, columns), numbers / torch.tensor(float(columns))
        )
