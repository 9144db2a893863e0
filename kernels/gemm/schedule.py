"""Which tile a thread block computes next: a walk that is known before the kernel starts.

Owns `tile_of`, the map from a number to a tile, and `Walk`, by which every role of a kernel goes
through the same numbers on its own: first, first + step, ... below total. Tiles are numbered down
groups of so many rows of tiles, so that what runs at once shares rows of B in the L2 cache.

How a form plugs in: `walk = walk_of(extents, tactic)` before the roles part, then in each of them
`for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1)`, and in the loop
`tile_at(walk, number)`: the tile of this thread block, in units of tiles along M and N. A cluster
is a unit of the walk: its thread blocks take neighbouring tiles; the last may lie beyond D, where
loads bring zeros and stores write nothing.

Refuses nothing: a kernel cannot. Kept honest by suites/kernels/gemm/test_schedule.py, which
walks all tiles on the CPU: `tile_of` uses // % * + - on integers that are not negative.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm.problem import Tactic


class Walk(NamedTuple):
    """Numbers of a thread block's tiles, and what turns a number into a tile."""

    first: Any
    total: Any
    step: Any
    tiles: tuple[Any, Any]  # of clusters, along M and N
    place: tuple[Any, Any]  # of this thread block in its cluster
    tactic: Tactic
    experts: Any = None  # of each row of tiles of clusters, in memory; None: all of D has one B


def tile_of(number: Any, tiles: tuple[Any, Any], group: int, least: Any = min) -> tuple[Any, Any]:
    """Return (row, column) of a tile: groups of `group` rows, within a group down first.

    `least` is the smaller of two integers; inside a kernel it is cutlass.min.
    """
    rows, columns = tiles
    first = number // (group * columns) * group
    height = least(rows - first, group)
    within = number - first * columns
    return first + within % height, within // height


def walk_of(extents: tuple[Any, Any], tactic: Tactic, experts: Any = None) -> Walk:
    """Return the walk of this thread block over D of M x N; the grid is that of gemm_problem.

    Where M is a number in memory, the grid may be larger: who has no tile has nothing to do.
    """
    rows, columns = extents
    tiles = (
        ceil_div(rows, tactic.rows * tactic.cluster_rows),
        ceil_div(columns, tactic.columns * tactic.cluster_columns),
    )
    in_row, in_column, first = cute.arch.block_idx()
    _, _, step = cute.arch.grid_dim()
    return Walk(first, tiles[0] * tiles[1], step, tiles, (in_row, in_column), tactic, experts)


def tile_at(walk: Walk, number: Any) -> tuple[Any, ...]:
    """Return the tile of this thread block, in units of tiles of D along M and N, and its expert.

    A number beyond the last tile yields a place that nobody may use; reading its expert is safe.
    """
    row, column = tile_of(Int32(number), walk.tiles, walk.tactic.group, cutlass.min)
    tactic, (in_row, in_column) = walk.tactic, walk.place
    row, column = row * tactic.cluster_rows + in_row, column * tactic.cluster_columns + in_column
    if walk.experts is None:
        return row, column
    # A cluster's rows of tiles have one expert.
    of_cluster = row if tactic.cluster_rows == 1 else row // tactic.cluster_rows
    known = cutlass.max(cutlass.min(of_cluster, walk.tiles[0] - 1), 0)
    return row, column, Int32(walk.experts[known])
