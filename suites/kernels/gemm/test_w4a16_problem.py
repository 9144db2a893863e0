"""BF16 times NVFP4, as arithmetic: every weight has one lane, memory fits, bytes; refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.gemm import w4a16_problem as facts
from degarble.kernels.gemm.w4a16_problem import (
    LAYOUTS,
    TACTICS,
    Tactic,
    W4A16Form,
    W4A16Problem,
    choose_form,
    choose_tactic,
    grid,
    rounds_kept,
    row_of,
    scale_offset,
    shared_bytes,
    tiles,
)
from degarble.kernels.runtime.targets import TARGETS

SHAPES = ((8, 32), (24, 96), (576, 7168), (7168, 4096), (8192, 8192), (7168, 18432))


def form_of(problem: W4A16Problem, target: str = "sm_90a") -> W4A16Form:
    return choose_form(problem, choose_tactic(problem), target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("outputs", [8, 24, 200, 1000])
def test_every_output_has_one_place(layout: str, outputs: int) -> None:
    problem = W4A16Problem(1, outputs, 32, layout)
    places = [
        row_of(tile, place, layout) for tile in range(tiles(problem)) for place in range(facts.TILE)
    ]
    assert len(set(places)) == len(places)
    assert set(range(outputs)) <= set(places)


@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_has_one_warp_and_every_tile_one_thread_block(rows: int, layout: str) -> None:
    problem = W4A16Problem(rows, 1000, 7168 + 96, layout)
    form = form_of(problem)
    assert form.parts * form.ranks == facts.PARTS
    steps = [
        round_ * facts.PARTS + rank * form.parts + part
        for round_ in range(problem.rounds)
        for rank in range(form.ranks)
        for part in range(form.parts)
    ]
    assert steps == list(range(problem.rounds * facts.PARTS))
    assert len(steps) * facts.STEP >= problem.columns > (len(steps) - facts.PARTS) * facts.STEP
    per_block = form.tiles * form.groups
    assert grid(problem, form) % form.ranks == 0
    assert 0 <= grid(problem, form) // form.ranks * per_block - tiles(problem) < per_block


def test_the_scales_of_a_swizzled_tile_lie_side_by_side() -> None:
    for tile in range(16):
        offsets = [
            scale_offset(row_of(tile, place, "128x4"), 16 * block, (256, 128), "128x4")
            for place in range(facts.TILE)
            for block in range(4)
        ]
        assert sorted(offsets) == list(range(offsets[0], offsets[0] + 64))
        # What the kernel reads of a place: a word, four on for each neighbour, one for a quarter.
        words = [(offset - offsets[0]) // 4 for offset in offsets[::4]]
        assert words == [place % 4 * 4 + place // 4 for place in range(facts.TILE)]


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
def test_memory_and_threads_fit(rows: int, outputs: int, columns: int) -> None:
    for layout in LAYOUTS:
        problem = W4A16Problem(rows, outputs, columns, layout)
        form = form_of(problem)
        assert form.columns >= rows
        assert 1 <= rounds_kept(problem, form) <= min(16, problem.rounds)
        assert shared_bytes(problem, form) <= min(
            target.shared_memory_bytes for target in TARGETS.values()
        )
        assert form.threads <= 1024
        assert form.stages <= 16
        for size in (form.stage_bytes, form.group_bytes // form.pieces, form.ring_bytes):
            assert size % 128 == 0  # where the copy engine may write
        assert all(extent <= 256 for extent in facts.activation_box(form))
        assert all(extent <= 256 for extent in facts.code_box(form))
        assert form.copied_bytes < 1 << 20  # what a barrier counts: PTX ISA 9.1, mbarrier


def test_bytes_at_the_shapes_of_the_bench() -> None:
    problem = W4A16Problem(1, 7168, 4096)
    assert problem.weight_bytes == 7168 * 4096 * 9 // 16 == 16_515_072
    assert problem.bytes_moved - problem.weight_bytes == 2 * (4096 + 7168)
    assert W4A16Problem(1, 8192, 8192).weight_bytes == 37_748_736
    assert problem.scale_bytes == 7168 * 256
    assert W4A16Problem(1, 8, 32, "128x4").scale_bytes == 512
    form = form_of(problem)
    assert form.stage_bytes == facts.TILE * facts.ROUND * 9 // 16
    assert grid(problem, form) == 112


def test_extents_choose_few_forms() -> None:
    problems = [
        W4A16Problem(m, n, k)
        for m in range(1, 65)
        for n, k in SHAPES
        for _ in LAYOUTS
        if k % 256 == 0
    ]
    assert len({form_of(problem) for problem in problems}) <= 18
    assert form_of(W4A16Problem(5, 8192, 4096)) == form_of(W4A16Problem(8, 16384, 8192))
    assert form_of(W4A16Problem(1, 512, 96)).ragged
    assert [tactic.rows for tactic in TACTICS] == sorted(tactic.rows for tactic in TACTICS)
    assert replace(form_of(W4A16Problem(1, 8, 32)), layout="128x4").pieces == 4


@pytest.mark.parametrize("tactic", TACTICS)
def test_no_more_activations_are_copied_than_half_of_them_needlessly(tactic: Tactic) -> None:
    for rows in range(1, tactic.rows + 1):
        problem = W4A16Problem(rows, 7168, 4096)
        form = choose_form(problem, tactic, "sm_90a")
        assert rows <= form.copied_rows < 2 * rows
        assert form.copied_rows <= form.columns
        assert form.kept_bytes * form.ranks == 2 * form.copied_rows * facts.ROUND
        assert facts.activation_box(form)[1] == form.copied_rows
    one, eight = (
        choose_form(W4A16Problem(rows, 7168, 4096), TACTICS[0], "sm_90a") for rows in (1, 8)
    )
    assert (one.kept_bytes, eight.kept_bytes) == (4096, 32_768)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("tiles_of_block", [1, 4])
def test_every_sum_is_added_up_once_and_no_two_threads_meet_in_a_bank(
    rows: int, tiles_of_block: int
) -> None:
    count = -(-rows // 2) * 2 * tiles_of_block * facts.TILE
    places = [facts.sum_place(number, tiles_of_block) for number in range(count)]
    assert len(set(places)) == count
    assert {place for place in places if place[2] < rows} == {
        (within, tile, row)
        for within in range(facts.TILE)
        for tile in range(tiles_of_block)
        for row in range(rows)
    }
    offsets = [facts.sum_offset(row // 8, within, row) for within, _, row in places]
    for first in range(0, count, 32):
        assert len({offset // 4 % 32 for offset in offsets[first : first + 32]}) == 32
    # Sums of lane l are of outputs l / 4 and 8 more, rows 2 (l mod 4) and one more: m16n8k16.
    for lane in range(32):
        own = facts.lane_offset(3, lane)
        got = [
            facts.sum_offset(3, lane // 4 + 8 * half, lane % 4 * 2 + odd)
            for half in range(2)
            for odd in range(2)
        ]
        assert got == [own, own + 4, own + 8, own + 12]
    for first in range(0, 32, 8):  # what is written at once: 16 bytes each
        quarter = [facts.lane_offset(0, lane) // 16 % 8 for lane in range(first, first + 8)]
        assert sorted(quarter) == list(range(8))


def test_refuses_by_name() -> None:
    with pytest.raises(ShapeMismatch, match="rows of activations = 65"):
        W4A16Problem(65, 8, 32)
    for outputs in (0, 4, 12):
        with pytest.raises(ShapeMismatch, match="N in a multiple of 8"):
            W4A16Problem(1, outputs, 32)
    for columns in (0, 16, 48):
        with pytest.raises(ShapeMismatch, match="K in a multiple of 32"):
            W4A16Problem(1, 8, columns)
    with pytest.raises(ShapeMismatch, match="N K below"):
        W4A16Problem(1, 1 << 17, 1 << 15)
    with pytest.raises(UnknownName, match="scale layout of a kernel"):
        W4A16Problem(1, 8, 32, "8x4")
    with pytest.raises(UnknownName, match="128x4"):
        W4A16Problem(1, 8, 32, "128x5")
