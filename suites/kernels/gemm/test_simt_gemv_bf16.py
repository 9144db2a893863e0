"""The product of few rows: compiled for every target, refusals, on an H200 the stated order."""

from __future__ import annotations

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
from degarble.kernels.gemm.gemv_problem import (
    AHEAD,
    GROUP,
    OUTPUTS,
    ROWS,
    VECTOR,
    GemvForm,
    GemvProblem,
)
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels import row_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 200, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.simt_gemv_bf16")


def require_sound(kernels: ModuleType, form: GemvForm) -> None:
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {form.target}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 128, facts  # 512 threads
    assert unstated_roundings(kernel.ptx) == ()
    assert len(fused_instructions(kernel.ptx)) == AHEAD * VECTOR * GROUP * form.rows
    # 16 bytes a lane: a row of activations each to hold them, weights in front and in the walk.
    assert kernel.ptx.count("ld.global.v4") == form.rows + 2 * AHEAD * GROUP


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, GemvForm(8, "fp32", target.name))


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("out", OUTPUTS)
def test_every_form_compiles(kernels: ModuleType, target: Target, rows: int, out: str) -> None:
    require_sound(kernels, GemvForm(rows, out, target.name))


def test_refuses_by_name() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight = torch.zeros(5, 64, dtype=torch.bfloat16)

    def run(x: torch.Tensor, weight: torch.Tensor = weight, **more: torch.Tensor) -> None:
        checks.multiply(x, weight, GemvProblem(2, 5, 64), **more)

    for error, name, arguments in (
        (DtypeMismatch, "activations", (x.float(),)),
        (ShapeMismatch, "activations", (x[:1],)),
        (LayoutMismatch, "address of activations", (torch.zeros(129).bfloat16()[1:].view(2, 64),)),
        (DtypeMismatch, "weight", (x, weight.half())),
        (LayoutMismatch, "strides of weight", (x, torch.zeros(64, 5).bfloat16().T)),
        (InvalidArgument, "one CUDA device", (x,)),
    ):
        with pytest.raises(error, match=name):
            run(*arguments)
    with pytest.raises(DtypeMismatch, match="sums to write"):
        run(x, out=torch.zeros(2, 5, dtype=torch.bfloat16))


def test_a_wrong_bit_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    case = checks.GemvCase(GemvProblem(2, 5, 264))
    got = checks.product_by_definition(*case.operands, "fp32")
    monkeypatch.setattr(checks, "product_on_device", lambda _case: got)
    assert not checks.product_mismatch(case)
    got.view(torch.int32)[1, 4] ^= 1
    assert "1 of 10 differ" in checks.product_mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_definition() -> None:
    wrong = [why for case in checks.gemv_cases() if (why := checks.product_mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    cases = checks.fuzzed_gemvs(seed, AT_ONCE)
    assert not [why for case in cases if (why := checks.product_mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("rows", [1, 8])
def test_the_head_of_v4_pro(rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 7168, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(129_280, 7168, device="cuda", generator=generator).bfloat16()
    problem = GemvProblem(rows, 129_280, 7168)
    first = checks.multiply(x, weight, problem)
    assert torch.equal(first, checks.multiply(x, weight, problem))
    some = torch.randperm(129_280, device="cuda")[:4000]
    want = checks.product_by_definition(x, weight[some], "fp32")
    assert torch.equal(first[:, some], want)
    alone = checks.multiply(x[-1:], weight, GemvProblem(1, 129_280, 7168))
    assert torch.equal(alone[0], first[-1])


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data() -> None:
    problem = GemvProblem(3, 777, 1032)
    x = torch.empty(3, 1032, dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(777, 1032, dtype=torch.bfloat16, device="cuda")
    out = torch.full((3, 777), torch.nan, device="cuda")

    def run() -> None:
        checks.multiply(x, weight, problem, out)

    x.zero_(), weight.zero_()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        case = checks.GemvCase(problem, "rows", seed)
        x.copy_(case.operands[0]), weight.copy_(case.operands[1])
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, checks.product_on_device(case))
