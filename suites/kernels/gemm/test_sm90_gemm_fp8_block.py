"""The block FP8 GEMM on Hopper: machine code, refusals, and on an H200 the exact product."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, ShapeMismatch
from degarble.kernels.runtime.compiling import CompileSettings, fused_instructions
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code as code

if TYPE_CHECKING:
    from types import ModuleType

    from degarble.kernels.gemm.problem import GemmForm

pytestmark = pytest.mark.needs("cutlass")

FORMS = checks.forms("fp8_block")
FUZZED, AT_ONCE = 200, 40


def named(form: GemmForm) -> str:
    return f"{form.scales}-{form.tactic.rows}x{form.tactic.columns}"


each_form = pytest.mark.parametrize("form", FORMS, ids=named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_fp8_block")


def require_sound(kernels: ModuleType, form: GemmForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    assert not code.complaints(kernel, form, issued=1)
    shape = f"m64n{form.tactic.columns}k32.f32.e4m3.e4m3"
    assert code.wgmmas(kernel.ptx) == 4 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    # A sum of a stage is promoted by one fma; a thread holds so many sums.
    assert len(fused_instructions(kernel.ptx)) == form.tactic.columns // 2


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, FORMS[-1])


@pytest.mark.slow
@each_form
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    require_sound(kernels, form)


def test_refuses_by_name(kernels: ModuleType) -> None:
    case = checks.table_case("fp8_block", (4, 136, 160), "float32")
    ((given),) = checks.fp8_sides(case, "cpu").given
    wrong = (
        (DtypeMismatch, "A = ", given._replace(a=given.a.float())),
        (ShapeMismatch, "B = ", given._replace(b=given.b[:8])),
        (DtypeMismatch, "scales of A", given._replace(a_scales=given.a_scales.byte())),
        (ShapeMismatch, "scales of A", given._replace(a_scales=given.a_scales[:, :1])),
        (ShapeMismatch, "scales of B", given._replace(b_scales=given.b_scales[:1])),
    )
    for error, name, each in wrong:
        with pytest.raises(error, match=name):
            kernels.gemm_fp8_block(each, case.problem, CompileSettings())


@pytest.mark.h200
@pytest.mark.parametrize("inner", [32, 128, 160, 1056])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432)])
def test_shapes_of_models(extents: tuple[int, int, int], scales: str) -> None:
    assert not checks.mismatch(checks.table_case("fp8_block", extents, scales))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed("fp8_block", seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_scales_that_are_one_are_left_out(scales: str) -> None:
    """A tensor core sums 128 integers without a loss: D is then the product, rounded once."""
    case = checks.table_case("fp8_block", (130, 264, 128), scales, seed=4)
    sides = checks.fp8_sides(case, "cuda")
    (given,) = sides.given
    integers = [
        torch.randint(-2, 3, x.shape, device="cuda").to(x.dtype) for x in (given.a, given.b)
    ]
    one = 1.0 if scales == "float32" else 127
    of_a, of_b = (torch.full_like(x, one) for x in (given.a_scales, given.b_scales))
    entry = checks.entry("fp8_block")
    plain = type(given)(integers[0], of_a, integers[1], of_b)
    got = entry(plain, case.problem, checks.SETTINGS)
    want = (integers[0].double() @ integers[1].double().T).bfloat16()
    assert torch.equal(got, want)
