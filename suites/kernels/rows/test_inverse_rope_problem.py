"""Turning back, as arithmetic: every chunk has one thread, in place the last 64 alone; refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import BackProblem


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("heads", [1, 7, 64, 128])
@pytest.mark.parametrize("width", [128, 512])
def test_every_chunk_has_one_thread(width: int, heads: int, in_place: bool) -> None:
    problem = BackProblem(2, heads, 1, in_place, width)
    tokens, groups = facts.back_grid(problem)
    walked = [
        group * facts.CHUNKS_AT_ONCE * facts.BACK_THREADS + turn * facts.BACK_THREADS + thread
        for group in range(groups)
        for turn in range(facts.CHUNKS_AT_ONCE)
        for thread in range(facts.BACK_THREADS)
    ]
    places = [
        facts.place_of_chunk(c, width, in_place=in_place) for c in walked if c < problem.chunks
    ]
    assert tokens == 2
    chunks = width // 8
    of_head = range(chunks - 8 if in_place else 0, chunks)
    want = [(head * chunks + within, within) for head in range(heads) for within in of_head]
    assert sorted(places) == want


def test_bytes_count_what_moves() -> None:
    assert BackProblem(3, 64, 9).bytes_moved == 3 * (2 * 2 * 64 * 512 + 8 + 256)
    assert BackProblem(3, 64, 9, in_place=True).bytes_moved == 3 * (2 * 2 * 64 * 64 + 8 + 256)


def test_refuses_by_name() -> None:
    for extents, name in (
        ((-1, 8, 1), "tokens"),
        ((1, 0, 1), "heads of attention's output"),
        ((1, 129, 1), "heads of attention's output"),
        ((1, 8, 0), "positions"),
    ):
        with pytest.raises(ShapeMismatch, match=name):
            BackProblem(*extents)
