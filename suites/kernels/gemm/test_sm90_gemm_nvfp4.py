"""The NVFP4 GEMM on Hopper: machine code, refusals, and on an H200 the decoded product."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, LayoutMismatch, ShapeMismatch
from degarble.kernels.gemm.problem import GemmForm, GemmProblem
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code as code

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FORMS = checks.forms("nvfp4")
FUZZED, AT_ONCE = 200, 40


def named(form: GemmForm) -> str:
    return f"{form.tactic.rows}x{form.tactic.columns}"


each_form = pytest.mark.parametrize("form", FORMS, ids=named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_nvfp4")


def require_sound(kernels: ModuleType, form: GemmForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    # Loads are written twice: before the first tile, and beside each stage that is decoded.
    assert not code.complaints(kernel, form, issued=2)
    shape = f"m64n{form.tactic.columns}k16.f32.bf16.bf16"
    # First stage of a tile, two that take turns, one where their number is odd.
    assert code.wgmmas(kernel.ptx) == 16 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    assert "cvt.rn.bf16x2.e2m1" not in kernel.ptx
    assert "fma" not in kernel.ptx


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, FORMS[0])


@pytest.mark.slow
@each_form
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    require_sound(kernels, form)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = GemmProblem(4, 16, 96, "nvfp4", "e4m3")
    case = checks.table_case("nvfp4", (4, 16, 96), "e4m3")
    a, b = checks.nvfp4_sides(case, "cpu").given
    wrong = (
        (DtypeMismatch, "codes of A", a._replace(codes=a.codes.to(torch.int8))),
        (ShapeMismatch, "codes of A", a._replace(codes=a.codes[:, :16])),
        (DtypeMismatch, "scales of A", a._replace(scales=a.scales.view(torch.float8_e4m3fn))),
        (ShapeMismatch, "scales of A", a._replace(scales=a.scales[:512])),
        (LayoutMismatch, "address of scales of A", a._replace(scales=moved(a.scales))),
        (ShapeMismatch, "decode scale of A", a._replace(decode_scale=torch.ones(2))),
        (DtypeMismatch, "decode scale of A", a._replace(decode_scale=torch.ones(1).double())),
    )
    for error, name, given in wrong:
        with pytest.raises(error, match=name):
            kernels.gemm_nvfp4(given, b, problem, CompileSettings())
    with pytest.raises(ShapeMismatch, match="scales of B"):
        kernels.gemm_nvfp4(a, b._replace(scales=b.scales[1:]), problem, CompileSettings())


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes at an address that is odd."""
    return torch.cat([tensor[:1], tensor])[1:]


@pytest.mark.h200
@pytest.mark.parametrize("inner", [32, 64, 96, 160, 1056])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (4096, 4096, 7168), (33, 7168, 18432)])
def test_shapes_of_models(extents: tuple[int, int, int]) -> None:
    assert not checks.mismatch(checks.table_case("nvfp4", extents, "e4m3"))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed("nvfp4", seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.mismatch(case))]


@pytest.mark.h200
@each_form
def test_every_bit_is_that_of_the_bf16_form_on_decoded_operands(form: GemmForm) -> None:
    from degarble.kernels.gemm.nvfp4_stages import order_of_k  # noqa: PLC0415

    for extents in ((70, 72, 128), (333, 520, 1984), (1024, 2048, 4096)):
        case = checks.with_form(form, extents, "ordinary", 9)
        sides = checks.nvfp4_sides(case, "cuda")
        one = torch.ones(1, device="cuda")
        plain = sides._replace(given=tuple(s._replace(decode_scale=one) for s in sides.given))
        got = checks.on_device(case, plain)[: extents[0]]
        starts = torch.arange(0, extents[2], 64, device="cuda")[:, None]
        order = (starts + torch.tensor(order_of_k(), device="cuda")).flatten()
        values = (
            (x / s.decode_scale.double()).bfloat16()[:, order].contiguous()
            for x, s in zip((sides.a, sides.b), sides.given, strict=True)
        )
        bf16 = checks.table_case("bf16", extents, "none")
        want = checks.entry("bf16")(*values, bf16.problem, checks.SETTINGS)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
def test_a_scale_that_is_nan_reaches_its_row_alone() -> None:
    case = checks.table_case("nvfp4", (200, 136, 160), "e4m3", seed=1)
    sides = checks.nvfp4_sides(case, "cuda")
    a, b = sides.given
    scales = a.scales.clone()
    scales[16 * 5 + 2] = checks.NAN_SCALE  # row 5, block 2
    out = checks.on_device(case, sides._replace(given=(a._replace(scales=scales), b)))
    assert out[5].isnan().all()
    assert not out[:5].isnan().any()
    assert not out[6:200].isnan().any()
