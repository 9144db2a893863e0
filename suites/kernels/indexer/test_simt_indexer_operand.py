"""Rows of the indexer: compiled for every target, refusals, on an H200 every stated bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch

from degarble.harness.base.errors import DtypeMismatch, InvalidArgument, ShapeMismatch
from degarble.kernels.indexer import problem as facts
from degarble.kernels.indexer.problem import OperandProblem, choose_operand_form
from degarble.kernels.runtime.compiling import (
    CompileSettings,
    cubin_facts,
    fused_instructions,
    unstated_roundings,
)
from degarble.kernels.runtime.targets import TARGETS, Target
from degarble.suites.kernels.indexer import indexer_operand_checks as checks

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.needs("cutlass")

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
each_kind = pytest.mark.parametrize("kind", range(len(checks.KINDS)))
FUZZED, AT_ONCE = 200, 50


@pytest.fixture
def kernels() -> ModuleType:
    return import_module("degarble.kernels.indexer.simt_indexer_operand")


def require_sound(kernels: ModuleType, kind: int, target: Target) -> None:
    form = choose_operand_form(checks.problem_of(1, 1, kind), target.name)
    kernel = kernels.compile_form(form, CompileSettings())
    assert f".target {target.name}\n" in kernel.ptx
    (code,) = cubin_facts(kernel.cubin)
    assert not code.spills, code
    assert code.registers <= 96, code
    assert unstated_roundings(kernel.ptx) == ()
    # Of each value: Hadamard's three across lanes, two of MXFP4's rounding, and nothing else.
    fused = 3 * form.hadamard + 2 * (form.format == "mxfp4")
    assert len(fused_instructions(kernel.ptx)) == facts.OF_LANE * fused


@each_target
def test_compiles_without_spills_and_with_every_rounding_stated(
    kernels: ModuleType, target: Target
) -> None:
    require_sound(kernels, 0, target)
    require_sound(kernels, 9, target)


@pytest.mark.slow
@each_target
@each_kind
def test_every_kind_compiles(kernels: ModuleType, target: Target, kind: int) -> None:
    require_sound(kernels, kind, target)


def test_refuses_by_name(kernels: ModuleType) -> None:
    problem = OperandProblem(2, 4, "halves", "fp8", normed=True, positions=5)
    coded = OperandProblem(2, 4, "none", "fp8", coded=True)
    rows = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    turning = kernels.RopeOperands(torch.zeros(5, 64), torch.zeros(2, dtype=torch.int64))
    norm = kernels.LayerNormOperands(torch.zeros(128), torch.zeros(128))

    def run(rows: torch.Tensor = rows, p: OperandProblem = problem, **changes: Any) -> None:
        kernels.indexer_operand(
            rows, p, CompileSettings(), **({"turning": turning, "norm": norm} | changes)
        )

    with pytest.raises(DtypeMismatch, match="rows"):
        run(rows.float())
    with pytest.raises(ShapeMismatch, match="rows"):
        run(rows[:1])
    with pytest.raises(InvalidArgument, match="turning"):
        run(turning=None)
    with pytest.raises(InvalidArgument, match="norm"):
        run(norm=None)
    with pytest.raises(InvalidArgument, match="turning"):
        run(p=coded, norm=None)
    with pytest.raises(ShapeMismatch, match="turns"):
        run(turning=turning._replace(turns=torch.zeros(4, 64)))
    with pytest.raises(DtypeMismatch, match="positions"):
        run(turning=turning._replace(positions=torch.zeros(2)))
    with pytest.raises(DtypeMismatch, match="bias"):
        run(norm=norm._replace(bias=torch.zeros(128).bfloat16()))
    with pytest.raises(DtypeMismatch, match="values"):
        run(out=kernels.IndexerOperand(torch.zeros(2, 4, 128), None))
    with pytest.raises(InvalidArgument, match="one CUDA device"):
        run()


def test_a_wrong_bit_is_seen() -> None:
    for kind in (0, 6):
        case = checks.OperandCase(checks.problem_of(3, 5, kind), "special", 3)
        whole = checks.by_definition(case)
        assert not checks.difference(case, *whole)
        whole.values.view(torch.uint8)[2, 4, 7] ^= 1
        assert "1 of 1920" in checks.difference(case, *whole)


@pytest.mark.h200
@pytest.mark.b200
def test_every_bit_is_that_of_the_definition() -> None:
    assert not [why for case in checks.cases() if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
@pytest.mark.parametrize("seed", range(FUZZED // AT_ONCE))
def test_fuzzed_rows(seed: int) -> None:
    assert not [why for case in checks.fuzzed(seed, AT_ONCE) if (why := checks.mismatch(case))]


@pytest.mark.h200
@pytest.mark.b200
def test_a_graph_replays_on_changed_data_in_place(kernels: ModuleType) -> None:
    cases = [checks.OperandCase(checks.problem_of(30, 8, 0), which, 4) for which in checks.SPREADS]
    problem, rows = cases[0].problem, cases[0].rows.cuda()
    assert cases[0].turning is not None
    turning = kernels.RopeOperands(*(part.cuda() for part in cases[0].turning))
    out = kernels.IndexerOperand(rows, None)

    def run() -> None:
        kernels.indexer_operand(rows, problem, checks.SETTINGS, turning=turning, out=out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in cases:
        assert case.turning is not None
        rows.copy_(case.rows)
        turning.turns.copy_(case.turning[0]), turning.positions.copy_(case.turning[1])
        graph.replay()
        assert not checks.difference(case, rows, None)
