"""Problems and rules of the paged caches, without the DSL."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch, UnknownName
from degarble.kernels.cache import problem as facts
from degarble.kernels.cache.problem import (
    CHOSEN,
    ENTRIES,
    KINDS,
    WINDOW,
    PagedPoolProblem,
    PoolForm,
    PoolProblem,
    SlotsProblem,
    StatePages,
)

if TYPE_CHECKING:
    from collections.abc import Callable


# --------------------------------------------------------------------------------------------------
# Windows as arithmetic: which tokens close them, rings in the references' order, refusals.


@pytest.mark.parametrize("ratio", facts.RATIOS)
def test_windows_close_where_their_last_token_is(ratio: int) -> None:
    starts, counts = [0, 3, ratio - 1, 5 * ratio, 1], [ratio, 2 * ratio, 1, ratio - 1, 1]
    closing, owners = facts.windows_of(starts, counts, ratio)
    want, begin = [], 0
    for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
        ends = [t for t in range(count) if (start + t + 1) % ratio == 0]
        want += [(begin + t, number) for t in ends]
        begin += count
    assert list(zip(closing.tolist(), owners.tolist(), strict=True)) == want
    assert closing.dtype == owners.dtype == torch.int32


def test_a_ring_has_the_last_whole_window_and_the_rest() -> None:
    ring = torch.zeros(8, 1)
    for position in range(10):
        ring[position % 8] = position + 1
    # Behind 10 tokens windows 0 and 1 are whole; 4 to 7 are the last, 8 and 9 the rest.
    assert facts.as_references_have_it(ring, 10, 4)[:, 0].tolist() == [5, 6, 7, 8, 9, 10, 0, 0]
    assert facts.as_references_have_it(ring, 3, 4)[:, 0].tolist()[:4] == [0, 0, 0, 0]
    assert facts.as_references_have_it(torch.ones(128, 1), 130, 128).sum() == 2


@pytest.mark.parametrize("ratio", facts.RATIOS)
@pytest.mark.parametrize("held", [1, 2, 3, 4, 6, 8, 12, 64, 128])
def test_rows_in_turn_lie_together_and_begin_together(ratio: int, held: int) -> None:
    together, of_window = facts.rows_in_turn(ratio, held), facts.rows_of_ring(ratio)
    assert facts.ROWS_AT_ONCE % together == 0
    for last in range(ratio - 1, 40 * ratio, ratio):
        for begin in range(last + 1 - of_window, last + 1, together):
            rows = range(begin, begin + together)
            assert len({row >= 0 for row in rows}) == 1
            # Before the start the first rows of all are read, and dropped.
            first = max(begin, 0)
            assert [(first + n) // held for n in range(together)] == [first // held] * together
    assert (facts.rows_in_turn(4, 8), facts.rows_in_turn(128, 128)) == (4, 8)


class Truncated(int):
    """An integer whose remainder has the sign of the left operand, as in a kernel."""

    def __add__(self, other: int) -> Truncated:
        return Truncated(int(self) + other)

    def __sub__(self, other: int) -> Truncated:
        return Truncated(int(self) - other)

    def __mod__(self, other: int) -> Truncated:
        return Truncated(math.fmod(int(self), other))


@pytest.mark.parametrize("rows", [facts.rows_of_ring(ratio) for ratio in facts.RATIOS])
def test_a_row_of_a_ring_has_its_newest_position_or_none(rows: int) -> None:
    for last in range(-1, 3 * rows):
        for row in range(rows):
            position = facts.newest_in_row(Truncated(last), row, rows)
            want = max((p for p in range(last + 1) if p % rows == row), default=None)
            assert position == want if want is not None else position < 0


def test_forms_have_a_thread_for_every_channel_and_row() -> None:
    for ratio in facts.RATIOS:
        for width in (512, 128):
            for few in (False, True):
                form = PoolForm(ratio, width, alone=few, target="sm_90a", few=few)
                assert (
                    form.parts * facts.ROWS_AT_ONCE == form.ring_rows == facts.rows_of_ring(ratio)
                )
                assert form.threads * form.channels_of_thread == form.parts * form.channels
                assert form.channels_of_thread == (1 if few and ratio == 128 else 2)
                assert form.groups * form.channels == width
                # The last block of few windows keeps the token's row, of windows of 128.
                assert form.blocks == form.groups + few
                kept = form.turns_of_row * form.threads * form.channels_of_thread
                assert kept == (form.columns if few and ratio == 128 else 0)
                assert form.threads % 32 == 0
                places = [form.place_of(thread) for thread in range(form.threads)]
                assert len(set(places)) == form.threads
                assert {part for part, _ in places} == set(range(form.parts))
    assert facts.choose_pool_form(PoolProblem(3, 3, 3, 5, 4), "sm_90a").alone
    assert not facts.choose_pool_form(PoolProblem(4, 3, 3, 5, 4), "sm_90a").alone
    many = facts.FEW_SEQUENCES + 1
    alone = [PoolProblem(n, n, n, 1, 128) for n in (many - 1, many)]
    assert [facts.choose_pool_form(problem, "sm_90a").few for problem in alone] == [True, False]
    assert PoolProblem(8192, 1, 2048, 1, 4).bytes_moved == 8 * 1024 * 8200 + 2048 * 1040


def test_a_spread_window_is_folded_in_the_order_of_its_parts() -> None:
    """Lanes 16 and 8 apart, and then warps: parts 8, 4, 2 and 1 apart, as rows.folded has them."""
    form = PoolForm(128, 512, alone=True, target="sm_90a", few=True)
    part_of = {thread: form.place_of(thread) for thread in range(form.threads)}
    numbers = {place: f"{place[0]}" for place in part_of.values()}
    for distance in (16, 8):
        numbers = {
            part_of[
                thread
            ]: f"({' '.join(numbers[part_of[t]] for t in sorted((thread, thread ^ distance)))})"
            for thread in part_of
        }
    left = [numbers[part_of[32 * warp]] for warp in range(facts.SPREAD_WARPS)]
    assert [part_of[32 * warp][0] for warp in range(facts.SPREAD_WARPS)] == [0, 1, 2, 3]
    whole = f"(({left[0]} {left[2]}) ({left[1]} {left[3]}))"
    stated = [f"{part}" for part in range(form.parts)]
    while len(stated) > 1:
        half = len(stated) // 2
        stated = [
            f"({first} {second})"
            for first, second in zip(stated[:half], stated[half:], strict=True)
        ]
    assert whole == stated[0]


def test_refuses_by_name() -> None:
    for extents, error, name in (
        ((4, 1, 1, 1, 3), InvalidArgument, "compress ratio"),
        ((4, 1, 1, 1, 4, 256), ShapeMismatch, "width of a row"),
        ((1, 2, 1, 1, 4), ShapeMismatch, "tokens"),
        ((-1, 0, 1, 1, 4), ShapeMismatch, "tokens"),
        ((1, 1, 1, 0, 4), ShapeMismatch, "rings"),
        ((1, 1, 1, 1 << 30, 4), ShapeMismatch, "rows of all rings"),
        ((1, 1, 1 << 30, 1, 4), ShapeMismatch, "pairs of channels of all windows"),
    ):
        with pytest.raises(error, match=name):
            PoolProblem(*extents)


# --------------------------------------------------------------------------------------------------
# Pages of states: what fits, what is refused, and which form answers.


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
    assert (form(1).keeping_threads, form(1).pool.threads, form(9).pool.threads) == (128, 128, 256)
    # Of a launch's only token one more thread block keeps the row, where channels are spread.
    of_four = facts.choose_paged_form(PagedPoolProblem(1, 2, 4, StatePages(8, 9, 1024)), "sm_90a")
    assert (form(1).single_blocks, of_four.single_blocks) == (512 // 8 + 1, 512 // 64)


@pytest.mark.parametrize(
    ("wrong", "error", "name"),
    [
        (lambda: StatePages(0, 3, 1024), ShapeMismatch, "rows of a page of states"),
        (lambda: StatePages(4, 0, 1024), ShapeMismatch, "pages of states"),
        (lambda: StatePages(4, 1 << 30, 1024), ShapeMismatch, "slots of states"),
        (lambda: StatePages(4, 3, 1024, 32_752), ShapeMismatch, "bytes of a page of states"),
        (lambda: StatePages(4, 3, 1024, 32_776), ShapeMismatch, "bytes of a page of states"),
        (lambda: PagedPoolProblem(1, 1, 8, StatePages(4, 3, 1024)), InvalidArgument, "ratio"),
        (lambda: PagedPoolProblem(1, 1, 128, StatePages(4, 3, 1024)), ShapeMismatch, "columns"),
        (lambda: PagedPoolProblem(-1, 1, 4, StatePages(4, 3, 1024)), ShapeMismatch, "tokens"),
        (lambda: PagedPoolProblem(1, -1, 4, StatePages(4, 3, 1024)), ShapeMismatch, "sequences"),
    ],
)
def test_paged_pool_problem_refuses_by_name(
    wrong: Callable[[], object], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=name):
        wrong()


# --------------------------------------------------------------------------------------------------
# Slots of decoding tokens: what is refused, and the rule on integers.


def test_slots_problem_refuses_by_name() -> None:
    with pytest.raises(UnknownName, match="kind of slots"):
        SlotsProblem(1, 4, "neighbours", 1, 8)
    with pytest.raises(InvalidArgument, match="width of a window = 9"):
        SlotsProblem(1, 9, WINDOW, 1, 8)
    for name, fields in (
        ("width", {"width": 0}), ("columns", {"columns": 0}), ("ratio", {"ratio": 0}),
        ("sequences", {"sequences": 0}), ("tokens", {"tokens": -1}),
    ):  # fmt: skip
        given = {"tokens": 1, "width": 4, "kind": ENTRIES, "sequences": 1, "columns": 8} | fields
        with pytest.raises(ShapeMismatch, match=name):
            SlotsProblem(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("position", [0, 1, 126, 127, 128, 500])
def test_a_window_ends_with_the_token_and_never_shares_a_column(position: int) -> None:
    numbers = [facts.number_of(WINDOW, place, position, 128) for place in range(128)]
    assert numbers[-1] == position
    end = facts.end_of(WINDOW, position, 128, 1)
    seen = [number for number in numbers if 0 <= number < end]
    assert seen == list(range(max(0, position - 127), position + 1))
    assert len({facts.column_of(WINDOW, each, 128) for each in seen}) == len(seen)


def test_entries_are_visible_from_their_last_token_on() -> None:
    seen = [facts.end_of(ENTRIES, position, 100, 4) for position in range(9)]
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert facts.end_of(ENTRIES, 10_000, 100, 4) == 100
    assert facts.end_of(CHOSEN, 0, 100, 4) == 100
    assert all(facts.number_of(kind, 7, 90, 8) == 7 for kind in KINDS if kind != WINDOW)


def test_parts_of_a_list_cover_it() -> None:
    assert SlotsProblem(3, 129, ENTRIES, 3, 200).blocks == (3, 2)
    assert SlotsProblem(0, 1, ENTRIES, 3, 200).blocks == (0, 1)
