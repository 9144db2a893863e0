"""NVFP4 in stages, as arithmetic: the order of K, where codes and scales lie, what is kept."""

from __future__ import annotations

import pytest

from degarble.harness.formats.layouts import offset_128x4

pytestmark = pytest.mark.needs("cutlass")


def test_k_is_a_permutation_that_keeps_four_codes_of_a_block_in_a_step() -> None:
    from degarble.kernels.gemm.nvfp4_stages import BLOCK, order_of_k  # noqa: PLC0415

    order = order_of_k()
    assert sorted(order) == list(range(64))
    for step in range(4):
        places = order[16 * step : 16 * step + 16]
        blocks = [k // BLOCK for k in places]
        assert blocks == 2 * [0, 0, 1, 1, 2, 2, 3, 3]  # columns 2 q, 2 q + 1 and 8 more: block q
    assert order[:4] == [0, 4, 16, 20]


@pytest.mark.parametrize("row", [0, 5, 31, 32, 100, 127, 128, 200, 255])
def test_scales_lie_where_128x4_says(row: int) -> None:
    from degarble.kernels.gemm.nvfp4_stages import word_of_scales  # noqa: PLC0415

    assert word_of_scales(row) * 4 == offset_128x4(row, 0, 4)


def test_swizzles_are_permutations_of_a_stage() -> None:
    from degarble.kernels.gemm.nvfp4_stages import (  # noqa: PLC0415
        chunk_of_codes,
        chunk_of_numbers,
    )

    codes = [chunk_of_codes(row, chunk) for row in range(64) for chunk in range(2)]
    assert sorted(codes) == list(range(128))
    assert [chunk_of_codes(row, 0) % 2 for row in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 0]
    numbers = [chunk_of_numbers(row, chunk) for row in range(64) for chunk in range(8)]
    assert sorted(numbers) == list(range(512))
    assert [chunk_of_numbers(row, 2) % 8 for row in range(8)] == [2, 3, 0, 1, 6, 7, 4, 5]


def test_products_fit_and_are_restored() -> None:
    from degarble.kernels.gemm import nvfp4_stages as stages  # noqa: PLC0415
    from degarble.kernels.primitives.e2m1_pairs import SCALE_EXPONENT  # noqa: PLC0415

    largest = 6 * 448 * 2.0**stages.PRODUCT_EXPONENT
    assert largest < 2.0**127
    assert 448 * 2.0**SCALE_EXPONENT < 2.0**127
    assert stages.RESTORE * 2.0 ** (2 * stages.PRODUCT_EXPONENT) == 1
