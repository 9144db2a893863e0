"""Faults planted in mHC's joined launches: each is another kernel, on an H200 each is caught.

A sum that is never given would be waited for without end, so no fault leaves one out.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from degarble.kernels.rows.mhc_few_problem import MhcNormProblem, OnwardProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.modules import kernel_named, module_of
from degarble.suites.kernels.rows import joined_checks as checks
from degarble.suites.kernels.rows.joined_checks import MIXED, ONWARD, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from degarble.kernels.runtime.compiling import CompiledKernel

pytestmark = pytest.mark.needs("cutlass")

NORM = Case(MIXED, MhcNormProblem(1, 4096, decoded=2), seed=5)
SPREAD = Case(ONWARD, OnwardProblem(1, 4096, "rows", 6, 7, rides=True), seed=5)


@dataclass(frozen=True)
class JoinedFault:
    """A function of a case's kernel, and what stands in its place; the true one comes first."""

    name: str
    function: str
    instead: Callable[..., Any]
    case: Case


def _holds_zero(_true: Any, address: Any) -> None:
    """A place that holds a sum from the start is not waited for."""
    cute = import_module("cutlass").cute
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], 0;", write_only_types=[], read_only_args=[address])


def _last_left_out(true: Any, *given: Any) -> Any:
    return true(*given)[:-1]


def _by_decode_scale(true: Any, scale: Any, *given: Any) -> Any:
    return true(scale, *given)._replace(share=scale)


def _other_weights(true: Any, tensors: Any, chosen: Any, *given: Any) -> Any:
    rows, weights = chosen
    return true(tensors, (rows, weights[::-1]), *given)


def _first_stream(true: Any, weights: Any, read: Any) -> Any:
    return true(weights, [read[0], read[0], *read[2:]])


FAULTS = (
    JoinedFault("sums are not awaited", "clear", _holds_zero, NORM),
    JoinedFault("last partial sum of a group left out", "lines_of", _last_left_out, NORM),
    JoinedFault("codes by the decode scale", "decoding_of", _by_decode_scale, NORM),
    JoinedFault("weights of experts reversed", "summed", _other_weights, SPREAD),
    JoinedFault("first stream twice", "spread_words", _first_stream, SPREAD),
)
each_fault = pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-")
)


@contextmanager
def planted(fault: JoinedFault) -> Iterator[None]:
    """Replace the function while a kernel is traced."""
    module = import_module(module_of(fault.case.kernel))
    true = getattr(module, fault.function)
    with mock.patch.object(module, fault.function, lambda *given: fault.instead(true, *given)):
        yield


def compiled(fault: JoinedFault, *, whole: bool = False) -> CompiledKernel:
    """Compile the form of a fault, with the fault or without, past every cache."""
    kernel: Any = kernel_named(fault.case.kernel)
    form = kernel.choose_form(fault.case.problem, "sm_90a")
    with nullcontext() if whole else planted(fault):
        made: CompiledKernel = kernel.compile_form.__wrapped__(form, CompileSettings())
    return made


def verdict(fault: JoinedFault, made: CompiledKernel) -> str:
    """Say what the checks find wrong with a kernel; empty where they find nothing."""
    kernel = kernel_named(fault.case.kernel)
    with mock.patch.dict(vars(kernel), {"compile_form": lambda *_given: made}):
        return checks.mismatch(fault.case)


@each_fault
def test_a_planted_fault_changes_the_machine_code(fault: JoinedFault) -> None:
    whole = compiled(fault, whole=True).ptx
    assert compiled(fault).ptx != whole
    assert compiled(fault, whole=True).ptx == whole


@pytest.mark.h200
@each_fault
def test_a_fault_is_caught_and_a_whole_form_is_not(fault: JoinedFault) -> None:
    assert not verdict(fault, compiled(fault, whole=True))
    assert verdict(fault, compiled(fault))
