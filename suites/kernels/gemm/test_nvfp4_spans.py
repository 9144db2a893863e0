"""Stages of several 64 numbers of K, as arithmetic: where codes, scales and numbers lie."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.formats.layouts import offset_128x4

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


@pytest.fixture
def spans() -> ModuleType:
    return import_module("degarble.kernels.moe.few_rows")


SWIZZLES = {"K_SW32": 1, "K_SW64": 2, "K_SW128": 3}  # bits of 16 bytes that rows of 128 change


def staged(element: str, rows: int, columns: int, swizzle: str) -> list[list[int]]:
    """Return at which byte CuTe has each element of a stage; PTX ISA 9.1, 5.5.6: its swizzle."""
    cutlass = import_module("cutlass")
    ir = import_module("cutlass._mlir").ir
    wgmma = import_module("degarble.kernels.gemm.mainloop")
    of, width = getattr(cutlass, element), getattr(cutlass, element).width // 8
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            chosen = getattr(wgmma.Swizzle, swizzle)
            layout: Any = wgmma.staged_layout(of, rows, columns, 2, chosen).outer
            places = [[layout((r, c, 0)) for c in range(columns)] for r in range(rows)]
    assert all(type(place) is int for row in places for place in row), "CuTe did not fold it"
    bits = (1 << SWIZZLES[swizzle]) - 1
    return [[place * width ^ (place * width >> 7 & bits) << 4 for place in row] for row in places]


@pytest.mark.parametrize(("count", "swizzle"), [(1, "K_SW32"), (2, "K_SW64"), (4, "K_SW128")])
def test_codes_lie_where_tma_writes_them(spans: ModuleType, count: int, swizzle: str) -> None:
    words = 8 * count
    places = staged("Uint32", 32, words, swizzle)
    for row in range(32):
        for word in range(words):
            chunk = spans.chunk_of_codes(row, word // 4, count)
            assert places[row][word] == chunk * 16 + word % 4 * 4


def test_one_span_is_the_stage_of_other_tiles(spans: ModuleType) -> None:
    stages = import_module("degarble.kernels.gemm.nvfp4_stages")
    for row in range(256):
        assert spans.word_of_scales(row, 0, 1) == stages.word_of_scales(row)
        for chunk in range(2):
            assert spans.chunk_of_codes(row, chunk, 1) == stages.chunk_of_codes(row, chunk)


@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (32, 256), (64, 128)])
def test_decoded_numbers_lie_where_wgmma_reads_them(
    spans: ModuleType, rows: int, columns: int
) -> None:
    places = staged("BFloat16", rows, columns, "K_SW128")
    for row in range(rows):
        for column in range(columns):
            span, within = divmod(column, 64)
            chunk = spans.chunk_of_numbers(row, within // 8, span, rows)
            assert places[row][column] == chunk * 16 + within % 8 * 2


def test_scales_of_a_stage_are_whole_tiles_side_by_side(spans: ModuleType) -> None:
    for row in (0, 7, 31, 32, 100, 127, 128, 200, 255):
        for count in (2, 4):
            for span in range(count):
                want = offset_128x4(row, 4 * span, 4 * count)
                assert spans.word_of_scales(row, span, count) * 4 == want


@pytest.mark.parametrize("count", [1, 2, 4])
def test_what_is_eight_rows_or_a_span_away_lies_where_the_reads_say(
    spans: ModuleType, count: int
) -> None:
    rows = [16 * group + g for group in range(16) for g in range(8)]
    for row in rows:
        of_scales = spans.word_of_scales(row, 0, count)
        for span in range(count):
            for i in range(2):
                got = of_scales + 128 * span + 32 * i
                assert got == spans.word_of_scales(row + 8 * i, span, count)
        for chunk in range(2 * count):
            below = spans.chunk_of_codes(row, chunk, count) + 2 * count * spans.SWIZZLED_ROWS
            assert below == spans.chunk_of_codes(row + 8, chunk, count)
