"""Cache pages: every byte claimed once or padding, maps equal slices, published sizes, decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
    UnknownName,
)
from degarble.harness.formats.cache_rows import (
    CACHE_ROWS,
    INDEXER_FP8,
    INDEXER_FP8_UE8M0,
    INDEXER_MXFP4,
    V4_FP8,
    V4_NVFP4,
    V32_FP8,
    V41_NVFP4,
    V41_NVFP4_PAGED,
    ByteMeaning,
    ByteRole,
    CacheRow,
    cache_row,
    decode_page,
    join_page,
    split_page,
)

if TYPE_CHECKING:
    from torch import Tensor

    from degarble.harness.formats.cache_rows import ValueField

ROWS = list(CACHE_ROWS.values())
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
by_entries = pytest.mark.parametrize("entries", [1, 2, 3, 64])

# (row, bytes an entry, dims, padding bytes an entry, {entries: page bytes}); sources beside the
# records. 37,440 and 1,728 and 8,640 are the sizes that vLLM allocates.
PUBLISHED = [
    (V4_FP8, 584, 512, 1, {64: 37_440, 2: 1_728}),
    (V32_FP8, 656, 576, 0, {64: 41_984}),
    (INDEXER_FP8, 132, 128, 0, {64: 8_640}),
    (INDEXER_FP8_UE8M0, 132, 128, 0, {64: 8_640}),
    (INDEXER_MXFP4, 68, 128, 0, {64: 4_352}),
    (V41_NVFP4, 288, 512, 0, {64: 18_432}),
    (V41_NVFP4_PAGED, 288, 512, 0, {64: 18_432}),
    (V4_NVFP4, 384, 512, 4, {64: 24_576, 2: 768}),
]


def random_page(row: CacheRow, entries: int, seed: int) -> Tensor:
    """Return two pages of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, 256, (2, row.page_bytes(entries)), dtype=torch.uint8, generator=generator
    )


@pytest.mark.parametrize(
    ("row", "entry_bytes", "dims", "padding", "pages"),
    PUBLISHED,
    ids=lambda x: getattr(x, "name", ""),
)
def test_sizes_are_the_published_ones(
    row: CacheRow, entry_bytes: int, dims: int, padding: int, pages: dict[int, int]
) -> None:
    assert (row.entry_bytes, row.dims) == (entry_bytes, dims)
    claimed = sum(field.size for field in row.values) + row.scale.size
    assert row.entry_bytes - claimed == padding
    assert {entries: row.page_bytes(entries) for entries in pages} == pages


def test_alignment_is_the_callers_where_it_is_named() -> None:
    assert INDEXER_FP8.page_bytes(64, alignment=1) == 8_448  # V3.2 does not pad
    page = torch.zeros(8_448, dtype=torch.uint8)
    assert split_page(page, INDEXER_FP8, 64, alignment=1)["key"].shape == (64, 128)


def claims(row: CacheRow, entries: int) -> Counter[int]:
    """Count how often each byte of a page is claimed by a value or a scale."""
    claimed: Counter[int] = Counter()
    for entry in range(entries):
        for field in row.values:
            for dim in range(field.first_dim, field.first_dim + field.dims, per_byte(field)):
                first = row.byte_of(entry, dim)
                claimed.update(range(first, first + max(1, field.element.bits // 8)))
        for index in range(row.scale.count):
            first = row.scale_byte_of(entry, index * row.scale.block, entries)
            claimed.update(range(first, first + row.scale.item))
    return claimed


def per_byte(field: ValueField) -> int:
    return max(1, 8 // field.element.bits)


@by_row
@pytest.mark.parametrize("entries", [1, 3])
def test_every_byte_is_claimed_once_or_is_padding(row: CacheRow, entries: int) -> None:
    claimed = claims(row, entries)
    assert set(claimed.values()) == {1}
    for byte in range(row.page_bytes(entries)):
        is_padding = row.describe(byte, entries).role is ByteRole.PADDING
        assert is_padding == (byte not in claimed), byte


def test_a_planted_overlap_is_detected() -> None:
    rope = V4_FP8.values[1]
    planted = replace(V4_FP8, values=(V4_FP8.values[0], replace(rope, start=rope.start - 2)))
    assert max(claims(V4_FP8, 2).values()) == 1
    assert max(claims(planted, 2).values()) == 2


@by_row
@pytest.mark.parametrize("entries", [1, 3])
def test_describe_inverts_the_maps(row: CacheRow, entries: int) -> None:
    for entry in range(entries):
        for dim in range(row.dims):
            byte = row.byte_of(entry, dim)
            meaning = row.describe(byte, entries)
            assert (meaning.role, meaning.entry) == (ByteRole.VALUE, entry)
            assert meaning.first_dim is not None
            assert meaning.first_dim <= dim < meaning.first_dim + meaning.dims
            assert row.coordinate_of(byte) == (entry, meaning.first_dim)
        for dim in range(row.scaled_dims):
            byte = row.scale_byte_of(entry, dim, entries)
            meaning = row.describe(byte, entries)
            assert (meaning.role, meaning.entry) == (ByteRole.SCALE, entry)
            assert meaning.first_dim == dim // row.scale.block * row.scale.block
            assert row.scale_coordinate_of(byte, entries) == (entry, dim // row.scale.block)


@by_row
@by_entries
def test_ints_and_tensors_get_the_same_bytes(row: CacheRow, entries: int) -> None:
    last = entries - 1
    dims = torch.arange(row.dims)
    entry = torch.full_like(dims, last)
    expected = [row.byte_of(last, dim) for dim in range(row.dims)]
    byte: Tensor = row.byte_of(entry, dims)
    assert byte.tolist() == expected
    back_entry, back_dim = row.coordinate_of(byte)
    assert (back_entry == last).all()
    assert back_dim.tolist() == [row.coordinate_of(b)[1] for b in expected]
    scaled = torch.arange(row.scaled_dims)
    assert row.scale_byte_of(last, scaled, entries).tolist() == [
        row.scale_byte_of(last, dim, entries) for dim in range(row.scaled_dims)
    ]


@by_row
@by_entries
def test_the_maps_equal_the_slices(row: CacheRow, entries: int, seed: int) -> None:
    page = random_page(row, entries, seed)
    parts = split_page(page, row, entries)
    for field in row.values:
        item = max(1, field.element.bits // 8)
        dims = torch.arange(field.first_dim, field.first_dim + field.dims, per_byte(field))
        for entry in (0, entries - 1):
            byte = row.byte_of(torch.full_like(dims, entry), dims)
            for place in range(item):
                taken = parts[field.name][:, entry, place::item]
                assert torch.equal(page[:, byte + place], taken)
    dims = torch.arange(0, row.scaled_dims, row.scale.block)
    byte = row.scale_byte_of(entries - 1, dims, entries)
    assert torch.equal(page[:, byte], parts["scale"][:, -1, :: row.scale.item])


@by_row
@by_entries
def test_joining_restores_all_but_the_padding(row: CacheRow, entries: int, seed: int) -> None:
    page = random_page(row, entries, seed)
    joined = join_page(split_page(page, row, entries), row)
    padding = [
        row.describe(byte, entries).role is ByteRole.PADDING
        for byte in range(row.page_bytes(entries))
    ]
    assert torch.equal(joined, page.masked_fill(torch.tensor(padding), 0))


def test_landmarks_of_the_pages() -> None:
    assert V4_FP8.byte_of(1, 447) == 576 + 447
    assert V4_FP8.byte_of(1, 448) == 576 + 448
    assert V4_FP8.byte_of(1, 511) == 576 + 574
    assert V4_FP8.scale_byte_of(1, 447, 64) == 64 * 576 + 8 + 6
    assert V4_FP8.describe(64 * 576 + 7, 64) == ByteMeaning(ByteRole.PADDING, 0)
    assert V4_FP8.describe(37_376, 64) == ByteMeaning(ByteRole.PADDING)
    assert V4_FP8.describe(449, 64) == ByteMeaning(ByteRole.VALUE, 0, "rope", 448, 1, 1)
    assert V32_FP8.scale_byte_of(2, 511, 64) == 2 * 656 + 512 + 12
    assert V32_FP8.byte_of(2, 512) == 2 * 656 + 528
    assert INDEXER_FP8.scale_byte_of(5, 0, 64) == 64 * 128 + 20
    assert INDEXER_MXFP4.byte_of(1, 127) == 64 + 63
    assert V41_NVFP4.scale_byte_of(1, 511, 64) == 288 + 256 + 31
    assert V41_NVFP4_PAGED.scale_byte_of(1, 511, 64) == 64 * 256 + 32 + 31
    assert V4_NVFP4.byte_of(0, 448) == 224
    assert V4_NVFP4.scale_byte_of(1, 447, 64) == 64 * 352 + 32 + 27
    meaning = V41_NVFP4.describe(288 + 3, 2)
    assert meaning == ByteMeaning(ByteRole.VALUE, 1, "latent", 6, 2, 0)


def test_a_v4_page_decodes_as_torch_reads_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nope = torch.randn(3, 448, generator=generator).to(torch.float8_e4m3fn)
    rope = torch.randn(3, 64, generator=generator).bfloat16()
    scale = torch.randint(100, 140, (3, 7), dtype=torch.uint8, generator=generator)
    parts = {"nope": nope.view(torch.uint8), "rope": rope.view(torch.uint8), "scale": scale}
    decoded = decode_page(join_page(parts, V4_FP8), V4_FP8, 3)
    factor = scale.view(torch.float8_e8m0fnu).float().repeat_interleave(64, dim=-1)
    assert torch.equal(decoded, torch.cat([nope.float() * factor, rope.float()], dim=-1))


def test_a_v32_page_decodes_with_its_fp32_scales(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nope = torch.randn(2, 512, generator=generator).to(torch.float8_e4m3fn)
    rope = torch.randn(2, 64, generator=generator).bfloat16()
    scale = torch.rand(2, 4, generator=generator)
    parts = {
        "nope": nope.view(torch.uint8),
        "rope": rope.view(torch.uint8),
        "scale": scale.view(torch.uint8),
    }
    decoded = decode_page(join_page(parts, V32_FP8), V32_FP8, 2)
    factor = scale.repeat_interleave(128, dim=-1)
    assert torch.equal(decoded, torch.cat([nope.float() * factor, rope.float()], dim=-1))


@pytest.mark.parametrize("row", [V41_NVFP4, V41_NVFP4_PAGED, V4_NVFP4], ids=lambda row: row.name)
def test_an_nvfp4_page_decodes_low_nibble_first(row: CacheRow) -> None:
    page = torch.zeros(row.page_bytes(2), dtype=torch.uint8)
    page[row.byte_of(1, 16)] = 0xF1  # dim 16: code 1 = 0.5, dim 17: code 15 = -6
    page[row.scale_byte_of(1, 16, 2)] = 0x40  # 2.0
    decoded = decode_page(page, row, 2)
    assert decoded[1, 16:18].tolist() == [1.0, -12.0]
    assert int((decoded != 0).sum()) == 2


def test_both_readings_of_the_indexer_scale_agree_on_powers_of_two() -> None:
    page = torch.zeros(INDEXER_FP8.page_bytes(2), dtype=torch.uint8)
    page[: 2 * 128] = 0x38  # 1.0
    words = page.clone()
    words[256:264] = torch.tensor([0.25, 8.0]).view(torch.uint8)
    octets = page.clone()
    octets[256:264] = torch.tensor([125] * 4 + [130] * 4, dtype=torch.uint8)
    assert torch.equal(
        decode_page(words, INDEXER_FP8, 2), decode_page(octets, INDEXER_FP8_UE8M0, 2)
    )


def test_reading_a_page_as_its_twin_format_does_not_return_its_numbers(seed: int) -> None:
    page = random_page(V41_NVFP4, 64, seed) & 0x77  # no NaN scale, no negative
    right, wrong = decode_page(page, V41_NVFP4, 64), decode_page(page, V41_NVFP4_PAGED, 64)
    assert (right != wrong).float().mean() > 0.5


def test_what_is_no_page_is_refused() -> None:
    page = torch.zeros(37_440, dtype=torch.uint8)
    with pytest.raises(LayoutMismatch, match="a last extent of 36864 bytes"):
        split_page(page, V4_FP8, 63)
    with pytest.raises(DtypeMismatch, match="never cast"):
        split_page(page.float(), V4_FP8, 64)
    with pytest.raises(InvalidArgument, match="not negative"):
        V4_FP8.describe(-1, 64)
    parts = split_page(page, V4_FP8, 64)
    with pytest.raises(LayoutMismatch, match="exactly nope, rope, scale"):
        join_page({"nope": parts["nope"]}, V4_FP8)
    with pytest.raises(ShapeMismatch, match="nope bytes of v4_fp8"):
        join_page({**parts, "nope": parts["nope"][:3]}, V4_FP8)
    with pytest.raises(UnknownName, match="Did you mean"):
        cache_row("v4_fp4")
    assert cache_row("v4_nvfp4") is V4_NVFP4


@by_row
def test_a_page_without_entries_decodes_to_nothing(row: CacheRow) -> None:
    assert decode_page(torch.zeros(0, dtype=torch.uint8), row, 0).shape == (0, row.dims)


# -1 entry of 132 bytes, rounded up to a multiple of 576, is a page of 0 bytes.
@pytest.mark.parametrize(("entries", "alignment"), [(-1, None), (1, 0), (1, -7)])
def test_sizes_that_cannot_be_meant_are_refused(entries: int, alignment: int | None) -> None:
    page = torch.zeros(max(0, entries) * INDEXER_FP8.entry_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="entries and alignment"):
        split_page(page, INDEXER_FP8, entries, alignment)
