"""The BF16 GEMM on Hopper: machine code, refusals, and on an H200 the exact product of operands."""

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
from degarble.kernels.gemm.problem import (
    OPERANDS,
    GemmForm,
    GemmProblem,
    choose_form,
)
from degarble.kernels.runtime.compiling import CompileSettings
from degarble.references import tensor_core
from degarble.suites.kernels import gemm_checks as checks
from degarble.suites.kernels import gemm_code as code

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

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


def test_another_number_in_the_code_is_seen(kernels: ModuleType) -> None:
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

    def run(a: torch.Tensor = a, b: torch.Tensor = b, **more: torch.Tensor) -> None:
        kernels.gemm_bf16(a, b, problem, CompileSettings(), **more)

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
def test_damage_is_seen(operands: str) -> None:
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
    problem, entry = cases[0].problem, checks.entry(operands)
    with torch.cuda.graph(graph):
        entry(*sides[0].given, problem, checks.SETTINGS, form=cases[0].form, out=out[:700])
    for case, each, data in zip(cases[1:], sides[1:], fixed[1:], strict=True):
        for into, of in zip(fixed[0], data, strict=True):
            into.copy_(of)
        out.fill_(torch.nan)
        graph.replay()
        assert not checks.difference(case, out, each)
