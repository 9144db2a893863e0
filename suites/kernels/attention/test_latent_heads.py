"""Products of few rows of heads: their problem, places in shared memory, and planted faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from degarble.harness.base.errors import InvalidArgument, ShapeMismatch
from degarble.kernels.attention import heads_problem as facts
from degarble.kernels.attention.heads_problem import HeadsProblem
from degarble.kernels.attention.problem import MERGED_AT_ONCE
from degarble.kernels.runtime.modules import module_of
from degarble.suites.kernels.attention import heads_checks as checks
from degarble.suites.kernels.memory_checks import WRONG_GUESSES

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS, VALUES = HeadsProblem(1, 128, *checks.KEYS, 9), HeadsProblem(1, 128, *checks.VALUES)
ROW = 2 * facts.STEP  # bytes of a row in a box
MODULE = module_of(checks.KERNEL)
DEVICE_WORDS = "degarble.kernels.primitives.device_words"


def test_thread_blocks_share_a_head_evenly() -> None:
    """Three of them fit on a processor, with a head's values and barriers."""
    for columns in range(facts.TILE, 1024, facts.TILE):
        for inner in range(facts.STEP, 2048, facts.STEP):
            span = facts.span_of(columns, inner)
            assert facts.serves(columns, inner) == (span > 0)
            if span == 0:
                assert inner > facts.BLOCK_BYTES // (2 * facts.TILE)
                continue
            assert columns % span == 0
            assert span % facts.TILE == 0
            assert span * inner * 2 <= facts.BLOCK_BYTES
            used = (span + facts.MOST_TOKENS) * inner * 2 + 8 * inner // facts.STEP + 1024
            assert facts.BLOCKS * (used + 1024) <= 233_472
    assert (facts.span_of(512, 128), facts.parts_of(KEYS)) == (256, 2)
    assert (facts.span_of(128, 512), facts.parts_of(VALUES)) == (64, 2)


def test_rows_of_keys_have_their_turned_part_and_values_have_none() -> None:
    assert (KEYS.out_width, VALUES.out_width) == (576, 128)
    assert (KEYS.steps, VALUES.steps) == (2, 8)
    # The turned 64 are read and written.
    assert KEYS.bytes_moved == 2 * 128 * (512 * 128 + 128 + 64 + 576)
    assert VALUES.bytes_moved == 2 * 128 * (128 * 512 + 512 + 128)
    sums_and_peaks = 4 * 3 * (512 + 2)
    assert replace(VALUES, splits=3).bytes_moved == 128 * (2 * (128 * 512 + 128) + sums_and_peaks)


@pytest.mark.parametrize("splits", range(1, 33))
def test_a_form_merges_all_splits_at_once(splits: int) -> None:
    form = facts.choose_form(replace(VALUES, splits=splits), "sm_90a")
    assert form.at_once == min(each for each in MERGED_AT_ONCE if each >= splits)
    assert facts.choose_form(VALUES, "sm_90a").at_once == 0


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 9}, {"columns": 96}, {"inner": 96}, {"inner": 576}, {"width": 500}, {"width": 448}],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ShapeMismatch, match="grouped product"):
        replace(VALUES, **wrong)


@pytest.mark.parametrize(
    ("problem", "wrong", "error", "says"),
    [
        (VALUES, {"heads": 0}, ShapeMismatch, "heads"),
        (VALUES, {"columns": 0}, ShapeMismatch, "columns of a head"),
        (VALUES, {"inner": 0}, ShapeMismatch, "that are multiplied"),
        (VALUES, {"inner": -64}, ShapeMismatch, "that are multiplied"),
        (KEYS, {"positions": -1}, ShapeMismatch, "table of turns"),
        (KEYS, {"decoded": True}, InvalidArgument, "keys alone"),
        (KEYS, {"splits": 4}, InvalidArgument, "keys alone"),
        (KEYS, {"width": 128}, ShapeMismatch, "whole heads"),
        (VALUES, {"splits": -1}, InvalidArgument, "0 to 32"),
        (VALUES, {"splits": 33}, InvalidArgument, "0 to 32"),
        (VALUES, {"splits": 2, "width": 576}, ShapeMismatch, "simt_attention_merge"),
        (VALUES, {"splits": 2, "inner": 448, "width": 448}, ShapeMismatch, "simt_attention_merge"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(
    problem: HeadsProblem, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"(?i){says}"):
        replace(problem, **wrong)


def test_merged_values_lie_where_a_copy_of_them_would() -> None:
    """A thread's four values of a token, by the kernel's rule and by the swizzle of 128 bytes."""
    seen: set[int] = set()
    for token in range(facts.MOST_TOKENS):
        for thread in range(facts.THREADS):
            first = 4 * thread
            step, within = first // facts.STEP, first % facts.STEP
            row = (step * facts.MOST_TOKENS + token) * ROW
            place = row + ((within // 8) ^ token) * 16 + within % 8 * 2
            plain = row + within * 2
            assert place == plain ^ (plain >> 7 & 7) << 4
            seen.update(range(place, place + 8))
    assert seen == set(range(VALUES.inner * facts.MOST_TOKENS * 2))


# ---- planted faults ------------------------------------------------------------------------------


def _halves_exchanged(true: Any, out: Any, word: Any, *more: Any) -> None:
    true(out, word << 16 | word >> 16, *more)


def _chunk_beside(true: Any, address: Any, words: Any) -> None:
    true(address ^ 16, words)


def _half_as_large(true: Any, largest: Any, decoding: Any) -> Any:
    return true(largest * 0.5, decoding)


def _next_position(true: Any, table: Any, turn: Any, place: Any, *more: Any) -> None:
    true(table, turn, (place[0] + 1, place[1]), *more)


def _nothing(_true: Any, *_given: Any) -> None:
    return None


FAULTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "columns eight further": ("put_pair", _halves_exchanged, "values"),
    "turned part left out": ("turn_part", _nothing, "keys"),
    "turned by the next position": ("correct_turn", _next_position, "keys"),
    "merged values unswizzled": ("store_words", _chunk_beside, "merged"),
    "values not merged": ("merge_rows", _nothing, "merged and decoded"),
    "scale of half the largest": ("coded_scale", _half_as_large, "decoded"),
}


def _anew(monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[..., Any]) -> None:
    """Compile the kernel anew with a function in place of one of its own."""
    kernels = import_module(MODULE)
    true = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *given: instead(true, *given))
    monkeypatch.setattr(kernels, "KERNEL", replace(kernels.KERNEL))


@pytest.mark.needs("cutlass")
@pytest.mark.h200
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, instead, kind = FAULTS[fault]
    case = next(case for case in checks.cases() if case.kind == kind and case.tokens == 3)
    assert not checks.mismatch(case)
    _anew(monkeypatch, name, instead)
    assert checks.mismatch(case)


@pytest.mark.needs("cutlass")
@pytest.mark.h200
@pytest.mark.parametrize("believed", [False, True])
def test_a_wrong_guess_counts_only_where_it_is_believed(
    believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions lie in memory long before, so no guess is wrong of itself."""
    case = checks.Case("keys", 4, 5, checks.KEYS, seed=3)
    assert not checks.mismatch(case)  # and what it is compared with is compiled as it is
    words, kernels = import_module(DEVICE_WORDS), import_module(MODULE)
    one_more = partial(WRONG_GUESSES["one more"], words.guessed)
    monkeypatch.setattr(words, "guessed", one_more)
    if believed:
        monkeypatch.setattr(words, "wrong_guess", lambda number, guess: (number != guess) & False)
    monkeypatch.setattr(kernels, "KERNEL", replace(kernels.KERNEL))
    assert bool(checks.mismatch(case)) == believed


@pytest.mark.needs("cutlass")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_another_kernel(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a night judges by its results is in the machine code."""
    name, instead, kind = FAULTS[fault]
    case = next(case for case in checks.cases() if case.kind == kind)
    form = facts.choose_form(case.problem, "sm_90a")
    kernels = import_module(MODULE)
    as_it_is = kernels.KERNEL.compile_form(form, checks.SETTINGS).ptx
    _anew(monkeypatch, name, instead)
    assert kernels.KERNEL.compile_form(form, checks.SETTINGS).ptx != as_it_is
