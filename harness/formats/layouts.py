"""Map block scales and weight rows to the memory orders that kernels read.

Scale layouts: linear, 128x4, 8x4 and DeepGEMM's packed UE8M0 (MN-major). Row orders: shuffle,
gate/up interleave, half swap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.codec import decode_array, encode_array, require_bytes
from degarble.harness.formats.number_formats import UE8M0

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


# --------------------------------------------------------------------------------------------------
# Layouts of block scales, as index maps
#
# 128x4 is the order of tcgen05 and cuBLAS, 8x4 that of TRT-LLM for small M. Offsets count bytes,
# one byte a scale. The index functions use // % * + on non-negative integers only, so one source
# runs on ints, int64 tensors and CuTe DSL values inside a kernel. They check nothing: a coordinate
# outside the matrix is the caller's mistake, or padding.
#
# `to_layout` and `from_layout` move whole uint8 matrices [..., M, Ks]; padding is zero. Each matrix
# of a batch (expert) is padded separately.
#
# Trap: DSL `%` truncates while Python's floors; both agree only while every operand is >= 0.
# Shape letters: M rows, Ks scale columns, S bytes of storage, E leading extents.


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


# --------------------------------------------------------------------------------------------------
# Power-of-two scales as DeepGEMM reads them on SM100: four UE8M0 bytes to an int32, MN-major
#
# The result is int32 [..., M, P] with strides (1, A), where P = ceil(Ks / 4) and A is M rounded up
# to 4. The byte order itself is PACKED_MN. An fp32 scale has to be a power of two from 2**-127 to
# 2**127: rounding any other (zero, infinity and NaN too) would change every product.
# Shape letters: M rows, Ks scale columns, P packed columns.


def exact_ue8m0(scales: Tensor) -> Tensor:
    """Return the UE8M0 codes of fp32 scales that are powers of two already."""
    if scales.dtype is not torch.float32:
        raise DtypeMismatch(
            "scales", scales.dtype, "torch.float32", "Pass UE8M0 bytes as they are, as uint8."
        )
    magnitude = scales.abs().nan_to_num(0.0)
    codes = encode_array(magnitude, UE8M0)
    wrong = decode_array(codes, UE8M0) != scales
    if bool(wrong.any()):
        raise InvalidArgument(
            f"scales, {int(wrong.sum())} of {scales.numel()}",
            float(scales[wrong][0]),
            "exact powers of two from 2**-127 to 2**127",
            "Quantise again with power-of-two scales; rounding a scale changes the weights.",
        )
    return codes


def pack_scales(scales_MK: Tensor, rows_per_scale: int = 1, rows: int | None = None) -> Tensor:
    """Pack fp32 or UE8M0 (uint8) scales [..., Ms, Ks] into int32 [..., rows, P].

    Each scale row is repeated for `rows_per_scale` rows and cut at `rows`.
    """
    codes_MK = scales_MK if scales_MK.dtype is torch.uint8 else exact_ue8m0(scales_MK)
    if codes_MK.ndim < 2:
        raise ShapeMismatch(
            "scales", tuple(codes_MK.shape), "rows and scale columns", "Add the missing dimension."
        )
    if rows_per_scale < 1:
        raise InvalidArgument(
            "rows_per_scale", rows_per_scale, "at least 1", "Check the granularity of the scales."
        )
    covered = codes_MK.shape[-2] * rows_per_scale
    rows = covered if rows is None else rows
    if ceil_div(rows, rows_per_scale) != codes_MK.shape[-2]:
        raise ShapeMismatch(
            "rows",
            rows,
            f"a number that {codes_MK.shape[-2]} scale rows of {rows_per_scale} cover",
            "Check the granularity of the scales.",
        )
    codes_MK = codes_MK.repeat_interleave(rows_per_scale, dim=-2)[..., :rows, :]
    storage = to_layout(codes_MK, PACKED_MN)
    word_shape = (ceil_div(codes_MK.shape[-1], 4), round_up(rows, 4), 4)
    words = storage.reshape(*storage.shape[:-1], *word_shape).view(torch.int32).squeeze(-1)
    return words.transpose(-1, -2)[..., :rows, :]


def unpack_scales(packed_MP: Tensor, columns: int) -> Tensor:
    """Return the UE8M0 codes [..., M, columns] of packed int32 scales."""
    if packed_MP.dtype is not torch.int32:
        raise DtypeMismatch(
            "packed scales", packed_MP.dtype, "torch.int32", "Pack them with pack_scales."
        )
    if packed_MP.ndim < 2 or packed_MP.shape[-1] != ceil_div(columns, 4):
        raise LayoutMismatch(
            f"packed scales of {columns} columns",
            tuple(packed_MP.shape),
            f"a last extent of {ceil_div(columns, 4)} words",
            "Pass the number of scale columns before packing.",
        )
    *leading, rows, packed_columns = packed_MP.shape
    words = packed_MP.new_zeros((*leading, packed_columns, round_up(rows, 4)))
    words[..., :rows] = packed_MP.transpose(-1, -2)
    return from_layout(words.flatten(-2).view(torch.uint8), PACKED_MN, rows, columns)


# --------------------------------------------------------------------------------------------------
# Row permutations of weights before a kernel reads them
#
# TRT-LLM shuffles rows in blocks of 32 or 16; gate and up interleave in groups of 1, 8 or 64; the
# halves are [w1; w3] or [w3; w1]; DeepGEMM transposes 4x32. Orders can be chained. An order is a
# gather: row r of the result is row `source(r, rows)` of the input, and `destination` is its
# inverse. Both use // % * + on non-negative integers only, so that one source runs on ints, int64
# tensors and CuTe DSL values; neither checks anything. `reorder_rows` and `restore_rows` move
# tensors [..., M, K] and check that the order divides M.
#
# Sources: FlashInfer utils.py and fused_moe/core.py (shuffle, interleave by one, chain), vLLM
# flashinfer_fp4_moe.py (w3 before w1), DeepGEMM mega/__init__.py (groups of 8, 4x32 transpose).
# Shape letters: M rows, K columns.


def shuffled_row(row: Any, ways: int, block: int) -> Any:
    """Return where a row goes when each `block` rows are dealt like cards to `ways` stacks.

    Inside a block j goes to (j mod ways) * (block / ways) + j div ways.
    """
    inside = row % block
    return row // block * block + inside % ways * (block // ways) + inside // ways


def interleaved_row(row: Any, rows: Any, group: int) -> Any:
    """Return where a row of [first half; second half] goes when groups of both halves alternate."""
    inside = row % (rows // 2)
    return inside // group * (2 * group) + row // (rows // 2) * group + inside % group


def deinterleaved_row(row: Any, rows: Any, group: int) -> Any:
    """Return where a row of alternating groups goes when the halves are joined again."""
    pair = row // (2 * group)
    return row // group % 2 * (rows // 2) + pair * group + row % group


def swapped_half_row(row: Any, rows: Any) -> Any:
    """Return where a row goes when [a; b] becomes [b; a]; its own inverse."""
    return (row + rows // 2) % rows


@dataclass(frozen=True)
class RowOrder:
    """A permutation of rows: `source(new_row, rows)` and its inverse `destination(row, rows)`."""

    name: str
    multiple: int  # the row count is a multiple of this
    source: Callable[[Any, Any], Any]
    destination: Callable[[Any, Any], Any]


def chain(name: str, first: RowOrder, *later: RowOrder) -> RowOrder:
    """Apply orders one after the other, as one gather."""
    orders = (first, *later)

    def source(row: Any, rows: Any) -> Any:
        for order in reversed(orders):
            row = order.source(row, rows)
        return row

    def destination(row: Any, rows: Any) -> Any:
        for order in orders:
            row = order.destination(row, rows)
        return row

    return RowOrder(name, math.lcm(*(order.multiple for order in orders)), source, destination)


def _shuffle(name: str, ways: int, block: int) -> RowOrder:
    return RowOrder(
        name,
        block,
        source=lambda row, _rows: shuffled_row(row, block // ways, block),
        destination=lambda row, _rows: shuffled_row(row, ways, block),
    )


def _interleave(group: int) -> RowOrder:
    return RowOrder(
        f"interleave_{group}",
        2 * group,
        source=partial(deinterleaved_row, group=group),
        destination=partial(interleaved_row, group=group),
    )


AS_STORED = RowOrder("as_stored", 1, lambda row, _rows: row, lambda row, _rows: row)
# Block 32 for an epilogue tile of 128 rows, block 16 otherwise (FlashInfer utils.py).
SHUFFLE_32 = _shuffle("shuffle_32", ways=4, block=32)
SHUFFLE_16 = _shuffle("shuffle_16", ways=2, block=16)
INTERLEAVE_1 = _interleave(1)  # TRT-LLM
INTERLEAVE_8 = _interleave(8)  # DeepGEMM MegaMoE
INTERLEAVE_64 = _interleave(64)  # FlashInfer CuTe DSL
SWAP_HALVES = RowOrder("swap_halves", 2, swapped_half_row, swapped_half_row)  # [w1;w3] to [w3;w1]
# Rows 32 a + b of 128 go to 4 b + a: what UTCCP copies into tensor memory (DeepGEMM MegaMoE).
TRANSPOSE_4X32 = _shuffle("transpose_4x32", ways=32, block=128)
# Interleave first, then shuffle: the combined gather is interleave[shuffle] (FlashInfer core.py).
TRTLLM_GATED = chain("trtllm_gated", SWAP_HALVES, INTERLEAVE_1, SHUFFLE_32)

ROW_ORDERS: Mapping[str, RowOrder] = MappingProxyType(
    {
        order.name: order
        for order in (
            AS_STORED,
            SHUFFLE_32,
            SHUFFLE_16,
            INTERLEAVE_1,
            INTERLEAVE_8,
            INTERLEAVE_64,
            SWAP_HALVES,
            TRANSPOSE_4X32,
            TRTLLM_GATED,
        )
    }
)


def gather_index(order: RowOrder, rows: int) -> Tensor:
    """Return, for every new row, the row that it comes from."""
    if rows % order.multiple:
        raise ShapeMismatch(
            f"rows for order {order.name}",
            rows,
            f"a multiple of {order.multiple}",
            "Pad the rows (each gated half on its own) with zeros first.",
        )
    index_M: Tensor = order.source(torch.arange(rows, dtype=torch.int64), rows)
    return index_M


def reorder_rows(tensor_MK: Tensor, order: RowOrder) -> Tensor:
    """Gather the rows of [..., M, K] into `order`."""
    index_M = gather_index(order, _rows_of(tensor_MK)).to(tensor_MK.device)
    return tensor_MK.index_select(-2, index_M)


def restore_rows(tensor_MK: Tensor, order: RowOrder) -> Tensor:
    """Undo reorder_rows."""
    index_M = gather_index(order, _rows_of(tensor_MK)).to(tensor_MK.device)
    return tensor_MK.index_select(-2, index_M.argsort())


def _rows_of(tensor_MK: Tensor) -> int:
    if tensor_MK.ndim < 2:
        raise ShapeMismatch(
            "tensor to reorder",
            tuple(tensor_MK.shape),
            "at least two dimensions, rows and columns",
            "Add a column dimension of extent 1.",
        )
    return tensor_MK.shape[-2]
