"""Two codes to a byte: every byte, both orders, and every way to hold it wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.harness.formats.codec import (
    high_nibble,
    low_nibble,
    pack_nibbles,
    pack_pair,
    unpack_nibbles,
)
from degarble.harness.formats.number_formats import NibbleOrder

orders = pytest.mark.parametrize("order", list(NibbleOrder), ids=str)
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)


@orders
def test_every_pair_of_bytes_survives_both_ways(order: NibbleOrder) -> None:
    low, high = torch.meshgrid(EVERY_BYTE, EVERY_BYTE, indexing="ij")
    packed = torch.stack([low, high], dim=-1)  # all 65,536 pairs
    codes = unpack_nibbles(packed, order)
    assert codes.shape == (256, 256, 4)
    assert int(codes.max()) == 15
    assert torch.equal(pack_nibbles(codes, order), packed)


def test_the_even_index_is_the_low_half_unless_named_otherwise() -> None:
    codes = torch.tensor([0x1, 0x2, 0xA, 0xF], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [0x21, 0xFA]
    assert pack_nibbles(codes, NibbleOrder.HIGH_EVEN).tolist() == [0x12, 0xAF]


def test_the_wrong_order_swaps_neighbours_and_nothing_else() -> None:
    codes = unpack_nibbles(EVERY_BYTE)
    swapped = unpack_nibbles(EVERY_BYTE, NibbleOrder.HIGH_EVEN)
    assert not torch.equal(codes, swapped)
    assert torch.equal(codes.view(-1, 2).flip(-1).flatten(), swapped)


@pytest.mark.parametrize("byte", range(256))
def test_the_scalar_pair_is_what_the_tensor_packs(byte: int) -> None:
    low, high = low_nibble(byte), high_nibble(byte)
    assert pack_pair(low, high) == byte
    assert unpack_nibbles(torch.tensor([byte], dtype=torch.uint8)).tolist() == [low, high]


@orders
@given(shape=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)))
def test_any_shape_keeps_its_leading_extents(
    order: NibbleOrder, shape: tuple[int, int, int]
) -> None:
    experts, rows, columns = shape
    count = experts * rows * 2 * columns
    codes = (torch.arange(count) * 7 % 16).to(torch.uint8).reshape(experts, rows, 2 * columns)
    packed = pack_nibbles(codes, order)
    assert packed.shape == shape
    assert torch.equal(unpack_nibbles(packed, order), codes)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="even number of codes"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ShapeMismatch, match="even number of codes"):
        pack_nibbles(torch.tensor(1, dtype=torch.uint8))
    with pytest.raises(InvalidArgument, match="not bytes that are packed already"):
        pack_nibbles(torch.tensor([1, 16], dtype=torch.uint8))
    with pytest.raises(DtypeMismatch, match="never cast"):
        pack_nibbles(torch.zeros(2))
    with pytest.raises(DtypeMismatch, match="never cast"):
        unpack_nibbles(torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ShapeMismatch, match="at least one dimension"):
        unpack_nibbles(torch.tensor(1, dtype=torch.uint8))
