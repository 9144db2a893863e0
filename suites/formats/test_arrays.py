"""Bytes looked up in a table, beside the arithmetic that other integer dtypes take: every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument
from degarble.harness.formats import codec
from degarble.harness.formats.codec import decode_array, decode_pairs, unpack_nibbles
from degarble.harness.formats.number_formats import E2M1, ELEMENT_FORMATS, NibbleOrder
from degarble.suites.formats.bits import differences

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import ElementFormat

SMALL = [each for each in ELEMENT_FORMATS.values() if each.bits <= 8]
by_format = pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)


@by_format
@pytest.mark.parametrize("mode", [False, True], ids=["plain", "inference"])
def test_every_byte_is_what_arithmetic_makes_of_it(fmt: ElementFormat, mode: bool) -> None:
    codec._table.cache_clear()
    codes = torch.arange(fmt.code_count).repeat(3)
    with torch.inference_mode(mode):
        found = decode_array(codes.to(torch.uint8), fmt)
    assert differences(found.clone(), decode_array(codes, fmt)) == ""


@by_format
def test_pieces_join(fmt: ElementFormat) -> None:
    codes = torch.arange(2 * (1 << 17) + 5).remainder(fmt.code_count).reshape(1, -1)
    assert differences(decode_array(codes.to(torch.uint8), fmt), decode_array(codes, fmt)) == ""


def test_bytes_beyond_four_bits_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="from 0 to 15"):
        decode_array(torch.tensor([3, 16], dtype=torch.uint8), E2M1)


@pytest.mark.parametrize("order", list(NibbleOrder), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(256,), (2, 128), (4, 8, 8), (0, 8)], ids=str)
def test_pairs_are_the_nibbles_one_by_one(
    order: NibbleOrder, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    packed = torch.arange(256)[: torch.Size(shape).numel()].to(torch.uint8).reshape(shape)
    expected = decode_array(unpack_nibbles(packed, order).long(), E2M1).to(dtype)
    found = decode_pairs(packed, E2M1, order, dtype)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit())


def test_pairs_of_many_and_of_strided_bytes() -> None:
    packed = (torch.arange(1 << 18) * 7).to(torch.uint8).reshape(512, 512)[:, 3:500:2]
    expected = decode_array(unpack_nibbles(packed).long(), E2M1)
    assert torch.equal(decode_pairs(packed, E2M1, NibbleOrder.LOW_EVEN, torch.float32), expected)
