"""The plain GEMMs on Hopper: machine code, refusals, and on an H200 the exact product."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    LayoutMismatch,
    ShapeMismatch,
)
from degarble.kernels.gemm.problem import OPERANDS, GemmForm, GemmProblem, choose_form
from degarble.kernels.runtime.compiling import CompileSettings, fused_instructions
from degarble.references import tensor_core
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code as code

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")


# --------------------------------------------------------------------------------------------------
# The BF16 GEMM on Hopper: machine code, refusals, and on an H200 the exact product of operands.

FORMS = checks.forms("bf16")
FUZZED, AT_ONCE = 200, 40


def named(form: GemmForm) -> str:
    return f"{form.tactic.rows}x{form.tactic.columns}"


each_form = pytest.mark.parametrize("form", FORMS, ids=named)


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_bf16")


def require_sound(kernels: ModuleType, form: GemmForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    assert not code.complaints(kernel, form, issued=1)
    shape = f"m64n{form.tactic.columns}k16.f32.bf16.bf16"
    # A stage is four steps of K; the first stage of a tile has its own text.
    assert code.wgmmas(kernel.ptx) == 8 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    assert ("multicast::cluster" in kernel.ptx) is (form.tactic.cluster_rows > 1)


def test_machine_code_is_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, FORMS[-1])


@pytest.mark.slow
@each_form
def test_machine_code_of_every_form(kernels: ModuleType, form: GemmForm) -> None:
    require_sound(kernels, form)


def test_another_number_in_the_code_is_detected(kernels: ModuleType) -> None:
    form = FORMS[-1]
    kernel = kernels.compile_form(form, CompileSettings())
    wrong = replace(kernel, ptx=kernel.ptx.replace(", 49152;", ", 49136;"))
    assert code.complaints(wrong, form, issued=1) == ["expected bytes: got {49136}, want {49152}"]
    assert code.complaints(kernel, form, issued=2) == ["loads: got 2, want 4"]


def test_extents_are_no_part_of_the_kernel(kernels: ModuleType) -> None:
    forms = {choose_form(GemmProblem(m, 8, k), "sm_90a") for m in (600, 999) for k in (8, 7168)}
    (form,) = forms
    first = kernels.compile_form(form, CompileSettings())
    assert kernels.compile_form(form, CompileSettings()) is first


def test_the_second_process_takes_it_from_disk(kernels: ModuleType, tmp_path: Path) -> None:
    settings = CompileSettings(cache_folder=tmp_path)
    compiled = [kernels.compile_form.__wrapped__(FORMS[0], settings) for _ in range(2)]
    assert [kernel.from_cache for kernel in compiled] == [False, True]


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = GemmProblem(4, 16, 32)
    a, b = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(16, 32, dtype=torch.bfloat16)

    def run(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor | None = None) -> None:
        checks.multiply(kernels, (a, b), problem, out=out)

    with pytest.raises(DtypeMismatch, match="A = "):
        run(a.half())
    with pytest.raises(ShapeMismatch, match="B = "):
        run(b=b[:8])
    with pytest.raises(LayoutMismatch, match="strides of B"):
        run(b=torch.zeros(32, 16, dtype=torch.bfloat16).T)
    with pytest.raises(LayoutMismatch, match="address of A"):
        run(torch.zeros(129, dtype=torch.bfloat16)[1:].view(4, 32))
    with pytest.raises(ShapeMismatch, match="D = "):
        run(out=torch.zeros(4, 8, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run()


def exact(case: checks.Case, sides: checks.Sides) -> torch.Tensor:
    """What a whole kernel would leave: D rounded once, NaN behind it."""
    out = torch.full((case.problem.rows + checks.ROWS_BEHIND, case.problem.columns), torch.nan)
    out[: case.problem.rows] = (sides.a @ sides.b.T).float()
    return out.bfloat16()


@pytest.mark.parametrize("operands", checks.SIDES)
def test_damage_is_detected(operands: str) -> None:
    scales = OPERANDS[operands].scales[0]
    case = checks.table_case(operands, (5, 72, 96), scales, seed=3)
    sides = checks.SIDES[operands](case, "cpu")
    whole = exact(case, sides)
    assert not checks.difference(case, whole, sides)
    for row, value in ((4, torch.nan), (0, torch.inf), (2, 1e30), (5, 0.0)):
        damaged = whole.clone()
        damaged[row, 71] = value
        why = checks.difference(case, damaged, sides)
        assert ("1 of 360" in why) or ("1 numbers written behind D" in why)
    assert "over all" in checks.difference(case, whole * 1.01, sides)


def test_cases_have_names_of_their_own() -> None:
    cases = [case for form in FORMS for inner in (8, 1096) for case in checks.tails(form, inner)]
    assert len({case.name for case in cases}) == len(cases)
    assert checks.fuzzed("bf16", 1, 9) == checks.fuzzed("bf16", 1, 9) != checks.fuzzed("bf16", 2, 9)


@pytest.mark.h200
@pytest.mark.parametrize("inner", [8, 64, 104, 1096])
@each_form
def test_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (4096, 4096, 7168), (33, 7168, 18432)])
def test_shapes_of_models(extents: tuple[int, int, int]) -> None:
    assert not checks.mismatch(checks.table_case("bf16", extents, "none"))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed("bf16", seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.mismatch(case))]


@pytest.mark.h200
@each_form
def test_every_bit_is_that_of_the_steps_in_their_order(form: GemmForm) -> None:
    """Tiles and clusters change no bit: all forms give what the model of wgmma gives."""
    for seed, extents in enumerate([(70, 72, 128), (130, 264, 328)]):
        case = checks.with_form(form, extents, "ordinary", seed)
        sides = checks.bf16_sides(case, "cuda")
        got = checks.on_device(case, sides)[: extents[0]]
        # Whole steps: zeros that TMA brings change no sum, but they do count as products.
        padded = [torch.nn.functional.pad(x, (0, -extents[2] % 64)) for x in sides.given]
        want = tensor_core.dense_gemm(*padded).bfloat16()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.h200
@each_form
def test_a_row_is_its_own(form: GemmForm) -> None:
    case = checks.with_form(form, (150, 136, 520), "ordinary", 5)
    assert not checks.rows_alone_differ(case)


@pytest.mark.h200
@pytest.mark.parametrize("operands", checks.SIDES)
def test_two_runs_are_equal_bit_for_bit(operands: str) -> None:
    for case in checks.fuzzed(operands, 77, 15):
        sides = checks.SIDES[operands](case, "cuda")
        first, second = (checks.on_device(case, sides).view(torch.int16) for _ in range(2))
        assert torch.equal(first, second), case.name


@pytest.mark.h200
@pytest.mark.parametrize("operands", checks.SIDES)
def test_a_graph_replays_on_changed_data(operands: str) -> None:
    scales = OPERANDS[operands].scales[-1]
    cases = [checks.table_case(operands, (700, 520, 1184), scales, seed) for seed in range(4)]
    sides = [checks.SIDES[operands](case, "cuda") for case in cases]
    fixed = [checks.flat(each.given) for each in sides]
    out = checks.on_device(cases[0], sides[0])
    graph = torch.cuda.CUDAGraph()
    problem, kernels = cases[0].problem, checks.hopper(operands)
    with torch.cuda.graph(graph):
        checks.multiply(kernels, sides[0].given, problem, cases[0].form, out[:700])
    for case, each, data in zip(cases[1:], sides[1:], fixed[1:], strict=True):
        for into, of in zip(fixed[0], data, strict=True):
            into.copy_(of)
        out.fill_(torch.nan)
        graph.replay()
        assert not checks.difference(case, out, each)


# --------------------------------------------------------------------------------------------------
# The block FP8 GEMM on Hopper: machine code, refusals, and on an H200 the exact product.

SM90_GEMM_FP8_BLOCK_FORMS = checks.forms("fp8_block")


def sm90_gemm_fp8_block_named(form: GemmForm) -> str:
    return f"{form.scales}-{form.tactic.rows}x{form.tactic.columns}"


each_fp8_form = pytest.mark.parametrize(
    "form", SM90_GEMM_FP8_BLOCK_FORMS, ids=sm90_gemm_fp8_block_named
)


@pytest.fixture
def sm90_gemm_fp8_block_kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_fp8_block")


def sm90_gemm_fp8_block_require_sound(kernels: ModuleType, form: GemmForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    assert not code.complaints(kernel, form, issued=1)
    shape = f"m64n{form.tactic.columns}k32.f32.e4m3.e4m3"
    assert code.wgmmas(kernel.ptx) == 4 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    # A sum of a stage is promoted by one fma; a thread holds so many sums.
    assert len(fused_instructions(kernel.ptx)) == form.tactic.columns // 2


def test_sm90_gemm_fp8_block_machine_code_is_as_derived(
    sm90_gemm_fp8_block_kernels: ModuleType,
) -> None:
    sm90_gemm_fp8_block_require_sound(sm90_gemm_fp8_block_kernels, SM90_GEMM_FP8_BLOCK_FORMS[-1])


@pytest.mark.slow
@each_fp8_form
def test_fp8_block_machine_code_of_every_form(
    sm90_gemm_fp8_block_kernels: ModuleType, form: GemmForm
) -> None:
    sm90_gemm_fp8_block_require_sound(sm90_gemm_fp8_block_kernels, form)


def test_sm90_gemm_fp8_block_refuses_by_name(sm90_gemm_fp8_block_kernels: ModuleType) -> None:
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
            checks.multiply(sm90_gemm_fp8_block_kernels, each, case.problem)


@pytest.mark.h200
@pytest.mark.parametrize("inner", [32, 128, 160, 1056])
@each_fp8_form
def test_sm90_gemm_fp8_block_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (33, 7168, 18432)])
def test_sm90_gemm_fp8_block_shapes_of_models(extents: tuple[int, int, int], scales: str) -> None:
    assert not checks.mismatch(checks.table_case("fp8_block", extents, scales))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_sm90_gemm_fp8_block_fuzzed_shapes(seed: int) -> None:
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
    plain = type(given)(integers[0], of_a, integers[1], of_b)
    got = checks.multiply(checks.hopper("fp8_block"), plain, case.problem)
    want = (integers[0].double() @ integers[1].double().T).bfloat16()
    assert torch.equal(got, want)


# --------------------------------------------------------------------------------------------------
# The NVFP4 GEMM on Hopper: machine code, refusals, and on an H200 the decoded product.

SM90_GEMM_NVFP4_FORMS = checks.forms("nvfp4")


def sm90_gemm_nvfp4_named(form: GemmForm) -> str:
    return f"{form.tactic.rows}x{form.tactic.columns}"


each_nvfp4_form = pytest.mark.parametrize("form", SM90_GEMM_NVFP4_FORMS, ids=sm90_gemm_nvfp4_named)


@pytest.fixture
def sm90_gemm_nvfp4_kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_nvfp4")


def sm90_gemm_nvfp4_require_sound(kernels: ModuleType, form: GemmForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    # Loads are written twice: before the first tile, and beside each stage that is decoded.
    assert not code.complaints(kernel, form, issued=2)
    shape = f"m64n{form.tactic.columns}k16.f32.bf16.bf16"
    # First stage of a tile, two that take turns, one where their number is odd.
    assert code.wgmmas(kernel.ptx) == 16 * [f"wgmma.mma_async.sync.aligned.{shape}"]
    assert "cvt.rn.bf16x2.e2m1" not in kernel.ptx
    assert "fma" not in kernel.ptx


def test_sm90_gemm_nvfp4_machine_code_is_as_derived(sm90_gemm_nvfp4_kernels: ModuleType) -> None:
    sm90_gemm_nvfp4_require_sound(sm90_gemm_nvfp4_kernels, SM90_GEMM_NVFP4_FORMS[0])


@pytest.mark.slow
@each_nvfp4_form
def test_nvfp4_machine_code_of_every_form(
    sm90_gemm_nvfp4_kernels: ModuleType, form: GemmForm
) -> None:
    sm90_gemm_nvfp4_require_sound(sm90_gemm_nvfp4_kernels, form)


def test_sm90_gemm_nvfp4_refuses_by_name(sm90_gemm_nvfp4_kernels: ModuleType) -> None:
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
            checks.multiply(sm90_gemm_nvfp4_kernels, (given, b), problem)
    with pytest.raises(ShapeMismatch, match="scales of B"):
        checks.multiply(sm90_gemm_nvfp4_kernels, (a, b._replace(scales=b.scales[1:])), problem)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes at an address that is odd."""
    return torch.cat([tensor[:1], tensor])[1:]


@pytest.mark.h200
@pytest.mark.parametrize("inner", [32, 64, 96, 160, 1056])
@each_nvfp4_form
def test_sm90_gemm_nvfp4_tails(form: GemmForm, inner: int) -> None:
    wrong = [why for case in checks.tails(form, inner) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("extents", [(4096, 7168, 4096), (4096, 4096, 7168), (33, 7168, 18432)])
def test_sm90_gemm_nvfp4_shapes_of_models(extents: tuple[int, int, int]) -> None:
    assert not checks.mismatch(checks.table_case("nvfp4", extents, "e4m3"))


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_sm90_gemm_nvfp4_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed("nvfp4", seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.mismatch(case))]


@pytest.mark.h200
@each_nvfp4_form
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
        want = checks.multiply(checks.hopper("bf16"), tuple(values), bf16.problem)
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
