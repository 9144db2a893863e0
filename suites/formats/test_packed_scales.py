"""DeepGEMM's packed UE8M0 words: built with shifts, strides checked, inexact scales refused."""

from __future__ import annotations

import math

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.harness.formats.layouts import (
    PACKED_MN,
    exact_ue8m0,
    offset_packed_mn,
    pack_scales,
    to_layout,
    unpack_scales,
)

SIZES = [(1, 1), (4, 4), (5, 7), (7, 8), (130, 9)]
by_size = pytest.mark.parametrize(("rows", "columns"), SIZES)


def codes_of(rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns) % 255).to(torch.uint8).reshape(rows, columns)


@by_size
def test_words_hold_four_columns_little_endian(rows: int, columns: int) -> None:
    codes = codes_of(rows, columns)
    packed = pack_scales(codes)
    assert packed.dtype is torch.int32
    assert packed.shape == (rows, math.ceil(columns / 4))
    for row in range(min(rows, 5)):
        for word in range(packed.shape[1]):
            expected = 0
            for place, code in enumerate(codes[row, 4 * word : 4 * word + 4].tolist()):
                expected |= code << (8 * place)
            assert int(packed[row, word]) & 0xFFFFFFFF == expected


@by_size
def test_words_are_mn_major_with_a_padded_stride(rows: int, columns: int) -> None:
    packed = pack_scales(torch.stack([codes_of(rows, columns)] * 2))
    stride = -(-rows // 4) * 4
    assert packed.stride() == (math.ceil(columns / 4) * stride, 1, stride)
    storage = to_layout(codes_of(rows, columns), PACKED_MN)
    assert storage[offset_packed_mn(rows - 1, columns - 1, rows)] == codes_of(rows, columns)[-1, -1]


@by_size
def test_unpacking_returns_the_codes(rows: int, columns: int) -> None:
    codes = torch.stack([codes_of(rows, columns), codes_of(rows, columns).flip(0)])
    assert torch.equal(unpack_scales(pack_scales(codes), columns), codes)
    assert torch.equal(unpack_scales(pack_scales(codes).contiguous(), columns), codes)


def test_powers_of_two_pack_as_their_exponents() -> None:
    scales = torch.tensor([[2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]])
    assert exact_ue8m0(scales).tolist() == [[0, 1, 126, 127, 128, 254]]
    assert torch.equal(pack_scales(scales), pack_scales(exact_ue8m0(scales)))


def test_a_row_of_scales_serves_its_whole_block() -> None:
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    codes = unpack_scales(pack_scales(scales, rows_per_scale=128, rows=200), 2)
    assert codes.shape == (200, 2)
    assert codes[127].tolist() == [127, 128]
    assert codes[128].tolist() == [129, 130]


@pytest.mark.parametrize(
    "planted",
    [
        math.nextafter(1.0, 2.0) + 1e-7,
        3.0,
        0.0,
        -1.0,
        math.inf,
        math.nan,
        2.0**-128,
        2.0**-127 * 1.5,
    ],
)
def test_a_planted_scale_that_is_no_power_of_two_is_refused(planted: float) -> None:
    scales = torch.ones(3, 4)
    scales[1, 2] = planted
    with pytest.raises(InvalidArgument, match=r"scales, 1 of 12.*exact powers of two"):
        pack_scales(scales)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match=r"torch\.float32"):
        pack_scales(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(ShapeMismatch, match="rows and scale columns"):
        pack_scales(torch.ones(2))
    with pytest.raises(ShapeMismatch, match="2 scale rows of 128 cover"):
        pack_scales(torch.ones(2, 2), rows_per_scale=128, rows=300)
    with pytest.raises(DtypeMismatch, match=r"torch\.int32"):
        unpack_scales(torch.ones(2, 2), 8)
    with pytest.raises(LayoutMismatch, match="a last extent of 3 words"):
        unpack_scales(pack_scales(torch.ones(2, 8)), 9)


def test_an_expert_without_rows_packs_to_nothing() -> None:
    packed = pack_scales(torch.ones(3, 0, 9))
    assert packed.shape == (3, 0, 3)
    assert unpack_scales(packed, 9).shape == (3, 0, 9)


def test_scales_of_no_rows_each_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="rows_per_scale = 0"):
        pack_scales(torch.ones(4, 4), rows_per_scale=0)
