"""The walk over tiles, as arithmetic: every tile once, groups down first, whatever the grid."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.needs("cutlass")


def walked(tiles: tuple[int, int], group: int, clusters: int) -> list[tuple[int, int]]:
    from degarble.kernels.gemm.schedule import tile_of  # noqa: PLC0415

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
