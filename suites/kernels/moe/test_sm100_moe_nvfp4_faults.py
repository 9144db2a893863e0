"""Faults planted in the grouped experts of Blackwell: each is in the text; a B200 has to catch it.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

from functools import cache

import pytest

from degarble.suites.kernels.moe import moe_checks as checks
from degarble.suites.kernels.moe import sm100_moe_faults as faults

pytestmark = pytest.mark.needs("cutlass")


@cache
def whole(name: str) -> str:
    return faults.text(faults.BY_NAME[name])


@cache
def verdict_of_whole(case: checks.Case) -> str:
    return checks.mismatch(case)


def test_faults_have_names_of_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 13


@pytest.mark.slow
def test_planting_is_in_the_text_and_taken_back() -> None:
    fault = faults.BY_NAME["routing weight left out after"]
    before = faults.text(fault)
    with faults.planted(fault):
        assert faults.text(fault) != before
    assert faults.text(fault) == before


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_the_machine_code(fault: faults.Fault) -> None:
    before = whole(fault.name)
    with faults.planted(fault):
        assert faults.text(fault) != before


@pytest.mark.b200
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_and_a_whole_call_is_not(fault: faults.Fault) -> None:
    with faults.planted(fault):
        assert checks.mismatch(fault.case)
    assert not verdict_of_whole(fault.case)
