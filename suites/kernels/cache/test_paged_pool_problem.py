"""Pages of states: what fits, what is refused, and which form answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import PagedPoolProblem, StatePages

if TYPE_CHECKING:
    from collections.abc import Callable


def test_pages_are_those_of_vllm() -> None:
    for ratio, width, rows, needed in (
        (4, 512, 4, 32_768),
        (4, 128, 4, 8_192),
        (128, 512, 8, 32_768),
    ):
        pages = StatePages(rows, 3, width * (2 if ratio == 4 else 1))
        assert (pages.stride, pages.slots) == (needed, 3 * rows)
        assert PagedPoolProblem(7, 2, ratio, pages, width).columns == pages.columns
    assert StatePages(4, 3, 1024, 37_440).stride == 37_440


def test_forms_know_no_extents_but_how_many() -> None:
    pages = StatePages(8, 10_000, 512)

    def form(tokens: int) -> facts.PagedForm:
        return facts.choose_paged_form(PagedPoolProblem(tokens, 2, 128, pages), "sm_90a")

    assert form(1) == form(8) != form(9) == form(256) != form(257) == form(60_000)
    assert (form(8).span, form(256).span, form(257).span) == (1, 1, 16)
    assert form(8).pool.few
    assert not form(9).pool.few
    assert (form(1).keeping_threads, form(1).pool.threads, form(9).pool.threads) == (128, 64, 256)


@pytest.mark.parametrize(
    ("wrong", "error", "name"),
    [
        (lambda: StatePages(0, 3, 1024), ShapeMismatch, "rows of a page of states"),
        (lambda: StatePages(4, 1 << 30, 1024), ShapeMismatch, "slots of states"),
        (lambda: StatePages(4, 3, 1024, 32_752), ShapeMismatch, "bytes of a page of states"),
        (lambda: StatePages(4, 3, 1024, 32_776), ShapeMismatch, "bytes of a page of states"),
        (lambda: PagedPoolProblem(1, 1, 8, StatePages(4, 3, 1024)), InvalidArgument, "ratio"),
        (lambda: PagedPoolProblem(1, 1, 128, StatePages(4, 3, 1024)), ShapeMismatch, "columns"),
        (lambda: PagedPoolProblem(-1, 1, 4, StatePages(4, 3, 1024)), ShapeMismatch, "tokens"),
        (lambda: PagedPoolProblem(1, -1, 4, StatePages(4, 3, 1024)), ShapeMismatch, "sequences"),
    ],
)
def test_refuses_by_name(wrong: Callable[[], object], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        wrong()
