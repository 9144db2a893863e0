"""Square parts of a weight that were read with rows and columns exchanged are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.engine.recover.products import ProductView
from degarble.harness.engine.recover.transposed import Square, squares_of, turned_square
from degarble.harness.formats.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor


def view(square: Square | None = None, noise: float = 0.0) -> ProductView:
    drawn = torch.Generator().manual_seed(7)
    x, numbers = (torch.randn(n, 32, generator=drawn).double() for n in (9, 24))
    used = numbers if square is None else turned_square(square, numbers)
    seen = x @ used.T + noise * torch.randn(9, 24, generator=drawn).double()
    allowed = torch.full((9, 24), 1e-6).double()
    weight = Weight(value=numbers)
    return ProductView("w", weight, x, numbers, seen, x @ numbers.T, allowed, torch.arange(9))


@pytest.mark.parametrize(
    "square", [Square(0, 0, 24), Square(8, 5, 8), Square(1, 3, 4, 2, 4), Square(20, 30, 2)]
)
def test_a_transposed_part_is_found(square: Square) -> None:
    assert list(squares_of(view(square))) == [("numbers", square)]


def test_no_part_is_found_where_none_is_transposed() -> None:
    assert not list(squares_of(view()))
    assert not list(squares_of(view(noise=0.1)))


def test_a_smaller_matrix_has_no_such_part() -> None:
    small: Tensor = torch.ones(3, 3)
    assert torch.equal(turned_square(Square(2, 2, 4), small), small)
