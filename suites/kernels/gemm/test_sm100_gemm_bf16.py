"""The BF16 GEMM on Blackwell: machine code as derived, bits of the host model; asked of a B200.

No B200 is here. What is marked b200 was never run; what is not marked says nothing about a chip.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch, MissingDevice, ShapeMismatch
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

FORMS = blackwell.forms("bf16")
SETTINGS = CompileSettings()
CLUSTERED = [clustered for form in FORMS for clustered in blackwell.clustered(form)]
each_form = pytest.mark.parametrize("form", FORMS, ids=blackwell.named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm100_gemm_bf16")


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, SETTINGS)
    assert not code.complaints(kernel, form)
    word = code.wanted_words(form)["words of instructions"][0]
    for bit in range(32):
        ptx = kernel.ptx.replace(f", {word};", f", {word ^ 1 << bit};", 1)
        assert code.complaints(replace(kernel, ptx=ptx), form), bit


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, *CLUSTERED], ids=blackwell.named)
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    assert not code.complaints(kernels.compile_form(form, SETTINGS), form)


@each_form
def test_every_bit_of_the_host_model(form: GemmForm) -> None:
    """Tails of all extents in two thread blocks; two sums take turns."""
    assert tensor_memory.accumulators(form) == 2
    case = checks.with_form(form, (130, form.tactic.columns + 8, 104), "ordinary", 3)
    drawn = blackwell.drawn(case)
    out, instructions = blackwell.on_model(case, drawn.given)
    assert instructions == 4 * 2 * 4
    assert not blackwell.difference(case, out, drawn.want)


def test_refuses_by_name(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = GemmProblem(4, 16, 32)
    a, b = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(16, 32, dtype=torch.bfloat16)
    moved = torch.zeros(129, dtype=torch.bfloat16)[1:].view(4, 32)
    for error, name, left, right in (
        (DtypeMismatch, "A = ", a.half(), b),
        (ShapeMismatch, "B = ", a, b[:8]),
        (LayoutMismatch, "address of A", moved, b),
    ):
        with pytest.raises(error, match=name):
            kernels.gemm_bf16(left, right, problem, SETTINGS)
    monkeypatch.setattr(kernels.contract, "require_device", lambda _tensors: 0)
    monkeypatch.setattr(kernels.contract, "target_of_device", lambda _device: SM90A)
    with pytest.raises(MissingDevice, match="sm_100a"):
        kernels.gemm_bf16(a, b, problem, SETTINGS)


def mismatch(case: checks.Case) -> str:
    """Run a case on the GPU, D and the rows behind it full of NaN before; compare every bit."""
    drawn, rows = blackwell.drawn(case, "cuda"), case.problem.rows
    shape = (rows + checks.ROWS_BEHIND, case.problem.columns)
    out = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    entry = import_module("degarble.kernels.gemm.sm100_gemm_bf16").gemm_bf16
    entry(*drawn.given, case.problem, SETTINGS, form=case.form, out=out[:rows])
    if not out[rows:].isnan().all():
        return f"{case.name}: numbers written behind D"
    return blackwell.difference(case, out[:rows], drawn.want)


@pytest.mark.b200
@pytest.mark.parametrize("inner", [8, 64, 104, 1096])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := mismatch(case))]
    assert not wrong


@pytest.mark.b200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432)])
def test_tile_and_cluster_shape_do_not_change_a_bit(extents: tuple[int, int, int]) -> None:
    kernels = import_module("degarble.kernels.gemm.sm100_gemm_bf16")
    found = []
    for form in (*FORMS, *CLUSTERED):
        case = checks.with_form(form, extents, "ordinary", 9)
        given = checks.bf16_sides(case, "cuda").given
        out = kernels.gemm_bf16(*given, case.problem, SETTINGS, form=form)
        found.append(out.view(torch.int16))
    assert all(torch.equal(out, found[0]) for out in found)
