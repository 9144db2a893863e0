"""Planted faults reach the kernel's code: its machine code is another, and whole again behind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from degarble.kernels.common import (
    attention_rows,
    gemm_problem,
    gemv_problem,
    kv_problem,
    mhc_problem,
    quantise_problem,
    rmsnorm_problem,
    router_problem,
)
from degarble.kernels.common import inverse_rope_problem as back
from degarble.kernels.common import qnorm_rope_problem as heads
from degarble.kernels.common.settings import CompileSettings
from degarble.suites.runs import cutedsl_faults as faults

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.needs("cutlass")
TARGET = "sm_90a"


def _gemm(rows: int, inner: int, operands: str, scales: str) -> Any:
    problem = gemm_problem.GemmProblem(rows, 64, inner, operands, scales)
    return gemm_problem.choose_form(problem, TARGET)


def _write(_: str) -> Any:
    pages = kv_problem.Pages("bf16", 64, 1)
    problem = kv_problem.WriteProblem(9, pages, positions=64)
    return kv_problem.choose_write_form(problem, TARGET)


FORMS: dict[str, Callable[[str], Any]] = {
    "sm90_gemm_nvfp4": lambda _: _gemm(144, 96, "nvfp4", "e4m3"),
    "sm90_gemm_fp8_block": lambda _: _gemm(144, 256, "fp8_block", "ue8m0"),
    "sm90_gemm_bf16": lambda _: _gemm(144, 512, "bf16", "none"),
    "simt_quantise_nvfp4": lambda name: quantise_problem.choose_form(
        quantise_problem.QuantiseProblem(
            9, 96, "linear", "swiglu" if name == "gate and up" else "values"
        ),
        TARGET,
    ),
    "simt_rmsnorm": lambda _: rmsnorm_problem.choose_form(
        rmsnorm_problem.NormProblem(9, 192), TARGET
    ),
    "simt_qnorm_rope": lambda _: heads.HeadsForm(TARGET),
    "simt_inverse_rope": lambda _: back.BackForm(False, TARGET),
    "simt_kv_write": _write,
    "simt_router": lambda _: router_problem.choose_form(
        router_problem.RouterProblem(9, 8, 2), TARGET
    ),
    "simt_gemv_bf16": lambda _: gemv_problem.choose_form(
        gemv_problem.GemvProblem(8, 8, 192), TARGET
    ),
    "simt_mhc": lambda _: mhc_problem.MixForm("post", TARGET),
}


def ptx(fault: faults.Fault) -> str:
    """Compile the form of a fault as the module has it now."""
    module = import_module(f"{faults.KERNELS}.{fault.kernel}")
    return str(module.compile_form(FORMS[fault.kernel](fault.name), CompileSettings()).ptx)


def test_names_are_their_own_and_there_are_enough() -> None:
    assert len(faults.BY_NAME) == len(faults.FAULTS) >= 15
    assert attention_rows.WIDTH == 512


SOME = ("entry of the next slot", "streams changed")


def _changes(fault: faults.Fault) -> None:
    whole = ptx(fault)
    with faults.planted(fault):
        assert ptx(fault) != whole
    assert ptx(fault) == whole


@pytest.mark.parametrize("name", SOME)
def test_a_planted_fault_changes_the_code_and_goes_away(name: str) -> None:
    _changes(faults.BY_NAME[name])


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_every_planted_fault_does(fault: faults.Fault) -> None:
    _changes(fault)
