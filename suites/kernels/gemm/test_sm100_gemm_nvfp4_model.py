"""The sm_100a NVFP4 GEMM as a host model: bits as references.tensor_core has them, faults are seen.

No compiled kernel runs here: this proves facts, places and protocol, and says nothing about a chip.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.kernels.gemm import problem as facts
from degarble.kernels.gemm import tensor_memory
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_model, tcgen05_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.needs("cutlass")  # the walk is the kernels' own

FORMS = {form.tactic.columns: form for form in blackwell.forms()}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=blackwell.named)


@pytest.mark.parametrize("first", sm100_model.FIRST)
@each_form
def test_every_bit_with_tails_of_all_extents(form: facts.GemmForm, first: str) -> None:
    """Two row tiles, several columns of tiles in two thread blocks, K ends within a word."""
    assert not blackwell.answer(form, (130, form.tactic.columns + 136, 288), first)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [32, 64, 96, 256, 1312])
@each_form
def test_every_bit_of_more_shapes(form: facts.GemmForm, inner: int) -> None:
    """K of 1312 is six steps, more than any ring but one has stages."""
    assert not blackwell.answer(form, (200, 2 * form.tactic.columns + 8, inner))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_bit_of_drawn_shapes(seed: int) -> None:
    """Each shape in every family: the table's, one thread block's, two together."""
    drawn = random.Random(seed)
    rows = drawn.choice((drawn.randint(1, 40), drawn.randint(1, 400)))
    extents = (rows, 8 * drawn.randint(1, 60), 32 * drawn.randint(1, 20))
    problem = facts.GemmProblem(*extents, "nvfp4", "e4m3")
    pairs = blackwell.pairs()
    for form in (
        facts.choose_form(problem, blackwell.TARGET),
        *drawn.sample(blackwell.forms(), 2),
        *drawn.sample(pairs, 2),
    ):
        why = blackwell.answer(form, extents, drawn.choice(sm100_model.FIRST))
        assert not why, blackwell.named(form)


def test_a_ring_that_begins_anew() -> None:
    assert tensor_memory.footprint(FORMS[256]).stages == 3
    assert not blackwell.answer(FORMS[256], (5, 72, 1056))


# ---- planted faults ------------------------------------------------------------------------------


@contextmanager
def planted(place: Any, name: str, instead: Callable[..., Any]) -> Iterator[None]:
    true = getattr(place, name)
    with mock.patch.object(place, name, lambda *given, **named: instead(true, *given, **named)):
        yield


def pairs_of_scale_tiles(_true: Any, tile: Any, form: Any) -> Any:
    """Count boxes of B's scales in pairs, where a tile of 192 begins within a pair."""
    row, column = tile
    first = column * form.tactic.columns // 128 // 2 * 2
    return row, column, row, first, first + 1


def zero(_true: Any, *_given: Any) -> int:
    return 0


def nothing_ends(_true: Any, *_given: Any) -> tuple[int, int]:
    return 0, 0


def more(by: int) -> Callable[..., Any]:
    def instead(true: Any, *given: Any) -> Any:
        return true(*given) + by

    return instead


def other_columns(true: Any, form: Any) -> tuple[int, int]:
    a, b = true(form)
    return a, b - 2


def never_begins(true: Any, *given: Any, begins: bool) -> None:
    true(*given, begins=begins and False)


def same_parity(_true: Any, turn: Any) -> None:
    turn.at = (turn.at + 1) % turn.stages


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "boxes of scales in pairs": (tensor_memory, "tiles_of_boxes", pairs_of_scale_tiles, 192),
    "rows of scales not skipped": (tensor_memory, "columns_skipped", zero, 64),
    "scales beyond K not cleared": (tensor_memory, "end_of_scales", nothing_ends, 128),
    "scales over each other": (tensor_memory, "first_columns", other_columns, 128),
    "bytes expected": (facts, "transaction_bytes", more(16), 128),
    "too few columns allocated": (tensor_memory, "columns_allocated", more(-256), 192),
    "sums not begun anew": (sm100_model.Block, "multiply_stage", never_begins, 128),
    "parity of a stage": (sm100_model.Turn, "advance", same_parity, 256),
    "N of the instruction": (tcgen05_words, "block_scaled_word", more(-1 << 17), 128),
    "format of an operand": (tcgen05_words, "block_scaled_word", more(1 << 7), 128),
    "major of an operand": (tcgen05_words, "block_scaled_word", more(1 << 15), 128),
    "distance of cores": (tcgen05_words, "operand_word", more(1 << 32), 128),
    "swizzle": (tcgen05_words, "operand_word", more(1 << 61), 128),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    place, function, instead, columns = FAULTS[name]
    with planted(place, function, instead):
        assert blackwell.answer(
            FORMS[columns], (100, columns + 72, 1056 if columns == 256 else 288)
        )


def test_a_word_too_long_waited_for_is_told() -> None:
    with planted(facts, "transaction_bytes", more(16)):
        assert "wait for ever" in blackwell.answer(FORMS[64], (8, 8, 32))
