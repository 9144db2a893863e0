"""Scale layouts, DeepGEMM's packed scales and row orders: bijections at every ragged size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.layouts import (
    AS_STORED,
    INTERLEAVE_1,
    INTERLEAVE_8,
    INTERLEAVE_64,
    LINEAR,
    PACKED_MN,
    ROW_ORDERS,
    SCALE_LAYOUTS,
    SHUFFLE_16,
    SHUFFLE_32,
    SWAP_HALVES,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    TRANSPOSE_4X32,
    TRTLLM_GATED,
    RowOrder,
    ScaleLayout,
    chain,
    coordinate_128x4,
    exact_ue8m0,
    from_layout,
    gather_index,
    nonzero_padding,
    offset_8x4,
    offset_128x4,
    offset_packed_mn,
    offset_table,
    pack_scales,
    padded_row_starts,
    reorder_rows,
    restore_rows,
    round_up,
    scale_layout,
    to_layout,
    unpack_scales,
)

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Scale layouts: bijections at every ragged size, equal to their reshape-and-permute spelling.

LAYOUTS = list(SCALE_LAYOUTS.values())
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
# Ragged and exact: around the tiles of every layout, and the shapes of real weights' corners.
SIZES = [(1, 1), (3, 2), (8, 4), (9, 5), (127, 3), (128, 4), (129, 8), (260, 13), (64, 448)]
by_size = pytest.mark.parametrize(("rows", "columns"), SIZES)
sizes = st.tuples(st.integers(1, 300), st.integers(1, 20))


def bytes_of(rows: int, columns: int, leading: tuple[int, ...] = ()) -> Tensor:
    """Return bytes without a zero, so that padding cannot pass for a scale."""
    count = rows * columns
    for extent in leading:
        count *= extent
    return (torch.arange(count) % 255 + 1).to(torch.uint8).reshape(*leading, rows, columns)


def bijection_errors(layout: ScaleLayout, rows: int, columns: int) -> int:
    """Count offsets that are shared, outside the storage, or not undone by the inverse."""
    offset = offset_table(layout, rows, columns)
    shared = offset.numel() - len(set(offset.flatten().tolist()))
    outside = (offset < 0) | (offset >= layout.storage_size(rows, columns))
    row, column = layout.coordinate_of(offset, rows, columns)
    wrong = (row != torch.arange(rows)[:, None]) | (column != torch.arange(columns)[None, :])
    bad: Tensor = outside | wrong
    return shared + int(bad.sum())


@by_layout
@by_size
def test_every_coordinate_has_its_own_byte(layout: ScaleLayout, rows: int, columns: int) -> None:
    assert bijection_errors(layout, rows, columns) == 0


@by_layout
@settings(max_examples=60)
@given(size=sizes)
def test_every_coordinate_has_its_own_byte_at_any_size(
    layout: ScaleLayout, size: tuple[int, int]
) -> None:
    assert bijection_errors(layout, *size) == 0


@by_layout
@by_size
def test_the_inverse_covers_padding_as_well(layout: ScaleLayout, rows: int, columns: int) -> None:
    offset = torch.arange(layout.storage_size(rows, columns))
    row, column = layout.coordinate_of(offset, rows, columns)
    assert torch.equal(layout.offset_of(row, column, rows, columns), offset)
    inside = (row < rows) & (column < columns)
    assert int(inside.sum()) == rows * columns
    assert int(row.max()) < round_up(rows, layout.row_tile)
    assert int(column.max()) < round_up(columns, layout.column_tile)


@by_layout
@given(size=st.tuples(st.integers(1, 140), st.integers(1, 9)))
@settings(max_examples=15)
def test_ints_and_tensors_get_the_same_offsets(layout: ScaleLayout, size: tuple[int, int]) -> None:
    rows, columns = size
    each = [
        [layout.offset_of(row, column, rows, columns) for column in range(columns)]
        for row in range(rows)
    ]
    assert offset_table(layout, rows, columns).tolist() == each


def by_permuting(scales_EMK: Tensor, layout: ScaleLayout) -> Tensor:
    """The same storage, spelled as pad, reshape and permute as the producers do."""
    *leading, rows, columns = scales_EMK.shape
    padded_rows = round_up(rows, layout.row_tile)
    padded_columns = round_up(columns, layout.column_tile)
    padded = scales_EMK.new_zeros((*leading, padded_rows, padded_columns))
    padded[..., :rows, :columns] = scales_EMK
    batch = padded.reshape(-1, padded_rows, padded_columns)
    count, tiles = batch.shape[0], padded_columns // 4
    if layout is SWIZZLE_128X4:
        view = batch.reshape(count, padded_rows // 128, 4, 32, tiles, 4)
        moved = view.permute(0, 1, 4, 3, 2, 5)
    elif layout is SWIZZLE_8X4:
        moved = batch.reshape(count, padded_rows // 8, 8, tiles, 4).permute(0, 1, 3, 2, 4)
    elif layout is PACKED_MN:
        moved = batch.reshape(count, padded_rows, tiles, 4).permute(0, 2, 1, 3)
    else:
        moved = batch
    return moved.reshape(*leading, -1)


@by_layout
@by_size
@pytest.mark.parametrize("leading", [(), (3,), (2, 2)], ids=str)
def test_storage_equals_the_permuted_spelling(
    layout: ScaleLayout, rows: int, columns: int, leading: tuple[int, ...]
) -> None:
    scales = bytes_of(rows, columns, leading)
    storage = to_layout(scales, layout)
    assert torch.equal(storage, by_permuting(scales, layout))
    assert storage.shape == (*leading, layout.storage_size(rows, columns))
    assert torch.equal(from_layout(storage, layout, rows, columns), scales)
    assert nonzero_padding(storage, layout, rows, columns) == 0
    assert int((storage == 0).sum()) == storage.numel() - scales.numel()


def test_landmarks_of_the_published_formulas() -> None:
    # 16 (row mod 32) + 4 (row div 32) + k inside 512 bytes; tiles of 4 columns come first.
    assert [offset_128x4(row, 0, 8) for row in (0, 1, 31, 32, 96, 127)] == [0, 16, 496, 4, 12, 508]
    assert [offset_128x4(0, column, 8) for column in (0, 3, 4, 7)] == [0, 3, 512, 515]
    assert offset_128x4(128, 0, 8) == 2 * 512
    assert offset_128x4(130, 5, 9) == 3 * 512 + 512 + 2 * 16 + 1
    assert coordinate_128x4(508, 8) == (127, 0)
    assert [offset_8x4(row, 0, 8) for row in (0, 1, 7, 8)] == [0, 4, 28, 64]
    assert offset_8x4(0, 4, 8) == 32
    # 5 rows: the stride of a packed column is 8 words.
    assert [offset_packed_mn(row, 0, 5) for row in (0, 1, 4)] == [0, 4, 16]
    assert offset_packed_mn(0, 4, 5) == 8 * 4


def test_8x4_and_128x4_agree_on_no_more_than_the_first_row() -> None:
    table, other = offset_table(SWIZZLE_128X4, 128, 4), offset_table(SWIZZLE_8X4, 128, 4)
    assert (table == other).nonzero().tolist() == [[0, column] for column in range(4)] + [
        [127, column] for column in range(4)
    ]


@by_layout
def test_experts_are_padded_each_on_their_own(layout: ScaleLayout) -> None:
    rows, columns = 9, 5
    storage = to_layout(bytes_of(rows, columns, (3,)), layout).flatten()
    scales = bytes_of(rows, columns, (3,))
    for expert in range(3):
        for row, column in ((0, 0), (8, 4), (7, 3)):
            offset = layout.batched_offset(expert, (row, column), rows, columns)
            assert storage[offset] == scales[expert, row, column]


@pytest.mark.parametrize("layout", [LINEAR, SWIZZLE_8X4, SWIZZLE_128X4], ids=lambda x: x.name)
def test_ragged_experts_start_at_whole_tiles(layout: ScaleLayout) -> None:
    counts, columns = [5, 0, 130, 8], 6
    starts = padded_row_starts(counts, layout)
    assert all(start % layout.row_tile == 0 for start in starts)
    padded_columns = round_up(columns, layout.column_tile)
    storage = torch.zeros(starts[-1] * padded_columns, dtype=torch.uint8)
    parts = [bytes_of(count, columns) for count in counts]
    for part, start in zip(parts, starts, strict=False):
        size = layout.storage_size(part.shape[0], columns)
        first = start * padded_columns
        storage[first : first + size] = to_layout(part, layout)
    # The whole is one matrix of padded rows in the same layout.
    whole = from_layout(storage, layout, starts[-1], columns)
    for part, start in zip(parts, starts, strict=False):
        assert torch.equal(whole[start : start + part.shape[0]], part)


@pytest.mark.parametrize("written", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("read", LAYOUTS, ids=lambda layout: layout.name)
def test_reading_in_another_layout_does_not_return_the_scales(
    written: ScaleLayout, read: ScaleLayout
) -> None:
    scales = bytes_of(256, 8)
    result = from_layout(to_layout(scales, written), read, 256, 8)
    assert torch.equal(result, scales) == (written is read)


@by_layout
def test_a_planted_swap_is_detected(layout: ScaleLayout) -> None:
    broken = replace(
        layout,
        offset_of=lambda row, column, rows, columns: layout.offset_of(
            row, column // 4 * 4 + 3 - column % 4, rows, columns
        ),
    )
    assert bijection_errors(layout, 16, 8) == 0
    assert bijection_errors(broken, 16, 8) > 0
    scales = bytes_of(16, 8)
    assert not torch.equal(to_layout(scales, broken), by_permuting(scales, layout))


def test_a_planted_byte_in_the_padding_is_counted() -> None:
    storage = to_layout(bytes_of(5, 3), SWIZZLE_128X4)
    storage[offset_128x4(5, 0, 3)] = 1
    storage[offset_128x4(0, 3, 3)] = 2
    assert nonzero_padding(storage, SWIZZLE_128X4, 5, 3) == 2
    assert torch.equal(from_layout(storage, SWIZZLE_128X4, 5, 3), bytes_of(5, 3))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DtypeMismatch, match="never cast"):
        to_layout(torch.zeros(4, 4), LINEAR)
    with pytest.raises(DtypeMismatch, match="never cast"):
        from_layout(torch.zeros(16), LINEAR, 4, 4)
    with pytest.raises(ShapeMismatch, match="at least two dimensions"):
        to_layout(torch.zeros(4, dtype=torch.uint8), LINEAR)
    with pytest.raises(LayoutMismatch, match="a last extent of 512 bytes"):
        from_layout(torch.zeros(20, dtype=torch.uint8), SWIZZLE_128X4, 5, 4)
    with pytest.raises(UnknownName, match="Did you mean 128x4"):
        scale_layout("128x8")
    assert scale_layout("8x4") is SWIZZLE_8X4


# --------------------------------------------------------------------------------------------------
# DeepGEMM's packed UE8M0 words: built with shifts, strides checked, inexact scales refused.

PACKED_SIZES = [(1, 1), (4, 4), (5, 7), (7, 8), (130, 9)]
by_packed_size = pytest.mark.parametrize(("rows", "columns"), PACKED_SIZES)


def codes_of(rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns) % 255).to(torch.uint8).reshape(rows, columns)


@by_packed_size
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


@by_packed_size
def test_words_are_mn_major_with_a_padded_stride(rows: int, columns: int) -> None:
    packed = pack_scales(torch.stack([codes_of(rows, columns)] * 2))
    stride = -(-rows // 4) * 4
    assert packed.stride() == (math.ceil(columns / 4) * stride, 1, stride)
    storage = to_layout(codes_of(rows, columns), PACKED_MN)
    assert storage[offset_packed_mn(rows - 1, columns - 1, rows)] == codes_of(rows, columns)[-1, -1]


@by_packed_size
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


def test_packed_scales_that_do_not_fit_are_refused() -> None:
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


# --------------------------------------------------------------------------------------------------
# Row orders: permutations with their inverses, equal to reshape and to the published tables.

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
