"""Faults planted in GEMM kernels: each is another kernel, and on an H200 each is caught."""

from __future__ import annotations

import subprocess
import sys

import pytest

from degarble.suites.kernels import gemm_faults as faults

pytestmark = pytest.mark.needs("cutlass")

SECONDS = 30
QUIET = [fault for fault in faults.FAULTS if not fault.violent]
VIOLENT = [fault for fault in faults.FAULTS if fault.violent]


def named(fault: faults.Fault) -> str:
    return fault.name.replace(" ", "-")


def test_names_are_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 12


def test_planting_is_taken_back() -> None:
    fault = faults.BY_NAME["parity of a stage"]
    whole = faults.compiled(fault, whole=True).ptx
    assert faults.compiled(fault).ptx != whole
    assert faults.compiled(fault, whole=True).ptx == whole


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=named)
def test_a_planted_fault_changes_the_machine_code(fault: faults.Fault) -> None:
    assert faults.compiled(fault).ptx != faults.compiled(fault, whole=True).ptx


@pytest.mark.h200
@pytest.mark.parametrize("fault", QUIET, ids=named)
def test_a_fault_is_caught_and_a_whole_form_is_not(fault: faults.Fault) -> None:
    assert not faults.verdict(fault, faults.compiled(fault, whole=True))
    assert faults.verdict(fault, faults.compiled(fault))


@pytest.mark.h200
@pytest.mark.parametrize("fault", VIOLENT, ids=named)
def test_a_violent_fault_is_caught_in_a_process_of_its_own(fault: faults.Fault) -> None:
    command = [sys.executable, "-m", "degarble.suites.kernels.gemm_faults", fault.name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return  # it stands still: nobody takes that for a result
    assert run.returncode or run.stdout.strip() != "nothing"
