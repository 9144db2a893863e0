"""Byte layouts of paged KV-cache and indexer-cache entries as serving engines store them.

A record states the value fields of an entry, its scales, the page alignment, and whether a page
holds entry after entry or first all data and then all scales. `byte_of`, `scale_byte_of` and their
inverses use // % * + on non-negative integers only, so they run on ints, int64 tensors and CuTe DSL
values. They check nothing. RoPE dims have no scale, so no scale byte.

How a writer chooses scales is not part of a record: writers differ in the floor of the amax, the
reciprocal and the rounding of the scale.
Shape letters: B entries of a page, D dims of an entry, S bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from degarble.harness.base.errors import InvalidArgument, LayoutMismatch, ShapeMismatch, UnknownName
from degarble.harness.formats.codec import code_dtype, decode_array, require_bytes, unpack_nibbles
from degarble.harness.formats.layouts import round_up
from degarble.harness.formats.number_formats import BF16, E2M1, E4M3, FP32, UE8M0

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from degarble.harness.formats.number_formats import ElementFormat


class ByteRole(StrEnum):
    """Roles of a byte of a page."""

    VALUE = "value"
    SCALE = "scale"
    PADDING = "padding"


@dataclass(frozen=True)
class ValueField:
    """Consecutive dims in one format; `start` counts bytes inside the entry's data."""

    name: str
    element: ElementFormat
    first_dim: int
    dims: int
    start: int

    @property
    def size(self) -> int:
        """Return the bytes of the field in one entry."""
        return self.dims * self.element.bits // 8


@dataclass(frozen=True)
class ScaleField:
    """`count` decode scales, one for each `block` dims from dim 0; `start` as CacheRow says."""

    element: ElementFormat
    block: int
    count: int
    start: int

    @property
    def item(self) -> int:
        """Return the bytes of one scale."""
        return self.element.bits // 8

    @property
    def size(self) -> int:
        """Return the bytes of all scales of one entry."""
        return self.count * self.item


@dataclass(frozen=True)
class ByteMeaning:
    """The meaning of one byte of a page: for a scale, the dims are those that it scales."""

    role: ByteRole
    entry: int | None = None
    field: str | None = None
    first_dim: int | None = None
    dims: int = 0
    byte_in_element: int = 0


@dataclass(frozen=True)
class CacheRow:
    """One entry format. A page holds B data parts of `data_bytes`, then B of `footer_bytes`.

    Without a footer an entry is contiguous and `scale.start` counts inside the data part; with one
    the scales live in the footer and `scale.start` counts inside the entry's footer part.
    """

    name: str
    values: tuple[ValueField, ...]
    scale: ScaleField
    data_bytes: int
    footer_bytes: int
    alignment: int

    @property
    def dims(self) -> int:
        """Return how many numbers an entry has."""
        return sum(field.dims for field in self.values)

    @property
    def scaled_dims(self) -> int:
        """Return how many dims have a scale; the others are stored unscaled."""
        return self.scale.block * self.scale.count

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of one entry, by which the format is often named."""
        return self.data_bytes + self.footer_bytes

    def page_bytes(self, entries: Any, alignment: int | None = None) -> Any:
        """Return the bytes of a page; `alignment` overrides that of the record (1 for none)."""
        return round_up(entries * self.entry_bytes, alignment or self.alignment)

    def byte_of(self, entry: Any, dim: Any) -> Any:
        """Return the (first) byte of a value; the even dim of a 4-bit pair is the low nibble."""
        first = self.values[0]
        start = entry * self.data_bytes
        if len(self.values) == 1:
            return start + first.start + dim * first.element.bits // 8
        second = self.values[1]
        # 0 or 1, the only branch that all three worlds take alike; second.dims <= first.dims.
        which = dim // first.dims
        byte = first.start + dim * first.element.bits // 8
        other = second.start + dim % first.dims * second.element.bits // 8
        return start + (1 - which) * byte + which * other

    def coordinate_of(self, byte: Any) -> tuple[Any, Any]:
        """Return (entry, lowest dim in the byte): inverse of byte_of on value bytes."""
        first = self.values[0]
        inside = byte % self.data_bytes
        entry = byte // self.data_bytes
        if len(self.values) == 1:
            return entry, (inside - first.start) * 8 // first.element.bits
        second = self.values[1]
        which = inside // second.start  # 0 or 1; the second field starts past the middle
        dim = (inside - first.start) * 8 // first.element.bits
        other = second.first_dim + inside % second.start * 8 // second.element.bits
        return entry, (1 - which) * dim + which * other

    def scale_byte_of(self, entry: Any, dim: Any, entries: Any) -> Any:
        """Return the (first) byte of the scale of a dim below `scaled_dims`."""
        inside = self.scale.start + dim // self.scale.block * self.scale.item
        if self.footer_bytes:
            return entries * self.data_bytes + entry * self.footer_bytes + inside
        return entry * self.data_bytes + inside

    def scale_coordinate_of(self, byte: Any, entries: Any) -> tuple[Any, Any]:
        """Return (entry, scale index): inverse of scale_byte_of on scale bytes."""
        if self.footer_bytes:
            footer = byte - entries * self.data_bytes
            entry, inside = footer // self.footer_bytes, footer % self.footer_bytes
        else:
            entry, inside = byte // self.data_bytes, byte % self.data_bytes
        return entry, (inside - self.scale.start) // self.scale.item

    def describe(self, byte: int, entries: int) -> ByteMeaning:
        """Return the meaning of a byte of a page; ints only."""
        if byte < 0:
            raise InvalidArgument(
                f"byte of a {self.name} page",
                byte,
                "an offset from the start of the page, not negative",
                "Subtract the start of the page from the address.",
            )
        if byte >= entries * self.entry_bytes:
            return ByteMeaning(ByteRole.PADDING)
        # A page: B * data_bytes, then B * footer_bytes, then padding.
        in_footer = byte >= entries * self.data_bytes
        stride = self.footer_bytes if in_footer else self.data_bytes
        start = entries * self.data_bytes if in_footer else 0
        entry, inside = (byte - start) // stride, (byte - start) % stride
        if not in_footer:
            for field in self.values:
                if field.start <= inside < field.start + field.size:
                    return _describe_value(self, field, byte, inside - field.start)
        scale = self.scale
        if in_footer == bool(self.footer_bytes) and 0 <= inside - scale.start < scale.size:
            index = self.scale_coordinate_of(byte, entries)[1]
            byte_in_scale = (inside - scale.start) % scale.item
            first_dim = index * scale.block
            return ByteMeaning(
                ByteRole.SCALE, entry, "scale", first_dim, scale.block, byte_in_scale
            )
        return ByteMeaning(ByteRole.PADDING, entry)


def _describe_value(row: CacheRow, field: ValueField, byte: int, inside: int) -> ByteMeaning:
    entry, dim = row.coordinate_of(byte)
    width = max(1, field.element.bits // 8)
    dims = max(1, 8 // field.element.bits)
    return ByteMeaning(ByteRole.VALUE, entry, field.name, dim, dims, inside % width)


# FlashMLA MODEL1, vLLM fp8_ds_mla for V4: 7 scales of 64 dims and one zero byte (vLLM csrc,
# FlashMLA tests/quant.py).
V4_FP8 = CacheRow(
    name="v4_fp8",
    values=(ValueField("nope", E4M3, 0, 448, 0), ValueField("rope", BF16, 448, 64, 448)),
    scale=ScaleField(UE8M0, block=64, count=7, start=0),
    data_bytes=576,
    footer_bytes=8,
    alignment=576,
)
# V3.2 fp8_ds_mla: values, four fp32 scales, RoPE, token after token (FlashMLA README).
V32_FP8 = CacheRow(
    name="v32_fp8",
    values=(ValueField("nope", E4M3, 0, 512, 0), ValueField("rope", BF16, 512, 64, 528)),
    scale=ScaleField(FP32, block=128, count=4, start=512),
    data_bytes=656,
    footer_bytes=0,
    alignment=1,
)
# vLLM pads the indexer pages of V4 like those of the main cache; V3.2 does not pad (pass 1).
INDEXER_FP8 = CacheRow(
    name="indexer_fp8",
    values=(ValueField("key", E4M3, 0, 128, 0),),
    scale=ScaleField(FP32, block=128, count=1, start=0),
    data_bytes=128,
    footer_bytes=4,
    alignment=576,
)
# The same bytes as DeepGEMM reads them on SM100: four UE8M0, which a writer makes equal.
INDEXER_FP8_UE8M0 = CacheRow(
    name="indexer_fp8_ue8m0",
    values=(ValueField("key", E4M3, 0, 128, 0),),
    scale=ScaleField(UE8M0, block=32, count=4, start=0),
    data_bytes=128,
    footer_bytes=4,
    alignment=576,
)
# DeepGEMM and vLLM; its page padding is published nowhere, so none is assumed.
INDEXER_MXFP4 = CacheRow(
    name="indexer_mxfp4",
    values=(ValueField("key", E2M1, 0, 128, 0),),
    scale=ScaleField(UE8M0, block=32, count=4, start=0),
    data_bytes=64,
    footer_bytes=4,
    alignment=1,
)
# V4.1 compressed KV, RoPE dims in FP4 as well, no tensor scale: FlashMLA and vLLM keep an entry
# together, FlashInfer splits the page (experimental/deepseek_v41/cache.py).
V41_NVFP4 = CacheRow(
    name="v41_nvfp4",
    values=(ValueField("latent", E2M1, 0, 512, 0),),
    scale=ScaleField(E4M3, block=16, count=32, start=256),
    data_bytes=288,
    footer_bytes=0,
    alignment=512,
)
V41_NVFP4_PAGED = CacheRow(
    name="v41_nvfp4_paged",
    values=(ValueField("latent", E2M1, 0, 512, 0),),
    scale=ScaleField(E4M3, block=16, count=32, start=0),
    data_bytes=256,
    footer_bytes=32,
    alignment=512,
)
# FlashInfer mla/_sparse_mla_nvfp4_sm120.py: per page 352 B data parts, then 32 B scale parts.
V4_NVFP4 = CacheRow(
    name="v4_nvfp4",
    values=(ValueField("nope", E2M1, 0, 448, 0), ValueField("rope", BF16, 448, 64, 224)),
    scale=ScaleField(E4M3, block=16, count=28, start=0),
    data_bytes=352,
    footer_bytes=32,
    alignment=1,
)

CACHE_ROWS: Mapping[str, CacheRow] = MappingProxyType(
    {
        row.name: row
        for row in (
            V4_FP8,
            V32_FP8,
            INDEXER_FP8,
            INDEXER_FP8_UE8M0,
            INDEXER_MXFP4,
            V41_NVFP4,
            V41_NVFP4_PAGED,
            V4_NVFP4,
        )
    }
)


def cache_row(name: str) -> CacheRow:
    """Return the entry format called `name`; raise with the nearest known names otherwise."""
    if name not in CACHE_ROWS:
        raise UnknownName.among("cache row", name, CACHE_ROWS)
    return CACHE_ROWS[name]


def split_page(
    page_S: Tensor, row: CacheRow, entries: int, alignment: int | None = None
) -> dict[str, Tensor]:
    """Split a page [..., S] into bytes [..., B, size] of each value field and of "scale"."""
    require_bytes("page", page_S)
    if entries < 0 or (alignment is not None and alignment < 1):
        raise InvalidArgument(
            f"entries and alignment of a {row.name} page",
            (entries, alignment),
            "entries of at least 0, an alignment of at least 1",
            "Pass 1 where pages are not aligned.",
        )
    size = row.page_bytes(entries, alignment)
    if page_S.ndim == 0 or page_S.shape[-1] != size:
        raise LayoutMismatch(
            f"page of {entries} {row.name} entries",
            tuple(page_S.shape),
            f"a last extent of {size} bytes",
            "Check entries a page, the entry format and the page alignment.",
        )
    # The views below copy nothing.
    split = entries * row.data_bytes
    data = page_S[..., :split].view(*page_S.shape[:-1], entries, row.data_bytes)
    parts = {f.name: data[..., f.start : f.start + f.size] for f in row.values}
    scales = data
    if row.footer_bytes:
        footer = page_S[..., split : entries * row.entry_bytes]
        scales = footer.view(*page_S.shape[:-1], entries, row.footer_bytes)
    parts["scale"] = scales[..., row.scale.start : row.scale.start + row.scale.size]
    return parts


def join_page(parts: Mapping[str, Tensor], row: CacheRow, alignment: int | None = None) -> Tensor:
    """Join the parts that split_page returns; all padding is zero."""
    wanted = {field.name: field.size for field in row.values} | {"scale": row.scale.size}
    if set(parts) != set(wanted):
        raise LayoutMismatch(
            f"parts of a {row.name} page",
            sorted(parts),
            f"exactly {', '.join(sorted(wanted))}",
            "Pass bytes for every field, and for no other.",
        )
    *leading, entries, _ = parts["scale"].shape
    for name, size in wanted.items():
        require_bytes(name, parts[name])
        if tuple(parts[name].shape) != (*leading, entries, size):
            raise ShapeMismatch(
                f"{name} bytes of {row.name}",
                tuple(parts[name].shape),
                f"{(*leading, entries, size)}",
                "Pack the codes to bytes first; all parts hold the same entries.",
            )
    page = parts["scale"].new_zeros((*leading, row.page_bytes(entries, alignment)))
    for name, part in split_page(page, row, entries, alignment).items():
        part.copy_(parts[name])  # a view of the page
    return page


def decode_page(
    page_S: Tensor, row: CacheRow, entries: int, alignment: int | None = None
) -> Tensor:
    """Return the float32 numbers [..., B, D] that a page holds: value times decode scale."""
    parts = split_page(page_S, row, entries, alignment)
    values = [_decode_bytes(parts[field.name], field.element) for field in row.values]
    value_BD = torch.cat(values, dim=-1)
    scale_BD = _decode_bytes(parts["scale"], row.scale.element)
    scale_BD = scale_BD.repeat_interleave(row.scale.block, dim=-1)
    value_BD[..., : row.scaled_dims] *= scale_BD
    return value_BD


def _decode_bytes(bytes_S: Tensor, fmt: ElementFormat) -> Tensor:
    """Decode stored bytes, little endian or two nibbles each, to float32."""
    if fmt.bits < 8:
        return decode_array(unpack_nibbles(bytes_S), fmt)
    item = fmt.bits // 8
    octets = bytes_S.view(*bytes_S.shape[:-1], bytes_S.shape[-1] // item, item).to(code_dtype(fmt))
    code = octets[..., 0]
    for place in range(1, item):
        code = code + (octets[..., place] << (8 * place))
    return decode_array(code, fmt)
