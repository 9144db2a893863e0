"""The FP8 GEMM with block scales on Blackwell: machine code as derived, refusals; asked of a B200.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
references.tensor_core has no rule for tcgen05 on E4M3, so the host model leaves this form out.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, MissingDevice, ShapeMismatch
from degarble.kernels.gemm import tensor_memory
from degarble.kernels.gemm.problem import GemmForm, GemmProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.kernels.runtime.targets import SM90A
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import sm100_checks as blackwell
from degarble.suites.kernels import sm100_code as code

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORMS = blackwell.forms("fp8_block")
CLUSTERED = [clustered for form in FORMS for clustered in blackwell.clustered(form)]
SETTINGS = CompileSettings()


def named(form: GemmForm) -> str:
    return f"{form.scales}-{blackwell.named(form)}"


each_form = pytest.mark.parametrize("form", FORMS, ids=named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_fp8_block")


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    """A thread that holds 128 sums and reads 64 more spills nothing."""
    form = FORMS[-1]
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)
    assert tensor_memory.accumulators(form) == tensor_memory.STAGE_ACCUMULATORS


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, *CLUSTERED], ids=named)
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)


def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.with_form(FORMS[0], (4, 16, 160), "ordinary", 1)
    ((given,), problem) = checks.fp8_sides(case, "cpu").given, case.problem
    for error, name, wrong in (
        (DtypeMismatch, "A = ", given._replace(a=given.a.view(torch.uint8))),
        (ShapeMismatch, "scales of B", given._replace(b_scales=given.b_scales[:, :1])),
    ):
        with pytest.raises(error, match=name):
            kernels.gemm_fp8_block(wrong, problem, SETTINGS)
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        kernels.gemm_fp8_block(given, problem, SETTINGS)


def on_device(case: checks.Case, given: object) -> torch.Tensor:
    """Run a case; D with the rows behind it, all of them NaN before."""
    rows = case.problem.rows
    shape = (rows + checks.ROWS_BEHIND, case.problem.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    entry = import_module("degarble.kernels.gemm.sm100_gemm_fp8_block").gemm_fp8_block
    entry(given, case.problem, SETTINGS, form=case.form, out=out[:rows])
    return out


@pytest.mark.b200
@pytest.mark.parametrize("inner", [32, 128, 160, 1184])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    """The budget is that of Hopper's 13 fraction bits: tcgen05 has 25, so it has to hold."""
    found = []
    for case in checks.tails(form, inner):
        sides = checks.fp8_sides(case, "cuda")
        found.append(checks.difference(case, on_device(case, sides.given[0]), sides))
    assert not [why for why in found if why]


@pytest.mark.b200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_tile_and_cluster_shape_do_not_change_a_bit(scales: str) -> None:
    forms = [form for form in (*FORMS, *CLUSTERED) if form.scales == scales]
    problem = GemmProblem(1030, 2056, 1184, "fp8_block", scales)
    given = checks.fp8_sides(checks.Case(problem, forms[0], seed=4), "cuda").given[0]
    outs = [on_device(checks.Case(problem, form), given) for form in forms]
    found = [out[: problem.rows].view(torch.int16) for out in outs]
    assert all(torch.equal(out, found[0]) for out in found)
