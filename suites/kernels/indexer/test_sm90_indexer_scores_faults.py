"""Faults planted in the indexer's kernels: each another kernel, on an H200 each is caught."""

from __future__ import annotations

import pytest

from degarble.suites.kernels.indexer import indexer_faults as faults

pytestmark = pytest.mark.needs("cutlass")


def named(fault: faults.Fault) -> str:
    return fault.name.replace(" ", "-")


def test_names_are_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 11


def test_planting_is_taken_back() -> None:
    fault = faults.BY_NAME["scale of a block twice as large"]
    whole = faults.compiled(fault, whole=True).ptx
    assert faults.compiled(fault).ptx != whole
    assert faults.compiled(fault, whole=True).ptx == whole


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=named)
def test_a_planted_fault_changes_the_machine_code(fault: faults.Fault) -> None:
    assert faults.compiled(fault).ptx != faults.compiled(fault, whole=True).ptx


@pytest.mark.h200
@pytest.mark.parametrize("fault", faults.FAULTS, ids=named)
def test_a_fault_is_caught_and_a_whole_form_is_not(fault: faults.Fault) -> None:
    assert not faults.verdict(fault, faults.compiled(fault, whole=True))
    assert faults.verdict(fault, faults.compiled(fault))
