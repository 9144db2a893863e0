"""Norming query heads, as arithmetic: every head has one warp; bytes; refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import HeadsProblem


@pytest.mark.parametrize("heads", [1, 7, 8, 9, 64, 128])
def test_every_head_has_one_warp(heads: int) -> None:
    tokens, groups = facts.heads_grid(HeadsProblem(3, heads, 1))
    walked = [
        group * facts.HEAD_WARPS + warp
        for group in range(groups)
        for warp in range(facts.HEAD_WARPS)
    ]
    assert tokens == 3
    assert [head for head in walked if head < heads] == list(range(heads))


def test_bytes_count_everything_once() -> None:
    assert HeadsProblem(3, 64, 9).bytes_moved == 3 * (2 * 2 * 64 * 512 + 8 + 256)


@pytest.mark.parametrize(
    ("extents", "name"),
    [
        ((-1, 8, 1), "tokens"),
        ((1, 0, 1), "query heads"),
        ((1, 129, 1), "query heads"),
        ((1, 8, 0), "positions"),
    ],
)
def test_refuses_by_name(extents: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ShapeMismatch, match=name):
        HeadsProblem(*extents)


def test_refuses_an_epsilon_that_no_norm_has() -> None:
    with pytest.raises(InvalidArgument, match="epsilon"):
        HeadsProblem(1, 8, 1, epsilon=-1.0)
