"""Faults planted in sparse attention: each replaces a function; on an H200 each is caught."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from degarble.suites.kernels.attention import attention_checks as checks
from degarble.suites.kernels.attention.attention_faults import (
    FAULTS,
    Fault,
    compiled,
    planted,
    verdict,
)

pytestmark = pytest.mark.needs("cutlass")

each_fault = pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-")
)


@each_fault
def test_is_planted_and_removed(fault: Fault) -> None:
    module = import_module(fault.module)
    true = getattr(module, fault.function)
    with planted(fault):
        assert getattr(module, fault.function) is not true
    assert getattr(module, fault.function) is true


def test_a_sink_left_out_is_beyond_the_gates() -> None:
    for fault in FAULTS:
        if fault.function != "inverse_total":
            continue
        given = checks.drawn(fault.case, "cpu")
        wanted = checks.formula(fault.case, given)
        without = replace(given, sink=given.sink - torch.inf)
        out, lse = checks.formula(fault.case, without)
        assert "output" in checks.complaint((out.bfloat16(), lse.float()), wanted)


@pytest.mark.h200
@each_fault
def test_is_caught(fault: Fault) -> None:
    assert not checks.mismatch(fault.case), "the whole kernels agree"
    assert verdict(fault, compiled(fault))
