"""Grouped products: compiled facts, refusals, on an H200 every bit of the composition."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import (
    DtypeMismatch,
    InvalidArgument,
    MissingDevice,
    ShapeMismatch,
)
from degarble.kernels.gemm import problem as gemm
from degarble.kernels.gemm.grouped_problem import GroupedProblem, choose_grouped_form
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.suites.kernels import gemm_code
from degarble.suites.kernels.gemm import grouped_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

FUZZED, AT_ONCE = 500, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.gemm.sm90_gemm_grouped")


def require_sound(kernels: ModuleType, problem: GroupedProblem) -> None:
    form = choose_grouped_form(problem)
    kernel = kernels.compile_form(form, CompileSettings())
    (facts,) = cubin_facts(kernel.cubin)
    assert not facts.spills, facts
    assert facts.registers <= gemm.registers_at_launch(form.gemm)
    assert unstated_roundings(kernel.ptx) == fused_instructions(kernel.ptx) == ()
    assert gemm_code.expected_bytes(kernel.ptx) == {gemm.transaction_bytes(form.gemm)}
    # The turned stages are written out once for the first head and once for the others.
    assert kernel.ptx.count("ld.shared.v4") == 8 * bool(form.turned)
    assert kernel.ptx.count("st.global.v2") == (form.out == "fp32") * form.gemm.tactic.columns // 4


def test_compiles_as_derived(kernels: ModuleType) -> None:
    require_sound(kernels, GroupedProblem(8192, 16, 1024, 4096, 512, 99))


@pytest.mark.slow
def test_every_form_compiles(kernels: ModuleType) -> None:
    require_sound(kernels, GroupedProblem(1, 1, 2048, 7168, out="fp32"))
    for tokens in (1, 300, 8192):
        for turned, out in ((0, "bf16"), (512, "bf16"), (128, "bf16"), (0, "fp32")):
            require_sound(kernels, GroupedProblem(tokens, 2, 256, 1024, turned, turned, out))


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = GroupedProblem(3, 2, 64, 128, 128, 5)
    a, b = (torch.zeros(n, k, dtype=torch.bfloat16) for n, k in ((3, 256), (128, 128)))
    turns = (torch.zeros(5, 64), torch.zeros(3, dtype=torch.int64))
    for error, name, given, told in (
        (DtypeMismatch, "A", (a.float(), b), turns),
        (ShapeMismatch, "A", (a[:, :128], b), turns),
        (ShapeMismatch, "B", (a, b[:64]), turns),
        (InvalidArgument, "turns", (a, b), None),
        (ShapeMismatch, "positions", (a, b), (turns[0], turns[1][:2])),
        ((InvalidArgument, MissingDevice), "CUDA device", (a, b), turns),
    ):
        with pytest.raises(error, match=name):
            kernels.gemm_grouped(*given, problem, checks.SETTINGS, turns=told)


@pytest.mark.h200
@pytest.mark.parametrize("case", checks.cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_every_bit_is_that_of_the_composition(case: checks.Case) -> None:
    assert not checks.mismatch(case)


@pytest.mark.h200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_products(seed: int) -> None:
    wrong = [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]
    assert not wrong


@pytest.mark.h200
@pytest.mark.parametrize("fault", ["forth instead of back", "another group", "the first token"])
def test_planted_faults_are_caught(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    case = checks.Case(200, (4, 128, 1024, 512))
    assert not checks.mismatch(case)
    if fault == "forth instead of back":
        true = kernels.turned_words
        monkeypatch.setattr(
            kernels,
            "turned_words",
            lambda numbers, turns, *, back: true(numbers, turns, back=not back),
        )
    elif fault == "another group":
        true = kernels.grouped.tiles_of_grouped
        monkeypatch.setattr(kernels.grouped, "tiles_of_grouped", lambda *told: 2 * true(*told))
    else:
        true = kernels.heads_of
        monkeypatch.setattr(
            kernels, "heads_of", lambda *told: true(*told)._replace(row=true(*told).row * 0)
        )
    monkeypatch.setattr(kernels, "compile_form", kernels.compile_form.__wrapped__)
    assert checks.mismatch(case)


@pytest.mark.h200
def test_two_runs_are_equal_and_a_graph_replays_on_changed_data(kernels: ModuleType) -> None:
    case = checks.Case(130, checks.TINY)
    parts: Any = case.operands()
    first, _ = checks.launched(case, parts)
    again, _ = checks.launched(case, parts)
    assert torch.equal(first.view(torch.int16), again.view(torch.int16))
    a, b, turns = parts
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gemm_grouped(a, b, case.problem, checks.SETTINGS, turns=turns, out=out)
    other: Any = checks.Case(130, checks.TINY, seed=9).operands()
    a.copy_(other[0])
    turns[1].copy_(other[2][1])
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    want = checks.composed(case, (a, b, turns))
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


@pytest.mark.h200
def test_no_tokens_launch_nothing(kernels: ModuleType) -> None:
    a, b, _ = checks.Case(0, (1, 64, 128, 0)).operands()
    assert kernels.gemm_grouped(a, b, GroupedProblem(0, 1, 64, 128), checks.SETTINGS).shape == (
        0,
        64,
    )
