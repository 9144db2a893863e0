"""The block formats: facts, extents, and what their shapes refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.harness.formats.number_formats import (
    BLOCK_FORMATS,
    FP8_1X128_F32,
    FP8_128X128_F32,
    FP8_128X128_UE8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    block_format,
    codes_shape,
    scale_shape,
)

if TYPE_CHECKING:
    from degarble.harness.formats.number_formats import BlockFormat

# name: element, scale, block, fp32 scale per tensor, bits of storage per 128 x 128 elements
FACTS = {
    "NVFP4": ("E2M1", "E4M3", (1, 16), True, 128 * 128 * 4 + 128 * 8 * 8),
    "MXFP4": ("E2M1", "UE8M0", (1, 32), False, 128 * 128 * 4 + 128 * 4 * 8),
    "MXFP8": ("E4M3", "UE8M0", (1, 32), False, 128 * 128 * 8 + 128 * 4 * 8),
    "FP8_128X128_F32": ("E4M3", "FP32", (128, 128), False, 128 * 128 * 8 + 32),
    "FP8_128X128_UE8M0": ("E4M3", "UE8M0", (128, 128), False, 128 * 128 * 8 + 8),
    "FP8_1X128_F32": ("E4M3", "FP32", (1, 128), False, 128 * 128 * 8 + 128 * 32),
    "FP8_1X128_UE8M0": ("E4M3", "UE8M0", (1, 128), False, 128 * 128 * 8 + 128 * 8),
}


def test_the_registry_holds_exactly_the_formats_of_the_table() -> None:
    assert set(BLOCK_FORMATS) == set(FACTS)
    assert all(block_format(name) is fmt for name, fmt in BLOCK_FORMATS.items())


@pytest.mark.parametrize("name", FACTS)
def test_facts_and_storage(name: str) -> None:
    element, scale, block, tensor_scale, storage_bits = FACTS[name]
    fmt = BLOCK_FORMATS[name]
    assert (fmt.element.name, fmt.scale.name) == (element, scale)
    assert (fmt.block, fmt.tensor_scale) == (block, tensor_scale)
    rows, columns = codes_shape((128, 128), fmt)
    scale_rows, scale_columns = scale_shape((128, 128), fmt)
    assert rows * columns * 8 + scale_rows * scale_columns * fmt.scale.bits == storage_bits
    assert fmt.packed == (fmt.element.bits == 4)


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UnknownName, match="NVFP4"):
        block_format("NVFP5")


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4, MXFP8, FP8_1X128_F32], ids=lambda fmt: fmt.name)
def test_a_cut_off_block_is_refused_where_the_format_has_none(fmt: BlockFormat) -> None:
    columns = fmt.block[1]
    assert scale_shape((3, 5 * columns), fmt) == (3, 5)
    for wrong in (columns - 1, columns + 1, 5 * columns + columns // 2):
        with pytest.raises(ShapeMismatch, match=f"a multiple of {columns}"):
            scale_shape((3, wrong), fmt)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 128), (1, 1)),
        ((129, 128), (2, 1)),
        ((1, 1), (1, 1)),
        ((576, 7168), (5, 56)),  # kv_a_proj_with_mqa of DeepSeek-V3: 512 + 64 rows
        ((4, 200, 257), (4, 2, 3)),
    ],
)
def test_scales_of_128x128_blocks_count_by_ceiling(
    shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert scale_shape(shape, FP8_128X128_F32) == expected
    assert scale_shape(shape, FP8_128X128_UE8M0) == expected
    assert codes_shape(shape, FP8_128X128_F32) == shape


@pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=lambda fmt: fmt.name)
def test_a_vector_is_refused(fmt: BlockFormat) -> None:
    with pytest.raises(ShapeMismatch, match=r"\[1, K\]"):
        codes_shape((128,), fmt)


def test_no_rows_are_no_mistake() -> None:
    assert codes_shape((0, 64), NVFP4) == (0, 32)
    assert scale_shape((0, 64), NVFP4) == (0, 4)
