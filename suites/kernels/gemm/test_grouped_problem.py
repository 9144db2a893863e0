"""Grouped products as arithmetic: tiles lie within groups, stages within heads, refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.gemm import grouped_problem as facts
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.grouped_problem import GroupedProblem


@pytest.mark.parametrize("tokens", [1, 64, 65, 512, 513, 8192])
@pytest.mark.parametrize("shape", [(16, 1024, 4096, 512), (8, 1024, 4096, 512), (4, 128, 256, 128)])
def test_a_tile_lies_in_one_group_and_turned_values_in_one_stage(
    tokens: int, shape: tuple[int, int, int, int]
) -> None:
    groups, columns, inner, turned = shape
    problem = GroupedProblem(tokens, groups, columns, inner, turned, 9)
    form = facts.choose_form(problem)
    tactic, tiles = form.gemm.tactic, facts.tiles_of_group(problem, form)
    assert columns == tiles * tactic.columns
    assert tactic.cluster_columns == 1  # a group's A would be shared with another's
    assert tactic.inner == facts.STEP == 64
    turned_from = turned - 64
    last = (form.steps_of_head - 1) * facts.STEP
    assert turned_from == last
    _, all_tiles = gemm.cluster_tiles(problem.gemm, tactic)
    assert all_tiles == groups * tiles


def test_a_single_group_takes_any_columns() -> None:
    problem = GroupedProblem(9000, 1, 520, 64, out="fp32")
    form = facts.choose_form(problem)
    assert (form.gemm.tactic.columns, facts.tiles_of_group(problem, form)) == (256, 3)
    assert problem.bytes_moved == 9000 * (2 * 64 + 4 * 520) + 2 * 520 * 64
    assert GroupedProblem(2, 4, 128, 256, 128, 9).bytes_moved == (
        2 * (2 * 1024 + 2 * 512 + 264) + 2 * 512 * 256
    )


def test_refuses_by_name() -> None:
    for extents, error, name in (
        ((1, 2, 60, 64), ShapeMismatch, "columns and values of a group"),
        ((1, 1, 64, 96), ShapeMismatch, "columns and values of a group"),
        ((1, 2, 64, 64, 128, 5), ShapeMismatch, "columns and values of a group"),
        ((1, 2, 64, 256, 256, 5), ShapeMismatch, "width of a row"),
        ((1, 2, 64, 256, 128, 0), ShapeMismatch, "positions"),
        ((1, 0, 64, 64), ShapeMismatch, "groups"),
        ((-1, 1, 64, 64), ShapeMismatch, "tokens"),
        ((1, 1, 64, 64, 0, 0, "fp16"), UnknownName, "dtype of grouped results"),
    ):
        with pytest.raises(error, match=name):
            GroupedProblem(*extents)
