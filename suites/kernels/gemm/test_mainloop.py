"""The parts that GEMM kernels share, as arithmetic: tile schedule, warpgroups, NVFP4 stages."""

from __future__ import annotations

import pytest

from degarble.harness.formats.layouts import offset_128x4
from degarble.kernels.gemm import problem as facts

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# The walk over tiles, as arithmetic: every tile once, groups down first, whatever the grid.


def walked(tiles: tuple[int, int], group: int, clusters: int) -> list[tuple[int, int]]:
    from degarble.kernels.gemm.mainloop import tile_of  # noqa: PLC0415

    total = tiles[0] * tiles[1]
    return [
        tile_of(number, tiles, group)
        for first in range(clusters)
        for number in range(first, total, clusters)
    ]


@pytest.mark.parametrize("clusters", [1, 7, 132])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tiles", [(1, 1), (1, 13), (13, 1), (8, 5), (9, 28), (32, 3)])
def test_every_tile_is_computed_once(tiles: tuple[int, int], group: int, clusters: int) -> None:
    seen = walked(tiles, group, clusters)
    every = [(row, column) for row in range(tiles[0]) for column in range(tiles[1])]
    assert sorted(seen) == every


def test_what_runs_at_once_shares_rows_and_columns() -> None:
    at_once = walked((32, 28), group=8, clusters=1)[:64]
    assert {row for row, _ in at_once} == set(range(8))
    assert {column for _, column in at_once} == set(range(8))
    assert walked((32, 28), group=8, clusters=1)[8 * 28] == (8, 0)


# --------------------------------------------------------------------------------------------------
# What the sm_90a forms share, where it is arithmetic: a warpgroup's barrier and its pieces.


def test_barriers_of_warpgroups_are_their_own() -> None:
    from degarble.kernels.gemm.mainloop import FIRST_BARRIER  # noqa: PLC0415

    largest = max(
        facts.consumers(facts.GemmForm(operands, "none", target, tactic))
        for (target, operands), tactics in facts.TACTICS.items()
        for tactic in tactics
        if target == "sm_90a"
    )
    assert FIRST_BARRIER >= 2
    assert FIRST_BARRIER + largest <= 16  # PTX ISA 9.1, barrier: sixteen a thread block


def test_pieces_of_neighbouring_tiles_do_not_overlap() -> None:
    tactic = facts.GemmTactic(1.0, rows=128, columns=256, inner=64)
    seen = [
        (row, column + i)
        for tile in ((0, 0), (0, 1), (1, 0), (1, 1))
        for mine in range(2)
        for row, column in [facts.piece_of(*tile, mine, tactic)]
        for i in range(tactic.columns // facts.PIECE_COLUMNS)
    ]
    assert sorted(seen) == [(row, column) for row in range(4) for column in range(8)]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("columns", [8, 16, 64])
def test_every_number_of_a_direct_tile_is_written_once_and_to_its_place(
    columns: int, swapped: bool
) -> None:
    """Words of two halves as a warpgroup holds, exchanges and writes them."""
    from degarble.kernels.gemm import mainloop  # noqa: PLC0415

    def number_of(row: int, column: int) -> int:
        return 64 * column + row

    def word_of(thread: int, i: int) -> list[int]:
        row, lane = row_of(thread), thread % 4
        row, column = row + i % 2 * 8, i // 2 * 8 + lane * 2  # PTX ISA 9.1, wgmma fragments
        return [number_of(row, column), number_of(row, column + 1)]

    written: dict[tuple[int, int], int] = {}
    for thread in range(128):
        row, lane = row_of(thread), thread % 4
        for i in range(columns // 4):
            halves = word_of(thread, i)
            if swapped:
                both = [*halves, *word_of(thread ^ 4, i)]  # bytes 0 to 3 and 4 to 7
                kind = mainloop.HALVES_OF_PAIR[row % 2]
                halves = [both[(kind & 15) // 2], both[(kind >> 8 & 15) // 2]]
            down, across = mainloop.place_of_word(i, row, lane, swapped)
            assert across % 2 == 0
            for j in range(2):
                assert (down, across + j) not in written
                written[down, across + j] = halves[j]
    places = {(r, c): number_of(r, c) for r in range(64) for c in range(columns)}
    assert written == ({(c, r): n for (r, c), n in places.items()} if swapped else places)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_sum_meets_the_scales_of_its_row_of_a(swapped: bool) -> None:
    from degarble.kernels.gemm.sm90_gemm_fp8_block import factor_of  # noqa: PLC0415

    tactic = facts.GemmTactic(1.0, rows=64, columns=32, inner=128, swapped=swapped, direct=True)
    for number in range(16):
        # PTX ISA 9.1, wgmma: two columns of row g, then of row g + 8, for each eight columns.
        column, row = number // 4 * 8 + number % 2, number // 2 % 2
        columns = [8 * i + j for i in range(4) for j in range(2)]  # of thread 0, in order
        assert factor_of(number, tactic) == (columns.index(column) if swapped else row)


def row_of(thread: int) -> int:
    """Return row g of a thread of a warpgroup."""
    return thread // 32 * 16 + thread % 32 // 4


# --------------------------------------------------------------------------------------------------
# NVFP4 in stages, as arithmetic: the order of K, where codes and scales lie, what is kept.


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
    from degarble.kernels.primitives.e2m1 import (  # noqa: PLC0415
        HALF_SCALE_EXPONENT,
        SCALE_EXPONENT,
    )

    largest = 6 * 448 * 2.0**stages.PRODUCT_EXPONENT
    assert largest < 2.0**127
    assert 448 * 2.0**SCALE_EXPONENT < 2.0**127
    assert stages.RESTORE * 2.0 ** (2 * stages.DECODED_EXPONENT) == 1
    most_of_fp16 = 65_504
    assert most_of_fp16 > 448 * 2.0**HALF_SCALE_EXPONENT
    assert most_of_fp16 > 6 * 448 * 2.0**stages.DECODED_EXPONENT
