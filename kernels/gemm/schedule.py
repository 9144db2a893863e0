"""The static persistent tile schedule: which tile a thread block computes next.

`tile_of` maps a number to a tile. Tiles are numbered down groups of `tactic.group` rows of tiles,
so that concurrent tiles share rows of B in the L2 cache. `Walk` holds a thread block's numbers:
first, first + step, ... below total. Every role of a kernel iterates over the same numbers by
itself: `for number in cutlass.range(walk.first, walk.total, walk.step, unroll=1)`, then `tile_at`.

A cluster is one unit of the walk: its thread blocks take neighbouring tiles. The last tiles may lie
outside D, where loads return zeros and stores write nothing.

`tile_of` runs on the host as well: it uses // % * + - on non-negative integers only.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from degarble.harness.formats.layouts import ceil_div
from degarble.kernels.gemm.problem import Tactic


class Walk(NamedTuple):
    """The tile numbers of a thread block, and what maps a number to a tile."""

    first: Any
    total: Any
    step: Any
    tiles: tuple[Any, Any]  # of clusters, along M and N
    place: tuple[Any, Any]  # of this thread block in its cluster
    tactic: Tactic
    experts: Any = None  # of each row of tiles of clusters, in memory; None: all of D has one B


def tile_of(number: Any, tiles: tuple[Any, Any], group: int, least: Any = min) -> tuple[Any, Any]:
    """Return (row, column) of a tile: groups of `group` rows, column-major within a group.

    `least` is the minimum of two integers; inside a kernel it is cutlass.min.
    """
    rows, columns = tiles
    first = number // (group * columns) * group
    height = least(rows - first, group)
    within = number - first * columns
    return first + within % height, within // height


def walk_of(extents: tuple[Any, Any], tactic: Tactic, experts: Any = None) -> Walk:
    """Return the walk of this thread block over D of M x N, with the grid of gemm.problem.

    Where M is read from memory, the grid may exceed the tiles; surplus thread blocks do nothing.
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
    """Return this thread block's tile, in tiles of D along M and N, and its expert if any.

    A number past the last tile gives a tile that must not be used; reading its expert is safe.
    """
    row, column = tile_of(Int32(number), walk.tiles, walk.tactic.group, cutlass.min)
    tactic, (in_row, in_column) = walk.tactic, walk.place
    row, column = row * tactic.cluster_rows + in_row, column * tactic.cluster_columns + in_column
    if walk.experts is None:
        return row, column
    # A cluster's rows of tiles have one expert.
    of_cluster = row if tactic.cluster_rows == 1 else row // tactic.cluster_rows
    # Clamped, because a number past the last tile would read outside the list of experts.
    known = cutlass.max(cutlass.min(of_cluster, walk.tiles[0] - 1), 0)
    return row, column, Int32(walk.experts[known])
