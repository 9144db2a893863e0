"""Damaged checkpoints, captures, configs and tokenizers through the command line.

The cases are those of the campaign `mutated_files`, each named by its seed. The kept ones are of
every class and kind, and those that once ended with status 70 or left something behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from degarble.suites.campaigns.mutated_files import (
    LAYOUTS,
    is_signed,
    make_bases,
    run_case,
)

if TYPE_CHECKING:
    from pathlib import Path

# Status 70: facts, indices and shapes of captures that no run had, outputs of another size or kind.
CRASHED = (3039, 3399, 3796, 4011, 50047, 50163, 50595, 50756, 51161, 51224,
           91573, 91644, 93588, 95821, 98043, 303721)  # fmt: skip
CRASHED_ON_CODES = (93409, 700125, 700178)  # captures of an NVFP4 checkpoint
HALF_WRITTEN = (3122, 3176, 3203)
ACCEPTED = (3047, 3202)  # data bytes of a capture, through `compare`
USUAL = (36, 37, 40, 45, 49, 54, 58, 63, 67, 71)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mutated") / "bases"
    folder.mkdir()
    make_bases(folder)
    return folder


@pytest.mark.parametrize("seed", [*CRASHED, *HALF_WRITTEN, *ACCEPTED, *USUAL])
def test_a_damaged_file_is_refused_or_judged(bases: Path, seed: int) -> None:
    result = run_case(bases, seed)
    assert result.outcome == "ok", result.detail


@pytest.mark.parametrize("seed", CRASHED_ON_CODES)
def test_a_damaged_capture_of_codes_is_refused_or_judged(bases: Path, seed: int) -> None:
    result = run_case(bases, seed, "nvfp4-full")
    assert result.outcome == "ok", result.detail


@pytest.mark.slow
@pytest.mark.parametrize("captured", LAYOUTS)
@pytest.mark.parametrize("first", range(200_000, 200_400, 100))
def test_many_changed_captures_with_fitting_hashes(bases: Path, first: int, captured: str) -> None:
    seeds = filter(is_signed, range(first, first + 100))
    found = [run_case(bases, seed, captured) for seed in seeds]
    assert [each for each in found if each.outcome != "ok"] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 100_900, 90))
def test_many_damaged_files_are_refused_or_judged(bases: Path, first: int) -> None:
    found = [run_case(bases, seed) for seed in range(first, first + 90)]
    assert [each for each in found if each.outcome != "ok"] == []
