"""V3.2's query rows: what is refused, and that every chunk is somebody's."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.attention import problem as facts
from degarble.kernels.attention.problem import QueryProblem


@pytest.mark.parametrize(("heads", "width"), [(0, 192), (1 << 16, 192), (4, 56), (4, 196)])
def test_refuses_heads_by_name(heads: int, width: int) -> None:
    with pytest.raises(ShapeMismatch, match="query heads and their width"):
        QueryProblem(1, heads, width, 1)


def test_refuses_other_extents() -> None:
    for name, tokens, positions in (("tokens", -1, 1), ("table of turns", 1, 0)):
        with pytest.raises(ShapeMismatch, match=name):
            QueryProblem(tokens, 1, 192, positions)


def test_chunks_walk_every_row_once() -> None:
    problem = QueryProblem(3, 5, 192, 7)
    tokens, parts = facts.query_grid(problem)
    assert tokens == 3
    assert parts * facts.QUERY_THREADS >= 5 * facts.CHUNKS > (parts - 1) * facts.QUERY_THREADS
    places = [facts.place_of(chunk) for chunk in range(5 * facts.CHUNKS)]
    assert places == [(head, n) for head in range(5) for n in range(facts.CHUNKS)]
    assert (facts.CHUNKS, facts.OF_LATENT, facts.TURNED) == (72, 64, 8)
    assert problem.chunks_of_head == 24
