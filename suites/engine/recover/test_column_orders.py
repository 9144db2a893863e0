"""Describe columns of a product's input in another order from few rows."""

from __future__ import annotations

import pytest
import torch

from degarble.harness.engine.recover.changes import Equations
from degarble.harness.engine.recover.column_orders import ColumnOrder, orders_of, reordered
from degarble.harness.engine.recover.operands import plain

ORDERS = (
    ColumnOrder("reversed", 8, 16), ColumnOrder("pairs", 3, 4), ColumnOrder("first", 2, 6, 8),
    ColumnOrder("rotated", 0, 48, 1, 7), ColumnOrder("rotated", 1, 12, 4, 3),
    ColumnOrder("reversed", 0, 48),
)  # fmt: skip


def equations(order: ColumnOrder | None) -> Equations:
    drawn = torch.Generator().manual_seed(11)
    x, other = (torch.randn(n, 48, generator=drawn).double() for n in (6, 20))
    used = x if order is None else reordered(order, x)
    right = x @ other.T
    return Equations(
        plain(x), torch.arange(6), other, used @ other.T, right, torch.full_like(right, 1e-6)
    )


@pytest.mark.parametrize("order", ORDERS, ids=lambda each: each.words)
def test_an_order_of_columns_is_found(order: ColumnOrder) -> None:
    found = [rule.words for rule in orders_of(equations(order))]
    assert order.words in found
    made = plain(torch.arange(96.0).reshape(2, 48)).numbers
    rule = next(iter(orders_of(equations(order))))
    assert torch.equal(rule.apply(made), reordered(order, made))


def test_no_order_is_found_in_healthy_outputs_or_noise() -> None:
    assert not list(orders_of(equations(None)))
    own = equations(None)
    noise = torch.randn(own.seen.shape, generator=torch.Generator().manual_seed(1))
    own.seen.add_(noise)
    assert not list(orders_of(own))


def test_narrower_rows_stay_as_they_are() -> None:
    narrow = torch.ones(2, 8)
    assert torch.equal(reordered(ColumnOrder("reversed", 8, 16), narrow), narrow)
