"""Row orders: permutations with their inverses, equal to reshape and to the published tables."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats.layouts import (
    AS_STORED,
    INTERLEAVE_1,
    INTERLEAVE_8,
    INTERLEAVE_64,
    ROW_ORDERS,
    SHUFFLE_16,
    SHUFFLE_32,
    SWAP_HALVES,
    TRANSPOSE_4X32,
    TRTLLM_GATED,
    RowOrder,
    chain,
    gather_index,
    reorder_rows,
    restore_rows,
    row_order,
)

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = list(ROW_ORDERS.values())
by_order = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)

# Where row j of a block goes, as FlashInfer tabulates it (utils.py, source to destination).
SHUFFLE_32_TABLE = [
    *(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27),
    *(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31),
]
SHUFFLE_16_TABLE = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


def permutation_errors(order: RowOrder, rows: int) -> int:
    """Count rows that are taken twice or that the inverse does not bring back."""
    new = torch.arange(rows)
    source: Tensor = order.source(new, rows)
    twice = rows - len(set(source.tolist()))
    lost: Tensor = (order.destination(source, rows) != new) | (source < 0) | (source >= rows)
    return twice + int(lost.sum())


@by_order
@settings(max_examples=25)
@given(multiples=st.integers(1, 9))
def test_an_order_is_a_permutation_with_its_inverse(order: RowOrder, multiples: int) -> None:
    rows = order.multiple * multiples
    assert permutation_errors(order, rows) == 0
    assert [order.source(row, rows) for row in range(rows)] == gather_index(order, rows).tolist()


def by_reshaping(x_MK: Tensor, order: RowOrder) -> Tensor:
    """The same order, spelled as reshape, transpose and concatenation."""
    rows, columns = x_MK.shape
    half = rows // 2
    if order in (INTERLEAVE_1, INTERLEAVE_8, INTERLEAVE_64):
        group = order.multiple // 2
        halves = x_MK.reshape(2, half // group, group, columns)
        return halves.transpose(0, 1).reshape(rows, columns)
    if order in (SHUFFLE_32, SHUFFLE_16, TRANSPOSE_4X32):
        stacks = {SHUFFLE_32.name: 4, SHUFFLE_16.name: 2, TRANSPOSE_4X32.name: 32}[order.name]
        block = x_MK.reshape(-1, order.multiple // stacks, stacks, columns)
        return block.transpose(1, 2).reshape(rows, columns)
    if order is SWAP_HALVES:
        return torch.cat([x_MK[half:], x_MK[:half]])
    if order is TRTLLM_GATED:
        for step in (SWAP_HALVES, INTERLEAVE_1, SHUFFLE_32):
            x_MK = by_reshaping(x_MK, step)
    return x_MK


@by_order
@pytest.mark.parametrize("multiples", [1, 2, 5])
def test_reordering_equals_the_reshaped_spelling(order: RowOrder, multiples: int) -> None:
    rows = order.multiple * multiples
    x_MK = torch.arange(rows * 3).reshape(rows, 3)
    assert torch.equal(reorder_rows(x_MK, order), by_reshaping(x_MK, order))
    assert torch.equal(restore_rows(reorder_rows(x_MK, order), order), x_MK)


def test_the_shuffles_equal_the_published_tables() -> None:
    assert [SHUFFLE_32.destination(row, 64) for row in range(32)] == SHUFFLE_32_TABLE
    assert [SHUFFLE_32.destination(32 + row, 64) for row in range(32)] == [
        32 + row for row in SHUFFLE_32_TABLE
    ]
    assert [SHUFFLE_16.destination(row, 16) for row in range(16)] == SHUFFLE_16_TABLE


def test_interleaving_alternates_gate_and_up() -> None:
    assert gather_index(INTERLEAVE_1, 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    rows = gather_index(INTERLEAVE_8, 32)
    assert rows.tolist() == [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]


def test_the_combined_gather_indexes_the_interleave_by_the_shuffle() -> None:
    rows = 64
    both = chain("both", INTERLEAVE_1, SHUFFLE_32)
    interleave, shuffle = gather_index(INTERLEAVE_1, rows), gather_index(SHUFFLE_32, rows)
    assert torch.equal(gather_index(both, rows), interleave[shuffle])
    swap = gather_index(SWAP_HALVES, rows)
    assert torch.equal(gather_index(TRTLLM_GATED, rows), swap[interleave[shuffle]])


def test_a_chain_needs_what_all_its_orders_need() -> None:
    assert TRTLLM_GATED.multiple == 32
    assert chain("both", INTERLEAVE_64, SHUFFLE_32).multiple == 128


def test_experts_keep_their_places() -> None:
    x_EMK = torch.arange(2 * 32 * 2).reshape(2, 32, 2)
    moved = reorder_rows(x_EMK, SHUFFLE_32)
    assert torch.equal(moved[1], reorder_rows(x_EMK[1], SHUFFLE_32))


@pytest.mark.parametrize(
    "order", [o for o in ORDERS if o not in (AS_STORED, SWAP_HALVES)], ids=lambda o: o.name
)
def test_the_inverse_planted_for_the_order_is_detected(order: RowOrder) -> None:
    planted = replace(order, source=order.destination)
    rows = 4 * order.multiple
    x_MK = torch.arange(rows)[:, None]
    assert permutation_errors(planted, rows) > 0
    assert not torch.equal(reorder_rows(x_MK, planted), by_reshaping(x_MK, order))


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match=r"shuffle_32 = 48.*a multiple of 32"):
        reorder_rows(torch.zeros(48, 4), SHUFFLE_32)
    with pytest.raises(ShapeMismatch, match="at least two dimensions"):
        reorder_rows(torch.zeros(32), SHUFFLE_32)
    with pytest.raises(UnknownName, match="Did you mean"):
        row_order("shuffle_64")
    assert row_order("interleave_64") is INTERLEAVE_64
