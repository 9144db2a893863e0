"""Adding a residual and norming: compiled, refusals, on an H200 fused equals unfused bit by bit."""

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
from degarble.kernels.rows.problem import NORM_WEIGHTS, ResidualProblem, choose_residual_form
from degarble.kernels.runtime.compiling import cubin_facts, fused_instructions, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels.row_checks import SETTINGS, bits_differ
from degarble.suites.kernels.rows import residual_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 300, 100


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_residual_norm")


def require_sound(kernels: ModuleType, problem: ResidualProblem, target: Target) -> None:
    kernel = kernels.compile_form(choose_residual_form(problem, target.name), SETTINGS)
    assert f".target {target.name}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 128, facts
    assert unstated_roundings(kernel.ptx) == ()
    assert len(fused_instructions(kernel.ptx)) == 4 * 7  # 7 of each of 4 halves sum squares


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, ResidualProblem(1, 7168, weight="fp32"), target)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("columns", [512, 7168, 16_384])
@pytest.mark.parametrize("weight", NORM_WEIGHTS)
@pytest.mark.parametrize("rounded", [False, True])
def test_every_form_compiles(
    kernels: ModuleType, target: Target, columns: int, weight: str, rounded: bool
) -> None:
    require_sound(kernels, ResidualProblem(1, columns, 1e-6, weight, rounded), target)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = ResidualProblem(4, 64)
    x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    for error, name, given in (
        (DtypeMismatch, "values", (x.float(), x, weight)),
        (ShapeMismatch, "residual", (x, x[:3], weight)),
        (LayoutMismatch, "strides of residual", (x, x.T.contiguous().T, weight)),
        (DtypeMismatch, "weight", (x, x, weight.float())),
        (InvalidArgument, "one CUDA device", (x, x, weight)),
    ):
        with pytest.raises(error, match=name):
            kernels.residual_norm(*given, problem, SETTINGS)
    with pytest.raises(ShapeMismatch, match="stored sum"):
        kernels.residual_norm(x, x, weight, problem, SETTINGS, out=kernels.ResidualNormed(x, x[:2]))
    with pytest.raises(ShapeMismatch, match="matrix to norm"):
        ResidualProblem(4, 60)


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_bit_is_detected(
    kernels: ModuleType, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = checks.Case(ResidualProblem(5, 80))
    out = kernels.ResidualNormed(*checks.by_definition(case, "cpu"))
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    assert not checks.mismatch(case)
    out[place].view(torch.int16)[-1, -1] ^= 1
    assert "1 of 400 differ" in checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_definition() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_shapes(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
def test_fused_equals_an_addition_and_the_norm_one_by_one() -> None:
    norms = import_module("degarble.kernels.rows.simt_rmsnorm")
    for columns, weight in ((7168, "fp32"), (7168, "bf16"), (512, "bf16")):
        case = checks.Case(ResidualProblem(333, columns, 1e-6, weight, rounded=True), "rows", 9)
        fused = checks.on_device(case)
        x, residual, of_norm = (each.cuda() for each in case.operands)
        total = x + residual
        plain = norms.rmsnorm(total, of_norm, case.problem.norm, SETTINGS).values
        assert not bits_differ("sum", fused.total, total)
        assert not bits_differ("normed", fused.normed, plain)


@pytest.mark.h200
@pytest.mark.b200
def test_in_place_alone_and_in_a_graph_bits_are_the_same(kernels: ModuleType) -> None:
    problem = ResidualProblem(300, 7168, weight="fp32")
    first, second = (checks.Case(problem, "rows", seed) for seed in (1, 2))
    x, residual, weight = (each.cuda() for each in first.operands)
    want = checks.on_device(first)
    alone = kernels.residual_norm(
        x[7:8], residual[7:8], weight, ResidualProblem(1, 7168, weight="fp32"), SETTINGS
    )
    assert torch.equal(alone.normed[0], want.normed[7])
    assert torch.equal(alone.total[0], want.total[7])
    given = x.clone(), residual.clone()
    place = kernels.ResidualNormed(*given)
    kernels.residual_norm(*given, weight, problem, SETTINGS, out=place)
    assert torch.equal(place.normed, want.normed)
    assert torch.equal(place.total, want.total)
    out = kernels.empty_outputs(problem, x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.residual_norm(x, residual, weight, problem, SETTINGS, out=out)
    for case in (first, second):
        for mine, theirs in zip((x, residual, weight), case.operands, strict=True):
            mine.copy_(theirs)
        graph.replay()
        want = checks.on_device(case)
        assert torch.equal(out.normed, want.normed)
        assert torch.equal(out.total, want.total)
