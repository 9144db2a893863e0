"""The router: compiled for every target, refusals, on an H200 every choice and weight bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.rows.router_problem import RouterProblem, choose_form
from degarble.kernels.runtime.compiling import CompileSettings, cubin_facts, unstated_roundings
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.references import experts
from degarble.suites.kernels.row_checks import bits_differ
from degarble.suites.kernels.rows import router_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
FUZZED, AT_ONCE = 200, 50
PROBLEMS = {
    "V4-Pro": RouterProblem(1, **checks.V4_PRO),
    "V3.2": RouterProblem(1, **checks.V32),
    "by table": RouterProblem(1, **checks.V4_PRO, vocabulary=129_280),
    "V4-Flash": RouterProblem(1, **checks.V4_FLASH),
    "largest": RouterProblem(1, 512, 16),
}


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.rows.simt_router")


def require_sound(kernels: ModuleType, problem: RouterProblem, target: Target) -> None:
    form = choose_form(problem, target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= 64, facts
    assert unstated_roundings(kernel.ptx) == ()


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, PROBLEMS["V4-Pro"], target)
    require_sound(kernels, PROBLEMS["V3.2"], target)


@pytest.mark.slow
@each_target
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_form_compiles(kernels: ModuleType, target: Target, problem: RouterProblem) -> None:
    require_sound(kernels, problem, target)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = RouterProblem(2, 8, 2)
    logits, bias = torch.zeros(2, 8), torch.zeros(8)

    def run(
        logits: torch.Tensor,
        source: torch.Tensor = bias,
        p: RouterProblem = problem,
        **more: object,
    ) -> None:
        kernels.route(logits, source, p, CompileSettings(), **more)

    by_table = RouterProblem(2, 8, 2, vocabulary=5)
    table, ids = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for error, name, arguments in (
        (DtypeMismatch, "logits", (logits.bfloat16(),)),
        (ShapeMismatch, "logits", (logits[:1],)),
        (ShapeMismatch, "bias", (logits, bias[:7])),
        (InvalidArgument, "token ids", (logits, table, by_table)),
        (InvalidArgument, "one CUDA device", (logits,)),
    ):
        with pytest.raises(error, match=name):
            run(*arguments)
    with pytest.raises(InvalidArgument, match="token ids"):
        run(logits, id_T=ids)
    with pytest.raises(DtypeMismatch, match="table"):
        run(logits, table.int(), by_table, id_T=ids)
    with pytest.raises(ShapeMismatch, match="token ids"):
        run(logits, table, by_table, id_T=ids[:1])
    out = kernels.empty_outputs(problem, logits.device)
    with pytest.raises(DtypeMismatch, match="experts"):
        run(logits, out=out._replace(experts=out.experts.long()))


def test_a_wrong_choice_and_a_wrong_bit_are_detected(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = checks.RouterCase(RouterProblem(3, **checks.V4_PRO))
    out = kernels.RoutedTokens(*checks.by_definition(case, "cpu"))
    monkeypatch.setattr(checks, "on_device", lambda _case: out)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    assert not checks.mismatch(case)
    out.experts[1, 5] += 1
    assert "experts: 1 of 18" in checks.mismatch(case)
    out.weights.view(torch.int32)[2, 0] ^= 1
    assert "weights: 1 of 18" in checks.mismatch(case)


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
def test_chooses_as_the_reference_does_on_the_cpu() -> None:
    case = checks.RouterCase(RouterProblem(8192, **checks.V4_PRO), "ordinary", 3)
    biased = experts.sqrt_softplus(case.logits) + case.bias
    moved = (checks.on_device(case).experts.cpu().long() != experts.largest_experts(biased, 6)).any(
        -1
    )
    assert int(moved.sum()) <= 8  # scores within a few units of each other, among 8192 x 6


@pytest.mark.h200
@pytest.mark.b200
def test_two_runs_are_equal_and_other_rows_change_nothing() -> None:
    for case in checks.fuzzed(99, 10):
        first, second = checks.on_device(case), checks.on_device(case)
        assert torch.equal(first.experts, second.experts)
        assert not bits_differ(case.name, first.weights, second.weights)


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    problem = RouterProblem(70, **checks.V32)
    cases = [checks.RouterCase(problem, "ordinary", seed) for seed in range(3)]
    logits, bias = torch.zeros(70, 256, device="cuda"), torch.zeros(256, device="cuda")
    out = kernels.empty_outputs(problem, logits.device)

    def run() -> None:
        kernels.route(logits, bias, problem, checks.SETTINGS, out=out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        logits.copy_(case.logits), bias.copy_(case.bias)
        out.experts.fill_(-7), out.weights.fill_(torch.nan)
        graph.replay()
        want = checks.on_device(case)
        assert torch.equal(out.experts, want.experts)
        assert torch.equal(out.weights, want.weights)
