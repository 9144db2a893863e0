"""Memory layouts of block scales: linear, 128x4, 8x4 and DeepGEMM's packed UE8M0, as index maps.

128x4 is the order of tcgen05 and cuBLAS, 8x4 that of TRT-LLM for small M. Offsets count bytes, one
byte a scale. The index functions use // % * + on non-negative integers only, so one source runs on
ints, int64 tensors and CuTe DSL values inside a kernel. They check nothing: a coordinate outside
the matrix is the caller's mistake, or padding.

`to_layout` and `from_layout` move whole uint8 matrices [..., M, Ks]; padding is zero. Each matrix
of a batch (expert) is padded separately.

Trap: DSL `%` truncates while Python's floors; both agree only while every operand is >= 0.
Shape letters: M rows, Ks scale columns, S bytes of storage, E leading extents.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.formats.packing import require_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


def ceil_div(value: Any, divisor: int) -> Any:
    """Divide and round up; `value` is not negative."""
    return (value + (divisor - 1)) // divisor


def round_up(value: Any, multiple: int) -> Any:
    """Round up to a multiple; `value` is not negative."""
    return (value + (multiple - 1)) // multiple * multiple


def offset_linear(row: Any, column: Any, columns: Any) -> Any:
    """Return the offset in row-major order without padding."""
    return row * columns + column


def coordinate_linear(offset: Any, columns: Any) -> tuple[Any, Any]:
    """Return (row, column): inverse of offset_linear."""
    return offset // columns, offset % columns


def offset_128x4(row: Any, column: Any, columns: Any) -> Any:
    """Return the offset in 512-byte tiles of 128 rows x 4 scales, tiles along K first.

    Inside a tile byte = 16 (row mod 32) + 4 (row div 32) + column (PTX ISA 9.1, tcgen05 scales).
    """
    tiles = ceil_div(columns, 4)
    # Row = 32 j + i of a tile lies in 16-byte line i, word j.
    tile = (row // 128) * tiles + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4


def coordinate_128x4(offset: Any, columns: Any) -> tuple[Any, Any]:
    """Return (row, column): inverse of offset_128x4; padding bytes give padding coordinates."""
    tiles = ceil_div(columns, 4)
    tile = offset // 512
    row = tile // tiles * 128 + offset % 16 // 4 * 32 + offset % 512 // 16
    return row, tile % tiles * 4 + offset % 4


def offset_8x4(row: Any, column: Any, columns: Any) -> Any:
    """Return the offset in 32-byte tiles of 8 rows x 4 scales, row-major inside and outside.

    TRT-LLM uses it for small M.
    """
    tiles = ceil_div(columns, 4)
    tile = (row // 8) * tiles + column // 4
    return tile * 32 + (row % 8) * 4 + column % 4


def coordinate_8x4(offset: Any, columns: Any) -> tuple[Any, Any]:
    """Return (row, column): inverse of offset_8x4; padding bytes give padding coordinates."""
    tiles = ceil_div(columns, 4)
    tile = offset // 32
    row = tile // tiles * 8 + offset % 32 // 4
    return row, tile % tiles * 4 + offset % 4


def offset_packed_mn(row: Any, column: Any, rows: Any) -> Any:
    """Return the offset in MN-major words of 4 scales along K, MN stride rounded up to 4 words.

    Byte j of the little-endian word p holds the scale of column 4 p + j: DeepGEMM's order on SM100
    (csrc/utils/layout.hpp).
    """
    return (column // 4 * round_up(rows, 4) + row) * 4 + column % 4


def coordinate_packed_mn(offset: Any, rows: Any) -> tuple[Any, Any]:
    """Return (row, column): inverse of offset_packed_mn; padding gives padding coordinates."""
    stride = round_up(rows, 4)
    word = offset // 4
    return word % stride, word // stride * 4 + offset % 4


@dataclass(frozen=True)
class ScaleLayout:
    """One order of scale bytes: tile extents that sizes are padded to, and the two index maps.

    `offset_of(row, column, rows, columns)` and `coordinate_of(offset, rows, columns)` have one
    signature for every layout; rows and columns are those of the unpadded matrix.
    """

    name: str
    row_tile: int
    column_tile: int
    offset_of: Callable[[Any, Any, Any, Any], Any]
    coordinate_of: Callable[[Any, Any, Any], tuple[Any, Any]]

    def storage_size(self, rows: Any, columns: Any) -> Any:
        """Return the bytes of one matrix, padding included."""
        return round_up(rows, self.row_tile) * round_up(columns, self.column_tile)

    def batched_offset(
        self, index: Any, coordinate: tuple[Any, Any], rows: Any, columns: Any
    ) -> Any:
        """Return the offset of (row, column) of matrix `index`, each matrix padded separately."""
        row, column = coordinate
        start = index * self.storage_size(rows, columns)
        return start + self.offset_of(row, column, rows, columns)


LINEAR = ScaleLayout(
    name="linear",
    row_tile=1,
    column_tile=1,
    offset_of=lambda row, column, _rows, columns: offset_linear(row, column, columns),
    coordinate_of=lambda offset, _rows, columns: coordinate_linear(offset, columns),
)
# Rows and scale columns are padded to whole tiles: 128 x 4, 8 x 4, or 4 x 4.
SWIZZLE_128X4 = ScaleLayout(
    name="128x4",
    row_tile=128,
    column_tile=4,
    offset_of=lambda row, column, _rows, columns: offset_128x4(row, column, columns),
    coordinate_of=lambda offset, _rows, columns: coordinate_128x4(offset, columns),
)
SWIZZLE_8X4 = ScaleLayout(
    name="8x4",
    row_tile=8,
    column_tile=4,
    offset_of=lambda row, column, _rows, columns: offset_8x4(row, column, columns),
    coordinate_of=lambda offset, _rows, columns: coordinate_8x4(offset, columns),
)
PACKED_MN = ScaleLayout(
    name="packed_mn",
    row_tile=4,
    column_tile=4,
    offset_of=lambda row, column, rows, _columns: offset_packed_mn(row, column, rows),
    coordinate_of=lambda offset, rows, _columns: coordinate_packed_mn(offset, rows),
)

SCALE_LAYOUTS: Mapping[str, ScaleLayout] = MappingProxyType(
    {layout.name: layout for layout in (LINEAR, SWIZZLE_128X4, SWIZZLE_8X4, PACKED_MN)}
)


def scale_layout(name: str) -> ScaleLayout:
    """Return the layout called `name`; raise with the nearest known names otherwise."""
    if name not in SCALE_LAYOUTS:
        raise UnknownName.among("scale layout", name, SCALE_LAYOUTS)
    return SCALE_LAYOUTS[name]


def offset_table(layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    """Return the int64 offsets of all coordinates, [M, Ks]."""
    row_M1 = torch.arange(rows, dtype=torch.int64)[:, None]
    column_1K = torch.arange(columns, dtype=torch.int64)[None, :]
    offset_MK: Tensor = layout.offset_of(row_M1, column_1K, rows, columns)
    return offset_MK


def to_layout(scales_EMK: Tensor, layout: ScaleLayout) -> Tensor:
    """Move scale bytes [..., M, Ks] into storage [..., S] with zero padding."""
    require_bytes("scales", scales_EMK)
    if scales_EMK.ndim < 2:
        raise ShapeMismatch(
            "scales",
            tuple(scales_EMK.shape),
            "at least two dimensions, rows and scale columns",
            "Reshape the scales to [rows, columns] first.",
        )
    *leading, rows, columns = scales_EMK.shape
    size = layout.storage_size(rows, columns)
    storage_ES = scales_EMK.new_zeros((*leading, size))
    offset = offset_table(layout, rows, columns).flatten().to(scales_EMK.device)
    # Scatter: offsets are distinct, because the map is a bijection into storage.
    storage_ES[..., offset] = scales_EMK.flatten(-2)
    return storage_ES


def from_layout(storage_ES: Tensor, layout: ScaleLayout, rows: int, columns: int) -> Tensor:
    """Read scale bytes [..., rows, columns] out of storage [..., S]; padding is ignored."""
    require_storage(storage_ES, layout, rows, columns)
    offset_MK = offset_table(layout, rows, columns).to(storage_ES.device)
    return storage_ES[..., offset_MK]


def nonzero_padding(storage_ES: Tensor, layout: ScaleLayout, rows: int, columns: int) -> int:
    """Count padding bytes that are not zero: a wrong layout or a wrong size often shows here."""
    require_storage(storage_ES, layout, rows, columns)
    is_padding_S = torch.ones(storage_ES.shape[-1], dtype=torch.bool, device=storage_ES.device)
    is_padding_S[offset_table(layout, rows, columns).flatten().to(storage_ES.device)] = False
    return int((storage_ES[..., is_padding_S] != 0).sum())


def require_storage(storage_ES: Tensor, layout: ScaleLayout, rows: int, columns: int) -> None:
    """Raise if storage cannot hold rows x columns scales of this layout."""
    require_bytes("scale storage", storage_ES)
    size = layout.storage_size(rows, columns)
    if storage_ES.ndim == 0 or storage_ES.shape[-1] != size:
        raise LayoutMismatch(
            f"storage of {rows} x {columns} scales in layout {layout.name}",
            tuple(storage_ES.shape),
            f"a last extent of {size} bytes",
            "Name the layout that the producer wrote, or flatten the last two extents.",
        )


def padded_row_starts(row_counts: Sequence[int], layout: ScaleLayout) -> tuple[int, ...]:
    """Return the first padded row of each expert, and one past the last.

    For ragged batches in linear, 128x4 and 8x4: the scale (row, column) of expert e lies at
    starts[e] * padded columns + offset.
    """
    starts = [0]
    for count in row_counts:
        starts.append(starts[-1] + round_up(count, layout.row_tile))
    return tuple(starts)
