"""Faults planted in GEMM kernels: each is another kernel, and on an H200 each is caught."""

from __future__ import annotations

import subprocess
import sys

import pytest

from degarble.suites.kernels.gemm import gemm_faults as faults

pytestmark = pytest.mark.needs("cutlass")

SECONDS = 60
QUIET = [fault for fault in faults.FAULTS if not fault.violent]
VIOLENT = [fault for fault in faults.FAULTS if fault.violent]


def named(fault: faults.Fault) -> str:
    return fault.name.replace(" ", "-")


def test_names_are_their_own() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) == 16


def test_a_planted_fault_is_removed() -> None:
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
    command = [sys.executable, "-m", "degarble.suites.kernels.gemm.gemm_faults", fault.name]
    said: bytes | None
    status: int | None
    try:
        run = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        said, status = run.stdout, run.returncode
    except subprocess.TimeoutExpired as still:
        said, status = still.stdout, None
    assert caught(said, status), (status, said)


def caught(said: bytes | None, status: int | None) -> bool:
    """Whether a process that was launched ended badly, found something, or stands still (None)."""
    lines = (said or b"").decode().splitlines()
    return faults.LAUNCHED in lines and (status != 0 or faults.NOTHING not in lines)


def test_a_process_that_never_came_to_a_launch_has_caught_nothing() -> None:
    launched = f"{faults.LAUNCHED}\n".encode()
    assert not caught(None, None)
    assert not caught(b"", 1)
    assert not caught(launched + b"nothing\n", 0)
    assert caught(launched, None)
    assert caught(launched, 1)
    assert caught(launched + b"3 of 9 differ\n", 0)
