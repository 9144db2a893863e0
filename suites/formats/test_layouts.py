"""Scale layouts: bijections at every ragged size, equal to their reshape-and-permute spelling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from degarble.harness.base.errors import (
    DtypeMismatch,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.layouts import (
    LINEAR,
    PACKED_MN,
    SCALE_LAYOUTS,
    SWIZZLE_8X4,
    SWIZZLE_128X4,
    ScaleLayout,
    coordinate_128x4,
    from_layout,
    nonzero_padding,
    offset_8x4,
    offset_128x4,
    offset_packed_mn,
    offset_table,
    padded_row_starts,
    round_up,
    scale_layout,
    to_layout,
)

if TYPE_CHECKING:
    from torch import Tensor

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
