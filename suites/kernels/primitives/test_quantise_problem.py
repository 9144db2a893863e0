"""Quantising, as arithmetic: every block has one thread, padding included; bytes; refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.primitives import quantise_problem as facts
from degarble.kernels.primitives.quantise_problem import (
    LAYOUTS,
    SWIGLU,
    TACTICS,
    QuantiseProblem,
    QuantiseTactic,
    choose_form,
    choose_tactic,
    grid,
    place_of,
    registers_allowed,
    tiles,
)


def walked(problem: QuantiseProblem, tactic: QuantiseTactic) -> list[tuple[int, int]]:
    """Every (row, block) that a launch visits, as the kernel computes it."""
    tile_rows, _ = tiles(problem)
    walkers, columns, _ = grid(problem, tactic, 3)
    visited = []
    for first in range(walkers):
        for tile in range(first, tile_rows, walkers):
            for column in range(columns):
                for thread in range(facts.THREADS):
                    row, block = place_of(tile, thread % 32, thread // 32, problem.layout)
                    visited.append((row, column * facts.TILE_BLOCKS + block))
    return visited


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("walkers", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (9, 528), (129, 80), (256, 1024)])
def test_every_scale_byte_has_one_thread(
    layout: str, walkers: int, rows: int, columns: int
) -> None:
    problem = QuantiseProblem(rows, columns, layout)
    visited = walked(problem, QuantiseTactic(float("inf"), walkers))
    assert len(set(visited)) == len(visited)
    record = problem.scale_layout
    high = -(-rows // record.row_tile) * record.row_tile
    wide = -(-problem.blocks // record.column_tile) * record.column_tile
    written = [
        record.offset_of(row, block, rows, problem.blocks)
        for row, block in visited
        if row < high and block < wide
    ]
    assert sorted(written) == list(range(problem.scale_bytes))
    inside = {(row, block) for row, block in visited if row < rows and block < problem.blocks}
    assert len(inside) == rows * problem.blocks


@pytest.mark.parametrize("layout", ["128x4", "8x4"])
def test_a_warp_fills_one_sector_of_scales(layout: str) -> None:
    record = LAYOUTS[layout]
    for warp in range(facts.WARPS):
        places = [place_of(5, lane, warp, layout) for lane in range(32)]
        offsets = sorted(record.offset_of(row, block, 256, 64) for row, block in places)
        assert offsets[0] % 32 == 0
        assert offsets == list(range(offsets[0], offsets[0] + 32))


def test_bytes_at_the_shape_of_the_bench() -> None:
    problem = QuantiseProblem(8192, 7168)
    assert problem.scale_bytes == 8192 * 448
    assert problem.bytes_moved == 117_440_512 + 29_360_128 + 3_670_016
    fused = QuantiseProblem(8192, 7168, source=SWIGLU.name, limit=10.0)
    assert fused.bytes_moved - problem.bytes_moved == 117_440_512
    assert QuantiseProblem(1, 16).scale_bytes == 512
    assert QuantiseProblem(1, 16, "8x4").scale_bytes == 32
    assert QuantiseProblem(1, 16, "linear").scale_bytes == 1


def test_grid_and_table() -> None:
    problem = QuantiseProblem(8192, 7168)
    assert tiles(problem) == (1024, 14)
    assert grid(problem, QuantiseTactic(float("inf"), 8), 132) == (75, 14, 1)
    assert grid(problem, QuantiseTactic(float("inf"), 0), 132) == (1024, 14, 1)
    assert choose_tactic(problem) is TACTICS[-1]
    assert choose_tactic(QuantiseProblem(1, 7168)) is TACTICS[0]
    assert grid(QuantiseProblem(8, 16, "8x4"), TACTICS[-1], 132) == (1, 1, 1)
    assert [registers_allowed(blocks) for blocks in (8, 5, 1)] == [32, 48, 255]


def test_extents_are_no_part_of_a_form() -> None:
    problems = [QuantiseProblem(m, k) for m in (1, 5000) for k in (16, 7168)]
    assert len({choose_form(problem, "sm_90a") for problem in problems}) == 1
    assert choose_form(QuantiseProblem(1, 16, experts=3), "sm_90a").by_expert


def test_refuses_by_name() -> None:
    for rows, columns in ((4, 24), (4, 0), (-1, 16), (1 << 31, 16)):
        with pytest.raises(ShapeMismatch, match="matrix to quantise"):
            QuantiseProblem(rows, columns)
    with pytest.raises(UnknownName, match="128x4"):
        QuantiseProblem(1, 16, "128x5")
    with pytest.raises(UnknownName, match="scale layout of a kernel"):
        QuantiseProblem(1, 16, "packed_mn")
    with pytest.raises(UnknownName, match="swiglu"):
        QuantiseProblem(1, 16, source="swigl")
    for source, limit in (("values", 10.0), ("swiglu", 0.0), ("swiglu", 10.01)):
        with pytest.raises(InvalidArgument, match="limit"):
            QuantiseProblem(1, 16, source=source, limit=limit)
