"""Looking up rows, as arithmetic: every vector is copied once; refusals."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch, UnknownName
from degarble.kernels.rows import problem as facts
from degarble.kernels.rows.problem import EmbedProblem, embed_grid, embed_threads


@pytest.mark.parametrize("columns", [8, 264, 7168, 20_000])
def test_every_vector_of_a_row_has_one_thread(columns: int) -> None:
    problem = EmbedProblem(3, 10, columns)
    tokens, parts = embed_grid(problem)
    visited = [
        part * embed_threads(problem) * facts.EMBED_VECTORS_OF_THREAD
        + place * embed_threads(problem)
        + thread
        for part in range(parts)
        for thread in range(embed_threads(problem))
        for place in range(facts.EMBED_VECTORS_OF_THREAD)
    ]
    assert tokens == 3
    assert sorted(v for v in visited if v < problem.vectors) == list(range(problem.vectors))
    assert len(set(visited)) == len(visited)


def test_facts_of_the_model() -> None:
    problem = EmbedProblem(8192, 129_280, 7168)
    assert (embed_grid(problem), embed_threads(problem)) == ((8192, 1), 224)
    assert problem.bytes_moved == 8192 * (4 * 7168 + 8)
    assert len({facts.choose_embed_form(EmbedProblem(t, 9, 64), "sm_90a") for t in (1, 8)}) == 1


def test_refuses_by_name() -> None:
    for tokens, rows, columns in ((-1, 1, 8), (1, 0, 8), (1, 1, 12), (1, 1, 0), (1 << 31, 1, 8)):
        with pytest.raises(ShapeMismatch, match="embedding"):
            EmbedProblem(tokens, rows, columns)
    with pytest.raises(UnknownName, match="int64"):
        EmbedProblem(1, 1, 8, "int16")
