"""The choice of the largest k: its problem, forms that hold every row, and the cut of a row."""

from __future__ import annotations

import pytest

from degarble.harness.base.errors import ShapeMismatch
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import TopkForm, TopkProblem, choose_topk_form, segment
from degarble.kernels.runtime.targets import TARGETS

PROCESSORS = 132  # of an H200


def form_of(rows: int, entries: int, count: int = 1024) -> TopkForm:
    return choose_topk_form(TopkProblem(rows, entries, count), "sm_90a", PROCESSORS)


@pytest.mark.parametrize("rows", [1, 16, 64, 66, 67, 4096])
@pytest.mark.parametrize("entries", [1, 127, 8192, 8193, 32_768, 40_000, 131_072, 262_144])
def test_a_form_holds_the_row(rows: int, entries: int) -> None:
    form = form_of(rows, entries)
    held = segment(entries, form.cluster)
    assert form.cluster * held >= entries
    assert held <= form.capacity <= form.threads * facts.KEYS_OF_THREAD
    assert facts.topk_shared_bytes(form) <= TARGETS["sm_90a"].shared_memory_bytes
    # A warp's span is at most one word of marks a lane.
    assert -(-held // form.warps) <= facts.WARP * facts.WARP
    assert held % form.capacity == 0 or held % 4 == 0


def test_few_rows_are_cut_and_many_are_not() -> None:
    assert (form_of(1, 131_072).cluster, form_of(1, 131_072).threads) == (8, 1024)
    assert (form_of(64, 131_072).cluster, form_of(64, 131_072).threads) == (4, 1024)
    assert form_of(64, 65_536).cluster == 2
    assert (form_of(1, 8192).cluster, form_of(1, 8192).threads) == (1, 1024)
    many = form_of(4096, 8192)
    assert (many.cluster, many.threads, many.capacity) == (1, 256, 8192)
    assert (form_of(4096, 32_768).cluster, form_of(4096, 131_072).cluster) == (1, 4)


def test_levels_cover_a_key_without_overlap() -> None:
    covered = 0
    for shift, bins in facts.LEVELS:
        assert covered & (bins - 1) << shift == 0
        covered |= (bins - 1) << shift
    assert covered == 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("rows of scores", (-1, 8, 1)),
        ("entries of a row", (1, 0, 1)),
        ("entries of a row", (1, facts.MOST_ENTRIES + 1, 1)),
        ("chosen entries", (1, 8, 0)),
        ("chosen entries", (1, 8, 2049)),
        ("tokens that become one entry", (1, 8, 1, -1)),
    ],
)
def test_refuses_by_name(name: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match=name):
        TopkProblem(*numbers)


def test_bytes_are_those_of_scores_and_choice() -> None:
    assert TopkProblem(2, 100, 10).bytes_moved == 4 * 2 * 110
